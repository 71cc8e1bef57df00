"""Runs one small case of every kernel variant under compute-sanitizer and records the outcome of each tool.

A run without a tool comes first and builds the kernels that are missing: what a compiler asks of the driver is not the
kernels', but counts as theirs. The bindings that CuTe-DSL imports, version 13.3, look for 34 functions that a driver of
CUDA 13.0 does not have, and memcheck calls each an error. Hazards in a kernel of cuBLAS are counted apart: racecheck
names one in the product of a linear layer's dequantize path (H200, ca6547ebf536). Where the tool is told to leave such
kernels out, later launches fail with illegal addresses, under it alone (H100, a1d33ff096b3).
"""

import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import typer
from provenance import ROOT, append_result, digest, provenance

FILES = tuple(f"tests/gpu/test_gpu{part}.py" for part in (
    "", "_register", "_cache", "_pair", "_level_sharing", "_level_windows"))
TOOLS = ("memcheck", "racecheck", "synccheck")
NOT_OURS = re.compile(r"Error: Race reported between \w+ access at nvjet_")  # cuBLAS's names


def main(tool: list[str] = list(TOOLS), selection: str = "one_small_case or bytes or every_number_of_tokens",
         output: str = "perf/results/sanitizer.jsonl", file: list[str] = list(FILES)) -> None:
    """Run the tests of each FILE that match SELECTION under each TOOL; exits with 1 if one found an error or failed."""
    tests = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-n", "0", "-p", "no:cacheprovider", "-k", selection,
             *file]
    alone = subprocess.run(tests, cwd=ROOT, capture_output=True, text=True)
    if alone.returncode:
        print(f"without a tool: exit status {alone.returncode}\n{(alone.stdout + alone.stderr)[-6000:]}")
        raise typer.Exit(1)
    failed = False
    for name in tool:
        started = time.time()
        text = subprocess.run(["compute-sanitizer", "--tool", name, *tests], cwd=ROOT, capture_output=True, text=True,
                              env=os.environ | {"LOWBIT_ATTN_NO_JIT": "1"}).stdout
        errors = [int(n) for n in re.findall(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)", text)]
        others, of_tests = len(NOT_OURS.findall(text)), re.sub(r"={9}( .*)?\n", "", text)  # what a tool says mid-line
        passed, bad = (re.findall(rf"::(\S+) {word}", of_tests) for word in ("PASSED", "FAILED"))
        files = {} if tuple(file) == FILES else {"files": [Path(one).stem for one in file]}
        line = {"tool": name, "selection": selection, **files, "seconds": round(time.time() - started),
                "errors": sum(errors) - others, "errors_of_cublas": others, "summaries": len(errors),
                "passed": len(passed), "failed": len(bad), "tests_sha256": digest(passed)}
        append_result(output, provenance() | line)
        print(f"{name}: {len(passed)} passed, {len(bad)} failed, {line['errors']} errors in {line['seconds']} s")
        if bad or line["errors"] or not errors:
            print(text[-6000:])
            print("\n".join(f"{count} x {what}" for what, count in kinds(text).most_common()))
            failed = True
    raise typer.Exit(int(failed))


def kinds(text: str) -> Counter[str]:
    """How often a tool named each error, of any address."""
    named = re.findall(r"^=+ (?=\S)(?!COMPUTE-SANITIZER|\w+ SUMMARY)(.+)$", text, re.M)
    return Counter(re.sub(r"0x[0-9a-f]+", "0x..", what) for what in named)


if __name__ == "__main__":
    typer.run(main)
