"""Finds the kernels: their programs, their checks, and which one takes a call.

Programs need a DSL, which may be missing, and architectures stand above the names and limits that they share (key.py,
support.py). So both are imported when they are asked for, by the names in ``MODULES`` and no others.
"""

from dataclasses import replace
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from lowbit_attn.formats import FORMATS, Format
from lowbit_attn.formats.levels import Levels, parse
from lowbit_attn.kernels.key import SPLITS, Checks, KernelKey
from lowbit_attn.kernels.support import find_path
from lowbit_attn.registers import WIDE_HEAD_DIM

ARCH_TARGETS = {"hopper": ("sm_90a",), "ampere": ("sm_80", "sm_89", "sm_90")}
# What is registered: of an architecture its paths and scratch, what its kernels are, and their program; then the
# programs that architectures share, by op.
MODULES = {
    "hopper": "lowbit_attn.hopper", "hopper.config": "lowbit_attn.hopper.config",
    "hopper.decode": "lowbit_attn.hopper.decode",
    "hopper.exchange": "lowbit_attn.hopper.exchange", "hopper.all_reduce": "lowbit_attn.hopper.all_reduce",
    "hopper.pair": "lowbit_attn.hopper.pair.decode", "hopper.pair.config": "lowbit_attn.hopper.pair.config",
    "ampere": "lowbit_attn.ampere", "ampere.config": "lowbit_attn.ampere.config",
    "ampere.decode": "lowbit_attn.ampere.decode",
    "quantize": "lowbit_attn.device.quantize", "dequantize": "lowbit_attn.device.quantize",
    "append": "lowbit_attn.device.append", "merge": "lowbit_attn.device.merge", "read": "lowbit_attn.device.read",
    "merge_states": "lowbit_attn.device.merge_states", "level_append": "lowbit_attn.device.level_append",
    "plan": "lowbit_attn.device.level_plan", "pack": "lowbit_attn.device.level_pack",
    "linear": "lowbit_attn.device.linear.kernels", "linear.config": "lowbit_attn.device.linear.config",
    "level_places": "lowbit_attn.device.level_windows", "level_hidden": "lowbit_attn.device.level_windows",
    "paged_plan": "lowbit_attn.device.paged_plan", "paged_append": "lowbit_attn.device.paged_append",
    "paged_copy": "lowbit_attn.device.paged_copy", "paged_fill": "lowbit_attn.device.paged_fill",
    "merge_rows": "lowbit_attn.device.merge_rows",
}

CUTE = ("read", "linear")  # ops whose programs are CuTe-DSL's on any architecture
APPENDING = ("append", "paged_append")  # ops that pack both sides of a format's blocks beside storing new tokens
OVERLAPPING = ("level_append", "plan", "pack")  # ops that start while the kernel before ends, and wait for that
OF_ARCHITECTURES = ("decode", "pair", "exchange", "all_reduce")  # their programs are an architecture's own


@cache
def module(name: str) -> ModuleType:
    """A registered module, imported at its first use."""
    return import_module(MODULES[name])


def arch_package(arch: str) -> ModuleType:
    """An architecture: ``PATHS`` by name, ``EMPTY``, ``SPLITS_COOPERATE`` and the sizes of its scratch."""
    return module(arch)


def program(arch: str, op: str) -> str:
    """Name in ``MODULES`` of the program of such a kernel."""
    return f"{arch}.{op}" if op in OF_ARCHITECTURES else op


def trace(key: KernelKey):
    """The DSL program of a kernel: a TileKernel or a CuteKernel. Imports the DSL."""
    if key.op == "read":
        threads, unroll = map(int, key.variant.split("x"))
        return module("read").read_kernel(threads, unroll)
    if key.op in ("linear", "pair", "exchange", "all_reduce"):
        return getattr(module(program(key.arch, key.op)), f"{key.op}_kernel")(key)
    if key.op in ("merge", "merge_states", "level_append", "plan", "paged_copy", "merge_rows"):  # of any format
        return getattr(module(key.op), f"{key.op}_kernel")(key.head_dim, key.dtype)
    if key.op in ("level_places", "level_hidden", "paged_plan"):  # of any head_dim too
        return getattr(module(key.op), f"{key.op}_kernel")()
    if key.op == "pack":
        return module("pack").pack_kernel(parse(key.format), key.head_dim, key.dtype, searches_of(key))
    fmt = FORMATS[key.format]
    if key.op == "decode":
        return module(f"{key.arch}.decode").decode_kernel(fmt, key.head_dim, key.dtype, key.sizes or key.target,
                                                          path_name(key), key.rows, key.features)
    if key.op == "paged_fill":
        return module("paged_fill").paged_fill_kernel(fmt, key.head_dim, key.dtype)
    if key.op in APPENDING:
        return getattr(module(key.op), f"{key.op}_kernel")(fmt, key.head_dim, key.dtype,
                                                           key.variant.removeprefix("search_"))
    if key.op == "quantize":
        return module("quantize").quantize_kernel(side_of(key), key.dtype, key.variant.endswith("-search"))
    return module("dequantize").dequantize_kernel(side_of(key))


def side_of(key: KernelKey):
    """SideSpec of the one side that a kernel fills or reads. The other side of the format that names it may not be
    possible: K of k1v4 is k1v1's, whose V does not exist at head_dim 96."""
    fmt = FORMATS[key.format]
    return fmt.k.spec(key.head_dim) if key.variant.startswith("k") else fmt.specs(key.head_dim)[1]


def searches_of(key: KernelKey) -> tuple[str, str]:
    """The sides of the high and of the low level whose range a pack kernel searches."""
    return tuple(key.variant.removeprefix("search_").split("_")) if key.variant else ("", "")


def is_cute(arch: str, op: str) -> bool:
    """Whether such a kernel is CuTe-DSL's, which brings its own compiler; others are TileLang's."""
    return op in CUTE or (op in OF_ARCHITECTURES and arch == "hopper")


def needs_nvcc(key: KernelKey) -> bool:
    """Whether a kernel is TileLang's, which compiles with nvcc."""
    return not is_cute(key.arch, key.op)


def checks(key: KernelKey) -> Checks:
    """The static checks of a kernel, declared beside its source."""
    if key.op == "decode":
        return module(f"{key.arch}.config").checks(FORMATS[key.format], key.head_dim, target=key.sizes or key.target,
                                                   path=path_name(key), rows=key.rows, dtype=key.dtype,
                                                   features=key.features)
    if key.op in ("linear", "pair"):
        return module(f"{program(key.arch, key.op)}.config").checks(key)
    if key.op in OVERLAPPING and key.target == "sm_90":
        return Checks(need=("ACQBULK",))
    if key.op in APPENDING and key.head_dim > WIDE_HEAD_DIM:
        k, v = FORMATS[key.format].specs(key.head_dim)
        if k.high or v.wide:
            return Checks(forbid=())  # beside K's 512 threads V's search, weights or two widths spill a few registers
    if (key.op in APPENDING or (key.op, key.target) == ("quantize", "sm_80")) and FORMATS[key.format].needs_codebooks:
        return Checks(forbid=())  # a search takes all registers: up to 14 spilled words on sm_90, 228 on sm_80
    return Checks()


def same_text(key: KernelKey) -> KernelKey:
    """An Ampere decode kernel whose TileLang text this one has, maybe itself."""
    return module("ampere.config").same_text(key, path_name(key))


def ctas_per_sm(key: KernelKey) -> int:
    """Blocks of a decode kernel that an SM surely holds at once."""
    sized = replace(key, target=key.sizes or key.target)
    return module(f"{key.arch}.config").ctas_per_sm(sized, path_name(key))


def decode_key(arch: str, target: str, dtype: str, head_dim: int, fmt: str, path: str, rows: int,
               features: tuple[str, ...] = (), sizes: str = "") -> KernelKey:
    """The decode kernel of a path."""
    support = arch_package(arch).PATHS[path]
    return KernelKey("decode", arch, target, dtype, head_dim, fmt, "", support.arithmetic, support.schedule, rows,
                     features, sizes)


def path_name(key: KernelKey) -> str:
    """The name by which a call asks for a decode kernel's arithmetic and schedule."""
    return path_of(key.arch, key.arithmetic, key.schedule)


def path_of(arch: str, arithmetic: str, schedule: str) -> str | None:
    """An architecture's path with this arithmetic on this schedule; None if there is none."""
    return find_path(arch_package(arch).PATHS, arithmetic, schedule)


def pick(arch: str, fmt: Format, head_dim: int, dtype: torch.dtype, rows: int, path: str | None = None,
         features: tuple[str, ...] = (), is_pre_rope: bool = False) -> tuple[tuple[str, int] | None, list[str]]:
    """((path, rows of its kernel), reasons of the paths passed over) for ``rows`` query rows of a KV head.

    The first path that takes all rows at once, or in two blocks where those are faster, else the one that takes most;
    path: only this one. is_pre_rope: whether codebooks are of keys before their rotary embedding. None: no path.
    """
    best, reach, reasons = None, 0, []
    for name, support in arch_package(arch).PATHS.items():
        if path != name and (path is not None or support.schedule != SPLITS or rows < support.least_rows):
            continue
        if support.pre_rope != is_pre_rope:
            reasons += [f"{arch} {name} path: codebooks of keys {_rope(is_pre_rope)} their rotary embedding, "
                        f"supported: {_rope(support.pre_rope)} it"] * (path is not None)
            continue
        missing = support.missing(fmt, head_dim, dtype, features)
        reasons += [f"{arch} {name} path: {reason}" for reason in missing]
        if not missing and (best is None or support.rows_for(rows, head_dim) > best[1]):
            best, reach = (name, support.rows_for(rows, head_dim)), support.reach(fmt, rows, head_dim)
        if reach >= rows:
            break
    return best, reasons


def _rope(is_pre_rope: bool) -> str:
    return "before" if is_pre_rope else "after"


def no_codebooks(arch: str, fmt: Format, head_dim: int, is_pre_rope: bool = False) -> list[str]:
    """Why no kernel of an architecture serves a format with codebooks; empty for others, and where one does.

    is_pre_rope: whether the codebooks are of keys before their rotary embedding.
    """
    if not fmt.needs_codebooks:
        return []
    paths = arch_package(arch).PATHS.values()
    served = [support for support in paths if support.codebooks and not support.pre_rope]
    reasons = [support.missing(fmt, head_dim, torch.float16) for support in served]
    elsewhere = "path='reference', any device"
    if all(reasons):  # or there is none
        why = "; ".join(reasons[-1]) if reasons else "codebooks"
        return [f"format {fmt}: no kernel on {arch} reads its codebooks yet ({why}), supported: "
                f"{'; '.join([*map(str, served), elsewhere])}"]
    turning = [support for support in paths if support.pre_rope]
    if is_pre_rope and all(support.missing(fmt, head_dim, torch.float16) for support in turning):
        elsewhere = "; ".join([*map(str, turning), elsewhere])
        return [f"format {fmt}: no kernel on {arch} reads codebooks of keys before their rotary embedding yet, "
                f"supported: rope='post', of a prompt codebooks='prompt-post'; {elsewhere}"]
    return []


def no_pair(arch: str, levels: Levels, head_dim: int, dtype: torch.dtype, features: tuple[str, ...] = ()) -> list[str]:
    """Why no kernel of an architecture reads both levels of such a cache in one launch; empty if one does."""
    if f"{arch}.pair.config" not in MODULES:
        return [f"pair path: no kernel on {arch} reads two levels in one launch, supported: hopper"]
    found = module(f"{arch}.pair.config").missing(levels, head_dim, dtype, features)
    return [f"pair path: {reason}" for reason in found]


def other_ctas(arch: str, path: str | None = None) -> list[str]:
    """Paths that are ``path``, or any other, on another schedule: not picked but by name or by a call's shape."""
    paths = arch_package(arch).PATHS
    return [other for other, has in paths.items() if has.schedule != SPLITS
            and (path is None or (path != other and paths[path].arithmetic == has.arithmetic))]


def clusters(key: KernelKey, blocks: int, sms: int) -> tuple[int, ...]:
    """Splits of each of so many blocks of query rows that may be one cluster of CTAs and merge among themselves."""
    package = arch_package(key.arch)
    if not package.PATHS[path_name(key)].clusters or key.head_dim > WIDE_HEAD_DIM:
        return ()
    return tuple(splits for splits in package.CLUSTERS if package.fits_clusters(blocks, splits, sms))
