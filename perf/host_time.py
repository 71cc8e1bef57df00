"""Host time of eager calls, decode and append: Python, argument conversion, launches; nothing of the GPU's own time.

    python perf/host_time.py            one JSON line in perf/results/host_time.jsonl, a table on screen

On a GPU: 1,000 calls without a synchronisation, medians of rounds. Without one the kernels are replaced by a function
that takes their arguments through the same interface and does nothing, so that what is left is this package's part.
"""

import statistics
import time
from contextlib import ExitStack, contextmanager
from typing import Annotated
from unittest import mock

import torch
import typer
from provenance import append_result, provenance
from rich.console import Console
from rich.table import Table

import lowbit_attn
from lowbit_attn import dispatch, layout, loader

ROUNDS = 7
SPLITS, SMS = 16, 132


@contextmanager
def kernels_that_do_nothing():
    """Decode on a CPU cache takes the kernels' way, up to the launch."""
    import tvm_ffi

    nothing = tvm_ffi.get_global_func("testing.nop")
    with ExitStack() as patches:
        for module, name, value in ((dispatch, "_has_kernels", lambda device: True),
                                    (dispatch, "target_of", lambda device: ("hopper", "sm_90a")),
                                    (dispatch, "default_splits", lambda *arguments: SPLITS),
                                    (dispatch, "running_ctas", lambda *arguments: SMS),
                                    (loader, "load", lambda key: nothing)):
            patches.enter_context(mock.patch.object(module, name, value))
        yield


def call_us(step, calls: int, rounds: int = ROUNDS, over=statistics.median) -> float:
    """One call's time, ``over`` rounds of so many calls that do not wait for the device."""
    times = []
    for _ in range(rounds):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            step()
        times.append((time.perf_counter() - started) / calls * 1e6)
    return over(times)


def decode_steps(format: str, batch: int, device: str) -> dict:
    """Kinds of eager decode calls, Llama-3.1-8B's heads, as functions; the cache is short: the host is what counts."""
    cache = lowbit_attn.KVCache(format, 4 * batch, 8, 128, device=device, max_batch=batch)
    for row in range(batch):
        cache.prefill(row, *(torch.randn(200, 8, 128, device=device, dtype=torch.float16) for _ in range(2)))
    q = torch.randn(batch, 1, 32, 128, device=device, dtype=torch.float16)
    out, lse = torch.empty_like(q), torch.empty(batch, 32, 1, device=device)
    path = None if device == "cuda" else "register"  # a CPU's own is the reference
    return {
        "decode": lambda: lowbit_attn.decode(q, cache, path=path),
        "decode, own out and lse": lambda: lowbit_attn.decode(q, cache, path=path, out=out, lse=lse),
        "decode, not planned": lambda: (vars(cache).pop("plans", None), lowbit_attn.decode(q, cache, path=path)),
    }


def append_step(format: str, batch: int, steps: int, device: str):
    """An append of one token a sequence, to be called so many times."""
    most = 2 * layout.PAGE_TOKENS + steps
    cache = lowbit_attn.KVCache(format, -(-most // layout.PAGE_TOKENS) * batch, 8, 128, device=device, max_batch=batch,
                                max_seqlen=most)
    k, v = (torch.randn(batch, 1, 8, 128, device=device, dtype=torch.float16) for _ in range(2))
    return lambda: cache.append(k, v)


def measure(format: str = "k4v4", batch: int = 1, calls: int = 1000) -> dict[str, float]:
    """Microseconds of each kind of call, here."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = decode_steps(format, batch, device)
    if device == "cuda":  # a CPU's is the reference, too
        steps["append"] = append_step(format, batch, ROUNDS * calls + 1, device)
    for step in steps.values():
        step()
    return {name: call_us(step, calls if "not planned" not in name else calls // 10) for name, step in steps.items()}


def main(
    format: Annotated[str, typer.Option(help="cache format")] = "k4v4",
    batch: Annotated[int, typer.Option(help="sequences")] = 1,
    calls: Annotated[int, typer.Option(help="calls a round")] = 1000,
    output: Annotated[str, typer.Option(help="JSON lines file of the repository")] = "perf/results/host_time.jsonl",
) -> None:
    """Time eager calls on the host."""
    if torch.cuda.is_available():
        times, what = measure(format, batch, calls), "with launches"
    else:
        with kernels_that_do_nothing():
            times, what = measure(format, batch, calls), "kernels replaced by nothing"
    table = Table("call", "us on the host", title=f"{format}, batch {batch}, {what}")
    for name, us in times.items():
        append_result(output, provenance() | {"call": name, "format": format, "batch": batch, "what": what,
                                              "us": round(us, 2)})
        table.add_row(name, f"{us:.1f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
