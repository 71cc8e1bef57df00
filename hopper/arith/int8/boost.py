"""Boosted channels of K (formats/kitty.py) on the integer path: their high codes times digits of 4 q s.

Both planes have 2 bits, so the codes of a token stand at the same bits of a byte in both, and one s32 sum takes them:

    S_t = sum_d (q s)_d low_td + sum_slot (4 q s)_index[slot] high_t,slot

A multiply takes two column tiles of slots, which the two lanes of a row share as they share those of all channels
(steps.py). A last, lone column tile takes a multiply of half as many columns: each of the two lanes has eight slots.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint16, Uint32

from lowbit_attn import layout
from lowbit_attn.device import numbers, ptx
from lowbit_attn.hopper.arith.int8.config import ROWS, STEP_TILES
from lowbit_attn.hopper.warp import fetch
from lowbit_attn.hopper.warp.config import BOOST_WEIGHT, WarpConfig
from lowbit_attn.hopper.warp.fetch import Lane, Piece

PAIRS = 0x5140  # selector: bytes of words (x0, x1), (y0, y1) -> x0, y0, x1, y1: the byte order of a column tile
# bits of a channel that layout.channel_meta_index has in their places, or shifts to these: by two, left and right
STAY, LEFT, RIGHT = 0xE1, 0x18, 0x06
EVERY_BYTE = 0x0101_0101
EVEN_LANE, ODD_LANE = 0x5140, 0x3726  # selectors: high digits of (own, other) pairs; low digits of (other, own)


def positions(channels):
    """layout.channel_meta_index of the four channels in the bytes of a word."""
    return ((channels & STAY * EVERY_BYTE) | ((channels << 2) & LEFT * EVERY_BYTE)
            | ((channels >> 2) & RIGHT * EVERY_BYTE))


def queries_view(cfg: WarpConfig, channels: cute.Pointer) -> cute.Tensor:
    """(query row, channel in the order of metadata): 4 q * softmax_scale_log2, fp32."""
    return cute.make_tensor(cute.recast_ptr(channels, dtype=Float32),
                            cute.make_layout((ROWS, cfg.head_dim), stride=(1, ROWS)))


def store_channels(cfg: WarpConfig, own: cute.Tensor, step: int, me: Lane, channels: cute.Pointer) -> None:
    """The lane's values of its column tile of a step, in the order of a word; by one warp, before a barrier."""
    view = queries_view(cfg, channels)
    for col8 in range(2):
        for e in range(2):
            channel = layout.TILE * (STEP_TILES * step + Int32(me.g % 2)) + 2 * Int32(me.t) + 8 * col8 + e
            view[Int32(me.g // 2), layout.channel_meta_index(channel)] = own[col8 + 2 * e] * Float32(BOOST_WEIGHT)


def products(cfg: WarpConfig, piece: Piece, me: Lane, channels: cute.Pointer) -> list[list[Float32]]:
    """[step] 4 q s of the lane's slots: those of a word's bytes, or 2t and 2t + 1 of its eight of a lone column tile.

    Slots that are not in use repeat the last one's channel, and their codes are zero.
    """
    queries = queries_view(cfg, channels)
    scales = fetch.elements(cfg, piece, cfg.k.meta, cfg.head_dim, Uint16)
    found = []
    for first in range(0, cfg.boost.col_tiles, STEP_TILES):
        word, count = own_channels(cfg, piece, me, first)
        word = positions(word)
        at = [Int32((word >> Uint32(8 * i)) & Uint32(0xFF)) for i in range(count)]
        found.append([queries[Int32(me.lane // 8), i] * numbers.widen(Uint32(scales[i]), cfg.k.storage)[0] for i in at])
    return found


def own_channels(cfg: WarpConfig, piece: Piece, me: Lane, first: int) -> tuple[Uint32, int]:
    """(channels of the lane's slots as bytes, how many) of the step from column tile ``first`` on."""
    pairs = fetch.elements(cfg, piece, cfg.boost.high.index, cfg.boost.cols // 2, Uint16)
    at = [Int32(i) for i in own_accesses(first, cfg.boost.col_tiles, me.lane)]
    words = [Uint32(pairs[i]) for i in at]
    return (words[0], 2) if len(words) == 1 else (ptx.permute(*words, PAIRS), 4)


def own_accesses(first: int, column_tiles: int, lane) -> list:
    """Indices of the pairs of slots that a lane looks up: one of a lone column tile, else those of col8 = 0 and 1."""
    half, tile = layout.TILE // 4, layout.TILE // 2
    if first + 1 == column_tiles:
        return [tile * first + lane % 8]  # t of col8 = g % 2
    return [tile * (first + lane // 4 % 2) + half * col8 + lane % 4 for col8 in (0, 1)]


def joined(me: Lane, pair: Uint32) -> list[Uint32]:
    """B operand of a lone column tile from the digits of the lane's two slots: their high digits, then the low ones."""
    other = cute.arch.shuffle_sync_bfly(pair, offset=4)
    selector = cutlass.select_(me.g % 2 != 0, Uint32(ODD_LANE), Uint32(EVEN_LANE))
    return [ptx.permute(pair, other, Uint32(selector))]
