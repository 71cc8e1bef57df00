"""Prints docs/serving.md's tables of what perf/engine.py measured: newest lines of one kind of GPU.

    python perf/engine_table.py steps        time per output token
    python perf/engine_table.py largest      the largest batch that the cache holds

A ratio is to vLLM's own 16-bit cache ("auto") in the same run: the newest one before the row's line, of its commit.
"""

import json
from collections.abc import Iterator
from typing import Annotated

import typer
from provenance import ROOT

RESULTS = ROOT / "perf/results/engine.jsonl"
BASE = "auto"
CASES = [(context, batch) for context in (8192, 32768, 131072) for batch in (1, 8)]
app = typer.Typer(no_args_is_help=True, add_completion=False)
Gpu = Annotated[str, typer.Option(help="Part of the GPU's name.")]


def lines(gpu: str, fill: str = "dummy") -> Iterator[dict]:
    """Measured steps on a GPU, oldest first, each with ``base``: the 16-bit line of its run and case, or None."""
    bases: dict[tuple, dict] = {}
    for line in map(json.loads, RESULTS.read_text().splitlines()):
        is_step = line["part"] == "steps" and "context" in line  # not of a row that ended early
        if not is_step or gpu not in line["gpu"] or line["fill"] != fill or line["is_eager"]:
            continue
        case = (line["context"], line["batch"] * (not line["is_largest"]))
        if line["dtype"] == BASE:
            bases[case, line["commit"]] = line
        yield line | dict(case=case, base=bases.get((case, line["commit"])))


def steps(gpu: str) -> str:
    """Markdown: a row a dtype, ms a token and the ratio to 16 bit; "-": its blocks do not hold the case."""
    found: dict[str, dict[tuple, str]] = {}
    for line in lines(gpu):
        row = found.setdefault(line["dtype"], {})
        if "ms_per_token" in line and not line["is_largest"]:
            base = line["base"] and line["base"].get("ms_per_token")
            ratio = f", {line['ms_per_token'] / base:.2f}" if base and line["dtype"] != BASE else ""
            row[line["case"]] = f"{line['ms_per_token']:.2f}{ratio}"
    head = [f"{context >> 10}K, batch {batch}" for context, batch in CASES]
    body = [f"| {name} | " + " | ".join(row.get(case, "-") for case in CASES) + " |" for name, row in found.items()]
    return "\n".join((f"| ms a token, x {BASE} | " + " | ".join(head) + " |", "|---" * (1 + len(head)) + "|", *body))


def largest(gpu: str) -> str:
    """Markdown: a row a dtype, what the cache holds, the largest batch of 32K tokens and its tokens/s."""
    found = {}
    for line in lines(gpu):
        if line["is_largest"] and "ms_per_token" in line:
            base = line["base"]
            gain = f"{line['tokens_per_s'] / base['tokens_per_s']:.1f}x" if base else "-"
            found[line["dtype"]] = (f"| {line['dtype']} | {line['capacity_tokens']:,} | {line['batch']} | "
                                    f"{line['ms_per_token']:.1f} | {line['tokens_per_s']:,.0f} | {gain} |")
    head = "| dtype | tokens held | largest batch of 32K | ms a token | tokens/s | x auto |"
    return "\n".join((head, "|---" * 6 + "|", *found.values()))


@app.command("steps")
def print_steps(gpu: Gpu = "H100") -> None:
    """Time per output token by context and batch."""
    print(steps(gpu))


@app.command("largest")
def print_largest(gpu: Gpu = "H100") -> None:
    """Largest batches."""
    print(largest(gpu))


if __name__ == "__main__":
    app()
