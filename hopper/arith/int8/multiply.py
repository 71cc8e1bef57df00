"""Codes times digits: m16n8k32 on masked bytes, and from its s32 sums to fp32."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from lowbit_attn import layout, registers
from lowbit_attn.device import ptx
from lowbit_attn.hopper.arith.int8.config import STEP_TILES
from lowbit_attn.hopper.common import numbers
from lowbit_attn.hopper.warp import unpack
from lowbit_attn.hopper.warp.config import SidePlan, WarpConfig
from lowbit_attn.hopper.warp.unpack import Lane, Piece

ALL_BITS = 0xFFFF_FFFF
DIGITS_OF_TWO = 0x4051  # of words a, b whose low halves are X: high digits of a, b, then their low digits


class Step(NamedTuple):
    """One multiply's column tiles of a matrix of codes: STEP_TILES of them, or the last one alone."""

    side: SidePlan
    index: int
    digits: list[Uint32]  # the B operand: a register a column tile

    @property
    def col_tiles(self) -> range:
        first = STEP_TILES * self.index
        return range(first, min(first + STEP_TILES, self.side.col_tiles))


def exponent(largest: Float32, guard: float, top: int) -> Int32:
    """a, so that rounding x * 2^a gives two digits for every |x| <= largest."""
    clamped = cute.arch.fmax(largest * Float32(guard), Float32(registers.MIN_FIXED_POINT))
    return top - registers.floor_log2(clamped.bitcast(Int32))


def down(largest: Float32, a: Int32) -> Float32:
    """2^-a; NaN where largest is infinite, so that it stays visible."""
    return largest * Float32(0.0) + numbers.pow2(-a)


def masks_of(side: SidePlan, row_tile: int, col_tile: int) -> list[tuple[int, int]]:
    """[row8] (word, mask) of a tile's two A registers."""
    found = []
    for row8 in (0, 1):
        row = layout.TILE * row_tile + 8 * row8
        word, _, _, _ = layout.code_slot(row, layout.TILE * col_tile, side.rows, side.bits)
        found.append((word, registers.byte_mask(row, side.bits)))
    return found


def masked(words: dict[int, Uint32], word: int, mask: int) -> Uint32:
    return words[word] if mask == ALL_BITS else words[word] & Uint32(mask)


def tile_words(cfg: WarpConfig, side: SidePlan, piece: Piece, me: Lane, col_tile: int, row_tiles: range,
               tile: Uint32 | None) -> dict[int, Uint32]:
    """The lane's words with the codes of consecutive row tiles of a column tile; tile: of this one, as row tile 0."""
    if tile is not None:
        return unpack.tile_codes(cfg, side, piece, me, col_tile * side.row_tiles, tile)
    return unpack.codes(cfg, side, piece, me, *run_of(side, col_tile, row_tiles))


def run_of(side: SidePlan, col_tile: int, row_tiles: range) -> tuple[int, int]:
    """(first tile, tiles) of the whole words that hold consecutive row tiles of a column tile."""
    n = layout.tiles_per_word(side.bits)
    first, stop = row_tiles.start // n * n, -(-row_tiles.stop // n) * n
    return col_tile * side.row_tiles + first, stop - first


def begin(row_tiles: range, is_signed: bool) -> list[list[Uint32]]:
    """[row tile] accumulators."""
    start = registers.SIGNED_START_BITS if is_signed else registers.UNSIGNED_START_BITS
    return [[Uint32(start)] * 4 for _ in row_tiles]


def add(cfg: WarpConfig, acc: list, piece: Piece, me: Lane, steps: list[Step], row_tiles: range, is_signed: bool,
        tile: Uint32 | None = None) -> None:
    """The columns of ``steps`` to ``acc``; tile: one row tile alone, chosen at run time, as that of ``row_tiles``."""
    for step in steps:
        words = [tile_words(cfg, step.side, piece, me, ct, row_tiles, tile) for ct in step.col_tiles]
        for at, row_tile in enumerate(row_tiles):
            a = [masked(found, *place) for found, ct in zip(words, step.col_tiles)
                 for place in masks_of(step.side, row_tile, ct)]
            acc[at] = ptx.multiply_bytes(a, step.digits, acc[at], is_signed)


def found_in(acc: list, is_signed: bool) -> list[list[Float32]]:
    """[row tile][row8] of this lane's row t: sum of code * 2^k * X, from accumulators."""
    return [[joined(*tile[2 * row8 : 2 * row8 + 2], is_signed) for row8 in (0, 1)] for tile in acc]


def joined(high: Uint32, low: Uint32, is_signed: bool) -> Float32:
    """256 high + low of two accumulators, read as start + sum."""
    start = registers.SIGNED_START if is_signed else registers.UNSIGNED_START
    base = registers.DIGIT_BASE
    return high.bitcast(Float32) * Float32(base) - Float32((base + 1) * start) + low.bitcast(Float32)
