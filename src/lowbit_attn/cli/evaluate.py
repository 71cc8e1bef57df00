"""``lowbit-attn eval``: tasks of lm-eval over low-bit caches, prompts read in chunks."""

import json
from pathlib import Path
from typing import Annotated

import typer

from lowbit_attn.cli import books
from lowbit_attn.cli.common import check_writable, console, fail, table, writing
from lowbit_attn.cli.model import ModelOption, SearchOption, SinksOption, cache_cases, load

NOTE = ("prompts read in chunks of {chunk} tokens; packed: share of the predicted tokens that attended to packed "
        "pages. Read in one forward call, as by lm-eval's other model types, a log-likelihood task never touches a "
        "quantized cache, whatever its format")


def evaluate(
    model: ModelOption = "demo",
    format: Annotated[list[str] | None, typer.Option(help="A format; repeatable. Default: k4v4, k2v2.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="A task of lm-eval, or lowbit_recall, which needs no network; "
                                                        "repeatable. Default: lowbit_recall.")] = None,
    sinks: SinksOption = None,
    search: SearchOption = None,
    codebooks: books.ManyBooksOption = None,
    chunk: Annotated[int, typer.Option(min=0, help="Tokens of a call that reads a prompt; 0: all at once.")] = 128,
    limit: Annotated[int | None, typer.Option(min=1, help="Documents of a task at most.")] = None,
    jsonl: Annotated[Path | None, typer.Option(help="Append one JSON line a format, task and metric to this file.")]
    = None,
) -> None:
    """Score lm-eval's tasks over low-bit caches, beside a 16-bit one."""
    from lowbit_attn.evaluation import REMEDY

    try:
        import lm_eval
        from lm_eval.tasks import TaskManager

        from lowbit_attn.evaluation.model import LowBitLM
        from lowbit_attn.evaluation.tasks import RECALL, TASKS
    except ImportError as error:
        fail(f"{error}; {REMEDY}")
    cases = cache_cases(["16", *(format or ["k4v4", "k2v2"])], sinks, search, codebooks or [])
    if jsonl is not None:
        check_writable("jsonl", jsonl, append=True)
    network, tokenizer = load(model)
    for options in cases.values():
        books.check_model(options, network)
        if books.is_prompt(options):
            fail("codebooks: got those of the prompt, supported: a file of lowbit-attn calibrate")
    names = task or [RECALL]
    manager = TaskManager(include_defaults=not set(names) <= TASKS.keys())  # an index of lm-eval's own takes a minute
    shown, rows = table("cache", "task", "metric", "value", "stderr", "documents", "packed"), []
    for label, options in cases.items():
        one = LowBitLM(network, tokenizer=tokenizer, chunk=chunk, **(options or {"format": "16"}))
        wanted = [TASKS[name]() if name in TASKS else name for name in names]
        try:
            found = lm_eval.simple_evaluate(one, tasks=wanted, limit=limit, log_samples=False, bootstrap_iters=1000,
                                            task_manager=manager)
        except (OSError, ValueError, KeyError) as error:  # no such task, no network for its data, refused options
            fail(f"task: {error}")
        for row in _rows(found, label, one.attended.share):
            rows.append({"model": model, "options": options, "chunk": chunk} | row)
            shown.add_row(*_cells(row))
    console().print(shown)
    console().print(NOTE.format(chunk=chunk) if chunk else "prompts read at once: packed counts generated tokens",
                    soft_wrap=True)
    for row in rows if jsonl else ():
        with writing("jsonl", jsonl), jsonl.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _rows(found: dict, label: str, packed: float) -> list[dict]:
    """One row a task and metric of lm-eval's results: value, standard error (None where it has none), documents."""
    rows = []
    for task, values in found["results"].items():
        for name, value in values.items():
            metric, _, filtered = name.partition(",")
            if not isinstance(value, int | float) or metric.endswith("_stderr") or not filtered:
                continue
            error = values.get(f"{metric}_stderr,{filtered}")
            rows.append({"cache": label, "task": task, "metric": metric, "value": value,
                         "stderr": error if isinstance(error, int | float) else None,
                         "documents": found["n-samples"][task]["effective"], "packed": packed})
    return rows


def _cells(row: dict) -> list[str]:
    error = "-" if row["stderr"] is None else f"{row['stderr']:.4f}"
    return [row["cache"], row["task"], row["metric"], f"{row['value']:.4f}", error, str(row["documents"]),
            f"{row['packed']:.1%}"]
