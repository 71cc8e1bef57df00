"""The sequence of tiles of one CTA, written once: every role loops over the same counts.

Packed pages of this split first, then (last split only) pages whose V is still in 16 bit, then 16-bit tiles: sinks,
then the residual ring. K and V have a walk each, tile for tile side by side: V has its 16-bit pages among the 16-bit
tiles, before the sinks. A 16-bit tile holds up to 128 tokens and passes through the packed stages in UNITS pieces,
always all.
"""

from typing import NamedTuple

from cutlass import Int32

from lowbit_attn.hopper.common.abi import at_most
from lowbit_attn.hopper.tile.config import TILE_N


class TileWalk(NamedTuple):
    """Run-time counts of one CTA and side, Int32."""

    first_page: Int32
    num_pages: Int32  # of this side's packed parts
    mixed_tiles: Int32  # V: 16-bit tiles that stand beside packed pages of K; K: 0
    sink_tiles: Int32
    token_tiles: Int32  # 16-bit tiles, all kinds
    n_sink: Int32
    n_residual: Int32
    ring_start: Int32  # number of the residual's first token among those that are no sinks
    packed_start: Int32  # position of packed token 0


class TokenTile(NamedTuple):
    """A 16-bit tile: tokens ``start .. start + live - 1`` of its segment; is_sink is 1 or 0.

    Of the residual, token 0 is the first that K has not packed: tokens of V's 16-bit pages count from below 0.
    """

    start: Int32
    live: Int32
    is_sink: Int32


def plan(n_sink, n_qk, n_qv, n_tok, ring_start, hidden_pages, split_idx, num_splits) -> tuple[TileWalk, TileWalk]:
    """K's and V's walk of split ``split_idx`` of ``num_splits`` over a sequence with these token counts.

    n_qk, n_qv: packed tokens of K and of V, n_qv <= n_qk; ring_start: those that left the ring; hidden_pages: the first
    pages, which no query sees.
    """
    pages = n_qv // TILE_N
    hidden = at_most(hidden_pages, pages)
    hidden_mixed = at_most(hidden_pages, n_qk // TILE_N) - hidden
    seen = pages - hidden
    first = seen * split_idx // num_splits
    count = seen * (split_idx + 1) // num_splits - first
    is_last = Int32(split_idx == num_splits - 1)
    mixed = is_last * (n_qk // TILE_N - pages - hidden_mixed)
    n_residual = is_last * (n_tok - n_sink - ring_start)
    sink_tiles = is_last * tiles_of(n_sink)
    tiles = sink_tiles + tiles_of(n_residual)
    # where pages of the mixed segment are hidden, all before them are, so that K's pages are one run
    first = first + hidden + hidden_mixed
    common = (is_last * n_sink, n_residual, ring_start, n_sink)
    return (TileWalk(first, count + mixed, Int32(0), sink_tiles, tiles, *common),
            TileWalk(first, count, mixed, sink_tiles, tiles + mixed, *common))


def hidden_pages(n_sink, n_tok, q_len, window):
    """Pages from the first on that lie left of the window of every query: query 0 sees most to the left."""
    tokens = n_tok - q_len + 1 - window - n_sink
    return tokens * Int32(tokens > 0) // TILE_N


def tiles_of(tokens):
    return (tokens + TILE_N - 1) // TILE_N


def token_tile_of(walk: TileWalk, i) -> TokenTile:
    """16-bit tile ``i`` of the walk, 0 <= i < token_tiles; at least one token is live."""
    i = i - walk.mixed_tiles
    is_sink = Int32(i < walk.sink_tiles) * Int32(i >= 0)
    start = (i - (1 - is_sink) * Int32(i >= 0) * walk.sink_tiles) * TILE_N
    left = is_sink * walk.n_sink + (1 - is_sink) * walk.n_residual - start
    return TokenTile(start, at_most(left, TILE_N), is_sink)
