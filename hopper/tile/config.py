"""Everything a decode kernel fixes at compile time: tiles, warp roles, register budgets, shared memory.

A ``TileSide`` says which word, shift and bit position give each register of a tile. The positions come from ``layout``.
"""

import math
from dataclasses import dataclass, replace

import torch

from lowbit_attn import layout
from lowbit_attn.formats.contract import Format
from lowbit_attn.formats.spec import Kind, SideSpec
from lowbit_attn.hopper.common.support import BOOK_TILE, PATHS
from lowbit_attn.hopper.common.tuning import IN_FLIGHT_BYTES, MAX_STAGES
from lowbit_attn.hopper.tile.book_side import TABLE_BYTES, BookTile
from lowbit_attn.kernels.key import FEATURES, SMEM_LIMIT_BYTES
from lowbit_attn.registers import CHUNK, matrix_place

TARGET = "sm_90a"
SMEM_LIMIT = SMEM_LIMIT_BYTES[TARGET]
SM_REGISTERS = 65_536
WARP = 32
GROUP_WARPS = 4  # warps of a warpgroup
TILE_M = 64  # rows of one WGMMA: query rows, the last ones zero, or tokens and channels
TILE_N = layout.PAGE_TOKENS  # tokens of a tile, packed or 16 bit
MAX_N = 128  # ptxas refuses m64n256k16: its accumulators alone are the 128 registers of a kernel of 512 threads
COLUMNS = 8  # query rows of a kernel where they are WGMMA's columns, so that they are not padded to TILE_M
UNIT_TOKENS = 32  # tokens of a 16-bit tile in one packed stage; each lane of the load warp copies one row
UNITS = TILE_N // UNIT_TOKENS
MAX_RUN_TILES = 16  # 16x16 tiles that a dequant warp unpacks in one piece of straight code, else registers spill
MAX_WIDE_RUN_TILES = 4  # the same where the arithmetic is fp32
MAX_BYTE_RUN_TILES = 12  # the same of bytes
MAX_NARROW_BYTE_RUN_TILES = 6  # the same in the 64-byte swizzle of head_dim 96, whose addresses take registers
SMEM_ALIGN = 1024  # an 8-row atom of the 128-byte swizzle; shared memory is a multiple of it
BARRIER_BYTES = 8
WORD = 4  # bytes
BLOCK_BITS = 4  # 16x16 tiles times bits of a code that make a lane one word
SASS_NEED = ("UBLKCP", "STSM", "HGMMA", "LDSM", "SYNCS")
SASS_FORBID = ("LDL", "STL")


def tile_chunk(row, chunk_col, rows, atom_chunks=8):
    """Index of 16 bytes in a 16-bit tile that WGMMA reads: K-major, swizzled, ``rows`` rows.

    row: 0 .. rows - 1; chunk_col: column // 8; atom_chunks: 16-byte chunks in a row of the swizzle atom, 8 (128-byte
    swizzle) or 4 (64-byte swizzle, where two rows share 128 bytes). Serves Python ints, numpy and the DSL's integers.
    """
    atom, within = chunk_col // atom_chunks, chunk_col % atom_chunks
    line = row // (8 // atom_chunks)  # of 128 bytes
    return (atom * rows + row) * atom_chunks + (within ^ (line % atom_chunks))


@dataclass(frozen=True)
class TileSide(SideSpec):
    """One side of a record, and the share of its 16x16 tiles that each of four dequant warps unpacks.

    A warp unpacks runs of contiguous words: ``run_cols`` column tiles, or one of ``row_parts`` parts of a column tile's
    rows. Its runs are warp, warp + 4, ... of ``runs``.
    """

    is_half: bool = False  # metadata and result are fp16: code * scale + zero in fp16, else in fp32
    tile_rows: int = 0  # of the 16-bit tile: rows, or whole blocks of TILE_M, whose last are neither written nor used

    @property
    def atom_chunks(self) -> int:
        """Chunks in a row of the tile's swizzle atom: 64-byte swizzle where 128 bytes do not divide a row."""
        return 8 if self.cols % (8 * CHUNK) == 0 else 4

    @property
    def max_tiles(self) -> int:
        if not self.is_half:
            return MAX_WIDE_RUN_TILES
        if self.bits < 8:
            return MAX_RUN_TILES
        return MAX_BYTE_RUN_TILES if self.cols % TILE_M == 0 else MAX_NARROW_BYTE_RUN_TILES

    @property
    def run_cols(self) -> int:
        return 2 if 2 * self.row_tiles <= self.max_tiles and self.col_tiles % (2 * GROUP_WARPS) == 0 else 1

    @property
    def row_parts(self) -> int:
        """The fewest parts of a column tile's rows that are whole words of no more than ``max_tiles`` tiles.

        A part is whole groups, or lies in one: V of head_dim 96 in groups of 32 channels has three parts, not two.
        """
        def fits(tiles: int) -> bool:
            group = self.rows if self.is_per_token and not self.transposed else self.group_size // layout.TILE
            return tiles <= self.max_tiles and tiles * self.bits % BLOCK_BITS == 0 and (
                tiles % group == 0 or group % tiles == 0)
        return next(parts for parts in range(1, self.row_tiles + 1)
                    if self.row_tiles % parts == 0 and fits(self.row_tiles // parts))

    @property
    def run_rows(self) -> int:
        return self.rows // self.row_parts

    @property
    def runs(self) -> int:
        return self.col_tiles // self.run_cols * self.row_parts

    @property
    def lane_words(self) -> int:
        return layout.words_per_lane(self.rows, self.cols, self.bits)

    @property
    def run_words(self) -> int:
        return self.lane_words // self.runs

    @property
    def width(self) -> int:
        """Words of one access: a run starts at a multiple of it, whole or within a block of BLOCK_WORDS."""
        return math.gcd(layout.BLOCK_WORDS, self.run_words)

    @property
    def tile_bytes(self) -> int:
        """Bytes of the dequantized 16-bit tile."""
        return self.tile_rows * self.cols * 2

    @property
    def meta_rows(self) -> int:
        """Rows of a run that one read of metadata serves: a group, or, K per token, the tokens of a 16-byte access."""
        return 4 * 8 if self.is_per_token and not self.transposed else min(self.group_size, self.run_rows)

    @property
    def meta_blocks(self) -> int:
        return self.run_rows // self.meta_rows

    def run_place(self, run):
        """(first row, first column tile) of a run."""
        if self.row_parts == 1:
            return 0, run * self.run_cols
        return run % self.row_parts * self.run_rows, run // self.row_parts * self.run_cols

    def registers(self, block: int):
        """For each 16x16 tile of run 0 in rows ``block * meta_rows`` and on: (column tile, row tile, parts).

        parts: [(row8, col8, word, shift, bit position)] * 4, the 8x8 matrices of one stmatrix.x4 in the order of
        ``matrix_place``. Run r has the same positions, ``r * run_words`` words on and at ``run_place(r)``.
        """
        count = self.meta_rows // layout.TILE
        tiles = []
        for col_tile in range(self.run_cols):
            for row_tile in range(block * count, (block + 1) * count):
                parts = []
                for matrix in range(4):
                    row8, col8 = matrix_place(matrix)
                    row, col = layout.TILE * row_tile + 8 * row8, layout.TILE * col_tile + 8 * col8
                    word, _, byte, slot = layout.code_slot(row, col, self.rows, self.bits)
                    parts.append((row8, col8, word, 8 * byte, self.bits * slot))
                tiles.append((col_tile, row_tile, parts))
        return tiles

    def meta_offsets(self, run, block: int, g, t):
        """Byte offsets, in the metadata plane, of a lane's loads of ``meta_bytes`` for a block of rows of a run.

        K per channel: scales, then zero-points of channels 2t, 2t + 1; V: (scale, zero) pairs of tokens 2t, then of
        tokens 2t + 1; K per token: pairs of tokens g, g + 8, g + 16, g + 24 of the block.
        """
        row, col_tile = self.run_place(run)
        first = layout.TILE * col_tile
        if self.transposed:
            return [layout.token_meta_offset(row // self.group_size + block, 0, first + 2 * t + e) for e in (0, 1)]
        if self.is_per_token:
            return [layout.token_meta_offset(first // self.group_size, 0, row + self.meta_rows * block + g)]
        return [layout.channel_meta_offset(row // self.group_size + block, is_zero, first + 2 * t, self.head_dim)
                for is_zero in (0, 1)]

    @property
    def meta_words(self) -> list[int]:
        """Word, within what such a load brings, of each 8 columns of a run (K per token: 8 rows of a block)."""
        if self.transposed:
            return [layout.token_meta_offset(0, 0, 8 * j) // WORD for j in range(2 * self.run_cols)]
        if self.is_per_token:
            return [layout.token_meta_offset(0, 0, 8 * j) // WORD for j in range(self.meta_rows // 8)]
        return [layout.channel_meta_offset(0, 0, 8 * j, self.head_dim) // WORD for j in range(2 * self.run_cols)]

    def meta_index(self, col_tile: int, row_tile: int, row8: int, col8: int) -> int:
        """Which of ``meta_words`` a register of a tile takes."""
        if self.is_per_token and not self.transposed:
            return (2 * row_tile + row8) % (self.meta_rows // 8)
        return 2 * col_tile + col8

    @property
    def meta_bytes(self) -> int:
        return len(self.meta_words) * WORD


@dataclass(frozen=True)
class DecodeConfig:
    """Compile-time constants of one decode kernel; ``check`` raises ValueError with the reasons."""

    k: TileSide | BookTile
    v: TileSide | BookTile
    head_dim: int
    dtype: str = "float16"
    rows: int = COLUMNS  # query rows of a CTA
    features: tuple[str, ...] = ()
    packed_stages: int = 4
    mma_groups: int = 2  # warpgroups that take the tiles in turn, each with a K and a V^T tile of its own
    load_regs: int = 24
    dequant_regs: int = 72
    mma_regs: int = 208
    groups: int = 4

    # Warpgroups in order: load (warp 0: K, warp 1: V), dequant (of both sides, or K and V), MMA.
    load_k_warp, load_v_warp = 0, 1

    @property
    def path(self) -> str:
        return BOOK_TILE if self.has_books else "tile"

    @property
    def dequant_groups(self) -> int:
        """2: the first one's side is K, the second one's V."""
        return self.groups - 1 - self.mma_groups

    @property
    def first_mma_group(self) -> int:
        return self.groups - self.mma_groups

    @property
    def mma_threads(self) -> int:
        return self.mma_groups * GROUP_WARPS * WARP

    @property
    def threads(self) -> int:
        return self.groups * GROUP_WARPS * WARP

    @property
    def loads_arrive(self) -> int:
        """Arrivals on a packed stage's full barrier: the one load warp of the side, once, with its bytes."""
        return 1

    @property
    def dequants_arrive(self) -> int:
        """Arrivals of a dequant warpgroup on a tile's full barrier: every lane of the four warps that write it."""
        return GROUP_WARPS * WARP

    @property
    def readers_arrive(self) -> int:
        """Arrivals on an empty barrier, of packed stages and of tiles: every lane of the four warps that read them."""
        return GROUP_WARPS * WARP

    @property
    def joins_arrive(self) -> int:
        """Arrivals on the barrier where MMA groups meet: group 1's lanes, or all where query rows are columns."""
        return self.mma_threads if self.in_columns else GROUP_WARPS * WARP

    @property
    def in_columns(self) -> bool:
        """Query rows are WGMMA's columns, tokens and channels its rows (columns.py)."""
        return self.rows == COLUMNS

    def row_steps(self, blocks: int) -> tuple[int, int]:
        """Rows of ``blocks`` blocks of 64 between a warp's and the next warp's, and between a warp's in a block and in
        the next."""
        return layout.TILE, TILE_M

    def sums_bytes(self, side: TileSide) -> int:
        """Bytes of an MMA group's own memory of a side, which holds its sums at the end."""
        return side.tile_bytes

    @property
    def is_wide(self) -> bool:
        """Tiles, and O's registers, are so large that one warpgroup multiplies, with Q in shared memory."""
        return self.head_dim > 128

    @property
    def has_books(self) -> bool:
        """Whether a side has a codebook, which leaves shared memory for one tile of each side, so one MMA group."""
        return Kind.CODEBOOK in (self.k.kind, self.v.kind)

    @property
    def token_parts(self) -> int:
        """16-bit tiles of K that stand for one: stored keys are divided by weights, whose rounding has its own."""
        return 2 if self.k.kind is Kind.CODEBOOK else 1

    @property
    def staged_rows(self) -> int:
        """Rows of Q in shared memory."""
        return self.rows if self.in_columns else TILE_M * self.is_wide

    @property
    def query_bytes(self) -> int:
        return -(-self.staged_rows * self.head_dim * 2 // SMEM_ALIGN) * SMEM_ALIGN

    @property
    def weight_bytes(self) -> int:
        """P of an MMA group in shared memory."""
        return self.rows * TILE_N * 2 * self.in_columns

    @property
    def maxima_bytes(self) -> int:
        """Maxima of an MMA group's warps."""
        return self.rows * GROUP_WARPS * WORD * self.in_columns

    @property
    def row_bytes(self) -> int:
        """Bytes of one 16-bit row (a token's K or V)."""
        return 2 * self.head_dim

    @property
    def row_pitch(self) -> int:
        """Bytes between 16-bit rows in a stage: 16 more than a row, so that ldmatrix has no bank conflict."""
        return self.row_bytes + 16

    def stage_bytes(self, side: TileSide) -> int:
        """Bytes of a packed stage: one part of a record, or UNIT_TOKENS rows of 16 bit."""
        return layout.align_record(max(side.nbytes, UNIT_TOKENS * self.row_pitch))

    @property
    def smem_plan(self) -> dict[str, int]:
        """Bytes of each piece of shared memory, in order."""
        return {
            "query": self.query_bytes,
            "weights": self.mma_groups * self.weight_bytes,
            "k_tiles": self.mma_groups * self.k.tile_bytes,
            "v_tiles": self.mma_groups * self.v.tile_bytes,
            "k_packed": self.packed_stages * self.stage_bytes(self.k),
            "v_packed": self.packed_stages * self.stage_bytes(self.v),
            **self.book_plan,
            "maxima": self.mma_groups * self.maxima_bytes,
            "barriers": BARRIER_BYTES * (4 * (self.packed_stages + self.mma_groups) + 1),
        }

    @property
    def book_plan(self) -> dict[str, int]:
        """Bytes of the sides' codebooks, of 1 / weight of K's channels, and of a barrier for each side."""
        if not self.has_books:
            return {}
        sizes = [TABLE_BYTES * (side.kind is Kind.CODEBOOK) for side in (self.k, self.v)]
        return {"k_book": sizes[0], "v_book": sizes[1], "reciprocals": WORD * self.head_dim,
                "book_bars": 2 * BARRIER_BYTES}

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of the launch."""
        return -(-sum(self.smem_plan.values()) // SMEM_ALIGN) * SMEM_ALIGN

    def problems(self) -> list[str]:
        """Reasons why this configuration cannot run; empty if it can."""
        found = []
        served = PATHS[self.path].rows
        if self.rows not in served:
            found.append(f"rows: got {self.rows}, supported: {served}")
        if unknown := set(self.features) - set(FEATURES):
            found.append(f"features: got {sorted(unknown)}, supported: {FEATURES}")
        if self.smem_bytes > SMEM_LIMIT:
            found.append(f"shared memory: {self.smem_bytes} B at {self.packed_stages} packed and "
                         f"{self.mma_groups} tile stages, limit {SMEM_LIMIT} B")
        regs = self.load_regs + self.dequant_groups * self.dequant_regs + self.mma_groups * self.mma_regs
        launched = SM_REGISTERS // self.threads // 8 * 8  # of a thread: what setmaxnreg shares out
        if regs > launched * self.groups:
            found.append(f"registers: {regs} for a thread of each warpgroup, limit {launched * self.groups}")
        if max(self.load_regs, self.dequant_regs) > launched or self.mma_regs < launched:
            found.append(f"registers: a thread starts with {launched}, which load and dequant release and MMA takes")
        for name in ("load_regs", "dequant_regs", "mma_regs"):
            if getattr(self, name) % 8 or not 24 <= getattr(self, name) <= 240:
                found.append(f"{name}: got {getattr(self, name)}, supported: multiples of 8 from 24 to 240")
        return found

    def check(self) -> "DecodeConfig":
        if found := self.problems():
            raise ValueError("; ".join(found))
        return self


def plan_sides(fmt: Format, head_dim: int, dtype: str, in_columns: bool = False) -> list[TileSide | BookTile]:
    """K's and V's plans; in_columns: query rows are WGMMA's columns."""
    def tile_rows(rows: int) -> int:
        return -(-rows // TILE_M) * TILE_M if in_columns else rows

    return [BookTile(**vars(side)) if side.kind is Kind.CODEBOOK else
            TileSide(**vars(side), is_half=side.storage == dtype == "float16", tile_rows=tile_rows(side.rows))
            for side in fmt.specs(head_dim)]


def make_config(fmt: Format, head_dim: int, dtype: str, rows: int = COLUMNS,
                features: tuple[str, ...] = ()) -> DecodeConfig:
    """The configuration of a format; ValueError with the reasons if there is none.

    As many packed stages as keep memory busy, if they fit.
    """
    path = PATHS[BOOK_TILE if fmt.needs_codebooks else "tile"]
    if found := path.missing(fmt, head_dim, getattr(torch, dtype)):
        raise ValueError("; ".join(found))
    k, v = plan_sides(fmt, head_dim, dtype, rows == COLUMNS)
    one = DecodeConfig(k, v, head_dim, dtype, rows, features, packed_stages=1)
    if one.is_wide or one.has_books:
        one = replace(one, mma_groups=1, load_regs=40, dequant_regs=112, mma_regs=240)
    elif one.in_columns:
        one = replace(one, groups=5, load_regs=40, dequant_regs=96, mma_regs=120)
    stage = one.stage_bytes(k) + one.stage_bytes(v) + 4 * BARRIER_BYTES
    fitting = 1 + (SMEM_LIMIT - sum(one.smem_plan.values())) // stage
    wanted = -(-IN_FLIGHT_BYTES // (k.nbytes + v.nbytes))
    return replace(one, packed_stages=max(1, min(fitting, wanted, MAX_STAGES))).check()
