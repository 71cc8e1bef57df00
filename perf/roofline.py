"""What a decode call must read and write, how long its page loop takes to issue, and the time that predicts.

    python perf/roofline.py --preset targets          a table, beside the newest measured times; needs no GPU

bytes       counted from the format's planes; partial results of splits stay on the chip and are shown apart
plain read  time of a plain read of the bytes on the GPU (budget.py), or at --read-tbps
issue       pages of the busiest scheduler x instructions of the built kernel's page loop, one an issue slot
busiest     pages of the busiest SM over those of the mean one: what the read may have to wait for, too
predicted   the larger of the two, and --fixed-us: what a call takes over the read of its bytes at any size (start,
            16-bit tokens, drain, merge); ratio: measured over predicted
"""

import heapq
from dataclasses import dataclass
from typing import Annotated

import sass_counts
import typer
from bench import PRESETS
from decode_results import H200_SMS, RESULTS, kernel_of, most_pages, newest, packed, read_lines
from page_loop import PageLoop, multiplies_of_codes, page_loop
from rich.console import Console
from rich.table import Column, Table

from lowbit_attn import budget, compile, dispatch, kernels
from lowbit_attn.bench import BenchCase, cache_tokens
from lowbit_attn.formats import FORMATS
from lowbit_attn.kernels import KernelKey
from lowbit_attn.layout import PAGE_TOKENS

HALF, WORD = 2, 4  # bytes: 16-bit values; page ids, counters, fp32
SCHEDULERS = 4  # of an SM
COUNTERS = 4  # of a sequence: n_sink, n_qk, n_qv, n_tok
PARTIAL = "partial results"


@dataclass(frozen=True)
class Launch:
    """The grid of a call: ``splits`` CTAs share a sequence's pages, ``row_blocks`` its query rows."""

    key: KernelKey
    splits: int
    row_blocks: int


def launch(case: BenchCase, arch: str, sms: int) -> Launch | None:
    """What the library launches for a case on a GPU of ``sms`` SMs; None where no kernel serves it."""
    key = kernel_of(case, arch, sms)
    if key is None:
        return None
    row_blocks = -(-case.rows // key.rows)
    ctas = case.batch * row_blocks * case.num_heads_kv
    return Launch(key, dispatch.filling_splits(key, ctas, most_pages(case), sms), row_blocks)


def traffic(case: BenchCase, splits: int, sinks: int = 0) -> dict[str, int]:
    """Bytes that a call reads and writes at least once, by what they are; sinks: 16-bit tokens before the pages.

    Each page counts once, also where several blocks of query rows read it: their CTAs are neighbours and share L2.
    """
    record, heads = FORMATS[case.format].record(case.head_dim), case.num_heads_kv
    lengths = [cache_tokens(n) for n in case.lengths]
    pages = [packed(case, n - sinks) for n in lengths]
    found, tokens_16_bit = {}, 2 * sum(lengths)
    sides = ((record.k_planes, record.v_offset), (record.v_planes, record.nbytes - record.v_offset))
    for side, (planes, nbytes), count in zip("kv", sides, map(sum, zip(*pages))):
        found |= {f"{side} {plane.name}": count * heads * plane.nbytes for plane in planes}
        found[f"{side} padding"] = count * heads * (nbytes - sum(plane.nbytes for plane in planes))
        tokens_16_bit -= count * PAGE_TOKENS
    rows = case.batch * case.q_len * case.num_heads
    found["16-bit tokens"] = tokens_16_bit * heads * case.head_dim * HALF
    found["page table"] = WORD * sum(k for k, _ in pages)
    found["counters"] = COUNTERS * WORD * case.batch
    found["q"] = found["o"] = rows * case.head_dim * HALF
    found["lse"] = rows * WORD
    # written and read; Hopper's slots repeat the statistics, half as much again, and are cleared
    found[PARTIAL] = 2 * splits * rows * (case.head_dim + 1) * WORD * (splits > 1)
    return found


def warps_of(key: KernelKey) -> tuple[int, bool] | None:
    """(warps of a CTA, whether all of them take every page, each for its own rows); None: by roles (Hopper's tile
    path), so that a page is no warp's work."""
    fmt = FORMATS[key.format]
    if key.arch == "ampere":
        from lowbit_attn.ampere.config import decode_config

        config = decode_config(fmt, key.head_dim, key.dtype, key.target, kernels.path_name(key), key.rows)
        return config.warps, config.shares_pages
    from lowbit_attn.hopper.config import TILE_PATHS, make_config

    if kernels.path_name(key) in TILE_PATHS:
        return None
    return make_config(kernels.path_name(key), fmt, key.head_dim, key.dtype, key.rows).warps, False


def scheduler_pages(pages: int, warps: int, shares_pages: bool) -> int:
    """Pages that the warps of a CTA's busiest scheduler take, dealt one by one or each to all warps."""
    own = range(0, warps, SCHEDULERS)
    return sum(pages if shares_pages else (pages + warps - 1 - warp) // warps for warp in own)


def pages_by_sm(case: BenchCase, grid: Launch, sms: int) -> list[int]:
    """Pages that each SM's busiest scheduler takes: each CTA, in launch order, goes to the SM with the least."""
    warps = warps_of(grid.key)
    if kernels.is_even(grid.key):
        pages = sum(packed(case, cache_tokens(n))[0] for n in case.lengths) * case.num_heads_kv * grid.row_blocks
        return [scheduler_pages(pages * (sm + 1) // sms - pages * sm // sms, *warps) for sm in range(sms)]
    load = [0] * sms
    for split in range(grid.splits):
        for length in case.lengths:
            pages = packed(case, cache_tokens(length))[0]
            share = pages * (split + 1) // grid.splits - pages * split // grid.splits
            for _ in range(case.num_heads_kv * grid.row_blocks):
                heapq.heapreplace(load, load[0] + scheduler_pages(share, *warps))
    return load


def built_loop(key: KernelKey, build: bool = False) -> PageLoop | None:
    """The page loop of a kernel's SASS, or, of one that is not built, the recorded one; None if there is neither, or
    none that one warp walks."""
    if warps_of(key) is None:
        return None
    if not (built := compile.find(key)) and (line := sass_counts.recorded(key, sass_counts.read())):
        return PageLoop(*line["page_loop"])
    if not built:
        if not build:
            return None
        built = compile.build(key)
    return page_loop(built.path, multiplies_of_codes(key))


@dataclass(frozen=True)
class Prediction:
    """What is predicted of one case. busiest: pages of the busiest SM over those of the mean one; None: warps share
    pages by roles. loop and issue_us None: that, or the kernel is not built."""

    grid: Launch
    nbytes: int
    partial_bytes: int
    loop: PageLoop | None
    read_us: float
    busiest: float | None
    issue_us: float | None
    us: float


def predict(case: BenchCase, grid: Launch, gpu: budget.Gpu, sms: int, clock_ghz: float, fixed_us: float,
            loop: PageLoop | None) -> Prediction:
    """The time of a case from its bytes and its instructions."""
    found = traffic(case, grid.splits)
    nbytes = sum(found.values()) - found[PARTIAL]
    read_us = gpu.read_us(nbytes)
    pages = pages_by_sm(case, grid, sms) if warps_of(grid.key) else None
    busiest = pages and max(pages) * sms / max(1, sum(pages))
    issue_us = loop and max(pages) * loop.instructions / (clock_ghz * 1e3)
    return Prediction(grid, nbytes, found[PARTIAL], loop, read_us, busiest, issue_us,
                      max(read_us, issue_us or 0) + fixed_us)


def table_row(case: BenchCase, found: Prediction, line: dict | None) -> list[str]:
    """The cells of a case; line: the newest measured one."""
    key = found.grid.key
    counts = map(str, found.loop or ("-", "-"))
    busiest = "-" if found.busiest is None else f"{found.busiest:.2f}"
    issue = "-" if found.issue_us is None else f"{found.issue_us:.1f}"
    measured = (f"{line['us']:.1f}", f"{line['us'] / found.us:.2f}", line["commit"]) if line else ("-", "-", "")
    return [str(case), f"{kernels.path_name(key)} r{key.rows}", str(found.grid.splits), f"{found.nbytes / 1e6:.2f}",
            f"{found.partial_bytes / 1e3:.0f}", f"{found.read_us:.1f}", *counts, busiest, issue,
            f"{found.us:.1f}", *measured]


def main(
    preset: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = "targets",
    arch: Annotated[str, typer.Option(help="Whose kernels: hopper or ampere.")] = "hopper",
    gpu: Annotated[str, typer.Option(help=f"Whose plain reads and measured times: {', '.join(budget.GPUS)}.")] = "h200",
    read_tbps: Annotated[float | None, typer.Option(help="A read rate for all sizes instead, in TB/s.")] = None,
    sms: Annotated[int, typer.Option(min=1, help="Of the GPU; default: an H200's.")] = H200_SMS,
    clock_ghz: Annotated[float, typer.Option(help="Of the SMs; default: an H200's at this work.")] = 1.75,
    fixed_us: Annotated[float, typer.Option(help="Added to every call; default: measured on an H200.")] = 5.5,
    build: Annotated[bool, typer.Option(help="Build kernels that are missing.")] = False,
    results: Annotated[str, typer.Option(help="JSON lines file of the repository.")] = RESULTS,
) -> None:
    """Show bytes, bounds and predicted time of a preset's cases."""
    if preset not in PRESETS:
        raise typer.BadParameter(f"{preset!r}, supported: {', '.join(PRESETS)}", param_hint="--preset")
    if arch not in kernels.ARCH_TARGETS:
        raise typer.BadParameter(f"{arch!r}, supported: {', '.join(kernels.ARCH_TARGETS)}", param_hint="--arch")
    try:
        known = measured_on = budget.gpu_named(gpu)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--gpu") from None
    if read_tbps:
        known = budget.Gpu(known.name, known.memory_gb, ((1e9, 1e3 / read_tbps),), "given")
    lines = read_lines(results, arch, measured_on)
    table = Table(*(Column(name, no_wrap=True) for name in (
        "case", "kernel", "splits", "MB", "partial KB", "plain read us", "instr.", "MMA", "busiest", "issue us",
        "predicted", "measured", "ratio", "commit")))
    for case in PRESETS[preset]:
        grid = launch(case, arch, sms)
        if grid is None:
            table.add_row(str(case), "none")
            continue
        found = predict(case, grid, known, sms, clock_ghz, fixed_us, built_loop(grid.key, build))
        table.add_row(*table_row(case, found, newest(lines, case)))
    console = Console(width=190)
    console.print(table)
    console.print(f"{known.name}: reads {known.source}, {sms} SMs, {clock_ghz} GHz; predicted: max(plain read, issue) "
                  f"+ {fixed_us} us. Without instructions (not built, see --build, or the "
                  "tile path): from the read alone", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
