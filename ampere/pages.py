"""The packed pages of a split: a warp walks its own, each through its ring of record parts, or all warps walk all.

Parts are numbered 2*page + side in the order of use; part n sits in slot n % slots and is replaced there by part
n + slots after the barrier that shows part n + 1 to all threads of the ring, which is when all have read part n: one
barrier a part. Of two slots one is empty while a warp waits, so where few warps have two of their own a slot is filled
as soon as it is read, behind a barrier of its own. ``ahead`` holds the pool addresses of the pages that this reaches,
read an iteration early.
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


class Walk(NamedTuple):
    """Where a ring is among its pages: int32 registers, one each but for ``ahead``."""

    begin: Any  # its first page
    mine: Any  # pages that it has
    slot: Any  # of the part that was read last
    ahead: Any  # pool addresses of its next pages


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


def bounds():
    """(first, last) of ``share``."""
    return T.alloc_local((2,), "int32")


@T.macro
def share(config, rows, state, split, num_splits, bounds):
    """A split's pages among those of which some row sees a token: its first, and the next one's."""
    count, begin = T.alloc_var("int32"), T.alloc_var("int32")
    count = T.truncdiv(state.num_packed_v, layout.PAGE_TOKENS)
    begin = T.min(queries.first_page(rows, state.num_sink), count) if config.window or config.level_window else 0
    bounds[0] = begin + before(config, count - begin, split, num_splits)
    bounds[1] = begin + before(config, count - begin, split + 1, num_splits)


def reach(config) -> int:
    """The page, counted from the one that is read, of the last part that is under way."""
    return config.slots // 2


def places(config) -> Walk:
    """Registers of a walk."""
    begin, mine, slot = (T.alloc_local((1,), "int32") for _ in range(3))
    return Walk(begin, mine, slot, T.alloc_local((reach(config) + 2,), "int32"))


@T.macro
def start(config, pages, work_range, ring, walker, member, walk):
    """Ask for the first parts of the pages first + walker, first + walker + rings, ... of the range.

    walker: the warp, or 0 for all warps of a block that shares its pages; member: the thread's number among those of
    the ring.
    """
    first, last = work_range.first, work_range.last
    walk.begin[0] = first + walker
    walk.mine[0] = T.truncdiv(last - first - walker + (config.rings - 1), config.rings)
    walk.slot[0] = walker * config.slots + config.parts_ahead
    if walk.mine[0] > 0:
        for i in static(reach(config) + 1):
            walk.ahead[i] = record_address(pages, T.min(walk.begin[0] + i * config.rings, last - 1))
        for part in static(config.parts_ahead):
            if part // 2 < walk.mine[0]:
                load.issue_piece(config, config.pieces[part % 2], pages.pool, walk.ahead[part // 2], ring.words,
                                 walker * config.slots + part, member)
            T.ptx_commit_group()


@T.macro
def refill(config, pages, walk, i, side, ring, member):
    """Ask for the next part that is not under way, into the slot of the part that was read last."""
    follower = side + config.parts_ahead  # counted from K of the page
    if i + follower // 2 < walk.mine[0]:
        load.issue_piece(config, config.pieces[follower % 2], pages.pool, walk.ahead[follower // 2], ring.words,
                         walk.slot[0], member)
    T.ptx_commit_group()


@T.macro
def next_part(config, pages, walk, i, side, ring, walker, member):
    """Wait until the next part, of ``side``, is there for all threads of the ring, which have read the one before."""
    T.ptx_wait_group(config.parts_ahead - 1)
    load.ring_barrier(config)
    if not config.refills_at_once:
        refill(config, pages, walk, i, side, ring, member)
    walk.slot[0] = next_slot(config, walker, side, walk.slot[0])


@T.macro
def release_part(config, pages, walk, i, side, ring, member):
    """The part, of ``side``, has been read."""
    if config.refills_at_once:
        load.ring_barrier(config)
        refill(config, pages, walk, i, side, ring, member)


def next_slot(config, walker, side, slot):
    """The slot of the next part, of ``side``; of two slots each is for one side."""
    first = walker * config.slots
    if config.slots == 2:
        return first + side
    return T.if_then_else(slot == first + (config.slots - 1), first, slot + 1)


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
def run(config, pages, work_range, rows, ring, walker, member, lane, walk, regs, ops, work, scales):
    """All pages of a ring, whose first parts ``start`` has asked for; the ring is empty afterwards.

    Trip counts are the same in all warps of a ring, which every barrier (load.ring_barrier) needs.
    """
    steps = STEPS[config.path]
    for i in T.serial(walk.mine[0]):
        page = walk.begin[0] + i * config.rings
        walk.ahead[reach(config) + 1] = record_address(
            pages, T.min(page + (reach(config) + 1) * config.rings, work_range.last - 1))
        next_part(config, pages, walk, i, SIDE_K, ring, walker, member)
        if queries.present(config, rows):
            logits(config, work_range, page, rows, ring, walk.slot[0], lane, ops, work, scales)
        release_part(config, pages, walk, i, SIDE_K, ring, member)
        if steps.VALUES_BEFORE_SOFTMAX:
            next_part(config, pages, walk, i, SIDE_V, ring, walker, member)
        if queries.present(config, rows):
            probabilities(config, ring, walk.slot[0], lane, regs, ops, work)
        if not steps.VALUES_BEFORE_SOFTMAX:
            next_part(config, pages, walk, i, SIDE_V, ring, walker, member)
        if queries.present(config, rows):
            steps.values(config, ring.words, walk.slot[0], lane, work, ops, regs.acc_o)
        release_part(config, pages, walk, i, SIDE_V, ring, member)
        for n in static(reach(config) + 1):
            walk.ahead[n] = walk.ahead[n + 1]
    T.ptx_wait_group(0)
    load.ring_barrier(config)
