"""A operands of WGMMA in registers: codes of a page, unpacked, scaled and shifted, or 16-bit rows by ldmatrix."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Int32, Uint32
from cutlass.cute.nvgpu import warp, warpgroup

from lowbit_attn import layout
from lowbit_attn.device import numbers
from lowbit_attn.hopper.tile import ring as rings
from lowbit_attn.hopper.tile.config import GROUP_WARPS, TILE_M, UNIT_TOKENS, UNITS, WARP, WORD
from lowbit_attn.hopper.tile.dequant import affine, meta_values, unpack_f16
from lowbit_attn.hopper.tile.mma import make_mma
from lowbit_attn.hopper.tile.ring import StageRing
from lowbit_attn.hopper.wgmma.config import BLOCK_UNITS, STEPS, OperandSide, WgmmaConfig
from lowbit_attn.registers import CHUNK, lane_place

UNIT_TILES = UNIT_TOKENS // layout.TILE
META_WORDS = 4  # of an access


class Packed(NamedTuple):
    """What an MMA group reads of a side."""

    ring: StageRing
    smem: cute.Pointer  # uint32


class Product(NamedTuple):
    """What a multiply has beside its A operand, which is made here."""

    acc: cute.Tensor
    b: cute.Tensor  # fragments of the B operand, by step


def multiplier(cfg: WgmmaConfig, is_added: bool = True) -> cute.TiledMma:
    """The multiply of all products; made where it is used, for the DSL carries what ``set`` changes along."""
    mma = make_mma(cfg.rows, numbers.ELEMENT[cfg.dtype])
    mma.set(warpgroup.Field.ACCUMULATE, is_added)
    return mma


def make_fragment(cfg: WgmmaConfig, rows: int, steps: int) -> cute.Tensor:
    """Registers of so many rows and steps of A."""
    return cute.make_rmem_tensor(multiplier(cfg).partition_shape_A((rows, layout.TILE * steps)),
                                 numbers.ELEMENT[cfg.dtype])


def place(side: OperandSide, block: int, register: int, step: int) -> int:
    """Word of such a fragment."""
    return register + 4 * (block + side.blocks * step)


class PairWords(NamedTuple):
    """What a lane reads for a pair of steps."""

    words: list  # codes, by step
    meta: list  # words of ``OperandSide.meta_accesses``


def load_pair(cfg: WgmmaConfig, side: OperandSide, packed: Packed, fill: Uint32, pair: int) -> PairWords:
    """Codes and metadata of column tiles 2 pair, 2 pair + 1 of a page."""
    stage, pitch = rings.stage(packed.ring, fill), cfg.stage_bytes(side) // WORD
    lane, own = Uint32(cute.arch.lane_idx()), own_warp()
    codes = cute.make_tensor(packed.smem, cute.make_layout(
        (side.warp_words, side.lane_words * WARP // side.warp_words, cfg.packed_stages),
        stride=(1, side.warp_words, pitch)))
    meta = cute.make_tensor(packed.smem + side.meta // WORD, cute.make_layout(
        (META_WORDS, (side.nbytes - side.meta) // (META_WORDS * WORD), cfg.packed_stages),
        stride=(1, META_WORDS, pitch)))
    found = []
    for step in range(STEPS):
        words = cute.make_rmem_tensor(side.warp_words, Uint32)
        cute.autovec_copy(codes[None, Int32(side.access(STEPS * pair + step, own, lane)), stage], words)
        found.append([words[i] for i in range(side.warp_words)])
    loads = []
    for at in side.meta_accesses(pair, own, lane // 4, lane % 4):
        words = cute.make_rmem_tensor(META_WORDS, Uint32)
        cute.autovec_copy(meta[None, Int32(at), stage], words)
        loads.append([words[i] for i in range(META_WORDS)])
    return PairWords(found, loads)


def own_warp() -> Uint32:
    """This warp's number in its warpgroup."""
    return Uint32(cute.arch.make_warp_uniform(cute.arch.warp_idx())) % GROUP_WARPS


def unpack(cfg: WgmmaConfig, side: OperandSide, pair: PairWords) -> cute.Tensor:
    """The A operand of a pair of steps: code * scale + zero-point."""
    a = make_fragment(cfg, side.rows, STEPS)
    a_words = cute.recast_tensor(a, Uint32)
    scale, zero = meta_values(side, pair.meta)
    for step, words in enumerate(pair.words):
        if side.sharing_warps > 1:
            words = [words[0] >> side.warp_shift(own_warp())]
        for block, register, word, shift, position in side.positions():
            at = side.meta_word(block, register, step)
            a_words[place(side, block, register, step)] = affine(
                cfg, side, unpack_f16(words[word], shift, position, side.bits), scale[at], zero[at])
    return a


def multiply_page(cfg: WgmmaConfig, side: OperandSide, packed: Packed, fill: Uint32, product: Product, is_fresh: bool,
                  first: PairWords) -> None:
    """acc (+)= the page's matrix b^T; waited for. first: what ``load_pair`` has read of pair 0.

    While a pair of steps multiplies the next one is unpacked, and what the one after it needs is on its way.
    """
    pairs, now = side.col_tiles // STEPS, first
    for pair in range(pairs):
        a = unpack(cfg, side, now)
        if pair + 1 < pairs:
            now = load_pair(cfg, side, packed, fill, pair + 1)
        else:
            rings.release(packed.ring, fill)
        issue(cfg, product, a, STEPS * pair, is_fresh and pair == 0)
        warpgroup.wait_group(min(1, pairs - 1 - pair))


@cute.jit
def issue(cfg: cutlass.Constexpr[WgmmaConfig], product: Product, a: cute.Tensor, first: cutlass.Constexpr[int],
          is_fresh: cutlass.Constexpr[bool]):
    """acc (+)= a b^T over a's steps, from step ``first`` of b on, as one group; not waited for."""
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(multiplier(cfg, not is_fresh or k > 0), product.acc, a[None, None, k],
                  product.b[None, None, first + k], product.acc)
    warpgroup.commit_group()


class UnitRows(NamedTuple):
    """16-bit rows in a ring, as matrices of 8 rows and 8 columns."""

    rows: cute.Tensor  # (8, chunks, tokens, stages)
    load: object  # ldmatrix


def token_rows(cfg: WgmmaConfig, side: OperandSide, packed: Packed) -> UnitRows:
    rows = cute.make_tensor(cute.recast_ptr(packed.smem, dtype=Float16), cute.make_layout(
        (CHUNK, cfg.row_pitch // (2 * CHUNK), UNIT_TOKENS, cfg.packed_stages),
        stride=(1, CHUNK, cfg.row_pitch // 2, cfg.stage_bytes(side) // 2)))
    return UnitRows(rows, cute.make_copy_atom(warp.LdMatrix8x8x16bOp(side.transposed, 4), Float16))


def load_tile(rows: UnitRows, chunk, token, stage: Int32) -> cute.Tensor:
    """Registers of a 16x16 tile of A, of which this lane addresses such a row of eight."""
    frag = cute.make_rmem_tensor(8, Float16)
    cute.copy(rows.load, rows.rows[None, chunk, token, stage], frag)
    return frag


@cute.jit
def multiply_keys(cfg: cutlass.Constexpr[WgmmaConfig], packed: Packed, fill: Uint32, product: Product):
    """acc = K Q^T of a 16-bit tile, 64 tokens at a time, which are the pieces of a block; waited for.

    A warp has row tile ``own`` of each block, as ``WgmmaConfig.of_tokens`` says.
    """
    side = cfg.k
    lane = Uint32(cute.arch.lane_idx())
    own = own_warp()
    row, col8 = lane_place(lane)
    rows = token_rows(cfg, side, packed)
    for block in cutlass.range_constexpr(side.blocks):
        for unit in cutlass.range_constexpr(BLOCK_UNITS):
            rings.wait_full(packed.ring, fill + Uint32(BLOCK_UNITS * block + unit))
        stage = rings.stage(packed.ring, fill + BLOCK_UNITS * block + own // UNIT_TILES)
        a = make_fragment(cfg, TILE_M, side.col_tiles)
        a_words = cute.recast_tensor(a, Uint32)
        for step in cutlass.range_constexpr(side.col_tiles):
            words = cute.recast_tensor(
                load_tile(rows, 2 * step + col8, layout.TILE * (own % UNIT_TILES) + row, stage), Uint32)
            for register in cutlass.range_constexpr(4):
                a_words[4 * step + register] = words[register]
        for unit in cutlass.range_constexpr(BLOCK_UNITS):
            rings.release(packed.ring, fill + Uint32(BLOCK_UNITS * block + unit))
        issue(cfg, Product(block_of(cfg, product.acc, block), product.b), a, 0, True)
        warpgroup.wait_group(0)


def block_of(cfg: WgmmaConfig, acc: cute.Tensor, block: int) -> cute.Tensor:
    """Accumulators of one block of 64 rows."""
    shape = multiplier(cfg).partition_shape_C((TILE_M, cfg.rows))
    return cute.make_tensor(acc.iterator + block * cute.size(shape), cute.make_layout(shape))


@cute.jit
def multiply_values(cfg: cutlass.Constexpr[WgmmaConfig], packed: Packed, fill: Uint32, live: Uint32, product: Product):
    """acc += V^T P^T of a 16-bit tile, piece by piece; tokens from ``live`` on are zeroed. Waited for."""
    side = cfg.v
    lane = Uint32(cute.arch.lane_idx())
    own = own_warp()
    row, col8 = lane_place(lane)
    rows = token_rows(cfg, side, packed)
    for unit in cutlass.range_constexpr(UNITS):
        piece = fill + Uint32(unit)
        rings.wait_full(packed.ring, piece)
        a = make_fragment(cfg, side.rows, UNIT_TILES)
        a_words = cute.recast_tensor(a, Uint32)
        for step in cutlass.range_constexpr(UNIT_TILES):
            for block in cutlass.range_constexpr(side.blocks):
                chunk = 2 * (own * side.blocks + block) + row // 8
                frag = load_tile(rows, chunk, layout.TILE * step + col8 * 8 + lane % 8,
                                 rings.stage(packed.ring, piece))
                numbers.zero_dead(frag, Uint32(UNIT_TOKENS * unit + layout.TILE * step) + 2 * (lane % 4), live)
                words = cute.recast_tensor(frag, Uint32)
                for register in cutlass.range_constexpr(4):
                    a_words[place(side, block, register, step)] = words[register]
        rings.release(packed.ring, piece)
        issue(cfg, product, a, UNIT_TILES * unit, False)
        warpgroup.wait_group(0)
