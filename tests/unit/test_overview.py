"""README's picture is drawn from the lines of its two tables, by a command, and is small."""

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
PICTURE = ROOT / "perf/results/plots/overview.png"

sys.path.append(str(ROOT / "perf"))
import overview  # noqa: E402
import targets_table  # noqa: E402
import typer  # noqa: E402

from lowbit_attn import bench  # noqa: E402

README = (ROOT / "README.md").read_text()
TABLE = re.search(r"targets_table.py --gpu (\w+) --commit (\w+) --kitty (\w+)", README).groups()


@pytest.fixture(scope="module")
def panels():
    return overview.overview_figure(targets_table.lines_at(*TABLE), overview.newest("table")).axes


def test_calls_are_those_of_the_table(panels):
    row = next(line for line in README.splitlines() if line.startswith("| GQA 32/8, batch 8, 32K |"))
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    bars = [bar.get_width() for bar in panels[0].containers[0]]
    assert sorted(f"{us:.1f}" for us in bars) == sorted(cell.split(" us")[0] for cell in cells)
    assert bars == sorted(bars, reverse=True) and len(bars) == 5
    reads = [line.get_xdata() for line in panels[0].get_lines() if "read" in str(line.get_label())]
    assert [len(read) for read in reads] == [4] and all(read < us for read, us in zip(reads[0], bars[1:]))


def test_perplexities_are_those_of_the_table(panels):
    labels = [text.get_text() for text in panels[1].texts]
    assert {label.split(":")[0] for label in labels} == set(overview.CACHES) and len(labels) == len(overview.CACHES)
    for label in labels:
        assert re.search(rf"\| [^|]*{label.split(': ')[1].split(' ')[0]}[^|]* \|", README), label


def test_titles_say_what_where_and_which_commit(panels):
    left, right = (axes.get_title() for axes in panels)
    assert "NVIDIA H200" in left and all(commit in left for commit in TABLE[1:])
    assert re.search(r"CPU, \d{4}-\d\d-\d\d, commit [0-9a-f]{12}", right)
    assert "(us)" in panels[0].get_xlabel() and "bits per element" in panels[1].get_xlabel()


def test_command_draws_a_small_picture(tmp_path):
    overview.main(*TABLE, output=str(tmp_path / "p.png"))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert PICTURE.stat().st_size < 80_000 and f"({PICTURE.relative_to(ROOT)})" in README
    assert overview.main.__defaults__[:3] == TABLE, "python perf/overview.py draws README's commits"
    with pytest.raises(typer.BadParameter, match="has not all cases"):
        overview.main("h200", "0" * 12, TABLE[2])


def test_read_is_the_fastest_one():
    assert bench.fastest_reads(targets_table.lines_at(*TABLE))[1] == "read"
