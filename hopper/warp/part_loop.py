"""``page_loop.packed_pages`` for pages that come in two parts of each side: what a page costs beside its lookups and
multiplies (its mean, maxima, weights, the pace) is paid once for both. Parts are a loop, not written out: a page's
instructions must fit into the caches.

    K of tokens 0 .. 63, K of tokens 64 .. 127, V of tokens 0 .. 63, V of tokens 64 .. 127; a ring of two slots
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from lowbit_attn.hopper.common.abi import Rows
from lowbit_attn.hopper.warp import fetch, page_loop, softmax
from lowbit_attn.hopper.warp.config import WARP, WarpConfig
from lowbit_attn.hopper.warp.fetch import Lane, Pages, Ring

PARTS = 2


@cute.jit
def packed_pages(cfg: cutlass.Constexpr[WarpConfig], pages: Pages, work: page_loop.Walk, ring: Ring, me: Lane,
                 ids: Int32, queries: fetch.Query, rows: Rows, state: softmax.State, limits: softmax.Limits,
                 on_pace: page_loop.Pace, slot: Int32, phase: Int32) -> tuple[Int32, Int32]:
    """The warp's pages, one after the other; slot and phase follow the pieces, and go on behind the last."""
    assert cfg.parts == PARTS == cfg.slots
    come = Int32(0)
    both = cute.make_rmem_tensor((4, PARTS * cfg.k.row_tiles), Float32)
    both.fill(0.0)
    for page in cutlass.range(pages.count, unroll=1):
        page_loop.is_behind(cfg, on_pace, me, page, pages.count, come)
        # S = K Q^T
        for part in cutlass.range(PARTS, unroll=1):
            ids = wait(cfg, 0, pages, ring, me, page, part, slot, phase, ids)
            acc = cfg.arithmetic.steps.part_scores(cfg, fetch.Piece(ring.buffer, me.warp, slot), me, queries)
            shift(both)
            copy(acc, 0, both, cfg.k.row_tiles)
            slot, phase = fetch.advance(cfg, slot, phase)
        last = fetch.Piece(ring.buffer, me.warp, slot_before(cfg, slot))
        found = cfg.arithmetic.steps.with_mean(cfg, last, me, queries, both)
        if cutlass.const_expr(cfg.features):
            first_token = (work.first_page + page * pages.apart) * (1 << cfg.page_log2)
            found = cfg.masks.mask_tokens(cfg, found, work.first_seen - first_token, rows, limits, me)
        maxima = softmax.exponentiate(cfg, found, state)
        come = page_loop.count_page(cfg, on_pace, me, page, pages.count)
        # O += P V
        for part in cutlass.range(PARTS, unroll=1):
            p = cute.make_rmem_tensor((4, cfg.k.row_tiles), Float32)
            copy(both, 0, p, 0)
            shift(both)
            ids = wait(cfg, 1, pages, ring, me, page, part, slot, phase, ids)
            arrival = fetch.Arrival(page, ring, phase, fetch.is_single(cfg, pages))
            cfg.arithmetic.steps.add_values(cfg, fetch.Piece(ring.buffer, me.warp, slot), me, state, p, maxima, arrival)
            slot, phase = fetch.advance(cfg, slot, phase)
    return slot, phase


def copy(source: cute.Tensor, first: int, target: cute.Tensor, at: int) -> None:
    """Columns of accumulators from ``first`` on, as many as the smaller has, to ``at`` and following."""
    for column in range(min(cute.size(source, mode=[1]), cute.size(target, mode=[1]))):
        for i in range(4):
            target[i, at + column] = source[i, first + column]


def shift(both: cute.Tensor) -> None:
    """The second part takes the place of the first: places of registers are constants."""
    count = cute.size(both, mode=[1]) // PARTS
    for column in range(count):
        for i in range(4):
            both[i, column] = both[i, count + column]


def slot_before(cfg: WarpConfig, slot: Int32) -> Int32:
    return slot - 1 + cfg.slots * Int32(slot == 0)


@cute.jit
def wait(cfg: cutlass.Constexpr[WarpConfig], side: cutlass.Constexpr[int], pages: Pages, ring: Ring, me: Lane,
         page: Int32, part: Int32, slot: Int32, phase: Int32, ids: Int32) -> Int32:
    """Wait for a part of a page in ``slot``, and start the copy of the next one to the slot before. Returns the ids."""
    cute.arch.mbarrier_wait(ring.full + slot, phase)
    cute.arch.sync_warp()  # all lanes have read what lies there
    other = slot_before(cfg, slot)
    if part + 1 < PARTS:
        if cutlass.const_expr(side == 1):
            issue(cfg, side, pages, ring, me, page, part + 1, other, ids)
        elif page > 0:  # else ``start`` did
            issue(cfg, side, pages, ring, me, page, part + 1, other, ids)
    else:
        later = page + side
        if later < pages.count:
            if cutlass.const_expr(side == 1):
                if later % WARP == 0:
                    ids = fetch.page_ids(cfg, pages, later, me.lane)
            issue(cfg, 1 - side, pages, ring, me, later, Int32(0), other, ids)
    return ids


@cute.jit
def start(cfg: cutlass.Constexpr[WarpConfig], pages: Pages, ring: Ring, me: Lane, ids: Int32,
          pieces: cutlass.Constexpr[range]):
    """``fetch.start``: the first two pieces are both parts of K."""
    for part in cutlass.range_constexpr(pieces.start, pieces.stop):
        if pages.count > 0:
            issue(cfg, 0, pages, ring, me, Int32(0), Int32(part), Int32(part), ids)


def issue(cfg: WarpConfig, side: int, pages: Pages, ring: Ring, me: Lane, page: Int32, part: Int32, slot: Int32,
          ids: Int32) -> None:
    """Start the copy of a part of a page."""
    page_id = cute.arch.shuffle_sync(ids, page % WARP)
    cfg.arithmetic.steps.copy_piece(cfg, cfg.v if side else cfg.k, pages, ring, me.warp, slot, PARTS * page_id + part)
