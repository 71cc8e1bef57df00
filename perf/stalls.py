"""Where warps wait, instruction by instruction: Nsight Compute's samples of a case's kernel.

    python perf/stalls.py targets:13              samples by what they wait for and by instruction, and the hot lines
    python perf/stalls.py wide:2 --path tile

Samples of each warp are taken at a fixed rate, so that a line's share is its share of the warps' time.
"""

import csv
import os
from collections import Counter
from typing import Annotated

import typer
from nsight import CALLS, cases_of, ncu
from rich.console import Console
from rich.table import Table

SAMPLES, EXECUTED, SOURCE = "Warp Stall Sampling (All Samples)", "Instructions Executed", "Source"
FIRST = "stall_"


def read_lines(lines: list[str]) -> list[dict[str, str]]:
    """The instructions of the one kernel that ncu's source page shows; RuntimeError if it shows none."""
    start = next((i for i, line in enumerate(lines) if SAMPLES in line), None)
    if start is None:
        raise RuntimeError(f"ncu sampled no kernel: {lines[-5:]}")
    return list(csv.DictReader(lines[start:]))


def number(text: str) -> int:
    return int(text.replace(",", "") or 0)


def waits(row: dict[str, str]) -> Counter:
    """Samples of an instruction by what its warp waited for."""
    return Counter({name.removeprefix(FIRST): number(value) for name, value in row.items()
                    if name and name.startswith(FIRST) and "(" not in name})


def opcode(source: str) -> str:
    return next((word for word in source.split() if not word.startswith("@")), "").split(".")[0]


def shares(title: str, counts: Counter, most: int) -> Table:
    table, total = Table(title, "%", title=f"{sum(counts.values())} samples"), max(1, sum(counts.values()))
    for name, count in counts.most_common(most):
        table.add_row(name, f"{100 * count / total:.1f}")
    return table


def main(
    case: Annotated[str, typer.Argument(help="preset:number of perf/bench.py")],
    arch: Annotated[str, typer.Option(help="whose kernels: hopper, ampere, ampere-sm_80 or ampere-sm_89")] = "hopper",
    path: Annotated[str | None, typer.Option(help="decode path; default: the dispatcher's pick")] = None,
    lines: Annotated[int, typer.Option(min=0, help="Of the hottest instructions, so many.")] = 20,
) -> None:
    """Sample one case's kernel."""
    if len(cases_of([case])) != 1:
        raise typer.BadParameter(f"{case!r} is a whole preset, supported: one case, as {case}:0")
    os.environ["LOWBIT_ATTN_ARCH"] = arch
    found, _ = ncu([case], path, "--launch-skip", str(CALLS - 1), "--launch-count", "1", "--section", "SourceCounters",
                   "--page", "source")
    rows, console = read_lines(found), Console(width=120)
    by_wait, by_opcode = Counter(), Counter()
    for row in rows:
        by_wait += waits(row)
        by_opcode[opcode(row[SOURCE])] += number(row[SAMPLES])
    console.print(shares("waits for", by_wait, 12), shares("instruction", by_opcode, 12))
    table = Table("line", "%", "executed", "instruction", "waits for")
    total = max(1, sum(number(row[SAMPLES]) for row in rows))
    for i in sorted(sorted(range(len(rows)), key=lambda i: -number(rows[i][SAMPLES]))[:lines]):
        row = rows[i]
        table.add_row(str(i), f"{100 * number(row[SAMPLES]) / total:.1f}", row[EXECUTED], row[SOURCE].strip()[:60],
                      ", ".join(f"{name} {count}" for name, count in waits(row).most_common(2) if count))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
