"""Decode attention over packed pages, tile path (BitDecoding section 4): the kernel shell.

One CTA serves one (split, block of query rows, KV head, sequence) with four warpgroups or five; setmaxnreg moves
registers to the MMA. Two warpgroups multiply, each every second tile: the softmax of one hides behind the multiplies
of the other. Their sums are joined at the end. At head_dim 256 one multiplies, with Q in shared memory (cfg.is_wide).
There, where query rows are WGMMA's columns (cfg.in_columns) and where a side has a codebook (books.py), K and V have a
dequant warpgroup each; codebooks leave room for one MMA group.

    role       warps  registers  loop over the walk (walk.py: pages, then 16-bit tiles)
    load K, V  1 + 1         24  wait packed empty -> bulk copies -> packed full (bytes)
    dequant        4         72  K: wait packed full, tile empty -> LDS.128, unpack, STSM -> packed empty, tile full,
                                 then the same on V^T
    mma        4 + 4        208  wait K full -> WGMMA S -> K empty -> softmax -> wait V full -> WGMMA O -> V empty

    ring            producer -> consumer   full                      empty
    k/v packed      load -> dequant        1 arrival + bytes         1 a dequant lane
    k/v tiles       dequant -> mma         1 a dequant lane, fenced  1 a lane of the tile's MMA group
    joined          mma 1 -> mma 0         1 a lane                  -   (in columns: all MMA groups, twice)

    time ->  load        p0 p1 p2 p3 | p4 ...         (packed_stages parts ahead)
             dequant        k0 v0 k1 v1 | k2 v2 ...   (a tile of each side for either MMA group)
             mma 0             S0 softmax O0    S2 softmax O2 ...
             mma 1                   S1 softmax O1    S3 ...
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import warpgroup

from lowbit_attn.device.numbers import ELEMENT
from lowbit_attn.formats.spec import Kind
from lowbit_attn.hopper.common import combine
from lowbit_attn.hopper.common.abi import DecodeKernel, Grid, Options, Results, View, block_rows, load_counts
from lowbit_attn.hopper.common.book_abi import BookDecodeKernel
from lowbit_attn.hopper.tile import books, columns, dequant, load, mma, walk
from lowbit_attn.hopper.tile.config import GROUP_WARPS, SMEM_ALIGN, TILE_N, DecodeConfig
from lowbit_attn.hopper.tile.masks import LogitScale, Visible
from lowbit_attn.hopper.tile.ring import StageRing, init


def tile_layout(rows: int, cols: int, stages: int, element=Float16):
    """WGMMA operand, K-major and swizzled: (rows, columns, stages); tile_chunk gives its addresses."""
    kinds = warpgroup.SmemLayoutAtomKind
    atom = warpgroup.make_smem_layout_atom(kinds.K_SW128 if cols % 64 == 0 else kinds.K_SW64, element)
    return cute.tile_to_shape(atom, (rows, cols, stages), order=(0, 1, 2))


def value_layout(tokens: int, channels: int, stages: int, element=Float16):
    """WGMMA operand (channels, tokens, stages), channels contiguous, whose memory is ``tile_layout(tokens, ..)``'s."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, element)
    return cute.tile_to_shape(atom, (channels, tokens, stages), order=(1, 0, 2))


class DecodeSm90(DecodeKernel):
    """The tile-path kernel of one DecodeConfig."""

    def __init__(self, cfg: DecodeConfig):
        self.cfg = cfg
        self.smem_bytes = cfg.smem_bytes

    def storage(self):
        """Shared memory in the order of ``DecodeConfig.smem_plan``."""
        cfg, element = self.cfg, ELEMENT[self.cfg.dtype]
        packed, tiles = cfg.packed_stages, cfg.mma_groups
        k_words, v_words = (packed * cfg.stage_bytes(side) // 4 for side in (cfg.k, cfg.v))
        book_words = [cfg.book_plan.get(name, 0) // 4 for name in ("k_book", "v_book")]

        @cute.struct
        class Smem:
            if cfg.staged_rows:
                query: cute.struct.Align[cute.struct.MemRange[element, cfg.query_bytes // 2], SMEM_ALIGN]
            if cfg.in_columns:
                weights: cute.struct.Align[cute.struct.MemRange[element, tiles * cfg.weight_bytes // 2], SMEM_ALIGN]
            k_tiles: cute.struct.Align[cute.struct.MemRange[element, tiles * cfg.k.tile_bytes // 2], SMEM_ALIGN]
            v_tiles: cute.struct.Align[cute.struct.MemRange[element, tiles * cfg.v.tile_bytes // 2], SMEM_ALIGN]
            k_packed: cute.struct.Align[cute.struct.MemRange[Uint32, k_words], 128]
            v_packed: cute.struct.Align[cute.struct.MemRange[Uint32, v_words], 128]
            if cfg.k.kind is Kind.CODEBOOK:
                k_book: cute.struct.Align[cute.struct.MemRange[Uint32, book_words[0]], 128]
            if cfg.v.kind is Kind.CODEBOOK:
                v_book: cute.struct.Align[cute.struct.MemRange[Uint32, book_words[1]], 128]
            if cfg.has_books:
                reciprocals: cute.struct.Align[cute.struct.MemRange[Float32, cfg.head_dim], 128]
            if cfg.in_columns:
                maxima: cute.struct.Align[cute.struct.MemRange[Float32, tiles * cfg.maxima_bytes // 4], 128]
            k_packed_bars: cute.struct.MemRange[Int64, 2 * packed]
            v_packed_bars: cute.struct.MemRange[Int64, 2 * packed]
            k_tile_bars: cute.struct.MemRange[Int64, 2 * tiles]
            v_tile_bars: cute.struct.MemRange[Int64, 2 * tiles]
            joined: cute.struct.MemRange[Int64, 1]
            if cfg.has_books:
                book_bars: cute.struct.MemRange[Int64, 2]

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
        k_packed, v_packed, k_tiles, v_tiles = self.make_rings(smem, warp_idx)
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
            if cutlass.const_expr(cfg.has_books):
                self.start_books(view.books, head_idx, smem, warp_idx)
            if warp_idx == cfg.load_k_warp:
                source = load.Source(view.pool, view.table, view.sink_k, view.ring_k, *place)
                load.run(cfg, cfg.k, source, k_walk, k_packed, smem.k_packed.data_ptr())
            if warp_idx == cfg.load_v_warp:
                source = load.Source(view.pool, view.table, view.sink_v, view.ring_v, *place)
                load.run(cfg, cfg.v, source, v_walk, v_packed, smem.v_packed.data_ptr())
        elif group < cfg.first_mma_group:
            cute.arch.setmaxregister_decrease(cfg.dequant_regs)
            pipes = (dequant.Pipe(k_walk, k_packed, smem.k_packed.data_ptr(), k_tiles, smem.k_tiles.data_ptr()),
                     dequant.Pipe(v_walk, v_packed, smem.v_packed.data_ptr(), v_tiles, smem.v_tiles.data_ptr()))
            if cutlass.const_expr(cfg.dequant_groups == 1):
                dequant.run(cfg, (cfg.k, cfg.v), pipes)
            else:
                if group == 1:
                    self.dequantize(cfg.k, pipes[:1], smem)
                else:
                    self.dequantize(cfg.v, pipes[1:], smem)
        else:
            cute.arch.setmaxregister_increase(cfg.mma_regs)
            attend, more = columns.run if cfg.in_columns else mma.run, ()
            if cutlass.const_expr(cfg.has_books):
                more = (view.books.channels,)
            attend(cfg, group - cfg.first_mma_group, k_walk, rows,
                   Visible(n_tok - rows.q_len, options.window, options.sink_window),
                   LogitScale(options.scale_log2, options.softcap_log2), q, self.tiles(smem), k_tiles, v_tiles,
                   combine.Outputs(*results, combine.block_of(block), split_idx), *more)

    def place(self, side, smem) -> books.SharedBook:
        """Shared memory of a side's codebook."""
        table = smem.v_book if side.transposed else smem.k_book
        return books.SharedBook(table.data_ptr(), smem.reciprocals.data_ptr(),
                               smem.book_bars.data_ptr() + int(side.transposed))

    @cute.jit
    def start_books(self, view, head_idx: Int32, smem, warp_idx: Int32):
        """Each side's load warp starts the copies of its codebook, if it has one."""
        cfg = self.cfg
        for side, load_warp in ((cfg.k, cfg.load_k_warp), (cfg.v, cfg.load_v_warp)):
            if cutlass.const_expr(side.kind is Kind.CODEBOOK):
                if warp_idx == load_warp:
                    with cute.arch.elect_one():
                        books.start(cfg, side, view, head_idx, self.place(side, smem))

    def dequantize(self, side, pipes: tuple, smem) -> None:
        """The dequant role of a warpgroup with one side, by its kind."""
        if side.kind is Kind.CODEBOOK:
            books.run(self.cfg, side, pipes[0], self.place(side, smem))
        else:
            dequant.run(self.cfg, (side,), pipes)

    def tiles(self, smem) -> mma.Tiles:
        """WGMMA's operands in shared memory."""
        cfg, element = self.cfg, ELEMENT[self.cfg.dtype]

        def view(piece, rows, cols, stages):
            layout = tile_layout(rows, cols, stages, element)
            return piece.get_tensor(layout.outer, swizzle=layout.inner)

        v_tiles = view(smem.v_tiles, cfg.v.tile_rows, cfg.v.cols, cfg.mma_groups)
        if cfg.v.kind is Kind.CODEBOOK:
            layout = value_layout(TILE_N, cfg.head_dim, cfg.mma_groups, element)
            v_tiles = smem.v_tiles.get_tensor(layout.outer, swizzle=layout.inner)
        return mma.Tiles(view(smem.k_tiles, cfg.k.tile_rows, cfg.k.cols, cfg.mma_groups), v_tiles,
                         smem.k_tiles.data_ptr(), smem.v_tiles.data_ptr(), smem.joined.data_ptr(),
                         smem.query.data_ptr() if cfg.staged_rows else None,
                         view(smem.query, cfg.staged_rows, cfg.head_dim, 1) if cfg.staged_rows else None,
                         smem.weights.data_ptr() if cfg.in_columns else None,
                         view(smem.weights, cfg.rows, TILE_N, cfg.mma_groups) if cfg.in_columns else None,
                         smem.maxima.data_ptr() if cfg.in_columns else None)

    @cute.jit
    def make_rings(self, smem, warp_idx: Int32):
        """(K packed, V packed, K tiles, V tiles); initialised for the whole CTA, behind one barrier."""
        cfg = self.cfg

        def ring(bars, stages):
            return StageRing(bars.data_ptr(), bars.data_ptr() + stages, stages)

        packed = [ring(b, cfg.packed_stages) for b in (smem.k_packed_bars, smem.v_packed_bars)]
        tiles = [ring(b, cfg.mma_groups) for b in (smem.k_tile_bars, smem.v_tile_bars)]
        if warp_idx == 0:
            with cute.arch.elect_one():
                for r in packed:
                    init(r, cfg.loads_arrive, cfg.readers_arrive)
                for r in tiles:
                    init(r, cfg.dequants_arrive, cfg.readers_arrive)
                cute.arch.mbarrier_init(smem.joined.data_ptr(), cfg.joins_arrive)
                if cutlass.const_expr(cfg.has_books):
                    for i in range(2):
                        cute.arch.mbarrier_init(smem.book_bars.data_ptr() + i, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        return packed[0], packed[1], tiles[0], tiles[1]


class BookDecodeSm90(BookDecodeKernel, DecodeSm90):
    """The tile-path kernel of a format with codebooks."""
