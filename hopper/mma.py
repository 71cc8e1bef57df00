"""MMA role: one warpgroup. S = Q K^T and O += P V with Q and P in registers, K and V^T tiles in shared memory."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from lowbit_attn.hopper import epilogue, softmax
from lowbit_attn.hopper import ring as rings
from lowbit_attn.hopper.config import GROUP_WARPS, TILE_M, TILE_N, WARP, DecodeConfig
from lowbit_attn.hopper.ring import Ring
from lowbit_attn.hopper.walk import Walk, plain_tile


class Heads(NamedTuple):
    """The query heads of this CTA: heads ``first .. first + count - 1`` of sequence ``batch_idx``."""

    batch_idx: Int32
    first: Int32
    count: Int32


def make_mma(tile_n: int) -> cute.TiledMma:
    """m64nNk16, fp16 with fp32 accumulators, A from registers, B K-major from shared memory."""
    return hopper_helpers.make_trivial_tiled_mma(
        Float16, Float16, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (TILE_M, tile_n),
        a_source=warpgroup.OperandSource.RMEM)


@cute.jit
def run(cfg: cutlass.Constexpr[DecodeConfig], walk: Walk, heads: Heads, q: cute.Tensor, sK: cute.Tensor,
        sVt: cute.Tensor, k_tiles: Ring, v_tiles: Ring, out: epilogue.Partial, scale_log2: Float32):
    """Attend to every tile of the walk, then write this split's partial result.

    S of a tile is issued while O of the tile before still runs, so one wait serves both.
    """
    thread = cute.arch.thread_idx()[0] - cfg.mma_group * GROUP_WARPS * WARP
    t = thread % 4
    mma_qk, mma_pv = make_mma(TILE_N), make_mma(cfg.head_dim)
    rQ = load_q(cfg, mma_qk, q, heads, thread)
    rP = cute.make_rmem_tensor(mma_pv.partition_shape_A((TILE_M, TILE_N)), Float16)
    rP.fill(0.0)
    rK = mma_qk.make_fragment_B(mma_qk.get_slice(0).partition_B(sK))
    rV = mma_pv.make_fragment_B(mma_pv.get_slice(0).partition_B(sVt))
    acc_s = cute.make_rmem_tensor(mma_qk.partition_shape_C((TILE_M, TILE_N)), Float32)
    acc_o = cute.make_rmem_tensor(mma_pv.partition_shape_C((TILE_M, cfg.head_dim)), Float32)
    acc_o.fill(0.0)
    mma_pv.set(warpgroup.Field.ACCUMULATE, True)
    row_max, row_sum = Float32(softmax.NEG_INF), Float32(0.0)
    for i in cutlass.range(walk.num_pages + walk.plain_tiles, unroll=1):
        fill = Uint32(i)
        # S = Q K^T
        rings.wait_full(k_tiles, fill)
        issue(mma_qk, acc_s, rQ, rK[None, None, None, rings.stage(k_tiles, fill)], True)
        warpgroup.wait_group(0)
        rings.release(k_tiles, fill)
        if i > 0:
            rings.release(v_tiles, fill - Uint32(1))
        # P = softmax(S), O scaled to the new maximum
        if i >= walk.num_pages:
            softmax.mask_columns(acc_s, plain_tile(walk, i - walk.num_pages).live, t)
        row_max, row_sum, correction = softmax.online_step(acc_s, rP, row_max, row_sum, scale_log2)
        softmax.rescale(acc_o, correction)
        # O += P V
        rings.wait_full(v_tiles, fill)
        issue(mma_pv, acc_o, rP, rV[None, None, None, rings.stage(v_tiles, fill)], False)
    warpgroup.wait_group(0)
    epilogue.write(out, heads, acc_o, row_max, softmax.quad_sum(row_sum), thread)


@cute.jit
def issue(tiled_mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor,
          is_fresh: cutlass.Constexpr[bool]):
    """acc (+)= a b^T over all k16 blocks as one group; not waited for."""
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        if cutlass.const_expr(is_fresh):
            tiled_mma.set(warpgroup.Field.ACCUMULATE, k > 0)
        cute.gemm(tiled_mma, acc, a[None, None, k], b[None, None, k], acc)
    warpgroup.commit_group()


@cute.jit
def load_q(cfg: cutlass.Constexpr[DecodeConfig], mma_qk: cute.TiledMma, q: cute.Tensor, heads: Heads,
           thread: Int32):
    """Q as the A operand: row g of warp 0 is query head g, all other rows are zero."""
    rQ = cute.make_rmem_tensor(mma_qk.partition_shape_A((TILE_M, cfg.head_dim)), Float16)
    rQ.fill(0.0)
    words = cute.recast_tensor(rQ, Uint32)
    row, t = thread // 4, thread % 4
    if row < heads.count:  # 8 rows at most, so threads of warp 0
        q_words = cute.recast_tensor(q, Uint32)
        for k in cutlass.range_constexpr(cfg.head_dim // 8):  # words of row g + 8 lie between those of row g
            words[2 * k] = q_words[heads.batch_idx, heads.first + row, 4 * k + t]
    return rQ
