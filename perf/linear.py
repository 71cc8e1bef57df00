"""Times products of codebook weights beside the fastest read of their bytes and cuBLAS, in one run on one GPU.

    python perf/linear.py --format e8p4 --shape 8192x28672 --shape 4096x4096 --rows 1 --rows 4 --rows 16

    python perf/linear.py --arch ampere --arch ampere-sm_89 --output perf/results/linear_ampere.jsonl

Random codes, medians of CUDA-graph replays, L2 flushed before each. ``us`` is the whole call with the transforms of x
and y; ``multiply_us`` the product kernel alone, and so on; reads as ``bench.read_us``; cuBLAS: torch.matmul of 16-bit
weights; int4: torch's product of bf16 x with weights of 4 bits in groups of 128. --arch: other kernels than the GPU's,
as LOWBIT_ATTN_ARCH names them.
"""

import os
from itertools import product
from typing import Annotated

import torch
import typer
from provenance import append_result, need, provenance
from random_weights import random_weight

from lowbit_attn import bench, linear_kernels
from lowbit_attn.linear import linear

RESULTS = "perf/results/linear.jsonl"
INT4_GROUP, INNER_TILES = 128, 8  # of torch's kernel


def int4_us(x: torch.Tensor, n: int) -> float:
    """torch's product with random weights of 4 bits in groups of 128, one scale and zero each."""
    codes = torch.randint(0, 256, (n, x.shape[1] // 2), dtype=torch.uint8, device="cuda")
    weight = torch.ops.aten._convert_weight_to_int4pack(codes, INNER_TILES)
    scales = torch.rand(x.shape[1] // INT4_GROUP, n, 2, device="cuda").bfloat16()
    x = x.bfloat16()
    return bench.graph_us(lambda: torch.ops.aten._weight_int4pack_mm(x, weight, INT4_GROUP, scales))


def measure(format: str, n: int, k: int, m: int, path: str | None) -> dict:
    """One case."""
    w, x = random_weight(format, n, k, "cuda"), torch.randn(m, k, device="cuda").half()
    dense = torch.randn(n, k, device="cuda").half()
    us, cublas = bench.graph_us(lambda: linear(x, w, path=path)), bench.graph_us(lambda: x @ dense.T)
    nbytes = sum(plane.nbytes for name, plane in w.planes.items() if name in ("codes", "codebooks"))
    int4 = int4_us(x, n)
    read, hinted = bench.read_us(nbytes)[0], bench.read_us(nbytes, bench.HINTED)[0]
    line = {"format": format, "n": n, "k": k, "m": m, "path": path,
            "us": round(us, 2), "read_us": round(read, 2),
            "hinted_read_us": round(hinted, 2), "cublas_us": round(cublas, 2), "int4_us": round(int4, 2),
            "bytes": nbytes}
    launches = linear_kernels.launches(x, w) if path in (None, "kernel") else {}
    return line | {f"{name}_us": round(bench.graph_us(launch), 2) for name, launch in launches.items()}


def main(
    format: Annotated[list[str], typer.Option(help="A format; repeatable.")] = ["e8p4"],
    shape: Annotated[list[str], typer.Option(help="NxK; repeatable.")] = ["8192x28672", "4096x4096"],
    rows: Annotated[list[int], typer.Option(help="Rows of x; repeatable.")] = [1, 4, 16],
    path: Annotated[str | None, typer.Option(help="kernel, dequantize or reference; default: any.")] = None,
    arch: Annotated[list[str], typer.Option(help="Kernels to run, repeatable; default: the GPU's own.")] = [],
    output: Annotated[str, typer.Option(help="JSON lines file.")] = RESULTS,
) -> None:
    """Measure every case and append a line for each."""
    need()
    about = provenance()
    for name, size, m, kernels in product(format, shape, rows, arch or [""]):
        if kernels:
            os.environ["LOWBIT_ATTN_ARCH"] = kernels
        n, k = map(int, size.split("x"))
        line = ({"arch": kernels} if kernels else {}) | measure(name, n, k, m, path)
        append_result(output, about | line)
        floor = min(line["read_us"], line["hinted_read_us"])
        print(f"{kernels} {name} {n}x{k} m {m} {path or ''}: {line['us']:.1f} us, {line['us'] / floor:.2f} of the read "
              f"({floor:.1f}), {line['cublas_us'] / line['us']:.2f}x cuBLAS ({line['cublas_us']:.1f}), "
              f"{line['int4_us'] / line['us']:.2f}x int4 ({line['int4_us']:.1f}); each launch alone: "
              + ", ".join(f"{key[:-3]} {line[key]:.1f} ({line[key] / floor:.2f})" for key in line
                          if key in ("multiply_us", "digits_us", "output_us", "sum_us")), flush=True)


if __name__ == "__main__":
    typer.run(main)
