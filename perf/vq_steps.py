"""Times VQ-LLM's steps from codebooks in global memory to conflict-free lookups and tables, in one run on one GPU.

    python perf/vq_steps.py                one JSON line a step in perf/results/vq_steps.jsonl, a table on screen

A step is a decode kernel that differs from the next one's in its lookups alone (vq_kernels.py), and the last ones are
the shipped kernels: "table", of 4 query rows, whose K looks up products of entries with q where codes are of 4
channels, and "default", which decode takes. Every kernel is compared with the reference first. Times as in bench.py;
of "read" the faster of a plain and a hinted read of the same bytes, of "16 bit" the best attention of torch.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated

import torch
import typer
from provenance import append_result, need, provenance
from rich.console import Console
from rich.table import Table

from lowbit_attn import FORMATS, bench, compile, decode, dispatch, emit, entries, kernels, loader, sass, testing
from lowbit_attn.bench import BenchCase
from lowbit_attn.reference import Attention
from lowbit_attn.testing import Case

SHAPES = ((8, 32, 32, 128, 1024), (8, 32, 32, 128, 4096), (8, 32, 8, 128, 32768))  # the paper's two, and ours
CASES = tuple(BenchCase(name, *shape) for shape in SHAPES for name in ("cq2", "cq4"))
TABLE, DEFAULT = "table", "default"
MOST_ERROR = 5e-3  # of o beside the shipped kernel's, relative: sums of a table round logits to about 1e-3


def built(name: str, lookup: str) -> Path:
    """A step's kernel of a format in fp16, built at its first use and kept in the kernel cache; .json: its facts."""
    import vq_kernels

    key = key_of(name, lookup)
    text = Path(vq_kernels.__file__).read_bytes() + compile.fingerprint("hopper", "decode").encode()
    folder = compile.cache_dir() / "vq-steps" / hashlib.sha256(text).hexdigest()[:16]
    path, program = folder / f"{key.name}.so", vq_kernels.step_kernel(FORMATS[name], key.dtype, lookup)
    if not path.exists():
        entries.make_folders(folder)
        function, _ = emit.emit_cute(key, program, path.with_suffix(".tmp"))
        found, = sass.inspect(path.with_suffix(".tmp"))
        path.with_suffix(".json").write_text(json.dumps({
            "function": function, "registers": found.registers, "spills": sum(found.ops[op] for op in sass.SPILLS)}))
        path.with_suffix(".tmp").rename(path)
    return path


def facts_of(name: str, lookup: str) -> dict:
    """Registers and spilled words of a step's kernel."""
    if lookup == DEFAULT:
        return {}
    if lookup == TABLE:
        facts = compile.build(key_of(name, TABLE)).facts
    else:
        facts = json.loads(built(name, lookup).with_suffix(".json").read_text())
    return {fact: facts[fact] for fact in ("registers", "spills")}


def kernel_of(name: str, lookup: str) -> Callable:
    path = built(name, lookup)
    facts = json.loads(path.with_suffix(".json").read_text())
    return loader._open(key_of(name, lookup), compile.Built(path, facts))


def key_of(name: str, lookup: str) -> kernels.KernelKey:
    key = kernels.decode_key("hopper", "sm_90a", "float16", 128, name, "codebook", 4)
    return key if lookup in (TABLE, DEFAULT) else replace(key, arithmetic=f"codebook_{lookup}")


def step_of(cache, q: torch.Tensor, name: str, lookup: str, splits: int | None = None) -> Callable:
    """A call of a step's kernel: () -> (o, lse)."""
    if lookup == DEFAULT:
        return lambda: decode(q, cache, num_splits=splits)
    if lookup == TABLE:
        return lambda: decode(q, cache, num_splits=splits, path="codebook")
    import vq_kernels

    plan = dispatch._make_plan(q, vq_kernels.cache_for(cache, lookup), Attention(), splits, key_of(name, TABLE))
    plan.decode = kernel_of(name, lookup)
    return lambda: plan.run(q, None, None, None)


@cache
def problem_of(name: str, heads: int) -> tuple[testing.Problem, testing.Expected]:
    """Sequences of several lengths, and the reference's answer."""
    case = Case(name, num_heads=heads, num_heads_kv=2, lengths=(700, 0, 128, 2051, 40), sinks=5)
    problem = testing.build(case, "cuda")
    return problem, testing.expected(problem)


def check(name: str, lookup: str) -> float:
    """Largest relative error of a step's o beside the reference, over several lengths; AssertionError beyond it."""
    errors = []
    for heads, splits in ((8, None), (2, 3), (6, 1)):
        problem, want = problem_of(name, heads)
        o, lse = step_of(problem.cache, problem.q, name, lookup, splits)()
        testing.assert_decode(o, lse, want)
        errors.append(testing.relative_error(o.cpu(), want.o))
    return max(errors)


def main(
    output: Annotated[str, typer.Option(help="JSON lines file of the repository")] = "perf/results/vq_steps.jsonl",
) -> None:
    """Check each step, then time it in each case."""
    need()
    import vq_kernels

    steps, origin, console = (*vq_kernels.LOOKUPS, TABLE, DEFAULT), provenance(), Console(width=120)
    errors = {(name, step): check(name, step) for name in ("cq2", "cq4") for step in steps}
    table = Table("case", "step", "us", "x 16 bit", "x read", "error", title=origin["gpu"])
    for case in CASES:
        held = q = None
        torch.cuda.empty_cache()
        held = bench.make_cache(case)
        q = bench.query_of(case, held)
        nbytes, want = bench.call_bytes(case, held), decode(q, held)[0]
        read = min(bench.read_us(nbytes, policy)[0] for policy in (bench.PLAIN, bench.HINTED))
        fp16, by = bench.fp16_us(case.batch, case.num_heads, case.num_heads_kv, case.head_dim, case.seqlen, case.q_len)
        for step in steps:
            call = step_of(held, q, case.format, step)
            error = testing.relative_error(call()[0], want)
            assert error < MOST_ERROR, f"{case} {step}: {error} beside the shipped kernel"
            us = bench.graph_us(call)
            append_result(output, origin | case.line | {
                "step": step, "us": round(us, 2), "read_us": round(read, 2), "fp16_us": round(fp16, 2), "fp16_by": by,
                "bytes": nbytes, "error": round(errors[case.format, step], 7), **facts_of(case.format, step)})
            table.add_row(str(case), step, f"{us:.1f}", f"{us / fp16:.2f}", f"{us / read:.2f}",
                          f"{errors[case.format, step]:.1e}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
