"""The packed pages of a split where shared memory holds one codebook: K of a few pages, then V of the same.

    round     K's table -> S of up to HELD_PAGES pages a warp, in registers
              V's table -> softmax, O^T += V^T P^T of these pages

All warps go through as many rounds as the one with the most pages. Parts are numbered in the order of a round: K of all
its pages, then V. A warp's ring goes on through tables and rounds; of pages beyond its last it has no parts.
"""

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.ampere import codebook, codebook_pages, codebook_scores, pages, softmax
from lowbit_attn.ampere.codebook_config import HELD_PAGES
from lowbit_attn.ampere.config import SIDE_K, SIDE_V, static


@T.macro
def refill(config, side, page, chunk, pool, ahead, done, mine, slot, lane, work):
    """Refill the slot of a part that has been read, of the round behind ``done`` pages."""
    follower = chunk + config.chunk_slots  # of the page, or of what comes behind it
    after = 1 + page + HELD_PAGES * side  # part of a page that comes next in the round, or the first of the next round
    T.sync_warp()
    if follower < config.chunks:
        issue(config, page + HELD_PAGES * side, follower, pool, ahead, done, mine, slot, lane, work)
    else:
        issue(config, after, follower - config.chunks, pool, ahead, done, mine, slot, lane, work)
    T.ptx_commit_group()


@T.macro
def issue(config, place, chunk, pool, ahead, done, mine, slot, lane, work):
    """Start copying a chunk; place: page and side in the round, K of its pages first, or in the next round."""
    later, side, page = place // (2 * HELD_PAGES), place // HELD_PAGES % 2, place % HELD_PAGES
    if done + later * HELD_PAGES + page < mine:
        codebook_pages.issue_part(config, side, chunk, pool, ahead[later * HELD_PAGES + page], slot, lane, work)


@T.macro
def swap_table(config, book, head, ring, side, thread):
    """A side's table in the place of the other's; all threads of the block."""
    T.sync_threads()
    codebook.load_table(config, book, head, ring, side, thread)
    T.ptx_commit_group()
    T.ptx_wait_group(0)
    T.sync_threads()


@T.macro
def keep(config, held, page, chunk, acc_s):
    """Logits of a chunk -> those of its page in ``held``, whose places are registers."""
    count = softmax.count(config, config.chunk_tiles)
    for c in static(config.chunks):
        if chunk == c:
            for n in static(count):
                held[(page * config.chunks + c) * count + n] = acc_s[softmax.element(config, n)]


@T.macro
def restore(config, held, page, chunk, acc_s):
    """Logits of a chunk from ``held``: the inverse of ``keep``."""
    count = softmax.count(config, config.chunk_tiles)
    for c in static(config.chunks):
        if chunk == c:
            for n in static(count):
                acc_s[softmax.element(config, n)] = held[(page * config.chunks + c) * count + n]


@T.macro
def walk(config, pool_of, work_range, rows, ring, books, thread, warp, lane, regs, ops, work, scales):
    """All pages first + warp, first + warp + warps, ... of the range."""
    first, last = work_range.first, work_range.last
    mine, rounds, done, begin, slot = (T.alloc_var("int32") for _ in range(5))
    mine = T.truncdiv(last - first - warp + (config.warps - 1), config.warps)
    rounds = T.truncdiv(last - first + (config.warps * HELD_PAGES - 1), config.warps * HELD_PAGES)
    begin = first + warp
    slot = warp * config.chunk_slots
    ahead = T.alloc_local((2 * HELD_PAGES,), "int32")
    held = T.alloc_local((softmax.count(config, HELD_PAGES * layout.PAGE_TOKENS // layout.TILE),), "float32")
    if rounds > 0:
        for i in static(HELD_PAGES):
            ahead[i] = pages.record_address(pool_of, T.min(begin + i * config.warps, last - 1))
        for part in static(config.chunk_slots):
            if mine > 0:
                codebook_pages.issue_part(config, SIDE_K, part, pool_of.pool, ahead[0], slot + part, lane, work)
            T.ptx_commit_group()
    for i in T.serial(rounds):
        done = i * HELD_PAGES
        for n in static(HELD_PAGES):
            ahead[HELD_PAGES + n] = pages.record_address(
                pool_of, T.min(begin + (done + HELD_PAGES + n) * config.warps, last - 1))
        swap_table(config, books.k, books.head, ring, SIDE_K, thread)
        for page in static(HELD_PAGES):
            for chunk in T.serial(config.chunks):
                codebook_pages.wait_part(config)
                if done + page < mine:
                    if chunk == 0:
                        codebook_scores.mean_product(config, slot, lane, work)
                    codebook_pages.logits(config, rows, work_range.state.num_sink, begin + (done + page) * config.warps,
                                          chunk, slot, lane, ops, work, scales)
                    keep(config, held, page, chunk, ops.acc_s)
                refill(config, SIDE_K, page, chunk, pool_of.pool, ahead, done, mine, slot, lane, work)
                slot = codebook_pages.next_slot(config, warp, slot)
        swap_table(config, books.v, books.head, ring, SIDE_V, thread)
        for page in static(HELD_PAGES):
            for chunk in T.serial(config.chunks):
                codebook_pages.wait_part(config)
                if done + page < mine:
                    restore(config, held, page, chunk, ops.acc_s)
                    codebook_pages.add_values(config, slot, chunk, lane, regs, ops, work)
                refill(config, SIDE_V, page, chunk, pool_of.pool, ahead, done, mine, slot, lane, work)
                slot = codebook_pages.next_slot(config, warp, slot)
        for n in static(HELD_PAGES):
            ahead[n] = ahead[HELD_PAGES + n]
    T.ptx_wait_group(0)
    T.sync_warp()
