"""Units of 16 tokens whose K is packed while their V is still in 16 bit, on O in true scale, one at a time.

A page is shared out over the warps, tile by tile. Every warp that takes a tile copies the whole K part, for the
metadata, and 16 rows of V into its ring, which no packed page uses any more; the page's own part of V is never read.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from lowbit_attn import layout
from lowbit_attn.hopper.common.abi import Rows
from lowbit_attn.hopper.warp import fetch, residual, softmax
from lowbit_attn.hopper.warp.config import UNIT_TOKENS, WORD, SidePlan, WarpConfig
from lowbit_attn.hopper.warp.fetch import Lane, Pages, Ring
from lowbit_attn.hopper.warp.page_loop import MIXED_UNITS, Walk
from lowbit_attn.hopper.warp.softmax import State


@cute.jit
def run(cfg: cutlass.Constexpr[WarpConfig], pages: Pages, work: Walk, source: residual.TokenRows, ring: Ring, me: Lane,
        queries: fetch.Query, rows: Rows, state: State, limits: softmax.Limits, phase: Int32,
        apart: Int32 | int) -> Int32:
    """Units first_mixed, first_mixed + apart, ...; returns the parity that ring.unit_full waits for next.

    pages.first: entry of page ``work.mixed_page``; phase: the parity that it waits for first.
    """
    for i in cutlass.range(work.first_mixed, work.num_mixed, apart, unroll=1):
        page, tile = unit_place(Uint32(i))
        first_token = work.mixed_page * layout.PAGE_TOKENS + i * UNIT_TOKENS
        load_unit(cfg, pages, source, Int32(page), first_token, ring, me)
        cute.arch.mbarrier_wait(ring.unit_full, phase)
        phase = phase ^ 1
        piece = fetch.Piece(ring.buffer, me.warp, Int32(0))
        found = cfg.arithmetic.steps.scores(cfg, piece, me, queries, tile)
        if cutlass.const_expr(cfg.features):
            found = cfg.masks.mask_tokens(cfg, found, work.first_seen - first_token, rows, limits, me)
        probabilities(cfg, found, state)
        operand = residual.probabilities(cfg, found.acc, 0)
        residual.add_values(cfg, ring, me, operand, cfg.mixed_row, cfg.mixed_row + UNIT_TOKENS, state, None)
    return phase


def unit_place(i):
    """(page of the segment, row tile of K) of unit ``i``."""
    return i // MIXED_UNITS, i % MIXED_UNITS


def probabilities(cfg: WarpConfig, found: softmax.Scores, state: State) -> None:
    """S becomes P; O and the sums go to the new maximum."""
    for column, top in enumerate(softmax.exponentiate(cfg, found, state)):
        softmax.apply_alpha(cfg, state, column, top)
    softmax.add_sums(cfg, state, found.acc)


@cute.jit
def load_unit(cfg: cutlass.Constexpr[WarpConfig], pages: Pages, source: residual.TokenRows, page: Int32,
              first_token: Int32, ring: Ring, me: Lane):
    """The page's K part to slot 0 and, by lanes 0..15, a row of V each behind it; one phase of ring.unit_full."""
    words = cfg.row_bytes // WORD
    target = residual.row_view(cfg, ring, Uint32, words, cfg.mixed_row + UNIT_TOKENS)
    on_unit = ring._replace(full=ring.unit_full)
    cute.arch.sync_warp()  # all lanes have read what lies in the ring
    fetch.issue(cfg, cfg.k, pages, on_unit, me.warp, Int32(0), pages.table[pages.first + page],
               UNIT_TOKENS * cfg.row_bytes)
    cute.arch.sync_warp()
    if me.lane < UNIT_TOKENS:
        row = value_row(first_token, source.slots_v, Int32(me.lane))
        cute.copy(cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Uint32),
                  fetch.words_at(source.ring_v + Int64(row) * cfg.row_bytes, cfg.row_bytes, "gmem"),
                  target[None, 0, cfg.mixed_row + Int32(me.lane), me.warp], mbar_ptr=ring.unit_full)


def value_row(first_token, slots, lane):
    """Slot of token ``first_token`` + lane: rings hold whole blocks of 64 tokens, so 16 aligned ones never wrap."""
    return first_token % slots + lane


def tile_codes(cfg: WarpConfig, side: SidePlan, piece: fetch.Piece, me: Lane, first_tile: int, tile: Uint32,
               skip=0) -> dict[int, Uint32]:
    """``fetch.codes`` of one row tile, chosen at run time, of the column tile from ``first_tile`` on.

    They stand where those of row tile 0 would: ``operand`` of first_tile, and the powers of row tile 0.
    """
    first, width = side.words_of(first_tile), max(1, side.words_of(1))
    view = fetch.part_view(cfg, piece, side.codes, width,
                     layout.plane_bytes(side.rows, side.cols, side.bits) // (width * WORD))
    at = tile_access(side, first_tile, tile, width) + side.code_access(0, width, me.lane)
    values = fetch.read(view, Int32(at) + skip * side.block_accesses(width))
    return {first + i: value >> tile_shift(side, tile) if side.bits < 4 else value for i, value in enumerate(values)}


def tile_access(side: SidePlan, first_tile: int, tile, width: int):
    """Index of lane 0's access of ``width`` words with row tile ``tile`` of the column tile from ``first_tile`` on."""
    own = tile // layout.tiles_per_word(side.bits) * width  # within the column tile: whole blocks, or of one block
    return side.code_access(side.words_of(first_tile), width, 0) + side.code_access(own, width, 0)


def tile_shift(side: SidePlan, tile):
    """How far to the right the tile's codes go, to where the word has its first tile's."""
    return tile % layout.tiles_per_word(side.bits) * (2 * side.bits)
