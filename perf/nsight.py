"""Nsight Compute on cases of presets: memory and issue rates, eligible warps, and what warps wait for.

    make profile CASE=targets:4           the fifth case of `perf/bench.py --preset targets`, the dispatcher's kernel
    make profile CASE="targets kitty:1"   a whole preset, and one case of another

Prints a table and appends a JSON line a case to perf/results/profile.jsonl. Clocks are left alone: rates count, not
times.
"""

import csv
import os
import subprocess
import sys
from typing import Annotated

import torch
import typer
from bench import PRESETS, BenchCase, make_cache, query_of
from provenance import append_result, provenance
from rich.console import Console
from rich.table import Table

import lowbit_attn

KERNELS = "regex:cutlass|decode"  # decode kernels of both architectures
STALLS = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
METRICS = {
    "us": "gpu__time_duration.sum",
    "DRAM, % of peak": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue slots busy, %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "eligible warps a scheduler": "smsp__warps_eligible.avg.per_cycle_active",
    "SM cycles active": "sm__cycles_active.avg",
    "SM cycles elapsed": "sm__cycles_elapsed.max",
}
CALLS = 3
LEAST_STALL = 0.05  # cycles an issue that are worth a line


def cases_of(names: list[str]) -> list[BenchCase]:
    """The cases of "preset" (all of it) and "preset:number"; typer.BadParameter for others."""
    found = []
    for name in names:
        preset, _, number = name.partition(":")
        cases = PRESETS.get(preset, [])
        chosen = cases if not number else cases[int(number):][:1] if number.isdigit() else []
        if not chosen:
            known = ", ".join(f"{preset}:0 to {len(cases) - 1}" for preset, cases in PRESETS.items())
            raise typer.BadParameter(f"case {name!r}, supported: {known}, or a whole preset")
        found += chosen
    return found


def run_cases(cases: list[BenchCase]) -> None:
    """What is profiled: a few calls of every case."""
    for case in cases:
        cache = make_cache(case)
        q = query_of(case, cache)
        for _ in range(CALLS):
            lowbit_attn.decode(q, cache)
        torch.cuda.synchronize()


def profile(names: list[str], count: int) -> list[tuple[str, dict[str, float]]]:
    """(kernel, value by metric) of the last call of each of ``count`` cases; RuntimeError with ncu's words if it
    did not see them all."""
    wanted = ",".join([*METRICS.values(), "regex:" + STALLS.format(".*").replace(".ratio", r"\.ratio")])
    command = ["ncu", "--clock-control", "none", "-k", KERNELS, "--csv", "--page", "raw", "--print-units", "base",
               "--metrics", wanted, sys.executable, __file__, *names, "--run"]
    done = subprocess.run(command, capture_output=True, text=True)
    rows = list(csv.DictReader(line for line in done.stdout.splitlines() if line.startswith('"')))[1:]  # [0]: units
    if len(rows) != CALLS * count:
        raise RuntimeError(f"ncu saw {len(rows)} launches of {CALLS * count}: {(done.stdout + done.stderr)[-2000:]}")
    return [(row["Kernel Name"], {name: float(value.replace(",", "")) for name, value in row.items()
                                  if name.startswith(("gpu__", "dram__", "smsp__", "sm__")) and value})
            for row in rows[CALLS - 1 :: CALLS]]


def main(
    case: Annotated[list[str], typer.Argument(help=f"preset or preset:number, presets {', '.join(PRESETS)}")],
    arch: Annotated[str, typer.Option(help="whose kernels: hopper or ampere")] = "hopper",
    run: Annotated[bool, typer.Option(help="make the calls instead of profiling them", hidden=True)] = False,
    output: Annotated[str, typer.Option(help="JSON lines file of the repository")] = "perf/results/profile.jsonl",
) -> None:
    """Profile cases."""
    cases = cases_of(case)
    if run:
        return run_cases(cases)
    os.environ["LOWBIT_ATTN_ARCH"] = arch
    origin, console = provenance() | {"arch": arch}, Console(width=100)
    for name, (kernel, values) in zip(map(str, cases), profile(case, len(cases))):
        stalls = {metric.split("stalled_")[1].split("_per_issue")[0]: value for metric, value in values.items()
                  if "stalled_" in metric}
        shown = {label: values[metric] for label, metric in METRICS.items()}
        shown["us"] /= 1e3  # of nanoseconds
        append_result(output, origin | {"case": name, "kernel": kernel[:80]} | shown | {"stalls": stalls})
        table = Table("what", "value", title=f"{name}, {arch}")
        for label, value in shown.items():
            table.add_row(label, f"{value:,.2f}")
        for stall, value in sorted(stalls.items(), key=lambda item: -item[1]):
            if value >= LEAST_STALL:
                table.add_row(f"cycles an issue: {stall}", f"{value:.2f}")
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
