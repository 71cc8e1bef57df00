"""The integer path on Stream-K's schedule: one CTA an SM, and each of its warps attends to an equal run of pages.

    for each item of the run (items.py):  counters -> page ids -> ring -> q s -> pages -> units -> sums

A warp has its own ring, queries and sums; the CTA meets once, at its end (fixup.py). Where lengths differ, or blocks of
query rows do not divide by the SMs, no SM waits for another.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from lowbit_attn.hopper.common import combine
from lowbit_attn.hopper.common.abi import Grid, Options, Results, Rows, View, load_counts
from lowbit_attn.hopper.schedule import fixup, items
from lowbit_attn.hopper.schedule.splits import SplitsSm90
from lowbit_attn.hopper.warp import fetch, residual, softmax
from lowbit_attn.hopper.warp.config import WORD, WarpConfig
from lowbit_attn.hopper.warp.page_loop import (
    COUNT,
    CacheRow,
    Call,
    Pace,
    Plans,
    load_base,
    make_pace,
    packed_pages,
    plans_of,
    rows_of,
)


class StreamSm90(SplitsSm90):
    """The kernel of one WarpConfig. One CTA a place of scratch."""

    def launch(self, q: cute.Tensor, view: View, results: Results, options: Options, grid: Grid, stream) -> None:
        ctas = results.partials.shape[0]
        self.kernel(q, view, results, options.scale_log2, grid.shape[0], *grid.divisors(ctas)).launch(
            grid=(ctas, 1, 1), block=(self.cfg.threads, 1, 1), stream=stream, min_blocks_per_mp=1, cooperative=True)

    @cute.kernel
    def kernel(self, q: cute.Tensor, view: View, results: Results, scale_log2: Float32, blocks: Int32,
               ratio: cute.FastDivmodDivisorV2, row_blocks: cute.FastDivmodDivisorV2, parts: cute.FastDivmodDivisorV2):
        cfg = self.cfg
        call, table = Call(q, view, ratio, row_blocks), view.table
        me = fetch.lane_of(cute.arch.make_warp_uniform(cute.arch.warp_idx()), Uint32(cute.arch.lane_idx()))
        cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        prefetch_parts(((table, table.shape[0]), (q, cute.size(q))), cta, ctas)
        cute.arch.sync_warp()
        early = items.load_pair(view, Int32(0), me.lane)
        on_pace = make_pace(cfg, results.partials)
        base = load_base(on_pace)
        smem = cutlass.memory.SmemAllocator().allocate(self.storage())
        own = own_of(cfg, smem, me, on_pace, smem.plans.data_ptr())
        out_to = combine.Outputs(*results, cta, Int32(0))
        cursor = begin(cfg, view, own, me, early, base, blocks, parts, out_to, ctas, items.work_item)
        common = Common(blocks, parts, scale_log2)
        left, slot, phase = cursor.left, Int32(0), Int32(0)
        while left > 0:
            now = fetch.fresh(me)  # for every item
            left, slot, phase = attend(cfg, call, common, own, now, out_to, slot, phase)
        cute.arch.sync_threads()
        fixup.merge(cfg, call, own.runs, out_to)


class Own(NamedTuple):
    """Shared memory of a warp, and where the CTA's warps meet."""

    ring: fetch.Ring
    query: cute.Pointer
    channels: cute.Pointer
    plans: Plans
    runs: fixup.RunSums
    pace: Pace


def prefetch_parts(tensors: tuple, cta: Int32, ctas: Int32) -> None:
    """Bring (tensor, elements) to L2, each CTA a part: they are small, and who needs what is not known yet."""
    for x, count in tensors:
        first = fetch.line_of(x) * cta
        fetch.prefetch(x, first, Int32(count) - first, ctas * cute.arch.thread_idx()[0])


def own_of(cfg: WarpConfig, smem, me: fetch.Lane, on_pace: Pace, plans: cute.Pointer) -> Own:
    """A warp's part of shared memory; plans: of all warps, with cursors and records behind them."""
    channels = (smem.channels if cutlass.const_expr(cfg.boost is not None) else smem.query).data_ptr()
    return Own(fetch.ring_of(cfg, smem.buffer.data_ptr(), smem.barriers.data_ptr(), me.warp),
               smem.query.data_ptr() + me.warp * (cfg.query_bytes // WORD),
               channels + me.warp * (cfg.channel_bytes // WORD),
               plans_of(plans, me.warp, cfg.warps), fixup.views(cfg, plans, smem.sums.data_ptr()),
               on_pace._replace(words=smem.pace.data_ptr()))


@cute.jit
def begin(cfg: cutlass.Constexpr[WarpConfig], views, own: Own, me: fetch.Lane, early, base: Int32, blocks: Int32,
         parts: cute.FastDivmodDivisorV2, out: combine.Outputs, ctas: Int32,
         item_of: cutlass.Constexpr) -> items.Cursor:
    """Make the warp's barriers, find where its run begins, and wait for the CTA's other warps; the cursor.

    early: counters of the first rows (items.load_pair); base: of the pace; item_of: as ``items.begin``.
    """
    with cute.arch.elect_one():
        fetch.init(cfg, own.ring)
        own.runs.clear(me.warp)
    cute.arch.mbarrier_init_fence()
    fixup.prefetch(cfg, out, ctas)
    cursor = items.begin(views, early, blocks, out.place, parts, me.warp, cfg.warps, me.lane, item_of)
    with cute.arch.elect_one():
        own.runs.store_cursor(me.warp, cursor)
    if cute.arch.thread_idx()[0] == 0:
        own.pace.begin(base)
    cute.arch.sync_threads()
    return cursor


class Common(NamedTuple):
    """What all items have in common."""

    blocks: Int32  # of query rows, of all KV heads
    parts: cute.FastDivmodDivisorV2  # CTAs
    scale_log2: Float32


@cute.jit
def attend(cfg: cutlass.Constexpr[WarpConfig], call: Call, common: Common, own: Own, me: fetch.Lane,
           out: combine.Outputs, slot: Int32, phase: Int32) -> tuple[Int32, Int32, Int32]:
    """The item at which the warp's cursor is; (positions left, slot and phase of the ring)."""
    cursor = own.runs.cursor(me.warp)
    view = call.view
    ring_row = view.ring_rows[cursor.batch_idx]
    row, counts = load_counts(view, cursor.batch_idx)
    rows = rows_of(cfg, call, (cursor.block, cursor.batch_idx))
    count = cutlass.min(cursor.left, items.work_item(*counts).positions - cursor.first)
    work = items.walk_of(*counts, cursor.first, count)
    pages = fetch.Pages(view.pool, view.table, view.first_entry(row, rows.head_idx) + work.first_page, work.num_pages,
                        view.page_stride, Int64(rows.head_idx) * Int64(view.head_stride), 1,
                        fetch.policy_of(cfg, cursor.total, call.row_blocks.divisor))
    ids = fetch.page_ids(cfg, pages, Int32(0), me.lane)
    fetch.start(cfg, pages, own.ring, me, ids, range(cfg.slots), slot)
    words = fetch.load_query(cfg, call.q, rows, me)
    with cute.arch.elect_one():
        own.plans.store(rows, work, CacheRow(row, ring_row))
    state = softmax.make_state(cfg)
    queries = cfg.arithmetic.steps.prepare_own_query(cfg, words, common.scale_log2, me, own.query, own.channels)
    cute.arch.sync_warp()
    limits = softmax.Limits(Float32(0.0), Float32(0.0), Int32(0), Int32(0))  # of no feature
    on_pace = own.pace._replace(own=cursor.done + cursor.left, before=cursor.done,
                                total=items.share(cursor.total, common.parts, out.place)[1])
    slot, phase = packed_pages(cfg, pages, work, own.ring, me, ids, queries, rows, state, limits,
                               on_pace, slot, phase)

    me = fetch.fresh(me)
    cute.arch.sync_warp()
    rows, work, place = own.plans.load(rows)
    cursor = own.runs.cursor(me.warp)
    source = residual.token_rows(cfg, call, place.ring_row, rows.head_idx)
    if cutlass.const_expr(cfg.has_mixed):
        pages = pages._replace(first=view.first_entry(place.row, rows.head_idx) + work.mixed_page)
        cursor = cursor._replace(unit_phase=cfg.mixed_steps.run(cfg, pages, work, source, own.ring, me, queries, rows,
                                                                  state, limits, cursor.unit_phase, 1))
    residual.run(cfg, work, source, own.ring, me, call.q, rows, state, common.scale_log2, limits, 1)
    _, counts = load_counts(view, rows.batch_idx)
    size = items.work_item(*counts).positions
    return finish(cfg, common, own, me, rows, cursor, size, work.num_pages, state, out), slot, phase


@cute.jit
def finish(cfg: cutlass.Constexpr[WarpConfig], common: Common, own: Own, me: fetch.Lane, rows: Rows,
           cursor: items.Cursor, size: Int32, counted: Int32, state: softmax.State, out: combine.Outputs) -> Int32:
    """Leave an item's sums, or write its result if the run has all of it; returns the positions left.

    size: positions of the item; counted: of those in the run, as many as the warp has counted at its pages.
    """
    count = cutlass.min(cursor.left, size - cursor.first)
    is_head, goes_on = cursor.first > 0, cursor.first + count < size
    part = 2 * me.warp + Int32(cursor.first == 0)
    fixup.store_sums(cfg, own.runs, part, me, state)
    last = out.place
    if goes_on:
        last = items.part_of(cursor.total, common.parts, cursor.position + size - cursor.first - 1)
    cute.arch.sync_warp()  # all lanes have read the cursor
    with cute.arch.elect_one():
        own.runs.record(part, cursor, Int32(is_head | goes_on), last)
        own.runs.store_cursor(me.warp, items.after(cursor, count, common.blocks))
        count_positions(cfg, own.pace, me, cursor.done + counted, count - counted)
    cute.arch.sync_warp()
    # for the merge: what was read at the start is not in L2 any more
    fetch.prefetch(out.sink_logits, rows.head_idx * rows.ratio * Int32(out.sink_logits.shape[0] > 1), Int32(1),
                  Int32(me.lane))
    if (cursor.first == 0) & (cursor.first + count == size):
        fixup.write_whole(cfg, own.runs, part, rows, out, me)
    cute.arch.sync_warp()
    return cursor.left - count


@cute.jit
def count_positions(cfg: cutlass.Constexpr[WarpConfig], pace: Pace, me: fetch.Lane, first: Int32, positions: Int32):
    """So many positions that are no pages, from number ``first`` of the warp on; by one lane."""
    cute.arch.atomic_add(pace.words + COUNT, positions, sem="relaxed", scope="cta")
    if cutlass.const_expr(pace.common is not None):
        # of the numbers below n this warp tells (n + warps - 1 - warp) // warps
        low, high = (Uint32(n + cfg.page_warps - 1 - me.warp) // Uint32(cfg.page_warps)
                     for n in (first, first + positions))
        if low != high:
            cute.arch.atomic_add(pace.common, Int32(high - low) * cfg.page_warps, sem="relaxed", scope="gpu")
