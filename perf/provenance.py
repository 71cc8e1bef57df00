"""Where a measured number comes from: commit, date, GPU, driver; and the lines of results that say so."""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import torch
import typer

ROOT = Path(__file__).resolve().parent.parent


def need(gpu: bool = True, program: str | None = None) -> None:
    """End a command with one line if there is no CUDA device, or no such program, on this machine."""
    if gpu and not torch.cuda.is_available():
        raise typer.BadParameter("this measurement needs a CUDA device, and torch sees none")
    if program and not shutil.which(program):
        raise typer.BadParameter(f"this measurement needs the program {program}, which is not on PATH")


def provenance() -> dict:
    """commit (with "+dirty" if the tree differs from it in more than results), date, gpu, driver, torch version."""
    return {"commit": commit(), "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none", "driver": driver(),
            "torch": torch.__version__}


def commit() -> str:
    """The checked-out commit, or LOWBIT_ATTN_COMMIT where the tree came without its history."""
    if named := os.environ.get("LOWBIT_ATTN_COMMIT"):
        return named
    try:
        head = _run("git", "rev-parse", "--short=12", "HEAD")
        changed = _run("git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)perf/results")
        return head + ("+dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def driver() -> str:
    try:
        return _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        return "none"


def digest(names: Iterable[str]) -> str:
    """First 16 hex digits of the SHA-256 of the sorted names, a line each: what a result says instead of a list."""
    return hashlib.sha256("".join(f"{name}\n" for name in sorted(names)).encode()).hexdigest()[:16]


def append_result(path: str, line: dict) -> None:
    """Append one JSON line to a results file, relative to the repository."""
    target = ROOT / path
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _run(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
