"""Plots of the LeanKV paper's figures from lines of perf/results: leankv_figures.py draws them."""

import statistics
from collections.abc import Iterable
from math import log10

from leankv_cases import DECADES, PER_DECADE, PRUNED, cases
from paper_lines import Lines

TEXTS = ("docs", "gpl", "code")
UNIFORM = ("k8v8", "k8v4", "k4v8", "k4v4", "k4v2", "k2v4", "k2v2", "k4v1")
MIRRORED = (("k8v8", "k8v4", "k4v8"), ("k4v4", "k4v2", "k2v4"), ("k2v2", "k4v1", "k1v4"))
MODEL = "SmolLM2-135M-Instruct"
PARTS = (("weights_ms", "weights"), ("attention_ms", "attention"), ("append_ms", "append"), ("manage_ms", "manage"),
         ("other_ms", "other"))
Panel = tuple[str, Iterable[tuple[float, float]]]


# ---- numbers


def mean(values: Iterable[float]) -> float:
    return statistics.mean(values)


def uniform_kl(lines: Lines, label: str) -> float:
    """KL of a uniform format, nats: the mean over the first window of each text."""
    return mean(lines.newest("texts", model=MODEL, label=label, text=text, window=0)["kl"] for text in TEXTS)


def of_case(lines: Lines, label: str, name: str) -> float:
    """A number of a cache's text lines: the mean over the texts."""
    return mean(lines.newest("leankv_figures", model=MODEL, task="text", label=label, text=text)[name]
                for text in TEXTS)


def requests(lines: Lines) -> list[dict]:
    """The attention lines, one of each text and window, newest each."""
    found = lines.all("leankv_figures", model=MODEL, task="attention")
    return list({(line["text"], line["window"]): line for line in found}.values())


def critical_by_layer(lines: Lines, name: str = "critical") -> list[tuple[float, float]]:
    """(mean, standard deviation over requests) of each layer's critical tokens, the mean of its heads."""
    by_request = [[mean(heads) for heads in line[name]] for line in requests(lines)]
    return [(mean(layer), statistics.stdev(layer)) for layer in zip(*by_request)]


def critical_by_head(lines: Lines, layer: int) -> list[tuple[float, float]]:
    """(mean, standard deviation over requests) of each KV head's critical tokens."""
    by_request = [line["critical"][layer] for line in requests(lines)]
    return [(mean(head), statistics.stdev(head)) for head in zip(*by_request)]


def spans(lines: Lines, name: str) -> list[float]:
    """Decades from the 1st to the 99th percentile of scores or norms: of each layer, over all requests."""
    by_layer = zip(*(line[name] for line in requests(lines)))
    return [log10(max(x[3] for x in layer) / min(x[1] for x in layer)) for layer in by_layer]


def extremes(lines: Lines, name: str) -> float:
    """Decades from the least to the largest score or norm of all layers and requests."""
    every = [layer for line in requests(lines) for layer in line[name]]
    return log10(max(x[4] for x in every) / min(x[0] for x in every))


# ---- figures


def figure_of(rows: int, columns: int, title: str):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * columns, 3.3 * rows), layout="constrained")
    figure.suptitle(title, fontsize=9)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for one in axes:
        one.tick_params(labelsize=7)
        one.grid(linewidth=0.3)
    return figure, axes


def name_axes(axes, title: str, x: str, y: str, legend: bool = True, **more) -> None:
    axes.set_title(title, fontsize=8)
    axes.set(**more)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    if legend:
        axes.legend(fontsize=6)


def attention_figure(lines: Lines):
    """Fig. 1 to 3: distributions of scores and norms, critical tokens by layer and by head."""
    found = requests(lines)
    figure, axes = figure_of(2, 2, f"LeanKV, Fig. 1 to 3, on {MODEL}: {len(found)} requests of {found[0]['tokens']} "
                             "tokens, attention in 16 bit")
    at = [10 ** (i / PER_DECADE - DECADES) for i in range((DECADES + 2) * PER_DECADE)]
    for place, name in ((0, "scores"), (1, "norms")):
        for layer in found[0][name]:
            counts = [sum(column) for column in zip(*(line[name][layer] for line in found))]
            axes[place].step(at, [count / sum(counts) for count in counts], where="post", label=f"layer {layer}",
                              linewidth=1)
    name_axes(axes[0], "Fig. 1: mean score of a token over later queries", "probability", "share", xscale="log",
              xlim=(1e-7, 1))
    name_axes(axes[1], "Fig. 1: norm of a token's value", "norm", "share", xscale="log", xlim=(1e-2, 100))
    for name, label in (("critical", "of a text's scores"), ("critical_of_a_query", "of a query's, the last 64")):
        means, errors = zip(*critical_by_layer(lines, name))
        axes[2].errorbar(range(len(means)), means, errors, label=label, linewidth=1, capsize=2)
    name_axes(axes[2], "Fig. 2: tokens that hold 95 %, mean of heads; bars: over requests", "layer", "tokens")
    for i, layer in enumerate(found[0]["scores"]):
        means, errors = zip(*critical_by_head(lines, int(layer)))
        axes[3].bar([j + 0.25 * i for j in range(len(means))], means, 0.25, yerr=errors, label=f"layer {layer}",
                    error_kw={"linewidth": 0.8})
    name_axes(axes[3], "Fig. 3: the same of each KV head", "KV head", "tokens")
    axes[3].set_xticks(range(len(means)))
    return figure


def kl_panel(axes, panels: Iterable[Panel], title: str, x: str, **more) -> None:
    for label, points in panels:
        xs, ys = zip(*sorted(points))
        axes.plot(xs, ys, marker="o", markersize=3, linewidth=1, label=label)
    name_axes(axes, title, x, "KL to 16 bit, nats", yscale="log", **more)


def points(lines: Lines, labels: Iterable[str], x: str, scale: float = 1) -> list[tuple[float, float]]:
    """(a number of its lines, KL) of each case."""
    return [(scale * of_case(lines, label, x), of_case(lines, label, "kl")) for label in labels]


def labels_with(*parts: str) -> list[str]:
    return [label for label in cases() if all(part in label for part in parts)]


def quality_figure(lines: Lines):
    """Fig. 7 to 11: key against value precision, static against dynamic shares, bytes, pruning and 1-bit values."""
    figure, axes = figure_of(2, 3, f"LeanKV, Fig. 7 to 11, on {MODEL}: KL over 3 texts of 1,024 tokens, 32 sinks")
    names = [name for group in MIRRORED for name in group]
    axes[0].bar(names, [uniform_kl(lines, name) for name in names],
                color=["tab:grey", "tab:blue", "tab:orange"] * len(MIRRORED))
    name_axes(axes[0], "Fig. 7: K and V of unequal precision", "blue: more bits to K; orange: to V",
              "KL to 16 bit, nats", legend=False, yscale="log")
    kl_panel(axes[1], [(how, points(lines, labels_with("pruned", how), "pruned", 100))
                       for how in ("static", "dynamic", "random")],
             "Fig. 8: pruning alone (stored in 8 bits)", "tokens pruned, %")
    for how in ("static", "dynamic", "random"):
        found = sorted((100 * line["pruned"], line["right"] / line["questions"]) for line in recalls(lines, how))
        axes[2].plot(*zip(*found), marker="o", markersize=3, linewidth=1, label=how)
    name_axes(axes[2], "Fig. 8: codes found again in pruned prompts", "tokens pruned, %", "recall", ylim=(0, 1))
    uniform = [(bits_of(lines, name), uniform_kl(lines, name)) for name in UNIFORM]
    mixed = [label for label in labels_with() if "9" in cases()[label].figures and "pruned" not in label]
    axes[3].plot(*zip(*uniform), "s", markersize=4, label="one format")
    axes[3].plot(*zip(*points(lines, mixed, "bits", 100 / 16)), "o", markersize=4, label="two levels")
    axes[3].plot(*zip(*points(lines, labels_with("lean", "pruned"), "bits", 100 / 16)), "^", markersize=4,
                 label="lean, pruned")
    for name, (x, y) in zip(UNIFORM, uniform):
        axes[3].annotate(name, (x, y), fontsize=5, xytext=(2, 2), textcoords="offset points")
    name_axes(axes[3], "Fig. 9: bytes of packed tokens and quality", "of 16 bit, %", "KL to 16 bit, nats", yscale="log")
    kl_panel(axes[4], [("stored in 8 bits", points(lines, [f"pruned {n} %, static" for n in PRUNED], "pruned", 100)),
                       ("lean", points(lines, labels_with("lean", "pruned"), "pruned", 100))],
             "Fig. 10: sensitivity to pruning", "tokens pruned, %")
    ends = [(0, uniform_kl(lines, "k4v2")), (100, uniform_kl(lines, "k4v1"))]
    kl_panel(axes[5], [("k4v2 + k4v1", ends + points(lines, labels_with("k4v2+k4v1"), "low", 100))],
             "Fig. 11: sensitivity to 1-bit values", "tokens in k4v1, %")
    return figure


def bits_of(lines: Lines, label: str) -> float:
    """Packed bytes of a uniform format, percent of 16 bit."""
    return lines.newest("texts", model=MODEL, label=label)["bits_per_element"] * 100 / 16


def recalls(lines: Lines, how: str) -> list[dict]:
    """The newest recall line of each case whose label has this word."""
    found = lines.all("leankv_figures", model=MODEL, task="recall")
    return [line for line in {line["label"]: line for line in found}.values() if how in line["label"]]


# ---- figures of lines that a GPU made


SPEED = dict(batch=8, heads=32, kv_heads=8, head_dim=128, arch="hopper", q_len=1, dtype="float16")
PAIRS = ("k8v8", "k8v4", "k4v4", "k4v2")
LENGTHS = (4096, 32768)
RATES = ("16 bit", "k4v4", "lean", "lean-low")
BATCHES = (1, 8, 64)  # of steps at 1K tokens


def steps(lines: Lines, **wanted) -> dict:
    """The newest step of Llama-3.1-8B's shape."""
    return lines.newest("e2e", model="llama-3.1-8b", **wanted)


def gains(lines: Lines, gpu: str, seqlen: int) -> dict[str, tuple[float, float]]:
    """format -> (how many times fewer bytes than 16 bit, how many times faster), batch 8, 32/8 heads."""
    found = {name: lines.newest("leankv_decode", gpu=gpu, format=name, seqlen=seqlen, **SPEED) for name in PAIRS}
    full = 2 * 2 * SPEED["batch"] * seqlen * SPEED["kv_heads"] * SPEED["head_dim"]
    return {name: (full / line["bytes"], line["fp16_us"] / line["us"]) for name, line in found.items()}


def rates(lines: Lines) -> dict[str, dict]:
    """format -> its step at the largest batch of 32K tokens, all of the newest run that had levels."""
    case = dict(seqlen=32768, largest=True)
    commit = steps(lines, format="lean-low", **case)["commit"]
    return {name: steps(lines, format=name, commit=commit, **case) for name in RATES}


def speed_figure(lines: Lines):
    """Fig. 12 to 14: shares of a step, attention beside 16 bit, throughput at the largest batch; of the GPU whose
    steps over levels are the newest."""
    gpu = steps(lines, format="lean", seqlen=1024)["gpu"]
    figure, axes = figure_of(1, 3, f"LeanKV, Fig. 12 to 14: {gpu}, Llama-3.1-8B's shape, random weights")
    shown = [(f"1K, batch {batch}", steps(lines, format="lean", seqlen=1024, batch=batch, largest=False))
             for batch in BATCHES]
    best = rates(lines)
    shown.append((f"32K, batch {best['lean']['batch']}", best["lean"]))
    base = [0.0] * len(shown)
    for name, label in PARTS:
        part = [100 * line[name] / line["step_ms"] for _, line in shown]
        axes[0].bar([case for case, _ in shown], part, 0.6, bottom=base, label=label)
        base = [a + b for a, b in zip(base, part)]
    axes[0].tick_params(axis="x", labelsize=6)
    name_axes(axes[0], "Fig. 12: parts of a decode step over lean", "", "of a step, %")
    for i, seqlen in enumerate(LENGTHS):
        found = gains(lines, gpu, seqlen)
        axes[1].bar([j + 0.4 * i for j in range(len(found))], [gain for _, gain in found.values()], 0.4,
                    label=f"{seqlen >> 10}K tokens")
    axes[1].plot([j + 0.2 for j in range(len(found))], [fewer for fewer, _ in found.values()], "k_", markersize=16,
                 label="fewer bytes")
    axes[1].set_xticks([j + 0.2 for j in range(len(found))], list(found))
    name_axes(axes[1], "Fig. 13: attention, batch 8, over the best in 16 bit", "", "times faster")
    bars = axes[2].bar(list(best), [line["tokens_per_s"] for line in best.values()], 0.6)
    plain = best["16 bit"]["tokens_per_s"]
    axes[2].bar_label(bars, [f"batch {line['batch']}\n{line['tokens_per_s'] / plain:.2f}x" for line in best.values()],
                      fontsize=6)
    name_axes(axes[2], "Fig. 14: largest batch of 32K tokens", "", "tokens/s", legend=False)
    axes[2].margins(y=0.15)
    return figure
