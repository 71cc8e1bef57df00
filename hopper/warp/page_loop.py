"""A warp's packed pages, one after the other, whatever its arithmetic and schedule are; and where they are."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from lowbit_attn.hopper.common.abi import Rows, View, block_rows, first_token
from lowbit_attn.hopper.warp import fetch, masks, pace, query, residual, softmax, unpack, walk
from lowbit_attn.hopper.warp.config import WarpConfig


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


@cute.jit
def packed_pages(cfg: cutlass.Constexpr[WarpConfig], pages: fetch.Pages, work: walk.Walk, ring: fetch.Ring,
                 me: unpack.Lane, ids: Int32, queries: query.Query, rows: Rows, state: softmax.State,
                 limits: masks.Limits, on_pace: pace.Pace, slot: Int32, phase: Int32) -> tuple[Int32, Int32]:
    """The warp's pages, one after the other; slot and phase follow the pieces, and go on behind the last."""
    come = Int32(0)
    for page in cutlass.range(pages.count, unroll=1):
        behind = pace.is_behind(cfg, on_pace, me, page, pages.count, come)
        ids = fetch.refill_early(cfg, 0, pages, ring, me, page, slot, ids, behind)
        ids = fetch.wait(cfg, 0, pages, ring, me, page, slot, phase, ids, behind)
        piece = unpack.Piece(ring.buffer, me.warp, slot)
        # S = K Q^T
        found = cfg.arithmetic.steps.scores(cfg, piece, me, queries)
        slot, phase = fetch.advance(cfg, slot, phase)
        found = masks.of_page(cfg, found, work.first_page + page * pages.apart, work, rows, limits, me)
        is_early = behind | fetch.has_come(ring, slot, phase)
        ids = fetch.refill_early(cfg, 1, pages, ring, me, page, slot, ids, is_early)
        maxima = softmax.exponentiate(cfg, found, state)  # hides behind V's way
        cfg.arithmetic.steps.before_values(cfg, state, maxima)
        ids = fetch.wait(cfg, 1, pages, ring, me, page, slot, phase, ids, is_early)
        come = pace.count_page(cfg, on_pace, me, page, pages.count)
        piece = unpack.Piece(ring.buffer, me.warp, slot)
        # O += P V
        arrival = fetch.Arrival(page, ring, phase, fetch.is_single(cfg, pages))
        cfg.arithmetic.steps.add_values(cfg, piece, me, state, found.acc, maxima, arrival)
        slot, phase = fetch.advance(cfg, slot, phase)
    return slot, phase
