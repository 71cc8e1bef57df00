"""One step of a cache on the device: pack the block that the last step filled, then store the new tokens.

Two launches, one a side, K's first; each reads the counters itself, so a captured launch serves every length and
every block boundary. V's launch moves the counters: its blocks of a sequence count themselves, and the last to have
read them writes the new ones. A block is one (KV head, sequence).

    K:  ring -> record if K's window and a block are full;  new K -> sinks, ring
    V:  the same for V;  last block: n_qk, n_qv, n_tok, n_sink

A sequence that has no room (its tokens would pass ``limit``, 0 for a freed one) and an unknown row are left as they
are and marked in ``faults``.
"""

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.device.groups import EXACT, UNIT_WORDS
from lowbit_attn.device.quantize import BODIES, matrix_of
from lowbit_attn.device.tilelang_kernel import TileKernel
from lowbit_attn.device.tokens import ACCESS_HALVES as ACCESS
from lowbit_attn.device.tokens import load_tokens

PAGE = layout.PAGE_TOKENS


@T.macro
def store_tokens(x, sink, ring, b, row, head, tx, threads, head_dim, length, num_sinks):
    """New tokens x[b] of one head -> sinks while there are any to fill, then the ring."""
    accesses = T.alloc_var("int32")
    accesses = x.shape[1] * (head_dim // ACCESS)
    for r in T.serial(T.truncdiv(accesses + threads - 1, threads)):
        at = T.alloc_var("int32")
        at = r * threads + tx
        if at < accesses:
            token, chunk, place = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            token = T.truncdiv(at, head_dim // ACCESS)
            chunk = T.truncmod(at, head_dim // ACCESS)
            place = length + token
            if place < num_sinks:
                for e in T.vectorized(ACCESS):
                    sink[row, head, place, ACCESS * chunk + e] = x[b, token, head, ACCESS * chunk + e]
            else:
                place = T.truncmod(place - num_sinks, ring.shape[2])
                for e in T.vectorized(ACCESS):
                    ring[row, head, place, ACCESS * chunk + e] = x[b, token, head, ACCESS * chunk + e]


@T.macro
def move_counters(row, tokens, num_sinks, window_k, window_v, n_sink, n_qk, n_qv, n_tok, arrivals):
    """The step's end for one sequence, by the one thread that finds all blocks of it to have read the counters."""
    filled, length = T.alloc_var("int32"), T.alloc_var("int32")
    length = n_tok[row]
    filled = length - n_sink[row]
    if filled - n_qk[row] >= window_k + PAGE:
        n_qk[row] = n_qk[row] + PAGE
    if filled - n_qv[row] >= window_v + PAGE:
        n_qv[row] = n_qv[row] + PAGE
    n_tok[row] = length + tokens
    n_sink[row] = T.min(length + tokens, num_sinks)
    arrivals[row] = 0


@T.macro
def pack_block(m, quantize, range_search, ring, row, head, first, pool, pool_meta, unit, tx):
    """The 128 tokens of a ring from slot ``first`` on -> the record at ``unit``, by all threads of a block."""
    tile = T.alloc_shared((m.part_rows * m.row_accesses, ACCESS), ring.dtype)
    for part in T.serial(m.parts):
        load_tokens(ring, row, head, first + part * m.part_rows, m.part_rows, m.row_accesses, tile, tx, m.threads, True)
        T.sync_threads()
        quantize(m, range_search, tile, part, pool, pool_meta, unit, tx)
        T.sync_threads()


def append_kernel(side, side_name: str, head_dim: int, dtype: str, range_search: bool) -> TileKernel:
    """x [batch, tokens, num_heads_kv, head_dim] -> one side of rows int32 [batch]; tensors as KVCache names them.

    pool: uint32 [units, 32] and its uint16 view, in units of 128 bytes, from the first record's part of this side on;
    sink, ring: this side's. num_sinks, window_k, window_v in tokens; page_stride and head_stride in units.
    """
    m = matrix_of(side, head_dim)
    quantize, threads = BODIES[type(m)][0], m.threads
    is_last = side_name == "v"
    batch, tokens, heads, seqs = (T.dynamic(name) for name in ("batch", "tokens", "heads", "seqs"))
    slots, sink_slots, entries = (T.dynamic(name) for name in ("slots", "sink_slots", "entries"))
    units, marks = T.dynamic("units"), T.dynamic("marks")

    @T.prim_func
    def append(
        x: T.Tensor((batch, tokens, heads, head_dim), dtype),
        rows: T.Tensor((batch,), "int32"),
        sink: T.Tensor((seqs, heads, sink_slots, head_dim), dtype),
        ring: T.Tensor((seqs, heads, slots, head_dim), dtype),
        table: T.Tensor((seqs, entries), "int32"),
        pool: T.Tensor((units, UNIT_WORDS), "uint32"),
        pool_meta: T.Tensor((units, 2 * UNIT_WORDS), "uint16"),
        n_sink: T.Tensor((seqs,), "int32"),
        n_qk: T.Tensor((seqs,), "int32"),
        n_qv: T.Tensor((seqs,), "int32"),
        n_tok: T.Tensor((seqs,), "int32"),
        limit: T.Tensor((seqs,), "int32"),
        faults: T.Tensor((marks,), "int32"),
        arrivals: T.Tensor((seqs,), "int32"),
        num_sinks: T.int32,
        window_k: T.int32,
        window_v: T.int32,
        page_stride: T.int32,
        head_stride: T.int32,
    ):
        with T.Kernel(heads, batch, threads=threads) as (head, b):
            T.annotate_min_blocks_per_sm(m.blocks_per_sm(range_search))
            tx = T.get_thread_binding()
            row, room = T.alloc_var("int32"), T.alloc_var("int32")
            length, filled, packed = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            row = rows[b]
            room = -1
            if T.And(row >= 0, row < seqs):
                room = limit[row]
                length = n_tok[row]
                filled = length - n_sink[row]
                packed = n_qv[row] if is_last else n_qk[row]
                room = room - length - tokens
                if T.And(room < 0, tx == 0):
                    faults[row] = 1
            else:
                if tx == 0:
                    faults[marks - 1] = 1
            if room >= 0:
                if filled - packed >= (window_v if is_last else window_k) + PAGE:
                    unit, first = T.alloc_var("int32"), T.alloc_var("int32")
                    unit = table[row, T.truncdiv(packed, PAGE)] * page_stride + head * head_stride
                    first = T.truncmod(packed, slots)
                    pack_block(m, quantize, range_search, ring, row, head, first, pool, pool_meta, unit, tx)
                T.sync_threads()  # the block may lie where new tokens go, and the counters are read
                store_tokens(x, sink, ring, b, row, head, tx, threads, head_dim, length, num_sinks)
                if is_last:
                    if tx == 0:
                        arrived = T.alloc_var("int32")
                        arrived = T.atomic_add(arrivals[row], 1, memory_order="acq_rel", return_prev=True)
                        if arrived == heads - 1:
                            move_counters(row, tokens, num_sinks, window_k, window_v, n_sink, n_qk, n_qv, n_tok,
                                          arrivals)

    return TileKernel(append, compile_flags=EXACT)
