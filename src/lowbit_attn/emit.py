"""Emits one kernel as a shared object: DSL program -> cubin -> .so, without a GPU."""

import os
import re
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from lowbit_attn import kernels, toolchain
from lowbit_attn.kernels import CuteKernel, KernelKey

LAUNCH = Path(__file__).parent / "device" / "launch.c"
CUTE_RUNTIME = "nvidia_cutlass_dsl/cu13/lib/libcute_dsl_runtime.so"
_DIM_SLOTS = {"blockIdx.x": 0, "blockIdx.y": 1, "blockIdx.z": 2, "threadIdx.x": 3, "threadIdx.y": 4, "threadIdx.z": 5,
              "tirx.use_dyn_shared_memory": 6}
# what waits for the kernel before, or lets the next one start, in TileLang's text
_OVERLAP_CALLS = re.compile(r"cuda(GridDependencySynchronize|TriggerProgrammaticLaunchCompletion)\(\);")
_LOWERED: dict[KernelKey, Any] = {}  # one text, of one or two kernels: see _lower and hand_on


def require(key: KernelKey) -> None:
    """Raise ToolMissingError unless all that emitting and checking a kernel needs is installed."""
    for package in ("tilelang" if kernels.needs_nvcc(key) else "cutlass", "tvm_ffi"):
        toolchain.package_dir(package)
    for tool in ("gcc", "nvdisasm", "cuobjdump", *["nvcc"] * kernels.needs_nvcc(key)):
        toolchain.find_tool(tool)


def emit(key: KernelKey, path: Path) -> tuple[str, int]:
    """Write a kernel's shared object; (name of its function, bytes of dynamic shared memory)."""
    program = kernels.trace(key)
    return (emit_cute if isinstance(program, CuteKernel) else emit_tilelang)(key, program, path)


def emit_cute(key: KernelKey, program: CuteKernel, path: Path) -> tuple[str, int]:
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    function = re.sub(r"\W", "_", str(key))
    options = f"--enable-tvm-ffi --gpu-arch {key.target} --keep-cubin"
    with tempfile.TemporaryDirectory() as scratch:
        compiled = cute.compile(program.entry, *program.arguments, make_fake_stream(use_tvm_ffi_env_stream=True),
                                options=f"{options} --dump-dir {scratch}")
        object_file = Path(scratch) / "kernel.o"
        compiled.export_to_c(str(object_file), function_name=function)
        runtime = toolchain.site_file(CUTE_RUNTIME)
        _link(path, [str(object_file), str(runtime)], scratch)
    return function, program.entry.smem_bytes


def emit_tilelang(key: KernelKey, program, path: Path) -> tuple[str, int]:
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    import tilelang

    lowered = _lower(key, program)
    source = for_target(lowered.kernel_source, key)
    includes = (tilelang.env.TILELANG_TEMPLATE_PATH, tilelang.env.CUTLASS_INCLUDE_DIR)
    host = lowered.rt_mod.inspect_source("c") if lowered.rt_mod is not None else lowered.host_mod.inspect_source()
    (symbol, device_function), = lowered.device_mod.functions.items()
    kernel_name = symbol.name_hint
    dims = [_DIM_SLOTS[str(tag)] for tag in device_function.attrs["tirx.kernel_launch_params"]]
    kinds = _param_kinds(source, kernel_name)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "kernel_meta.h").write_text(
            f'#define KERNEL_NAME "{kernel_name}"\n#define NUM_PARAMS {len(kinds)}\n#define NUM_DIMS {len(dims)}\n'
            f"#define OVERLAPS {int(program.overlaps and may_overlap(key))}\n"
            f'static const char param_kind[] = "{kinds}";\n'
            f'static const int dim_slot[] = {{{", ".join(map(str, dims))}}};\n')
        (folder / "host.c").write_text(_standalone(host))
        (folder / "kernel.cu").write_text(source)
        # not by tilelang.contrib.nvcc, which looks for nvcc elsewhere and puts the whole source into its errors
        toolchain.run([toolchain.find_tool("nvcc"), f"-ccbin={toolchain.find_tool('gcc')}", "--cubin", "-O3",
                       "-lineinfo", f"-arch={key.target}", "-std=c++20", *(f"-I{include}" for include in includes),
                       *program.compile_flags, "-o", "kernel.cubin", "kernel.cu"], scratch)
        (folder / "cubin.S").write_text(
            '.section .rodata\n.global kernel_cubin\n.hidden kernel_cubin\n.balign 64\nkernel_cubin:\n'
            '.incbin "kernel.cubin"\n.section .note.GNU-stack,"",@progbits\n')
        include = toolchain.tvm_ffi_dir() / "include"
        _link(path, ["-O2", "-s", "-w", "host.c", str(LAUNCH), "cubin.S", "-I.",
                     f"-I{include}", "-ldl"], scratch)
    return program.prim_func.attrs["global_symbol"], _dynamic_smem(host, kernel_name, len(kinds), dims)


def same_source(key: KernelKey) -> KernelKey:
    """What kernels have in common whose TileLang text is the same on all targets: those of ``device``."""
    return replace(key, target="") if key.arch == "device" and kernels.needs_nvcc(key) else key


@cache
def source_of(key: KernelKey) -> KernelKey:
    """What kernels have in common whose TileLang text is the same: as ``same_source``, and Ampere's decode kernels of
    the same sizes. No kernel is made of it: packing kernels would be built again for every change of Ampere's sizes.
    """
    return kernels.same_text(key) if key.arch == "ampere" and key.op == "decode" else same_source(key)


def hand_on(key: KernelKey, other: KernelKey) -> None:
    """Let a kernel take the text of the one that was emitted last, if it is the same."""
    if source_of(key) == source_of(other) and (lowered := _LOWERED.get(same_source(key))):
        _LOWERED[same_source(other)] = lowered


def may_overlap(key: KernelKey) -> bool:
    """Whether a target's kernels may start before the one ahead of them has ended."""
    return key.target.startswith("sm_9")


def for_target(source: str, key: KernelKey) -> str:
    """TileLang's text of a kernel, without the calls that its target does not know."""
    return source if may_overlap(key) else _OVERLAP_CALLS.sub("", source)


def lowering_target(key: KernelKey, program) -> str:
    """What TileLang is told to write for: it refuses to write of early starts for less than sm_90."""
    return "sm_90" if program.overlaps else key.target


def _lower(key: KernelKey, program):
    """TileLang's text of a kernel; the last one is kept, so that its other targets only take nvcc's time."""
    import tilelang

    shared = same_source(key)
    if (lowered := _LOWERED.get(shared)) is None:
        target = tilelang.tvm.target.Target({"kind": "cuda", "arch": lowering_target(key, program)})
        with tilelang.tvm.transform.PassContext(opt_level=3, config=program.pass_configs), target:
            lowered = tilelang.lower(program.prim_func, target=target, enable_host_codegen=True,
                                     enable_device_compile=False)
        _LOWERED.clear()
        _LOWERED[shared] = lowered
    return lowered


def _param_kinds(source: str, kernel_name: str) -> str:
    signature = re.search(rf" {kernel_name}\(([^)]*)\);", source).group(1)  # the kernel's forward declaration
    kinds = (("*", "p"), ("int64", "l"), ("int", "i"), ("", "f"))
    return "".join(next(kind for text, kind in kinds if text in p) for p in signature.split(","))


def _standalone(host: str) -> str:
    """TileLang's host C without TVM's headers: the one function it needs of them is in launch.c."""
    declaration = ('__attribute__((visibility("hidden"))) '
                   "int TVMBackendGetFuncFromEnv(void*, const char*, void**);")
    host = re.sub(r'#include "tvm/runtime/[^"]*"', "", host)
    return host.replace('#include "tvm/ffi/c_api.h"', f'#include "tvm/ffi/c_api.h"\n{declaration}', 1)


def _dynamic_smem(host: str, kernel_name: str, num_params: int, dims: list[int]) -> int:
    """Bytes of dynamic shared memory that the generated host code passes at launch: its last launch argument."""
    if _DIM_SLOTS["tirx.use_dyn_shared_memory"] not in dims:
        return 0
    slot = num_params + dims.index(_DIM_SLOTS["tirx.use_dyn_shared_memory"])
    return int(re.findall(rf"stack_ffi_any\)\[{slot}\]\.v_int64\) = \(\(int64_t\)(\d+)\)", host)[-1])


def _link(path: Path, inputs: list[str], cwd: str) -> None:
    library = toolchain.tvm_ffi_dir() / "lib"
    toolchain.run([toolchain.find_tool("gcc"), "-shared", "-fPIC", "-o", str(path), *inputs, f"-L{library}",
                   "-ltvm_ffi", "-Wl,--no-undefined"], cwd)
