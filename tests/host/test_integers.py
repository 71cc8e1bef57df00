"""The swap of the DSL's integers: it reaches every module of a computation, and fails where one has none."""

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe-DSL (nvidia-cutlass-dsl) is not installed")

from cutlass import Int32  # noqa: E402

from host.integers import modules_used, replace_integers  # noqa: E402
from lowbit_attn.device import numbers  # noqa: E402
from lowbit_attn.hopper.common import abi, combine, tuning  # noqa: E402
from lowbit_attn.hopper.schedule import items  # noqa: E402
from lowbit_attn.hopper.tile import walk as tile_walk  # noqa: E402
from lowbit_attn.hopper.warp import page_loop  # noqa: E402


def test_modules_are_found_through_imports():
    assert {page_loop, abi} <= set(modules_used(items)) and combine not in modules_used(items)
    assert {abi, numbers} <= set(modules_used(combine))


def test_walks_compute_in_numpy_integers(numpy_walk):
    for module in (items, tile_walk, page_loop, abi):
        assert module.Int32 is np.int32
    assert combine.Int32 is Int32, "no walk calls it"
    with pytest.raises(FloatingPointError, match="overflow"):
        items.at_most(np.int32(2**31 - 1), np.int32(1)) + np.int32(2**31 - 1)


def test_integers_are_the_dsls_again():
    with pytest.MonkeyPatch.context() as patch:
        replace_integers(patch, int, tile_walk)
        assert tile_walk.Int32 is abi.Int32 is int and items.Int32 is Int32
    assert tile_walk.Int32 is abi.Int32 is Int32


def test_a_module_without_integers_is_refused(monkeypatch):
    with pytest.raises(AssertionError, match="tuning has no Int32"):
        replace_integers(monkeypatch, int, items, tuning)
    with pytest.raises(AssertionError, match="walk has no Uint7"):
        replace_integers(monkeypatch, int, tile_walk, names=("Int32", "Uint7"))
    assert items.Int32 is tile_walk.Int32 is Int32
