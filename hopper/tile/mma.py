"""MMA role, many query rows: two warpgroups, or one, that take the tiles in turn. S = Q K^T, O += P V, K and V in
shared memory. P is in registers, and so is Q where O leaves room for it.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from lowbit_attn.device.numbers import ELEMENT, LOWEST
from lowbit_attn.formats.spec import Kind
from lowbit_attn.hopper.common import combine
from lowbit_attn.hopper.common.abi import Rows, query_and_head
from lowbit_attn.hopper.common.book_abi import ORDER_PLANE
from lowbit_attn.hopper.tile import epilogue, softmax
from lowbit_attn.hopper.tile import ring as rings
from lowbit_attn.hopper.tile.config import (
    CHUNK,
    GROUP_WARPS,
    MAX_N,
    TILE_M,
    TILE_N,
    WARP,
    DecodeConfig,
    TileSide,
    tile_chunk,
)
from lowbit_attn.hopper.tile.masks import LogitScale, MmaThread, Visible, to_logits
from lowbit_attn.hopper.tile.ring import StageRing
from lowbit_attn.hopper.tile.walk import TileWalk

GROUP_BARRIER = 1  # named, of one MMA warpgroup; 0 is the CTA's
HALVES = 2  # rows of the accumulators that a thread has values of


class Tiles(NamedTuple):
    """Operands in shared memory: tiles of K and V for each MMA group, Q and P where they are not in registers."""

    k: cute.Tensor  # (128, head_dim, mma_groups)
    v: cute.Tensor  # (head_dim, 128, mma_groups); channels contiguous where V has a codebook
    k_smem: cute.Pointer  # the same memory
    v_smem: cute.Pointer
    joined: cute.Pointer  # mbarrier
    q_smem: cute.Pointer | None
    q: cute.Tensor | None  # (64 or columns, head_dim, 1)
    p_smem: cute.Pointer | None
    p: cute.Tensor | None  # (columns, 128, mma_groups)
    maxima: cute.Pointer | None  # fp32 (4, columns, mma_groups): maxima of a group's warps


def lane_of(mma_thread: Int32) -> MmaThread:
    """Place of one of the MMA groups' threads."""
    thread = mma_thread % (GROUP_WARPS * WARP)
    lane = thread % WARP
    return MmaThread(thread, thread // WARP, lane // 4, lane % 4)


def make_mma(tile_n: int, element, is_a_shared: bool = False, b_major=OperandMajorMode.K) -> cute.TiledMma:
    """m64nNk16, fp32 accumulators, A from registers or K-major from shared memory, B from shared memory."""
    source = warpgroup.OperandSource.SMEM if is_a_shared else warpgroup.OperandSource.RMEM
    return hopper_helpers.make_trivial_tiled_mma(
        element, element, OperandMajorMode.K, b_major, Float32, (1, 1, 1), (TILE_M, tile_n), a_source=source)


def make_mma_pv(cfg: DecodeConfig) -> cute.TiledMma:
    """O += P V: V^T is K-major, but where its tile has tokens as rows."""
    major = OperandMajorMode.MN if cfg.v.kind is Kind.CODEBOOK else OperandMajorMode.K
    return make_mma(min(cfg.head_dim, MAX_N), ELEMENT[cfg.dtype], b_major=major)


@cute.jit
def run(cfg: cutlass.Constexpr[DecodeConfig], group: Int32, walk: TileWalk, rows: Rows, visible: Visible,
        scores: LogitScale, q: cute.Tensor, tiles: Tiles, k_tiles: StageRing, v_tiles: StageRing, out: combine.Outputs,
        channels: cute.Tensor | None = None):
    """Attend to this group's tiles of the walk, join the groups' sums, then store and merge this split's result.

    channels: book_abi.Books.channels where K has a codebook.
    """
    element = ELEMENT[cfg.dtype]
    mma_thread = cute.arch.thread_idx()[0] - cfg.first_mma_group * GROUP_WARPS * WARP
    me = lane_of(mma_thread)
    mma_qk, mma_pv = make_mma(TILE_N, element, cfg.is_wide), make_mma_pv(cfg)
    if cutlass.const_expr(cfg.is_wide):
        stage_q(cfg, q, rows, me.thread, tiles.q_smem)
        cute.arch.barrier(barrier_id=GROUP_BARRIER, number_of_threads=GROUP_WARPS * WARP)
        rQ = mma_qk.make_fragment_A(mma_qk.get_slice(0).partition_A(tiles.q))[None, None, None, 0]
    else:
        rQ = load_q(cfg, mma_qk, q, rows, me, channels)
    rP = cute.make_rmem_tensor(mma_pv.partition_shape_A((TILE_M, TILE_N)), element)
    rK = mma_qk.make_fragment_B(mma_qk.get_slice(0).partition_B(tiles.k))[None, None, None, group]
    rV = mma_pv.make_fragment_B(mma_pv.get_slice(0).partition_B(tiles.v))[None, None, None, group]
    acc_s = cute.make_rmem_tensor(mma_qk.partition_shape_C((TILE_M, TILE_N)), Float32)
    acc_o = cute.make_rmem_tensor(mma_pv.partition_shape_C((TILE_M, cfg.head_dim)), Float32)
    acc_o.fill(0.0)
    mma_pv.set(warpgroup.Field.ACCUMULATE, True)
    mma_more = None
    if cutlass.const_expr(cfg.token_parts > 1):
        mma_more = make_mma(TILE_N, element)
        mma_more.set(warpgroup.Field.ACCUMULATE, True)
    row_max, row_sum = (cute.make_rmem_tensor(HALVES, Float32) for _ in range(2))
    row_max.fill(LOWEST)
    row_sum.fill(0.0)
    for i in cutlass.range(group, walk.num_pages + walk.token_tiles, cfg.mma_groups, unroll=1):
        fill = Uint32(i)
        # S = Q K^T
        if cutlass.const_expr(cfg.token_parts == 1):
            rings.wait_full(k_tiles, fill)
            issue(mma_qk, acc_s, rQ, rK, True)
            warpgroup.wait_group(0)
            rings.release(k_tiles, fill)
        else:
            multiply_parts(mma_qk, mma_more, acc_s, rQ, rK, k_tiles, walk, i)
        # P = softmax(S), O scaled to the new maximum
        scale_log2 = to_logits(cfg, acc_s, walk, rows, visible, scores, me, i)
        for half in cutlass.range_constexpr(HALVES):
            correction = softmax.online_step(half, acc_s, rP, row_max, row_sum, scale_log2, element)
            softmax.rescale(half, acc_o, correction)
        # O += P V
        rings.wait_full(v_tiles, fill)
        issue(mma_pv, acc_o, rP, rV, False)
        warpgroup.wait_group(0)
        rings.release(v_tiles, fill)
    if cutlass.const_expr(cfg.mma_groups == 2):
        join_groups(cfg, tiles, group, me.thread, acc_o, row_max, row_sum)
    if group == 0:
        for half in cutlass.range_constexpr(HALVES):
            write_row(half, out, rows, me, acc_o, row_max[half], softmax.quad_sum(row_sum[half]))
    if out.num_splits > 1:
        combine.merge(out, rows, cfg.mma_threads, mma_thread, most_lanes_log2=0)


@cute.jit
def multiply_parts(mma_qk: cute.TiledMma, mma_more: cute.TiledMma, acc_s: cute.Tensor, rQ: cute.Tensor,
                   rK: cute.Tensor, k_tiles: StageRing, walk: TileWalk, i: Int32):
    """S = Q K^T of tile i, where keys of a 16-bit tile are the sum of two tiles that follow each other."""
    tokens = i - walk.num_pages
    fill = Uint32(i + tokens * Int32(tokens > 0))
    rings.wait_full(k_tiles, fill)
    issue(mma_qk, acc_s, rQ, rK, True)
    warpgroup.wait_group(0)
    rings.release(k_tiles, fill)
    if tokens >= 0:
        rings.wait_full(k_tiles, fill + Uint32(1))
        issue(mma_more, acc_s, rQ, rK, False)
        warpgroup.wait_group(0)
        rings.release(k_tiles, fill + Uint32(1))


@cute.jit
def join_groups(cfg: cutlass.Constexpr[DecodeConfig], tiles: Tiles, group: Int32, thread: Int32, acc_o: cute.Tensor,
                row_max: cute.Tensor, row_sum: cute.Tensor):
    """Group 1's sums to group 0, through the tiles that only group 1 has read: O through K's, the rest through V's."""
    count = cute.size(acc_o)
    sums = second_tile(tiles.k_smem, cfg.k, count)
    pairs = second_tile(tiles.v_smem, cfg.v, 2 * HALVES)
    if group == 1:
        cute.arch.barrier(barrier_id=GROUP_BARRIER, number_of_threads=GROUP_WARPS * WARP)  # no warp reads them now
        for i in cutlass.range_constexpr(count):
            sums[thread, i] = acc_o[i]
        for half in cutlass.range_constexpr(HALVES):
            pairs[thread, 2 * half], pairs[thread, 2 * half + 1] = row_max[half], row_sum[half]
        cute.arch.mbarrier_arrive(tiles.joined)
    else:
        cute.arch.mbarrier_wait(tiles.joined, 0)
        for half in cutlass.range_constexpr(HALVES):
            top = cute.arch.fmax(row_max[half], pairs[thread, 2 * half])
            own, other = combine.weight(row_max[half], top), combine.weight(pairs[thread, 2 * half], top)
            row_max[half] = top
            row_sum[half] = row_sum[half] * own + pairs[thread, 2 * half + 1] * other
            for i in softmax.row_values(count, half):
                acc_o[i] = acc_o[i] * own + sums[thread, i] * other


def second_tile(smem: cute.Pointer, side: TileSide, count: int) -> cute.Tensor:
    """Group 1's tile of a side as (threads, count) fp32."""
    return cute.make_tensor(cute.recast_ptr(smem + side.tile_bytes // 2, dtype=Float32),
                            cute.make_layout((GROUP_WARPS * WARP, count)))


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


def row_of(me: MmaThread, half: int) -> Int32:
    """Query row of the CTA that this thread has values of."""
    return 16 * me.warp + me.g + 8 * half


@cute.jit
def load_q(cfg: cutlass.Constexpr[DecodeConfig], mma_qk: cute.TiledMma, q: cute.Tensor, rows: Rows,
           me: MmaThread, channels: cute.Tensor | None):
    """Q as the A operand: tile row r is query row ``rows.first + r``, rows from ``rows.count`` on are zero; channels in
    the order of stored keys, where ``channels`` has one."""
    rQ = cute.make_rmem_tensor(mma_qk.partition_shape_A((TILE_M, cfg.head_dim)), ELEMENT[cfg.dtype])
    rQ.fill(0.0)
    words, q_words = cute.recast_tensor(rQ, Uint32), cute.recast_tensor(q, Uint32)
    for half in cutlass.range_constexpr(HALVES):
        if row_of(me, half) < rows.count:
            query, head = query_and_head(rows, row_of(me, half))
            for k in cutlass.range_constexpr(cfg.head_dim // 8):  # words of row g + 8 lie between those of row g
                if cutlass.const_expr(cfg.k.kind is Kind.CODEBOOK):
                    pair = cute.make_rmem_tensor(2, ELEMENT[cfg.dtype])
                    for e in cutlass.range_constexpr(2):
                        channel = channels[rows.head_idx, ORDER_PLANE, 8 * k + 2 * me.t + e].bitcast(Int32)
                        pair[e] = q[rows.batch_idx, query, head, channel]
                    words[2 * k + half] = cute.recast_tensor(pair, Uint32)[0]
                else:
                    words[2 * k + half] = q_words[rows.batch_idx, query, head, 4 * k + me.t]
    return rQ


@cute.jit
def stage_q(cfg: cutlass.Constexpr[DecodeConfig], q: cute.Tensor, rows: Rows, thread: Int32, q_smem: cute.Pointer):
    """Q as a K-major tile in shared memory, for WGMMA, by all MMA groups: rows from ``rows.count`` on are zero.

    A barrier must follow.
    """
    chunks, q_words = cfg.head_dim // CHUNK, cute.recast_tensor(q, Uint32)
    tile = cute.make_tensor(cute.recast_ptr(q_smem, dtype=Uint32),
                            cute.make_layout((4, cfg.staged_rows * chunks), stride=(1, 4)))
    for first in cutlass.range(0, cfg.staged_rows * chunks, cfg.mma_threads, unroll=1):
        row, chunk = (first + thread) // chunks, (first + thread) % chunks
        if row < cfg.staged_rows:
            words = cute.make_rmem_tensor(4, Uint32)
            words.fill(0)
            if row < rows.count:
                query, head = query_and_head(rows, row)
                for e in cutlass.range_constexpr(4):
                    words[e] = q_words[rows.batch_idx, query, head, 4 * chunk + e]
            cute.autovec_copy(words, tile[None, tile_chunk(row, chunk, cfg.staged_rows, cfg.k.atom_chunks)])
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def write_row(half: cutlass.Constexpr[int], out: combine.Outputs, rows: Rows, me: MmaThread, acc_o: cute.Tensor,
              row_max: Float32, row_sum: Float32):
    """This thread's row of a half, if it is a query row."""
    found = epilogue.chunks(half, acc_o, me.t)
    if row_of(me, half) < rows.count:
        epilogue.write(out, rows, combine.find_row(out, rows, row_of(me, half)), found, row_max, row_sum)
