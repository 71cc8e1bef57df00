"""The tokens that are in 16 bit on both sides: sinks, then the residual, by the warps of the last split."""

from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn.ampere import load, mma, softmax


class Tokens(NamedTuple):
    """16-bit K and V of a sequence and KV head, and which of them are live."""

    sink_k: Any  # dtype [batch, num_heads_kv, sinks, head_dim]
    sink_v: Any
    ring_k: Any  # dtype [batch, num_heads_kv, slots, head_dim]; token n_sink + r in slot r % slots
    ring_v: Any
    seq: Any
    head: Any
    num_sink: Any
    num_packed: Any  # tokens of K in pages
    num_tok: Any
    slots_k: Any
    slots_v: Any


@T.macro
def walk(config, tokens, ring, warp, lane, regs, ops, softmax_scale_log2):
    """Tiles of 16-bit tokens dealt out to the warps; K of a tile in the warp's slot 0, V in slot 1.

    No residual tile wraps around a ring: packed tokens come in 128s, and the rings are multiples of 64.
    """
    size, tiles = config.tile16_tokens, config.tile16_tokens // 16
    seq, head = tokens.seq, tokens.head
    slot = T.alloc_var("int32")
    slot = warp * config.slots
    sink_tiles = T.alloc_var("int32")
    sink_tiles = T.truncdiv(tokens.num_sink + (size - 1), size)
    residual = T.alloc_var("int32")
    residual = tokens.num_tok - tokens.num_sink - tokens.num_packed
    live = T.alloc_var("int32")
    at = T.alloc_var("int32")
    count = T.alloc_var("int32")
    count = T.truncdiv(sink_tiles + T.truncdiv(residual + (size - 1), size) - warp + (config.warps - 1), config.warps)
    for i in T.serial(count):
        tile = warp + i * config.warps
        if tile < sink_tiles:
            at = tile * size
            live = tokens.num_sink - at
            load.issue_tokens(config, tokens.sink_k, seq, head, at, live, ring.halves, slot, lane)
            load.issue_tokens(config, tokens.sink_v, seq, head, at, live, ring.halves, slot + 1, lane)
        else:
            at = (tile - sink_tiles) * size
            live = residual - at
            at = tokens.num_packed + at
            load.issue_tokens(config, tokens.ring_k, seq, head, T.truncmod(at, tokens.slots_k), live, ring.halves,
                              slot, lane)
            load.issue_tokens(config, tokens.ring_v, seq, head, T.truncmod(at, tokens.slots_v), live, ring.halves,
                              slot + 1, lane)
        T.ptx_commit_group()
        T.ptx_wait_group(0)
        T.sync_warp()
        mma.clear(ops.acc_s, 4 * tiles * config.columns)
        mma.tokens_qk(config, ring.halves, slot, lane, ops)
        softmax.scale_scores(config, ops.acc_s, tiles, softmax_scale_log2)
        softmax.mask_scores(config, ops.acc_s, tiles, live, lane // 4)
        softmax.online_softmax(config, ops.acc_s, tiles, regs, T.float32(1.0), 0, None, 0)
        mma.probabilities(config, ops, tiles)
        mma.tokens_pv(config, ring.halves, slot + 1, lane, ops, 0, regs.acc_o)
        T.sync_warp()
