"""The codebook path: entries from shared memory as A fragments, S^T = K Q^T and O^T = V^T P^T.

A lane asks for the groups of its tokens in an order rotated by g (K) or t (V) (formats/codebook_order.py), so that the
lanes of an access meet no bank twice. Two selects bring each entry to its place, or fewer where a query row has several
columns: those then have its q' (K), or its weights (V), of different rotations. With fewer than 8 rows K of 2 bits is a
table of products, whose order does not matter. What pages have beside codes:

    mean    q' . mean is added to logits of a page, once a page, by multiplies of its own
    norm    p becomes (p n)~ = fp16(p n 2^(E + 15)), E as of the register path (values.py)

q' is the query in the order of stored channels over their weights, 2^(11 - e) times, e of its row. This file has what
both sides share; read codebook_scores, codebook_table (K), codebook_values (V), codebook_pages, codebook_phases.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn import layout, registers, subnormals
from lowbit_attn.ampere import queries, softmax
from lowbit_attn.ampere.codebook_config import BOOK_ENTRIES, BOOK_ROW_BYTES, KEY_ROTATIONS, CodebookConfig
from lowbit_attn.ampere.codes import bits_of, pow2, value_at
from lowbit_attn.ampere.config import ACCESS_BYTES, LANES, static

SASS_NEED = ("LDGSTS", "LDSM", "HMMA", "MOVM")
ORDER, RECIPROCAL, MEAN, REACH = range(4)  # planes of k_channels
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
    products: Any  # K's as uint32 [256, words of a row], where it becomes a table of products
    chunks: Any  # shared uint32 [warps * slots, accesses, 4]
    low_of: Any  # shared fp16 [steps, lanes, 4]
    row_query: Any  # shared fp32 [rows, head_dim]: q' 2^-11, for K's table of products
    query: Any  # fp16 [steps, 4]
    low: Any  # fp16 [4]
    exponent: Any  # int32 [1]: e of the row of column g
    slope: Any  # fp32 [row values], of products with packed keys
    mean_slope: Any  # the same of products with means
    token_slope: Any  # ... and with 16-bit keys
    bias: Any  # what logits of all packed keys are larger by: of K's table
    offset: Any  # the same of a page's keys, with q' . mean
    offsets: Any  # uint32 [of K's words, then V, 2]: bytes in a row of a table, two lookups each
    words: Any  # uint32 [4 a run of a chunk]
    entry: Any  # uint32 [two tokens (K) or four (V), 4 lookups, pairs]
    straight: Any  # the same in the order of groups, or nearer to it
    found: Any  # uint32 [4 lookups, words] in K's table, and the same as fp16
    found_h: Any
    sums: Any  # uint32 [words], and the same as fp16
    sums_h: Any
    selector: Any  # uint32 [2]: B of sums of products
    a: Any
    b: Any  # uint32 [masks, 2]
    masks: Any  # uint32 [rotations left]: of P, see codebook_values
    mean: Any  # fp32 [4]: q' . mean
    norm: Any  # fp32 [2 a tile]
    value_exponent: Any  # int32 [1]
    pair: Any  # uint32 [1], and the same as fp16 [2]
    pair_h: Any


def allocate(config: CodebookConfig, ring) -> Registers:
    tables = T.view(ring.words, (config.tables_bytes,), "uint8")
    entry, straight, found, sums, pair = (T.alloc_local((n,), "uint32") for n in (32, 32, 8, 2, 1))
    slopes = [T.alloc_local((config.row_values,), "float32") for _ in range(5)]
    return Registers(
        tables, T.view(ring.words, (config.tables_bytes // config.row_bytes, config.row_bytes // 4), "uint32"),
        T.alloc_shared((config.warps * config.chunk_slots, config.chunk_accesses, 4), "uint32"),
        T.alloc_shared((config.steps, LANES, 4), "float16"),
        T.alloc_shared((config.rows, config.head_dim), "float32") if config.uses_table else None,
        T.alloc_local((4 * config.steps,), "float16"), T.alloc_local((4,), "float16"), T.alloc_local((1,), "int32"),
        *slopes, T.alloc_local((2 * key_tables(config) + 2,), "uint32"),
        T.alloc_local((4 * config.chunk_runs,), "uint32"), entry, straight, found, T.view(found, (16,), "float16"),
        sums, T.view(sums, (4,), "float16"), T.alloc_local((2,), "uint32"), T.alloc_local((4,), "uint32"),
        T.alloc_local((2 * config.value_masks,), "uint32"), T.alloc_local((config.value_masks,), "uint32"),
        T.alloc_local((4,), "float32"),
        T.alloc_local((2 * config.chunk_tiles,), "float32"), T.alloc_local((1,), "int32"), pair,
        T.view(pair, (2,), "float16"))


def operand_channel(config: CodebookConfig, step: int, t, i: int, rotation=0):
    """Channel of element i of a lane's B (and A) operand: b0 has 0 and 1, b1 has 2 and 3.

    rotation: groups t, t + 4, ... of a word that the column is ahead by, see ``columns_rotation``.
    """
    size = config.k.vec_size
    place = step if size == 4 else 2 * step + i // 2
    within = (place % KEY_ROTATIONS + rotation) % KEY_ROTATIONS
    return 4 * size * (place // KEY_ROTATIONS * KEY_ROTATIONS + within) + size * t + i % size


def columns_rotation(config: CodebookConfig, g):
    """Rotation of q' in column g: columns of a row have what lanes of other g ask for."""
    return 0 if config.uses_table else g % config.key_columns << config.key_selects


def column_row(config: CodebookConfig, lane):
    """Query row of column g."""
    return lane // (4 * config.columns_a_row)


class Row(NamedTuple):
    """The query row of a lane's column g: a row beyond the last is the last, times 0."""

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
def load_query(config, q, books, seq, row: Row, lane, values):
    """q' of a row, of the channels of a lane's operands, unscaled -> values."""
    t, rotation = lane % 4, columns_rotation(config, lane // 4)
    run = 2  # consecutive channels; combine.SASS_FORBID tells its loads by their 16 bytes
    order, reciprocal = (T.alloc_local((4 * config.steps,), "float32") for _ in range(2))
    for i in static(4 * config.steps // run):
        for v in T.vectorized(run):
            order[run * i + v] = books.channels[
                books.head, ORDER, operand_channel(config, run * i // 4, t, run * i % 4, rotation) + v]
        for v in T.vectorized(run):
            reciprocal[run * i + v] = books.channels[
                books.head, RECIPROCAL, operand_channel(config, run * i // 4, t, run * i % 4, rotation) + v]
    for i in static(4 * config.steps):
        values[i] = weighted_query(q, seq, row, order[i], reciprocal[i])


@T.macro
def start(config, q, books, rows, ring, thread, work, softmax_scale_log2):
    """Tables on their way to shared memory, q' and its rows' slopes; all threads of the block, which then must meet."""
    lane = thread % LANES
    if not config.is_phased:
        for side in (K, V):
            load_table(config, (books.k, books.v)[side], books.head, ring, side, thread)
            T.ptx_commit_group()
    values = T.alloc_local((4 * config.steps,), "float32")
    largest, up, live = (T.alloc_var("float32") for _ in range(3))
    query, head = T.alloc_var("int32"), T.alloc_var("int32")
    live = T.if_then_else(column_row(config, lane) < rows.count, T.float32(1.0), T.float32(0.0))
    query = queries.query(rows, T.min(column_row(config, lane), rows.count - 1))
    head = queries.head(rows, T.min(column_row(config, lane), rows.count - 1))
    largest = T.float32(2.0**subnormals.MIN_QUERY_LOG2)
    load_query(config, q, books, rows.seq, Row(query, head, live), lane, values)
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
    if config.uses_table:
        if T.And(thread < LANES, lane // 4 % config.columns_a_row == 0):
            for i in static(4 * config.steps):
                work.row_query[column_row(config, lane), operand_channel(config, i // 4, lane % 4, i % 4)] = (
                    values[i] * pow2(-work.exponent[0]))
    start_slopes(config, lane, work, softmax_scale_log2)
    for i in static(2):
        for word in static(key_tables(config)):
            work.offsets[2 * word + i] = kept(
                config, pair_of(config, [key_offset(config, word, 2 * i + e, lane) for e in (0, 1)]), lane)
        work.offsets[2 * key_tables(config) + i] = kept(
            config, pair_of(config, [value_offset(config, 2 * i + e, lane) for e in (0, 1)]), lane)
    work.value_exponent[0] = registers.MAX_VALUE_EXPONENT if config.v.is_shifted else 0


@T.macro
def start_slopes(config, lane, work, softmax_scale_log2):
    """What products with a lane's rows become logits by."""
    for v in static(config.row_values):
        row = softmax.query_row(config, v, lane % 4)
        exponent = T.shfl_sync(work.exponent[0], 4 * config.columns_a_row * row)
        work.mean_slope[v] = softmax_scale_log2 * pow2(exponent - subnormals.QUERY_OWN_SHIFT)
        work.slope[v] = work.mean_slope[v]
        work.token_slope[v] = softmax_scale_log2 * pow2(exponent)
        work.bias[v] = T.float32(0.0)


def kept(config, value, lane):
    """What a lane computes once: the compiler would do it again in each chunk, but for what a shuffle gave. With 8 rows
    it has no registers for that."""
    return T.shfl_sync(value, lane) if config.columns_a_row > 1 else value


def key_tables(config) -> int:
    """Words of K's codes that have offsets of their own: the second copy of entries is not a constant further on."""
    return config.k.num_groups // 16 if has_key_copy(config) else 1


def has_key_copy(config) -> bool:
    """Whether lanes with larger g look up one-word entries of K, or products, in a second copy: see SECOND_COPY."""
    return config.key_words == 1 and (config.has_second_copy or config.uses_table)


def key_offset(config, word: int, i: int, lane):
    """Byte, in a row of the table, of the group that lane 4g + t asks for at lookup i of a word of K's."""
    own = 4 * config.key_words * (16 * word + 4 * ((i + lane // 4) % 4) + lane % 4)
    return own ^ (lane // 16 * SECOND_COPY) if has_key_copy(config) else own


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
def lookup(config, side, words, work, word, byte, i, first, more, out):
    """Entry of ``words`` registers of the code in a byte of a word -> where ``out`` points.

    first: of the offsets, of which lookup i has its own; more: bytes that the entry lies further.
    """
    place = T.alloc_var("uint32")
    base = T.call_pure_extern("uint32", "cute::cast_smem_ptr_to_uint", T.access_ptr(work.tables[0], "r"))
    place = T.call_pure_extern("uint32", "__byte_perm", word, work.offsets[first + i // 2],
                               T.uint32(0x6600 | byte << 4 | 4 + i % 2))
    T.call_extern("handle", f"cutlass::arch::shared_load<{4 * words}>", out,
                  place // T.uint32(row_scale(config)) + (base + T.uint32(config.table_at(side) + more)))


@T.macro
def straighten(pairs, rotations, selects, first, by, work):
    """straight[j] = entry[(j - by) mod rotations], by the lowest bits of ``by``; of one token, from ``first`` on."""
    middle = T.alloc_local((4 * pairs,), "uint32")
    for j in static(rotations):
        for p in static(pairs):
            middle[j * pairs + p] = selected(selects > 0, by & 1, work.entry[first + (j - 1) % rotations * pairs + p],
                                              work.entry[first + j * pairs + p])
    for j in static(rotations):
        for p in static(pairs):
            work.straight[first + j * pairs + p] = selected(
                selects > 1, by & 2, middle[(j - 2) % rotations * pairs + p], middle[j * pairs + p])


def selected(is_asked: bool, bit, late, early):
    """A word behind a select, or as it was."""
    return T.if_then_else(bit != 0, late, early) if is_asked else early


@T.macro
def load_codes(config, piece, slot, lane, work):
    """A lane's words of codes of a chunk."""
    for run in static(config.code_accesses(piece) // LANES):
        for v in T.vectorized(4):
            work.words[4 * run + v] = work.chunks[slot, LANES * run + lane, v]


@T.macro
def query_for_tokens(config, q, books, rows, lane, work, ops):
    """q' 2^-e as B operands, and what their rounding leaves, for 16-bit keys, which are stored ones too."""
    down = T.alloc_var("float32")
    query, head = T.alloc_var("int32"), T.alloc_var("int32")
    down = T.if_then_else(column_row(config, lane) < rows.count, pow2(-work.exponent[0]), T.float32(0.0))
    query = queries.query(rows, T.min(column_row(config, lane), rows.count - 1))
    head = queries.head(rows, T.min(column_row(config, lane), rows.count - 1))
    for i in static(2 * config.o_tiles):
        for v in static(2):
            value = T.alloc_var("float32")
            value = stored_query(q, books, rows.seq, Row(query, head, down), 8 * i + 2 * (lane % 4) + v)
            ops.rows[2 * i + v] = T.cast(value, config.dtype)
            ops.rest[2 * i + v] = T.cast(value - value_at(ops.rows[2 * i + v]), config.dtype)


assert BOOK_ENTRIES == 256 and layout.PAGE_TOKENS == 128
