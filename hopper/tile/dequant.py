"""Dequant role: a warpgroup turns packed parts and 16-bit rows, of both sides or of one, into WGMMA's B tiles.

A tile is K-major with the 128-byte swizzle: K as [128 tokens, D channels], V as [D channels, 128 tokens].
The 8x8 matrix that one masked word gives is exactly stmatrix's, so no lane ever exchanges data.
"""

import struct
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import warp

from lowbit_attn import layout
from lowbit_attn.device import numbers, ptx
from lowbit_attn.hopper.tile import ring as rings
from lowbit_attn.hopper.tile.config import (
    GROUP_WARPS,
    UNIT_TOKENS,
    UNITS,
    WARP,
    WORD,
    DecodeConfig,
    TileSide,
    tile_chunk,
)
from lowbit_attn.hopper.tile.ring import StageRing
from lowbit_attn.hopper.tile.walk import TileWalk, token_tile_of
from lowbit_attn.registers import CHUNK, lane_place

BOTH = 0x0001_0001  # a 16-bit pattern in both halves of a word
FP16_MAX = 65504.0
FP16_MAGIC = 0x6400  # bits of 1024: ORing a code at bit k of the mantissa gives 1024 + code * 2**k


class DequantThread(NamedTuple):
    """This thread's place: warp of the group, lane, and the row and column (in 8x8 matrices) it addresses."""

    warp: Uint32
    lane: Uint32
    row: Uint32  # row within a 16x16 tile whose 16 bytes this lane addresses in a x4 access
    col8: Uint32


class Pipe(NamedTuple):
    """What a side has: its walk, the rings that its tiles come from and go to, and their shared memory."""

    walk: TileWalk
    packed: StageRing
    packed_smem: cute.Pointer
    tiles: StageRing
    tile_smem: cute.Pointer


class Part(NamedTuple):
    """A record's part in a packed stage."""

    smem: cute.Pointer  # of the ring, uint32
    stage: Int32
    stages: int
    pitch: int  # words between stages


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
def run(cfg: cutlass.Constexpr[DecodeConfig], sides: cutlass.Constexpr[tuple], pipes: tuple):
    """Consume the sides' packed rings and fill their tile rings in the walk's order, a tile of each side in turn.

    Tiles are bits of 16, fp16 or bf16. K and V have as many.
    """
    lane = Uint32(cute.arch.lane_idx())
    me = DequantThread(Uint32(cute.arch.make_warp_uniform(cute.arch.warp_idx())) % GROUP_WARPS, lane, *lane_place(lane))
    for i in cutlass.range(pipes[0].walk.num_pages + pipes[0].walk.token_tiles, unroll=1):
        for side, pipe in zip(sides, pipes):
            fill_tile(cfg, side, me, pipe, i)


@cute.jit
def fill_tile(cfg: cutlass.Constexpr[DecodeConfig], side: cutlass.Constexpr[TileSide], me: DequantThread, pipe: Pipe,
              i: Int32):
    """Tile ``i`` of a side."""
    tile_chunks = side.tile_bytes // (2 * CHUNK)
    out = cute.make_tensor(cute.recast_ptr(pipe.tile_smem, dtype=Float16), cute.make_layout(
        (CHUNK, tile_chunks, cfg.mma_groups), stride=(1, CHUNK, tile_chunks * CHUNK)))
    fill, pages = Uint32(i), pipe.walk.num_pages
    out = out[None, None, rings.stage(pipe.tiles, fill)]
    if i < pages:
        rings.wait_full(pipe.packed, fill)
        rings.wait_empty(pipe.tiles, fill)
        dequant_page(cfg, side, me, pipe.packed_smem, rings.stage(pipe.packed, fill), out)
        rings.release(pipe.packed, fill)
    else:
        tile = token_tile_of(pipe.walk, i - pages)
        rings.wait_empty(pipe.tiles, fill)
        for u in cutlass.range(UNITS, unroll=1):
            piece = Uint32(pages + (i - pages) * UNITS + u)
            rings.wait_full(pipe.packed, piece)
            copy_unit(cfg, side, me, pipe.packed_smem, rings.stage(pipe.packed, piece), out, Uint32(u),
                      Uint32(tile.live))
            rings.release(pipe.packed, piece)
    rings.publish(pipe.tiles, fill)


@cute.jit
def dequant_page(cfg: cutlass.Constexpr[DecodeConfig], side: cutlass.Constexpr[TileSide], me: DequantThread,
                 packed_smem: cute.Pointer, stage: Int32, out: cute.Tensor):
    """One part of a record -> one tile: this warp's runs of column tiles."""
    part = Part(packed_smem, stage, cfg.packed_stages, cfg.stage_bytes(side) // WORD)
    if cutlass.const_expr(side.runs == GROUP_WARPS):
        dequant_run(cfg, side, me, part, me.warp, out)
    else:
        for run in cutlass.range(Int32(me.warp), side.runs, GROUP_WARPS, unroll=1):
            dequant_run(cfg, side, me, part, Uint32(run), out)


def dequant_run(cfg: DecodeConfig, side: TileSide, me: DequantThread, part: Part, run: Uint32,
                out: cute.Tensor) -> None:
    """One run of column tiles: code * scale + zero, rounded once to the tile's type."""
    words = load_words(side, me, part, run)
    first_row, first_col = side.run_place(run)
    chunks = [tile_chunk(me.row + first_row, (first_col + c) * 2 + me.col8, side.tile_rows, side.atom_chunks)
              for c in range(side.run_cols)]
    store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), Float16)
    for block in range(side.meta_blocks):
        scale, zero = load_meta(side, me, part, run, block)
        for col_tile, row_tile, parts in side.registers(block):
            frag = cute.make_rmem_tensor(8, Float16)
            frag_words = cute.recast_tensor(frag, Uint32)
            for matrix, (row8, col8, word, shift, position) in enumerate(parts):
                codes = unpack_f16(words[word], shift, position, side.bits)
                at = side.meta_index(col_tile, row_tile, row8, col8)
                frag_words[matrix] = affine(cfg, side, codes, scale[at], zero[at])
            # 16 rows further on keep the swizzle
            cute.copy(store, frag, out[None, chunks[col_tile] + row_tile * layout.TILE * side.atom_chunks])


def load_words(side: TileSide, me: DequantThread, part: Part, run: Uint32) -> list[Uint32]:
    """This lane's words of a run."""
    width, split = side.width, layout.BLOCK_WORDS // side.width
    packed = cute.make_tensor(part.smem, cute.make_layout(
        (width, split, WARP, side.lane_words // layout.BLOCK_WORDS, part.stages),
        stride=(1, width, layout.BLOCK_WORDS, layout.BLOCK_WORDS * WARP, part.pitch)))
    words = cute.make_rmem_tensor((width, side.run_words // width), Uint32)
    for i in range(side.run_words // width):
        access = run * (side.run_words // width) + i
        within = access % split if split > 1 else 0
        cute.autovec_copy(packed[None, within, me.lane, access // split, part.stage], words[None, i])
    return [words[i] for i in range(side.run_words)]


def load_meta(side: TileSide, me: DequantThread, part: Part, run: Uint32, block: int):
    """(scales, zeros) of a block of rows of a run, by ``TileSide.meta_index``, as ``affine`` takes them."""
    count = side.meta_bytes // WORD
    meta = cute.make_tensor(part.smem + side.meta // WORD, cute.make_layout(
        (count, (side.nbytes - side.meta) // side.meta_bytes, part.stages),
        stride=(1, count, part.pitch)))
    loads = []
    for offset in side.meta_offsets(run, block, me.lane // 4, me.lane % 4):
        words = cute.make_rmem_tensor(count, Uint32)
        cute.autovec_copy(meta[None, Int32(offset // side.meta_bytes), part.stage], words)
        loads.append([words[j] for j in side.meta_words])
    return meta_values(side, loads)


def meta_values(side: TileSide, loads: list[list[Uint32]]):
    """(scales, zeros) of words of metadata: fp16 pairs of words, else fp32 of the low and of the high column."""
    if side.is_half:
        return half_meta(side, loads)
    wide = [[numbers.widen(word, side.storage) for word in load] for load in loads]
    if len(wide) == 1:  # (scale, zero) words of a row, the same for both columns
        return [(s, s) for s, _ in wide[0]], [(m, m) for _, m in wide[0]]
    if side.transposed:  # (scale, zero) words of the low and of the high column
        return tuple([(low[i], high[i]) for low, high in zip(*wide)] for i in (0, 1))
    return wide


def half_meta(side: TileSide, loads: list[list[Uint32]]):
    """Scales and zero-points as fp16 pairs of the low and the high column."""
    if not side.transposed and len(loads) == 2:
        return loads
    low, high = loads[0], loads[-1]
    return ([ptx.low_halves(a, b) for a, b in zip(low, high)], [ptx.high_halves(a, b) for a, b in zip(low, high)])


def affine(cfg: DecodeConfig, side: TileSide, codes: Uint32, scale, zero) -> Uint32:
    """code * scale + zero of two fp16 codes, in the tile's type, one rounding but for fp32's own."""
    if side.is_half:
        return ptx.fma_f16x2(codes, scale, zero)
    values = [code * s + m for code, s, m in zip(numbers.widen(codes, "float16"), scale, zero)]
    if cfg.dtype == "float16":
        values = [finite_f16(x) for x in values]
    return numbers.pack(*values, numbers.ELEMENT[cfg.dtype])


def finite_f16(x: Float32) -> Float32:
    """x within fp16's range: bf16 metadata reach beyond it, and an Inf times P = 0 is a NaN. A NaN stays."""
    x = cutlass.select_(x > Float32(FP16_MAX), Float32(FP16_MAX), x)
    return cutlass.select_(x < Float32(-FP16_MAX), Float32(-FP16_MAX), x)


@cute.jit
def copy_unit(cfg: cutlass.Constexpr[DecodeConfig], side: cutlass.Constexpr[TileSide], me: DequantThread,
              packed_smem: cute.Pointer, stage: Int32, out: cute.Tensor, unit: Uint32, live: Uint32):
    """32 rows of 16 bit -> their part of a tile; V is transposed and its tokens from ``live`` on are zeroed."""
    row_chunks = cfg.row_pitch // (2 * CHUNK)
    rows = cute.make_tensor(cute.recast_ptr(packed_smem, dtype=Float16), cute.make_layout(
        (CHUNK, row_chunks, UNIT_TOKENS, cfg.packed_stages),
        stride=(1, CHUNK, cfg.row_pitch // 2, cfg.stage_bytes(side) // 2)))
    load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(side.transposed, 4), Float16)
    store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), Float16)
    row8, i8 = me.row // 8, me.lane % 8
    for j in cutlass.range_constexpr(unit_tiles(side) // GROUP_WARPS):
        token_tile, channel_tile = unit_tile(side, me.warp, j)
        token8 = unit * (UNIT_TOKENS // 8) + 2 * token_tile  # the tile's first token, in eights
        frag = cute.make_rmem_tensor(8, Float16)
        if cutlass.const_expr(side.transposed):
            token = token_tile * layout.TILE + me.col8 * 8 + i8
            cute.copy(load, rows[None, 2 * channel_tile + row8, token, stage], frag)
            numbers.zero_dead(frag, token8 * 8 + 2 * (me.lane % 4), live)
            chunk = tile_chunk(channel_tile * layout.TILE + me.row, token8 + me.col8, side.tile_rows,
                               side.atom_chunks)
        else:
            cute.copy(load, rows[None, 2 * channel_tile + me.col8, token_tile * layout.TILE + me.row, stage], frag)
            chunk = tile_chunk(token8 * 8 + me.row, 2 * channel_tile + me.col8, side.tile_rows, side.atom_chunks)
        cute.copy(store, frag, out[None, chunk])


def unit_tiles(side: TileSide) -> int:
    """16x16 tiles of a unit of 16-bit rows."""
    return UNIT_TOKENS * side.head_dim // layout.TILE**2


def unit_tile(side: TileSide, warp, j: int):
    """(token tile, channel tile) of the ``j``-th tile of a unit that a warp copies; channel tiles run fastest."""
    channel_tiles = side.head_dim // layout.TILE
    if channel_tiles % GROUP_WARPS == 0:
        return GROUP_WARPS * j // channel_tiles, GROUP_WARPS * j % channel_tiles + warp
    tile = GROUP_WARPS * j + warp
    return tile // channel_tiles, tile % channel_tiles
