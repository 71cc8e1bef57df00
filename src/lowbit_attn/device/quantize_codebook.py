"""K and V by codebooks (``formats.codebook``): a page's mean or norms, codes by ``codebook_search``, and back.

A warp owns whole groups of channels, so it has all that a mean of K needs; norms of V come first, from all threads of
the block. Codes replace the tile's values in shared memory, group by group, until the block writes them in the packed
order. Sums are in the order of ``affine.tree_sum``, with its roundings (compile with EXACT).
"""

import operator
from functools import partial
from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.device import codebook_search
from lowbit_attn.device.codebook_search import HELD, HELD_AT_END, PAIR, TOKENS, VALUE_SCALE
from lowbit_attn.device.groups import ROW_LANES, fold, load_meta, static, storage_bits, sync_packers, tree_sum
from lowbit_attn.device.tokens import ACCESS_HALVES, swizzled
from lowbit_attn.formats import codebook_order as order
from lowbit_attn.formats.codebook import ENTRIES, LARGEST, SAFE
from lowbit_attn.formats.spec import Kind, SideSpec

LANES, PAGE = layout.LANES, layout.PAGE_TOKENS
WARPS = (8, 4, 2)  # of a block: the most that share the groups evenly and fit
SHARED_BYTES = 90 << 10  # of tokens and entries: what append leaves of sm_89's shared memory
WIDE = 128
RUN = 16  # bytes of codes that a thread writes at once
FINITE = T.infinity("float32")
ROLLED = {"pragma_unroll_factor": 1}  # loops over searches, each of which takes all registers


class CodebookMatrix:
    """Static geometry of a side with a codebook; byte offsets from the start of the side's part."""

    @staticmethod
    def serves(side: SideSpec) -> bool:
        return side.kind is Kind.CODEBOOK

    def __init__(self, side: SideSpec, dtype: str = ""):
        self.head_dim, self.transposed, self.channels = side.head_dim, side.transposed, side.group_size
        self.groups = side.head_dim // side.group_size
        self.storage = side.storage
        self.codes_at, self.meta_at = side.codes, side.meta
        self.shift = "mean" if not side.transposed else "norm" if side.meta < side.nbytes else ""
        tile, entries = 2 * PAGE * side.head_dim, codebook_search.shared_bytes(self.channels)
        self.warps = next(n for n in WARPS if self.groups % n == 0 and tile + n * entries <= SHARED_BYTES)
        self.threads = self.warps * LANES
        self.parts, self.part_rows = 1, PAGE
        self.row_accesses = side.head_dim // ACCESS_HALVES
        self.sharers = 4 if side.head_dim > WIDE else 2  # threads of a token's norm
        self.sharer_distances = tuple(n for n in (2, 1) if n < self.sharers)
        self.runs = PAGE * self.groups // RUN

    def blocks_per_sm(self, range_search, threads=None, more=0):
        """Blocks that must fit an SM together: those of a second multiply or of uneven rows take all registers, those
        of norms more than others."""
        if self.channels == 8 or self.head_dim % 64:
            return 1
        return 2 if self.transposed else 3

    def place(self, row, channel):
        """(access of the tile, half of it) of a token's channel."""
        return swizzled(row, channel // ACCESS_HALVES, self.row_accesses), channel % ACCESS_HALVES


def entries_argument(side: SideSpec, heads):
    """entries of a kernel of a side with a codebook: fp16 [heads, groups, 256 c]; else no argument."""
    return (T.Tensor((heads, side.head_dim // side.group_size, ENTRIES * side.group_size), "float16")
            if side.kind is Kind.CODEBOOK else None)


class Shift(NamedTuple):
    """What is taken off a lane's two channels of a group (K), or what each token is multiplied with (V)."""

    mean: Any  # fp32 [2]
    is_finite: Any  # int32 [2]: whether a channel's values are
    factors: Any  # shared fp32 [128]; 0: the token is not finite


@T.macro
def quantize_codebook(m, range_search, tile, part, pool, pool_meta, unit, tx, entries, head):
    """The tile of one block's tokens in shared memory -> codes and mean or norms of the record at ``unit``."""
    warp, lane = tx // LANES, tx % LANES
    s = codebook_search.buffers(m.warps, m.channels, warp)
    codes = T.view(tile, tuple(tile.shape), "uint16")
    shift = Shift(T.alloc_local((PAIR,), "float32"), T.alloc_local((PAIR,), "int32"),
                  T.alloc_shared((PAGE,), "float32"))
    if m.shift == "norm":
        store_norms(m, tile, pool_meta, unit, shift.factors, tx)
        sync_packers(m.threads)
    for round_ in T.unroll(m.groups // m.warps, annotations=ROLLED):
        quantize_group(m, s, shift, tile, codes, entries, head, round_ * m.warps + warp, pool_meta, unit, lane)
    sync_packers(m.threads)
    for i in T.unroll(-(-m.runs // m.threads)):
        if i * m.threads + tx < m.runs:
            store_codes(m, codes, pool, unit, i * m.threads + tx)


@T.macro
def quantize_group(m, s, shift, tile, codes, entries, head, group, pool_meta, unit, lane):
    """One group of channels of all tokens -> codes in the place of its first channel."""
    means = T.alloc_local((m.channels,), "float32")
    own = m.channels * group + PAIR * (lane % 4 % (m.channels // PAIR))
    codebook_search.load_entries(s, entries, head, group, lane)
    if m.shift == "mean":
        find_mean(m, tile, shift, pool_meta, unit, own, lane)
        for i in static(m.channels):
            means[i] = T.shfl_sync(T.if_then_else(shift.is_finite[i % 2] != 0, shift.mean[i % 2], FINITE), i // 2)
    for part in T.unroll(PAGE // TOKENS, annotations=ROLLED):
        load_values(m, s, shift, tile, own, TOKENS * part, lane)
        codebook_search.search(s, lane)
        code_tokens(m, s, shift, means, tile, codes, m.channels * group, TOKENS * part, lane)


@T.macro
def load_values(m, s, shift, tile, own, first, lane):
    """The values of a lane's two channels and of 64 tokens from ``first`` on -> the search."""
    pair, values = T.alloc_local((PAIR,), tile.dtype), T.alloc_local((PAIR,), "float32")
    is_channel = codebook_search.is_channel(s, lane)
    for i in static(HELD):
        access, half = m.place(first + 8 * i + lane // 4, own)
        for e in T.vectorized(PAIR):
            pair[e] = tile[access, half + e]
        for e in static(PAIR):
            value, is_live = shifted(m, s, shift, T.cast(pair[e], "float32"), shift.mean[e], shift.is_finite[e] != 0,
                                   first + 8 * i + lane // 4)
            values[e] = codebook_search.reach(s, T.if_then_else(is_live, value, T.float32(0.0)))
        codebook_search.scale_row(s, i, values, lane)
        for e in static(PAIR):
            codebook_search.put(s, i, e, T.if_then_else(is_channel, values[e] * T.float32(VALUE_SCALE),
                                                        codebook_search.one(s, lane, e)))


@T.macro
def code_tokens(m, s, shift, means, tile, codes, channel, first, lane):
    """The codes of the tokens that a lane has at the end of a search, in the place of ``channel``, their first one."""
    x, code = T.alloc_local((m.channels,), "float32"), T.alloc_local((1,), "int32")
    for r in static(HELD_AT_END):
        row = first + TOKENS // 4 * (lane % 4) + 8 * r + lane // 4
        access, half = m.place(row, channel)
        for i in static(m.channels):
            value, is_live = shifted(m, s, shift, T.cast(tile[access, half + i], "float32"), means[i],
                                   means[i] < FINITE, row)
            x[i] = codebook_search.reach(s, T.if_then_else(is_live, value, T.float32(0.0)))
        codebook_search.nearest_of_eight(s, s.block[r], x, code)
        codes[access, half] = T.cast(code[0], "uint16")


def shifted(m, s, shift, x, mean, is_finite, row):
    """(a value of the model as entries are compared with it, scaled; whether it counts, else it is 0)."""
    if m.shift == "mean":
        return (x - mean) * s.scale[0], is_finite
    if m.shift == "norm":
        return x * (shift.factors[row] * s.scale[0]), shift.factors[row] != T.float32(0.0)
    return x * s.scale[0], T.abs(x) < FINITE


@T.macro
def as_stored(value, bits, stored):
    """stored[0]: an fp32 mean or norm as fp16 keeps it; bits[0]: its bits."""
    bounded = T.alloc_var("float32")
    bounded = T.if_then_else(T.abs(value) < FINITE, T.max(T.min(value, T.float32(LARGEST)), T.float32(-LARGEST)), value)
    stored[0] = T.cast(T.cast(bounded, "float16"), "float32")
    if stored[0] == T.float32(0.0):
        stored[0] = T.float32(0.0)
    bits[0] = storage_bits(stored[0], "float16")


@T.macro
def find_mean(m, tile, shift, pool_meta, unit, own, lane):
    """Means of a lane's two channels over the page, as stored; the first lanes write them."""
    pairs = T.alloc_local((PAGE // 8 * PAIR,), tile.dtype)
    for i in static(PAGE // 8):
        access, half = m.place(8 * i + lane // 4, own)
        for e in T.vectorized(PAIR):
            pairs[PAIR * i + e] = tile[access, half + e]
    total, stored, bits = (T.alloc_local((1,), x) for x in ("float32", "float32", "uint16"))
    for e in static(PAIR):
        total[0] = tree_sum([T.cast(pairs[PAIR * i + e], "float32") * T.float32(1 / PAGE)
                             for i in range(PAGE // 8)])
        for distance in ROW_LANES.distances:
            total[0] = total[0] + T.shfl_xor(total[0], distance)
        as_stored(total[0], bits, stored)
        shift.is_finite[e] = T.cast(T.abs(total[0]) < FINITE, "int32")
        shift.mean[e] = stored[0]
        if lane < m.channels // PAIR:
            offset = m.meta_at + layout.META_BYTES * (own + e)
            pool_meta[unit + offset // 128, offset % 128 // 2] = bits[0]


def squared(x):
    """The square of a value, cut to what fp32 can add squares of; infinity and NaN stay."""
    bounded = T.if_then_else(T.And(T.abs(x) > T.float32(SAFE), T.abs(x) < FINITE), T.float32(SAFE), x)
    return bounded * bounded


def access_squares(held, i: int) -> list:
    return [squared(T.cast(held[ACCESS_HALVES * i + e], "float32")) for e in range(ACCESS_HALVES)]


def sum_accesses(squares, first: int, step: int, count: int) -> list:
    """Elementwise sums of the accesses first, first + step, ... of ``count``, in the order of affine.tree_sum."""
    if first >= count:
        return []
    if first + step >= count:
        return squares(first)
    size = 1 << (count - 1).bit_length()
    if step >= size:
        return squares(first)
    low, high = sum_accesses(squares, first, 2 * step, count), sum_accesses(squares, first + step, 2 * step, count)
    return [a + b for a, b in zip(low, high)] if high else low


@T.macro
def store_norms(m, tile, pool_meta, unit, factors, tx):
    """Root mean squares of the tokens -> the record, and what tokens are multiplied with -> factors."""
    for i in T.serial(PAGE * m.sharers // m.threads):
        store_norm(m, tile, pool_meta, unit, factors, i * (m.threads // m.sharers) + tx // m.sharers, tx % m.sharers)


@T.macro
def store_norm(m, tile, pool_meta, unit, factors, token, member):
    """The norm of one token by m.sharers threads, which take its accesses by turns."""
    count = m.row_accesses // m.sharers
    held = T.alloc_local((count * ACCESS_HALVES,), tile.dtype)
    sums = T.alloc_local((ACCESS_HALVES,), "float32")
    norm, stored, bits = (T.alloc_local((1,), x) for x in ("float32", "float32", "uint16"))
    for i in static(count):
        access, _ = m.place(token, ACCESS_HALVES * (m.sharers * i + member))
        for e in T.vectorized(ACCESS_HALVES):
            held[ACCESS_HALVES * i + e] = tile[access, e]
    found = sum_accesses(partial(access_squares, held), 0, 1, count)
    for e in static(ACCESS_HALVES):
        sums[e] = found[e]
    for distance in m.sharer_distances:
        for e in static(ACCESS_HALVES):
            sums[e] = sums[e] + T.shfl_xor(sums[e], distance)
    norm[0] = T.sqrt(tree_sum([sums[e] for e in range(ACCESS_HALVES)]) / T.float32(m.head_dim))
    as_stored(norm[0], bits, stored)
    if member == 0:
        offset = m.meta_at + layout.META_BYTES * order.norm_index(token)
        pool_meta[unit + offset // 128, offset % 128 // 2] = bits[0]
        factors[token] = T.if_then_else(
            stored[0] == T.float32(0.0), T.float32(1.0),
            T.if_then_else(T.abs(stored[0]) < FINITE, T.float32(1.0) / stored[0], T.float32(0.0)))


def code_bits(m, codes, offset):
    """The code at a byte of the packed order."""
    token, group = order.code_at(offset, m.groups, m.transposed)
    return T.cast(codes[m.place(token, m.channels * group)], "uint32")


@T.macro
def store_codes(m, codes, pool, unit, run):
    """Sixteen codes of the packed order -> the record."""
    words = T.alloc_local((4,), "uint32")
    for w in static(4):
        words[w] = fold([code_bits(m, codes, RUN * run + 4 * w + byte) << T.uint32(8 * byte) for byte in range(4)],
                        operator.or_)
    offset = m.codes_at + RUN * run
    for w in T.vectorized(4):
        pool[unit + offset // 128, offset % 128 // 4 + w] = words[w]


@T.macro
def dequantize_codebook(m, pool, pool_meta, unit, put, part, tx, entries, head):
    """The record at ``unit`` -> put, a group at a time: entries, with the mean added or times the norm."""
    for i in T.serial(PAGE * m.groups // m.threads):
        at = T.alloc_var("int32")
        at = i * m.threads + tx
        token, group = at // m.groups, at % m.groups
        offset = m.codes_at + order.code_offset(token, group, m.groups, m.transposed)
        code = T.alloc_var("int32")
        code = T.cast((pool[unit + offset // 128, offset % 128 // 4] >> T.cast(offset % 4 * 8, "uint32"))
                      & T.uint32(0xFF), "int32")
        put(token, m.channels * group,
            [unshifted(m, T.cast(entries[head, group, m.channels * code + e], "float32"), pool_meta, unit, token,
                       m.channels * group + e) for e in range(m.channels)])


def unshifted(m, value, pool_meta, unit, token, channel):
    """A value of an entry with the mean added or times the norm."""
    place = m.meta_at + layout.META_BYTES * (order.norm_index(token) if m.transposed else channel)
    if m.shift == "mean":
        return value + load_meta(pool_meta, unit, place)
    return value * load_meta(pool_meta, unit, place) if m.shift == "norm" else value
