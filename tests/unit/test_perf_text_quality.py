"""perf/text_quality.py: its cases make caches, windows are cut whole, and lines become the table of docs/quality.md."""

import json
import math
import re

import pytest
from perf_scripts import PERF, script

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def texts():
    with script("text_quality") as module:
        yield module


def test_every_case_makes_a_cache(texts):
    from lowbit_attn.quality import new_cache

    made = texts.cases()
    assert list(made)[0] == "16 bit" and all(new_cache(options) is not None for options in made.values())
    assert {options["sinks"] for options in made.values() if options} == {0, 32}
    assert {"k8v8", "k2v4", "k4v2", "k1v1", "kitty-variance", "kitty-weighted"} <= made.keys()


def test_layers_that_slide_are_packed_too(texts):
    from types import SimpleNamespace

    plain, sliding = (SimpleNamespace(config=SimpleNamespace(layer_types=kinds)) for kinds in (
        None, ["sliding_attention", "full_attention"]))
    options = dict(format="k4v4", sinks=32)
    assert texts.all_layers(options, plain) == options and texts.all_layers(None, sliding) is None
    assert texts.all_layers(options, sliding) == options | {"sliding": "lowbit"}


def test_windows_begin_as_a_text_does(texts):
    assert texts.windows(list(range(10)), None, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert texts.windows([9, *range(8)], 9, 4) == [[9, 0, 1, 2], [9, 3, 4, 5]]
    with pytest.raises(ValueError, match="got 7 tokens, supported: 8 or more"):
        texts.windows(list(range(7)), None, 4)
    assert all(len(texts.text_of(name)) > 30_000 for name in texts.TEXTS)


def line(label: str, text: str, window: int, **found) -> dict:
    return dict(model="M", label=label, text=text, window=window, commit="a", perplexity=10.0, spread=0.3, kl=0.01,
                kl_error=0.003, top1=0.9, top1_error=0.04, bits_per_element=4.375, cache_bytes=5 << 20) | found


def test_windows_are_pooled(texts):
    lines = [line("k4v4", "docs", 0, perplexity=4.0, spread=0.3), line("k4v4", "docs", 1, perplexity=9.0, spread=0.9)]
    whole, error = texts.pooled_perplexity(lines)
    assert whole == pytest.approx(6) and error == pytest.approx(6 * math.hypot(0.3 / 4, 0.1) / 2)
    assert texts.pooled(lines, "kl") == pytest.approx((0.01, 0.003 / math.sqrt(2)))


def test_lines_become_a_table(texts, tmp_path):
    path = tmp_path / "lines.jsonl"
    lines = [line(label, text, window, cache_bytes=size << 20) for label, size in (("16 bit", 16), ("k4v4", 5))
             for text in texts.TEXTS for window in range(2)]
    lines += [line("k2v2", "docs", 0), line("k4v4", "docs", 0, commit="b+dirty", perplexity=99.0)]
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    rows = texts.table_of(texts.newest("M", str(path))).splitlines()
    assert len(rows) == 4 and rows[2].startswith("| 16 bit | 4.38 | 16.00 |")
    assert rows[3] == ("| k4v4 | 4.38 | 5.00 | 10.00 ± 0.21 | 10.00 ± 0.21 | 10.00 ± 0.21 | 10.00 ± 1.22 "
                       "| 90.0 ± 1.6 % |")
    assert texts.pairs_of(texts.newest("M", str(path))).count("\n") == 1, "no pair is there"
    assert texts.newest("N", str(path)) == {} == texts.newest("M", str(tmp_path / "none"))


def test_pairs_are_compared_window_by_window(texts):
    kl = {"k4v2": [0.01, 0.02, 0.03], "k2v4": [0.011, 0.023, 0.035]}
    kl["16 bit"] = [0.0, 0.0, 0.0]
    found = {(label, text): [line(label, text, w, kl=values[i]) for w in range(2)]
             for label, values in kl.items() for i, text in enumerate(texts.TEXTS)}
    rows = texts.pairs_of(found).splitlines()
    assert rows[2:] == ["| k4v2 | k2v4 | -3.00 ± 0.73 | 6 of 6 |"]


def test_a_model_may_have_read_less(texts, tmp_path):
    """One window of one text has a table of its own; caches that have read other windows are not in it."""
    path = tmp_path / "lines.jsonl"
    lines = [line("16 bit", "code", 0, cache_bytes=16 << 20), line("k4v4", "code", 0), line("k2v2", "docs", 0),
             line("k4v2", "code", 0), line("k4v2", "code", 1), line("k2v4", "code", 0)]
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    found = texts.newest("M", str(path))
    rows = texts.table_of(found).splitlines()
    assert rows[0] == "| cache | bits: packed | bits: whole | perplexity, code | KL, 1e-3 nats | top-1 |"
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| 16 bit", "| k4v4", "| k2v4"]
    assert texts.pairs_of(found).count("\n") == 1, "one window has no standard error"


def test_the_docs_have_the_newest_lines(texts):
    text = (PERF.parent / "docs/quality.md").read_text()
    shown_of = {"texts": (texts.table_of, texts.SMOLLM2), "pairs": (texts.pairs_of, texts.SMOLLM2),
                "gemma": (texts.table_of, "gemma-3-270m"), "qwen": (texts.table_of, "qwen2.5-coder-1.5b")}
    for name, (made, model) in shown_of.items():
        shown = re.search(rf"<!-- {name}: begin .*?-->\n(.*?)\n<!-- {name}: end -->", text, re.DOTALL)[1]
        assert shown == made(texts.newest(model)), f"put the table of perf/text_quality.py table --model {model} there"
