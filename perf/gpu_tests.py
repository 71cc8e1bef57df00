"""Runs the GPU tests and appends one line to perf/results/gpu_tests.jsonl: what passed, where, the worst errors,
and how many calls of the sample were drawn again because their bounds said nothing.

A line has counts and one SHA-256 of the names of the tests that passed, not the names: two runs with the same count and
the same digest passed the same tests."""

import sys
import time
from collections import defaultdict
from collections.abc import Mapping

import pytest
import typer
from provenance import ROOT, append_result, digest, provenance

sys.path.append(str(ROOT / "tests"))
from gpu import matrix  # noqa: E402


class Summary:
    """pytest plugin: counts outcomes and calls drawn again, keeps the names that passed and the worst recorded error of
    each group."""

    def __init__(self):
        self.counts, self.errors, self.drawn_again = defaultdict(int), defaultdict(float), 0
        self.passed: list[str] = []

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.counts["error" if report.when != "call" and report.failed else report.outcome] += 1
        if report.when == "call" and report.outcome == "passed":
            self.passed.append(report.nodeid)
        recorded = dict(report.user_properties)
        self.drawn_again += report.when == "call" and "drawn_again" in recorded
        if report.when == "call" and "group" in recorded:
            self.errors[recorded["group"]] = max(self.errors[recorded["group"]], recorded["error"])

    def line(self) -> dict:
        """What a result says of the run: counts, the digest of what passed, and the worst error of each family."""
        return {name: self.counts[name] for name in ("passed", "failed", "skipped", "error")} | {
            "passed_sha256": digest(self.passed), "worst_error": worst_by_family(self.errors)}


def worst_by_family(errors: Mapping[str, float]) -> dict[str, float]:
    """The largest error of each family: of all groups that differ in their last word only, a format or an input
    ("hopper register k4v4" and "hopper register k2v2")."""
    worst = defaultdict(float)
    for group, error in errors.items():
        family = group.rpartition(" ")[0] or group
        worst[family] = max(worst[family], round(error, 7))
    return dict(sorted(worst.items()))


def main(seed: int = 0, cases: int = 0, selection: str = "", workers: int = 8,
         output: str = "perf/results/gpu_tests.jsonl") -> None:
    """Run the GPU tests and record the outcome; exits with pytest's status.

    cases 0: the fast subset; else a sample of so many decode calls, drawn by SEED and listed, on both architectures.
    selection: only the tests that match it (pytest -k). workers: processes that share the GPU.
    """
    summary, started = Summary(), time.time()
    # those that compile last, when tests are dealt in small numbers: the first 90 go to one worker
    fast = [f"tests/gpu/test_gpu{part}.py" for part in ("", "_register", "_long", "_cache", "_ops", "_hf")]
    files = ["tests/gpu/test_gpu_matrix.py"] if cases else fast
    options = ["-m", "gpu", "-v" if cases else "-q", "--maxfail=40", "-p", "no:cacheprovider"]
    options += [f"--seed={seed}", f"--cases={cases}"]
    options += ["-n", str(workers)] if workers > 1 else ["-n", "0"]
    options += ["-k", selection] if selection else []
    status = pytest.main([*options, *files], plugins=[summary])
    append_result(output, provenance() | {
        "arch": "hopper+ampere", "selection": selection, "seed": seed, "cases": cases,
        "seconds": round(time.time() - started),
        **summary.line(), **({"drawn_again": summary.drawn_again} if cases else {}),
    })
    if summary.drawn_again > (most := matrix.most_drawn_again(sum(summary.counts.values()))):
        typer.echo(f"drawn again, as their bounds say nothing: {summary.drawn_again} calls, at most {most}", err=True)
        raise typer.Exit(1)
    raise typer.Exit(int(status))


if __name__ == "__main__":
    typer.run(main)
