"""Pages whose K is packed while their V is still in 16 bit: few, after O came to true scale, one at a time.

Both sides come through the warp's ring, which no packed page uses any more, on the barrier of the 16-bit units: K's
part in slot 0, then, over it, rows of V. The pages' own parts of V are never read.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from lowbit_attn import layout
from lowbit_attn.hopper.register import load, masks, plain, query, scores, softmax
from lowbit_attn.hopper.register.config import WARP, WORD, RegisterConfig
from lowbit_attn.hopper.register.load import Lane, Pages, Plain, Ring
from lowbit_attn.hopper.register.softmax import State
from lowbit_attn.hopper.register.walk import Walk
from lowbit_attn.hopper.walk import Rows


@cute.jit
def run(cfg: cutlass.Constexpr[RegisterConfig], pages: Pages, work: Walk, source: Plain, ring: Ring, me: Lane,
        queries: query.Query, rows: Rows, state: State, limits: masks.Limits) -> Int32:
    """The warp's pages third_page, third_page + warps, ...; returns the parity that ring.unit_full waits for next."""
    on_unit = ring._replace(full=ring.unit_full)
    phase = Int32(0)
    for i in cutlass.range(pages.count, unroll=1):
        cute.arch.sync_warp()  # all lanes have read what lies in the ring
        load.issue(cfg, cfg.k, pages, on_unit, me.warp, Int32(0), pages.table[pages.first + i * cfg.warps])
        cute.arch.mbarrier_wait(ring.unit_full, phase)
        phase = phase ^ 1
        page = work.third_page + i * cfg.warps
        found = scores.of_page(cfg, load.Piece(ring.buffer, me.warp, Int32(0)), me, queries)
        found = masks.of_page(cfg, found, page, work, rows, limits, me)
        probabilities(cfg, found, state)
        first_token = page * layout.PAGE_TOKENS
        for first in cutlass.range_constexpr(0, layout.PAGE_TOKENS, cfg.third_tokens):
            load_values(cfg, source, first_token + first, ring, me)
            cute.arch.mbarrier_wait(ring.unit_full, phase)
            phase = phase ^ 1
            add_values(cfg, ring, me, found.acc, first, state)
    return phase


def probabilities(cfg: RegisterConfig, found: scores.Scores, state: State) -> None:
    """S becomes P; O and the sums go to the new maximum."""
    maxima = softmax.page_max(cfg, found, state)
    softmax.exponentiate(cfg, found, maxima)
    for column, top in enumerate(maxima):
        softmax.apply_alpha(cfg, state, column, top, None)
    softmax.add_sums(cfg, state, found.acc)


@cute.jit
def load_values(cfg: cutlass.Constexpr[RegisterConfig], source: Plain, first_token: Int32, ring: Ring, me: Lane):
    """``third_tokens`` rows of V from ``first_token`` on, one lane a row, to the start of the ring."""
    words = cfg.row_bytes // WORD
    rows = plain.row_view(cfg, ring, Uint32, words, cfg.third_tokens)
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(ring.unit_full, cfg.third_tokens * cfg.row_bytes)
    cute.arch.sync_warp()
    for first in cutlass.range_constexpr(0, cfg.third_tokens, WARP):
        row = value_row(first_token + first, source.slots_v, Int32(me.lane))
        address = cute.make_ptr(Uint32, source.ring_v + Int64(row) * cfg.row_bytes, cute.AddressSpace.gmem,
                                assumed_align=16)
        cute.copy(cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Uint32),
                  cute.make_tensor(address, cute.make_layout(words)), rows[None, 0, first + Int32(me.lane), me.warp],
                  mbar_ptr=ring.unit_full)


def value_row(first_token, slots, lane):
    """Slot of token ``first_token`` + lane: rings hold whole blocks of 64 tokens, so 32 aligned ones never wrap."""
    return first_token % slots + lane


def add_values(cfg: RegisterConfig, ring: Ring, me: Lane, p: cute.Tensor, first: int, state: State) -> None:
    """O += V P over the rows in the ring, tokens ``first`` and on of the page; p: fp32 accumulators of S^T."""
    for token in range(0, cfg.third_tokens, layout.TILE):
        operand = plain.probabilities(cfg, p, (first + token) // layout.TILE)
        plain.add_values(cfg, ring, me, operand, token, cfg.third_tokens, state, None)
