"""Times decode over two levels beside the fastest read of the same bytes and the uniform k4v4, in one run on one GPU.

    python perf/levels.py                 one JSON line a case in perf/results/levels.jsonl

Records of random tokens in random places of the pool, tables of distinct pages, stages half full, 32 sinks and 120
recent tokens. Every time is a replay of a CUDA graph, L2 flushed, medians.
"""

import os
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from provenance import append_result, need, provenance

from lowbit_attn import bench, decode, layout
from lowbit_attn.bench import BenchCase
from lowbit_attn.frames import FramePool
from lowbit_attn.levels import LevelCache
from lowbit_attn.policy import Shares

PAGE = layout.PAGE_TOKENS
SINKS, STAGED, RECENT = 32, 64, 120
DISTINCT = 64  # records of different tokens; copies of them fill the pool


@dataclass(frozen=True)
class LevelCase:
    """One decode step: levels, high pages in percent, batch, heads, tokens of a head on average; ragged: heads from .4
    to 1.6 of it."""

    levels: str
    percent: int
    batch: int
    num_heads: int
    num_heads_kv: int
    seqlen: int
    target: float  # of the time to that of a plain read
    ragged: bool = False
    head_dim: int = 128

    @property
    def pages(self) -> list[tuple[int, int]]:
        """(high, low) pages of each (sequence, head)."""
        heads, mean = self.num_heads_kv, self.seqlen // PAGE - 2
        shares = [0.4 + 1.2 * h / (heads - 1) if self.ragged else 1.0 for h in range(heads)]
        counts = [round(mean * share) for share in shares]
        return [(round(n * self.percent / 100), n - round(n * self.percent / 100)) for n in counts] * self.batch

    @property
    def line(self) -> dict:
        return {"levels": self.levels, "high": self.percent, "batch": self.batch, "heads": self.num_heads,
                "kv_heads": self.num_heads_kv, "head_dim": self.head_dim, "seqlen": self.seqlen, "ragged": self.ragged}


CASES = (
    LevelCase("lean", 50, 1, 32, 8, 131072, 1.35),
    LevelCase("lean", 50, 8, 32, 8, 32768, 1.20),
    LevelCase("lean", 50, 8, 32, 8, 32768, 1.20, ragged=True),
    LevelCase("lean", 50, 64, 32, 8, 4096, 1.25),
    LevelCase("lean", 50, 1, 32, 32, 131072, 1.10),
    LevelCase("k4v4+k2v2", 25, 8, 32, 8, 32768, 1.25),
)


def make_cache(case: LevelCase, seed: int = 0) -> LevelCache:
    """A cache as many steps would have left it, filled directly."""
    draw = torch.Generator(device="cuda").manual_seed(seed)
    pages = torch.tensor(case.pages)
    high, low = pages.sum(0).tolist()
    probe = FramePool(case.levels, head_dim=case.head_dim, frames=1) if "+" not in case.levels else None
    is_shared = probe is not None or FramePool(case.levels, head_dim=case.head_dim, frames=1).is_shared
    pool = FramePool(case.levels, head_dim=case.head_dim, device="cuda",
                     frames=high + (low + 1) // 2 if is_shared else (high, low))
    cache = LevelCache(pool, case.num_heads_kv, policy=Shares(case.percent / 100), sinks=SINKS, max_batch=case.batch,
                       max_seqlen=max(map(sum, case.pages)) * PAGE + 2 * PAGE)
    places = _units(pool, high, low, draw)
    for level, fmt in enumerate(pool.levels.formats):
        k, v = torch.randn(2, DISTINCT, PAGE, case.head_dim)
        records = fmt.quantize(k, v).view(DISTINCT, -1, layout.RECORD_ALIGN).cuda()
        size, units = records.shape[1], pool.units(level)
        for some in places[level].split(1024):
            at = some[:, None] + torch.arange(size, device="cuda")
            units[at] = records[torch.randint(DISTINCT, (len(some),), generator=draw, device="cuda")]
        start = 0
        for row, count in enumerate(pages[:, level].tolist()):
            cache.table[level, row, :count] = places[level][start : start + count].int()
            start += count
    for x in (cache.hi_k, cache.hi_v, cache.lo_k, cache.lo_v, cache.ring_k, cache.ring_v):
        x.normal_(generator=draw)
    cache.c_pack.copy_(pages.T * PAGE)
    cache.n_stage.fill_(STAGED)
    cache.n_sink.fill_(SINKS)
    cache.n_out.fill_(case.seqlen // PAGE * PAGE - 2 * PAGE)  # heads differ as after pruning
    cache.n_tok.copy_(cache.n_sink + cache.n_out + RECENT)
    for row in range(case.batch):
        cache.recount(row)
    return cache


def _units(pool: FramePool, high: int, low: int, draw: torch.Generator) -> list[torch.Tensor]:
    """Units where records of each level begin, frames in random order."""
    found, taken = [], 0
    for level, (count, per) in enumerate(((high, 1), (low, pool.per_low))):
        frames = torch.randperm(len(pool.lists[pool.sizes[level]].ids), generator=draw, device="cuda")
        if pool.is_shared:
            draw_again = torch.Generator(device="cuda").manual_seed(7)
            frames = torch.randperm(len(pool.lists[0].ids), generator=draw_again, device="cuda")[taken:]
        size = pool.record_bytes[level] // layout.RECORD_ALIGN
        mine = frames[: -(-count // per)] * pool.frame_units(level)
        taken += len(mine)
        found.append((mine[:, None] + torch.arange(per, device="cuda") * size).flatten()[:count])
    return found


def call_bytes(case: LevelCase, cache: LevelCache) -> int:
    """Pages, stages, sinks and recent tokens, q and o of the call."""
    pages = sum(n * size for counts in case.pages for n, size in zip(counts, cache.pool.record_bytes))
    beside = len(case.pages) * (2 * STAGED + SINKS + RECENT) * 4 * case.head_dim
    return pages + beside + 2 * case.batch * case.num_heads * case.head_dim * 2


def uniform_us(case: LevelCase, arch_path: str | None) -> float:
    """The uniform k4v4 at the same tokens."""
    uniform = BenchCase("k4v4", case.batch, case.num_heads, case.num_heads_kv, case.head_dim, case.seqlen)
    cache = bench.make_cache(uniform)
    q = bench.query_of(uniform, cache)
    return bench.graph_us(lambda: decode(q, cache, path=arch_path))


def measure(case: LevelCase, paths: list[str | None], with_uniform: bool) -> dict:
    """The numbers of a case; us by path."""
    cache = make_cache(case)
    q = torch.randn(case.batch, 1, case.num_heads, case.head_dim, device="cuda", dtype=cache.dtype)
    nbytes = call_bytes(case, cache)
    us = {str(path): bench.graph_us(lambda: decode(q, cache, path=path)) for path in paths}  # noqa: B023
    del cache
    read, hinted = bench.read_us(nbytes)[0], bench.read_us(nbytes, bench.HINTED)[0]
    best = min(us.values())
    return case.line | {
        "us": {path: round(time, 2) for path, time in us.items()}, "bytes": nbytes, "read_us": round(read, 2),
        "hinted_read_us": round(hinted, 2), "ratio": round(best / read, 3),
        "ratio_fastest": round(best / min(read, hinted), 3), "target": case.target,
        "k4v4_us": round(uniform_us(case, None), 2) if with_uniform else None}


def main(
    path: Annotated[list[str], typer.Option(help="of decode; 'default': the dispatcher's pick")] = ["default"],
    only: Annotated[list[int], typer.Option(help="Only the case of this number; repeatable.")] = [],
    arch: Annotated[str, typer.Option(help="whose decode kernels: hopper or ampere")] = "hopper",
    uniform: Annotated[bool, typer.Option(help="also time the uniform k4v4")] = True,
    output: Annotated[str, typer.Option(help="JSON lines file of the repository")] = "perf/results/levels.jsonl",
) -> None:
    """Time the cases, one JSON line each."""
    need()
    os.environ["LOWBIT_ATTN_ARCH"] = arch
    origin = provenance()
    paths = [None if name == "default" else name for name in path]
    for number in only or range(len(CASES)):
        line = measure(CASES[number], paths, uniform) | {"arch": arch}
        append_result(output, origin | line)
        print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
