"""Nsight Compute on one case of a preset: memory and issue rates, eligible warps, and what warps wait for.

    make profile CASE=targets:4      the fifth case of `perf/bench.py --preset targets`, with the dispatcher's kernel

Prints a table and appends a JSON line to perf/results/profile.jsonl. Clocks are left alone: rates count, not times.
"""

import csv
import os
import subprocess
import sys
from typing import Annotated

import torch
import typer
from bench import PRESETS, make_cache
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


def run_case(preset: str, index: int) -> None:
    """What is profiled: a few calls of one case."""
    case = PRESETS[preset][index]
    cache = make_cache(case)
    q = torch.randn(case.batch, case.q_len, case.num_heads, case.head_dim, device="cuda", dtype=cache.dtype)
    for _ in range(CALLS):
        lowbit_attn.decode(q, cache)
    torch.cuda.synchronize()


def profile(preset: str, index: int) -> tuple[str, dict[str, float]]:
    """(kernel, value by metric) of the last of the calls; RuntimeError with ncu's words if it gave none."""
    wanted = ",".join([*METRICS.values(), "regex:" + STALLS.format(".*").replace(".ratio", r"\.ratio")])
    command = ["ncu", "--clock-control", "none", "-k", KERNELS, "-c", str(CALLS), "--csv", "--page", "raw",
               "--print-units", "base", "--metrics", wanted, sys.executable, __file__, f"{preset}:{index}", "--run"]
    done = subprocess.run(command, capture_output=True, text=True)
    rows = list(csv.DictReader(line for line in done.stdout.splitlines() if line.startswith('"')))
    if len(rows) < 2:  # units, then a row a launch
        raise RuntimeError(f"ncu gave no values: {(done.stdout + done.stderr)[-2000:]}")
    last = rows[-1]
    return last["Kernel Name"], {name: float(value.replace(",", "")) for name, value in last.items()
                                 if name.startswith(("gpu__", "dram__", "smsp__", "sm__")) and value}


def main(
    case: Annotated[str, typer.Argument(help=f"preset:number, presets {', '.join(PRESETS)}")] = "targets:4",
    arch: Annotated[str, typer.Option(help="whose kernels: hopper or ampere")] = "hopper",
    run: Annotated[bool, typer.Option(help="make the calls instead of profiling them", hidden=True)] = False,
    output: Annotated[str, typer.Option(help="JSON lines file of the repository")] = "perf/results/profile.jsonl",
) -> None:
    """Profile one case."""
    preset, _, number = case.partition(":")
    if preset not in PRESETS or not number.isdigit() or int(number) >= len(PRESETS[preset]):
        known = ", ".join(f"{name}:0 to {len(cases) - 1}" for name, cases in PRESETS.items())
        raise typer.BadParameter(f"case {case!r}, supported: {known}")
    if run:
        return run_case(preset, int(number))
    os.environ["LOWBIT_ATTN_ARCH"] = arch
    kernel, values = profile(preset, int(number))
    stalls = {name.split("stalled_")[1].split("_per_issue")[0]: value for name, value in values.items()
              if "stalled_" in name}
    shown = {label: values[name] for label, name in METRICS.items()}
    shown["us"] /= 1e3  # of nanoseconds
    name = str(PRESETS[preset][int(number)])
    origin = provenance() | {"case": name, "arch": arch, "kernel": kernel[:80]}
    append_result(output, origin | shown | {"stalls": stalls})
    table = Table("what", "value", title=f"{name}, {arch}")
    for label, value in shown.items():
        table.add_row(label, f"{value:,.2f}")
    for stall, value in sorted(stalls.items(), key=lambda item: -item[1]):
        if value >= LEAST_STALL:
            table.add_row(f"cycles an issue: {stall}", f"{value:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
