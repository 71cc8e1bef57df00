"""Instructions of a kernel on int8 digits, predicted from its configuration."""

from lowbit_attn.hopper.arith.int8.config import STEP_TILES
from lowbit_attn.hopper.warp.config import WarpConfig
from lowbit_attn.hopper.warp.counts import DIVISIONS, merge_exponentials


def expected(cfg: WarpConfig) -> dict[str, int]:
    """Predicted static SASS counts: see ``Arithmetic.expected_counts``."""
    k, v, mixed = cfg.k, cfg.v, int(cfg.has_mixed)
    boost_tiles = cfg.boost.col_tiles if cfg.boost else 0
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
        "MUFU.EX2": logits + 4 + mixed + merge_exponentials(cfg),
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
