"""Online softmax of one warp on S^T accumulators, in base 2 and fp32.

Accumulators stand in the order (tile, column, 4): lane 4g + t holds, of each 16-token tile, tokens g and g + 8 of query
rows 8*column + 2t and + 1. A lane's row values (maxima, sums, factors) are numbered 2*column + 0 or 1. Row maxima are
equal in the eight lanes of a row; row sums stay per lane until the end.

With fewer than 8 rows each has several columns (config.columns_a_row), and a lane one row value: the tokens of its row
are in the even accumulators, and the odd ones are not read.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn.ampere.config import MMA_N, DecodeConfig
from lowbit_attn.registers import LOG2_E

NO_TOKEN = -3.4028234e38  # row maximum before the first token: finite, so that -inf - maximum is never NaN
ROW_LANES = (4, 8, 16)  # lanes that share a query row differ in these bits


class State(NamedTuple):
    """A warp's results so far, and the scratch registers of a step."""

    acc_o: Any  # fp32 [head_dim / 16, columns, 4]
    row_max: Any  # fp32 [row values]
    row_sum: Any
    new_max: Any
    rescale: Any


def state(config: DecodeConfig) -> State:
    """Registers of the softmax."""
    rows = (T.alloc_local((config.row_values,), "float32") for _ in range(4))
    return State(T.alloc_local((4 * config.o_tiles * config.columns,), "float32"), *rows)


def row_value(config, i):
    """The row value that belongs to accumulator element ``i``."""
    return 0 if config.columns_a_row > 1 else 2 * (i // 4 % config.columns) + i % 2


def count(config, tiles):
    """Accumulators of ``tiles`` tiles that are read."""
    return 2 * tiles * config.row_values


def element(config, n):
    """Accumulator n of those."""
    return 2 * n if config.columns_a_row > 1 else n


@T.macro
def start(config, regs):
    for i in T.unroll(4 * config.o_tiles * config.columns):
        regs.acc_o[i] = T.float32(0.0)
    for j in T.unroll(config.row_values):
        regs.row_max[j] = T.float32(NO_TOKEN)
        regs.row_sum[j] = T.float32(0.0)


@T.macro
def scale_scores(config, acc_s, tiles, softmax_scale_log2):
    """Scores -> base-2 logits, before the maximum is taken: a negative softmax_scale is legal."""
    for n in T.unroll(count(config, tiles)):
        acc_s[element(config, n)] = acc_s[element(config, n)] * softmax_scale_log2


@T.macro
def scale_rows(config, acc_s, tiles, factors):
    """``scale_scores`` by a factor of each row [row values]."""
    for n in T.unroll(count(config, tiles)):
        i = element(config, n)
        acc_s[i] = acc_s[i] * factors[row_value(config, i)]


@T.macro
def cap_scores(config, acc_s, tiles, softcap_log2):
    """x -> cap tanh(x / cap) of base-2 logits, as cap - 2 cap / (e^(2x / cap) + 1): right at both infinities."""
    steepness = T.alloc_var("float32")
    steepness = T.float32(2 * LOG2_E) / softcap_log2
    for n in T.unroll(count(config, tiles)):
        i = element(config, n)
        acc_s[i] = softcap_log2 - T.float32(2.0) * softcap_log2 / (T.exp2(acc_s[i] * steepness) + T.float32(1.0))


def token(config, i, g):
    """Token, from the first of the accumulators on, of element ``i``."""
    return 16 * (i // (4 * config.columns)) + 8 * (i % 4 // 2) + g


@T.macro
def mask_from(config, acc_s, tiles, stop, g):
    """-inf for tokens from ``stop`` [row values] on."""
    for n in T.unroll(count(config, tiles)):
        i = element(config, n)
        if token(config, i, g) >= stop[row_value(config, i)]:
            acc_s[i] = -T.infinity("float32")


@T.macro
def mask_before(config, acc_s, tiles, begin, g):
    """-inf for tokens before ``begin`` [row values]."""
    for n in T.unroll(count(config, tiles)):
        i = element(config, n)
        if token(config, i, g) < begin[row_value(config, i)]:
            acc_s[i] = -T.infinity("float32")


@T.macro
def mask_between(config, acc_s, tiles, first, stop, g):
    """-inf for tokens ``first`` to ``stop`` - 1, of all rows."""
    for n in T.unroll(count(config, tiles)):
        i = element(config, n)
        if T.And(token(config, i, g) >= first, token(config, i, g) < stop):
            acc_s[i] = -T.infinity("float32")


def tiles_in_use(config, o_tiles: int | None) -> int:
    """Tiles of O: all, or so many."""
    return config.o_tiles if o_tiles is None else o_tiles


@T.macro
def online_softmax(config, acc_s, tiles, regs, o_factor, moved, sums, sum_groups, o_tiles=None):
    """Logits -> probabilities in place; O and the sums follow the maximum when any lane's moved.

    o_factor, moved: what O is multiplied with besides, and whether that is not 1; sums: further sums [sum_groups,
    row values] that follow the maximum; o_tiles: accumulators of O in use, all but on the codebook path.
    """
    for j in T.unroll(config.row_values):
        regs.new_max[j] = regs.row_max[j]
    for n in T.unroll(count(config, tiles)):
        i = element(config, n)
        regs.new_max[row_value(config, i)] = T.max(regs.new_max[row_value(config, i)], acc_s[i])
    for d in T.unroll(len(ROW_LANES)):
        for j in T.unroll(config.row_values):
            regs.new_max[j] = T.max(regs.new_max[j], T.shfl_xor(regs.new_max[j], T.shift_left(ROW_LANES[0], d)))
    change = T.alloc_var("int32")
    change = moved
    for j in T.unroll(config.row_values):
        change = change | T.cast(regs.new_max[j] > regs.row_max[j], "int32")
    if T.any_sync(change != 0) != 0:
        for j in T.unroll(config.row_values):
            regs.rescale[j] = T.exp2(regs.row_max[j] - regs.new_max[j])
            regs.row_sum[j] = regs.row_sum[j] * regs.rescale[j]
            regs.row_max[j] = regs.new_max[j]
        if sum_groups:
            for i in T.unroll(sum_groups * config.row_values):
                sums[i] = sums[i] * regs.rescale[i % config.row_values]
        for j in T.unroll(config.row_values):
            regs.rescale[j] = regs.rescale[j] * o_factor
        for i in T.unroll(4 * tiles_in_use(config, o_tiles) * config.columns):
            regs.acc_o[i] = regs.acc_o[i] * regs.rescale[row_value(config, i)]
    for n in T.unroll(count(config, tiles)):
        i = element(config, n)
        acc_s[i] = T.exp2(acc_s[i] - regs.row_max[row_value(config, i)])
        regs.row_sum[row_value(config, i)] = regs.row_sum[row_value(config, i)] + acc_s[i]


@T.macro
def sum_rows(values, count):
    """Sums of the lanes of a row -> the row's sum in all of them, for ``count`` values."""
    for d in T.unroll(len(ROW_LANES)):
        for j in T.unroll(count):
            values[j] = values[j] + T.shfl_xor(values[j], T.shift_left(ROW_LANES[0], d))


def query_row(config, value, t):
    """Query row of a lane's row value."""
    if config.columns_a_row > 1:
        return 2 * t // config.columns_a_row
    return MMA_N * (value // 2) + 2 * t + value % 2
