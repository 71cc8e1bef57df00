"""From record parts in shared memory to a lane's registers: words of codes and of metadata."""

import math
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Uint32

from lowbit_attn import layout
from lowbit_attn.hopper.warp.config import META_BYTES, WARP, WORD, SidePlan, WarpConfig

BLOCK_WORDS = layout.BLOCK_WORDS


class Lane(NamedTuple):
    """This thread: its warp, and lane = 4 * g + t."""

    warp: Int32
    lane: Uint32
    g: Uint32
    t: Uint32


def lane_of(warp: Int32, lane: Uint32) -> Lane:
    return Lane(warp, lane, lane // 4, lane % 4)


def fresh(me: Lane) -> Lane:
    """This thread once more, as values of its own: what ptxas worked out of the old ones would stay in registers over
    a long loop, or be spilled."""
    return lane_of(me.warp, Uint32(cute.arch.shuffle_sync_bfly(me.lane, offset=0)))


def fence() -> None:
    """Keep loads on their side: else ptxas brings the next ones forward, until registers are short, or puts early ones
    off."""
    cute.arch.sync_warp()


class Piece(NamedTuple):
    """A record part in shared memory."""

    buffer: cute.Pointer
    warp: Int32
    slot: Int32


def part_view(cfg: WarpConfig, piece: Piece, offset: int, words: int, count: int) -> cute.Tensor:
    """(words, count) accesses of ``words`` 32-bit words from byte ``offset`` of the part on, aligned to their size."""
    view = cute.make_tensor(piece.buffer + offset // WORD, cute.make_layout(
        (words, count, cfg.slots, cfg.warps), stride=(1, words, cfg.slot_bytes // WORD, cfg.warp_bytes // WORD)))
    return view[None, None, piece.slot, piece.warp]


def read(view: cute.Tensor, index) -> list:
    """One access: its words, or what else the view has."""
    words = cute.make_rmem_tensor(cute.size(view, mode=[0]), view.element_type)
    cute.autovec_copy(view[None, index], words)
    return [words[i] for i in range(cute.size(words))]


def codes(cfg: WarpConfig, side: SidePlan, piece: Piece, me: Lane, first_tile: int, tiles: int,
          skip=0) -> dict[int, Uint32]:
    """The lane's words of a run of tiles, by word index; ``skip``, an int or Int32: whole blocks of words to skip."""
    first, count = side.words_of(first_tile), side.words_of(tiles)
    width = math.gcd(count, BLOCK_WORDS)  # runs of head_dim 96 start anywhere in a block
    accesses = layout.plane_bytes(side.rows, side.cols, side.bits) // (width * WORD)
    view = part_view(cfg, piece, side.codes_offset, width, accesses)
    found = {}
    for word in range(first, first + count, width):
        values = read(view, side.code_access(word, width, Int32(me.lane)) + skip * side.block_accesses(width))
        found |= {word + i: value for i, value in enumerate(values)}
    return found


def tile_codes(cfg: WarpConfig, side: SidePlan, piece: Piece, me: Lane, first_tile: int, tile: Uint32,
               skip=0) -> dict[int, Uint32]:
    """``codes`` of one row tile, chosen at run time, of the column tile from ``first_tile`` on.

    They stand where those of row tile 0 would: ``operand`` of first_tile, and the powers of row tile 0.
    """
    first, width = side.words_of(first_tile), max(1, side.words_of(1))
    view = part_view(cfg, piece, side.codes_offset, width,
                     layout.plane_bytes(side.rows, side.cols, side.bits) // (width * WORD))
    at = tile_access(side, first_tile, tile, width) + side.code_access(0, width, me.lane)
    values = read(view, Int32(at) + skip * side.block_accesses(width))
    return {first + i: value >> tile_shift(side, tile) if side.bits < 4 else value for i, value in enumerate(values)}


def tile_access(side: SidePlan, first_tile: int, tile, width: int):
    """Index of lane 0's access of ``width`` words with row tile ``tile`` of the column tile from ``first_tile`` on."""
    own = tile // layout.tiles_per_word(side.bits) * width  # within the column tile: whole blocks, or of one block
    return side.code_access(side.words_of(first_tile), width, 0) + side.code_access(own, width, 0)


def tile_shift(side: SidePlan, tile):
    """How far to the right the tile's codes go, to where the word has its first tile's."""
    return tile % layout.tiles_per_word(side.bits) * (2 * side.bits)


def column_codes(cfg: WarpConfig, side: SidePlan, piece: Piece, me: Lane, col_tile: int,
                 tile: Uint32 | None) -> dict[int, Uint32]:
    """Words of a column tile: of all its row tiles, or of ``tile`` alone."""
    first = col_tile * side.row_tiles
    if tile is None:
        return codes(cfg, side, piece, me, first, side.row_tiles)
    return tile_codes(cfg, side, piece, me, first, tile)


def operand(side: SidePlan, words: dict[int, Uint32], tile: int) -> list[Uint32]:
    """The four A registers of a tile: raw codes as fp16 subnormals."""
    return [(words[word] >> Uint32(shift) if shift else words[word]) & Uint32(mask)
            for word, shift, mask in side.operand(tile)]


def meta_view(cfg: WarpConfig, side: SidePlan, piece: Piece) -> cute.Tensor:
    """(words, accesses): the part's metadata in accesses of META_BYTES."""
    accesses = (side.part_bytes - side.meta_offset) // META_BYTES
    return part_view(cfg, piece, side.meta_offset, META_BYTES // WORD, accesses)


def channel_meta(cfg: WarpConfig, side: SidePlan, piece: Piece, me: Lane, group, is_zero: int,
                 col_tile: int) -> list[Uint32]:
    """[col8] words of a token group's scales or zero-points: channels 2t, 2t + 1 of each 8 of a column tile."""
    return read(meta_view(cfg, side, piece), side.channel_access(Int32(group), is_zero, col_tile, Int32(me.t)))


def all_scales(cfg: WarpConfig, side: SidePlan, piece: Piece, me: Lane, group) -> list[Uint32]:
    """This lane's share of a token group's scales, in no useful order; with few channels lanes share a share."""
    view = meta_view(cfg, side, piece)
    return [word for index in scale_accesses(side, Int32(group), me.lane) for word in read(view, Int32(index))]


def scale_accesses(side: SidePlan, group, lane) -> list:
    """Indices of a lane's accesses of META_BYTES, which all lanes together make to a token group's scales."""
    count = layout.META_BYTES * side.head_dim // META_BYTES
    own = lane % min(count, WARP)
    return [side.channel_access(group, 0, 0, 0) + start + own for start in range(0, count, WARP)]


def token_meta(cfg: WarpConfig, side: SidePlan, piece: Piece, me: Lane, group: int, tile) -> list[Uint32]:
    """[half] (scale, zero) words of tokens 16 * tile + 8 * half + g: scale in the low half."""
    return read(meta_view(cfg, side, piece), Int32(side.token_access(group, tile, Int32(me.g))))


def all_token_meta(cfg: WarpConfig, side: SidePlan, piece: Piece, me: Lane) -> list[Uint32]:
    """This lane's share of all (scale, zero) words, in no useful order: each word is read by one lane."""
    accesses = side.groups * layout.PAGE_TOKENS // BLOCK_WORDS
    view = part_view(cfg, piece, side.meta_offset, BLOCK_WORDS, accesses)
    return [word for first in range(0, accesses, WARP) for word in read(view, Int32(me.lane) + first)]


def elements(cfg: WarpConfig, piece: Piece, offset: int, count: int, element) -> cute.Tensor:
    """``count`` integers of 8 or 16 bits from byte ``offset`` of the part on."""
    apart = WORD * 8 // element.width  # elements in a word
    view = cute.make_tensor(cute.recast_ptr(piece.buffer + offset // WORD, dtype=element), cute.make_layout(
        (count, cfg.slots, cfg.warps), stride=(1, cfg.slot_bytes // WORD * apart, cfg.warp_bytes // WORD * apart)))
    return view[None, piece.slot, piece.warp]
