"""``lowbit-attn bench``: one decode step on this GPU beside the fastest read of its bytes and 16-bit attention."""

import json
from importlib import metadata
from pathlib import Path
from typing import Annotated

import torch
import typer

from lowbit_attn import dispatch, kernels
from lowbit_attn.cli.common import JsonOption, check_plot, console, fail, format_named, table, tell_builds, writing


def bench(
    format: Annotated[list[str] | None, typer.Option(help="A format; repeatable. Default: k4v4, k2v2.")] = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Channels of a head.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 1,
    q_len: Annotated[int, typer.Option(min=1, max=dispatch.MAX_Q_LEN, help="New tokens of a sequence.")] = 1,
    seqlen: Annotated[int, typer.Option(min=256, help="Tokens of every sequence.")] = 32768,
    path: Annotated[str | None, typer.Option(help="Decode path; default: the dispatcher's pick.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the times into this PNG or SVG.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Time decode on this GPU: microseconds, ratio to the fastest read of the same bytes, gain over 16 bit."""
    formats = [format_named(name) for name in format or ["k4v4", "k2v2"]]
    if heads % kv_heads:
        fail(f"heads: got {heads}, supported: multiples of kv-heads = {kv_heads}")
    if plot is not None:
        check_plot("plot", plot)
    if reason := unavailable():
        fail(f"bench: {reason}", 1)
    tell_builds()
    arch, target = dispatch.target_of(torch.device("cuda"))
    from lowbit_attn import bench as timing

    lines = []
    for fmt in formats:
        picked, reasons = kernels.pick(arch, fmt, head_dim, torch.float16, heads // kv_heads * q_len, path)
        if reasons and picked is None:
            fail("; ".join(reasons))
        case = timing.BenchCase(fmt.name, batch, heads, kv_heads, head_dim, seqlen, q_len)
        lines.append(timing.measure(case, timing.make_cache(case), arch, picked[0]))
    where = f"{torch.cuda.get_device_name()}, {target} kernels"
    if plot is not None:
        with writing("plot", plot):
            save_plot(plot, lines, where)
    if as_json:
        typer.echo(json.dumps(lines, indent=1))
        return
    show(lines, where)


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


def save_plot(path: Path, lines: list[dict], where: str) -> None:
    """Three bars a format: the fastest read of its bytes, decode, and 16-bit attention, in microseconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from lowbit_attn.bench import fastest_reads

    bars = (("fastest read of the same bytes", fastest_reads(lines)[0]), ("decode", [line["us"] for line in lines]),
            ("16-bit attention (torch's best)", [line["fp16_us"] for line in lines]))
    figure, axes = pyplot.subplots(figsize=(8, 1.6 + 0.9 * len(lines)))
    for i, (label, values) in enumerate(bars):
        drawn = axes.barh([row + 0.27 * (i - 1) for row in range(len(lines))], values, height=0.25, label=label)
        axes.bar_label(drawn, fmt="%.1f", padding=3)
    axes.set_yticks(range(len(lines)), [line["format"] + " (void)" * line["void"] for line in lines])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    first = lines[0]
    axes.set(xlabel="microseconds a call", title=(
        f"One decode call on {where}, lowbit_attn {metadata.version('lowbit-attn')}\nbatch {first['batch']}, heads "
        f"{first['heads']}/{first['kv_heads']}, head_dim {first['head_dim']}, {first['seqlen']:,} tokens, q_len "
        f"{first['q_len']}"))
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
