"""Scores of the recent tokens of a cache of levels (LeanKV, section 4.1), by a CTA of ``level_plan``.

A thread has a slot of the ring: its key comes to shared memory with those of the others, and ROWS query rows are
multiplied with it at once. Of a query's probabilities the largest of a group's heads counts, after normalisation, and
a token's own query says nothing.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn.device.level_rows import ACTS, FIRST, LENGTH, PAGE, ROW, THREADS
from lowbit_attn.device.tokens import ACCESS_HALVES as ACCESS
from lowbit_attn.device.tokens import swizzled, token_place
from lowbit_attn.registers import LOG2_E

ROWS = 4  # query rows that a thread multiplies its key with at once
VECTOR = 4  # fp32 of one access to shared memory


class Queries(NamedTuple):
    """Queries [batch, q_len, num_heads, head_dim], their lse, and how logits are made."""

    x: Any
    lse: Any
    scale: Any
    softcap: Any  # 0: none


class Shared(NamedTuple):
    """Shared memory of a CTA."""

    keys: Any  # 16 bit, a slot a row
    q: Any  # fp32 [ROWS * head_dim]
    lse: Any  # fp32 [ROWS], times log2 e
    mean: Any  # fp32 [128]
    weight: Any  # int64 [128]
    votes: Any  # uint32 [8]: tokens high, then low


def age_of(slot, oldest, slots):
    """How many tokens of the ring are older than that of a slot."""
    return T.if_then_else(slot < oldest, slot - oldest + slots, slot - oldest)


@T.macro
def load_keys(ring_k, v, first, oldest, held, row_accesses, keys, tx):
    """Keys of the slots from ``first`` on that hold a token -> shared memory; ``observe`` waits for them."""
    slots = ring_k.shape[1]
    for i in T.unroll(row_accesses):
        row, access = token_place(i * THREADS + tx, row_accesses)
        if T.And(first + row < slots, age_of(first + row, oldest, slots) < held):
            T.ptx_cp_async(T.access_ptr(keys[swizzled(row, access, row_accesses), 0], "w", ACCESS),
                           T.access_ptr(ring_k[v, first + row, access * ACCESS], "r", ACCESS), ACCESS)
    T.ptx_commit_group()


@T.macro
def load_queries(queries, at, head, ratio, block, row_accesses, shared, tx):
    """ROWS query rows of a KV head, by query, then by head -> fp32 in shared memory; rows beyond the last are 0."""
    taken = T.alloc_local((ACCESS,), queries.x.dtype)
    row, access, rows = T.alloc_var("int32"), T.alloc_var("int32"), queries.x.shape[1] * ratio
    if tx < ROWS * row_accesses:
        row = block * ROWS + tx // row_accesses
        access = tx % row_accesses
        for e in T.unroll(ACCESS):
            taken[e] = T.cast(T.float32(0.0), queries.x.dtype)
        if row < rows:
            for e in T.vectorized(ACCESS):
                taken[e] = queries.x[at, T.truncdiv(row, ratio), head * ratio + T.truncmod(row, ratio),
                                     ACCESS * access + e]
        for e in T.unroll(ACCESS):
            shared.q[ACCESS * tx + e] = T.cast(taken[e], "float32")
    if tx < ROWS:
        total = T.alloc_var("float32")
        total = T.float32(0.0)
        row = block * ROWS + tx
        if row < rows:
            total = queries.lse[at, head * ratio + T.truncmod(row, ratio), T.truncdiv(row, ratio)]
        shared.lse[tx] = T.if_then_else(total == -T.infinity("float32"), T.float32(0.0), total * T.float32(LOG2_E))


@T.macro
def multiply(shared, row_accesses, tx, s):
    """s [ROWS] = q k of the thread's key and the rows in shared memory."""
    key, part = T.alloc_local((ACCESS,), shared.keys.dtype), T.alloc_local((VECTOR,), "float32")
    for j in T.unroll(ROWS):
        s[j] = T.float32(0.0)
    for access in T.unroll(row_accesses, unroll_factor=2):
        for e in T.vectorized(ACCESS):
            key[e] = shared.keys[swizzled(tx, access, row_accesses), e]
        for j in T.unroll(ROWS):
            for i in T.unroll(ACCESS // VECTOR):
                for e in T.vectorized(VECTOR):
                    part[e] = shared.q[(j * row_accesses + access) * ACCESS + i * VECTOR + e]
                for e in T.unroll(VECTOR):
                    s[j] = s[j] + part[e] * T.cast(key[i * VECTOR + e], "float32")


def capped(x, softcap):
    """softcap tanh(x / softcap), or x where softcap is 0."""
    double = T.exp2(x / softcap * T.float32(2 * LOG2_E))
    return T.if_then_else(softcap == T.float32(0.0), x,
                          softcap * (T.float32(1.0) - T.float32(2.0) / (double + T.float32(1.0))))


@T.macro
def observe(queries, at, head, ratio, behind, row_accesses, shared, tx, total):
    """Probabilities that the call's queries give the thread's key, of each the largest of the group's heads -> total.

    behind: tokens from the key's position to the first query's; queries that see it, but its own, come after it.
    """
    s = T.alloc_local((ROWS,), "float32")
    best, p, row = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("int32")
    best = T.float32(0.0)
    total[0] = T.float32(0.0)
    for block in T.serial(T.truncdiv(queries.x.shape[1] * ratio + (ROWS - 1), ROWS)):
        T.sync_threads()  # the rows before were read
        load_queries(queries, at, head, ratio, block, row_accesses, shared, tx)
        T.ptx_wait_group(0)  # the keys
        T.sync_threads()
        multiply(shared, row_accesses, tx, s)
        for j in T.unroll(ROWS):
            row = block * ROWS + j
            if row < queries.x.shape[1] * ratio:
                p = T.exp2(capped(s[j] * queries.scale, queries.softcap) * T.float32(LOG2_E) - shared.lse[j])
                best = T.max(best, T.if_then_else(behind + T.truncdiv(row, ratio) > 0, p, T.float32(0.0)))
                if T.truncmod(row + 1, ratio) == 0:
                    total[0] = total[0] + best
                    best = T.float32(0.0)


@T.macro
def score_ring(batch, found, queries, at, head, num_heads, ring_k, score, seen, row_accesses, shared, tx):
    """The ring's scores with the call's, if the row acts; means of the oldest 128 -> shared memory."""
    slots, ratio = ring_k.shape[1], T.truncdiv(queries.x.shape[2], num_heads)
    v, oldest, first, slot, age, given = (T.alloc_var("int32") for _ in range(6))
    mine, total = T.alloc_var("float32"), T.alloc_local((1,), "float32")
    v = found[ROW] * num_heads + head
    oldest = T.truncmod(batch.n_out[found[ROW]], slots)
    total[0] = T.float32(0.0)
    for chunk in T.serial(T.truncdiv(slots + (THREADS - 1), THREADS)):
        first = chunk * THREADS
        slot = first + tx
        age = age_of(slot, oldest, slots)
        if slot < slots:
            mine = score[v, slot]
            given = seen[found[ROW], slot]
        if found[ACTS] != 0:
            T.sync_threads()  # the keys before were read
            load_keys(ring_k, v, first, oldest, found[LENGTH] - found[FIRST], row_accesses, shared.keys, tx)
            observe(queries, at, head, ratio, found[LENGTH] - batch.q_len - found[FIRST] - age, row_accesses, shared,
                    tx, total)
        if slot < slots:
            if found[ACTS] != 0:
                is_held = age < found[LENGTH] - found[FIRST]
                mine = T.if_then_else(is_held, mine + total[0], T.float32(0.0))
                given = T.if_then_else(is_held, given + observations(batch, found, age), 0)
                score[v, slot] = mine
            if age < PAGE:
                shared.mean[age] = T.if_then_else(given > 0, mine / T.cast(T.max(given, 1), "float32"),
                                                  T.infinity("float32"))


def observations(batch, found, age):
    """How many queries of the call come after the token of the ring of this age."""
    return T.max(0, T.min(batch.q_len, found[LENGTH] - 1 - found[FIRST] - age))


@T.macro
def add_seen(batch, found, seen, tx):
    """``seen`` of a row's ring with the call's queries, by all threads."""
    slots, slot, age = seen.shape[1], T.alloc_var("int32"), T.alloc_var("int32")
    slot = tx
    while slot < slots:
        age = age_of(slot, T.truncmod(batch.n_out[found[ROW]], slots), slots)
        seen[found[ROW], slot] = T.if_then_else(age < found[LENGTH] - found[FIRST],
                                                seen[found[ROW], slot] + observations(batch, found, age), 0)
        slot = slot + THREADS
