"""16-bit tokens (sinks, residual) in units of 16, after the last packed page, on true-scale accumulators.

Rows of a unit follow each other in memory and come by cp.async, to rows a little apart: as 32 bulk copies, which a warp
starts one after the other, they took it a microsecond.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync, warp

from lowbit_attn.device import numbers, ptx
from lowbit_attn.hopper.common.abi import Rows, first_token, query_and_head
from lowbit_attn.hopper.warp import fetch, softmax
from lowbit_attn.hopper.warp.config import UNIT_TOKENS, WARP, WORD, WarpConfig
from lowbit_attn.hopper.warp.fetch import CHUNK_BYTES, Lane, Ring
from lowbit_attn.hopper.warp.page_loop import Call, Unit, Walk, unit
from lowbit_attn.hopper.warp.softmax import State
from lowbit_attn.registers import CHUNK, lane_place


class TokenRows(NamedTuple):
    """16-bit K and V of this sequence and KV head: sinks and ring, as addresses of row 0 and slots of the rings."""

    sink_k: Int64
    sink_v: Int64
    ring_k: Int64
    ring_v: Int64
    slots_k: Int32
    slots_v: Int32


def token_rows(cfg: WarpConfig, call: Call, ring_row: Int32, head_idx: Int32) -> TokenRows:
    view = call.view
    starts = (first_token(x, ring_row, head_idx) for x in (view.sink_k, view.sink_v, view.ring_k, view.ring_v))
    return TokenRows(*starts, view.ring_k.shape[2], view.ring_v.shape[2])


@cute.jit
def load_unit(cfg: cutlass.Constexpr[WarpConfig], tokens: TokenRows, walk: Walk, unit: Unit, ring: Ring, me: Lane):
    """Start copies of a unit's rows of K, then of V, to the start of the ring: a group of cp.async."""
    # rings hold whole blocks of 64 tokens, so 16 aligned tokens never wrap around
    sides = ((tokens.sink_k, tokens.ring_k, tokens.slots_k), (tokens.sink_v, tokens.ring_v, tokens.slots_v))
    cute.arch.sync_warp()  # all lanes have read what lies there
    for side, (sink, residual, slots) in enumerate(sides):
        source = residual + Int64((walk.ring_start + unit.start) % slots) * cfg.row_bytes
        if unit.is_sink == 1:
            source = sink + Int64(unit.start) * cfg.row_bytes
        copy_rows(cfg, ring, me, source, side * UNIT_TOKENS, unit.live)
    cute.arch.cp_async_commit_group()


@cute.jit
def copy_rows(cfg: cutlass.Constexpr[WarpConfig], ring: Ring, me: Lane, source: Int64,
              first_row: cutlass.Constexpr[int], live: Int32):
    """UNIT_TOKENS rows that follow each other in memory, 16 bytes a lane; dead rows are not touched."""
    words, chunks = CHUNK_BYTES // WORD, cfg.row_bytes // CHUNK_BYTES
    together = WARP // chunks  # rows, by the first lanes
    row, chunk = Int32(me.lane // chunks), Int32(me.lane % chunks)
    at = (first_row + row) * cfg.row_pitch + chunk * CHUNK_BYTES + me.warp * cfg.warp_bytes
    target = cute.make_tensor(
        cute.make_ptr(Uint32, ring.buffer.toint() + at, cute.AddressSpace.smem, assumed_align=CHUNK_BYTES),
        cute.make_layout((words, UNIT_TOKENS), stride=(1, cfg.row_pitch // WORD)))
    own = cute.make_tensor(
        cute.make_ptr(Uint32, source + Int64(me.lane) * CHUNK_BYTES, cute.AddressSpace.gmem,
                      assumed_align=CHUNK_BYTES), cute.make_layout((words, UNIT_TOKENS), stride=(1, words * chunks)))
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), Uint32,
                               num_bits_per_copy=8 * CHUNK_BYTES)
    left = live - row
    if row >= together:
        left = Int32(0)
    for i in cutlass.range_constexpr(0, UNIT_TOKENS, together):
        if left > i:
            cute.copy(atom, own[None, i], target[None, i])


@cute.jit
def run(cfg: cutlass.Constexpr[WarpConfig], walk: Walk, tokens: TokenRows, ring: Ring, me: Lane, q: cute.Tensor,
        rows: Rows, state: State, scale_log2: Float32, limits: softmax.Limits, apart: Int32 | int,
        own_query: cute.Pointer | None = None):
    """Units first_unit, first_unit + apart, ..., one at a time through the warp's ring.

    own_query: shared memory with q as stored keys want it, of an arithmetic with codebooks.
    """
    if walk.first_unit < walk.num_units:
        element = numbers.ELEMENT[cfg.dtype]
        parts = cfg.arithmetic.query_parts
        operand, operand_words = numbers.fragments(parts * cfg.k.col_tiles * cfg.col_blocks, element)
        scales = [scale_log2] * cfg.lane_rows
        if cutlass.const_expr(own_query is not None):
            words, scales = cfg.arithmetic.steps.token_query(cfg, own_query, ring, me)
            operand_words.store(words.load())
        else:
            operand_words.store(fetch.load_query(cfg, q, rows, me).load())
        queries = queries_of(cfg, rows, me)
        for i in cutlass.range(walk.first_unit, walk.num_units, apart, unroll=1):
            now = unit(walk, i, rows.q_len)
            load_unit(cfg, tokens, walk, now, ring, me)
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_warp()
            attend(cfg, ring, me, operand, state, walk, now, queries, scales, limits)
        cute.arch.fence_proxy("async.shared", space="cta")  # bulk copies may come to the same places: of a later item


def attend(cfg: WarpConfig, ring: Ring, me: Lane, operand: cute.Tensor, state: State, walk: Walk, now: Unit,
           queries: list, scales: list, limits: softmax.Limits) -> None:
    """One unit: 16 rows of K, then 16 rows of V. A query may see none of them. scales: [column] of accumulators."""
    element, blocks = numbers.ELEMENT[cfg.dtype], cfg.col_blocks
    atom = numbers.multiply_atom(element)
    rows = row_view(cfg, ring, element, CHUNK, 2 * UNIT_TOKENS)
    row, col8 = lane_place(me.lane)
    read_k = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), element)

    acc = cute.make_rmem_tensor((4, blocks), Float32)
    acc.fill(0.0)
    for ct in range(cfg.k.col_tiles):
        a = cute.make_rmem_tensor(8, element)
        cute.copy(read_k, rows[None, 2 * ct + col8, row, me.warp], a)
        for part in range(cfg.arithmetic.query_parts):
            for nt in range(blocks):
                numbers.multiply(atom, acc, nt, a, operand[None, (part * cfg.k.col_tiles + ct) * blocks + nt])
    for column in range(cfg.lane_rows):
        at = softmax.places(acc, column, blocks)
        logits = [acc[place] * scales[column] for place in at]
        if cfg.has_softcap:
            logits = [cfg.masks.capped(limits, logit) for logit in logits]
        seen = [is_seen(cfg, walk, now, queries[column], Int32(me.g) + 8 * half, limits) for half in (0, 1)]
        # -inf for a token that is dead or not seen, whatever its K holds
        logits = [cutlass.select_(is_seen, logit, Float32(numbers.NEG_INF)) for logit, is_seen in zip(logits, seen)]
        top = numbers.over_lanes(cute.arch.fmax(*logits), numbers.OVER_G, cute.arch.fmax)
        top = cute.arch.fmax(state.row_max[column], top)
        softmax.apply_alpha(cfg, state, column, top)
        for place, logit in zip(at, logits):
            acc[place] = cute.math.exp2(logit - top, fastmath=True)
            state.row_sum[column] = state.row_sum[column] + acc[place]
    add_values(cfg, ring, me, probabilities(cfg, acc, 0), UNIT_TOKENS, 2 * UNIT_TOKENS, state, Uint32(now.live))


def queries_of(cfg: WarpConfig, rows: Rows, me: Lane) -> list[Int32]:
    """[column] the query of each row of this lane."""
    return [query_and_head(rows, Int32(cfg.arithmetic.column_row(me.t, column)))[0] for column in range(cfg.lane_rows)]


def is_seen(cfg: WarpConfig, walk: Walk, unit: Unit, query: Int32, token: Int32, limits: softmax.Limits):
    """Whether a query sees token ``token`` of a 16-bit unit."""
    stop = unit.reach + query
    seen = (token < unit.live) & (token < stop)
    return seen & cfg.masks.is_in_window(cfg, walk, unit, token, stop, limits) if cfg.has_window else seen


def row_view(cfg: WarpConfig, ring: Ring, element, width: int, count: int) -> cute.Tensor:
    """(width, chunk, row, warp): ``count`` 16-bit rows from the start of each warp's ring, in chunks of ``width``."""
    size = element.width // 8
    return cute.make_tensor(cute.recast_ptr(ring.buffer, dtype=element), cute.make_layout(
        (width, cfg.row_pitch // (size * width), count, cfg.warps),
        stride=(1, width, cfg.row_pitch // size, cfg.warp_bytes // size)))


def probabilities(cfg: WarpConfig, p: cute.Tensor, tile: int) -> cute.Tensor:
    """B operand (4, col_blocks) of a token tile of P, fp32 accumulators, in the cache's dtype; no row, no P."""
    element, blocks = numbers.ELEMENT[cfg.dtype], cfg.col_blocks
    operand, words = numbers.fragments(blocks, element)
    for nt in range(blocks):
        for half in (0, 1):
            pair = [p[2 * half + e, tile * blocks + nt] if e < cfg.lane_rows else Float32(0.0) for e in (0, 1)]
            words[half, nt] = ptx.movmatrix(numbers.pack(*pair, element))
    return operand


def add_values(cfg: WarpConfig, ring: Ring, me: Lane, p: cute.Tensor, first_row: int, count: int, state: State,
               live: Uint32 | None) -> None:
    """O += V P over 16 of ``count`` rows in the ring, from ``first_row`` on; live: how many of them exist, or None."""
    element, blocks = numbers.ELEMENT[cfg.dtype], cfg.col_blocks
    rows = row_view(cfg, ring, element, CHUNK, count)
    row, col8 = lane_place(me.lane)
    row8, i8 = row // 8, me.lane % 8
    read = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), element)
    for rt in range(cfg.v.row_tiles):
        a = cute.make_rmem_tensor(8, element)
        cute.copy(read, rows[None, 2 * rt + row8, first_row + col8 * 8 + i8, me.warp], a)
        if live is not None:
            numbers.zero_dead(a, 2 * me.t, live)
        for nt in range(blocks):
            numbers.multiply(numbers.multiply_atom(element), state.acc_o, rt * blocks + nt, a, p[None, nt])
