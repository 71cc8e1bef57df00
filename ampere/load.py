"""cp.async copies into a warp's private ring: packed pieces of records, and tiles of 16-bit tokens.

Each lane copies 16 bytes at a time. A warp commits, waits and synchronises alone: no barrier of the block is needed,
because no other warp ever touches its slots.
"""

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.ampere.config import ACCESS_BYTES, HALF_BYTES, LANES

UNIT_WORDS = layout.RECORD_ALIGN // layout.WORD_BYTES  # words in a unit of the pool
ACCESS_WORDS = ACCESS_BYTES // layout.WORD_BYTES
ROUND_WORDS = LANES * ACCESS_WORDS
ACCESS_HALVES = ACCESS_BYTES // HALF_BYTES


def lane_word(record, first_unit, lane):
    """First word of the pool that a lane copies of a part of the record at unit ``record``; round i is 128 words on."""
    return (record + first_unit) * UNIT_WORDS + lane * ACCESS_WORDS


def token_place(i, lane, row_accesses):
    """(row of the tile, 16-byte access of the row) that a lane copies in round ``i``."""
    return (i * LANES + lane) // row_accesses, (i * LANES + lane) % row_accesses


def swizzled(row, access, row_accesses):
    """Where one 16-byte access of a row of 16-bit data sits in a slot.

    Eight consecutive rows, which one phase of ldmatrix reads at the same column, fall into eight groups of banks.
    """
    return row * row_accesses + (access ^ (row % 8))


@T.macro
def issue_piece(piece, pool, record, ring, slot, lane):
    """Start copying the K or V part of the record at unit ``record`` of the pool into a ring slot."""
    word = T.alloc_var("int64")
    word = lane_word(T.cast(record, "int64"), piece.first_unit, T.cast(lane, "int64"))
    for i in T.unroll(piece.accesses // LANES):
        issue_access(pool, word + i * ROUND_WORDS, ring, slot, i * LANES + lane)
    if piece.accesses % LANES:
        if lane < piece.accesses % LANES:
            issue_access(pool, word + piece.accesses // LANES * ROUND_WORDS, ring, slot,
                         piece.accesses // LANES * LANES + lane)


@T.macro
def issue_access(pool, word, ring, slot, access):
    T.ptx_cp_async(T.access_ptr(ring[slot, access, 0], "w", ACCESS_WORDS),
                   T.access_ptr(pool[0, word], "r", ACCESS_WORDS), ACCESS_WORDS)


@T.macro
def issue_tokens(config, source, seq, head, first, live, ring_h, slot, lane):
    """Start copying one tile of 16-bit tokens, rows first .. of source [batch, heads, rows, head_dim].

    Rows from ``live`` on are filled with zeros and not read: their memory may hold NaN, and 0 * NaN is NaN.
    """
    per_row = config.row_accesses
    for i in T.unroll(config.tile16_tokens * per_row // LANES):
        row, access = token_place(i, lane, per_row)
        T.ptx_cp_async(
            T.access_ptr(ring_h[slot, swizzled(row, access, per_row), 0], "w", ACCESS_HALVES),
            T.access_ptr(source[seq, head, first + T.min(row, live - 1), access * ACCESS_HALVES], "r", ACCESS_HALVES),
            ACCESS_HALVES, row < live)
