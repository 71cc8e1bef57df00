"""Which of a CTA's warps ask for their next piece early: those that have come less far than the others.

Each warp has pages of its own, and its copies come after those that the SM's other warps have asked for. Some fall
behind by chance, and at the end the whole call waits for them while memory has nothing to do. So a warp that is behind
has a piece more under way. What is added up in which order stays the same: only the time of copies changes.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from lowbit_attn.hopper.register.config import RegisterConfig
from lowbit_attn.hopper.register.load import Lane

MARGIN = 4  # a warp that is this part of a page behind is helped


class Pace(NamedTuple):
    """How far the CTA and this warp have come, in pages."""

    come: cute.Pointer  # shared memory, int32: of all warps
    before: Int32 | int = 0  # of this warp, before the pages at hand

    def start(self) -> None:
        """By one thread, before a barrier of the CTA."""
        cute.make_tensor(self.come, cute.make_layout(1))[0] = Int32(0)

    def count(self, pages) -> Int32:
        """So many more have come to this warp: how many had come to all before; by one lane."""
        return cute.arch.atomic_add(self.come, Int32(pages), sem="relaxed", scope="cta")


@cute.jit
def count_page(pace: Pace, me: Lane) -> Int32:
    """A page of this warp has come; lane 0 gets what ``is_behind`` wants, which takes a while."""
    come = Int32(0)
    if me.lane == 0:
        come = pace.count(1)
    return come


def is_behind(cfg: RegisterConfig, pace: Pace, pages: Int32, come: Int32):
    """Whether this warp, with ``pages`` at hand done, is clearly behind the mean; come: of ``count_page``, or 0."""
    return (pace.before + pages) * cfg.page_warps + cfg.page_warps // MARGIN < cute.arch.shuffle_sync(come, 0)
