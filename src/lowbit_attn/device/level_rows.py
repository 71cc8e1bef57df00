"""Rows of a call of ``manage`` over a cache of levels: where they stand, and which of them act or are due."""

from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.cache.state import MAX_Q_LEN

PAGE, LANES = layout.PAGE_TOKENS, layout.LANES
THREADS = 192  # of a CTA of the plan: slots of a default ring, and whole rows of 8, 12 or 16 accesses
# of what ``read_row`` finds; FIRST: position of the oldest recent token
ROW, LENGTH, FIRST, WAITS, ACTS, DUE = FIELDS = range(6)


class Batch(NamedTuple):
    """Rows of the call, and where they stand."""

    rows: Any  # int64 [batch]
    n_sink: Any
    n_out: Any
    n_tok: Any
    waits: Any
    every: Any
    due_at: Any  # recent tokens of a row whose oldest 128 leave
    q_len: Any


def row_in_registers():
    return T.alloc_local((len(FIELDS),), "int32")


@T.macro
def read_counters(batch, row, found):
    found[LENGTH] = batch.n_tok[row]
    found[FIRST] = batch.n_sink[row] + batch.n_out[row]
    found[WAITS] = T.cast(batch.waits[row], "int32")


@T.macro
def read_row(batch, at, found):
    """Row ``at`` of the call -> found. It acts if the step brought its length to or over a multiple of ``every``.

    Mostly it is row ``at`` of the cache, whose counters are read meanwhile.
    """
    before = T.alloc_var("int32")
    found[ROW] = T.cast(batch.rows[at], "int32")
    read_counters(batch, at, found)
    if found[ROW] != at:
        read_counters(batch, found[ROW], found)
    before = T.truncdiv(found[LENGTH] - batch.q_len + MAX_Q_LEN * batch.every, batch.every) - MAX_Q_LEN
    found[ACTS] = T.cast(T.truncdiv(found[LENGTH], batch.every) > before, "int32")
    found[DUE] = T.cast(T.And(T.Or(found[ACTS] != 0, found[WAITS] != 0),
                              found[LENGTH] - found[FIRST] >= batch.due_at), "int32")


@T.macro
def count_due(batch, size, lane, total):
    """Rows of the call that are due, by one warp."""
    found, at, is_due = row_in_registers(), T.alloc_var("int32"), T.alloc_var("int32")
    total[0] = 0
    for i in T.serial(T.truncdiv(size + (LANES - 1), LANES)):
        at = LANES * i + lane
        is_due = 0
        if at < size:
            read_row(batch, at, found)
            is_due = found[DUE]
        total[0] = total[0] + ones(T.cast(T.ballot(is_due != 0), "uint32"))


def ones(votes):
    """Bits that are set."""
    return T.cast(T.popcount(votes), "int32")


def bits_below(lane):
    """Bits of the lanes before one."""
    return (T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1)
