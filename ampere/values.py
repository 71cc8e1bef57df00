"""The V side of the register path: O^T += V^T P^T on raw codes, P scaled by what its tokens' V are scaled by.

    V per token     B = (p s)~ for the channel tiles of a group; z = sum p m is one number a row and group
    centring        z = sum p (m + N/2 s), and every page takes N/2 sum (p s)~ from O again: the rounding meets c - N/2,
                    and O stays as small as what it stands for. Left in, codes, which have one sign, would add up over
                    the sequence, and the tensor core truncates its sums. Where instructions count (config.is_light),
                    sum (p s)~ is a multiply with ones a token tile, else two fp32 instructions a weight
"""

import tilelang.language as T

from lowbit_attn import layout, subnormals
from lowbit_attn.ampere import mma, softmax
from lowbit_attn.ampere.codes import (
    ONES,
    code_power,
    largest_half,
    load_tokens,
    lower_value_exponent,
    multiply_codes,
    pow2,
    row_power,
    value_at,
)


@T.macro
def lower_exponent(config, ring, slot, lane, work, o_factor, moved):
    """E after this page: the least -ceil(log2 largest scale) so far; what O is multiplied with, and whether."""
    piece = config.v
    largest = T.alloc_local((1,), "int32")
    largest_half(ring, slot, piece.meta, piece.groups * layout.PAGE_TOKENS, lane, True, largest)
    lower_value_exponent(largest[0], piece.meta_dtype, work, o_factor, moved)


def rounded_values(config) -> int:
    """Registers for sum (p s)~ of a page: an accumulator, or the lane's part of each group and row value."""
    return 4 if config.is_light else config.v.groups * config.row_values


@T.macro
def values(config, ring, slot, lane, work, ops, acc_o):
    """O^T += V^T P^T over the 128 tokens of a packed V part, centred, and z of the page."""
    piece = config.v
    factor = T.alloc_var("float32")
    factor = pow2(work.value_exponent[0] + subnormals.PROBABILITY_SHIFT)
    mma.clear(work.rounded, rounded_values(config))
    for first, run in piece.runs:
        add_run(config, first, run, ring, slot, lane, factor, work, ops, acc_o)
    recentre(config, work, acc_o)


@T.macro
def add_run(config, first, run, ring, slot, lane, factor, work, ops, acc_o):
    """Consecutive tokens of one width, from token tile ``first`` on. O has the powers of the last run's codes."""
    piece = config.v
    for ct in T.unroll(run.column_tiles):
        for j in T.unroll(piece.groups):
            if config.is_crowded:
                T.sync_warp()
            load_tokens(piece, ring, slot, j, first + ct, lane, work.meta_v)
            for n in T.unroll(config.columns):
                scale_probabilities(config, run, first + ct, j, n, factor, work, ops)
        if config.is_light:
            for i in T.unroll(4):
                work.a[i] = T.uint32(ONES)
            mma.multiply("float16", work.a, work.b, 0, work.rounded, 0)
        multiply_codes(config, run, ring, slot, lane, work, ct, 0, piece.row_tiles, work.b,
                       lambda tile: tile // (piece.row_tiles // piece.groups), acc_o, 0, piece.bits)


@T.macro
def scale_probabilities(config, run, token_tile, group, column, factor, work, ops):
    """(p s)~ = fp16(p s 2^(E + 15)) of the tokens in meta_v and 8 query rows -> b; z and ``rounded`` take theirs.

    A run's (p s)~ count in ``rounded`` by their N, of which the last run's is taken for 1.
    """
    half_steps, weight = run.levels / 2, T.float32(run.levels / config.v.levels)
    for row8 in T.unroll(2):
        at = 4 * (token_tile * config.columns + column) + 2 * row8
        for v in T.unroll(2):
            work.z[group * config.row_values + 2 * column + v] = (
                work.z[group * config.row_values + 2 * column + v]
                + ops.acc_s[at + v] * (value_at(work.meta_v_v[2 * row8]) * T.float32(half_steps)
                                       + value_at(work.meta_v_v[2 * row8 + 1])))
        for v in T.vectorized(2):
            work.pair_h[v] = T.cast(ops.acc_s[at + v] * (value_at(work.meta_v_v[2 * row8]) * factor), "float16")
        if not config.is_light:
            for v in T.unroll(2):
                work.rounded[group * config.row_values + 2 * column + v] = (
                    work.rounded[group * config.row_values + 2 * column + v] + value_at(work.pair_h[v]) * weight)
        T.call_extern("handle", mma.MOVMATRIX, work.pair[0], work.b[2 * (group * config.columns + column) + row8])


@T.macro
def recentre(config, work, acc_o):
    """O -= N/2 sum (p s)~ of the page, in the accumulators' units: codes of a row at bit k are 2^(k - 24) each."""
    piece = config.v
    group_tiles = piece.row_tiles // piece.groups
    if not config.is_light:
        softmax.sum_rows(work.rounded, piece.groups * config.row_values)
    for i in T.unroll(4 * piece.row_tiles * config.columns):
        tile = i // (4 * config.columns)
        unit = pow2(row_power(piece, tile, i) - subnormals.SUBNORMAL_SHIFT) * T.float32(-piece.levels / 2)
        acc_o[i] = acc_o[i] + unit * work.rounded[tile // group_tiles * config.row_values
                                                  + softmax.row_value(config, i)]


@T.macro
def finish(config, work, acc_o):
    """O of the packed pages in true scale, zero-points added: what 16-bit tokens add to."""
    piece, columns = config.v, config.columns
    group_tiles = piece.row_tiles // piece.groups
    softmax.sum_rows(work.z, piece.groups * config.row_values)
    scale = T.alloc_var("float32")
    scale = pow2(-subnormals.PROBABILITY_SHIFT - work.value_exponent[0])
    for i in T.unroll(4 * piece.row_tiles * columns):
        tile = i // (4 * columns)
        unit = code_power(piece, tile, i) * T.float32(2.0**subnormals.SUBNORMAL_SHIFT)
        acc_o[i] = acc_o[i] * unit * scale + work.z[tile // group_tiles * config.row_values
                                                   + softmax.row_value(config, i)]
