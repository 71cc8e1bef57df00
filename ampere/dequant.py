"""Packed words -> A fragments of m16n8k16, in registers, with scale and zero-point applied to every code.

A masked code at bit position ``exponent`` of a half, joined with the bits of 1024, is the fp16 number
1024 + code * 2**exponent, exactly (exponent + bits <= 10): one multiply-add leaves the integer, another applies scale
and zero-point with a single rounding.
"""

from dataclasses import dataclass

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.ampere.config import ACCESS_BYTES, TILE

MAGIC = 0x64006400  # 1024 in both halves
MAGIC_VALUE = 1024.0
BLOCK = layout.BLOCK_WORDS


@dataclass(frozen=True)
class Source:
    """Where the two codes of one A register are: word of the 16-byte load, right shift, mask, exponent."""

    word: int
    shift: int
    mask: int
    exponent: int


@dataclass(frozen=True)
class TileSource:
    """One 16x16 tile of a 16-byte load: its place in the matrix and its four registers."""

    row_tile: int
    column_tile: int
    registers: tuple[Source, ...]


def register_source(row_tile: int, column_tile: int, register: int, rows: int, bits: int) -> tuple[int, Source]:
    """(16-byte load, Source) of register a0 .. a3: rows g and g + 8, then the same of columns + 8."""
    row, col = TILE * row_tile + 8 * (register % 2), TILE * column_tile + 8 * (register // 2)
    word, lane, byte, slot = layout.code_slot(row, col, rows, bits)
    high = layout.code_slot(row, col + 1, rows, bits)
    if lane or high != (word, 0, byte + 2, slot):
        raise ValueError(f"the order of {bits}-bit codes does not put a register's two codes 16 bits apart")
    exponent = bits * slot
    mask = (((1 << bits) - 1) << exponent) * 0x00010001
    return word // BLOCK, Source(word % BLOCK, 8 * byte, mask, exponent)


def pair_loads(pair: int, rows: int, bits: int) -> tuple[tuple[int, tuple[TileSource, ...]], ...]:
    """The 16-byte loads that hold columns 32*pair .. 32*pair + 31, each with the tiles it brings."""
    loads: dict[int, list[TileSource]] = {}
    for column_tile in (2 * pair, 2 * pair + 1):
        for row_tile in range(rows // TILE):
            found = [register_source(row_tile, column_tile, r, rows, bits) for r in range(4)]
            loads.setdefault(found[0][0], []).append(TileSource(row_tile, column_tile, tuple(s for _, s in found)))
            if len({load for load, _ in found}) != 1:
                raise ValueError(f"{bits}-bit codes spread a tile over two 16-byte loads")
    return tuple((load, tuple(tiles)) for load, tiles in loads.items())


def code_access(load, lane):
    """16-byte access, within a part, of one load of codes."""
    return layout.word_offset(BLOCK * load, lane) // ACCESS_BYTES


def channel_meta_access(pair, is_zero, t, head_dim):
    """16-byte access, within the metadata plane, of a lane's scales or zero-points of 32 channels."""
    return layout.channel_meta_offset(0, is_zero, 2 * TILE * pair + 2 * t, head_dim) // ACCESS_BYTES


def channel_half(column_tile: int, col8: int) -> int:
    """Which of the eight halves of that access is the first of the two columns of one register."""
    return layout.channel_meta_index(TILE * (column_tile % 2) + 8 * col8)


def token_meta_access(pair, t, e):
    """16-byte access, within the metadata plane, of a lane's (scale, zero) pairs of tokens 2t + e + 8j."""
    return layout.token_meta_offset(0, 0, 2 * TILE * pair + 2 * t + e) // ACCESS_BYTES


def token_word(column_tile: int, col8: int) -> int:
    """Which of the four words of that access is the pair of a column: scale in its low half, zero-point in the high."""
    return layout.token_meta_index(TILE * (column_tile % 2) + 8 * col8)


def low_halves(x, y):
    return (x & 0xFFFF) | (y << 16)


def high_halves(x, y):
    return (x >> 16) | (y & 0xFFFF0000)


def masked(word, source: Source):
    """The two codes of a register in place, each within its half."""
    return (word >> source.shift if source.shift else word) & source.mask


@T.macro
def load_words(ring, slot, access, words):
    """One 16-byte shared load into four uint32 registers."""
    for v in T.vectorized(4):
        words[v] = ring[slot, access, v]


@T.macro
def load_channel_meta(piece, ring, slot, pair, t, head_dim, scale, zero):
    """Scales and zero-points (uint32 [4] each) of the columns 2t, 2t + 1 of four 8-column groups."""
    load_words(ring, slot, piece.meta + channel_meta_access(pair, 0, t, head_dim), scale)
    load_words(ring, slot, piece.meta + channel_meta_access(pair, 1, t, head_dim), zero)


@T.macro
def load_token_meta(piece, ring, slot, pair, t, pairs, scale, zero):
    """Load V's (scale, zero) pairs of columns 2t and 2t + 1, and regroup them: a column pair to a register."""
    for e in (0, 1):
        for v in T.vectorized(4):
            pairs[4 * e + v] = ring[slot, piece.meta + token_meta_access(pair, t, e), v]
    for column_tile in (0, 1):
        for col8 in (0, 1):
            at, of = channel_half(column_tile, col8) // 2, token_word(column_tile, col8)
            scale[at] = low_halves(pairs[of], pairs[4 + of])
            zero[at] = high_halves(pairs[of], pairs[4 + of])


@T.macro
def dequant_tile(tile, words, magic, scale_h, zero_h, a, a_h):
    """One 16x16 tile -> its A fragment (uint32 [4], the same registers as fp16 [8])."""
    for r, source in enumerate(tile.registers):
        at = channel_half(tile.column_tile, r // 2)
        step = 2.0**-source.exponent
        a[r] = masked(words[source.word], source) | magic
        for v in T.vectorized(2):
            a_h[2 * r + v] = (a_h[2 * r + v] * T.float16(step) - T.float16(MAGIC_VALUE * step)) * scale_h[at + v] \
                + zero_h[at + v]
