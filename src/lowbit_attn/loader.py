"""Loads built kernels; builds one at its first use when no ``make`` has."""

import ctypes
import os
from collections.abc import Callable
from functools import cache

import torch

from lowbit_attn import compile, emit, toolchain
from lowbit_attn.compile import KernelNotBuiltError
from lowbit_attn.kernels import KernelKey


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
        remedy = "remove it to have it built again"
        if "libcute_dsl_runtime" in str(error):
            remedy = f"its runtime library is not installed; {toolchain.PACKAGE_REMEDY}"
        raise KernelNotBuiltError(f"{key} cannot be loaded from {built.path}: {text}; {remedy}") from error


def argument(tensor: torch.Tensor) -> object:
    """A tensor as kernels take it: converted once, it costs a later call a fifth. It keeps the memory alive."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(tensor)


@cache
def _load_cute_runtime() -> None:
    """Kernels of CuTe-DSL need its runtime library; loaded here, it is found under its name by all of them."""
    if runtime := toolchain.site_file(emit.CUTE_RUNTIME):
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
