"""A warp's packed pages, one after the other, whatever its arithmetic and schedule are; where they are; and the pace of
warps: which ask for their next piece early, and which wait a little.

Each warp has pages of its own, and its copies come after those that all other warps have asked for. Some fall behind by
chance, and at the end the whole call waits for them while memory has nothing to do. So the pages that have come are
counted: a warp that is behind the mean has a piece more under way, one that is far ahead leaves memory to the others.

A CTA counts its pages in shared memory. When its warps are at page n of each, one of them, another one at page n + 1,
adds a page for all of them to a count of all CTAs and learns how far the mean CTA is: an atomic of global memory for
every page makes some GPUs slower. On Stream-K's schedule a warp compares itself by its part of the CTA's positions,
since some runs are one longer. What is added up in which order stays the same: only the time of copies changes.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from lowbit_attn.device import ptx
from lowbit_attn.hopper.common.abi import Rows, View, block_rows, first_token
from lowbit_attn.hopper.common.tuning import FAR, FEW_PAGES, LINE_WORDS, Rule
from lowbit_attn.hopper.warp import fetch, residual, softmax, unpack, walk
from lowbit_attn.hopper.warp.config import WarpConfig
from lowbit_attn.hopper.warp.unpack import Lane

COUNT, LEAD, BASE, WORDS = range(4)  # words of shared memory
TELLER_LANE = 2  # lanes COUNT and LEAD use their words


class Call(NamedTuple):
    """What says where a CTA's rows, pages and 16-bit tokens are."""

    q: cute.Tensor
    view: View
    ratio: cute.FastDivmodDivisorV2  # query heads of a KV head
    row_blocks: cute.FastDivmodDivisorV2  # of a KV head


def rows_of(cfg: WarpConfig, call: Call, block: tuple) -> Rows:
    return block_rows(block, call.row_blocks, call.ratio.divisor, call.q.shape[1], cfg.rows, call.ratio)


def token_rows(cfg: WarpConfig, call: Call, ring_row: Int32, head_idx: Int32) -> residual.TokenRows:
    view = call.view
    starts = (first_token(x, ring_row, head_idx) for x in (view.sink_k, view.sink_v, view.ring_k, view.ring_v))
    return residual.TokenRows(*starts, view.ring_k.shape[2], view.ring_v.shape[2])


class Pace(NamedTuple):
    """How far the warps that count together and this warp have come, in pages."""

    common: cute.Pointer | None  # int32 in global memory: pages of ``ctas`` CTAs; goes on from call to call
    ctas: Int32 | int
    is_single_wave: Boolean | bool  # whether all of them run at once
    # int32 in shared memory: pages that have come to the CTA, pages that the mean CTA has more than this one, and what
    # the common count was before the call
    words: cute.Pointer | None
    own: Int32 | int  # this warp's part of ``total``: of the CTA's warps with pages, or of its positions
    total: Int32 | int
    before: Int32 | int = 0  # of this warp, before the pages at hand

    def word(self, i) -> cute.Tensor:
        return cute.make_tensor(self.words + i, cute.make_layout(1))

    def begin(self, base: Int32) -> None:
        """Start counting; one thread does it, before a barrier of the CTA. base: of ``load_base``."""
        for i in range(WORDS):
            self.word(i)[0] = base if i == BASE else Int32(0)


def rule_of(cfg: WarpConfig) -> Rule:
    """The schedule's rule, else the arithmetic's."""
    return cfg.schedule.pace or cfg.arithmetic.pace(cfg)


def is_long(cfg: WarpConfig, pages: Int32):
    """Whether a warp with so many pages compares itself; on Stream-K's schedule they are only a part of its run."""
    return (pages > 1) if cfg.own_queries else (pages >= FEW_PAGES)


def counts(cfg: WarpConfig, pages: Int32):
    """Whether a warp with so many pages counts them."""
    return True if cfg.own_queries else is_long(cfg, pages)


def is_alone(cfg: WarpConfig) -> bool:
    """Whether CTAs know nothing of each other: with K per token a register would be missing; with 16 rows arithmetic
    decides, not memory."""
    return cfg.k.is_per_token or cfg.col_blocks > 1


def make_pace(cfg: WarpConfig, partials: cute.Tensor) -> Pace:
    """Without shared memory yet. As many CTAs as there are SMs, or nearly, count together, in a line before
    ``partials``: what is added to one word more often takes too long."""
    if is_alone(cfg):
        return Pace(None, 1, True, None, 1, cfg.page_warps)
    (x, y, z), (blocks, batch, splits) = cute.arch.block_idx(), cute.arch.grid_dim()
    group = (x + blocks * (y + batch * z)) % cfg.ctas_per_sm
    ctas = (blocks * batch * splits - group + cfg.ctas_per_sm - 1) // cfg.ctas_per_sm  # one an SM, if all run at once
    common = cute.recast_ptr(partials.iterator, dtype=Int32) - LINE_WORDS * (group + 1)
    return Pace(common, ctas, True if cfg.own_queries else ctas <= cute.arch.nsmid(), None, 1, cfg.page_warps)


@cute.jit
def load_base(pace: Pace) -> Int32:
    """What ``begin`` wants, by the thread that begins."""
    base = Int32(0)
    if cutlass.const_expr(pace.common is not None):
        if cute.arch.thread_idx()[0] == 0:
            base = cute.arch.load(pace.common, Int32, sem="relaxed", scope="gpu")
    return base


def reports(cfg: WarpConfig, me: Lane, number):
    """Whether this warp tells the other CTAs that its own has come to page, or position, ``number`` of each warp."""
    return me.warp == number % cfg.page_warps


@cute.jit
def count_page(cfg: cutlass.Constexpr[WarpConfig], pace: Pace, me: Lane, page: Int32, pages: Int32) -> Int32:
    """Page ``page`` of ``pages`` has come; the first lanes get what ``is_behind`` wants, which takes a while."""
    come = Int32(0)
    if counts(cfg, pages):
        if me.lane <= LEAD:
            come = cute.arch.atomic_add(pace.words + me.lane, Int32(1) - Int32(me.lane), sem="relaxed", scope="cta")
        if cutlass.const_expr(pace.common is not None):
            if (me.lane == TELLER_LANE) & reports(cfg, me, pace.before + page):
                come = cute.arch.atomic_add(pace.common, Int32(cfg.page_warps), sem="relaxed", scope="gpu")
    return come


@cute.jit
def is_behind(cfg: cutlass.Constexpr[WarpConfig], pace: Pace, me: Lane, page: Int32, pages: Int32, come: Int32):
    """Before page ``page`` of ``pages``: whether this warp is clearly behind the others; ahead of them, wait.

    come: of ``count_page``, at the page before.
    """
    rule, knows = rule_of(cfg), (page > 0) & is_long(cfg, pages)
    own, lead = (cute.arch.shuffle_sync(come, i) for i in (COUNT, LEAD))
    lag = (own + lead) * pace.own - (pace.before + page) * pace.total
    if cutlass.const_expr(pace.common is not None):
        if knows & reports(cfg, me, pace.before + page - 1) & pace.is_single_wave:
            if me.lane == TELLER_LANE:
                told = Float32(come + cfg.page_warps - pace.word(BASE)[0])
                found = Int32(told * cute.arch.rcp_approx(Float32(pace.ctas))) - (own + 1)
                is_near = cutlass.max(found, 0 - found) <= FAR * cfg.page_warps
                cute.arch.atomic_exch(pace.words + LEAD, found * Int32(is_near), sem="relaxed", scope="cta")
    if knows & (lag < -(pace.total // rule.ahead)):
        ptx.nanosleep(wait_ns(rule, pace, lag))
    return knows & (lag > pace.total // rule.behind)


def wait_ns(rule: Rule, pace: Pace, lag: Int32) -> Int32:
    if rule.page_ns is None:
        return Int32(rule.wait_ns)
    ahead = Float32(0 - lag) * cute.arch.rcp_approx(Float32(pace.total))  # pages
    return cutlass.min(Int32(rule.wait_ns), Int32(ahead * Float32(rule.page_ns)))


@cute.jit
def packed_pages(cfg: cutlass.Constexpr[WarpConfig], pages: fetch.Pages, work: walk.Walk, ring: fetch.Ring,
                 me: unpack.Lane, ids: Int32, queries: unpack.Query, rows: Rows, state: softmax.State,
                 limits: softmax.Limits, on_pace: Pace, slot: Int32, phase: Int32) -> tuple[Int32, Int32]:
    """The warp's pages, one after the other; slot and phase follow the pieces, and go on behind the last."""
    come = Int32(0)
    for page in cutlass.range(pages.count, unroll=1):
        behind = is_behind(cfg, on_pace, me, page, pages.count, come)
        ids = fetch.refill_early(cfg, 0, pages, ring, me, page, slot, ids, behind)
        ids = fetch.wait(cfg, 0, pages, ring, me, page, slot, phase, ids, behind)
        piece = unpack.Piece(ring.buffer, me.warp, slot)
        # S = K Q^T
        found = cfg.arithmetic.steps.scores(cfg, piece, me, queries)
        slot, phase = fetch.advance(cfg, slot, phase)
        if cutlass.const_expr(cfg.features):
            first_token = (work.first_page + page * pages.apart) * (1 << cfg.page_log2)
            found = cfg.masks.mask_tokens(cfg, found, work.first_seen - first_token, rows, limits, me)
        is_early = behind | fetch.has_come(ring, slot, phase)
        ids = fetch.refill_early(cfg, 1, pages, ring, me, page, slot, ids, is_early)
        maxima = softmax.exponentiate(cfg, found, state)  # hides behind V's way
        cfg.arithmetic.steps.before_values(cfg, state, maxima)
        ids = fetch.wait(cfg, 1, pages, ring, me, page, slot, phase, ids, is_early)
        come = count_page(cfg, on_pace, me, page, pages.count)
        piece = unpack.Piece(ring.buffer, me.warp, slot)
        # O += P V
        arrival = fetch.Arrival(page, ring, phase, fetch.is_single(cfg, pages))
        cfg.arithmetic.steps.add_values(cfg, piece, me, state, found.acc, maxima, arrival)
        slot, phase = fetch.advance(cfg, slot, phase)
    return slot, phase
