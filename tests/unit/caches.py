"""Small caches, the calls that fill them, and what must hold of any of them."""

from dataclasses import replace

import torch

from lowbit_attn import FORMATS, KVCache
from lowbit_attn.testing import assert_same_bytes

HEADS, DIM = 2, 32


def tokens(count, dtype=torch.float16):
    return tuple(torch.randn(count, HEADS, DIM).to(dtype) for _ in range(2))


def make(fmt="k4v4", windows=(0, 0), pages=8, **kwargs) -> KVCache:
    fmt = replace(FORMATS[fmt], window_k=windows[0], window_v=windows[1])
    return KVCache(fmt, pages, HEADS, DIM, **kwargs)


def prefilled(k, v, **kwargs) -> KVCache:
    cache = make(**kwargs)
    cache.prefill(0, k, v)
    return cache


def snapshot(cache: KVCache) -> dict:
    """Everything a call could write: the tensors, and the host's account of pages and rows."""
    tensors = {name: value.clone() for name, value in vars(cache).items() if isinstance(value, torch.Tensor)}
    return tensors | {"book": cache.book.copy()}


def assert_untouched(cache: KVCache, before: dict) -> None:
    assert {"pool", "table", "n_tok", "n_qk", "sink_k", "ring_v", "limit"} <= before.keys()
    for name, value in before.items():
        if name == "book":
            assert value.free == cache.book.free and value.held == cache.book.held
            assert value.refs.tolist() == cache.book.refs.tolist()
            assert value.state.tolist() == cache.book.state.tolist()
        else:
            assert_same_bytes(name, getattr(cache, name), value)


def assert_account(cache: KVCache) -> None:
    """No page lost, none owned twice; the table and the limits say what the book says."""
    cache.book.check()
    for row, pages in enumerate(cache.book.held):
        assert cache.table[row].tolist() == pages + [-1] * (cache.table.shape[1] - len(pages))
    limits = cache.limit.clone()
    cache.refresh_limits()
    assert torch.equal(cache.limit, limits)
