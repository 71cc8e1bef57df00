"""``lowbit-attn calibrate``: codebooks of a local model in one file."""

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lowbit_attn.cli.common import check_writable, console, fail, format_named, read_text, table, writing
from lowbit_attn.cli.model import ModelOption, load
from lowbit_attn.codebooks.calibrate import LARGEST_SEED as SEEDS

TOKENS = 8192


def calibrate(
    model: ModelOption = "demo",
    format: Annotated[str, typer.Option(help="A codebook format: cq4, cq2, cq1, kcq4vcq2, k4vcq2, ...")] = "cq2",
    text: Annotated[list[Path] | None, typer.Option(
        help="A text file, repeatable; default: a mixture of what every Python has.")] = None,
    tokens: Annotated[int, typer.Option(min=1024, help="Tokens to learn from, at most.")] = TOKENS,
    rope: Annotated[str, typer.Option(help="Codes of keys after (post) or before (pre) their rotary embedding.")
                    ] = "post",
    k_shared: Annotated[bool, typer.Option("--k-shared", help="With --rope pre: four codebooks of K a head, as "
                                             "Hopper's kernels read them.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=SEEDS, help="Of k-means and random positions.")] = 0,
    out: Annotated[Path | None, typer.Option(help="The file; default: MODEL.FORMAT.safetensors, here.")] = None,
) -> None:
    """Learn codebooks for a model's KV caches and write them into one file."""
    from lowbit_attn.codebooks import calibrate as learning

    try:
        recipe = learning.recipe_of(chosen := format_named(format), rope, seed, k_shared)
    except ValueError as error:
        fail(error)
    out = Path(f"{Path(model).resolve().name}.{format}.safetensors") if out is None else out
    check_writable("out", out)
    pieces = [read_text("text", path) for path in text or []]
    network, tokenizer = load(model)
    try:
        ids = _ids(tokenizer, pieces, learning.tokens_to_read(tokens, chosen.sinks))
        made = _with_progress(learning, network, ids, chosen, recipe, Path(model).resolve().name)
    except (ValueError, NotImplementedError) as error:
        fail(error)
    with writing("out", out):
        made.save(out)
    _report(made, out)
    command = ("lowbit-attn", "quality", "--model", model, "--format", format, "--codebooks", str(out))
    typer.echo(f"Next: {shlex.join(command)}")


def _ids(tokenizer, pieces: list[str], tokens: int):
    from lowbit_attn.codebooks.text import mixture, tokenized

    return tokenized(tokenizer, pieces or mixture(), tokens)


def _with_progress(learning, network, ids, format, recipe, name: str):
    """The codebooks; two bars while they are made."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console(), transient=True) as bar:
        layers = network.config.get_text_config().num_hidden_layers
        reading = bar.add_task("tokens read", total=len(ids))
        steps = bar.add_task("k-means", total=layers * recipe.steps)
        return learning.calibrate(network, ids, format, rope=recipe.rope, seed=recipe.seed,
                                  k_shared=recipe.k_shared, name=name,
                                  on_tokens=lambda count: bar.advance(reading, count),
                                  on_step=lambda: bar.advance(steps))


def _report(made, out: Path) -> None:
    about, shown = made.metadata, table("layer", "logit error", "V error", "unused")
    for i, (logit, value, unused) in enumerate(zip(about["logit_error"], about["value_error"],
                                                   about["unused_entries"], strict=True)):
        shown.add_row(str(i), *("-" if x is None else f"{x:.4f}" for x in (logit, value)), str(unused))
    printed = console()
    printed.print(shown)
    printed.print(f"{made.format}, rope {made.rope}: learned from {about['tokens']:,} tokens, errors on "
                  f"{about['held_out_tokens']:,} others: mean square of a logit (nats^2), relative square of V; "
                  "unused: entries that no vector chose", soft_wrap=True)
    for warning in about["warnings"]:
        printed.print(f"warning: {warning}", soft_wrap=True, markup=False)
    printed.print(f"{out}: {out.stat().st_size:,} bytes, hash {made.hash[:16]}", soft_wrap=True, markup=False)
