"""What a kernel of this path fixes at compile time; the rest is as on the tile path with query rows as columns."""

from dataclasses import dataclass, replace

import torch

from lowbit_attn import layout
from lowbit_attn.formats.contract import Format
from lowbit_attn.hopper.common.support import PATHS, WGMMA
from lowbit_attn.hopper.tile.config import (
    BARRIER_BYTES,
    GROUP_WARPS,
    SMEM_LIMIT,
    TILE_M,
    UNIT_TOKENS,
    WORD,
    DecodeConfig,
    TileSide,
)

STEPS = 2  # 16-column steps of a multiply that a lane unpacks together: one access to metadata serves both
ROWS = 32  # query rows of a CTA: the columns of its multiplies
BLOCK_UNITS = TILE_M // UNIT_TOKENS  # fills of 16-bit keys that a multiply waits for together
MAX_STAGES = 4  # of an MMA group's own rings, which hold its sums at the end


@dataclass(frozen=True)
class OperandSide(TileSide):
    """One side of a record as A operands: warp w of a warpgroup has row tiles w * blocks .. (w + 1) * blocks - 1, one
    in each of the multiply's blocks of 64 rows, so that its rows follow each other."""

    @property
    def blocks(self) -> int:
        """Blocks of 64 rows, and row tiles of a warp."""
        return self.rows // TILE_M

    @property
    def tile_words(self) -> int:
        """Words a lane that a column tile has."""
        return layout.words_per_lane(self.rows, layout.TILE, self.bits)

    @property
    def warp_words(self) -> int:
        """Words of a column tile that a warp reads."""
        return max(1, self.tile_words // GROUP_WARPS)

    def first_word(self, warp):
        """The first of them."""
        return warp * self.tile_words // GROUP_WARPS

    @property
    def sharing_warps(self) -> int:
        """Warps whose codes lie in one word."""
        return max(1, GROUP_WARPS // self.tile_words)

    def warp_shift(self, warp):
        """Bits of a shared word below the first code of a warp."""
        return warp % self.sharing_warps * (8 // self.sharing_warps)

    def access(self, col_tile: int, warp, lane):
        """Index of the access of ``warp_words`` words to a column tile's codes."""
        def at(word):
            return layout.word_offset(word, 0) // WORD

        return (at(col_tile * self.tile_words) + at(self.first_word(warp)) + lane * layout.BLOCK_WORDS
                ) // self.warp_words

    def positions(self):
        """[(block, register of the A operand, word, shift, bit position)] of the warp's words of a column tile."""
        tiles = layout.tiles_per_word(self.bits)
        found = []
        for block in range(self.blocks):
            for register in range(4):
                row8, col8 = register % 2, register // 2
                word, _, byte, slot = layout.code_slot(layout.TILE * block + 8 * row8, 8 * col8, self.rows, self.bits)
                found.append((block, register, word % self.warp_words, 8 * byte, self.bits * slot))
        assert tiles * self.warp_words * self.sharing_warps >= self.blocks
        return found

    def meta_accesses(self, pair: int, warp, g, t):
        """Indices of the 16-byte accesses to metadata for a warp's rows and column tiles 2 pair, 2 pair + 1: K per
        channel: scales, zero-points; V: tokens 2t, tokens 2t + 1; K per token: its tokens, for their group there."""
        first_row, first = layout.TILE * self.blocks * warp, layout.TILE * STEPS * pair
        if self.transposed:
            offsets = [layout.token_meta_offset(first_row // self.group_size, 0, first + 2 * t + e) for e in (0, 1)]
        elif self.is_per_token:
            offsets = [layout.token_meta_offset(first // self.group_size, 0, first_row + g)]
        else:
            offsets = [layout.channel_meta_offset(first_row // self.group_size, z, first + 2 * t, self.head_dim)
                       for z in (0, 1)]
        return [offset // 16 for offset in offsets]

    def meta_word(self, block: int, register: int, step: int) -> int:
        """Which word of such an access a register of column tile 2 pair + step takes."""
        if self.is_per_token and not self.transposed:
            return 2 * block + register % 2
        return 2 * step + register // 2


@dataclass(frozen=True)
class WgmmaConfig(DecodeConfig):
    """Compile-time constants of one kernel; ``check`` raises ValueError with the reasons.

    packed_stages: of the rings that each MMA group has for itself.
    """

    mma_groups: int = 3  # as many as their registers leave room for: one's latencies hide behind the others' work
    load_regs: int = 32
    mma_regs: int = 160

    @property
    def path(self) -> str:
        return WGMMA

    @property
    def in_columns(self) -> bool:
        return True

    @property
    def is_wide(self) -> bool:
        return False

    def row_steps(self, blocks: int) -> tuple[int, int]:
        return layout.TILE * blocks, layout.TILE

    def sums_bytes(self, side: TileSide) -> int:
        return self.packed_stages * self.stage_bytes(side)

    @property
    def smem_plan(self) -> dict[str, int]:
        groups, stages = self.mma_groups, self.mma_groups * self.packed_stages
        return {
            "query": self.query_bytes,
            "weights": groups * self.weight_bytes,
            "k_packed": stages * self.stage_bytes(self.k),
            "v_packed": stages * self.stage_bytes(self.v),
            "maxima": groups * self.maxima_bytes,
            "barriers": BARRIER_BYTES * (4 * stages + 1),
        }

    @property
    def of_tokens(self) -> "WgmmaConfig":
        """This configuration where S has the tokens of a 16-bit tile as its rows, each block's in order."""
        return TokenConfig(**vars(self))

    @property
    def may_spill(self) -> bool:
        """Two words, where a window's masks come beside 128 channels of 2-bit K."""
        return "window" in self.features and self.head_dim == 128 and self.k.bits == 2

    def problems(self) -> list[str]:
        found = super().problems()
        sums = 4 * self.rows * (self.head_dim + 4)
        if sums > self.sums_bytes(self.k):
            found.append(f"rings of {self.sums_bytes(self.k)} B, which hold no sums of {sums} B")
        if self.packed_stages < BLOCK_UNITS:  # of 16-bit keys, for which one multiply waits together
            found.append(f"rings of {self.packed_stages} fills, {BLOCK_UNITS} are needed")
        return found


@dataclass(frozen=True)
class TokenConfig(WgmmaConfig):
    """``WgmmaConfig.of_tokens``."""

    def row_steps(self, blocks: int) -> tuple[int, int]:
        return layout.TILE, TILE_M


def make_config(fmt: Format, head_dim: int, dtype: str, rows: int = ROWS,
                features: tuple[str, ...] = ()) -> WgmmaConfig:
    """The configuration of a format; ValueError with the reasons if there is none."""
    if found := PATHS[WGMMA].missing(fmt, head_dim, getattr(torch, dtype)):
        raise ValueError("; ".join(found))
    k, v = (OperandSide(**vars(side), is_half=True, tile_rows=side.rows) for side in fmt.specs(head_dim))
    one = WgmmaConfig(k, v, head_dim, dtype, rows, features, packed_stages=1)
    stage = one.mma_groups * (one.stage_bytes(k) + one.stage_bytes(v) + 4 * BARRIER_BYTES)
    fitting = 1 + (SMEM_LIMIT - sum(one.smem_plan.values())) // stage
    return replace(one, packed_stages=max(1, min(fitting, MAX_STAGES))).check()
