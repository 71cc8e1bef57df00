"""Finds the compilers and libraries that building kernels needs, and says what to install where one is missing."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from lowbit_attn import extras
from lowbit_attn.errors import ToolFailedError, ToolMissingError

NVCC_REMEDY = "pip install 'cuda-toolkit[nvcc,cccl]>=13.0.2,<13.1', or install a CUDA toolkit and set CUDA_HOME"
REMEDIES = {
    "nvcc": NVCC_REMEDY,
    "nvdisasm": "pip install nvidia-cuda-nvdisasm",
    "cuobjdump": "pip install nvidia-cuda-cuobjdump",
    "gcc": "install gcc",
}
PACKAGE_REMEDY = extras.remedy("kernels")
TVM_FFI = "apache-tvm-ffi"
TVM_FFI_NEEDED = f"{TVM_FFI}>=0.1.12,<0.2"
TVM_FFI_ABI = "0.1"  # that kernels are built for where it is not installed; pyproject.toml allows no other
PROBE_SECONDS = 10  # longest wait for a program to tell its version


def find_tool(name: str) -> str:
    """Path of a program; ToolMissingError with the remedy if there is none."""
    home = os.environ.get("CUDA_HOME")
    if name == "nvcc" and home and not (Path(home) / "bin" / name).is_file():
        raise ToolMissingError(f"CUDA_HOME is {home}, which has no bin/nvcc; set it to a CUDA toolkit or unset it")
    for folder in _tool_folders():
        if (folder / name).is_file():
            return str(folder / name)
    if found := shutil.which(name):
        return found
    raise ToolMissingError(f"{name} not found; {REMEDIES.get(name, f'install {name}')}")


def run(command: list[str], cwd: str) -> None:
    """Run a program to its end; ToolFailedError with what it printed if it fails."""
    ended = subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True, errors="replace")
    if ended.returncode:
        printed = f"{' '.join(command)}\nexit status {ended.returncode}\n"
        raise ToolFailedError(Path(command[0]).name, ended.stdout + printed if ended.stdout.strip() else printed)


@cache
def nvcc_version(path: str) -> str | None:
    """The release of an nvcc, such as 13.0.88; None if it does not tell."""
    try:
        shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=PROBE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    release = re.search(r"release [\d.]+, V([\d.]+)", shown.stdout)
    return release and release[1]


def site_file(relative: str) -> Path | None:
    """A file of an installed package by its path below the import folders, without importing the package."""
    return next((path for entry in sys.path if (path := Path(entry or ".") / relative).is_file()), None)


def package_dir(name: str, remedy: str = PACKAGE_REMEDY) -> Path:
    """Folder of an installed package; ToolMissingError if it is not installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ToolMissingError(f"{name} is not installed; {remedy}")
    return Path(spec.origin).parent


def tvm_ffi_dir() -> Path:
    """Folder of the package that every kernel is loaded with."""
    return package_dir("tvm_ffi", f"pip install '{TVM_FFI_NEEDED}'")


def tvm_ffi_abi() -> str:
    """Version of the binary interface between kernels and tvm_ffi: its releases of one minor version share it."""
    installed = dsl_version(TVM_FFI)
    return ".".join(installed.split(".")[:2]) if installed else TVM_FFI_ABI


@cache
def dsl_version(package: str) -> str | None:
    """Installed version of a distribution ("tilelang", "nvidia-cutlass-dsl"), or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def tested_range(package: str) -> tuple[str, str] | None:
    """(first version, first one beyond) of a DSL distribution that this package names as tested; None where it is not
    installed itself."""
    try:
        needed = importlib.metadata.requires("lowbit-attn") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for text in needed:
        if re.match(rf"{re.escape(package)}(?![\w.-])", text):
            bounds = dict(re.findall(r"(>=|<)([\d.]+)", text.partition(";")[0]))
            return bounds[">="], bounds["<"]
    return None


def is_tested(version: str, bounds: tuple[str, str]) -> bool:
    """Whether a version is in a range of ``tested_range``: by its numbers, up to the first part that is none."""
    def numbers(text: str) -> list[int]:
        return [int(part) for part in re.match(r"\d+(?:\.\d+)*", text)[0].split(".")]

    return numbers(bounds[0]) <= numbers(version) < numbers(bounds[1])


def _tool_folders():
    if home := os.environ.get("CUDA_HOME"):
        yield Path(home) / "bin"
    for entry in sys.path:
        yield Path(entry or ".") / "nvidia" / "cu13" / "bin"
    yield Path("/usr/local/cuda/bin")
