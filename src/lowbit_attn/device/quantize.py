"""Quantize-and-pack and its inverse for sides whose groups run down the rows of the code matrix.

K per channel: rows = tokens; V per token: rows = channels. Either way a group is consecutive rows of one column, so
one kernel text serves both; K per token, whose groups run along the columns, is in ``quantize_token``, K with boosted
channels in ``quantize_boost``. One block is one page of one KV head; a warp owns one column tile (16 columns), and
each lane holds exactly the elements whose codes land in its own words, so packing needs no exchange. The arithmetic is
``formats.affine`` step by step, without contraction (-fmad=false), so the bytes are the reference's.
"""

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.device import groups
from lowbit_attn.device.groups import EXACT, UNIT_WORDS, pick, storage_bits, stored_span, tree_sum
from lowbit_attn.device.quantize_boost import boosted_dequantize_kernel, boosted_quantize_kernel, plain_side
from lowbit_attn.device.quantize_token import token_dequantize_kernel, token_quantize_kernel
from lowbit_attn.device.tilelang_kernel import TileKernel
from lowbit_attn.formats.affine import SEARCH_FACTORS
from lowbit_attn.formats.kitty import Boosted
from lowbit_attn.formats.uniform import PerChannel

COLUMNS = 4  # columns of a tile that one lane holds: (col8, e)


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

    def word_and_shift(self, held, column):
        """(word within the column tile, bit position) of a lane's element: row 8*held + g, column 8*col8 + 2t + e."""
        word, _, byte, slot = layout.code_slot(8 * held, 8 * (column // 2) + column % 2, self.rows, self.bits)
        return word, 8 * byte + self.bits * slot

    def column_of(self, column_tile, t, column):
        return layout.TILE * column_tile + 8 * (column // 2) + 2 * t + column % 2

    def meta_offset(self, group, is_zero, col, head_dim):
        """Byte offset of a column's scale or zero from the start of the side's planes."""
        if self.transposed:
            return self.meta_bytes + layout.token_meta_offset(group, is_zero, col)
        return self.meta_bytes + layout.channel_meta_offset(group, is_zero, col, head_dim)

    def source(self, x, page, head, row, col):
        """Element (row, col) of the code matrix in x [n, heads, 128 tokens, head_dim]."""
        return x[page, head, col, row] if self.transposed else x[page, head, row, col]


def runs_along_columns(side) -> bool:
    """Whether a group is consecutive columns of one row (K per token); else rows of one column."""
    return not isinstance(side, PerChannel) and not side.transposed


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
    factors = SEARCH_FACTORS if range_search else SEARCH_FACTORS[:1]
    two_means = m.bits == 1 and not range_search

    @T.macro
    def span_codes(v, codes, group, c, scale, zero):
        inverse = T.alloc_var("float32")
        inverse = T.if_then_else(scale[0] == T.float32(0.0), T.float32(0.0), T.float32(1.0) / scale[0])
        for i in T.unroll(m.held_per_group):
            code = T.alloc_var("float32")
            code = T.nearbyint((v[group * m.held_per_group + i, c] - zero[0]) * inverse)
            codes[i] = T.if_then_else(code > T.float32(0.0), T.min(code, T.float32(m.steps)), T.float32(0.0))

    @T.macro
    def best_span(v, codes, group, c, low, high, scale, zero):
        """A.2 with factor 1, then A.2b: the least squared error over the factors, the larger factor on ties."""
        middle, half = T.alloc_var("float32"), T.alloc_var("float32")
        middle = (low + high) * T.float32(0.5)
        half = (high - low) * T.float32(0.5)
        best = T.alloc_var("float32")
        tried = T.alloc_local((m.held_per_group,), "float32")
        s, z = T.alloc_local((1,), "float32"), T.alloc_local((1,), "float32")
        stored_span(low, (high - low) / T.float32(m.steps), scale, zero, m.storage)
        span_codes(v, codes, group, c, scale, zero)
        if len(factors) > 1:
            best = squared_error(m, v, codes, group, c, scale, zero)
            for r in T.serial(3):
                best = best + T.shfl_xor(best, T.shift_right(16, r))
            for f in T.unroll(len(factors) - 1):
                factor = T.alloc_var("float32")
                factor = pick(factors[1:], f)
                bottom, top = T.alloc_var("float32"), T.alloc_var("float32")
                bottom = middle - half * factor
                top = middle + half * factor
                stored_span(bottom, (top - bottom) / T.float32(m.steps), s, z, m.storage)
                span_codes(v, tried, group, c, s, z)
                error = T.alloc_var("float32")
                error = squared_error(m, v, tried, group, c, s, z)
                for r in T.serial(3):
                    error = error + T.shfl_xor(error, T.shift_right(16, r))
                if error < best:
                    best = error
                    scale[0] = s[0]
                    zero[0] = z[0]
                    for i in T.unroll(m.held_per_group):
                        codes[i] = tried[i]

    @T.macro
    def two_mean_levels(v, codes, group, c, low, high, scale, zero):
        """A.4: the two levels are the means below and from the midpoint."""
        middle = T.alloc_var("float32")
        middle = (high + low) * T.float32(0.5)
        below, above, count = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("float32")
        below = masked_sum(m, v, group, c, lambda x: T.if_then_else(x < middle, x, T.float32(0.0)))
        above = masked_sum(m, v, group, c, lambda x: T.if_then_else(x < middle, T.float32(0.0), x))
        count = masked_sum(m, v, group, c, lambda x: T.if_then_else(x < middle, T.float32(1.0), T.float32(0.0)))
        for r in T.serial(3):
            below = below + T.shfl_xor(below, T.shift_right(16, r))
            above = above + T.shfl_xor(above, T.shift_right(16, r))
            count = count + T.shfl_xor(count, T.shift_right(16, r))
        mean_below, mean_above = T.alloc_var("float32"), T.alloc_var("float32")
        mean_below = T.if_then_else(count > T.float32(0.0), below / count, low)
        mean_above = T.if_then_else(count > T.float32(0.0), above / (T.float32(m.group_rows) - count), high)
        stored_span(mean_below, mean_above - mean_below, scale, zero, m.storage)
        for i in T.unroll(m.held_per_group):
            reaches = v[group * m.held_per_group + i, c] >= zero[0] + scale[0] * T.float32(0.5)
            codes[i] = T.if_then_else(T.And(reaches, scale[0] != T.float32(0.0)), T.float32(1.0), T.float32(0.0))

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
            tx = T.get_thread_binding()
            column_tile, lane = tx // layout.LANES, tx % layout.LANES
            g, t = lane // 4, lane % 4
            unit = T.alloc_var("int32")
            unit = pages[page] * page_stride + head * head_stride
            v = T.alloc_local((m.held, COLUMNS), "float32")
            words = T.alloc_local((m.words,), "uint32")
            codes = T.alloc_local((m.held_per_group,), "float32")
            scale, zero = T.alloc_local((1,), "float32"), T.alloc_local((1,), "float32")
            for i in T.unroll(m.held):
                for c in T.unroll(COLUMNS):
                    v[i, c] = T.cast(m.source(x, page, head, 8 * i + g, m.column_of(column_tile, t, c)), "float32")
            for w in T.unroll(m.words):
                words[w] = T.uint32(0)
            for group in T.unroll(m.groups):
                for c in T.unroll(COLUMNS):
                    low, high, is_nan = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("int32")
                    low = fold(m, v, group, c, T.min)
                    high = fold(m, v, group, c, T.max)
                    is_nan = any_nan(m, v, group, c)
                    for r in T.serial(3):
                        low = T.min(low, T.shfl_xor(low, T.shift_right(16, r)))
                        high = T.max(high, T.shfl_xor(high, T.shift_right(16, r)))
                        is_nan = is_nan | T.shfl_xor(is_nan, T.shift_right(16, r))
                    if is_nan != 0:
                        low = T.reinterpret(T.uint32(0x7FC00000), "float32")
                        high = low
                    if two_means:
                        two_mean_levels(v, codes, group, c, low, high, scale, zero)
                    else:
                        best_span(v, codes, group, c, low, high, scale, zero)
                    for i in T.unroll(m.held_per_group):
                        word, shift = m.word_and_shift(group * m.held_per_group + i, c)
                        words[word] = words[word] | (T.cast(codes[i], "uint32") << T.cast(shift, "uint32"))
                    if g == 0:
                        col = m.column_of(column_tile, t, c)
                        at_scale = m.meta_offset(group, 0, col, head_dim)
                        at_zero = m.meta_offset(group, 1, col, head_dim)
                        pool_meta[unit + at_scale // 128, at_scale % 128 // 2] = storage_bits(scale[0], m.storage)
                        pool_meta[unit + at_zero // 128, at_zero % 128 // 2] = storage_bits(zero[0], m.storage)
            for w in T.unroll(m.words):
                offset = layout.word_offset(column_tile * m.words + w, lane)
                pool[unit + offset // 128, offset % 128 // 4] = words[w]

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
                    at_scale = m.meta_offset(group, 0, col, head_dim)
                    at_zero = m.meta_offset(group, 1, col, head_dim)
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


def _group(m: CodeMatrix, v, group, c) -> list:
    return [v[group * m.held_per_group + i, c] for i in range(m.held_per_group)]


def fold(m: CodeMatrix, v, group, c, step):
    """step (T.min or T.max) over the elements of a group that a lane holds."""
    return groups.fold(_group(m, v, group, c), step)


def any_nan(m: CodeMatrix, v, group, c):
    flags = [T.cast(T.isnan(x), "int32") for x in _group(m, v, group, c)]
    total = flags[0]
    for flag in flags[1:]:
        total = total | flag
    return total


def masked_sum(m: CodeMatrix, v, group, c, of):
    return tree_sum([of(x) for x in _group(m, v, group, c)])


def squared_error(m: CodeMatrix, v, codes, group, c, scale, zero):
    misses = [x - (codes[i] * scale[0] + zero[0]) for i, x in enumerate(_group(m, v, group, c))]
    return tree_sum([miss * miss for miss in misses])
