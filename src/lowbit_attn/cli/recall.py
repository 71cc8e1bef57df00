"""``lowbit-attn quality --task recall``: what a model still finds in a packed prompt."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from lowbit_attn import progress
from lowbit_attn.cli.common import console, fail, table, writing


def ask(network, tokenizer, prose: str, cases: Mapping[str, Mapping | None], questions: int, jsonl: Path | None,
        about: Mapping) -> None:
    """Score the cases, print a table and append a JSON line for each; about: what stands first in every line."""
    from lowbit_attn.recall import recall

    out = console()
    with progress.bar(out, "questions") as bar:
        task = bar.add_task("asking", total=questions)
        try:
            scores = recall(network, tokenizer, prose, cases, questions, lambda count: bar.advance(task, count))
        except (NotImplementedError, ValueError) as error:
            fail(error)
    shown = table("cache", "bits/elt", "right", "questions", "recall")
    for label, score in scores.items():
        shown.add_row(label, f"{score.bits_per_element:.2f}", str(score.right), str(score.questions),
                      f"{score.recall:.3f}")
    out.print(shown)
    out.print("a list of codes inside prose, read in 16 bit and packed once; right: every digit of a code is likeliest")
    for label, score in scores.items() if jsonl else ():
        with writing("jsonl", jsonl), jsonl.open("a", encoding="utf-8") as file:
            line = about | {"task": "recall", "cache": label, "options": cases[label], "recall": score.recall}
            file.write(json.dumps(line | asdict(score)) + "\n")
