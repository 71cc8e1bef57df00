"""V of a chunk's codes: O^T += V^T P^T, entries of two tokens as rows of A, which are channels in the order of lookups.

Selects leave rotations of a run's groups apart, by t; the columns of a query row tell those apart: with P masked to the
lanes of one group a column adds up what belongs to that group. A lane's accumulators are all of its own rows:

    O[(run, x, pair of channels), element]    group R g + x + X v of the run, of column v of the row

X tiles of a pair (config.value_tiles). ``finish`` puts channels in order.
"""

import tilelang.language as T

from lowbit_attn import subnormals
from lowbit_attn.ampere import codebook, mma, softmax
from lowbit_attn.ampere.codes import lower_value_exponent, pow2, value_of_half
from lowbit_attn.ampere.config import TILE, static

LOW, HIGH = 0x5410, 0x7632  # selectors of the low and of the high halves of two words


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
def start(config, lane, work):
    """Masks of P: masks[k] is all ones in lanes whose rotation is k strides further than the group of their column."""
    left, selects = config.value_masks, config.value_selects
    own = T.alloc_var("int32")
    own = T.shift_right(lane % 4, selects) - (config.value_tiles >> selects) * (lane // 4 % config.columns_a_row)
    for k in static(left):
        work.masks[k] = codebook.kept(
            config, T.if_then_else((own + 4 * left - k) % left == 0, T.uint32(0xFFFF_FFFF), T.uint32(0)), lane)


@T.macro
def weights(config, tile, factor, work, acc_s):
    """P^T of a tile of 16 tokens with their norms, masked: B operands."""
    word = T.alloc_local((1,), "uint32")
    for row8 in static(2):
        for v in T.vectorized(2):
            work.pair_h[v] = T.cast(acc_s[4 * tile + 2 * row8 + v % config.row_values]
                                    * (work.norm[2 * tile + row8] * factor), "float16")
        T.call_extern("handle", mma.MOVMATRIX, work.pair[0], word[0])
        for k in static(config.value_masks):
            work.b[2 * k + row8] = word[0] if config.value_masks == 1 else word[0] & work.masks[k]


@T.macro
def values(config, slot, lane, work, ops, acc_o):
    """O^T += V^T P^T over a chunk of V."""
    piece, factor = config.v, T.alloc_var("float32")
    factor = pow2(work.value_exponent[0] + subnormals.PROBABILITY_SHIFT)
    codebook.load_codes(config, piece, slot, lane, work)
    for tile in static(config.chunk_tiles):
        weights(config, tile, factor, work, ops.acc_s)
        for run in static(piece.runs):
            for token in static(4):  # 2t + e of the first eight, then of the second
                for i in static(piece.rotations):
                    codebook.lookup(
                        config, codebook.V, piece.pairs, work,
                        work.words[(tile * piece.runs + run) * piece.rotations + i], token, i,
                        2 * codebook.key_tables(config), 8 * piece.rotations * run * 2 * piece.vec_size,
                        T.access_ptr(work.entry[(4 * token + i) * piece.pairs], "w", piece.pairs))
                codebook.straighten(piece.pairs, piece.rotations, config.value_selects, 4 * token * piece.pairs,
                                    lane % 4, work)
            for j in static(piece.rotations):
                for pair in static(piece.pairs):
                    add_entries(config, run, j, pair, work, acc_o)


@T.macro
def add_entries(config, run, j, pair, work, acc_o):
    """Step j of a run's lookups, of a pair of channels, times the weights of each column that has their groups."""
    piece, stride = config.v, 1 << config.value_selects
    for col8 in static(2):
        for row8 in static(2):
            work.a[2 * col8 + row8] = T.call_pure_extern(
                "uint32", "__byte_perm", work.straight[(8 * col8 + j) * piece.pairs + pair],
                work.straight[(8 * col8 + 4 + j) * piece.pairs + pair], T.uint32(HIGH if row8 else LOW))
    for x in static(j % min(stride, config.value_tiles), config.value_tiles, stride):
        mma.multiply("float16", work.a, work.b, (x - j) // stride % config.value_masks, acc_o,
                     (run * config.value_tiles + x) * piece.pairs + pair)


def output_channel(config, tile: int, element: int, lane):
    """Channel of an element of an accumulator tile of O."""
    piece, tiles = config.v, config.value_tiles
    pair, x, run = tile % piece.pairs, tile // piece.pairs % tiles, tile // piece.pairs // tiles
    column = (2 * (lane % 4) + element % 2) % config.columns_a_row
    group = piece.rotations * (lane // 4) + (x + tiles * column) % piece.rotations
    return piece.vec_size * (8 * piece.rotations * run + group) + 2 * pair + element // 2


@T.macro
def finish(config, ring, warp, lane, work, acc_o):
    """O of the packed pages in true scale and in the order of channels, through the place of the tables."""
    scale, g = T.alloc_var("float32"), lane // 4
    scale = pow2(-subnormals.PROBABILITY_SHIFT - work.value_exponent[0])
    T.sync_threads()  # no warp needs the tables any more
    for i in static(4 * config.packed_o_tiles):
        row = softmax.query_row(config, softmax.row_value(config, i), lane % 4)
        ring.floats[warp, row * config.merge_row + output_channel(config, i // 4, i % 4, lane)] = acc_o[i] * scale
    T.sync_warp()
    for i in static(4 * config.o_tiles):
        row = softmax.query_row(config, softmax.row_value(config, i), lane % 4)
        acc_o[i] = ring.floats[warp, row * config.merge_row + TILE * (i // 4) + 8 * (i % 4 // 2) + g]
    T.sync_warp()


