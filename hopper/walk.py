"""The sequence of tiles of one CTA, written once: every role loops over the same counts.

Packed pages of this split first, then (last split only) the 16-bit tiles: sinks, then the residual ring.
A 16-bit tile holds up to 128 tokens and passes through the packed stages in UNITS pieces, always all.
"""

from typing import NamedTuple

from cutlass import Int32

from lowbit_attn.hopper.config import TILE_N


class Walk(NamedTuple):
    """Run-time counts of one CTA, Int32."""

    first_page: Int32
    num_pages: Int32
    sink_tiles: Int32
    plain_tiles: Int32  # 16-bit tiles, sinks included
    n_sink: Int32
    n_residual: Int32
    n_packed: Int32


class PlainTile(NamedTuple):
    """A 16-bit tile: tokens ``start .. start + live - 1`` of its segment; is_sink is 1 or 0."""

    start: Int32
    live: Int32
    is_sink: Int32


def plan(n_sink, n_packed, n_tok, split_idx, num_splits) -> Walk:
    """The walk of split ``split_idx`` of ``num_splits`` over a sequence with these token counts."""
    pages = n_packed // TILE_N
    first = pages * split_idx // num_splits
    is_last = Int32(split_idx == num_splits - 1)
    n_residual = is_last * (n_tok - n_sink - n_packed)
    n_sink = is_last * n_sink
    sink_tiles = (n_sink + TILE_N - 1) // TILE_N
    return Walk(first, pages * (split_idx + 1) // num_splits - first, sink_tiles,
                sink_tiles + (n_residual + TILE_N - 1) // TILE_N, n_sink, n_residual, n_packed)


def plain_tile(walk: Walk, i) -> PlainTile:
    """16-bit tile ``i`` of the walk, 0 <= i < plain_tiles; at least one token is live."""
    is_sink = Int32(i < walk.sink_tiles)
    start = (i - (1 - is_sink) * walk.sink_tiles) * TILE_N
    left = is_sink * walk.n_sink + (1 - is_sink) * walk.n_residual - start
    return PlainTile(start, at_most(left, TILE_N), is_sink)


def at_most(x, limit: int):
    """min(x, limit), in operators that Python ints, numpy and the DSL's integers share."""
    return x + (limit - x) * Int32(x > limit)


def clamp_unit(x, limit: int):
    """x clamped to 0 .. limit."""
    return at_most(x * Int32(x > 0), limit)
