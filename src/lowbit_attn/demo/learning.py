"""Codebooks of the demo's model, for the rows whose formats need them: made in the demo, kept beside its numbers."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from lowbit_attn import FORMATS, progress
from lowbit_attn.codebooks import calibrate, text
from lowbit_attn.demo.scoring import Case

TOKENS, QUICK_TOKENS = 4096, 1024  # half of what lowbit-attn calibrate takes, at 5 % more KL in half the time


def with_codebooks(console: Console, model, tokenizer, cases: Sequence[Case], tokens: int, out: Path) -> list[Case]:
    """The cases, those whose formats need codebooks with files in ``out`` that are learned here, one a format.

    The text is the mixture of ``lowbit-attn calibrate``, which has no line of what the demo reads. On a GPU torch
    reads the caches of codebooks.
    """
    names = dict.fromkeys(fmt.name for case in cases for fmt in case.formats if fmt.needs_codebooks)
    files = {name: _learned(console, model, tokenizer, name, tokens, out) for name in names}
    path = "reference" if model.device.type == "cuda" else None
    return [replace(case, codebooks=str(files[case.format]), path=path) if case.format in files else case
            for case in cases]


def _learned(console: Console, model, tokenizer, name: str, tokens: int, out: Path) -> Path:
    start = time.perf_counter()
    ids = text.tokenized(tokenizer, text.mixture(), calibrate.tokens_to_read(tokens, FORMATS[name].sinks))
    steps = calibrate.recipe_of(FORMATS[name]).steps * model.config.num_hidden_layers
    with progress.bar(console, "steps") as bar:
        task = bar.add_task(f"learning {name}", total=len(ids) + steps)
        made = calibrate.calibrate(model, ids, FORMATS[name], name="SmolLM2-135M-Instruct",
                                   on_tokens=lambda count: bar.advance(task, count), on_step=lambda: bar.advance(task))
    out.mkdir(parents=True, exist_ok=True)
    made.save(file := out / f"SmolLM2-135M-Instruct.{name}.safetensors")
    console.print(f"Codebooks of {name}: learned from {made.metadata['tokens']:,} tokens of a mixture of texts in "
                  f"{time.perf_counter() - start:.0f} s, {file.stat().st_size / 1e6:.1f} MB: {file}",
                  markup=False, soft_wrap=True)
    return file
