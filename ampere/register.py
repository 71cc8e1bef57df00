"""Steps of the register path: raw integer codes are multiplied; scale and zero-point stay out of the inner loop.

A masked code is an fp16 subnormal (subnormals.py), so unpacking is one AND a register and nothing else is done to a
code. What it stands for is put back around the multiplies:

    K per channel   B = q~ = q' s, rounded once a page and token group; zero-points by a bias multiply of D/16 steps,
                    whose rows 8 .. 15 hold the scales: with q~ multiplied by a constant row they give sum q s - sum q~
                    (centring: times N/2, it makes the rounding of q~ meet c - N/2 instead of c)
    K per token     B = q'; the accumulators of a channel group take scale and zero-point in fp32
    V per token     values.py

Powers of two: q' = q 2^(e_q + 11), q~ = q' s 2^(e_s + 2), p s 2^(E + 15); a row of codes at bit k of its half is
2^(k - 24) too small. They leave with the logits, and with O after the last packed page (finish).
"""

from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn import layout, registers, subnormals
from lowbit_attn.ampere import boost, mma, softmax
from lowbit_attn.ampere.codes import (
    BLOCK,
    ONES,
    bits_of,
    code_power,
    largest_half,
    load_tokens,
    metadata_rows,
    multiply_codes,
    pow2,
    scale_query,
    value_at,
    value_of_half,
)
from lowbit_attn.ampere.config import ACCESS_BYTES, LANES, TILE, DecodeConfig
from lowbit_attn.ampere.values import finish, lower_exponent, rounded_values, values

__all__ = ["finish", "lower_exponent", "query_for_tokens", "scores", "start", "values"]  # the steps: see pages.STEPS
VALUES_BEFORE_SOFTMAX = True  # the V part must have arrived: its largest scale decides whether O is rescaled
SASS_NEED = ("LDGSTS", "LDSM", "HMMA", "MOVM")
LARGEST_CHANNEL_EXPONENT = 22  # of fp16 scales: with more, the constant of the centring row would be 0 in fp16


class Registers(NamedTuple):
    """A thread's register arrays. MMA operands (query, scaled, a, b) have no views: see mma.multiply."""

    query_of: Any  # q' of all column tiles, in shared memory: fp16 [head_dim / 16, row groups * lanes, columns * 4],
    # or, in kernels with boosted channels, boost.query_shape
    member: Any  # the thread's place in it
    query: Any  # q' of one column tile, fp16 [columns, 4]
    e_q: Any  # int32 [row values]
    scaled: Any  # q~ of one column tile, fp16 [token groups, columns, 4]
    bias: Any  # fp32 [columns, 4]: elements 0, 1 the zero-points' part, 2, 3 the centring's
    query_sum: Any  # K per token: sum of q' over each channel group, fp32 [channel groups, columns, 4]
    part: Any  # K per token: S of one channel group and four row tiles
    z: Any  # fp32 [channel groups of V, row values]
    rounded: Any  # centring: sum of (p s)~ over a page's tokens, as z or as an accumulator
    e_s: Any  # int32 [token groups], and of the zero-points
    e_m: Any
    value_exponent: Any  # E, int32 [1]
    words: Any
    a: Any
    minus: Any  # uint32 [1]: -2^(e_c - e_s - 2) of the lane's group twice, and the same as fp16 [2]
    minus_h: Any
    b: Any  # P^T of one token tile, uint32 [channel groups, columns, 2]
    meta_k: Any  # uint32 [2], and the same as four values of metadata
    meta_k_v: Any
    meta_v: Any
    meta_v_v: Any
    pair: Any  # uint32 [1], and the same as fp16 [2]
    pair_h: Any


def allocate(config: DecodeConfig, thread) -> Registers:
    """Registers of the path."""
    n, groups = config.columns, config.k.groups
    of_channel = 1 if config.k.per_token else groups
    of_token = groups if config.k.per_token else 1
    meta_k, meta_v, pair, minus = (T.alloc_local((size,), "uint32") for size in (2, 2, 1, 1))
    return Registers(
        T.alloc_shared((config.o_tiles, config.row_groups * LANES, 4 * n) if config.boost is None
                       else boost.query_shape(config), "float16"),
        thread % (config.row_groups * LANES),
        T.alloc_local((4 * n,), "float16"), T.alloc_local((config.row_values,), "int32"),
        T.alloc_local((4 * of_channel * n,), "float16"), T.alloc_local((4 * n,), "float32"),
        T.alloc_local((4 * of_token * n,), "float32"), T.alloc_local((4 * BLOCK * n,), "float32"),
        T.alloc_local((config.v.groups * config.row_values,), "float32"),
        T.alloc_local((rounded_values(config),), "float32"),
        *(T.alloc_local((of_channel,), "int32") for _ in range(2)), T.alloc_local((1,), "int32"),
        T.alloc_local((BLOCK,), "uint32"),
        T.alloc_local((4,), "uint32"), minus, T.view(minus, (2,), "float16"),
        T.alloc_local((2 * config.v.groups * n,), "uint32"), meta_k, T.view(meta_k, (4,), config.k.meta_dtype),
        meta_v, T.view(meta_v, (4,), config.v.meta_dtype), pair, T.view(pair, (2,), "float16"))


@T.macro
def start(config, q, rows, warp, lane, ops, work, num_splits):
    """q' and e_q of the warp's rows; sums and exponents before the first page.

    q' goes to shared memory: 16 to 32 registers that the accumulators of 16 rows need, for one load a column tile.
    """
    mma.load_query(config, q, rows, lane, ops.rows)
    row_exponents(config, warp, lane, ops.rows, work)
    T.sync_threads()
    for i in T.unroll(config.v.groups * config.row_values):
        work.z[i] = T.float32(0.0)
    work.value_exponent[0] = registers.MAX_VALUE_EXPONENT
    if config.k.per_token:
        sum_query(config, lane, work)


@T.macro
def load_query_tile(config, column_tile, lane, work):
    """q' of one column tile as B operand."""
    if config.boost is not None:
        boost.load_query(config, TILE * column_tile + lane % TILE, lane, work)
    else:
        for v in T.vectorized(4 * config.columns):
            work.query[v] = work.query_of[column_tile, work.member, v]


def own_query(value, exponent):
    """q' of a value of q."""
    return T.cast(T.cast(value, "float32") * pow2(exponent) * T.float32(2.0**subnormals.QUERY_OWN_SHIFT), "float16")


@T.macro
def store_query(config, rows, n, half, exponent, lane, work):
    """q' of query row 8n + g and channels 8*half + 2t, + 1."""
    at = 4 * (half // 2 * config.columns + n) + 2 * (half % 2)
    if config.boost is not None:
        for v in T.unroll(2):
            boost.store_query(work, n, 8 * half + 2 * (lane % 4) + v, lane, own_query(rows[at + v], exponent))
    else:
        for v in T.vectorized(2):
            work.query_of[half // 2, work.member, 4 * n + 2 * (half % 2) + v] = own_query(rows[at + v], exponent)


@T.macro
def row_exponents(config, warp, lane, rows, work):
    """e_q = -floor(log2 max |q|) of each row, and q' = fp16(q 2^(e_q + 11))."""
    largest, exponent = T.alloc_var("float32"), T.alloc_var("int32")
    for n in T.unroll(config.columns):
        largest = T.float32(0.0)
        for i in T.unroll(4 * config.o_tiles):
            largest = T.max(largest, T.abs(T.cast(rows[4 * (i // 4 * config.columns + n) + i % 4], "float32")))
        for d in T.unroll(2):
            largest = T.max(largest, T.shfl_xor(largest, T.shift_left(1, d)))
        exponent = -registers.floor_log2(T.max(bits_of(largest), registers.pow2_bits(subnormals.MIN_QUERY_LOG2)))
        exponent = T.if_then_else(largest == T.float32(0.0), 0, T.max(exponent, -126))
        if warp < config.row_groups:
            for i in T.unroll(2 * config.o_tiles):
                store_query(config, rows, n, i, exponent, lane, work)
        for j in T.unroll(2):
            work.e_q[2 * n + j] = T.shfl_sync(exponent, 4 * registers.accumulator_col(lane, j))


@T.macro
def sum_query(config, lane, work):
    """Sums of q' over the channel groups, by multiplies with ones: every lane has those of its columns."""
    for i in T.unroll(4):
        work.a[i] = T.uint32(ONES)
    mma.clear(work.query_sum, 4 * config.k.groups * config.columns)
    for ct in T.unroll(config.o_tiles):
        load_query_tile(config, ct, lane, work)
        for n in T.unroll(config.columns):
            mma.multiply("float16", work.a, work.query, n, work.query_sum,
                         ct // (config.o_tiles // config.k.groups) * config.columns + n)


@T.macro
def scores(config, ring, slot, lane, work, ops, softmax_scale_log2):
    """Logits of the 128 tokens of a packed K part in ops.acc_s."""
    if config.k.per_token:
        token_scores(config, ring, slot, lane, work, ops, softmax_scale_log2)
    else:
        channel_scores(config, ring, slot, lane, work, ops, softmax_scale_log2)


@T.macro
def channel_exponents(config, ring, slot, lane, work):
    """e_s of the token groups, and e_m where zero-points are bf16."""
    piece, dim = config.k, config.head_dim
    largest = T.alloc_local((1,), "int32")
    least = -LARGEST_CHANNEL_EXPONENT if piece.meta_dtype == "float16" else registers.MIN_SCALE_LOG2
    for j in T.unroll(piece.groups):
        at = piece.meta + layout.channel_meta_offset(j, 0, 0, dim) // ACCESS_BYTES
        largest_half(ring, slot, at, dim // 2, lane, False, largest)
        work.e_s[j] = -registers.ceil_log2(T.max(bits_of(value_of_half(largest[0], piece.meta_dtype)),
                                                 registers.pow2_bits(least)))
        if piece.meta_dtype == "float16":
            work.e_m[j] = 0
        else:
            zeros = piece.meta + layout.channel_meta_offset(j, 1, 0, dim) // ACCESS_BYTES
            largest_half(ring, slot, zeros, dim // 2, lane, False, largest)
            work.e_m[j] = subnormals.ZERO_SHIFT - registers.ceil_log2(
                T.max(bits_of(value_of_half(largest[0], piece.meta_dtype)),
                      registers.pow2_bits(registers.MIN_SCALE_LOG2)))


@T.macro
def load_channels(config, ring, slot, group, is_zero, column_tile, lane, work):
    """Metadata of the channels 2t, 2t + 1 and 2t + 8, 2t + 9 of a column tile -> meta_k."""
    index = layout.channel_meta_index(TILE * column_tile + 2 * (lane % 4))
    row = layout.channel_meta_offset(group, is_zero, 0, config.head_dim) // ACCESS_BYTES
    for v in T.vectorized(2):
        work.meta_k[v] = ring[slot, config.k.meta + row + index // 8, index % 8 // 2 + v]


@T.macro
def load_bias(config, ring, slot, own, column_tile, lane, own_scale, own_zero, work):
    """A of the bias multiply: rows 0 .. 7 the zero-points, rows 8 .. 15 the scales (centring) of group row % groups."""
    for is_zero in (0, 1):
        load_channels(config, ring, slot, own, is_zero, column_tile, lane, work)
        metadata_rows(config, 1 - is_zero, own_zero if is_zero else own_scale, work)


def groups_held(config) -> int:
    """Token groups whose q~ is in registers at once: all, so that 16-byte loads of codes serve several, or one."""
    tiles = config.k.row_tiles // config.k.groups
    return 1 if config.columns > 1 and tiles % layout.tiles_per_word(config.k.bits) == 0 else config.k.groups


@T.macro
def channel_scores(config, ring, slot, lane, work, ops, softmax_scale_log2):
    piece, n_groups = config.k, config.k.groups
    group_tiles, held = piece.row_tiles // n_groups, groups_held(config)
    channel_exponents(config, ring, slot, lane, work)
    own, own_e_s, own_e_m, own_e_c = (T.alloc_var("int32") for _ in range(4))
    own = subnormals.bias_row_group(lane // 4, n_groups)
    own_e_s = work.e_s[0]
    own_e_m = work.e_m[0]
    for j in T.unroll(n_groups - 1):
        own_e_s = T.if_then_else(own == j + 1, work.e_s[j + 1], own_e_s)
        own_e_m = T.if_then_else(own == j + 1, work.e_m[j + 1], own_e_m)
    own_e_c = 0 if piece.meta_dtype == "float16" else own_e_s + subnormals.CENTRE_SHIFT
    own_scale, own_zero = T.alloc_var("float32"), T.alloc_var("float32")
    own_scale = pow2(T.min(own_e_c, 127))
    own_zero = pow2(own_e_m)
    # takes q~ off the scales' row: A is this in the rows 8 .. 15 of the group that q~ belongs to
    for v in T.vectorized(2):
        work.minus_h[v] = T.cast(-pow2(T.min(own_e_c - own_e_s - subnormals.SCALE_SHIFT, 127)), "float16")
    mma.clear(ops.acc_s, 4 * piece.row_tiles * config.columns)
    mma.clear(work.bias, 4 * config.columns)
    for ct in T.unroll(piece.column_tiles):
        if config.is_crowded:
            T.sync_warp()  # keeps the next tile's loads, hence registers, behind this tile's multiplies
        load_query_tile(config, ct, lane, work)
        load_bias(config, ring, slot, own, ct, lane, own_scale, own_zero, work)
        for n in T.unroll(config.columns):
            mma.multiply("float16", work.a, work.query, n, work.bias, n)
        for j in T.unroll(n_groups):
            load_channels(config, ring, slot, j, 0, ct, lane, work)
            scale_query(config, work.e_s[j], j % held, work)
            for r in T.unroll(2):
                work.a[2 * r] = T.uint32(0)
                work.a[2 * r + 1] = T.if_then_else(own == j, work.minus[0], T.uint32(0))
            for n in T.unroll(config.columns):
                mma.multiply("float16", work.a, work.scaled, j % held * config.columns + n, work.bias, n)
            if held == 1:
                multiply_codes(config, piece, ring, slot, lane, work, ct, j * group_tiles, group_tiles, work.scaled,
                               lambda tile: 0, ops.acc_s, 0)
        if held > 1:
            multiply_codes(config, piece, ring, slot, lane, work, ct, 0, piece.row_tiles, work.scaled,
                           lambda tile: tile // group_tiles, ops.acc_s, 0)
    if config.boost is not None:
        boost.add(config, ring, slot, lane, own_scale, work, ops)
    post_scale(config, lane, work, ops, softmax_scale_log2, own_e_c, own_e_m)


@T.macro
def post_scale(config, lane, work, ops, softmax_scale_log2, own_e_c, own_e_m):
    """Accumulators -> logits: acc * scale 2^(11 - k - e_q - e_s) + the bias of the row and token group."""
    piece, n_groups = config.k, config.k.groups
    tiles = piece.row_tiles // n_groups
    half_steps = piece.levels / 2
    shift = subnormals.SUBNORMAL_SHIFT - subnormals.QUERY_SHIFT
    bias, factor = (T.alloc_local((config.row_values,), "float32") for _ in range(2))
    for i in T.unroll(config.row_values):
        at = 4 * (i // 2) + i % 2
        bias[i] = work.bias[at] * pow2(-own_e_m)
        bias[i] = bias[i] + T.float32(half_steps) * (work.bias[at + 2] * pow2(-own_e_c))
        bias[i] = bias[i] * (softmax_scale_log2 * pow2(-work.e_q[i] - subnormals.QUERY_OWN_SHIFT))
    group_bias = T.alloc_local((config.row_values,), "float32")
    for j in T.unroll(n_groups):
        for i in T.unroll(config.row_values):
            exponent = T.max(T.min(shift - work.e_q[i] - work.e_s[j], 127), -126)
            factor[i] = softmax_scale_log2 * pow2(exponent)
            if n_groups == 1:
                group_bias[i] = bias[i]
            else:
                group_bias[i] = T.shfl_sync(bias[i], subnormals.bias_lane(j, lane, n_groups))
        for i in T.unroll(4 * tiles * config.columns):
            row = softmax.row_value(config, i)
            at = 4 * j * tiles * config.columns + i
            ops.acc_s[at] = (ops.acc_s[at] * (factor[row] * code_power(piece, at // (4 * config.columns), i))
                             + group_bias[row])


@T.macro
def token_scores(config, ring, slot, lane, work, ops, softmax_scale_log2):
    """K per token: four row tiles at a time, S of a channel group takes scale and zero-point when it is complete."""
    piece, columns = config.k, config.columns
    group_tiles = piece.column_tiles // piece.groups
    factor = T.alloc_local((config.row_values,), "float32")
    for i in T.unroll(config.row_values):
        factor[i] = softmax_scale_log2 * pow2(-work.e_q[i] - subnormals.QUERY_OWN_SHIFT)
    mma.clear(ops.acc_s, 4 * piece.row_tiles * columns)
    for chunk in T.unroll(piece.row_tiles // BLOCK):
        for j in T.unroll(piece.groups):
            mma.clear(work.part, 4 * BLOCK * columns)
            for c in T.unroll(group_tiles):
                load_query_tile(config, j * group_tiles + c, lane, work)
                multiply_codes(config, piece, ring, slot, lane, work, j * group_tiles + c, BLOCK * chunk, BLOCK,
                               work.query, lambda tile: 0, work.part, BLOCK * chunk)
            for tile in T.unroll(BLOCK):
                load_tokens(piece, ring, slot, j, BLOCK * chunk + tile, lane, work.meta_k)
                for i in T.unroll(4 * columns):
                    at = 4 * (BLOCK * chunk + tile) * columns + i
                    row8 = i % 4 // 2
                    unit = code_power(piece, BLOCK * chunk + tile, i) * T.float32(2.0**subnormals.SUBNORMAL_SHIFT)
                    ops.acc_s[at] = (ops.acc_s[at]
                                     + value_at(work.meta_k_v[2 * row8]) * (work.part[4 * tile * columns + i] * unit)
                                     + value_at(work.meta_k_v[2 * row8 + 1])
                                     * work.query_sum[4 * (j * columns + i // 4) + i % 2])
    for i in T.unroll(4 * piece.row_tiles * columns):
        ops.acc_s[i] = ops.acc_s[i] * factor[softmax.row_value(config, i)]


@T.macro
def query_for_tokens(config, q, rows, lane, ops):
    """Q as given once more: it was not kept in registers through the packed pages."""
    mma.load_query(config, q, rows, lane, ops.rows)
