"""What a query row sees: the window on packed pages, the causal limit too on 16-bit units; and the logits' soft cap."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from lowbit_attn.hopper.common import numbers
from lowbit_attn.hopper.common.abi import Rows, query_and_head
from lowbit_attn.hopper.warp import softmax
from lowbit_attn.hopper.warp.config import WarpConfig
from lowbit_attn.hopper.warp.unpack import Lane
from lowbit_attn.hopper.warp.walk import Unit, Walk
from lowbit_attn.layout import PAGE_TOKENS

MIN_SLOPE = 2.0**-100  # far below any slope that matters; -inf times a slope that underflowed to 0 would be NaN


class Limits(NamedTuple):
    """The call's soft cap and windows; kernels without the feature use none of it."""

    growth: Float32  # 2 log2(e) / softcap_log2
    span: Float32  # 2 softcap_log2
    window: Int32  # tokens that a query sees, itself included
    sink_window: Int32  # the same for sinks


def cap_constants(softcap_log2: Float32) -> tuple[Float32, Float32]:
    """(growth, span) of ``Limits``: on the host, so that they are constants that take no registers."""
    return Float32(2 * numbers.LOG2_E) / softcap_log2, Float32(2.0) * softcap_log2


def capped(limits: Limits, logit: Float32) -> Float32:
    """cap * tanh(logit / cap), base 2, as 2 cap (1/2 - 1 / (exp2(2 log2(e) y) + 1)): +-cap where exp2 is 0 or inf."""
    grown = cute.math.exp2(logit * limits.growth, fastmath=True)
    return (Float32(0.5) - cute.arch.rcp_approx(grown + Float32(1.0))) * limits.span


def of_page(cfg: WarpConfig, found: softmax.Scores, page: Int32, walk: Walk, rows: Rows, limits: Limits,
            me: Lane) -> softmax.Scores:
    """The scores of page ``page`` of the sequence with the kernel's features."""
    return of_tokens(cfg, found, page * PAGE_TOKENS, walk, rows, limits, me)


def of_tokens(cfg: WarpConfig, found: softmax.Scores, first_token: Int32, walk: Walk, rows: Rows, limits: Limits,
              me: Lane) -> softmax.Scores:
    """The scores of a run of packed tokens, from number ``first_token`` on, with the kernel's features."""
    if cfg.has_softcap:
        found = cap_page(cfg, found, limits)
    elif cfg.has_window and found.slope is not None:
        found = found._replace(slope=tuple(cute.arch.fmax(s, Float32(MIN_SLOPE)) for s in found.slope))
    if cfg.has_window:
        hide(cfg, found.acc, walk.first_seen - first_token, rows, me)
    return found


def cap_page(cfg: WarpConfig, found: softmax.Scores, limits: Limits) -> softmax.Scores:
    """The accumulator becomes capped logits."""
    for column in range(cfg.lane_rows):
        for at, power in zip(softmax.places(found.acc, column, cfg.col_blocks), found.powers):
            found.acc[at] = capped(limits, softmax.logit(found, column, found.acc[at], power))
    return softmax.Scores(found.acc, (0,) * len(found.powers), None, None)


@cute.jit
def hide(cfg: cutlass.Constexpr[WarpConfig], acc: cute.Tensor, first_seen: Int32, rows: Rows, me: Lane):
    """Tokens of a page below number first_seen + j become -inf for query j; pages without any such token skip this."""
    if first_seen + rows.q_len > 1:
        for column in cutlass.range_constexpr(cfg.lane_rows):
            query, _ = query_and_head(rows, Int32(cfg.arithmetic.column_row(me.t, column)))
            hidden = first_seen + query - Int32(me.g)
            for row, at in enumerate(softmax.places(acc, column, cfg.col_blocks)):
                acc[at] = cutlass.select_(8 * row < hidden, Float32(numbers.NEG_INF), acc[at])


def queries_of(cfg: WarpConfig, rows: Rows, me: Lane) -> list[Int32]:
    """[column] the query of each row of this lane."""
    return [query_and_head(rows, Int32(cfg.arithmetic.column_row(me.t, column)))[0] for column in range(cfg.lane_rows)]


def of_unit(cfg: WarpConfig, unit: Unit, query: Int32, token: Int32, limits: Limits):
    """Whether a query sees token ``token`` of a 16-bit unit."""
    stop = unit.reach + query
    seen = (token < unit.live) & (token < stop)
    if cfg.has_window:
        window = limits.window + (limits.sink_window - limits.window) * unit.is_sink
        seen = seen & (token >= stop - window)
    return seen
