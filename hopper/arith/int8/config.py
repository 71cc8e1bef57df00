"""What an integer-path kernel fixes at compile time, beside what it shares with the register path."""

from dataclasses import dataclass

import torch

from lowbit_attn import layout
from lowbit_attn.formats.contract import Format
from lowbit_attn.hopper import PATHS
from lowbit_attn.hopper.warp import config as register
from lowbit_attn.hopper.warp.config import PLAN_WORDS, WORD, RegisterConfig
from lowbit_attn.kernels import Checks
from lowbit_attn.registers import BYTE_STEP

ROWS = 4  # query rows: two columns each
MAX_TILES = 8  # row tiles of V multiplied side by side: their accumulators are 32 registers
STEP_TILES = BYTE_STEP // layout.TILE  # column tiles of one multiply
TURN_WORDS, NOTE_WORDS = 8, 4  # of Stream-K's schedule: where a warp is, and what it says of sums it leaves
PLANS_WORDS = PLAN_WORDS + TURN_WORDS + 2 * NOTE_WORDS
SASS_NEED = ("IMMA", "HMMA", "UBLKCP", "LDSM", "MOVM", "SYNCS")


@dataclass(frozen=True)
class IntegerConfig(RegisterConfig):
    """A register-path kernel with the integer path's arithmetic: a lane has one query row, its t."""

    is_integer, may_spill, has_shared_query = True, False, True
    query_width = 4  # q * softmax_scale_log2 in fp32, which each lane reads a step at a time

    @property
    def col_blocks(self) -> int:
        return 1

    @property
    def lane_rows(self) -> int:
        return 1

    @property
    def has_halves(self) -> bool:
        """With one group of channels, all of whose sums fit: they are formed over half of the tokens, then the rest."""
        v = self.v
        words = v.words_of(v.col_tiles // 2 * v.row_tiles)
        return (v.groups == 1 and v.row_tiles <= MAX_TILES and words % layout.BLOCK_WORDS == 0
                and self.ctas_per_sm == 1 and not self.own_queries)

    @property
    def merge_pitch(self) -> int:
        """8 floats more than a row: the four rows of a warp's lanes then lie in different banks."""
        return self.head_dim + 8

    @property
    def row_choices(self) -> list[int]:
        return [ROWS]


@dataclass(frozen=True)
class SmallConfig(IntegerConfig):
    """CTAs of a quarter of the warps: the start and the end of one pass while the SM's others are at their pages."""

    ctas_per_sm = 4


@dataclass(frozen=True)
class StreamConfig(IntegerConfig):
    """A warp attends to a run of pages, of one sequence or of several (schedule.py)."""

    own_queries = True

    @property
    def page_warps(self) -> int:
        return self.warps

    @property
    def reuse_bytes(self) -> int:
        return max(self.unit_bytes, self.third_bytes)

    @property
    def own_plan(self) -> dict[str, int]:
        """Bytes of each piece of shared memory that a warp has beside its ring: the sums are of two items."""
        channels = {"channels": self.channel_bytes} if self.boost else {}
        return {"plans": WORD * PLANS_WORDS, "query": self.query_bytes, **channels, "sums": 2 * self.merge_bytes}

    @property
    def own_bytes(self) -> int:
        return sum(self.own_plan.values())

    @property
    def smem_plan(self) -> dict[str, int]:
        plan = super().smem_plan
        return ({"buffer": plan["buffer"]}
                | {name: layout.align_record(self.warps * nbytes) for name, nbytes in self.own_plan.items()}
                | {name: plan[name] for name in ("pace", "barriers")})


KINDS = {"integer": IntegerConfig, "small": SmallConfig, "stream": StreamConfig}  # by path


def make_config(fmt: Format, head_dim: int, dtype: str, rows: int = ROWS,
                features: tuple[str, ...] = (), path: str = "integer") -> IntegerConfig:
    """The configuration of a format on one of the paths of ``KINDS``; ValueError with the reasons if there is none."""
    if found := PATHS[path].missing(fmt, head_dim, getattr(torch, dtype)):
        raise ValueError("; ".join(found))
    return register.make_config(fmt, head_dim, dtype, rows, features, KINDS[path])


def expected_counts(cfg: IntegerConfig) -> dict[str, int]:
    """Predicted static SASS counts: one warp's share of one packed page, of one 16-bit unit and of one beside packed K.
    """
    k, v, third = cfg.k, cfg.v, int(cfg.third_segment)
    boost_tiles = cfg.boost.steps if cfg.boost else 0
    key_tiles = k.col_tiles + boost_tiles
    full_steps, lone = key_tiles // STEP_TILES, boost_tiles % STEP_TILES
    plain = k.col_tiles + (1 + third) * v.row_tiles
    masked = 2 * key_tiles * (k.row_tiles + third) * (k.bits < 8) + 2 * v.row_tiles * v.col_tiles * (v.bits < 8)
    logits = 2 * (k.row_tiles + third)
    operands = k.groups + third  # times that q s becomes digits
    key_words = 4 * (k.col_tiles // STEP_TILES) * operands  # of metadata
    widened = sum(n for side, n in ((k, key_words), (v, 2 * v.col_tiles * v.groups)) if side.storage == "bfloat16")
    counts = {
        "IMMA": (full_steps + lone) * (k.row_tiles + third) + v.row_tiles * v.col_tiles // STEP_TILES,
        "HMMA": plain,
        "LDSM": plain,
        "MOVM": v.col_tiles * v.groups + 2 * (1 + third),
        "MUFU.EX2": logits + 4 + third + cfg.merge_exponentials,
        # an AND a register, two sign flips a step and token group, high halves of bf16 metadata; dead tokens of V;
        # addresses and parities
        "LOP3": masked + widened + (2 * full_steps + lone) * operands + 4 * v.row_tiles + 70,
        # digits of q s to two words and back from the other lane; of p s
        "PRMT": (4 * full_steps + 2 * lone) * operands + v.col_tiles * v.groups + 10,
    }
    if cfg.has_softcap:
        counts["MUFU.EX2"] += logits + 2
        counts["MUFU.RCP"] = logits + 2 + register.DIVISIONS
    return counts


def checks(fmt: Format, head_dim: int, dtype: str, rows: int,
           features: tuple[str, ...] = (), path: str = "integer") -> Checks:
    """What the SASS of the kernel of one of the paths of ``KINDS`` must show."""
    cfg = make_config(fmt, head_dim, dtype, rows, features, path)
    forbid = register.SASS_FORBID if cfg.may_spill else register.SPILLS + register.SASS_FORBID
    return Checks(SASS_NEED, forbid, tuple(expected_counts(cfg).items()), cfg.smem_bytes)
