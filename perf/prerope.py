"""Times decode over codebooks of keys before their rotary embedding beside those of keys after it, on one GPU.

    python perf/prerope.py        one JSON line a kernel in perf/results/prerope.jsonl, a table on screen

Both read the same pages, whose codes are random: what codes mean changes no time. Every kernel before the embedding is
first compared with the reference, over several lengths, and in each case with torch's own reading of the same cache.
"""

import copy
from typing import Annotated

import torch
import typer
from provenance import append_result, need, provenance
from rich.console import Console
from rich.table import Table

from lowbit_attn import bench, decode, testing
from lowbit_attn.bench import BenchCase
from lowbit_attn.cache.attached import Attached, identity
from lowbit_attn.testing import Case

SHAPES = ((8, 32, 8, 32768), (1, 32, 8, 131072), (1, 32, 32, 131072), (8, 64, 8, 32768))  # batch, heads, KV heads
AFTER, BEFORE = ("codebook2", "codebook", "codebook8"), ("prerope", "prerope8")
ROWS = {"codebook2": 2, "codebook": 4, "codebook8": 8, "prerope": 4, "prerope8": 8}
MOST_ERROR = 3e-3  # of o beside torch's reading, relative: angles and turned keys are rounded to fp16


def before(cache):
    """A view of a cache whose codes are of keys before their rotary embedding, of shared codebooks of K."""
    view = copy.copy(cache)
    books = testing.normal_codebooks("cq2", 1, cache.num_heads_kv, cache.head_dim, "pre", k_shared=True).layer(0)
    view.attached = Attached(books, cache.format, cache.num_heads_kv, cache.head_dim, cache.device)
    view.plans, view.identity = None, identity(cache.format, view.attached)
    return view


def check(path: str) -> float:
    """Largest relative error of a kernel's o beside the reference, over several lengths; AssertionError beyond it."""
    errors = []
    for splits in (None, 1):
        case = Case("cq2", num_heads=2 * ROWS[path], num_heads_kv=2, lengths=(700, 0, 128, 2051, 40), sinks=5,
                    rope="pre", k_shared=True)
        problem = testing.build(case, "cuda")
        want = testing.expected(problem)
        o, lse = decode(problem.q, problem.cache, path=path, num_splits=splits)
        testing.assert_decode(o, lse, want)
        errors.append(testing.relative_error(o.cpu(), want.o))
    return max(errors)


def main(
    output: Annotated[str, typer.Option(help="JSON lines file of the repository")] = "perf/results/prerope.jsonl",
) -> None:
    """Check each kernel, then time all in each case."""
    need()
    origin, console = provenance(), Console(width=120)
    errors = {path: check(path) for path in BEFORE}
    table = Table("case", "path", "us", "x read", "x the fastest after it", "error", title=origin["gpu"])
    for batch, heads, heads_kv, seqlen in SHAPES:
        case, held, torch_o = BenchCase("cq2", batch, heads, heads_kv, 128, seqlen), None, None
        torch.cuda.empty_cache()
        held = bench.make_cache(case)
        q, turned = bench.query_of(case, held), before(held)
        nbytes = bench.call_bytes(case, held)
        read = min(bench.read_us(nbytes, policy)[0] for policy in (bench.PLAIN, bench.HINTED))
        torch_o = decode(q[:1], turned, path="reference")[0]
        times = {path: bench.graph_us(lambda: decode(q, held, path=path)) for path in AFTER  # noqa: B023
                 if ROWS[path] >= min(8, case.rows)}
        fastest = min(times.values())
        for path in (*times, *(path for path in BEFORE if ROWS[path] >= min(8, case.rows))):
            error = None
            if path in BEFORE:
                error = testing.relative_error(decode(q, turned, path=path)[0][:1], torch_o)
                assert error < MOST_ERROR, f"{case} {path}: {error} beside torch's reading"
                times[path] = bench.graph_us(lambda: decode(q, turned, path=path))  # noqa: B023
            us = times[path]
            append_result(output, origin | case.line | {
                "path": path, "us": round(us, 2), "read_us": round(read, 2), "bytes": nbytes,
                "error": None if error is None else round(max(error, errors[path]), 7)})
            table.add_row(str(case), path, f"{us:.1f}", f"{us / read:.2f}", f"{us / fastest:.3f}", str(error))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
