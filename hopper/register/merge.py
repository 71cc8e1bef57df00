"""End of a CTA: the warps' partial results through shared memory, normalised, then the merge with the other splits."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from lowbit_attn.hopper import combine
from lowbit_attn.hopper.register import numbers, softmax
from lowbit_attn.hopper.register.config import RegisterConfig
from lowbit_attn.hopper.register.load import Lane, Ring
from lowbit_attn.hopper.register.query import column_row
from lowbit_attn.hopper.register.softmax import State
from lowbit_attn.hopper.walk import Rows

CTA_BARRIER = 0  # that of sync_threads


class Shared(NamedTuple):
    """What the warps leave in shared memory, fp32."""

    o: cute.Tensor  # (head_dim, rows, warps)
    row_max: cute.Tensor  # (rows, warps)
    row_sum: cute.Tensor  # (rows, warps)


def views(cfg: RegisterConfig, ring: Ring) -> Shared:
    base = cute.recast_ptr(ring.buffer, dtype=Float32)
    pitch, floats = cfg.merge_pitch, cfg.warps * cfg.rows * cfg.merge_pitch
    statistics = cute.make_layout((cfg.rows, cfg.warps), stride=(1, cfg.rows))
    return Shared(cute.make_tensor(base, cute.make_layout((cfg.head_dim, cfg.rows, cfg.warps),
                                                          stride=(1, pitch, cfg.rows * pitch))),
                  cute.make_tensor(base + floats, statistics),
                  cute.make_tensor(base + (floats + cfg.warps * cfg.rows), statistics))


@cute.jit
def run(cfg: cutlass.Constexpr[RegisterConfig], ring: Ring, me: Lane, rows: Rows, state: State,
        out: combine.Outputs):
    """The first barriers of the CTA after its start: every warp is done with its ring before it holds O."""
    shared = views(cfg, ring)
    cute.arch.sync_threads()
    leave(cfg, shared, me, state)
    cute.arch.sync_threads()
    thread = cute.arch.thread_idx()[0]
    for first in cutlass.range(0, rows.count * cfg.head_dim, cfg.threads, unroll=1):
        row, d = (first + thread) // cfg.head_dim, (first + thread) % cfg.head_dim
        if row < rows.count:
            write(cfg, shared, rows, out, row, d)
    combine.merge(out, rows, cfg.head_dim, cfg.threads, thread, CTA_BARRIER, ring.buffer)


@cute.jit
def leave(cfg: cutlass.Constexpr[RegisterConfig], shared: Shared, me: Lane, state: State):
    """This warp's O, maximum and sum."""
    for column in cutlass.range_constexpr(cfg.lane_rows):
        row = Int32(column_row(cfg, me.t, column))
        total = numbers.over_lanes(state.row_sum[column], numbers.OVER_G, numbers.add)
        for tile_row, at in enumerate(softmax.places(state.acc_o, column, cfg.col_blocks)):
            shared.o[8 * tile_row + Int32(me.g), row, me.warp] = state.acc_o[at]
        if me.g == 0:
            shared.row_max[row, me.warp] = state.row_max[column]
            shared.row_sum[row, me.warp] = total


@cute.jit
def write(cfg: cutlass.Constexpr[RegisterConfig], shared: Shared, rows: Rows, out: combine.Outputs, row: Int32,
          d: Int32):
    """One channel of one query row; no token at all gives o = 0 and lse = -inf."""
    tops = [shared.row_max[row, w] for w in range(cfg.warps)]
    top = numbers.tree(tops, cute.arch.fmax)
    weights = [cute.math.exp2(x - top, fastmath=True) for x in tops]
    total = numbers.tree([w * shared.row_sum[row, i] for i, w in enumerate(weights)], numbers.add)
    value = numbers.tree([w * shared.o[d, row, i] for i, w in enumerate(weights)], numbers.add)
    inverse, lse = Float32(0.0), Float32(combine.NEG_INF)
    if total != 0.0:  # a NaN among live scores stays visible
        inverse = Float32(1.0) / total
        lse = (top + cute.math.log2(total, fastmath=True)) * combine.LN_2
    combine.leave(out, combine.find_row(out, rows, row), (d,), (value * inverse,), lse, d == 0)
