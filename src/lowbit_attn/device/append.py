"""One step of a cache on the device: pack the blocks that the last step filled, then store the new tokens.

One launch for both sides; it reads the counters itself, so a captured launch serves every length and every block
boundary. Every block of threads reads the counters of all rows, a thread a row, and so knows the whole step:

    new tokens   -> sinks, ring    16 bytes a thread, of all rows, heads and both sides, loaded beside the counters
    full blocks  -> records        dealt out by (row, side, KV head); whoever packs a block then stores the new tokens
                                   of its side and head, which may go where the block lay
    counters                       moved by the last block of threads to have read them

The grid is no larger than what a GPU holds at once, whatever the batch: a step that packs nothing takes as long as
its chain of dependent accesses, once: counters, the arrival of a block, counters again. Nothing else is on it: new
tokens go through the last warps, and a batch that fits a warp has its counters moved by the first warp alone. A
sequence that has no room (its tokens would pass ``limit``, 0 for a freed one) and an unknown row are left as they are
and marked in ``faults``.
"""

from functools import partial

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.device.groups import EXACT, UNIT_WORDS, static
from lowbit_attn.device.quantize import weights_argument
from lowbit_attn.device.quantize_codebook import entries_argument
from lowbit_attn.device.step import (
    BatchRows,
    Counters,
    Pool,
    Ranks,
    Side,
    StepGeometry,
    pack_block,
    rows_in_shared_memory,
)
from lowbit_attn.device.tilelang_kernel import TileKernel
from lowbit_attn.device.tokens import ACCESS_HALVES as ACCESS
from lowbit_attn.device.tokens import in_whole_accesses, load_tokens, token_strides
from lowbit_attn.formats import Format

PAGE, LANES = layout.PAGE_TOKENS, layout.LANES


@T.macro
def load_counters(row, counters, mine):
    mine[0] = counters.limit[row]
    mine[1] = counters.n_tok[row]
    mine[2] = counters.n_sink[row]
    mine[3] = counters.n_qk[row]
    mine[4] = counters.n_qv[row]
    mine[5] = counters.ring_start[row]


def elsewhere(mine):
    """Packed tokens of a row that no page of this cache holds: its ring starts that many tokens later."""
    return mine[5] - mine[3]


def held_tokens(mine):
    """Tokens of a row behind its sinks, but for those packed elsewhere."""
    return mine[1] - mine[2] - elsewhere(mine)


@T.macro
def guess_counters(rows, at, counters, row, mine):
    """The rows of ``at`` of the batch (-1: none) and its counters, if it is sequence ``at``, which saves a dependent
    read."""
    row[0] = -1
    row[1] = -1
    if at < rows.counters.shape[0]:
        row[0] = rows.counters[at]
        row[1] = rows.rings[at]
        if at < counters.limit.shape[0]:
            load_counters(at, counters, mine)


@T.macro
def read_row(rows, at, counters, row, mine):
    """Row ``at`` of the batch and its counters."""
    row[0] = rows.counters[at]
    if T.And(row[0] >= 0, row[0] < counters.limit.shape[0]):
        load_counters(row[0], counters, mine)


@T.macro
def plan_row(at, tokens, counters, row, mine, here, packs, tx):
    """What the step does for a thread's row -> the thread's place of ``here``; ``row`` and ``mine`` as guessed.

    packs: 1 if the row has a full block, else 0.
    """
    length, packed_k, packed_v, gone = (T.alloc_var("int32") for _ in range(4))
    length = -1
    gone = 0
    packed_k = -1
    packed_v = -1
    if T.And(row[0] >= 0, row[0] < counters.limit.shape[0]):
        if row[0] != at:
            load_counters(row[0], counters, mine)
        filled = held_tokens(mine)
        if mine[0] - mine[1] >= tokens:
            length = mine[1]
            gone = elsewhere(mine)
            packed_k = T.if_then_else(filled - mine[3] >= counters.window_k + PAGE, mine[3], -1)
            packed_v = T.if_then_else(filled - mine[4] >= counters.window_v + PAGE, mine[4], -1)
    here.row[tx] = row[0]
    here.ring_row[tx] = row[1]
    here.elsewhere[tx] = gone
    here.length[tx] = length
    here.packed_k[tx] = packed_k
    here.packed_v[tx] = packed_v
    packs[0] = T.cast(T.Or(packed_k >= 0, packed_v >= 0), "int32")


@T.macro
def list_full(threads, here, packs, tx, count):
    """The rows that have a full block -> here.full, by all threads; their number."""
    before, own = T.alloc_var("int32"), T.alloc_var("uint32")
    own = T.cast(T.ballot(packs[0] != 0), "uint32")
    if tx % LANES == 0:
        here.votes[tx // LANES] = own
    T.sync_threads()
    count[0] = 0
    before = 0
    for warp in T.unroll(threads // LANES):
        before = T.if_then_else(warp == tx // LANES, count[0], before)
        count[0] = count[0] + T.cast(T.popcount(here.votes[warp]), "int32")
    bit = T.uint32(1) << T.cast(tx % LANES, "uint32")
    if (own & bit) != T.uint32(0):
        here.full[before + T.cast(T.popcount(own & (bit - T.uint32(1))), "int32")] = tx
    T.sync_threads()


@T.macro
def put(held, side, row, head, position, access, num_sinks):
    """16 bytes of a new token -> row ``row`` of sinks while there are any to fill, then of the ring."""
    if position < num_sinks:
        for e in T.vectorized(ACCESS):
            side.sink[row, head, position, ACCESS * access + e] = held[e]
    else:
        slot = T.alloc_var("int32")
        slot = T.truncmod(position - num_sinks, side.ring.shape[2])
        for e in T.vectorized(ACCESS):
            side.ring[row, head, slot, ACCESS * access + e] = held[e]


@T.macro
def fetch(at, accesses, first, k, v, place, held):
    """Access ``at`` of the new tokens of K, then V, from row ``first`` on, ``accesses`` of each -> registers.

    place: its row (of those from ``first`` on), token, head and access of the head.
    """
    if at < 2 * accesses:
        place[3] = T.if_then_else(at < accesses, at, at - accesses)
        for i, size in ((2, k.m.row_accesses), (1, k.x.shape[2]), (0, k.x.shape[1])):
            place[i] = T.truncdiv(place[i + 1], size)
            place[i + 1] = place[i + 1] - place[i] * size
        if at < accesses:
            for e in T.vectorized(ACCESS):
                held[e] = k.x[first + place[0], place[1], place[2], ACCESS * place[3] + e]
        else:
            for e in T.vectorized(ACCESS):
                held[e] = v.x[first + place[0], place[1], place[2], ACCESS * place[3] + e]


@T.macro
def store_fetched(at, accesses, k, v, here, place, held, num_sinks):
    """What ``fetch`` loaded -> sinks, ring; but for rows without room and sides whose block is full."""
    row, length, packed = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    row = here.ring_row[place[0]]
    length = here.length[place[0]]
    packed = T.if_then_else(at < accesses, here.packed_k[place[0]], here.packed_v[place[0]])
    if T.And(length >= 0, packed < 0):
        if at < accesses:
            put(held, k, row, place[2], length + place[1], place[3], num_sinks)
        else:
            put(held, v, row, place[2], length + place[1], place[3], num_sinks)


@T.macro
def load_ring(side, row, head, first, order, part, tile, tx, threads):
    """Part ``part`` of the 128 tokens of a ring from slot ``first`` on -> the tile."""
    m = side.m
    load_tokens(side.ring, row, head, first + part * m.part_rows, m.part_rows, m.row_accesses, tile, tx, threads,
                True, order)


@T.macro
def pack_full(side, packed, first, t, head, pool, here, tile, held, num_sinks, threads, tx, order=None):
    """A full block of one side and head of row ``first + t``, from token ``packed`` on; then its new tokens."""
    m, (row, ring_row, unit, slot) = side.m, (T.alloc_var("int32") for _ in range(4))
    packers = min(m.threads, threads)
    row = here.row[t]
    ring_row = here.ring_row[t]  # before the branch: no barrier may come into it
    if tx < packers:
        unit = pool.table[row, T.truncdiv(packed, PAGE)] * pool.page_stride + head * pool.head_stride + side.first_unit
        slot = T.truncmod(packed + here.elsewhere[t], side.ring.shape[2])
        pack_block(side, head, partial(load_ring, side, ring_row, head, slot, order), pool, unit, tile, packers, tx)
    T.sync_threads()  # the block may lie where new tokens go
    for r in T.serial(T.truncdiv(side.x.shape[1] * m.row_accesses + threads - 1, threads)):
        token, access = T.alloc_var("int32"), T.alloc_var("int32")
        token = T.truncdiv(r * threads + tx, m.row_accesses)
        access = T.truncmod(r * threads + tx, m.row_accesses)
        if token < side.x.shape[1]:
            for e in T.vectorized(ACCESS):
                held[e] = side.x[first + t, token, head, ACCESS * access + e]
            put(held, side, ring_row, head, here.length[t] + token, access, num_sinks)


@T.macro
def pack_all(k, v, count, first, block, grid, pool, here, tile, held, num_sinks, threads, tx):
    """This block's share of the full blocks of ``count`` rows: every ``grid``-th of (row, side, head)."""
    heads = k.x.shape[2]
    for i in T.serial(T.truncdiv(2 * heads * count - block + grid - 1, grid)):
        t, head, packed = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
        t = T.truncdiv(i * grid + block, 2 * heads)
        head = i * grid + block - t * 2 * heads
        t = here.full[t]
        if head < heads:
            packed = here.packed_k[t]
            if packed >= 0:
                pack_full(k, packed, first, t, head, pool, here, tile, held, num_sinks, threads, tx)
        else:
            head = head - heads
            packed = here.packed_v[t]
            if packed >= 0:
                pack_full(v, packed, first, t, head, pool, here, tile, held, num_sinks, threads, tx)


@T.macro
def pack_all_ordered(k, v, count, first, block, grid, pool, here, tile, held, num_sinks, threads, tx, ranks):
    """Pack the due blocks of a format that orders tokens: every ``grid``-th of (row, head), K, then V, in one order."""
    heads = k.x.shape[2]
    for i in T.serial(T.truncdiv(heads * count - block + grid - 1, grid)):
        t, head, packed = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
        t = T.truncdiv(i * grid + block, heads)
        head = i * grid + block - t * heads
        t = here.full[t]
        packed = here.packed_k[t]
        pack_full(k, packed, first, t, head, pool, here, tile, held, num_sinks, threads, tx, ranks.order)
        pack_full(v, packed, first, t, head, pool, here, tile, held, num_sinks, threads, tx, ranks.order)
        finish_order(v, packed, t, head, pool, here, tx, ranks)


@T.macro
def finish_order(v, packed, t, head, pool, here, tx, ranks):
    """A block's positions -> its record; its slots lose their scores, and the next block has no order yet."""
    row, unit, slot = (T.alloc_var("int32") for _ in range(3))
    row = here.ring_row[t]
    unit = pool.table[here.row[t], T.truncdiv(packed, PAGE)] * pool.page_stride + head * pool.head_stride + v.first_unit
    if tx < UNIT_WORDS:
        word = T.alloc_var("uint32")
        word = T.uint32(0)
        for i in static(layout.WORD_BYTES):
            word = word | (T.cast(ranks.order[row, head, layout.WORD_BYTES * tx + i], "uint32") << T.uint32(8 * i))
        pool.words[unit + v.m.positions_unit, tx] = word
    T.sync_threads()  # the order was read
    if tx < PAGE:
        slot = T.truncmod(packed + here.elsewhere[t] + tx, ranks.score.shape[2])
        ranks.order[row, head, tx] = T.cast(tx, "uint8")
        ranks.score[row, head, slot] = T.float32(0.0)
        if head == 0:
            ranks.seen[row, slot] = 0


@T.macro
def move_counters(row, mine, tokens, counters, faults):
    """The step's end for a thread's row, whose counters are ``mine``, when all blocks have read them."""
    if T.And(row >= 0, row < counters.limit.shape[0]):
        length, filled = T.alloc_var("int32"), T.alloc_var("int32")
        length = mine[1]
        filled = held_tokens(mine)
        if mine[0] - length >= tokens:
            if filled - mine[3] >= counters.window_k + PAGE:
                counters.n_qk[row] = mine[3] + PAGE
                counters.ring_start[row] = mine[5] + PAGE  # n_qk itself, in a cache that holds all its pages
            if filled - mine[4] >= counters.window_v + PAGE:
                counters.n_qv[row] = mine[4] + PAGE
            counters.n_tok[row] = length + tokens
            counters.n_sink[row] = T.min(length + tokens, counters.num_sinks)
        else:
            faults[row] = 1
    else:
        faults[faults.shape[0] - 1] = 1


@T.macro
def first_access(block, grid, threads, tx):
    """The first of a thread's accesses of new tokens, of all blocks' numbers: last warps first, which the step's end
    does not wait for."""
    warps = threads // LANES
    return ((warps - 1 - tx // LANES) * grid + block) * LANES + tx % LANES


@T.macro
def end_step(batch, tokens, rows, row, mine, counters, faults, threads, tx):
    """Move the counters of all rows, a thread each; the last block to have read them does it."""
    at = T.alloc_var("int32")
    at = tx
    while at < batch:
        if batch > threads:  # else what the thread has read is its row's
            read_row(rows, at, counters, row, mine)
        move_counters(row[0], mine, tokens, counters, faults)
        at = at + threads


@T.macro
def run_step(step, k, v, rows, counters, pool, faults, arrivals, block, grid, tx, ranks):
    """The whole step, by one of ``grid`` blocks; arrivals: blocks that have read the counters, at the first row; ranks:
    of formats that order tokens."""
    (batch, tokens, heads), threads = k.x.shape[:3], step.threads
    here, tile = rows_in_shared_memory(threads), T.alloc_shared((step.tile_accesses, ACCESS), k.x.dtype)
    place, held, count = T.alloc_local((4,), "int32"), T.alloc_local((ACCESS,), k.x.dtype), T.alloc_local((1,), "int32")
    row, mine, packs = T.alloc_local((2,), "int32"), T.alloc_local((6,), "int32"), T.alloc_local((1,), "int32")
    own_row, arrived, some = (T.alloc_var("int32") for _ in range(3))
    arrived = -1
    for chunk in T.serial(T.truncdiv(batch + threads - 1, threads)):
        first, accesses, at = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
        first = chunk * threads
        accesses = T.min(batch - first, threads) * tokens * heads * k.m.row_accesses
        at = first_access(block, grid, threads, tx)
        guess_counters(rows, first + tx, counters, row, mine)
        fetch(at, accesses, first, k, v, place, held)
        if first > 0:
            T.sync_threads()  # of the chunk before
        plan_row(first + tx, tokens, counters, row, mine, here, packs, tx)
        if first == 0:
            own_row = T.max(0, T.min(row[0], counters.limit.shape[0] - 1))
        some = T.syncthreads_or(packs[0])
        if T.And(tx == 0, first + threads >= batch):  # relaxed: all that the block read is in ``here`` already
            arrived = T.atomic_add(arrivals[own_row], 1, memory_order="relaxed", return_prev=True)
        if T.And(batch <= LANES, tx < LANES):  # the first warp alone, which need not wait for stores and records
            if T.ballot(arrived == grid - 1) != 0:
                if tx < batch:
                    move_counters(row[0], mine, tokens, counters, faults)
                if tx == 0:
                    arrivals[own_row] = 0
        while at < 2 * accesses:
            store_fetched(at, accesses, k, v, here, place, held, counters.num_sinks)
            at = at + grid * threads
            fetch(at, accesses, first, k, v, place, held)
        if some != 0:  # one step in many
            list_full(threads, here, packs, tx, count)
            if step.orders_tokens:
                pack_all_ordered(k, v, count[0], first, block, grid, pool, here, tile, held, counters.num_sinks,
                                 threads, tx, ranks)
            else:
                pack_all(k, v, count[0], first, block, grid, pool, here, tile, held, counters.num_sinks, threads, tx)
    if batch > LANES:
        if T.syncthreads_or(T.cast(arrived == grid - 1, "int32")) != 0:
            end_step(batch, tokens, rows, row, mine, counters, faults, threads, tx)
            if tx == 0:
                arrivals[own_row] = 0


def append_kernel(fmt: Format, head_dim: int, dtype: str, searches: str) -> TileKernel:
    """k, v [batch, tokens, num_heads_kv, head_dim] -> rows int32 [batch] of a cache, sinks and rings of ring_rows int32
    [batch]; tensors as ``lowbit_attn.cache.view`` names them.

    pool: uint32 [units, 32] and its uint16 view, in units of 128 bytes. num_sinks, window_k, window_v in tokens;
    page_stride and head_stride in units. query_weights: only of a K that weighs queries. k_entries, v_entries: fp16
    [num_heads_kv, groups, 256 c], only of sides with codebooks; order, score, seen: only of formats that order tokens.
    searches: the sides with range search.
    """
    step, sides = StepGeometry(fmt, head_dim, searches, dtype), fmt.specs(head_dim)
    batch, tokens, heads, seqs = (T.dynamic(name) for name in ("batch", "tokens", "heads", "seqs"))
    slots_k, slots_v, sink_slots = (T.dynamic(name) for name in ("slots_k", "slots_v", "sink_slots"))
    entries, units, marks, rings = (T.dynamic(name) for name in ("entries", "units", "marks", "rings"))
    grid = T.min(2 * heads * batch, step.max_blocks)

    strides = {name: token_strides(name, head_dim) for name in ("sink_k", "sink_v", "ring_k", "ring_v")}

    @T.prim_func
    def append(
        x_k: T.Tensor((batch, tokens, heads, head_dim), dtype),
        x_v: T.Tensor((batch, tokens, heads, head_dim), dtype),
        rows: T.Tensor((batch,), "int32"),
        ring_rows: T.Tensor((batch,), "int32"),
        pool: T.Tensor((units, UNIT_WORDS), "uint32"),
        pool_meta: T.Tensor((units, 2 * UNIT_WORDS), "uint16"),
        table: T.Tensor((seqs, entries), "int32"),
        n_sink: T.Tensor((seqs,), "int32"),
        n_qk: T.Tensor((seqs,), "int32"),
        n_qv: T.Tensor((seqs,), "int32"),
        n_tok: T.Tensor((seqs,), "int32"),
        ring_start: T.Tensor((seqs,), "int32"),
        sink_k: T.StridedTensor((rings, heads, sink_slots, head_dim), strides["sink_k"], dtype),
        sink_v: T.StridedTensor((rings, heads, sink_slots, head_dim), strides["sink_v"], dtype),
        ring_k: T.StridedTensor((rings, heads, slots_k, head_dim), strides["ring_k"], dtype),
        ring_v: T.StridedTensor((rings, heads, slots_v, head_dim), strides["ring_v"], dtype),
        limit: T.Tensor((seqs,), "int32"),
        faults: T.Tensor((marks,), "int32"),
        arrivals: T.Tensor((seqs,), "int32"),
        query_weights: weights_argument(sides[0], heads),
        k_entries: entries_argument(sides[0], heads),
        v_entries: entries_argument(sides[1], heads),
        order: T.Tensor((rings, heads, PAGE), "uint8") if step.orders_tokens else None,
        score: T.Tensor((rings, heads, slots_k), "float32") if step.orders_tokens else None,
        seen: T.Tensor((rings, slots_k), "int32") if step.orders_tokens else None,
        num_sinks: T.int32,
        window_k: T.int32,
        window_v: T.int32,
        page_stride: T.int32,
        head_stride: T.int32,
    ):
        with T.Kernel(grid, threads=step.threads) as block:
            T.annotate_min_blocks_per_sm(step.blocks_per_sm)
            k = Side(step.matrices[0], "k" in searches, step.first_units[0], x_k, in_whole_accesses(sink_k),
                     in_whole_accesses(ring_k), query_weights, k_entries)
            v = Side(step.matrices[1], "v" in searches, step.first_units[1], x_v, in_whole_accesses(sink_v),
                     in_whole_accesses(ring_v), None, v_entries)
            counters = Counters(n_sink, n_qk, n_qv, n_tok, ring_start, limit, num_sinks, window_k, window_v)
            records = Pool(pool, pool_meta, table, page_stride, head_stride)
            blocks = T.alloc_var("int32")
            blocks = grid
            run_step(step, k, v, BatchRows(rows, ring_rows), counters, records, faults, arrivals, block, blocks,
                     T.get_thread_binding(), Ranks(order, score, seen))

    return TileKernel(append, compile_flags=EXACT)
