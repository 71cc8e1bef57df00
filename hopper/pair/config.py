"""What a kernel of two levels fixes at compile time: a warp's configuration for each level, over one ring.

Pages of both levels come to the same slots, as large as the larger part of either. Shared memory, the 16-bit tokens and
the merge are the low level's configuration's.
"""

from dataclasses import dataclass, replace

import torch

from lowbit_attn import layout
from lowbit_attn.formats.contract import Format
from lowbit_attn.formats.levels import Levels, parse
from lowbit_attn.hopper.arith.int8.config import INT8, ROWS
from lowbit_attn.hopper.common.support import PATHS
from lowbit_attn.hopper.common.tuning import MAX_WARPS, MIN_SLOTS
from lowbit_attn.hopper.schedule.config import PLANS_WORDS, Stream
from lowbit_attn.hopper.warp import plan
from lowbit_attn.hopper.warp.config import PLAN_WORDS, WORD, SidePlan, WarpConfig
from lowbit_attn.kernels.key import Checks, KernelKey
from lowbit_attn.kernels.support import listed

HEAD_DIMS = (64, 128)
FEATURES = ("softcap",)
HIGH_POSITIONS = 2  # of a run that a page of the high level takes: its records are about twice the low level's
SASS_FORBID = ("LDL", "STL", "STSM", "HGMMA")


class Pair(Stream):
    """An even share of the pages of both levels."""

    def own_plan(self, cfg: WarpConfig) -> dict[str, int]:
        """A warp keeps a walk of each level."""
        found = super().own_plan(cfg)
        return found | {"plans": WORD * (PLANS_WORDS + PLAN_WORDS)}

    def kernel(self, cfg: WarpConfig):
        raise NotImplementedError("a kernel of two levels has two configurations: see hopper/pair/decode.py")


PAIR = Pair()


@dataclass(frozen=True)
class LevelConfig(WarpConfig):
    """Compile-time constants of one of the levels."""

    part_bytes: int = 0  # of the larger part of a record of either level
    positions: int = 1

    @property
    def slot_bytes(self) -> int:
        return self.part_bytes

    @property
    def page_positions(self) -> int:
        return self.positions


@dataclass(frozen=True)
class PairConfig:
    """The configurations of both levels, of the same warps, slots and shared memory."""

    high: LevelConfig
    low: LevelConfig

    @property
    def rows(self) -> int:
        return self.low.rows

    @property
    def threads(self) -> int:
        return self.low.threads

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of the launch."""
        return self.low.smem_bytes


def missing(levels: Levels, head_dim: int, dtype: torch.dtype, features: tuple[str, ...] = ()) -> list[str]:
    """Reasons why no kernel of two levels serves a call; empty if one does."""
    if head_dim not in HEAD_DIMS:
        return [f"head_dim {head_dim}, supported: {listed(HEAD_DIMS)}"]
    found = [f"{level} level: {reason}" for level, fmt in zip(("high", "low"), levels.formats)
             for reason in PATHS["stream"].missing(fmt, head_dim, dtype)]
    if not found and levels.high.specs(head_dim)[0].high:
        found.append(f"high level: format {levels.high}, supported: K without boosted channels")
    return found + [f"feature {name}, supported: {listed(FEATURES)}" for name in features if name not in FEATURES]


def make_config(levels: Levels, head_dim: int, dtype: str, features: tuple[str, ...] = ()) -> PairConfig:
    """The configurations of two levels; ValueError with the reasons if there is none."""
    if reasons := missing(levels, head_dim, getattr(torch, dtype), features):
        raise ValueError("; ".join(reasons))
    sides = [_sides(fmt, head_dim) for fmt in levels.formats]
    part = max(side.nbytes for both in sides for side in both)
    high, low = (LevelConfig(*both, head_dim, ROWS, INT8, PAIR, dtype, 1, MIN_SLOTS, False, features,
                             plan.plan_boost(both[0]), part, positions)
                 for both, positions in zip(sides, (HIGH_POSITIONS, 1)))
    free = plan.smem_limit(PAIR.ctas_per_sm) - layout.RECORD_ALIGN * 8  # pace, and barriers
    warps = max(1, min(MAX_WARPS, free // (MIN_SLOTS * part + plan.own_bytes(low))))
    low = replace(low, warps=warps)
    low = replace(low, slots=min(plan.slots_needed(low), (free // warps - plan.own_bytes(low)) // part))
    return PairConfig(replace(high, warps=low.warps, slots=low.slots), plan.check(low))


def _sides(fmt: Format, head_dim: int) -> tuple[SidePlan, SidePlan]:
    return tuple(SidePlan(**vars(spec)) for spec in fmt.specs(head_dim))


def config_of(key: KernelKey) -> PairConfig:
    """The configurations of a kernel."""
    return make_config(parse(key.format), key.head_dim, key.dtype, key.features)


def checks(key: KernelKey) -> Checks:
    """What the SASS of a kernel of two levels must show."""
    return Checks(INT8.sass_need, SASS_FORBID, config_of(key).smem_bytes)
