"""Which kernels are promised and shipped, and how a rotation goes through them."""

from collections import Counter
from functools import cache
from itertools import pairwise, product

import pytest
import torch

from lowbit_attn import dispatch, emit, kernels, promised
from lowbit_attn.formats import FORMATS
from lowbit_attn.formats.levels import PRESETS as LEVELS
from lowbit_attn.formats.levels import parse
from lowbit_attn.kernels import KernelKey, registry
from lowbit_attn.linear import NAMES

# (blocks of query rows, pages of each sequence) of calls, small and large, on a GPU of so many SMs
PRESETS = tuple(name for name in FORMATS if not FORMATS[name].needs_codebooks)  # no kernel reads codebooks yet
SHAPES, SMS = tuple(product((1, 8, 100, 133, 200, 1024), (1, 9, 128, 1000))), 132


@cache
def all_promised(arch: str) -> list[KernelKey]:
    return promised.promised(arch)


@pytest.mark.parametrize("arch", kernels.SHIPPED_TARGETS)
def test_what_is_shipped_is_promised(arch):
    assert set(kernels.shipped_keys(arch)) <= set(all_promised(arch))
    assert {key.format for key in kernels.shipped_keys(arch)} >= set(PRESETS)


@pytest.mark.parametrize("arch", kernels.SHIPPED_TARGETS)
def test_promises_name_every_operation_head_dim_dtype_and_path(arch):
    of_caches = [key for key in all_promised(arch) if key.op != "linear"]
    found = {name: {getattr(key, name) for key in of_caches} for name in ("op", "head_dim", "dtype")}
    one_launch = {"pair", "exchange"} if arch == "hopper" else set()
    assert found == {"op": {"decode", "quantize", "dequantize", "append", "merge", "merge_states", "level_append",
                            "plan", "pack", "level_places", "level_hidden", "paged_plan", "paged_append", "paged_copy",
                            "paged_fill", "merge_rows"} | one_launch,
                     "head_dim": {0, 64, 96, 128, 256},  # positions have none
                     "dtype": {"float16", "bfloat16", "float32", "int32"}}  # dequantize writes fp32
    decode = [key for key in all_promised(arch) if key.op == "decode"]
    assert {kernels.path_name(key) for key in decode} == set(kernels.arch_package(arch).PATHS)
    of_levels = {key.features: key.format for key in decode if kernels.LEVEL_WINDOW in key.features}
    assert {key.features for key in decode} - set(of_levels) == {(), ("softcap",), ("window",), ("softcap", "window")}
    assert set(of_levels) == {(kernels.LEVEL_WINDOW,), ("softcap", kernels.LEVEL_WINDOW)}
    assert not any(kernels.LEVEL_WINDOW in key.features for key in kernels.shipped_keys(arch))


def test_every_product_of_codebook_weights_is_promised_where_there_is_one():
    found = {arch: {(key.variant, key.format) for key in all_promised(arch) if key.op == "linear"}
             for arch in kernels.SHIPPED_TARGETS}
    for kernels_of in found.values():
        assert {name for variant, name in kernels_of if variant == "dequantize"} == set(NAMES)
        assert {name for variant, name in kernels_of if variant == "gemv"} == set(NAMES) - {"aqlm_1x16"}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("arch", kernels.SHIPPED_TARGETS)
def test_a_cache_of_a_preset_needs_shipped_kernels_only(arch, name):
    """With default options, 1 to 16 query rows of a KV head, and any shape of the call."""
    shipped, fmt = set(kernels.shipped_keys(arch)), FORMATS[name]
    for target, dtype, head_dim in product(kernels.SHIPPED_TARGETS[arch], kernels.SHIPPED_DTYPES,
                                           kernels.SHIPPED_HEAD_DIMS):
        needed = {kernels.append_key(target, dtype, head_dim, fmt)}
        if not kernels.paged_missing(fmt, head_dim):
            needed |= {kernels.paged_plan_key(target), kernels.paged_append_key(target, dtype, head_dim, fmt),
                       kernels.paged_copy_key(target, dtype, head_dim), kernels.merge_rows_key(target, dtype, head_dim),
                       kernels.paged_fill_key(target, dtype, head_dim, fmt)}
        for side in "kv":
            needed |= {kernels.quantize_key(target, dtype, head_dim, fmt, side),
                       kernels.dequantize_key(target, head_dim, fmt, side)}
        for rows in range(1, 17):
            picked, reasons = kernels.pick(arch, fmt, head_dim, getattr(torch, dtype), rows)
            assert picked, reasons
            key = kernels.decode_key(arch, target, dtype, head_dim, name, *picked)
            needed |= {dispatch.for_shape(key, blocks, pages, SMS) for blocks, pages in SHAPES}
        assert needed <= shipped


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("arch", kernels.SHIPPED_TARGETS)
def test_levels_of_a_preset_are_managed_by_shipped_kernels(arch, name):
    shipped, levels = set(kernels.shipped_keys(arch)), parse(name)
    for target, dtype, head_dim in product(kernels.SHIPPED_TARGETS[arch], kernels.SHIPPED_DTYPES, (64, 128)):
        assert kernels.manage_missing(levels, head_dim, getattr(torch, dtype)) == []
        assert {*kernels.manage_keys(target, dtype, head_dim, levels), kernels.merge_key(target, dtype, head_dim),
                kernels.level_append_key(target, dtype, head_dim)} <= shipped
        assert (kernels.no_pair(arch, levels, head_dim, getattr(torch, dtype)) == []) == (arch == "hopper")
        assert (kernels.pair_key(target, dtype, head_dim, levels) in shipped) == (arch == "hopper")


@pytest.mark.parametrize("count", [1, 60, 10**6])
def test_a_rotation_comes_to_every_kernel_once(count):
    keys = list(dict.fromkeys(key for arch in kernels.SHIPPED_TARGETS for key in kernels.shipped_keys(arch)))
    parts = max(1, round(len(keys) / count))
    seen = Counter(key for seed in range(1000, 1000 + parts) for key in promised.rotation(keys, count, seed))
    assert seen == Counter(keys)
    assert promised.rotation(keys, count, 7) == promised.rotation(keys, count, 7 + parts)


def test_kernels_of_one_source_come_in_one_part():
    keys = list(dict.fromkeys(key for arch in kernels.SHIPPED_TARGETS for key in kernels.shipped_keys(arch)))
    part = promised.rotation(keys, 60, 3)
    sources = {emit.source_of(key) for key in part}
    assert set(part) == {key for key in keys if emit.source_of(key) in sources}
    assert len(part) > len(sources)


def test_parts_of_a_rotation_have_every_class_in_proportion():
    keys = all_promised("hopper")
    parts = [promised.rotation(keys, 500, seed) for seed in (1, 2, 3)]
    whole = Counter((key.op, key.head_dim) for key in keys)
    for part in parts:
        found = Counter((key.op, key.head_dim) for key in part)
        for kind, count in whole.items():
            assert abs(found[kind] - count * len(part) / len(keys)) < 8  # about one a class of promised.rotation
        assert {key.dtype for key in part if key.op == "append"} == {"float16", "bfloat16"}
    assert all(not set(a) & set(b) for a, b in pairwise(parts))


@pytest.mark.parametrize("arch", kernels.ARCH_TARGETS)
def test_sides_of_promised_kernels_exist(arch):
    """Kernels of one side are named by the plainest format that has it, whose other side may be impossible."""
    of_sides = [key for key in all_promised(arch) if key.op in ("quantize", "dequantize")]
    assert any((key.format, key.head_dim, key.variant) == ("k1v1", 96, "k") for key in of_sides)
    for key in of_sides:
        assert registry.side_of(key).head_dim == key.head_dim
