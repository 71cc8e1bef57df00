"""Quality of boosted values and of two levels on a small real model, as JSON lines; needs no GPU.

    python perf/leankv.py text --only k4v2-boost      perplexity of the text that perf/quality.py reads
    python perf/leankv.py recall --only k4v2-boost    codes that the model finds again in packed prompts

SmolLM2-135M-Instruct in fp32, all caches with 32 sinks. "random" in a label: tokens get their places by chance instead
of by significance, everything else alike: what a choice by scores is worth.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated
from unittest import mock

import typer
from provenance import ROOT, append_result, provenance

app = typer.Typer(no_args_is_help=True, add_completion=False)

MODEL = "SmolLM2-135M-Instruct"
RESULTS = "perf/results/leankv.jsonl"
SINKS = 32
OnlyOption = Annotated[list[str], typer.Option(help="Only the case of this label; repeatable.")]
OutputOption = Annotated[str, typer.Option(help="JSON lines file of the repository.")]
ThreadsOption = Annotated[int, typer.Option(help="CPU threads of torch.")]


def cases() -> dict[str, dict | None]:
    """label -> options of LowBitCache, None: 16 bit."""
    from lowbit_attn.levels.policy import Shares

    named = ("k4v4", "k4v2", "kitty-pro", "k4v2-boost", "lean", "lean-low", "k4v4+k2v2", "k4v4+k4v2")
    made = {"16 bit": None} | {name: dict(format=name, sinks=SINKS) for name in named}
    made |= {f"{name}, random": dict(format=name, sinks=SINKS) for name in ("k4v2-boost", "lean-low")}
    for pruned in (10, 20, 40):
        kept = 1 - pruned / 100
        made[f"lean, {pruned} % pruned"] = dict(format="lean", sinks=SINKS, policy=Shares(kept / 4, 3 * kept / 4))
    made["lean, 20 % pruned, random"] = made["lean, 20 % pruned"]
    return made


@contextmanager
def by_chance(is_random: bool) -> Iterator[None]:
    """Means of tokens are random numbers, the same for each run; or as they are."""
    import torch

    from lowbit_attn.cache import significance
    from lowbit_attn.levels import level_cache

    if not is_random:
        yield
        return
    generator = torch.Generator().manual_seed(0)

    def random(score: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return torch.rand(score.shape, generator=generator)

    with mock.patch.object(significance, "means", random), mock.patch.object(level_cache, "means", random):
        yield


def chosen(only: list[str]) -> dict[str, dict | None]:
    """The cases of these labels, all for none."""
    known = cases()
    if unknown := set(only) - known.keys():
        raise typer.BadParameter(f"{sorted(unknown)}, supported: {', '.join(known)}", param_hint="--only")
    return {label: known[label] for label in only or known}


def loaded(threads: int) -> tuple:
    """(model, tokenizer) on the CPU."""
    import torch

    from lowbit_attn.demo import model as models

    torch.set_num_threads(threads)
    return models.load(models.fetch(models.default_folder()), "cpu")


def line_of(task: str, label: str, options: dict | None, found: dict) -> dict:
    """One line of results: where it comes from, the case and what was found."""
    from lowbit_attn import FORMATS
    from lowbit_attn.formats import levels

    name = options and options["format"]
    bits = (levels.parse(name) or FORMATS[name]).bits_per_element(128) if name else 16.0
    shown = None if options is None else {key: str(value) if key == "policy" else value
                                          for key, value in options.items()}
    return provenance() | {"task": task, "model": MODEL, "label": label, "options": shown,
                           "bits_per_element_at_128": round(bits, 4)} | found


@app.command()
def text(only: OnlyOption = [], tokens: Annotated[int, typer.Option(help="Tokens that are read.")] = 2048,
         threads: ThreadsOption = 1, output: OutputOption = RESULTS) -> None:
    """Perplexity of each case, the text read in chunks of 128 tokens."""
    import torch

    from lowbit_attn import quality
    from lowbit_attn.demo.scoring import help_text
    from lowbit_attn.integrations.hf import CACHE_ARGUMENT

    picked, (model, tokenizer) = chosen(only), loaded(threads)
    ids = tokenizer(help_text(), return_tensors="pt").input_ids[:, :tokens]
    for label, options in picked.items():
        cache, nll = quality.new_cache(options), 0.0
        quality.use_cache_kind(model, options)
        with torch.inference_mode(), by_chance(label.endswith("random")):
            for chunk, targets in quality.chunks(ids):
                logits = model(chunk, **{CACHE_ARGUMENT: cache}).logits[0].float()
                nll += quality.negative_log_likelihood(logits[: len(targets)], targets)
        found = {"tokens": ids.shape[1], "perplexity": round(quality.perplexity(nll, ids.shape[1] - 1), 4),
                 "cache_bytes": quality.cache_bytes(cache)}
        append_result(output, line_of("text", label, options, found))
        print(label, found, flush=True)


@app.command()
def recall(only: OnlyOption = [], questions: Annotated[int, typer.Option(help="Questions to each case.")] = 160,
           threads: ThreadsOption = 1, output: OutputOption = RESULTS) -> None:
    """Share of the codes in packed prompts that the model finds again."""
    from lowbit_attn.demo.scoring import help_text
    from lowbit_attn.recall import recall as ask

    picked, (model, tokenizer) = chosen(only), loaded(threads)
    for label, options in picked.items():
        with by_chance(label.endswith("random")):
            score = ask(model, tokenizer, help_text(None), {label: options}, questions)[label]
        found = {"questions": score.questions, "right": score.right, "recall": round(score.recall, 4),
                 "tokens": score.tokens}
        append_result(output, line_of("recall", label, options, found))
        print(label, found, flush=True)


def table_of(lines: list[dict]) -> str:
    """The newest line of each case and task, as a table in Markdown."""
    newest = {(line["label"], line["task"]): line for line in lines}
    rows = ["| cache | bits (head_dim 128) | bytes | perplexity | recall |", "|---|---|---|---|---|"]
    for label in dict.fromkeys(line["label"] for line in lines):
        text, asked = (newest.get((label, task), {}) for task in ("text", "recall"))
        bits = (text or asked)["bits_per_element_at_128"]
        nbytes = f"{text['cache_bytes'] / 1e6:.1f} MB" if text else "-"
        perplexity = f"{text['perplexity']:.3f}" if text else "-"
        found = f"{asked['right']} / {asked['questions']}" if asked else "-"
        rows.append(f"| {label} | {bits:.2f} | {nbytes} | {perplexity} | {found} |")
    return "\n".join(rows)


@app.command()
def show(results: OutputOption = RESULTS) -> None:
    """The newest line of each case and task, as a table in Markdown."""
    print(table_of([json.loads(line) for line in (ROOT / results).read_text().splitlines()]))


if __name__ == "__main__":
    app()
