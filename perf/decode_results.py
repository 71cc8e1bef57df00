"""The lines that perf/bench.py wrote, by case."""

import json
from functools import cache

import torch
from provenance import ROOT

from lowbit_attn import kernels
from lowbit_attn.bench import BenchCase
from lowbit_attn.formats import FORMATS

RESULTS = "perf/results/decode.jsonl"


def read_lines(path: str = RESULTS, arch: str = "hopper") -> list[dict]:
    """The lines of one architecture's whole kernels (nothing left out of them), oldest first."""
    file = ROOT / path
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in lines if line["arch"] == arch and not line.get("without")]


def newest(lines: list[dict], case: BenchCase) -> dict | None:
    """The last line of a case on the decode path that the library takes today."""
    return next((line for line in reversed(lines) if BenchCase.from_line(line) == case
                 and line["path"] == path_of(case, line["arch"])), None)


@cache
def path_of(case: BenchCase, arch: str) -> str | None:
    """The decode path that an architecture takes for a case; None where it has none."""
    picked, _ = kernels.pick(arch, FORMATS[case.format], case.head_dim, getattr(torch, case.dtype), case.rows)
    return picked and picked[0]
