"""Numbers as a text shows them, and the lines of perf/results that they are of."""

import json
import math
import re
from pathlib import Path

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())


def found(name: str, commit: str, **of) -> list[dict]:
    """Lines of perf/results/NAME.jsonl of a commit with these values, the oldest first."""
    lines = map(json.loads, (ROOT / f"perf/results/{name}.jsonl").read_text().splitlines())
    lines = [line for line in lines if line["commit"].startswith(commit)
             and all(line.get(key) == value for key, value in of.items())]
    assert lines, f"{name}.jsonl has no line of {commit} with {of}"
    return lines


def newest(name: str, commit: str, **of) -> dict:
    return found(name, commit, **of)[-1]


def rows_of(text: str, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its head."""
    part = re.split(rf"^#+ {re.escape(heading)}$", text, flags=re.M)[1]
    table = re.search(r"^\|.*?(?=\n[^|])", part, flags=re.M | re.S)[0]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]


def is_rounded(shown: str, value: float) -> bool:
    """Whether a number as it is written is the value to its last digit; lines are rounded themselves, hence 1.01."""
    number = re.sub(r"[ ,%x]|us|K", "", shown)
    digits = len(number.partition("e")[0].partition(".")[2]) - int(number.partition("e")[2] or 0)
    return math.isclose(float(number), value, abs_tol=0.5 * 10**-digits * 1.01, rel_tol=0)


def in_text(text: str, words: str) -> bool:
    return words in " ".join(text.split())


def numbers(text: str, words: str) -> tuple[str, ...]:
    """The numbers that stand for the # of these words in a text."""
    found = re.search(re.escape(words).replace(r"\#", r"(\d[\d.,]*(?:e-\d+)?)"), " ".join(text.split()))
    assert found, words
    return found.groups()
