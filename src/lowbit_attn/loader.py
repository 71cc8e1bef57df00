"""Loads built kernels; builds one at its first use when no ``make`` has."""

import ctypes
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from lowbit_attn import compile, emit, entries, toolchain
from lowbit_attn.compile import KernelNotBuiltError
from lowbit_attn.kernels import KernelKey

# What the dynamic linker says where the system, not the file, is the cause
REFUSED = ("failed to map segment", "Permission denied", "Operation not permitted", "cannot enable executable stack")


@cache
def load(key: KernelKey) -> Callable:
    """The kernel as a function of torch tensors (outputs passed in, current stream)."""
    try:
        toolchain.tvm_ffi_dir()
    except toolchain.ToolMissingError as error:
        raise KernelNotBuiltError(f"{key} cannot be loaded: {error}") from error
    built, notes = compile.look(key)
    passed_over = "".join(f"; {note}" for note in notes)
    if built is None and os.environ.get("LOWBIT_ATTN_NO_JIT"):
        raise KernelNotBuiltError(f"{key} is not built and LOWBIT_ATTN_NO_JIT is set{passed_over}; "
                                  f"{compile.elsewhere(key)}")
    if built is None:
        try:
            if reason := entries.forbidden(compile.cache_dir()):  # before minutes of building
                raise KernelNotBuiltError(f"{key} is not built: {reason}")
            built = compile.build(key)
        except KernelNotBuiltError as error:
            raise type(error)(f"{error}{passed_over}") from error
    return _open(key, built)


def _open(key: KernelKey, built: compile.Built) -> Callable:
    try:
        _load_cute_runtime()
        import tvm_ffi

        return tvm_ffi.load_module(str(built.path))[built.facts["function"]]
    except Exception as error:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise KernelNotBuiltError(f"{key} cannot be loaded from {built.path}: {text}; {_remedy(built.path, str(error))}"
                                  ) from error


def _remedy(path: Path, error: str) -> str:
    """What helps where a built kernel cannot be loaded: to build it again does not, where the machine is the cause."""
    if reason := entries.forbidden(path.parent):
        return reason
    if "libcute_dsl_runtime" in error:
        return f"its runtime library is not installed; {toolchain.PACKAGE_REMEDY}"
    missing = re.search(r"([^\s/:]+): cannot open shared object file", error)
    if missing and missing[1] != path.name:
        return f"it needs the library {missing[1]}: install it, or name its folder in LD_LIBRARY_PATH"
    if any(words in error for words in REFUSED):
        return ("this system does not let a library be loaded from there (SELinux or another protection); set "
                "LOWBIT_ATTN_CACHE_DIR to a folder from which it does")
    unset = "unset LOWBIT_ATTN_NO_JIT and " if os.environ.get("LOWBIT_ATTN_NO_JIT") else ""
    return f"{unset}remove it to have it built again"


def argument(tensor: torch.Tensor) -> object:
    """A tensor as kernels take it: converted once, it costs a later call a fifth. It keeps the memory alive."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(tensor)


@cache
def _load_cute_runtime() -> None:
    """Kernels of CuTe-DSL need its runtime library; loaded here, it is found under its name by all of them."""
    if runtime := toolchain.site_file(emit.CUTE_RUNTIME):
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
