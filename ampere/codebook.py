"""The codebook path: entries from shared memory as A fragments, S^T = K Q^T and O^T = V^T P^T.

A lane asks for the groups of its tokens in an order rotated by g (K) or t (V) (formats/codebook_order.py), so that the
lanes of an access meet no bank twice, and two selects bring each entry to its place. What pages have beside codes:

    mean    q' . mean is what logits of a page start from, once a page, by multiplies of their own
    norm    p becomes (p n)~ = fp16(p n 2^(E + 15)), E as of the register path (values.py)

q' is the query in the order of stored channels over their weights, 2^(11 - e) times, e of its row. The rows of O are
channels in the order of lookups; ``finish`` puts them in order.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn import layout, registers, subnormals
from lowbit_attn.ampere import mma, queries, softmax
from lowbit_attn.ampere.codebook_config import BOOK_ENTRIES, BOOK_ROW_BYTES, CodebookConfig
from lowbit_attn.ampere.codes import bits_of, lower_value_exponent, pow2, value_at, value_of_half
from lowbit_attn.ampere.config import ACCESS_BYTES, LANES, TILE, static

SASS_NEED = ("LDGSTS", "LDSM", "HMMA", "MOVM")
ORDER, RECIPROCAL = 0, 1  # planes of k_channels
LOW, HIGH = 0x5410, 0x7632  # selectors of the low and of the high halves of two words
K, V = 0, 1
SECOND_COPY = 192  # bits in which the place of an entry's second copy in a row differs (Attached.planes)


class Books(NamedTuple):
    """A layer's codebooks in global memory, and the KV head."""

    k: Any  # uint32 [heads, 256, 64]
    v: Any
    channels: Any  # fp32 [heads, 4, head_dim]
    head: Any


class Registers(NamedTuple):
    """A thread's arrays; MMA operands (query, low, a, b) have no views."""

    tables: Any  # shared: K's and V's codebooks, uint8
    chunks: Any  # shared uint32 [warps * slots, accesses, 4]
    low_of: Any  # shared fp16 [steps, lanes, 4]
    query: Any  # fp16 [steps, 4]
    low: Any  # fp16 [4]
    exponent: Any  # int32 [1]: e of row g
    slope: Any  # fp32 [row values], of packed keys
    token_slope: Any  # the same of 16-bit keys
    offsets: Any  # uint32 [of K's words, then V, 2]: bytes in a row of a table, two lookups each
    words: Any  # uint32 [4 a run of a chunk]
    entry: Any  # uint32 [two tokens (K) or four (V), 4 lookups, pairs]
    rotated: Any  # the same in the order of groups
    a: Any
    b: Any  # uint32 [2]
    mean: Any  # fp32 [4]: q' . mean
    norm: Any  # fp32 [2 a tile]
    value_exponent: Any  # int32 [1]
    pair: Any  # uint32 [1], and the same as fp16 [2]
    pair_h: Any


def allocate(config: CodebookConfig, ring) -> Registers:
    tables = T.view(ring.words, (config.tables_bytes,), "uint8")
    pair = T.alloc_local((1,), "uint32")
    entry, rotated = (T.alloc_local((4 * 4 * 2,), "uint32") for _ in range(2))
    return Registers(
        tables, T.alloc_shared((config.warps * config.chunk_slots, config.chunk_accesses, 4), "uint32"),
        T.alloc_shared((config.steps, LANES, 4), "float16"), T.alloc_local((4 * config.steps,), "float16"),
        T.alloc_local((4,), "float16"), T.alloc_local((1,), "int32"), T.alloc_local((2,), "float32"),
        T.alloc_local((2,), "float32"), T.alloc_local((2 * key_tables(config) + 2,), "uint32"),
        T.alloc_local((4 * config.chunk_runs,), "uint32"), entry, rotated,
        T.alloc_local((4,), "uint32"), T.alloc_local((2,), "uint32"), T.alloc_local((4,), "float32"),
        T.alloc_local((2 * config.chunk_tiles,), "float32"), T.alloc_local((1,), "int32"), pair,
        T.view(pair, (2,), "float16"))


def operand_channel(config: CodebookConfig, step: int, t, i: int):
    """Channel of element i of a lane's B (and A) operand: b0 has 0 and 1, b1 has 2 and 3."""
    if config.k.vec_size == 4:
        return TILE * step + 4 * t + i
    return TILE * step + 8 * (i // 2) + 2 * t + i % 2


class Row(NamedTuple):
    """The query row g of a lane: a row beyond the last is the last, times 0."""

    query: Any
    head: Any
    live: Any


def stored_query(q, books, seq, row: Row, channel):
    """q' of a row and stored channel, unscaled, fp32."""
    return weighted_query(q, seq, row, books.channels[books.head, ORDER, channel],
                          books.channels[books.head, RECIPROCAL, channel])


def weighted_query(q, seq, row: Row, order, reciprocal):
    """q of the channel whose number is in the bits of ``order``, divided by its weight."""
    return T.cast(q[seq, row.query, row.head, bits_of(order)], "float32") * reciprocal * row.live


@T.macro
def load_query(config, q, books, seq, row: Row, t, values):
    """q' of a row, of the channels of a lane's operands, unscaled -> values."""
    run = 2  # consecutive channels; combine.SASS_FORBID tells its loads by their 16 bytes
    order, reciprocal = (T.alloc_local((4 * config.steps,), "float32") for _ in range(2))
    for i in static(4 * config.steps // run):
        for v in T.vectorized(run):
            order[run * i + v] = books.channels[
                books.head, ORDER, operand_channel(config, run * i // 4, t, run * i % 4) + v]
        for v in T.vectorized(run):
            reciprocal[run * i + v] = books.channels[
                books.head, RECIPROCAL, operand_channel(config, run * i // 4, t, run * i % 4) + v]
    for i in static(4 * config.steps):
        values[i] = weighted_query(q, seq, row, order[i], reciprocal[i])


@T.macro
def start(config, q, books, rows, ring, thread, work, softmax_scale_log2):
    """Tables on their way to shared memory, q' and its rows' slopes; all threads of the block, which then must meet."""
    lane = thread % LANES
    if not config.is_phased:
        load_table(config, books.k, books.head, ring, K, thread)
        load_table(config, books.v, books.head, ring, V, thread)
        T.ptx_commit_group()
    values = T.alloc_local((4 * config.steps,), "float32")
    largest, up, live = (T.alloc_var("float32") for _ in range(3))
    query, head = T.alloc_var("int32"), T.alloc_var("int32")
    live = T.if_then_else(lane // 4 < rows.count, T.float32(1.0), T.float32(0.0))
    query = queries.query(rows, T.min(lane // 4, rows.count - 1))
    head = queries.head(rows, T.min(lane // 4, rows.count - 1))
    largest = T.float32(2.0**subnormals.MIN_QUERY_LOG2)
    load_query(config, q, books, rows.seq, Row(query, head, live), lane % 4, values)
    for i in static(4 * config.steps):
        largest = T.max(largest, T.abs(values[i]))
    for distance in static(2):
        largest = T.max(largest, T.shfl_xor(largest, distance + 1))
    work.exponent[0] = T.min(registers.floor_log2(bits_of(largest)), 126)
    up = pow2(subnormals.QUERY_OWN_SHIFT - work.exponent[0])
    for step in static(config.steps):
        for i in static(4):
            work.query[4 * step + i] = T.cast(values[4 * step + i] * up, "float16")
            if thread < LANES:
                work.low_of[step, lane, i] = T.cast(
                    values[4 * step + i] * up - T.cast(work.query[4 * step + i], "float32"), "float16")
    for v in static(2):
        exponent = T.shfl_sync(work.exponent[0], 8 * (lane % 4) + 4 * v)
        work.slope[v] = softmax_scale_log2 * pow2(exponent - subnormals.QUERY_OWN_SHIFT)
        work.token_slope[v] = softmax_scale_log2 * pow2(exponent)
    for i in static(2):
        for q16 in static(key_tables(config)):
            work.offsets[2 * q16 + i] = pair_of(config, [key_offset(config, q16, 2 * i + e, lane) for e in (0, 1)])
        work.offsets[2 * key_tables(config) + i] = pair_of(
            config, [value_offset(config, 2 * i + e, lane) for e in (0, 1)])
    work.value_exponent[0] = registers.MAX_VALUE_EXPONENT if config.v.is_shifted else 0


def key_tables(config) -> int:
    """Words of K's codes that have offsets of their own: the second copy of entries is not a constant further on."""
    return config.k.num_groups // 16 if config.has_second_copy and config.k.pairs == 1 else 1


def key_offset(config, word: int, i: int, lane):
    """Byte, in a row of the table, of the group that lane 4g + t asks for at lookup i of a word of K's."""
    own = 2 * config.k.vec_size * (16 * word + 4 * ((i + lane // 4) % 4) + lane % 4)
    return own ^ (lane // 16 * SECOND_COPY) if key_tables(config) > 1 else own


def value_offset(config, i: int, lane):
    """Byte, in a row of the table, of the group of lookup i of V; beyond its rotations there is none."""
    rotations = config.v.rotations
    own = 2 * config.v.vec_size * (rotations * (lane // 4) + (i + lane % 4) % rotations)
    return own ^ (lane % 4 // 2 * SECOND_COPY) if config.has_second_copy and rotations == 2 else own


def pair_of(config, offsets):
    """Two offsets in the lower bytes of a word."""
    first, second = (T.cast(row_scale(config) * x, "uint32") for x in offsets)
    return first | (second << T.uint32(8))


def row_scale(config) -> int:
    """What places in a table are multiplied with where they are put together: 256 bytes a row are a byte's place."""
    return BOOK_ROW_BYTES // config.row_bytes


@T.macro
def load_table(config, book, head, ring, side, thread):
    """Start copying a side's table, by all threads; of rows with two copies of entries maybe only the first."""
    row, first = config.row_bytes // ACCESS_BYTES, config.table_at(side) // ACCESS_BYTES
    for i in T.serial(-(-BOOK_ENTRIES * row // config.threads)):
        at = T.alloc_var("int32")
        at = i * config.threads + thread
        if at < BOOK_ENTRIES * row:
            T.ptx_cp_async(
                T.access_ptr(ring.words[(first + at) // config.slot_accesses, (first + at) % config.slot_accesses, 0],
                             "w", 4),
                T.access_ptr(book[head, at // row, at % row * 4], "r", 4), 4)


@T.macro
def lookup(config, side, work, word, byte, i, first, more, out):
    """Entry of the code in a byte of a word -> work.entry[out ..].

    first: of the offsets, of which lookup i has its own; more: bytes that the entry lies further.
    """
    piece, place = config.pieces[side], T.alloc_var("uint32")
    base = T.call_pure_extern("uint32", "cute::cast_smem_ptr_to_uint", T.access_ptr(work.tables[0], "r"))
    place = T.call_pure_extern("uint32", "__byte_perm", word, work.offsets[first + i // 2],
                               T.uint32(0x6600 | byte << 4 | 4 + i % 2))
    T.call_extern("handle", f"cutlass::arch::shared_load<{4 * piece.pairs}>",
                  T.access_ptr(work.entry[out], "w", piece.pairs),
                  place // T.uint32(row_scale(config)) + (base + T.uint32(config.table_at(side) + more)))


@T.macro
def rotate(pairs, rotations, first, by, work):
    """rotated[j] = entry[(j - by) mod rotations] of one token's lookups, from ``first`` on."""
    middle = T.alloc_local((4 * pairs,), "uint32")
    for j in static(rotations):
        for p in static(pairs):
            middle[j * pairs + p] = T.if_then_else((by & 1) != 0, work.entry[first + (j - 1) % rotations * pairs + p],
                                                   work.entry[first + j * pairs + p])
    for j in static(rotations):
        for p in static(pairs):
            if rotations == 4:
                work.rotated[first + j * pairs + p] = T.if_then_else(
                    (by & 2) != 0, middle[(j - 2) % rotations * pairs + p], middle[j * pairs + p])
            else:
                work.rotated[first + j * pairs + p] = middle[j * pairs + p]


@T.macro
def load_codes(config, piece, slot, lane, work):
    """A lane's words of codes of a chunk."""
    for run in static(config.code_accesses(piece) // LANES):
        for v in T.vectorized(4):
            work.words[4 * run + v] = work.chunks[slot, LANES * run + lane, v]


@T.macro
def mean_product(config, slot, lane, work):
    """q' . mean of the page whose first chunk is in ``slot`` -> work.mean; all rows of A are the mean."""
    first, t = config.code_accesses(config.k), lane % 4
    mma.clear(work.mean, 4)
    for step in static(config.steps):
        for half in static(2):
            word = operand_channel(config, step, t, 2 * half) // 2
            work.a[2 * half] = work.chunks[slot, first + word // 4, word % 4]
            work.a[2 * half + 1] = work.a[2 * half]
        for i in T.vectorized(4):
            work.low[i] = work.low_of[step, lane, i]
        mma.multiply("float16", work.a, work.query, step, work.mean, 0)
        mma.multiply("float16", work.a, work.low, 0, work.mean, 0)


@T.macro
def scores(config, slot, lane, work, ops):
    """Logits of a chunk of K in ops.acc_s."""
    piece, g = config.k, lane // 4
    load_codes(config, piece, slot, lane, work)
    for i in static(4 * config.chunk_tiles):
        ops.acc_s[i] = work.mean[i % 4]
    for tile in static(config.chunk_tiles):
        for q in static(piece.num_groups // 16):
            for row8 in static(2):
                word = (2 * tile + row8) * (piece.num_groups // 16) + q
                for i in static(4):
                    own = q % key_tables(config)
                    lookup(config, K, work, work.words[word], i, i, 2 * own, 16 * (q - own) * 2 * piece.vec_size,
                            (4 * row8 + i) * piece.pairs)
                rotate(piece.pairs, 4, 4 * row8 * piece.pairs, g, work)
            for j in static(2 * piece.pairs):
                for half in static(2):
                    for row8 in static(2):
                        work.a[2 * half + row8] = work.rotated[4 * row8 * piece.pairs + 2 * j + half]
                mma.multiply("float16", work.a, work.query, 2 * piece.pairs * q + j, ops.acc_s, tile)
    softmax.scale_rows(config, ops.acc_s, config.chunk_tiles, work.slope)


@T.macro
def load_norms(config, slot, chunk, lane, work, o_factor, moved):
    """Norms of the tokens g and g + 8 of a chunk's tiles; E after it, what O is multiplied with, and whether."""
    first, g = config.code_accesses(config.v), lane // 4
    largest = T.alloc_var("uint32")
    o_factor[0] = T.float32(1.0)
    moved[0] = 0
    for i in static(2 * config.chunk_tiles):
        work.norm[i] = T.float32(1.0)
    if config.v.is_shifted:
        largest = T.uint32(0)
        for i in static(2 * config.chunk_tiles):
            token8 = chunk * config.chunk_tokens % 32 // 8 + i  # the eight among those of the first 32 tokens
            half = T.alloc_var("uint32")
            half = (work.chunks[slot, first + token8 // 4 * 4 + g // 2, token8 % 4]
                    >> T.cast(16 * (g % 2), "uint32")) & T.uint32(0xFFFF)
            work.norm[i] = value_of_half(T.cast(half, "int32"), "float16")
            largest = T.max(largest, half & T.uint32(0x7FFF))
        largest = T.warp_reduce_max(largest)
        lower_value_exponent(T.cast(largest, "int32"), "float16", work, o_factor, moved)


@T.macro
def values(config, slot, lane, work, ops, acc_o):
    """O^T += V^T P^T over a chunk of V."""
    piece, t = config.v, lane % 4
    factor = T.alloc_var("float32")
    factor = pow2(work.value_exponent[0] + subnormals.PROBABILITY_SHIFT)
    load_codes(config, piece, slot, lane, work)
    for tile in static(config.chunk_tiles):
        for row8 in static(2):
            for v in T.vectorized(2):
                work.pair_h[v] = T.cast(ops.acc_s[4 * tile + 2 * row8 + v] * (work.norm[2 * tile + row8] * factor),
                                        "float16")
            T.call_extern("handle", mma.MOVMATRIX, work.pair[0], work.b[row8])
        for run in static(piece.runs):
            for token in static(4):  # 2t + e of the first eight, then of the second
                for i in static(piece.rotations):
                    lookup(config, V, work, work.words[(tile * piece.runs + run) * piece.rotations + i], token, i,
                            2 * key_tables(config), 8 * piece.rotations * run * 2 * piece.vec_size,
                            (4 * token + i) * piece.pairs)
                rotate(piece.pairs, piece.rotations, 4 * token * piece.pairs, t, work)
            for j in static(piece.rotations):
                for p in static(piece.pairs):
                    for col8 in static(2):
                        for row8 in static(2):
                            work.a[2 * col8 + row8] = T.call_pure_extern(
                                "uint32", "__byte_perm", work.rotated[(8 * col8 + j) * piece.pairs + p],
                                work.rotated[(8 * col8 + 4 + j) * piece.pairs + p], T.uint32(HIGH if row8 else LOW))
                    mma.multiply("float16", work.a, work.b, 0, acc_o, (run * piece.rotations + j) * piece.pairs + p)


def output_channel(config, tile: int, row8: int, g):
    """Channel of rows g (and g + 8) of an accumulator tile of O."""
    piece = config.v
    p, j, run = tile % piece.pairs, tile // piece.pairs % piece.rotations, tile // piece.pairs // piece.rotations
    return piece.vec_size * (8 * piece.rotations * run + piece.rotations * g + j) + 2 * p + row8


@T.macro
def finish(config, ring, warp, lane, work, acc_o):
    """O of the packed pages in true scale and in the order of channels, through the place of the tables."""
    scale, g = T.alloc_var("float32"), lane // 4
    scale = pow2(-subnormals.PROBABILITY_SHIFT - work.value_exponent[0])
    T.sync_threads()  # no warp needs the tables any more
    for i in static(4 * config.o_tiles):
        row = softmax.query_row(i % 2, lane % 4)
        channel = output_channel(config, i // 4, i % 4 // 2, g)
        ring.floats[warp, row * config.merge_row + channel] = acc_o[i] * scale
    T.sync_warp()
    for i in static(4 * config.o_tiles):
        row = softmax.query_row(i % 2, lane % 4)
        acc_o[i] = ring.floats[warp, row * config.merge_row + TILE * (i // 4) + 8 * (i % 4 // 2) + g]
    T.sync_warp()


@T.macro
def query_for_tokens(config, q, books, rows, lane, work, ops):
    """q' 2^-e as B operands, and what their rounding leaves, for 16-bit keys, which are stored ones too."""
    down = T.alloc_var("float32")
    query, head = T.alloc_var("int32"), T.alloc_var("int32")
    down = T.if_then_else(lane // 4 < rows.count, pow2(-work.exponent[0]), T.float32(0.0))
    query = queries.query(rows, T.min(lane // 4, rows.count - 1))
    head = queries.head(rows, T.min(lane // 4, rows.count - 1))
    for i in static(2 * config.o_tiles):
        for v in static(2):
            value = T.alloc_var("float32")
            value = stored_query(q, books, rows.seq, Row(query, head, down), 8 * i + 2 * (lane % 4) + v)
            ops.rows[2 * i + v] = T.cast(value, config.dtype)
            ops.rest[2 * i + v] = T.cast(value - value_at(ops.rows[2 * i + v]), config.dtype)


assert BOOK_ENTRIES == 256 and layout.PAGE_TOKENS == 128
