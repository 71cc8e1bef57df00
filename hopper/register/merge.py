"""End of a CTA: the warps' partial results through shared memory, normalised, then the merge with the other splits."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from lowbit_attn.hopper import combine
from lowbit_attn.hopper.register import numbers, softmax
from lowbit_attn.hopper.register.config import RegisterConfig
from lowbit_attn.hopper.register.load import Lane, Ring, read
from lowbit_attn.hopper.register.query import column_row
from lowbit_attn.hopper.register.softmax import State
from lowbit_attn.hopper.walk import Rows

CHANNELS = combine.CHANNELS
CTA_BARRIER = 0  # that of sync_threads


class Shared(NamedTuple):
    """What the warps leave in shared memory, fp32."""

    o: cute.Tensor  # (head_dim, rows, warps)
    chunks: cute.Tensor  # the same as (CHANNELS, (chunks of a row, rows, warps))
    row_max: cute.Tensor  # (rows, warps)
    row_sum: cute.Tensor  # (rows, warps)


def views(cfg: RegisterConfig, ring: Ring) -> Shared:
    base = cute.recast_ptr(ring.buffer, dtype=Float32)
    pitch, floats = cfg.merge_pitch, cfg.warps * cfg.rows * cfg.merge_pitch
    shape, stride = (cfg.rows, cfg.warps), (pitch, cfg.rows * pitch)
    statistics = cute.make_layout(shape, stride=(1, cfg.rows))
    return Shared(
        cute.make_tensor(base, cute.make_layout((cfg.head_dim, *shape), stride=(1, *stride))),
        cute.make_tensor(base, cute.make_layout((CHANNELS, (cfg.head_dim // CHANNELS, *shape)),
                                                stride=(1, (CHANNELS, *stride)))),
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
    chunks = cfg.head_dim // CHANNELS
    for first in cutlass.range(0, rows.count * chunks, cfg.threads, unroll=1):
        row, chunk = (first + thread) // chunks, (first + thread) % chunks
        if row < rows.count:
            write(cfg, shared, rows, out, row, chunk)
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
          chunk: Int32):
    """CHANNELS channels of one query row; no token at all gives o = 0 and lse = -inf."""
    tops = [shared.row_max[row, w] for w in range(cfg.warps)]
    top = numbers.tree(tops, cute.arch.fmax)
    weights = [cute.math.exp2(x - top, fastmath=True) for x in tops]
    total = numbers.tree([w * shared.row_sum[row, i] for i, w in enumerate(weights)], numbers.add)
    parts = [read(shared.chunks, (chunk, row, w)) for w in range(cfg.warps)]
    inverse, lse = Float32(0.0), Float32(combine.NEG_INF)
    if total != 0.0:  # a NaN among live scores stays visible
        inverse = Float32(1.0) / total
        lse = (top + cute.math.log2(total, fastmath=True)) * combine.LN_2
    values = cute.make_rmem_tensor(CHANNELS, Float32)
    for e in cutlass.range_constexpr(CHANNELS):
        values[e] = numbers.tree([w * part[e] for w, part in zip(weights, parts)], numbers.add) * inverse
    combine.leave_chunk(out, combine.find_row(out, rows, row), cfg.head_dim, chunk, values, lse)
