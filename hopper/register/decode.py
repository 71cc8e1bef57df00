"""Decode attention over packed pages, register path: the kernel shell.

One CTA serves one (split, row block, KV head, sequence); more than ``cfg.rows`` query rows make several row blocks,
each of which reads the pages. Its warps share nothing but the query rows: each walks over its own pages (walk.py) with
a ring, a softmax and accumulators of its own, and they meet once, in merge.py.

    for each page:  wait K part -> S^T = K Q^T (scores) -> refill slot -> maximum, P (softmax)
                    wait V part -> O^T += V^T P^T (values) -> refill slot
    then:           O to true scale -> pages with V in 16 bit (third) -> 16-bit units (plain) -> merge

    ring      warp -> itself    full: 1 arrival + bytes      empty: the warp's own program order

Operands of m16n8k16: K and V^T are A, straight from masked words (raw codes, fp16 subnormals); query rows are N.
With an IntegerConfig packed pages take the arithmetic of hopper/integer (m16n8k32 on bytes); the rest is the same.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from lowbit_attn.hopper.integer import scores as integer_scores
from lowbit_attn.hopper.integer import values as integer_values
from lowbit_attn.hopper.register import load, masks, merge, plain, query, scores, softmax, third, values, walk
from lowbit_attn.hopper.register.config import WORD, RegisterConfig


class RegisterSm90:
    """The register-path kernel of one RegisterConfig; call it with the ABI's 21 arguments and a stream."""

    def __init__(self, cfg: RegisterConfig):
        self.cfg = cfg
        self.smem_bytes = cfg.smem_bytes

    def storage(self):
        """Shared memory in the order of ``RegisterConfig.smem_plan``."""
        plan = self.cfg.smem_plan
        buffer_words, query_words, barriers = plan["buffer"] // WORD, plan["query"] // WORD, plan["barriers"] // 8
        channel_words = self.cfg.channel_bytes // WORD

        @cute.struct
        class Smem:
            buffer: cute.struct.Align[cute.struct.MemRange[Uint32, buffer_words], 128]
            query: cute.struct.Align[cute.struct.MemRange[Uint32, query_words], 128]
            if self.cfg.boost:
                channels: cute.struct.Align[cute.struct.MemRange[Uint32, channel_words], 128]
            bars: cute.struct.Align[cute.struct.MemRange[Int64, barriers], 128]

        return Smem

    @cute.jit
    def __call__(self, q: cute.Tensor, pool: cute.Tensor, table: cute.Tensor, n_sink: cute.Tensor, n_qk: cute.Tensor,
                 n_qv: cute.Tensor, n_tok: cute.Tensor, sink_k: cute.Tensor, sink_v: cute.Tensor, ring_k: cute.Tensor,
                 ring_v: cute.Tensor, o_partial: cute.Tensor, lse_partial: cute.Tensor, softmax_scale_log2: Float32,
                 softcap_log2: Float32, window: Int32, sink_window: Int32, page_stride: Int32, head_stride: Int32,
                 table_b: Int32, table_h: Int32, stream):
        ratio = q.shape[2] // ring_k.shape[1]
        row_blocks = (ratio * q.shape[1] + self.cfg.rows - 1) // self.cfg.rows
        grid = (ring_k.shape[1] * row_blocks, q.shape[0], o_partial.shape[0])
        # without a third segment n_qv equals n_qk
        packed_v = n_qv if cutlass.const_expr(self.cfg.third_segment) else None
        self.kernel(q, pool, table, n_sink, n_qk, packed_v, n_tok, sink_k, sink_v, ring_k, ring_v, o_partial,
                    lse_partial, softmax_scale_log2, *masks.cap_constants(softcap_log2), window, sink_window,
                    page_stride, head_stride, table_b, table_h, ratio, row_blocks).launch(
            grid=grid, block=(self.cfg.threads, 1, 1), stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, q: cute.Tensor, pool: cute.Tensor, table: cute.Tensor, n_sink: cute.Tensor, n_qk: cute.Tensor,
               n_qv: cute.Tensor | None, n_tok: cute.Tensor, sink_k: cute.Tensor, sink_v: cute.Tensor,
               ring_k: cute.Tensor, ring_v: cute.Tensor, o_partial: cute.Tensor, lse_partial: cute.Tensor,
               scale_log2: Float32, cap_growth: Float32, cap_span: Float32, window: Int32, sink_window: Int32,
               page_stride: Int32, head_stride: Int32, table_b: Int32, table_h: Int32, ratio: Int32, row_blocks: Int32):
        cfg = self.cfg
        limits = masks.Limits(cap_growth, cap_span, window, sink_window)
        x, batch_idx, split_idx = cute.arch.block_idx()
        head_idx = Int32(Uint32(x) // Uint32(row_blocks))  # blocks that read the same pages are neighbours
        rows = query.make_rows(cfg, batch_idx, head_idx, x - head_idx * row_blocks, ratio, q.shape[1])
        lane = Uint32(cute.arch.lane_idx())
        me = load.Lane(cute.arch.make_warp_uniform(cute.arch.warp_idx()), lane, lane // 4, lane % 4)
        smem = cutlass.memory.SmemAllocator().allocate(self.storage())
        bars = smem.bars.data_ptr() + me.warp * (cfg.slots + 1)
        ring = load.Ring(smem.buffer.data_ptr(), bars, bars + cfg.slots)
        with cute.arch.elect_one():
            load.init(cfg, ring)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()

        packed_v = n_qk if cutlass.const_expr(n_qv is None) else n_qv
        work = walk.plan(n_sink[batch_idx], n_qk[batch_idx], packed_v[batch_idx], n_tok[batch_idx], rows.q_len,
                         window if cutlass.const_expr(cfg.has_window) else None, split_idx,
                         o_partial.shape[0], me.warp, cfg.warps)
        first_entry = batch_idx * table_b + head_idx * table_h
        pages = load.Pages(pool, table, first_entry + work.first_page, work.num_pages, page_stride,
                           Int64(head_idx) * Int64(head_stride))
        ids = load.start(cfg, pages, ring, me)
        cute.arch.griddepcontrol_launch_dependents()  # combine may take its place now; it waits for this grid's end
        state = softmax.make_state(cfg)
        channels = (smem.channels if cutlass.const_expr(cfg.boost is not None) else smem.query).data_ptr()
        words = query.load(cfg, q, rows, me)
        if cutlass.const_expr(cfg.is_integer):
            queries = integer_scores.prepare(cfg, words, scale_log2, me, channels)
        else:
            queries = query.prepare(cfg, words, scale_log2, me, smem.query.data_ptr(), channels)
        packed_pages(cfg, pages, work, ring, me, ids, queries, rows, state, limits)
        (integer_values.add_zeros if cfg.is_integer else values.true_scale)(cfg, state)

        def rows_of(x):
            return x.iterator.toint() + Int64((batch_idx * x.shape[1] + head_idx) * x.shape[2]) * cfg.row_bytes

        source = load.Plain(*(rows_of(x) for x in (sink_k, sink_v, ring_k, ring_v)), ring_k.shape[2], ring_v.shape[2])
        phase = Int32(0)
        if cutlass.const_expr(cfg.third_segment):
            pages = pages._replace(first=first_entry + work.third_page, count=work.num_third)
            phase = third.run(cfg, pages, work, source, ring, me, queries, rows, state, limits)
        plain.run(cfg, work, source, ring, me, q, rows, state, scale_log2, limits, phase)
        merge.run(cfg, ring, me, rows, state, merge.Partial(o_partial, lse_partial, split_idx))


@cute.jit
def packed_pages(cfg: cutlass.Constexpr[RegisterConfig], pages: load.Pages, work: walk.Walk, ring: load.Ring,
                 me: load.Lane, ids: Int32, queries: query.Query, rows: query.Rows, state: softmax.State,
                 limits: masks.Limits):
    """The warp's pages, one after the other; slot and phase follow the pieces."""
    slot, phase = Int32(0), Int32(0)
    new_max = cute.make_rmem_tensor(cfg.lane_rows, Float32)
    for page in cutlass.range(pages.count, unroll=1):
        cute.arch.mbarrier_wait(ring.full + slot, phase)
        piece = load.Piece(ring.buffer, me.warp, slot)
        # S = K Q^T
        found = (integer_scores if cfg.is_integer else scores).of_page(cfg, piece, me, queries)
        ids = load.refill(cfg, 0, pages, ring, me, page, slot, ids)
        slot, phase = load.advance(cfg, slot, phase)
        found = masks.of_page(cfg, found, work.first_page + page * cfg.warps, work, rows, limits, me)
        cute.arch.mbarrier_wait(ring.full + slot, phase)
        piece = load.Piece(ring.buffer, me.warp, slot)
        exponent = state.exponent[0]
        if cutlass.const_expr(not cfg.is_integer):
            exponent = values.page_exponent(cfg, piece, me, state)  # hides behind the softmax
        # P = exp2(S - maximum)
        maxima = softmax.page_max(cfg, found, state)
        for column in cutlass.range_constexpr(cfg.lane_rows):
            new_max[column] = maxima[column]
        softmax.exponentiate(cfg, found, maxima)
        # O += P V
        if cutlass.const_expr(cfg.is_integer):
            softmax.rescale(cfg, state, new_max, state.exponent[0])
            integer_values.accumulate(cfg, piece, me, state, found.acc)
        else:
            softmax.rescale(cfg, state, new_max, exponent)
            values.accumulate(cfg, piece, me, state, found.acc, exponent)
        ids = load.refill(cfg, 1, pages, ring, me, page, slot, ids)
        slot, phase = load.advance(cfg, slot, phase)
