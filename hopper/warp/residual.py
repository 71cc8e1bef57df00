"""16-bit tokens (sinks, residual) in units of 16, after the last packed page, on true-scale accumulators."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import warp

from lowbit_attn.device import ptx
from lowbit_attn.hopper.arith.fp16 import query
from lowbit_attn.hopper.common import numbers
from lowbit_attn.hopper.common.matrices import CHUNK, lane_place
from lowbit_attn.hopper.common.rows import Rows
from lowbit_attn.hopper.warp import load, masks, softmax
from lowbit_attn.hopper.warp.config import UNIT_TOKENS, RegisterConfig
from lowbit_attn.hopper.warp.load import Lane, Plain, Ring
from lowbit_attn.hopper.warp.softmax import State
from lowbit_attn.hopper.warp.walk import Unit, Walk, unit


@cute.jit
def run(cfg: cutlass.Constexpr[RegisterConfig], walk: Walk, plain: Plain, ring: Ring, me: Lane, q: cute.Tensor,
        rows: Rows, state: State, scale_log2: Float32, limits: masks.Limits, takers: Int32 | int):
    """Units first_unit, first_unit + takers, ..., one at a time through the warp's ring."""
    if walk.first_unit < walk.num_units:
        element = numbers.ELEMENT[cfg.dtype]
        operand, operand_words = numbers.fragments(cfg.k.col_tiles * cfg.col_blocks, element)
        operand_words.store(query.load(cfg, q, rows, me).load())
        queries = masks.queries_of(cfg, rows, me)
        for i in cutlass.range(walk.first_unit, walk.num_units, takers, unroll=1):
            now = unit(walk, i, rows.q_len)
            load.load_unit(cfg, plain, walk, now, ring, me)
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_warp()
            attend(cfg, ring, me, operand, state, now, queries, scale_log2, limits)
        cute.arch.fence_proxy("async.shared", space="cta")  # bulk copies may come to the same places: of a later item


def attend(cfg: RegisterConfig, ring: Ring, me: Lane, operand: cute.Tensor, state: State, now: Unit, queries: list,
           scale_log2: Float32, limits: masks.Limits) -> None:
    """One unit: 16 rows of K, then 16 rows of V. A query may see none of them."""
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
        for nt in range(blocks):
            numbers.multiply(atom, acc, nt, a, operand[None, ct * blocks + nt])
    for column in range(cfg.lane_rows):
        at = softmax.places(acc, column, blocks)
        logits = [acc[place] * scale_log2 for place in at]
        if cfg.has_softcap:
            logits = [masks.capped(limits, logit) for logit in logits]
        logits = [masked(logit, masks.of_unit(cfg, now, queries[column], Int32(me.g) + 8 * half, limits))
                  for half, logit in enumerate(logits)]
        top = numbers.over_lanes(cute.arch.fmax(*logits), numbers.OVER_G, cute.arch.fmax)
        top = cute.arch.fmax(state.row_max[column], top)
        softmax.apply_alpha(cfg, state, column, top, None)
        for place, logit in zip(at, logits):
            acc[place] = cute.math.exp2(logit - top, fastmath=True)
            state.row_sum[column] = state.row_sum[column] + acc[place]
    add_values(cfg, ring, me, probabilities(cfg, acc, 0), UNIT_TOKENS, 2 * UNIT_TOKENS, state, Uint32(now.live))


def row_view(cfg: RegisterConfig, ring: Ring, element, width: int, count: int) -> cute.Tensor:
    """(width, chunk, row, warp): ``count`` 16-bit rows from the start of each warp's ring, in chunks of ``width``."""
    size = element.width // 8
    return cute.make_tensor(cute.recast_ptr(ring.buffer, dtype=element), cute.make_layout(
        (width, cfg.row_pitch // (size * width), count, cfg.warps),
        stride=(1, width, cfg.row_pitch // size, cfg.warp_bytes // size)))


def probabilities(cfg: RegisterConfig, p: cute.Tensor, tile: int) -> cute.Tensor:
    """B operand (4, col_blocks) of a token tile of P, fp32 accumulators, in the cache's dtype; no row, no P."""
    element, blocks = numbers.ELEMENT[cfg.dtype], cfg.col_blocks
    operand, words = numbers.fragments(blocks, element)
    for nt in range(blocks):
        for half in (0, 1):
            pair = [p[2 * half + e, tile * blocks + nt] if e < cfg.lane_rows else Float32(0.0) for e in (0, 1)]
            words[half, nt] = ptx.movmatrix(numbers.pack(*pair, element))
    return operand


def add_values(cfg: RegisterConfig, ring: Ring, me: Lane, p: cute.Tensor, first_row: int, count: int, state: State,
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


def masked(logit: Float32, is_seen) -> Float32:
    """-inf for a token that is dead or not seen, whatever its K holds."""
    return cutlass.select_(is_seen, logit, Float32(masks.NEG_INF))
