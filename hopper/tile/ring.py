"""A ring of shared-memory stages between two roles: a full and an empty mbarrier for each stage.

Both ends count fills from 0: fill n uses stage n % stages, and its parity is that of n // stages. A wait
only tells neighbouring phases apart, so every warp that waits on a ring waits for every fill of it.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Uint32


class StageRing(NamedTuple):
    """Barriers of one ring; ``full`` and ``empty`` point to ``stages`` mbarriers each."""

    full: cute.Pointer
    empty: cute.Pointer
    stages: int


def stage(ring: StageRing, fill: Uint32) -> Int32:
    return Int32(fill % ring.stages)


def parity(ring: StageRing, fill: Uint32) -> Int32:
    return Int32((fill // ring.stages) % 2)


def init(ring: StageRing, full_arrivals: int, empty_arrivals: int) -> None:
    """Make the barriers; one thread does it, before the CTA's first barrier."""
    for i in range(ring.stages):
        cute.arch.mbarrier_init(ring.full + i, full_arrivals)
        cute.arch.mbarrier_init(ring.empty + i, empty_arrivals)


def wait_full(ring: StageRing, fill: Uint32) -> None:
    cute.arch.mbarrier_wait(ring.full + stage(ring, fill), parity(ring, fill))


def wait_empty(ring: StageRing, fill: Uint32) -> None:
    """Passes at once in the first round: the phase before an mbarrier's first counts as complete."""
    cute.arch.mbarrier_wait(ring.empty + stage(ring, fill), parity(ring, fill) ^ 1)


def expect(ring: StageRing, fill: Uint32, nbytes) -> None:
    """The producer's only arrival on the fill, with the bytes that bulk copies will bring; by one lane."""
    cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage(ring, fill), nbytes)


def release(ring: StageRing, fill: Uint32) -> None:
    """This lane has read the stage. Each lane arrives: racecheck then sees every read before the next fill."""
    cute.arch.mbarrier_arrive(ring.empty + stage(ring, fill))


def publish(ring: StageRing, fill: Uint32) -> None:
    """This lane has written its share of a tile for WGMMA. Each lane arrives, as for ``release``."""
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.mbarrier_arrive(ring.full + stage(ring, fill))
