"""``lowbit-attn bench``: one decode step on this GPU beside the fastest read of its bytes and 16-bit attention."""

import json
from typing import Annotated

import torch
import typer

from lowbit_attn import dispatch, kernels
from lowbit_attn.cli.common import JsonOption, console, fail, format_named, table


def bench(
    format: Annotated[list[str] | None, typer.Option(help="A format; repeatable. Default: k4v4, k2v2.")] = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Channels of a head.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 1,
    q_len: Annotated[int, typer.Option(min=1, max=dispatch.MAX_Q_LEN, help="New tokens of a sequence.")] = 1,
    seqlen: Annotated[int, typer.Option(min=256, help="Tokens of every sequence.")] = 32768,
    path: Annotated[str | None, typer.Option(help="Decode path; default: the dispatcher's pick.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Time decode on this GPU: microseconds, ratio to the fastest read of the same bytes, gain over 16 bit."""
    formats = [format_named(name) for name in format or ["k4v4", "k2v2"]]
    if heads % kv_heads:
        fail(f"heads: got {heads}, supported: multiples of kv-heads = {kv_heads}")
    if reason := unavailable():
        fail(f"bench: {reason}", 1)
    arch, target = dispatch.target_of(torch.device("cuda"))
    from lowbit_attn import bench as timing

    lines = []
    for fmt in formats:
        picked, reasons = kernels.pick(arch, fmt, head_dim, torch.float16, heads // kv_heads * q_len, path)
        if reasons and picked is None:
            fail("; ".join(reasons))
        case = timing.BenchCase(fmt.name, batch, heads, kv_heads, head_dim, seqlen, q_len)
        lines.append(timing.measure(case, timing.make_cache(case), arch, picked[0]))
    if as_json:
        typer.echo(json.dumps(lines, indent=1))
        return
    show(lines, f"{torch.cuda.get_device_name()}, {target} kernels")


def unavailable() -> str:
    """Why nothing can be timed here; empty if it can."""
    if not torch.cuda.is_available():
        return "needs a CUDA device, and torch sees none"
    try:
        dispatch.target_of(torch.device("cuda"))
        import triton.testing  # noqa: F401
    except (NotImplementedError, ImportError) as error:
        return str(error)
    return ""


def show(lines: list[dict], where: str) -> None:
    """Print what ``bench.measure`` gave as a table."""
    from lowbit_attn.bench import fastest_reads

    shown = table("format", "us", "x read", "GB/s", "16 bit us", "x 16 bit", "read")
    for line, read in zip(lines, fastest_reads(lines)[0]):
        shown.add_row(line["format"], f"{line['us']:.1f}", f"{line['us'] / read:.2f}",
                      f"{line['bytes'] / line['us'] / 1e3:.0f}", f"{line['fp16_us']:.1f}",
                      f"{line['fp16_us'] / line['us']:.2f}", "slow: void" if line["void"] else "credible")
    out = console()
    out.print(shown)
    first = lines[0]
    out.print(f"{where}; batch {first['batch']}, heads {first['heads']}/{first['kv_heads']}, head_dim "
              f"{first['head_dim']}, {first['seqlen']:,} tokens, q_len {first['q_len']}; 16 bit: {first['fp16_by']}; "
              "x read: ratio to the fastest read of the same bytes, plain or with the cache hint; void: a plain read "
              f"below {first['floor']}", soft_wrap=True)
