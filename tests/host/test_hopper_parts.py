"""Hopper's arithmetics and schedules: each path has one of each, and all keep the contract of warp/config.py."""

import inspect

import pytest

from lowbit_attn import kernels
from lowbit_attn.hopper import PATHS
from lowbit_attn.hopper.config import ARITHMETICS, SCHEDULES, TILE_PATHS
from lowbit_attn.hopper.warp.config import Arithmetic

STEPS = ("prefetch_query", "load_query", "prepare_query", "scores", "before_values", "add_values", "finish")
OWN_STEPS = ("prepare_own_query",)
OF_WARPS = {path: support for path, support in PATHS.items() if path not in TILE_PATHS}


# of arithmetics that read codebooks
BOOK_STEPS = ("copy_piece", "end_books", "place_books", "start_books", "token_query")
PART_STEPS = ("part_scores", "with_mean")  # of those whose warps take both pieces of a page


def test_a_path_is_an_arithmetic_on_a_schedule():
    pairs = {path: (support.arithmetic, support.schedule) for path, support in PATHS.items()}
    assert len(set(pairs.values())) == len(pairs)
    assert {path: kernels.path_of("hopper", *pair) for path, pair in pairs.items()} == {path: path for path in pairs}
    assert {support.arithmetic for support in OF_WARPS.values()} == set(ARITHMETICS)
    assert {support.schedule for support in OF_WARPS.values()} == set(SCHEDULES) == set(kernels.SCHEDULES)
    assert kernels.path_of("hopper", "fp16", "stream") is None and kernels.path_of("ampere", "int8", "splits") is None
    for path, support in OF_WARPS.items():
        assert support.clusters == (SCHEDULES[support.schedule].may_cluster and not support.codebooks), path


@pytest.mark.parametrize("arch", kernels.ARCH_TARGETS)
def test_keys_name_both_and_give_the_path_back(arch):
    for path, support in kernels.arch_package(arch).PATHS.items():
        target = kernels.ARCH_TARGETS[arch][0]
        key = kernels.decode_key(arch, target, "float16", 128, "k4v4", path, support.rows[0], ("window",))
        assert (kernels.path_name(key), key.arithmetic, key.schedule) == (path, support.arithmetic, support.schedule)
        assert str(key) == (f"decode-{key.arithmetic}-{key.schedule}-k4v4-float16-d128-r{key.rows}-window@{target}")


@pytest.mark.parametrize("name", ARITHMETICS)
def test_an_arithmetic_has_every_step(name):
    """With the arguments of the contract, in its order."""
    pytest.importorskip("cutlass", reason="CuTe-DSL (nvidia-cutlass-dsl) is not installed")
    steps, text = ARITHMETICS[name].steps, inspect.getdoc(Arithmetic)
    serves = {support.schedule for support in OF_WARPS.values() if support.arithmetic == name}
    of_books = BOOK_STEPS * any(support.codebooks for support in OF_WARPS.values() if support.arithmetic == name)
    of_books += PART_STEPS * getattr(ARITHMETICS[name], "has_parts", False)
    wanted = STEPS + OWN_STEPS * any(SCHEDULES[schedule].own_queries for schedule in serves)
    assert set(wanted + of_books) == set(steps.__all__)
    text += inspect.getdoc(type(ARITHMETICS["codebook"]))
    for step in wanted + of_books:
        shown = text[text.index(f"    {step}(") :].split("(")[1].split(")")[0].split(", ")
        taken = list(inspect.signature(getattr(steps, step)).parameters)
        if of_books and step == "scores":
            assert shown.pop() == "tile=None"  # of codebooks, scores are of whole pages
        assert len(taken) == len(shown) and taken[0] == shown[0] == "cfg", f"{name}: {step}({', '.join(taken)})"
