"""python -m lowbit_attn.demo: the table, the answers, the plot."""

import os
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lowbit_attn import FORMATS, progress, tokenizing
from lowbit_attn.cli.common import check_folder, fail, format_named, writing
from lowbit_attn.cli.errors import last_resort
from lowbit_attn.demo import model as models
from lowbit_attn.demo import report
from lowbit_attn.formats import levels

# The short text ends with a block: 32 sinks and 8 blocks of 128, all of them packed in a cache with sinks.
FULL_TOKENS, QUICK_TOKENS = 2048, 32 + 8 * 128
MOST_SINKS = 1024
BENCHED = ["k4v4", "k2v2"]
CONTEXT_TOKENS, ANSWER_TOKENS = 600, 40  # of the question that is answered by every format


def main(
    quick: Annotated[bool, typer.Option("--quick", envvar="QUICK", help="Read 1,056 tokens instead of 2,048.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the plot and the JSON file.")] = Path("build/demo"),
    cache_dir: Annotated[Path | None, typer.Option(help="Folder of the model; default: the user's cache.")] = None,
    format: Annotated[list[str] | None, typer.Option(help=f"One more row: {', '.join(FORMATS.grammars)}.")] = None,
    sinks: Annotated[int, typer.Option(min=0, max=MOST_SINKS, help="Sinks of the --format rows.")] = 0,
) -> None:
    """A small real model reads real text through low-bit KV caches: quality, bytes and speed of each format."""
    with last_resort():
        for name in format or []:
            if not known_levels(name):
                format_named(name, f"also {', '.join(levels.PRESETS)}")
        check_folder("out", out)
        console = Console(width=None if Console().is_terminal else 120)
        try:
            gguf = models.fetch(cache_dir or models.default_folder(), console.print)
        except (models.FetchError, OSError) as error:
            fail(f"model: {error}", 1)
        run(console, gguf, quick, out, [(name, sinks) for name in format or []])


def known_levels(name: str) -> bool:
    """Whether a name is one of levels; ends the demo for a pair that is refused."""
    try:
        return levels.parse(name) is not None
    except ValueError as error:
        fail(error)


def run(console: Console, gguf: Path, is_quick: bool, out: Path, extra: list[tuple[str, int]]) -> None:
    """Load the model, print the rows and the answers, and write the plot and the numbers."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
    from lowbit_attn import quality
    from lowbit_attn.demo import learning, scoring

    tokens = QUICK_TOKENS if is_quick else FULL_TOKENS
    shown, left_out = scoring.cases_of(tokens)
    cases = [*shown, *(scoring.Case(f"{name}, {sinks} sinks", name, sinks) for name, sinks in extra)]
    device, reasons = scoring.pick_device()
    console.print(f"Device: {device}" + (f" ({'; '.join(reasons)})" if reasons else ""), markup=False)
    start = time.perf_counter()
    with console.status("Loading SmolLM2-135M-Instruct (about 20 s) ..."):
        model, tokenizer = models.load(gguf, device)
    console.print(f"Loaded SmolLM2-135M-Instruct in {time.perf_counter() - start:.0f} s ({model.dtype}).")
    ids = tokenizing.tensor(tokenizer, scoring.help_text(), device)[:, :tokens]
    console.print(f"Reading {ids.shape[1]:,} tokens of Python's help text in chunks of {quality.CHUNK}, every token "
                  "predicted. 16 bit: transformers' cache and sdpa attention, K and V rounded to 16 bit.")
    if left_out:
        console.print(f"Left out: {left_out}", markup=False)
    taught = learning.TOKENS if tokens == FULL_TOKENS else learning.QUICK_TOKENS
    cases = learning.with_codebooks(console, model, tokenizer, cases, taught, out)
    console.print()
    rows = _score_all(console, scoring, quality, model, ids, cases)
    for line in report.notes(rows, model.config):
        console.print(line, markup=False)
    console.print(f"\nDecoding is served by: {rows[1].served_by}.\n")
    answers = _answer_all(console, scoring, model, tokenizer, cases)
    report.show_answers(console, answers, tokenizer.decode)

    with writing("out", out):
        out.mkdir(parents=True, exist_ok=True)
        report.save_plot(out / "demo.png", rows, ids.shape[1], device)
        report.save_json(out / "demo.json", rows, tokens=ids.shape[1], device=device, answers={
            label: tokenizer.decode(answer) for label, answer in answers.items()})
    _bench(console)
    console.print(f"\nPlot: {out / 'demo.png'}   numbers: {out / 'demo.json'}   "
                  f"in all {time.perf_counter() - start:.0f} s")
    console.print("Next: python -m lowbit_attn.demo --quick --format k4v2-vg32 --sinks 32", markup=False)


def _bench(console: Console) -> None:
    """Decode at 32K on this GPU beside 16 bit, or a line that says why not."""
    from lowbit_attn.cli import bench

    if reason := bench.unavailable():
        console.print(f"\nDecode at 32K tokens was not timed: {reason}.", markup=False)
        return
    console.print("\nDecode at 32K tokens, random data (kernels that are not built yet are built first):")
    bench.bench(BENCHED, 32, 8, 128, 8, 1, 32768, None, None, False)


def _score_all(console: Console, scoring, quality, model, ids, cases) -> list[report.Row]:
    """Print one row a case as it finishes."""
    rows, baseline = [], None
    console.print(report.header())
    with progress.bar(console, "tokens") as bar:
        whole = bar.add_task("all caches", total=len(cases) * ids.shape[1])
        for case in cases:
            task = bar.add_task(case.label, total=ids.shape[1])
            score = scoring.score(model, ids, case, lambda n, task=task: (bar.advance(task, n), bar.advance(whole, n)))
            baseline = score if baseline is None else baseline
            rows.append(report.Row(case.label, case.format, case.sinks, case.range_search, score.bits_per_element,
                                   score.cache_bytes, score.perplexity, quality.agreement(score.top1, baseline.top1),
                                   score.tokens_per_s, score.served_by,
                                   quality.spread(score.perplexity, score.nll, baseline.nll, score.predicted)))
            bar.remove_task(task)
            bar.console.print(report.line(rows[-1].cells(rows[0].cache_bytes)))
    return rows


def _answer_all(console: Console, scoring, model, tokenizer, cases) -> dict[str, list[int]]:
    prompt = scoring.question(tokenizer, CONTEXT_TOKENS).to(model.device)
    answers = {}
    answered = [case for case in cases if case.label in scoring.ANSWERED]
    with progress.bar(console, "tokens") as bar:
        task = bar.add_task("", total=len(answered) * ANSWER_TOKENS)
        for case in answered:
            bar.update(task, description=f"answering: {case.label}")
            answers[case.label] = scoring.answer(model, prompt, case, ANSWER_TOKENS, lambda n: bar.advance(task, n))
    return answers


if __name__ == "__main__":
    typer.run(main)
