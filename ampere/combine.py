"""The end of a call: which block merges the splits of a row block, and how (flash-decoding's combine), in fp32.

A call of one split has nothing to merge: its blocks write (out, lse) themselves, with the sink logit (``with_sink``).
Else each block writes its (o, lse) and counts itself; the last of a row block finds all of them written:

    all threads   o_partial, lse_partial -> barrier
    thread 0      arrivals + 1, released and acquired at the GPU's scope -> flag in shared memory -> barrier
    last block    arrivals = 0 for the next call; its rows of all splits, in the order of the splits -> out, lse

So the result does not depend on which block is last.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn.ampere import load, queries
from lowbit_attn.registers import LN_2, LOG2_E

SPLITS_AT_ONCE = 8  # whose loads are under way together
CHANNELS = 4  # of a thread: 16 bytes of o_partial
SASS_NEED = ("ATOM|ATOMG",)
SASS_FORBID = ("LDG.E.128.CONSTANT",)  # partial results come from other SMs: never through the read-only path


class Results(NamedTuple):
    """Where (o, lse) go, of one split or of all, and what else is in the denominator."""

    o_partial: Any  # fp32 [num_splits, batch, q_len, num_heads, head_dim]
    lse_partial: Any  # fp32 [num_splits, batch, q_len, num_heads]
    out: Any  # dtype [batch, q_len, num_heads, head_dim]
    lse: Any  # fp32 [batch, num_heads, q_len]
    sink_logits: Any  # fp32 [1 or num_heads]
    split: Any
    num_splits: Any


def row_at(results: Results, seq, query, head):
    """The number of a row in ``out``, and in the partial results of the first split.

    With it as the one index before the channel, addresses take a tenth of the instructions of four.
    """
    _, q_len, num_heads, _ = results.out.shape
    return (seq * q_len + query) * num_heads + head


def num_rows(results: Results):
    """Rows of a split; those of the next follow."""
    batch, q_len, num_heads, _ = results.out.shape
    return batch * q_len * num_heads


def logit_place(sink_logits, head):
    """Where the sink logit of a query head is: a single one is all heads'."""
    return T.if_then_else(sink_logits.shape[0] == 1, 0, head)


def origin(top):
    """What the logits of a row are measured from: 0 keeps every weight of an all-empty row at exp2(-inf) = 0."""
    return T.if_then_else(top == -T.infinity("float32"), T.float32(0.0), top)


def weight(logit, start):
    """exp(logit - start)."""
    return T.exp2((logit - start) * T.float32(LOG2_E))


def log_sum(start, total):
    return T.if_then_else(total == T.float32(0.0), -T.infinity("float32"), start + T.log2(total) * T.float32(LN_2))


def weighted(value, factor):
    """0 for what has no weight, whatever it is; a NaN of live data stays visible."""
    return T.if_then_else(factor == T.float32(0.0), T.float32(0.0), factor * value)


@T.macro
def with_sink(results, head, row_lse, found):
    """lse of all tokens -> found: [what o is multiplied with, lse] once the sink logit is in the denominator."""
    sink, start, own, total = (T.alloc_var("float32") for _ in range(4))
    sink = results.sink_logits[logit_place(results.sink_logits, head)]
    start = origin(T.max(row_lse, sink))
    own = weight(row_lse, start)
    total = own + weight(sink, start)
    found[0] = T.if_then_else(total == T.float32(0.0), T.float32(0.0), own / total)
    found[1] = log_sum(start, total)


@T.macro
def prefetch(sink_logits, head, arrivals, place, thread):
    """What the end of a block would else wait for: its last loads are of lines that nobody has read."""
    if thread == 0:
        load.prefetch(sink_logits, logit_place(sink_logits, head))
        at = T.alloc_var("int32")
        at = place
        load.prefetch(arrivals, at)


@T.macro
def finish(config, thread, rows, results, arrivals, place, flag):
    """After a block has written its split: the last one merges. flag: uint32 in shared memory, free for all."""
    sink, head = T.alloc_var("float32"), T.alloc_var("int32")
    # on its way while the block counts itself; a row that is not there has a head of the group too
    head = queries.head(rows, thread // (config.head_dim // CHANNELS))
    sink = results.sink_logits[logit_place(results.sink_logits, head)]
    T.sync_threads()
    if thread == 0:
        at, arrived = T.alloc_var("int32"), T.alloc_var("int32")
        at = place
        arrived = T.atomic_add(arrivals[at], 1, memory_order="acq_rel", return_prev=True)
        flag[0, 0, 0] = T.cast(arrived == results.num_splits - 1, "uint32")
        if arrived == results.num_splits - 1:
            arrivals[at] = 0
    T.sync_threads()
    if flag[0, 0, 0] != T.uint32(0):
        combine(config, thread, rows, results, sink)


@T.macro
def combine(config, thread, rows, results, first_sink):
    """(o, lse) of all splits of a block's rows -> out, lse; a thread has CHANNELS channels of a row at a time.

    first_sink: the sink logit of the thread's first row. An empty split has lse -inf; a row of only such gives o = 0,
    lse = -inf (or the sink logit).
    """
    lanes = config.head_dim // CHANNELS
    sink, top, start, shrink, total = (T.alloc_var("float32") for _ in range(5))
    unit, query, head, row, at, chunk, stride = (T.alloc_var("int32") for _ in range(7))
    acc = T.alloc_local((CHANNELS,), "float32")
    lses = T.alloc_local((SPLITS_AT_ONCE,), "float32")
    values = T.alloc_local((CHANNELS * SPLITS_AT_ONCE,), "float32")
    sink = first_sink
    stride = num_rows(results)
    for i in T.serial(T.truncdiv(rows.count * lanes - thread + (config.threads - 1), config.threads)):
        unit = thread + i * config.threads
        chunk = unit % lanes
        query = queries.query(rows, unit // lanes)
        head = queries.head(rows, unit // lanes)
        row = row_at(results, rows.seq, query, head)
        at = row
        top = sink
        total = T.if_then_else(top == -T.infinity("float32"), T.float32(0.0), T.float32(1.0))
        for c in T.unroll(CHANNELS):
            acc[c] = T.float32(0.0)
        for first in T.serial(T.truncdiv(results.num_splits + (SPLITS_AT_ONCE - 1), SPLITS_AT_ONCE)):
            load_splits(results, results.num_splits - first * SPLITS_AT_ONCE, at, stride, chunk, lses, values)
            at = at + SPLITS_AT_ONCE * stride
            shrink = top
            for s in T.unroll(SPLITS_AT_ONCE):
                top = T.max(top, lses[s])
            start = origin(top)
            shrink = weight(shrink, start)
            total = total * shrink
            for c in T.unroll(CHANNELS):
                acc[c] = acc[c] * shrink
            for s in T.unroll(SPLITS_AT_ONCE):
                lses[s] = weight(lses[s], start)
                total = total + lses[s]
                for c in T.unroll(CHANNELS):
                    acc[c] = acc[c] + weighted(values[CHANNELS * s + c], lses[s])
        for c in T.vectorized(CHANNELS):
            results.out[0, 0, row, CHANNELS * chunk + c] = T.cast(
                T.if_then_else(total == T.float32(0.0), T.float32(0.0), acc[c] / total), config.dtype)
        if chunk == 0:
            results.lse[rows.seq, head, query] = log_sum(start, total)
        head = queries.head(rows, (unit + config.threads) // lanes)
        sink = results.sink_logits[logit_place(results.sink_logits, head)]


@T.macro
def load_splits(results, count, row, stride, chunk, lses, values):
    """lse and channels of a row in ``count`` splits, -inf for more than those; ``row``: its number in the first."""
    for s in T.unroll(SPLITS_AT_ONCE):
        lses[s] = -T.infinity("float32")
        for c in T.vectorized(CHANNELS):
            values[CHANNELS * s + c] = T.float32(0.0)
        if s < count:
            lses[s] = results.lse_partial[0, 0, 0, row + s * stride]
            for c in T.vectorized(CHANNELS):
                values[CHANNELS * s + c] = results.o_partial[0, 0, 0, row + s * stride, CHANNELS * chunk + c]
