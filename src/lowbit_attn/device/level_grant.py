"""The end of the plan of a cache of levels: frames for all rows that are due, by prefix sums (LeanKV, 5.2).

    needs    of a row, by a warp of its last CTA: heads in order, of one head the high level first
    grant    by the last CTA of all: a warp sums what rows need, in the call's order; a row goes if its inclusive sum is
             free, or it needs nothing
    then     its threads, a (row, head) each: frames from the circular list, table entries, and the counters as they are
             once ``level_pack`` has moved the tokens

A row that does not go keeps everything; ``waits`` marks it and ``starved`` counts it.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn.device.level_rows import DUE, LANES, PAGE, ROW, THREADS, bits_below, ones, read_row, row_in_registers
from lowbit_attn.levels.policy import HIGH, LOW

SCAN = (1, 2, 4, 8, 16)  # lanes back


class Heads(NamedTuple):
    """What a cache holds of each (row, KV head), by the names of LevelCache."""

    order: Any
    fresh: Any  # new
    n_stage: Any
    c_sink: Any
    c_out: Any
    c_pack: Any
    c_tok: Any
    n_drop: Any
    unit: Any  # half
    table: Any


class Frames(NamedTuple):
    """Lists of free frames, and their sizes in units; see ``level_plan.plan_kernel``."""

    ids_high: Any
    ids_low: Any
    ends_high: Any
    ends_low: Any
    size_high: Any
    size_low: Any
    size_record: Any
    per_low: Any
    is_shared: Any


class Ends(NamedTuple):
    """What the end of a plan says of rows."""

    starved: Any
    limit: Any
    max_seqlen: Any
    room: Any  # of sinks and ring


class Wanted(NamedTuple):
    """Scratch: frames that heads and rows need, and what becomes of the rows of the call."""

    places: Any  # of a head's frame among its row's, -1: it takes none
    needs: Any  # [2, max_batch]: frames of each size, of rows of the cache
    starts: Any  # [2, max_batch]: where they begin behind the list's head, -1: it does not go; of rows of the call
    goes: Any  # of rows of the call


# by function, for a tensor that a macro has as an argument of its own gets that argument's name in the kernel
def ids_of(frames, size):
    return frames.ids_low if size else frames.ids_high


def ends_of(frames, size):
    return frames.ends_low if size else frames.ends_high


def frame_units(frames, level):
    return frames.size_low if level == LOW else frames.size_high


@T.macro
def note_needs(heads, wanted, frames, row, num_heads, lane):
    """Frames that a row's heads take -> places, needs; by one warp."""
    v, high, low, is_high, is_low = (T.alloc_var("int32") for _ in range(5))
    high_votes, low_votes, before = (T.alloc_var("uint32") for _ in range(3))
    before = bits_below(lane)
    high = 0
    low = 0
    for i in T.serial(T.truncdiv(num_heads + (LANES - 1), LANES)):
        is_high = 0
        is_low = 0
        v = row * num_heads + LANES * i + lane
        if LANES * i + lane < num_heads:
            is_high = T.cast(heads.n_stage[HIGH, v] + heads.fresh[HIGH, v] >= PAGE, "int32")
            is_low = T.cast(T.And(heads.n_stage[LOW, v] + heads.fresh[LOW, v] >= PAGE, heads.unit[v] < 0), "int32")
        high_votes = T.cast(T.ballot(is_high != 0), "uint32")
        low_votes = T.cast(T.ballot(is_low != 0), "uint32")
        if LANES * i + lane < num_heads:
            beside = T.alloc_var("int32")  # of the other level in the same list
            beside = T.if_then_else(frames.is_shared != 0, low + ones(low_votes & before), 0)
            wanted.places[HIGH, v] = T.if_then_else(is_high != 0, high + ones(high_votes & before) + beside, -1)
            beside = T.if_then_else(frames.is_shared != 0, high + ones(high_votes & before) + is_high, 0)
            wanted.places[LOW, v] = T.if_then_else(is_low != 0, low + ones(low_votes & before) + beside, -1)
        high = high + ones(high_votes)
        low = low + ones(low_votes)
    if lane == 0:
        wanted.needs[0, row] = T.if_then_else(frames.is_shared != 0, high + low, high)
        wanted.needs[1, row] = T.if_then_else(frames.is_shared != 0, 0, low)


@T.macro
def inclusive_sum(value, lane):
    """value[0] -> the sum of the lanes up to this one."""
    for distance in SCAN:
        below = T.alloc_var("int32")
        below = T.shfl_sync(value[0], T.max(lane - distance, 0))
        value[0] = value[0] + T.if_then_else(lane >= distance, below, 0)


@T.macro
def decide(call, wanted, frames, size, ends, lane, taken):
    """Which rows of the call go, by one warp -> starts, goes, the rows' counters; frames taken of each size."""
    found, from_high, from_low = row_in_registers(), T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32")
    sum_high, sum_low, high, low, row, at, is_due, goes, refused = (T.alloc_var("int32") for _ in range(9))
    free_high, free_low = T.alloc_var("int64"), T.alloc_var("int64")
    free_high = frames.ends_high[1] - frames.ends_high[0]
    free_low = frames.ends_low[1] - frames.ends_low[0]
    sum_high = 0
    sum_low = 0
    refused = 0
    taken[0] = 0
    taken[1] = 0
    for i in T.serial(T.truncdiv(size + (LANES - 1), LANES)):
        at = LANES * i + lane
        is_due = 0
        high = 0
        low = 0
        if at < size:
            read_row(call, at, found)
            row = found[ROW]
            is_due = found[DUE]
            if is_due != 0:
                high = wanted.needs[0, row]
                low = wanted.needs[1, row]
        from_high[0] = high
        from_low[0] = low
        inclusive_sum(from_high, lane)
        inclusive_sum(from_low, lane)
        from_high[0] = from_high[0] + sum_high
        from_low[0] = from_low[0] + sum_low
        goes = T.cast(T.And(is_due != 0, T.Or(
            T.And(T.cast(from_high[0], "int64") <= free_high, T.cast(from_low[0], "int64") <= free_low),
            high + low == 0)), "int32")
        if at < size:
            wanted.starts[0, at] = T.if_then_else(goes != 0, from_high[0] - high, -1)
            wanted.starts[1, at] = T.if_then_else(goes != 0, from_low[0] - low, -1)
            if is_due != 0:
                wanted.goes[at] = goes
                call.waits[row] = T.cast(1 - goes, "uint8")
                call.n_out[row] = call.n_out[row] + PAGE * goes
                ends.limit[row] = T.min(ends.max_seqlen, call.n_out[row] + ends.room)
        taken[0] = taken[0] + T.if_then_else(goes != 0, high, 0)
        taken[1] = taken[1] + T.if_then_else(goes != 0, low, 0)
        refused = refused + is_due - goes
        sum_high = T.shfl_sync(from_high[0], LANES - 1)
        sum_low = T.shfl_sync(from_low[0], LANES - 1)
    for distance in SCAN:
        taken[0] = taken[0] + T.shfl_xor(taken[0], distance)
        taken[1] = taken[1] + T.shfl_xor(taken[1], distance)
        refused = refused + T.shfl_xor(refused, distance)
    if T.And(lane == 0, refused > 0):
        ends.starved[0] = ends.starved[0] + refused


@T.macro
def settle_level(heads, wanted, frames, level, size, v, call_row, new_unit):
    """Counters of a level of a (row, head) once its tokens have moved; of a new record its table entry.

    size: 0 or 1, whose list of frames is the level's. new_unit: the place of a frame's next free low record, -1: none;
    of the low level alone.
    """
    total, page, unit, at, count = (T.alloc_var("int32") for _ in range(5))
    total = heads.n_stage[level, v] + heads.fresh[level, v]
    if total >= PAGE:
        page = T.truncdiv(heads.c_pack[level, v], PAGE)
        unit = new_unit[0]
        if wanted.places[level, v] >= 0:
            count = ids_of(frames, size).shape[0]
            at = T.cast(T.truncmod(ends_of(frames, size)[0], T.cast(count, "int64")), "int32")
            at = at + wanted.starts[size, call_row] + wanted.places[level, v]
            unit = ids_of(frames, size)[T.if_then_else(at >= count, at - count, at)] * frame_units(frames, level)
        heads.table[level, v, page] = unit
        heads.c_pack[level, v] = PAGE * (page + 1)
        total = total - PAGE
        if level == LOW:
            new_unit[0] = T.if_then_else(T.truncmod(page + 1, frames.per_low) == 0, -1, unit + frames.size_record)
    heads.n_stage[level, v] = total


@T.macro
def settle(call, heads, wanted, frames, size, num_heads, tx):
    """Frames and counters of all heads of the rows that go, a thread each."""
    i, at, row, v, behind = (T.alloc_var("int32") for _ in range(5))
    unit = T.alloc_local((1,), "int32")
    i = tx
    while i < size * num_heads:
        at = T.truncdiv(i, num_heads)
        if wanted.starts[0, at] >= 0:
            row = T.cast(call.rows[at], "int32")
            v = row * num_heads + T.truncmod(i, num_heads)
            unit[0] = -1
            settle_level(heads, wanted, frames, HIGH, 0, v, at, unit)
            unit[0] = heads.unit[v]
            if frames.is_shared != 0:
                settle_level(heads, wanted, frames, LOW, 0, v, at, unit)
            else:
                settle_level(heads, wanted, frames, LOW, 1, v, at, unit)
            heads.unit[v] = unit[0]
            heads.n_drop[v] = heads.n_drop[v] + PAGE - heads.fresh[HIGH, v] - heads.fresh[LOW, v]
            behind = call.n_tok[row] - call.n_sink[row]
            heads.c_sink[HIGH, v] = heads.n_stage[HIGH, v] + call.n_sink[row]
            heads.c_sink[LOW, v] = heads.n_stage[LOW, v]
            heads.c_out[LOW, v] = call.n_out[row]
            heads.c_tok[HIGH, v] = heads.c_sink[HIGH, v] + behind
            heads.c_tok[LOW, v] = heads.c_sink[LOW, v] + behind
        i = i + THREADS


@T.macro
def grant(call, heads, wanted, frames, size, num_heads, ends, tx):
    """Frames for the rows that are due, by the one CTA that has seen all of them; size: rows of the call."""
    taken = T.alloc_local((2,), "int32")
    if tx < LANES:
        decide(call, wanted, frames, size, ends, tx, taken)
    T.sync_threads()
    settle(call, heads, wanted, frames, size, num_heads, tx)
    T.sync_threads()
    if tx == 0:
        frames.ends_high[0] = frames.ends_high[0] + T.cast(taken[0], "int64")
        if taken[1] > 0:
            frames.ends_low[0] = frames.ends_low[0] + T.cast(taken[1], "int64")
