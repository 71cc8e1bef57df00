"""perf/results: lines of a size that a person can compare, and the scripts that write them."""

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
RESULTS = ROOT / "perf/results"
LONGEST, MOST_NAMES = 5_500, 4  # characters of a line (histograms, counts of 30 layers), strings in a list

sys.path.append(str(ROOT / "perf"))
import gpu_tests  # noqa: E402
import provenance  # noqa: E402
import sanitize  # noqa: E402


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.jsonl")), ids=lambda file: file.stem)
def test_a_line_is_short_and_says_where_it_is_from(file):
    lines = file.read_text().splitlines()
    assert lines and max(map(len, lines)) <= LONGEST
    for line in map(json.loads, lines):
        assert {"commit", "date", "gpu"} <= line.keys()
        assert not [name for name, value in line.items() if isinstance(value, list) and len(value) > MOST_NAMES
                    and isinstance(value[0], str)], "a list of names: leave their count and digest"


def test_digest_is_of_the_sorted_names():
    want = hashlib.sha256(b"a\nb\n").hexdigest()[:16]
    assert provenance.digest(["b", "a"]) == provenance.digest(iter("ab")) == want
    assert provenance.digest(["ab"]) != want and len(provenance.digest([])) == 16


def report(name: str, outcome: str = "passed", when: str = "call", **recorded) -> SimpleNamespace:
    """What pytest tells a plugin of one phase of one test."""
    return SimpleNamespace(nodeid=name, outcome=outcome, when=when, failed=outcome == "failed",
                           user_properties=list(recorded.items()))


def test_gpu_tests_leave_counts_a_digest_and_the_worst_of_a_family():
    summary = gpu_tests.Summary()
    reports = (report("a", when="setup"), report("a", group="hopper register k4v4", error=1e-3),
               report("b", group="hopper register k2v2", error=2.00000004e-3),
               report("c", outcome="skipped", when="setup"), report("e", outcome="failed", when="setup"),
               report("d", outcome="failed", group="hopper tile", error=3e-3))
    for one in reports:
        summary.pytest_runtest_logreport(one)
    assert summary.line() == {"passed": 2, "failed": 1, "skipped": 1, "error": 1,
                              "passed_sha256": provenance.digest("ab"),
                              "worst_error": {"hopper": 3e-3, "hopper register": 2e-3}}
    assert gpu_tests.worst_by_family({"one": 1.0}) == {"one": 1.0}


SANITIZED = """tests/test_gpu.py::test_x[b] PASSED
tests/test_gpu.py::test_x[a] PASSED
========= ERROR SUMMARY: 0 errors
"""


def test_sanitize_leaves_a_digest_and_no_names(tmp_path, monkeypatch):
    monkeypatch.setattr(sanitize.subprocess, "run", lambda *command, **rest: SimpleNamespace(stdout=SANITIZED,
                                                                                                     returncode=0))
    monkeypatch.setattr(sanitize, "provenance", lambda: {"commit": "0" * 12})
    with pytest.raises(sanitize.typer.Exit) as ended:
        sanitize.main(["memcheck"], "x", str(tmp_path / "lines.jsonl"))
    line = json.loads((tmp_path / "lines.jsonl").read_text())
    assert ended.value.exit_code == 0 and (line["passed"], line["failed"], line["errors"]) == (2, 0, 0)
    assert line["tests_sha256"] == provenance.digest(["test_x[a]", "test_x[b]"]) and "tests" not in line
