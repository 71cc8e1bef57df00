"""Skips without a CUDA device, and one seed a test, taken from its name."""

import zlib

import pytest
import torch

from lowbit_attn import dispatch, kernels


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=0, help="of the GPU tests' sample (gpu_matrix.sample)")
    parser.addoption("--cases", type=int, default=0, help="decode calls in that sample, each on both architectures")


def pytest_configure(config):
    torch.set_num_threads(1)  # xdist already runs one worker a core


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def seed(request) -> int:
    value = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(value)
    return value


@pytest.fixture(params=kernels.ARCH_TARGETS)
def arch(request, monkeypatch) -> str:
    """Runs the test with each architecture's kernels; skips what this device cannot run."""
    monkeypatch.setenv("LOWBIT_ATTN_ARCH", request.param)
    try:
        dispatch.target_of(torch.device("cuda"))
    except NotImplementedError as error:
        pytest.skip(str(error))
    return request.param
