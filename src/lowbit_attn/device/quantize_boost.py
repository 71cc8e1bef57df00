"""Quantize-and-pack and its inverse for K per channel with boosted channels (``formats.kitty``), in one launch.

One block is one page of one KV head; a warp owns one column tile and a lane holds 16 rows of four columns, as in
``quantize``. Every column is scored, the columns are ranked through shared memory, and a boosted column then takes more
levels than the others in otherwise the same arithmetic. Its high bits fill, from each lane, one whole byte of every
word of its slot: those bytes and the index are staged in shared memory. Sums run in the order of ``affine.tree_sum``,
without contraction (-fmad=false), so the bytes are the reference's.
"""

from itertools import accumulate

import tilelang.language as T
import torch

from lowbit_attn import layout
from lowbit_attn.device.groups import EXACT, UNIT_WORDS, fold, pick, storage_bits, stored_span, tree_sum
from lowbit_attn.device.quantize_token import code_of, miss_squared
from lowbit_attn.device.tilelang_kernel import TileKernel
from lowbit_attn.formats.affine import SEARCH_FACTORS
from lowbit_attn.formats.kitty import Boosted
from lowbit_attn.formats.uniform import PerChannel

COLUMNS = 4  # columns of a tile that one lane holds: (col8, e)
BITS = (2, 4)  # of a code, of a boosted code
MASK_BITS = 32  # channels whose membership is one word: those that a warp ranks
BYTE = 8


class BoostMatrix:
    """Static geometry of a boosted K, seen from a lane; byte offsets from the start of the K part.

    Words of shared memory: scores [head_dim], masks of boosted channels [head_dim / 32], then what is staged, in the
    order of the record: the high plane and the index.
    """

    def __init__(self, side: Boosted, head_dim: int):
        if (side.bits, side.boosted_bits) != BITS:
            raise NotImplementedError(f"K: {side.boosted_bits} bits boosted over {side.bits}, supported: 4 over 2")
        if side.weighs_queries:
            raise NotImplementedError("K: channels weighted by queries, supported: magnitude, variance, random")
        self.head_dim, self.selection = head_dim, side.selection
        self.bits, self.high_bits = side.bits, side.high_bits
        self.steps, self.boosted_steps = (1 << side.bits) - 1, (1 << side.boosted_bits) - 1
        self.storage = str(side.storage).removeprefix("torch.")
        self.boost, self.slots = side.boost(head_dim), side.slots(head_dim)
        self.fixed = side.boosted_channels(torch.zeros(1, layout.PAGE_TOKENS, head_dim))[0].tolist()  # if not by scores
        self.threads = head_dim // layout.TILE * layout.LANES
        self.held = layout.PAGE_TOKENS // BYTE  # rows of one column that one lane holds
        self.words = layout.words_per_lane(layout.PAGE_TOKENS, layout.TILE, side.bits)  # a lane's of one column tile
        self.high_words = layout.words_per_lane(layout.PAGE_TOKENS, layout.TILE, side.high_bits)
        self.high_rows = layout.PAGE_TOKENS // self.high_words  # rows that share a word
        sizes = side.plane_sizes(head_dim)
        offsets = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        self.high_at, self.index_at, self.meta_at = (offsets[name] for name in ("high", "index", "meta"))
        self.masks, self.num_masks = head_dim, head_dim // MASK_BITS
        self.staged = self.masks + self.num_masks
        self.staged_words = (self.meta_at - self.high_at) // layout.WORD_BYTES
        self.staged_rounds = -(-self.staged_words // self.threads)
        self.shared_words = self.staged + self.staged_words

    def column_of(self, column_tile, t, c):
        return layout.TILE * column_tile + 8 * (c // 2) + 2 * t + c % 2

    def column(self, v, c) -> list:
        """The elements of a column that a lane holds, rows 8 * i + g."""
        return [v[i, c] for i in range(self.held)]

    def word_and_shift(self, held, c):
        """(word within the column tile, bit position) of the low bits of a lane's element."""
        word, _, byte, slot = layout.code_slot(8 * held, 8 * (c // 2) + c % 2, layout.PAGE_TOKENS, self.bits)
        return word, BYTE * byte + self.bits * slot

    def high_and_shift(self, held):
        """(word within the column tile, bit position within its byte) of the high bits of a lane's element."""
        word, _, _, slot = layout.code_slot(8 * held, 0, layout.PAGE_TOKENS, self.high_bits)
        return word, self.high_bits * slot

    def high_byte(self, slot, word, g):
        """(byte offset of the word in the high plane, byte in it) of rows with this g of a slot."""
        row = self.high_rows * word
        at, lane, byte, _ = layout.code_slot(row, slot, layout.PAGE_TOKENS, self.high_bits)
        return layout.word_offset(at, lane + 4 * g), byte

    def meta_offset(self, is_zero, channel):
        return self.meta_at + layout.channel_meta_offset(0, is_zero, channel, self.head_dim)

    def fixed_mask(self, index):
        """Word ``index`` of the masks where the boosted channels do not depend on the data."""
        words = [sum(1 << d % MASK_BITS for d in self.fixed if d // MASK_BITS == w) for w in range(self.num_masks)]
        chosen = T.uint32(words[-1])
        for w, word in enumerate(words[:-1]):
            chosen = T.if_then_else(index == w, T.uint32(word), chosen)
        return chosen

    def is_boosted(self, shared, channel):
        mask = shared[self.masks + channel // MASK_BITS]
        return ((mask >> T.cast(channel % MASK_BITS, "uint32")) & T.uint32(1)) != T.uint32(0)

    def slot_of(self, shared, channel):
        """Boosted channels below this one: its slot, if it is boosted."""
        here, below = channel // MASK_BITS, T.uint32(1) << T.cast(channel % MASK_BITS, "uint32")
        count = _ones(shared[self.masks + here] & (below - T.uint32(1)))
        for w in range(self.num_masks - 1):
            count = count + T.if_then_else(w < here, _ones(shared[self.masks + w]), 0)
        return count


def _ones(word):
    return T.cast(T.popcount(word), "int32")


def plain_side(side, head_dim: int):
    """The same side, or K per channel in its place if it boosts no channel: the bytes are the same."""
    if isinstance(side, Boosted) and not side.boost(head_dim):
        return PerChannel(side.bits, storage=side.storage, searches_range=side.searches_range)
    return side


@T.macro
def column_sum(m, v, c, of, total):
    """affine.tree_sum of a column: the rows that a lane holds, then the eight lanes that share it."""
    total[0] = tree_sum([of(x) for x in m.column(v, c)])
    for r in T.serial(3):
        total[0] = total[0] + T.shfl_xor(total[0], T.shift_right(16, r))


@T.macro
def score_columns(m, v, scores, column_tile, g, t):
    """kitty.magnitude or kitty.variance of every column, not a number as infinity -> scores [head_dim]."""
    total, mean = T.alloc_local((1,), "float32"), T.alloc_local((1,), "float32")
    for c in T.unroll(COLUMNS):
        if m.selection == "variance":
            column_sum(m, v, c, lambda x: x, mean)
            mean[0] = mean[0] / T.float32(layout.PAGE_TOKENS)
            column_sum(m, v, c, lambda x: (x - mean[0]) * (x - mean[0]), total)
        else:
            column_sum(m, v, c, T.abs, total)
        if g == 0:
            scores[m.column_of(column_tile, t, c)] = T.if_then_else(
                T.isnan(total[0]), T.infinity("float32"), total[0])


@T.macro
def mark_largest(m, scores, shared, tx):
    """The boosted channels, those with fewer than ``boost`` ahead of them -> one bit each in the masks.

    Ahead are channels with a larger score, or an equal one and a lower number. A thread has a channel, a warp a mask.
    """
    if tx < m.head_dim:
        mine, rank, mask = T.alloc_var("float32"), T.alloc_var("int32"), T.alloc_var("uint32")
        mine = scores[tx]
        rank = 0
        for other in T.serial(m.head_dim):
            ahead = T.Or(scores[other] > mine, T.And(scores[other] == mine, other < tx))
            rank = rank + T.cast(ahead, "int32")
        mask = T.cast(T.ballot(rank < m.boost), "uint32")
        if tx % MASK_BITS == 0:
            shared[m.masks + tx // MASK_BITS] = mask


@T.macro
def limits(m, v, c, low, high):
    """Smallest and largest value of a column, both not a number if one of its values is."""
    is_nan = T.alloc_var("int32")
    low[0] = fold(m.column(v, c), T.min)
    high[0] = fold(m.column(v, c), T.max)
    is_nan = fold([T.cast(T.isnan(x), "int32") for x in m.column(v, c)], lambda a, b: a | b)
    for r in T.serial(3):
        low[0] = T.min(low[0], T.shfl_xor(low[0], T.shift_right(16, r)))
        high[0] = T.max(high[0], T.shfl_xor(high[0], T.shift_right(16, r)))
        is_nan = is_nan | T.shfl_xor(is_nan, T.shift_right(16, r))
    if is_nan != 0:
        low[0] = T.reinterpret(T.uint32(0x7FC00000), "float32")
        high[0] = low[0]


@T.macro
def inverse_of(scale, inverse):
    inverse[0] = T.if_then_else(scale[0] == T.float32(0.0), T.float32(0.0), T.float32(1.0) / scale[0])


@T.macro
def best_span(m, v, c, steps, range_search, scale, zero, inverse):
    """A.2 with factor 1, then A.2b: the least squared error over the factors, the larger factor on ties."""
    low, high = T.alloc_local((1,), "float32"), T.alloc_local((1,), "float32")
    limits(m, v, c, low, high)
    stored_span(low[0], (high[0] - low[0]) / steps[0], scale, zero, m.storage)
    inverse_of(scale, inverse)
    if range_search:
        middle, half = T.alloc_var("float32"), T.alloc_var("float32")
        middle = (low[0] + high[0]) * T.float32(0.5)
        half = (high[0] - low[0]) * T.float32(0.5)
        s, z, r, best, error = (T.alloc_local((1,), "float32") for _ in range(5))
        column_sum(m, v, c, lambda x: miss_squared(x, scale[0], zero[0], inverse[0], steps[0]), best)
        for f in T.serial(len(SEARCH_FACTORS) - 1):
            factor, bottom, top = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("float32")
            factor = pick(SEARCH_FACTORS[1:], f)
            bottom = middle - half * factor
            top = middle + half * factor
            stored_span(bottom, (top - bottom) / steps[0], s, z, m.storage)
            inverse_of(s, r)
            column_sum(m, v, c, lambda x: miss_squared(x, s[0], z[0], r[0], steps[0]), error)
            if error[0] < best[0]:
                best[0] = error[0]
                scale[0] = s[0]
                zero[0] = z[0]
                inverse[0] = r[0]


@T.macro
def pack_column(m, v, c, scale, zero, inverse, steps, words, high):
    """Codes of a column: low bits into the lane's words of its column tile, the rest into ``high``, a byte a word."""
    for w in T.unroll(m.high_words):
        high[w] = T.uint32(0)
    for i in T.unroll(m.held):
        code = T.alloc_var("uint32")
        code = T.cast(code_of(v[i, c], scale[0], zero[0], inverse[0], steps[0]), "uint32")
        word, shift = m.word_and_shift(i, c)
        words[word] = words[word] | ((code & T.uint32(m.steps)) << T.cast(shift, "uint32"))
        high_word, high_shift = m.high_and_shift(i)
        high[high_word] = high[high_word] | ((code >> T.uint32(m.bits)) << T.cast(high_shift, "uint32"))


@T.macro
def stage_column(m, octets, high, slot, channel, g):
    """A boosted column's high bits and channel -> the staged planes; padded slots of the index repeat the last one."""
    plane = m.staged * layout.WORD_BYTES
    index = plane + m.index_at - m.high_at
    for w in T.unroll(m.high_words):
        at, byte = m.high_byte(slot, w, g)
        octets[plane + at + byte] = T.cast(high[w], "uint8")
    if g == 0:
        octets[index + slot] = T.cast(channel, "uint8")
        if m.slots > m.boost:
            if slot == m.boost - 1:
                for p in T.unroll(m.slots - m.boost):
                    octets[index + m.boost + p] = T.cast(channel, "uint8")


@T.macro
def clear_staged(m, shared, tx):
    for r in T.serial(m.staged_rounds):
        if r * m.threads + tx < m.staged_words:
            shared[m.staged + r * m.threads + tx] = T.uint32(0)


@T.macro
def store_staged(m, pool, unit, shared, tx):
    for r in T.serial(m.staged_rounds):
        if r * m.threads + tx < m.staged_words:
            at = m.high_at + layout.WORD_BYTES * (r * m.threads + tx)
            pool[unit + at // 128, at % 128 // 4] = shared[m.staged + r * m.threads + tx]


@T.macro
def choose(m, v, scores, shared, tx, column_tile, g, t):
    """The masks of boosted channels -> shared; ends with a barrier."""
    if m.selection == "random":
        if tx < m.num_masks:
            shared[m.masks + tx] = m.fixed_mask(tx)
    else:
        score_columns(m, v, scores, column_tile, g, t)
        T.sync_threads()
        mark_largest(m, scores, shared, tx)
    T.sync_threads()


def boosted_quantize_kernel(side: Boosted, head_dim: int, dtype: str, range_search: bool) -> TileKernel:
    """The arguments and the result of ``quantize.quantize_kernel``, for K with boosted channels."""
    m = BoostMatrix(side, head_dim)
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
            tx = T.get_thread_binding()
            column_tile, lane = tx // layout.LANES, tx % layout.LANES
            g, t = lane // 4, lane % 4
            unit = T.alloc_var("int32")
            unit = pages[page] * page_stride + head * head_stride
            shared = T.alloc_shared((m.shared_words,), "uint32")
            scores = T.view(shared, (m.shared_words,), "float32")
            octets = T.view(shared, (m.shared_words * layout.WORD_BYTES,), "uint8")
            v = T.alloc_local((m.held, COLUMNS), "float32")
            words = T.alloc_local((m.words,), "uint32")
            high = T.alloc_local((m.high_words,), "uint32")
            scale, zero, inverse, steps = (T.alloc_local((1,), "float32") for _ in range(4))
            for i in T.unroll(m.held):
                for c in T.unroll(COLUMNS):
                    v[i, c] = T.cast(x[page, head, 8 * i + g, m.column_of(column_tile, t, c)], "float32")
            clear_staged(m, shared, tx)
            choose(m, v, scores, shared, tx, column_tile, g, t)
            for w in T.unroll(m.words):
                words[w] = T.uint32(0)
            for c in T.unroll(COLUMNS):
                channel = m.column_of(column_tile, t, c)
                boosted = m.is_boosted(shared, channel)
                steps[0] = T.if_then_else(boosted, T.float32(m.boosted_steps), T.float32(m.steps))
                best_span(m, v, c, steps, range_search, scale, zero, inverse)
                pack_column(m, v, c, scale, zero, inverse, steps, words, high)
                if boosted:
                    slot = T.alloc_var("int32")
                    slot = m.slot_of(shared, channel)
                    stage_column(m, octets, high, slot, channel, g)
                if g == 0:
                    at_scale, at_zero = m.meta_offset(0, channel), m.meta_offset(1, channel)
                    pool_meta[unit + at_scale // 128, at_scale % 128 // 2] = storage_bits(scale[0], m.storage)
                    pool_meta[unit + at_zero // 128, at_zero % 128 // 2] = storage_bits(zero[0], m.storage)
            for w in T.unroll(m.words):
                offset = layout.word_offset(column_tile * m.words + w, lane)
                pool[unit + offset // 128, offset % 128 // 4] = words[w]
            T.sync_threads()
            store_staged(m, pool, unit, shared, tx)

    return TileKernel(quantize, compile_flags=EXACT)


def boosted_dequantize_kernel(side: Boosted, head_dim: int) -> TileKernel:
    """The arguments and the result of ``quantize.dequantize_kernel``, for K with boosted channels."""
    m = BoostMatrix(side, head_dim)
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
            slots = T.alloc_shared((head_dim,), "int32")
            words = T.alloc_local((m.words,), "uint32")
            high = T.alloc_local((m.high_words,), "uint32")
            if tx < head_dim:
                slots[tx] = -1
            T.sync_threads()
            if tx < m.boost:
                at = m.index_at + tx
                named = T.alloc_var("int32")
                named = T.cast(octet(pool, unit, at // 4 * 4, at % 4), "int32")
                if named < head_dim:
                    slots[named] = tx
            T.sync_threads()
            for w in T.unroll(m.words):
                offset = layout.word_offset(column_tile * m.words + w, lane)
                words[w] = pool[unit + offset // 128, offset % 128 // 4]
            for c in T.unroll(COLUMNS):
                channel = m.column_of(column_tile, t, c)
                slot, scale, zero = T.alloc_var("int32"), T.alloc_var("float32"), T.alloc_var("float32")
                slot = slots[channel]
                at_scale, at_zero = m.meta_offset(0, channel), m.meta_offset(1, channel)
                scale = T.cast(pool_meta[unit + at_scale // 128, at_scale % 128 // 2], "float32")
                zero = T.cast(pool_meta[unit + at_zero // 128, at_zero % 128 // 2], "float32")
                for w in T.unroll(m.high_words):
                    high[w] = T.uint32(0)
                    if slot >= 0:
                        high_at, byte = m.high_byte(slot, w, g)
                        high[w] = octet(pool, unit, m.high_at + high_at, byte)
                for i in T.unroll(m.held):
                    word, shift = m.word_and_shift(i, c)
                    high_word, high_shift = m.high_and_shift(i)
                    code = T.alloc_var("uint32")
                    code = (words[word] >> T.cast(shift, "uint32")) & T.uint32(m.steps)
                    rest = (high[high_word] >> T.cast(high_shift, "uint32")) & T.uint32((1 << m.high_bits) - 1)
                    code = code | (rest << T.uint32(m.bits))
                    out[page, head, 8 * i + g, channel] = T.cast(code, "float32") * scale + zero

    return TileKernel(dequantize, compile_flags=EXACT)


def octet(pool, unit, at, byte):
    """Byte ``byte`` of the word at byte offset ``at`` of a record."""
    return (pool[unit + at // 128, at % 128 // 4] >> T.cast(BYTE * byte, "uint32")) & T.uint32(255)
