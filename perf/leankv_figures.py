"""The LeanKV paper's figures on SmolLM2-135M-Instruct, as JSON lines and plots; needs no GPU.

    python perf/leankv_figures.py measure --only attention    Fig. 1 to 3: scores, norms of V, critical tokens
    python perf/leankv_figures.py measure --only text         Fig. 8 to 11: KL of caches that prune, that mix levels
    python perf/leankv_figures.py measure --only recall       Fig. 8: codes found again in pruned prompts
    python perf/leankv_figures.py plot                        perf/results/plots/leankv-*.png, of the lines there are
    python perf/leankv_figures.py measure --gguf FILE --model qwen --text code --windows 1 --tokens 512
        --label "lean, 10 % high"                             another model: a text and caches of one's choice

Lines that are there are not measured again: a run that was broken off goes on where it ended. Fig. 7 and the uniform
formats of Fig. 9 and 11 are lines of text_quality.py, on the same windows. Fig. 12 to 14 need a GPU:

    python perf/bench.py --preset leankv --arch hopper --output perf/results/leankv_decode.jsonl
    python perf/e2e.py --contexts 1K --batch 1 --batch 8 --batch 64 --formats lean
    python perf/e2e.py --contexts 32K --batch 0 --formats lean --formats lean-low --formats k4v4
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from leankv_cases import Case, attention_of, cases, kept_caches, recall_cases, stored
from provenance import ROOT, append_result, provenance
from text_quality import TEXTS, TOKENS, text_of, windows

app = typer.Typer(no_args_is_help=True, add_completion=False)

MODEL = "SmolLM2-135M-Instruct"
RESULTS = "perf/results/leankv_figures.jsonl"
PLOTS = "perf/results/plots"
TASKS = ("attention", "text", "recall")
REQUESTS = 4  # windows of each text whose attention is looked at
QUESTIONS = 80
TOGETHER = 6  # caches read in lockstep beside one in 16 bit
OutputOption = Annotated[str, typer.Option(help="JSON lines file of the repository.")]


def read_lines(path: str = RESULTS, model: str = MODEL) -> list[dict]:
    """A model's lines of a clean tree, oldest first."""
    file = ROOT / path
    lines = map(json.loads, file.read_text().splitlines() if file.exists() else ())
    return [line for line in lines if line["model"] == model and not line["commit"].endswith("+dirty")]


def key_of(line: dict) -> tuple:
    """What tells a line from others: task, case, text and window."""
    return tuple(line.get(name) for name in ("task", "label", "text", "window"))


def batches(known: Mapping[str, Case], done: set, where: tuple) -> Iterator[list[str]]:
    """Labels that have no line of this (text, window) yet, few at a time; ranked by chance or not, never both."""
    for is_random in (False, True):
        labels = [label for label, case in known.items() if case.is_random == is_random
                  and ("text", label, *where) not in done]
        for start in range(0, len(labels), TOGETHER):
            yield labels[start : start + TOGETHER]


def read_attention(model, window: list[int], about: dict, done: set, known: Mapping[str, Case]) -> Iterator[dict]:
    """The line of a window's attention, with histograms of the first, the middle and the last layer, unless it is
    there."""
    layers = model.config.num_hidden_layers
    if ("attention", None, about["text"], about["window"]) not in done:
        yield about | attention_of(model, window, (0, layers // 2, layers - 1))


def read_text(model, window: list[int], about: dict, done: set, known: Mapping[str, Case]) -> Iterator[dict]:
    """A line for each cache over a window."""
    import torch
    from leankv import by_chance

    from lowbit_attn import model_layers, quality

    head_dim = model_layers.of_model(model).layers[0].head_dim
    for labels in batches(known, done, (about["text"], about["window"])):
        options = {label: known[label].options for label in labels}
        with by_chance(known[labels[0]].is_random), kept_caches(quality) as made:
            scores = quality.compare(model, torch.tensor([window]), options)
        for label, cache in zip(labels, made[1:], strict=True):  # the first is the one in 16 bit
            found = {name: round(value, 6) for name, value in asdict(scores[label]).items() if isinstance(value, float)}
            yield about | {"label": label, "figures": known[label].figures} | found | {
                "cache_bytes": scores[label].cache_bytes} | stored([cache], head_dim)


def read_recall(model, tokenizer, done: set) -> Iterator[dict]:
    """A line for each cache that questions are put to."""
    from leankv import by_chance

    from lowbit_attn import model_layers
    from lowbit_attn import recall as recalls
    from lowbit_attn.demo.scoring import help_text

    for label, case in recall_cases().items():
        if ("recall", label, None, None) in done:
            continue
        with by_chance(case.is_random), kept_caches(recalls) as made:
            score = recalls.recall(model, tokenizer, help_text(None), {label: case.options}, QUESTIONS)[label]
        yield {"label": label, "questions": score.questions, "right": score.right, "tokens": score.tokens} | stored(
            made, model_layers.of_model(model).layers[0].head_dim)


@dataclass(frozen=True)
class Reading:
    """Which texts are read, how many windows of each, of how many tokens, over which caches."""

    texts: tuple[str, ...] = TEXTS
    windows: int = REQUESTS  # whose attention is looked at; caches read the first alone
    tokens: int = TOKENS
    known: Mapping[str, Case] = field(default_factory=cases)


def run(task: str, model, tokenizer, done: set, reading: Reading) -> Iterator[dict]:
    """The lines of a task that are not there yet."""
    if task == "recall":
        yield from read_recall(model, tokenizer, done)
        return
    count, read = {"attention": (reading.windows, read_attention), "text": (1, read_text)}[task]
    for text in reading.texts:
        ids = tokenizer(text_of(text)).input_ids
        for place, window in enumerate(windows(ids, tokenizer.bos_token_id, reading.tokens, count)):
            about = {"text": text, "window": place, "tokens": len(window)}
            yield from read(model, window, about, done, reading.known)


def chosen(given: list[str], known, name: str) -> tuple[str, ...]:
    """Those of a repeatable option, all for none; BadParameter for unknown ones."""
    if unknown := set(given) - set(known):
        raise typer.BadParameter(f"{sorted(unknown)}, supported: {', '.join(known)}", param_hint=name)
    return tuple(given or known)


@app.command()
def measure(
    only: Annotated[list[str], typer.Option(help=f"Of {', '.join(TASKS)}; repeatable; none: all.")] = [],
    gguf: Annotated[Path | None, typer.Option(help="A model in GGUF that transformers can load.")] = None,
    model: Annotated[str, typer.Option(help="Its name in the results.")] = MODEL,
    text: Annotated[list[str], typer.Option(help=f"Of {', '.join(TEXTS)}; repeatable; none: all.")] = [],
    count: Annotated[int, typer.Option("--windows", help="Windows of a text for attention.")] = REQUESTS,
    tokens: Annotated[int, typer.Option(help="Tokens of a window.")] = TOKENS,
    label: Annotated[list[str], typer.Option(help="Only the cache of this label; repeatable; none: all.")] = [],
    threads: Annotated[int, typer.Option(help="CPU threads of torch.")] = 1,
    output: OutputOption = RESULTS,
) -> None:
    """Measure what is not there yet, a line each."""
    tasks, texts, known = chosen(only, TASKS, "--only"), chosen(text, TEXTS, "--text"), cases()
    reading = Reading(texts, count, tokens, {one: known[one] for one in chosen(label, known, "--label")})
    import torch

    from lowbit_attn.demo import model as models

    torch.set_num_threads(threads)
    origin, (network, tokenizer) = provenance(), models.load(gguf or models.fetch(models.default_folder()), "cpu")
    done = {key_of(line) for line in read_lines(output, model)}
    for task in tasks:
        for line in run(task, network, tokenizer, done, reading):
            append_result(output, origin | {"task": task, "model": model} | line)
            shown = ("label", "text", "window", "kl", "bits", "pruned", "right")
            print(task, *(f"{name} {line[name]}" for name in shown if name in line), flush=True)


# ---- the lines as tables


def pooled(lines: list[dict], label: str, texts: tuple[str, ...] = TEXTS) -> dict | None:
    """Means over the windows of a cache's text lines; None unless every text has one."""
    newest = {line["text"]: line for line in lines if line["task"] == "text" and line["label"] == label}
    if newest.keys() < set(texts):
        return None
    names = ("bits", "pruned", "high", "kl", "top1", "least_pruned", "most_pruned")
    return {name: sum(line[name] for line in newest.values()) / len(newest) for name in names}


def table_of(lines: list[dict], texts: tuple[str, ...] = TEXTS) -> str:
    """A row a cache whose lines are complete: what is stored of the tokens that left the window, and what it costs."""
    rows = ["| cache | bits | pruned | of a head | KL, 1e-3 nats | top-1 |", "|---|---|---|---|---|---|"]
    for label in cases():
        if one := pooled(lines, label, texts):
            rows.append(f"| {label} | {one['bits']:.2f} | {one['pruned']:.1%} | {one['least_pruned']:.0%} to "
                        f"{one['most_pruned']:.0%} | {1e3 * one['kl']:.2f} | {one['top1']:.1%} |")
    return "\n".join(rows)


@app.command()
def show(model: Annotated[str, typer.Option(help="A model's name in the results.")] = MODEL,
         text: Annotated[list[str], typer.Option(help="Of these texts; repeatable; none: all.")] = [],
         results: OutputOption = RESULTS) -> None:
    """Print a model's caches that have lines of all texts."""
    print(table_of(read_lines(results, model), chosen(text, TEXTS, "--text")))


@app.command()
def plot(folder: Annotated[str, typer.Option(help="Where the plots go, in the repository.")] = PLOTS) -> None:
    """Draw leankv-attention, leankv-quality and leankv-speed as PNG; exit status 1 if lines are missing for one."""
    import leankv_plots as plots
    from paper_lines import Lines

    target, missing = ROOT / folder, []
    target.mkdir(parents=True, exist_ok=True)
    for name, draw in (("attention", plots.attention_figure), ("quality", plots.quality_figure),
                       ("speed", plots.speed_figure)):
        try:
            draw(Lines()).savefig(target / f"leankv-{name}.png", dpi=80, metadata={"Software": None})
            print(target / f"leankv-{name}.png")
        except KeyError as error:
            missing.append(name)
            typer.echo(f"leankv-{name}: {error.args[0]}", err=True)
    if missing:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
