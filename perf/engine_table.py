"""Prints docs/serving.md's tables of what perf/engine.py measured: newest lines of one kind of GPU.

    python perf/engine_table.py steps        time per output token
    python perf/engine_table.py largest      the largest batch that the cache holds
    python perf/engine_table.py prompts      time per output token behind prompts, and behind blocks of dummy values
    python perf/engine_table.py ranks        time per output token of several GPUs, and of one
    python perf/engine_table.py quality      perplexity through the engine, and by lowbit_attn.quality
    python perf/engine_table.py overhead     the same steps in the engine and in perf/e2e.py, on one card in one run

A ratio is to vLLM's own 16-bit cache ("auto") in the same run: the newest one before the row's line, of its commit.
"""

import json
import statistics
from collections.abc import Iterator
from typing import Annotated

import typer
from provenance import ROOT

RESULTS, E2E = ROOT / "perf/results/engine.jsonl", ROOT / "perf/results/e2e.jsonl"
BASE = "auto"
CASES = [(context, batch) for context in (8192, 32768, 131072) for batch in (1, 8)]
app = typer.Typer(no_args_is_help=True, add_completion=False)
Gpu = Annotated[str, typer.Option(help="Part of the GPU's name.")]


def read(part: str, gpu: str) -> list[dict]:
    """All lines of a part on a GPU, oldest first."""
    lines = map(json.loads, RESULTS.read_text().splitlines())
    return [line for line in lines if line["part"] == part and gpu in line["gpu"]]


def lines(gpu: str, fill: str = "dummy", several: bool = False) -> Iterator[dict]:
    """Measured steps on a GPU, or on ``several`` of them, oldest first, each with ``base``: the 16-bit line of its run
    and case, or None."""
    bases: dict[tuple, dict] = {}
    for line in read("steps", gpu):
        if "context" not in line or line["fill"] != fill or line["is_eager"]:  # without: a row that ended early
            continue
        if (line.get("ranks", 1) > 1) != several:
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


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    return "\n".join(("| " + " | ".join(head) + " |", "|---" * len(head) + "|",
                      *("| " + " | ".join(row) + " |" for row in rows)))


def case_of(line: dict) -> str:
    return f"{line['context'] >> 10}K, batch {line['batch']}"


def typical(line: dict) -> float:
    """Median of a line's measurements of one step, in ms: where a machine is shared, hosts disturb single ones."""
    stepped = [line["ms_stepped"]] if "ms_stepped" in line else []
    return statistics.median([*line.get("ms_of_each", [line["ms_per_token"]]), *stepped])


def newest(gpu: str, like: dict, **same: str) -> float | None:
    """``typical`` of the newest line of a dtype and case on one GPU with dummy blocks; same: what else agrees."""
    found = [typical(line) for line in lines(gpu) if "ms_per_token" in line and not line["is_largest"]
             and all(line[name] == like[name] for name in ("dtype", "context", "batch"))
             and all(line[name] == value for name, value in same.items())]
    return found[-1] if found else None


def prompts(gpu: str) -> str:
    """Markdown: ms of a step behind prompts of random tokens, behind dummy blocks in that engine, and their ratio."""
    rows = {}
    for line in lines(gpu):
        if behind := line.get("ms_prompts"):
            dummy = line["ms_stepped"]
            rows[line["dtype"], case_of(line)] = [f"{behind:.2f}", f"{dummy:.2f}", f"{behind / dummy:.2f}"]
    return table(["dtype", "case", "prompts, ms", "dummy blocks, ms", "ratio"],
                 [[*key, *row] for key, row in rows.items()])


def ranks(gpu: str) -> str:
    """Markdown: ms a token of several GPUs by tensor parallel, of one, and how much faster several are."""
    rows = {}
    for line in lines(gpu, several=True):
        if "ms_per_token" in line:
            one, ms = newest(gpu, line), typical(line)
            rows[line["dtype"], f"{line['ranks']}", case_of(line)] = \
                [f"{ms:.2f}", f"{one:.2f}" if one else "-", f"{one / ms:.2f}x" if one else "-"]
    return table(["dtype", "GPUs", "case", "ms a token", "one GPU", "gain"],
                 [[*key, *row] for key, row in rows.items()])


def quality(gpu: str) -> str:
    """Markdown: perplexity of the same text in the same chunks, through the engine and by lowbit_attn.quality."""
    found: dict[str, dict[str, float]] = {}
    for line in read("quality", gpu):
        if "perplexity" in line:
            found.setdefault(line["dtype"], {})[line["by"]] = line["perplexity"]
    rows = []
    for dtype, by in sorted(found.items(), key=lambda item: (item[0] != BASE, item[0].startswith("lowbit"), item[0])):
        ours, engine = by.get("lowbit_attn.quality"), by.get("vllm")
        rows.append([dtype, f"{engine:.3f}" if engine else "-", f"{ours:.3f}" if ours else "-",
                     f"{engine / ours - 1:+.2%}".replace("%", " %") if ours and engine else "-"])
    return table(["dtype", "vLLM", "lowbit_attn.quality", "apart"], rows)


def overhead(gpu: str) -> str:
    """Markdown: for each case ms of a step in perf/e2e.py and in the engine, in 16 bit and for k4v4; and what k4v4
    takes more there than 16 bit does, in ms and of its own step in perf/e2e.py.

    Cases that the engine ran at the commit of perf/e2e.py's line.
    """
    plain = [line for line in map(json.loads, E2E.read_text().splitlines())
             if line.get("dtype") == "bfloat16" and gpu in line["gpu"]]
    kinds, found = {"16 bit": BASE, "k4v4": "lowbit_k4v4"}, {}
    for line in plain:
        like = dict(dtype=kinds.get(line["format"]), context=line["seqlen"], batch=line["batch"])
        if ms := newest(gpu, like, commit=line["commit"]):
            found.setdefault(case_of(like), {})[line["format"]] = (line["step_ms"], ms)
    rows = []
    for case, by in found.items():
        if len(by) == len(kinds):
            more = {kind: engine - alone for kind, (alone, engine) in by.items()}
            own = more["k4v4"] - more["16 bit"]
            rows.append([case, *(f"{by[kind][0]:.2f} -> {by[kind][1]:.2f}, +{more[kind]:.2f}" for kind in kinds),
                         f"{own:+.2f} ms, {own / by['k4v4'][0]:+.1%}".replace("%", " %")])
    return table(["case", "16 bit: e2e -> engine, ms", "k4v4: e2e -> engine, ms", "k4v4 more than 16 bit"], rows)


@app.command("steps")
def print_steps(gpu: Gpu = "H100") -> None:
    """Time per output token by context and batch."""
    print(steps(gpu))


@app.command("largest")
def print_largest(gpu: Gpu = "H100") -> None:
    """Largest batches."""
    print(largest(gpu))


@app.command("prompts")
def print_prompts(gpu: Gpu = "H100") -> None:
    """Prompts beside dummy blocks."""
    print(prompts(gpu))


@app.command("ranks")
def print_ranks(gpu: Gpu = "H100") -> None:
    """Several GPUs."""
    print(ranks(gpu))


@app.command("quality")
def print_quality(gpu: Gpu = "H100") -> None:
    """Perplexity."""
    print(quality(gpu))


@app.command("overhead")
def print_overhead(gpu: Gpu = "H100") -> None:
    """The engine beside perf/e2e.py."""
    print(overhead(gpu))


if __name__ == "__main__":
    app()
