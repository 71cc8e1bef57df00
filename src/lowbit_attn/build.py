"""``python -m lowbit_attn.build --arch hopper``: builds and checks an architecture's shipped kernels, without a GPU."""

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lowbit_attn import compile, emit, kernels, promised, toolchain
from lowbit_attn.kernels import KernelKey
from lowbit_attn.kernels.registry import APPENDING
from lowbit_attn.progress import bar

_RECORDED = re.compile(r"(\S+) (\S+) (\S+) ([0-9a-f]{16})")  # kernel, architecture, operation, fingerprint


def build_all(keys: list[KernelKey], jobs: int | None = None, force: bool = False,
              initializer: Callable[[], None] | None = None) -> Iterator[tuple[KernelKey, str]]:
    """Build kernels in parallel processes; yields (key, what went wrong or "") as each ends.

    Targets of one source follow each other in one process, and what takes longest comes first. initializer: a module's
    function that each process calls first.
    """
    groups: dict[KernelKey, list[KernelKey]] = {}
    for key in keys:
        groups.setdefault(emit.source_of(key), []).append(key)
    with ProcessPoolExecutor(jobs or os.cpu_count(), initializer=initializer) as pool:
        futures = {pool.submit(_build_each, group, force): group for group in sorted(groups.values(), key=_quickness)}
        for future in _shown(as_completed(futures), futures):
            if error := future.exception():  # the process died
                yield from ((key, f"{type(error).__name__}: {error}") for key in futures[future])
            else:
                yield from zip(futures[future], future.result())


def _shown(ended: Iterator, groups: dict[object, list[KernelKey]]) -> Iterator:
    """Pass futures on as they end, and show on a terminal how many kernels are done, and the time left."""
    with bar(Console(stderr=True), "kernels") as progress:
        task = progress.add_task("building", total=sum(map(len, groups.values())))
        for future in ended:
            progress.advance(task, len(groups[future]))
            yield future


def _build_each(keys: list[KernelKey], force: bool = False) -> list[str]:
    """What went wrong with each, in words: not every exception can pass between processes."""
    found = []
    for i, key in enumerate(keys):
        if i:
            emit.hand_on(keys[i - 1], key)
        found.append(_build(key, force))
    return found


def _build(key: KernelKey, force: bool) -> str:
    try:
        compile.build(key, force)
    except Exception as error:  # whatever it is, the others must still be built
        return f"{type(error).__name__}: {error}"
    return ""


def _quickness(group: list[KernelKey]) -> tuple:
    """Steps of a cache take longest, and among them those of boosted channels and of wide heads."""
    key = group[0]
    return key.op not in APPENDING, not key.format.startswith("kitty"), -key.head_dim


def main(
    arch: Annotated[list[str], typer.Option(help="hopper or ampere; may be given twice")],
    force: Annotated[bool, typer.Option(help="rebuild what is up to date")] = False,
    perf: Annotated[bool, typer.Option(help="also build what the benchmarks compare with")] = False,
    every: Annotated[bool, typer.Option("--all", help="all kernels that the support tables promise")] = False,
    rotation: Annotated[int, typer.Option(help="about so many of these kernels: those of the seed")] = 0,
    seed: Annotated[int, typer.Option(help="of the rotation")] = 0,
    jobs: Annotated[int | None, typer.Option(help="parallel compilations; default: one a core")] = None,
    record: Annotated[Path | None, typer.Option(help="file with a line for each kernel built; those in it are passed "
                                                     "over: a run that was cut off goes on, on any machine")] = None,
) -> None:
    """Build the shipped kernels, check their SASS and shared memory, and print what came out."""
    console = new_console()
    found = promised.promised if every else kernels.shipped_keys
    keys = list(dict.fromkeys(key for name in arch for key in found(name)))
    if rotation:
        total, keys = len(keys), promised.rotation(keys, rotation, seed)
        console.print(f"{len(keys)} of {total} kernels, as --rotation {rotation} --seed {seed} names them")
    keys += [key for name in arch for key in kernels.baselines(name) if perf]
    build_and_report(keys, console, jobs, force, with_table=not every or bool(rotation), record=record)


def new_console() -> Console:
    """A console that is wide enough for the table where the output is no terminal."""
    return Console(width=None if Console().is_terminal else 150)


def build_and_report(keys: list[KernelKey], console: Console, jobs: int | None = None, force: bool = False,
                     with_table: bool = True, initializer: Callable[[], None] | None = None,
                     record: Path | None = None) -> None:
    """Build what is missing of these kernels, print failures, a table of all and their number, and end the command.

    Raises typer.Exit: 0, 1 if a kernel failed, 2 if a tool is missing without which none can be built. See
    ``build_all`` for ``initializer``. record: a file of lines, a kernel and the fingerprint of its sources, to which
    what is built now is added; kernels that it has are left out, wherever they were built.
    """
    for tool in ("gcc", "nvdisasm", "cuobjdump"):
        if missing := _missing(tool):
            console.print(f"nothing built: {missing}", style="red", markup=False)
            raise typer.Exit(2)
    if missing := _missing("nvcc"):
        skipped = [key for key in keys if kernels.needs_nvcc(key)]
        keys = [key for key in keys if key not in skipped]
        console.print(f"{len(skipped)} TileLang kernels skipped: {missing}", style="yellow", markup=False)
    if record:
        done = recorded(record)
        keys = [key for key in keys if str(key) not in done]
        console.print(f"{len(done)} kernels were built before, as {record} says")
    wanted = [k for k in keys if force or not compile.find(k)]
    failed = {}
    for key, error in build_all(wanted, jobs, force, initializer):
        if error:
            failed[key] = error
            console.print(f"{key}: {error}", style="red", markup=False)
        elif record:
            _add(record, key)
    if with_table:
        console.print(_table([k for k in keys if k not in failed]))
    console.print(f"{len(keys) - len(failed)} kernels in {compile.cache_dir()}, "
                  f"{len(wanted) - len(failed)} of them built now; {len(failed)} failed")
    raise typer.Exit(bool(failed))


def recorded(path: Path) -> set[str]:
    """Kernels that a record says were built of today's sources; a line that was cut off while written says nothing."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [entry.groups() for line in lines if (entry := _RECORDED.fullmatch(line))]
    return {kernel for kernel, arch, op, made_of in found if made_of == compile.fingerprint(arch, op)}


def _add(path: Path, key: KernelKey) -> None:
    with path.open("a") as file:
        file.write(f"\n{key} {key.arch} {key.op} {compile.fingerprint(key.arch, key.op)}\n")


def _missing(tool: str) -> str:
    """What to do about a tool that is not installed; empty if it is."""
    try:
        toolchain.find_tool(tool)
    except toolchain.ToolMissingError as error:
        return str(error)
    return ""


def _table(keys: list[KernelKey]) -> Table:
    table = Table("kernel", "target", "registers", "spills", "smem B", "seconds", "SASS (static count)")
    for key in keys:
        entry = compile.find(key).facts
        numbers = (str(entry[field]) for field in ("registers", "spills", "smem_total_bytes", "seconds"))
        table.add_row(key.name, key.target, *numbers, " ".join(f"{op} {n}" for op, n in entry["sass"].items()))
    return table


if __name__ == "__main__":
    typer.run(main)
