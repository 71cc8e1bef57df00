"""Decode attention over packed pages, by warps: the kernel whose CTAs are splits.

One CTA serves one (split, row block, KV head, sequence); more than ``cfg.rows`` query rows make several row blocks,
each of which reads the pages. Its warps share nothing but the query rows: each walks over its own pages (page_loop.py)
with a ring, a softmax and accumulators of its own, and they meet once, in merge.py.

    for each page:  wait K part, refill last slot -> S^T = K Q^T (scores) -> maximum, P (softmax)
                    wait V part, refill last slot -> O^T += V^T P^T (values)
    then:           O to true scale -> pages with V in 16 bit (mixed) -> 16-bit units (residual) -> merge

    ring      warp -> itself    full: 1 arrival + bytes      empty: the warp's own program order

K and V^T are the A operands of the multiplies, straight from masked words; query rows are N. What a step does is its
arithmetic's (warp/config.py). P is formed while V comes.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from lowbit_attn import layout
from lowbit_attn.device import ptx
from lowbit_attn.hopper.common import combine
from lowbit_attn.hopper.common.abi import DecodeKernel, Grid, Options, Results, Rows, View, guess_counts, right_counts
from lowbit_attn.hopper.common.tuning import FEW_PAGES
from lowbit_attn.hopper.warp import fetch, merge, page_loop, residual, softmax
from lowbit_attn.hopper.warp.config import WARP, WarpConfig
from lowbit_attn.hopper.warp.page_loop import CacheRow, Call, Plans, Walk

SMEM_ALIGN = layout.RECORD_ALIGN  # of each piece of shared memory
ALL_SMEM = 100  # percent of an SM's shared memory and L1; asked for by name, else the DSL asks the driver


class SplitsSm90(DecodeKernel):
    """The kernel of one WarpConfig whose CTAs are splits."""

    def __init__(self, cfg: WarpConfig):
        self.cfg = cfg
        self.smem_bytes = cfg.smem_bytes
        self.reads_v_counts = cfg.has_mixed

    def storage(self):
        """Shared memory in the order of ``WarpConfig.smem_plan``."""
        kinds = {"plans": Int32, "sums": Float32, "pace": Int32, "barriers": Int64}
        fields = {}
        for name, nbytes in self.cfg.smem_plan.items():
            kind = kinds.get(name, Uint32)
            fields[name] = cute.struct.Align[cute.struct.MemRange[kind, 8 * nbytes // kind.width], SMEM_ALIGN]
        return cute.struct(type("Smem", (), {"__annotations__": fields}))

    def launch(self, q: cute.Tensor, view: View, results: Results, options: Options, grid: Grid, stream) -> None:
        splits, in_clusters = results.partials.shape[1], merge.is_cluster(self.cfg, results.partials)
        limits = softmax.Limits(*softmax.cap_constants(options.softcap_log2), options.window, options.sink_window)
        self.kernel(q, view, results, options.scale_log2, limits, *grid.divisors(splits)).launch(
            grid=grid.shape, block=(self.cfg.threads, 1, 1), stream=stream, min_blocks_per_mp=self.cfg.ctas_per_sm,
            preferred_smem_carveout=ALL_SMEM if self.cfg.ctas_per_sm > 1 else None,
            cooperative=(splits > 1) & ~in_clusters,  # a cluster waits for none but its own CTAs, which run at once
            cluster=(1, 1, cutlass.select_(in_clusters, splits, Int32(1))))

    @cute.kernel
    def kernel(self, q: cute.Tensor, view: View, results: Results, scale_log2: Float32, limits: softmax.Limits,
               ratio: cute.FastDivmodDivisorV2, row_blocks: cute.FastDivmodDivisorV2,
               splits: cute.FastDivmodDivisorV2):
        cfg = self.cfg
        call, partials = Call(q, view, ratio, row_blocks), results.partials
        me = fetch.lane_of(cute.arch.make_warp_uniform(cute.arch.warp_idx()), Uint32(cute.arch.lane_idx()))
        block = cute.arch.block_idx()
        rows = page_loop.rows_of(cfg, call, block)
        on_pace = page_loop.make_pace(cfg, partials)
        base = page_loop.load_base(on_pace)
        first = page_loop.page_place(block[2], partials.shape[1], me.warp)
        apart = page_loop.pages_apart(partials.shape[1], cfg.page_warps)
        ids, place, counts, words = load_inputs(cfg, call, rows, results.sink_logits, me, first, apart)
        smem = cutlass.memory.SmemAllocator().allocate(self.storage())
        ring = make_ring(cfg, smem.buffer.data_ptr(), smem.barriers.data_ptr(), me, view, rows)
        ids, counts = right_inputs(cfg, view, rows, place, counts, ids, first, apart, me)
        window = cfg.masks.row_window(counts, limits) if cfg.has_window else None
        work = page_loop.plan_walk(*counts[:5], rows.q_len, window, block[2], partials.shape[1], me.warp, cfg.warps,
                                   cfg.page_warps, splits, cfg.page_log2)
        pages = pages_of(cfg, view, place.row, rows, work, apart)
        if cutlass.const_expr(cfg.has_window):
            ids = fetch.page_ids(cfg, pages, Int32(0), me.lane)
        pages = start_pages(cfg, call, work, pages, ring, me, ids)
        words = cfg.arithmetic.steps.load_query(cfg, call, rows, me, words)

        plans = page_loop.plans_of(smem.plans.data_ptr(), me.warp, cfg.warps)
        with cute.arch.elect_one():
            plans.store(rows, work, place)
        on_pace = on_pace._replace(words=smem.pace.data_ptr())
        if cute.arch.thread_idx()[0] == 0:
            on_pace.begin(base)
        own_lane = Int32(fetch.fresh(me).lane)  # the merge works with the other
        outputs = combine.Outputs(*results, combine.block_of(block), block[2])
        inbox = None
        if cutlass.const_expr(cfg.has_clusters):
            inbox = merge.Inbox(smem.inbox.data_ptr(), smem.barriers.data_ptr() + cfg.warps * cfg.warp_barriers)
            merge.begin_cluster(cfg, inbox, outputs, rows)
        if ~merge.is_cluster(cfg, partials):
            combine.prefetch(outputs, rows, WARP * me.warp + own_lane)
        state = softmax.make_state(cfg)
        channels = (smem.channels if cutlass.const_expr(cfg.boost is not None) else smem.query).data_ptr()
        if cutlass.const_expr(cfg.arithmetic.has_books):
            channels = ring.books
        queries = cfg.arithmetic.steps.prepare_query(cfg, words, scale_log2, me, smem.query.data_ptr(), channels)
        cute.arch.sync_threads()
        if merge.is_cluster(cfg, partials):
            cute.arch.cluster_wait()  # all splits' inboxes are there; the first pages are still on their way
        # V behind all warps' first K: S is formed while it comes
        if (pages.count < FEW_PAGES) & ~fetch.is_single(cfg, pages):
            (fetch if cutlass.const_expr(cfg.loop is None) else cfg.loop).start(
                cfg, pages, ring, me, ids, range(1, cfg.slots))
        loop = page_loop if cutlass.const_expr(cfg.loop is None) else cfg.loop
        loop.packed_pages(cfg, pages, work, ring, me, ids, queries, rows, state, limits, on_pace, Int32(0), Int32(0))
        cfg.arithmetic.steps.finish(cfg, state, me, ring)
        # values of their own, as fetch.fresh has them
        block = tuple(cute.arch.make_warp_uniform(i) for i in block)
        own_query = smem.query.data_ptr() if cutlass.const_expr(cfg.arithmetic.has_books) else None
        me, rows = token_units(cfg, call, pages, plans, ring, me, queries, rows, state, scale_log2, limits,
                               partials.shape[1], own_query)
        merge.run(cfg, ring, inbox, me, rows, state, combine.Outputs(*results, combine.block_of(block), block[2]))


@cute.jit
def make_ring(cfg: cutlass.Constexpr[WarpConfig], buffer: cute.Pointer, barriers: cute.Pointer, me: fetch.Lane,
              view: View, rows: Rows) -> fetch.Ring:
    """The warp's ring, with barriers that its own lanes see; codebooks, if there are any, start on their way."""
    ring = fetch.ring_of(cfg, buffer, barriers, me.warp)
    with cute.arch.elect_one():
        fetch.init(cfg, ring)
    if cutlass.const_expr(cfg.arithmetic.has_books):
        ring = ring._replace(books=cfg.arithmetic.steps.place_books(cfg, buffer, barriers))
        if cute.arch.thread_idx()[0] == 0:
            cfg.arithmetic.steps.start_books(cfg, view.books, rows, ring.books)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_warp()
    return ring


def pages_of(cfg: WarpConfig, view: View, row: Int32, rows: Rows, work: Walk, apart: Int32) -> fetch.Pages:
    """The warp's pages, or pieces of pages, of a row of the table."""
    first, number = view.first_entry(row, rows.head_idx), work.first_page
    if cfg.k.cut == 1:
        first, number = first + number, 0
    return fetch.Pages(view.pool, view.table, first, work.num_pages, view.page_stride,
                       Int64(rows.head_idx) * Int64(view.head_stride), apart, Int32(ptx.EVICT_FIRST), number)


@cute.jit
def start_pages(cfg: cutlass.Constexpr[WarpConfig], call: Call, work: Walk, pages: fetch.Pages, ring: fetch.Ring,
                me: fetch.Lane, ids: Int32) -> fetch.Pages:
    """Fill the ring, or of few pages only the first slot; returns the pages with L2's policy for them."""
    if pages.count < FEW_PAGES:
        (fetch if cutlass.const_expr(cfg.loop is None) else cfg.loop).start(cfg, pages, ring, me, ids, range(1))
    policy = pages.policy
    if pages.count >= FEW_PAGES:
        # fewer read too little to choose; and in front of the branches this makes ptxas load page ids late
        policy = policy_of(cfg, call, work)
        (fetch if cutlass.const_expr(cfg.loop is None) else cfg.loop).start(
            cfg, pages._replace(policy=policy), ring, me, ids, range(cfg.slots))
    return pages._replace(policy=policy)


@cute.jit
def token_units(cfg: cutlass.Constexpr[WarpConfig], call: Call, pages: fetch.Pages, plans: Plans,
                ring: fetch.Ring, me: fetch.Lane, queries: fetch.Query, rows: Rows, state: softmax.State,
                scale_log2: Float32, limits: softmax.Limits, splits: Int32,
                own_query: cute.Pointer | None) -> tuple[fetch.Lane, Rows]:
    """Attend to this warp's 16-bit units, behind its last page; returns (me, rows), made again."""
    if cutlass.const_expr(cfg.arithmetic.has_true_scale and cfg.has_mixed):
        me = fetch.fresh(me)
    cute.arch.sync_warp()
    rows, work, place = plans.load(rows)
    source, warps = residual.token_rows(cfg, call, place.ring_row, rows.head_idx), cfg.warps * splits
    if cutlass.const_expr(cfg.has_mixed):
        pages = pages._replace(first=call.view.first_entry(place.row, rows.head_idx) + work.mixed_page)
        cfg.mixed_steps.run(cfg, pages, work, source, ring, me, queries, rows, state, limits, Int32(0), warps)
    residual.run(cfg, work, source, ring, me, call.q, rows, state, scale_log2, limits, warps, own_query)
    return me, rows


def policy_of(cfg: WarpConfig, call: Call, work: Walk) -> Int32:
    """L2's policy for this CTA's pages, as if all sequences were as long as its own."""
    blocks, batch, _ = cute.arch.grid_dim()
    return fetch.policy_of(cfg, (work.ring_start >> cfg.page_log2) * blocks * batch, call.row_blocks.divisor)


@cute.jit
def load_inputs(cfg: cutlass.Constexpr[WarpConfig], call: Call, rows: Rows, sink_logits: cute.Tensor, me: fetch.Lane,
                place: Int32, apart: Int32) -> tuple[Int32, CacheRow, tuple, cute.Tensor | None]:
    """(page ids, rows of the cache, counters, q words of the integer path), ids and counters as most calls have them
    (``right_inputs``). Page ids and pages are two reads in a row; all others go beside them. With a window, pages
    depend on the counters, so there are no ids yet.

    place: which of the sequence's pages is the warp's first; apart: from there to its next.
    """
    view, thread = call.view, cute.arch.thread_idx()[0]
    entries = view.table_h if view.table_h > 0 else view.table_b
    guess = Int32(ptx.opaque(rows.batch_idx))  # the row of most calls, as load_counts has it
    ids, first = Int32(0), view.first_entry(guess, rows.head_idx)
    if cutlass.const_expr(not cfg.has_window):
        ids = fetch.early_ids(cfg, view.table, first, entries, place, apart, me.lane)
        entries = entries * Int32(entries > WARP * apart)  # others are asked for later
    words = cfg.arithmetic.steps.prefetch_query(cfg, call.q, rows, me, thread)
    fetch.prefetch(view.table, first, entries, thread)
    fetch.prefetch(sink_logits, rows.head_idx * rows.ratio * Int32(sink_logits.shape[0] > 1), 1, thread)
    fetch.fence()  # before the counters are waited for
    ring_row = view.ring_rows[rows.batch_idx]
    row, counts = guess_counts(view, rows.batch_idx)
    return ids, CacheRow(row, ring_row), counts, words


@cute.jit
def right_inputs(cfg: cutlass.Constexpr[WarpConfig], view: View, rows: Rows, where: CacheRow, counts: tuple,
                 ids: Int32, place: Int32, apart: Int32, me: fetch.Lane) -> tuple[Int32, tuple]:
    """Page ids and counters of the row that the call reads, for those that were guessed."""
    counts = right_counts(view, rows.batch_idx, where.row, counts)
    if cutlass.const_expr(not cfg.has_window):
        if where.row != rows.batch_idx:
            pages = counts[2] >> page_loop.PAGE_LOG2
            first = view.first_entry(where.row, rows.head_idx)
            ids = fetch.early_ids(cfg, view.table, first, pages, place, apart, me.lane)
    return ids, counts
