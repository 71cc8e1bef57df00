"""Makes the configuration of a warp's kernel from a format: sides, warps, slots of a ring; or says why it cannot."""

from dataclasses import replace

from lowbit_attn import layout
from lowbit_attn.formats.contract import Format
from lowbit_attn.hopper.common.tuning import MANY_WARPS, MAX_SLOTS, MAX_WARPS, MIN_SLOTS, UNDER_WAY
from lowbit_attn.hopper.warp.config import (
    BOOST_BITS,
    COLUMNS,
    PLAN_WORDS,
    TARGET,
    UNIT_TOKENS,
    WORD,
    Arithmetic,
    Schedule,
    SidePlan,
    WarpConfig,
)
from lowbit_attn.kernels.key import FEATURES, LEVEL_WINDOW, SMEM_LIMIT_BYTES

SMEM_LIMIT = SMEM_LIMIT_BYTES[TARGET]
SM_SMEM, BLOCK_SMEM = 233_472, 1024  # bytes of shared memory an SM has, and those that a CTA takes beside its own
HEAD_DIMS = (64, 96, 128, 256)


def smem_limit(ctas_per_sm: int) -> int:
    """Bytes of shared memory of each of so many CTAs an SM."""
    return min(SMEM_LIMIT, SM_SMEM // ctas_per_sm - BLOCK_SMEM)


def plan_boost(k: SidePlan) -> SidePlan | None:
    """The high codes of boosted channels of K as a matrix of their own, whose columns are slots; or None."""
    if not (high := k.high):
        return None
    return replace(k, bits=high.bits, head_dim=high.slots, codes=high.codes)


def make_config(fmt: Format, head_dim: int, dtype: str, rows: int, arithmetic: Arithmetic, schedule: Schedule,
                features: tuple[str, ...] = ()) -> WarpConfig:
    """The configuration of a format: as many warps as leave ``MIN_SLOTS`` each, then the slots they need.

    ValueError with the reasons if there is none.
    """
    k, v = (SidePlan(**vars(spec)) for spec in fmt.specs(head_dim))
    if v.wide:
        v = replace(v, nbytes=v.wide.positions)  # the last plane, which is not read
    k, v = arithmetic.sides(k, v)
    boost = plan_boost(k)
    slot = max(k.nbytes, v.nbytes)
    queries = rows * head_dim * arithmetic.query_width * (2 if boost else 1)  # once more by channel
    free = smem_limit(schedule.ctas_per_sm) - queries * (not schedule.own_queries)
    free -= layout.RECORD_ALIGN * 8  # pace, and barriers: room for 112 of 8 bytes
    has_mixed = fmt.window_v > fmt.window_k
    is_slim = not features and rows <= COLUMNS and head_dim <= 128 and k.groups == v.groups == 1
    is_slim = is_slim and not (has_mixed and k.is_per_token)  # would spill 5 words
    found = arithmetic.config(k, v, head_dim, rows, arithmetic, schedule, dtype, 1, MIN_SLOTS, has_mixed, features,
                              boost)
    free -= found.smem_plan.get("inbox", 0) + found.smem_plan.get("books", 0)
    fitting, many = free // (MIN_SLOTS * slot + own_bytes(found)), MANY_WARPS // schedule.ctas_per_sm
    warps = many if is_slim and many <= fitting else max(1, min(MAX_WARPS // schedule.ctas_per_sm, fitting))
    if arithmetic.has_books:
        slot = found.slot_bytes
        warps = min(arithmetic.most_warps, (free - layout.RECORD_ALIGN) // (MIN_SLOTS * slot + PLAN_WORDS * WORD))
    found = replace(found, warps=warps)
    return check(replace(found, slots=min(slots_needed(found), (free // warps - own_bytes(found)) // slot)))


def check(cfg: WarpConfig) -> WarpConfig:
    """The configuration itself; ValueError with the reasons if it cannot run."""
    if found := problems(cfg):
        raise ValueError("; ".join(found))
    return cfg


def slots_needed(cfg: WarpConfig) -> int:
    """Slots with which all but one of a CTA's make ``UNDER_WAY`` bytes, and a warp's ring holds what reuses it."""
    under_way = -(-UNDER_WAY // (cfg.ctas_per_sm * cfg.warps * cfg.slot_bytes))
    return min(MAX_SLOTS, max(MIN_SLOTS, 1 + under_way, -(-reuse_bytes(cfg) // cfg.slot_bytes)))


def own_bytes(cfg: WarpConfig) -> int:
    """Bytes of a warp's shared memory beside its ring."""
    return sum(cfg.schedule.own_plan(cfg).values())


def reuse_bytes(cfg: WarpConfig) -> int:
    """Bytes that a warp's ring must have for what reuses it: 16-bit units, also beside packed K, and O at the merge."""
    mixed_bytes = (cfg.mixed_row + UNIT_TOKENS) * cfg.row_pitch if cfg.has_mixed else 0
    return max(cfg.unit_bytes, mixed_bytes, cfg.merge_bytes * (not cfg.own_queries))


def problems(cfg: WarpConfig) -> list[str]:
    """Reasons why this configuration cannot run; empty if it can."""
    found = []
    if cfg.smem_bytes > (limit := smem_limit(cfg.ctas_per_sm)):
        found.append(f"shared memory: {cfg.smem_bytes} B at {cfg.warps} warps and "
                     f"{cfg.slots} slots, limit {limit} B")
    if cfg.warp_bytes < (needed := reuse_bytes(cfg)):
        found.append(f"ring of a warp: {cfg.warp_bytes} B, a 16-bit unit or O needs {needed} B")
    if cfg.head_dim not in HEAD_DIMS:
        found.append(f"head_dim: got {cfg.head_dim}, supported: {', '.join(map(str, HEAD_DIMS))}")
    if cfg.rows not in (choices := cfg.arithmetic.row_choices(cfg.head_dim)):
        rows = ", ".join(map(str, choices))
        found.append(f"rows: got {cfg.rows}, supported at head_dim {cfg.head_dim}: {rows}")
    if unknown := [name for name in cfg.features if name not in (*FEATURES, LEVEL_WINDOW)]:
        found.append(f"features: got {', '.join(unknown)}, supported: {', '.join((*FEATURES, LEVEL_WINDOW))}")
    if cfg.boost and not cfg.k.bits == cfg.boost.bits == BOOST_BITS:
        found.append(f"boosted K: got {cfg.boost.bits} bits over {cfg.k.bits}, supported: "
                     f"{BOOST_BITS} over {BOOST_BITS}")
    return found
