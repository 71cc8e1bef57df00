"""Boosted channels of K (formats/kitty.py): the other bits of their codes, times queries gathered by channel.

Both planes have 2 bits, so a token's codes stand at the same bits of a word in both, and one accumulator takes them:

    S_t = sum_d (q' s)_d low_td + sum_slot (4 q' s)_index[slot] high_t,slot

A step is a column tile of the high plane, 16 slots: lane l looks up the channel of slot l % 16, one ldmatrix gathers
4 q' of these channels from a copy of q' that lies by channel in shared memory, and the scales come by shuffles.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint8, Uint16, Uint32
from cutlass.cute.nvgpu import warp

from lowbit_attn import layout, subnormals
from lowbit_attn.device import numbers, ptx
from lowbit_attn.hopper.arith.fp16 import operands
from lowbit_attn.hopper.warp import fetch
from lowbit_attn.hopper.warp.config import BOOST_WEIGHT, COLUMNS, WarpConfig
from lowbit_attn.hopper.warp.fetch import Lane, Piece


class PageSums(NamedTuple):
    """Accumulators of a page's K, fp32 (4, row tile * col_blocks + block)."""

    acc: cute.Tensor  # S
    ones: cute.Tensor  # sum of the rounded q' s
    bias: cute.Tensor  # sum of q' m in elements 0, 1 and of q' s in elements 2, 3


def channel_view(cfg: WarpConfig, channels: cute.Pointer, element) -> cute.Tensor:
    """(a channel's 8 query rows, channel, block of rows): 16 bytes each."""
    count = COLUMNS * 16 // element.width
    return cute.make_tensor(cute.recast_ptr(channels, dtype=element), cute.make_layout(
        (count, cfg.head_dim, cfg.col_blocks), stride=(1, count, count * cfg.head_dim)))


def store_channels(cfg: WarpConfig, words: cute.Tensor, me: Lane, channels: cute.Pointer) -> None:
    """4 q' by channel, from q' as B operand (2, column tile * col_blocks + block); by one warp, before a barrier."""
    view = channel_view(cfg, channels, Uint32)
    for ct in range(cfg.k.col_tiles):
        for col8 in (0, 1):
            for nt in range(cfg.col_blocks):
                # rows 2t, 2t + 1 of channel g of the eight
                word = ptx.movmatrix(words[col8, ct * cfg.col_blocks + nt])
                word = operands.rounded(word, "float16", Float32(BOOST_WEIGHT))
                view[Int32(me.t), layout.TILE * ct + 8 * col8 + Int32(me.g), nt] = word


def add(cfg: WarpConfig, piece: Piece, me: Lane, channels: cute.Pointer, up, e_s: Int32, sums: PageSums,
        tile: Uint32 | None) -> None:
    """The high codes into S, and 4 q' s into the other sums, as these codes count four times.

    up: as for all channels, scores.scale_up; tile: of one row tile alone.
    """
    side, blocks = cfg.boost, cfg.col_blocks
    atom = numbers.multiply_atom()
    for step in range(cfg.boost.col_tiles):
        if step and step % (2 // blocks) == 0:
            fetch.fence()  # between these steps' multiplies and the next steps' loads
        queries, query_words, scales = gather(cfg, piece, me, channels, step)
        scaled, scaled_words = numbers.fragments(blocks)
        for col8, word in enumerate(scales):
            times = None if word is None else up(word)
            for nt in range(blocks):
                scaled_words[col8, nt] = Uint32(0) if word is None else times(query_words[col8, nt])
        a = numbers.operand_a([Uint32(operands.ONES)] * 4)
        own = numbers.operand_a([x for word in scales for x in (Uint32(0), centre(cfg, word, e_s))])
        for nt in range(blocks):
            numbers.multiply(atom, sums.ones, nt, a, scaled[None, nt])
            numbers.multiply(atom, sums.bias, nt, own, queries[None, nt])
        words = operands.column_codes(cfg, side, piece, me, step, tile)
        for rt in range(side.row_tiles if tile is None else 1):
            a = numbers.operand_a(operands.codes_operand(side, words, step * side.row_tiles + rt))
            for nt in range(blocks):
                numbers.multiply(atom, sums.acc, rt * blocks + nt, a, scaled[None, nt])


def centre(cfg: WarpConfig, word: Uint32 | None, e_s: Int32) -> Uint32:
    """A word of scales as the bias multiply takes them; 0 for slots that are not in use."""
    if word is None:
        return Uint32(0)
    if cfg.k.storage == "float16":
        return word
    return operands.rounded(word, cfg.k.storage, numbers.pow2(e_s + subnormals.CENTRE_SHIFT))


def gather(cfg: WarpConfig, piece: Piece, me: Lane, channels: cute.Pointer, step: int):
    """Gather a step's channels: 4 q' as B operand, fp16 (4, block) and words (2, block), and [col8] words of scales.

    Scales are those of slots 2t, 2t + 1 of each 8, or None where these are not in use.
    """
    blocks = cfg.col_blocks
    indices = fetch.elements(cfg, piece, cfg.boost.high.index, cfg.boost.cols, Uint8)
    channel = Uint32(indices[layout.TILE * step + Int32(me.lane % layout.TILE)])
    operand, words = numbers.fragments(blocks)
    flat = cute.make_tensor(operand.iterator, cute.make_layout((4 * blocks,)))
    block = Int32(me.lane // layout.TILE) if blocks > 1 else 0
    read = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 2 * blocks), Float16)
    cute.copy_atom_call(read, channel_view(cfg, channels, Float16)[None, Int32(channel), block], flat)
    scales = fetch.elements(cfg, piece, cfg.k.meta, cfg.head_dim, Uint16)
    own = Uint32(scales[Int32(layout.channel_meta_index(channel))])
    pair = own | cute.arch.shuffle_sync_bfly(own, offset=1) << Uint32(16)  # in lanes of even slots
    return operand, words, [
        cute.arch.shuffle_sync(pair, slot_lane(me.t, col8)) if in_use(cfg, step, col8) else None
        for col8 in (0, 1)]


def in_use(cfg: WarpConfig, step: int, col8: int) -> bool:
    """Whether the eight slots of half a column tile are in use, all of them or none."""
    return layout.TILE * step + 8 * col8 < cfg.boost.high.channels


def slot_lane(t, col8: int):
    """Lane that looks up slot 2t of half a column tile."""
    return Int32(8 * col8 + 2 * t)
