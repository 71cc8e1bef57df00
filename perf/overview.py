"""README's picture: how long a call takes, and what its cache costs in perplexity, format by format.

    python perf/overview.py        perf/results/plots/overview.png

Drawn from perf/results: the calls are those of README's table of speed (perf/targets_table.py), the perplexities those
of its table of quality (perf/quality.py), each of the commit that is named in the picture.
"""

from typing import Annotated

import targets_table
import typer
from plots import PLOTS
from provenance import ROOT
from quality import newest
from quality import title_of as title_of_quality

from lowbit_attn.bench import BenchCase, fastest_reads
from lowbit_attn.demo.figures import Point, bits_all_in, draw_perplexity

SHAPE = (8, 32768)  # sequences and their tokens, of the calls on the left
CACHES = {  # label -> color, the one of its format's bar
    "16 bit": "grey", "k4v4": "tab:blue", "k4v2, sinks": "tab:purple", "kitty-pro, search": "tab:olive",
    "kitty, search": "tab:green", "k2v2, sinks, search": "tab:orange",
}


def draw_calls(axes, lines: list[dict]) -> None:
    """A bar a format and one for torch's best 16-bit attention: time of the same call, and how many times faster than
    16 bit in the same run; a mark where the fastest read of the format's bytes ends."""
    reads, name = fastest_reads(lines)
    found = [(line, read) for line, read in zip(lines, reads)
             if (line["batch"], line["seqlen"], line["heads"]) == (*SHAPE, 32) and not line.get("ragged")]
    found.sort(key=lambda one: -one[0]["us"])
    whole, formats = found[0][0]["fp16_us"], [line["format"] for line, _ in found]
    colors = {label.partition(",")[0]: color for label, color in CACHES.items()}
    bars = axes.barh(["16 bit (torch)", *formats], [whole, *(line["us"] for line, _ in found)], height=0.6,
                     color=[colors["16 bit"], *map(colors.get, formats)])
    texts = [f"{whole:.0f} us", *(f"{line['us']:.0f} us, {line['fp16_us'] / line['us']:.1f}x" for line, _ in found)]
    axes.bar_label(bars, texts, padding=4, fontsize=8)
    axes.plot([read for _, read in found], formats, "k|", markersize=12, label=f"fastest {name} of these bytes")
    axes.legend(fontsize=7, loc="lower right")
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.15 * whole), xlabel="time of a call (us)")
    case, commits = BenchCase.from_line(found[0][0]), dict.fromkeys(line["commit"] for line in lines)
    axes.set_title(f"One attention call: {case.batch} x {case.seqlen >> 10}K tokens, {case.num_heads} query and "
                   f"{case.num_heads_kv} KV heads\n{lines[0]['gpu']}, commits {', '.join(commits)}", fontsize=8)


def draw_quality(axes, lines: dict[str, dict]) -> None:
    """Perplexity against bits per element of the whole cache, of README's caches."""
    base = lines["16 bit"]
    points = [Point(label, bits_all_in(lines[label]["cache_bytes"], base["cache_bytes"]), lines[label]["perplexity"],
                    lines[label].get("spread")) for label in CACHES]
    axes.set_title("\n".join(title_of_quality(base).split("; ")), fontsize=8)
    draw_perplexity(axes, points, CACHES)


def overview_figure(calls: list[dict], quality: dict[str, dict]):
    """Both panels beside each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_calls(left, calls)
    draw_quality(right, quality)
    return figure


def main(
    gpu: Annotated[str, typer.Option(help="Whose times.")] = "h200",
    commit: Annotated[str, typer.Option(help="Commit of the calls.")] = "327b1a011c4b",
    kitty: Annotated[str, typer.Option(help="Commit of Kitty's calls.")] = "5e2651264428",
    output: Annotated[str, typer.Option(help="The picture, in the repository.")] = f"{PLOTS}/overview.png",
) -> None:
    """Draw the picture."""
    calls = targets_table.lines_at(gpu, commit, kitty)
    if not calls:
        raise typer.BadParameter(f"{commit} or {kitty} has not all cases on {gpu}", param_hint="--commit")
    overview_figure(calls, newest("table")).savefig(ROOT / output, dpi=90, metadata={"Software": None})
    print(ROOT / output)


if __name__ == "__main__":
    typer.run(main)
