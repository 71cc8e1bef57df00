"""Quality of the formats on a small real model, as JSON lines and plots; needs no GPU.

    python perf/quality.py run --preset table     16 bit, k2v2 and its remedies, Kitty, wider formats
    python perf/quality.py run --preset boost     boost rates of Kitty by selection of channels
    python perf/quality.py table                  README's table of the newest commit's lines
    python perf/quality.py plot                   plots of the newest commit's line of each case, beside the numbers

SmolLM2-135M-Instruct reads the first 2,048 tokens of Python's help texts in chunks of 128 tokens, in fp32, over each
cache; every token but the first is predicted (lowbit_attn.quality).
"""

import hashlib
import json
from dataclasses import asdict
from itertools import product
from typing import Annotated

import typer
from provenance import ROOT, append_result, provenance

from lowbit_attn.demo.figures import bits_all_in

app = typer.Typer(no_args_is_help=True, add_completion=False)

MODEL = "SmolLM2-135M-Instruct"
HEAD_DIM = 64  # of the model
RESULTS = "perf/results/quality.jsonl"
PLOTS = "perf/results/plots"
SINKS = 32
RATES = (0, 12.5, 25, 50, 75, 100)  # percent of K's channels that take 4 bits
SELECTIONS = ("magnitude", "weighted", "variance", "random")
TOGETHER = 6  # caches read in lockstep beside one 16-bit baseline


def boosted(rate: float, selection: str) -> str:
    """The Kitty format that boosts this share of the model's channels, chosen so."""
    return f"kitty-b{int(rate / 100 * HEAD_DIM)}" + f"-{selection}" * (selection != "magnitude")


def table_cases() -> dict[str, dict | None]:
    """label -> options of the cache, as quality.compare takes them."""
    plain, search = dict(range_search=False), {}  # the formats' own: of K alone, since searching V does not help
    kivi = dict(format="k2v2-g32-vg32", range_search=False, window_v=128, v_step=1)
    return {
        "16 bit": None,
        "k2v2": dict(format="k2v2", **plain), "k2v2, search": dict(format="k2v2", **search),
        "k2v2, sinks": dict(format="k2v2", sinks=SINKS, **plain),
        "k2v2, sinks, search": dict(format="k2v2", sinks=SINKS, **search),
        "KIVI (groups of 32, simulator)": kivi, "KIVI, sinks (simulator)": dict(**kivi, sinks=SINKS),
        "kitty": dict(format="kitty", **plain), "kitty, search": dict(format="kitty", **search),
        "kitty (simulator)": dict(format="kitty", v_step=1, **plain),
        "kitty, search (simulator)": dict(format="kitty", v_step=1, **search),
        "kitty-weighted, search": dict(format="kitty-weighted", **search),
        "kitty-pro": dict(format="kitty-pro", **plain), "kitty-pro, search": dict(format="kitty-pro", **search),
        "kitty-pro (simulator)": dict(format="kitty-pro", v_step=1, **plain),
        "kitty-pro, search (simulator)": dict(format="kitty-pro", v_step=1, **search),
        "kitty-pro-weighted, search": dict(format="kitty-pro-weighted", **search),
        "k4v2": dict(format="k4v2"), "k4v2, sinks": dict(format="k4v2", sinks=SINKS),
        "k4v4": dict(format="k4v4"), "k4v4, sinks": dict(format="k4v4", sinks=SINKS), "k8v4": dict(format="k8v4"),
    }


def boost_cases() -> dict[str, dict | None]:
    """Every rate and selection, without range search (as published) and with it; 0 and 100 % need no selection."""
    cases = {"16 bit": None}
    for is_search, rate, selection in product((False, True), RATES, SELECTIONS):
        if rate not in (0, 100) or selection == SELECTIONS[0]:
            name = boosted(rate, selection)
            cases[name + ", search" * is_search] = dict(format=name) | ({} if is_search else dict(range_search=False))
    return cases


PRESETS = {"table": table_cases, "boost": boost_cases}


@app.command()
def run(
    preset: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = "table",
    tokens: Annotated[int, typer.Option(help="Tokens of the text that are read.")] = 2048,
    threads: Annotated[int, typer.Option(help="CPU threads of torch.")] = 1,
    only: Annotated[list[str], typer.Option(help="Only the case of this label; repeatable.")] = [],
    output: Annotated[str, typer.Option(help="JSON lines file of the repository.")] = RESULTS,
) -> None:
    """Score the cases of a preset and append a line for each."""
    if preset not in PRESETS:
        raise typer.BadParameter(f"{preset!r}, supported: {', '.join(PRESETS)}", param_hint="--preset")
    import torch

    from lowbit_attn import FORMATS, quality
    from lowbit_attn.demo import model as models
    from lowbit_attn.demo import scoring

    torch.set_num_threads(threads)
    model, tokenizer = models.load(models.fetch(models.default_folder()), "cpu")
    ids = tokenizer(scoring.help_text(), return_tensors="pt").input_ids[:, :tokens]
    text = tokenizer.decode(ids[0])
    about = provenance() | {"preset": preset, "model": MODEL, "dtype": str(model.dtype), "tokens": ids.shape[1],
                            "chunk": quality.CHUNK, "text_sha256": hashlib.sha256(text.encode()).hexdigest()[:16]}
    cases = PRESETS[preset]()
    if unknown := set(only) - cases.keys():
        raise typer.BadParameter(f"{sorted(unknown)}, supported: {', '.join(cases)}", param_hint="--only")
    cases = {label: cases[label] for label in only or cases}
    for start in range(0, len(cases), TOGETHER):
        labels = list(cases)[start : start + TOGETHER]
        scores = quality.compare(model, ids, {label: cases[label] for label in labels})
        for label in labels:
            line = _line(about, label, cases[label], scores[label], FORMATS)
            append_result(output, line)
            print(f"{label:32} {line['bits_per_element']:6.3f} bits  perplexity {line['perplexity']:8.4f}  "
                  f"top-1 {line['top1']:.3f}  KL {line['kl']:.4f}", flush=True)


def _line(about: dict, label: str, options: dict | None, score, formats) -> dict:
    values = {name: round(value, 4) for name, value in asdict(score).items() if isinstance(value, float)}
    fmt = formats[options["format"]] if options else None
    wide = fmt.bits_per_element(128) if fmt else 16.0
    whole = {"sinks": fmt.sinks} | options if fmt else None
    return about | {"label": label, "options": whole} | values | {
        "bits_per_element_at_128": round(wide, 4), "cache_bytes": score.cache_bytes,
        "lowest_cosine": round(min(score.cosine), 4)}


def newest(preset: str, path: str = RESULTS) -> dict[str, dict]:
    """label -> its last line of a preset, for the most tokens that were read; all of one commit, the last that was
    checked out as it is."""
    lines = [json.loads(line) for line in (ROOT / path).read_text().splitlines()]
    lines = [line for line in lines if line["preset"] == preset and not line["commit"].endswith("+dirty")]
    lines = [line for line in lines if line["commit"] == lines[-1]["commit"]]
    most = max((line["tokens"] for line in lines), default=0)
    return {line["label"]: line for line in lines if line["tokens"] == most}


README_ROWS = {  # a row of README's table -> its labels of preset table
    "16 bit": ["16 bit"], "k4v4": ["k4v4"], "k4v2, 32 sinks": ["k4v2, sinks"], "k2v2, no search": ["k2v2"],
    "k2v2, no search, 32 sinks": ["k2v2, sinks"], "k2v2, 32 sinks": ["k2v2, sinks, search"],
    "KIVI, groups of 32, 32 sinks": ["KIVI, sinks (simulator)"],
    "kitty, no search / search": ["kitty", "kitty, search"],
    "kitty-pro, no search / search": ["kitty-pro", "kitty-pro, search"],
}


def row_of(label: str, lines: list[dict], base: dict) -> str:
    """One row of README's table: bits of a packed page and of the whole cache, which all its lines share, perplexities
    and agreements with 16 bit."""
    perplexity, top1 = (" / ".join(texts) for texts in zip(*(
        (f"{line['perplexity']:.2f}", f"{100 * line['top1']:.1f}") for line in lines)))
    bits = bits_all_in(lines[0]["cache_bytes"], base["cache_bytes"])
    return f"| {label} | {lines[0]['bits_per_element']:.2f} | {bits:.2f} | {perplexity} | {top1} % |"


@app.command()
def table(results: Annotated[str, typer.Option(help="JSON lines file of the repository.")] = RESULTS) -> None:
    """Print the rows of README's table; their commit goes to the sentence above it."""
    lines = newest("table", results)
    missing = sorted({name for names in README_ROWS.values() for name in names} - lines.keys())
    if missing:
        raise typer.BadParameter(f"the newest commit of {results} has no {', '.join(missing)}; run python "
                                 "perf/quality.py run --preset table", param_hint="--results")
    print("commit", lines["16 bit"]["commit"])
    for label, names in README_ROWS.items():
        print(row_of(label, [lines[name] for name in names], lines["16 bit"]))


@app.command()
def plot(
    results: Annotated[str, typer.Option(help="JSON lines file of the repository.")] = RESULTS,
    folder: Annotated[str, typer.Option(help="Where the plots go, in the repository.")] = PLOTS,
) -> None:
    """Draw boost-rate.svg and .png (curves that are complete), and quality.svg and .png, of the newest numbers."""
    from plots import save

    for name, preset, draw in (("boost-rate", "boost", boost_figure), ("quality", "table", table_figure)):
        lines = newest(preset, results)
        if preset == "boost" and not boost_curves(lines):
            print(f"{name}: no curve is complete at one commit; run python perf/quality.py run --preset boost")
        elif lines:
            save(draw(lines), ROOT / folder / name)


def boost_labels(selection: str, is_search: bool) -> list[str]:
    """Labels of a selection's cases, by rate."""
    names = (boosted(rate, SELECTIONS[0] if rate in (0, 100) else selection) for rate in RATES)
    return [name + ", search" * is_search for name in names]


def boost_curves(lines: dict[str, dict]) -> dict[tuple[bool, str], list[float]]:
    """(range search, selection) -> perplexity by rate, of the curves that are complete beside a 16-bit line."""
    curves = {}
    for is_search, selection in product((False, True), SELECTIONS):
        labels = boost_labels(selection, is_search)
        if lines.keys() >= {"16 bit", *labels}:
            curves[is_search, selection] = [lines[label]["perplexity"] for label in labels]
    return curves


def boost_figure(lines: dict[str, dict]):
    """Perplexity against boost rate, a curve for each selection that is complete; the 16-bit baseline dashed."""
    from matplotlib.figure import Figure

    curves = boost_curves(lines)
    searches = sorted({is_search for is_search, _ in curves})
    figure = Figure(figsize=(1 + 4.7 * len(searches), 4.2), layout="constrained")
    panels = figure.subplots(1, len(searches), sharey=True, squeeze=False)[0]
    base = lines["16 bit"]
    for axes, is_search in zip(panels, searches, strict=True):
        for selection, marker in zip(SELECTIONS, "osd^", strict=True):
            if values := curves.get((is_search, selection)):
                axes.plot(RATES, values, marker=marker, markersize=4, label=selection)
        axes.axhline(base["perplexity"], linestyle="--", linewidth=0.8, color="grey", label="16 bit")
        axes.set(xlabel="K channels boosted from 2 to 4 bits (%)", xticks=RATES,
                 title="with range search" if is_search else "plain ranges, as published")
    panels[0].set_ylabel("perplexity")
    panels[0].legend(title="channels chosen by")
    figure.suptitle(f"Boosted channels of Kitty: perplexity, {SINKS} sinks, V of 2 bits\n{title_of(base)}", fontsize=9)
    return figure


def title_of(line: dict) -> str:
    """Where a line's numbers are from."""
    machine = "CPU" if line["gpu"] == "none" else line["gpu"]
    return (f"{line['model']}, {line['tokens']:,} tokens of help texts; {machine}, {line['date'][:10]}, "
            f"commit {line['commit']}")


def table_figure(lines: dict[str, dict]):
    """A row a case, in the table's order: perplexity on a linear axis with one standard error of its distance to 16 bit
    (where the lines have it), and bits per element of the whole cache in the name."""
    from matplotlib.figure import Figure

    base, order = lines["16 bit"], list(PRESETS["table"]())
    cases = [label for label in dict.fromkeys(order + list(lines)) if lines.get(label, base)["options"] is not None]
    found = [lines[label] for label in cases]
    figure = Figure(figsize=(8, 1.4 + 0.25 * len(cases)), layout="constrained")
    axes = figure.subplots()
    axes.errorbar([line["perplexity"] for line in found], range(len(cases)), marker="o", markersize=4, capsize=3,
                  xerr=[line.get("spread") or 0 for line in found], linestyle="none")
    axes.axvline(base["perplexity"], linestyle="--", linewidth=0.8, color="grey")
    bits = [bits_all_in(line["cache_bytes"], base["cache_bytes"]) for line in found]
    axes.set_yticks(range(len(cases)), [f"{label}, {n:.2f} bits" for label, n in zip(cases, bits)], fontsize=8)
    for place, line in enumerate(found):
        axes.annotate(f"{line['perplexity']:.2f}", (line["perplexity"] + (line.get("spread") or 0), place),
                      xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.grid(axis="x", linewidth=0.3)
    axes.set(xlabel=f"perplexity, ± one standard error beside 16 bit's {base['perplexity']:.2f} (dashed)")
    figure.suptitle(f"Perplexity by cache; bits per element of the whole cache\n{title_of(base)}", fontsize=9)
    return figure


if __name__ == "__main__":
    app()
