"""Loads built kernels; builds one at its first use when no ``make`` has."""

import ctypes
import os
from collections.abc import Callable
from functools import cache

import torch

from lowbit_attn import compile, toolchain
from lowbit_attn.kernels import KernelKey


class KernelNotBuiltError(RuntimeError):
    """A kernel is not in the cache and may not, or cannot, be built here; the message names the remedy."""


@cache
def load(key: KernelKey) -> Callable:
    """The kernel as a function of torch tensors (outputs passed in, current stream)."""
    path = compile.so_path(key)
    entry = compile.manifest().get(str(key))
    if not path.exists() or entry is None or entry["fingerprint"] != compile.fingerprint(key.arch, key.op):
        if os.environ.get("LOWBIT_ATTN_NO_JIT"):
            raise KernelNotBuiltError(f"{key} is not built and LOWBIT_ATTN_NO_JIT is set; run {_remedy(key)}")
        try:
            entry = compile.build(key)
        except (ImportError, toolchain.ToolMissingError) as error:
            raise KernelNotBuiltError(f"{key} is not built and cannot be built here: {error}; "
                                      f"pip install 'lowbit-attn[kernels]' or run {_remedy(key)} elsewhere and copy "
                                      f"its kernels to {compile.cache_dir()}") from error
    _load_cute_runtime()
    import tvm_ffi

    return tvm_ffi.load_module(str(path))[entry["function"]]


def argument(tensor: torch.Tensor) -> object:
    """A tensor as kernels take it: converted once, it costs a later call a fifth. It keeps the memory alive."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(tensor)


def _remedy(key: KernelKey) -> str:
    return f"make {key.arch}" if key.op == "decode" else "make hopper or make ampere"


@cache
def _load_cute_runtime() -> None:
    """Kernels of CuTe-DSL need its runtime library; loaded here, it is found under its name by all of them."""
    if runtime := toolchain.site_file(compile.CUTE_RUNTIME):
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
