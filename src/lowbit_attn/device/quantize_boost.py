"""K per channel with boosted channels (``formats.kitty``), in one launch.

A warp owns one column tile and a lane holds 16 rows of four columns, as in ``quantize_rows``. Every column is scored,
each warp ranks its columns among all scores in shared memory, and a boosted column then takes more levels than the
others in otherwise the same arithmetic. Its high bits fill, from each lane, one whole byte of every word of its slot:
those bytes and the index are staged in shared memory. Scores are summed in the order of ``affine.tree_sum``.
"""

from functools import partial
from itertools import product

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.device.columns import (
    COLUMNS,
    blocks_per_sm,
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
    BYTES,
    ROW_LANES,
    empty_word,
    errors_of,
    group_sum,
    load_meta,
    part_bits,
    static,
    store_meta,
    sync_packers,
    uniform_errors,
)
from lowbit_attn.device.tokens import ACCESS_HALVES, MATRICES, load_fragment, swizzled
from lowbit_attn.formats.affine import folds
from lowbit_attn.formats.kitty import WEIGHTED
from lowbit_attn.formats.spec import SideSpec

BITS = (2, 4)  # of a code, of a boosted code
SCORES_AT_ONCE = 4  # of one access to shared memory
BYTE = 8
CODES = 8  # of four bits, in a word while a column is packed


class BoostMatrix:
    """Static geometry of a boosted K, seen from a lane; byte offsets from the start of the K part.

    Words of shared memory: scores [head_dim], masks of boosted channels, one a column tile, then what is staged, in the
    order of the record: the high plane and the index. dtype: of the tokens, where it is known: fp16
    ones leave room for more blocks, but for 64 channels, where the compiler would spill.
    """

    @staticmethod
    def serves(side: SideSpec) -> bool:
        return side.high is not None

    def __init__(self, side: SideSpec, dtype: str = ""):
        high, head_dim = side.high, side.head_dim
        if (side.bits, high.code_bits) != BITS:
            raise NotImplementedError(f"K: {high.code_bits} bits boosted over {side.bits}, supported: 4 over 2")
        self.head_dim, self.selection, self.dtype = head_dim, high.selection, dtype
        self.bits, self.high_bits = side.bits, high.bits
        self.steps, self.boosted_steps = side.steps, (1 << high.code_bits) - 1
        self.storage = side.storage
        self.boost, self.slots, self.fixed = high.channels, high.slots, high.fixed
        self.threads = head_dim // layout.TILE * layout.LANES
        self.held = layout.PAGE_TOKENS // BYTE  # rows of one column that one lane holds
        self.words = layout.words_per_lane(layout.PAGE_TOKENS, layout.TILE, side.bits)  # a lane's of one column tile
        self.high_words = layout.words_per_lane(layout.PAGE_TOKENS, layout.TILE, high.bits)
        self.code_words = self.held // CODES  # of a column's codes, while they are packed
        self.high_rows = layout.PAGE_TOKENS // self.high_words  # rows that share a word
        self.high_at, self.index_at, self.meta_at = high.codes, high.index, side.meta
        self.masks, self.num_masks = head_dim, head_dim // layout.TILE
        self.store_words = layout.BLOCK_WORDS  # that a lane stores at once
        self.row_accesses = head_dim // ACCESS_HALVES
        self.parts, self.part_rows = 1, layout.PAGE_TOKENS
        self.staged = self.masks + self.num_masks
        self.staged_words = (self.meta_at - self.high_at) // layout.WORD_BYTES
        self.staged_rounds = -(-self.staged_words // self.threads)
        self.shared_words = self.staged + self.staged_words

    def blocks_per_sm(self, range_search, threads=None, more=0):
        """Blocks of m.threads, or of so many with ``more`` registers each, that must fit an SM together."""
        is_slim = self.dtype == "float16" and self.head_dim > 64
        return blocks_per_sm(threads or self.threads, self.held, not is_slim, more)

    def column_of(self, column_tile, t, c):
        return layout.TILE * column_tile + 8 * (c // 2) + 2 * t + c % 2

    def place(self, column_tile, col8, first, lane):
        """Access that a lane names of four matrices of the tile: rows 8 * first .. of eight columns."""
        return swizzled(8 * first + lane, 2 * column_tile + col8, self.row_accesses)

    def word_and_shift(self, held, c):
        """(word within the column tile, bit position) of the low bits of a lane's element."""
        word, _, byte, slot = layout.code_slot(8 * held, 8 * (c // 2) + c % 2, layout.PAGE_TOKENS, self.bits)
        return word, BYTE * byte + self.bits * slot

    def word_and_byte(self, held, c):
        """(word within the column tile, byte in it) of the low bits of four elements of a lane from ``held`` on."""
        word, shift = self.word_and_shift(held, c)
        assert [self.word_and_shift(held + i, c) for i in range(4)] == [(word, shift + self.bits * i) for i in range(4)]
        return word, shift // BYTE

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

    def steps_of(self, boosted):
        return T.if_then_else(boosted, T.float32(self.boosted_steps), T.float32(self.steps))

    def fold_words(self, boosted):
        """groups.fold_words of a column: a fold about 0 changes nothing, so that all have as many."""
        def of(tenths):
            base, deep = (folds(tenths, bits) for bits in BITS)
            base += [0] * (len(deep) - len(base))
            return [T.if_then_else(boosted, T.uint32(d * BYTES), T.uint32(p * BYTES)) for d, p in zip(deep, base)]
        return of

    def fixed_mask(self, column_tile):
        """The mask of a column tile where the boosted channels do not depend on the data."""
        words = [sum(1 << d % layout.TILE for d in self.fixed if d // layout.TILE == w) for w in range(self.num_masks)]
        chosen = T.uint32(words[-1])
        for w, word in enumerate(words[:-1]):
            chosen = T.if_then_else(column_tile == w, T.uint32(word), chosen)
        return chosen


def bit_of(channel):
    """That of a channel in the mask of its column tile."""
    return T.uint32(1) << T.cast(channel % layout.TILE, "uint32")


def is_boosted(mask, channel):
    return (mask & bit_of(channel)) != T.uint32(0)


def ones(word):
    return T.cast(T.popcount(word), "int32")


@T.macro
def score_columns(m, pairs, scores, column_tile, lane, query_weights, head):
    """kitty.magnitude, variance or weighted of every column, not a number as infinity -> scores [head_dim]."""
    total, mean = T.alloc_local((1,), "float32"), T.alloc_local((1,), "float32")
    for c in static(COLUMNS):
        values = column_values(pairs, m.held, range(m.held), c)
        if m.selection == "variance":
            group_sum([values], ROW_LANES, mean)
            mean[0] = mean[0] / T.float32(layout.PAGE_TOKENS)
            group_sum([[(x - mean[0]) * (x - mean[0]) for x in values]], ROW_LANES, total)
        else:
            group_sum([[T.abs(x) for x in values]], ROW_LANES, total)
        if m.selection == WEIGHTED:
            total[0] = total[0] * query_weights[head, m.column_of(column_tile, lane % 4, c)]
        if lane < 4:
            scores[m.column_of(column_tile, lane, c)] = T.if_then_else(
                T.isnan(total[0]), T.infinity("float32"), total[0])


@T.macro
def mark_largest(m, scores, column_tile, lane, mask):
    """The boosted channels of the warp's column tile, those with fewer than ``boost`` ahead of them -> mask.

    Ahead are channels with a larger score, or an equal one and a lower number. Two lanes count for a channel, each in
    every other column tile: larger than the score before is equal or larger.
    """
    mine, before, limit = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("float32")
    some, ahead = T.alloc_local((SCORES_AT_ONCE,), "float32"), T.alloc_var("float32")
    rank = T.alloc_var("int32")
    mine = scores[layout.TILE * column_tile + lane % layout.TILE]
    before = T.call_pure_extern("float32", "nextafterf", mine, -T.infinity("float32"))
    ahead = T.float32(0.0)
    for r in T.unroll(m.num_masks // 2, unroll_factor=1):
        run = 2 * r + lane // layout.TILE
        limit = T.if_then_else(run < column_tile, before, mine)
        for i in T.unroll(layout.TILE // SCORES_AT_ONCE, unroll_factor=1):  # else registers are spilled
            for e in T.vectorized(SCORES_AT_ONCE):
                some[e] = scores[layout.TILE * run + SCORES_AT_ONCE * i + e]
            for e in T.unroll(SCORES_AT_ONCE):
                ahead = ahead + T.if_then_else(some[e] > limit, T.float32(1.0), T.float32(0.0))
    rank = T.cast(ahead, "int32")  # counted as fp32, which other pipes add
    if lane < layout.TILE:  # equal scores of this column tile
        equal = T.call_pure_extern("uint32", "__match_any_sync", T.uint32((1 << layout.TILE) - 1), mine)
        rank = rank + ones(equal & (bit_of(lane) - T.uint32(1)))
    rank = rank + T.shfl_xor(rank, layout.TILE)
    mask[0] = T.cast(T.ballot(rank < m.boost), "uint32") & T.uint32((1 << layout.TILE) - 1)


@T.macro
def boosted_errors(m, boosted, column, words, count, errors):
    """groups.errors_of a column; without the folds of boosted ones where the warp holds none at this place."""
    if T.cast(T.ballot(boosted[column] != 0), "uint32") != T.uint32(0):
        errors_of(words, count, m.fold_words(boosted[column] != 0), errors)
    else:
        uniform_errors(m.bits, words, count, errors)


def two_bits(codes, shift: int):
    """Two bits, from ``shift`` on, of each of the eight codes of a word -> bytes 0 and 2, four codes each."""
    some = (codes >> T.uint32(shift)) & T.uint32(0x33333333)
    some = (some | (some >> T.uint32(2))) & T.uint32(0x0F0F0F0F)
    return (some | (some >> T.uint32(4))) & T.uint32(0x00FF00FF)


def replacing(byte: int, source: int) -> int:
    """Selector of __byte_perm(word, other, ...): the word with one byte replaced by byte ``source`` of the other."""
    return sum((4 + source if b == byte else b) << 4 * b for b in range(4))


@T.macro
def pack_column(m, pairs, c, zero, inverse, boosted, codes, words):
    """A column -> its codes, eight of four bits a word, and their low bits into the lane's words."""
    part, most, reach = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("float32")
    reach = T.if_then_else(boosted, T.float32(m.boosted_steps + 1), T.float32(m.steps + 1))
    most = T.if_then_else(boosted, T.float32(m.boosted_steps / (m.boosted_steps + 1)),
                          T.float32(m.steps / (m.steps + 1)))
    part = inverse * T.if_then_else(boosted, T.float32(1 / (m.boosted_steps + 1)), T.float32(1 / (m.steps + 1)))
    for v in static(m.code_words):
        codes[v] = T.uint32(empty_word(BITS[1]))
    for i, x in enumerate(column_values(pairs, m.held, range(m.held), c)):
        codes[i // CODES] = codes[i // CODES] + (part_bits(x, zero, part, most, reach)
                                                 << T.uint32(BITS[1] * (i % CODES)))
    for v in static(m.code_words):
        low = T.alloc_var("uint32")
        low = two_bits(codes[v], 0)
        for half in static(2):
            word, byte = m.word_and_byte(CODES * v + CODES // 2 * half, c)
            words[word] = T.call_pure_extern("uint32", "__byte_perm", words[word], low,
                                             T.uint32(replacing(byte, 2 * half)))


@T.macro
def stage_column(m, octets, codes, slot, channel, g):
    """A boosted column's high bits and channel -> the staged planes; padded slots of the index repeat the last one."""
    plane = m.staged * layout.WORD_BYTES
    index = plane + m.index_at - m.high_at
    for v in static(m.code_words):
        high = T.alloc_var("uint32")
        high = two_bits(codes[v], m.bits)
        for half in static(2):
            at, byte = m.high_byte(slot, 2 * v + half, g)
            octets[plane + at + byte] = T.cast(high >> T.uint32(16 * half), "uint8")
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
def choose(m, pairs, scores, column_tile, lane, query_weights, head, mask):
    """The mask of the warp's boosted channels; all warps rank all scores."""
    if m.selection == "random":
        mask[0] = m.fixed_mask(column_tile)
    else:
        score_columns(m, pairs, scores, column_tile, lane, query_weights, head)
        sync_packers(m.threads)
        mark_largest(m, scores, column_tile, lane, mask)


@T.macro
def first_slot(m, shared, column_tile, slot):
    """Boosted channels below the column tile -> slot."""
    slot[0] = 0
    for w in T.serial(column_tile):
        slot[0] = slot[0] + ones(shared[m.masks + w])


@T.macro
def quantize_boosted(m, range_search, tile, part, pool, pool_meta, unit, tx, query_weights=None, head=None):
    """The tile of one block's tokens in shared memory -> all planes of the record at ``unit``.

    query_weights fp32 [num_heads_kv, head_dim], of which row ``head``: where channels are weighted by queries.
    """
    column_tile, lane = tx // layout.LANES, tx % layout.LANES
    shared = T.alloc_shared((m.shared_words,), "uint32")
    scores = T.view(shared, (m.shared_words,), "float32")
    octets = T.view(shared, (m.shared_words * layout.WORD_BYTES,), "uint8")
    pairs = T.alloc_local((COLUMNS * m.held,), tile.dtype)
    words = T.alloc_local((m.words,), "uint32")
    codes = T.alloc_local((m.code_words,), "uint32")
    mask = T.alloc_local((1,), "uint32")
    for col8, i in product(static(2), static(m.held // MATRICES)):
        load_fragment(False, tile, m.place(column_tile, col8, MATRICES * i, lane), pairs, col8 * m.held + MATRICES * i)
    sync_packers(m.threads)  # the compiler may put the scratch where the tile is
    clear_staged(m, shared, tx)
    choose(m, pairs, scores, column_tile, lane, query_weights, head, mask)
    if lane == 0:
        shared[m.masks + column_tile] = mask[0]
    boosted, slot = T.alloc_local((COLUMNS,), "int32"), T.alloc_local((1,), "int32")
    for c in static(COLUMNS):
        boosted[c] = T.cast(is_boosted(mask[0], m.column_of(column_tile, lane % 4, c)), "int32")
    low, high, scale, zero, inverse, steps = (T.alloc_local((1,), "float32") for _ in range(6))
    own = m.column_of(column_tile, lane % 4, own_column(lane))
    steps[0] = m.steps_of(is_boosted(mask[0], own))
    rows = range(m.held)
    column_limits(pairs, m.held, rows, lane, low, high)
    column_errors = partial(boosted_errors, m, boosted) if range_search else None
    span_columns(pairs, m.held, rows, lane, column_errors, steps[0], m.storage, low, high, scale, zero, inverse)
    if is_writer(lane):
        store_meta(pool_meta, unit, m.meta_offset(0, own), scale[0], m.storage)
        store_meta(pool_meta, unit, m.meta_offset(1, own), zero[0], m.storage)
    for w in T.unroll(m.words):
        words[w] = T.uint32(0)
    sync_packers(m.threads)  # all masks, and the cleared planes
    first_slot(m, shared, column_tile, slot)
    for c in static(COLUMNS):
        from_zero, scaling = T.alloc_var("float32"), T.alloc_var("float32")
        from_zero = T.shfl_sync(zero[0], owner(c, lane))
        scaling = T.shfl_sync(inverse[0], owner(c, lane))
        pack_column(m, pairs, c, from_zero, scaling, boosted[c] != 0, codes, words)
        if boosted[c] != 0:
            channel = m.column_of(column_tile, lane % 4, c)
            at = T.alloc_var("int32")
            at = slot[0] + ones(mask[0] & (bit_of(channel) - T.uint32(1)))
            stage_column(m, octets, codes, at, channel, lane // 4)
    store_words(m, pool, unit, column_tile, lane, words)
    sync_packers(m.threads)
    store_staged(m, pool, unit, shared, tx)


@T.macro
def dequantize_boosted(m, pool, pool_meta, unit, put, part, tx):
    """The record at ``unit`` -> put, two neighbouring channels at a time, by the first m.threads threads."""
    column_tile, lane = tx // layout.LANES, tx % layout.LANES
    g, t = lane // 4, lane % 4
    slots = T.alloc_shared((m.head_dim,), "int32")
    words = T.alloc_local((m.words,), "uint32")
    name_slots(m, pool, unit, slots, tx)
    load_words(m, pool, unit, column_tile, lane, words)
    for col8 in T.unroll(COLUMNS // 2):
        scale, zero = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
        high = T.alloc_local((2 * m.high_words,), "uint32")
        for e in static(2):
            channel = m.column_of(column_tile, t, 2 * col8 + e)
            scale[e] = load_meta(pool_meta, unit, m.meta_offset(0, channel))
            zero[e] = load_meta(pool_meta, unit, m.meta_offset(1, channel))
            load_high(m, pool, unit, slots[channel], g, high, e * m.high_words)
        for i in T.unroll(m.held):
            put(8 * i + g, m.column_of(column_tile, t, 2 * col8),
                [code_at(m, words, high, i, col8, e) * scale[e] + zero[e] for e in range(2)])


@T.macro
def load_high(m, pool, unit, slot, g, high, first):
    """The high bits of a lane's rows of a column in slot ``slot`` -> high from ``first`` on, 0 if it has no slot."""
    for w in T.unroll(m.high_words):
        high[first + w] = T.uint32(0)
        if slot >= 0:
            high_at, byte = m.high_byte(slot, w, g)
            high[first + w] = octet(pool, unit, m.high_at + high_at, byte)


def code_at(m, words, high, held, col8, e):
    """The code of a lane's element, as fp32."""
    word, shift = m.word_and_shift(held, 2 * col8 + e)
    high_word, high_shift = m.high_and_shift(held)
    low = (words[word] >> T.cast(shift, "uint32")) & T.uint32(m.steps)
    rest = (high[e * m.high_words + high_word] >> T.cast(high_shift, "uint32")) & T.uint32((1 << m.high_bits) - 1)
    return T.cast(low | (rest << T.uint32(m.bits)), "float32")


@T.macro
def name_slots(m, pool, unit, slots, tx):
    """The index of a record -> slots [head_dim] in shared memory: each channel's slot, -1 if it is not boosted."""
    if tx < m.head_dim:
        slots[tx] = -1
    sync_packers(m.threads)
    if tx < m.boost:
        at = m.index_at + tx
        named = T.alloc_var("int32")
        named = T.cast(octet(pool, unit, at // 4 * 4, at % 4), "int32")
        if named < m.head_dim:
            slots[named] = tx
    sync_packers(m.threads)


def octet(pool, unit, at, byte):
    """Byte ``byte`` of the word at byte offset ``at`` of a record."""
    return (pool[unit + at // 128, at % 128 // 4] >> T.cast(BYTE * byte, "uint32")) & T.uint32(255)
