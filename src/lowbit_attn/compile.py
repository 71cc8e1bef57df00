"""The kernel cache: finds built kernels, and builds what is missing, without a GPU.

Where. ``kernels`` in LOWBIT_ATTN_CACHE_DIR, which may be relative or begin with ~, or else in the user's cache folder.
A kernel NAME of TARGET is two files, binary and facts (entries.py), in a folder for all that must agree:

    FINGERPRINT/TARGET-ffiABI/TOOLS/NAME.so, NAME.json; while it is built NAME.lock, NAME.builder; if it fails NAME.log

FINGERPRINT  hash of the source text that the kernel is made from, found by following names (closure.py) from its
             program, its checks and the code that emits it. Code that finds, keeps and loads kernels is not in it.
ABI          of tvm_ffi, through which kernels are called: its minor version, not its patch release.
TOOLS        versions of the DSL, nvcc and Python that built it. Where the DSL is installed, a kernel of other versions
             is passed over and built again; where it is not, any is taken: kernels are carried to such machines. With
             LOWBIT_ATTN_NO_JIT a TileLang kernel of other versions is taken, too. CuTe-DSL's need their own runtime.

Then in ``kernels`` of the installed packages that prebuilt.py names, with the same layout, which is only read.

Trust. Folders are made for the user alone. A kernel is loaded if its file and folders, up to ``kernels``, belong to the
user or root and nobody else may write them, and if its sha256 is in its entry. Folders above are not looked at: who
could swap ``kernels`` would own what came in its place. Prebuilt packages are trusted as far as Python imports them.

Building. Processes that want the same kernel wait for the first, LOWBIT_ATTN_LOCK_SECONDS at most. Whatever goes wrong
is one KernelNotBuiltError of one line with a remedy.
"""

import hashlib
import logging
import os
import platform
import re
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_cache_dir

from lowbit_attn import closure, emit, entries, kernels, prebuilt, sass, toolchain
from lowbit_attn.errors import KernelCheckError, KernelNotBuiltError
from lowbit_attn.kernels import KernelKey
from lowbit_attn.kernels.registry import MODULES, is_cute, program

LOCK_SECONDS = 600.0
LOCK_QUIET_SECONDS = 2.0  # of waiting before it is told
TOOLS = {True: ("tilelang", "nvcc", "python"), False: ("nvidia-cutlass-dsl", "python")}  # by kernels.needs_nvcc
NOT_IN_KERNELS = frozenset({"lowbit_attn.toolchain"})  # finds tools, whose versions are in the entry
log = logging.getLogger("lowbit_attn")


@dataclass(frozen=True)
class Built:
    """A kernel that is ready to load, and the facts of its entry."""

    path: Path
    facts: dict


def cache_dir() -> Path:
    """Where built kernels live; the first call in a process fixes what a relative path means."""
    name = os.environ.get("LOWBIT_ATTN_CACHE_DIR")
    try:
        folder = Path(name).expanduser() if name else Path(user_cache_dir("lowbit_attn"))
        if not name and not folder.is_absolute():
            raise RuntimeError
        return _fixed(folder) / "kernels"
    except (RuntimeError, KeyError, OSError):
        raise KernelNotBuiltError(f"no folder for kernels: {name or 'the home folder'} cannot be found; set "
                                  "LOWBIT_ATTN_CACHE_DIR to a folder that can be written") from None


@cache
def _fixed(folder: Path) -> Path:
    return folder.absolute()


@cache
def fingerprint(arch: str, op: str) -> str:
    """Hash of all source text that such a kernel is made from."""
    registry = "lowbit_attn.kernels.registry"
    roots = [(MODULES[program(arch, op)], closure.ALL), (registry, "trace"), (registry, "checks"),
             ("lowbit_attn.emit", "emit_cute" if is_cute(arch, op) else "emit_tilelang")]
    configs = {"decode": f"{arch}.config", "linear": "linear.config", "pair": f"{arch}.pair.config"}
    roots += [(MODULES[configs[op]], "checks")] if op in configs else []
    texts = [f"{module} {name}\n{text}\n" for (module, name), text in closure.texts(roots, NOT_IN_KERNELS).items()]
    texts += [emit.LAUNCH.read_text()] * (not is_cute(arch, op))
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def so_path(key: KernelKey) -> Path:
    """Where a kernel that is built here goes."""
    tools = "-".join(f"{name.split('-')[-1]}{version or ''}" for name, version in versions(key).items())
    return cache_dir() / place(key) / tools / f"{key.name}.so"


def place(key: KernelKey) -> Path:
    """Folder of a kernel in a cache, where its builds by different tools have folders."""
    return Path(fingerprint(key.arch, key.op)) / f"{key.target}-ffi{toolchain.tvm_ffi_abi()}"


def versions(key: KernelKey) -> dict[str, str | None]:
    """Versions of what builds such a kernel here; None: not installed."""
    return {name: _version(name) for name in TOOLS[kernels.needs_nvcc(key)]}


def _version(tool: str) -> str | None:
    if tool == "python":
        return ".".join(platform.python_version_tuple()[:2])
    if tool != "nvcc":
        return toolchain.dsl_version(tool)
    try:
        return toolchain.nvcc_version(toolchain.find_tool("nvcc"))
    except toolchain.ToolMissingError:
        return None


def look(key: KernelKey) -> tuple[Built | None, list[str]]:
    """(the kernel if there is one to load, why others of its name were passed over)."""
    notes = []
    try:
        folders = [(cache_dir(), True)]
    except KernelNotBuiltError as error:
        folders, notes = [], [str(error)]
    packages = prebuilt.folders()
    for root, is_own in [*folders, *((folder, False) for folder in packages)]:
        for file in sorted((root / place(key)).glob(f"*/{key.name}.json"), reverse=True):
            try:
                if built := take(key, file, root if is_own else None, notes):
                    return built, notes
            except (entries.DamagedEntryError, OSError) as error:
                notes.append(str(error))
    return None, notes + [note for root in packages if (note := prebuilt.why_not(root, place(key), key.name))]


def take(key: KernelKey, file: Path, root: Path | None, notes: list[str]) -> Built | None:
    """The kernel of an entry, None with a note if other tools built it; root: its cache, if trust is to be checked."""
    if root:
        for path in filter(Path.exists, (file, file.with_suffix(".so"))):
            entries.check_trust(path, root)
    facts = entries.read(file)
    if facts["tvm_ffi_abi"] != toolchain.tvm_ffi_abi():
        raise entries.DamagedEntryError(f"{file} is damaged: it is for {toolchain.TVM_FFI} {facts['tvm_ffi_abi']}, in "
                                        f"the folder of {toolchain.tvm_ffi_abi()}")
    others = other_tools(key, facts)
    may_take = not others or (bool(os.environ.get("LOWBIT_ATTN_NO_JIT")) and kernels.needs_nvcc(key))
    path = entries.check_binary(file, facts)
    if not may_take:
        notes.append(f"{path} is built with {others}")
    return Built(path, facts) if may_take else None


def other_tools(key: KernelKey, facts: dict) -> str:
    """How the tools here differ from those that built a kernel; empty also where they are not installed."""
    here = versions(key)
    if None in list(here.values())[:1]:  # the DSL
        return ""
    other = [f"{name} {facts['built_with'].get(name)}, here is {version}" for name, version in here.items()
             if version not in (None, facts["built_with"].get(name))]
    return "; ".join(other)


def find(key: KernelKey) -> Built | None:
    """A kernel that is ready to load, or None."""
    return look(key)[0]


def build(key: KernelKey, force: bool = False) -> Built:
    """Compile one kernel, check it and enter it into the cache, unless it is there; force: also if it is."""
    path = so_path(key)
    try:
        emit.require(key)
        entries.make_folders(path.parent)
        entries.check_trust(path.parent, cache_dir())
        with _lock(key, path):
            if found := not force and find(key):
                return found
            log.info("building %s, which is done once", key)
            return _build(key, path)
    except KernelNotBuiltError:
        raise
    except Exception as error:
        raise KernelNotBuiltError(_reason(key, path, error)) from error


def _build(key: KernelKey, path: Path) -> Built:
    started = time.time()
    unfinished = path.with_suffix(".tmp")
    function, smem_bytes = emit.emit(key, unfinished)
    facts = {"name": str(key), "key": asdict(key), "fingerprint": fingerprint(key.arch, key.op), "function": function,
             "tvm_ffi_abi": toolchain.tvm_ffi_abi(), "smem_bytes": smem_bytes,
             "built_with": versions(key) | {toolchain.TVM_FFI: toolchain.dsl_version(toolchain.TVM_FFI)}}
    facts |= check(key, unfinished, smem_bytes)
    entries.write(unfinished, path, facts | {"seconds": round(time.time() - started, 1)})
    path.with_suffix(".log").unlink(missing_ok=True)
    return Built(path, entries.read(path.with_suffix(".json")))


def check(key: KernelKey, path: Path, smem_bytes: int) -> dict:
    """Static checks of a built kernel; KernelCheckError on the first broken one."""
    wanted = kernels.checks(key)
    found, = sass.inspect(path)
    total = smem_bytes + found.static_smem_bytes
    spills = sum(found.ops[name] for name in sass.SPILLS)
    broken = [f"no {names}" for names in found.missing(wanted.need)]
    broken += [f"{name} x{found.ops[name]}" for name in wanted.forbid if found.ops[name]]
    if total > kernels.SMEM_LIMIT_BYTES[key.target]:
        broken.append(f"{total} B of shared memory, limit {kernels.SMEM_LIMIT_BYTES[key.target]}")
    if wanted.smem_bytes is not None and wanted.smem_bytes != total:
        broken.append(f"{total} B of shared memory, planned {wanted.smem_bytes}")
    if broken:
        path.unlink()
        raise KernelCheckError(f"{key}: {'; '.join(broken)}")
    shown = sorted({name for names in wanted.need for name in names.split("|")})
    return {"registers": found.registers, "spills": spills, "smem_total_bytes": total,
            "sass": {name: found.ops[name] for name in shown if found.ops[name]}}


@contextmanager
def _lock(key: KernelKey, path: Path) -> Iterator[None]:
    """Hold the kernel's lock; says for whom it waits, and gives up after LOWBIT_ATTN_LOCK_SECONDS."""
    lock, holder = FileLock(path.with_suffix(".lock")), path.with_suffix(".builder")
    limit = _lock_seconds()
    try:
        lock.acquire(timeout=min(LOCK_QUIET_SECONDS, limit))
    except Timeout:
        who = _who(holder)
        log.warning("%s is being built by %s; waiting up to %g s for %s", key, who, limit, lock.lock_file)
        try:
            lock.acquire(timeout=limit)
        except Timeout:
            raise KernelNotBuiltError(f"{key} has been built by {who} for more than {limit:g} s; stop it if it hangs, "
                                      "or set LOWBIT_ATTN_LOCK_SECONDS to wait longer") from None
    try:
        holder.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _lock_seconds() -> float:
    text = os.environ.get("LOWBIT_ATTN_LOCK_SECONDS")
    if text and not re.fullmatch(r"\d+(\.\d*)?", text):
        raise KernelNotBuiltError(f"LOWBIT_ATTN_LOCK_SECONDS: got {text!r}, supported: a number of seconds")
    return float(text or LOCK_SECONDS)


def _who(holder: Path) -> str:
    try:
        return holder.read_text() or "another process"
    except (OSError, ValueError):
        return "another process"


def elsewhere(key: KernelKey) -> str:
    """How to get a kernel onto a machine that cannot build it."""
    make = f"make {key.arch}" if key.op == "decode" else "make hopper or make ampere"
    return f"run {make} where the tools are and copy its kernels to {cache_dir()}, or install a kernel wheel"


def _reason(key: KernelKey, path: Path, error: Exception) -> str:
    """One line: what failed and what to do."""
    text = str(error)
    if isinstance(error, toolchain.ToolMissingError):
        return f"{key} is not built and cannot be built here: {text}; or {elsewhere(key)}"
    if isinstance(error, entries.UntrustedError):
        return f"{key} is not built: {text}"
    where = _write_log(path, error)
    text = (text.strip().splitlines() or [""])[0][:300]
    if isinstance(error, OSError) or "No space left" in text:
        return (f"{key} cannot be built: {text}; free space or allow writing there, or set LOWBIT_ATTN_CACHE_DIR to "
                "another folder")
    if isinstance(error, toolchain.ToolFailedError):
        return f"{key} cannot be built: {text}; all of its output is in {where}"
    dsl = TOOLS[kernels.needs_nvcc(key)][0]
    tested = " to below ".join(toolchain.tested_range(dsl) or ("no version",))
    return (f"{key} cannot be built with {dsl} {_version(dsl)}, tested with {tested}: {type(error).__name__}: {text}; "
            f"{toolchain.PACKAGE_REMEDY}; details are in {where}")


def _write_log(path: Path, error: Exception) -> str:
    """Write all that is known of a failed build beside the kernel; the file's name."""
    file = path.with_suffix(".log")
    try:
        file.write_text("".join(traceback.format_exception(error)) + getattr(error, "output", ""))
    except OSError:
        return "no file, which could not be written"
    return str(file)
