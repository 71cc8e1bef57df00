"""Skips without a CUDA device, and one seed a test, taken from its name."""

import zlib
from collections import defaultdict
from importlib import import_module

import numpy as np
import pytest
import torch

from lowbit_attn import dispatch, kernels


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=0, help="of the GPU tests' sample (gpu_matrix.sample)")
    parser.addoption("--cases", type=int, default=0, help="decode calls in that sample, each on both architectures")


def pytest_configure(config):
    torch.set_num_threads(1)  # xdist already runs one worker a core


def pytest_collection_modifyitems(config, items):
    """Without a CUDA device one case of every GPU test is left, skipped: thousands take as long as other tests."""
    if torch.cuda.is_available():
        return
    cases = defaultdict(list)
    for item in items:
        if "gpu" in item.keywords:
            cases[item.parent, item.originalname].append(item)
    for first, *others in cases.values():
        first.add_marker(pytest.mark.skip(reason=f"needs a CUDA device; cases: {1 + len(others)}"))
    left_out = {item for _, *others in cases.values() for item in others}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def seed(request) -> int:
    value = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(value)
    return value


@pytest.fixture
def numpy_walk(monkeypatch):
    """Hopper's walks compute in numpy's int32, where overflows raise: the DSL's integers take 100 times longer."""
    for name in ("common.rows", "tile.walk", "warp.walk", "schedule.items"):
        monkeypatch.setattr(import_module(f"lowbit_attn.hopper.{name}"), "Int32", np.int32)
    with np.errstate(over="raise"):
        yield


@pytest.fixture(params=kernels.ARCH_TARGETS)
def arch(request, monkeypatch) -> str:
    """Runs the test with each architecture's kernels; skips what this device cannot run."""
    monkeypatch.setenv("LOWBIT_ATTN_ARCH", request.param)
    try:
        dispatch.target_of(torch.device("cuda"))
    except NotImplementedError as error:
        pytest.skip(str(error))
    return request.param
