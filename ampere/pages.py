"""The packed pages of a split: a warp walks its own, each through its ring of record parts.

Parts are numbered 2*page + side in the order of use; part n sits in slot n % slots and is replaced there by part
n + slots. ``ahead`` holds the pool addresses of the pages that this reaches, read an iteration early.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.ampere import load, mma, register, softmax, tile
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
    """Pages first .. last - 1 of a sequence; third, a run-time flag or None: their V is still in 16 bit, in ring_v."""

    first: Any
    last: Any
    third: Any
    ring_v: Any
    seq: Any
    head: Any
    ring_tokens: Any


def record_address(pages: Pool, page):
    """Units of 128 bytes from the start of the pool to a page's record of this head: below 2^31, as the pool's size."""
    return pages.table[pages.table_row + page] * pages.page_stride + pages.head_offset


@T.macro
def refill(config, pages, ahead, i, mine, side, ring, slot, lane):
    """Into a slot that was just read: the part that follows ``slots`` parts on."""
    follower = side + config.slots
    if i + follower // 2 < mine:
        load.issue_piece(config.pieces[follower % 2], pages.pool, ahead[follower // 2], ring.words, slot, lane)
    T.ptx_commit_group()


@T.macro
def values_16bit(config, work_range, page, ring, slot, lane, ops, acc_o):
    """O^T += V^T P^T over the 128 tokens of a page whose V is in ring_v; the part in ``slot`` is overwritten.

    No tile wraps around the ring: pages start at multiples of 128, and the ring is a multiple of 64.
    """
    size = config.tile16_tokens
    mma.probabilities(config, ops, config.k.row_tiles)
    for chunk in T.unroll(layout.PAGE_TOKENS // size):
        T.sync_warp()
        at = T.truncmod(page * layout.PAGE_TOKENS + chunk * size, work_range.ring_tokens)
        load.issue_tokens(config, work_range.ring_v, work_range.seq, work_range.head, at, size, ring.halves, slot, lane)
        T.ptx_commit_group()
        T.ptx_wait_group(0)
        T.sync_warp()
        mma.tokens_pv(config, ring.halves, slot, lane, ops, chunk * (size // layout.TILE), acc_o)


@T.macro
def walk(config, pages, work_range, ring, warp, lane, regs, ops, work, softmax_scale_log2):
    """All pages first + warp, first + warp + warps, ... of the range."""
    steps = STEPS[config.path]
    first, last = work_range.first, work_range.last
    reach = (config.slots + 1) // 2
    mine = T.alloc_var("int32")
    mine = T.truncdiv(last - first - warp + (config.warps - 1), config.warps)
    begin = T.alloc_var("int32")
    begin = first + warp
    slot = T.alloc_var("int32")
    slot = warp * config.slots
    ahead = T.alloc_local((reach + 2,), "int32")
    o_factor, moved = T.alloc_local((1,), "float32"), T.alloc_local((1,), "int32")
    if mine > 0:
        for i in static(reach + 1):
            ahead[i] = record_address(pages, T.min(begin + i * config.warps, last - 1))
        for part in static(config.slots):
            if part // 2 < mine:
                load.issue_piece(config.pieces[part % 2], pages.pool, ahead[part // 2], ring.words, slot + part, lane)
            T.ptx_commit_group()
    for i in T.serial(mine):
        ahead[reach + 1] = record_address(pages, T.min(begin + (i + reach + 1) * config.warps, last - 1))
        T.ptx_wait_group(config.slots - 1)
        T.sync_warp()
        steps.scores(config, ring.words, slot, lane, work, ops, softmax_scale_log2)
        T.sync_warp()
        refill(config, pages, ahead, i, mine, SIDE_K, ring, slot, lane)
        slot = T.if_then_else(slot == warp * config.slots + (config.slots - 1), warp * config.slots, slot + 1)
        if steps.VALUES_BEFORE_SOFTMAX:
            T.ptx_wait_group(config.slots - 1)
            T.sync_warp()
        o_factor[0] = T.float32(1.0)
        moved[0] = 0
        if work_range.third is None:
            steps.lower_exponent(config, ring.words, slot, lane, work, o_factor, moved)
        else:
            if work_range.third == 0:
                steps.lower_exponent(config, ring.words, slot, lane, work, o_factor, moved)
        softmax.online_softmax(config, ops.acc_s, config.k.row_tiles, regs, o_factor[0], moved[0], work.z,
                               0 if work.z is None else config.v.groups)
        if not steps.VALUES_BEFORE_SOFTMAX:
            T.ptx_wait_group(config.slots - 1)
            T.sync_warp()
        if work_range.third is None:
            steps.values(config, ring.words, slot, lane, work, ops, regs.acc_o)
        else:
            if work_range.third == 0:
                steps.values(config, ring.words, slot, lane, work, ops, regs.acc_o)
            else:
                values_16bit(config, work_range, begin + i * config.warps, ring, slot, lane, ops, regs.acc_o)
        T.sync_warp()
        refill(config, pages, ahead, i, mine, SIDE_V, ring, slot, lane)
        slot = T.if_then_else(slot == warp * config.slots + (config.slots - 1), warp * config.slots, slot + 1)
        for n in static(reach + 1):
            ahead[n] = ahead[n + 1]
    T.ptx_wait_group(0)
    T.sync_warp()
