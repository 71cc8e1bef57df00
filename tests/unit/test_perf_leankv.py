"""perf/leankv.py: its cases make caches, chance replaces scores, and lines become a table."""

import json
import re

import pytest
import torch
from perf_scripts import PERF, script

pytest.importorskip("transformers")

from lowbit_attn.cache import significance  # noqa: E402
from lowbit_attn.levels import level_cache  # noqa: E402


@pytest.fixture(scope="module")
def leankv():
    with script("leankv") as module:
        yield module


def test_every_case_makes_a_cache(leankv):
    from lowbit_attn.quality import new_cache

    made = leankv.cases()
    assert list(made)[0] == "16 bit" and all(new_cache(options) is not None for options in made.values())
    assert made["lean, 20 % pruned"]["policy"].counts(1000) == (200, 800)
    assert list(leankv.chosen(["lean"])) == ["lean"]


def test_chance_replaces_means_and_ends(leankv):
    score, seen = torch.ones(2, 5), torch.ones(5, dtype=torch.int32)
    with leankv.by_chance(True):
        first = significance.means(score, seen)
        assert level_cache.means is significance.means and len(first.unique()) == 10
    with leankv.by_chance(False):
        assert (significance.means(score, seen) == 1).all() and level_cache.means is significance.means


def test_lines_become_a_table(leankv, tmp_path, capsys):
    path = tmp_path / "lines.jsonl"
    options, found = dict(format="lean", sinks=32), {"perplexity": 11.9, "cache_bytes": 16_300_000}
    lines = [leankv.line_of("text", "lean", options, found | {"perplexity": 12.0}),
             leankv.line_of("text", "lean", options, found),
             leankv.line_of("recall", "lean", options, {"right": 40, "questions": 80}),
             leankv.line_of("recall", "16 bit", None, {"right": 67, "questions": 80})]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    leankv.show(str(path))
    out = capsys.readouterr().out
    assert "| lean | 4.00 | 16.3 MB | 11.900 | 40 / 80 |" in out and "| 16 bit | 16.00 | - | - | 67 / 80 |" in out


def test_the_docs_have_the_newest_lines(leankv):
    text = (PERF.parent / "docs/leankv.md").read_text()
    shown = re.search(r"<!-- quality: begin .*?-->\n(.*?)\n<!-- quality: end -->", text, re.DOTALL)[1]
    lines = [json.loads(line) for line in (PERF.parent / leankv.RESULTS).read_text().splitlines()]
    assert shown == leankv.table_of(lines), "run python perf/leankv.py show and put its table into docs/leankv.md"
