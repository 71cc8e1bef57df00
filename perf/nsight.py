"""Nsight Compute on cases of presets: memory and issue rates, eligible warps, and what warps wait for.

    make profile CASE=targets:4           the fifth case of `perf/bench.py --preset targets`, the dispatcher's kernel
    make profile CASE="targets kitty:1"   a whole preset, and one case of another
    python perf/nsight.py ablation:0 --path tile

Prints a table and appends a JSON line a case to perf/results/profile.jsonl. Clocks are left alone: rates count, not
times. perf/stalls.py shows the same calls instruction by instruction.
"""

import csv
import os
import subprocess
import sys
from typing import Annotated

import torch
import typer
from bench import PRESETS, BenchCase, make_cache, query_of
from provenance import append_result, need, provenance
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
    "shared memory wavefronts of loads and stores": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",  # 128 bytes each
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


def run_cases(cases: list[BenchCase], path: str | None = None) -> None:
    """What is profiled: a few calls of every case, on a path or on the dispatcher's pick."""
    for case in cases:
        cache = make_cache(case)
        q = query_of(case, cache)
        for _ in range(CALLS):
            lowbit_attn.decode(q, cache, path=path)
        torch.cuda.synchronize()


def ncu(names: list[str], path: str | None, *options: str) -> tuple[list[str], str]:
    """(lines of CSV, all that was printed) of Nsight Compute over the calls of cases."""
    need(program="ncu")
    command = ["ncu", "--clock-control", "none", "-k", KERNELS, "--csv", "--print-units", "base", *options,
               sys.executable, __file__, *names, "--run", *(["--path", path] if path else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if line.startswith('"')], done.stdout + done.stderr


def profile(names: list[str], count: int, path: str | None) -> list[tuple[str, dict[str, float]]]:
    """(kernel, value by metric) of the last call of each of ``count`` cases; RuntimeError with ncu's words if it
    did not see them all."""
    wanted = ",".join([*METRICS.values(), "regex:" + STALLS.format(".*").replace(".ratio", r"\.ratio")])
    lines, words = ncu(names, path, "--page", "raw", "--metrics", wanted)
    rows = list(csv.DictReader(lines))[1:]  # [0]: units
    if len(rows) != CALLS * count:
        raise RuntimeError(f"ncu saw {len(rows)} launches of {CALLS * count}: {words[-2000:]}")
    return [(row["Kernel Name"], {name: float(value.replace(",", "")) for name, value in row.items()
                                  if name.startswith(("gpu__", "dram__", "smsp__", "sm__", "l1tex__")) and value})
            for row in rows[CALLS - 1 :: CALLS]]


def main(
    case: Annotated[list[str], typer.Argument(help=f"preset or preset:number, presets {', '.join(PRESETS)}")],
    arch: Annotated[str, typer.Option(help="whose kernels: hopper, ampere, ampere-sm_80 or ampere-sm_89")] = "hopper",
    path: Annotated[str | None, typer.Option(help="decode path; default: the dispatcher's pick")] = None,
    run: Annotated[bool, typer.Option(help="make the calls instead of profiling them", hidden=True)] = False,
    output: Annotated[str, typer.Option(help="JSON lines file of the repository")] = "perf/results/profile.jsonl",
) -> None:
    """Profile cases."""
    cases = cases_of(case)
    if run:
        return run_cases(cases, path)
    os.environ["LOWBIT_ATTN_ARCH"] = arch
    origin, console = provenance() | {"arch": arch}, Console(width=100)
    for name, (kernel, values) in zip(map(str, cases), profile(case, len(cases), path)):
        stalls = {metric.split("stalled_")[1].split("_per_issue")[0]: value for metric, value in values.items()
                  if "stalled_" in metric}
        shown = {label: values[metric] for label, metric in METRICS.items()}
        shown["us"] /= 1e3  # of nanoseconds
        append_result(output, origin | {"case": name, "path": path, "kernel": kernel[:80]} | shown | {"stalls": stalls})
        table = Table("what", "value", title=f"{name}, {arch}")
        for label, value in shown.items():
            table.add_row(label, f"{value:,.2f}")
        for stall, value in sorted(stalls.items(), key=lambda item: -item[1]):
            if value >= LEAST_STALL:
                table.add_row(f"cycles an issue: {stall}", f"{value:.2f}")
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
