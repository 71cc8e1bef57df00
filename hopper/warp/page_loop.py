"""A warp's packed pages, one after the other, whatever its arithmetic and schedule are: which they are, and the pace of
warps: which ask for their next piece early, and which wait a little.

The walk. After its pages a warp has a share of units of 16 tokens: of pages whose K is packed while their V is in 16
bit (mixed.py), then of sinks and residual (residual.py). Units are dealt one by one to the warps of all splits, the
late warps first: they have fewer pages.

The pace. A warp's copies come after those that all other warps have asked for. Some fall behind by chance, and at the
end the whole call waits for them while memory has nothing to do. So the pages that have come are counted: a warp that
is behind the mean has a piece more under way, one that is far ahead leaves memory to the others.

A CTA counts its pages in shared memory. When its warps are at page n of each, one of them, another one at page n + 1,
adds a page for all of them to a count of all CTAs and learns how far the mean CTA is: an atomic of global memory for
every page makes some GPUs slower. On Stream-K's schedule a warp compares itself by its part of the CTA's positions,
since some runs are one longer. What is added up in which order stays the same: only the time of copies changes.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from lowbit_attn import layout
from lowbit_attn.device import ptx
from lowbit_attn.hopper.common.abi import Rows, View, at_most, block_rows
from lowbit_attn.hopper.common.tuning import FAR, FEW_PAGES, LINE_WORDS, Rule
from lowbit_attn.hopper.warp import fetch, softmax
from lowbit_attn.hopper.warp.config import PLAN_WORDS, UNIT_TOKENS, WarpConfig
from lowbit_attn.hopper.warp.fetch import Lane

MIXED_UNITS = layout.PAGE_TOKENS // UNIT_TOKENS  # of a page
PAGE_LOG2, UNIT_LOG2 = (n.bit_length() - 1 for n in (layout.PAGE_TOKENS, UNIT_TOKENS))  # a shift is one instruction
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


class Walk(NamedTuple):
    """Run-time counts of one warp, Int32. Its pages are first_page, first_page + apart, ... of the sequence
    (``pages_apart``; on Stream-K's schedule one after the other)."""

    first_page: Int32
    num_pages: Int32
    mixed_page: Int32  # the first page with V in 16 bit; its first unit is unit 0 of the mixed segment
    first_mixed: Int32  # units first_mixed, first_mixed + apart, ... below num_mixed; apart: the warps of all splits
    num_mixed: Int32  # of the sequence
    first_unit: Int32  # the same of sinks and residual: units first_unit, first_unit + apart, ... below num_units
    num_units: Int32  # of the sequence: units of sinks, then of the residual
    sink_units: Int32
    n_sink: Int32
    n_residual: Int32
    ring_start: Int32  # number of the residual's first token among those that are no sinks
    first_seen: Int32  # query j sees tokens after the sinks from number first_seen + j on; may be negative


class Unit(NamedTuple):
    """16-bit tokens ``start .. start + live - 1`` of their segment; is_sink is 1 or 0."""

    start: Int32
    live: Int32
    is_sink: Int32
    reach: Int32  # query j sees none from number reach + j of the unit on; may be negative


class CacheRow(NamedTuple):
    """Which rows of the cache's memory a warp reads, Int32."""

    row: Int32  # of counters and table
    ring_row: Int32  # of sinks and rings


class Plans(NamedTuple):
    """Where each warp keeps its rows and its walk while it is at its pages: in registers they would be spilled.

    ``PLAN_WORDS`` words of shared memory a warp: batch_idx, head_idx, first and count of its rows, the walk, and which
    rows of the cache it reads.
    """

    words: cute.Tensor  # int32 (PLAN_WORDS), of this warp

    def store(self, rows: Rows, walk: Walk, place: CacheRow) -> None:
        """Write rows, walk and place; one lane does it."""
        own = cute.make_rmem_tensor(PLAN_WORDS, Int32)
        own.fill(0)
        for i, value in enumerate((*rows[:4], *walk, *place)):
            own[i] = Int32(value)
        cute.autovec_copy(own, self.words)

    def load(self, rows: Rows) -> tuple[Rows, Walk, CacheRow]:
        """What ``store`` wrote; the rest of the rows is the call's."""
        own = cute.make_rmem_tensor(PLAN_WORDS, Int32)
        cute.autovec_copy(self.words, own)
        values = [own[i] for i in range(PLAN_WORDS)]
        end = 4 + len(Walk._fields)
        return Rows(*values[:4], *rows[4:]), Walk(*values[4:end]), CacheRow(*values[end : end + 2])


def plans_of(place: cute.Pointer, warp_idx: Int32, warps: int) -> Plans:
    """The plan of one warp; place: int32 of the CTA."""
    return Plans(cute.make_tensor(place, cute.make_layout((PLAN_WORDS, warps)))[None, warp_idx])


def plan_walk(n_sink, n_qk, n_qv, n_tok, ring_start, q_len, window, split_idx, num_splits, warp_idx, warps: int,
              page_warps: int, divisor=None, page_log2: int = PAGE_LOG2) -> Walk:
    """The walk of one warp of split ``split_idx`` of ``num_splits`` over a sequence with these token counts.

    n_qk, n_qv: packed tokens of K and of V, multiples of a page, n_qv <= n_qk; ring_start: tokens that left the ring.
    window: tokens that a query sees, itself included, or None; pages that the first query does not reach are left out,
    and the splits share the rest. Pages are dealt one by one, to the first warps of all splits, then to their second
    warps, ...: which page a warp has first does not depend on the length. page_warps: the first warps of a split, which
    take the packed pages. divisor: num_splits in a form that is divided by faster. page_log2: of the tokens of a page,
    or of what takes its place where a warp takes less at a time; such formats have no mixed segment.
    """
    divisor = num_splits if divisor is None else divisor
    first_seen = 0 * n_tok if window is None else n_tok - q_len + 1 - window - n_sink
    packed_k, packed_v = n_qk >> page_log2, n_qv >> page_log2
    start, mixed_start = 0, packed_v
    if window is not None:
        hidden = at_most(first_seen * Int32(first_seen > 0) >> page_log2, packed_k)
        start = at_most(hidden, packed_v)
        mixed_start = packed_v + hidden - start
    num_mixed, n_residual = (packed_k - mixed_start) * MIXED_UNITS, n_tok - n_sink - ring_start
    sink_units, residual_units = units_of(n_sink), units_of(n_residual)
    apart = warps * num_splits
    first_mixed = (warps - 1 - warp_idx) * num_splits + split_idx
    first_unit = first_mixed - num_mixed % apart  # the next warp's
    first_unit = first_unit + apart * Int32(first_unit < 0)
    place = page_place(split_idx, num_splits, warp_idx)
    own = (packed_v - start + pages_apart(num_splits, page_warps) - 1 - place) // divisor // page_warps
    if page_warps < warps:
        own = own * Int32(warp_idx < page_warps)
    return Walk(start + place, own, mixed_start, first_mixed, num_mixed,
                first_unit, sink_units + residual_units, sink_units, n_sink, n_residual, ring_start, first_seen)


def page_place(split_idx, num_splits, warp_idx):
    """Number of a warp among those that take pages, of all splits."""
    return warp_idx * num_splits + split_idx


def pages_apart(num_splits, page_warps: int):
    """From a warp's page to its next: as many warps take pages, of all splits."""
    return page_warps * num_splits


def units_of(tokens):
    return tokens + UNIT_TOKENS - 1 >> UNIT_LOG2


def unit(walk: Walk, i, q_len) -> Unit:
    """16-bit unit ``i`` of the sequence, 0 <= i < num_units; at least one token is live."""
    is_sink = Int32(i < walk.sink_units)
    start = (i - (1 - is_sink) * walk.sink_units) * UNIT_TOKENS
    left = is_sink * walk.n_sink + (1 - is_sink) * walk.n_residual - start
    behind = is_sink * (walk.ring_start + walk.n_residual)  # tokens between this segment's end and the sequence's
    return Unit(start, at_most(left, UNIT_TOKENS), is_sink, behind + left - q_len + 1)


# ---- pace


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
    """Whether CTAs know nothing of each other: K per token lacks a register, and 16 rows are bound by arithmetic."""
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
    found = me.warp == number % cfg.page_warps
    for more in range(1, cfg.page_positions):
        found = found | (me.warp == (number + more) % cfg.page_warps)
    return found


def position(cfg: WarpConfig, pace: Pace, page: Int32):
    """Number of a page among all positions of the warp."""
    return pace.before + page * cfg.page_positions


@cute.jit
def count_page(cfg: cutlass.Constexpr[WarpConfig], pace: Pace, me: Lane, page: Int32, pages: Int32) -> Int32:
    """Page ``page`` of ``pages`` has come; the first lanes get what ``is_behind`` wants, which takes a while."""
    come = Int32(0)
    if counts(cfg, pages):
        if me.lane <= LEAD:
            come = cute.arch.atomic_add(pace.words + me.lane, (Int32(1) - Int32(me.lane)) * cfg.page_positions,
                                        sem="relaxed", scope="cta")
        if cutlass.const_expr(pace.common is not None):
            if (me.lane == TELLER_LANE) & reports(cfg, me, position(cfg, pace, page)):
                come = cute.arch.atomic_add(pace.common, Int32(cfg.page_warps), sem="relaxed", scope="gpu")
    return come


@cute.jit
def is_behind(cfg: cutlass.Constexpr[WarpConfig], pace: Pace, me: Lane, page: Int32, pages: Int32, come: Int32):
    """Before page ``page`` of ``pages``: whether this warp is clearly behind the others; ahead of them, wait.

    come: of ``count_page``, at the page before.
    """
    rule, knows = rule_of(cfg), (page > 0) & is_long(cfg, pages)
    own, lead = (cute.arch.shuffle_sync(come, i) for i in (COUNT, LEAD))
    lag = (own + lead) * pace.own - position(cfg, pace, page) * pace.total
    if cutlass.const_expr(pace.common is not None):
        if knows & reports(cfg, me, position(cfg, pace, page) - cfg.page_positions) & pace.is_single_wave:
            if me.lane == TELLER_LANE:
                told = Float32(come + cfg.page_warps - pace.word(BASE)[0])
                found = Int32(told * cute.arch.rcp_approx(Float32(pace.ctas))) - (own + cfg.page_positions)
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
def packed_pages(cfg: cutlass.Constexpr[WarpConfig], pages: fetch.Pages, work: Walk, ring: fetch.Ring,
                 me: fetch.Lane, ids: Int32, queries: fetch.Query, rows: Rows, state: softmax.State,
                 limits: softmax.Limits, on_pace: Pace, slot: Int32, phase: Int32) -> tuple[Int32, Int32]:
    """The warp's pages, one after the other; slot and phase follow the pieces, and go on behind the last."""
    come = Int32(0)
    for page in cutlass.range(pages.count, unroll=1):
        behind = is_behind(cfg, on_pace, me, page, pages.count, come)
        ids = fetch.refill_early(cfg, 0, pages, ring, me, page, slot, ids, behind)
        ids = fetch.wait(cfg, 0, pages, ring, me, page, slot, phase, ids, behind)
        piece = fetch.Piece(ring.buffer, me.warp, slot)
        if cutlass.const_expr(hasattr(queries, "position")):
            queries = queries._replace(position=work.n_sink + (work.first_page + page * pages.apart << cfg.page_log2))
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
        piece = fetch.Piece(ring.buffer, me.warp, slot)
        # O += P V
        arrival = fetch.Arrival(page, ring, phase, fetch.is_single(cfg, pages))
        cfg.arithmetic.steps.add_values(cfg, piece, me, state, found.acc, maxima, arrival)
        slot, phase = fetch.advance(cfg, slot, phase)
    return slot, phase
