"""Instructions of a kernel on fp16 codes, predicted from its configuration."""

from lowbit_attn.hopper.arith.fp16.config import loops_over_groups
from lowbit_attn.hopper.warp.config import WarpConfig
from lowbit_attn.hopper.warp.counts import DIVISIONS, merge_exponentials


def expected(cfg: WarpConfig) -> dict[str, int]:
    """Predicted static SASS counts: see ``Arithmetic.expected_counts``."""
    k, v = cfg.k, cfg.v
    shown = k.groups if loops_over_groups(cfg) else 1  # channel groups of K that share their instructions
    steps = cfg.boost.col_tiles if cfg.boost else 0
    tiles = k.row_tiles * (k.col_tiles + steps) // shown + v.row_tiles * v.col_tiles
    code_words = sum(side.words_of(side.row_tiles * n) for side, n in ((k, (k.col_tiles + steps) // shown),
                                                                       (v, v.col_tiles)))
    # sums of q' (per token); bias and centring (per channel)
    around = 1 if k.is_per_token else 1 + k.groups
    around = k.col_tiles // (shown if k.is_per_token else 1) * around + 2 * steps
    multiplies = tiles + around + v.col_tiles * v.groups  # the last: sums of (p s)~
    tokens = k.col_tiles + v.row_tiles
    counts = {
        "HMMA": cfg.col_blocks * (multiplies + tokens),
        "LDSM": tokens + steps,
        # an AND a register; dead tokens of V; addresses, exponents and parities
        "LOP3": 4 * (tiles + v.row_tiles) + 100,
        "MOVM": cfg.col_blocks * (2 * cfg.v.col_tiles * cfg.v.groups + 2 + 2 * k.col_tiles * bool(steps)),
        "MUFU.EX2": 2 * cfg.col_blocks * (2 * cfg.v.col_tiles + 8) + merge_exponentials(cfg),
    }
    if cfg.k.storage == cfg.v.storage == "float16":
        counts["SHF"] = code_words + 40  # word >> 8; bf16 metadata are widened by shifts too
    if not cfg.k.is_per_token and cfg.k.storage == "float16":
        exact = 1  # multiply of two scales by a power of two; products with bf16 scales are formed in fp32
        counts["HMUL2"] = 2 * (cfg.k.col_tiles * cfg.k.groups + steps) * (exact + cfg.col_blocks)
    if cfg.has_mixed:
        k_tiles = (k.col_tiles + steps) // shown
        counts["HMMA"] += cfg.col_blocks * (around + k_tiles + v.row_tiles)
        counts["LDSM"] += v.row_tiles + steps
        counts["LOP3"] += 4 * k_tiles
        counts["MOVM"] += cfg.col_blocks * 2
        counts["MUFU.EX2"] += 2 * cfg.col_blocks * 3
        if "SHF" in counts:
            counts["SHF"] += k_tiles * 2
        if "HMUL2" in counts:
            counts["HMUL2"] *= 2
    if cfg.has_softcap:
        logits = 2 * cfg.col_blocks * (k.row_tiles + cfg.has_mixed + 1) * 2
        counts["MUFU.EX2"] += logits
        counts["MUFU.RCP"] = logits + DIVISIONS
    return counts
