"""docs/deviations.md: a row for every section of both papers that says how something is built."""

import re
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
TEXT = (ROOT / "docs/deviations.md").read_text()
SECTIONS = {"BitDecoding": ("4.1.1", "4.1.2", "4.1.3", "4.1.4", "4.2", "4.3", "5", "Algorithm 2", "Algorithm 3"),
            "Kitty": ("3.2", "3.3", "4.1", "4.2", "4.3", "Algorithm 1", "5")}


def rows_of(paper: str) -> list[list[str]]:
    """Cells of the paper's table, without its header; "\\|" is a bar within a cell."""
    part = TEXT.split(f"## {paper}\n")[1].split("\n## ")[0]
    rows = [row for row in part.splitlines() if row.startswith("|")][2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


@pytest.mark.parametrize("paper", SECTIONS)
def test_every_section_has_a_row_and_a_reason(paper):
    rows = rows_of(paper)
    assert all(len(row) == 4 and all(row) for row in rows), [row for row in rows if len(row) != 4 or not all(row)]
    named = " ".join(row[0] for row in rows)
    for section in SECTIONS[paper]:
        assert re.search(rf"(?<![\d.]){re.escape(section)}(?!\.?\d)", named), section
    for section, wanted, here, why in rows:
        assert why != "-" or here.startswith(("followed", "none for codes")), f"{section}: {wanted}"
    assert sum("followed" in here for _, _, here, _ in rows) >= 3
