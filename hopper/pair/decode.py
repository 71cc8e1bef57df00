"""Decode over both levels of a cache of levels in one launch, on Stream-K's schedule (schedule/stream.py).

    for each item of the run:  counters -> q s -> high pages -> low pages -> 16-bit units of both -> sums

A warp runs the page loop of the high level, then that of the low level, over one ring, one operand of q and one softmax
state. The int8 path keeps O in its own units from page to page, so that pages of any two formats follow each other.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from lowbit_attn.device.numbers import ELEMENT
from lowbit_attn.hopper.common import combine
from lowbit_attn.hopper.common.abi import Results, Rows, View, grid_of, load_counts
from lowbit_attn.hopper.pair.config import HIGH_POSITIONS, LevelConfig, PairConfig, config_of
from lowbit_attn.hopper.pair.items import LevelViews, level_item, walks_of
from lowbit_attn.hopper.schedule import fixup, items
from lowbit_attn.hopper.schedule.splits import SplitsSm90
from lowbit_attn.hopper.schedule.stream import Common, Own, begin, finish, own_of, prefetch_parts
from lowbit_attn.hopper.warp import fetch, residual, softmax
from lowbit_attn.hopper.warp.config import PLAN_WORDS
from lowbit_attn.hopper.warp.page_loop import (
    CacheRow,
    Call,
    Plans,
    Walk,
    load_base,
    make_pace,
    packed_pages,
    plans_of,
    rows_of,
)
from lowbit_attn.kernels.key import CuteKernel, KernelKey

UNIT_WORDS = 32  # of 128 bytes, in which pools are counted


class LevelTensors(NamedTuple):
    """What the kernel reads of one level alone."""

    pool: cute.Tensor  # (units, 32) uint32
    table: cute.Tensor  # (entries) int32
    n_sink: cute.Tensor  # (rows) int32, as the next ones
    n_packed: cute.Tensor
    n_tok: cute.Tensor
    ring_start: cute.Tensor
    sink_k: cute.Tensor  # (rows, 1, slots, head_dim)
    sink_v: cute.Tensor


class PairSm90(SplitsSm90):
    """The kernel of one PairConfig. One CTA a place of scratch."""

    def __init__(self, cfg: PairConfig):
        self.pair = cfg
        super().__init__(cfg.low)

    @cute.jit
    def __call__(self, q: cute.Tensor, rows: cute.Tensor, high_pool: cute.Tensor, low_pool: cute.Tensor,
                 table: cute.Tensor, c_sink: cute.Tensor, c_pack: cute.Tensor, c_tok: cute.Tensor, c_out: cute.Tensor,
                 high_k: cute.Tensor, high_v: cute.Tensor, low_k: cute.Tensor, low_v: cute.Tensor, ring_k: cute.Tensor,
                 ring_v: cute.Tensor, partials: cute.Tensor, out: cute.Tensor, lse: cute.Tensor,
                 sink_logits: cute.Tensor, scale_log2: Float32, softcap_log2: Float32, stream):
        """q, out [rows, q_len, heads of a KV head, head_dim]; lse fp32 [rows, heads of a KV head, q_len]; a row is a
        (sequence, KV head). table int32 [2, rows, pages] and c_* int32 [2, rows]: of LevelCache. The rest is
        common/abi.py's."""
        counters = (c_sink, c_pack, c_tok, c_out)
        high, low = (LevelTensors(pool, level_of(table, level), *(level_of(x, level) for x in counters), *tokens)
                     for level, (pool, *tokens) in enumerate(((high_pool, high_k, high_v), (low_pool, low_k, low_v))))
        grid = grid_of(q, ring_k, partials.shape[1], self.pair.rows)
        limits = softmax.Limits(*softmax.cap_constants(softcap_log2), Int32(0), Int32(0))
        ctas = partials.shape[0]
        self.kernel(q, rows, high, low, ring_k, ring_v, table.shape[2], Results(partials, out, lse, sink_logits),
                    scale_log2, limits, grid.shape[0], *grid.divisors(ctas)).launch(
            grid=(ctas, 1, 1), block=(self.pair.threads, 1, 1), stream=stream, min_blocks_per_mp=1, cooperative=True)

    @cute.kernel
    def kernel(self, q: cute.Tensor, rows: cute.Tensor, high: LevelTensors, low: LevelTensors, ring_k: cute.Tensor,
               ring_v: cute.Tensor, entries: Int32, results: Results, scale_log2: Float32, limits: softmax.Limits,
               blocks: Int32, ratio: cute.FastDivmodDivisorV2, row_blocks: cute.FastDivmodDivisorV2,
               parts: cute.FastDivmodDivisorV2):
        pair, cfg = self.pair, self.pair.low
        views = LevelViews(rows, *(view_of(level, rows, ring_k, ring_v, entries) for level in (high, low)))
        call = PairCall(q, views, ratio, row_blocks)
        me = fetch.lane_of(cute.arch.make_warp_uniform(cute.arch.warp_idx()), Uint32(cute.arch.lane_idx()))
        cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        prefetch_parts(((high.table, high.table.shape[0]), (low.table, low.table.shape[0]), (q, cute.size(q))), cta,
                       ctas)
        cute.arch.sync_warp()
        early = items.load_pair(views, Int32(0), me.lane)
        on_pace = make_pace(cfg, results.partials)
        base = load_base(on_pace)
        smem = cutlass.memory.SmemAllocator().allocate(self.storage())
        high_plans = smem.plans.data_ptr()
        own = own_of(cfg, smem, me, on_pace, high_plans + PLAN_WORDS * cfg.warps)
        out_to = combine.Outputs(*results, cta, Int32(0))
        cursor = begin(cfg, views, own, me, early, base, blocks, parts, out_to, ctas, level_item)
        common = Common(blocks, parts, scale_log2)
        left, slot, phase = cursor.left, Int32(0), Int32(0)
        while left > 0:
            now = fetch.fresh(me)  # for every item
            left, slot, phase = attend(pair, call, common, own, high_plans, limits, now, out_to, slot, phase)
        cute.arch.sync_threads()  # all warps have left their sums
        fixup.merge(cfg, call, own.runs, out_to)


class PairCall(NamedTuple):
    """``Call`` of two levels."""

    q: cute.Tensor
    view: LevelViews
    ratio: cute.FastDivmodDivisorV2
    row_blocks: cute.FastDivmodDivisorV2

    def of(self, view: View) -> Call:
        """``Call`` of one of the levels."""
        return Call(self.q, view, self.ratio, self.row_blocks)


def level_of(x: cute.Tensor, level: int) -> cute.Tensor:
    """Level ``level`` of a tensor (2, ...), as one row."""
    count = cute.size(x) // 2
    return cute.make_tensor(x.iterator + level * count, cute.make_layout((count,)))


def view_of(level: LevelTensors, rows: cute.Tensor, ring_k: cute.Tensor, ring_v: cute.Tensor, entries: Int32) -> View:
    """One level as an ordinary cache of (sequence, KV head) rows. A page's number is that of its first unit."""
    return View(rows, rows, level.pool, level.table, level.n_sink, level.n_packed, None, level.n_tok, level.ring_start,
                level.sink_k, level.sink_v, ring_k, ring_v, Int32(1), Int32(0), entries, Int32(0))


def pages_of(cfg: LevelConfig, view: View, rows: Rows, work: Walk, positions: Int32, row_blocks: Int32) -> fetch.Pages:
    """The warp's pages of one level. positions: of the call."""
    return fetch.Pages(view.pool, view.table, view.first_entry(rows.batch_idx, Int32(0)) + work.first_page,
                       work.num_pages, view.page_stride, Int64(0), 1, fetch.policy_of(cfg, positions, row_blocks))


@cute.jit
def attend(pair: cutlass.Constexpr[PairConfig], call: PairCall, common: Common, own: Own, high_plans: cute.Pointer,
           limits: softmax.Limits, me: fetch.Lane, out: combine.Outputs, slot: Int32,
           phase: Int32) -> tuple[Int32, Int32, Int32]:
    """The item at which the warp's cursor is; (positions left, slot and phase of the ring)."""
    cfg, high, low, cursor = pair.low, call.view.high, call.view.low, own.runs.cursor(me.warp)
    _, counts = load_counts(call.view, cursor.batch_idx)
    rows = rows_of(cfg, call, (cursor.block, cursor.batch_idx))
    count = cutlass.min(cursor.left, level_item(*counts).positions - cursor.first)
    work, later = walks_of(*counts, first=cursor.first, count=count)
    row_blocks, place = call.row_blocks.divisor, CacheRow(rows.batch_idx, rows.batch_idx)
    pages = pages_of(pair.high, high, rows, work, cursor.total, row_blocks)
    ids = fetch.page_ids(pair.high, pages, Int32(0), me.lane)
    fetch.start(pair.high, pages, own.ring, me, ids, range(cfg.slots), slot)
    if pages.count == 0:
        first = pages_of(cfg, low, rows, later, cursor.total, row_blocks)
        fetch.start(cfg, first, own.ring, me, fetch.page_ids(cfg, first, Int32(0), me.lane), range(cfg.slots), slot)
    words = fetch.load_query(cfg, call.q, rows, me)
    mine = plans_of(high_plans, me.warp, cfg.warps)
    with cute.arch.elect_one():
        mine.store(rows, work, place)
        own.plans.store(rows, later, place)
    state = softmax.make_state(cfg)
    queries = cfg.arithmetic.steps.prepare_own_query(cfg, words, common.scale_log2, me, own.query, own.channels)
    cute.arch.sync_warp()
    on_pace = own.pace._replace(own=cursor.done + cursor.left, before=cursor.done,
                                total=items.share(cursor.total, common.parts, out.place)[1])
    slot, phase = packed_pages(pair.high, pages, work, own.ring, me, ids, queries, rows, state, limits, on_pace, slot,
                               phase)

    me = fetch.fresh(me)
    cute.arch.sync_warp()
    slot, phase = low_pages(pair, call, common, own, mine, queries, limits, me, out, state, slot, phase)

    me = fetch.fresh(me)
    cute.arch.sync_warp()
    rows, _, _ = own.plans.load(rows)
    for level in cutlass.range(2, unroll=1):
        at = plans_of(high_plans + level * (PLAN_WORDS * cfg.warps), me.warp, cfg.warps)
        _, own_work, _ = at.load(rows)
        of_levels = (residual.token_rows(cfg, call.of(view), rows.batch_idx, Int32(0)) for view in (high, low))
        source = residual.TokenRows(*(cutlass.select_(level == 0, *pair_of) for pair_of in zip(*of_levels)))
        residual.run(cfg, own_work, source, own.ring, me, call.q, rows, state, common.scale_log2, limits, 1)
    cursor = own.runs.cursor(me.warp)
    _, counts = load_counts(call.view, rows.batch_idx)
    size = level_item(*counts).positions
    counted = mine.load(rows)[1].num_pages * HIGH_POSITIONS + own.plans.load(rows)[1].num_pages
    return finish(cfg, common, own, me, rows, cursor, size, counted, state, out), slot, phase


@cute.jit
def low_pages(pair: cutlass.Constexpr[PairConfig], call: PairCall, common: Common, own: Own, high_plans: Plans,
              queries: fetch.Query, limits: softmax.Limits, me: fetch.Lane, out: combine.Outputs,
              state: softmax.State, slot: Int32, phase: Int32) -> tuple[Int32, Int32]:
    """The warp's pages of the low level, behind those of the high one; (slot, phase)."""
    cfg, cursor = pair.low, own.runs.cursor(me.warp)
    rows = rows_of(cfg, call, (cursor.block, cursor.batch_idx))
    rows, work, _ = own.plans.load(rows)
    pages = pages_of(cfg, call.view.low, rows, work, cursor.total, call.row_blocks.divisor)
    ids = fetch.page_ids(cfg, pages, Int32(0), me.lane)
    before = high_plans.load(rows)[1].num_pages
    if before > 0:
        fetch.start(cfg, pages, own.ring, me, ids, range(cfg.slots), slot)
    on_pace = own.pace._replace(own=cursor.done + cursor.left, before=cursor.done + before * HIGH_POSITIONS,
                                total=items.share(cursor.total, common.parts, out.place)[1])
    return packed_pages(cfg, pages, work, own.ring, me, ids, queries, rows, state, limits, on_pace, slot, phase)


def pair_kernel(key: KernelKey) -> CuteKernel:
    """The kernel of a key and the fake arguments (all but the stream) to compile it for.

    ValueError with the reasons if there is none.
    """
    return CuteKernel(PairSm90(config_of(key)), fake_arguments(key.head_dim, ELEMENT[key.dtype]))


def fake_arguments(head_dim: int, element) -> tuple:
    """All arguments but the stream; every size but head_dim varies at run time."""
    def tensor(kind, *shape, align=16):
        return make_fake_compact_tensor(kind, shape, stride_order=tuple(reversed(range(len(shape)))),
                                        assumed_align=align)

    n = cute.sym_int
    batch, q_len, heads, seqs, high, low, ring = (n() for _ in range(7))

    def tokens(slots):
        return make_fake_tensor(element, (seqs, 1, slots, head_dim),
                                (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), head_dim, 1),
                                assumed_align=16)

    return (
        tensor(element, batch, q_len, heads, head_dim), tensor(Int32, batch, align=4),
        *(tensor(Uint32, n(), UNIT_WORDS, align=128) for _ in range(2)), tensor(Int32, 2, seqs, n(), align=4),
        *(tensor(Int32, 2, seqs, align=4) for _ in range(4)), *(tokens(slots) for slots in (high, high, low, low)),
        *(tokens(ring) for _ in range(2)), tensor(Float32, n(), n(), n()),
        tensor(element, batch, q_len, heads, head_dim), tensor(Float32, batch, heads, q_len, align=4),
        tensor(Float32, n(), align=4), Float32(1.0), Float32(1.0),
    )
