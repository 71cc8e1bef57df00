"""Skips without a CUDA device, and one seed a test, taken from its name."""

from collections import defaultdict

import pytest
import torch
import windowed
from parts import left_out
from seeds import seed_of

from lowbit_attn import dispatch, kernels

pytest_plugins = ("cpu_limit",)


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=0, help="of the GPU tests' sample (gpu.matrix.sample), and of --parts")
    parser.addoption("--cases", type=int, default=0, help="decode calls in that sample, each on both architectures")
    parser.addoption("--parts", type=int, default=1, help="of as many cases of the PTX interpreter one is run")


def pytest_configure(config):
    torch.set_num_threads(1)  # xdist already runs one worker a core


def pytest_collection_modifyitems(config, items):
    leave_out(config, items, left_out(items, config.getoption("--parts"), config.getoption("--seed")))
    if not torch.cuda.is_available():
        leave_out(config, items, gpu_cases(items))


def leave_out(config, items, which):
    config.hook.pytest_deselected(items=which)
    which = set(which)
    items[:] = [item for item in items if item not in which]


def gpu_cases(items) -> list:
    """All but one of each GPU test, which is marked as skipped: thousands take as long as other tests."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("gpu"):
            cases[item.parent, item.originalname].append(item)
    for first, *others in cases.values():
        first.add_marker(pytest.mark.skip(reason=f"needs a CUDA device; cases: {1 + len(others)}"))
    return [item for _, *others in cases.values() for item in others]


@pytest.fixture(autouse=True)
def seed(request) -> int:
    value = seed_of(request.node.nodeid)
    torch.manual_seed(value)
    return value


@pytest.fixture
def windowed_formats():
    """Kernels of formats like "k4v4+w128" are found, as the package's FORMATS has them."""
    with windowed.registered():
        yield


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(params=kernels.ARCH_TARGETS)
def arch(request, monkeypatch) -> str:
    """Runs the test with each architecture's kernels; skips what this device cannot run."""
    monkeypatch.setenv("LOWBIT_ATTN_ARCH", request.param)
    try:
        dispatch.target_of(torch.device("cuda"))
    except NotImplementedError as error:
        pytest.skip(str(error))
    return request.param
