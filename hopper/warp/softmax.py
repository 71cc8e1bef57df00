"""Online softmax in base 2 of one warp, by accumulator columns: a lane has columns 2t, 2t + 1 of each 8 query rows."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from lowbit_attn import registers
from lowbit_attn.device import numbers
from lowbit_attn.hopper.warp.config import WarpConfig

LAST_PLACE = 2.0**-23  # of fp32, relative


class Scores(NamedTuple):
    """S as accumulators and how to read them."""

    acc: cute.Tensor  # fp32 (4, row tile * col_blocks + block)
    powers: tuple  # [2 * row tile + row8] k
    slope: tuple | None  # [column]; None: acc holds logits
    offset: tuple | None  # [column]; None: 0


class State(NamedTuple):
    """What a warp carries from page to page, in registers."""

    acc_o: cute.Tensor  # fp32 (4, channel tile * col_blocks + block)
    row_max: cute.Tensor  # fp32 (columns), softmax_scale included
    row_sum: cute.Tensor  # fp32 (columns), this lane's share
    zeros: cute.Tensor  # fp32 (columns, channel groups of V): sum of p * zero-point, this lane's share
    exponent: cute.Tensor  # int32 (1): E, the least e_v so far
    # fp32 (4, group // 2 * col_blocks + block): sums of (ps)~ since O was centred, of even groups in elements 0 and 1
    rounded: cute.Tensor


def make_state(cfg: WarpConfig) -> State:
    columns = cfg.lane_rows
    state = State(cute.make_rmem_tensor((4, cfg.v.row_tiles * cfg.col_blocks), Float32),
                  *(cute.make_rmem_tensor(columns, Float32) for _ in range(2)),
                  cute.make_rmem_tensor((columns, cfg.v.groups), Float32), cute.make_rmem_tensor(1, Int32),
                  cute.make_rmem_tensor((4, (cfg.v.groups + 1) // 2 * cfg.col_blocks), Float32))
    for tensor in (state.acc_o, state.row_sum, state.zeros, state.rounded):
        tensor.fill(0.0)
    state.row_max.fill(numbers.LOWEST)
    state.exponent.fill(registers.MAX_VALUE_EXPONENT)
    return state


def places(acc: cute.Tensor, column: int, col_blocks: int) -> list[tuple[int, int]]:
    """Where the values of one column lie in an accumulator: [2 * row tile + row8]."""
    nt, e = divmod(column, 2)
    return [(2 * row8 + e, rt * col_blocks + nt)
            for rt in range(cute.size(acc, mode=[1]) // col_blocks) for row8 in (0, 1)]


def slope_of(scores: Scores, column: int, power: int) -> Float32:
    """What turns an accumulator value into its logit, but for the offset."""
    return Float32(1.0) if scores.slope is None else scores.slope[column] * Float32(2.0**-power)


def exponentiate(cfg: WarpConfig, scores: Scores, state: State) -> tuple[Float32, ...]:
    """S becomes P <= 1: operands made of it cannot overflow, however large the logits. Returns the new maxima."""
    maxima = []
    for column in range(cfg.lane_rows):
        places_of_column = places(scores.acc, column, cfg.col_blocks)
        slopes = {k: slope_of(scores, column, k) for k in sorted(set(scores.powers))}
        tops = []
        for k, slope in slopes.items():  # which are positive: the maximum is taken before them
            values = [scores.acc[at] for at, power in zip(places_of_column, scores.powers) if power == k]
            tops.append(numbers.tree(values, cute.arch.fmax) * slope)
        top = numbers.tree(tops, cute.arch.fmax)
        offset = Float32(0.0) if scores.offset is None else scores.offset[column]
        new_max = cute.arch.fmax(state.row_max[column],
                                 numbers.over_lanes(top + offset, numbers.OVER_G, cute.arch.fmax))
        # a unit in top's last place below zero at least: the largest logit is rounded once more than its maximum
        start = cute.arch.fmin(offset - new_max, -(cute.math.absf(top) * Float32(LAST_PLACE) + top))
        for at, power in zip(places_of_column, scores.powers):
            scores.acc[at] = cute.math.exp2(scores.acc[at] * slopes[power] + start, fastmath=True)
        maxima.append(new_max)
    return tuple(maxima)


def add_sums(cfg: WarpConfig, state: State, p: cute.Tensor) -> None:
    """The sums take a page's P."""
    for column in range(cfg.lane_rows):
        total = numbers.tree([p[at] for at in places(p, column, cfg.col_blocks)], numbers.add)
        state.row_sum[column] = state.row_sum[column] + total


@cute.jit
def rescale(cfg: cutlass.Constexpr[WarpConfig], state: State, new_max: tuple):
    """Bring O, z and the sums to new maxima, if one moves in any lane of the warp."""
    moved = Int32(0)
    for column in cutlass.range_constexpr(cfg.lane_rows):
        moved = moved | Int32(new_max[column] > state.row_max[column])
    if cute.arch.vote_any_sync(moved != 0):
        for column in cutlass.range_constexpr(cfg.lane_rows):
            apply_alpha(cfg, state, column, new_max[column])


def apply_alpha(cfg: WarpConfig, state: State, column: int, new_max: Float32) -> None:
    """One column, O in true scale. O takes the zero-points at the end on the integer path, has them on the others."""
    alpha = raise_max(state, column, new_max)
    if cfg.arithmetic.has_true_scale:
        for group in range(cfg.v.groups):
            state.zeros[column, group] = state.zeros[column, group] * alpha
    scale_column(cfg, state.acc_o, column, alpha)


def raise_max(state: State, column: int, new_max: Float32) -> Float32:
    """A column's maximum becomes the new one, and its sum follows; returns alpha, by which all sums shrink."""
    alpha = cute.math.exp2(state.row_max[column] - new_max, fastmath=True)
    state.row_max[column] = new_max
    state.row_sum[column] = state.row_sum[column] * alpha
    return alpha


def scale_column(cfg: WarpConfig, sums: cute.Tensor, column: int, factor: Float32) -> None:
    for at in places(sums, column, cfg.col_blocks):
        sums[at] = sums[at] * factor


class Limits(NamedTuple):
    """The call's soft cap and windows; kernels without the feature use none of it."""

    growth: Float32  # 2 log2(e) / softcap_log2
    span: Float32  # 2 softcap_log2
    window: Int32  # tokens that a query sees, itself included
    sink_window: Int32  # the same for sinks


def cap_constants(softcap_log2: Float32) -> tuple[Float32, Float32]:
    """(growth, span) of ``Limits``: on the host, so that they are constants that take no registers."""
    return Float32(2 * registers.LOG2_E) / softcap_log2, Float32(2.0) * softcap_log2
