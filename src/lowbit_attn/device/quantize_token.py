"""Quantize-and-pack and its inverse for K per token: rows = tokens, columns = channels, a group runs along columns.

The counterpart of ``quantize`` for groups that cross lanes and column tiles: the four lanes of one row hold a group.
One warp owns the rows that share its words (8, 16, 32, 64 at 8, 4, 2, 1 bits) and takes them eight at a time, one a
lane quad, so packing needs no exchange between lanes and a lane holds head_dim / 4 values. The arithmetic is
``formats.affine`` step by step, without contraction, so the bytes are the reference's.
"""

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.device.groups import (
    EXACT,
    UNIT_WORDS,
    fold,
    pick,
    storage_bits,
    stored_span,
    tree_sum,
)
from lowbit_attn.device.tilelang_kernel import TileKernel
from lowbit_attn.formats.affine import SEARCH_FACTORS

ATOM = 8  # rows and columns of the fragment atom
STRANDS = 2  # neighbouring columns (e) that one lane holds of every atom
WARPS = 4  # of a block, at most: 128 threads, so that head_dim 256 has the registers it needs


class TokenMatrix:
    """Static geometry of a K-per-token code matrix, seen from a lane."""

    def __init__(self, side, head_dim: int):
        self.bits, self.head_dim = side.bits, head_dim
        self.steps = (1 << side.bits) - 1
        self.storage = str(side.storage).removeprefix("torch.")
        self.group_cols = side.group_size or head_dim
        self.groups = head_dim // self.group_cols
        self.atoms = head_dim // ATOM  # of one row
        self.atoms_per_group = self.group_cols // ATOM
        self.slots = layout.slots_per_byte(side.bits)  # eight-row blocks that share their words
        self.spans = layout.PAGE_TOKENS // (ATOM * self.slots)  # runs of such rows: one warp each
        self.warps = min(WARPS, self.spans)
        self.parts = self.spans // self.warps
        self.col_tiles = head_dim // layout.TILE
        self.meta_bytes = side.plane_sizes(head_dim)["codes"]  # metadata follow the codes

    def row_of(self, span, slot, g):
        return ATOM * (span * self.slots + slot) + g

    def column_of(self, atom, t, e):
        return ATOM * atom + 2 * t + e

    def code_word(self, span, col_tile):
        """Word that holds the codes of these rows and of one column tile."""
        return layout.code_slot(self.row_of(span, 0, 0), layout.TILE * col_tile, layout.PAGE_TOKENS, self.bits)[0]

    def code_shift(self, slot, atom, e):
        """Bit position within the word of an element of row block ``slot``."""
        row = self.row_of(0, slot, 0)
        _, _, byte, at = layout.code_slot(row, self.column_of(atom, 0, e), layout.PAGE_TOKENS, self.bits)
        return 8 * byte + self.bits * at

    def strand(self, v, group, e) -> list:
        """The elements of a group that a lane holds, at one e, in the order of their channels."""
        return [v[group * self.atoms_per_group + i, e] for i in range(self.atoms_per_group)]

    def everything(self, v, group) -> list:
        return [x for e in range(STRANDS) for x in self.strand(v, group, e)]

    def meta_offset(self, group, is_zero, token):
        """Byte offset of a token's scale or zero from the start of the side's planes."""
        return self.meta_bytes + layout.token_meta_offset(group, is_zero, token)


def code_of(x, scale, zero, inverse, steps: int):
    """The code of a value as fp32, not a number gives 0."""
    code = T.nearbyint((x - zero) * inverse)
    return T.if_then_else(code > T.float32(0.0), T.min(code, T.float32(steps)), T.float32(0.0))


def miss_squared(x, scale, zero, inverse, steps: int):
    miss = x - (code_of(x, scale, zero, inverse, steps) * scale + zero)
    return miss * miss


def token_quantize_kernel(side, head_dim: int, dtype: str, range_search: bool) -> TileKernel:
    """The arguments and the result of ``quantize.quantize_kernel``, for K per token."""
    m = TokenMatrix(side, head_dim)
    n, heads, units = T.dynamic("n"), T.dynamic("heads"), T.dynamic("units")
    factors = SEARCH_FACTORS if range_search else SEARCH_FACTORS[:1]
    two_means = m.bits == 1 and not range_search

    @T.macro
    def group_sum(parts, total):
        """affine.tree_sum's order: atoms (summed already), then the lanes of a quad, then the two strands."""
        for r in T.unroll(2):
            for e in T.unroll(STRANDS):
                parts[e] = parts[e] + T.shfl_xor(parts[e], T.shift_right(2, r))
        total[0] = parts[0] + parts[1]

    @T.macro
    def inverse_of(scale, inverse):
        inverse[0] = T.if_then_else(scale[0] == T.float32(0.0), T.float32(0.0), T.float32(1.0) / scale[0])

    @T.macro
    def squared_error(v, group, scale, zero, inverse, total):
        parts = T.alloc_local((STRANDS,), "float32")
        for e in T.unroll(STRANDS):
            held = m.strand(v, group, e)
            parts[e] = tree_sum([miss_squared(x, scale[0], zero[0], inverse[0], m.steps) for x in held])
        group_sum(parts, total)

    @T.macro
    def best_span(v, group, low, high, scale, zero, inverse):
        """A.2 with factor 1, then A.2b: the least squared error over the factors, the larger factor on ties."""
        stored_span(low, (high - low) / T.float32(m.steps), scale, zero, m.storage)
        inverse_of(scale, inverse)
        if len(factors) > 1:
            middle, half = T.alloc_var("float32"), T.alloc_var("float32")
            middle = (low + high) * T.float32(0.5)
            half = (high - low) * T.float32(0.5)
            s, z = T.alloc_local((1,), "float32"), T.alloc_local((1,), "float32")
            r, best, error = (T.alloc_local((1,), "float32") for _ in range(3))
            squared_error(v, group, scale, zero, inverse, best)
            for f in T.serial(len(factors) - 1):
                factor, bottom, top = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("float32")
                factor = pick(factors[1:], f)
                bottom = middle - half * factor
                top = middle + half * factor
                stored_span(bottom, (top - bottom) / T.float32(m.steps), s, z, m.storage)
                inverse_of(s, r)
                squared_error(v, group, s, z, r, error)
                if error[0] < best[0]:
                    best[0] = error[0]
                    scale[0] = s[0]
                    zero[0] = z[0]
                    inverse[0] = r[0]

    @T.macro
    def masked_sum(v, group, of, total):
        parts = T.alloc_local((STRANDS,), "float32")
        for e in T.unroll(STRANDS):
            parts[e] = tree_sum([of(x) for x in m.strand(v, group, e)])
        group_sum(parts, total)

    @T.macro
    def two_mean_levels(v, group, low, high, scale, zero):
        """A.4: the two levels are the means below and from the midpoint."""
        middle = T.alloc_var("float32")
        middle = (high + low) * T.float32(0.5)
        below, above, count = (T.alloc_local((1,), "float32") for _ in range(3))
        masked_sum(v, group, lambda x: T.if_then_else(x < middle, x, T.float32(0.0)), below)
        masked_sum(v, group, lambda x: T.if_then_else(x < middle, T.float32(0.0), x), above)
        masked_sum(v, group, lambda x: T.if_then_else(x < middle, T.float32(1.0), T.float32(0.0)), count)
        low_mean, high_mean = T.alloc_var("float32"), T.alloc_var("float32")
        low_mean = T.if_then_else(count[0] > T.float32(0.0), below[0] / count[0], low)
        high_mean = T.if_then_else(count[0] > T.float32(0.0), above[0] / (T.float32(m.group_cols) - count[0]), high)
        stored_span(low_mean, high_mean - low_mean, scale, zero, m.storage)

    @T.macro
    def pack_group(v, words, slot, group, scale, zero, inverse):
        for i in T.unroll(m.atoms_per_group):
            for e in T.unroll(STRANDS):
                atom = group * m.atoms_per_group + i
                code = T.alloc_var("float32")
                if two_means:
                    reaches = v[atom, e] >= zero[0] + scale[0] * T.float32(0.5)
                    code = T.if_then_else(T.And(reaches, scale[0] != T.float32(0.0)), T.float32(1.0), T.float32(0.0))
                else:
                    code = code_of(v[atom, e], scale[0], zero[0], inverse[0], m.steps)
                shift = T.cast(m.code_shift(slot, atom, e), "uint32")
                words[atom // 2] = words[atom // 2] | (T.cast(code, "uint32") << shift)

    @T.prim_func
    def quantize(
        x: T.Tensor((n, heads, layout.PAGE_TOKENS, head_dim), dtype),
        pages: T.Tensor((n,), "int32"),
        pool: T.Tensor((units, UNIT_WORDS), "uint32"),
        pool_meta: T.Tensor((units, 2 * UNIT_WORDS), "uint16"),
        page_stride: T.int32,
        head_stride: T.int32,
    ):
        with T.Kernel(heads, n, m.parts, threads=m.warps * layout.LANES) as (head, page, part):
            tx = T.get_thread_binding()
            lane = tx % layout.LANES
            span = part * m.warps + tx // layout.LANES
            g, t = lane // 4, lane % 4
            unit = T.alloc_var("int32")
            unit = pages[page] * page_stride + head * head_stride
            v = T.alloc_local((m.atoms, STRANDS), "float32")
            words = T.alloc_local((m.col_tiles,), "uint32")
            scale, zero, inverse = (T.alloc_local((1,), "float32") for _ in range(3))
            for w in T.unroll(m.col_tiles):
                words[w] = T.uint32(0)
            for slot in T.serial(m.slots):
                row = m.row_of(span, slot, g)
                for i in T.unroll(m.atoms):
                    for e in T.unroll(STRANDS):
                        v[i, e] = T.cast(x[page, head, row, m.column_of(i, t, e)], "float32")
                for group in T.unroll(m.groups):
                    low, high, is_nan = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("int32")
                    low = fold(m.everything(v, group), T.min)
                    high = fold(m.everything(v, group), T.max)
                    is_nan = fold([T.cast(T.isnan(x), "int32") for x in m.everything(v, group)], lambda a, b: a | b)
                    for r in T.unroll(2):
                        low = T.min(low, T.shfl_xor(low, T.shift_right(2, r)))
                        high = T.max(high, T.shfl_xor(high, T.shift_right(2, r)))
                        is_nan = is_nan | T.shfl_xor(is_nan, T.shift_right(2, r))
                    if is_nan != 0:
                        low = T.reinterpret(T.uint32(0x7FC00000), "float32")
                        high = low
                    if two_means:
                        two_mean_levels(v, group, low, high, scale, zero)
                    else:
                        best_span(v, group, low, high, scale, zero, inverse)
                    pack_group(v, words, slot, group, scale, zero, inverse)
                    if t == 0:
                        at_scale = m.meta_offset(group, 0, row)
                        at_zero = m.meta_offset(group, 1, row)
                        pool_meta[unit + at_scale // 128, at_scale % 128 // 2] = storage_bits(scale[0], m.storage)
                        pool_meta[unit + at_zero // 128, at_zero % 128 // 2] = storage_bits(zero[0], m.storage)
            for w in T.unroll(m.col_tiles):
                offset = layout.word_offset(m.code_word(span, w), lane)
                pool[unit + offset // 128, offset % 128 // 4] = words[w]

    return TileKernel(quantize, compile_flags=EXACT)


def token_dequantize_kernel(side, head_dim: int) -> TileKernel:
    """The arguments and the result of ``quantize.dequantize_kernel``, for K per token."""
    m = TokenMatrix(side, head_dim)
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
        with T.Kernel(heads, n, m.parts, threads=m.warps * layout.LANES) as (head, page, part):
            tx = T.get_thread_binding()
            lane = tx % layout.LANES
            span = part * m.warps + tx // layout.LANES
            g, t = lane // 4, lane % 4
            unit = T.alloc_var("int32")
            unit = pages[page] * page_stride + head * head_stride
            words = T.alloc_local((m.col_tiles,), "uint32")
            for w in T.unroll(m.col_tiles):
                offset = layout.word_offset(m.code_word(span, w), lane)
                words[w] = pool[unit + offset // 128, offset % 128 // 4]
            for slot in T.serial(m.slots):
                row = m.row_of(span, slot, g)
                for group in T.unroll(m.groups):
                    at_scale = m.meta_offset(group, 0, row)
                    at_zero = m.meta_offset(group, 1, row)
                    scale, zero = T.alloc_var("float32"), T.alloc_var("float32")
                    scale = T.cast(pool_meta[unit + at_scale // 128, at_scale % 128 // 2], "float32")
                    zero = T.cast(pool_meta[unit + at_zero // 128, at_zero % 128 // 2], "float32")
                    for i in T.unroll(m.atoms_per_group):
                        for e in T.unroll(STRANDS):
                            atom = group * m.atoms_per_group + i
                            shift = T.cast(m.code_shift(slot, atom, e), "uint32")
                            code = (words[atom // 2] >> shift) & T.uint32(m.steps)
                            out[page, head, row, m.column_of(atom, t, e)] = T.cast(code, "float32") * scale + zero

    return TileKernel(dequantize, compile_flags=EXACT)
