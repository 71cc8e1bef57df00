"""Times a step's append beside its decode: what the new tokens of a batch cost on top of attention, in one run.

    python perf/append.py                 one JSON line a case in perf/results/append.jsonl, a table on screen

Every time is a replay of a CUDA graph, L2 flushed, medians: append and decode, decode alone, append alone. ``us`` is
the difference of the first two. A step that packs a block in every sequence (one in 128) is timed apart.
"""

import os
from typing import Annotated

import torch
import typer
from bench import BenchCase, graph_us, query_of
from provenance import append_result, need, provenance
from rich.console import Console
from rich.table import Table

import lowbit_attn
from lowbit_attn import layout
from lowbit_attn.testing import permute_pages

TARGET_US = 5.0  # of an append on top of decode
BLOCK = layout.PAGE_TOKENS


def make_cache(case: BenchCase) -> lowbit_attn.KVCache:
    """Every sequence with seqlen - 64 tokens, and pages reserved for the replays of the measurement."""
    length, most = case.seqlen - BLOCK // 2, case.seqlen + BLOCK
    cache = lowbit_attn.KVCache(case.format, case.batch * (most // BLOCK), case.num_heads_kv, case.head_dim,
                                device="cuda", sinks=0, max_batch=case.batch, max_q_len=case.q_len, max_seqlen=most)
    k, v = (torch.randn(length, case.num_heads_kv, case.head_dim, device="cuda", dtype=torch.float16)
            for _ in range(2))
    for row in range(case.batch):
        cache.prefill(row, k, v)
    permute_pages(cache, seed=1)
    cache.reserve(range(case.batch), most)
    return cache


def held(cache: lowbit_attn.KVCache, step, n_tok: int):
    """A step that starts from the same counters every time, so that all replays do the same work.

    Setting them costs a launch or two, which the step without ``append`` pays too.
    """
    start = [x.clone() for x in cache.counters()]
    start[3].fill_(n_tok)

    def run():
        torch._foreach_copy_(list(cache.counters()), start)
        step()

    return run


def measure(case: BenchCase) -> dict:
    cache = make_cache(case)
    q = query_of(case, cache)
    k, v = (torch.randn(case.batch, case.q_len, case.num_heads_kv, case.head_dim, device="cuda", dtype=torch.float16)
            for _ in range(2))

    def append():
        cache.append(k, v)

    def decode():
        lowbit_attn.decode(q, cache)

    def both():
        append()
        decode()

    packed = int(cache.n_qv[0])
    open_tokens = packed + cache.window_v + BLOCK // 2
    full = packed + cache.window_v + BLOCK  # of both sides, where their windows are the same
    times = {name: graph_us(held(cache, step, n_tok)) for name, step, n_tok in (
        ("decode", decode, open_tokens), ("both", both, open_tokens), ("append", append, open_tokens),
        ("nothing", lambda: None, open_tokens), ("packing", append, full))}
    return {
        "format": case.format, "batch": case.batch, "heads": case.num_heads, "kv_heads": case.num_heads_kv,
        "head_dim": case.head_dim, "seqlen": case.seqlen, "q_len": case.q_len,
        "us": round(times["both"] - times["decode"], 2), "decode_us": round(times["decode"] - times["nothing"], 2),
        "append_alone_us": round(times["append"] - times["nothing"], 2),
        "packing_alone_us": round(times["packing"] - times["nothing"], 2),
        "bytes": 4 * k.numel() * k.element_size(), "target_us": TARGET_US,
    }


def main(
    format: Annotated[list[str], typer.Option(help="may be given twice")] = ["k4v4", "k2v2"],
    batch: int = 64, heads: int = 32, kv_heads: int = 8, head_dim: int = 128, seqlen: int = 4096,
    q_len: Annotated[list[int], typer.Option(help="tokens a step; may be given twice")] = [1],
    arch: Annotated[str, typer.Option(help="whose decode kernels: hopper or ampere")] = "hopper",
    output: Annotated[str, typer.Option(help="JSON lines file of the repository")] = "perf/results/append.jsonl",
) -> None:
    """Time each format's append on top of decode."""
    need()
    os.environ["LOWBIT_ATTN_ARCH"] = arch
    origin, console = provenance(), Console(width=150)
    table = Table("case", "decode us", "append us", "append alone us", "packing alone us", "within target")
    for name in format:
        for tokens in q_len:
            case = BenchCase(name, batch, heads, kv_heads, head_dim, seqlen, tokens)
            line = measure(case) | {"arch": arch}
            append_result(output, origin | line)
            table.add_row(str(case), f"{line['decode_us']:.1f}", f"{line['us']:.2f}", f"{line['append_alone_us']:.2f}",
                          f"{line['packing_alone_us']:.2f}", str(line["us"] <= TARGET_US))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
