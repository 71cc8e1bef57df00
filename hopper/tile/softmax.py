"""Online softmax in base 2 on WGMMA accumulators.

Value i of a thread in m64nN accumulators belongs to row ``16 * warp + g + 8 * (i // 2 % 2)`` and to column
``8 * (i // 4) + 2 * t + i % 2``, with lane = 4 * g + t. Query rows are the rows, of which a thread has two halves, g
and g + 8, or they are the columns, of which it has every fourth pair.
"""

import operator

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from lowbit_attn.device import numbers
from lowbit_attn.registers import LOG2_E

SUMS = 4  # of a row's weights, added up side by side


def row_values(count: int, half: int) -> list[int]:
    """Those of ``count`` accumulator values of a thread that belong to row g + 8 * half."""
    return [i for i in range(count) if i // 2 % 2 == half]


def column_values(blocks: int, columns: int, c: int) -> list[tuple[int, int, int]]:
    """(i, block, half) of the values of ``column(c)`` in so many m64 blocks of accumulators."""
    return [(block * columns // 2 + 4 * (c // 2) + 2 * half + c % 2, block, half)
            for block in range(blocks) for half in range(2)]


def column(c: int, t: Int32) -> Int32:
    """The ``c``-th column of a thread of this t."""
    return 8 * (c // 2) + 2 * t + c % 2


def quad_sum(x: Float32) -> Float32:
    """Over the four lanes that share a row."""
    return numbers.over_lanes(x, numbers.OVER_T, operator.add)


def cap_scores(acc_s: cute.Tensor, scale_log2: Float32, cap_log2: Float32) -> None:
    """Scores become cap_log2 * tanh(score * scale_log2 / cap_log2), with tanh y = 1 - 2 / (e^2y + 1)."""
    slope = scale_log2 * (Float32(2.0 * LOG2_E) / cap_log2)
    for i in range(cute.size(acc_s)):
        grown = cute.math.exp2(acc_s[i] * slope, fastmath=True)
        acc_s[i] = cap_log2 - (cap_log2 + cap_log2) * cute.arch.rcp_approx(grown + Float32(1.0))


def online_step(half: int, acc_s: cute.Tensor, p: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor,
                scale_log2: Float32, element) -> Float32:
    """One tile and half: writes P (``element``, WGMMA's A operand), row_max and row_sum; returns O's correction.

    row_max is in base-2 units, softmax_scale included (which must be positive); row_sum is this lane's share.
    """
    at = row_values(cute.size(acc_s), half)
    tile_max = numbers.tree([acc_s[i] for i in at], cute.arch.fmax)
    new_max = cute.arch.fmax(row_max[half], numbers.over_lanes(tile_max, numbers.OVER_T, cute.arch.fmax) * scale_log2)
    correction = cute.math.exp2(row_max[half] - new_max, fastmath=True)
    p_words, sums = cute.recast_tensor(p, Uint32), [Float32(0.0)] * SUMS
    for j in range(len(at) // 2):  # pair by pair: P takes the registers that S leaves
        pair = [cute.math.exp2(acc_s[i] * scale_log2 - new_max, fastmath=True) for i in at[2 * j : 2 * j + 2]]
        p_words[2 * j + half] = numbers.pack(*pair, element)
        sums = [*sums[2:], *(x + e for x, e in zip(sums, pair))]
    row_sum[half] = row_sum[half] * correction + numbers.tree(sums, operator.add)
    row_max[half] = new_max
    return correction


def rescale(half: int, acc_o: cute.Tensor, correction: Float32) -> None:
    for i in row_values(cute.size(acc_o), half):
        acc_o[i] = acc_o[i] * correction
