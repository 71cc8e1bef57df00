"""The packed pages of a split: a warp walks its own, each through its ring of record parts, or all warps walk all.

Parts are numbered 2*page + side in the order of use; part n sits in slot n % slots and is replaced there by part
n + slots: in a warp's own ring as soon as it is read, in a shared one after the barrier that shows part n + 1 to all
threads, which is when all have read part n: one barrier a part. ``ahead`` holds the pool addresses of the pages that
this reaches, read an iteration early.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.ampere import load, queries, register, softmax, tile
from lowbit_attn.ampere.config import SIDE_K, SIDE_V, static

STEPS = {"register": register, "tile": tile}


class Pool(NamedTuple):
    """Where the pages of one KV head of one sequence are."""

    pool: Any
    table: Any
    table_row: Any
    page_stride: Any
    head_offset: Any  # units


class Range(NamedTuple):
    """Pages first .. last - 1 of a sequence."""

    first: Any
    last: Any
    state: Any  # tokens.Tokens


class Scales(NamedTuple):
    """What makes logits in base 2 of products."""

    softmax_log2: Any
    softcap_log2: Any
    rows: Any = None  # fp32 [row values] in the place of softmax_log2, where q is scaled row by row


def record_address(pages: Pool, page):
    """Units of 128 bytes from the start of the pool to a page's record of this head: below 2^31, as the pool's size."""
    return pages.table[pages.table_row + page] * pages.page_stride + pages.head_offset


def before(config, count, split, num_splits):
    """Pages of ``count`` that the splits before ``split`` have: equal shares, but for config.tail_pages of the last."""
    if not config.tail_pages:
        return T.truncdiv(count * split, num_splits)
    return T.min(T.truncdiv((count + config.tail_pages) * split, num_splits), count)


@T.macro
def refill(config, pages, ahead, i, mine, side, ring, slot, member):
    """Into a slot that was just read: the part that follows ``slots`` parts on. side -1: V of the page before."""
    follower = side + config.slots
    if i + follower // 2 < mine:
        load.issue_piece(config, config.pieces[follower % 2], pages.pool, ahead[follower // 2], ring.words, slot,
                         member)
    T.ptx_commit_group()


@T.macro
def wait_part(config, pages, ahead, i, mine, side, ring, walker, slot, member):
    """Wait until the part in ``slot`` is there for all threads of the ring."""
    T.ptx_wait_group(config.parts_ahead - 1)
    load.ring_barrier(config)
    if config.shares_pages:
        refill(config, pages, ahead, i, mine, side - 1, ring, previous_slot(config, walker, slot), member)


@T.macro
def release_part(config, pages, ahead, i, mine, side, ring, slot, member):
    """Refill ``slot``, whose part has been read; a shared ring does it at the next wait."""
    if not config.shares_pages:
        load.ring_barrier(config)
        refill(config, pages, ahead, i, mine, side, ring, slot, member)


def next_slot(config, walker, slot):
    """The slot of the next part."""
    return T.if_then_else(slot == walker * config.slots + (config.slots - 1), walker * config.slots, slot + 1)


def previous_slot(config, walker, slot):
    """The slot of the part before."""
    return T.if_then_else(slot == walker * config.slots, walker * config.slots + (config.slots - 1), slot - 1)


@T.macro
def logits(config, work_range, page, rows, ring, slot, lane, ops, work, scales):
    """Logits of a packed page in ops.acc_s, with what the kernel's features do to them."""
    STEPS[config.path].scores(config, ring.words, slot, lane, work, ops, scales.softmax_log2)
    if config.softcap:
        softmax.cap_scores(config, ops.acc_s, config.k.row_tiles, scales.softcap_log2)
    if config.window:
        queries.mask_page(config, rows, work_range.state.num_sink + page * layout.PAGE_TOKENS, ops.acc_s, lane)
    if config.level_window:
        queries.mask_level(config, rows.hidden - page * layout.PAGE_TOKENS, ops.acc_s, lane)


@T.macro
def probabilities(config, ring, slot, lane, regs, ops, work):
    """Logits -> probabilities in ops.acc_s; E follows the V part in ``slot``."""
    o_factor, moved = T.alloc_local((1,), "float32"), T.alloc_local((1,), "int32")
    o_factor[0] = T.float32(1.0)
    moved[0] = 0
    STEPS[config.path].lower_exponent(config, ring.words, slot, lane, work, o_factor, moved)
    softmax.online_softmax(config, ops.acc_s, config.k.row_tiles, regs, o_factor[0], moved[0], work.z,
                           0 if work.z is None else config.v.groups)


@T.macro
def walk(config, pages, work_range, rows, ring, walker, member, lane, regs, ops, work, scales):
    """All pages first + walker, first + walker + rings, ... of the range.

    walker: the warp, or 0 for all warps of a block that shares its pages; member: the thread's number among those of
    the ring. Trip counts are then the same in all warps, which every barrier (load.ring_barrier) needs.
    """
    steps = STEPS[config.path]
    first, last = work_range.first, work_range.last
    reach = (config.slots + 1) // 2
    mine = T.alloc_var("int32")
    mine = T.truncdiv(last - first - walker + (config.rings - 1), config.rings)
    begin = T.alloc_var("int32")
    begin = first + walker
    slot = T.alloc_var("int32")
    slot = walker * config.slots
    ahead = T.alloc_local((reach + 2,), "int32")
    if mine > 0:
        for i in static(reach + 1):
            ahead[i] = record_address(pages, T.min(begin + i * config.rings, last - 1))
        for part in static(config.parts_ahead):
            if part // 2 < mine:
                load.issue_piece(config, config.pieces[part % 2], pages.pool, ahead[part // 2], ring.words, slot + part,
                                 member)
            T.ptx_commit_group()
    for i in T.serial(mine):
        ahead[reach + 1] = record_address(pages, T.min(begin + (i + reach + 1) * config.rings, last - 1))
        wait_part(config, pages, ahead, i, mine, SIDE_K, ring, walker, slot, member)
        if queries.present(config, rows):
            logits(config, work_range, begin + i * config.rings, rows, ring, slot, lane, ops, work, scales)
        release_part(config, pages, ahead, i, mine, SIDE_K, ring, slot, member)
        slot = next_slot(config, walker, slot)
        if steps.VALUES_BEFORE_SOFTMAX:
            wait_part(config, pages, ahead, i, mine, SIDE_V, ring, walker, slot, member)
        if queries.present(config, rows):
            probabilities(config, ring, slot, lane, regs, ops, work)
        if not steps.VALUES_BEFORE_SOFTMAX:
            wait_part(config, pages, ahead, i, mine, SIDE_V, ring, walker, slot, member)
        if queries.present(config, rows):
            steps.values(config, ring.words, slot, lane, work, ops, regs.acc_o)
        release_part(config, pages, ahead, i, mine, SIDE_V, ring, slot, member)
        slot = next_slot(config, walker, slot)
        for n in static(reach + 1):
            ahead[n] = ahead[n + 1]
    T.ptx_wait_group(0)
    load.ring_barrier(config)
