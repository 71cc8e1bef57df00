"""``manage`` of a cache of levels, its first launch: scores, and the plan of each block that is due (LeanKV, 4.1, 5.2).

    a CTA a (row, KV head), THREADS threads, each a slot of the ring at a time
    score    s = q k, p = exp(scale s - lse), the largest of a group's heads, summed over queries; own queries left out
    classes  mean = score / seen of the oldest 128; rank by counting; policy -> classes, order, new tokens a level
    needs    the last CTA of a row: seen; which heads need frames, and their places among the row's
    grant    the last due row: ``level_grant``

A row that does not act and waits for nothing costs one round of loads. Which CTA is last does not matter: what it does
depends on counters and on what the others wrote. ``level_pack`` then moves the tokens of the rows in ``goes``; it may
be launched while this kernel runs, and waits for its end.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn.device.level_grant import Ends, Frames, Heads, Wanted, grant, note_needs
from lowbit_attn.device.level_rows import (
    ACTS,
    DUE,
    LANES,
    PAGE,
    ROW,
    THREADS,
    Batch,
    bits_below,
    count_due,
    ones,
    read_row,
    row_in_registers,
)
from lowbit_attn.device.level_score import ROWS, VECTOR, Queries, Shared, add_seen, score_ring
from lowbit_attn.device.tilelang_kernel import TileKernel
from lowbit_attn.device.tokens import ACCESS_HALVES as ACCESS
from lowbit_attn.levels.policy import FRACTION_BITS, HIGH, LOW, PRUNED


class Policy(NamedTuple):
    """What the policy says: tokens high, and high or low (Shares), or T_l and T_h (Cumulative)."""

    is_cumulative: Any
    high: Any
    kept: Any
    t_low: Any
    t_high: Any


@T.macro
def classify(policy, shared, tx, token_class):
    """The class of token ``tx`` of the block, of 128 threads: by its rank, or by the share of those not ahead of it.

    Ahead are tokens with a larger mean, or an equal one and an earlier place.
    """
    mine, rank = T.alloc_var("float32"), T.alloc_var("int32")
    behind, total = T.alloc_var("int64"), T.alloc_var("int64")
    some = T.alloc_local((VECTOR,), "float32")
    mine = shared.mean[tx]
    rank = 0
    behind = T.int64(0)
    total = T.int64(0)
    for i in T.serial(PAGE // VECTOR):
        for e in T.vectorized(VECTOR):
            some[e] = shared.mean[VECTOR * i + e]
        for e in T.unroll(VECTOR):
            is_ahead = T.Or(some[e] > mine, T.And(some[e] == mine, VECTOR * i + e < tx))
            rank = rank + T.cast(is_ahead, "int32")
            total = total + shared.weight[VECTOR * i + e]
            behind = behind + T.if_then_else(is_ahead, T.int64(0), shared.weight[VECTOR * i + e])
    if policy.is_cumulative != 0:
        token_class[0] = T.if_then_else(
            mine == T.infinity("float32"), HIGH,
            T.if_then_else(T.cast(behind, "float32") < policy.t_low * T.cast(total, "float32"), PRUNED,
                           T.if_then_else(T.cast(behind, "float32") < policy.t_high * T.cast(total, "float32"), LOW,
                                          HIGH)))
    else:
        token_class[0] = T.cast(rank >= policy.high, "int32") + T.cast(rank >= policy.kept, "int32")


@T.macro
def weigh(shared, tx):
    """Means as whole numbers, so that sums are exact; 0 of tokens that no query has seen."""
    if tx < PAGE:
        value = T.alloc_var("float32")
        value = shared.mean[tx]
        shared.weight[tx] = T.cast(T.nearbyint(T.if_then_else(value == T.infinity("float32"), T.float32(0.0), value)
                                               * T.float32(1 << FRACTION_BITS)), "int64")


def count(votes, level):
    """Tokens of a level, of all warps that voted."""
    first, *rest = (ones(votes[PAGE // LANES * level + w]) for w in range(PAGE // LANES))
    return sum(rest, first)


@T.macro
def plan_block(policy, heads, v, shared, tx):
    """The oldest block of a (row, head) -> its order, by class and position, and its new tokens a level."""
    own, token_class, votes = T.alloc_var("uint32"), T.alloc_local((1,), "int32"), shared.votes
    place, warp = T.alloc_var("int32"), tx // LANES
    T.sync_threads()  # all means
    weigh(shared, tx)
    T.sync_threads()
    if tx < PAGE:
        classify(policy, shared, tx, token_class)
    T.sync_threads()  # the compiler may put the votes where means or weights are
    if tx < PAGE:
        for level in T.unroll(2):
            own = T.cast(T.ballot(token_class[0] == level), "uint32")
            if tx % LANES == 0:
                votes[PAGE // LANES * level + warp] = own
    T.sync_threads()
    if tx < PAGE:
        high, low = count(votes, HIGH), count(votes, LOW)
        place = 0
        own = T.uint32(0)
        for w in T.unroll(PAGE // LANES):
            mine = T.alloc_var("uint32")  # tokens of this class
            mine = T.if_then_else(token_class[0] == PRUNED, ~(votes[w] | votes[PAGE // LANES + w]),
                                  votes[PAGE // LANES * T.min(token_class[0], LOW) + w])
            place = place + T.if_then_else(w < warp, ones(mine), 0)
            own = T.if_then_else(w == warp, mine, own)
        place = place + ones(own & bits_below(tx % LANES))
        place = place + T.if_then_else(token_class[0] > HIGH, high, 0) + T.if_then_else(token_class[0] > LOW, low, 0)
        heads.order[v, place] = T.cast(tx, "uint8")
        if tx == 0:
            heads.fresh[HIGH, v] = high
            heads.fresh[LOW, v] = low


@T.macro
def is_last(arrivals, place, expected, tx, last):
    """Whether this CTA is the last of ``expected`` (of thread 0) to arrive: of all threads, all that the others wrote
    before is then seen."""
    arrived = T.alloc_var("int32")
    T.sync_threads()
    arrived = 0
    if tx == 0:
        at = T.alloc_var("int32")
        at = place
        arrived = T.cast(T.atomic_add(arrivals[at], 1, memory_order="acq_rel", return_prev=True) == expected - 1,
                         "int32")
        if arrived != 0:
            arrivals[at] = 0
    last[0] = T.syncthreads_or(arrived)


@T.macro
def manage_row(call, policy, heads, wanted, frames, queries, ring_k, score, seen, arrivals, ends, shared, row_accesses,
               at, head, size, num_heads, tx):
    """All that a CTA does for row ``at`` of the call and one KV head."""
    found, last, due = row_in_registers(), T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32")
    read_row(call, at, found)
    last[0] = 0
    due[0] = 0
    if T.And(found[DUE] == 0, T.And(head == 0, tx == 0)):
        wanted.goes[at] = 0
    if T.Or(found[ACTS] != 0, found[DUE] != 0):
        score_ring(call, found, queries, at, head, num_heads, ring_k, score, seen, row_accesses, shared, tx)
        if found[DUE] != 0:
            plan_block(policy, heads, found[ROW] * num_heads + head, shared, tx)
        is_last(arrivals, found[ROW], num_heads, tx, last)
        if last[0] != 0:
            if found[ACTS] != 0:
                add_seen(call, found, seen, tx)
            if found[DUE] != 0:
                if tx < LANES:
                    note_needs(heads, wanted, frames, found[ROW], num_heads, tx)
                    count_due(call, size, tx, due)
                is_last(arrivals, arrivals.shape[0] - 1, due[0], tx, last)
                if last[0] != 0:
                    grant(call, heads, wanted, frames, size, num_heads, ends, tx)


def plan_kernel(head_dim: int, dtype: str) -> TileKernel:
    """q [batch, q_len, num_heads, head_dim] and lse fp32 [batch, num_heads, q_len] of rows int64 [batch] -> the cache's
    scores, plans, frames and counters; tensors as LevelCache names them, ``fresh`` its ``new``, ``unit`` its ``half``.

    places int32 [2, v], needs int32 [2, max_batch], starts int32 [2, max_batch], arrivals int32 [max_batch + 1] (0
    between calls): scratch. goes int32 [max_batch]: 1 for rows of the call whose tokens ``level_pack`` moves, else 0.
    every, due_at, high, kept, room (of sinks and ring), max_seqlen in tokens; size_high, size_low (of a frame) and
    size_record (of a low record) in units of 128 bytes; per_low: low records of a frame. is_shared: 1 if a frame serves
    both levels, whose lists are then the high one's.
    """
    row_accesses = head_dim // ACCESS
    size, q_len, query_heads, seqs, marks = (T.dynamic(name) for name in (
        "size", "q_len", "query_heads", "seqs", "marks"))
    rows, slots, pages, frames_high, frames_low = (T.dynamic(name) for name in (
        "cache_rows", "slots", "pages", "frames_high", "frames_low"))

    @T.prim_func
    def plan(
        q: T.Tensor((size, q_len, query_heads, head_dim), dtype),
        lse: T.Tensor((size, query_heads, q_len), "float32"),
        which: T.Tensor((size,), "int64"),
        ring_k: T.Tensor((rows, slots, head_dim), dtype),
        score: T.Tensor((rows, slots), "float32"),
        seen: T.Tensor((seqs, slots), "int32"),
        n_sink: T.Tensor((seqs,), "int32"),
        n_out: T.Tensor((seqs,), "int32"),
        n_tok: T.Tensor((seqs,), "int32"),
        limit: T.Tensor((seqs,), "int32"),
        waits: T.Tensor((seqs,), "uint8"),
        starved: T.Tensor((1,), "int32"),
        order: T.Tensor((rows, PAGE), "uint8"),
        fresh: T.Tensor((2, rows), "int32"),
        n_stage: T.Tensor((2, rows), "int32"),
        c_sink: T.Tensor((2, rows), "int32"),
        c_out: T.Tensor((2, rows), "int32"),
        c_pack: T.Tensor((2, rows), "int32"),
        c_tok: T.Tensor((2, rows), "int32"),
        n_drop: T.Tensor((rows,), "int32"),
        unit: T.Tensor((rows,), "int32"),
        table: T.Tensor((2, rows, pages), "int32"),
        ids_high: T.Tensor((frames_high,), "int32"),
        ids_low: T.Tensor((frames_low,), "int32"),
        ends_high: T.Tensor((2,), "int64"),
        ends_low: T.Tensor((2,), "int64"),
        places: T.Tensor((2, rows), "int32"),
        needs: T.Tensor((2, seqs), "int32"),
        starts: T.Tensor((2, seqs), "int32"),
        goes: T.Tensor((seqs,), "int32"),
        arrivals: T.Tensor((marks,), "int32"),
        num_heads: T.int32,
        every: T.int32,
        due_at: T.int32,
        high: T.int32,
        kept: T.int32,
        is_cumulative: T.int32,
        size_high: T.int32,
        size_low: T.int32,
        size_record: T.int32,
        per_low: T.int32,
        is_shared: T.int32,
        max_seqlen: T.int32,
        room: T.int32,
        softmax_scale: T.float32,
        softcap: T.float32,
        t_low: T.float32,
        t_high: T.float32,
    ):
        with T.Kernel(num_heads, size, threads=THREADS) as (head, at):
            T.pdl_trigger()
            T.pdl_sync()
            tx = T.get_thread_binding()
            call = Batch(which, n_sink, n_out, n_tok, waits, every, due_at, q_len)
            policy = Policy(is_cumulative, high, kept, t_low, t_high)
            mine = Heads(order, fresh, n_stage, c_sink, c_out, c_pack, c_tok, n_drop, unit, table)
            frames = Frames(ids_high, ids_low, ends_high, ends_low, size_high, size_low, size_record, per_low,
                            is_shared)
            wanted = Wanted(places, needs, starts, goes)
            shared = Shared(T.alloc_shared((THREADS * row_accesses, ACCESS), dtype),
                            T.alloc_shared((ROWS * head_dim,), "float32"), T.alloc_shared((ROWS,), "float32"),
                            T.alloc_shared((PAGE,), "float32"), T.alloc_shared((PAGE,), "int64"),
                            T.alloc_shared((2 * PAGE // LANES,), "uint32"))
            manage_row(call, policy, mine, wanted, frames, Queries(q, lse, softmax_scale, softcap), ring_k, score,
                       seen, arrivals, Ends(starved, limit, max_seqlen, room), shared, row_accesses, at, head, size,
                       num_heads, tx)

    return TileKernel(plan, overlaps=True)
