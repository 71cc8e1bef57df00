"""int8 on masked bytes, up to 4 query rows, each in two digits; what follows from it for a kernel."""

from types import ModuleType

from lowbit_attn import layout
from lowbit_attn.hopper.common.tuning import PACE_INT8, Rule
from lowbit_attn.hopper.warp.config import Arithmetic, WarpConfig
from lowbit_attn.registers import BYTE_STEP

ROWS = 4  # query rows: two columns each
MAX_TILES = 8  # row tiles of V multiplied side by side: their accumulators are 32 registers
STEP_TILES = BYTE_STEP // layout.TILE  # column tiles of one multiply


class Int8(Arithmetic):
    """Masked bytes times 16-bit fixed-point numbers of two digits: a lane has one query row, its t."""

    name = "int8"
    query_width = 4  # q * softmax_scale_log2 in fp32, which each lane reads a step at a time
    merge_pad = 8  # the four rows of a warp's lanes then lie in different banks
    has_true_scale = True
    sass_need = ("IMMA", "HMMA", "UBLKCP", "LDSM", "MOVM", "SYNCS")

    @property
    def steps(self) -> ModuleType:
        from lowbit_attn.hopper.arith.int8 import steps

        return steps

    @property
    def boost(self) -> ModuleType:
        """The module of boosted channels of K; imports the DSL."""
        from lowbit_attn.hopper.arith.int8 import boost

        return boost

    def row_choices(self, head_dim: int) -> list[int]:
        return [ROWS]

    def col_blocks(self, rows: int) -> int:
        return 1

    def lane_rows(self, rows: int) -> int:
        return 1

    def column_row(self, t, column: int):
        return t

    def operand_row(self, g, block: int):
        return g // 2

    def has_shared_query(self, cfg: WarpConfig) -> bool:
        return True

    def has_halves(self, cfg: WarpConfig) -> bool:
        """With one group of channels, all of whose sums fit: they are formed over half of the tokens, then the rest."""
        v = cfg.v
        words = v.runs[-1].words_of(v.early_tiles * v.row_tiles)
        is_whole = words % layout.BLOCK_WORDS == 0 and v.early_tiles >= 0 and v.early_tiles % STEP_TILES == 0
        return (v.groups == 1 and v.row_tiles <= MAX_TILES and is_whole
                and cfg.ctas_per_sm == 1 and not cfg.own_queries)

    def pace(self, cfg: WarpConfig) -> Rule:
        return PACE_INT8


INT8 = Int8()
