"""``lowbit-attn info``: which kernel serves a decode call, and where a page keeps its bytes."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import typer
from rich.markup import escape

from lowbit_attn import KVCache, compile, dispatch, kernels
from lowbit_attn.cache import attached, rope
from lowbit_attn.cli import books, level_info, level_plot
from lowbit_attn.cli.common import JsonOption, console, fail, format_named, table
from lowbit_attn.cli.model import DEMO, ModelOption
from lowbit_attn.formats import Format, levels, unnamed
from lowbit_attn.kernels import KernelKey
from lowbit_attn.layout import PAGE_TOKENS


@dataclass(frozen=True)
class Served:
    """How one target serves a call. reasons: why its paths do not, where none does (kernel is then "").

    kernel_rows: query rows of a KV head at once; passes: blocks of them, each of which reads the cache again; splits:
    CTAs a sequence and KV head, None where no device tells; registers and smem_bytes: None unless built.
    """

    target: str
    kernel: str = ""
    path: str = ""
    kernel_rows: int = 0
    passes: int = 0
    splits: int | None = None
    is_built: bool = False
    registers: int | None = None
    smem_bytes: int | None = None
    reasons: tuple[str, ...] = ()


def info(
    format: Annotated[str, typer.Argument(help="A format: k4v4, k2v2-g32, kitty, ...; or levels: lean, ...")],
    heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Channels of a head.")] = 128,
    batch: Annotated[int, typer.Option(help="Sequences decoded together.")] = 1,
    q_len: Annotated[int, typer.Option(help="New tokens of a sequence.")] = 1,
    seqlen: Annotated[int, typer.Option(help="Tokens of the longest sequence.")] = 32768,
    dtype: Annotated[str, typer.Option(help="float16 or bfloat16.")] = "float16",
    arch: Annotated[str | None, typer.Option(help="hopper or ampere; default: this GPU's, else both.")] = None,
    path: Annotated[str | None, typer.Option(help="Only this decode path; default: the dispatcher's pick.")] = None,
    feature: Annotated[list[str] | None, typer.Option(help="softcap or window; repeatable.")] = None,
    codebooks: books.BooksOption = None,
    plot: level_plot.PlotOption = None,
    model: ModelOption = DEMO,
    text: level_plot.TextOption = None,
    tokens: level_plot.TokensOption = 2048,
    thresholds: level_plot.ThresholdsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which kernel the dispatcher picks for a decode call, why not another, and a page's byte map.

    Of levels: where a head's tokens are; with --plot, where those of a model's heads are after a text.
    """
    try:
        pair = levels.parse(format)
        if pair is not None:
            _check(heads, kv_heads, batch, q_len, seqlen, dtype, arch, feature or ())
    except ValueError as error:
        fail(error)
    for name, value in (("text", text), ("thresholds", thresholds)):
        if value is not None and plot is None:
            fail(f"{name}: got {str(value)!r} without --plot, supported: beside --plot FILE")
    if plot is not None:
        if pair is None:
            fail(f"plot: got a file beside format {format}, supported: levels (lean, lean-low, ...)")
        level_plot.check(plot, text)
        level_plot.make(pair, plot, model, text, tokens, level_plot.thresholds_named(thresholds))
        return
    if pair is not None:
        level_info.show(pair, kv_heads, head_dim, batch, seqlen, as_json)
        return
    fmt = format_named(format)
    try:
        record = fmt.record(head_dim)
        _check(heads, kv_heads, batch, q_len, seqlen, dtype, arch, feature or ())
        read = None if codebooks is None else books.loaded(codebooks)
        if read is not None:
            attached.check(read, fmt, kv_heads, head_dim)
    except ValueError as error:
        fail(error)
    features = tuple(name for name in kernels.FEATURES if name in (feature or ()))
    is_pre_rope = read is not None and read.rope == "pre"
    served = [_served(name, target, fmt, heads, kv_heads, head_dim, batch, q_len, seqlen, dtype, path, features,
                      is_pre_rope, [] if read is None else rope.missing(read)) for name, target in _targets(arch)]
    planes = [(side, plane.name, plane.offset, plane.nbytes)
              for side, part in (("K", record.k_planes), ("V", record.v_planes)) for plane in part]
    if as_json:
        typer.echo(json.dumps({
            "format": fmt.name, "record_bytes": record.nbytes, "bits_per_element": fmt.bits_per_element(head_dim),
            "shared_bytes": fmt.shared_bytes(head_dim), "codebooks": None if read is None else read.hash,
            "bytes_per_token": record.nbytes * kv_heads / PAGE_TOKENS, "served": [asdict(one) for one in served],
            "planes": [dict(zip(("side", "name", "offset", "bytes"), plane)) for plane in planes]}, indent=1))
        return
    _print_served(served)
    _print_record(fmt, head_dim, kv_heads, record, planes)
    if fmt.needs_codebooks:
        console().print(f"Beside its pages a layer has {fmt.shared_bytes(head_dim):,} bytes of codebooks a KV head; "
                        + ("lowbit-attn calibrate makes them." if read is None else books.described(read)),
                        soft_wrap=True)


def _check(heads: int, kv_heads: int, batch: int, q_len: int, seqlen: int, dtype: str, arch: str | None,
           features) -> None:
    for name, value in (("batch", batch), ("seqlen", seqlen)):
        if value < 1:
            raise ValueError(f"{name}: got {value}, supported: 1 or more")
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(f"heads: got {heads}, supported: multiples of kv-heads = {kv_heads}")
    if not 1 <= q_len <= dispatch.MAX_Q_LEN:
        raise ValueError(f"q-len: got {q_len}, supported: 1 to {dispatch.MAX_Q_LEN}")
    for name, value, supported in (("dtype", dtype, kernels.SHIPPED_DTYPES),
                                   ("arch", arch, (None, *kernels.ARCH_TARGETS)),
                                   *(("feature", feature, kernels.FEATURES) for feature in features)):
        if value not in supported:
            raise ValueError(f"{name}: got {value}, supported: {', '.join(map(str, filter(None, supported)))}")


def _targets(arch: str | None) -> list[tuple[str, str]]:
    """(arch, target) pairs to show: this GPU's own, else every one that kernels are shipped for."""
    if arch is None and torch.cuda.is_available():
        try:
            return [dispatch.target_of(torch.device("cuda"))]
        except NotImplementedError as error:
            fail(error)
    return [(name, target) for name, targets in kernels.SHIPPED_TARGETS.items() for target in targets
            if arch in (None, name)]


def _served(arch: str, target: str, fmt: Format, heads: int, kv_heads: int, head_dim: int, batch: int, q_len: int,
            seqlen: int, dtype: str, path: str | None, features: tuple[str, ...], is_pre_rope: bool,
            unread: list[str]) -> Served:
    rows = heads // kv_heads * q_len
    if path not in (None, *kernels.arch_package(arch).PATHS):
        return Served(target, reasons=(f"path: {path!r} is not known on {arch}, supported: "
                                       f"{', '.join(kernels.arch_package(arch).PATHS)}",))
    picked, reasons = kernels.pick(arch, fmt, head_dim, getattr(torch, dtype), rows, path, features,
                                   is_pre_rope)
    refused = kernels.no_codebooks(arch, fmt, head_dim, is_pre_rope) or unread
    passed_over = reasons if picked is None or not fmt.needs_codebooks else []  # which no codebook could have
    reasons = unnamed(fmt) + (refused or passed_over)
    if picked is None or refused:
        return Served(target, reasons=tuple(reasons))
    key = kernels.decode_key(arch, target, dtype, head_dim, fmt.name, *picked, features=features)
    passes = -(-rows // key.rows)
    key, splits = _launch(key, kv_heads, batch, passes, seqlen, q_len, path)
    built = compile.find(key)
    facts = built.facts if built else {}
    return Served(target, key.name, kernels.path_name(key), key.rows, passes, splits, bool(built),
                  facts.get("registers"), facts.get("smem_total_bytes"), tuple(reasons))


def _launch(key: KernelKey, kv_heads: int, batch: int, passes: int, seqlen: int, q_len: int,
            path: str | None) -> tuple[KernelKey, int | None]:
    """(kernel, splits) as the dispatcher decides on this GPU; splits None: no GPU of this target, or no splits."""
    if not torch.cuda.is_available() or dispatch.target_of(torch.device("cuda"))[1] != key.target:
        return key, None
    cache = KVCache(key.format, 1, kv_heads, key.head_dim, getattr(torch, key.dtype), "cuda", max_batch=batch,
                    max_seqlen=seqlen, max_q_len=q_len)
    if path is None:
        key = dispatch.for_shape(key, batch * kv_heads * passes, cache.table.shape[1],
                                 dispatch.running_ctas(cache.device, 1))
    if kernels.is_even(key):
        return key, None  # all CTAs share all sequences
    return key, dispatch.default_splits(cache, batch * passes * kv_heads, key)


def _print_served(served: list[Served]) -> None:
    shown = table("target", "kernel", "rows", "passes", "splits", "built", "registers", "smem B")
    for one in served:
        if one.kernel:
            numbers = (one.kernel_rows, one.passes, one.splits, "yes" if one.is_built else "no", one.registers,
                       one.smem_bytes)
            shown.add_row(one.target, one.kernel, *("-" if n is None else str(n) for n in numbers))
    out = console()
    out.print(shown)
    for one in served:
        for reason in one.reasons:
            out.print(f"{one.target}: not {'' if one.kernel else 'served: '}{escape(reason)}", soft_wrap=True)
    if any(one.kernel and not one.is_built for one in served):
        out.print("A kernel that is not built is built at its first use (`make hopper`, `make ampere` build ahead).")


def _print_record(fmt: Format, head_dim: int, kv_heads: int, record, planes) -> None:
    out = console()
    out.print(f"\nA page is {PAGE_TOKENS} tokens; its record for one KV head has {record.nbytes:,} bytes "
              f"({fmt.bits_per_element(head_dim):.3f} bits per element); a token takes "
              f"{record.nbytes * kv_heads / PAGE_TOKENS:,.1f} bytes over {kv_heads} KV heads.", soft_wrap=True)
    shown = table("side", "plane", "offset", "bytes")
    for side, name, offset, nbytes in planes:
        shown.add_row(side, name, f"{offset:,}", f"{nbytes:,}")
    out.print(shown)
