"""Times decode attention of other libraries beside ours, over the same random data on one GPU.

    python perf/peers.py run --shape 8,32,8,128,32768      a line a peer in perf/results/peers.jsonl, a table on screen
    python perf/peers.py run --dry                         small shapes on the CPU: errors are real, times are no GPU's
    python perf/peers.py table                             the newest lines of each shape and GPU

Every peer runs in a process of its own with fp16 queries of N(0, 1), L2 flushed before each call, medians; one that
cannot run is a line with the reason. An error is |o - want| / |want|, want from fp64 attention over the values that the
peer's own cache holds: what its arithmetic adds, not what its format loses. "host": a call that no CUDA graph holds, so
that launching it is in its time. The read is the faster of a plain and a hinted one of the cache's bytes.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from peer_attention import first_line, flash_attention_2, flash_attention_4, flashinfer, sdpa
from peer_caches import kivi_like, lowbit, quantized_cache
from peer_case import Data, Shape, Step, Unavailable, data_of, error_of, time_us
from peer_vllm import vllm_int4, vllm_turboquant
from provenance import ROOT, append_result, need, provenance
from rich.console import Console
from rich.table import Table

app = typer.Typer(no_args_is_help=True, add_completion=False)

RESULTS = "perf/results/peers.jsonl"
SHAPES = ("1,32,8,128,131072", "8,32,8,128,32768")
SMALL = "2,8,2,64,320"  # of a dry run
SHAPE_KEYS = ("batch", "heads", "kv_heads", "head_dim", "seqlen")
LIMIT_S = 400  # of one peer, its own compiler included
PEERS: dict[str, Callable[[Shape, Data], list[Step]]] = {
    **{f"sdpa {name}": sdpa(name) for name in ("flash", "cudnn", "efficient", "math")},
    "flashinfer fp16": flashinfer(torch.float16), "flashinfer fp8": flashinfer(torch.float8_e4m3fn),
    "flashinfer nvfp4": flashinfer(torch.uint8),
    "flash-attn 4": flash_attention_4, "flash-attn 2": flash_attention_2,
    **{f"transformers {backend} {bits}": quantized_cache(backend, bits) for backend in ("quanto", "hqq")
       for bits in (4, 2)},
    "kivi-like 4": kivi_like(4), "kivi-like 2": kivi_like(2), "vllm int4_per_token_head": vllm_int4,
    **{f"vllm {name}": vllm_turboquant(name) for name in ("turboquant_k8v4", "turboquant_4bit_nc",
                                                          "turboquant_3bit_nc")},
    "lowbit k4v4": lowbit("k4v4"), "lowbit k2v2": lowbit("k2v2"),
}
ResultsOption = Annotated[str, typer.Option(help="JSON lines file of the repository.")]


def measured(name: str, shape: Shape, device: str) -> dict:
    """The numbers of one peer: of the fastest of its steps; its reason where it has none."""
    line = {"peer": name} | shape.line
    try:
        data = data_of(shape, device)
        with torch.inference_mode():
            steps = PEERS[name](shape, data)
            timed = [(*time_us(step), step) for step in steps]
            us, launch, step = min(timed, key=lambda one: one[0])
            error = error_of(step, data.q)
    except Unavailable as reason:
        return line | {"reason": str(reason)}
    except torch.OutOfMemoryError as error:
        return line | {"reason": first_line(error)}
    line |= {"us": round(us, 2), "launch": launch, "error": float(f"{error:.3g}"), "bytes": step.nbytes}
    if device == "cuda":
        from lowbit_attn.bench import HINTED, read_us

        line["read_us"] = round(min(read_us(step.nbytes)[0], read_us(step.nbytes, HINTED)[0]), 2)
    return line | ({"note": step.note} if step.note else {})


@app.command()
def one(name: str, shape: list[str], device: str = "cuda") -> None:
    """Measure one peer here at each shape and print its lines."""
    for text in shape:
        print(json.dumps(measured(name, Shape.parse(text), device)), flush=True)
        torch.cuda.empty_cache()


def in_a_process(name: str, shapes: list[str], device: str) -> list[dict]:
    """What ``one`` prints in a process of its own; a reason for each shape that it ends without."""
    command = [sys.executable, __file__, "one", name, *shapes, "--device", device]
    try:
        ended = subprocess.run(command, text=True, capture_output=True, timeout=LIMIT_S)
        out, last = ended.stdout, (ended.stderr.strip().splitlines() or [""])[-1]
        reason = f"ended with {ended.returncode}: {last[:300]}"
    except subprocess.TimeoutExpired as error:
        out, reason = (error.stdout or b"").decode(), f"no answer in {LIMIT_S} s"
    lines = [json.loads(line) for line in out.splitlines() if line.startswith('{"peer"')]
    return lines + [{"peer": name} | Shape.parse(text).line | {"reason": reason} for text in shapes[len(lines) :]]


@app.command()
def run(
    shape: Annotated[list[str], typer.Option(help="batch,heads,kv_heads,head_dim,seqlen; repeatable.")] = list(SHAPES),
    peer: Annotated[list[str], typer.Option(help="Only this peer; repeatable.")] = [],
    dry: Annotated[bool, typer.Option(help="One small shape on the CPU, nothing written.")] = False,
    output: ResultsOption = RESULTS,
) -> None:
    """Measure the peers at each shape, append a line for each and print a table."""
    if unknown := set(peer) - PEERS.keys():
        raise typer.BadParameter(f"{sorted(unknown)}, supported: {', '.join(PEERS)}", param_hint="--peer")
    try:
        shapes = [SMALL] if dry else [one for one in shape if Shape.parse(one)]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--shape") from None
    if not dry:
        need()
    origin, lines = provenance(), []
    for name in peer or PEERS:
        for line in in_a_process(name, shapes, "cpu" if dry else "cuda"):
            lines.append(line)
            if not dry:
                append_result(output, origin | line)
            print(line, flush=True)
    lines.sort(key=lambda line: shapes.index(",".join(str(line[key]) for key in SHAPE_KEYS)))
    Console(width=160).print(shown(lines, "a CPU: no times of a GPU" if dry else origin["gpu"]))


def shown(lines: list[dict], title: str) -> Table:
    table = Table("case", "peer", "us", "x read", "MB", "error", "launch", "note or reason", title=title)
    for line in lines:
        case = "b{batch} {heads}/{kv_heads} d{head_dim} L{seqlen}".format(**line)
        if "us" not in line:
            table.add_row(case, line["peer"], "-", "-", "-", "-", "-", line["reason"])
            continue
        ratio = f"{line['us'] / line['read_us']:.2f}" if "read_us" in line else "-"
        table.add_row(case, line["peer"], f"{line['us']:.1f}", ratio, f"{line['bytes'] / 1e6:.1f}",
                      f"{line['error']:.1e}", line["launch"], line.get("note", ""))
    return table


def markdown(lines: list[dict]) -> str:
    """docs/performance.md's table of a GPU: a row a peer that ran, in the order of PEERS, a column a shape with time, x
    the fastest read, error."""
    cases, rows = [], {}
    for line in sorted(lines, key=lambda line: [*PEERS].index(line["peer"])):
        case = "{heads}/{kv_heads}, batch {batch}, {0}K".format(line["seqlen"] >> 10, **line)
        cases += [case] * (case not in cases)
        if "us" in line:
            rows.setdefault(line["peer"], {})[case] = (f"{line['us']:,.0f} us, {line['us'] / line['read_us']:.2f}, "
                                                       f"{line['error']:.1e}")
    body = [f"| {name} | " + " | ".join(row.get(case, "-") for case in cases) + " |" for name, row in rows.items()]
    return "\n".join((f"| us, x read, error | {' | '.join(cases)} |", "|---" * (1 + len(cases)) + "|", *body))


@app.command()
def table(
    results: ResultsOption = RESULTS,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="As docs/performance.md has it.")] = False,
) -> None:
    """Print the newest line of each peer, shape and GPU."""
    file, newest = ROOT / results, {}
    for line in map(json.loads, file.read_text().splitlines() if file.exists() else ()):
        newest[line["gpu"], line["peer"], *(line[name] for name in SHAPE_KEYS)] = line
    for gpu in dict.fromkeys(key[0] for key in newest):
        lines = [line for key, line in newest.items() if key[0] == gpu]
        if as_markdown:
            print(f"{gpu}, commits {', '.join(sorted({x['commit'] for x in lines}))}:\n\n{markdown(lines)}\n")
            continue
        Console(width=160).print(shown(lines, f"{gpu}, commits {', '.join(sorted({x['commit'] for x in lines}))}"))


if __name__ == "__main__":
    app()
