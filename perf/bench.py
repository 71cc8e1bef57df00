"""Times decode beside the fastest read of the same bytes and the best 16-bit attention here, in one run.

    python perf/bench.py --preset first        one JSON line a case in perf/results/decode.jsonl, a table on screen

How it measures: lowbit_attn.bench.
"""

import os
from itertools import product
from typing import Annotated

import torch
import typer
from provenance import append_result, need, provenance
from rich.console import Console
from rich.table import Table

from lowbit_attn import dispatch, kernels
from lowbit_attn.bench import BenchCase, fastest_reads, fp16_us, graph_us, make_cache, measure, query_of, read_us

# what other scripts use
__all__ = ["PRESETS", "BenchCase", "fp16_us", "graph_us", "make_cache", "measure", "query_of", "read_us"]

PRESETS = {
    "first": [
        BenchCase("k4v4", 1, 32, 8, 128, 8192), BenchCase("k4v4", 1, 32, 8, 128, 32768),
        BenchCase("k4v4", 1, 32, 8, 128, 131072), BenchCase("k4v4", 8, 32, 8, 128, 32768),
        BenchCase("k4v4", 1, 32, 32, 128, 32768), BenchCase("k4v4", 8, 32, 8, 64, 32768),
    ],
    "kitty": [BenchCase(name, *shape) for shape in ((8, 32, 8, 128, 32768), (1, 32, 8, 128, 131072))
              for name in ("k2v2", "kitty", "kitty-pro")],
    "ablation": [BenchCase(name, 8, 32, 8, 128, 32768) for name in ("k4v4", "k2v2")],
    "register": [
        BenchCase(name, *shape) for name in ("k4v4", "k2v2")
        for shape in ((8, 32, 8, 128, 32768), (1, 32, 32, 128, 131072), (1, 32, 8, 128, 32768), (1, 32, 8, 128, 131072))
    ],
}
PRESETS["targets"] = [BenchCase(name, batch, heads, kv_heads, 128, seqlen, ragged=ragged) for name in ("k4v4", "k2v2")
                      for batch, heads, kv_heads, seqlen, ragged in (
    (1, 32, 8, 8192, None), (1, 32, 8, 32768, None), (1, 32, 8, 131072, None), (1, 32, 32, 131072, None),
    (8, 32, 8, 32768, None), (8, 64, 8, 32768, None), (64, 32, 8, 4096, None), (64, 32, 8, 4096, (1024, 16384)))]
PRESETS["wide"] = [BenchCase(name, 8, heads, 8, head_dim, 32768, q_len) for heads, head_dim, q_len, name in (
    (32, 128, 4, "k4v4"), (32, 128, 4, "k2v2"), (64, 128, 8, "k4v4"), (64, 128, 8, "k2v2"), (32, 96, 1, "k4v4"),
    (32, 256, 1, "k4v4"), (32, 256, 1, "k2v2"), (32, 256, 1, "k8v4"), (32, 256, 4, "k4v4"), (32, 128, 1, "k4tv4"),
    (32, 128, 8, "k4v4"), (32, 128, 8, "k2v2"))]
# 16 to 64 query rows of a KV head, by heads and by queries
PRESETS["rows"] = [BenchCase(name, 8, heads, 8, 128, 32768, q_len) for heads, q_len in (
    (32, 4), (40, 4), (32, 6), (32, 8), (64, 6), (64, 8)) for name in ("k4v4", "k2v2")]
PRESETS["formats"] = [BenchCase(name, 8, 32, 8, head_dim, 32768, dtype=dtype) for name, head_dim, dtype in (
    *((name, 128, "float16") for name in ("k4v2", "k8v4", "k4tv4", "k4v4-g32", "k2v2-g32")),
    *((name, head_dim, "float16") for head_dim in (64, 256) for name in ("k4v4", "k2v2")), ("k4v4", 96, "float16"),
    *((name, 128, "bfloat16") for name in ("k4v4", "k2v2")))]
PRESETS["codebooks"] = [BenchCase(name, batch, heads, kv_heads, head_dim, seqlen)
                        for batch, heads, kv_heads, head_dim, seqlen in (
                            (1, 32, 8, 128, 131072), (8, 32, 8, 128, 32768), (1, 32, 32, 128, 131072),
                            (8, 64, 8, 128, 32768), (8, 32, 8, 64, 32768))
                        for name in ("k4v4", "k2v2", "kitty-pro", "cq2", "cq4", "kcq4vcq2")]
# of VQ-LLM's evaluation: Llama-7B's heads, batch 8 and 4,096 tokens
PRESETS["codebooks-4k"] = [BenchCase(name, 8, 32, kv_heads, 128, 4096) for kv_heads in (32, 8)
                           for name in ("k4v4", "k2v2", "cq2", "cq4", "kcq4vcq2")]
# more query rows than a warp's kernel takes at once: codebook64, and codebook8 in blocks (--path)
PRESETS["codebook-rows"] = [BenchCase(name, 8, heads, 8, head_dim, 32768) for head_dim, heads in (
    (128, 72), (128, 128), (128, 256), (128, 512), (64, 128), (64, 512)) for name in ("cq2", "cq4")]
PRESETS["boosted"] = [BenchCase(name, batch, heads, kv_heads, head_dim, seqlen)
                      for batch, heads, kv_heads, head_dim, seqlen in (
                          (8, 32, 8, 128, 32768), (1, 32, 8, 128, 131072), (64, 32, 8, 128, 4096),
                          (8, 64, 8, 128, 32768), (8, 32, 8, 64, 32768))
                      for name in ("k4v2", "k4v2-boost", "k4v4")]
# Fig. 13 of the LeanKV paper: its pairs of bits, beside 16 bit
PRESETS["leankv"] = [BenchCase(name, 8, 32, 8, 128, seqlen) for seqlen in (4096, 32768)
                     for name in ("k8v8", "k8v4", "k4v4", "k4v2")]
# more blocks of query rows than SMs, or a number that splits do not fill them with
PRESETS["batches"] = [BenchCase(name, batch, 32, 8, 128, seqlen, ragged=ragged) for name in ("k4v4", "k2v2")
                      for batch, seqlen, ragged in ((9, 32768, None), (20, 16384, None), (32, 4096, None),
                                                    (64, 4096, (1024, 16384)), (64, 32768, (8192, 131072)))]
PRESETS["lengths"] = [BenchCase(name, 1, 32, 8, 128, 1024 << i) for name in ("k4v4", "k2v2") for i in range(1, 9)]


def main(
    preset: Annotated[str, typer.Option(help=f"one of {', '.join(PRESETS)}")] = "first",
    arch: Annotated[list[str], typer.Option(help="hopper, ampere, ampere-sm_80, ampere-sm_89; may be repeated")
                    ] = ["hopper", "ampere"],
    path: Annotated[list[str], typer.Option(help="decode paths; default: the dispatcher's pick")] = [],
    output: Annotated[str, typer.Option(help="JSON lines file of the repository")] = "perf/results/decode.jsonl",
) -> None:
    """Time the preset's cases on each architecture's kernels."""
    if preset not in PRESETS:
        raise typer.BadParameter(f"{preset!r}, supported: {', '.join(PRESETS)}", param_hint="--preset")
    need()
    origin, console = provenance(), Console(width=150)
    table = Table("case", "arch", "path", "us", "x read", "read us", "x plain read", "GB/s", "fp16 us", "x fp16",
                  "void", title=f"{origin['gpu']}; read: the faster of a plain and a hinted one")
    for case, name in product(PRESETS[preset], arch):
        os.environ["LOWBIT_ATTN_ARCH"] = name
        cache = q = None
        torch.cuda.empty_cache()  # a case has memory of its own, as a server's cache has, not pieces of the last one's
        cache = make_cache(case)
        q = query_of(case, cache)
        picked = [dispatch.kernel_of(q, cache, p)[0] for p in path or [None]]
        for chosen in [kernels.path_name(key) for key in picked if key]:
            line = measure(case, cache, name, chosen)
            append_result(output, origin | line)
            read, = fastest_reads([line])[0]
            table.add_row(str(case), name, chosen, f"{line['us']:.1f}", f"{line['us'] / read:.3f}", f"{read:.1f}",
                          f"{line['us'] / line['read_us']:.3f}", f"{line['bytes'] / line['us'] / 1e3:.0f}",
                          f"{line['fp16_us']:.1f} {line['fp16_by']}", f"{line['fp16_us'] / line['us']:.2f}",
                          str(line["void"]))
            table.caption = f"void: a plain read below {line['floor']}"
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
