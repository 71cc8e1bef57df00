"""Peers of 16 and 8 bits: torch's SDPA by backend, FlashInfer over pages, the FlashAttention packages."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from peer_case import Data, Shape, Step, Unavailable
from torch.nn.attention import SDPBackend, sdpa_kernel

PAGE = 16  # tokens of a page of FlashInfer
WORKSPACE = 128 << 20
SPLITS = (0, 1, 4, 8, 16, 32)  # of FlashAttention 4; 0: its own choice
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}


def sdpa(backend: str) -> Callable[[Shape, Data], list[Step]]:
    """torch's attention on one backend, over contiguous K and V."""
    def steps(shape: Shape, data: Data) -> list[Step]:
        q = data.q[:, :, None]

        def call() -> torch.Tensor:
            with sdpa_kernel(BACKENDS[backend]):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, data.k, data.v, enable_gqa=shape.num_heads != shape.num_heads_kv)[:, :, 0]

        try:
            call()
        except RuntimeError as error:
            raise Unavailable(f"torch has no kernel of this backend for the shape here: {first_line(error)}") from error
        return [Step(call, data.k, data.v, 2 * data.k.nbytes)]
    return steps


def flashinfer(dtype: torch.dtype) -> Callable[[Shape, Data], list[Step]]:
    """FlashInfer's batch decode over pages in permuted order, with and without tensor cores."""
    def steps(shape: Shape, data: Data) -> list[Step]:
        need_gpu()
        try:
            from flashinfer import BatchDecodeWithPagedKVCacheWrapper
        except Exception as error:  # a missing package, or one of its own that does not import
            raise Unavailable(f"flashinfer cannot be imported: {first_line(error)}") from error
        if shape.seqlen % PAGE:
            raise Unavailable(f"seqlen {shape.seqlen} is no multiple of {PAGE}")
        k, v = (x.to(dtype) for x in data[1:])
        pages, device = shape.seqlen // PAGE, data.q.device
        order = torch.randperm(shape.batch * pages, generator=torch.Generator().manual_seed(1)).to(device)
        pools = [torch.empty(len(order), PAGE, shape.num_heads_kv, shape.head_dim, dtype=dtype, device=device)
                 for _ in range(2)]
        for pool, x in zip(pools, (k, v)):
            rows = x.transpose(1, 2).reshape(len(order), PAGE, shape.num_heads_kv, shape.head_dim)
            pool.view(torch.uint8)[order] = rows.view(torch.uint8)
        counts = dict(dtype=torch.int32, device=device)
        indptr = torch.arange(0, len(order) + 1, pages, **counts)
        last = torch.full((shape.batch,), PAGE, **counts)
        def step(has_tensor_cores: bool) -> Step:
            wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.zeros(WORKSPACE, dtype=torch.uint8, device=device),
                                                         "NHD", use_tensor_cores=has_tensor_cores)
            wrapper.plan(indptr, order.int(), last, shape.num_heads, shape.num_heads_kv, shape.head_dim, PAGE,
                         q_data_type=torch.float16, kv_data_type=dtype)
            wrapper.run(data.q, tuple(pools))
            return Step(lambda: wrapper.run(data.q, tuple(pools)), k, v, 2 * k.nbytes,
                        note=f"tensor cores: {has_tensor_cores}")

        return those_that_run(step, (True, False), "tensor cores")
    return steps


def flash_attention_4(shape: Shape, data: Data) -> list[Step]:
    """The package flash-attn-4 (CuTe-DSL), over contiguous K and V, by number of splits."""
    need_gpu()
    try:
        from flash_attn.cute import flash_attn_func
    except Exception as error:
        raise Unavailable(f"flash-attn-4 cannot be imported: {first_line(error)}") from error
    q, k, v = data.q[:, None], data.k.transpose(1, 2).contiguous(), data.v.transpose(1, 2).contiguous()

    def step(splits: int) -> Step:
        def call() -> torch.Tensor:
            o = flash_attn_func(q, k, v, num_splits=splits)
            return (o[0] if isinstance(o, tuple) else o)[:, 0]

        call()
        return Step(call, data.k, data.v, 2 * data.k.nbytes, note=f"splits: {splits or 'its own choice'}")

    return those_that_run(step, SPLITS, "splits")


def flash_attention_2(shape: Shape, data: Data) -> list[Step]:
    """flash_attn_with_kvcache of the package flash-attn, which splits over tokens by itself."""
    need_gpu()
    try:
        from flash_attn import flash_attn_with_kvcache
    except Exception as error:
        raise Unavailable(f"flash-attn cannot be imported: {first_line(error)}") from error
    q, k, v = data.q[:, None], data.k.transpose(1, 2).contiguous(), data.v.transpose(1, 2).contiguous()
    return [Step(lambda: flash_attn_with_kvcache(q, k, v)[:, 0], data.k, data.v, 2 * k.nbytes)]


def those_that_run(step: Callable[[object], Step], values: Iterable, name: str) -> list[Step]:
    """A step for each value with which a peer runs; their notes say with which it does not, and why."""
    found, reasons = [], []
    for value in values:
        try:
            found.append(step(value))
        except Exception as error:  # of its own compiler, too
            reasons.append(f"not with {name} {value}: {first_line(error)}")
    if not found:
        raise Unavailable("; ".join(reasons))
    return [replace(one, note="; ".join((one.note, *reasons))) for one in found]


def need_gpu() -> None:
    if not torch.cuda.is_available():
        raise Unavailable("torch sees no CUDA device")


def first_line(error: BaseException) -> str:
    """An error's kind and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
