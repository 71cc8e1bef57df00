"""The tokens that are in 16 bit on both sides: sinks, then the residual, by the warps of the last split."""

from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn.ampere import load, mixed, mma, queries, softmax


class Tokens(NamedTuple):
    """16-bit K and V of a sequence and KV head, and which of them are live."""

    sink_k: Any  # dtype [rows, num_heads_kv, sinks, head_dim]
    sink_v: Any
    ring_k: Any  # dtype [rows, num_heads_kv, slots, head_dim]; token n_sink + r in slot r % slots
    ring_v: Any
    slots_k: Any
    slots_v: Any
    head: Any
    ring_row: Any  # row of the four
    num_sink: Any
    num_packed: Any  # tokens of K in pages
    num_packed_v: Any
    num_tok: Any
    ring_start: Any  # tokens that left the ring: r of its first one


COUNTS = Tokens._fields[-5:]


class Counters(NamedTuple):
    """Which rows of the cache's memory a batch row reads, int32 [batch], and the counters, int32 [rows]."""

    rows: Any  # of counters and table
    ring_rows: Any  # of sinks and rings
    n_sink: Any
    n_qk: Any
    n_qv: Any
    n_tok: Any
    ring_start: Any


def places():
    """(row, ring row) of ``load_counts``."""
    return T.alloc_local((2,), "int32")


def counts():
    """The five counters of ``load_counts``."""
    return T.alloc_local((len(COUNTS),), "int32")


def listed(counts):
    """The counters one by one, in the order of COUNTS."""
    return tuple(counts[i] for i in range(len(COUNTS)))


@T.macro
def load_row(counters, row, counts):
    """The five counters of a row; one by one, for a loop's variable would give the tensors its name."""
    counts[0] = counters.n_sink[row]
    counts[1] = counters.n_qk[row]
    counts[2] = counters.n_qv[row]
    counts[3] = counters.n_tok[row]
    counts[4] = counters.ring_start[row]


@T.macro
def load_counts(counters, seq, row, counts):
    """Which rows of the cache batch row ``seq`` reads -> row, and its five counters -> counts.

    Most calls read row b for batch row b, so its counters are read beside ``rows``. A row that does not exist has no
    tokens.
    """
    load_row(counters, seq, counts)
    row[0] = counters.rows[seq]
    row[1] = counters.ring_rows[seq]
    if row[0] != seq:
        for i in T.unroll(len(COUNTS)):
            counts[i] = 0
        if T.And(row[0] >= 0, row[0] < counters.n_tok.shape[0]):
            load_row(counters, row[0], counts)


def first_tile(config, walker):
    """The first tile of a ring; dealt out from the last ring on, since the first have the more pages, or from the last
    one without a chunk of a page whose V is in 16 bit."""
    if not config.has_mixed:
        return config.rings - 1 - walker
    return T.truncmod(mixed.place_of(config, walker) + config.rings - mixed.active_rings(config), config.rings)


@T.macro
def walk(config, tokens, rows, ring, walker, member, lane, regs, ops, scales):
    """Tiles of 16-bit tokens dealt out to the rings, ``config.token_buffers`` in flight, two slots each: K, then V.

    No residual tile wraps around a ring: packed tokens come in 128s, and the rings are multiples of 64.
    """
    size, buffers = config.tile16_tokens, config.token_buffers
    sink_tiles, residual, count, first, at = (T.alloc_var("int32") for _ in range(5))
    sink_tiles = T.truncdiv(tokens.num_sink + (size - 1), size)
    residual = tokens.num_tok - tokens.num_sink - tokens.ring_start
    first = first_tile(config, walker)
    count = T.truncdiv(sink_tiles + T.truncdiv(residual + (size - 1), size) - first + (config.rings - 1), config.rings)
    ends = T.alloc_local((config.row_values,), "int32")
    queries.ends(config, rows, lane, ends)
    for step in T.serial(count + (buffers - 1)):
        if buffers == 1 or step < count:
            issue(config, tokens, first + step * config.rings, sink_tiles, residual, ring,
                  walker * config.slots + 2 * (step % buffers), member)
        T.ptx_commit_group()
        if buffers == 1 or step > 0:
            tile = first + (step - (buffers - 1)) * config.rings
            T.ptx_wait_group(buffers - 1)
            load.ring_barrier(config)
            at = tile * size - T.if_then_else(tile < sink_tiles, 0, sink_tiles * size)
            if queries.present(config, rows):
                attend(config, ends, at + T.if_then_else(tile < sink_tiles, 0, tokens.num_sink + tokens.ring_start),
                       T.if_then_else(tile < sink_tiles, tokens.num_sink, residual) - at,
                       reach_of(config, tokens, rows, tile < sink_tiles, residual, at),
                       T.max(T.if_then_else(tile < sink_tiles, -rows.sink_window - at, 0), 0)
                       if config.level_window else 0, ring,
                       walker * config.slots + 2 * ((step - (buffers - 1)) % buffers), lane, regs, ops, scales)
            load.ring_barrier(config)


def reach_of(config, tokens, rows, is_sink, residual, at):
    """The window of a tile's tokens; of a level's, from which number on of tile ``at`` on it shows them."""
    if not config.level_window:
        return T.if_then_else(is_sink, rows.sink_window, rows.window)
    return T.if_then_else(is_sink, queries.stage_seen(rows, tokens.num_packed_v), residual - rows.window) - at


@T.macro
def issue(config, tokens, tile, sink_tiles, residual, ring, slot, member):
    """Start copying a tile: K into ``slot``, V into the next; the sinks' tiles come first."""
    row, head, size = tokens.ring_row, tokens.head, config.tile16_tokens
    at, live = T.alloc_var("int32"), T.alloc_var("int32")
    if tile < sink_tiles:
        at = tile * size
        live = tokens.num_sink - at
        load.issue_tokens(config, tokens.sink_k, row, head, at, live, ring.halves, slot, member)
        load.issue_tokens(config, tokens.sink_v, row, head, at, live, ring.halves, slot + 1, member)
    else:
        at = (tile - sink_tiles) * size
        live = residual - at
        at = tokens.ring_start + at
        load.issue_tokens(config, tokens.ring_k, row, head, T.truncmod(at, tokens.slots_k), live, ring.halves, slot,
                          member)
        load.issue_tokens(config, tokens.ring_v, row, head, T.truncmod(at, tokens.slots_v), live, ring.halves, slot + 1,
                          member)


@T.macro
def attend(config, ends, start, live, reach, kept, ring, slot, lane, regs, ops, scales):
    """A tile in slots ``slot`` and ``slot`` + 1: positions from ``start`` on, ``live`` of them; reach: the window, and
    kept: so many of its first tokens it does not hide (``reach_of``)."""
    tiles = config.tile16_tokens // 16
    bound = T.alloc_local((config.row_values,), "int32")
    mma.clear(ops.acc_s, 4 * tiles * config.columns)
    mma.tokens_qk(config, ring.halves, slot, lane, ops)
    if scales.rows is None:
        softmax.scale_scores(config, ops.acc_s, tiles, scales.softmax_log2)
    else:
        softmax.scale_rows(config, ops.acc_s, tiles, scales.rows)
    if config.softcap:
        softmax.cap_scores(config, ops.acc_s, tiles, scales.softcap_log2)
    for v in T.unroll(config.row_values):
        bound[v] = T.min(ends[v] - start, live)
    softmax.mask_from(config, ops.acc_s, tiles, bound, lane // 4)
    if config.window:
        for v in T.unroll(config.row_values):
            bound[v] = ends[v] - reach - start
        softmax.mask_before(config, ops.acc_s, tiles, bound, lane // 4)
    if config.level_window:
        softmax.mask_between(config, ops.acc_s, tiles, kept, reach, lane // 4)
    softmax.online_softmax(config, ops.acc_s, tiles, regs, T.float32(1.0), 0, None, 0)
    mma.probabilities(config, ops, tiles)
    mma.tokens_pv(config, ring.halves, slot + 1, lane, ops, 0, regs.acc_o)
