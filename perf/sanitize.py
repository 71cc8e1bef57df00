"""Runs one small case of every kernel variant under compute-sanitizer and records the outcome of each tool."""

import re
import subprocess
import sys
import time
from pathlib import Path

import typer
from provenance import ROOT, append_result, digest, provenance

FILES = tuple(f"tests/gpu/test_gpu{part}.py" for part in (
    "", "_register", "_cache", "_pair", "_level_sharing", "_level_windows"))
TOOLS = ("memcheck", "racecheck", "synccheck")


def main(tool: list[str] = list(TOOLS), selection: str = "one_small_case or bytes or every_number_of_tokens",
         output: str = "perf/results/sanitizer.jsonl", file: list[str] = list(FILES)) -> None:
    """Run the tests of each FILE that match SELECTION under each TOOL; exits with 1 if one found an error or failed."""
    failed = False
    for name in tool:
        started = time.time()
        command = ["compute-sanitizer", "--tool", name, sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-n", "0",
                   "-p", "no:cacheprovider", "-k", selection, *file]
        text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
        errors = [int(n) for n in re.findall(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)", text)]
        passed, bad = (re.findall(rf"::(\S+) {word}", text) for word in ("PASSED", "FAILED"))
        files = {} if tuple(file) == FILES else {"files": [Path(one).stem for one in file]}
        line = {"tool": name, "selection": selection, **files, "seconds": round(time.time() - started),
                "errors": sum(errors), "summaries": len(errors), "passed": len(passed), "failed": len(bad),
                "tests_sha256": digest(passed)}
        append_result(output, provenance() | line)
        print(f"{name}: {len(passed)} passed, {len(bad)} failed, {sum(errors)} errors in {line['seconds']} s")
        if bad or sum(errors) or not errors:
            print(text[-6000:])
            failed = True
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    typer.run(main)
