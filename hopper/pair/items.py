"""The even share (schedule/items.py) of two levels: an item is a block of query rows with its (sequence, KV head).

Its positions are the pages of the high level, each of which takes several, those of the low level, then the 16-bit
units of the high level (sinks and stage) and of the low one (stage and ring). A high page belongs to the run that has
its first position.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from lowbit_attn.hopper.common.abi import View, at_most, clamp_unit
from lowbit_attn.hopper.pair.config import HIGH_POSITIONS
from lowbit_attn.hopper.warp.page_loop import PAGE_LOG2, Walk, units_of

POSITIONS_LOG2 = HIGH_POSITIONS.bit_length() - 1


class LevelViews(NamedTuple):
    """Both levels of a cache, as ``View`` has one."""

    rows: cute.Tensor
    high: View
    low: View

    @property
    def n_tok(self) -> cute.Tensor:
        return self.low.n_tok

    @property
    def counters(self) -> tuple:
        """n_sink, n_qk, n_tok, ring_start of the high level, then of the low one."""
        return tuple(x for view in (self.high, self.low) for x in (view.n_sink, view.n_qk, view.n_tok, view.ring_start))


class LevelItem(NamedTuple):
    """An item's things, Int32: units are of 16 tokens."""

    high_pages: Int32
    low_pages: Int32
    high_units: Int32
    low_units: Int32

    @property
    def positions(self):
        """One at least: rows without tokens have a result too."""
        found = self.high_pages * HIGH_POSITIONS + self.low_pages + self.high_units + self.low_units
        return found + Int32(found == 0)


def level_item(*counts) -> LevelItem:
    """From ``LevelViews.counters`` of a row."""
    pages, units = [], []
    for n_sink, n_packed, n_tok, ring_start in (counts[:4], counts[4:]):
        pages.append(n_packed >> PAGE_LOG2)
        units.append(units_of(n_sink) + units_of(n_tok - n_sink - ring_start))
    return LevelItem(*pages, *units)


def walks_of(*counts, first, count) -> tuple[Walk, Walk]:
    """What a warp visits of positions ``first`` to ``first + count - 1`` of an item: of the high, of the low level."""
    item, end = level_item(*counts), first + count
    high = [at_most(position + HIGH_POSITIONS - 1 >> POSITIONS_LOG2, item.high_pages) for position in (first, end)]
    before, parts = item.high_pages * HIGH_POSITIONS, []
    for size in item[1:]:
        parts.append([clamp_unit(position - before, size) for position in (first, end)])
        before = before + size
    low, *units = parts
    return tuple(_walk(*own, *pages, *of_units)
                 for own, pages, of_units in zip((counts[:4], counts[4:]), (high, low), units))


def _walk(n_sink, n_packed, n_tok, ring_start, first_page, end_page, first_unit, end_unit) -> Walk:
    none = 0 * n_tok
    return Walk(first_page, end_page - first_page, n_packed >> PAGE_LOG2, none, none, first_unit, end_unit,
                units_of(n_sink), n_sink, n_tok - n_sink - ring_start, ring_start, none)
