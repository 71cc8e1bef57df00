"""Exact instruction counts of the default kernels, recorded for the versions of the tools that built them.

    python perf/sass_counts.py compare            what differs from the record, of kernels that are built
    python perf/sass_counts.py compare --build    the same of all, which builds what is missing
    python perf/sass_counts.py write              builds what is missing and records all for the tools that are here

Other versions of the DSL or of nvcc emit other instructions, so only records of the same ones are compared; those of
others stay in the file. A change of a kernel that is meant writes its records anew, and the diff shows what it cost.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from page_loop import multiplies_of_codes, page_loop

from lowbit_attn import compile, kernels, sass
from lowbit_attn.kernels import KernelKey

FILE = Path(__file__).with_name("sass_counts.jsonl")
FORMATS, DTYPE, HEAD_DIM, TARGETS = ("k4v4", "k2v2", "kitty"), "float16", 128, ("sm_90a", "sm_80")

app = typer.Typer(add_completion=False, no_args_is_help=True)


def default_keys() -> list[KernelKey]:
    """Decode kernels that most calls take, and one that reads pages, which is built in seconds."""
    shipped = [key for arch in kernels.ARCH_TARGETS for key in kernels.shipped_keys(arch)]
    decode = [key for key in shipped if key.op == "decode" and key.format in FORMATS and key.target in TARGETS
              and (key.dtype, key.head_dim) == (DTYPE, HEAD_DIM) and not (key.arch == "ampere" and is_rare(key))]
    return decode + [key for key in shipped if (key.op, key.target, key.head_dim) == ("dequantize", "sm_90", HEAD_DIM)
                     and key.format == FORMATS[0] and key.variant == "k"]


def is_rare(key: KernelKey) -> bool:
    """Whether few calls take a decode kernel of Ampere: for more query rows, or by another path than the default."""
    return key.rows > 8 or kernels.path_name(key) != "register"


def record_of(key: KernelKey, path: Path, tools: dict[str, str]) -> dict:
    """What is recorded of a built kernel."""
    found, = sass.inspect(path)
    counts = {name: n for name, n in sorted(found.ops.items()) if "." not in name}
    line = {"kernel": str(key), "tools": tools, "registers": found.registers, "counts": counts}
    if key.op == "decode" and not counts.keys() & {"HGMMA"}:
        line["page_loop"] = page_loop(path, multiplies_of_codes(key))
    return line


def tools_of(key: KernelKey) -> dict[str, str]:
    """Versions of what decides a kernel's instructions here, without Python's; None: not installed."""
    return {name: version for name, version in compile.versions(key).items() if name != "python"}


def read(file: Path = FILE) -> list[dict]:
    """All records."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def recorded(key: KernelKey, lines: Iterable[dict]) -> dict | None:
    """The record of a kernel by the tools that are installed here, or None."""
    tools = tools_of(key)
    return next((line for line in lines if (line["kernel"], line["tools"]) == (str(key), tools)), None)


def differences(found: dict, line: dict) -> Iterator[str]:
    """How a kernel differs from its record, a text each."""
    if found["registers"] != line["registers"]:
        yield f"registers {line['registers']} -> {found['registers']}"
    if (loop := list(found.get("page_loop", []))) != (before := line.get("page_loop", [])):
        yield f"page loop, its multiplies {before} -> {loop}"
    for name in sorted(found["counts"].keys() | line["counts"].keys()):
        before, after = line["counts"].get(name, 0), found["counts"].get(name, 0)
        if before != after:
            yield f"{name} {before} -> {after}"


def compared(key: KernelKey, lines: Iterable[dict], build: bool) -> list[str] | None:
    """Differences of a kernel from its record; None: there is no record by these tools, or it is not built."""
    line = recorded(key, lines)
    if line is None:
        return None
    built = compile.build(key) if build else compile.find(key)
    return built and list(differences(record_of(key, built.path, line["tools"]), line))


@app.command()
def write(file: Path = FILE) -> None:
    """Record the default kernels, which builds what is missing; a record is written as soon as it is made."""
    lines = read(file) if file.exists() else []
    for key in default_keys():
        built = compile.build(key)
        line = record_of(key, built.path, tools_of(key))
        lines = [x for x in lines if (x["kernel"], x["tools"]) != (line["kernel"], line["tools"])] + [line]
        file.write_text("".join(json.dumps(x) + "\n" for x in sorted(lines, key=json.dumps)))
        typer.echo(f"{key}: {sum(line['counts'].values())} instructions, {line['registers']} registers")


@app.command()
def compare(build: Annotated[bool, typer.Option(help="Build kernels that are missing.")] = False,
            file: Path = FILE) -> None:
    """Show how the default kernels differ from their records; fails if one does."""
    lines, passed, differing = read(file), 0, 0
    for key in default_keys():
        found = compared(key, lines, build)
        passed += found is None
        differing += bool(found)
        if found:
            typer.echo(f"{key}: {', '.join(found)}")
    typer.echo(f"{len(default_keys()) - passed} compared, {differing} differ, {passed} without a record or not built")
    raise typer.Exit(differing > 0)


if __name__ == "__main__":
    app()
