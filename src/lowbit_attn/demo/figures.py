"""Panels that the demo, ``lowbit-attn quality`` and perf/ draw: perplexity against bits, cosine by layer."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

MOST = 2.0  # times the baseline's perplexity: what is above is drawn at the upper edge, its number beside its name


class Point(NamedTuple):
    """One cache of the perplexity panel. bits: per element of the whole cache. spread: one standard error of the
    perplexity beside the baseline's; None where there is none."""

    label: str
    bits: float
    perplexity: float
    spread: float | None = None


def bits_all_in(cache_bytes: int, baseline_bytes: int) -> float:
    """Bits per element of all that a cache holds: packed pages, sinks, open blocks, layers that stay in 16 bit.

    baseline_bytes: of the 16-bit cache of the same tokens.
    """
    return 16 * cache_bytes / baseline_bytes


def where(device: str) -> str:
    """The package's version and the machine that computed: a GPU's name, or "CPU". device: a torch device's name."""
    import torch

    from lowbit_attn import __version__

    machine = "CPU" if device == "cpu" else torch.cuda.get_device_name(device)
    return f"lowbit_attn {__version__}, {machine}"


def draw_perplexity(axes, points: Sequence[Point], colors: Mapping[str, str] | None = None) -> None:
    """Draw perplexity against bits per element, both linear, a marker and an error bar a cache; the first is the
    baseline, a dashed line. Perplexities over MOST times the baseline's are triangles at the upper edge.

    colors: by label; matplotlib's own where a label has none.
    """
    base = points[0].perplexity
    inside = [point for point in points if point.perplexity <= MOST * base]
    low = min(point.perplexity - (point.spread or 0) for point in inside)
    high = max(point.perplexity + (point.spread or 0) for point in inside)
    margin = 0.08 * max(high - low, 0.01 * base)
    low, high = low - margin, high + margin
    handles = []  # in the order of the points, which a legend of its own would not keep
    for point in points:
        color = (colors or {}).get(point.label)
        name = f"{point.label}: {point.perplexity:.2f}" + (f" ± {point.spread:.2f}" if point.spread else "")
        if point in inside:
            handles.append(axes.errorbar(point.bits, point.perplexity, yerr=point.spread, marker="o", capsize=3,
                                         linestyle="none", label=name, color=color))
        else:
            handles += axes.plot(point.bits, high, "^", label=f"{name} (above)", clip_on=False, color=color)
    axes.axhline(base, linewidth=0.8, linestyle="--", color="grey")
    what = "perplexity" + " (± one standard error)" * any(point.spread for point in points)
    axes.set(xlim=(0, 17), xticks=range(0, 17, 2), ylim=(low, high), ylabel=what,
             xlabel="bits per element of the whole cache")
    axes.legend(handles=handles, fontsize=7)


def draw_cosine(axes, curves: Mapping[str, Sequence[float]]) -> None:
    """Draw each cache's mean cosine with the 16-bit run by layer; layers are whole numbers, counted from 0."""
    from matplotlib.ticker import MaxNLocator

    for label, values in curves.items():
        axes.plot(range(len(values)), values, ".-", label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="layer", ylabel="cosine with the 16-bit run (mean over tokens)", title="attention output by layer")
    axes.legend(fontsize=7)
