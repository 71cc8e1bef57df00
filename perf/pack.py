"""Times quantize-and-pack of K and of V beside a plain copy of as many bytes and the same in torch, in one run.

    python perf/pack.py --format k4v4 --format k2v2      one JSON line a side in perf/results/pack.jsonl, a table

Random 16-bit data of 128K tokens and 8 KV heads unless told otherwise, L2 flushed, medians of one launch replayed from
a CUDA graph. The bytes are those read (16 bit) and written (the side's part of the records); the copy moves as many.
BitDecoding's Table 3 compares the same with torch at these sizes.
"""

from typing import Annotated

import torch
import typer
from bench import graph_us
from provenance import append_result, need, provenance
from rich.console import Console
from rich.table import Table

import lowbit_attn
from lowbit_attn import dispatch, kernels, layout
from lowbit_attn.cache.backend import BACKENDS, write_blocks

TORCH_PAGES = 64  # that torch packs at once: its intermediate values take 100 times the memory of its input


def copy_us(nbytes: int) -> float:
    """Copy half as many bytes: all of them are moved, half read and half written."""
    source = torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return graph_us(lambda: target.copy_(source))


def torch_us(cache: lowbit_attn.KVCache, pages: torch.Tensor, blocks: torch.Tensor, side: str) -> float:
    """The reference quantizer on this device, eagerly, TORCH_PAGES at a time; one run after one to warm up."""
    for timed in (False, True):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for i in range(0, len(pages) if timed else TORCH_PAGES, TORCH_PAGES):
            write_blocks(cache, pages[i : i + TORCH_PAGES], blocks[i : i + TORCH_PAGES], side)
        end.record()
        end.synchronize()
    return 1e3 * start.elapsed_time(end)


def measure(cache: lowbit_attn.KVCache, blocks: torch.Tensor, side: str, beside_torch: bool) -> dict:
    pages = torch.randperm(cache.num_pages, device="cuda").int()
    key = kernels.quantize_key(dispatch.target_of(cache.device)[1], str(cache.dtype).removeprefix("torch."),
                               cache.head_dim, cache.format, side, cache.range_search)
    records = cache.num_pages * cache.num_heads_kv
    part = cache.record.v_offset if side == "k" else cache.record.nbytes - cache.record.v_offset
    nbytes = blocks.nbytes + records * part
    us = graph_us(lambda: BACKENDS["cuda"].write_blocks(cache, pages, blocks, side))
    copied = copy_us(nbytes)
    return {"kernel": str(key), "tokens": cache.num_pages * layout.PAGE_TOKENS, "kv_heads": cache.num_heads_kv,
            "head_dim": cache.head_dim, "format": cache.format.name, "side": side, "search": "search" in key.variant,
            "us": round(us, 2), "bytes": nbytes, "copy_us": round(copied, 2),
            "torch_us": round(torch_us(cache, pages, blocks, side), 1) if beside_torch else None}


def main(
    format: Annotated[list[str], typer.Option(help="names of formats; may be given several times")] = [
        "k4v4", "k2v2", "k8v4", "k4tv4", "kitty"],
    search: Annotated[bool | None, typer.Option(help="range search on both sides; default: the format's own")] = None,
    tokens: Annotated[int, typer.Option(help="tokens, a multiple of 128")] = 131072,
    kv_heads: Annotated[int, typer.Option(help="KV heads")] = 8,
    head_dim: Annotated[int, typer.Option(help="channels of a head")] = 128,
    dtype: Annotated[str, typer.Option(help="float16 or bfloat16")] = "float16",
    beside_torch: Annotated[bool, typer.Option(help="time the reference in torch on the GPU, too")] = True,
    output: Annotated[str, typer.Option(help="JSON lines file of the repository")] = "perf/results/pack.jsonl",
) -> None:
    """Time packing of each format's K and V."""
    need()
    origin = provenance()
    table = Table("kernel", "us", "x copy", "copy us", "GB/s", "torch us", "x torch")
    pages = tokens // layout.PAGE_TOKENS
    blocks = torch.randn(pages, kv_heads, layout.PAGE_TOKENS, head_dim, device="cuda", dtype=getattr(torch, dtype))
    for name in format:
        cache = lowbit_attn.KVCache(name, pages, kv_heads, head_dim, blocks.dtype, "cuda", range_search=search)
        for side in "kv":
            line = measure(cache, blocks, side, beside_torch)
            append_result(output, origin | line)
            beside = line["torch_us"]
            table.add_row(line["kernel"], f"{line['us']:.1f}", f"{line['us'] / line['copy_us']:.2f}",
                          f"{line['copy_us']:.1f}", f"{line['bytes'] / line['us'] / 1e3:.0f}",
                          f"{beside:.0f}" if beside else "-", f"{beside / line['us']:.0f}" if beside else "-")
    Console(width=150).print(table)


if __name__ == "__main__":
    typer.run(main)
