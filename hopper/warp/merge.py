"""End of a CTA: the warps' partial results added up through shared memory, then the merge with the other splits.

Splits of a row block may be one cluster of CTAs, which merge through distributed shared memory. Each split merges some
of the block's chunks, of whole warps, and receives all other splits' sums of these. A CTA's barrier counts the bytes
that come, so that none waits but who merges. Through scratch (combine.py) the same takes two ways to L2 and back; but
only few clusters of many CTAs fit on a GPU. The size of scratch tells which it is.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from lowbit_attn.device import numbers
from lowbit_attn.device.numbers import LOWEST
from lowbit_attn.hopper.common import combine
from lowbit_attn.hopper.common.abi import Rows
from lowbit_attn.hopper.common.tuning import CHUNK_CHANNELS, CLUSTER_WORDS, CLUSTERS, SLOT_WORDS
from lowbit_attn.hopper.warp import softmax
from lowbit_attn.hopper.warp.config import WARP, WORD, WarpConfig
from lowbit_attn.hopper.warp.fetch import Lane, Ring, read
from lowbit_attn.hopper.warp.softmax import State

CHANNELS = combine.CHANNELS
PAIR_WORDS = SLOT_WORDS - CHUNK_CHANNELS  # maximum and sum
TOGETHER = max(CLUSTERS) - 1  # other splits whose sums a thread adds up at once


class Inbox(NamedTuple):
    """Shared memory to which the other splits write."""

    slots: cute.Pointer  # uint32: sums of cfg.inbox_slots chunks, then as many maxima and sums of weights
    full: cute.Pointer  # barrier: 1 arrival + bytes


class Destination(NamedTuple):
    """Where a chunk goes: the split that merges it, and the slot in its inbox of this, or the first other, split."""

    merger: Int32
    slot: Int32
    apart: Int32  # slots of one split's chunk and the next one's


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
def run(cfg: cutlass.Constexpr[WarpConfig], ring: Ring, inbox: Inbox | None, me: Lane, rows: Rows,
        state: State, out: combine.Outputs):
    """The first barrier of the CTA after its start: each warp is done with its ring by itself."""
    shared = sums_views(cfg, cute.recast_ptr(ring.buffer, dtype=Float32), cfg.warps, cfg.warp_bytes // 4)
    thread, chunks = cute.arch.thread_idx()[0], cfg.head_dim // CHANNELS
    # the first warps have most pages, the last ones merge: what can be had before the barrier is asked for in between
    unit = thread + WARP * (cfg.warps // 3)
    unit = unit - cfg.threads * Int32(unit >= cfg.threads)
    row, chunk = unit // chunks, unit % chunks
    sink_logit, query, head, acc_at, pair_at = Float32(0.0), Int32(0), Int32(0), Int64(0), Int64(0)
    merger, slot, apart, in_cluster = Int32(0), Int32(0), Int32(0), is_cluster(cfg, out.partials)
    if row < rows.count:
        own = combine.find_row(out, rows, row)
        query, head, (acc_at, pair_at) = own.query, own.head, address_of(cfg, out, rows, own, chunk)
        if in_cluster:
            merger, slot, apart = destination_of(out, rows, row, chunk)
        if in_cluster | (out.num_splits == 1):
            sink_logit = combine.find_row(out, rows, row).sink_logit
    cute.arch.sync_warp()
    store_sums(cfg, shared, me, state)
    cute.arch.sync_threads()
    if row < rows.count:
        write(cfg, shared, inbox, out, combine.Row(row, rows.batch_idx, query, head, sink_logit), chunk,
              Destination(merger, slot, apart), combine.Slot(acc_at, pair_at))
    if cutlass.const_expr(cfg.rows * chunks > cfg.threads):
        for later in cutlass.range(unit + cfg.threads, rows.count * chunks, cfg.threads, unroll=1):
            own = combine.find_row(out, rows, later // chunks)
            write(cfg, shared, inbox, out, own, later % chunks,
                  destination_of(out, rows, own.idx, later % chunks),
                  address_of(cfg, out, rows, own, later % chunks))
    if (out.num_splits > 1) & ~in_cluster:
        combine.merge(out, rows, cfg.threads, thread)
    if cutlass.const_expr(cfg.arithmetic.has_books):
        cfg.arithmetic.steps.end_books(cfg, ring.books)


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
                o = o + sums[cfg.lane_rows + 8 * tile_row // cfg.v.group_size]
            shared.o[8 * tile_row + Int32(me.g), row, me.warp] = o
        if me.g == 0:
            shared.pairs[0, (row, me.warp)] = state.row_max[column]
            shared.pairs[1, (row, me.warp)] = sums[column]


@cute.jit
def address_of(cfg: cutlass.Constexpr[WarpConfig], out: combine.Outputs, rows: Rows, row: combine.Row,
         chunk: Int32) -> combine.Slot:
    """Where a chunk goes: to scratch, or at last to o."""
    acc, pair_at = combine.o_address(out, row, chunk), Int64(0)
    if (out.num_splits > 1) & ~is_cluster(cfg, out.partials):
        acc, pair_at = combine.slot_address(out, rows, row, chunk)
    return combine.Slot(acc, pair_at)


@cute.jit
def write(cfg: cutlass.Constexpr[WarpConfig], shared: WarpSums, inbox: Inbox | None, out: combine.Outputs,
          own: combine.Row, chunk: Int32, place: Destination, at: combine.Slot):
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
        if is_cluster(cfg, out.partials):
            exchange(cfg, inbox, out, own, chunk, place, at.acc, sums)
        else:
            combine.store_partial(out, own, (chunk,), (at,), (sums,))
    else:
        combine.store_partial(out, own, (chunk,), (at,), (sums,))


# ---- clusters


def is_cluster(cfg: WarpConfig, partials: cute.Tensor):
    """Whether the splits of the call are clusters."""
    return partials.shape[2] == CLUSTER_WORDS if cfg.has_clusters else Boolean(False)


def cluster_chunks(out: combine.Outputs, rows: Rows) -> Int32:
    """Chunks that a split merges, in whole warps; the last splits may have fewer, or none."""
    return combine.chunks_of_split(out, Int32(Uint32(rows.count * out.chunks + (WARP - 1)) // Uint32(WARP))) * WARP


def destination_of(out: combine.Outputs, rows: Rows, row: Int32, chunk: Int32) -> Destination:
    unit, size = row * out.chunks + chunk, cluster_chunks(out, rows)
    merger = Int32(Uint32(unit) // Uint32(size))
    sender = (out.split_idx - Int32(out.split_idx > merger)) * Int32(out.split_idx != merger)
    return Destination(merger, unit - merger * size + sender * size, size)


@cute.jit
def begin_cluster(cfg: cutlass.Constexpr[WarpConfig], inbox: Inbox, out: combine.Outputs, rows: Rows):
    """Say that sums may come; all threads call it."""
    if is_cluster(cfg, out.partials):
        if cute.arch.thread_idx()[0] == 0:
            size = cluster_chunks(out, rows)
            count = cutlass.min(size, cutlass.max(rows.count * out.chunks - out.split_idx * size, Int32(0)))
            cute.arch.mbarrier_init(inbox.full, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(inbox.full, (out.num_splits - 1) * count * (SLOT_WORDS * WORD))
        cute.arch.cluster_arrive_relaxed()


@cute.jit
def exchange(cfg: cutlass.Constexpr[WarpConfig], inbox: Inbox, out: combine.Outputs, row: combine.Row, chunk: Int32,
             place: Destination, at, sums: combine.Sums):
    """A chunk's sums go to the split that merges it, which writes the result to ``at``."""
    if place.merger != out.split_idx:
        send(cfg, inbox, place.slot, place.merger, sums)
    else:
        cute.arch.mbarrier_wait(inbox.full, 0)
        top, total, others = sums.top, sums.total, out.num_splits - 1
        if others == 1:
            top, total = combine.join((sums.acc,), top, total, [(received(cfg, inbox, place.slot, True),)])
        else:
            found = [received(cfg, inbox, place.slot + i * place.apart, i < others) for i in range(TOGETHER)]
            top, total = combine.join((sums.acc,), top, total, [(one,) for one in found])
        combine.write_all(out, row, (chunk,), (at,), (combine.Sums(sums.acc, top, total),))


def inbox_slot(cfg: WarpConfig, inbox: Inbox, i: Int32) -> tuple[cute.Pointer, cute.Pointer]:
    """(sums, maximum and sum) number ``i``."""
    base = inbox.slots.toint()
    return tuple(cute.make_ptr(Uint32, base + WORD * (start + words * i), cute.AddressSpace.smem,
                               assumed_align=WORD * words)
                 for start, words in ((0, CHUNK_CHANNELS), (CHUNK_CHANNELS * cfg.inbox_slots, PAIR_WORDS)))


def send(cfg: WarpConfig, inbox: Inbox, i: Int32, to: Int32, sums: combine.Sums) -> None:
    values = [sums.acc[e] for e in range(CHUNK_CHANNELS)], [sums.top, sums.total]
    for pointer, own in zip(inbox_slot(cfg, inbox, i), values):
        cute.arch.store_async_dsmem(pointer, tuple(x.bitcast(Int32) for x in own), inbox.full, to)


@cute.jit
def received(cfg: cutlass.Constexpr[WarpConfig], inbox: Inbox, i: Int32, is_there) -> combine.Sums:
    """Sums that have come to a slot, or those of no token."""
    words = cute.make_rmem_tensor(SLOT_WORDS, Uint32)
    words.fill(0)
    words[CHUNK_CHANNELS] = Float32(LOWEST).bitcast(Uint32)
    if is_there:
        at = 0
        for pointer, count in zip(inbox_slot(cfg, inbox, i), (CHUNK_CHANNELS, PAIR_WORDS)):
            for word in read(cute.make_tensor(pointer, cute.make_layout((count, 1))), 0):
                words[at] = word
                at += 1
    return combine.from_words([words[e] for e in range(SLOT_WORDS)])
