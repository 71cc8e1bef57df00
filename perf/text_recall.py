"""Codes that a small real model finds again in packed prompts, by cache, as JSON lines; needs no GPU.

    python perf/text_recall.py run                                       a line a cache of SmolLM2-135M-Instruct
    python perf/text_recall.py run --gguf FILE --model gemma-3-270m      another model, with all its layers
    python perf/text_recall.py table                                     the newest lines as docs/quality.md has them

A list of "word: digits" lines stands inside prose; the prompt is read in one call and packed once, then each question
goes on from a copy of the cache (lowbit_attn.recall). The caches are those of perf/text_quality.py, and KIVI's scheme
as lowbit_attn simulates it: V one token at a time, the last 128 of either side in 16 bit.
"""

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from provenance import ROOT, append_result, provenance
from text_quality import SINKS, SMOLLM2, LabelsOption, OutputOption, all_layers, asked_for, loaded
from text_quality import cases as formats

app = typer.Typer(no_args_is_help=True, add_completion=False)

RESULTS = "perf/results/recall.jsonl"
QUESTIONS = 80


def cases() -> dict[str, dict | None]:
    """label -> options of the cache; None: 16 bit."""
    kivi = dict(format="k2v2-g32-vg32", range_search=False, window_v=128, v_step=1)
    return formats() | {"KIVI, groups of 32 (simulator)": kivi,
                        f"KIVI, groups of 32, {SINKS} sinks (simulator)": kivi | {"sinks": SINKS}}


@app.command()
def run(
    gguf: Annotated[Path | None, typer.Option(help="A model in GGUF that transformers can load.")] = None,
    model: Annotated[str, typer.Option(help="Its name in the results.")] = SMOLLM2,
    questions: Annotated[int, typer.Option(min=2, help="Codes that are asked for.")] = QUESTIONS,
    only: LabelsOption = [],
    threads: Annotated[int, typer.Option(help="CPU threads of torch.")] = 1,
    output: OutputOption = RESULTS,
) -> None:
    """Ask each cache and append a line for it."""
    picked = asked_for(cases(), only)
    network, tokenizer = loaded(gguf, threads)
    for label, options in picked.items():
        line = asked(network, tokenizer, options, questions)
        append_result(output, provenance() | {"model": model, "label": label} | line)
        print(label, line, flush=True)


def asked(network, tokenizer, options: dict | None, questions: int) -> dict:
    """What one cache answers: right of the questions, and the tokens of all prompts."""
    from lowbit_attn.demo.scoring import help_text
    from lowbit_attn.quality import is_simulated
    from lowbit_attn.recall import recall

    options = options if is_simulated(options) else all_layers(options, network)
    start = time.perf_counter()
    score = recall(network, tokenizer, help_text(None), {"": options}, questions)[""]
    return {"options": options, "questions": score.questions, "right": score.right, "tokens": score.tokens,
            "bits_per_element": round(score.bits_per_element, 4), "seconds": round(time.perf_counter() - start, 1)}


def table_of(lines: list[dict]) -> str:
    """The newest line of each cache, in the order of the cases, a column a model, as Markdown; lines of a tree that was
    changed are left out."""
    lines = [line for line in lines if not line["commit"].endswith("+dirty")]
    newest = {(line["model"], line["label"]): line for line in lines}
    models = list(dict.fromkeys(line["model"] for line in lines))
    rows = [f"| cache | {' | '.join(models)} |", "|---" * (1 + len(models)) + "|"]
    for label in cases():
        cells = [cell_of(newest.get((model, label))) for model in models]
        if set(cells) != {"-"}:
            rows.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(rows)


def cell_of(line: dict | None) -> str:
    """Share of the questions with one standard error, which is 0 where all or none are right."""
    if line is None:
        return "-"
    share, asked = line["right"] / line["questions"], line["questions"]
    return f"{share:.2f} ± {(share * (1 - share) / (asked - 1)) ** 0.5:.2f} ({line['right']} of {asked})"


@app.command()
def table(results: OutputOption = RESULTS) -> None:
    """Print the table of docs/quality.md, and the commits of its lines."""
    file = ROOT / results
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    print(f"{table_of(lines)}\n\ncommits: {', '.join(sorted({line['commit'] for line in lines}))}")


if __name__ == "__main__":
    app()
