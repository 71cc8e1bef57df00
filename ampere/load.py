"""cp.async copies into a ring: packed pieces of records, and tiles of 16-bit tokens.

Each thread copies 16 bytes at a time. A warp with a ring of its own commits, waits and synchronises alone: no other
warp ever touches its slots. A ring that the block shares is filled by all its threads, which number themselves as one
warp's lanes do (``member``) and meet at a barrier of the block (``ring_barrier``).
"""

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.ampere.config import ACCESS_BYTES, HALF_BYTES
from lowbit_attn.device.tokens import swizzled, token_place

UNIT_WORDS = layout.RECORD_ALIGN // layout.WORD_BYTES  # words in a unit of the pool
ACCESS_WORDS = ACCESS_BYTES // layout.WORD_BYTES
ACCESS_HALVES = ACCESS_BYTES // HALF_BYTES
COPIES_AT_ONCE = 4  # of 16-bit tokens in kernels of formats with two windows, which have few registers for addresses

PREFETCH = "cute::prefetch"  # one line of memory towards L2; a header of mma.MOVMATRIX_FLAGS has it


@T.macro
def prefetch(tensor, at):
    """The line of element ``at`` of a vector."""
    T.call_extern("handle", PREFETCH, T.access_ptr(tensor[at], "r"))


def member_word(record, first_unit, member):
    """First word of the pool that a thread copies of a part of the record at unit ``record``."""
    return (record + first_unit) * UNIT_WORDS + member * ACCESS_WORDS


@T.macro
def ring_barrier(config):
    """All threads that fill and read a ring."""
    if config.shares_pages:
        T.sync_threads()
    else:
        T.sync_warp()


@T.macro
def issue_piece(config, piece, pool, record, ring, slot, member):
    """Start copying the K or V part of the record at unit ``record`` of the pool into a ring slot."""
    word = T.alloc_var("int64")
    word = member_word(T.cast(record, "int64"), piece.first_unit, T.cast(member, "int64"))
    threads = config.ring_threads
    rounds = piece.accesses // threads
    for i in T.unroll(rounds):
        issue_access(pool, word + i * threads * ACCESS_WORDS, ring, slot, i * threads + member)
    if piece.accesses % threads:
        if member < piece.accesses % threads:
            issue_access(pool, word + rounds * threads * ACCESS_WORDS, ring, slot, rounds * threads + member)


@T.macro
def issue_access(pool, word, ring, slot, access):
    T.ptx_cp_async(T.access_ptr(ring[slot, access, 0], "w", ACCESS_WORDS),
                   T.access_ptr(pool[0, word], "r", ACCESS_WORDS), ACCESS_WORDS)


@T.macro
def issue_tokens(config, source, seq, head, first, live, ring_h, slot, member):
    """Start copying one tile of 16-bit tokens, rows first .. of source [batch, heads, rows, head_dim]."""
    threads = config.ring_threads
    accesses = config.tile16_tokens * config.row_accesses
    unrolled = {"pragma_unroll_factor": COPIES_AT_ONCE} if config.has_mixed else None
    for i in T.unroll(accesses // threads, annotations=unrolled):
        issue_token_access(config, source, seq, head, first, live, ring_h, slot, i * threads + member)
    if accesses % threads:
        if member < accesses % threads:
            issue_token_access(config, source, seq, head, first, live, ring_h, slot,
                               accesses // threads * threads + member)


@T.macro
def issue_token_access(config, source, seq, head, first, live, ring_h, slot, index):
    """16 bytes. Rows from ``live`` on are filled with zeros and not read: they may hold NaN, and 0 * NaN is NaN."""
    row, access = token_place(index, config.row_accesses)
    T.ptx_cp_async(
        T.access_ptr(ring_h[slot, swizzled(row, access, config.row_accesses), 0], "w", ACCESS_HALVES),
        T.access_ptr(source[seq, head, first + T.min(row, live - 1), access * ACCESS_HALVES], "r", ACCESS_HALVES),
        ACCESS_HALVES, row < live)
