"""Panels that the demo, ``lowbit-attn quality`` and perf/ draw: perplexity against bits, cosine by layer."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

MOST = 1.15  # times the baseline's perplexity: worse caches are drawn at the upper edge, with their number
FONT = 7  # points, of labels
GAPS = (7, 16, 28, 42, 58, 76, 96, 120)  # points between a marker and its label: the least that has room
SIDES = ((1, 0), (1, 1), (1, -1), (-1, 0), (-1, 1), (-1, -1), (0, 1), (0, -1), (1, 2), (1, -2), (1, 3), (1, -3))
Box = tuple[float, float, float, float]  # left, lower, right, upper


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


def palette(labels: Iterable[str]) -> dict[str, str]:
    """A color for each label, no color twice: strong ones first, then colors between them."""
    from matplotlib import colormaps
    from matplotlib.colors import hsv_to_rgb, to_hex

    labels = list(dict.fromkeys(labels))
    named = [to_hex(color) for name in ("tab10", "Dark2", "Set1") for color in colormaps[name].colors]
    strong = list(dict.fromkeys(named))
    more = (to_hex(hsv_to_rgb((i * 0.618 % 1, 0.9, 0.7))) for i in itertools.count())
    return dict(zip(labels, itertools.chain(strong, (color for color in more if color not in strong))))


def draw_perplexity(axes, points: Sequence[Point], colors: Mapping[str, str] | None = None) -> None:
    """Draw perplexity against bits per element, both linear: a marker, an error bar and a label a cache; the first is
    the baseline, a dashed line. Perplexities over MOST times the baseline's are triangles at the upper edge, whose
    numbers are in a legend.

    colors: by label; a palette's where a label has none.
    """
    base = points[0].perplexity
    colors = palette(point.label for point in points) | dict(colors or {})
    inside = _useful(points)
    low = min(point.perplexity - (point.spread or 0) for point in inside)
    high = max(point.perplexity + (point.spread or 0) for point in inside)
    margin = 0.08 * max(high - low, 0.01 * base)
    low, high = low - margin, high + margin
    above = []
    for point in points:
        if point in inside:
            axes.errorbar(point.bits, point.perplexity, yerr=point.spread, marker="o", capsize=3, linestyle="none",
                          label=name_of(point), color=colors[point.label])
        else:
            above += axes.plot(point.bits, high, "^", label=name_of(point), clip_on=False, color=colors[point.label])
    axes.axhline(base, linewidth=0.8, linestyle="--", color="grey")
    what = "perplexity" + " (± one standard error)" * any(point.spread for point in points)
    axes.set(xlim=(0, 17), xticks=range(0, 17, 2), ylim=(low, high), ylabel=what,
             xlabel="bits per element of the whole cache")
    legend = axes.legend(handles=above, title="above the range", loc="upper right", fontsize=FONT,
                         title_fontsize=FONT) if above else None
    _label(axes, [(name_of(point), point.bits, point.perplexity, point.spread or 0, colors[point.label])
                  for point in inside], [(line.get_xdata()[0], high) for line in above], legend)


def name_of(point: Point) -> str:
    """A label and its number, with the standard error where there is one."""
    return f"{point.label}: {point.perplexity:.2f}" + (f" ± {point.spread:.2f}" if point.spread else "")


def _useful(points: Sequence[Point]) -> list[Point]:
    """The points that set the range: the baseline and those near it, at least the best of the others."""
    base, *others = points
    near = [point for point in others if point.perplexity <= MOST * base.perplexity]
    return [base, *(near or sorted(others, key=lambda point: point.perplexity)[:1])]


def _label(axes, marks: Sequence[tuple[str, float, float, float, str]], others: Sequence[tuple[float, float]],
           legend) -> None:
    """Write (text, x, y, length of the error bar to one side, color) beside their markers, as near as nothing is
    covered; a thin line leads to a label that is not near.

    The first mark's y is a line over the whole width. others: markers without such a label; legend: the panel's, or
    None.
    """
    figure = axes.get_figure()
    figure.draw_without_rendering()  # which sets the sizes
    scale, frame = figure.dpi / 72, axes.get_window_extent()
    inside = (frame.x0, frame.y0, frame.x1, frame.y1)
    places = [axes.transData.transform((x, y)) for _, x, y, _, _ in marks]
    bars = [axes.transData.transform((x, y + bar))[1] - at for (_, x, y, bar, _), (_, at) in zip(marks, places)]
    taken = [_box(x, y, 9 * scale, max(9 * scale, 2 * bar)) for (x, y), bar in zip(places, bars)]
    taken += [_box(x, y, 9 * scale, 9 * scale) for x, y in map(axes.transData.transform, others)]
    taken += [legend.get_window_extent().extents] if legend else []
    taken.append(_box((frame.x0 + frame.x1) / 2, places[0][1], frame.width, 2 * scale))
    labels: list[Box] = []
    for (text, x, y, _, color), (left, lower) in sorted(zip(marks, places), key=lambda one: (-one[1][1], -one[1][0])):
        probe = axes.annotate(text, (x, y), fontsize=FONT)
        extent = probe.get_window_extent()
        probe.remove()
        width, height = extent.width + 3 * scale, extent.height + scale
        dx, dy = _free(left, lower, width, height, scale, taken, labels, inside)
        labels.append(_box(left + dx, lower + dy, width, height))
        line = None
        if max(abs(dx) - width / 2, abs(dy) - height / 2) > 12 * scale:
            line = dict(arrowstyle="-", linewidth=0.5, color=color, shrinkA=0, shrinkB=3)
            taken += _steps(left, lower, dx, dy)
        side = "center" if abs(dx) < width / 2 else "left" if dx > 0 else "right"  # from its marker it may grow
        start = dx - {"center": 0, "left": width / 2, "right": -width / 2}[side]
        axes.annotate(text, (x, y), xytext=(start / scale, dy / scale), textcoords="offset points", fontsize=FONT,
                      ha=side, va="center", color=color, annotation_clip=False, arrowprops=line)


def _box(x: float, y: float, width: float, height: float) -> Box:
    """The box around a center."""
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _steps(x: float, y: float, dx: float, dy: float) -> list[Box]:
    """Small boxes along the line from a marker to its label's center."""
    return [_box(x + dx * i / 16, y + dy * i / 16, 1, 1) for i in range(1, 16)]


def _free(x: float, y: float, width: float, height: float, scale: float, taken: Sequence[Box], labels: Sequence[Box],
          frame: Box) -> tuple[float, float]:
    """Where a label's center goes, from its marker: the nearest place in the frame that covers the fewest others, and
    whose line to the marker crosses the fewest labels."""
    least, best = None, (0.0, 0.0)
    for gap, (right, up) in itertools.product(GAPS, SIDES):
        dx, dy = right * (gap * scale + width / 2), up * (gap * scale + height / 2)
        box = _box(x + dx, y + dy, width, height)
        if not (frame[0] < box[0] and box[2] < frame[2] and frame[1] < box[1] and box[3] < frame[3]):
            continue
        covered = sum(_overlap(box, other) for other in (*taken, *labels)) + sum(
            _overlap(step, other) for step in _steps(x, y, dx, dy) for other in labels)
        if least is None or covered < least:
            least, best = covered, (dx, dy)
    return best


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def draw_cosine(axes, curves: Mapping[str, Sequence[float]]) -> None:
    """Draw each cache's mean cosine with the 16-bit run by layer; layers are whole numbers, counted from 0."""
    from matplotlib.ticker import MaxNLocator

    colors = palette(curves)
    for label, values in curves.items():
        axes.plot(range(len(values)), values, ".-", label=label, color=colors[label])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="layer", ylabel="cosine with the 16-bit run (mean over tokens)", title="attention output by layer")
    axes.legend(fontsize=FONT)
