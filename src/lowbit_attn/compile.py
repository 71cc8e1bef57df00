"""Builds kernels: DSL program -> cubin -> one shared object each, without a GPU.

``build`` compiles, checks the SASS and enters the kernel into the manifest that the loader reads. ``make`` calls it for
the shipped set (build.py), the loader for anything else at its first use.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock
from platformdirs import user_cache_dir

from lowbit_attn import kernels, sass, toolchain
from lowbit_attn.kernels import CuteKernel, KernelKey

PACKAGE = Path(__file__).parent
COMMON_DEVICE_FILES = ("launch.c", "ptx.py", "tilelang_kernel.py", "tokens.py")  # that decode kernels share
CUTE_RUNTIME = "nvidia_cutlass_dsl/cu13/lib/libcute_dsl_runtime.so"
_DIM_SLOTS = {"blockIdx.x": 0, "blockIdx.y": 1, "blockIdx.z": 2, "threadIdx.x": 3, "threadIdx.y": 4, "threadIdx.z": 5,
              "tirx.use_dyn_shared_memory": 6}
_LOWERED: dict[KernelKey, Any] = {}  # at most one entry: see _lower


class KernelCheckError(RuntimeError):
    """A built kernel breaks a static check: spills, a missing instruction, counts or shared memory."""


def cache_dir() -> Path:
    """Where built kernels live: LOWBIT_ATTN_CACHE_DIR, else the user's cache directory."""
    return Path(os.environ.get("LOWBIT_ATTN_CACHE_DIR") or user_cache_dir("lowbit_attn")) / "kernels"


@cache
def fingerprint(arch: str, op: str) -> str:
    """Hash of every source file that such a kernel is made from: of the architecture's package for decode, of device
    for all others."""
    files = [*(PACKAGE / name for name in ("layout.py", "registers.py", "compile.py")),
             *sorted((PACKAGE / "formats").glob("*.py"))]
    if op == "decode":
        folder = Path(sys.modules.get(f"lowbit_attn.{arch}", kernels.arch_package(arch)).__file__).parent
        files += sorted(folder.rglob("*.py")) + [PACKAGE / "device" / name for name in COMMON_DEVICE_FILES]
    else:
        files += sorted((PACKAGE / "device").glob("*.[pc]*"))
    digest = hashlib.sha256()
    for file in (f for f in files if f.suffix in (".py", ".c")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def so_path(key: KernelKey) -> Path:
    return cache_dir() / fingerprint(key.arch, key.op) / key.target / f"{key.name}.so"


def build(key: KernelKey) -> dict:
    """Compile one kernel into so_path(key), check it, and enter it into the manifest; returns its entry."""
    started = time.time()
    path = so_path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        program = kernels.trace(key)
        make = _build_cute if isinstance(program, CuteKernel) else _build_tilelang
        function, smem_bytes = make(key, program, path)
        entry = {"function": function, "file": str(path.relative_to(cache_dir())),
                 "fingerprint": fingerprint(key.arch, key.op), "key": asdict(key), "smem_bytes": smem_bytes,
                 "seconds": round(time.time() - started, 1)}
        entry |= check(key, path, smem_bytes)
        _write_manifest(str(key), entry)
    return entry


def check(key: KernelKey, path: Path, smem_bytes: int) -> dict:
    """Static checks of a built kernel; KernelCheckError on the first broken one."""
    wanted = kernels.checks(key)
    found, = sass.inspect(path)
    total = smem_bytes + found.static_smem_bytes
    spills = sum(found.ops[name] for name in sass.SPILLS)
    broken = [f"no {names}" for names in found.missing(wanted.need)]
    broken += [f"{name} x{found.ops[name]}" for name in wanted.forbid if found.ops[name]]
    broken += found.outside(dict(wanted.expected))
    if total > kernels.SMEM_LIMIT_BYTES[key.target]:
        broken.append(f"{total} B of shared memory, limit {kernels.SMEM_LIMIT_BYTES[key.target]}")
    if wanted.smem_bytes is not None and wanted.smem_bytes != total:
        broken.append(f"{total} B of shared memory, planned {wanted.smem_bytes}")
    if broken:
        path.unlink()
        raise KernelCheckError(f"{key}: {'; '.join(broken)}")
    shown = sorted({n for names in wanted.need for n in names.split("|")} | dict(wanted.expected).keys())
    return {"registers": found.registers, "spills": spills, "smem_total_bytes": total,
            "sass": {name: found.ops[name] for name in shown if found.ops[name]}}


def manifest() -> dict[str, dict]:
    """Built kernels by str(key)."""
    path = cache_dir() / "manifest.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _write_manifest(name: str, entry: dict) -> None:
    path = cache_dir() / "manifest.json"
    with FileLock(f"{path}.lock"):
        whole = manifest() | {name: entry}
        swap = path.with_suffix(".tmp")
        swap.write_text(json.dumps(whole, indent=1, sort_keys=True))
        swap.replace(path)


def _build_cute(key: KernelKey, program: CuteKernel, path: Path) -> tuple[str, int]:
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


def _build_tilelang(key: KernelKey, program, path: Path) -> tuple[str, int]:
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    toolchain.find_tool("nvcc")
    import tilelang
    from tilelang.contrib import nvcc

    lowered = _lower(key, program)
    source = lowered.kernel_source
    cubin = nvcc.compile_cuda(source, "cubin", [f"-arch={key.target}"], options=[
        "-std=c++20", f"-I{tilelang.env.TILELANG_TEMPLATE_PATH}", f"-I{tilelang.env.CUTLASS_INCLUDE_DIR}",
        *program.compile_flags])
    host = lowered.rt_mod.inspect_source("c") if lowered.rt_mod is not None else lowered.host_mod.inspect_source()
    (symbol, device_function), = lowered.device_mod.functions.items()
    kernel_name = symbol.name_hint
    dims = [_DIM_SLOTS[str(tag)] for tag in device_function.attrs["tirx.kernel_launch_params"]]
    kinds = _param_kinds(source, kernel_name)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "kernel_meta.h").write_text(
            f'#define KERNEL_NAME "{kernel_name}"\n#define NUM_PARAMS {len(kinds)}\n#define NUM_DIMS {len(dims)}\n'
            f'static const char param_kind[] = "{kinds}";\n'
            f'static const int dim_slot[] = {{{", ".join(map(str, dims))}}};\n')
        (folder / "host.c").write_text(_standalone(host))
        (folder / "kernel.cubin").write_bytes(bytes(cubin))
        (folder / "cubin.S").write_text(
            '.section .rodata\n.global kernel_cubin\n.hidden kernel_cubin\n.balign 64\nkernel_cubin:\n'
            '.incbin "kernel.cubin"\n.section .note.GNU-stack,"",@progbits\n')
        include = toolchain.package_dir("tvm_ffi") / "include"
        _link(path, ["-O2", "-s", "-w", "host.c", str(PACKAGE / "device" / "launch.c"), "cubin.S", "-I.",
                     f"-I{include}", "-ldl"], scratch)
    return program.prim_func.attrs["global_symbol"], _dynamic_smem(host, kernel_name, len(kinds), dims)


def same_source(key: KernelKey) -> KernelKey:
    """What kernels have in common whose TileLang text is the same on all targets: those of ``device``."""
    return replace(key, target="") if key.arch == "device" else key


def _lower(key: KernelKey, program):
    """TileLang's text of a kernel; the last one is kept, so that its other targets only take nvcc's time."""
    import tilelang

    shared = same_source(key)
    if (lowered := _LOWERED.get(shared)) is None:
        target = tilelang.tvm.target.Target({"kind": "cuda", "arch": key.target})
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
    library = toolchain.package_dir("tvm_ffi") / "lib"
    swap = path.with_suffix(".tmp")
    command = [toolchain.find_tool("gcc"), "-shared", "-fPIC", "-o", str(swap), *inputs, f"-L{library}", "-ltvm_ffi"]
    subprocess.run([*command, "-Wl,--no-undefined"], cwd=cwd, check=True, stdin=subprocess.DEVNULL)
    swap.replace(path)
