"""Load role: one warp for K and one for V bring packed parts and 16-bit rows into the side's ring."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from lowbit_attn.hopper.common.abi import clamp_unit, token_offset
from lowbit_attn.hopper.tile import ring as rings
from lowbit_attn.hopper.tile.config import UNIT_TOKENS, UNITS, WARP, WORD, DecodeConfig, TileSide
from lowbit_attn.hopper.tile.ring import StageRing
from lowbit_attn.hopper.tile.walk import TileWalk, token_tile_of

UNIT_WORDS = 32  # 32-bit words in one unit (128 bytes) of the pool


class Source(NamedTuple):
    """Global memory of one side, and where this CTA's KV head lies in it."""

    pool: cute.Tensor  # (units, 32) uint32
    table: cute.Tensor  # (entries) int32
    sink: cute.Tensor  # (rows, h_k, sinks, d)
    ring: cute.Tensor  # (rows, h_k, ring, d)
    ring_row: Int32  # of sink and ring
    head_idx: Int32
    table_start: Int32
    page_stride: Int32
    head_stride: Int32


@cute.jit
def run(cfg: cutlass.Constexpr[DecodeConfig], side: cutlass.Constexpr[TileSide], src: Source, walk: TileWalk,
        packed: StageRing, packed_smem: cute.Pointer):
    """Fill the ring in the walk's order: one part of a record a page, UNITS pieces a 16-bit tile."""
    lane = cute.arch.lane_idx()
    fill = load_pages(cfg, side, src, walk, packed, packed_smem, lane)
    if cutlass.const_expr(side.transposed or cfg.token_parts == 1):
        for i in cutlass.range(walk.token_tiles, unroll=1):
            load_token_tile(cfg, side, src, walk, packed, packed_smem, lane, i, fill + Uint32(i * UNITS))
    else:
        for i in cutlass.range(walk.token_tiles * cfg.token_parts, unroll=1):
            load_token_tile(cfg, side, src, walk, packed, packed_smem, lane, i // cfg.token_parts,
                            fill + Uint32(i * UNITS))


@cute.jit
def load_pages(cfg: cutlass.Constexpr[DecodeConfig], side: cutlass.Constexpr[TileSide], src: Source, walk: TileWalk,
               packed: StageRing, packed_smem: cute.Pointer, lane: Int32):
    """One bulk copy a page; a lane looks up the page id of every 32nd page, 32 pages ahead at a time."""
    words = side.nbytes // WORD
    stages = cute.make_tensor(packed_smem, cute.make_layout((words, cfg.packed_stages),
                                                            stride=(1, cfg.stage_bytes(side) // WORD)))
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Uint32)
    head = src.pool.iterator.toint() + Int64(src.head_idx) * Int64(src.head_stride) * (UNIT_WORDS * WORD)
    fill = Uint32(0)
    page_id = Int32(0)
    for i in cutlass.range(walk.num_pages, unroll=1):
        if i % WARP == 0:
            if i + lane < walk.num_pages:
                page_id = src.table[src.table_start + walk.first_page + i + lane]
        unit = Int64(cute.arch.shuffle_sync(page_id, i % WARP)) * Int64(src.page_stride)
        record = cute.make_ptr(Uint32, head + unit * (UNIT_WORDS * WORD) + side.start, cute.AddressSpace.gmem,
                               assumed_align=UNIT_WORDS * WORD)
        part = cute.make_tensor(record, cute.make_layout(words))
        rings.wait_empty(packed, fill)
        with cute.arch.elect_one():
            rings.expect(packed, fill, side.nbytes)
            cute.copy(atom, part, stages[None, rings.stage(packed, fill)],
                      mbar_ptr=packed.full + rings.stage(packed, fill))
        fill += Uint32(1)
    return fill


@cute.jit
def load_token_tile(cfg: cutlass.Constexpr[DecodeConfig], side: cutlass.Constexpr[TileSide], src: Source,
                    walk: TileWalk, packed: StageRing, packed_smem: cute.Pointer, lane: Int32, i: Int32, fill: Uint32):
    """A 16-bit tile as UNITS pieces of 32 rows, a bulk copy for each live row; dead rows are not touched."""
    tile = token_tile_of(walk, i)
    words = cfg.row_bytes // WORD
    stages = cute.make_tensor(packed_smem, cute.make_layout(
        (words, UNIT_TOKENS, cfg.packed_stages), stride=(1, cfg.row_pitch // WORD, cfg.stage_bytes(side) // WORD)))
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Uint32)
    for u in cutlass.range(UNITS, unroll=1):
        live = clamp_unit(tile.live - u * UNIT_TOKENS, UNIT_TOKENS)
        start = tile.start + u * UNIT_TOKENS
        # The ring holds whole blocks of 64 tokens, so 32 aligned tokens never wrap around.
        base = src.ring.iterator.toint()
        of_row, of_head = Int64(src.ring.stride[0]), Int64(src.ring.stride[1])
        row = (walk.ring_start + start) % src.ring.shape[2]
        if tile.is_sink == 1:
            base = src.sink.iterator.toint()
            of_row, of_head = Int64(src.sink.stride[0]), Int64(src.sink.stride[1])
            row = start
        # anew for every piece: the role has no registers to keep it
        base = base + token_offset(of_row, of_head, src.ring_row, src.head_idx)
        rings.wait_empty(packed, fill + Uint32(u))
        with cute.arch.elect_one():
            rings.expect(packed, fill + Uint32(u), live * cfg.row_bytes)
        cute.arch.sync_warp()
        if lane < live:
            token = cute.make_ptr(Uint32, base + Int64(row + lane) * cfg.row_bytes, cute.AddressSpace.gmem,
                                  assumed_align=16)
            slot = rings.stage(packed, fill + Uint32(u))
            cute.copy(atom, cute.make_tensor(token, cute.make_layout(words)), stages[None, lane, slot],
                      mbar_ptr=packed.full + slot)
