"""The lines that perf/bench.py wrote, by case, always of one kind of GPU."""

import json
from functools import cache

import torch
from provenance import ROOT

from lowbit_attn import budget, dispatch, kernels
from lowbit_attn.bench import BenchCase, cache_tokens
from lowbit_attn.formats import FORMATS
from lowbit_attn.kernels import KernelKey
from lowbit_attn.layout import PAGE_TOKENS

RESULTS = "perf/results/decode.jsonl"
H200_SMS = 132


def read_lines(path: str = RESULTS, arch: str = "hopper", gpu: budget.Gpu = budget.GPUS["h200"]) -> list[dict]:
    """The lines of one architecture's whole kernels on one kind of GPU, oldest first; some of 2026-11-21 were built
    ``without`` parts."""
    file = ROOT / path
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in lines if line["arch"] == arch and line["gpu"] == gpu.device and not line.get("without")]


def newest(lines: list[dict], case: BenchCase) -> dict | None:
    """The last line of a case on the decode path that the library takes today."""
    return next((line for line in reversed(lines) if BenchCase.from_line(line) == case
                 and line["path"] == path_of(case, line["arch"])), None)


def label_of(case: BenchCase) -> str:
    """The case in words: "GQA 32/8, batch 1, 8K"."""
    heads = f"{'MHA' if case.num_heads == case.num_heads_kv else 'GQA'} {case.num_heads}/{case.num_heads_kv}"
    tokens = "ragged {}K to {}K".format(*(n >> 10 for n in case.ragged)) if case.ragged else f"{case.seqlen >> 10}K"
    return f"{heads}, batch {case.batch}, {tokens}"


def path_of(case: BenchCase, arch: str) -> str | None:
    """The decode path that an architecture takes for a case on an H200; None where it has none."""
    key = kernel_of(case, arch)
    return key and kernels.path_name(key)


def packed(case: BenchCase, length: int) -> tuple[int, int]:
    """Pages of a sequence of ``length`` cached tokens whose K, and whose V, is packed."""
    fmt = FORMATS[case.format]
    return tuple(max(0, length - max(window, case.q_len - 1)) // PAGE_TOKENS
                 for window in (fmt.window_k, fmt.window_v))


def most_pages(case: BenchCase) -> int:
    """Packed pages of K of the longest sequence."""
    return max(1, packed(case, cache_tokens(max(case.lengths)))[0])


@cache
def kernel_of(case: BenchCase, arch: str, sms: int = H200_SMS) -> KernelKey | None:
    """What the library takes for a case on a GPU of ``sms`` SMs; None where no kernel serves it."""
    target = kernels.ARCH_TARGETS[arch][-1]
    picked, _ = kernels.pick(arch, FORMATS[case.format], case.head_dim, getattr(torch, case.dtype), case.rows)
    if picked is None:
        return None
    key = kernels.decode_key(arch, target, case.dtype, case.head_dim, case.format, *picked)
    return dispatch.for_shape(key, case.batch * case.num_heads_kv * -(-case.rows // key.rows), most_pages(case), sms)
