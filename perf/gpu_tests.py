"""Runs the GPU tests and appends one line to perf/results/gpu_tests.jsonl: what passed, where, and the worst errors."""

from collections import defaultdict

import pytest
import typer
from provenance import append_result, provenance


class Summary:
    """pytest plugin: counts outcomes and keeps the worst recorded error of each group."""

    def __init__(self):
        self.counts, self.errors = defaultdict(int), defaultdict(float)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.counts["error" if report.when != "call" and report.failed else report.outcome] += 1
        recorded = dict(report.user_properties)
        if report.when == "call" and "group" in recorded:
            self.errors[recorded["group"]] = max(self.errors[recorded["group"]], recorded["error"])


def main(selection: str = "", seed: int = 0, output: str = "perf/results/gpu_tests.jsonl") -> None:
    """Run tests marked gpu (those matching SELECTION) and record the outcome; exits with pytest's status."""
    summary = Summary()
    options = ["-m", "gpu", "-q", "--maxfail=20", "-p", "no:cacheprovider", "tests"]
    status = pytest.main(options + (["-k", selection] if selection else []), plugins=[summary])
    append_result(output, provenance() | {
        "arch": "hopper+ampere", "selection": selection, "seed": seed,
        **{name: summary.counts[name] for name in ("passed", "failed", "skipped", "error")},
        "worst_error": {group: round(error, 7) for group, error in sorted(summary.errors.items())},
    })
    raise typer.Exit(int(status))


if __name__ == "__main__":
    typer.run(main)
