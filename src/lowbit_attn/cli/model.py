"""``lowbit-attn generate`` and ``lowbit-attn quality``: a local model over low-bit caches."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import Progress

from lowbit_attn.cli import recall
from lowbit_attn.cli.common import console, fail, format_named, table
from lowbit_attn.formats import levels

DEMO = "demo"
TASKS = ("text", "recall")
ModelOption = Annotated[str, typer.Option(help="Folder of a transformers model; demo: SmolLM2-135M-Instruct, fetched.")]
SinksOption = Annotated[int, typer.Option(help="First tokens that stay in 16 bit.")]
SearchOption = Annotated[bool | None, typer.Option("--search/--no-search", help="Range search; default: the format's.")]


def load(name: str):
    """(model, tokenizer) on the GPU in fp16 if there is one, else on the CPU in fp32; ends the command if it cannot."""
    from lowbit_attn.demo import model as models

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if name == DEMO:
            return models.load(models.fetch(models.default_folder(), lambda text: typer.echo(text, err=True)), device)
        if not (Path(name) / "config.json").exists():
            fail(f"model: got {name!r}, supported: {DEMO!r}, or a folder with a config.json")
        return models.load_folder(Path(name), device)
    except ValueError as error:  # of transformers: no tokenizer, no weights, a model type that it does not know
        fail(f"model: transformers cannot load {name!r}: {error}; supported: {DEMO!r}, or a folder with a config.json, "
             "weights and a tokenizer")
    except (ImportError, models.FetchError, OSError) as error:
        fail(f"{error}" + ("; pip install 'lowbit-attn[demo]'" if isinstance(error, ImportError) else ""))


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    model: ModelOption = DEMO,
    format: Annotated[str, typer.Option(help="A format, or 16 for a 16-bit cache.")] = "k4v4",
    sinks: SinksOption = 0,
    search: SearchOption = None,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens at most.")] = 64,
    chat: Annotated[bool, typer.Option(help="Put the prompt into the model's chat template.")] = False,
) -> None:
    """Continue a text greedily over a low-bit cache; print it, tokens a second and the cache's bytes."""
    options = _options(format, sinks, search)
    network, tokenizer = load(model)
    from lowbit_attn import quality as scoring
    from lowbit_attn.integrations.hf import CACHE_ARGUMENT

    if chat:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False,
                                               add_generation_prompt=True)
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(network.device)
    if not ids.shape[1]:
        fail("prompt: got no tokens, supported: one or more")
    cache = scoring.new_cache(options)
    scoring.use_cache_kind(network, options)
    start = time.perf_counter()
    with torch.inference_mode():
        out = network.generate(ids, attention_mask=torch.ones_like(ids), **{CACHE_ARGUMENT: cache}, do_sample=False,
                               max_new_tokens=tokens, pad_token_id=0)
    new, seconds = out.shape[1] - ids.shape[1], time.perf_counter() - start
    typer.echo(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    typer.echo(f"{new} tokens after {ids.shape[1]} in {seconds:.2f} s, {new / seconds:.1f} tokens/s (prompt included); "
               f"cache {format}: {scoring.cache_bytes(cache):,} bytes, in 16 bit "
               f"{_sixteen_bit_bytes(network.config, out.shape[1] - 1):,}", err=True)


def quality(
    model: ModelOption = DEMO,
    text: Annotated[Path | None, typer.Option(help="A text file; default: Python's help texts.")] = None,
    format: Annotated[list[str] | None, typer.Option(help="A format; repeatable. Default: k4v4, k2v2.")] = None,
    sinks: SinksOption = 0,
    search: SearchOption = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text to read.")] = 2048,
    task: Annotated[str, typer.Option(help="text: read it; recall: ask for codes in prompts cut from it.")] = "text",
    questions: Annotated[int, typer.Option(min=1, help="Questions of the recall task.")] = 160,
    jsonl: Annotated[Path | None, typer.Option(help="Append one JSON line a format to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw perplexity and cosine by layer into this PNG or SVG.")] = None,
) -> None:
    """Compare caches on a text: perplexity, KL, top-1 agreement with 16 bit, cosine by layer; or by recall."""
    if task not in TASKS:
        fail(f"task: got {task!r}, supported: {', '.join(TASKS)}")
    if task == "recall" and plot is not None:
        fail("plot: got a file beside the task recall, supported: the task text")
    names = ["16", *(format or ["k4v4", "k2v2"])]
    cases = {_label(name, sinks, search): _options(name, sinks, search) for name in names}
    if text is not None and not text.is_file():
        fail(f"text: got {str(text)!r}, supported: a text file")
    for name, path in (("jsonl", jsonl), ("plot", plot)):
        if path is not None:
            _check_writable(name, path)
    network, tokenizer = load(model)
    from lowbit_attn import quality as scoring
    from lowbit_attn.demo.scoring import help_text

    if task == "recall":
        prose = help_text(None) if text is None else text.read_text()
        recall.ask(network, tokenizer, prose, cases, questions, jsonl,
                   {"model": model, "text": str(text or "help texts")})
        return
    written = help_text() if text is None else text.read_text()
    ids = tokenizer(written, return_tensors="pt").input_ids[:, :tokens].to(network.device)
    try:
        scoring.check_tokens(ids)
    except ValueError as error:
        fail(error)
    out = console()
    with Progress(console=out, transient=True) as bar:
        task = bar.add_task("reading", total=ids.shape[1])
        scores = scoring.compare(network, ids, cases, lambda count: bar.advance(task, count))
    out.print(_quality_table(scores))
    out.print(f"{ids.shape[1]:,} tokens in chunks of {scoring.CHUNK}; lowest cosine of an attention block's output, "
              "averaged over tokens, beside the 16-bit run")
    for label, score in scores.items() if jsonl else ():
        with jsonl.open("a") as file:
            about = {"model": model, "text": str(text or "help texts"), "cache": label, "options": cases[label]}
            file.write(json.dumps(about | asdict(score)) + "\n")
    if plot:
        save_plot(plot, scores)


def _check_writable(name: str, path: Path) -> None:
    """End the command, before its long run, where it could not write this file."""
    parent = path.absolute().parent
    if not parent.is_dir():
        fail(f"{name}: got {str(path)!r}, supported: a file in a folder that is there, and {str(parent)!r} is not")
    if path.is_dir() or not os.access(path if path.exists() else parent, os.W_OK):
        fail(f"{name}: got {str(path)!r}, which cannot be written, supported: a file in a folder that can be")


def _label(name: str, sinks: int, search: bool | None) -> str:
    if name == "16":
        return "16 bit"
    return name + f", {sinks} sinks" * bool(sinks) + ("" if search is None else ", search" if search else ", no search")


def _options(name: str, sinks: int, search: bool | None) -> dict | None:
    if name == "16":
        return None
    if sinks < 0:
        fail(f"sinks: got {sinks}, supported: 0 or more")
    try:
        known = levels.parse(name) or format_named(name)
    except ValueError as error:  # of a pair that is refused
        fail(error)
    return dict(format=known.name, sinks=sinks, range_search=search)


def _sixteen_bit_bytes(config, tokens: int) -> int:
    from lowbit_attn.quality import head_dim_of

    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    return config.num_hidden_layers * tokens * heads * head_dim_of(config) * 2 * 2


def _quality_table(scores: dict):
    shown = table("cache", "bits/elt", "cache bytes", "perplexity", "KL nats", "top-1", "lowest cosine", "s")
    for label, score in scores.items():
        worst = min(range(len(score.cosine)), key=score.cosine.__getitem__)
        shown.add_row(label, f"{score.bits_per_element:.2f}", f"{score.cache_bytes:,}", f"{score.perplexity:.3f}",
                      f"{score.kl:.5f}", f"{score.top1:.1%}", f"{score.cosine[worst]:.4f} (layer {worst})",
                      f"{score.seconds:.1f}")
    return shown


def save_plot(path: Path, scores: dict) -> None:
    """Two panels: perplexity against the cache's bytes, and cosine by layer, one colour a cache."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for label, score in scores.items():
        left.plot(score.cache_bytes / 1e6, score.perplexity, "o", label=f"{label}: {score.perplexity:.2f}")
        right.plot(range(len(score.cosine)), score.cosine, ".-", label=label)
    left.set(xlabel="bytes of the KV cache (MB)", ylabel="perplexity", yscale="log")
    right.set(xlabel="layer", ylabel="cosine with the 16-bit run", title="attention output")
    left.legend(fontsize="small")
    right.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
