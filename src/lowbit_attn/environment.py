"""What this machine has for building and running the kernels: facts only, nothing is printed."""

import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata

import torch

from lowbit_attn import compile, dispatch, toolchain

DSLS = {"tilelang": "tilelang", "cutedsl": "nvidia-cutlass-dsl"}  # name -> distribution
DSL_REMEDY = toolchain.PACKAGE_REMEDY


@dataclass(frozen=True)
class Gpu:
    """One CUDA device; ``reason`` says why its kernels are not served, "" if they are."""

    name: str
    capability: str
    memory_bytes: int
    arch: str
    target: str
    reason: str


@dataclass(frozen=True)
class Tool:
    """A program or package; ``version`` is None where it is missing, and ``remedy`` then says what to do."""

    version: str | None
    path: str | None = None
    remedy: str = ""


@dataclass(frozen=True)
class Environment:
    """Everything ``doctor`` shows.

    kernels_built: by target, those that would be loaded; kernels_stale: of other sources or tools; kernels_damaged: cut,
    changed, or open to others; cache_problem: why no kernel can be kept or trusted there, "" if all is well.
    """

    lowbit_attn: str
    python: str
    platform: str
    torch: str
    cuda_runtime: str | None
    driver: str | None
    gpus: tuple[Gpu, ...]
    tools: dict[str, Tool]
    cache_dir: str
    kernels_built: dict[str, int]
    kernels_stale: int
    kernels_damaged: int
    cache_problem: str
    will_use: str


def gather() -> Environment:
    """Look at this process's Python, the installed packages, the tools and the devices. Imports no DSL."""
    gpus = tuple(_gpu(index) for index in range(torch.cuda.device_count()))
    tools = {"nvcc": _nvcc()} | {name: _package(package) for name, package in DSLS.items()}
    kept = compile.survey()
    return Environment(
        lowbit_attn=metadata.version("lowbit-attn"),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        torch=torch.__version__,
        cuda_runtime=torch.version.cuda,
        driver=_driver(),
        gpus=gpus,
        tools=tools,
        cache_dir=kept.folder,
        kernels_built=kept.built,
        kernels_stale=kept.stale,
        kernels_damaged=kept.damaged,
        cache_problem=kept.problem,
        will_use=will_use(gpus, tools, kept.built),
    )


def will_use(gpus: tuple[Gpu, ...], tools: dict[str, Tool], built: dict[str, int]) -> str:
    """One sentence: what a decode call runs on here, and what it lacks."""
    if not gpus:
        return "the torch reference on the CPU: no CUDA device"
    gpu = gpus[0]
    if gpu.reason:
        return f"path='reference' only: {gpu.reason}"
    needs = {"hopper": ("cutedsl", "tilelang", "nvcc"), "ampere": ("tilelang", "nvcc")}[gpu.arch]
    missing = [name for name in needs if tools[name].version is None]
    count = built.get(gpu.target, 0)
    if not missing:
        return f"the {gpu.arch} kernels for {gpu.target} on {gpu.name}; {count} built, others are built at first use"
    if count:
        return f"the {count} built {gpu.arch} kernels for {gpu.target} on {gpu.name}; no others, without {missing[0]}"
    return f"path='reference' only: no {gpu.target} kernels are built, and building needs {' and '.join(missing)}"


def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    try:
        (arch, target), reason = dispatch.target_of(torch.device("cuda", index)), ""
    except NotImplementedError as error:
        arch, target, reason = "", "", str(error)
    return Gpu(properties.name, f"{properties.major}.{properties.minor}", properties.total_memory, arch, target, reason)


def _package(name: str) -> Tool:
    version, tested = toolchain.dsl_version(name), toolchain.tested_version(name)
    if version and tested not in (None, version):
        return Tool(version, remedy=f"tested with {tested}; {DSL_REMEDY}")
    return Tool(version, remedy="" if version else DSL_REMEDY)


def _nvcc() -> Tool:
    try:
        path = toolchain.find_tool("nvcc")
    except toolchain.ToolMissingError as error:
        return Tool(None, remedy=str(error))
    version = toolchain.nvcc_version(path)
    if not version:
        return Tool(None, path, f"{path} does not run; {toolchain.NVCC_REMEDY}")
    return Tool(version, path)


def _driver() -> str | None:
    if not shutil.which("nvidia-smi"):
        return None
    answer = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return answer.splitlines()[0].strip() if answer else None


def _output(command: list[str]) -> str | None:
    """Standard output of a command, or None if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=toolchain.PROBE_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
