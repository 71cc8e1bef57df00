"""The features of a kernel, on the scores of packed tokens: the logits' soft cap, and windows as masks."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from lowbit_attn.device import numbers
from lowbit_attn.hopper.common.abi import Rows, query_and_head
from lowbit_attn.hopper.warp import softmax
from lowbit_attn.hopper.warp.config import WarpConfig
from lowbit_attn.hopper.warp.fetch import Lane
from lowbit_attn.hopper.warp.page_loop import Unit, Walk
from lowbit_attn.hopper.warp.softmax import Limits, Scores

MIN_SLOPE = 2.0**-100  # far below any slope that matters; -inf times a slope that underflowed to 0 would be NaN


def capped(limits: Limits, logit: Float32) -> Float32:
    """cap * tanh(logit / cap), base 2, as 2 cap (1/2 - 1 / (exp2(2 log2(e) y) + 1)): +-cap where exp2 is 0 or inf."""
    grown = cute.math.exp2(logit * limits.growth, fastmath=True)
    return (Float32(0.5) - cute.arch.rcp_approx(grown + Float32(1.0))) * limits.span


def mask_tokens(cfg: WarpConfig, found: Scores, first_seen: Int32, rows: Rows, limits: Limits, me: Lane) -> Scores:
    """The scores of a run of packed tokens with the kernel's features; query j sees tokens from number first_seen + j
    of the run on."""
    if cfg.has_softcap:
        found = cap_page(cfg, found, limits)
    elif cfg.has_window and found.slope is not None:
        found = found._replace(slope=tuple(cute.arch.fmax(s, Float32(MIN_SLOPE)) for s in found.slope))
    if cfg.has_window:
        hide(cfg, found.acc, first_seen, rows, me)
    return found


def logit(scores: Scores, column: int, value: Float32, power: int) -> Float32:
    """The base-2 logit of an accumulator value."""
    value = value * softmax.slope_of(scores, column, power)
    return value if scores.offset is None else value + scores.offset[column]


def cap_page(cfg: WarpConfig, found: Scores, limits: Limits) -> Scores:
    """The accumulator becomes capped logits."""
    for column in range(cfg.lane_rows):
        for at, power in zip(softmax.places(found.acc, column, cfg.col_blocks), found.powers):
            found.acc[at] = capped(limits, logit(found, column, found.acc[at], power))
    return Scores(found.acc, (0,) * len(found.powers), None, None)


@cute.jit
def hide(cfg: cutlass.Constexpr[WarpConfig], acc: cute.Tensor, first_seen: Int32, rows: Rows, me: Lane):
    """Tokens of a page below number first_seen + j become -inf for query j; pages without any such token skip this."""
    if first_seen + rows.q_len > 1:
        for column in cutlass.range_constexpr(cfg.lane_rows):
            query, _ = query_and_head(rows, Int32(cfg.arithmetic.column_row(me.t, column)))
            hidden = first_seen + query - Int32(me.g)
            for row, at in enumerate(softmax.places(acc, column, cfg.col_blocks)):
                acc[at] = cutlass.select_(8 * row < hidden, Float32(numbers.NEG_INF), acc[at])


def row_window(counts: tuple, limits: Limits) -> Int32:
    """How many of a row's last tokens a query sees, as ``page_loop.plan_walk`` takes it; counts: View.counters."""
    return limits.window


def is_in_window(cfg: WarpConfig, walk: Walk, unit: Unit, token: Int32, stop: Int32, limits: Limits):
    """Whether the window shows token ``token`` of a 16-bit unit to a query that sees none from ``stop`` on."""
    window = limits.window + (limits.sink_window - limits.window) * unit.is_sink
    return token >= stop - window
