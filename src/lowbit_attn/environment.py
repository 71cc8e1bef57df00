"""What this machine has for building and running the kernels: facts only, nothing is printed."""

import platform
import shutil
import subprocess
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch

from lowbit_attn import compile, dispatch, entries, extras, prebuilt, toolchain
from lowbit_attn.kernels import KernelKey

DSLS = {"tilelang": "tilelang", "cutedsl": "nvidia-cutlass-dsl"}  # name -> distribution
DSL_REMEDY = toolchain.PACKAGE_REMEDY
BINUTILS = ("nvdisasm", "cuobjdump")  # read built kernels, for their checks
NEEDS = {"hopper": ("cutedsl", "tilelang", "nvcc", "gcc", *BINUTILS), "ampere": ("tilelang", "nvcc", "gcc", *BINUTILS)}


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

    kernels_built: by target, those that would be loaded; kernels_stale: of other sources or tools; kernels_damaged:
    cut, changed, or open to others; cache_problem: why no kernel can be kept or trusted there, "" if all is well;
    next_steps: what to do, in this order.
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
    next_steps: tuple[str, ...]


def gather() -> Environment:
    """Look at this process's Python, the installed packages, the tools and the devices. Imports no DSL."""
    gpus = tuple(_gpu(index) for index in range(torch.cuda.device_count()))
    tools = {"gcc": _gcc(), "nvcc": _nvcc("nvcc")} | {name: _package(package) for name, package in DSLS.items()}
    tools |= {name: _nvcc(name) for name in BINUTILS}
    driver = _driver()
    kept = _survey()
    return Environment(
        lowbit_attn=metadata.version("lowbit-attn"),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        torch=torch.__version__,
        cuda_runtime=torch.version.cuda,
        driver=driver,
        gpus=gpus,
        tools=tools,
        cache_dir=kept.folder,
        kernels_built=kept.built,
        kernels_stale=kept.stale,
        kernels_damaged=kept.damaged,
        cache_problem=kept.problem,
        will_use=will_use(gpus, tools, kept.built),
        next_steps=next_steps(gpus, tools, kept, driver, torch.version.cuda),
    )


def will_use(gpus: tuple[Gpu, ...], tools: dict[str, Tool], built: dict[str, int]) -> str:
    """One sentence: what a decode call runs on here, and what it lacks."""
    if not gpus:
        return "the torch reference on the CPU: no CUDA device"
    gpu = gpus[0]
    if gpu.reason:
        return f"path='reference' only: {gpu.reason}"
    missing = [name for name in NEEDS[gpu.arch] if tools[name].version is None]
    count = built.get(gpu.target, 0)
    if not missing:
        return f"the {gpu.arch} kernels for {gpu.target} on {gpu.name}; {count} built, others are built at first use"
    if count:
        return f"the {count} built {gpu.arch} kernels for {gpu.target} on {gpu.name}; no others, without {missing[0]}"
    return f"path='reference' only: no {gpu.target} kernels are built, and building needs {' and '.join(missing)}"


def next_steps(gpus: tuple[Gpu, ...], tools: dict[str, Tool], kept: "Kept", driver: str | None,
               cuda_runtime: str | None) -> tuple[str, ...]:
    """What to do on this machine, in order, each in a sentence; the last is always something to try."""
    arch = gpus[0].arch if gpus else ""
    needed = NEEDS.get(arch, tuple(tools))
    faults = {name: tools[name].remedy for name in needed if tools[name].remedy}
    steps = {remedy: f"{name} {'is missing' if tools[name].version is None else f'is {tools[name].version}'}: {remedy}"
             for name, remedy in reversed(faults.items())}  # one step for each remedy
    found = list(reversed(steps.values()))
    if kept.problem:
        found.insert(0, f"The kernel cache cannot be used: {kept.problem}")
    if not arch:
        found = [f"Only to build kernels here for another machine: {step}" for step in found]
        if driver and not cuda_runtime:
            found.insert(0, "This torch is for CPUs, and a driver is there: install a torch that is built for CUDA")
        return *found, ("Try it on the CPU, where everything is exact and slow: make demo in a clone, or "
                        f"{extras.remedy('demo')}, then lowbit-attn generate \"The capital of France is\"")
    if not kept.built.get(gpus[0].target):
        ahead = f"build the kernels ahead (make {arch}; minutes to hours), or let each be built at its first use"
        found.append(f"Install a kernel wheel of {arch}, or {ahead}")
    gain = "See what your model gains: lowbit-attn suggest --model FOLDER, then lowbit-attn quality --model FOLDER"
    return *found, "Time it beside 16 bit: lowbit-attn bench", gain


def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    try:
        (arch, target), reason = dispatch.target_of(torch.device("cuda", index)), ""
    except NotImplementedError as error:
        arch, target, reason = "", "", str(error)
    return Gpu(properties.name, f"{properties.major}.{properties.minor}", properties.total_memory, arch, target, reason)


def _package(name: str) -> Tool:
    version, tested = toolchain.dsl_version(name), toolchain.tested_range(name)
    if version and tested and not toolchain.is_tested(version, tested):
        return Tool(version, remedy=f"tested from {tested[0]} to below {tested[1]}; {DSL_REMEDY}")
    return Tool(version, remedy="" if version else DSL_REMEDY)


def _nvcc(name: str) -> Tool:
    """nvcc, or another program of the CUDA toolkit that tells its version as nvcc does."""
    try:
        path = toolchain.find_tool(name)
    except toolchain.ToolMissingError as error:
        return Tool(None, remedy=str(error).removeprefix(f"{name} not found; "))
    version = toolchain.nvcc_version(path)
    if not version:
        return Tool(None, path, f"{path} does not run; {toolchain.REMEDIES[name]}")
    return Tool(version, path)


def _gcc() -> Tool:
    try:
        path = toolchain.find_tool("gcc")
    except toolchain.ToolMissingError as error:
        return Tool(None, remedy=str(error).removeprefix("gcc not found; "))
    version = (_output([path, "-dumpfullversion"]) or "").strip()
    return Tool(version, path) if version else Tool(None, path, f"{path} does not run; {toolchain.REMEDIES['gcc']}")


def _driver() -> str | None:
    if not shutil.which("nvidia-smi"):
        return None
    answer = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return answer.splitlines()[0].strip() if answer else None


def _output(command: list[str]) -> str | None:
    """Standard output of a command, or None if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=toolchain.PROBE_SECONDS,
                              check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


@dataclass
class Kept:
    """What a cache holds: kernels that would be loaded by target, and how many others."""

    folder: str = "none"
    problem: str = ""
    built: dict[str, int] = field(default_factory=dict)
    stale: int = 0
    damaged: int = 0


def _survey() -> Kept:
    """Count the kernels in the cache and in prebuilt packages."""
    found, folders = Kept(), [(folder, False) for folder in prebuilt.folders()]
    try:
        root = compile.cache_dir()
        found.folder = str(root)
        folders.insert(0, (root, True))
        if root.exists():
            entries.check_trust(root, root)
        found.problem = entries.forbidden(root)
    except (compile.KernelNotBuiltError, OSError) as error:
        found.problem = str(error)
    for root, is_own in folders:
        for file in root.glob("*/*/*/*.json"):
            try:
                _count(found, file, root if is_own else None)
            except (entries.DamagedEntryError, OSError):
                found.damaged += 1
    return found


def _count(found: Kept, file: Path, root: Path | None) -> None:
    facts = entries.read(file)
    try:
        key = KernelKey(**{name: tuple(x) if isinstance(x, list) else x for name, x in facts["key"].items()})
        is_here = file.parents[1] == file.parents[3] / compile.place(key)
        is_current = is_here and bool(compile.take(key, file, root, []))
    except (TypeError, AttributeError, KeyError):  # a key of another version of the package
        is_current = False
    if is_current:
        found.built[key.target] = found.built.get(key.target, 0) + 1
    else:
        found.stale += 1
