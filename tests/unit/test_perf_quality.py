"""perf/quality.py: its cases exist, and its plots show the numbers of a results file."""

import json

import pytest
from perf_scripts import script

from lowbit_attn import FORMATS


@pytest.fixture(scope="module")
def quality():
    with script("quality") as module:
        yield module


def test_every_case_makes_a_cache(quality):
    pytest.importorskip("transformers")
    from lowbit_attn.quality import new_cache

    for cases in (preset() for preset in quality.PRESETS.values()):
        assert list(cases)[0] == "16 bit" and cases["16 bit"] is None
        assert all(new_cache(options) is not None for options in cases.values())


def test_boost_rates_are_shares_of_the_channels(quality):
    cases = quality.boost_cases()
    assert len(cases) == 1 + 2 * (2 + 4 * 4)  # no rate of 0 or 100 % more than once
    for selection in quality.SELECTIONS:
        for is_search in (False, True):
            labels = quality.boost_labels(selection, is_search)
            made = [FORMATS[cases[label]["format"]] for label in labels]
            assert [fmt.k.boost(64) / 64 for fmt in made] == [rate / 100 for rate in quality.RATES]
            assert {fmt.k.selection for fmt in made[1:-1]} == {selection} and {fmt.sinks for fmt in made} == {32}
            assert {cases[label].get("range_search") for label in labels} == {None if is_search else False}


def test_no_boost_plot_without_a_whole_curve(quality, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    line = dict(preset="boost", model="M", tokens=2048, perplexity=11.0, commit="new")
    results = tmp_path / "quality.jsonl"
    results.write_text("".join(json.dumps(line | dict(label=label)) + "\n" for label in ("16 bit", "kitty-b8-random")))
    quality.plot(str(results), str(tmp_path / "plots"))
    assert not (tmp_path / "plots").exists() and "run --preset boost" in capsys.readouterr().out


def test_plots_show_the_newest_complete_numbers(quality, tmp_path):
    pytest.importorskip("matplotlib")
    common = dict(model="M", tokens=2048, bits_per_element=2.5, commit="new", gpu="none", date="2026-11-22T00:00:00")
    lines = [common | dict(preset="boost", label=quality.boosted(12.5, "magnitude"), perplexity=3.0, commit="old"),
             common | dict(preset="boost", label="kitty-b8-variance", perplexity=3.0, commit="old")]
    lines += [common | dict(preset="boost", label="16 bit", perplexity=11.0)]
    for i, label in enumerate(quality.boost_labels("magnitude", False)):
        lines.append(common | dict(preset="boost", label=label, perplexity=20.0))
        lines.append(common | dict(preset="boost", label=label, perplexity=15.0 - i))  # newer
    lines.append(common | dict(preset="boost", label="kitty-b8-random", perplexity=30.0))  # a curve of one point
    lines.append(common | dict(preset="boost", label="kitty-b8", tokens=300, perplexity=99.0))  # of fewer tokens
    for label, options, size, spread in (("16 bit", None, 1600, {}), ("a", {}, 300, {}),
                                         ("b", {"format": "b"}, 400, {"spread": 0.5})):
        lines.append(common | spread | dict(preset="table", label=label, options=options, perplexity=12.0,
                                            cache_bytes=size))
    lines += [line | dict(perplexity=1.0, commit="newer+dirty") for line in lines]
    results = tmp_path / "quality.jsonl"
    results.write_text("\n".join(map(json.dumps, lines)) + "\n")
    axes, = quality.boost_figure(quality.newest("boost", str(results))).axes
    curve, baseline = axes.get_lines()
    assert curve.get_label() == "magnitude" and list(curve.get_ydata()) == [15, 14, 13, 12, 11, 10]
    assert list(curve.get_xdata()) == list(quality.RATES) and set(baseline.get_ydata()) == {11}
    axes, = (figure := quality.table_figure(quality.newest("table", str(results)))).axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a, 3.00 bits", "b, 4.00 bits"]
    bars = axes.containers[0][2][0].get_segments()
    assert [[x for x, _ in bar] for bar in bars] == [[12, 12], [11.5, 12.5]] and axes.get_xscale() == "linear"
    assert "M, 2,048 tokens of help texts; CPU, 2026-11-22, commit new" in figure.get_suptitle()
    quality.plot(str(results), str(tmp_path))
    for name in ("boost-rate", "quality"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()
