"""Lookups in codebooks that lie in shared memory, up to 2, 4 or 8 query rows; what follows from it for a kernel."""

from lowbit_attn.formats.codebook_order import BOOK_ROW_BYTES, ENTRIES
from lowbit_attn.hopper.common.tuning import BOOK_WARPS, MAX_WARPS, PACE_INT8, Rule
from lowbit_attn.hopper.warp.config import WORD, Arithmetic, SidePlan, WarpConfig

TWO, FEW, MANY = 2, 4, 8  # query rows: of a lane t // 2, or t, as on the integer path, or 2t and the next
COLUMNS = 8  # of a multiply
TABLE_BYTES = ENTRIES * BOOK_ROW_BYTES  # of a side's codebook, or of the products that take its place
LARGE_PART = 6 << 10  # bytes
FACTORS = 4  # of a query row, fp32: see query.Factor
TABLE_VEC_SIZE = 4  # channels of a code of K whose products with few rows of q are looked up; else entries are
BOOK_SIDES = ("k", "v")


def uses_table(cfg: WarpConfig) -> bool:
    """Whether K's lookups give products of entries with q (VQ-LLM's K side as a table), not entries."""
    return cfg.k.group_size == TABLE_VEC_SIZE and cfg.rows <= FEW


def groups(side: SidePlan) -> int:
    """Groups of channels that share a code."""
    return side.head_dim // side.group_size


def rotations(side: SidePlan) -> int:
    """R of codebook_order: steps after which a lane has asked for every group of its run."""
    return min(4, groups(side) // (8 if side.transposed else 4))


def lane_bytes(side: SidePlan) -> int:
    """Codes of a lane in 8 tokens of K, or in 16 tokens of V."""
    return groups(side) // (2 if side.transposed else 4)


class Codebook(Arithmetic):
    """fp16 entries, or products with them, gathered from shared memory into operands of m16n8k16."""

    query_width = 4  # q of stored keys in fp32
    query_parts = 2  # weights leave no 16-bit number
    merge_pad = 8
    sass_need = ("HMMA", "UBLKCP", "PRMT", "LDSM", "MOVM", "SYNCS")

    def __init__(self, name: str, rows: int):
        self.name, self.rows = name, rows
        self.most_warps = MAX_WARPS if rows == MANY else BOOK_WARPS  # MANY need more registers

    @property
    def steps(self):
        from lowbit_attn.hopper.arith.codebook import steps

        return steps

    def row_choices(self, head_dim: int) -> list[int]:
        return [self.rows]

    def col_blocks(self, rows: int) -> int:
        return 1

    def lane_rows(self, rows: int) -> int:
        return max(1, self.rows // FEW)

    def column_row(self, t, column: int):
        return 2 * t + column if self.rows == MANY else t // (FEW // self.rows)

    def operand_row(self, g, block: int):
        return g // (COLUMNS // self.rows)

    def has_shared_query(self, cfg: WarpConfig) -> bool:
        return True

    def book_bytes(self, cfg: WarpConfig) -> int:
        return len(BOOK_SIDES) * TABLE_BYTES + (self.rows * FACTORS + cfg.head_dim) * WORD

    def may_spill(self, cfg: WarpConfig) -> bool:
        """A word, where a window's masks come beside q' as an operand."""
        return cfg.has_window and not uses_table(cfg)

    def page_cut(self, k: SidePlan, v: SidePlan) -> int:
        """2 where parts are large, and few rings would fit beside the codebooks, or where S takes many registers."""
        return 2 if self.rows == MANY or max(k.nbytes, v.nbytes) > LARGE_PART else 1

    def pace(self, cfg: WarpConfig) -> Rule:
        return PACE_INT8


CODEBOOK2, CODEBOOK, CODEBOOK8 = Codebook("codebook2", TWO), Codebook("codebook", FEW), Codebook("codebook8", MANY)
