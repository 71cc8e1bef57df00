"""What one warp of one CTA visits: its packed pages, then its share of 16-bit units.

A unit has 16 tokens: of pages whose K is packed while their V is in 16 bit (mixed.py), then of sinks and residual
(residual.py). The units are dealt one by one to the warps of all splits, the late warps first: they have fewer pages.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from lowbit_attn import layout
from lowbit_attn.hopper.common.abi import Rows, at_most
from lowbit_attn.hopper.warp.config import PLAN_WORDS, UNIT_TOKENS

MIXED_UNITS = layout.PAGE_TOKENS // UNIT_TOKENS  # of a page
PAGE_LOG2, UNIT_LOG2 = (n.bit_length() - 1 for n in (layout.PAGE_TOKENS, UNIT_TOKENS))  # a shift is one instruction


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


def plans(place: cute.Pointer, warp_idx: Int32, warps: int) -> Plans:
    """The plan of one warp; place: int32 of the CTA."""
    return Plans(cute.make_tensor(place, cute.make_layout((PLAN_WORDS, warps)))[None, warp_idx])


def plan(n_sink, n_qk, n_qv, n_tok, ring_start, q_len, window, split_idx, num_splits, warp_idx, warps: int,
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
