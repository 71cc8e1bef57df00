"""The query rows of a block or warp: where each is in q and in the results, and which positions it sees.

Row r of a KV head is query r // ratio of head r % ratio of its group. Query j sees no position from end + j on, and,
in kernels with a window, none before end + j - window (sinks: sink_window).
"""

from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.ampere import softmax


class Rows(NamedTuple):
    """Rows first .. first + count - 1 of a KV head and sequence."""

    seq: Any
    first_head: Any
    ratio: Any
    first: Any
    count: Any  # 0 or less: none
    end: Any  # first position that query 0 does not see: n_tok - q_len + 1
    last_end: Any  # the same of the last query: n_tok
    window: Any
    sink_window: Any  # under the window of a level: sinks before its stage, negative where none is hidden
    hidden: Any = None  # of a level under a window: see cache/view.py


def query(rows: Rows, row):
    """The query of row ``first + row``."""
    return T.truncdiv(rows.first + row, rows.ratio)


def head(rows: Rows, row):
    """The head of row ``first + row``."""
    return rows.first_head + T.truncmod(rows.first + row, rows.ratio)


def first_row(config, row_block, warp):
    """The first row of a warp in a row block: of all its warps the same, or each has rows of its own."""
    return row_block * config.rows + (warp * config.warp_rows if config.shares_pages else 0)


def of_block(config, rows: Rows, warp, q_len) -> Rows:
    """The rows of a warp's block."""
    if not config.shares_pages:
        return rows
    first = rows.first - warp * config.warp_rows
    return rows._replace(first=first, count=T.min(rows.ratio * q_len - first, config.rows))


def present(config, rows: Rows):
    """Whether a warp has rows to work on: only in a block of several row groups can it have none.

    With V in 16 bit beside packed K the branch costs spills: all warps work there.
    """
    return not config.shares_pages or config.has_mixed or rows.count > 0


def first_page(rows: Rows, num_sink):
    """First page of which some query sees a token: query 0 sees furthest back."""
    if rows.hidden is not None:
        return T.truncdiv(T.max(rows.hidden, 0), layout.PAGE_TOKENS)
    return T.truncdiv(T.max(rows.end - rows.window - num_sink, 0), layout.PAGE_TOKENS)


@T.macro
def ends(config, rows, lane, out):
    """First position that each of a lane's row values does not see."""
    for v in T.unroll(config.row_values):
        out[v] = rows.end + query(rows, softmax.query_row(config, v, lane % 4))


@T.macro
def mask_page(config, rows, start, acc_s, lane):
    """-inf for the tokens of a packed page, from position ``start`` on, that are before a row's window."""
    if start < rows.last_end - rows.window:
        begin = T.alloc_local((config.row_values,), "int32")
        ends(config, rows, lane, begin)
        for v in T.unroll(config.row_values):
            begin[v] = begin[v] - rows.window - start
        softmax.mask_before(config, acc_s, layout.PAGE_TOKENS // layout.TILE, begin, lane // 4)


@T.macro
def mask_level(config, first, acc_s, lane):
    """-inf for the tokens of a level's page before number ``first``, for all rows: of a query that is alone."""
    if first > 0:
        begin = T.alloc_local((config.row_values,), "int32")
        for v in T.unroll(config.row_values):
            begin[v] = first
        softmax.mask_before(config, acc_s, layout.PAGE_TOKENS // layout.TILE, begin, lane // 4)


def stage_seen(rows: Rows, num_packed):
    """Number in a level's segment of sinks and stage from which on its window shows it: what it hides beyond the
    pages are tokens of the stage."""
    return T.abs(rows.sink_window) + T.min(rows.hidden, 0) + T.max(rows.hidden - num_packed, 0)
