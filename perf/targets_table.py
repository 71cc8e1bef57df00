"""Prints README's table of the times that perf/bench.py measured (preset targets) on one kind of GPU at one commit,
with Kitty's (preset kitty) of one commit beside them.

    python perf/targets_table.py --gpu h200 --commit 7be43a01bf1c --kitty 5e2651264428

README has it between two comments, the first of which holds the arguments; tests/unit/test_readme.py compares them.
"""

from typing import Annotated

import typer
from bench import PRESETS
from decode_results import label_of, read_lines
from plots import complete

from lowbit_attn import budget
from lowbit_attn.bench import BenchCase, fastest_reads

KITTY = ("kitty", "kitty-pro")  # of preset kitty, whose k2v2 is of preset targets here


def cell_of(line: dict, read: float) -> str:
    """Time, how many times faster than 16 bit in the same run, how many times the fastest read."""
    void = " (void)" * line["void"]
    return f"{line['us']:.1f} us, {line['fp16_us'] / line['us']:.1f}x, {line['us'] / read:.2f}{void}"


def table_of(lines: list[dict]) -> str:
    """Markdown, a row a case and a column a format; lines: of the cases in order, those of one case in one format each.
    "-": not measured; 16 bit: the case's first line's."""
    reads, name = fastest_reads(lines)
    formats = list(dict.fromkeys(line["format"] for line in lines))
    rows: dict[str, dict[str, str]] = {}
    for line, read in zip(lines, reads):
        row = rows.setdefault(label_of(BenchCase.from_line(line)), {"16 bit": f"{line['fp16_us']:.1f} us"})
        row[line["format"]] = cell_of(line, read)
    columns = ["16 bit", *formats]
    body = [f"| {label} | " + " | ".join(row.get(column, "-") for column in columns) + " |"
            for label, row in rows.items()]
    head = f"| case: us, x 16 bit, x {name} | " + " | ".join(columns) + " |"
    return "\n".join((head, "|---" * (1 + len(columns)) + "|", *body))


def lines_at(gpu: str, commit: str | None, kitty: str | None) -> list[dict]:
    """The newest lines of preset targets at one commit, and with ``kitty`` those of Kitty's formats at that one; empty
    where one of the two has not every case."""
    lines = read_lines(gpu=budget.gpu_named(gpu))
    found = complete(lines, PRESETS["targets"], commit)
    if kitty is None or not found:
        return found
    boosted = complete(lines, [case for case in PRESETS["kitty"] if case.format in KITTY], kitty)
    return found + boosted if boosted else []


def main(
    gpu: Annotated[str, typer.Option(help=f"Whose times: {', '.join(budget.GPUS)}.")] = "h200",
    commit: Annotated[str | None, typer.Option(help="Default: the newest that has every case.")] = None,
    kitty: Annotated[str | None, typer.Option(help="Commit of Kitty's columns; default: without them.")] = None,
) -> None:
    """Print the table."""
    found = lines_at(gpu, commit, kitty)
    if not found:
        raise typer.BadParameter(f"{commit or gpu} or Kitty's {kitty} has not all cases; run perf/bench.py --preset "
                                 "targets, or kitty, there", param_hint="--commit")
    print(table_of(found))


if __name__ == "__main__":
    typer.run(main)
