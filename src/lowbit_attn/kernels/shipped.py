"""Lists what ``make`` builds: the kernels of the presets, and those that the benchmarks compare with."""

from itertools import chain, product

import torch

from lowbit_attn.formats import FORMATS, Format
from lowbit_attn.formats.levels import PRESETS, parse
from lowbit_attn.kernels.key import (
    ROWS,
    KernelKey,
    device_target,
    level_append_key,
    manage_keys,
    merge_key,
    merge_rows_key,
    paged_append_key,
    paged_copy_key,
    paged_fill_key,
    paged_plan_key,
    pair_key,
    rank_keys,
    step_keys,
)
from lowbit_attn.kernels.linear import linear_keys
from lowbit_attn.kernels.registry import ARCH_TARGETS, decode_key, no_pair, other_ctas, pick
from lowbit_attn.kernels.support import manage_missing, paged_missing, quantize_missing

SHIPPED_TARGETS = {"hopper": ("sm_90a",), "ampere": ("sm_80", "sm_89")}  # Ampere's on Hopper are for tests only
SHIPPED_FORMATS = tuple(FORMATS)  # presets
SHIPPED_HEAD_DIMS = (64, 128, 256)
SHIPPED_DTYPES = ("float16", "bfloat16")
SHIPPED_ROWS = (2, 4, 8, 16)
DRAFT_ROWS = 32  # of speculative decoding; shipped where a kernel takes as many at once
READ_VARIANTS = ("256x8", "512x4", "512x8", "1024x2")


def shipped_shapes(arch: str, name: str, dtype: str, head_dim: int) -> list[tuple[str, int]]:
    """(path, rows) of the decode kernels that are shipped for a preset: what most calls take, and for the paper's own
    case, int4 in fp16, the largest kernel and the tile path too."""
    def picked(rows: int, path: str | None = None):
        return pick(arch, FORMATS[name], head_dim, getattr(torch, dtype), rows, path)[0]

    shapes = [picked(rows) for rows in SHIPPED_ROWS]
    shapes += [shape for shape in [picked(DRAFT_ROWS)] if shape and shape[1] == DRAFT_ROWS]
    shapes += [picked(ROWS[0], path) for path in other_ctas(arch)]
    if (name, dtype) == ("k4v4", "float16"):
        shapes += [picked(ROWS[-1]), picked(ROWS[0], "tile")]
    return sorted({shape for shape in shapes if shape})


def levels_keys(target: str, dtype: str, head_dim: int) -> list[KernelKey]:
    """What appends to and manages caches of the presets of levels."""
    served = [levels for levels in map(parse, PRESETS) if not manage_missing(levels, head_dim, getattr(torch, dtype))]
    keys = [key for levels in served for key in manage_keys(target, dtype, head_dim, levels)]
    return [level_append_key(target, dtype, head_dim), *keys] if served else []


def paged_keys(target: str, dtype: str, head_dim: int, fmt: Format) -> list[KernelKey]:
    """What serves the steps of an engine, beside decode."""
    if quantize_missing(fmt, head_dim, getattr(torch, dtype)) or paged_missing(fmt, head_dim):
        return []
    return [paged_plan_key(target), paged_append_key(target, dtype, head_dim, fmt),
            paged_copy_key(target, dtype, head_dim), paged_fill_key(target, dtype, head_dim, fmt),
            merge_rows_key(target, dtype, head_dim)]


def pair_keys(arch: str, target: str, dtype: str, head_dim: int) -> list[KernelKey]:
    """What decodes over both levels of the presets in one launch."""
    return [pair_key(target, dtype, head_dim, levels) for levels in map(parse, PRESETS)
            if not no_pair(arch, levels, head_dim, getattr(torch, dtype))]


def shipped_keys(arch: str) -> list[KernelKey]:
    """Every kernel that ``make`` builds for an architecture."""
    keys = {}
    for target, dtype, head_dim in product(SHIPPED_TARGETS[arch], SHIPPED_DTYPES, SHIPPED_HEAD_DIMS):
        common = (target, dtype, head_dim)
        keys |= dict.fromkeys([merge_key(*common), *rank_keys(arch, *common), *levels_keys(*common),
                               *pair_keys(arch, *common)])
        for name in SHIPPED_FORMATS:
            shapes = shipped_shapes(arch, name, dtype, head_dim)
            has_steps = not quantize_missing(FORMATS[name], head_dim, getattr(torch, dtype))
            keys |= dict.fromkeys([*(step_keys(*common, FORMATS[name]) if has_steps else ()),
                                   *paged_keys(*common, FORMATS[name]),
                                   *(decode_key(arch, *common, name, *shape) for shape in shapes)])
    return [*keys, *chain.from_iterable(map(linear_keys, SHIPPED_TARGETS[arch]))]


def baselines(arch: str) -> list[KernelKey]:
    """The read-only kernels that the benchmarks compare with; they use no packed data."""
    target = device_target(ARCH_TARGETS[arch][-1])
    return [KernelKey("read", "device", target, "uint32", 0, variant=variant) for variant in READ_VARIANTS]
