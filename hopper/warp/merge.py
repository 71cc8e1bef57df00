"""End of a CTA: the warps' partial results added up through shared memory, then the merge with the other splits."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from lowbit_attn.hopper.common import combine, numbers
from lowbit_attn.hopper.common.abi import Rows
from lowbit_attn.hopper.warp import cluster, softmax
from lowbit_attn.hopper.warp.config import WARP, WarpConfig
from lowbit_attn.hopper.warp.fetch import Ring
from lowbit_attn.hopper.warp.softmax import State
from lowbit_attn.hopper.warp.unpack import Lane, read

CHANNELS = combine.CHANNELS


class WarpSums(NamedTuple):
    """What each warp leaves, fp32: O, then a pair a row."""

    o: cute.Tensor  # (head_dim, rows, warps)
    chunks: cute.Tensor  # the same as (CHANNELS, (chunks of a row, rows, warps))
    pairs: cute.Tensor  # (maximum and sum, (rows, warps))


def sums_views(cfg: WarpConfig, base: cute.Pointer, count: int, apart: int) -> WarpSums:
    """``count`` of them, ``apart`` floats from one to the next."""
    pitch = cfg.merge_pitch
    shape, stride = (cfg.rows, count), (pitch, apart)
    return WarpSums(
        cute.make_tensor(base, cute.make_layout((cfg.head_dim, *shape), stride=(1, *stride))),
        cute.make_tensor(base, cute.make_layout((CHANNELS, (cfg.head_dim // CHANNELS, *shape)),
                                                stride=(1, (CHANNELS, *stride)))),
        cute.make_tensor(base + cfg.rows * pitch, cute.make_layout((2, shape), stride=(1, (2, apart)))))


@cute.jit
def run(cfg: cutlass.Constexpr[WarpConfig], ring: Ring, inbox: cluster.Inbox | None, me: Lane, rows: Rows,
        state: State, out: combine.Outputs):
    """The first barrier of the CTA after its start: each warp is done with its ring by itself."""
    shared = sums_views(cfg, cute.recast_ptr(ring.buffer, dtype=Float32), cfg.warps, cfg.warp_bytes // 4)
    thread, chunks = cute.arch.thread_idx()[0], cfg.head_dim // CHANNELS
    # the first warps have most pages, the last ones merge: what can be had before the barrier is asked for in between
    unit = thread + WARP * (cfg.warps // 3)
    unit = unit - cfg.threads * Int32(unit >= cfg.threads)
    row, chunk = unit // chunks, unit % chunks
    sink_logit, query, head, acc_at, pair_at = Float32(0.0), Int32(0), Int32(0), Int64(0), Int64(0)
    merger, slot, apart, is_cluster = Int32(0), Int32(0), Int32(0), cluster.is_cluster(cfg, out.partials)
    if row < rows.count:
        own = combine.find_row(out, rows, row)
        query, head, (acc_at, pair_at) = own.query, own.head, address_of(cfg, out, rows, own, chunk)
        if is_cluster:
            merger, slot, apart = cluster.destination_of(out, rows, row, chunk)
        if is_cluster | (out.num_splits == 1):
            sink_logit = combine.find_row(out, rows, row).sink_logit
    cute.arch.sync_warp()
    store_sums(cfg, shared, me, state)
    cute.arch.sync_threads()
    if row < rows.count:
        write(cfg, shared, inbox, out, combine.Row(row, rows.batch_idx, query, head, sink_logit), chunk,
              cluster.Destination(merger, slot, apart), combine.Slot(acc_at, pair_at))
    if cutlass.const_expr(cfg.rows * chunks > cfg.threads):
        for later in cutlass.range(unit + cfg.threads, rows.count * chunks, cfg.threads, unroll=1):
            own = combine.find_row(out, rows, later // chunks)
            write(cfg, shared, inbox, out, own, later % chunks,
                  cluster.destination_of(out, rows, own.idx, later % chunks),
                  address_of(cfg, out, rows, own, later % chunks))
    if (out.num_splits > 1) & ~is_cluster:
        combine.merge(out, rows, cfg.threads, thread)


@cute.jit
def store_sums(cfg: cutlass.Constexpr[WarpConfig], shared: WarpSums, me: Lane, state: State):
    """This warp's O, maximum and sum. O in true scale takes the zero-points now."""
    groups = cfg.v.groups if cutlass.const_expr(cfg.arithmetic.has_true_scale) else 0
    lanes = [state.row_sum[column] for column in range(cfg.lane_rows)] + [state.zeros[0, j] for j in range(groups)]
    sums = numbers.all_over_lanes(lanes, numbers.OVER_G, numbers.add)
    for column in cutlass.range_constexpr(cfg.lane_rows):
        row = Int32(cfg.arithmetic.column_row(me.t, column))
        for tile_row, at in enumerate(softmax.places(state.acc_o, column, cfg.col_blocks)):
            o = state.acc_o[at]
            if cutlass.const_expr(cfg.arithmetic.has_true_scale):
                o = o + sums[cfg.lane_rows + 8 * tile_row // cfg.v.group]
            shared.o[8 * tile_row + Int32(me.g), row, me.warp] = o
        if me.g == 0:
            shared.pairs[0, (row, me.warp)] = state.row_max[column]
            shared.pairs[1, (row, me.warp)] = sums[column]


@cute.jit
def address_of(cfg: cutlass.Constexpr[WarpConfig], out: combine.Outputs, rows: Rows, row: combine.Row,
         chunk: Int32) -> combine.Slot:
    """Where a chunk goes: to scratch, or at last to o."""
    acc, pair_at = combine.o_address(out, row, chunk), Int64(0)
    if (out.num_splits > 1) & ~cluster.is_cluster(cfg, out.partials):
        acc, pair_at = combine.slot_address(out, rows, row, chunk)
    return combine.Slot(acc, pair_at)


@cute.jit
def write(cfg: cutlass.Constexpr[WarpConfig], shared: WarpSums, inbox: cluster.Inbox | None, out: combine.Outputs,
          own: combine.Row, chunk: Int32, place: cluster.Destination, at: combine.Slot):
    """CHANNELS channels of one query row, added up over the warps; at: ``address_of``."""
    pairs = [read(shared.pairs, (own.idx, w)) for w in range(cfg.warps)]
    tops = [pair[0] for pair in pairs]
    top = numbers.tree(tops, cute.arch.fmax)
    weights = [cute.math.exp2(x - top, fastmath=True) for x in tops]
    total = numbers.tree([w * pair[1] for w, pair in zip(weights, pairs)], numbers.add)
    parts = [read(shared.chunks, (chunk, own.idx, w)) for w in range(cfg.warps)]
    values = cute.make_rmem_tensor(CHANNELS, Float32)
    for e in cutlass.range_constexpr(CHANNELS):
        values[e] = numbers.tree([w * part[e] for w, part in zip(weights, parts)], numbers.add)
    sums = combine.Sums(values, top, total)
    if cutlass.const_expr(cfg.has_clusters):
        if cluster.is_cluster(cfg, out.partials):
            cluster.exchange(cfg, inbox, out, own, chunk, place, at.acc, sums)
        else:
            combine.store_partial(out, own, (chunk,), (at,), (sums,))
    else:
        combine.store_partial(out, own, (chunk,), (at,), (sums,))
