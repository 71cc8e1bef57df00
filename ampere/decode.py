"""Split-KV decode attention for SM80 and SM89 (built for sm_90 too, to run it there): the tile path of one KV head.

One block per (split, KV head, sequence). Every warp owns whole pages of the split's range and a private ring of
``slots`` record parts; nothing synchronises warps until their results merge:

    page i of a warp      wait K part -> dequant + S^T = K Q^T -> refill slot -> softmax -> P^T
                          wait V part -> dequant + O^T += V^T P^T -> refill slot
    last split only       sinks and the 16-bit residual, tiles of 32 (or 16) tokens dealt out to the warps,
                          through the emptied ring and ldmatrix
    end                   O, row maxima and sums of the warps -> shared memory -> one (o, lse) of the split

Read load, dequant, mma, softmax next: they are called in this order. A register path (scale and zero-point folded out
of the loop) would replace dequant.dequant_tile and scale the operands of mma.packed_qk and packed_pv instead.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.ampere import load, mma, softmax
from lowbit_attn.ampere.config import LANES, MMA_N, SIDE_K, SIDE_V, DecodeConfig, decode_config, static
from lowbit_attn.ampere.dequant import MAGIC
from lowbit_attn.ampere.expected import EXPECTED, expected_static
from lowbit_attn.device.tilelang_kernel import TileKernel
from lowbit_attn.formats import Format

__all__ = ["EXPECTED", "SASS_FORBID", "SASS_NEED", "decode_kernel", "expected_static"]

LN_2 = 0.6931471805599453
COMPILE_FLAGS = ("-use_fast_math", *mma.MOVMATRIX_FLAGS)  # exp2 as one MUFU, approximate division; sums stay fp32

SASS_NEED = ("LDGSTS", "LDSM", "HMMA", "MOVM")
SASS_FORBID = ("LDL", "STL")


class Registers(NamedTuple):
    """A thread's register arrays: Q, the results so far, and the dequantization's (_h: the same registers as fp16)."""

    rows: Any
    acc_o: Any
    row_max: Any
    row_sum: Any

    words: Any
    scale: Any
    scale_h: Any
    zero: Any
    zero_h: Any
    pairs: Any
    a: Any
    a_h: Any


class Ring(NamedTuple):
    """The block's shared memory, seen as 16-byte accesses of words and of halves, and as floats by warp."""

    words: Any
    halves: Any
    floats: Any


def decode_kernel(fmt: Format, head_dim: int, dtype: str, target: str) -> TileKernel:
    """The kernel of one format, head_dim (64, 128), dtype ("float16") and target ("sm_80", "sm_89", "sm_90").

    ValueError, naming what is supported, for anything else. At run time 1 <= num_heads / num_heads_kv <= 8.
    """
    config = decode_config(fmt, head_dim, dtype, target)
    return TileKernel(_trace(config), compile_flags=COMPILE_FLAGS)


def _trace(config: DecodeConfig):
    head_dim, dtype = config.head_dim, config.dtype
    batch, heads, heads_kv = T.dynamic("batch"), T.dynamic("num_heads"), T.dynamic("num_heads_kv")
    units, entries, sinks, ring_tokens = T.dynamic("units"), T.dynamic("entries"), T.dynamic("sinks"), T.dynamic("ring")
    num_splits = T.dynamic("num_splits")

    @T.prim_func
    def decode(
        q: T.Tensor((batch, heads, head_dim), dtype),
        pool: T.Tensor((units, layout.RECORD_ALIGN // 4), "uint32"),
        table: T.Tensor((entries,), "int32"),
        n_sink: T.Tensor((batch,), "int32"),
        n_packed: T.Tensor((batch,), "int32"),
        n_tok: T.Tensor((batch,), "int32"),
        sink_k: T.Tensor((batch, heads_kv, sinks, head_dim), dtype),
        sink_v: T.Tensor((batch, heads_kv, sinks, head_dim), dtype),
        ring_k: T.Tensor((batch, heads_kv, ring_tokens, head_dim), dtype),
        ring_v: T.Tensor((batch, heads_kv, ring_tokens, head_dim), dtype),
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
            words, pairs = T.alloc_local((4,), "uint32"), T.alloc_local((8,), "uint32")
            scale, zero, a = (T.alloc_local((4,), "uint32") for _ in range(3))
            rows = T.alloc_local((head_dim // 4,), dtype)
            acc_o = T.alloc_local((head_dim // 4,), "float32")
            row_max, row_sum = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
            regs = Registers(rows, acc_o, row_max, row_sum, words, scale, T.view(scale, (8,), dtype),
                             zero, T.view(zero, (8,), dtype), pairs, a, T.view(a, (8,), dtype))
            # x & mask | magic is one LOP3 only if one of the constants is in a register: hide its value
            magic = T.alloc_var("uint32")
            magic = T.uint32(MAGIC) + T.cast(T.shift_right(num_splits, 31), "uint32")
            ratio = T.alloc_var("int32")
            ratio = T.truncdiv(heads, heads_kv)
            load_query(config, q, seq, head * ratio, ratio, lane, rows)
            mma.clear(acc_o, head_dim // 16)
            softmax.start_row(row_max, row_sum)
            pages = T.alloc_var("int32")
            pages = T.truncdiv(n_packed[seq], layout.PAGE_TOKENS)
            packed_pages(config, pool, table, seq * table_b + head * table_h, page_stride, head * head_stride,
                         T.truncdiv(pages * split, num_splits), T.truncdiv(pages * (split + 1), num_splits),
                         ring, warp, lane, magic, regs, softmax_scale_log2)
            if split == num_splits - 1:
                tokens_16bit(config, sink_k, sink_v, ring_k, ring_v, seq, head, n_sink[seq], n_packed[seq], n_tok[seq],
                             ring_tokens, ring, warp, lane, regs, softmax_scale_log2)
            stash(config, regs, ring.floats, warp, lane)
            T.sync_threads()
            merge(config, ring.floats, thread, ratio, o_partial, lse_partial, split, seq, head * ratio)

    return decode


@T.macro
def load_query(config, q, seq, first_head, ratio, lane, rows):
    """Q^T as B operand: lane 4g + t holds row g, channels 2t, 2t + 1, + 8; rows beyond the group are zero."""
    for i in static(config.head_dim // 8):
        for v in T.vectorized(2):
            rows[2 * i + v] = T.cast(0, config.dtype)
    if lane // 4 < ratio:
        for i in static(config.head_dim // 8):
            for v in T.vectorized(2):
                rows[2 * i + v] = q[seq, first_head + lane // 4, 8 * i + 2 * (lane % 4) + v]


@T.macro
def packed_pages(config, pool, table, table_row, page_stride, head_offset, first, last, ring, warp, lane, magic, regs,
                 softmax_scale_log2):
    """All pages first + warp, first + warp + warps, ... of the split.

    Parts are numbered 2*page + side in the order of use; part n sits in slot n % slots and is replaced there by part
    n + slots. ``ahead`` holds the pool addresses of the pages that this reaches, read an iteration early.
    """
    reach = (config.slots + 1) // 2
    tiles = config.k.row_tiles
    mine = T.alloc_var("int32")
    mine = T.truncdiv(last - first - warp + (config.warps - 1), config.warps)
    start = T.alloc_var("int32")
    start = first + warp
    slot = T.alloc_var("int32")
    slot = warp * config.slots
    ahead = T.alloc_local((reach + 2,), "int64")
    acc_s = T.alloc_local((4 * tiles,), "float32")
    half, p = T.alloc_local((1,), "uint32"), T.alloc_local((2 * tiles,), "uint32")
    half_h = T.view(half, (2,), config.dtype)
    new_max, rescale = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
    if mine > 0:
        for i in static(reach + 1):
            ahead[i] = record_address(table, table_row, T.min(start + i * config.warps, last - 1), page_stride,
                                      head_offset)
        for part in static(config.slots):
            if part // 2 < mine:
                load.issue_piece(config.pieces[part % 2], pool, ahead[part // 2], ring.words, slot + part, lane)
            T.ptx_commit_group()
    for i in T.serial(mine):
        ahead[reach + 1] = record_address(table, table_row, T.min(start + (i + reach + 1) * config.warps, last - 1),
                                          page_stride, head_offset)
        for side in (SIDE_K, SIDE_V):
            T.ptx_wait_group(config.slots - 1)
            T.sync_warp()
            if side == SIDE_K:
                mma.clear(acc_s, tiles)
                mma.packed_qk(config, ring.words, slot, lane, magic, regs, regs.rows, acc_s)
            else:
                mma.packed_pv(config, ring.words, slot, lane, magic, regs, p, regs.acc_o)
            T.sync_warp()
            follower = side + config.slots
            if i + follower // 2 < mine:
                load.issue_piece(config.pieces[follower % 2], pool, ahead[follower // 2], ring.words, slot, lane)
            T.ptx_commit_group()
            slot = T.if_then_else(slot == warp * config.slots + (config.slots - 1), warp * config.slots, slot + 1)
            if side == SIDE_K:
                softmax.scale_scores(acc_s, tiles, softmax_scale_log2)
                softmax.online_softmax(acc_s, tiles, regs.acc_o, config.v.row_tiles, regs.row_max, regs.row_sum,
                                       new_max, rescale)
                mma.probabilities(acc_s, tiles, half, half_h, p)
        for n in static(reach + 1):
            ahead[n] = ahead[n + 1]
    T.ptx_wait_group(0)
    T.sync_warp()


def record_address(table, table_row, page, page_stride, head_offset):
    """Units of 128 bytes from the start of the pool to a page's record of this head, int64."""
    return (T.cast(table[table_row + page], "int64") * T.cast(page_stride, "int64")
            + T.cast(head_offset, "int64"))


@T.macro
def tokens_16bit(config, sink_k, sink_v, ring_k, ring_v, seq, head, num_sink, num_packed, num_tok, ring_tokens, ring,
                 warp, lane, regs, softmax_scale_log2):
    """Sinks, then the residual, in tiles dealt out to the warps; K of a tile in the warp's slot 0, V in slot 1.

    No residual tile wraps around the ring: packed tokens come in 128s, and the ring is a multiple of 64.
    """
    size, tiles = config.tile16_tokens, config.tile16_tokens // 16
    slot = T.alloc_var("int32")
    slot = warp * config.slots
    sink_tiles = T.alloc_var("int32")
    sink_tiles = T.truncdiv(num_sink + (size - 1), size)
    residual = T.alloc_var("int32")
    residual = num_tok - num_sink - num_packed
    live = T.alloc_var("int32")
    at = T.alloc_var("int32")
    acc_s = T.alloc_local((4 * tiles,), "float32")
    half, p = T.alloc_local((1,), "uint32"), T.alloc_local((2 * tiles,), "uint32")
    half_h = T.view(half, (2,), config.dtype)
    new_max, rescale = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
    count = T.alloc_var("int32")
    count = T.truncdiv(sink_tiles + T.truncdiv(residual + (size - 1), size) - warp + (config.warps - 1), config.warps)
    for i in T.serial(count):
        tile = warp + i * config.warps
        if tile < sink_tiles:
            at = tile * size
            live = num_sink - at
            load.issue_tokens(config, sink_k, seq, head, at, live, ring.halves, slot, lane)
            load.issue_tokens(config, sink_v, seq, head, at, live, ring.halves, slot + 1, lane)
        else:
            at = (tile - sink_tiles) * size
            live = residual - at
            at = T.truncmod(num_packed + at, ring_tokens)
            load.issue_tokens(config, ring_k, seq, head, at, live, ring.halves, slot, lane)
            load.issue_tokens(config, ring_v, seq, head, at, live, ring.halves, slot + 1, lane)
        T.ptx_commit_group()
        T.ptx_wait_group(0)
        T.sync_warp()
        mma.clear(acc_s, tiles)
        mma.tokens_qk(config, ring.halves, slot, lane, regs, regs.rows, acc_s)
        softmax.scale_scores(acc_s, tiles, softmax_scale_log2)
        softmax.mask_scores(acc_s, tiles, live, lane // 4)
        softmax.online_softmax(acc_s, tiles, regs.acc_o, config.v.row_tiles, regs.row_max, regs.row_sum,
                               new_max, rescale)
        mma.probabilities(acc_s, tiles, half, half_h, p)
        mma.tokens_pv(config, ring.halves, slot + 1, lane, regs, p, regs.acc_o)
        T.sync_warp()


@T.macro
def stash(config, regs, floats, warp, lane):
    """A warp's O [8 rows, head_dim], row maxima and sums -> its own part of shared memory."""
    softmax.finish_sum(regs.row_sum)
    stats = MMA_N * config.merge_row
    for i in static(config.head_dim // 4):
        channel = 16 * (i // 4) + 8 * (i % 4 // 2) + lane // 4
        floats[warp, merge_at(config, 2 * (lane % 4) + i % 2, channel)] = regs.acc_o[i]
    if lane // 4 == 0:
        for j in (0, 1):
            floats[warp, stats + 2 * lane + j] = regs.row_max[j]
            floats[warp, stats + MMA_N + 2 * lane + j] = regs.row_sum[j]


def merge_at(config, row, channel):
    """Float, within a warp's part, of one element of its O."""
    return row * config.merge_row + channel


@T.macro
def merge(config, floats, thread, ratio, o_partial, lse_partial, split, seq, first_head):
    """The warps' (O, max, sum) -> o (normalised) and lse (natural log); o = 0 and lse = -inf if no token was seen.

    Only a sum of exactly 0 means that, so a NaN of live data comes out as NaN.
    """
    stats = MMA_N * config.merge_row
    top, total, value, weight = (T.alloc_var("float32") for _ in range(4))
    for i in T.serial(T.truncdiv(ratio * config.head_dim - thread + (config.threads - 1), config.threads)):
        row = (thread + i * config.threads) // config.head_dim
        channel = (thread + i * config.threads) % config.head_dim
        top = T.float32(softmax.NO_TOKEN)
        for w in static(config.warps):
            top = T.max(top, floats[w, stats + row])
        total = T.float32(0.0)
        value = T.float32(0.0)
        for w in static(config.warps):
            weight = T.exp2(floats[w, stats + row] - top)
            total = total + weight * floats[w, stats + MMA_N + row]
            value = value + weight * floats[w, merge_at(config, row, channel)]
        o_partial[split, seq, first_head + row, channel] = T.if_then_else(total == T.float32(0.0), T.float32(0.0),
                                                                        value / total)
        if channel == 0:
            lse_partial[split, seq, first_head + row] = T.if_then_else(
                total == T.float32(0.0), -T.infinity("float32"), (top + T.log2(total)) * T.float32(LN_2))
