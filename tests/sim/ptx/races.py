"""Which warp used which byte of a CTA's shared memory last, and what other warps know of it: races are errors.

A warp knows what the others had done when it last met them, at a barrier of warps or as an mbarrier that they had
arrived at let it go on (vector clocks). It may not read what another wrote since, nor write what another read or wrote
since. Not looked at: lanes of one warp, atomics, copies that a barrier counts, clusters and wgmma's reads.
"""

import numpy as np


class Races:
    def __init__(self, warps: int, nbytes: int):
        self.known = np.zeros((warps, warps), np.int32)  # [warp, other]: the other's time that the warp knows
        np.fill_diagonal(self.known, 1)  # 0: before the kernel
        self.arrived: dict[int, np.ndarray] = {}  # by mbarrier: what those know that have arrived
        self.writer = np.full(nbytes, -1, np.int16)
        self.written = np.zeros(nbytes, np.int32)  # the writer's time
        self.read_at = np.zeros((warps, nbytes), np.int32)  # the reader's time

    def read(self, warp: int, places: np.ndarray) -> None:
        self.check_writer(warp, places, "a read")
        self.read_at[warp, places] = self.known[warp, warp]

    def write(self, warp: int, places: np.ndarray) -> None:
        self.check_writer(warp, places, "a write")
        late = self.read_at[:, places] > self.known[warp][:, None]
        assert not late.any(), f"a write of warp {warp} where warp {np.flatnonzero(late.any(1))[0]} may still read"
        self.writer[places], self.written[places] = warp, self.known[warp, warp]

    def check_writer(self, warp: int, places: np.ndarray, what: str) -> None:
        writer = self.writer[places]
        late = (writer >= 0) & (self.written[places] > self.known[warp][writer])
        assert not late.any(), f"{what} of warp {warp} where warp {writer[late][0]} has written without a barrier since"

    def copied(self, places: slice) -> None:
        """A copy that a barrier counts has come."""
        self.writer[places] = -1

    def meet(self, warps: list[int]) -> None:
        """Warps have met at a barrier: each knows what they all know, and goes on."""
        self.known[warps] = self.known[warps].max(0)
        self.known[warps, warps] += 1

    def arrive(self, warp: int, barrier: int) -> None:
        self.arrived[barrier] = np.maximum(self.arrived.get(barrier, 0), self.known[warp])
        self.known[warp, warp] += 1

    def go_on(self, warp: int, barrier: int) -> None:
        """An mbarrier lets a warp go on: it knows what those who have arrived knew."""
        if barrier in self.arrived:
            self.known[warp] = np.maximum(self.known[warp], self.arrived[barrier])
