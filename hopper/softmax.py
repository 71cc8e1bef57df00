"""Online softmax in base 2 on WGMMA accumulators: of the 64 rows, a thread's first row holds a query head.

Accumulator value i of a thread belongs to row ``g + 8 * (i // 2 % 2)`` of its warp's 16 rows and to column
``8 * (i // 4) + 2 * t + i % 2``, with lane = 4 * g + t. With at most 8 query heads only the values of row g
of warp 0 are real, so the steps touch row g alone.
"""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint32

NEG_INF = float("-inf")


def row_values(count: int) -> list[int]:
    """Of ``count`` accumulator values of a thread, those of row g."""
    return [i for i in range(count) if i // 2 % 2 == 0]


def column(i: int, t: Int32) -> Int32:
    """Column of accumulator value i in a thread of this t."""
    return 8 * (i // 4) + 2 * t + i % 2


def tree(values: list, combine):
    """Fold in pairs: five dependent steps for 32 values, not 31."""
    while len(values) > 1:
        values = [combine(*pair) if len(pair) == 2 else pair[0]
                  for pair in (values[i : i + 2] for i in range(0, len(values), 2))]
    return values[0]


def quad_max(x: Float32) -> Float32:
    """Maximum over the four lanes that share a row."""
    for offset in (1, 2):
        x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=offset))
    return x


def quad_sum(x: Float32) -> Float32:
    for offset in (1, 2):
        x = x + cute.arch.shuffle_sync_bfly(x, offset=offset)
    return x


@cute.jit
def mask_columns(acc_s: cute.Tensor, live: Int32, t: Int32):
    """Scores of tokens from ``live`` on become -inf, whatever they were."""
    for i in cutlass.range_constexpr(cute.size(acc_s)):
        if cutlass.const_expr(i // 2 % 2 == 0):
            acc_s[i] = acc_s[i] if column(i, t) < live else Float32(NEG_INF)


def online_step(acc_s: cute.Tensor, p: cute.Tensor, row_max: Float32, row_sum: Float32, scale_log2: Float32):
    """One tile: writes P (fp16, WGMMA's A operand) and returns (row_max, row_sum, correction of O).

    row_max is in base-2 units, softmax_scale included (which must be positive); row_sum is this lane's share.
    """
    at = row_values(cute.size(acc_s))
    tile_max = tree([acc_s[i] for i in at], cute.arch.fmax)
    new_max = cute.arch.fmax(row_max, quad_max(tile_max) * scale_log2)
    correction = cute.math.exp2(row_max - new_max, fastmath=True)
    exps = cute.make_rmem_tensor(len(at), Float32)
    for j, i in enumerate(at):
        exps[j] = cute.math.exp2(acc_s[i] * scale_log2 - new_max, fastmath=True)
    total = row_sum * correction + tree([exps[j] for j in range(len(at))], operator.add)
    halves = cute.make_rmem_tensor(len(at), Float16)
    halves.store(exps.load().to(Float16))
    pairs, p_words = cute.recast_tensor(halves, Uint32), cute.recast_tensor(p, Uint32)
    for j in range(len(at) // 2):
        p_words[2 * j] = pairs[j]  # words 2j + 1 are row g + 8 and stay zero
    return new_max, total, correction


def rescale(acc_o: cute.Tensor, correction: Float32) -> None:
    for i in row_values(cute.size(acc_o)):
        acc_o[i] = acc_o[i] * correction
