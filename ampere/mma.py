"""What both paths multiply with: m16n8k16, query rows on the N side; S^T = K Q^T and O^T = V^T P^T of 16-bit tokens.

K and V^T are the A operand: packed ones come from registers (tile, register), 16-bit ones through ldmatrix. Q^T stays
in registers as B operand; P^T becomes one by movmatrix. A step of B is numbered (16-row step) * columns + column.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.ampere import queries
from lowbit_attn.ampere.config import DecodeConfig
from lowbit_attn.device.tokens import swizzled

MOVMATRIX = "cute::SM75_U32x1_MOVM_T::copy"  # transposes one 8x8 matrix of halves across the warp
MOVMATRIX_FLAGS = ("-include", "cute/arch/copy_sm75.hpp", "-include", "cutlass/arch/memory.h")
MMA_TYPE = {"float16": "fp16", "bfloat16": "bf16"}


class Operands(NamedTuple):
    """Register arrays of the multiplies of 16-bit data, all without views: see ``multiply``."""

    rows: Any  # Q^T as given, dtype [head_dim / 16, columns, 4]
    a: Any  # dtype [8]
    acc_s: Any  # fp32 [8 tiles of 16 tokens, columns, 4]
    p: Any  # P^T, uint32 [8 tiles, columns, 2]
    half: Any  # uint32 [1] ...
    half_v: Any  # ... and the same as dtype [2]
    rest: Any  # as ``rows``: what its rounding leaves of q; None where q comes in 16 bit


def operands(config: DecodeConfig) -> Operands:
    """Registers of the multiplies."""
    tiles = layout.PAGE_TOKENS // layout.TILE
    half = T.alloc_local((1,), "uint32")
    rest = T.alloc_local((4 * config.o_tiles * config.columns,), config.dtype) if config.query_parts == 2 else None
    return Operands(T.alloc_local((4 * config.o_tiles * config.columns,), config.dtype),
                    T.alloc_local((8,), config.dtype), T.alloc_local((4 * tiles * config.columns,), "float32"),
                    T.alloc_local((2 * tiles * config.columns,), "uint32"), half, T.view(half, (2,), config.dtype),
                    rest)


def row_access(lane, tile, column_tile, row_accesses):
    """16-byte access of a lane's ldmatrix row for K: matrices a0 .. a3 are tokens + 8, then channels + 8."""
    return swizzled(16 * tile + lane % 16, 2 * column_tile + lane // 16, row_accesses)


def row_access_transposed(lane, token_tile, channel_tile, row_accesses):
    """16-byte access of a lane's row for V, transposed: matrices a0 .. a3 are channels + 8, then tokens + 8."""
    return swizzled(16 * token_tile + 8 * (lane // 16) + lane % 8, 2 * channel_tile + lane // 8 % 2, row_accesses)


def step_offset(b, step):
    """Where a step of B starts, in elements: the offsets of ptx_mma count what the array was allocated as.

    An array with views of other types is allocated as any one of them, so B must be an array without views.
    """
    return step * (2 if b.dtype == "uint32" else 4)


@T.macro
def clear(acc, count):
    for i in T.unroll(count):
        acc[i] = T.float32(0.0)


@T.macro
def multiply(dtype, a, b, step, acc, tile):
    """acc[tile] += A (the 4 registers of ``a``) times step ``step`` of B (2 registers a step)."""
    T.ptx_mma("float32", "m16n8k16", "row", "col", MMA_TYPE[dtype], MMA_TYPE[dtype], "fp32", a.data, 0, b.data,
              step_offset(b, step), acc.data, 4 * tile, T.bool(False))


@T.macro
def load_query(config, q, rows, lane, b):
    """Q^T as B operand: lane 4g + t holds rows 8n + g, channels 2t, 2t + 1, + 8; rows beyond the last are zero."""
    query, head = T.alloc_var("int32"), T.alloc_var("int32")
    for i in T.unroll(2 * config.o_tiles * config.columns):
        for v in T.vectorized(2):
            b[2 * i + v] = T.cast(0, config.dtype)
    for column in T.unroll(config.columns):
        if 8 * column + lane // 4 < rows.count:
            query = queries.query(rows, 8 * column + lane // 4)
            head = queries.head(rows, 8 * column + lane // 4)
            for i in T.unroll(2 * config.o_tiles):
                for v in T.vectorized(2):
                    b[4 * (i // 2 * config.columns + column) + 2 * (i % 2) + v] = q[
                        rows.seq, query, head, 8 * i + 2 * (lane % 4) + v]


@T.macro
def tokens_qk(config, ring_h, slot, lane, ops):
    """S^T += K Q^T over one tile of 16-bit tokens."""
    for column_tile in T.unroll(config.o_tiles):
        for tile in T.unroll(config.tile16_tokens // 16):
            T.ptx_ldmatrix(
                T.bool(False), 4,
                T.access_ptr(ring_h[slot, row_access(lane, tile, column_tile, config.row_accesses), 0], "r", 8),
                T.access_ptr(ops.a[0], "w", 8))
            for n in T.unroll(config.columns):
                multiply(config.dtype, ops.a, ops.rows, column_tile * config.columns + n, ops.acc_s,
                         tile * config.columns + n)
                if config.query_parts == 2:
                    multiply(config.dtype, ops.a, ops.rest, column_tile * config.columns + n, ops.acc_s,
                             tile * config.columns + n)


@T.macro
def tokens_pv(config, ring_h, slot, lane, ops, first_tile, acc_o):
    """O^T += V^T P^T over one tile of 16-bit tokens; its P^T starts at token tile ``first_tile``."""
    for tile in T.unroll(config.tile16_tokens // 16):
        for channel_tile in T.unroll(config.o_tiles):
            access = row_access_transposed(lane, tile, channel_tile, config.row_accesses)
            T.ptx_ldmatrix(T.bool(True), 4, T.access_ptr(ring_h[slot, access, 0], "r", 8),
                           T.access_ptr(ops.a[0], "w", 8))
            for n in T.unroll(config.columns):
                multiply(config.dtype, ops.a, ops.p, (first_tile + tile) * config.columns + n, acc_o,
                         channel_tile * config.columns + n)


@T.macro
def probabilities(config, ops, tiles):
    """P^T in accumulator order (fp32) -> B operand (two registers of 16-bit pairs a step)."""
    for i in T.unroll(2 * tiles * config.columns):
        for v in T.vectorized(2):
            ops.half_v[v] = T.cast(ops.acc_s[2 * i + v % config.row_values], config.dtype)
        T.call_extern("handle", MOVMATRIX, ops.half[0], ops.p[i])
