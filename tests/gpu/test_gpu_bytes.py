"""Thousands of groups of ordinary data: with range search too, each gets the scale on a GPU that it gets on a CPU."""

import pytest
import torch

import lowbit_attn
from lowbit_attn import testing

pytestmark = pytest.mark.gpu
PAGES, HEADS, HEAD_DIM = 48, 2, 128
SEARCHED = ("k2v2", "kitty", "kitty-pro", "k2v4-g64", "k1v1")
DATA = {"normal": lambda shape: torch.randn(shape), "uniform": lambda shape: torch.rand(shape) - 0.5,
        "heavy-tailed": lambda shape: torch.randn(shape) ** 3, "offset": lambda shape: torch.randn(shape) + 3}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", SEARCHED)
def test_random_groups_have_the_same_bytes(name, dtype, data):
    tokens = PAGES * 128 + 300  # beyond sinks and windows
    k, v = (DATA[data]((tokens, HEADS, HEAD_DIM)).to(getattr(torch, dtype)) for _ in range(2))
    caches = [lowbit_attn.KVCache(name, PAGES + 4, HEADS, HEAD_DIM, k.dtype, where) for where in ("cpu", "cuda")]
    for cache in caches:
        cache.prefill(0, k.to(cache.device), v.to(cache.device))
    testing.assert_same_state(caches[1], caches[0])
