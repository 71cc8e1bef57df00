"""``lowbit-attn doctor`` and ``lowbit-attn suggest``: what this machine has, and what a format would gain."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from lowbit_attn import budget, environment
from lowbit_attn.cli import books, config, weights
from lowbit_attn.cli.common import JsonOption, console, fail, table
from lowbit_attn.formats import FORMATS, levels, shortened
from lowbit_attn.levels.state import buffer_bytes

MOST = 1 << 20  # of layers, heads, channels and sequences: what suggest multiplies stays a number of GB
MOST_DIGITS = 20  # of a number of tokens


def doctor(codebooks: books.BooksOption = None, as_json: JsonOption = False) -> None:
    """Show what this machine has for building and running the kernels, and what to install where something lacks.

    With --codebooks also whether that file can be read, and what it is for.
    """
    read = None if codebooks is None else books.loaded(codebooks)
    found = environment.gather()
    if as_json:
        about = {} if read is None else {"codebooks": {"file": str(codebooks), "format": read.format, "hash": read.hash,
                                                       "nbytes": read.nbytes, "warnings": books.warnings_of(read)}}
        typer.echo(json.dumps(asdict(found) | about, indent=1))
        return
    shown = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _doctor_lines(found):
        shown.add_row(f"[bold]{name}", escape(value))
    out = console()
    out.print(shown)
    out.print(f"[bold]will use[/]: {escape(found.will_use)}", soft_wrap=True)
    if read is not None:
        out.print(f"[bold]codebooks[/]: {escape(books.described(read))}", soft_wrap=True)
        for warning in books.warnings_of(read):
            out.print(f"[bold]codebooks[/] warning: {escape(warning)}", soft_wrap=True)
    out.print("[bold]what to do next[/], in this order:")
    for number, step in enumerate(found.next_steps, 1):
        out.print(f"  {number}. {escape(step)}", soft_wrap=True)


def _doctor_lines(found: environment.Environment):
    yield "lowbit_attn", f"{found.lowbit_attn}, Python {found.python}, {found.platform}"
    yield "torch", f"{found.torch}, CUDA runtime {found.cuda_runtime or 'none'}"
    yield "driver", found.driver or "not found"
    for gpu in found.gpus:
        yield "GPU", (f"{gpu.name}, compute capability {gpu.capability}, {gpu.memory_bytes / 2**30:.1f} GiB: "
                      f"{gpu.reason or f'{gpu.arch} kernels, {gpu.target}'}")
    if not found.gpus:
        yield "GPU", "none"
    for name, tool in found.tools.items():
        yield name, f"{tool.version or 'not found'}{f' ({tool.path})' if tool.path else ''}"
    counts = ", ".join(f"{count} for {target}" for target, count in sorted(found.kernels_built.items()))
    stale = f"; {found.kernels_stale} of other sources or tools" if found.kernels_stale else ""
    damaged = f"; {found.kernels_damaged} damaged or not trusted" if found.kernels_damaged else ""
    yield "kernels", f"{counts or 'not built'}{stale}{damaged}"
    yield "cache", found.cache_dir


def suggest(
    model: Annotated[Path | None, typer.Option(help="Folder of a model: its config.json gives layers, heads, head-dim "
                                                    "and ctx.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, max=MOST, help="Layers with attention.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, max=MOST, help="KV heads of a layer.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, max=MOST, help="Channels of a head.")] = None,
    ctx: Annotated[str | None, typer.Option(help="Tokens of a sequence: 4096, 128K, 1M; default: the model's.")] = None,
    batch: Annotated[int, typer.Option(min=1, max=MOST, help="Sequences decoded together.")] = 1,
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(budget.GPUS)}.")] = "h200",
    heads: Annotated[int | None, typer.Option(min=1, max=MOST, help="Query heads of a layer; default: the model's.")
                     ] = None,
    weights_gb: Annotated[float | None, typer.Option(help="Weights read each step, in GB (10^9 bytes); default: those "
                                                          "of --model.")] = None,
    sinks: Annotated[int, typer.Option(help="First tokens that stay in 16 bit.")] = 0,
    format: Annotated[list[str] | None, typer.Option(help="A format; repeatable. Default: the presets.")] = None,
    codebooks: books.BooksOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare formats for a model: size of the cache, what fits, and the least time a token can take."""
    given = {"layers": layers, "num_heads": heads, "num_heads_kv": kv_heads, "head_dim": head_dim}
    try:
        _check_weights(weights_gb)
        shape = _shape(model, given)
        if weights_gb is None and model is not None and (stored := weights.nbytes(model)):
            weights_gb = stored * 1e-9
        network, device = shape.model(weights_gb), budget.gpu_named(gpu)
        if ctx is None and shape.context is None:
            raise ValueError("ctx: got none, supported: a number of tokens, or --model FOLDER whose config.json has "
                             "max_position_embeddings")
        tokens = shape.context if ctx is None else _tokens(ctx)
        if codebooks is not None:
            format = _with_codebooks(books.loaded(codebooks), network, format)
        rows = budget.suggest(network, tokens, batch, device, format, sinks)
    except (ValueError, KeyError) as error:
        fail(error)
    note = budget.measured_note(device, network)
    if shape.context is not None and tokens > shape.context:
        typer.echo(f"warning: ctx: got {tokens:,} tokens, and the model's context is {shape.context:,} "
                   "(max_position_embeddings)", err=True)
    if as_json:
        answer = {"gpu": device.name, "memory_gb": device.memory_gb, "read_tb_per_s": round(device.peak_tb_per_s, 3),
                  "read_source": device.source, "measured": note, "model": asdict(shape), "weights_gb": weights_gb,
                  "ctx": tokens, "batch": batch, "rows": [asdict(row) for row in rows]}
        typer.echo(json.dumps(answer, indent=1))
        return
    out = console()
    out.print(f"{shape}; {tokens:,} tokens a sequence, batch {batch}", soft_wrap=True)
    out.print(_suggest_table(rows))
    out.print(f"{device.name}: {device.memory_gb:g} GB, reads at most {device.peak_tb_per_s:.2f} TB/s "
              f"({device.source}). The floor is a plain read of the cache.", soft_wrap=True)
    out.print(f"kernels ms: {note}.", soft_wrap=True)
    for pair in filter(None, (levels.parse(row.format) for row in rows if row.cache_gb)):
        head_dims = dict.fromkeys(group.head_dim for group in network.packed)
        for head_dim in head_dims:
            name = f"{pair} at head_dim {head_dim}" if len(head_dims) > 1 else pair.name
            out.print(f"{name}: {buffer_bytes(sinks, head_dim):,} bytes of 16-bit buffers a KV "
                      f"head, whatever the length; smaller than {pair.high} from "
                      f"{budget.pays_from(pair, head_dim, sinks):,} tokens on.", soft_wrap=True)
    for window in dict.fromkeys(group.window for group in network.groups if group.window):
        out.print(f"Layers with a window keep their last {window - 1:,} tokens in 16 bit in every row; kernels ms "
                  "leave them out.", soft_wrap=True)
    if weights_gb is None:
        out.print("The weights are not known, and fits and max batch leave no room for them: --weights-gb gives their "
                  "size, and then the gain of a whole step is shown.", soft_wrap=True)
    else:
        out.print(f"fits and max batch leave room for {weights_gb:,.2f} GB of weights, which x step reads.",
                  soft_wrap=True)


def _check_weights(gb: float | None) -> None:
    """ValueError for what is no size; NaN compares with nothing."""
    if gb is not None and not (math.isfinite(gb) and gb >= 0):
        raise ValueError(f"weights-gb: got {gb}, supported: 0 or more")


def _tokens(ctx: str) -> int:
    """Tokens of an option; ValueError, with few of its characters, for what is no number."""
    if len(ctx) > MOST_DIGITS:
        raise ValueError(f"ctx: got {shortened(ctx)}, supported: a positive number of tokens, such as 4096, 128K or 1M")
    return budget.parse_tokens(ctx)


def _shape(folder: Path | None, given: dict[str, int | None]) -> config.Shape:
    """The shape of a folder's model, with the given numbers in place of its own; ValueError if one is missing."""
    given = {name: value for name, value in given.items() if value is not None}
    if folder is not None:
        shape = config.read(folder)
        if shape.mixed and given:
            name, value = next(iter(given.items()))
            raise ValueError(f"{name}: got {value} beside a model whose layers differ in shape ({shape}), supported: "
                             "the model's own numbers")
        return replace(shape, **given)
    missing = [name for name in ("layers", "num_heads_kv", "head_dim") if name not in given]
    if missing:
        option = {"num_heads_kv": "kv-heads", "head_dim": "head-dim"}.get(missing[0], missing[0])
        raise ValueError(f"{option}: got none, supported: a number, or --model FOLDER with a config.json")
    return config.Shape(**{"num_heads": given["num_heads_kv"]} | given)


def _with_codebooks(read, model: budget.Model, formats: list[str] | None) -> list[str]:
    """The formats with that of a file of codebooks; ValueError if they are not of this model's shape."""
    if model.mixed:
        raise ValueError("codebooks: got some beside a model whose layers differ in shape, supported: layers of one "
                         "shape")
    for name, got, wanted in (("layers", read.layers, model.layers), ("head-dim", read.head_dim, model.head_dim),
                              ("kv-heads", read.num_heads_kv, model.num_heads_kv)):
        if got != wanted:
            raise ValueError(f"codebooks: made for {name} {got}, supported: {wanted}, the model's")
    return list(dict.fromkeys([*(formats or FORMATS), read.format]))


def _suggest_table(rows: list[budget.Row]) -> Table:
    shown = table("format", "bits/elt", "cache GB", "fits", "max batch", "floor ms/token", "kernels ms", "x 16 bit",
                  "x step", "note")
    for row in rows:
        if not row.cache_gb:
            shown.add_row(row.format, *["-"] * 8, escape(row.reason))
            continue
        step, measured = ("-" if x is None else f"{x:.{n}f}" for x, n in ((row.step_ratio, 2), (row.measured_ms, 3)))
        shown.add_row(row.format, f"{row.bits:.2f}", f"{row.cache_gb:.2f}", "yes" if row.fits else "no",
                      str(row.max_batch), f"{row.floor_ms:.3f}", measured, f"{row.ratio:.2f}", step, row.reason)
    return shown
