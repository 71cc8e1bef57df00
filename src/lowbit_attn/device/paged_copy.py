"""Copies tokens that are in 16 bit into dense rows: new tokens of a step, a sequence's sinks and its ring.

A block of threads takes one side of an item, which is at most ``ITEM_TOKENS`` tokens of all heads: 16 bytes a thread,
several of them on their way at once.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn.device.groups import static
from lowbit_attn.device.tilelang_kernel import TileKernel
from lowbit_attn.device.tokens import ACCESS_HALVES as ACCESS
from lowbit_attn.device.tokens import in_whole_accesses, token_strides

THREADS = 256
AT_ONCE = 4  # loads of a thread that are on their way together
ITEM_TOKENS = 32  # that a caller gives one item
NEW, SINKS, RING = SOURCES = range(3)
K, V = SIDES = 1, 2  # bits of an item's sides
SOURCE, ROW, FIRST, TOKENS, DEST, SIDE = FIELDS = range(6)  # of an item


class Side(NamedTuple):
    """K or V: where tokens may be, and where they go."""

    x: Any  # [tokens, heads, head_dim]
    sink: Any  # [rings, heads, slots, head_dim]
    ring: Any
    dense: Any  # [tokens, heads, head_dim]


def dense_strides(name: str, head_dim: int) -> tuple:
    """Strides of 16-bit tokens [tokens, heads, head_dim] with room between them."""
    return T.dynamic(f"{name}_token", "int64"), head_dim, 1


def dense_in_accesses(x):
    """Tokens [tokens, heads, head_dim] whose stride is seen to be whole accesses."""
    return T.view(x, strides=(x.strides[0] // ACCESS * ACCESS, *x.strides[1:]))


@T.macro
def load_new(side, row, head, token, access, held, at):
    """An access of one of the step's tokens -> held from ``at`` on."""
    for e in T.vectorized(ACCESS):
        held[at + e] = side.x[token, head, ACCESS * access + e]


@T.macro
def load_sink(side, row, head, token, access, held, at):
    """An access of a sink, by its place -> held from ``at`` on."""
    for e in T.vectorized(ACCESS):
        held[at + e] = side.sink[row, head, token, ACCESS * access + e]


@T.macro
def load_ring(side, row, head, token, access, held, at):
    """An access of a token in the ring, by its position behind the sinks -> held from ``at`` on."""
    for e in T.vectorized(ACCESS):
        held[at + e] = side.ring[row, head, T.truncmod(token, side.ring.shape[2]), ACCESS * access + e]


@T.macro
def copy_tokens(load, side, row, first, tokens, dest, row_accesses, tx):
    """Tokens from ``first`` on of one source -> the dense rows from ``dest`` on, of all heads."""
    heads = side.dense.shape[1]
    held = T.alloc_local((AT_ONCE * ACCESS,), side.dense.dtype)
    token, head, access = (T.alloc_local((AT_ONCE,), "int32") for _ in range(3))
    for round_ in T.serial(T.truncdiv(tokens * heads * row_accesses + (AT_ONCE * THREADS - 1), AT_ONCE * THREADS)):
        for i in static(AT_ONCE):
            token[i] = T.truncdiv((round_ * AT_ONCE + i) * THREADS + tx, row_accesses)
            access[i] = (round_ * AT_ONCE + i) * THREADS + tx - token[i] * row_accesses
            head[i] = T.truncmod(token[i], heads)
            token[i] = T.truncdiv(token[i], heads)
            if token[i] < tokens:
                load(side, row, head[i], first + token[i], access[i], held, ACCESS * i)
        for i in static(AT_ONCE):
            if token[i] < tokens:
                for e in T.vectorized(ACCESS):
                    side.dense[dest + token[i], head[i], ACCESS * access[i] + e] = held[ACCESS * i + e]


@T.macro
def copy_item(side, items, item, ring_rows, row_accesses, tx):
    """One side of an item."""
    row, first, tokens, dest = (T.alloc_var("int32") for _ in range(4))
    first = items[FIRST, item]
    tokens = items[TOKENS, item]
    dest = items[DEST, item]
    if items[SOURCE, item] == NEW:
        copy_tokens(load_new, side, 0, first, tokens, dest, row_accesses, tx)
    else:
        row = ring_rows[items[ROW, item]]
        if items[SOURCE, item] == SINKS:
            copy_tokens(load_sink, side, row, first, tokens, dest, row_accesses, tx)
        else:
            copy_tokens(load_ring, side, row, first, tokens, dest, row_accesses, tx)


def paged_copy_kernel(head_dim: int, dtype: str) -> TileKernel:
    """Items int32 [6, n] -> keys, values [capacity, num_heads_kv, head_dim] in ``dtype``, dense.

    items: SOURCE, the step's ROW, FIRST, TOKENS, DEST in keys and values, SIDE (K, V or both). FIRST is a token of x,
    the place of a sink, or a position behind the sinks, which lies in slot position % slots of the ring. x_k, x_v:
    [tokens, num_heads_kv, head_dim], tokens at multiples of 16 bytes; sinks and rings of ring_rows int32 [rows].
    """
    row_accesses = head_dim // ACCESS
    tokens, heads, rings, sink_slots, slots_k, slots_v = (
        T.dynamic(name) for name in ("tokens", "heads", "rings", "sink_slots", "slots_k", "slots_v"))
    rows, count, capacity = (T.dynamic(name) for name in ("rows", "count", "capacity"))
    strides = {name: token_strides(name, head_dim) for name in ("sink_k", "sink_v", "ring_k", "ring_v")}

    @T.prim_func
    def paged_copy(
        x_k: T.StridedTensor((tokens, heads, head_dim), dense_strides("x_k", head_dim), dtype),
        x_v: T.StridedTensor((tokens, heads, head_dim), dense_strides("x_v", head_dim), dtype),
        sink_k: T.StridedTensor((rings, heads, sink_slots, head_dim), strides["sink_k"], dtype),
        sink_v: T.StridedTensor((rings, heads, sink_slots, head_dim), strides["sink_v"], dtype),
        ring_k: T.StridedTensor((rings, heads, slots_k, head_dim), strides["ring_k"], dtype),
        ring_v: T.StridedTensor((rings, heads, slots_v, head_dim), strides["ring_v"], dtype),
        ring_rows: T.Tensor((rows,), "int32"),
        items: T.Tensor((len(FIELDS), count), "int32"),
        keys: T.Tensor((capacity, heads, head_dim), dtype),
        values: T.Tensor((capacity, heads, head_dim), dtype),
    ):
        with T.Kernel(len(SIDES), count, threads=THREADS) as (side, item):
            tx = T.get_thread_binding()
            if (items[SIDE, item] >> side) % 2 == 1:
                if side == 0:
                    copy_item(Side(dense_in_accesses(x_k), in_whole_accesses(sink_k), in_whole_accesses(ring_k), keys),
                              items, item, ring_rows, row_accesses, tx)
                else:
                    copy_item(Side(dense_in_accesses(x_v), in_whole_accesses(sink_v), in_whole_accesses(ring_v),
                                   values), items, item, ring_rows, row_accesses, tx)

    return TileKernel(paged_copy)
