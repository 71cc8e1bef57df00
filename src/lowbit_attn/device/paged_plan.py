"""What one step of an engine does, for all layers that share its pages: counters, places of tokens, blocks to pack.

One block of threads, launched once a step; ``paged_append`` and the decode kernels read what it writes. Names are those
of ``paged.py``: a token behind the sinks is in slot ``(position - sinks) % slots`` of a ring, blocks of 128 tokens are
dealt to ranks in turn.

    rows      counters of decode rows; where each row's new tokens begin               a thread a row
    blocks    those that the step ends -> items                                        a thread a block
    tokens    row and place of each new token                                          a thread a token

A row is deferred if its first item reads slots of the ring that its own new tokens take: whoever packs that item
stores the row's tokens afterwards, and no other does.

Shared memory is one buffer, so nothing else takes its place. Each thread writes its own column of it between two
barriers, and all threads read it behind the second one. Rows come in groups of ``THREADS``; a barrier ends a group.
"""

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.device.tilelang_kernel import TileKernel

PAGE, LANES = layout.PAGE_TOKENS, layout.LANES
THREADS = 1024
# rows of shared memory, a column for each row of the group: first new token, tokens before them, all tokens, one of
# the states below, first entry of the table to pack, number of such entries of the rows before; sums of warps
Q_START, BEFORE, LENGTH, STATE, ENTRY, FIRST_ITEM, SUMS, SHARED_ROWS = range(8)
STORES_NOTHING, STORES, DEFERRED = range(3)  # states


@T.macro
def entries_below(block, rank, world, entries):
    """How many of a row's first ``block`` blocks this rank has: ``paged.own_blocks``."""
    entries[0] = T.truncdiv(block - rank + world - 1, world)


@T.macro
def scan(value, here, tx, before, total):
    """The sum of ``value`` over the threads before, and over all."""
    sum_, other = T.alloc_var("int32"), T.alloc_var("int32")
    sum_ = value
    for i in T.unroll(5):
        other = T.shfl_up(sum_, 1 << i)
        sum_ = sum_ + T.if_then_else(tx % LANES >= 1 << i, other, 0)
    if tx % LANES == LANES - 1:
        here[SUMS, tx // LANES] = sum_
    T.sync_threads()
    before[0] = sum_ - value
    sum_ = here[SUMS, tx % LANES]  # as many warps as lanes
    for i in T.unroll(5):
        other = T.shfl_up(sum_, 1 << i)
        sum_ = sum_ + T.if_then_else(tx % LANES >= 1 << i, other, 0)
    total[0] = T.shfl_sync(sum_, LANES - 1)
    other = T.shfl_sync(sum_, T.max(tx // LANES - 1, 0))
    before[0] = before[0] + T.if_then_else(tx >= LANES, other, 0)
    T.sync_threads()  # the next scan writes the sums


@T.macro
def find_row(here, keys, value, found):
    """The last row of the group whose key (a row of shared memory, ascending) is at most ``value``."""
    found[0] = 0
    for i in T.unroll(10):
        found[0] = found[0] + T.if_then_else(here[keys, found[0] + (THREADS >> (i + 1))] <= value,
                                             THREADS >> (i + 1), 0)


@T.macro
def write_counters(read, row, is_decoded, before, length, sinks, window_k, window_v, rank, world):
    """``paged.counters`` of a row behind its new tokens; 0 where decode does not read it."""
    rest, packed_k, packed_v, tokens = (T.alloc_var("int32") for _ in range(4))
    own = T.alloc_local((1,), "int32")
    for i in T.unroll(5):
        read[i, row] = 0
    if is_decoded:
        rest = T.max(before - sinks, 0)
        packed_k = T.truncdiv(T.max(rest - window_k, 0), PAGE)
        packed_v = T.truncdiv(T.max(rest - window_v, 0), PAGE)
        tokens = length
        read[4, row] = PAGE * packed_k
        if world > 1:
            if T.truncmod(packed_k, world) != rank:  # another rank has the open block
                tokens = PAGE * packed_k
            entries_below(packed_k, rank, world, own)
            packed_k = own[0]
            packed_v = own[0]
        read[0, row] = T.min(length, sinks)
        read[1, row] = PAGE * packed_k
        read[2, row] = PAGE * packed_v
        read[3, row] = tokens


@T.macro
def plan_row(table, seq_lens, query_start_loc, row, tx, sinks, slots, null_pages, rank, world, here, count):
    """A thread's row -> its column of shared memory; count: blocks that the step ends, of this rank and the table."""
    (rows, blocks), (q_start, fresh, length, rest, end) = table.shape, (T.alloc_var("int32") for _ in range(5))
    first, last, state = T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32"), T.alloc_var("int32")
    q_start = query_start_loc[T.min(row, rows)]
    fresh = T.max(query_start_loc[T.min(row + 1, rows)] - q_start, 0)
    length = 0
    count[0] = 0
    state = STORES_NOTHING
    first[0] = 0
    if fresh > 0:
        length = seq_lens[row]
        rest = T.max(length - fresh - sinks, 0)
        end = T.max(length - sinks, 0)
        entries_below(T.truncdiv(rest, PAGE), rank, world, first)
        entries_below(T.truncdiv(end, PAGE), rank, world, last)
        count[0] = T.max(T.min(last[0], blocks) - first[0], 0)
        if table[row, 0] >= null_pages:
            state = STORES
            if count[0] > 0:
                reads = T.alloc_var("int32")  # the first block behind the sinks whose tokens an item takes
                reads = PAGE * (first[0] * world + rank)
                if T.And(reads < rest, end - slots > reads):
                    if table[row, first[0]] >= null_pages:
                        state = DEFERRED
    here[Q_START, tx] = q_start
    here[BEFORE, tx] = length - fresh
    here[LENGTH, tx] = length
    here[STATE, tx] = state
    here[ENTRY, tx] = first[0]


@T.macro
def list_items(table, items, first_row, candidates, null_pages, rank, world, here, tx, listed):
    """Blocks that the group's rows end -> items, in order, but for those without a page; listed: items so far."""
    row, found, total = (T.alloc_local((1,), "int32") for _ in range(3))
    page, entry, at, is_item = (T.alloc_var("int32") for _ in range(4))
    for i in T.serial(T.truncdiv(candidates + (THREADS - 1), THREADS)):
        is_item = 0
        at = i * THREADS + tx
        row[0] = 0
        entry = 0
        page = 0
        if at < candidates:
            find_row(here, FIRST_ITEM, at, row)
            entry = here[ENTRY, row[0]] + at - here[FIRST_ITEM, row[0]]
            page = table[first_row + row[0], entry]
            is_item = T.cast(page >= null_pages, "int32")
        scan(is_item, here, tx, found, total)
        if T.And(is_item != 0, listed[0] + found[0] < items.shape[1]):
            place = T.alloc_var("int32")
            place = listed[0] + found[0]
            items[0, place] = first_row + row[0]
            items[1, place] = page
            items[2, place] = PAGE * (entry * world + rank)
            items[3, place] = T.cast(T.And(here[STATE, row[0]] == DEFERRED, at == here[FIRST_ITEM, row[0]]), "int32")
        listed[0] = listed[0] + total[0]


@T.macro
def place_tokens(token_row, token_slot, first_row, first, stop, sinks, slots, here, tx):
    """Rows and places of the tokens ``first`` .. ``stop`` of the batch, which are new in the group's rows."""
    row, position, slot = T.alloc_local((1,), "int32"), T.alloc_var("int32"), T.alloc_var("int32")
    for i in T.serial(T.truncdiv(T.max(stop - first, 0) + (THREADS - 1), THREADS)):
        at = T.alloc_var("int32")
        at = first + i * THREADS + tx
        if at < stop:
            find_row(here, Q_START, at, row)
            position = here[BEFORE, row[0]] + at - here[Q_START, row[0]]
            slot = -1
            if here[STATE, row[0]] == STORES:
                if position < sinks:
                    slot = position
                elif position >= here[LENGTH, row[0]] - slots:  # else a later one takes its place
                    slot = sinks + T.truncmod(position - sinks, slots)
            token_row[at] = first_row + row[0]
            token_slot[at] = slot


def paged_plan_kernel() -> TileKernel:
    """A step of an engine, as ``paged.Step`` has it -> what ``paged_append`` and decode kernels read of it, int32.

    read [5, held]: n_sink, n_qk, n_qv, n_tok and ring_start of the first ``num_decode`` rows, as ``paged.counters``
    gives them behind the new tokens; 0 of all other rows and of padding.
    row [3, held]: tokens before the step, first new token of the batch, number of new tokens; 0 of padding.
    token_row, token_slot: of each of ``num_tokens`` tokens its row (-1: padding) and where it is stored, sinks first,
    then slots of the ring. Slot -1: padding, a row without a first page, a later token of the row takes the place, or
    the row is deferred.
    items [4, max_items]: row, page, position behind the sinks of the block's first token, 1 for the item after which a
    deferred row's tokens are stored; count [1]: how many. held: at least the rows of the step.
    """
    rows, blocks, held, max_tokens, max_items = (T.dynamic(name) for name in ("rows", "blocks", "held", "max_tokens",
                                                                              "max_items"))
    starts, table_row = T.dynamic("starts"), T.dynamic("table_row", "int64")

    @T.prim_func
    def paged_plan(
        table: T.StridedTensor((rows, blocks), (table_row, 1), "int32"),
        seq_lens: T.Tensor((rows,), "int32"),
        query_start_loc: T.Tensor((starts,), "int32"),
        read: T.Tensor((5, held), "int32"),
        row: T.Tensor((3, held), "int32"),
        token_row: T.Tensor((max_tokens,), "int32"),
        token_slot: T.Tensor((max_tokens,), "int32"),
        items: T.Tensor((4, max_items), "int32"),
        count: T.Tensor((1,), "int32"),
        num_decode: T.int32,
        num_tokens: T.int32,
        sinks: T.int32,
        slots: T.int32,
        window_k: T.int32,
        window_v: T.int32,
        null_pages: T.int32,
        rank: T.int32,
        world: T.int32,
    ):
        with T.Kernel(1, threads=THREADS) as _:
            tx = T.get_thread_binding()
            here = T.alloc_shared((SHARED_ROWS, THREADS), "int32")
            own, before, candidates, listed = (T.alloc_local((1,), "int32") for _ in range(4))
            listed[0] = 0
            for group in T.serial(T.truncdiv(held + (THREADS - 1), THREADS)):
                first_row, at, fresh = (T.alloc_var("int32") for _ in range(3))
                first_row = group * THREADS
                at = first_row + tx
                T.sync_threads()  # of the group before
                plan_row(table, seq_lens, query_start_loc, at, tx, sinks, slots, null_pages, rank, world, here, own)
                fresh = here[LENGTH, tx] - here[BEFORE, tx]
                if at < held:
                    write_counters(read, at, T.And(at < num_decode, fresh > 0), here[BEFORE, tx], here[LENGTH, tx],
                                   sinks, window_k, window_v, rank, world)
                    row[0, at] = here[BEFORE, tx]
                    row[1, at] = T.if_then_else(fresh > 0, here[Q_START, tx], 0)
                    row[2, at] = fresh
                scan(own[0], here, tx, before, candidates)
                here[FIRST_ITEM, tx] = before[0]
                T.sync_threads()
                list_items(table, items, first_row, candidates[0], null_pages, rank, world, here, tx, listed)
                place_tokens(token_row, token_slot, first_row, here[Q_START, 0],
                             T.min(query_start_loc[T.min(first_row + THREADS, rows)], num_tokens), sinks, slots, here,
                             tx)
            at = T.alloc_var("int32")
            at = query_start_loc[rows] + tx
            while at < num_tokens:
                token_row[at] = -1
                token_slot[at] = -1
                at = at + THREADS
            if tx == 0:
                count[0] = T.min(listed[0], max_items)

    return TileKernel(paged_plan)
