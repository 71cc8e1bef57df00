"""Prints README's table of the times that perf/bench.py measured (preset targets) on one kind of GPU at one commit.

    python perf/targets_table.py --gpu h200 --commit 7be43a01bf1c

README has it between two comments, the first of which holds the arguments; tests/unit/test_readme.py compares them.
"""

from typing import Annotated

import typer
from bench import PRESETS
from decode_results import read_lines
from plots import complete

from lowbit_attn import budget
from lowbit_attn.bench import BenchCase, fastest_reads

FORMATS = ("k4v4", "k2v2")


def label_of(case: BenchCase) -> str:
    """The case in words: "GQA 32/8, batch 1, 8K"."""
    heads = f"{'MHA' if case.num_heads == case.num_heads_kv else 'GQA'} {case.num_heads}/{case.num_heads_kv}"
    tokens = "ragged {}K to {}K".format(*(n >> 10 for n in case.ragged)) if case.ragged else f"{case.seqlen >> 10}K"
    return f"{heads}, batch {case.batch}, {tokens}"


def table_of(lines: list[dict]) -> str:
    """Markdown, a row a case; lines: of the preset's cases in order."""
    reads, name = fastest_reads(lines)
    cells = {}
    for line, read in zip(lines, reads):
        found = cells.setdefault(label_of(BenchCase.from_line(line)), {})
        found[line["format"]] = (f"{line['us']:.1f} us{' (void)' * line['void']} | {line['us'] / read:.2f} | "
                                 f"{line['fp16_us'] / line['us']:.1f}"), f"{read:.1f}"
    head = "".join(f" {fmt} | x {name} | x 16 bit |" for fmt in FORMATS)
    rows = [f"| {label} | " + " | ".join(found[fmt][0] for fmt in FORMATS)
            + f" | {', '.join(found[fmt][1] for fmt in FORMATS)} us |" for label, found in cells.items()]
    return "\n".join((f"| case |{head} {name}s |", "|---" * 8 + "|", *rows))


def main(
    gpu: Annotated[str, typer.Option(help=f"Whose times: {', '.join(budget.GPUS)}.")] = "h200",
    commit: Annotated[str | None, typer.Option(help="Default: the newest that has every case.")] = None,
) -> None:
    """Print the table."""
    found = complete(read_lines(gpu=budget.gpu_named(gpu)), PRESETS["targets"], commit)
    if not found:
        raise typer.BadParameter(f"{commit or gpu} has not all cases; run perf/bench.py --preset targets there",
                                 param_hint="--commit")
    print(table_of(found))


if __name__ == "__main__":
    typer.run(main)
