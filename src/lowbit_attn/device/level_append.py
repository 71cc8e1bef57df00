"""``append`` of a cache of levels in one launch: new tokens -> the sinks and the ring of each (row, KV head).

    a CTA a (row, KV head), 16 bytes a thread at a time
    where     the head's own counters say how many tokens its sinks and its ring hold, so that no CTA reads what another
              one writes
    tokens    -> sinks while there are any to fill, then the ring
    counters  the head's, and of a row's first head the row's

The counters of row ``at`` of the cache are read beside the number of the call's row ``at``, which mostly is the same,
and new tokens beside both. A row whose tokens would pass ``limit`` stays as it is, and ``faults`` marks it.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn.device.tilelang_kernel import TileKernel
from lowbit_attn.device.tokens import ACCESS_HALVES as ACCESS
from lowbit_attn.levels.policy import HIGH, LOW

THREADS = 64  # one token of 64 or 128 channels is 16 or 32 accesses, K and V
# of what ``read_head`` finds; HELD: tokens in the sinks, BEHIND: all others of the row, STAGED: of the levels' stages
ROW, HELD, BEHIND, STAGED_HIGH, STAGED_LOW, LIMIT = FIELDS = range(6)


class Tokens(NamedTuple):
    """One side: new tokens, and where they go."""

    x: Any  # [batch, tokens, heads, head_dim]
    sink: Any  # [rows, slots, head_dim]
    ring: Any


class Counters(NamedTuple):
    """Counters by the names of LevelCache."""

    n_sink: Any
    n_tok: Any
    limit: Any
    faults: Any
    n_stage: Any
    c_sink: Any
    c_out: Any
    c_tok: Any


@T.macro
def read_head(counters, row, v, found):
    """Where a (row, KV head) stands -> found."""
    found[ROW] = row
    found[LIMIT] = counters.limit[row]
    found[STAGED_HIGH] = counters.n_stage[HIGH, v]
    found[STAGED_LOW] = counters.n_stage[LOW, v]
    found[HELD] = counters.c_sink[HIGH, v] - found[STAGED_HIGH]
    found[BEHIND] = counters.c_out[HIGH, v]


@T.macro
def fetch(k, v, at, head, i, row_accesses, held):
    """Access ``i`` of the new tokens of a (row, KV head), K's, then V's -> registers."""
    accesses, token, access = k.x.shape[1] * row_accesses, T.alloc_var("int32"), T.alloc_var("int32")
    if i < 2 * accesses:
        token = T.truncdiv(T.if_then_else(i < accesses, i, i - accesses), row_accesses)
        access = T.truncmod(i, row_accesses)
        if i < accesses:
            for e in T.vectorized(ACCESS):
                held[e] = k.x[at, token, head, ACCESS * access + e]
        else:
            for e in T.vectorized(ACCESS):
                held[e] = v.x[at, token, head, ACCESS * access + e]


@T.macro
def put(side, row, position, access, sinks, held):
    """16 bytes of the token at a position -> the sinks of a (row, KV head) while there are any to fill, or its ring."""
    if position < sinks:
        for e in T.vectorized(ACCESS):
            side.sink[row, position, ACCESS * access + e] = held[e]
    else:
        slot = T.alloc_var("int32")
        slot = T.truncmod(position - sinks, side.ring.shape[1])
        for e in T.vectorized(ACCESS):
            side.ring[row, slot, ACCESS * access + e] = held[e]


@T.macro
def store_tokens(k, v, at, head, row, first, sinks, row_accesses, held, tx):
    """All new tokens of a (row, KV head) ``row``, the first of them at position ``first``; ``held`` has this thread's
    first access."""
    accesses, i, position, access = (k.x.shape[1] * row_accesses, *(T.alloc_var("int32") for _ in range(3)))
    i = tx
    while i < 2 * accesses:
        position = first + T.truncdiv(T.if_then_else(i < accesses, i, i - accesses), row_accesses)
        access = T.truncmod(i, row_accesses)
        if i < accesses:
            put(k, row, position, access, sinks, held)
        else:
            put(v, row, position, access, sinks, held)
        i = i + THREADS
        fetch(k, v, at, head, i, row_accesses, held)


@T.macro
def move_counters(counters, found, v, head, after, sinks):
    """Counters of a (row, KV head) ``v`` whose row has ``after`` tokens now; of the first head the row's."""
    sunk = T.alloc_var("int32")
    sunk = T.min(after, sinks)
    counters.c_sink[HIGH, v] = found[STAGED_HIGH] + sunk
    counters.c_out[HIGH, v] = after - sunk
    counters.c_tok[HIGH, v] = found[STAGED_HIGH] + after
    counters.c_tok[LOW, v] = found[STAGED_LOW] + after - sunk
    if head == 0:
        counters.n_sink[found[ROW]] = sunk
        counters.n_tok[found[ROW]] = after


@T.macro
def append_head(counters, which, k, v, sinks, row_accesses, at, head, tx):
    """The step of row ``at`` of the call and one KV head, by a CTA."""
    heads, tokens = k.x.shape[2], k.x.shape[1]
    found, held = T.alloc_local((len(FIELDS),), "int32"), T.alloc_local((ACCESS,), k.x.dtype)
    row, mine, after = (T.alloc_var("int32") for _ in range(3))
    row = T.cast(which[at], "int32")
    read_head(counters, at, at * heads + head, found)
    fetch(k, v, at, head, tx, row_accesses, held)
    if row != at:
        read_head(counters, row, row * heads + head, found)
    mine = row * heads + head
    after = found[HELD] + found[BEHIND] + tokens
    if after <= found[LIMIT]:
        store_tokens(k, v, at, head, mine, after - tokens, sinks, row_accesses, held, tx)
    T.sync_threads()  # all threads have read the counters
    if tx == 0:
        if after <= found[LIMIT]:
            move_counters(counters, found, mine, head, after, sinks)
        elif head == 0:
            counters.faults[row] = 1


def level_append_kernel(head_dim: int, dtype: str) -> TileKernel:
    """x_k, x_v [batch, tokens, num_heads_kv, head_dim] -> distinct rows int64 [batch] of a cache; tensors as LevelCache
    names them. sinks: capacity, in tokens."""
    row_accesses = head_dim // ACCESS
    batch, tokens, heads, seqs, rows, high_slots, slots = (T.dynamic(name) for name in (
        "batch", "tokens", "heads", "seqs", "cache_rows", "high_slots", "slots"))

    @T.prim_func
    def level_append(
        x_k: T.Tensor((batch, tokens, heads, head_dim), dtype),
        x_v: T.Tensor((batch, tokens, heads, head_dim), dtype),
        which: T.Tensor((batch,), "int64"),
        hi_k: T.Tensor((rows, high_slots, head_dim), dtype),
        hi_v: T.Tensor((rows, high_slots, head_dim), dtype),
        ring_k: T.Tensor((rows, slots, head_dim), dtype),
        ring_v: T.Tensor((rows, slots, head_dim), dtype),
        n_sink: T.Tensor((seqs,), "int32"),
        n_tok: T.Tensor((seqs,), "int32"),
        limit: T.Tensor((seqs,), "int32"),
        faults: T.Tensor((seqs,), "int32"),
        n_stage: T.Tensor((2, rows), "int32"),
        c_sink: T.Tensor((2, rows), "int32"),
        c_out: T.Tensor((2, rows), "int32"),
        c_tok: T.Tensor((2, rows), "int32"),
        sinks: T.int32,
    ):
        with T.Kernel(heads, batch, threads=THREADS) as (head, at):
            T.pdl_sync()
            counters = Counters(n_sink, n_tok, limit, faults, n_stage, c_sink, c_out, c_tok)
            append_head(counters, which, Tokens(x_k, hi_k, ring_k), Tokens(x_v, hi_v, ring_v), sinks, row_accesses, at,
                        head, T.get_thread_binding())

    return TileKernel(level_append, overlaps=True)
