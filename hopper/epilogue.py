"""End of a split: normalise, write o_partial and lse_partial (natural log)."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from lowbit_attn.hopper import softmax

LN_2 = 0.6931471805599453


class Partial(NamedTuple):
    """Outputs, fp32, and the split that writes them."""

    o: cute.Tensor  # (num_splits, b, h, d)
    lse: cute.Tensor  # (num_splits, b, h)
    split_idx: Int32


@cute.jit
def write(out: Partial, heads, acc_o: cute.Tensor, row_max: Float32, row_sum: Float32, thread: Int32):
    """Rows of real query heads; a split that saw no token (row_sum 0) writes o = 0 and lse = -inf."""
    row, t = thread // 4, thread % 4
    if row < heads.count:
        head = heads.first + row
        inverse = Float32(0.0)
        lse = Float32(softmax.NEG_INF)
        if row_sum > 0.0:
            inverse = Float32(1.0) / row_sum
            lse = (row_max + cute.math.log2(row_sum, fastmath=True)) * LN_2
        if row_sum != row_sum:  # a NaN among live scores must stay visible
            inverse = row_sum
            lse = row_sum
        gO = out.o[out.split_idx, heads.batch_idx, head, None]
        for j in cutlass.range_constexpr(cute.size(acc_o) // 4):
            for e in cutlass.range_constexpr(2):
                gO[softmax.column(4 * j + e, t)] = acc_o[4 * j + e] * inverse
        if t == 0:
            out.lse[out.split_idx, heads.batch_idx, head] = lse
