"""perf/tasks.py: a tiny model is scored through lm-eval, and lines become the table of docs/quality.md."""

import json
import re

import pytest
from perf_scripts import PERF, script

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tasks():
    with script("tasks") as module:
        yield module


def test_a_model_is_scored(tasks, tmp_path):
    pytest.importorskip("lm_eval")
    from tiny_models import save_with_letters

    from lowbit_attn.demo.model import load_folder

    network, tokenizer = load_folder(save_with_letters(tmp_path, " abcdefghijklmnopqrstuvwxyz:0123456789"), "cpu")
    line = tasks.scored(network, tokenizer, dict(format="k2v2", sinks=0), 2)
    assert line["questions"] == 2 and line["exact_match"] == 0 == line["stderr"] and line["packed"] == 1
    assert tasks.scored(network, tokenizer, None, 2)["packed"] == 0


def test_lines_become_a_table(tasks, tmp_path, capsys):
    line = dict(commit="a", questions=100, exact_match=0.5, stderr=0.05, packed=1.0)
    lines = [line | dict(label="k2v2", exact_match=0.9), line | dict(label="k2v2"),
             line | dict(label="16 bit", packed=0.0),
             line | dict(label="k4v4", questions=10), line | dict(label="k4v2", commit="b+dirty")]
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    tasks.table(str(path))
    out = capsys.readouterr().out.splitlines()
    assert out[2:5] == ["| 16 bit | 0.50 ± 0.05 | 100 | 0% |", "| k2v2 | 0.50 ± 0.05 | 100 | 100% |", ""]


def test_the_docs_have_the_newest_lines(tasks):
    text = (PERF.parent / "docs/quality.md").read_text()
    shown = re.search(r"<!-- recall: begin .*?-->\n(.*?)\n<!-- recall: end -->", text, re.DOTALL)[1]
    lines = [json.loads(line) for line in (PERF.parent / tasks.RESULTS).read_text().splitlines()]
    assert shown == tasks.table_of(lines), "run python perf/tasks.py table and put its table into docs/quality.md"
