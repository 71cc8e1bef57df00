"""End of a CTA: the warps' partial results added up through shared memory, then the merge with the other splits."""

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


class Shared(NamedTuple):
    """What each warp leaves, fp32: O, then a pair a row."""

    o: cute.Tensor  # (head_dim, rows, warps)
    chunks: cute.Tensor  # the same as (CHANNELS, (chunks of a row, rows, warps))
    pairs: cute.Tensor  # (maximum and sum, (rows, warps))


def sums_views(cfg: RegisterConfig, base: cute.Pointer, count: int, apart: int) -> Shared:
    """``count`` of them, ``apart`` floats from one to the next."""
    pitch = cfg.merge_pitch
    shape, stride = (cfg.rows, count), (pitch, apart)
    return Shared(
        cute.make_tensor(base, cute.make_layout((cfg.head_dim, *shape), stride=(1, *stride))),
        cute.make_tensor(base, cute.make_layout((CHANNELS, (cfg.head_dim // CHANNELS, *shape)),
                                                stride=(1, (CHANNELS, *stride)))),
        cute.make_tensor(base + cfg.rows * pitch, cute.make_layout((2, shape), stride=(1, (2, apart)))))


@cute.jit
def run(cfg: cutlass.Constexpr[RegisterConfig], ring: Ring, me: Lane, rows: Rows, state: State,
        out: combine.Outputs):
    """The first barrier of the CTA after its start: each warp is done with its ring by itself."""
    shared = sums_views(cfg, cute.recast_ptr(ring.buffer, dtype=Float32), cfg.warps, cfg.warp_bytes // 4)
    cute.arch.sync_warp()
    leave(cfg, shared, me, state)
    cute.arch.sync_threads()
    thread = cute.arch.thread_idx()[0]
    chunks = cfg.head_dim // CHANNELS
    for first in cutlass.range(0, rows.count * chunks, cfg.threads, unroll=1):
        row, chunk = (first + thread) // chunks, (first + thread) % chunks
        if row < rows.count:
            write(cfg, shared, rows, out, row, chunk)
    if out.num_splits > 1:
        combine.merge(out, rows, cfg.threads, thread)


@cute.jit
def leave(cfg: cutlass.Constexpr[RegisterConfig], shared: Shared, me: Lane, state: State):
    """This warp's O, maximum and sum."""
    for column in cutlass.range_constexpr(cfg.lane_rows):
        row = Int32(column_row(cfg, me.t, column))
        total = numbers.over_lanes(state.row_sum[column], numbers.OVER_G, numbers.add)
        for tile_row, at in enumerate(softmax.places(state.acc_o, column, cfg.col_blocks)):
            shared.o[8 * tile_row + Int32(me.g), row, me.warp] = state.acc_o[at]
        if me.g == 0:
            shared.pairs[0, (row, me.warp)] = state.row_max[column]
            shared.pairs[1, (row, me.warp)] = total


@cute.jit
def write(cfg: cutlass.Constexpr[RegisterConfig], shared: Shared, rows: Rows, out: combine.Outputs, row: Int32,
          chunk: Int32):
    """CHANNELS channels of one query row, added up over the warps."""
    own_row = combine.find_row(out, rows, row)  # asks for the sink logit
    pairs = [read(shared.pairs, (row, w)) for w in range(cfg.warps)]
    tops = [pair[0] for pair in pairs]
    top = numbers.tree(tops, cute.arch.fmax)
    weights = [cute.math.exp2(x - top, fastmath=True) for x in tops]
    total = numbers.tree([w * pair[1] for w, pair in zip(weights, pairs)], numbers.add)
    parts = [read(shared.chunks, (chunk, row, w)) for w in range(cfg.warps)]
    values = cute.make_rmem_tensor(CHANNELS, Float32)
    for e in cutlass.range_constexpr(CHANNELS):
        values[e] = numbers.tree([w * part[e] for w, part in zip(weights, parts)], numbers.add)
    combine.leave(out, own_row, (chunk,), (combine.Sums(values, top, total),))
