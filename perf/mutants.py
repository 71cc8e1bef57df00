"""Whether the tests see deliberate faults in kernels, one at a time, each in a copy of the tree.

    make mutants                                      every fault of perf/mutants/, about an hour
    python perf/mutants.py --only tile --output /tmp/mutants.jsonl

A fault is a text of one file and what takes its place: a sign, a bound, a power of two, a packing order, a barrier. It
names the test that should fail then, and only that one is run, under a time limit; a test that hangs has seen it too.
The text must be in its folder exactly once, else the command ends: the fault is out of date. Before, all tests that are
named must pass without a fault. What only a GPU's test can see names that one, and is left out without a GPU. Results,
the last of each fault, go to perf/results/mutants.jsonl; printed is the part that was seen, folder by folder.
"""

import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import torch
import typer
from provenance import ROOT, provenance

FAULTS = ROOT / "perf/mutants"
RESULTS = "perf/results/mutants.jsonl"
KINDS = ("sign", "bound", "power", "packing", "barrier")
SECONDS = 300  # of a test; a busy machine compiles slowly
GPU_TESTS = "tests/gpu/"


@dataclass(frozen=True)
class Fault:
    what: str
    kind: str
    folder: str
    old: str
    new: str
    test: str  # a pytest id
    timeout: int = SECONDS

    @property
    def needs_gpu(self) -> bool:
        return self.test.startswith(GPU_TESTS)

    def file(self, tree: Path) -> str:
        """The file with the fault's text, relative to the tree; ValueError unless the text is there exactly once."""
        found = Counter({path: path.read_text().count(self.old) for path in sorted((tree / self.folder).rglob("*"))
                         if path.suffix in (".py", ".c")})
        if found.total() != 1:
            raise ValueError(f"{self.what}: its text is {found.total()} times in {self.folder}/, must be once:\n"
                             f"{self.old}")
        return next(found.elements()).relative_to(tree).as_posix()


def faults() -> list[Fault]:
    """All of perf/mutants/, whose tests have names of their own in each file."""
    found = []
    for path in sorted(FAULTS.glob("*.toml")):
        given = tomllib.loads(path.read_text())
        for fault in given["fault"]:
            found.append(Fault(**(fault | {"folder": given["folder"],
                                           "test": given["tests"].get(fault["test"], fault["test"])})))
    names = Counter(fault.what for fault in found)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"faults of one name: {', '.join(twice)}")
    if others := {fault.kind for fault in found} - {*KINDS}:
        raise ValueError(f"kind: got {', '.join(sorted(others))}, supported: {', '.join(KINDS)}")
    return found


def copy_tree(target: Path) -> None:
    """The working tree's files that git knows or would add, with the kernels' folders inside the package."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name.endswith((".py", ".c", ".toml", ".json")) and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    for folder in ("hopper", "ampere"):
        (target / "src/lowbit_attn" / folder).symlink_to(target / folder)


def run_tests(tree: Path, tests: list[str], seconds: float) -> tuple[bool, str]:
    """(whether all passed, how it ended) of tests of a tree, in a process that has imported the compilers before; tests
    of a GPU get a new one, since what a compiler does with CUDA on import would break it in the fork."""
    log = tree / "build/tests.log"
    child = os.fork()
    if child == 0:
        in_child(tree, tests, log)
    end = time.monotonic() + seconds
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.1)
    if ended == (0, 0):
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return False, f"{seconds:.0f} s were over"
    code, output = os.waitstatus_to_exitcode(ended[1]), log.read_text()
    last = output.strip().splitlines()[-1] if output.strip() else ""
    if code == 0 and re.search(r"\d+ passed", last) and "skipped" not in last:
        return True, "passed"
    if code == 1 and re.search(r"\d+ (failed|error)", last):
        return False, reason(output)
    raise RuntimeError(f"{' '.join(tests)}: pytest ended with {code}\n{output[-2000:]}")


def in_child(tree: Path, tests: list[str], log: Path) -> None:
    """Run tests and end: the package and the tests are those of the tree, and all output goes to a file."""
    os.setsid()
    os.chdir(tree)
    (tree / "build/cache").mkdir(parents=True, exist_ok=True, mode=0o700)
    os.environ["LOWBIT_ATTN_CACHE_DIR"] = str(tree / "build/cache")
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    words, code = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests], 3
    try:
        if any(test.startswith(GPU_TESTS) for test in tests):
            path = os.pathsep.join([str(tree / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
            os.execve(sys.executable, [sys.executable, "-m", "pytest", *words], os.environ | {"PYTHONPATH": path})
        sys.path.insert(0, str(tree / "src"))
        code = int(pytest.main(words))
    finally:
        sys.stdout.flush()
        os._exit(code)


def import_compilers() -> None:
    """What takes tests seconds to import, where it is there; nothing of the package itself."""
    for name in ("cutlass.cute", "tilelang", "hypothesis"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert "lowbit_attn" not in sys.modules


def reason(output: str) -> str:
    """What pytest says at last of a test that failed, in a few words."""
    found = re.findall(r"^E\s+((?!File)\S.*)$", output, re.M)
    return found[0][:120] if found else "failed"


def rewrite(path: Path, text: str) -> None:
    """A new text, and no compiled one: Python compares times and sizes, which two texts may share."""
    path.write_text(text)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def try_fault(tree: Path, fault: Fault, origin: dict) -> dict:
    """The result of one fault in a copy of the tree, which is as before afterwards; origin: of the copy."""
    path = tree / (name := fault.file(tree))
    text, start = path.read_text(), time.monotonic()
    rewrite(path, text.replace(fault.old, fault.new))
    try:
        passed, how = run_tests(tree, [fault.test], fault.timeout)
    finally:
        rewrite(path, text)
    return {"fault": fault.what, "kind": fault.kind, "file": name, "test": fault.test, "seen": not passed, "how": how,
            "seconds": round(time.monotonic() - start, 1), **origin}


def table(lines: list[dict], left_out: list[tuple[str, Fault]]) -> str:
    """The part of the faults that was seen, by folder; left_out: (file, fault) of those that need a GPU."""
    files = [line["file"] for line in lines] + [file for file, _ in left_out]
    folders = sorted(set(map(os.path.dirname, files)))
    rows = []
    for folder in (*folders, ""):
        own = [line["seen"] for line in lines if not folder or os.path.dirname(line["file"]) == folder]
        without = sum(not folder or os.path.dirname(file) == folder for file, _ in left_out)
        score = f"{100 * sum(own) / (len(own) + without):.0f} %"
        rows.append((folder or "all", len(own) + without, sum(own), len(own) - sum(own), without, score))
    head = ("folder", "faults", "seen", "not seen", "need a GPU", "score")
    widths = [max(len(str(row[i])) for row in (head, *rows)) for i in range(len(head))]
    return "\n".join("  ".join([str(row[0]).ljust(widths[0]), *(str(x).rjust(w) for x, w in zip(row[1:], widths[1:]))])
                     for row in (head, *rows))


def main(only: Annotated[str, typer.Option(help="a part of the name, file or test of a fault")] = "",
         left: Annotated[bool, typer.Option(help="only faults that have no result yet")] = False,
         baseline: Annotated[bool, typer.Option(help="run the named tests without a fault before")] = True,
         output: Annotated[str, typer.Option(help="results, a line a fault")] = RESULTS) -> None:
    """Try every fault; exit code 1 if one was not seen."""
    known, target = faults(), ROOT / output
    old = [json.loads(line) for line in target.read_text().splitlines()] if target.exists() else []
    results = {line["fault"]: line for line in old}
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else asking makes CUDA unusable in forked tests
    has_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        (tree / "build").mkdir()
        import_compilers()
        origin = provenance()
        files = {fault.what: fault.file(tree) for fault in known}
        chosen = [fault for fault in known if (has_gpu or not fault.needs_gpu) and not (left and fault.what in results)
                  and any(only in text for text in (fault.what, files[fault.what], fault.test))]
        if baseline and chosen:
            passed, how = run_tests(tree, sorted({fault.test for fault in chosen}), SECONDS * len(chosen))
            if not passed:
                raise typer.BadParameter(f"a test fails without a fault: {how}")
        for i, fault in enumerate(chosen):
            line = results[fault.what] = try_fault(tree, fault, origin)
            seen = "seen    " if line["seen"] else "NOT SEEN"
            print(f"{i + 1:3} of {len(chosen)}  {seen} {line['seconds']:5.0f} s  {line['file']}: {fault.what} "
                  f"({line['how']})", flush=True)
            kept = [results[one.what] for one in known if one.what in results]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text("".join(json.dumps(line) + "\n" for line in kept))
    lines = [results[fault.what] for fault in known if fault.what in results]
    left_out = [(files[fault.what], fault) for fault in known if fault.needs_gpu and fault.what not in results]
    print(table(lines, left_out))
    raise typer.Exit(not all(line["seen"] for line in lines))


if __name__ == "__main__":
    typer.run(main)
