"""Quantize-and-pack and its inverse for sides whose groups run down the rows of the code matrix.

K per channel: rows = tokens; V per token: rows = channels. Either way a group is consecutive rows of one column, so
one kernel text serves both; K per token, whose groups run along the columns, is in ``quantize_token``, K with boosted
channels in ``quantize_boost``. One block is one page of one KV head; a warp owns one column tile (16 columns), and
each lane holds exactly the elements whose codes land in its own words, so packing needs no exchange. The arithmetic is
``formats.affine`` step by step, without contraction (-fmad=false), so the bytes are the reference's.
"""

from functools import partial
from itertools import product
from math import gcd

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.device.columns import (
    COLUMNS,
    blocks_per_sm,
    column_limits,
    column_values,
    is_writer,
    own_column,
    owner,
    plain_errors,
    span_columns,
    store_words,
)
from lowbit_attn.device.groups import (
    EXACT,
    ROW_LANES,
    UNIT_WORDS,
    code_bits,
    empty_word,
    static,
    store_meta,
    two_means,
    two_means_bits,
)
from lowbit_attn.device.quantize_boost import boosted_dequantize_kernel, boosted_quantize_kernel, plain_side
from lowbit_attn.device.quantize_token import token_dequantize_kernel, token_quantize_kernel
from lowbit_attn.device.tilelang_kernel import TileKernel
from lowbit_attn.device.tokens import ACCESS_HALVES, MATRICES, load_fragment, load_tokens, swizzled
from lowbit_attn.formats.kitty import Boosted
from lowbit_attn.formats.uniform import PerChannel


class CodeMatrix:
    """Static geometry of one side's code matrix, seen from a lane."""

    def __init__(self, side, head_dim: int):
        self.transposed = not isinstance(side, PerChannel)
        self.rows = head_dim if self.transposed else layout.PAGE_TOKENS
        self.cols = layout.PAGE_TOKENS if self.transposed else head_dim
        self.bits = side.bits
        self.steps = (1 << side.bits) - 1
        self.storage = str(side.storage).removeprefix("torch.")
        self.group_rows = side.group_size or head_dim
        self.groups = self.rows // self.group_rows
        self.col_tiles = self.cols // layout.TILE
        self.threads = self.col_tiles * layout.LANES
        self.held = self.rows // 8  # rows of one column that one lane holds
        self.held_per_group = self.group_rows // 8
        self.words = layout.words_per_lane(self.rows, layout.TILE, self.bits)  # a lane's words of one column tile
        self.meta_bytes = side.plane_sizes(head_dim)["codes"]  # metadata follow the codes
        self.store_words = gcd(self.words, layout.BLOCK_WORDS)  # that a lane stores at once
        self.head_dim = head_dim
        self.row_accesses = head_dim // ACCESS_HALVES  # of a token
        self.accesses = layout.PAGE_TOKENS * self.row_accesses

    def word_and_shift(self, held, column):
        """(word within the column tile, bit position) of a lane's element: row 8*held + g, column 8*col8 + 2t + e."""
        word, _, byte, slot = layout.code_slot(8 * held, 8 * (column // 2) + column % 2, self.rows, self.bits)
        return word, 8 * byte + self.bits * slot

    def column_of(self, column_tile, t, column):
        return layout.TILE * column_tile + 8 * (column // 2) + 2 * t + column % 2

    def meta_offset(self, group, is_zero, col):
        """Byte offset of a column's scale or zero from the start of the side's planes."""
        if self.transposed:
            return self.meta_bytes + layout.token_meta_offset(group, is_zero, col)
        return self.meta_bytes + layout.channel_meta_offset(group, is_zero, col, self.head_dim)

    def place(self, column_tile, col8, first, lane):
        """Access that a lane names of four matrices of the tile of tokens: rows 8 * first .. of eight columns."""
        if self.transposed:
            token = layout.TILE * column_tile + 8 * col8 + lane % 8
            return swizzled(token, first + lane // 8, self.row_accesses)
        return swizzled(8 * first + lane, 2 * column_tile + col8, self.row_accesses)


def runs_along_columns(side) -> bool:
    """Whether a group is consecutive columns of one row (K per token); else rows of one column."""
    return not isinstance(side, PerChannel) and not side.transposed


@T.macro
def quantize_rows(m, range_search, tile, pool, pool_meta, unit, tx):
    """The tile of one block's tokens in shared memory -> codes and metadata of the record at ``unit``."""
    column_tile, lane = tx // layout.LANES, tx % layout.LANES
    words = T.alloc_local((m.words,), "uint32")
    pairs = T.alloc_local((COLUMNS * m.held,), tile.dtype)
    for w in T.unroll(m.words):
        words[w] = T.uint32(empty_word(m.bits))
    for col8, i in product(static(2), static(m.held // MATRICES)):
        load_fragment(m.transposed, tile, m.place(column_tile, col8, MATRICES * i, lane), pairs,
                      col8 * m.held + MATRICES * i)
    for group in static(m.groups):
        quantize_group(m, range_search, pairs, group, words, pool_meta, unit, column_tile, lane)
    store_words(m, pool, unit, column_tile, lane, words)


@T.macro
def quantize_group(m, range_search, pairs, group, words, pool_meta, unit, column_tile, lane):
    """One group of each of four columns -> codes into the lane's words, metadata into the record."""
    rows = range(group * m.held_per_group, (group + 1) * m.held_per_group)
    low, high, scale, zero, inverse = (T.alloc_local((1,), "float32") for _ in range(5))
    column_limits(pairs, m.held, rows, lane, low, high)
    if m.bits == 1 and not range_search:
        pack_two_means(m, pairs, rows, lane, low, high, words, scale, zero)
    else:
        column_errors = partial(plain_errors, m.bits) if range_search and m.bits < 8 else None
        span_columns(pairs, m.held, rows, lane, column_errors, T.float32(m.steps), m.storage, low, high, scale, zero,
                     inverse)
        for c in static(COLUMNS):
            from_zero, scaling = T.alloc_var("float32"), T.alloc_var("float32")
            from_zero = T.shfl_sync(zero[0], owner(c, lane))
            scaling = T.shfl_sync(inverse[0], owner(c, lane))
            for i, x in zip(rows, column_values(pairs, m.held, rows, c)):
                word, shift = m.word_and_shift(i, c)
                words[word] = words[word] + (code_bits(x, from_zero, scaling, T.float32(m.steps)) << T.uint32(shift))
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


def quantize_kernel(side, head_dim: int, dtype: str, range_search: bool) -> TileKernel:
    """Blocks x [n, num_heads_kv, 128, head_dim] -> one side's codes and metadata in pages int32 [n] of the pool.

    pool: uint32 [units, 32] and its uint16 view [units, 64], in units of 128 bytes, from the first record's part of
    this side on; page_stride and head_stride in the same units.
    """
    side = plain_side(side, head_dim)
    if isinstance(side, Boosted):
        return boosted_quantize_kernel(side, head_dim, dtype, range_search)
    if runs_along_columns(side):
        return token_quantize_kernel(side, head_dim, dtype, range_search)
    m = CodeMatrix(side, head_dim)
    n, heads, units = T.dynamic("n"), T.dynamic("heads"), T.dynamic("units")

    @T.prim_func
    def quantize(
        x: T.Tensor((n, heads, layout.PAGE_TOKENS, head_dim), dtype),
        pages: T.Tensor((n,), "int32"),
        pool: T.Tensor((units, UNIT_WORDS), "uint32"),
        pool_meta: T.Tensor((units, 2 * UNIT_WORDS), "uint16"),
        page_stride: T.int32,
        head_stride: T.int32,
    ):
        with T.Kernel(heads, n, threads=m.threads) as (head, page):
            T.annotate_min_blocks_per_sm(blocks_per_sm(m.threads, m.held))
            tx = T.get_thread_binding()
            unit = T.alloc_var("int32")
            unit = pages[page] * page_stride + head * head_stride
            tile = T.alloc_shared((m.accesses, ACCESS_HALVES), dtype)
            load_tokens(x, page, head, 0, layout.PAGE_TOKENS, m.row_accesses, tile, tx, m.threads)
            T.sync_threads()
            quantize_rows(m, range_search, tile, pool, pool_meta, unit, tx)

    return TileKernel(quantize, compile_flags=EXACT)


def dequantize_kernel(side, head_dim: int) -> TileKernel:
    """One side of pages int32 [n] of the pool -> fp32 out [n, num_heads_kv, 128, head_dim]: code * scale + zero."""
    side = plain_side(side, head_dim)
    if isinstance(side, Boosted):
        return boosted_dequantize_kernel(side, head_dim)
    if runs_along_columns(side):
        return token_dequantize_kernel(side, head_dim)
    m = CodeMatrix(side, head_dim)
    n, heads, units = T.dynamic("n"), T.dynamic("heads"), T.dynamic("units")

    @T.prim_func
    def dequantize(
        pages: T.Tensor((n,), "int32"),
        pool: T.Tensor((units, UNIT_WORDS), "uint32"),
        pool_meta: T.Tensor((units, 2 * UNIT_WORDS), m.storage),
        out: T.Tensor((n, heads, layout.PAGE_TOKENS, head_dim), "float32"),
        page_stride: T.int32,
        head_stride: T.int32,
    ):
        with T.Kernel(heads, n, threads=m.threads) as (head, page):
            tx = T.get_thread_binding()
            column_tile, lane = tx // layout.LANES, tx % layout.LANES
            g, t = lane // 4, lane % 4
            unit = T.alloc_var("int32")
            unit = pages[page] * page_stride + head * head_stride
            words = T.alloc_local((m.words,), "uint32")
            for w in T.unroll(m.words):
                offset = layout.word_offset(column_tile * m.words + w, lane)
                words[w] = pool[unit + offset // 128, offset % 128 // 4]
            for group in T.unroll(m.groups):
                for c in T.unroll(COLUMNS):
                    col = m.column_of(column_tile, t, c)
                    at_scale = m.meta_offset(group, 0, col)
                    at_zero = m.meta_offset(group, 1, col)
                    scale, zero = T.alloc_var("float32"), T.alloc_var("float32")
                    scale = T.cast(pool_meta[unit + at_scale // 128, at_scale % 128 // 2], "float32")
                    zero = T.cast(pool_meta[unit + at_zero // 128, at_zero % 128 // 2], "float32")
                    for i in T.unroll(m.held_per_group):
                        held = group * m.held_per_group + i
                        word, shift = m.word_and_shift(held, c)
                        code = (words[word] >> T.cast(shift, "uint32")) & T.uint32(m.steps)
                        row = 8 * held + g
                        value = T.cast(code, "float32") * scale + zero
                        out[page, head, col if m.transposed else row, row if m.transposed else col] = value

    return TileKernel(dequantize, compile_flags=EXACT)
