"""Which warps ask for their next piece early, and which wait a little: those that have come less far, or further, than
the others.

Each warp has pages of its own, and its copies come after those that all other warps have asked for. Some fall behind by
chance, and at the end the whole call waits for them while memory has nothing to do. So the pages that have come are
counted, of CTAs here and there on the GPU together: a warp that is behind the mean has a piece more under way, one that
is far ahead leaves memory to the others. On Stream-K's schedule the mean is that of each warp's part of its CTA's
positions, since some runs are one longer. What is added up in which order stays the same: only the time of copies
changes.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import nvvm

from lowbit_attn.hopper import LINE_WORDS, PACE_GROUPS
from lowbit_attn.hopper.register.config import FEW_PAGES, RegisterConfig
from lowbit_attn.hopper.register.load import Lane


class Rule(NamedTuple):
    """A warp that is this part of a page behind is helped; one that is this part of a page ahead waits so long."""

    behind: int = 4
    ahead: int = 2
    wait_ns: int = 600


class Pace(NamedTuple):
    """How far the warps that count together and this warp have come, in pages."""

    come: cute.Pointer | None  # int32, of all warps: in global memory it goes on from call to call
    base: cute.Pointer | None  # shared memory, int32: what it was before
    own: Int32 | int  # this warp's part of ``total``: of the warps that count together, or of their pages
    total: Int32 | int
    before: Int32 | int = 0  # of this warp, before the pages at hand

    @property
    def scope(self) -> str:
        return "cta" if self.come.memspace == cute.AddressSpace.smem else "gpu"

    def count(self, pages) -> Int32:
        """So many more have come to this warp: how many had come to all before; by one lane."""
        return cute.arch.atomic_add(self.come, Int32(pages), sem="relaxed", scope=self.scope)

    def at(self, words: cute.Pointer) -> "Pace":
        """With two words of shared memory: the CTA's own counter is the second."""
        return self._replace(base=words, come=words + 1 if self.come is None else self.come)

    def begin(self, base: Int32) -> None:
        """By one thread, before a barrier of the CTA; base: of ``ask``."""
        cute.make_tensor(self.base, cute.make_layout(1))[0] = base
        if self.scope == "cta":
            cute.make_tensor(self.come, cute.make_layout(1))[0] = Int32(0)


def rule_of(cfg: RegisterConfig) -> Rule:
    """Found by trying (perf/NOTES.md)."""
    if cfg.own_queries:
        return Rule(8, 4)
    is_few = cfg.page_warps < cfg.warps
    return Rule(16, 4, 800) if is_few and not cfg.is_integer else Rule()


def is_long(cfg: RegisterConfig, pages: Int32):
    """Whether a warp with so many pages compares itself; on Stream-K's schedule they are only a part of its run."""
    return (pages > 1) if cfg.own_queries else (pages >= FEW_PAGES)


def is_alone(cfg: RegisterConfig) -> bool:
    """Whether warps compare themselves with those of their CTA alone: those with runs of their own do not gain by more,
    and with K per token a register would be missing."""
    return cfg.own_queries or cfg.k.is_per_token


def make(cfg: RegisterConfig, partials: cute.Tensor) -> Pace:
    """Every PACE_GROUPS-th CTA counts with this one, in a line before ``partials``: one counter for all is too slow.

    Or the CTA counts alone, and has its words later.
    """
    if is_alone(cfg):
        return Pace(None, None, 1, cfg.page_warps)
    (x, y, z), (blocks, batch, splits) = cute.arch.block_idx(), cute.arch.grid_dim()
    group = (x + blocks * (y + batch * z)) % PACE_GROUPS
    ctas = (blocks * batch * splits - group + PACE_GROUPS - 1) // PACE_GROUPS
    come = cute.recast_ptr(partials.iterator, dtype=Int32) - LINE_WORDS * (group + 1)
    return Pace(come, None, 1, ctas * cfg.page_warps)


@cute.jit
def ask(pace: Pace) -> Int32:
    """What ``begin`` wants, by the thread that begins."""
    base = Int32(0)
    if cutlass.const_expr(pace.come is not None):
        if cute.arch.thread_idx()[0] == 0:
            base = cute.arch.load(pace.come, Int32, sem="relaxed", scope=pace.scope)
    return base


@cute.jit
def count_page(cfg: cutlass.Constexpr[RegisterConfig], pace: Pace, me: Lane, page: Int32, pages: Int32) -> Int32:
    """Page ``page`` of ``pages`` has come; lane 0 gets what ``look`` wants, which takes a while."""
    come = Int32(0)
    if me.lane == 0:
        if (page + 1 < pages) & is_long(cfg, pages):
            come = pace.count(1)
        else:
            pace.count(1)  # none waits for it
    return come


@cute.jit
def look(cfg: cutlass.Constexpr[RegisterConfig], pace: Pace, page: Int32, pages: Int32, come: Int32):
    """Before page ``page`` of ``pages``: whether this warp is clearly behind the others; ahead of them, wait.

    come: of ``count_page``, at the page before.
    """
    rule, knows = rule_of(cfg), (page > 0) & is_long(cfg, pages)
    base = cute.make_tensor(pace.base, cute.make_layout(1))[0]
    lag = (cute.arch.shuffle_sync(come, 0) - base) * pace.own - (pace.before + page) * pace.total
    if knows & (lag < -(pace.total // rule.ahead)):
        nvvm.nanosleep(Int32(rule.wait_ns).ir_value())
    return knows & (lag > pace.total // rule.behind)
