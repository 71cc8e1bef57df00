"""One step of an engine on the device: store the new tokens in rings, and pack the blocks that end in this step.

One launch for both sides. It counts nothing and changes no counters: ``paged_plan`` has said of each token where it
goes, and which blocks end (items). Names are those of ``paged.py``.

    new tokens  -> sinks, ring    16 bytes of K and of V a thread, of all tokens and heads
    items       -> records        dealt out by (item, side, KV head): 128 tokens, those of earlier steps out of the
                                  ring, the others out of the new ones
    deferred rows                 the block of threads that packed the item stores the new tokens of its side and head

A step without items ends behind the first line, as short as ``append``: the plan beside the tokens, ring, stores.

Who writes what, while who reads it:

- Ring, read by items. Only a row's open block has tokens of earlier steps, at positions behind the sinks from
  ``first`` on. New tokens that are stored take the slots of positions below ``seq_len - sinks - slots``. If that is at
  most ``first``, nobody writes a slot that the item reads, in whatever order. Else the row is deferred: its tokens have
  token_slot -1, so nobody stores them but the block of threads that has read its own side and head of the ring, behind
  a barrier of all its threads. Another side or head is other memory, and so is another row: no two rows of a step have
  one ring, but for ring 0, which is never written.
- Sinks are read by nobody. A deferred row has tokens behind its sinks already, so it stores none there.
- Records: each (page, side, head) is one item's share, and is read by nobody in this launch. Two rows never end
  blocks in one page.
- Shared memory: the tile and what the packing bodies use belong to one item's share at a time. All threads meet
  between two shares, also because K and V may be packed by unlike numbers of threads, which share a named barrier.
"""

from functools import partial
from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.device.groups import EXACT, UNIT_WORDS
from lowbit_attn.device.quantize_codebook import entries_argument
from lowbit_attn.device.step import Pool, Side, StepGeometry, pack_block
from lowbit_attn.device.tilelang_kernel import TileKernel
from lowbit_attn.device.tokens import ACCESS_HALVES as ACCESS
from lowbit_attn.device.tokens import (
    in_whole_accesses,
    loading_threads,
    ring_slot,
    swizzled,
    token_place,
    token_strides,
)
from lowbit_attn.formats import Format

PAGE, LANES = layout.PAGE_TOKENS, layout.LANES
AT_ONCE = 4  # tokens whose places a thread reads at once, behind its first one: of a chunk few are stored


class Plan(NamedTuple):
    """What ``paged_plan`` has written, and the rings of the layers' group."""

    ring_rows: Any
    row: Any
    token_row: Any
    token_slot: Any
    items: Any


@T.macro
def load_access(x, token, head, access, held):
    for e in T.vectorized(ACCESS):
        held[e] = x[token, head, ACCESS * access + e]


@T.macro
def store_access(held, tokens, row, head, slot, access):
    for e in T.vectorized(ACCESS):
        tokens[row, head, slot, ACCESS * access + e] = held[e]


@T.macro
def put(k, v, row, head, slot, access, held_k, held_v, num_sinks):
    """16 bytes of K and of V of a new token -> place ``slot`` of a ring, whose first are the sinks."""
    if slot < num_sinks:
        store_access(held_k, k.sink, row, head, slot, access)
        store_access(held_v, v.sink, row, head, slot, access)
    else:
        store_access(held_k, k.ring, row, head, slot - num_sinks, access)
        store_access(held_v, v.ring, row, head, slot - num_sinks, access)


@T.macro
def store_token(k, v, plan, token, rest, slot, row, held_k, held_v, num_sinks):
    """What a thread holds of a token that is stored -> its row's ring, if it has one."""
    ring_row = T.alloc_var("int32")
    if slot >= 0:
        ring_row = plan.ring_rows[row]
        if ring_row > 0:
            put(k, v, ring_row, T.truncdiv(rest, k.m.row_accesses), slot, T.truncmod(rest, k.m.row_accesses), held_k,
                held_v, num_sinks)


@T.macro
def load_token(k, v, token, rest, held_k, held_v):
    """Access ``rest`` of all of a token's, head by head, of K and of V."""
    load_access(k.x, token, T.truncdiv(rest, k.m.row_accesses), T.truncmod(rest, k.m.row_accesses), held_k)
    load_access(v.x, token, T.truncdiv(rest, k.m.row_accesses), T.truncmod(rest, k.m.row_accesses), held_v)


@T.macro
def store_tokens(k, v, plan, block, grid, threads, tx, held_k, held_v, num_sinks):
    """This block's share of the new tokens: accesses of all heads, 32 to a warp, warps of all blocks by turns."""
    tokens, heads = k.x.shape[:2]
    token, rest, size, slot, row, far, further = (T.alloc_var("int32") for _ in range(7))
    at, offset, slots = (T.alloc_local((AT_ONCE,), "int32") for _ in range(3))
    size = heads * k.m.row_accesses
    rest = (tx // LANES * grid + block) * LANES + tx % LANES
    token = T.truncdiv(rest, size)
    rest = rest - token * size
    if token < tokens:  # mostly a decode step has no more than this: all that does not depend on another load at once
        slot = plan.token_slot[token]
        row = plan.token_row[token]
        load_token(k, v, token, rest, held_k, held_v)
        store_token(k, v, plan, token, rest, slot, row, held_k, held_v, num_sinks)
    far = T.truncdiv(grid * threads, size)  # to a thread's next access: so many tokens, and accesses of the token
    further = grid * threads - far * size
    while token + far < tokens:
        for i in T.unroll(AT_ONCE):
            rest = rest + further
            token = token + far + T.cast(rest >= size, "int32")
            rest = T.if_then_else(rest >= size, rest - size, rest)
            at[i] = token
            offset[i] = rest
            slots[i] = -1
            if token < tokens:
                slots[i] = plan.token_slot[token]
        for i in T.unroll(AT_ONCE):
            if slots[i] >= 0:
                load_token(k, v, at[i], offset[i], held_k, held_v)
                store_token(k, v, plan, at[i], offset[i], slots[i], plan.token_row[at[i]], held_k, held_v, num_sinks)


class Block(NamedTuple):
    """An item, in registers: where its 128 tokens are."""

    ring_row: Any
    first: Any  # position behind the sinks of the first one
    old: Any  # behind the sinks, tokens of earlier steps: those below are in the ring
    token: Any  # new token at position 0 behind the sinks, if all of the row's were new


@T.macro
def load_tile(side, block, head, part, tile, tx, threads):
    """Part ``part`` of an item's tokens -> the tile, by asynchronous copies; waits for the thread's own."""
    m = side.m
    position, slot = T.alloc_var("int32"), T.alloc_var("int32")
    loaders = loading_threads(threads, m.part_rows, m.row_accesses)
    position = block.first + part * m.part_rows
    slot = T.truncmod(block.first, side.ring.shape[2]) + part * m.part_rows
    if tx < loaders:
        for i in T.unroll(m.part_rows * m.row_accesses // loaders):
            row, access = token_place(i * loaders + tx, m.row_accesses)
            if position + row < block.old:
                T.ptx_cp_async(
                    T.access_ptr(tile[swizzled(row, access, m.row_accesses), 0], "w", ACCESS),
                    T.access_ptr(side.ring[block.ring_row, head, ring_slot(slot + row, side.ring.shape[2]),
                                           access * ACCESS], "r", ACCESS), ACCESS)
            else:
                T.ptx_cp_async(
                    T.access_ptr(tile[swizzled(row, access, m.row_accesses), 0], "w", ACCESS),
                    T.access_ptr(side.x[block.token + position + row, head, access * ACCESS], "r", ACCESS), ACCESS)
    T.ptx_commit_group()
    T.ptx_wait_group(0)


@T.macro
def store_deferred(side, block, head, length, threads, tx, held):
    """The row's new tokens of one side and head that no later one overwrites -> the ring; length: of the row, behind
    the sinks."""
    m, slots = side.m, side.ring.shape[2]
    first, token, position = (T.alloc_var("int32") for _ in range(3))
    first = T.max(block.old, length - slots)
    for i in T.serial(T.truncdiv((length - first) * m.row_accesses + (threads - 1), threads)):
        token = T.truncdiv(i * threads + tx, m.row_accesses)
        position = first + token
        if position < length:
            load_access(side.x, block.token + position, head, T.truncmod(i * threads + tx, m.row_accesses), held)
            store_access(held, side.ring, block.ring_row, head, T.truncmod(position, slots),
                         T.truncmod(i * threads + tx, m.row_accesses))


@T.macro
def pack_item(side, plan, item, head, pool, tile, threads, tx, held, num_sinks):
    """An item of one side and head -> its record; then, of a deferred row, its new tokens -> the ring."""
    packers = min(side.m.threads, threads)
    row, unit, before, fresh = (T.alloc_var("int32") for _ in range(4))
    ring_row, first, old, token = (T.alloc_var("int32") for _ in range(4))
    row = plan.items[0, item]
    unit = plan.items[1, item] * pool.page_stride + head * pool.head_stride + side.first_unit
    first = plan.items[2, item]
    before = plan.row[0, row]
    fresh = plan.row[2, row]
    ring_row = plan.ring_rows[row]
    old = T.max(before - num_sinks, 0)
    token = plan.row[1, row] + num_sinks - before
    block = Block(ring_row, first, old, token)
    if tx < packers:
        pack_block(side, head, partial(load_tile, side, block, head), pool, unit, tile, packers, tx)
    T.sync_threads()  # the item is out of the ring, and the next one may take the tile
    if T.And(plan.items[3, item] != 0, ring_row > 0):
        store_deferred(side, block, head, before + fresh - num_sinks, threads, tx, held)


@T.macro
def pack_items(k, v, plan, count, block, grid, pool, tile, threads, tx, held, num_sinks):
    """This block's share of ``count`` items: every ``grid``-th of (item, side, head)."""
    heads = k.x.shape[1]
    for i in T.serial(T.truncdiv(T.max(2 * heads * count - block + grid - 1, 0), grid)):
        item, head = T.alloc_var("int32"), T.alloc_var("int32")
        item = T.truncdiv(i * grid + block, 2 * heads)
        head = i * grid + block - item * 2 * heads
        if head < heads:
            pack_item(k, plan, item, head, pool, tile, threads, tx, held, num_sinks)
        else:
            pack_item(v, plan, item, head - heads, pool, tile, threads, tx, held, num_sinks)


def new_tokens(tokens):
    """New tokens [tokens, heads, head_dim] that are seen to be whole accesses: ``tokens.in_whole_accesses``."""
    return T.view(tokens, strides=(tokens.strides[0] // ACCESS * ACCESS, *tokens.strides[1:]))


def paged_append_kernel(fmt: Format, head_dim: int, dtype: str, searches: str) -> TileKernel:
    """k, v [tokens, num_heads_kv, head_dim] of a step, dense but for the stride of a token, a multiple of 8 elements ->
    sinks and rings of ring_rows int32 [rows] (0: none), and records.

    row, token_row, token_slot, items, count: of ``paged_plan``. pool: uint32 [units, 32] and its uint16 view, in units
    of 128 bytes; page_stride and head_stride in units. k_entries, v_entries: fp16 [num_heads_kv, groups, 256 c], only
    of sides with codebooks. searches: the sides with range search.
    """
    step, sides = StepGeometry(fmt, head_dim, searches, dtype), fmt.specs(head_dim)
    tokens, heads, rows, held_rows = (T.dynamic(name) for name in ("tokens", "heads", "rows", "held"))
    max_tokens, max_items, units = (T.dynamic(name) for name in ("max_tokens", "max_items", "units"))
    slots, sink_slots, rings = (T.dynamic(name) for name in ("slots", "sink_slots", "rings"))
    grid = T.min(2 * heads * tokens, step.max_blocks)
    strides = {name: token_strides(name, head_dim) for name in ("sink_k", "sink_v", "ring_k", "ring_v")}
    x_strides = {name: (T.dynamic(f"{name}_token", "int64"), head_dim, 1) for name in ("x_k", "x_v")}

    @T.prim_func
    def paged_append(
        x_k: T.StridedTensor((tokens, heads, head_dim), x_strides["x_k"], dtype),
        x_v: T.StridedTensor((tokens, heads, head_dim), x_strides["x_v"], dtype),
        ring_rows: T.Tensor((rows,), "int32"),
        row: T.Tensor((3, held_rows), "int32"),
        token_row: T.Tensor((max_tokens,), "int32"),
        token_slot: T.Tensor((max_tokens,), "int32"),
        items: T.Tensor((4, max_items), "int32"),
        count: T.Tensor((1,), "int32"),
        pool: T.Tensor((units, UNIT_WORDS), "uint32"),
        pool_meta: T.Tensor((units, 2 * UNIT_WORDS), "uint16"),
        sink_k: T.StridedTensor((rings, heads, sink_slots, head_dim), strides["sink_k"], dtype),
        sink_v: T.StridedTensor((rings, heads, sink_slots, head_dim), strides["sink_v"], dtype),
        ring_k: T.StridedTensor((rings, heads, slots, head_dim), strides["ring_k"], dtype),
        ring_v: T.StridedTensor((rings, heads, slots, head_dim), strides["ring_v"], dtype),
        k_entries: entries_argument(sides[0], heads),
        v_entries: entries_argument(sides[1], heads),
        num_sinks: T.int32,
        page_stride: T.int32,
        head_stride: T.int32,
    ):
        with T.Kernel(grid, threads=step.threads) as block:
            T.annotate_min_blocks_per_sm(step.blocks_per_sm)
            tx = T.get_thread_binding()
            k = Side(step.matrices[0], "k" in searches, step.first_units[0], new_tokens(x_k),
                     in_whole_accesses(sink_k), in_whole_accesses(ring_k), None, k_entries)
            v = Side(step.matrices[1], "v" in searches, step.first_units[1], new_tokens(x_v),
                     in_whole_accesses(sink_v), in_whole_accesses(ring_v), None, v_entries)
            plan = Plan(ring_rows, row, token_row, token_slot, items)
            tile = T.alloc_shared((step.tile_accesses, ACCESS), dtype)
            held_k, held_v = T.alloc_local((ACCESS,), dtype), T.alloc_local((ACCESS,), dtype)
            blocks, num_items, size = T.alloc_var("int32"), T.alloc_var("int32"), step.threads
            blocks = grid
            num_items = count[0]  # beside the first loads, not behind the stores
            store_tokens(k, v, plan, block, blocks, size, tx, held_k, held_v, num_sinks)
            pack_items(k, v, plan, num_items, block, blocks, Pool(pool, pool_meta, None, page_stride, head_stride),
                       tile, size, tx, held_k, num_sinks)

    return TileKernel(paged_append, compile_flags=EXACT)
