"""TileLang kernels as PTX, for the interpreter."""

from functools import cache

import pytest

from lowbit_attn import kernels, toolchain
from sim.ptx import program as ptx


@cache
def program(key: kernels.KernelKey) -> ptx.Program:
    """A kernel compiled as the package compiles it, but to PTX."""
    return ptx.Program(compiled(key, "ptx").decode())


def compiled(key: kernels.KernelKey, form: str) -> bytes:
    """A kernel as "ptx" or "cubin"."""
    tilelang = pytest.importorskip("tilelang", reason="TileLang is not installed")
    try:
        toolchain.find_tool("nvcc")
    except toolchain.ToolMissingError as error:
        pytest.skip(str(error))
    from tilelang.contrib import nvcc

    traced = kernels.trace(key)
    target = tilelang.tvm.target.Target({"kind": "cuda", "arch": key.target})
    with tilelang.tvm.transform.PassContext(opt_level=3, config=traced.pass_configs), target:
        lowered = tilelang.lower(traced.prim_func, target=target, enable_host_codegen=True, enable_device_compile=False)
    return bytes(nvcc.compile_cuda(lowered.kernel_source, form, [f"-arch={key.target}"], options=[
        "-std=c++20", f"-I{tilelang.env.TILELANG_TEMPLATE_PATH}", f"-I{tilelang.env.CUTLASS_INCLUDE_DIR}",
        *traced.compile_flags]))
