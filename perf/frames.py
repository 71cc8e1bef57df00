"""Random steps of two levels in torch on the CPU: no frame may be lost or held by whom it is not counted for, no page
overwritten.

    python perf/frames.py --steps 100000

Rows of a LevelCache take their blocks' plans (``levels.step.Plan``: classes, prefix sums over the circular free list,
halves of frames) with random scores and few frames; they are released, and made to share another's frames, at random.
Records are stamps instead of codes, so
that each page says who wrote it.
"""

import random
import time
from dataclasses import asdict, dataclass
from typing import Annotated
from unittest import mock

import torch
import typer
from provenance import append_result, provenance

from lowbit_attn.cache.pages import PageExhaustedError

RESULTS = "perf/results/frames.jsonl"
ROWS, HEADS, HEAD_DIM, PAGES = 4, 2, 64, 24
FRAMES = {"lean": 17, "lean-low": (13, 19)}
RELEASED, SHARED = 0.15, 0.05  # of the steps


@dataclass
class Done:
    """steps; pages written; plans refused for want of frames; rows released, and made from another; frames that were
    common then; turns of the list; pages looked at."""

    steps: int = 0
    pages: int = 0
    refused: int = 0
    releases: int = 0
    shares: int = 0
    common: int = 0
    wraps: int = 0
    checked: int = 0


class Stamps:
    """Stands for a format's ``quantize``: a record's bytes are a number of its own, in 4 bytes, over and over."""

    def __init__(self, record_bytes: int):
        self.record_bytes, self.count = record_bytes, 0

    def quantize(self, k: torch.Tensor, v: torch.Tensor, range_search: bool | None) -> torch.Tensor:
        numbers = torch.arange(self.count, self.count + len(k), dtype=torch.int32)
        self.count += len(k)
        return numbers[:, None].expand(-1, self.record_bytes // 4).contiguous().view(torch.uint8)


class Life:
    """A cache, and what each head's pages must hold."""

    def __init__(self, name: str, seed: int):
        from lowbit_attn.levels.frames import FramePool
        from lowbit_attn.levels.level_cache import LevelCache
        from lowbit_attn.levels.policy import Cumulative

        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.pool = FramePool(name, head_dim=HEAD_DIM, frames=FRAMES[name])
        self.cache = LevelCache(self.pool, HEADS, policy=Cumulative(0.05, 0.6), sinks=0, max_batch=ROWS,
                                max_seqlen=PAGES * 128)
        self.stamps = [Stamps(size) for size in self.pool.record_bytes]
        self.pages = [[[] for _ in range(ROWS * HEADS)] for _ in self.stamps]
        self.done = Done()

    def plan(self) -> None:
        """Blocks of some rows leave, as far as there are frames."""
        from lowbit_attn.cache.significance import Scores
        from lowbit_attn.levels import step

        cache, rows = self.cache, torch.randperm(ROWS, generator=self.generator)
        cache.n_tok.copy_(cache.n_out + 192)
        score = torch.rand(ROWS, HEADS, cache.slots, generator=self.generator) ** 4
        tries = torch.rand(ROWS, generator=self.generator) < 0.4
        tries &= cache.n_out[rows] < (PAGES - 1) * 128
        first = [stamps.count for stamps in self.stamps]
        with mock.patch.object(type(cache.format), "formats", tuple(self.stamps)):
            plan = step.Plan(cache, rows, Scores(score, torch.ones(ROWS, cache.slots, dtype=torch.int32)), tries)
            plan.write()
        self.done.refused += int((plan.due & ~plan.go).sum())
        full = plan.full & plan.go.repeat_interleave(HEADS)[:, None]
        for i, level in full.nonzero().tolist():
            self.pages[level][int(plan.v[i])].append(first[level] + i)
            self.done.pages += 1

    def share(self) -> None:
        """A row takes another's pages, as far as there are frames for what must be copied."""
        src, dst = self.random.sample(range(ROWS), 2)
        self.release(dst)
        try:
            self.cache.share(src, dst)
        except PageExhaustedError:
            return
        for level in self.pages:
            for head in range(HEADS):
                level[dst * HEADS + head] = list(level[src * HEADS + head])
        self.done.shares += 1
        self.done.common += sum(int(free.shared.sum()) for free in self.pool.lists)

    def release(self, row: int) -> None:
        self.look(row)
        self.cache.free([row])
        for level in self.pages:
            for v in range(row * HEADS, (row + 1) * HEADS):
                level[v] = []
        self.done.releases += 1

    def look(self, row: int) -> None:
        """Every page of a row is where the table says, whole, in the order of writing."""
        for level, by_head in enumerate(self.pages):
            size = self.pool.record_bytes[level] // 128
            for v in range(row * HEADS, (row + 1) * HEADS):
                units = self.cache.table[level, v, : len(by_head[v])].long()
                assert int(self.cache.c_pack[level, v]) == 128 * len(by_head[v])
                found = self.pool.units(level)[units[:, None] + torch.arange(size)].flatten(1).view(torch.int32)
                want = torch.tensor(by_head[v], dtype=torch.int32)[:, None]
                assert (found == want).all(), f"level {level}, head {v}: a page was overwritten"
                self.done.checked += len(by_head[v])

    def step(self) -> None:
        kind = self.random.random()
        if kind < RELEASED:
            self.release(self.random.randrange(ROWS))
        else:
            self.share() if kind < RELEASED + SHARED else self.plan()
        self.pool.check(self.cache)
        self.done.steps += 1


def life(name: str, steps: int, seed: int = 0) -> Done:
    """So many random steps; AssertionError at the first that loses a frame, miscounts its holders or overwrites a
    page."""
    mine = Life(name, seed)
    for _ in range(steps):
        mine.step()
    for row in range(ROWS):
        mine.look(row)
    mine.done.wraps = min(int(free.ends[0]) // len(free.ids) for free in mine.pool.lists)
    return mine.done


def main(steps: Annotated[int, typer.Option(help="Random steps of each pair.")] = 100_000,
         threads: Annotated[int, typer.Option(help="CPU threads of torch.")] = 1) -> None:
    torch.set_num_threads(threads)
    for name in FRAMES:
        start = time.monotonic()
        done = life(name, steps)
        line = provenance() | {"levels": name, "seconds": round(time.monotonic() - start, 1)} | asdict(done)
        append_result(RESULTS, line)
        print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
