"""The packed pages of a split on the codebook path: a warp walks its own, chunk by chunk, through a ring of its own.

A part is a chunk's K or V; part n sits in slot n % slots, and is replaced there by part n + slots once it is read.
"""

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.ampere import (
    codebook_scores,
    codebook_table,
    codebook_values,
    load,
    pages,
    queries,
    softmax,
)
from lowbit_attn.ampere.codebook_config import NORM_TOKENS
from lowbit_attn.ampere.config import ACCESS_BYTES, LANES, SIDE_K, SIDE_V, static


@T.macro
def issue_part(config, side, chunk, pool, record, slot, lane, work):
    """Start copying a chunk's K or V of the record at unit ``record``."""
    piece = config.pieces[side]
    codes = config.code_accesses(piece)
    base = T.alloc_var("int64")
    base = (T.cast(record, "int64") + piece.first_unit) * load.UNIT_WORDS + T.cast(lane, "int64") * load.ACCESS_WORDS
    for run in static(codes // LANES):
        load.issue_access(pool, base + (piece.codes + codes * chunk + LANES * run) * load.ACCESS_WORDS, work.chunks,
                          slot, LANES * run + lane)
    if side == SIDE_K:
        if T.And(chunk == 0, lane < config.mean_accesses):
            load.issue_access(pool, base + piece.meta * load.ACCESS_WORDS, work.chunks, slot, codes + lane)
    if side == SIDE_V and piece.is_shifted:
        block = chunk * config.chunk_tokens // NORM_TOKENS * (NORM_TOKENS * layout.META_BYTES // ACCESS_BYTES)
        if lane < config.norm_accesses:
            load.issue_access(pool, base + (piece.meta + block) * load.ACCESS_WORDS, work.chunks, slot, codes + lane)


@T.macro
def refill(config, side, chunk, pool, ahead, i, mine, slot, lane, work):
    """Refill the slot of a part that has been read."""
    follower = chunk + (side + config.chunk_slots) // 2
    T.sync_warp()
    if i + follower // config.chunks < mine:
        issue_part(config, (side + config.chunk_slots) % 2, follower % config.chunks, pool,
                   T.if_then_else(follower < config.chunks, ahead[0], ahead[1]), slot, lane, work)
    T.ptx_commit_group()


@T.macro
def wait_part(config):
    """Wait until the next part is there for the warp."""
    T.ptx_wait_group(config.chunk_slots - 1)
    T.sync_warp()


def next_slot(config, warp, slot):
    """The slot of the next part."""
    first = warp * config.chunk_slots
    return T.if_then_else(slot == first + (config.chunk_slots - 1), first, slot + 1)


@T.macro
def mask(config, rows, start, acc_s, lane):
    """-inf for the tokens of a chunk, from position ``start`` on, that are before a row's window."""
    begin = T.alloc_local((config.row_values,), "int32")
    for v in T.unroll(config.row_values):
        begin[v] = 0  # the compiler moves reads out of the branch
    if start < rows.last_end - rows.window:
        queries.ends(config, rows, lane, begin)
        for v in T.unroll(config.row_values):
            begin[v] = begin[v] - rows.window - start
        softmax.mask_before(config, acc_s, config.chunk_tiles, begin, lane // 4)


@T.macro
def logits(config, rows, num_sink, page, chunk, slot, lane, ops, work, scales):
    """Logits of a chunk in ops.acc_s, with what the kernel's features do to them."""
    codebook_scores.scores(config, slot, lane, work, ops)
    if config.softcap:
        softmax.cap_scores(config, ops.acc_s, config.chunk_tiles, scales.softcap_log2)
    if config.window:
        mask(config, rows, num_sink + page * layout.PAGE_TOKENS + chunk * config.chunk_tokens, ops.acc_s, lane)


@T.macro
def add_values(config, slot, chunk, lane, regs, ops, work):
    """Logits of a chunk -> probabilities, and O^T += V^T P^T."""
    o_factor, moved = T.alloc_local((1,), "float32"), T.alloc_local((1,), "int32")
    codebook_values.load_norms(config, slot, chunk, lane, work, o_factor, moved)
    softmax.online_softmax(config, ops.acc_s, config.chunk_tiles, regs, o_factor[0], moved[0], None, 0,
                           config.packed_o_tiles)
    codebook_values.values(config, slot, lane, work, ops, regs.acc_o)


@T.macro
def walk(config, pool_of, work_range, rows, books, thread, warp, lane, regs, ops, work, scales):
    """All pages first + warp, first + warp + warps, ... of the range."""
    first, last = work_range.first, work_range.last
    mine, begin, slot = (T.alloc_var("int32") for _ in range(3))
    mine = T.truncdiv(last - first - warp + (config.warps - 1), config.warps)
    begin = first + warp
    slot = warp * config.chunk_slots
    ahead = T.alloc_local((3,), "int32")
    if mine > 0:
        for i in static(2):
            ahead[i] = pages.record_address(pool_of, T.min(begin + i * config.warps, last - 1))
    for part in static(config.chunk_slots):
        if mine > 0:
            issue_part(config, part % 2, part // 2, pool_of.pool, ahead[0], slot + part, lane, work)
        T.ptx_commit_group()
    if config.uses_table:
        T.ptx_wait_group(config.chunk_slots + 1)  # K's entries, which were before V's and the parts
        T.sync_threads()
        codebook_table.build(config, books, thread, lane, work)
    T.ptx_wait_group(config.chunk_slots)
    T.sync_threads()
    for i in T.serial(mine):
        ahead[2] = pages.record_address(pool_of, T.min(begin + (i + 2) * config.warps, last - 1))
        for chunk in T.serial(config.chunks):  # unrolled, the loop is larger than the instruction caches
            wait_part(config)
            if chunk == 0:
                codebook_scores.mean_product(config, slot, lane, work)
            logits(config, rows, work_range.state.num_sink, begin + i * config.warps, chunk, slot, lane, ops, work,
                   scales)
            refill(config, SIDE_K, chunk, pool_of.pool, ahead, i, mine, slot, lane, work)
            slot = next_slot(config, warp, slot)
            wait_part(config)
            add_values(config, slot, chunk, lane, regs, ops, work)
            refill(config, SIDE_V, chunk, pool_of.pool, ahead, i, mine, slot, lane, work)
            slot = next_slot(config, warp, slot)
        for n in static(2):
            ahead[n] = ahead[n + 1]
    T.ptx_wait_group(0)
    T.sync_warp()
