"""Times the steps of two levels on one GPU: ``manage`` by kernels and in torch, its share of a step of an 8B model,
``append``, and a layer's whole step: append, decode, manage.

    python perf/level_manage.py           one JSON line a case in perf/results/level_manage.jsonl

A step is one of three: at rest, one that scores (every eighth), and one in which every row's block leaves (one in 128).
Every time is a replay of a CUDA graph, L2 flushed, medians, with the counters put back before, less the time of that
alone. The mean weighs them as often as they come. A step of Llama-3.1-8B's shape is taken as 32 layers of decode and
``manage`` and a plain read of its weights; what else a model does is not in it, so a share is an upper bound.

Kernels that start while the one before them ends cost less behind decode than alone, so ``layer_share`` takes a layer's
whole step, less one without ``manage``.
"""

from typing import Annotated

import torch
import typer
from levels import SINKS, LevelCase, make_cache
from provenance import append_result, need, provenance

from lowbit_attn import bench, decode, layout
from lowbit_attn.levels import LevelCache

PAGE, EVERY = layout.PAGE_TOKENS, 8
LAYERS, WEIGHT_BYTES = 32, 16.06e9  # of Llama-3.1-8B in 16 bit
READ_BYTES = 10**9  # of the read whose rate stands for the weights'
TARGET = 0.01  # of a step
RECENT = {"rest": 121, "score": 120, "flush": 184}  # tokens of the rings, behind multiples of 8
STATE = ("n_out", "n_tok", "n_stage", "c_pack", "c_sink", "c_out", "c_tok", "half", "waits", "starved", "limit",
         "table")
CASES = tuple(LevelCase(levels, 25, batch, 32, 8, seqlen, TARGET)
              for levels in ("lean", "lean-low") for batch, seqlen in ((64, 4096), (8, 32768)))


def prepared(case: LevelCase, kind: str, device: str = "cuda") -> LevelCache:
    """A cache whose next ``manage`` is of this kind, with frames for what leaves."""
    cache = make_cache(case, device)
    spare = len(cache.half)
    cache.pool.grow(spare if cache.pool.is_shared else (spare, spare))
    assert not (SINKS % EVERY or PAGE % EVERY)
    cache.n_tok.copy_(cache.n_sink + cache.n_out + RECENT[kind])
    cache.score.uniform_()
    cache.seen.fill_(3)
    cache.recount()
    return cache


def restorer(cache: LevelCache):
    """A function that puts a cache's counters and lists back to what they are now."""
    held = [getattr(cache, name) for name in STATE] + [free.ends for free in cache.pool.lists]
    kept = [x.clone() for x in held]

    def restore() -> None:
        for x, old in zip(held, kept):
            x.copy_(old)
    return restore


def manage_us(case: LevelCase, kind: str, path: str | None) -> float:
    """One ``manage`` in a graph."""
    cache = prepared(case, kind)
    q = torch.randn(case.batch, 1, case.num_heads, case.head_dim, device="cuda", dtype=cache.dtype)
    _, lse = decode(q, cache)
    restore = restorer(cache)
    alone = bench.graph_us(restore)

    def step() -> None:
        restore()
        cache.manage(q, lse, path=path)

    before = cache.n_out.clone()
    found = bench.graph_us(step) - alone
    assert bool((cache.n_out > before).all()) == (kind == "flush") and not cache.starved.any()
    return found


def append_us(case: LevelCase) -> float:
    """One ``append`` of a token to each sequence, in a graph."""
    cache = prepared(case, "rest")
    k, v = new_tokens(case, cache)
    restore = restorer(cache)
    alone = bench.graph_us(restore)

    def step() -> None:
        restore()
        cache.append(k, v)

    return bench.graph_us(step) - alone


def layer_us(case: LevelCase, kind: str | None) -> float:
    """A layer's whole step in a graph, whose ``manage`` is of this kind; None: append and decode alone."""
    cache = prepared(case, kind or "rest")
    cache.n_tok -= 1
    cache.recount()
    q = torch.randn(case.batch, 1, case.num_heads, case.head_dim, device="cuda", dtype=cache.dtype)
    k, v = new_tokens(case, cache)
    decode(q, cache)
    restore = restorer(cache)
    alone = bench.graph_us(restore)

    def step() -> None:
        restore()
        cache.append(k, v)
        _, lse = decode(q, cache)
        if kind:
            cache.manage(q, lse)

    return bench.graph_us(step) - alone


def new_tokens(case: LevelCase, cache: LevelCache) -> tuple[torch.Tensor, torch.Tensor]:
    shape = case.batch, 1, case.num_heads_kv, case.head_dim
    return tuple(torch.randn(shape, device="cuda", dtype=cache.dtype) for _ in range(2))


def mean_us(us: dict[str, float]) -> float:
    """The mean of steps, each kind as often as it comes."""
    score, flush = 1 / EVERY - 1 / PAGE, 1 / PAGE
    return us["rest"] * (1 - score - flush) + us["score"] * score + us["flush"] * flush


def share(mean: float, others_us: float, weights_us: float) -> float:
    """Part of a step that ``manage`` is; others_us: what else a layer does."""
    return LAYERS * mean / (LAYERS * (mean + others_us) + weights_us)


def measure(case: LevelCase, with_torch: bool = True) -> dict:
    """The numbers of a case."""
    cache = prepared(case, "rest")
    q = torch.randn(case.batch, 1, case.num_heads, case.head_dim, device="cuda", dtype=cache.dtype)
    decoding = bench.graph_us(lambda: decode(q, cache))
    weights = bench.read_us(READ_BYTES)[0] * WEIGHT_BYTES / READ_BYTES
    us = {name: {kind: round(manage_us(case, kind, path), 2) for kind in RECENT}
          for name, path in (("kernels", None), *[("torch", "reference")] * with_torch)}
    line = {name: value for name, value in case.line.items() if name != "ragged"}
    for name, times in us.items():
        line |= {f"{name}_us": times, f"{name}_mean_us": round(mean_us(times), 2),
                 f"{name}_share": round(share(mean_us(times), decoding, weights), 4)}
    layer, without = {kind: round(layer_us(case, kind), 2) for kind in RECENT}, layer_us(case, None)
    return line | {"append_us": round(append_us(case), 2), "layer_us": layer, "layer_mean_us": round(mean_us(layer), 2),
                   "layer_without_us": round(without, 2),
                   "layer_share": round(share(mean_us(layer) - without, without, weights), 4),
                   "decode_us": round(decoding, 2), "weights_us": round(weights, 1), "target": TARGET}


def main(
    only: Annotated[list[int], typer.Option(help="Only the case of this number; repeatable.")] = [],
    with_torch: Annotated[bool, typer.Option("--torch/--no-torch", help="also time manage in torch")] = True,
    output: Annotated[str, typer.Option(help="JSON lines file of the repository")] = "perf/results/level_manage.jsonl",
) -> None:
    """Time the cases, one JSON line each."""
    need()
    torch.ones((8, 8), device="cuda") @ torch.ones((8, 8), device="cuda")  # cuBLAS cannot start in a captured step
    origin = provenance()
    for number in only or range(len(CASES)):
        line = measure(CASES[number], with_torch)
        append_result(output, origin | line)
        print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
