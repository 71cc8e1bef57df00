"""Prints the tables of what perf/serve.py measured: the newest lines of one kind of GPU.

    python perf/serve_table.py loads         a whole server's work, by load: docs/serving.md
    python perf/serve_table.py readme        its output tokens/s: README.md

A ratio is to vLLM's own 16-bit cache ("auto") at the same commit, load, mode and cache size.
"""

import json
from typing import Annotated

import typer
from engine_table import table
from provenance import ROOT

RESULTS = ROOT / "perf/results/serve.jsonl"
BASE, TTFT = "auto", "ttft"
ALIKE = ("load", "mode", "cache_gib", "drafts", "prefix_caching", "commit", "compilation")
WORDS = {
    "ttft": "time to the first token, a prompt of {} tokens",
    "chat": "chat: prompts of 500 to 4,000 tokens, 100 to 300 out",
    "long": "long: prompts of 4,000 to 16,000 tokens, 100 to 300 out",
    "chat-800": "chat-800: the prompts of chat, 800 to 1,600 out",
    "long-800": "long-800: the prompts of long, 800 to 1,600 out",
    "docs": "docs: 16 at once, prompts of 24,000 to 40,000 tokens, 500 to 1,000 out",
    "shared": "shared: one of 8 system prompts of 2,048 tokens before each",
    "verify": "verify: the prompts repeat themselves",
}
app = typer.Typer(no_args_is_help=True, add_completion=False)
Gpu = Annotated[str, typer.Option(help="Part of the GPU's name.")]


def cases(gpu: str) -> dict[tuple, dict[str, dict]]:
    """The newest line of each dtype, by case."""
    found: dict[tuple, dict[str, dict]] = {}
    for line in map(json.loads, RESULTS.read_text().splitlines()):
        if gpu in line["gpu"] and "load" in line:
            case = (*(line[name] for name in ALIKE), line["prompt_tokens"] if line["load"] == TTFT else None)
            found.setdefault(case, {})[line["dtype"]] = line
    return found


def words(case: tuple) -> str:
    named = dict(zip((*ALIKE, "length"), case))
    text = WORDS[named["load"]].format(f"{named['length']:,}" if named["length"] else "")
    text += f", {named['drafts']} n-gram drafts" if named["drafts"] else ""
    return text + (f", a cache of {named['cache_gib']:.0f} GiB" if named["cache_gib"] else "")


def value(line: dict, base: dict | None) -> str:
    """Seconds to the first token, or output tokens/s, with the ratio to 16 bit."""
    name, form = ("seconds", "{:.3f} s") if line["load"] == TTFT else ("out_tok_s", "{:,.0f}")
    ratio = f", {line[name] / base[name]:.2f}x" if base and line is not base else ""
    return form.format(line[name]) + ratio


def loads(gpu: str) -> str:
    """Markdown: a row a case and dtype."""
    rows = []
    for case, dtypes in cases(gpu).items():
        for dtype, line in dtypes.items():
            rest = ["-"] * 4
            if line["load"] != TTFT:
                rest = [f"{line['ttft_ms'][0]:,.0f}, {line['ttft_ms'][1]:,.0f}", f"{line['itl_ms'][0]:.1f}, "
                        f"{line['itl_ms'][2]:.1f}", f"{line['pure_ms'][0]:.1f}, {line['mixed_ms'][0]:.1f}",
                        f"{line['launches_per_mixed_step']:.0f}, {line['syncs_per_mixed_step']:.2f}"]
            rows.append([words(case), dtype, value(line, dtypes.get(BASE)), *rest])
    return table(["load", "dtype", f"output tokens/s, x {BASE}", "TTFT ms: median, p90", "ITL ms: median, p99",
                  "step ms: decode, mixed", "mixed step: launches, syncs"], rows)


def readme(gpu: str) -> str:
    """Markdown: a row a case with output tokens, a column a dtype."""
    found = {case: lines for case, lines in cases(gpu).items() if case[0] != TTFT}
    dtypes = list(dict.fromkeys(dtype for lines in found.values() for dtype in lines))
    order = [BASE, *sorted(dtype for dtype in dtypes if dtype != BASE)]
    rows = [[words(case), *(value(lines[dtype], lines.get(BASE)) if dtype in lines else "-" for dtype in order)]
            for case, lines in found.items()]
    return table(["output tokens/s", *order], rows)


@app.command("loads")
def show_loads(gpu: Gpu = "H200") -> None:
    """A row a case and dtype."""
    print(loads(gpu))


@app.command("readme")
def show_readme(gpu: Gpu = "H200") -> None:
    """A row a case."""
    print(readme(gpu))


if __name__ == "__main__":
    app()
