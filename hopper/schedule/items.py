"""Stream-K's schedule of a call (Osama et al. 2023): all sequences' tokens in one row, an equal run for each warp.

An item is a block of query rows with its sequence. Its positions are packed pages, then 16-bit units, those beside
packed K first: a unit, whose load nothing hides, takes a warp as long as a page. Items follow each other, sequence by
sequence. Lengths are on the device alone, so each warp sums them up and finds where its run begins. No run is longer
than another by more than one.
"""

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from lowbit_attn.hopper.common.abi import View, at_most, clamp_unit, load_counts
from lowbit_attn.hopper.warp.config import WARP
from lowbit_attn.hopper.warp.page_loop import MIXED_UNITS, PAGE_LOG2, Walk, units_of

PAIRS = 2 * WARP  # sequences that a warp looks at together, two a lane


class Cursor(NamedTuple):
    """Where a warp is in its run, Int32."""

    batch_idx: Int32
    block: Int32  # of query rows, of all KV heads
    first: Int32  # position in the item
    left: Int32  # positions of the run from here on
    position: Int32  # in the call
    total: Int32  # positions of the call
    unit_phase: Int32  # parity that the barrier of the next unit beside packed K has
    done: Int32  # positions of the run before this one


class WorkItem(NamedTuple):
    """An item's things, Int32: units are of 16 tokens."""

    pages: Int32
    mixed_units: Int32
    sink_units: Int32
    residual_units: Int32

    @property
    def positions(self):
        """One at least: rows without tokens have a result too."""
        found = self.pages + self.mixed_units + self.sink_units + self.residual_units
        return found + Int32(found == 0)


def work_item(n_sink, n_qk, n_qv, n_tok, ring_start) -> WorkItem:
    """From a sequence's token counts."""
    packed_k, packed_v = n_qk >> PAGE_LOG2, n_qv >> PAGE_LOG2
    residual_units = units_of(n_tok - n_sink - ring_start)
    return WorkItem(packed_v, (packed_k - packed_v) * MIXED_UNITS, units_of(n_sink), residual_units)


def walk_of(n_sink, n_qk, n_qv, n_tok, ring_start, first, count) -> Walk:
    """What a warp visits of positions ``first`` to ``first + count - 1`` of an item, in turn."""
    item = work_item(n_sink, n_qk, n_qv, n_tok, ring_start)
    num_units, units_start = item.sink_units + item.residual_units, item.pages + item.mixed_units
    end, first_page = first + count, at_most(first, item.pages)
    mixed, units = ([clamp_unit(position - start, limit) for position in (first, end)]
                    for start, limit in ((item.pages, item.mixed_units), (units_start, num_units)))
    return Walk(first_page, at_most(end, item.pages) - first_page, item.pages, *mixed, *units, item.sink_units, n_sink,
                n_tok - n_sink - ring_start, ring_start, 0 * n_tok)


def share(total, parts, i) -> tuple:
    """(first, count) of part ``i`` of ``total`` things in order, dealt evenly to ``parts``."""
    each, rest = total // parts, total % parts
    return each * i + at_most(i, rest), each + Int32(i < rest)


def part_of(total, parts, thing):
    """The part of ``share`` that has number ``thing``."""
    each, rest = total // parts, total % parts
    larger = (each + 1) * rest
    is_late = Int32(thing >= larger)
    return (1 - is_late) * (thing // (each + 1)) + is_late * (rest + (thing - larger) // (each + Int32(each == 0)))


@cute.jit
def load_pair(view: View, base: Int32, lane: Uint32) -> tuple:
    """Counters of batch rows base + 2 * lane and the next, of which those beyond the last are nothing."""
    found = cute.make_rmem_tensor((len(view.counters), 2), Int32)
    found.fill(0)
    for j in cutlass.range_constexpr(2):
        at = base + 2 * Int32(lane) + j
        if at < view.rows.shape[0]:
            _, counts = load_counts(view, at)
            for i, x in enumerate(counts):
                found[i, j] = x
    return tuple(tuple(found[i, j] for i in range(len(view.counters))) for j in range(2))


def sizes_of(early: tuple, view: View, base: Int32, lane: Uint32, item: Callable = work_item) -> tuple:
    """Positions of an item of either batch row that ``load_pair`` looked at, 0 beyond the last."""
    first, batch = base + 2 * Int32(lane), view.rows.shape[0]
    return tuple(item(*counts).positions * Int32(first + j < batch) for j, counts in enumerate(early))


@cute.jit
def begin(view: View, early: tuple, blocks: Int32, cta: Int32, ctas: cute.FastDivmodDivisorV2, warp: Int32,
          warps: cutlass.Constexpr[int], lane: Uint32, item: cutlass.Constexpr[Callable] = work_item) -> Cursor:
    """The cursor of a warp at its start; early: of ``load_pair``, of the first sequences; item: what a sequence's
    counters mean."""
    one, two = sizes_of(early, view, Int32(0), lane, item)
    through = through_lane(one + two, lane)
    last = cute.arch.shuffle_sync(through, WARP - 1)
    total = last
    for base in cutlass.range(PAIRS, view.rows.shape[0], PAIRS, unroll=1):
        sizes = sizes_of(load_pair(view, base, lane), view, base, lane, item)
        total = total + Int32(cute.arch.warp_redux_sync(sum(sizes), "add"))
    total = total * blocks
    cta_first, cta_count = share(total, ctas, cta)
    first, left = share(cta_count, warps, warp)
    first, base = first + cta_first, Int32(0)
    while (left > 0) & (last * blocks <= first):
        base = base + PAIRS
        one, two = sizes_of(load_pair(view, base, lane), view, base, lane, item)
        through = last + through_lane(one + two, lane)
        last = cute.arch.shuffle_sync(through, WARP - 1)
    # of the lane that has the run's first sequence
    beyond = Uint32(cute.arch.vote_ballot_sync(through * blocks > first))
    at = Int32(cute.arch.popc((beyond & (Uint32(0) - beyond)) - Uint32(1))) % WARP
    start, one, two = (cute.arch.shuffle_sync(x, at) for x in (through - one - two, one, two))
    is_two = Int32(first >= (start + one) * blocks)
    size = cutlass.max(cutlass.select_(is_two != 0, two, one), Int32(1))
    block, position = divided(first - (start + is_two * one) * blocks, size)
    return Cursor(base + 2 * at + is_two, block, position, left, first, total, Int32(0), Int32(0))


def divided(x: Int32, n: Int32) -> tuple[Int32, Int32]:
    """(x // n, x % n) of numbers that are not negative, for quotients below 2^20: where a rounded one is off by 1, it
    is corrected."""
    quotient = Int32(Float32(x) * cute.arch.rcp_approx(Float32(n)))
    rest = x - quotient * n
    more = Int32(rest >= n) - Int32(rest < 0)
    return quotient + more, rest - more * n


@cute.jit
def through_lane(x: Int32, lane: Uint32) -> Int32:
    """Sum over the lanes up to this one."""
    for i in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(x, offset=1 << i, mask_and_clamp=0)
        x = x + other * Int32(Int32(lane) >= (1 << i))
    return x


def after(cursor: Cursor, count, blocks) -> Cursor:
    """Behind ``count`` positions of the item: the next item."""
    block = cursor.block + 1
    is_last = Int32(block == blocks)
    return cursor._replace(batch_idx=cursor.batch_idx + is_last, block=block * (1 - is_last), first=0 * count,
                         left=cursor.left - count, position=cursor.position + count, done=cursor.done + count)
