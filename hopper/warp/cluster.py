"""Splits of a row block that are one cluster of CTAs: they merge through distributed shared memory.

Each split merges a share of the block's chunks, of whole warps, and gets all other splits' sums of it. A CTA's barrier
counts the bytes that come, so that no one waits but who merges. Through scratch (combine.py) the same takes two ways to
L2 and back; but only few clusters of many CTAs fit on a GPU. Which it is, the size of scratch tells.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from lowbit_attn.hopper.common import combine
from lowbit_attn.hopper.common.abi import Rows
from lowbit_attn.hopper.common.numbers import LOWEST
from lowbit_attn.hopper.common.scratch import CHUNK_CHANNELS, CLUSTER_WORDS, CLUSTERS, SLOT_WORDS
from lowbit_attn.hopper.warp.config import WARP, WORD, WarpConfig
from lowbit_attn.hopper.warp.unpack import read

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


def is_cluster(cfg: WarpConfig, partials: cute.Tensor):
    """Whether the splits of the call are clusters."""
    return partials.shape[2] == CLUSTER_WORDS if cfg.has_clusters else Boolean(False)


def chunks_of_split(out: combine.Outputs, rows: Rows) -> Int32:
    """Chunks that a split merges, in whole warps; the last splits may have fewer, or none."""
    return combine.chunks_of_split(out, Int32(Uint32(rows.count * out.chunks + (WARP - 1)) // Uint32(WARP))) * WARP


def destination_of(out: combine.Outputs, rows: Rows, row: Int32, chunk: Int32) -> Destination:
    unit, size = row * out.chunks + chunk, chunks_of_split(out, rows)
    merger = Int32(Uint32(unit) // Uint32(size))
    sender = (out.split_idx - Int32(out.split_idx > merger)) * Int32(out.split_idx != merger)
    return Destination(merger, unit - merger * size + sender * size, size)


@cute.jit
def begin(cfg: cutlass.Constexpr[WarpConfig], inbox: Inbox, out: combine.Outputs, rows: Rows):
    """Say that sums may come; all threads call it."""
    if is_cluster(cfg, out.partials):
        if cute.arch.thread_idx()[0] == 0:
            size = chunks_of_split(out, rows)
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


def slot_of(cfg: WarpConfig, inbox: Inbox, i: Int32) -> tuple[cute.Pointer, cute.Pointer]:
    """(sums, maximum and sum) number ``i``."""
    base = inbox.slots.toint()
    return tuple(cute.make_ptr(Uint32, base + WORD * (start + words * i), cute.AddressSpace.smem,
                               assumed_align=WORD * words)
                 for start, words in ((0, CHUNK_CHANNELS), (CHUNK_CHANNELS * cfg.inbox_slots, PAIR_WORDS)))


def send(cfg: WarpConfig, inbox: Inbox, i: Int32, to: Int32, sums: combine.Sums) -> None:
    values = [sums.acc[e] for e in range(CHUNK_CHANNELS)], [sums.top, sums.total]
    for pointer, own in zip(slot_of(cfg, inbox, i), values):
        cute.arch.store_async_dsmem(pointer, tuple(x.bitcast(Int32) for x in own), inbox.full, to)


@cute.jit
def received(cfg: cutlass.Constexpr[WarpConfig], inbox: Inbox, i: Int32, is_there) -> combine.Sums:
    """Sums that have come to a slot, or those of no token."""
    words = cute.make_rmem_tensor(SLOT_WORDS, Uint32)
    words.fill(0)
    words[CHUNK_CHANNELS] = Float32(LOWEST).bitcast(Uint32)
    if is_there:
        at = 0
        for pointer, count in zip(slot_of(cfg, inbox, i), (CHUNK_CHANNELS, PAIR_WORDS)):
            for word in read(cute.make_tensor(pointer, cute.make_layout((count, 1))), 0):
                words[at] = word
                at += 1
    return combine.from_words([words[e] for e in range(SLOT_WORDS)])
