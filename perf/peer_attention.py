"""Peers of 16 and 8 bits: torch's SDPA by backend, FlashInfer over pages, the FlashAttention packages."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from peer_case import Data, Shape, Step, Unavailable
from torch.nn.attention import SDPBackend, sdpa_kernel

PAGE = 16  # tokens of a page of FlashInfer
WORKSPACE = 128 << 20
SPLITS = (0, 1, 4, 8, 16, 32)  # of FlashAttention 4; 0: its own choice
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of a 4-bit float
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
    """FlashInfer's batch decode over pages in permuted order, with and without tensor cores; torch.uint8: nvfp4."""
    def steps(shape: Shape, data: Data) -> list[Step]:
        need_gpu()
        try:
            from flashinfer import BatchDecodeWithPagedKVCacheWrapper
        except Exception as error:  # a missing package, or one of its own that does not import
            raise Unavailable(f"flashinfer cannot be imported: {first_line(error)}") from error
        if shape.seqlen % PAGE:
            raise Unavailable(f"seqlen {shape.seqlen} is no multiple of {PAGE}")
        pages, device, is_nvfp4 = shape.seqlen // PAGE, data.q.device, dtype == torch.uint8
        order = torch.randperm(shape.batch * pages, generator=torch.Generator().manual_seed(1)).to(device)

        def pool_of(x: torch.Tensor) -> torch.Tensor:
            """x [batch, num_heads_kv, seqlen, n] as pages [pages, 16, num_heads_kv, n]."""
            pool = torch.empty(len(order), PAGE, shape.num_heads_kv, x.shape[-1], dtype=x.dtype, device=device)
            rows = x.transpose(1, 2).reshape(pool.shape)
            pool.view(torch.uint8)[order] = rows.view(torch.uint8)
            return pool

        if is_nvfp4:
            sides = [nvfp4(x) for x in data[1:]]
            k, v = (side.values for side in sides)
            pools = tuple(pool_of(side.codes) for side in sides)
            more = {"kv_cache_sf": tuple(pool_of(side.scales) for side in sides)}
        else:
            k, v = (x.to(dtype) for x in data[1:])
            pools, more = (pool_of(k), pool_of(v)), {}
        nbytes = sum(pool.nbytes for pool in (*pools, *more.get("kv_cache_sf", ())))
        counts = dict(dtype=torch.int32, device=device)
        indptr = torch.arange(0, len(order) + 1, pages, **counts)
        last = torch.full((shape.batch,), PAGE, **counts)

        def step(has_tensor_cores: bool) -> Step:
            wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.zeros(WORKSPACE, dtype=torch.uint8, device=device),
                                                         "NHD", use_tensor_cores=has_tensor_cores)
            wrapper.plan(indptr, order.int(), last, shape.num_heads, shape.num_heads_kv, shape.head_dim, PAGE,
                         q_data_type=torch.float16, kv_data_type=dtype)
            wrapper.run(data.q, pools, **more)
            return Step(lambda: wrapper.run(data.q, pools, **more), k, v, nbytes,
                        note=f"tensor cores: {has_tensor_cores}")

        return those_that_run(step, (True,) if is_nvfp4 else (True, False), "tensor cores")
    return steps


class Nvfp4(NamedTuple):
    """codes [.., n / 2] uint8, the even channel in the low half; scales [.., n / 16] fp8; values fp16 [.., n]."""

    codes: torch.Tensor
    scales: torch.Tensor
    values: torch.Tensor


def nvfp4(x: torch.Tensor) -> Nvfp4:
    """x [.., n] in NVFP4: signed E2M1 over 16 channels that share an E4M3 scale, the largest being 6 scales."""
    levels = torch.tensor(E2M1, device=x.device)
    groups = x.unflatten(-1, (-1, 16)).float()
    scales = (groups.abs().amax(-1, keepdim=True) / E2M1[-1]).clamp(min=2**-9).to(torch.float8_e4m3fn)
    level = torch.bucketize((groups / scales.float()).abs(), (levels[1:] + levels[:-1]) / 2, out_int32=True)
    values = (levels[level] * groups.sign() * scales.float()).half().flatten(-2)
    code = (level + 8 * (groups < 0)).to(torch.uint8).flatten(-2).unflatten(-1, (-1, 2))
    return Nvfp4(code[..., 0] | code[..., 1] << 4, scales[..., 0], values)


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
