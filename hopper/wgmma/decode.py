"""Decode attention over packed pages for 17 to 32 query rows: WGMMA with the unpacked codes in registers.

One CTA serves one (split, block of query rows, KV head, sequence): a warpgroup that loads, and three that each take
every third page through rings of their own. A page is unpacked by the warpgroup that multiplies it, straight into the
A operand: no dequantized tile is ever written.

    role       warps      loop over the walk (tile/walk.py: pages, then 16-bit tiles)
    load K, V  1 + 1      wait empty -> bulk copies -> full (bytes), the groups' rings in turn
    mma        3 x 4      wait K full -> two steps of codes to A registers, WGMMA S^T beside the next two -> K empty
                          -> softmax, P to shared memory -> the same on V^T, WGMMA O^T -> V empty

    ring            producer -> consumer   full                 empty
    k/v packed      load -> mma group      1 arrival + bytes    1 a lane of the group
    joined          mma -> mma             1 a lane             -   (Q is staged; sums are shared)
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from lowbit_attn.device.numbers import ELEMENT
from lowbit_attn.hopper.common import combine
from lowbit_attn.hopper.common.abi import DecodeKernel, Grid, Options, Results, View, block_rows, load_counts
from lowbit_attn.hopper.tile import walk
from lowbit_attn.hopper.tile.config import GROUP_WARPS, SMEM_ALIGN, TILE_N
from lowbit_attn.hopper.tile.decode import tile_layout
from lowbit_attn.hopper.tile.load import Source
from lowbit_attn.hopper.tile.masks import LogitScale, Visible
from lowbit_attn.hopper.tile.mma import Tiles
from lowbit_attn.hopper.tile.ring import StageRing, init
from lowbit_attn.hopper.wgmma import attend, load
from lowbit_attn.hopper.wgmma.config import WgmmaConfig
from lowbit_attn.hopper.wgmma.operands import Packed


class WgmmaSm90(DecodeKernel):
    """The kernel of one WgmmaConfig."""

    def __init__(self, cfg: WgmmaConfig):
        self.cfg = cfg
        self.smem_bytes = cfg.smem_bytes

    def storage(self):
        """Shared memory in the order of ``WgmmaConfig.smem_plan``."""
        cfg, element, plan = self.cfg, ELEMENT[self.cfg.dtype], self.cfg.smem_plan
        stages = cfg.mma_groups * cfg.packed_stages
        sizes = [plan[name] for name in ("query", "weights", "k_packed", "v_packed", "maxima")]

        @cute.struct
        class Smem:
            query: cute.struct.Align[cute.struct.MemRange[element, sizes[0] // 2], SMEM_ALIGN]
            weights: cute.struct.Align[cute.struct.MemRange[element, sizes[1] // 2], SMEM_ALIGN]
            k_packed: cute.struct.Align[cute.struct.MemRange[Uint32, sizes[2] // 4], 128]
            v_packed: cute.struct.Align[cute.struct.MemRange[Uint32, sizes[3] // 4], 128]
            maxima: cute.struct.Align[cute.struct.MemRange[Float32, sizes[4] // 4], 128]
            k_bars: cute.struct.MemRange[Int64, 2 * stages]
            v_bars: cute.struct.MemRange[Int64, 2 * stages]
            joined: cute.struct.MemRange[Int64, 1]

        return Smem

    def launch(self, q: cute.Tensor, view: View, results: Results, options: Options, grid: Grid, stream) -> None:
        self.kernel(q, view, results, options, grid.ratio, grid.row_blocks).launch(
            grid=grid.shape, block=(self.cfg.threads, 1, 1), stream=stream, min_blocks_per_mp=1,
            cooperative=results.partials.shape[1] > 1)

    @cute.kernel
    def kernel(self, q: cute.Tensor, view: View, results: Results, options: Options, ratio: Int32, row_blocks: Int32):
        cfg = self.cfg
        block = cute.arch.block_idx()
        rows = block_rows(block, row_blocks, ratio, q.shape[1], cfg.rows)
        head_idx, split_idx, num_splits = rows.head_idx, block[2], results.partials.shape[1]
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = warp_idx // GROUP_WARPS
        smem = cutlass.memory.SmemAllocator().allocate(self.storage())
        k_rings, v_rings = self.make_rings(smem, warp_idx)
        row, counts = load_counts(view, rows.batch_idx)
        n_sink, _, _, n_tok, _ = counts
        hidden = Int32(0)
        if cutlass.const_expr("window" in cfg.features):
            hidden = walk.hidden_pages(n_sink, n_tok, rows.q_len, options.window)
        k_walk, v_walk = walk.plan(*counts, hidden, split_idx, num_splits)
        if group == 0:
            cute.arch.setmaxregister_decrease(cfg.load_regs)
            place = (view.ring_rows[rows.batch_idx], head_idx, view.first_entry(row, head_idx), view.page_stride,
                     view.head_stride)
            policy = load.policy_of(cfg, k_walk, row_blocks)
            if warp_idx == cfg.load_k_warp:
                source = Source(view.pool, view.table, view.sink_k, view.ring_k, *place)
                load.run(cfg, cfg.k, source, k_walk, k_rings, smem.k_packed.data_ptr(), policy)
            if warp_idx == cfg.load_v_warp:
                source = Source(view.pool, view.table, view.sink_v, view.ring_v, *place)
                load.run(cfg, cfg.v, source, v_walk, v_rings, smem.v_packed.data_ptr(), policy)
        else:
            cute.arch.setmaxregister_increase(cfg.mma_regs)
            own = group - cfg.first_mma_group
            keys, values = (
                Packed(load.ring_of(cfg, ring, own), load.smem_of(cfg, side, memory.data_ptr(), own))
                for side, ring, memory in ((cfg.k, k_rings, smem.k_packed), (cfg.v, v_rings, smem.v_packed)))
            attend.run(cfg, own, k_walk, rows, Visible(n_tok - rows.q_len, options.window, options.sink_window),
                       LogitScale(options.scale_log2, options.softcap_log2), q, self.tiles(smem), keys, values,
                       combine.Outputs(*results, combine.block_of(block), split_idx))

    def tiles(self, smem) -> Tiles:
        """WGMMA's B operands, and the memory in which groups share their sums: their rings."""
        cfg, element = self.cfg, ELEMENT[self.cfg.dtype]

        def view(piece, cols, stages):
            layout = tile_layout(cfg.rows, cols, stages, element)
            return piece.get_tensor(layout.outer, swizzle=layout.inner)

        k_sums, v_sums = (cute.recast_ptr(piece.data_ptr(), dtype=element) for piece in (smem.k_packed, smem.v_packed))
        return Tiles(None, None, k_sums, v_sums, smem.joined.data_ptr(), smem.query.data_ptr(),
                     view(smem.query, cfg.head_dim, 1), smem.weights.data_ptr(),
                     view(smem.weights, TILE_N, cfg.mma_groups), smem.maxima.data_ptr())

    @cute.jit
    def make_rings(self, smem, warp_idx: Int32):
        """(K's, V's) rings of all groups; initialised for the whole CTA, behind one barrier."""
        cfg = self.cfg
        stages = cfg.mma_groups * cfg.packed_stages
        found = [StageRing(bars.data_ptr(), bars.data_ptr() + stages, stages) for bars in (smem.k_bars, smem.v_bars)]
        if warp_idx == 0:
            with cute.arch.elect_one():
                for ring in found:
                    init(ring, cfg.loads_arrive, cfg.readers_arrive)
                cute.arch.mbarrier_init(smem.joined.data_ptr(), cfg.joins_arrive)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        return found[0], found[1]
