"""``lowbit-attn generate`` and ``lowbit-attn quality``: a local model over low-bit caches."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from lowbit_attn import extras, loading, progress, tokenizing
from lowbit_attn.cli import books, recall
from lowbit_attn.cli.common import (
    check_plot,
    check_writable,
    console,
    fail,
    format_named,
    is_file,
    one_line,
    one_of,
    read_text,
    table,
    tell_builds,
    told_refusals,
    writing,
)
from lowbit_attn.demo.model import DEMO
from lowbit_attn.formats import Format, levels, shortened
from lowbit_attn.layout import PAGE_TOKENS

TASKS = ("text", "recall")
MOST_SINKS = 1 << 16  # of the commands: more tokens in 16 bit are no low-bit cache
ModelOption = Annotated[str, typer.Option(help="Folder of a transformers model; demo: SmolLM2-135M-Instruct, fetched.")]
SinksOption = Annotated[int | None, typer.Option(help="First tokens that stay in 16 bit; default: the format's.")]
SearchOption = Annotated[bool | None, typer.Option("--search/--no-search", help="Range search; default: the format's.")]


def load(name: str):
    """(model, tokenizer) in the model's own dtype, on the GPU if there is one; ends the command if it cannot."""
    return _load(name, loading.pick_device())


def load_on_cpu(name: str):
    """(model, tokenizer) on the CPU in fp32; ends the command if it cannot."""
    return _load(name, "cpu", torch.float32)


def _load(name: str, device: str, dtype: torch.dtype | None = None):
    from lowbit_attn.demo import model as models

    tell_builds()
    try:
        file = _fetched() if name == DEMO else None
        if file is None and not is_file(Path(name) / "config.json"):
            fail(f"model: got {shortened(name)}, supported: {DEMO!r}, or a folder with a config.json")
        return models.load(file, device, dtype) if file else loading.load_folder(Path(name), device, dtype)
    except (typer.Exit, MemoryError):
        raise
    except ImportError as error:
        fail(f"model: {error}; {extras.remedy('demo')}")
    except Exception as error:  # transformers raises errors of any type for a damaged folder
        fail(f"model: transformers cannot load {name!r}: {one_line(error)}; supported: {DEMO!r}, or a folder with a "
             "config.json, weights and a tokenizer")


def _fetched() -> Path:
    """The file of the demo's model; ends the command where it cannot be had."""
    import gguf  # noqa: F401 (which reads it: before anything is fetched)

    from lowbit_attn.demo import model as models

    try:
        return models.fetch(models.default_folder(), lambda text: typer.echo(text, err=True))
    except (models.FetchError, OSError) as error:
        fail(f"model: {error}")


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    model: ModelOption = DEMO,
    format: Annotated[str, typer.Option(help="A format, or 16 for a 16-bit cache.")] = "k4v4",
    sinks: SinksOption = None,
    search: SearchOption = None,
    codebooks: books.BooksOption = None,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens at most.")] = 64,
    chat: Annotated[bool, typer.Option(help="Put the prompt into the model's chat template.")] = False,
) -> None:
    """Continue a text greedily over a low-bit cache; print both, tokens a second and the cache's bytes."""
    check_prompt(prompt)
    options = _options(format, sinks, search, [codebooks] if codebooks else [])
    network, tokenizer = load(model)
    books.check_model(options, network)
    from lowbit_attn import quality as scoring
    from lowbit_attn.integrations.hf import CACHE_ARGUMENT

    try:
        found = tokenizing.chat(tokenizer, prompt) if chat else tokenizing.encode(tokenizer, prompt)
    except ValueError as error:
        fail(error)
    ids = torch.tensor([found], dtype=torch.long, device=network.device)
    if not ids.shape[1]:
        fail("prompt: got no tokens, supported: one or more")
    books.check_prompt(options, ids.shape[1])
    cache = scoring.new_cache(options, network, ids.shape[1] + tokens)
    scoring.use_cache_kind(network, options)
    start = time.perf_counter()
    with told_refusals("model"), torch.inference_mode():
        out = network.generate(ids, attention_mask=torch.ones_like(ids), **{CACHE_ARGUMENT: cache}, do_sample=False,
                               max_new_tokens=tokens, pad_token_id=0)
    new, seconds = out.shape[1] - ids.shape[1], time.perf_counter() - start
    typer.echo("\n".join(f"> {line}" for line in prompt.splitlines() or [""]))
    typer.echo(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    typer.echo(f"{new} tokens after {ids.shape[1]} in {seconds:.2f} s, {new / seconds:.1f} tokens/s (prompt included)",
               err=True)
    for line in cache_lines(network, cache, options, out.shape[1] - 1):
        typer.echo(line, err=True)


def check_prompt(prompt: str) -> None:
    """End the command for a prompt that is empty or that no tokenizer reads: the bytes of another encoding."""
    if not prompt:
        fail("prompt: got no text, supported: one character or more")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        fail(f"prompt: got a character that is no text at position {error.start}, supported: text in UTF-8")


def cache_lines(network, cache, options: dict | None, tokens: int) -> list[str]:
    """What a cache of so many tokens takes, beside 16 bit and beside its format's own bits, and what is not packed."""
    from lowbit_attn import quality as scoring

    nbytes, whole = scoring.cache_bytes(cache), scoring.sixteen_bit_bytes(network, tokens)
    bits, own = scoring.measured_bits(network, nbytes, tokens), scoring.bits_per_element(options, network)
    name = "16" if options is None else options["format"]
    lines = [f"cache {name}: {nbytes:,} bytes, in 16 bit {whole:,}; {bits:.2f} bits per element of all {tokens:,} "
             f"tokens, {own:.2f} where packed"]
    if options is None:
        return lines
    held = [[one.kv for one in getattr(layer, "rows", None) or [layer] if one.kv is not None] for layer in cache.layers]
    pages = [kv for layer in held for kv in layer]
    if learned := sum(kv.attached.nbytes for kv in pages if getattr(kv, "attached", None)):
        whose = "of this sequence alone" if books.is_prompt(options) else "however many tokens and sequences there are"
        lines.append(f"{learned:,} of these bytes are codebooks, {whose}")
    sliding = sum(not layer for layer in held)
    if pages and not any(kv.counts.n_qv.any() or kv.counts.n_qk.any() for kv in pages):
        after = f" after the {pages[0].sinks} sinks" if pages[0].sinks else ""
        lines.append(f"nothing was packed: all tokens are still in 16 bit; a block of {PAGE_TOKENS} tokens{after} is "
                     "packed when it is full and a next token comes")
    if sliding:
        lines.append(f"{sliding} of {len(cache.layers)} layers have a sliding window and keep its tokens in 16 bit "
                     "(LowBitCache(sliding='lowbit') packs them)")
    return lines


def quality(
    model: ModelOption = DEMO,
    text: Annotated[Path | None, typer.Option(help="A text file; default: Python's help texts.")] = None,
    format: Annotated[list[str] | None, typer.Option(help="A format; repeatable. Default: k4v4, k2v2.")] = None,
    sinks: SinksOption = None,
    search: SearchOption = None,
    codebooks: books.ManyBooksOption = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text to read.")] = 2048,
    task: Annotated[str, typer.Option(help="text: read it; recall: ask for codes in prompts cut from it.")] = "text",
    questions: Annotated[int, typer.Option(min=1, help="Questions of the recall task.")] = 160,
    jsonl: Annotated[Path | None, typer.Option(help="Append one JSON line a format to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw perplexity and cosine by layer into this PNG or SVG.")] = None,
) -> None:
    """Compare caches on a text: perplexity, KL, top-1 agreement with 16 bit, cosine by layer; or by recall."""
    one_of("task", task, TASKS)
    if task == "recall" and plot is not None:
        fail("plot: got a file beside the task recall, supported: the task text")
    names = ["16", *(format or ["k4v4", "k2v2"])]
    cases = cache_cases(names, sinks, search, codebooks or [])
    given = None if text is None else read_text("text", text)
    if jsonl is not None:
        check_writable("jsonl", jsonl, append=True)
    if plot is not None:
        check_plot("plot", plot)
    network, tokenizer = load(model)
    for options in cases.values():
        books.check_model(options, network)
    from lowbit_attn import quality as scoring
    from lowbit_attn.demo.scoring import help_text

    if task == "recall":
        prose = help_text(None) if given is None else given
        recall.ask(network, tokenizer, prose, cases, questions, jsonl,
                   {"model": model, "text": str(text or "help texts")})
        return
    written = help_text() if given is None else given
    ids = tokenizing.tensor(tokenizer, written, network.device)[:, :tokens]
    try:
        scoring.check_tokens(ids)
    except ValueError as error:
        fail(error)
    for options in cases.values():
        books.check_prompt(options, ids.shape[1] - 1)
    out = console()
    with told_refusals("model"), progress.bar(out, "tokens") as bar:
        reading = bar.add_task("reading", total=ids.shape[1])
        scores = scoring.compare(network, ids, cases, lambda count: bar.advance(reading, count))
    out.print(_quality_table(scores, lambda nbytes: scoring.measured_bits(network, nbytes, ids.shape[1])))
    out.print(f"{ids.shape[1]:,} tokens in chunks of {scoring.CHUNK}; lowest cosine of an attention block's output, "
              "averaged over tokens, beside the 16-bit run; bits per element of K and V: of a packed page, and all-in, "
              "of the whole cache with codebooks and what stays in 16 bit", soft_wrap=True)
    if any(map(books.is_prompt, cases.values())):
        out.print("codebooks of the prompt: its first 1,024 tokens are read in 16 bit, without errors, and count in "
                  "perplexity, KL and top-1", soft_wrap=True)
    for label, score in scores.items() if jsonl else ():
        with writing("jsonl", jsonl), jsonl.open("a", encoding="utf-8") as file:
            about = {"model": model, "text": str(text or "help texts"), "cache": label, "options": cases[label]}
            file.write(json.dumps(about | asdict(score)) + "\n")
    if plot:
        from lowbit_attn.demo import figures

        with writing("plot", plot):
            save_plot(plot, scores, f"{full_name(model)}, {ids.shape[1]:,} tokens of "
                                    f"{text or 'help texts'}; {figures.where(network.device.type)}")


def full_name(model: str) -> str:
    """What a plot calls the model of an option."""
    return "SmolLM2-135M-Instruct" if model == DEMO else model


def cache_cases(names: list[str], sinks: int | None, search: bool | None, files: list[Path]) -> dict[str, dict | None]:
    """label -> options of LowBitCache of each format, None for "16"; ends the command for what no cache takes."""
    return {_label(name, sinks, search): _options(name, sinks, search, files) for name in names}


def _label(name: str, sinks: int | None, search: bool | None) -> str:
    if name == "16":
        return "16 bit"
    return name + f", {sinks} sinks" * bool(sinks) + ("" if search is None else ", search" if search else ", no search")


def _options(name: str, sinks: int | None, search: bool | None, files: list[Path]) -> dict | None:
    if name == "16":
        return None
    if sinks is not None and not 0 <= sinks <= MOST_SINKS:
        fail(f"sinks: got {sinks}, supported: 0 to {MOST_SINKS:,}")
    try:
        known = levels.parse(name) or format_named(name, f"also {', '.join(levels.PRESETS)}, and 16 for 16 bit")
    except ValueError as error:  # of a pair that is refused
        fail(error)
    extra = books.cache_options(known.name, files) if isinstance(known, Format) else {}
    return dict(format=known.name, sinks=sinks, range_search=search, **extra)


def _quality_table(scores: dict, measured: Callable[[int], float]):
    shown = table("cache", "packed bits", "all-in bits", "cache bytes", "perplexity", "KL nats", "top-1",
                  "lowest cosine", "s")
    for label, score in scores.items():
        worst = min(range(len(score.cosine)), key=score.cosine.__getitem__)
        shown.add_row(label, f"{score.bits_per_element:.2f}", f"{measured(score.cache_bytes):.2f}",
                      f"{score.cache_bytes:,}", f"{score.perplexity:.3f}",
                      f"{score.kl:.5f}", f"{score.top1:.1%}", f"{score.cosine[worst]:.4f} (layer {worst})",
                      f"{score.seconds:.1f}")
    return shown


def save_plot(path: Path, scores: dict, about: str) -> None:
    """Two panels: perplexity against bits per element of the whole cache, and cosine by layer, one colour a cache.
    scores: the 16-bit cache's first. about: the model, the text and the machine, for the title."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from lowbit_attn.demo import figures

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    base = next(iter(scores.values())).cache_bytes
    figure.suptitle(about, fontsize=9)
    left.set_title("perplexity")
    figures.draw_cosine(right, {label: score.cosine for label, score in scores.items()})
    figures.draw_perplexity(left, [
        figures.Point(label, figures.bits_all_in(score.cache_bytes, base), score.perplexity, score.spread)
        for label, score in scores.items()])
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
