"""Scores of lm-eval's task lowbit_recall over low-bit caches on a small real model, as JSON lines; needs no GPU.

    python perf/tasks.py run --questions 100          a line a cache in perf/results/tasks.jsonl
    python perf/tasks.py table                        the newest lines as the table of docs/quality.md

SmolLM2-135M-Instruct in fp32 writes the code of a word that stands in a list inside prose; prompts are read in chunks
of 128 tokens (lowbit_attn.evaluation). The caches are those of perf/text_quality.py. Needs the extra eval.
"""

import json
import time
from typing import Annotated

import typer
from provenance import ROOT, append_result, provenance
from text_quality import SMOLLM2, asked_for, cases, loaded

app = typer.Typer(no_args_is_help=True, add_completion=False)

RESULTS = "perf/results/tasks.jsonl"
OutputOption = Annotated[str, typer.Option(help="JSON lines file of the repository.")]


@app.command()
def run(
    questions: Annotated[int, typer.Option(min=2, help="Documents of the task.")] = 100,
    only: Annotated[list[str], typer.Option(help="Only the cache of this label; repeatable.")] = [],
    threads: Annotated[int, typer.Option(help="CPU threads of torch.")] = 1,
    output: OutputOption = RESULTS,
) -> None:
    """Score the caches and append a line for each."""
    picked = asked_for(cases(), only)
    network, tokenizer = loaded(None, threads)
    for label, options in picked.items():
        line = scored(network, tokenizer, options, questions)
        append_result(output, provenance() | {"model": SMOLLM2, "label": label, "options": options} | line)
        print(label, line, flush=True)


def scored(network, tokenizer, options: dict | None, questions: int) -> dict:
    """What lm-eval finds of one cache: exact_match and its standard error, and what was attended to."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    from lowbit_attn.evaluation.model import LowBitLM
    from lowbit_attn.evaluation.tasks import RECALL, recall_task

    start = time.perf_counter()
    one = LowBitLM(network, tokenizer=tokenizer, **(options or {"format": "16"}))
    found = lm_eval.simple_evaluate(one, tasks=[recall_task(questions)], log_samples=False, bootstrap_iters=0,
                                    task_manager=TaskManager(include_defaults=False))
    right = found["results"][RECALL]["exact_match,none"]
    return {"task": RECALL, "questions": questions, "exact_match": round(right, 4),
            "stderr": round((right * (1 - right) / (questions - 1)) ** 0.5, 4), "packed": round(one.attended.share, 4),
            "chunk": one.reader.chunk, "lm_eval": lm_eval.__version__, "seconds": round(time.perf_counter() - start, 1)}


def table_of(lines: list[dict]) -> str:
    """The newest line of each cache that was asked most questions, in the order of the cases, as Markdown."""
    lines = [line for line in lines if not line["commit"].endswith("+dirty")]
    most = max((line["questions"] for line in lines), default=0)
    newest = {line["label"]: line for line in lines if line["questions"] == most}
    rows = ["| cache | exact match | questions | predicted over packed pages |", "|---|---|---|---|"]
    rows += ["| {label} | {exact_match:.2f} ± {stderr:.2f} | {questions} | {packed:.0%} |".format(**newest[label])
             for label in cases() if label in newest]
    return "\n".join(rows)


@app.command()
def table(results: OutputOption = RESULTS) -> None:
    """Print the table of docs/quality.md, and the commits of its lines."""
    file = ROOT / results
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    print(f"{table_of(lines)}\n\ncommits: {', '.join(sorted({line['commit'] for line in lines}))}")


if __name__ == "__main__":
    app()
