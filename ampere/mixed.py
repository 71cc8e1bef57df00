"""The mixed segment: pages whose K is packed and whose V is still in 16 bit, a page or two of a sequence.

A page is shared out: a warp with a ring of its own forms the logits of all 128 tokens, which costs less than handing
them over, and goes on with its own chunks of V alone. A block that shares its ring takes every chunk in all warps, each
for its own rows. A chunk is a tile of 16-bit tokens, as large as one ring slot holds (config.tile16_tokens).
"""

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.ampere import load, mma, pages, softmax
from lowbit_attn.ampere.config import TILE


def chunks(config) -> int:
    """Chunks of V of one page."""
    return layout.PAGE_TOKENS // config.tile16_tokens


def own_chunks(config) -> int:
    """Chunks of a page that an active ring has: the least power of two with which the rings cover the page."""
    return next(n for n in (1, 2, 4, 8) if n * config.rings >= chunks(config))


def active_rings(config) -> int:
    """Rings that have chunks: those with the first places."""
    return chunks(config) // own_chunks(config)


def place_of(config, walker):
    """Whose turn a ring is when chunks are dealt out: the last rings come first, since the first have more pages."""
    return config.rings - 1 - walker


def own_tiles(config) -> int:
    """Token tiles of a ring's own chunks."""
    return own_chunks(config) * config.tile16_tokens // TILE


@T.macro
def walk(config, pool_of, work_range, rows, ring, walker, member, lane, regs, ops, work, scales):
    """Every page first .. last - 1 of the range, on O in true scale; the ring is empty before and after."""
    slot, address, place = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    slot = walker * config.slots
    place = place_of(config, walker)
    if config.rings == active_rings(config) or place < active_rings(config):
        for page in T.serial(work_range.last - work_range.first):
            address = pages.record_address(pool_of, work_range.first + page)
            load.issue_piece(config, config.k, pool_of.pool, address, ring.words, slot, member)
            issue_chunk(config, work_range.state, work_range.first + page, place * own_chunks(config), ring, slot + 1,
                        member)
            T.ptx_wait_group(0)
            load.ring_barrier(config)
            pages.logits(config, work_range, work_range.first + page, rows, ring, slot, lane, ops, work, scales)
            keep_own_logits(config, ops.acc_s, place)
            softmax.online_softmax(config, ops.acc_s, own_tiles(config), regs, T.float32(1.0), 0, None, 0)
            mma.probabilities(config, ops, own_tiles(config))
            for chunk in T.unroll(own_chunks(config)):
                if chunk > 0:
                    load.ring_barrier(config)
                    issue_chunk(config, work_range.state, work_range.first + page, place * own_chunks(config) + chunk,
                                ring, slot + 1, member)
                    T.ptx_wait_group(0)
                    load.ring_barrier(config)
                mma.tokens_pv(config, ring.halves, slot + 1, lane, ops, chunk * (config.tile16_tokens // TILE),
                              regs.acc_o)
            load.ring_barrier(config)


@T.macro
def issue_chunk(config, state, page, chunk, ring, slot, member):
    """Start copying a chunk of V. None wraps around: pages start at multiples of 128, the ring is one of 64."""
    size, at = config.tile16_tokens, T.alloc_var("int32")
    at = T.truncmod(page * layout.PAGE_TOKENS + chunk * size, T.cast(state.slots_v, "int32"))
    load.issue_tokens(config, state.ring_v, state.ring_row, state.head, at, size, ring.halves, slot, member)
    T.ptx_commit_group()


@T.macro
def keep_own_logits(config, acc_s, place):
    """Move the logits of the ring's own chunks to the first accumulators."""
    count = 4 * own_tiles(config) * config.columns
    for other in T.unroll(active_rings(config) - 1):
        if place == other + 1:
            for i in T.unroll(count):
                acc_s[i] = acc_s[(other + 1) * count + i]
