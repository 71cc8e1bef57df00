"""TileLang kernels as PTX, for the interpreter."""

import re
from functools import cache

import pytest

from lowbit_attn import emit, kernels, toolchain
from sim.ptx import program as ptx


@cache
def program(key: kernels.KernelKey) -> ptx.Program:
    """A kernel compiled as the package compiles it, but to PTX."""
    return ptx.Program(compiled(key, "ptx").decode())


def parameters(key: kernels.KernelKey) -> list[tuple[str, str]]:
    """(type, name) of a kernel's parameters, in order; of pointers the type is "*"."""
    signature = re.search(r"__launch_bounds__\([^)]*\)\s*\w+\(([^)]*)\)\s*\{", source(key)[0])[1]
    return [("*" if "*" in text else text.split()[0], text.split()[-1]) for text in signature.split(",")]


def compiled(key: kernels.KernelKey, form: str) -> bytes:
    """A kernel as "ptx" or "cubin"."""
    text, flags = source(key)
    from tilelang.contrib import nvcc

    return bytes(nvcc.compile_cuda(text, form, [f"-arch={key.target}"], options=list(flags)))


@cache
def source(key: kernels.KernelKey) -> tuple[str, tuple[str, ...]]:
    """What TileLang gives to the compiler: the text, and flags."""
    tilelang = pytest.importorskip("tilelang", reason="TileLang is not installed")
    try:
        toolchain.find_tool("nvcc")
    except toolchain.ToolMissingError as error:
        pytest.skip(str(error))
    traced = kernels.trace(key)
    target = tilelang.tvm.target.Target({"kind": "cuda", "arch": emit.lowering_target(key, traced)})
    with tilelang.tvm.transform.PassContext(opt_level=3, config=traced.pass_configs), target:
        lowered = tilelang.lower(traced.prim_func, target=target, enable_host_codegen=True, enable_device_compile=False)
    return emit.for_target(lowered.kernel_source, key), ("-std=c++20", f"-I{tilelang.env.TILELANG_TEMPLATE_PATH}",
                                   f"-I{tilelang.env.CUTLASS_INCLUDE_DIR}", *traced.compile_flags)
