"""int8 on masked bytes, up to 4 query rows, each in two digits; what follows from it for a kernel."""

from lowbit_attn import layout
from lowbit_attn.hopper.common.tuning import PACE_INT8, Rule
from lowbit_attn.hopper.warp.config import DIVISIONS, WarpConfig
from lowbit_attn.hopper.warp.contract import Arithmetic
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
    def steps(self):
        from lowbit_attn.hopper.arith.int8 import steps

        return steps

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

    def expected_counts(self, cfg: WarpConfig) -> dict[str, int]:
        k, v, mixed = cfg.k, cfg.v, int(cfg.has_mixed)
        boost_tiles = cfg.boost.steps if cfg.boost else 0
        key_tiles = k.col_tiles + boost_tiles
        full_steps, lone = key_tiles // STEP_TILES, boost_tiles % STEP_TILES
        tokens = k.col_tiles + (1 + mixed) * v.row_tiles
        masked = 2 * key_tiles * (k.row_tiles + mixed) * (k.bits < 8) + 2 * v.row_tiles * v.col_tiles * (v.bits < 8)
        logits = 2 * (k.row_tiles + mixed)
        operands = k.groups + mixed  # times that q s becomes digits
        key_words = 4 * (k.col_tiles // STEP_TILES) * operands  # of metadata
        widened = sum(n for side, n in ((k, key_words), (v, 2 * v.col_tiles * v.groups)) if side.storage == "bfloat16")
        counts = {
            "IMMA": (full_steps + lone) * (k.row_tiles + mixed) + v.row_tiles * v.col_tiles // STEP_TILES,
            "HMMA": tokens,
            "LDSM": tokens,
            "MOVM": v.col_tiles * v.groups + 2 * (1 + mixed),
            "MUFU.EX2": logits + 4 + mixed + cfg.merge_exponentials,
            # an AND a register, two sign flips a step and token group, high halves of bf16 metadata; dead tokens of V;
            # addresses and parities
            "LOP3": masked + widened + (2 * full_steps + lone) * operands + 4 * v.row_tiles + 70,
            # digits of q s to two words and back from the other lane; of p s
            "PRMT": (4 * full_steps + 2 * lone) * operands + v.col_tiles * v.groups + 10,
        }
        if cfg.has_softcap:
            counts["MUFU.EX2"] += logits + 2
            counts["MUFU.RCP"] = logits + 2 + DIVISIONS
        return counts


INT8 = Int8()
