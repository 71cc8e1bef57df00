"""Everything a decode kernel fixes at compile time: tiles, warp roles, register budgets, shared memory.

A side (K or V) is described once, by ``SidePlan``: where its bytes lie in a record, and which word, shift
and bit position give each register of a tile. The positions come from ``layout``.
"""

from dataclasses import dataclass

import torch

from lowbit_attn import layout
from lowbit_attn.formats.contract import Format
from lowbit_attn.hopper import PATHS
from lowbit_attn.hopper.register import config as register
from lowbit_attn.kernels import SMEM_LIMIT_BYTES, Checks

TARGET = "sm_90a"
SMEM_LIMIT = SMEM_LIMIT_BYTES[TARGET]
SM_REGISTERS = 65_536
WARP = 32
GROUP_WARPS = 4  # warps of a warpgroup
TILE_M = 64  # rows of one WGMMA; 1 to MAX_ROWS of them are query heads, the rest zero
TILE_N = layout.PAGE_TOKENS  # tokens of a tile, packed or 16 bit
MAX_ROWS = 8  # query heads of a KV head: one row of the accumulator a thread
UNIT_TOKENS = 32  # tokens of a 16-bit tile in one packed stage; each lane of the load warp copies one row
UNITS = TILE_N // UNIT_TOKENS
CHUNK = 8  # 16-bit values in 16 bytes: one row of an 8x8 matrix, the unit of the 128-byte swizzle
ATOM_CHUNKS = 8  # chunks in a 128-byte row of the swizzle atom
SMEM_ALIGN = 1024  # an 8-row atom of the 128-byte swizzle; shared memory is a multiple of it
BARRIER_BYTES = 8
WORD = 4  # bytes
SASS_NEED = ("UBLKCP", "STSM", "HGMMA", "LDSM", "SYNCS")
SASS_FORBID = ("LDL", "STL")


def tile_chunk(row, chunk_col, rows):
    """Index of 16 bytes in a 16-bit tile that WGMMA reads: K-major, 128-byte swizzle, ``rows`` rows.

    row: 0 .. rows - 1; chunk_col: column // 8. Serves Python ints, numpy and the DSL's integers.
    """
    atom, within = chunk_col // ATOM_CHUNKS, chunk_col % ATOM_CHUNKS
    return (atom * rows + row) * ATOM_CHUNKS + (within ^ (row % ATOM_CHUNKS))


@dataclass(frozen=True)
class SidePlan:
    """One side of a record, and the share of its 16x16 tiles that each of four dequant warps unpacks."""

    bits: int
    transposed: bool  # V: rows = channels, columns = tokens
    head_dim: int
    part_offset: int  # bytes from the start of the record
    part_bytes: int
    meta_offset: int  # bytes from the start of the part

    @property
    def rows(self) -> int:
        return self.head_dim if self.transposed else TILE_N

    @property
    def cols(self) -> int:
        return TILE_N if self.transposed else self.head_dim

    @property
    def row_tiles(self) -> int:
        return self.rows // layout.TILE

    @property
    def warp_cols(self) -> int:
        """Column tiles that one warp unpacks: a contiguous run of words."""
        return self.cols // layout.TILE // GROUP_WARPS

    @property
    def warp_words(self) -> int:
        return layout.words_per_lane(self.rows, self.cols, self.bits) // GROUP_WARPS

    @property
    def tile_bytes(self) -> int:
        """Bytes of the dequantized 16-bit tile."""
        return self.rows * self.cols * 2

    def registers(self):
        """For each 16x16 tile of warp 0: (column tile, row tile, [(col8, word, shift, bit position)] * 4).

        The four entries are the 8x8 matrices of one stmatrix.x4 in the order of ``matrix_place``. Warp w
        has the same positions, ``w * warp_words`` words and ``w * warp_cols`` column tiles further on.
        """
        tiles = []
        for col_tile in range(self.warp_cols):
            for row_tile in range(self.row_tiles):
                parts = []
                for matrix in range(4):
                    row8, col8 = matrix_place(matrix)
                    row, col = layout.TILE * row_tile + 8 * row8, layout.TILE * col_tile + 8 * col8
                    word, _, byte, slot = layout.code_slot(row, col, self.rows, self.bits)
                    parts.append((col8, word, 8 * byte, self.bits * slot))
                tiles.append((col_tile, row_tile, parts))
        return tiles


    def meta_offsets(self, warp, t):
        """Byte offsets, in the metadata plane, of the two loads of ``meta_bytes`` of a lane of this t.

        K: scales, then zero-points of the channels; V: (scale, zero) pairs of tokens 2t, then of tokens 2t + 1.
        """
        first = layout.TILE * self.warp_cols * warp + 2 * t
        if self.transposed:
            return [layout.token_meta_offset(0, 0, first + e) for e in (0, 1)]
        return [layout.channel_meta_offset(0, is_zero, first, self.head_dim) for is_zero in (0, 1)]

    def meta_words(self) -> list[int]:
        """Word, within what such a load brings, of each 8-column group of a warp's column tiles."""
        groups = range(2 * self.warp_cols)
        if self.transposed:
            return [layout.token_meta_offset(0, 0, 8 * j) // WORD for j in groups]
        return [layout.channel_meta_offset(0, 0, 8 * j, self.head_dim) // WORD for j in groups]

    @property
    def meta_bytes(self) -> int:
        return 2 * self.warp_cols * WORD


def matrix_place(matrix):
    """(row8, col8) within a 16x16 tile of the 8x8 matrix that register ``matrix`` of a x4 access holds."""
    return matrix % 2, matrix // 2


def lane_place(lane):
    """(row within a 16x16 tile, col8) of the 16 bytes that ``lane`` addresses in a x4 access."""
    row8, col8 = matrix_place(lane // 8)
    return 8 * row8 + lane % 8, col8


@dataclass(frozen=True)
class DecodeConfig:
    """Compile-time constants of one decode kernel; ``check`` raises ValueError with the reasons."""

    k: SidePlan
    v: SidePlan
    head_dim: int
    dtype: str = "float16"
    packed_stages: int = 4
    tile_stages: int = 2
    load_regs: int = 40
    dequant_regs: int = 120
    mma_regs: int = 232

    # Warpgroups in order: load (warp 0: K, warp 1: V), dequant K, dequant V, MMA.
    load_k_warp, load_v_warp = 0, 1
    dequant_k_group, dequant_v_group, mma_group = 1, 2, 3
    groups = 4

    @property
    def threads(self) -> int:
        return self.groups * GROUP_WARPS * WARP

    @property
    def loads_arrive(self) -> int:
        """Arrivals on a packed stage's full barrier: the one load warp of the side, once, with its bytes."""
        return 1

    @property
    def dequants_arrive(self) -> int:
        """Arrivals of a dequant warpgroup: one a warp, on packed empty and on tile full barriers."""
        return GROUP_WARPS

    @property
    def mmas_arrive(self) -> int:
        """Arrivals on a tile's empty barrier: one an MMA warp."""
        return GROUP_WARPS

    @property
    def row_bytes(self) -> int:
        """Bytes of one 16-bit row (a token's K or V)."""
        return 2 * self.head_dim

    @property
    def row_pitch(self) -> int:
        """Bytes between 16-bit rows in a stage: 16 more than a row, so that ldmatrix has no bank conflict."""
        return self.row_bytes + 16

    @property
    def stage_bytes(self) -> int:
        """Bytes of a packed stage: one part of a record, or UNIT_TOKENS rows of 16 bit."""
        return layout.align_record(max(self.k.part_bytes, self.v.part_bytes, UNIT_TOKENS * self.row_pitch))

    @property
    def smem_plan(self) -> dict[str, int]:
        """Bytes of each piece of shared memory, in order."""
        return {
            "k_tiles": self.tile_stages * self.k.tile_bytes,
            "v_tiles": self.tile_stages * self.v.tile_bytes,
            "k_packed": self.packed_stages * self.stage_bytes,
            "v_packed": self.packed_stages * self.stage_bytes,
            "barriers": 4 * BARRIER_BYTES * (self.packed_stages + self.tile_stages),
        }

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of the launch."""
        return -(-sum(self.smem_plan.values()) // SMEM_ALIGN) * SMEM_ALIGN

    def problems(self) -> list[str]:
        """Reasons why this configuration cannot run; empty if it can."""
        found = []
        if self.smem_bytes > SMEM_LIMIT:
            found.append(f"shared memory: {self.smem_bytes} B at {self.packed_stages} packed and "
                         f"{self.tile_stages} tile stages, limit {SMEM_LIMIT} B")
        budget = (self.load_regs + 2 * self.dequant_regs + self.mma_regs) * GROUP_WARPS * WARP
        if budget > SM_REGISTERS:
            found.append(f"registers: {budget} for all roles, limit {SM_REGISTERS}")
        for name in ("load_regs", "dequant_regs", "mma_regs"):
            if getattr(self, name) % 8 or not 24 <= getattr(self, name) <= 240:
                found.append(f"{name}: got {getattr(self, name)}, supported: multiples of 8 from 24 to 240")
        return found

    def check(self) -> "DecodeConfig":
        if found := self.problems():
            raise ValueError("; ".join(found))
        return self


def make_config(fmt: Format, head_dim: int, dtype: str) -> DecodeConfig:
    """The configuration of a format; ValueError with the reasons if there is none."""
    if found := PATHS["tile"].missing(fmt, head_dim, getattr(torch, dtype), 1, 1):
        raise ValueError("; ".join(found))
    record = fmt.record(head_dim)
    (k_codes, k_meta), (v_codes, v_meta) = record.k_planes, record.v_planes
    k = SidePlan(fmt.k.bits, False, head_dim, k_codes.offset, record.v_offset, k_meta.offset - k_codes.offset)
    v = SidePlan(fmt.v.bits, True, head_dim, v_codes.offset, record.nbytes - record.v_offset,
                 v_meta.offset - v_codes.offset)
    stages = 4 if head_dim == 128 else 8  # about 70 KB of packed bytes in flight an SM
    return DecodeConfig(k, v, head_dim, dtype, packed_stages=stages).check()


def expected_counts(head_dim: int) -> dict[str, int]:
    """Predicted static SASS counts: what one warp of each role issues for one packed page, plus the 16-bit path.

    Loops over pages and over units are not unrolled and K and V have code of their own, so a static count is
    the sum over both. A CTA issues 4 times the page's share a page, as every role has 4 warps.
    """
    tiles = TILE_N * head_dim // layout.TILE**2 // GROUP_WARPS  # 16x16 tiles a warp, side and page
    words = tiles  # at 4 bits a lane's word is one tile
    plain = 2 * head_dim // (layout.TILE * GROUP_WARPS)  # 16x16 tiles a warp, side and unit
    return {
        "HGMMA": head_dim // layout.TILE + TILE_N // layout.TILE,  # k16 blocks of S and of O
        "STSM": 2 * tiles + 2 * plain,
        "LDSM": 2 * plain,
        "LDS.128": 2 * words // layout.BLOCK_WORDS + (4 if head_dim == 128 else 2),  # K's metadata at 64: LDS.64
        # (word & mask) | magic, one a register; dead tokens of V, 4 a tile; 64 for parities, swizzles and lane fields
        "LOP3": 2 * 4 * words + 4 * plain + 64,
        "HFMA2": 2 * 8 * words,  # to the exact code, then scale and zero
    }


EXPECTED = {head_dim: expected_counts(head_dim) for head_dim in PATHS["tile"].head_dims}


def checks(fmt: Format, head_dim: int, target: str = TARGET, path: str = "tile", rows: int = 8,
           dtype: str = "float16", without: tuple[str, ...] = ()) -> Checks:
    """What the SASS of the decode kernel of a path must show; rows and dtype: register path only."""
    if path == "register":
        return register.checks(fmt, head_dim, dtype, rows, without)
    cfg = make_config(fmt, head_dim, "float16")
    return Checks(SASS_NEED, SASS_FORBID, tuple(EXPECTED[head_dim].items()), cfg.smem_bytes)
