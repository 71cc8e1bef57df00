"""Finds the compilers and libraries that building kernels needs, and says what to install where one is missing."""

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from pathlib import Path

NVCC_REMEDY = ("pip install 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-cccl==13.0.*' "
               "'nvidia-cuda-runtime==13.0.*' 'nvidia-nvvm==13.0.*', or install a CUDA toolkit and set CUDA_HOME")
REMEDIES = {
    "nvcc": NVCC_REMEDY,
    "nvdisasm": "pip install nvidia-cuda-nvdisasm",
    "cuobjdump": "pip install nvidia-cuda-cuobjdump",
    "gcc": "install gcc",
}


class ToolMissingError(RuntimeError):
    """A program or library that the call needs is not installed; the message says how to get it."""


def find_tool(name: str) -> str:
    """Path of a program; ToolMissingError with the remedy if there is none."""
    for folder in _tool_folders():
        if (folder / name).is_file():
            return str(folder / name)
    if found := shutil.which(name):
        return found
    raise ToolMissingError(f"{name} not found; {REMEDIES.get(name, f'install {name}')}")


def site_file(relative: str) -> Path | None:
    """A file of an installed package by its path below the import folders, without importing the package."""
    return next((path for entry in sys.path if (path := Path(entry or ".") / relative).is_file()), None)


def package_dir(name: str) -> Path:
    """Folder of an installed package; ToolMissingError if it is not installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ToolMissingError(f"{name} is not installed; pip install 'lowbit-attn[kernels]'")
    return Path(spec.origin).parent


def dsl_version(package: str) -> str | None:
    """Installed version of a DSL distribution ("tilelang", "nvidia-cutlass-dsl"), or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _tool_folders():
    if home := os.environ.get("CUDA_HOME"):
        yield Path(home) / "bin"
    for entry in sys.path:
        yield Path(entry or ".") / "nvidia" / "cu13" / "bin"
    yield Path("/usr/local/cuda/bin")
