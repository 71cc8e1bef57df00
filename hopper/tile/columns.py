"""MMA role, few query rows: S^T = K Q^T and O^T += V^T P^T.

Tokens and channels are WGMMA's 64 rows and query rows its columns, so that neither softmax nor O is padded to 64 rows.
All operands are in shared memory; each MMA group has a P of its own. A column's tokens lie in all four warps, which
would have to agree on its maximum for every tile. They do so only where a logit is more than SLACK above the maximum
that weights are relative to (rescaling where needed, as in FlashAttention-4); weights are 2^SLACK at most.

    of a tile   S^T = K Q^T
                exceeds a logit its column's maximum by SLACK? a vote at a barrier of the group
                    rarely: maxima through shared memory; O^T and sums scaled to the new ones
                P = 2^(S - maximum), transposed, to shared memory; a barrier of the group
                O^T += V^T P^T
"""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import warp, warpgroup

from lowbit_attn.device import numbers, ptx
from lowbit_attn.hopper.common import combine
from lowbit_attn.hopper.common.abi import Rows
from lowbit_attn.hopper.tile import epilogue, softmax
from lowbit_attn.hopper.tile import ring as rings
from lowbit_attn.hopper.tile.config import CHUNK, GROUP_WARPS, TILE_M, TILE_N, WARP, DecodeConfig, tile_chunk
from lowbit_attn.hopper.tile.masks import LogitScale, MmaThread, Visible, to_logits
from lowbit_attn.hopper.tile.mma import GROUP_BARRIER, Tiles, issue, lane_of, make_mma, stage_q
from lowbit_attn.hopper.tile.ring import StageRing
from lowbit_attn.hopper.tile.walk import TileWalk

SLACK = 8.0  # base 2; fp16 holds weights up to 2^16
PAD = 4  # fp32 numbers between the sums of query rows: a warp's accesses meet no bank twice


@cute.jit
def run(cfg: cutlass.Constexpr[DecodeConfig], group: Int32, walk: TileWalk, rows: Rows, visible: Visible,
        scores: LogitScale, q: cute.Tensor, tiles: Tiles, k_tiles: StageRing, v_tiles: StageRing, out: combine.Outputs):
    """Attend to this group's tiles of the walk, join the groups' sums, then store and merge this split's result."""
    element = numbers.ELEMENT[cfg.dtype]
    mma_thread = cute.arch.thread_idx()[0] - cfg.first_mma_group * GROUP_WARPS * WARP
    me = lane_of(mma_thread)
    stage_q(cfg, q, rows, mma_thread, tiles.q_smem)
    barrier(tiles, 0)
    mma_qk, mma_pv = (make_mma(cfg.rows, element, True) for _ in range(2))
    rK = mma_qk.make_fragment_A(mma_qk.get_slice(0).partition_A(tiles.k))[None, None, None, group]
    rQ = mma_qk.make_fragment_B(mma_qk.get_slice(0).partition_B(tiles.q))[None, None, None, 0]
    rV = mma_pv.make_fragment_A(mma_pv.get_slice(0).partition_A(tiles.v))[None, None, None, group]
    rP = mma_pv.make_fragment_B(mma_pv.get_slice(0).partition_B(tiles.p))[None, None, None, group]
    acc_s = cute.make_rmem_tensor(mma_qk.partition_shape_C((TILE_N, cfg.rows)), Float32)
    acc_o = cute.make_rmem_tensor(mma_pv.partition_shape_C((cfg.v.tile_rows, cfg.rows)), Float32)
    acc_o.fill(0.0)
    mma_pv.set(warpgroup.Field.ACCUMULATE, True)
    maxima, sums = (cute.make_rmem_tensor(cfg.rows // 4, Float32) for _ in range(2))
    maxima.fill(numbers.LOWEST)
    sums.fill(0.0)
    for i in cutlass.range(group, walk.num_pages + walk.token_tiles, cfg.mma_groups, unroll=1):
        fill = Uint32(i)
        # S^T = K Q^T
        rings.wait_full(k_tiles, fill)
        issue(mma_qk, acc_s, rK, rQ, True)
        warpgroup.wait_group(0)
        rings.release(k_tiles, fill)
        # P = softmax(S), O^T scaled to the new maximum
        scale_log2 = to_logits(cfg, acc_s, walk, rows, visible, scores, me, i)
        raise_maxima(cfg, me, group, tiles, acc_s, scale_log2, maxima, sums, acc_o)
        store_weights(cfg, me, group, tiles, acc_s, scale_log2, maxima, sums)
        # O^T += V^T P^T
        rings.wait_full(v_tiles, fill)
        issue(mma_pv, acc_o, rV, rP, False)
        warpgroup.wait_group(0)
        rings.release(v_tiles, fill)
    share_sums(cfg, me, group, tiles, acc_o, maxima, sums)
    barrier(tiles, 1)
    store_partials(cfg, tiles, rows, out, mma_thread)
    if out.num_splits > 1:
        combine.merge(out, rows, cfg.mma_threads, mma_thread)


def barrier(tiles: Tiles, phase: int) -> None:
    """All MMA groups' lanes: what each wrote to shared memory before is there."""
    cute.arch.mbarrier_arrive(tiles.joined)
    cute.arch.mbarrier_wait(tiles.joined, phase)


def group_barrier(group: Int32) -> Int32:
    """Number of a group's own barrier."""
    return group + GROUP_BARRIER


def column_lists(cfg: DecodeConfig, blocks: int) -> list[list[int]]:
    """Accumulator values of each of a thread's columns."""
    return [[i for i, _, _ in softmax.column_values(blocks, cfg.rows, c)] for c in range(cfg.rows // 4)]


@cute.jit
def raise_maxima(cfg: cutlass.Constexpr[DecodeConfig], me: MmaThread, group: Int32, tiles: Tiles, acc_s: cute.Tensor,
               scale_log2: Float32, maxima: cute.Tensor, sums: cute.Tensor, acc_o: cute.Tensor):
    """Where a logit exceeds its column's maximum by SLACK, all columns' maxima become those of this tile or before.

    Behind it no warp of the group reads the last tile's P any more.
    """
    found = cute.make_rmem_tensor(cfg.rows // 4, Float32)
    exceeds = cutlass.Boolean(False)
    for c, at in enumerate(column_lists(cfg, TILE_N // TILE_M)):
        found[c] = numbers.tree([acc_s[i] for i in at], cute.arch.fmax) * scale_log2
        exceeds = exceeds | (found[c] > maxima[c] + Float32(SLACK))
    if ptx.any_of(group_barrier(group), GROUP_WARPS * WARP, Uint32(exceeds)) != 0:
        agree(cfg, me, group, tiles, found)
        for c, at in enumerate(column_lists(cfg, cfg.v.tile_rows // TILE_M)):
            top = cute.arch.fmax(maxima[c], found[c])
            shrink = combine.weight(maxima[c], top)
            maxima[c] = top
            sums[c] = sums[c] * shrink
            for i in at:
                acc_o[i] = acc_o[i] * shrink


@cute.jit
def agree(cfg: cutlass.Constexpr[DecodeConfig], me: MmaThread, group: Int32, tiles: Tiles, found: cute.Tensor):
    """Each column's maximum over the group. The vote before, by all lanes, is behind the last reads here."""
    shared = cute.make_tensor(tiles.maxima, cute.make_layout((GROUP_WARPS, cfg.rows, cfg.mma_groups)))
    for c in cutlass.range_constexpr(cfg.rows // 4):
        found[c] = numbers.over_lanes(found[c], numbers.OVER_G, cute.arch.fmax)
        if me.g == 0:
            shared[me.warp, softmax.column(c, me.t), group] = found[c]
    cute.arch.barrier(barrier_id=group_barrier(group), number_of_threads=GROUP_WARPS * WARP)
    for c in cutlass.range_constexpr(cfg.rows // 4):
        of_warps = cute.make_rmem_tensor(GROUP_WARPS, Float32)
        cute.autovec_copy(shared[None, softmax.column(c, me.t), group], of_warps)
        found[c] = numbers.tree([of_warps[i] for i in range(GROUP_WARPS)], cute.arch.fmax)


def weights_chunk(cfg: DecodeConfig, warp, lane, eight: int):
    """16 bytes of P that a lane addresses: eight tokens of a query row of the ``eight``-th eight."""
    of_warp, of_block = (step // 8 for step in cfg.row_steps(TILE_N // TILE_M))
    return tile_chunk(8 * eight + lane % 8, lane // 16 * of_block + of_warp * warp + lane // 8 % 2, cfg.rows)


@cute.jit
def store_weights(cfg: cutlass.Constexpr[DecodeConfig], me: MmaThread, group: Int32, tiles: Tiles, acc_s: cute.Tensor,
                  scale_log2: Float32, maxima: cute.Tensor, sums: cute.Tensor):
    """P to shared memory, K-major [rows, 128 tokens] for WGMMA, and this lane's share of its columns' sums."""
    chunks = cfg.weight_bytes // (2 * CHUNK)
    out = cute.make_tensor(cute.recast_ptr(tiles.p_smem, dtype=Float16), cute.make_layout(
        (CHUNK, chunks, cfg.mma_groups), stride=(1, CHUNK, chunks * CHUNK)))
    store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), Float16)
    lane = 4 * me.g + me.t
    for eight in cutlass.range_constexpr(cfg.rows // 8):
        pair = []
        for c in (2 * eight, 2 * eight + 1):
            weights = [cute.math.exp2(acc_s[i] * scale_log2 - maxima[c], fastmath=True)
                       for i, _, _ in softmax.column_values(TILE_N // TILE_M, cfg.rows, c)]
            sums[c] = sums[c] + numbers.tree(weights, operator.add)
            pair.append(weights)
        frag = cute.make_rmem_tensor(8, Float16)
        words = cute.recast_tensor(frag, Uint32)
        for matrix in cutlass.range_constexpr(4):  # of two blocks of tokens two halves each
            words[matrix] = numbers.pack(pair[0][matrix], pair[1][matrix], numbers.ELEMENT[cfg.dtype])
        cute.copy(store, frag, out[None, weights_chunk(cfg, me.warp, lane, eight), group])
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=group_barrier(group), number_of_threads=GROUP_WARPS * WARP)


def sums_of(cfg: DecodeConfig, tiles: Tiles, group) -> tuple[cute.Tensor, cute.Tensor]:
    """(O [channels, rows] in K's tile of a group, (sums of four warps, maximum) [5, rows] in V's), fp32."""
    k_tile, v_tile = (cute.recast_ptr(smem + group * (cfg.sums_bytes(side) // 2), dtype=Float32)
                      for smem, side in ((tiles.k_smem, cfg.k), (tiles.v_smem, cfg.v)))
    return (cute.make_tensor(k_tile, cute.make_layout((cfg.v.tile_rows, cfg.rows), stride=(1, cfg.v.tile_rows + PAD))),
            cute.make_tensor(v_tile, cute.make_layout((GROUP_WARPS + 1, cfg.rows))))


@cute.jit
def share_sums(cfg: cutlass.Constexpr[DecodeConfig], me: MmaThread, group: Int32, tiles: Tiles, acc_o: cute.Tensor,
               maxima: cute.Tensor, sums: cute.Tensor):
    """This group's O, sums and maxima to shared memory, through its tiles, which none of its warps reads any more."""
    o, totals = sums_of(cfg, tiles, group)
    of_warp, of_block = cfg.row_steps(cfg.v.tile_rows // TILE_M)
    cute.arch.barrier(barrier_id=group_barrier(group), number_of_threads=GROUP_WARPS * WARP)
    for c in cutlass.range_constexpr(cfg.rows // 4):
        row = softmax.column(c, me.t)
        for i, block, half in softmax.column_values(cfg.v.tile_rows // TILE_M, cfg.rows, c):
            o[of_block * block + of_warp * me.warp + 8 * half + me.g, row] = acc_o[i]
        total = numbers.over_lanes(sums[c], numbers.OVER_G, operator.add)
        if me.g == 0:
            totals[me.warp, row] = total
            if me.warp == 0:
                totals[GROUP_WARPS, row] = maxima[c]


@cute.jit
def store_partials(cfg: cutlass.Constexpr[DecodeConfig], tiles: Tiles, rows: Rows, out: combine.Outputs,
                   mma_thread: Int32):
    """This split's sums, of all groups, a chunk a thread."""
    for unit in cutlass.range(mma_thread, rows.count * out.chunks, cfg.mma_threads, unroll=1):
        row, chunk = combine.find_row(out, rows, unit // out.chunks), unit % out.chunks
        found = [group_sums(cfg, tiles, group, row.idx, chunk) for group in range(cfg.mma_groups)]
        acc, top, total = found[0]
        top, total = combine.join((acc,), top, total, [(other,) for other in found[1:]])
        combine.store_partial(out, row, (chunk,), epilogue.slot_addresses(out, rows, row, (chunk,)),
                      (combine.Sums(acc, top, total),))


def group_sums(cfg: DecodeConfig, tiles: Tiles, group: int, row: Int32, chunk: Int32) -> combine.Sums:
    """What a group found of a chunk of a row."""
    o, totals = sums_of(cfg, tiles, group)
    acc = cute.make_rmem_tensor(combine.CHANNELS, Float32)
    cute.autovec_copy(cute.zipped_divide(o[None, row], (combine.CHANNELS,))[None, chunk], acc)
    total = numbers.tree([totals[i, row] for i in range(GROUP_WARPS)], operator.add)
    return combine.Sums(acc, totals[GROUP_WARPS, row], total)
