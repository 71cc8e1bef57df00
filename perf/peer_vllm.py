"""vLLM's Triton kernels over quantized caches in blocks of 16 tokens, called apart from its engine."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from peer_attention import first_line, need_gpu
from peer_case import Data, Shape, Step, Unavailable

BLOCK, SEGMENTS, GRID = 16, 16, 128  # tokens of a block, parts of a split sequence, blocks of its grid
PROBED = 4096  # tokens that vLLM's kernel dequantizes at once
WRITTEN = 1 << 16  # tokens that are quantized at once
SPLITS = 32  # of turboquant's sequences, vLLM's default


class Blocks(NamedTuple):
    """Where tokens lie: table [batch, blocks of a sequence] int32, in permuted order; slots [batch * seqlen] int64, a
    token's place in all blocks; lengths [batch] int32; k, v [batch * seqlen, num_heads_kv, head_dim]."""

    table: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def parts(self) -> Iterator[slice]:
        """Tokens that are written at once."""
        yield from (slice(first, first + WRITTEN) for first in range(0, len(self.slots), WRITTEN))


def blocks_of(shape: Shape, data: Data) -> Blocks:
    """Raises Unavailable for a length that is not of whole blocks."""
    if shape.seqlen % BLOCK:
        raise Unavailable(f"seqlen {shape.seqlen} is no multiple of {BLOCK}")
    blocks, device = shape.seqlen // BLOCK, data.q.device
    order = torch.randperm(shape.batch * blocks, generator=torch.Generator().manual_seed(1)).to(device)
    slots = (order[:, None] * BLOCK + torch.arange(BLOCK, device=device)).flatten()
    return Blocks(order.view(shape.batch, blocks).int(), slots,
                  torch.full((shape.batch,), shape.seqlen, dtype=torch.int32, device=device),
                  *(x.transpose(1, 2).flatten(0, 1).contiguous() for x in data[1:]))


# ---- int4_per_token_head


def vllm_int4(shape: Shape, data: Data) -> list[Step]:
    """The Triton kernel of the cache dtype int4_per_token_head."""
    need_gpu()
    try:
        from vllm.v1.attention.ops import int4_per_token_head as ops
    except Exception as error:
        raise Unavailable(f"vLLM's int4_per_token_head cannot be imported: {first_line(error)}") from error
    at = blocks_of(shape, data)
    pools = _vllm_pools(at.table.numel(), shape, data.q.device)
    for part in at.parts():
        _vllm_write(ops, pools, at.k[part], at.v[part], at.slots[part])
    call = _vllm_call(ops, pools, data.q, at.table, at.lengths, shape)
    k, v = (_vllm_values(ops, x, shape).unflatten(0, (shape.batch, -1)).transpose(1, 2) for x in (at.k, at.v))
    return [Step(call, k, v, sum(pool.nbytes for pool in pools))]


def _vllm_pools(count: int, shape: Shape, device: torch.device) -> list[torch.Tensor]:
    """Codes of K and V, two a byte, and their fp32 scales."""
    like = (count, BLOCK, shape.num_heads_kv)
    codes = [torch.zeros(*like, shape.head_dim // 2, dtype=torch.uint8, device=device) for _ in range(2)]
    return codes + [torch.zeros(*like, dtype=torch.float32, device=device) for _ in range(2)]


def _vllm_write(ops, pools, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    ops.reshape_and_cache_int4(k, v, *pools[:2], slots, k_scale_cache=pools[2], v_scale_cache=pools[3])


def _vllm_call(ops, pools, q, table, lengths, shape: Shape) -> Callable[[], torch.Tensor]:
    """One call of its attention for a token of each sequence; few sequences are split into 16 parts, as vLLM does."""
    like = dict(dtype=torch.float32, device=q.device)
    parts = [torch.empty(len(q), shape.num_heads, SEGMENTS, *more, **like) for more in ((shape.head_dim,), (), ())]
    out, starts = torch.empty_like(q), torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    nothing = dict.fromkeys(("sinks", "alibi_slopes", "qq_bias", "output_scale", "mm_prefix_range"))

    def call() -> torch.Tensor:
        ops.unified_attention_int4(
            q, *pools[:2], out, cu_seqlens_q=starts, max_seqlen_q=1, seqused_k=lengths, max_seqlen_k=shape.seqlen,
            softmax_scale=shape.head_dim**-0.5, window_size=(-1, -1), block_table=table, softcap=0.0,
            use_alibi_sqrt=False, k_scale_cache=pools[2], v_scale_cache=pools[3],
            seq_threshold_3D=GRID // shape.num_heads_kv, num_par_softmax_segments=SEGMENTS,
            softmax_segm_output=parts[0], softmax_segm_max=parts[1], softmax_segm_expsum=parts[2], **nothing)
        return out

    return call


def _vllm_values(ops, x: torch.Tensor, shape: Shape) -> torch.Tensor:
    """What its cache holds of tokens [n, num_heads_kv, head_dim]: attention over one token gives that token's V back,
    and K is quantized as V is."""
    found, one = [], shape._replace(num_heads=shape.num_heads_kv, seqlen=1)
    for part in x.split(PROBED):
        pools, count = _vllm_pools(len(part), shape, x.device), torch.arange(len(part), device=x.device)
        _vllm_write(ops, pools, part, part, count * BLOCK)
        ones = torch.ones(len(part), dtype=torch.int32, device=x.device)
        found.append(_vllm_call(ops, pools, torch.zeros_like(part), count[:, None].int(), ones, one)().clone())
    return torch.cat(found)


# ---- turboquant


def vllm_turboquant(preset: str) -> Callable[[Shape, Data], list[Step]]:
    """The Triton kernels of the cache dtypes turboquant_*: K rotated and of a few levels a channel, or fp8; V uniform.

    Rotating the queries is part of the call.
    """
    def steps(shape: Shape, data: Data) -> list[Step]:
        need_gpu()
        try:
            from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
            from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
            from vllm.v1.attention.ops import triton_turboquant_decode as reading
            from vllm.v1.attention.ops.triton_turboquant_store import triton_turboquant_store as store
        except Exception as error:
            raise Unavailable(f"vLLM's turboquant cannot be imported: {first_line(error)}") from error
        from lowbit_attn.formats.rotation import hadamard

        config, at = TurboQuantConfig.from_cache_dtype(preset, shape.head_dim), blocks_of(shape, data)
        device, signed = data.q.device, hadamard(shape.head_dim)
        rotation = (signed[:, :1].sign() * signed).to(device)  # without our signs: symmetric, as vLLM has it
        levels = get_centroids(shape.head_dim, config.centroid_bits).to(device, torch.float32).sort().values
        pool = torch.zeros(at.table.numel(), BLOCK, shape.num_heads_kv, config.slot_size_aligned, dtype=torch.uint8,
                           device=device)
        bits = dict(mse_bits=config.key_mse_bits, key_packed_size=config.key_packed_size,
                    value_quant_bits=config.effective_value_quant_bits, key_fp8=config.key_fp8)
        for part in at.parts():
            store(at.k[part], at.v[part], pool, at.slots[part].int(), rotation, (levels[1:] + levels[:-1]) / 2, **bits)

        def call() -> torch.Tensor:
            return reading.triton_turboquant_decode_attention(
                data.q, pool, at.table, at.lengths, rotation, levels, shape.head_dim**-0.5, **bits, PiT=rotation,
                norm_correction=config.norm_correction, max_num_kv_splits=SPLITS)

        k, v = _turboquant_values(reading, config, pool, at.table, levels, shape)
        return [Step(call, k if config.key_fp8 else (k.float() @ rotation).half(), v, pool.nbytes)]
    return steps


def _turboquant_values(reading, config, pool, table, levels, shape: Shape) -> list[torch.Tensor]:
    """K (rotated, unless it is in fp8) and V as vLLM's own kernel dequantizes them, fp16 [batch, num_heads_kv, seqlen,
    head_dim]."""
    out = [torch.empty(shape.batch, shape.num_heads_kv, shape.seqlen, shape.head_dim, dtype=torch.float16,
                       device=pool.device) for _ in range(2)]
    bits, dim = config.effective_value_quant_bits, shape.head_dim
    reading._tq_full_dequant_kv[shape.seqlen, shape.batch * shape.num_heads_kv](
        pool, table, levels, *out, *out[0].stride()[:3], *out[1].stride()[:3], *pool.stride()[:3], table.stride(0),
        HEAD_DIM=dim, BLOCK_SIZE=BLOCK, NUM_KV_HEADS=shape.num_heads_kv, MSE_BYTES=-(-dim * config.key_mse_bits // 8),
        KPS=config.key_packed_size, VQB=bits, VAL_DATA_BYTES=-(-dim * bits // 8), MSE_BITS=config.key_mse_bits,
        KEY_FP8=int(config.key_fp8), BLOCK_D=1 << (dim - 1).bit_length(), NORM_CORRECTION=int(config.norm_correction),
        FP8_E4B15=reading._use_fp8_e4b15(pool.device.index or 0), num_warps=4)
    return out
