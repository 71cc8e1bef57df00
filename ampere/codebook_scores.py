"""S of a chunk of K's codes, and of its page's mean: logits of the lane's rows."""

import tilelang.language as T

from lowbit_attn.ampere import codebook, codebook_table, mma, softmax
from lowbit_attn.ampere.codebook_config import KEY_ROTATIONS
from lowbit_attn.ampere.config import static


@T.macro
def mean_product(config, slot, lane, work):
    """What logits of the page whose first chunk is in ``slot`` are larger by than products of its codes; rows 0
    to 7 of A are its mean. Even columns have q' without a rotation."""
    first, t = config.code_accesses(config.k), lane % 4
    mma.clear(work.mean, 4)
    for step in static(config.steps):
        for half in static(2):
            word = codebook.operand_channel(config, step, t, 2 * half) // 2
            work.a[2 * half] = work.chunks[slot, first + word // 4, word % 4]
            work.a[2 * half + 1] = T.uint32(0)
        for i in T.vectorized(4):
            work.low[i] = work.low_of[step, lane, i]
        mma.multiply("float16", work.a, work.query, step, work.mean, 0)
        mma.multiply("float16", work.a, work.low, 0, work.mean, 0)
    for v in static(config.row_values):
        work.offset[v] = work.mean[v] * work.mean_slope[v] + work.bias[v]


@T.macro
def scores(config, slot, lane, work, ops):
    """Logits of a chunk of K in ops.acc_s."""
    codebook.load_codes(config, config.k, slot, lane, work)
    mma.clear(ops.acc_s, 4 * config.chunk_tiles)
    for tile in static(config.chunk_tiles):
        if config.uses_table:
            codebook_table.add_products(config, tile, work, ops.acc_s)
        else:
            add_entries(config, tile, lane // 4, work, ops.acc_s)
    if config.key_columns > 1 and not config.uses_table:
        own_rotation(config, lane // 4, ops.acc_s)
    for n in static(softmax.count(config, config.chunk_tiles)):
        i = softmax.element(config, n)
        v = softmax.row_value(config, i)
        ops.acc_s[i] = ops.acc_s[i] * work.slope[v] + work.offset[v]


@T.macro
def add_entries(config, tile, g, work, acc_s):
    """A tile of 16 tokens: rows of A are entries, columns q' of a row and rotation."""
    piece = config.k
    for q in static(piece.num_groups // 16):
        for row8 in static(2):
            word = (2 * tile + row8) * (piece.num_groups // 16) + q
            own = q % codebook.key_tables(config)
            for i in static(4):
                codebook.lookup(config, codebook.K, piece.pairs, work, work.words[word], i, i, 2 * own,
                                16 * (q - own) * 2 * piece.vec_size,
                                T.access_ptr(work.entry[(4 * row8 + i) * piece.pairs], "w", piece.pairs))
            codebook.straighten(piece.pairs, KEY_ROTATIONS, config.key_selects, 4 * row8 * piece.pairs, g, work)
        for j in static(2 * piece.pairs):
            for half in static(2):
                for row8 in static(2):
                    work.a[2 * half + row8] = work.straight[4 * row8 * piece.pairs + 2 * j + half]
            mma.multiply("float16", work.a, work.query, 2 * piece.pairs * q + j, acc_s, tile)


@T.macro
def own_rotation(config, g, acc_s):
    """The column of a row that has the rotation of token g -> the even accumulators."""
    for i in static(2 * config.chunk_tiles):
        acc_s[2 * i] = T.if_then_else(T.shift_right(g, config.key_selects) & 1 != 0, acc_s[2 * i + 1], acc_s[2 * i])
