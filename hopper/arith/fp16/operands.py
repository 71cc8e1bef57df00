"""What the register path reads of a page, and halves of words: codes as A registers, scales and zero-points, maxima."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from lowbit_attn import layout, subnormals
from lowbit_attn.device.numbers import LOW_HALF, pack, widen
from lowbit_attn.hopper.warp import fetch
from lowbit_attn.hopper.warp.config import META_BYTES, WARP, SidePlan, WarpConfig
from lowbit_attn.hopper.warp.fetch import Lane, Piece

ONES = 0x3C00_3C00  # fp16 1.0 in both halves
NO_SIGNS = 0x7FFF_7FFF
MIN_FP16_SCALE_LOG2 = -13  # so that 2^(e_s + 2) is an fp16 number; q' s of smaller scales keep their digits, too


def column_codes(cfg: WarpConfig, side: SidePlan, piece: Piece, me: Lane, col_tile: int,
                 tile: Uint32 | None) -> dict[int, Uint32]:
    """Words of a column tile: of all its row tiles, or of ``tile`` alone."""
    first = col_tile * side.row_tiles
    if tile is None:
        return fetch.codes(cfg, side, piece, me, first, side.row_tiles)
    return cfg.mixed_steps.tile_codes(cfg, side, piece, me, first, tile)


def codes_operand(side: SidePlan, words: dict[int, Uint32], tile: int) -> list[Uint32]:
    """The four A registers of a tile: raw codes as fp16 subnormals."""
    return [(words[word] >> Uint32(shift) if shift else words[word]) & Uint32(mask)
            for word, shift, mask in register_sources(side, tile)]


def register_sources(side: SidePlan, tile: int) -> list[tuple[int, int, int]]:
    """(word, shift, mask) of the four A registers of a tile: register = (word >> shift) & mask."""
    found = {}
    for row8 in (0, 1) if side.bits == 8 else (0,):
        word = 2 * tile + row8 if side.bits == 8 else tile // layout.tiles_per_word(side.bits)
        for step in subnormals.unpack_steps(side.bits):
            if step.tile == tile % layout.tiles_per_word(side.bits):
                found[step.register + row8] = (word, step.shift, step.mask)
    return [found[i] for i in range(4)]


def channel_meta(cfg: WarpConfig, side: SidePlan, piece: Piece, me: Lane, group, is_zero: int,
                 col_tile: int) -> list[Uint32]:
    """[col8] words of a token group's scales or zero-points: channels 2t, 2t + 1 of each 8 of a column tile."""
    at = side.channel_access(Int32(group), is_zero, col_tile, Int32(me.t))
    return fetch.read(fetch.meta_view(cfg, side, piece), at)


def all_scales(cfg: WarpConfig, side: SidePlan, piece: Piece, me: Lane, group) -> list[Uint32]:
    """This lane's share of a token group's scales, in no useful order; with few channels lanes share a share."""
    view = fetch.meta_view(cfg, side, piece)
    return [word for index in scale_accesses(side, Int32(group), me.lane) for word in fetch.read(view, Int32(index))]


def scale_accesses(side: SidePlan, group, lane) -> list:
    """Indices of a lane's accesses of META_BYTES, which all lanes together make to a token group's scales."""
    count = layout.META_BYTES * side.head_dim // META_BYTES
    own = lane % min(count, WARP)
    return [side.channel_access(group, 0, 0, 0) + start + own for start in range(0, count, WARP)]


def token_meta(cfg: WarpConfig, side: SidePlan, piece: Piece, me: Lane, group: int, tile) -> list[Uint32]:
    """[half] (scale, zero) words of tokens 16 * tile + 8 * half + g: scale in the low half."""
    return fetch.read(fetch.meta_view(cfg, side, piece), Int32(token_access(group, tile, Int32(me.g))))


def token_access(group: int, token_tile: int, g):
    """Index of the 8 bytes that hold a lane's two (scale, zero) pairs of a token tile: tokens g and g + 8."""
    def at(*place):
        return layout.token_meta_offset(*place) // META_BYTES

    return group * at(1, 0, 0) + at(0, 0, layout.TILE * token_tile) + g * at(0, 0, 1)


def all_token_meta(cfg: WarpConfig, side: SidePlan, piece: Piece, me: Lane) -> list[Uint32]:
    """This lane's share of all (scale, zero) words, in no useful order: each word is read by one lane."""
    accesses = side.groups * layout.PAGE_TOKENS // layout.BLOCK_WORDS
    view = fetch.part_view(cfg, piece, side.meta, layout.BLOCK_WORDS, accesses)
    return [word for first in range(0, accesses, WARP) for word in fetch.read(view, Int32(me.lane) + first)]


def rounded(word: Uint32, storage: str, up: Float32) -> Uint32:
    """Both values of a word times a power of two, in fp16."""
    return pack(*(half * up for half in widen(word, storage)))


def warp_max_half(word: Uint32, storage: str) -> Float32:
    """The largest low half of the warp's words without sign bits, as fp32."""
    return widen(Uint32(cute.arch.warp_redux_sync(word & Uint32(LOW_HALF), "umax")), storage)[0]
