"""V per token in two widths (boosted values): the first tokens that a page stores have more bits than the others.

Each token is a group of its own, and a warp owns 16 of them, so a warp packs as ``quantize_rows`` does, in the matrix
of codes of its tokens' width. Tokens come in the order in which they are stored; their metadata are one plane.
"""

from dataclasses import replace

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.device.columns import blocks_per_sm, load_words, store_words
from lowbit_attn.device.quantize_rows import RowMatrix, dequantize_column, quantize_column
from lowbit_attn.formats.spec import SideSpec


class RunMatrix:
    """Static geometry of both matrices of codes; a warp has one column tile of either."""

    @staticmethod
    def serves(side: SideSpec) -> bool:
        return side.wide is not None

    def __init__(self, side: SideSpec, dtype: str = ""):
        wide = side.wide
        self.wide = RowMatrix(replace(side, bits=wide.bits, codes=wide.codes, wide=None))
        self.narrow = RowMatrix(replace(side, wide=None))
        self.wide_tiles = wide.tokens // layout.TILE
        self.wide_unit, self.narrow_unit = (at // layout.RECORD_ALIGN for at in (wide.codes, side.codes))
        self.positions_unit = wide.positions // layout.RECORD_ALIGN
        self.threads, self.storage = self.narrow.threads, side.storage
        self.parts, self.part_rows, self.row_accesses = 1, layout.PAGE_TOKENS, self.narrow.row_accesses

    def blocks_per_sm(self, range_search, threads=None, more=0):
        """Blocks of m.threads, or of so many with ``more`` registers each, that must fit an SM together."""
        if self.narrow.bits == 1:
            return 1
        return blocks_per_sm(threads or self.threads, self.narrow.held, range_search, more)


@T.macro
def quantize_run(m, range_search, tile, pool, pool_meta, unit, codes_unit, column_tile, own_tile, lane):
    """A warp's 16 tokens -> its column tile ``own_tile`` of the codes at ``codes_unit``, and their metadata."""
    words = T.alloc_local((m.words,), "uint32")
    quantize_column(m, range_search, tile, pool_meta, unit, column_tile, lane, words)
    store_words(m, pool, codes_unit, own_tile, lane, words)


@T.macro
def quantize_runs(m, range_search, tile, part, pool, pool_meta, unit, tx):
    """The tile of one block's tokens in shared memory -> codes and metadata of the record at ``unit``."""
    column_tile, lane = tx // layout.LANES, tx % layout.LANES
    if column_tile < m.wide_tiles:
        quantize_run(m.wide, range_search, tile, pool, pool_meta, unit, unit + m.wide_unit, column_tile, column_tile,
                     lane)
    else:
        quantize_run(m.narrow, range_search, tile, pool, pool_meta, unit, unit + m.narrow_unit, column_tile,
                     column_tile - m.wide_tiles, lane)


@T.macro
def dequantize_run(m, pool, pool_meta, unit, codes_unit, put, column_tile, own_tile, lane):
    """The inverse of ``quantize_run``."""
    words = T.alloc_local((m.words,), "uint32")
    load_words(m, pool, codes_unit, own_tile, lane, words)
    dequantize_column(m, words, pool_meta, unit, put, column_tile, lane)


@T.macro
def dequantize_runs(m, pool, pool_meta, unit, put, part, tx):
    """The record at ``unit`` -> put, tokens as stored."""
    column_tile, lane = tx // layout.LANES, tx % layout.LANES
    if column_tile < m.wide_tiles:
        dequantize_run(m.wide, pool, pool_meta, unit, unit + m.wide_unit, put, column_tile, column_tile, lane)
    else:
        dequantize_run(m.narrow, pool, pool_meta, unit, unit + m.narrow_unit, put, column_tile,
                       column_tile - m.wide_tiles, lane)
