"""K per token: rows = tokens, columns = channels, a group runs along the columns.

The counterpart of ``quantize_rows`` for groups that cross lanes and column tiles: the four lanes of one row hold a
group. One warp owns the rows that share its words (8, 16, 32, 64 at 8, 4, 2, 1 bits) and takes them eight at a time,
one a lane quad, so packing needs no exchange between lanes and a lane holds head_dim / 4 values.
"""

from itertools import product

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.device.groups import (
    QUAD_LANES,
    code_bits,
    empty_word,
    inverse_of,
    limits,
    load_meta,
    span_of,
    static,
    store_meta,
    two_means,
    two_means_bits,
)
from lowbit_attn.device.tokens import ACCESS_HALVES, MATRICES, load_fragment, swizzled
from lowbit_attn.formats.spec import Kind, SideSpec

ATOM = 8  # rows and columns of the fragment atom
STRANDS = 2  # neighbouring columns (e) that one lane holds of every atom
WARPS = 4  # of a block, at most: 128 threads, so that head_dim 256 has the registers it needs


class TokenMatrix:
    """Static geometry of a K-per-token code matrix, seen from a lane."""

    @staticmethod
    def serves(side: SideSpec) -> bool:
        return side.high is None and side.kind is Kind.TOKEN and not side.transposed

    def __init__(self, side: SideSpec, dtype: str = ""):
        self.bits, self.head_dim, head_dim = side.bits, side.head_dim, side.head_dim
        self.steps, self.storage = side.steps, side.storage
        self.group_cols, self.groups = side.group_size, side.groups
        self.atoms = head_dim // ATOM  # of one row
        self.atoms_per_group = self.group_cols // ATOM
        self.slots = layout.slots_per_byte(side.bits)  # eight-row blocks that share their words
        self.spans = layout.PAGE_TOKENS // (ATOM * self.slots)  # runs of such rows: one warp each
        self.warps = min(WARPS, self.spans)
        self.parts = self.spans // self.warps
        self.threads = self.warps * layout.LANES
        self.part_rows = layout.PAGE_TOKENS // self.parts
        self.row_accesses = head_dim // ACCESS_HALVES
        self.col_tiles = head_dim // layout.TILE
        self.meta_at = side.meta

    def blocks_per_sm(self, range_search, threads=None, more=0):
        """Blocks that must fit an SM together: small as they are, more than one do."""
        return 1

    def row_of(self, span, slot, g):
        return ATOM * (span * self.slots + slot) + g

    def column_of(self, atom, t, e):
        return ATOM * atom + 2 * t + e

    def place(self, warp, slot, first, lane):
        """Access that a lane names of four matrices of the tile: eight rows of a warp, atoms first .. first + 3."""
        return swizzled(self.row_of(warp, slot, lane % ATOM), first + lane // ATOM, self.row_accesses)

    def code_word(self, span, col_tile):
        """Word that holds the codes of these rows and of one column tile."""
        return layout.code_slot(self.row_of(span, 0, 0), layout.TILE * col_tile, layout.PAGE_TOKENS, self.bits)[0]

    def code_shift(self, slot, atom, e):
        """Bit position within the word of an element of row block ``slot``."""
        row = self.row_of(0, slot, 0)
        _, _, byte, at = layout.code_slot(row, self.column_of(atom, 0, e), layout.PAGE_TOKENS, self.bits)
        return 8 * byte + self.bits * at

    def meta_offset(self, group, is_zero, token):
        """Byte offset of a token's scale or zero from the start of the side's planes."""
        return self.meta_at + layout.token_meta_offset(group, is_zero, token)


@T.macro
def quantize_tokens(m, range_search, tile, part, pool, pool_meta, unit, tx):
    """One part of a block's tokens in shared memory -> codes and metadata of the record at ``unit``."""
    lane, warp = tx % layout.LANES, tx // layout.LANES
    span = part * m.warps + warp
    words = T.alloc_local((m.col_tiles,), "uint32")
    pairs = T.alloc_local((m.atoms * STRANDS,), tile.dtype)
    for w in T.unroll(m.col_tiles):
        words[w] = T.uint32(empty_word(m.bits))
    for slot in T.serial(m.slots):
        for i in static(m.atoms // MATRICES):
            load_fragment(False, tile, m.place(warp, slot, MATRICES * i, lane), pairs, MATRICES * i)
        for group in static(m.groups):
            quantize_group(m, range_search, pairs, slot, group, words, pool_meta, unit, span, lane)
    for w in T.unroll(m.col_tiles):
        offset = layout.word_offset(m.code_word(span, w), lane)
        pool[unit + offset // 128, offset % 128 // 4] = words[w]


@T.macro
def quantize_group(m, range_search, pairs, slot, group, words, pool_meta, unit, span, lane):
    """One group of a row -> its codes into the lane's words, its metadata into the record."""
    v = T.alloc_local((m.atoms_per_group, STRANDS), "float32")
    for i, e in product(static(m.atoms_per_group), static(STRANDS)):
        v[i, e] = T.cast(pairs[(group * m.atoms_per_group + i) * STRANDS + e], "float32")
    strands = [[v[i, e] for i in range(m.atoms_per_group)] for e in range(STRANDS)]
    values = [x for strand in strands for x in strand]
    low, high, scale, zero, inverse = (T.alloc_local((1,), "float32") for _ in range(5))
    limits(values, QUAD_LANES, lane, low, high)
    if m.bits == 1 and not range_search:
        two_means(strands, m.group_cols, QUAD_LANES, low, high, m.storage, scale, zero)
    else:
        search_bits = m.bits if range_search and m.bits < 8 else 0
        span_of(values, QUAD_LANES, lane, search_bits, low, high, T.float32(m.steps), m.storage, scale, zero)
        inverse_of(scale, inverse)
    for i, e in product(static(m.atoms_per_group), static(STRANDS)):
        atom = group * m.atoms_per_group + i
        bits = T.alloc_var("uint32")
        if m.bits == 1 and not range_search:
            bits = two_means_bits(v[i, e], scale[0], zero[0])
        else:
            bits = code_bits(v[i, e], zero[0], inverse[0], T.float32(m.steps))
        words[atom // 2] = words[atom // 2] + (bits << T.cast(m.code_shift(slot, atom, e), "uint32"))
    if lane % 4 == 0:
        row = m.row_of(span, slot, lane // 4)
        store_meta(pool_meta, unit, m.meta_offset(group, 0, row), scale[0], m.storage)
        store_meta(pool_meta, unit, m.meta_offset(group, 1, row), zero[0], m.storage)


@T.macro
def dequantize_tokens(m, pool, pool_meta, unit, put, part, tx):
    """One part of the record at ``unit`` -> put; threads beyond those of a part take the next one."""
    lane = tx % layout.LANES
    span = part * m.warps + tx // layout.LANES
    g, t = lane // 4, lane % 4
    words = T.alloc_local((m.col_tiles,), "uint32")
    for w in T.unroll(m.col_tiles):
        offset = layout.word_offset(m.code_word(span, w), lane)
        words[w] = pool[unit + offset // 128, offset % 128 // 4]
    for slot in T.serial(m.slots):
        row = m.row_of(span, slot, g)
        for group in T.unroll(m.groups):
            scale, zero = T.alloc_var("float32"), T.alloc_var("float32")
            scale = load_meta(pool_meta, unit, m.meta_offset(group, 0, row))
            zero = load_meta(pool_meta, unit, m.meta_offset(group, 1, row))
            for i in T.unroll(m.atoms_per_group):
                atom = group * m.atoms_per_group + i
                put(row, m.column_of(atom, t, 0),
                    [code_at(m, words, slot, atom, e) * scale + zero for e in range(STRANDS)])


def code_at(m, words, slot, atom, e):
    """The code of a lane's element, as fp32."""
    shift = T.cast(m.code_shift(slot, atom, e), "uint32")
    return T.cast((words[atom // 2] >> shift) & T.uint32(m.steps), "float32")
