"""perf/text_recall.py: its caches are asked, and lines become the table of docs/quality.md."""

import json
import re

import pytest
from perf_scripts import PERF, script

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def recalls():
    with script("text_recall") as module:
        yield module


def test_every_case_makes_a_cache(recalls):
    from lowbit_attn.quality import is_simulated, new_cache

    made = recalls.cases()
    assert list(made)[0] == "16 bit" and all(new_cache(options) is not None for options in made.values())
    simulated = [options for options in made.values() if is_simulated(options)]
    assert [options.get("sinks", 0) for options in simulated] == [0, 32]


@pytest.mark.parametrize("label", ["16 bit", "k4v4", "KIVI, groups of 32 (simulator)"])
def test_a_cache_is_asked(recalls, label, tmp_path):
    from tiny_models import save_with_letters

    from lowbit_attn.demo import model as models

    network, tokenizer = models.load_folder(save_with_letters(tmp_path), "cpu")
    line = recalls.asked(network, tokenizer, recalls.cases()[label], 2)
    assert line["questions"] == 2 and 0 <= line["right"] <= 2 and line["tokens"] > 1000
    assert line["bits_per_element"] == {"16 bit": 16.0, "k4v4": 4.375}.get(label, 3.0)


def test_lines_become_a_table(recalls):
    def line(model: str, label: str, right: int, commit: str = "a") -> dict:
        return dict(model=model, label=label, right=right, questions=80, commit=commit)

    lines = [line("M", "16 bit", 10), line("M", "16 bit", 40), line("M", "k4v4", 80), line("N", "16 bit", 60),
             line("N", "k4v4", 1, "b+dirty")]
    rows = recalls.table_of(lines).splitlines()
    assert rows == ["| cache | M | N |", "|---|---|---|",
                    "| 16 bit | 0.50 ± 0.06 (40 of 80) | 0.75 ± 0.05 (60 of 80) |",
                    "| k4v4 | 1.00 ± 0.00 (80 of 80) | - |"]


def test_the_docs_have_the_newest_lines(recalls):
    text = (PERF.parent / "docs/quality.md").read_text()
    shown = re.search(r"<!-- codes: begin .*?-->\n(.*?)\n<!-- codes: end -->", text, re.DOTALL)[1]
    lines = [json.loads(line) for line in (PERF.parent / recalls.RESULTS).read_text().splitlines()]
    assert shown == recalls.table_of(lines), "run python perf/text_recall.py table and put its table there"
