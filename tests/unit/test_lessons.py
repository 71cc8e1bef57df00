"""docs/lessons.md: every row is whole, every commit is one, every file that it names is there."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
LESSONS = ROOT / "docs/lessons.md"
TEXT = LESSONS.read_text()
RAW = ROOT / "perf/results/raw"
COMMIT = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7,12}\b")
ROW = re.compile(r"^\|(.*)\|$", re.M)
COLUMNS = ("date", "idea", "predicted", "measured", "kept")
BY_DATE = ("Memory", "Schedule", "Arithmetic", "Start and end of a call", "Quantizers and quality",
           "Host, append and whole models", "Tooling and measuring")
LAST = "1681f37"  # the last commit that has the diary and the diffs


def tables(text: str) -> dict[str, list[list[str]]]:
    """heading -> rows of the table below it as cells, the header first and without the line under it."""
    found = {}
    for part in re.split(r"^## ", text, flags=re.M)[1:]:
        heading, _, body = part.partition("\n")
        rows = [[cell.strip() for cell in row.split("|")] for row in ROW.findall(body)]
        found[heading] = rows[:1] + rows[2:]
    return found


TABLES = tables(TEXT)


def test_every_row_is_whole():
    assert sum(map(len, TABLES.values())) > 200
    for heading, rows in TABLES.items():
        for row in rows:
            assert len(row) == len(rows[0]) and all(row), f"{heading}: {' | '.join(row)[:80]}"
    for heading in BY_DATE:
        assert tuple(TABLES[heading][0]) == COLUMNS
        assert all(re.fullmatch(r"1[12]-\d\d|-", row[0]) for row in TABLES[heading][1:]), heading
    assert tables("# A\n\n## B c\n\n| x | y |\n|---|---|\n| 1 | 2 |\n") == {"B c": [["x", "y"], ["1", "2"]]}


def test_the_index_names_every_group():
    named = re.findall(r"\[([^\]]+)\]\(#", "".join(f"|{'|'.join(row)}|\n" for row in TABLES["Index"]))
    assert named == [line[3:] for line in TEXT.splitlines() if line.startswith("## ")][2:]


def test_failures_are_kept():
    """What was measured and not kept stays: as many rows as say so, and each of the diffs by name."""
    outcomes = [row[-1] for heading in BY_DATE for row in TABLES[heading][1:]]
    assert sum(outcome.startswith("no") for outcome in outcomes) >= 60 and all(outcomes)


def git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def history() -> set[str]:
    """Whole ids of all commits; skips where the tree came without them."""
    if not (ROOT / ".git").exists() or git("rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("needs the repository's whole history")
    return set(git("rev-list", "HEAD").split())


def test_commits_are_of_this_history(history):
    quoted = set(COMMIT.findall(TEXT))
    assert len(quoted) > 60
    unknown = sorted(short for short in quoted if not any(commit.startswith(short) for commit in history))
    assert not unknown, f"{unknown} are in docs/lessons.md and no commits"


def test_every_diff_has_a_row(history):
    names = [Path(name).stem for name in git("ls-tree", "--name-only", LAST, "perf/remedies/").split()]
    assert len(names) == 22 and LAST in TEXT
    missing = [name for name in names if not re.search(rf"\b{name}\b", TEXT)]
    assert not missing


def test_raw_files_are_those_that_a_page_cites():
    """Files of perf/results/raw: a name in a page leads to one, and each is named in one."""
    pages = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
    cited = {name for page in pages for name in re.findall(r"raw/([\w.-]+\.(?:txt|jsonl|log))", page.read_text())}
    there = {file.name for file in RAW.iterdir()}
    assert cited == there and len(there) > 20, f"cited and gone: {cited - there}; not cited: {there - cited}"


def test_nothing_else_names_the_diary():
    """Its rows are here; a pointer to the file leads nowhere."""
    folders = [ROOT / name for name in ("src", "hopper", "ampere", "perf", "examples", "docs")]
    files = [file for folder in folders for kind in ("*.py", "*.md") for file in folder.rglob(kind)]
    files += [file for file in ROOT.glob("*.md")]
    assert len(files) > 150
    assert [file.name for file in files if "NOTES.md" in file.read_text() or "remedies/" in file.read_text()] == [
        LESSONS.name]
