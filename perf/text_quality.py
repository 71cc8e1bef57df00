"""Quality of every preset on three texts of different kind, two windows of each, as JSON lines; needs no GPU.

    python perf/text_quality.py run --text docs                        SmolLM2-135M-Instruct, a line a window and cache
    python perf/text_quality.py run --text docs --gguf FILE --model gemma-3-270m      another model, with all its layers
    python perf/text_quality.py run --text code --gguf FILE --model qwen --windows 1 --tokens 512    less of a text
    python perf/text_quality.py table                                  the newest lines as the table of docs/quality.md

A window of 1,024 tokens is read from its start in chunks of 128, in fp32, over each cache (lowbit_attn.quality). The
texts are Python's help topics, the GPL-3, and the source of Python's statistics module. Every cache has 32 sinks unless
its label says otherwise. Formats with codebooks have a table of their own (perf/codebook_quality.py).
"""

import hashlib
import json
import math
import statistics
import sysconfig
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from provenance import ROOT, append_result, provenance

from lowbit_attn.demo.figures import bits_all_in

app = typer.Typer(no_args_is_help=True, add_completion=False)

SMOLLM2 = "SmolLM2-135M-Instruct"
RESULTS = "perf/results/texts.jsonl"
TEXTS = ("docs", "gpl", "code")
WINDOWS, TOKENS, SINKS, TOGETHER = 2, 1024, 32, 6
FORMATS = ("k8v8", "k8v4", "k4v8", "k4v4", "k4tv4", "k4v2", "k2v4", "k2v2", "k4v1", "k1v4", "k1v1", "kitty",
           "kitty-variance", "kitty-weighted", "kitty-pro", "kitty-pro-variance", "kitty-pro-weighted", "k4v2-boost",
           "lean", "lean-low")
PAIRS = (("k8v4", "k4v8"), ("k4v2", "k2v4"), ("k4v1", "k1v4"), ("kitty-variance", "kitty"), ("kitty-weighted", "kitty"),
         ("kitty-pro-variance", "kitty-pro"), ("kitty-pro-weighted", "kitty-pro"), ("k4v2-boost", "k4v2"),
         ("lean", "k4v4"))
WITHOUT_SINKS = ("k4v4", "k4v2", "k2v2")
LabelsOption = Annotated[list[str], typer.Option(help="Only the cache of this label; repeatable.")]
OutputOption = Annotated[str, typer.Option(help="JSON lines file of the repository.")]


def cases() -> dict[str, dict | None]:
    """label -> options of LowBitCache; None: 16 bit."""
    made = {"16 bit": None} | {name: dict(format=name, sinks=SINKS) for name in FORMATS}
    return made | {f"{name}, no sinks": dict(format=name, sinks=0) for name in WITHOUT_SINKS}


def text_of(name: str) -> str:
    """One of the three texts, all of which a Debian machine with Python has."""
    from lowbit_attn.codebooks.text import help_text

    if name == "docs":
        return help_text()
    folder = Path(sysconfig.get_path("stdlib"))
    return (Path("/usr/share/common-licenses/GPL-3") if name == "gpl" else folder / "statistics.py").read_text()


def windows(ids: list[int], bos: int | None, tokens: int = TOKENS, count: int = WINDOWS) -> list[list[int]]:
    """The first ``count`` disjoint windows of a text's tokens, each behind the token that begins a text, if ids do.

    Raises ValueError for a text that is too short.
    """
    first = ids[:1] if ids[:1] == [bos] else []
    body, size = ids[len(first) :], tokens - len(first)
    if len(body) < count * size:
        raise ValueError(f"text: got {len(ids)} tokens, supported: {count * size} or more")
    return [first + body[i * size : (i + 1) * size] for i in range(count)]


@app.command()
def run(
    text: Annotated[str, typer.Option(help=f"One of {', '.join(TEXTS)}.")],
    gguf: Annotated[Path | None, typer.Option(help="A model in GGUF that transformers can load.")] = None,
    model: Annotated[str, typer.Option(help="Its name in the results.")] = SMOLLM2,
    only: LabelsOption = [],
    count: Annotated[int, typer.Option("--windows", help="Windows of the text that are read.")] = WINDOWS,
    tokens: Annotated[int, typer.Option(help="Tokens of a window.")] = TOKENS,
    threads: Annotated[int, typer.Option(help="CPU threads of torch.")] = 1,
    output: OutputOption = RESULTS,
) -> None:
    """Score the caches on the windows of one text and append a line for each."""
    if text not in TEXTS:
        raise typer.BadParameter(f"{text!r}, supported: {', '.join(TEXTS)}", param_hint="--text")
    known = asked_for(cases(), only)
    import torch

    from lowbit_attn import quality

    network, tokenizer = loaded(gguf, threads)
    picked = {label: all_layers(options, network) for label, options in known.items()}
    ids = tokenizer(text_of(text)).input_ids
    for place, window in enumerate(windows(ids, tokenizer.bos_token_id, tokens, count)):
        about = provenance() | {"model": model, "text": text, "window": place, "tokens": len(window),
                                "window_sha256": hashlib.sha256(str(window).encode()).hexdigest()[:16]}
        for start in range(0, len(picked), TOGETHER):
            labels = list(picked)[start : start + TOGETHER]
            scores = quality.compare(network, torch.tensor([window]), {label: picked[label] for label in labels})
            for label in labels:
                line = about | line_of(label, picked[label], scores[label])
                append_result(output, line)
                print(f"{text} {place} {label:20} {line['bits_per_element']:6.3f} bits  {line['perplexity']:8.4f}  "
                      f"KL {line['kl']:.5f}  top-1 {line['top1']:.3f}  {line['seconds']:.0f} s", flush=True)


def asked_for(known: dict[str, dict | None], only: list[str]) -> dict[str, dict | None]:
    """The cases of --only, in its order, or all; BadParameter for a label that none has."""
    if unknown := set(only) - known.keys():
        raise typer.BadParameter(f"{sorted(unknown)}, supported: {', '.join(known)}", param_hint="--only")
    return {label: known[label] for label in only or known}


def loaded(gguf: Path | None, threads: int) -> tuple:
    """(network, tokenizer) of a model in GGUF, or of SmolLM2, on so many threads of the CPU."""
    import torch

    from lowbit_attn.demo import model as models

    torch.set_num_threads(threads)
    return models.load(gguf or models.fetch(models.default_folder()), "cpu")


def all_layers(options: dict | None, network) -> dict | None:
    """The options with which layers that slide are packed too, in a model that has some."""
    slides = "sliding_attention" in (getattr(network.config, "layer_types", None) or ())
    return options | {"sliding": "lowbit"} if slides and options else options


def line_of(label: str, options: dict | None, score) -> dict:
    """What a line says of a cache and its scores; errors and KL in full, of small numbers too."""
    found = {name: round(value, 6) for name, value in asdict(score).items() if isinstance(value, float)}
    return {"label": label, "options": options} | found | {"cache_bytes": score.cache_bytes,
                                                           "lowest_cosine": round(min(score.cosine), 4)}


# ---- the table


def newest(model: str, path: str = RESULTS) -> dict[tuple[str, str], list[dict]]:
    """(label, text) -> the last line of each window, in order: those of as many windows as 16 bit has lines of.

    Lines of a tree that was changed are left out.
    """
    file, found = ROOT / path, {}
    for line in map(json.loads, file.read_text().splitlines() if file.exists() else ()):
        if line["model"] == model and not line["commit"].endswith("+dirty"):
            found.setdefault((line["label"], line["text"]), {})[line["window"]] = line
    return {(label, text): [by_window[i] for i in sorted(by_window)] for (label, text), by_window in found.items()
            if by_window.keys() == found.get(("16 bit", text), {}).keys()}


def pooled_perplexity(lines: list[dict]) -> tuple[float, float]:
    """(perplexity, its standard error beside 16 bit's) of windows of one length."""
    whole = math.exp(sum(math.log(line["perplexity"]) for line in lines) / len(lines))
    return whole, whole * math.hypot(*(line["spread"] / line["perplexity"] for line in lines)) / len(lines)


def pooled(lines: list[dict], name: str) -> tuple[float, float]:
    """(mean, standard error) of what the lines have for windows of one length: "kl" or "top1"."""
    return (sum(line[name] for line in lines) / len(lines),
            math.hypot(*(line[f"{name}_error"] for line in lines)) / len(lines))


def texts_of(found: dict[tuple[str, str], list[dict]]) -> list[str]:
    """The texts that a model has read over a 16-bit cache, in order."""
    return [text for text in TEXTS if ("16 bit", text) in found]


def table_of(found: dict[tuple[str, str], list[dict]]) -> str:
    """A row a cache that has lines of all of the model's texts: bits, perplexity on each text, KL and top-1 over all
    windows."""
    texts = texts_of(found)
    rows = ["| cache | bits: packed | bits: whole | " + " | ".join(f"perplexity, {text}" for text in texts)
            + " | KL, 1e-3 nats | top-1 |", "|---" * (5 + len(texts)) + "|"]
    for label in cases():
        if not all((label, text) in found for text in texts):
            continue
        lines = [line for text in texts for line in found[label, text]]
        base = [line for text in texts for line in found["16 bit", text]]
        bits = bits_all_in(sum(line["cache_bytes"] for line in lines), sum(line["cache_bytes"] for line in base))
        cells = [label, f"{lines[0]['bits_per_element']:.2f}", f"{bits:.2f}"]
        cells += ["{:.2f} ± {:.2f}".format(*pooled_perplexity(found[label, text])) for text in texts]
        (kl, kl_error), (top1, top1_error) = pooled(lines, "kl"), pooled(lines, "top1")
        cells += [f"{1e3 * kl:.2f} ± {1e3 * kl_error:.2f}", f"{100 * top1:.1f} ± {100 * top1_error:.1f} %"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def pairs_of(found: dict[tuple[str, str], list[dict]]) -> str:
    """A row a pair of caches: the difference of KL over the windows of all texts, what both find hard cancelled."""
    rows = ["| first | second | KL of the first less the second's, 1e-3 nats | windows where the first has less |",
            "|---|---|---|---|"]
    texts = texts_of(found)
    for first, second in PAIRS:
        if not all((label, text) in found for label in (first, second) for text in texts):
            continue
        gone = [1e3 * (a["kl"] - b["kl"]) for text in texts for a, b in zip(found[first, text], found[second, text])]
        if len(gone) < 2:
            continue
        error = statistics.stdev(gone) / len(gone) ** 0.5
        rows.append(f"| {first} | {second} | {statistics.mean(gone):.2f} ± {error:.2f} | "
                    f"{sum(one < 0 for one in gone)} of {len(gone)} |")
    return "\n".join(rows)


@app.command()
def table(model: Annotated[str, typer.Option(help="A model's name in the results.")] = SMOLLM2,
          results: OutputOption = RESULTS) -> None:
    """Print the tables of docs/quality.md, and the commits of their lines."""
    found = newest(model, results)
    commits = sorted({line["commit"] for lines in found.values() for line in lines})
    print(f"{table_of(found)}\n\n{pairs_of(found)}\n\ncommits: {', '.join(commits)}")


if __name__ == "__main__":
    app()
