"""End of a split on the tile path: normalise and leave o and lse (natural log)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from lowbit_attn.hopper import combine, softmax
from lowbit_attn.hopper.combine import LN_2, Outputs, Row


@cute.jit
def write(half: cutlass.Constexpr[int], out: Outputs, row: Row, acc_o: cute.Tensor, row_max: Float32, row_sum: Float32,
          t: Int32):
    """Row g + 8 * half of a warp, a query row; a split of which it saw no token (row_sum 0) gets o = 0, lse = -inf."""
    inverse = Float32(0.0)
    lse = Float32(softmax.NEG_INF)
    if row_sum > 0.0:
        inverse = Float32(1.0) / row_sum
        lse = (row_max + cute.math.log2(row_sum, fastmath=True)) * LN_2
    if row_sum != row_sum:  # a NaN among live scores must stay visible
        inverse = row_sum
        lse = row_sum
    places = [(j, e) for j in range(cute.size(acc_o) // 4) for e in range(2)]
    combine.leave(out, row, tuple(softmax.column(4 * j + e, t) for j, e in places),
                  tuple(acc_o[4 * j + 2 * half + e] * inverse for j, e in places), lse, t == 0)
