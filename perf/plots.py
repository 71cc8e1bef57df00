"""Two plots of the times that perf/bench.py measured, as SVG and PNG.

    python perf/plots.py                perf/results/plots/decode-lengths (preset lengths), decode-targets (targets)
    python perf/plots.py --gpu h100     decode-lengths-h100, decode-targets-h100

Each plot is of one kind of GPU and of one commit: the newest that has every case of its preset, or --commit.
"""

from pathlib import Path
from typing import Annotated

import typer
from bench import PRESETS
from decode_results import RESULTS, label_of, newest, read_lines
from provenance import ROOT

from lowbit_attn import budget
from lowbit_attn.bench import BenchCase, fastest_reads

PLOTS = "perf/results/plots"
DEFAULT_GPU = "h200"  # whose plots have no GPU in their names
COLORS = {"k4v4": "tab:blue", "k2v2": "tab:orange"}


def complete(lines: list[dict], cases: list[BenchCase], commit: str | None) -> list[dict]:
    """The newest line of each case at one commit, in order; empty where no commit (or not this one) has all cases.
    lines: of one GPU, else ValueError."""
    if len(gpus := {line["gpu"] for line in lines}) > 1:
        raise ValueError(f"lines: got those of {', '.join(sorted(gpus))}, supported: one kind of GPU")
    for name in [commit] if commit else dict.fromkeys(line["commit"] for line in reversed(lines)):
        found = [newest([line for line in lines if line["commit"] == name], case) for case in cases]
        if all(found):
            return found
    return []


def title_of(lines: list[dict]) -> str:
    """Where numbers are from."""
    first = lines[0]
    return f"{first['gpu']}, {first['arch']} kernels, {first['date'][:10]}, commit {first['commit']}"


def lengths_figure(lines: list[dict]):
    """Time of a call against the tokens of its one sequence: both formats, reads of their bytes, 16 bit."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 5), layout="constrained")
    axes = figure.subplots()
    reads, kind = fastest_reads(lines)
    for name, color in COLORS.items():
        points = [line for line in lines if line["format"] == name]
        tokens = [line["seqlen"] for line in points]
        axes.plot(tokens, [line["us"] for line in points], marker="o", markersize=4, color=color, label=name)
        axes.plot(tokens, [read for read, line in zip(reads, lines) if line["format"] == name], linestyle="--",
                  linewidth=1, color=color, label=f"{kind} of {name}'s bytes")
    axes.plot(tokens, [line["fp16_us"] for line in points], marker="s", markersize=4, color="grey", label="16 bit")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(tokens, [f"{n >> 10}K" for n in tokens])
    axes.set(xlabel="tokens of the sequence", ylabel="time of a decode call (us)")
    axes.grid(which="both", linewidth=0.3)
    axes.legend(fontsize=8)
    one = points[0]
    figure.suptitle(f"Time of a decode call, batch {one['batch']}, {one['heads']} query and {one['kv_heads']} KV "
                    f"heads, head_dim {one['head_dim']}\n{title_of(lines)}", fontsize=9)
    return figure


def targets_figure(lines: list[dict]):
    """A bar a case: the rate at which a call reads its bytes, over that of the fastest read; *: slow reads."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.4 + 0.28 * len(lines)), layout="constrained")
    axes = figure.subplots()
    reads, kind = fastest_reads(lines)
    fractions = [read / line["us"] for read, line in zip(reads, lines)]
    labels = [f"{line['format']}, {label_of(BenchCase.from_line(line))}" + " *" * line["void"] for line in lines]
    bars = axes.barh(labels, fractions, height=0.7, color=[COLORS[line["format"]] for line in lines])
    axes.bar_label(bars, [f"{fraction:.2f}, {line['us']:.1f} us" for fraction, line in zip(fractions, lines)],
                   label_type="center", color="white", fontsize=8)
    axes.axvline(1, linestyle="--", linewidth=0.8, color="grey")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    which = "the fastest read" if kind == "read" else f"a {kind}"
    axes.set(xlabel=f"rate of a decode call over that of {which} of the same bytes", xlim=(0, 1.05))
    void = "; *: slow plain read" * any(line["void"] for line in lines)
    figure.suptitle(f"How near a decode call comes to {which} of its bytes; in the bars: share, time\n"
                    f"{title_of(lines)}{void}", fontsize=9)
    return figure


def save(figure, file: Path) -> None:
    """Write FILE.png and FILE.svg, whose text is text; the same numbers give the same files."""
    import matplotlib

    file.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "lowbit_attn", "svg.fonttype": "none"}):
        figure.savefig(f"{file}.png", dpi=110, metadata={"Software": None})
        figure.savefig(f"{file}.svg", metadata={"Date": None})
    print(f"{file}.png", f"{file}.svg")


FIGURES = {"lengths": lengths_figure, "targets": targets_figure}


def main(
    arch: Annotated[str, typer.Option(help="Whose kernels: hopper or ampere.")] = "hopper",
    gpu: Annotated[str, typer.Option(help=f"Whose times: {', '.join(budget.GPUS)}.")] = DEFAULT_GPU,
    commit: Annotated[str | None, typer.Option(help="Only lines of this commit; default: the newest complete.")] = None,
    results: Annotated[str, typer.Option(help="JSON lines file of the repository.")] = RESULTS,
    folder: Annotated[str, typer.Option(help="Where the plots go, in the repository.")] = PLOTS,
) -> None:
    """Draw every plot whose lines are there; an error says what to run for the others."""
    try:
        known = budget.gpu_named(gpu)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--gpu") from None
    lines, target, missing = read_lines(results, arch, known), ROOT / folder, []
    suffix = "" if known is budget.GPUS[DEFAULT_GPU] else f"-{gpu.lower()}"
    for preset, draw in FIGURES.items():
        found = complete(lines, PRESETS[preset], commit)
        if not found:
            missing.append(preset)
            continue
        save(draw(found), target / f"decode-{preset}{suffix}")
    for preset in missing:
        at = f"at commit {commit}" if commit else "of one commit"
        typer.echo(f"{results} has not all cases of preset {preset} {at}, {arch} kernels, {known.name}; on one run: "
                   f"python perf/bench.py --preset {preset} --arch {arch}", err=True)
    if missing:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
