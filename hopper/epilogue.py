"""End of a split: normalise, write o_partial and lse_partial (natural log)."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from lowbit_attn.hopper import softmax

LN_2 = 0.6931471805599453


class Partial(NamedTuple):
    """Outputs, fp32, and the split that writes them."""

    o: cute.Tensor  # (num_splits, b, q_len, h, d)
    lse: cute.Tensor  # (num_splits, b, q_len, h)
    split_idx: Int32


@cute.jit
def write(half: cutlass.Constexpr[int], out: Partial, batch_idx: Int32, query: Int32, head: Int32, acc_o: cute.Tensor,
          row_max: Float32, row_sum: Float32, t: Int32):
    """Row g + 8 * half of a warp, a query row; a split of which it saw no token (row_sum 0) gets o = 0, lse = -inf."""
    inverse = Float32(0.0)
    lse = Float32(softmax.NEG_INF)
    if row_sum > 0.0:
        inverse = Float32(1.0) / row_sum
        lse = (row_max + cute.math.log2(row_sum, fastmath=True)) * LN_2
    if row_sum != row_sum:  # a NaN among live scores must stay visible
        inverse = row_sum
        lse = row_sum
    gO = out.o[out.split_idx, batch_idx, query, head, None]
    for j in cutlass.range_constexpr(cute.size(acc_o) // 4):
        for e in cutlass.range_constexpr(2):
            gO[softmax.column(4 * j + e, t)] = acc_o[4 * j + 2 * half + e] * inverse
    if t == 0:
        out.lse[out.split_idx, batch_idx, query, head] = lse
