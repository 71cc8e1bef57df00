"""The two multiplies of one warp: S^T = K Q^T and O^T = V^T P^T by m16n8k16, query rows on the N side.

K and V^T are the A operand: packed ones come from registers (dequant), 16-bit ones through ldmatrix. Q^T stays in
registers as B operand; P^T becomes one by movmatrix.
"""

import tilelang.language as T

from lowbit_attn.ampere import dequant
from lowbit_attn.ampere.config import static
from lowbit_attn.ampere.load import swizzled

MOVMATRIX = "cute::SM75_U32x1_MOVM_T::copy"  # transposes one 8x8 matrix of halves across the warp
MOVMATRIX_FLAGS = ("-include", "cute/arch/copy_sm75.hpp")


def row_access(lane, tile, column_tile, row_accesses):
    """16-byte access of a lane's ldmatrix row for K: matrices a0 .. a3 are tokens + 8, then channels + 8."""
    return swizzled(16 * tile + lane % 16, 2 * column_tile + lane // 16, row_accesses)


def row_access_transposed(lane, token_tile, channel_tile, row_accesses):
    """The same for V, transposed while it is loaded: matrices a0 .. a3 are channels + 8, then tokens + 8."""
    return swizzled(16 * token_tile + 8 * (lane // 16) + lane % 8, 2 * channel_tile + lane // 8 % 2, row_accesses)


def step_offset(b, step: int) -> int:
    """Where a step of B starts, in elements: the offsets of ptx_mma count what the array was allocated as.

    An array with views of other types is allocated as any one of them, so B must be an array without views.
    """
    return step * (2 if b.dtype == "uint32" else 4)


@T.macro
def clear(acc, tiles):
    for i in static(4 * tiles):
        acc[i] = T.float32(0.0)


@T.macro
def multiply(a, b, step, acc, tile):
    """acc[tile] += A (4 registers) times step ``step`` of B (2 registers a step)."""
    T.ptx_mma("float32", "m16n8k16", "row", "col", "fp16", "fp16", "fp32", a.data, 0, b.data, step_offset(b, step),
              acc.data, 4 * tile, T.bool(False))


@T.macro
def packed_qk(config, ring, slot, lane, magic, regs, q, acc_s):
    """S^T += K Q^T over the 128 tokens of a packed K part."""
    piece = config.k
    for pair in static(piece.column_pairs):
        dequant.load_channel_meta(piece, ring, slot, pair, lane % 4, config.head_dim, regs.scale, regs.zero)
        for load, tiles in dequant.pair_loads(pair, piece.rows, piece.bits):
            dequant.load_words(ring, slot, dequant.code_access(load, lane), regs.words)
            for tile in tiles:
                dequant.dequant_tile(tile, regs.words, magic, regs.scale_h, regs.zero_h, regs.a, regs.a_h)
                multiply(regs.a, q, tile.column_tile, acc_s, tile.row_tile)


@T.macro
def packed_pv(config, ring, slot, lane, magic, regs, p, acc_o):
    """O^T += V^T P^T over the 128 tokens of a packed V part."""
    piece = config.v
    for pair in static(piece.column_pairs):
        dequant.load_token_meta(piece, ring, slot, pair, lane % 4, regs.pairs, regs.scale, regs.zero)
        for load, tiles in dequant.pair_loads(pair, piece.rows, piece.bits):
            dequant.load_words(ring, slot, dequant.code_access(load, lane), regs.words)
            for tile in tiles:
                dequant.dequant_tile(tile, regs.words, magic, regs.scale_h, regs.zero_h, regs.a, regs.a_h)
                multiply(regs.a, p, tile.column_tile, acc_o, tile.row_tile)


@T.macro
def tokens_qk(config, ring_h, slot, lane, regs, q, acc_s):
    """S^T += K Q^T over one tile of 16-bit tokens."""
    for column_tile in static(config.head_dim // 16):
        for tile in static(config.tile16_tokens // 16):
            T.ptx_ldmatrix(
                T.bool(False), 4,
                T.access_ptr(ring_h[slot, row_access(lane, tile, column_tile, config.row_accesses), 0], "r", 8),
                T.access_ptr(regs.a_h[0], "w", 8))
            multiply(regs.a, q, column_tile, acc_s, tile)


@T.macro
def tokens_pv(config, ring_h, slot, lane, regs, p, acc_o):
    """O^T += V^T P^T over one tile of 16-bit tokens."""
    for tile in static(config.tile16_tokens // 16):
        for channel_tile in static(config.head_dim // 16):
            access = row_access_transposed(lane, tile, channel_tile, config.row_accesses)
            T.ptx_ldmatrix(T.bool(True), 4, T.access_ptr(ring_h[slot, access, 0], "r", 8),
                           T.access_ptr(regs.a_h[0], "w", 8))
            multiply(regs.a, p, tile, acc_o, channel_tile)


@T.macro
def probabilities(acc_s, tiles, half, half_h, p):
    """P^T in accumulator order (fp32) -> B operand (two registers of fp16 pairs a 16-token step)."""
    for i in static(2 * tiles):
        for v in T.vectorized(2):
            half_h[v] = T.cast(acc_s[2 * i + v], "float16")
        T.call_extern("handle", MOVMATRIX, half[0], p[i])
