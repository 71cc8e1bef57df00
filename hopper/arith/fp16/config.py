"""fp16 on raw codes (subnormals.py): 8 or 16 query rows, the columns of m16n8k16; what follows from it for a kernel."""

from lowbit_attn import layout, subnormals
from lowbit_attn.hopper.common.tuning import PACE_FP16, PACE_FP16_LARGE_PAGES, Rule
from lowbit_attn.hopper.warp.config import COLUMNS, Arithmetic, WarpConfig

MAX_ROWS = {256: COLUMNS}  # else 2 * COLUMNS: O alone would take 128 registers
CHUNK_TILES = 8  # of K per token, where a page's S is formed in chunks


def chunk_tiles(cfg: WarpConfig) -> int:
    """Row tiles of K per token formed at a time with one channel group: two S of 128 x 16 would spill.

    8 tiles of the group at once (whole words of codes): with 16, ptxas holds so many words that it spills, too.
    """
    if cfg.k.groups == 1 or cfg.col_blocks == 1:
        return cfg.k.row_tiles
    return max(CHUNK_TILES * layout.TILE // cfg.k.group_size, layout.tiles_per_word(cfg.k.bits))


def loops_over_groups(cfg: WarpConfig) -> bool:
    """Whether channel groups of K per token are a loop at run time: unrolled, ptxas spills up to 8 words a page."""
    return cfg.k.is_per_token and chunk_tiles(cfg) < cfg.k.row_tiles


class Fp16(Arithmetic):
    """Raw codes as fp16 subnormals: one AND an operand register."""

    name = "fp16"
    sass_need = ("HMMA", "UBLKCP", "LDSM", "MOVM", "SYNCS")

    @property
    def steps(self):
        from lowbit_attn.hopper.arith.fp16 import steps

        return steps

    def row_choices(self, head_dim: int) -> list[int]:
        return [n for n in (COLUMNS, 2 * COLUMNS) if n <= MAX_ROWS.get(head_dim, n)]

    def col_blocks(self, rows: int) -> int:
        return rows // COLUMNS

    def lane_rows(self, rows: int) -> int:
        return 2 * self.col_blocks(rows)

    def column_row(self, t, column: int):
        return COLUMNS * (column // 2) + 2 * t + column % 2

    def operand_row(self, g, block: int):
        return g + COLUMNS * block

    def has_shared_query(self, cfg: WarpConfig) -> bool:
        return cfg.col_blocks > 1 or cfg.head_dim > 128

    def may_spill(self, cfg: WarpConfig) -> bool:
        """255 registers fall a few short in 16 rows, beside K per token, groups of K or V, or boosted channels; and in
        256 channels of O, beside groups of K or, with every feature, boosted channels and groups of V."""
        if cfg.col_blocks > 1:
            return cfg.k.is_per_token or cfg.k.groups > 1 or cfg.v.groups > 1 or bool(cfg.boost)
        is_full = bool(cfg.boost) and cfg.v.groups > 1 and cfg.has_softcap and cfg.has_window
        return cfg.head_dim > 128 and (cfg.k.groups > 1 or is_full)

    def recentred_pages(self, cfg: WarpConfig) -> int:
        """So many pages add up before O is centred; 1 where registers are short: the weights' sums take some until
        then."""
        return subnormals.RECENTRED_PAGES if cfg.v.groups == 1 and not cfg.k.is_per_token else 1

    def pace(self, cfg: WarpConfig) -> Rule:
        return PACE_FP16_LARGE_PAGES if cfg.page_warps < cfg.warps else PACE_FP16


FP16 = Fp16()
