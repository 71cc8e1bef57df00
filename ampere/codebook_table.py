"""K's side as a table of products, of up to 4 query rows: VQ-LLM's K in place of entries of 4 channels.

    T[e][y] = q' of each row . (entry e of group y - the group's mean entry) 2^s, fp16, s of each row

takes the place of the entries, 2 bytes a row. A token's products are added up whatever their order: fp16 sums of a
word's four, then a multiply with ones that adds up the lanes in fp32 and brings row r to its columns. |T| < 2^13, so
that sums of four stay fp16. What the mean entries give is the same for all tokens: the logits' bias. Products of 2 rows
are one word, and there are two copies of them, for lanes that would ask one bank for different ones.
"""

import tilelang.language as T

from lowbit_attn import registers
from lowbit_attn.ampere import codebook, mma, softmax
from lowbit_attn.ampere.codebook_config import BOOK_ENTRIES, TABLE_VEC_SIZE
from lowbit_attn.ampere.codes import bits_of, pow2
from lowbit_attn.ampere.config import static

TABLE_TOP = 13  # log2 of what |products| are below
MIN_BOUND_LOG2 = -60
ONE, HIGH_ONE = 0x3C00, 0x3C00_0000  # fp16 1 in the low or the high half


@T.macro
def build(config, books, thread, lane, work):
    """Products in place of K's entries, which have come; all threads of the block, which then must meet."""
    size = TABLE_VEC_SIZE
    group = thread % config.k.num_groups
    mean, reach = (T.alloc_local((size,), "float32") for _ in range(2))
    query = T.alloc_local((config.rows * size,), "float32")
    below = T.alloc_local((config.rows,), "float32")
    for i in static(size // 2):  # combine.SASS_FORBID tells its loads by their 16 bytes
        for v in T.vectorized(2):
            mean[2 * i + v] = books.channels[books.head, codebook.MEAN, size * group + 2 * i + v]
        for v in T.vectorized(2):
            reach[2 * i + v] = books.channels[books.head, codebook.REACH, size * group + 2 * i + v]
    for row in static(config.rows):
        for v in T.vectorized(size):
            query[size * row + v] = work.row_query[row, size * group + v]
        scale_row(config, row, lane, mean, reach, query, below, work)
    for j in static(2):
        row, first = codebook.column_row(config, lane), 2 * j % config.rows
        work.selector[j] = codebook.kept(config, T.if_then_else(row == first, T.uint32(ONE), T.if_then_else(
            row == first + 1, T.uint32(HIGH_ONE), T.uint32(0))), lane)
    for i in T.serial(-(-BOOK_ENTRIES * config.k.num_groups // config.threads)):
        entry = T.alloc_var("int32")
        entry = (thread + i * config.threads) // config.k.num_groups
        if entry < BOOK_ENTRIES:
            replace_entry(config, entry, group, query, below, work)


@T.macro
def scale_row(config, row, lane, mean, reach, query, below, work):
    """q' of a row, of a group's channels -> as the table takes it; its product with the group's mean entry -> below.
    Slope and bias of the lanes' logits, if it is their row."""
    size = TABLE_VEC_SIZE
    largest, total, shift = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("int32")
    largest = T.float32(0.0)
    total = T.float32(0.0)
    for v in static(size):
        largest = T.max(largest, T.abs(query[size * row + v]) * reach[v])
        total = total + query[size * row + v] * mean[v]
    below[row] = total
    for bit in static((config.k.num_groups - 1).bit_length()):
        largest = T.max(largest, T.shfl_xor(largest, 1 << bit))
        total = total + T.shfl_xor(total, 1 << bit)
    largest = T.max(largest * T.float32(size), T.float32(2.0**MIN_BOUND_LOG2))
    shift = TABLE_TOP - registers.ceil_log2(bits_of(largest))
    for v in static(size):
        query[size * row + v] = query[size * row + v] * pow2(shift)
    below[row] = below[row] * pow2(shift)
    if softmax.query_row(config, 0, lane % 4) == row:
        work.slope[0] = work.token_slope[0] * pow2(-shift)
        work.bias[0] = work.token_slope[0] * total


@T.macro
def replace_entry(config, entry, group, query, below, work):
    """Products of the rows with entry ``entry`` of a group -> where it was, and their second copy if they have one."""
    size = TABLE_VEC_SIZE
    for v in T.vectorized(2):
        work.found[v] = work.products[entry, 2 * group + v]
    if config.key_words == 1:
        T.sync_warp()  # a row's entries have all been read
    for row in static(config.rows):
        product = T.alloc_var("float32")
        product = -below[row]
        for v in static(size):
            product = product + query[size * row + v] * T.cast(work.found_h[v], "float32")
        work.sums_h[row] = T.cast(product, "float16")
    if config.key_words == 1:
        for copy in static(2):
            work.products[entry, group ^ (copy * codebook.SECOND_COPY // 4)] = work.sums[0]
    else:
        for v in T.vectorized(2):
            work.products[entry, 2 * group + v] = work.sums[v]


@T.macro
def add_products(config, tile, work, acc_s):
    """A tile of 16 tokens: rows g and g + 8 of A, whose registers have rows 0 and 1, rows 2 and 3; of two rows, a
    word's sums and the next one's."""
    words, size = config.k.num_groups // 16, config.key_words
    for q in static(words):
        own = q % codebook.key_tables(config)
        for row8 in static(2):
            for i in static(4):
                codebook.lookup(config, codebook.K, size, work, work.words[(2 * tile + row8) * words + q], i, i,
                                2 * own, 16 * (q - own) * 4 * size, T.access_ptr(work.found[i * size], "w", size))
            for v in T.vectorized(2 * size):
                work.sums_h[v] = (work.found_h[v] + work.found_h[2 * size + v]) + (
                    work.found_h[4 * size + v] + work.found_h[6 * size + v])
            for pair in static(size):
                work.a[2 * (pair if size > 1 else q) + row8] = work.sums[pair]
        if size > 1 or q == words - 1:
            if words == size == 1:
                for row8 in static(2):
                    work.a[2 + row8] = T.uint32(0)
            mma.multiply("float16", work.a, work.selector, 0, acc_s, tile)

