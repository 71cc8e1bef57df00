"""demo/figures.py: panels that read at a glance, and the plots that are made of them."""

import re
from types import SimpleNamespace

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure  # noqa: E402
from matplotlib.text import Text  # noqa: E402

import lowbit_attn  # noqa: E402
from lowbit_attn.demo import figures, report  # noqa: E402

POINTS = [figures.Point("16 bit", 16.0, 12.0, 0.0), figures.Point("k4v4", 4.4, 12.1, 0.05),
          figures.Point("k2v2", 2.4, 20.0, 1.5), figures.Point("k2tv2", 2.4, 300.0, 90.0)]


def panel():
    return Figure().subplots()


def test_perplexity_is_linear_with_its_spread_against_bits():
    axes = panel()
    figures.draw_perplexity(axes, POINTS)
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "linear")
    assert {text.get_text() for text in axes.texts} == {"16 bit: 12.00", "k4v4: 12.10 ± 0.05"}
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["k2v2: 20.00 ± 1.50", "k2tv2: 300.00 ± 90.00"]
    bars = {bar.get_label(): bar for bar in axes.containers}
    (whisker,), (line,) = bars["k4v4: 12.10 ± 0.05"][2], [bars["k4v4: 12.10 ± 0.05"][0]]
    assert [y for _, y in whisker.get_segments()[0]] == pytest.approx([12.05, 12.15])
    assert list(line.get_xdata()) == [4.4]
    low, high = axes.get_ylim()
    assert 11.9 < low < 12 and 12.15 < high < 12.2, "the spread is inside, what is far above does not set the range"
    above = next(line for line in axes.get_lines() if str(line.get_label()).startswith("k2tv2"))
    assert list(above.get_ydata()) == [high] and "bits per element" in axes.get_xlabel()


def test_the_best_cache_is_in_the_range_where_all_are_far():
    axes = panel()
    figures.draw_perplexity(axes, [POINTS[0], *POINTS[2:]])
    assert 21.5 < axes.get_ylim()[1] < 24 and [text.get_text() for text in axes.get_legend().get_texts()] == [
        "k2tv2: 300.00 ± 90.00"]


def test_one_cache_alone_is_drawn():
    axes = panel()
    figures.draw_perplexity(axes, [figures.Point("16 bit", 16.0, 12.0)], {"16 bit": "red"})
    assert axes.containers[0][0].get_color() == "red" and axes.get_ylabel() == "perplexity"
    low, high = axes.get_ylim()
    assert low < 12 < high and [text.get_text() for text in axes.texts] == ["16 bit: 12.00"]


DEMO_POINTS = [figures.Point("16 bit", 16.0, 11.91, 0.0)] + [figures.Point(name, bits, value, spread) for (
    name, bits, value, spread) in (
    ("k4v4", 4.38, 12.06, 0.03), ("k4v2, 32 sinks", 4.16, 12.06, 0.04), ("k2v2, no search", 2.38, 21.51, 0.9),
    ("k2v2, no search, 32 sinks", 3.23, 15.55, 0.36), ("k2v2, 32 sinks", 3.23, 12.62, 0.1),
    ("kitty, search", 3.94, 12.24, 0.06), ("cq2, 32 sinks", 3.1, 12.3, 0.08), ("lean, 32 sinks", 5.0, 12.0, 0.03),
    ("k4v2-boost, 32 sinks", 4.4, 12.02, 0.03), ("lean-low, 32 sinks", 4.2, 12.15, 0.05), ("k2tv2", 2.4, 300.0, 50.0))]


def test_labels_stand_at_their_points_and_cover_nothing():
    """Those of the demo's rows: inside the panel, no two over each other, none over a marker, each near its own."""
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    figures.draw_perplexity(axes, DEMO_POINTS)
    figure.draw_without_rendering()
    boxes = {text.get_text(): Text.get_window_extent(text) for text in axes.texts}  # without the line to the marker
    marks = {figures.name_of(point): axes.transData.transform((point.bits, point.perplexity)) for point in DEMO_POINTS}
    assert len(boxes) == len(DEMO_POINTS) - 3 and set(boxes) <= set(marks)
    for name, box in boxes.items():
        assert axes.get_window_extent().contains(box.x0, box.y0) and axes.get_window_extent().contains(box.x1, box.y1)
        assert not any(box.overlaps(other) for label, other in boxes.items() if label != name), name
        assert not any(box.contains(*marks[other]) for other in boxes), name
        x, y = marks[name]
        assert max(box.x0 - x, x - box.x1, box.y0 - y, y - box.y1) < 60, f"{name} is far from its point"
        assert not box.overlaps(axes.get_legend().get_window_extent())


def test_no_color_is_used_twice():
    axes, other = panel(), panel()
    figures.draw_perplexity(axes, DEMO_POINTS)
    colors = [text.get_color() for text in axes.texts] + [
        line.get_color() for line in axes.get_lines() if str(line.get_label()).startswith(("k2v2, no", "k2tv2"))]
    assert len(set(colors)) == len(DEMO_POINTS)
    figures.draw_cosine(other, {str(i): [1.0, 0.9] for i in range(14)})
    assert len({line.get_color() for line in other.get_lines()}) == 14
    assert len(set(figures.palette(map(str, range(60))).values())) == 60


@pytest.mark.parametrize("layers", (2, 5, 30))
def test_ticks_of_layers_are_whole_numbers(layers):
    axes = panel()
    figures.draw_cosine(axes, {"k4v4": [1 - 0.01 * i for i in range(layers)]})
    assert all(tick == int(tick) for tick in axes.get_xticks()) and axes.get_xlabel() == "layer"


def test_bits_count_all_bytes():
    assert figures.bits_all_in(9_515_520, 47_185_920) == pytest.approx(3.227, abs=1e-3)
    assert figures.bits_all_in(100, 100) == 16


def titles(figure) -> str:
    return " | ".join([figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)])


@pytest.fixture
def saved(monkeypatch):
    """The figures that are saved, instead of files."""
    found = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **rest: found.append(self))
    return found


def test_plot_of_the_demo_says_what_and_where(saved, tmp_path):
    rows = [report.Row("16 bit", None, 0, None, 16.0, 1600, 11.9, 1.0, 300.4, "sdpa", 0.0),
            report.Row("k4v4", "k4v4", 0, None, 4.375, 500, 12.1, 0.95, 255.0, "reference in torch", 0.1)]
    report.save_plot(tmp_path / "p.png", rows, 2048)
    axes, = saved[0].axes
    assert f"2,048 tokens of Python's help text; lowbit_attn {lowbit_attn.__version__}, CPU" in titles(saved[0])
    assert [bar[0].get_xdata()[0] for bar in axes.containers] == [16, 5]


def test_plot_of_quality_says_what_and_where(saved, tmp_path):
    from lowbit_attn.cli import model

    scores = {label: SimpleNamespace(cache_bytes=size, perplexity=12.0 + spread, spread=spread, cosine=(1.0, 0.9, 0.8))
              for label, size, spread in (("16 bit", 1600, 0.0), ("k2v2", 300, 0.5))}
    model.save_plot(tmp_path / "p.png", scores, "a model, 300 tokens; lowbit_attn 0, CPU")
    left, right = saved[0].axes
    assert "a model, 300 tokens; lowbit_attn 0, CPU" in titles(saved[0])
    assert [bar[0].get_xdata()[0] for bar in left.containers] == [16, 3]
    assert re.search("layer", right.get_xlabel()) and len(right.get_lines()) == 2


def test_machine_is_named(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of {device}")
    assert figures.where("cpu").endswith(", CPU") and figures.where("cuda").endswith(", GPU of cuda")


def test_rows_of_the_demo_have_their_spread():
    """Rows of a tiny model: the spread is quality's own, of the same caches read in lockstep."""
    import io

    import torch
    from rich.console import Console
    from transformers import LlamaConfig, LlamaForCausalLM

    from lowbit_attn import quality
    from lowbit_attn.demo import __main__ as demo
    from lowbit_attn.demo import scoring

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64, vocab_size=50, max_position_embeddings=512, initializer_range=0.1)).eval()
    ids = torch.randint(3, 50, (1, 300))
    cases = [scoring.Case("16 bit"), scoring.Case("k2v2", "k2v2", range_search=False)]
    rows = demo._score_all(Console(file=io.StringIO()), scoring, quality, model, ids, cases)
    want = quality.evaluate(model, ids, dict(format="k2v2", sinks=0, range_search=False))
    assert rows[0].spread == 0 and rows[1].spread == pytest.approx(want.spread, rel=1e-3) and want.spread > 0
    assert rows[1].perplexity == pytest.approx(want.perplexity, rel=1e-5)
