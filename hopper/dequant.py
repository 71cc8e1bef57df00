"""Dequant role: one warpgroup for K, one for V turn packed parts and 16-bit rows into WGMMA's B tiles.

A tile is K-major with the 128-byte swizzle: K as [128 tokens, D channels], V as [D channels, 128 tokens].
The 8x8 matrix that one masked word gives is exactly stmatrix's, so no lane ever exchanges data.
"""

import struct
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Int32, Uint32
from cutlass.cute.nvgpu import warp

from lowbit_attn import layout
from lowbit_attn.device import ptx
from lowbit_attn.hopper import ring as rings
from lowbit_attn.hopper.config import (
    CHUNK,
    GROUP_WARPS,
    UNIT_TOKENS,
    UNITS,
    WARP,
    WORD,
    DecodeConfig,
    SidePlan,
    lane_place,
    matrix_place,
    tile_chunk,
)
from lowbit_attn.hopper.ring import Ring
from lowbit_attn.hopper.walk import Walk, plain_tile

BOTH = 0x0001_0001  # a 16-bit pattern in both halves of a word
FP16_MAGIC = 0x6400  # bits of 1024: ORing a code at bit k of the mantissa gives 1024 + code * 2**k


class Lane(NamedTuple):
    """This thread's place: warp of the group, lane, and the row and column (in 8x8 matrices) it addresses."""

    warp: Uint32
    lane: Uint32
    row: Uint32  # row within a 16x16 tile whose 16 bytes this lane addresses in a x4 access
    col8: Uint32


def fp16_bits(x: float) -> int:
    return struct.unpack("<H", struct.pack("<e", x))[0]


def unpack_f16(word: Uint32, shift: int, position: int, bits: int) -> Uint32:
    """Two exact fp16 codes from the bits at ``position`` of both halves of ``word >> shift``."""
    mask = ((1 << bits) - 1) << position
    magic = cute.arch.lop3(word >> Uint32(shift) if shift else word, Uint32(mask * BOTH),
                           Uint32(FP16_MAGIC * BOTH), ptx.OR_OF_AND)
    scale = 2.0**-position  # (1024 + code * 2**position) * scale - 1024 * scale: exact
    return ptx.fma_f16x2_const(magic, fp16_bits(scale) * BOTH, fp16_bits(-1024.0 * scale) * BOTH)


@cute.jit
def run(cfg: cutlass.Constexpr[DecodeConfig], side: cutlass.Constexpr[SidePlan], walk: Walk, packed: Ring,
        packed_smem: cute.Pointer, tiles: Ring, tile_smem: cute.Pointer):
    """Consume the packed ring and fill the tile ring in the walk's order."""
    lane = Uint32(cute.arch.lane_idx())
    me = Lane(Uint32(cute.arch.make_warp_uniform(cute.arch.warp_idx())) % GROUP_WARPS, lane, *lane_place(lane))
    tile_chunks = side.tile_bytes // (2 * CHUNK)
    out = cute.make_tensor(tile_smem, cute.make_layout((CHUNK, tile_chunks, cfg.tile_stages),
                                                       stride=(1, CHUNK, tile_chunks * CHUNK)))
    fill = Uint32(0)
    for i in cutlass.range(walk.num_pages, unroll=1):
        rings.wait_full(packed, fill)
        rings.wait_empty(tiles, fill)
        dequant_page(cfg, side, me, packed_smem, rings.stage(packed, fill), out[None, None, rings.stage(tiles, fill)])
        rings.release(packed, fill)
        rings.publish(tiles, fill)
        fill += Uint32(1)
    for i in cutlass.range(walk.plain_tiles, unroll=1):
        tile_fill = fill + Uint32(i)
        tile = plain_tile(walk, i)
        rings.wait_empty(tiles, tile_fill)
        for u in cutlass.range(UNITS, unroll=1):
            piece = fill + Uint32(i * UNITS + u)
            rings.wait_full(packed, piece)
            copy_unit(cfg, side, me, packed_smem, rings.stage(packed, piece),
                      out[None, None, rings.stage(tiles, tile_fill)], Uint32(u), Uint32(tile.live))
            rings.release(packed, piece)
        rings.publish(tiles, tile_fill)


@cute.jit
def dequant_page(cfg: cutlass.Constexpr[DecodeConfig], side: cutlass.Constexpr[SidePlan], me: Lane,
                 packed_smem: cute.Pointer, stage: Int32, out: cute.Tensor):
    """One part of a record -> one tile: code * scale + zero, fp16, one rounding."""
    block_words = layout.BLOCK_WORDS
    blocks = side.warp_words // block_words
    packed = cute.make_tensor(packed_smem, cute.make_layout(
        (block_words, WARP, blocks * GROUP_WARPS, cfg.packed_stages),
        stride=(1, block_words, block_words * WARP, cfg.stage_bytes // WORD)))
    words = cute.make_rmem_tensor((block_words, blocks), Uint32)
    for block in cutlass.range_constexpr(blocks):
        cute.autovec_copy(packed[None, me.lane, me.warp * blocks + block, stage], words[None, block])
    scale, zero = load_meta(cfg, side, me, packed_smem, stage)
    chunks = [tile_chunk(me.row, (me.warp * side.warp_cols + c) * 2 + me.col8, side.rows)
              for c in range(side.warp_cols)]
    store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), Float16)
    for col_tile, row_tile, parts in side.registers():
        frag = cute.make_rmem_tensor(8, Float16)
        frag_words = cute.recast_tensor(frag, Uint32)
        for matrix, (c8, word, shift, position) in enumerate(parts):
            codes = unpack_f16(words[word], shift, position, side.bits)
            frag_words[matrix] = ptx.fma_f16x2(codes, scale[2 * col_tile + c8], zero[2 * col_tile + c8])
        # 16 rows further on keep row % 8, hence the swizzle
        cute.copy(store, frag, out[None, chunks[col_tile] + row_tile * tile_chunk(layout.TILE, 0, side.rows)])


def load_meta(cfg: DecodeConfig, side: SidePlan, me: Lane, packed_smem: cute.Pointer, stage: Int32):
    """(scales, zeros): f16x2 words for columns 2t, 2t + 1 of each 8-column group of this warp's column tiles."""
    count = side.meta_bytes // WORD
    meta = cute.make_tensor(packed_smem + side.meta_offset // WORD, cute.make_layout(
        (count, (side.part_bytes - side.meta_offset) // side.meta_bytes, cfg.packed_stages),
        stride=(1, count, cfg.stage_bytes // WORD)))
    first, second = (cute.make_rmem_tensor(count, Uint32) for _ in range(2))
    for offset, words in zip(side.meta_offsets(me.warp, me.lane % 4), (first, second)):
        cute.autovec_copy(meta[None, Int32(offset // side.meta_bytes), stage], words)
    if not side.transposed:
        return [first[j] for j in side.meta_words()], [second[j] for j in side.meta_words()]
    # a token is a column here: each load brings whole (scale, zero) words, of the low and of the high halves
    return ([ptx.low_halves(first[j], second[j]) for j in side.meta_words()],
            [ptx.high_halves(first[j], second[j]) for j in side.meta_words()])


@cute.jit
def copy_unit(cfg: cutlass.Constexpr[DecodeConfig], side: cutlass.Constexpr[SidePlan], me: Lane,
              packed_smem: cute.Pointer, stage: Int32, out: cute.Tensor, unit: Uint32, live: Uint32):
    """32 rows of 16 bit -> their part of a tile; V is transposed and its tokens from ``live`` on are zeroed."""
    row_chunks = cfg.row_pitch // (2 * CHUNK)
    rows = cute.make_tensor(cute.recast_ptr(packed_smem, dtype=Float16), cute.make_layout(
        (CHUNK, row_chunks, UNIT_TOKENS, cfg.packed_stages),
        stride=(1, CHUNK, cfg.row_pitch // 2, cfg.stage_bytes // 2)))
    load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(side.transposed, 4), Float16)
    store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), Float16)
    row8, i8 = me.row // 8, me.lane % 8
    for token_tile in cutlass.range_constexpr(UNIT_TOKENS // layout.TILE):
        for j in cutlass.range_constexpr(side.head_dim // layout.TILE // GROUP_WARPS):
            channel_tile = me.warp + GROUP_WARPS * j
            token8 = unit * (UNIT_TOKENS // 8) + 2 * token_tile  # the tile's first token, in eights
            frag = cute.make_rmem_tensor(8, Float16)
            if cutlass.const_expr(side.transposed):
                token = token_tile * layout.TILE + me.col8 * 8 + i8
                cute.copy(load, rows[None, 2 * channel_tile + row8, token, stage], frag)
                zero_dead(frag, token8 * 8 + 2 * (me.lane % 4), live)
                chunk = tile_chunk(channel_tile * layout.TILE + me.row, token8 + me.col8, side.rows)
            else:
                cute.copy(load, rows[None, 2 * channel_tile + me.col8, token_tile * layout.TILE + me.row, stage], frag)
                chunk = tile_chunk(token8 * 8 + me.row, 2 * channel_tile + me.col8, side.rows)
            cute.copy(store, frag, out[None, chunk])


def zero_dead(frag: cute.Tensor, token: Uint32, live: Uint32) -> None:
    """Zero the halves of a V^T fragment whose token is not live; ``token``: that of register 0's low half.

    P = 0 does not protect: 0 * NaN is NaN.
    """
    words = cute.recast_tensor(frag, Uint32)
    for matrix in range(4):
        _, col8 = matrix_place(matrix)
        low, high = Uint32(token + 8 * col8 < live), Uint32(token + 8 * col8 + 1 < live)
        words[matrix] = words[matrix] & (low * Uint32(0x0000FFFF) + high * Uint32(0xFFFF0000))
