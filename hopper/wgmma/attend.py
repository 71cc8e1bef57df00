"""MMA role: S^T = K Q^T and O^T += V^T P^T with K and V^T in registers, Q and P in shared memory.

Warpgroups take the tiles in turn, each with rings, a P and sums of its own. Softmax and the end are those of the tile
path's query rows as columns (tile/columns.py).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from lowbit_attn.device import numbers
from lowbit_attn.hopper.common import combine
from lowbit_attn.hopper.common.abi import Rows
from lowbit_attn.hopper.tile import columns
from lowbit_attn.hopper.tile import ring as rings
from lowbit_attn.hopper.tile.config import GROUP_WARPS, TILE_N, WARP
from lowbit_attn.hopper.tile.masks import LogitScale, Visible, to_logits
from lowbit_attn.hopper.tile.mma import Tiles, lane_of, stage_q
from lowbit_attn.hopper.tile.walk import TileWalk, token_tile_of
from lowbit_attn.hopper.wgmma import load, operands
from lowbit_attn.hopper.wgmma.config import WgmmaConfig
from lowbit_attn.hopper.wgmma.operands import Packed, Product, multiplier


@cute.jit
def run(cfg: cutlass.Constexpr[WgmmaConfig], group: Int32, walk: TileWalk, rows: Rows, visible: Visible,
        scores: LogitScale, q: cute.Tensor, tiles: Tiles, keys: Packed, values: Packed, out: combine.Outputs):
    """Attend to this group's tiles of the walk, join the groups' sums, then store and merge this split's result."""
    mma_thread = cute.arch.thread_idx()[0] - cfg.first_mma_group * GROUP_WARPS * WARP
    me = lane_of(mma_thread)
    stage_q(cfg, q, rows, mma_thread, tiles.q_smem)
    columns.barrier(tiles, 0)
    mma = multiplier(cfg)
    rQ = mma.make_fragment_B(mma.get_slice(0).partition_B(tiles.q))[None, None, None, 0]
    rP = mma.make_fragment_B(mma.get_slice(0).partition_B(tiles.p))[None, None, None, group]
    acc_s = cute.make_rmem_tensor(mma.partition_shape_C((TILE_N, cfg.rows)), Float32)
    acc_o = cute.make_rmem_tensor(mma.partition_shape_C((cfg.head_dim, cfg.rows)), Float32)
    acc_o.fill(0.0)
    maxima, sums = (cute.make_rmem_tensor(cfg.rows // 4, Float32) for _ in range(2))
    maxima.fill(numbers.LOWEST)
    sums.fill(0.0)
    of_s, of_o = Product(acc_s, rQ), Product(acc_o, rP)
    for i in cutlass.range(group, walk.num_pages, cfg.mma_groups, unroll=1):
        fill = Uint32(i // cfg.mma_groups)
        # S^T = K Q^T
        rings.wait_full(keys.ring, fill)
        first = operands.load_pair(cfg, cfg.k, keys, fill, 0)
        operands.multiply_page(cfg, cfg.k, keys, fill, of_s, True, first)
        # P = softmax(S), O^T scaled to the new maximum
        scale_log2 = to_logits(cfg, acc_s, walk, rows, visible, scores, me, i)
        columns.raise_maxima(cfg, me, group, tiles, acc_s, scale_log2, maxima, sums, acc_o)
        rings.wait_full(values.ring, fill)
        first = operands.load_pair(cfg, cfg.v, values, fill, 0)
        columns.store_weights(cfg, me, group, tiles, acc_s, scale_log2, maxima, sums)
        # O^T += V^T P^T
        operands.multiply_page(cfg, cfg.v, values, fill, of_o, False, first)
    ahead = group - walk.num_pages % cfg.mma_groups  # tiles from the last page to this group's first of 16 bit
    for i in cutlass.range(walk.num_pages + ahead + cfg.mma_groups * Int32(ahead < 0),
                           walk.num_pages + walk.token_tiles, cfg.mma_groups, unroll=1):
        fill = load.first_fill(cfg, walk, group, i)
        operands.multiply_keys(cfg, keys, fill, of_s)
        scale_log2 = to_logits(cfg.of_tokens, acc_s, walk, rows, visible, scores, me, i)
        columns.raise_maxima(cfg, me, group, tiles, acc_s, scale_log2, maxima, sums, acc_o)
        columns.store_weights(cfg.of_tokens, me, group, tiles, acc_s, scale_log2, maxima, sums)
        live = token_tile_of(walk, i - walk.num_pages).live
        operands.multiply_values(cfg, values, fill, Uint32(live), of_o)
    columns.share_sums(cfg, me, group, tiles, acc_o, maxima, sums)
    columns.barrier(tiles, 1)
    columns.store_partials(cfg, tiles, rows, out, mma_thread)
    if out.num_splits > 1:
        combine.merge(out, rows, cfg.mma_threads, mma_thread)
