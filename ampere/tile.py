"""Steps of the tile path: scale and zero-point are applied to every code, in registers, before the multiply."""

from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn.ampere import dequant, mma, softmax
from lowbit_attn.ampere.config import DecodeConfig, static

VALUES_BEFORE_SOFTMAX = False  # the V part is only needed after the softmax
SASS_NEED = ("LDGSTS", "LDSM", "HMMA", "MOVM")


class Registers(NamedTuple):
    """A thread's register arrays (_h: the same registers as fp16)."""

    words: Any
    scale: Any
    scale_h: Any
    zero: Any
    zero_h: Any
    pairs: Any
    a: Any
    a_h: Any
    magic: Any
    z: Any  # none: O needs nothing added


def allocate(config: DecodeConfig, thread) -> Registers:
    """Registers of the path."""
    words, pairs = T.alloc_local((4,), "uint32"), T.alloc_local((8,), "uint32")
    scale, zero, a = (T.alloc_local((4,), "uint32") for _ in range(3))
    views = (T.view(x, (8,), config.dtype) for x in (scale, zero, a))
    scale_h, zero_h, a_h = views
    return Registers(words, scale, scale_h, zero, zero_h, pairs, a, a_h, T.alloc_local((1,), "uint32"), None)


@T.macro
def start(config, q, rows, warp, lane, ops, work, num_splits):
    # x & mask | magic is one LOP3 only if one of the constants is in a register: hide its value
    work.magic[0] = T.uint32(dequant.MAGIC) + T.cast(T.shift_right(num_splits, 31), "uint32")
    mma.load_query(config, q, rows, lane, ops.rows)


@T.macro
def scores(config, ring, slot, lane, work, ops, softmax_scale_log2):
    """Logits of the 128 tokens of a packed K part in ops.acc_s."""
    piece = config.k
    mma.clear(ops.acc_s, 4 * piece.row_tiles)
    for pair in static(piece.column_pairs):
        dequant.load_channel_meta(piece, ring, slot, pair, lane % 4, config.head_dim, work.scale, work.zero)
        for load, tiles in dequant.pair_loads(pair, piece.rows, piece.bits):
            dequant.load_words(ring, slot, dequant.code_access(load, lane), work.words)
            for tile in tiles:
                dequant.dequant_tile(tile, work.words, work.magic[0], work.scale_h, work.zero_h, work.a, work.a_h)
                mma.multiply(config.dtype, work.a, ops.rows, tile.column_tile, ops.acc_s, tile.row_tile)
    softmax.scale_scores(config, ops.acc_s, piece.row_tiles, softmax_scale_log2)


@T.macro
def lower_exponent(config, ring, slot, lane, work, o_factor, moved):
    """O has its true scale here."""
    o_factor[0] = T.float32(1.0)
    moved[0] = 0


@T.macro
def values(config, ring, slot, lane, work, ops, acc_o):
    """O^T += V^T P^T over the 128 tokens of a packed V part."""
    piece = config.v
    mma.probabilities(config, ops, config.k.row_tiles)
    for pair in static(piece.column_pairs):
        dequant.load_token_meta(piece, ring, slot, pair, lane % 4, work.pairs, work.scale, work.zero)
        for load, tiles in dequant.pair_loads(pair, piece.rows, piece.bits):
            dequant.load_words(ring, slot, dequant.code_access(load, lane), work.words)
            for tile in tiles:
                dequant.dequant_tile(tile, work.words, work.magic[0], work.scale_h, work.zero_h, work.a, work.a_h)
                mma.multiply(config.dtype, work.a, ops.p, tile.column_tile, acc_o, tile.row_tile)


@T.macro
def finish(config, work, acc_o):
    """O has its true scale already."""
    T.sync_warp()


@T.macro
def query_for_tokens(config, q, rows, lane, ops):
    """Q is still in registers."""
    T.sync_warp()
