"""Times products of codebook weights beside the fastest read of their bytes and cuBLAS, in one run on one GPU.

    python perf/linear.py --format e8p4 --shape 8192x28672 --shape 4096x4096 --rows 1 --rows 4 --rows 16

Random codes, medians of CUDA-graph replays, L2 flushed before each. ``us`` is the whole call with the transforms of x
and y; ``multiply_us`` the product kernel alone, and so on; reads as ``bench.read_us``; cuBLAS: torch.matmul of 16-bit
weights.
"""

from typing import Annotated

import torch
import typer
from provenance import append_result, need, provenance
from random_weights import random_weight

from lowbit_attn import bench, linear_kernels
from lowbit_attn.linear import linear

RESULTS = "perf/results/linear.jsonl"


def measure(format: str, n: int, k: int, m: int, path: str | None) -> dict:
    """One case."""
    w, x = random_weight(format, n, k, "cuda"), torch.randn(m, k, device="cuda").half()
    dense = torch.randn(n, k, device="cuda").half()
    us, cublas = bench.graph_us(lambda: linear(x, w, path=path)), bench.graph_us(lambda: x @ dense.T)
    nbytes = sum(plane.nbytes for name, plane in w.planes.items() if name in ("codes", "codebooks"))
    read, hinted = bench.read_us(nbytes)[0], bench.read_us(nbytes, bench.HINTED)[0]
    line = {"format": format, "n": n, "k": k, "m": m, "path": path,
            "us": round(us, 2), "read_us": round(read, 2),
            "hinted_read_us": round(hinted, 2), "cublas_us": round(cublas, 2), "bytes": nbytes}
    launches = linear_kernels.launches(x, w) if path in (None, "kernel") else {}
    return line | {f"{name}_us": round(bench.graph_us(launch), 2) for name, launch in launches.items()}


def main(
    format: Annotated[list[str], typer.Option(help="A format; repeatable.")] = ["e8p4"],
    shape: Annotated[list[str], typer.Option(help="NxK; repeatable.")] = ["8192x28672", "4096x4096"],
    rows: Annotated[list[int], typer.Option(help="Rows of x; repeatable.")] = [1, 4, 16],
    path: Annotated[str | None, typer.Option(help="kernel, dequantize or reference; default: any.")] = None,
    output: Annotated[str, typer.Option(help="JSON lines file.")] = RESULTS,
) -> None:
    """Measure every case and append a line for each."""
    need()
    about = provenance()
    for name in format:
        for size in shape:
            for m in rows:
                n, k = map(int, size.split("x"))
                line = measure(name, n, k, m, path)
                append_result(output, about | line)
                floor = min(line["read_us"], line["hinted_read_us"])
                print(f"{name} {n}x{k} m {m} {path or ''}: {line['us']:.1f} us, {line['us'] / floor:.2f} of the read "
                      f"({floor:.1f}), "
                      f"{line['cublas_us'] / line['us']:.2f}x cuBLAS ({line['cublas_us']:.1f}); each launch alone: "
                      + ", ".join(f"{key[:-3]} {line[key]:.1f} ({line[key] / floor:.2f})" for key in line
                                  if key in ("multiply_us", "digits_us", "output_us", "sum_us")), flush=True)


if __name__ == "__main__":
    typer.run(main)
