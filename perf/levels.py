"""Times decode over two levels beside the fastest read of the same bytes and the uniform k4v4, in one run on one GPU.

    python perf/levels.py                              one JSON line a case in perf/results/levels.jsonl
    python perf/levels.py --path pair --path merge     one launch for both levels beside two and their merge
    python perf/levels.py --window 4096                of each sequence the last 4,096 positions, and their bytes

Records of random tokens in random places of the pool, tables of distinct pages, stages half full, 32 sinks and 120
recent tokens. Every time is a replay of a CUDA graph, L2 flushed, medians.
"""

import os
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import typer
from provenance import append_result, need, provenance

from lowbit_attn import bench, decode, layout
from lowbit_attn.bench import BenchCase
from lowbit_attn.formats.levels import parse
from lowbit_attn.levels import LevelCache, windows
from lowbit_attn.levels.frames import FramePool, frame_sizes
from lowbit_attn.levels.policy import Shares

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
    window: int | None = None

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
                "kv_heads": self.num_heads_kv, "head_dim": self.head_dim, "seqlen": self.seqlen, "ragged": self.ragged,
                "window": self.window}


CASES = (
    LevelCase("lean", 50, 1, 32, 8, 131072, 1.35),
    LevelCase("lean", 50, 8, 32, 8, 32768, 1.20),
    LevelCase("lean", 50, 8, 32, 8, 32768, 1.20, ragged=True),
    LevelCase("lean", 50, 64, 32, 8, 4096, 1.25),
    LevelCase("lean", 50, 1, 32, 32, 131072, 1.10),
    LevelCase("k4v4+k2v2", 25, 8, 32, 8, 32768, 1.25),
)


def make_cache(case: LevelCase, device: str = "cuda") -> LevelCache:
    """A cache as many steps would have left it, filled directly; heads differ in length as after pruning."""
    pages = torch.tensor(case.pages)
    counts = pages.sum(0).tolist()
    levels = parse(case.levels)
    per_low, sizes = frame_sizes(*(fmt.record_bytes(case.head_dim) for fmt in levels.formats))
    frames = [counts[0], -(-counts[1] // per_low)]
    pool = FramePool(levels, head_dim=case.head_dim, device=device, frames=sum(frames) if len(sizes) == 1 else frames)
    cache = LevelCache(pool, case.num_heads_kv, policy=Shares(case.percent / 100), sinks=SINKS, max_batch=case.batch,
                       max_seqlen=max(map(sum, case.pages)) * PAGE + 4 * PAGE, windows=case.window is not None)
    free = [torch.randperm(len(mine.ids), generator=torch.Generator().manual_seed(0)) for mine in pool.lists]
    taken = (free[0][: frames[0]], free[0][frames[0] :] if pool.is_shared else free[1])
    for level, fmt in enumerate(levels.formats):
        records = fmt.quantize(*torch.randn(2, DISTINCT, PAGE, case.head_dim)).view(DISTINCT, -1, layout.RECORD_ALIGN)
        records, units = records.to(device), pool.units(level)
        size, per = records.shape[1], (1, per_low)[level]
        places = (taken[level][:, None] * pool.frame_units(level) + torch.arange(per) * size).flatten()[: counts[level]]
        for some in places.to(device).split(1024):
            units[some[:, None] + torch.arange(size, device=device)] = records[
                torch.randint(DISTINCT, (len(some),), device=device)]
        for row, mine in enumerate(places.int().split(pages[:, level].tolist())):
            cache.table[level, row, : len(mine)] = mine.to(device)
    for x in (cache.hi_k, cache.hi_v, cache.lo_k, cache.lo_v, cache.ring_k, cache.ring_v):
        x.normal_()
    cache.c_pack.copy_(pages.T * PAGE)
    cache.n_stage.fill_(STAGED)
    cache.n_sink.fill_(SINKS)
    cache.n_out.fill_(case.seqlen // PAGE * PAGE - 2 * PAGE)
    if case.window is not None:
        _scatter_classes(cache)
    cache.n_tok.copy_(cache.n_sink + cache.n_out + RECENT)
    cache.recount()
    return cache


def _scatter_classes(cache: LevelCache) -> None:
    """Random classes of what left the ring: as many of each as a head has of pages and stage."""
    held = cache.c_pack + cache.n_stage
    out = int(held.sum(0).max())
    for v, (high, low) in enumerate(held.T.tolist()):
        classes = torch.tensor([0] * high + [1] * low + [2] * (out - high - low), dtype=torch.uint8)
        blocks = classes[torch.randperm(out, generator=torch.Generator().manual_seed(v))].view(-1, PAGE)
        cache.classes[v, : len(blocks)] = blocks.to(cache.device)
        for level in range(2):
            cache.before[level, v, 1 : len(blocks) + 1] = (blocks == level).sum(1).cumsum(0).to(cache.device)
    cache.n_out.fill_(out)


def call_bytes(case: LevelCase, cache: LevelCache) -> int:
    """Pages, stages, sinks and recent tokens, q and o of the call."""
    counts = cache.c_pack
    if case.window is not None:
        hidden = windows.hidden(cache, cache.n_tok - case.window).clamp(min=0)
        counts = counts - torch.minimum(hidden // PAGE * PAGE, counts)
    pages = sum(n * size for n, size in zip((counts // PAGE).sum(1).tolist(), cache.pool.record_bytes))
    beside = len(case.pages) * (2 * STAGED + SINKS + RECENT) * 4 * case.head_dim
    return pages + beside + 2 * case.batch * case.num_heads * case.head_dim * 2


def uniform_us(case: LevelCase, arch_path: str | None) -> float:
    """The uniform k4v4 at the same tokens."""
    uniform = BenchCase("k4v4", case.batch, case.num_heads, case.num_heads_kv, case.head_dim, case.seqlen)
    cache = bench.make_cache(uniform)
    q = bench.query_of(uniform, cache)
    return bench.graph_us(lambda: decode(q, cache, path=arch_path))


def decode_us(case: LevelCase, paths: list[str | None]) -> tuple[dict[str, float], int]:
    """(us by path, bytes of the call)."""
    cache = make_cache(case)
    q = torch.randn(case.batch, 1, case.num_heads, case.head_dim, device="cuda", dtype=cache.dtype)

    def step(path: str | None) -> float:
        return bench.graph_us(lambda: decode(q, cache, path=path, window=case.window))

    return {str(path): step(path) for path in paths}, call_bytes(case, cache)


def measure(case: LevelCase, paths: list[str | None], with_uniform: bool) -> dict:
    """The numbers of a case; us by path."""
    us, nbytes = decode_us(case, paths)
    read, hinted = bench.read_us(nbytes)[0], bench.read_us(nbytes, bench.HINTED)[0]
    best = min(us.values())
    return case.line | {
        "us": {path: round(time, 2) for path, time in us.items()}, "bytes": nbytes, "read_us": round(read, 2),
        "hinted_read_us": round(hinted, 2), "ratio": round(best / read, 3),
        "ratio_fastest": round(best / min(read, hinted), 3), "target": case.target,
        "k4v4_us": round(uniform_us(case, None), 2) if with_uniform else None}


def main(
    path: Annotated[list[str], typer.Option(help="of decode; repeatable; 'default': the dispatch's")] = ["default"],
    only: Annotated[list[int], typer.Option(help="Only the case of this number; repeatable.")] = [],
    arch: Annotated[str, typer.Option(help="whose decode kernels: hopper or ampere")] = "hopper",
    window: Annotated[int | None, typer.Option(help="of decode, in positions")] = None,
    uniform: Annotated[bool, typer.Option(help="also time the uniform k4v4")] = True,
    output: Annotated[str, typer.Option(help="JSON lines file of the repository")] = "perf/results/levels.jsonl",
) -> None:
    """Time the cases, one JSON line each."""
    need()
    os.environ["LOWBIT_ATTN_ARCH"] = arch
    origin = provenance()
    paths = [None if name == "default" else name for name in path]
    for number in only or range(len(CASES)):
        line = measure(replace(CASES[number], window=window), paths, uniform) | {"arch": arch}
        append_result(output, origin | line)
        print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
