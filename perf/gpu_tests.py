"""Runs the GPU tests and appends one line to perf/results/gpu_tests.jsonl: what passed, where, the worst errors,
and how many calls of the sample were drawn again because their bounds said nothing."""

import sys
import time
from collections import defaultdict

import pytest
import typer
from provenance import ROOT, append_result, provenance

sys.path.append(str(ROOT / "tests"))
from gpu import matrix  # noqa: E402


class Summary:
    """pytest plugin: counts outcomes and calls drawn again, and keeps the worst recorded error of each group."""

    def __init__(self):
        self.counts, self.errors, self.drawn_again = defaultdict(int), defaultdict(float), 0

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.counts["error" if report.when != "call" and report.failed else report.outcome] += 1
        recorded = dict(report.user_properties)
        self.drawn_again += report.when == "call" and "drawn_again" in recorded
        if report.when == "call" and "group" in recorded:
            self.errors[recorded["group"]] = max(self.errors[recorded["group"]], recorded["error"])


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
        **{name: summary.counts[name] for name in ("passed", "failed", "skipped", "error")},
        **({"drawn_again": summary.drawn_again} if cases else {}),
        "worst_error": {group: round(error, 7) for group, error in sorted(summary.errors.items())},
    })
    if summary.drawn_again > (most := matrix.most_drawn_again(sum(summary.counts.values()))):
        typer.echo(f"drawn again, as their bounds say nothing: {summary.drawn_again} calls, at most {most}", err=True)
        raise typer.Exit(1)
    raise typer.Exit(int(status))


if __name__ == "__main__":
    typer.run(main)
