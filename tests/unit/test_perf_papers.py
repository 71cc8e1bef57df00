"""docs/papers.md is what perf/papers.py makes of the lines of perf/results."""

import re
from pathlib import Path

import pytest
from perf_scripts import script

ROOT = Path(__file__).parents[2]
SHOWN = re.findall(r"<!-- paper: begin \(python perf/papers.py ([\w-]+)\) -->\n(.*?)\n<!-- paper: end -->",
                   (ROOT / "docs/papers.md").read_text(), re.S)


@pytest.fixture(scope="module")
def papers():
    with script("papers") as module:
        yield module


def test_all_papers_are_shown(papers):
    assert [name for name, _ in SHOWN] == list(papers.PAPERS)


@pytest.mark.parametrize("name, shown", SHOWN, ids=[name for name, _ in SHOWN])
def test_tables_are_the_lines(papers, name, shown):
    assert shown == papers.table_of(name), f"run python perf/papers.py {name} and put its output into docs/papers.md"


def test_lines_are_the_newest_of_a_clean_tree(papers, tmp_path, monkeypatch):
    folder = tmp_path / "perf/results"
    folder.mkdir(parents=True)
    common = '"date": "2026-01-02T03", "gpu": "none", "label": "a"'
    (folder / "some.jsonl").write_text("".join(f'{{"commit": "{name}", {common}, "us": {us}}}\n' for name, us in
                                               (("old", 1), ("new", 2), ("new", 3), ("newer+dirty", 4))))
    monkeypatch.setitem(papers.Lines.newest.__globals__, "ROOT", tmp_path)
    lines = papers.Lines()
    assert [line["us"] for line in lines.all("some", label="a")] == [2, 3]
    assert lines.newest("some", label="a")["us"] == 3 and lines.newest("some", commit="old")["us"] == 1
    assert list(lines.sources()) == ["new (2026-01-02, CPU)", "old (2026-01-02, CPU)"]
    with pytest.raises(KeyError, match="no line with .*label.*b"):
        lines.newest("some", label="b")
