"""Whether two commits build the same kernels: instructions, registers and shared memory.

    make same-sass BASE=main                                               the working tree against a commit
    python perf/same_sass.py main --now feature                            a commit against another
    python perf/same_sass.py main --keys '^decode.*sm_90a' --sample 25     pairs of properties of a name, then no more
    python perf/same_sass.py main --rename '^decode-small-/decode-int8-small-/'

Kernels are the shipped set and the GPU tests' fast subset. Each side names them itself, and builds them from a copy of
its sources in a process and a cache folder of its own, with the tools that are installed; what a side has built stays
there for the next comparison with the same sources. Symbols and line tables may differ. Exit code: 0 if all kernels are
the same, 1 if any differs or exists on one side alone, 2 if nothing was compared.
"""

import difflib
import hashlib
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from importlib import metadata
from itertools import combinations
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from lowbit_attn import compile, sass

ROOT = Path(__file__).parent.parent
SIDE_SCRIPT = Path(__file__).with_name("same_sass_side.py")
TOOLS = ("nvidia-cutlass-dsl", "tilelang", "apache-tvm-ffi", "nvidia-cuda-nvcc")
TEST_MODULES = ("windowed.py", "gpu/__init__.py", "gpu/matrix.py")
SHOWN_LINES = 40  # of a difference


class Side(NamedTuple):
    """One of two source trees, as an importable package, and the folder where its kernels are."""

    package: Path
    cache: Path

    def run(self, *arguments: str, names: list[str] = ()) -> subprocess.Popen:
        """same_sass_side.py with this side's package in front of the installed one; ``names`` go to its input."""
        environment = os.environ | {"PYTHONPATH": str(self.package), "LOWBIT_ATTN_CACHE_DIR": str(self.cache)}
        process = subprocess.Popen([sys.executable, str(SIDE_SCRIPT), *arguments], env=environment, text=True,
                                   stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        process.stdin.write(json.dumps(list(names)))
        process.stdin.close()
        return process

    @property
    def listed(self) -> Path:
        return self.cache / "names.json"

    @property
    def results(self) -> Path:
        return self.cache / "built.jsonl"

    def found(self) -> dict[str, dict]:
        """What is built, by name."""
        if not self.results.exists():
            return {}
        lines = [json.loads(line) for line in self.results.read_text().splitlines()]
        return {line["name"]: line for line in lines if "file" not in line or Path(line["file"]).exists()}


def export(commit: str | None, folder: Path) -> Path:
    """The sources of a commit, or of the working tree, in ``folder``."""
    if commit is not None:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        tarfile.open(fileobj=io.BytesIO(archive)).extractall(folder, filter="data")
        return folder
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name.endswith((".py", ".c", ".toml", ".json")) and (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def assemble(tree: Path, package: Path) -> Path:
    """A source tree as importable packages: the folders that pyproject.toml names, put inside each other, and the
    modules of its tests that say which kernels these need."""
    folders = tomllib.loads((tree / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    for name in sorted(folders):
        shutil.copytree(tree / folders[name], package.joinpath(*name.split(".")), dirs_exist_ok=True,
                        ignore=shutil.ignore_patterns("__pycache__"))
    for name in TEST_MODULES:
        if (tree / "tests" / name).exists():
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tree / "tests" / name, package / name)
    return package


def content_hash(package: Path) -> str:
    """Hash of the sources and of the versions of what compiles them."""
    digest = hashlib.sha256(sys.version.encode())
    for tool in TOOLS:
        try:
            digest.update(f"{tool}={metadata.version(tool)};".encode())
        except metadata.PackageNotFoundError:
            digest.update(f"{tool};".encode())
    for file in sorted(package.rglob("*.*")):
        if file.suffix in (".py", ".c"):
            digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def make_side(commit: str | None, scratch: Path) -> Side:
    name = commit or "working-tree"
    tree = scratch / "sources" / name.replace("/", "_")
    tree.mkdir(parents=True)
    package = assemble(export(commit, tree), scratch / "packages" / name.replace("/", "_"))
    cache = compile.cache_dir().parent / "same-sass" / content_hash(package)
    cache.mkdir(parents=True, exist_ok=True)
    return Side(package, cache)


def renamed(name: str, rules: list[str]) -> str:
    """The name that a kernel of the base has now: each rule is /pattern/replacement/ with any separator."""
    for rule in rules:
        pattern, replacement = rule.strip(rule[-1]).split(rule[-1])
        name = re.sub(pattern, replacement, name)
    return name


def properties(name: str) -> set:
    """A kernel's properties by place and value, and each two of them."""
    kernel, _, target = name.partition("@")
    singles = {target, *enumerate(kernel.split("-"))}
    return singles | set(combinations(sorted(singles, key=str), 2))


def sampled(names: list[str], count: int, seed: int) -> list[str]:
    """``count`` names that together have as many pairs of properties as a greedy choice finds."""
    left = {name: properties(name) for name in random.Random(seed).sample(names, len(names))}
    chosen = []
    while left and len(chosen) < count:
        best = max(left, key=lambda name: len(left[name]))
        chosen.append(best)
        seen = left.pop(best)
        left = {name: have - seen for name, have in left.items()}
    return chosen


def build_both(sides: tuple[Side, Side], wanted: tuple[list[str], list[str]], jobs: int) -> None:
    """Build what either side lacks, both at the same time; RuntimeError if a side ends early."""
    missing = [[name for name in names if name not in side.found()] for side, names in zip(sides, wanted)]
    busy = sum(map(bool, missing))
    running = [side.run("build", str(side.results), str(max(1, jobs // busy)), names=names)
               for side, names in zip(sides, missing) if names]
    if any([process.wait() for process in running]):
        raise RuntimeError("a side could not build its kernels; what it printed is above")


def code_of(path: str) -> tuple[bytes, dict[str, bytes]]:
    """(the cubin of a built kernel, its code and constants by kind of section, without the kernel's name)."""
    elf, = sass.cuda_elfs(Path(path).read_bytes())
    kinds = {".text": b"", ".nv.constant": b""}
    for name, content in sass.sections(elf):
        for kind in kinds:
            if name.startswith(kind):
                kinds[kind] += content
    return elf, kinds


def instructions(elf: bytes) -> list[str]:
    """Instructions and labels, without addresses and the kernel's name."""
    text = sass.disassembly(elf)
    name = re.search(r"^\.text\.(\S+):", text, re.M)[1]
    return re.findall(r"^\.L_\w+:|(?<=\*/).*;", text.replace(name, "kernel"), re.M)


def differences(base: dict, head: dict) -> list[str]:
    """Lines that say how two builds of a kernel differ; empty if they do not."""
    if "error" in base or "error" in head:
        mine, theirs = base.get("error", "builds"), head.get("error", "builds")
        return [] if mine == theirs else [f"base: {mine}", f"now: {theirs}"]
    found = [f"{what}: base {base[what]}, now {head[what]}" for what in ("registers", "smem_bytes")
             if base[what] != head[what]]
    (base_elf, base_code), (head_elf, head_code) = code_of(base["file"]), code_of(head["file"])
    if base_code[".nv.constant"] != head_code[".nv.constant"]:
        found.append("constants, or parameters, differ")
    if base_code[".text"] != head_code[".text"]:
        streams = [instructions(elf) for elf in (base_elf, head_elf)]
        lines = list(difflib.unified_diff(*streams, "base", "now", n=2, lineterm=""))
        found += lines[:SHOWN_LINES] or ["the same instructions with other scheduling bits"]
        found += [f"... {len(lines) - SHOWN_LINES} more lines"] * (len(lines) > SHOWN_LINES)
    return found


def chosen(base: list[str], head: list[str], rules: list[str], keys: str, drop: str | None) -> tuple[dict, list[str]]:
    """({base's name: its name now}, names of one side alone) among those that ``keys`` finds and ``drop`` does not."""
    pairs = {name: renamed(name, rules) for name in base if re.search(keys, name)}
    kept = set(head)
    alone = [f"base alone: {name}" for name, now in pairs.items() if now not in kept]
    known = set(pairs.values()) | {renamed(name, rules) for name in base}
    alone += [f"now alone: {name}" for name in head if name not in known and re.search(keys, name)]
    alone = [line for line in alone if not (drop and re.search(drop, line))]
    return {name: now for name, now in pairs.items() if now in kept}, alone


def main(
    base: Annotated[str, typer.Argument(help="commit that is compared with")],
    keys: Annotated[str, typer.Option(help="regular expression of the base's kernel names")] = "",
    now: Annotated[str | None, typer.Option(help="commit instead of the working tree")] = None,
    sample: Annotated[int, typer.Option(help="so many of them, for most pairs of properties; 0: all")] = 0,
    seed: Annotated[int, typer.Option(help="of the sample")] = 0,
    rename: Annotated[list[str], typer.Option(help="/pattern/replacement/ from the base's names to those of now")] = [],
    drop: Annotated[str | None, typer.Option(help="kernels that one side alone may have: regular expression")] = None,
    jobs: Annotated[int, typer.Option(help="compilations at once, of both sides together")] = os.cpu_count() or 1,
) -> None:
    """Compare the kernels of the working tree, or of a second commit, with those of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        sides = make_side(base, Path(folder)), make_side(now, Path(folder))
        listing = [side.run("list", str(side.listed)) for side in sides if not side.listed.exists()]
        if any([process.wait() for process in listing]):
            raise typer.Exit(2)
        pairs, alone = chosen(*(json.loads(side.listed.read_text()) for side in sides), rename, keys, drop)
        names = sampled(list(pairs), sample, seed) if sample else list(pairs)
        build_both(sides, (names, [pairs[name] for name in names]), jobs)
        before, after = (side.found() for side in sides)
    broken = 0
    for name in names:
        if lines := differences(before[name], after[pairs[name]]):
            broken += 1
            print(f"{name} -> {pairs[name]}" if name != pairs[name] else name, *lines, "", sep="\n")
    print(*alone, sep="\n", end="\n" * bool(alone))
    failed = sum("error" in after[pairs[name]] for name in names)
    print(f"{len(names)} of {len(pairs)} kernels compared with {base}: {broken} differ, {failed} of them do not build; "
          f"{len(alone)} on one side alone")
    raise typer.Exit(2 if not names else int(bool(broken or alone)))


if __name__ == "__main__":
    typer.run(main)
