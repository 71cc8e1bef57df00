"""Split-KV decode attention for SM80 and SM89 (built for sm_90 too, to run it there): one KV head, either path.

One block per (split, KV head, sequence). Every warp owns whole pages of the split's range and a private ring of
``slots`` record parts; nothing synchronises warps until their results merge:

    page i of a warp      wait K part -> S^T = K Q^T -> refill slot -> wait V part -> softmax
    (pages.walk)          -> P^T, O^T += V^T P^T -> refill slot
    last split only       pages whose V is still in 16 bit (formats with two windows), then sinks and the 16-bit
    (tokens.walk)         residual, tiles of 32 (or 16) tokens dealt out to the warps, through the emptied ring
    end (merge)           O, row maxima and sums of the warps -> shared memory -> one (o, lse) of the split

What becomes of a packed part is the path's: register (codes are multiplied as they are) or tile (scale and zero-point
applied to every code); both modules define the same steps. Read pages, register, tokens, merge next.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.ampere import merge, mma, pages, softmax, tokens
from lowbit_attn.ampere.config import LANES, DecodeConfig, decode_config
from lowbit_attn.device.tilelang_kernel import TileKernel
from lowbit_attn.formats import Format

COMPILE_FLAGS = ("-use_fast_math", *mma.MOVMATRIX_FLAGS)  # exp2 as one MUFU, approximate division; sums stay fp32
SASS_FORBID = ("LDL", "STL")


class Ring(NamedTuple):
    """The block's shared memory, seen as 16-byte accesses of words and of halves, and as floats by warp."""

    words: Any
    halves: Any
    floats: Any


def decode_kernel(fmt: Format, head_dim: int, dtype: str, target: str, path: str, rows: int,
                  without: tuple[str, ...] = ()) -> TileKernel:
    """The kernel of one format, head_dim (64, 128) and dtype of q and 16-bit tokens ("float16", "bfloat16").

    target "sm_80", "sm_89" or "sm_90"; path "register" or "tile"; rows 8 or 16: at run time 1 <= num_heads /
    num_heads_kv <= rows. ValueError, naming what is supported, for anything else.
    """
    return trace(decode_config(fmt, head_dim, dtype, target, path, rows, without))


def trace(config: DecodeConfig) -> TileKernel:
    """The kernel of a configuration."""
    return TileKernel(_prim_func(config), compile_flags=COMPILE_FLAGS)


def _prim_func(config: DecodeConfig):
    head_dim, dtype = config.head_dim, config.dtype
    steps = pages.STEPS[config.path]
    batch, heads, heads_kv = T.dynamic("batch"), T.dynamic("num_heads"), T.dynamic("num_heads_kv")
    units, entries, sinks = T.dynamic("units"), T.dynamic("entries"), T.dynamic("sinks")
    slots_k, slots_v, num_splits = T.dynamic("slots_k"), T.dynamic("slots_v"), T.dynamic("num_splits")

    @T.prim_func
    def decode(
        q: T.Tensor((batch, heads, head_dim), dtype),
        pool: T.Tensor((units, layout.RECORD_ALIGN // 4), "uint32"),
        table: T.Tensor((entries,), "int32"),
        n_sink: T.Tensor((batch,), "int32"),
        n_qk: T.Tensor((batch,), "int32"),
        n_qv: T.Tensor((batch,), "int32"),
        n_tok: T.Tensor((batch,), "int32"),
        sink_k: T.Tensor((batch, heads_kv, sinks, head_dim), dtype),
        sink_v: T.Tensor((batch, heads_kv, sinks, head_dim), dtype),
        ring_k: T.Tensor((batch, heads_kv, slots_k, head_dim), dtype),
        ring_v: T.Tensor((batch, heads_kv, slots_v, head_dim), dtype),
        o_partial: T.Tensor((num_splits, batch, heads, head_dim), "float32"),
        lse_partial: T.Tensor((num_splits, batch, heads), "float32"),
        softmax_scale_log2: T.float32,
        page_stride: T.int32,
        head_stride: T.int32,
        table_b: T.int32,
        table_h: T.int32,
    ):
        with T.Kernel(num_splits, heads_kv, batch, threads=config.threads) as (split, head, seq):
            thread = T.get_thread_binding()
            warp, lane = thread // LANES, thread % LANES
            shared = T.alloc_shared((config.warps * config.slots, config.slot_accesses, 4), "uint32")
            ring = Ring(
                shared,
                T.view(shared, (config.warps * config.slots, config.slot_accesses, 8), "float16"),
                T.view(shared, (config.warps, config.warp_floats), "float32"),
            )
            regs, ops, work = softmax.state(config), mma.operands(config), steps.allocate(config)
            ratio = T.alloc_var("int32")
            ratio = T.truncdiv(heads, heads_kv)
            steps.start(config, q, seq, head * ratio, ratio, warp, lane, ops, work, num_splits)
            softmax.start(config, regs)
            pool_of = pages.Pool(pool, table, seq * table_b + head * table_h, page_stride, head * head_stride)
            count = T.alloc_var("int32")
            count = T.truncdiv(n_qv[seq], layout.PAGE_TOKENS)
            first, last = T.alloc_var("int32"), T.alloc_var("int32")
            first = T.truncdiv(count * split, num_splits)
            last = T.truncdiv(count * (split + 1), num_splits)
            if config.third_segment:
                for third in T.serial(2):
                    pages.walk(config, pool_of, pages.Range(first, last, third, ring_v, seq, head, slots_v), ring, warp,
                               lane, regs, ops, work, softmax_scale_log2)
                    if third == 0:
                        steps.finish(config, work, regs.acc_o)
                    first = T.if_then_else(split == num_splits - 1, count, 0)
                    last = T.if_then_else(split == num_splits - 1, T.truncdiv(n_qk[seq], layout.PAGE_TOKENS), 0)
            else:
                pages.walk(config, pool_of, pages.Range(first, last, None, None, None, None, None), ring, warp, lane,
                           regs, ops, work, softmax_scale_log2)
                steps.finish(config, work, regs.acc_o)
            if split == num_splits - 1:
                steps.query_for_tokens(config, q, seq, head * ratio, ratio, lane, ops)
                tokens.walk(config, tokens.Tokens(sink_k, sink_v, ring_k, ring_v, seq, head, n_sink[seq], n_qk[seq],
                                                  n_tok[seq], slots_k, slots_v),
                            ring, warp, lane, regs, ops, softmax_scale_log2)
            merge.stash(config, regs, ring.floats, warp, lane)
            T.sync_threads()
            merge.merge(config, ring.floats, thread, ratio, o_partial, lse_partial, split, seq, head * ratio)

    return decode
