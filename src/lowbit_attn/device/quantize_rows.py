"""K per channel and V per token: a group runs down the rows of the code matrix.

K per channel: rows = tokens; V per token: rows = channels. Either way a group is consecutive rows of one column, so
one text serves both. A warp owns one column tile (16 columns), and each lane holds exactly the elements whose codes
land in its own words, so packing needs no exchange.
"""

from functools import partial
from itertools import product
from math import gcd

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.device.columns import (
    COLUMNS,
    blocks_per_sm,
    column_errors_of,
    column_limits,
    column_values,
    is_writer,
    load_words,
    own_column,
    owner,
    span_columns,
    store_words,
)
from lowbit_attn.device.groups import (
    ROW_LANES,
    empty_word,
    load_meta,
    part_bits,
    static,
    store_meta,
    two_means,
    two_means_bits,
)
from lowbit_attn.device.tokens import ACCESS_HALVES, MATRICES, load_fragment, swizzled
from lowbit_attn.formats.spec import Kind, SideSpec


class RowMatrix:
    """Static geometry of one side's code matrix, seen from a lane."""

    @staticmethod
    def serves(side: SideSpec) -> bool:
        has_one_width = side.high is side.wide is None
        return has_one_width and (side.kind is Kind.CHANNEL or (side.kind is Kind.TOKEN and side.transposed))

    def __init__(self, side: SideSpec, dtype: str = ""):
        self.transposed, self.rows, self.cols = side.transposed, side.rows, side.cols
        self.bits, self.steps, self.storage = side.bits, side.steps, side.storage
        self.group_rows, self.groups = side.group_size, side.groups
        self.col_tiles = self.cols // layout.TILE
        self.threads = self.col_tiles * layout.LANES
        self.held = self.rows // 8  # rows of one column that one lane holds
        self.held_per_group = self.group_rows // 8
        self.words = layout.words_per_lane(self.rows, layout.TILE, self.bits)  # a lane's words of one column tile
        self.meta_at = side.meta
        self.store_words = gcd(self.words, layout.BLOCK_WORDS)  # that a lane stores at once
        self.head_dim = side.head_dim
        self.row_accesses = side.head_dim // ACCESS_HALVES  # of a token
        self.parts, self.part_rows = 1, layout.PAGE_TOKENS

    def blocks_per_sm(self, range_search, threads=None, more=0):
        """Blocks of m.threads, or of so many with ``more`` registers each, that must fit an SM together; two means take
        more registers than more blocks would leave."""
        return 1 if self.bits == 1 else blocks_per_sm(threads or self.threads, self.held, range_search, more)

    def word_and_shift(self, held, column):
        """(word within the column tile, bit position) of a lane's element: row 8*held + g, column 8*col8 + 2t + e."""
        word, _, byte, slot = layout.code_slot(8 * held, 8 * (column // 2) + column % 2, self.rows, self.bits)
        return word, 8 * byte + self.bits * slot

    def column_of(self, column_tile, t, column):
        return layout.TILE * column_tile + 8 * (column // 2) + 2 * t + column % 2

    def meta_offset(self, group, is_zero, col):
        """Byte offset of a column's scale or zero from the start of the side's planes."""
        if self.transposed:
            return self.meta_at + layout.token_meta_offset(group, is_zero, col)
        return self.meta_at + layout.channel_meta_offset(group, is_zero, col, self.head_dim)

    def place(self, column_tile, col8, first, lane):
        """Access that a lane names of four matrices of the tile of tokens: rows 8 * first .. of eight columns."""
        if self.transposed:
            token = layout.TILE * column_tile + 8 * col8 + lane % 8
            return swizzled(token, first + lane // 8, self.row_accesses)
        return swizzled(8 * first + lane, 2 * column_tile + col8, self.row_accesses)


@T.macro
def quantize_rows(m, range_search, tile, part, pool, pool_meta, unit, tx):
    """The tile of one block's tokens in shared memory -> codes and metadata of the record at ``unit``."""
    column_tile, lane = tx // layout.LANES, tx % layout.LANES
    words = T.alloc_local((m.words,), "uint32")
    quantize_column(m, range_search, tile, pool_meta, unit, column_tile, lane, words)
    store_words(m, pool, unit, column_tile, lane, words)


@T.macro
def quantize_column(m, range_search, tile, pool_meta, unit, column_tile, lane, words):
    """A column tile of the tokens in shared memory -> the lane's words of codes, and metadata of the record."""
    pairs = T.alloc_local((COLUMNS * m.held,), tile.dtype)
    for w in T.unroll(m.words):
        words[w] = T.uint32(empty_word(m.bits))
    for col8, i in product(static(2), static(m.held // MATRICES)):
        load_fragment(m.transposed, tile, m.place(column_tile, col8, MATRICES * i, lane), pairs,
                      col8 * m.held + MATRICES * i)
    for group in static(m.groups):
        quantize_group(m, range_search, pairs, group, words, pool_meta, unit, column_tile, lane)


@T.macro
def quantize_group(m, range_search, pairs, group, words, pool_meta, unit, column_tile, lane):
    """One group of each of four columns -> codes into the lane's words, metadata into the record."""
    rows = range(group * m.held_per_group, (group + 1) * m.held_per_group)
    low, high, scale, zero, inverse = (T.alloc_local((1,), "float32") for _ in range(5))
    column_limits(pairs, m.held, rows, lane, low, high)
    if m.bits == 1 and not range_search:
        pack_two_means(m, pairs, rows, lane, low, high, words, scale, zero)
    else:
        column_errors = partial(column_errors_of, m.bits) if range_search and m.bits < 8 else None
        span_columns(pairs, m.held, rows, lane, column_errors, T.float32(m.steps), m.storage, low, high, scale, zero,
                     inverse)
        for c in static(COLUMNS):
            from_zero, scaling = T.alloc_var("float32"), T.alloc_var("float32")
            from_zero = T.shfl_sync(zero[0], owner(c, lane))
            scaling = T.shfl_sync(inverse[0], owner(c, lane))
            scaling = scaling * T.float32(1 / (m.steps + 1))
            for i, x in zip(rows, column_values(pairs, m.held, rows, c)):
                word, shift = m.word_and_shift(i, c)
                words[word] = words[word] + (part_bits(
                    x, from_zero, scaling, T.float32(m.steps / (m.steps + 1)), T.float32(m.steps + 1))
                    << T.uint32(shift))
    if is_writer(lane):
        col = m.column_of(column_tile, lane % 4, own_column(lane))
        store_meta(pool_meta, unit, m.meta_offset(group, 0, col), scale[0], m.storage)
        store_meta(pool_meta, unit, m.meta_offset(group, 1, col), zero[0], m.storage)


@T.macro
def pack_two_means(m, pairs, rows, lane, low, high, words, scale, zero):
    """1 bit: codes of four columns into the lane's words; scale and zero of the own one."""
    for c in static(COLUMNS):
        bottom, top, s, z = (T.alloc_local((1,), "float32") for _ in range(4))
        bottom[0] = T.shfl_sync(low[0], owner(c, lane))
        top[0] = T.shfl_sync(high[0], owner(c, lane))
        values = column_values(pairs, m.held, rows, c)
        two_means([values], m.group_rows, ROW_LANES, bottom, top, m.storage, s, z)
        for i, x in zip(rows, values):
            word, shift = m.word_and_shift(i, c)
            words[word] = words[word] + (two_means_bits(x, s[0], z[0]) << T.uint32(shift))
        if own_column(lane) == c:
            scale[0] = s[0]
            zero[0] = z[0]


@T.macro
def dequantize_rows(m, pool, pool_meta, unit, put, part, tx):
    """The record at ``unit`` -> put, as ``quantize.put_floats`` has it."""
    column_tile, lane = tx // layout.LANES, tx % layout.LANES
    words = T.alloc_local((m.words,), "uint32")
    load_words(m, pool, unit, column_tile, lane, words)
    dequantize_column(m, words, pool_meta, unit, put, column_tile, lane)


@T.macro
def dequantize_column(m, words, pool_meta, unit, put, column_tile, lane):
    """A lane's words of a column tile -> put, two neighbouring columns at a time."""
    g, t = lane // 4, lane % 4
    for group in T.unroll(m.groups):
        for col8 in T.unroll(COLUMNS // 2):
            scale, zero = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
            for e in static(2):
                col = m.column_of(column_tile, t, 2 * col8 + e)
                scale[e] = load_meta(pool_meta, unit, m.meta_offset(group, 0, col))
                zero[e] = load_meta(pool_meta, unit, m.meta_offset(group, 1, col))
            first = m.column_of(column_tile, t, 2 * col8)
            for i in T.unroll(m.held_per_group):
                held = group * m.held_per_group + i
                values = [code_at(m, words, held, 2 * col8 + e) * scale[e] + zero[e] for e in range(2)]
                if m.transposed:
                    put(first, 8 * held + g, values[:1])
                    put(first + 1, 8 * held + g, values[1:])
                else:
                    put(8 * held + g, first, values)


def code_at(m, words, held, column):
    """The code of a lane's element, as fp32."""
    word, shift = m.word_and_shift(held, column)
    return T.cast((words[word] >> T.cast(shift, "uint32")) & T.uint32(m.steps), "float32")
