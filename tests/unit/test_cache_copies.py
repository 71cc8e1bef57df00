"""Copies of a cache: caches of their own, here and in another process, or views of its memory."""

import copy
import io
import pickle

import pytest
import torch
import torch.multiprocessing as mp

from lowbit_attn import KVCache, decode
from lowbit_attn.testing import assert_same_state


def tokens(count):
    return torch.randn(2, count, 2, 64).half()


@pytest.fixture
def cache() -> KVCache:
    found = KVCache("k4v4", 8, 2, 64, sinks=8, max_batch=2, max_q_len=2)
    found.prefill(0, *tokens(300))
    found.prefill(1, *tokens(4))
    return found


def saved(cache):
    buffer = io.BytesIO()
    torch.save(cache, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False, map_location="cpu")


def in_inference_mode(cache):
    with torch.inference_mode():
        return pickle.loads(pickle.dumps(cache))


WAYS = {"deepcopy": copy.deepcopy, "pickle": lambda cache: pickle.loads(pickle.dumps(cache)), "torch.save": saved,
        "pickle in inference mode": in_inference_mode}


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_a_cache_of_its_own(cache, way):
    """Host and device agree in it whatever comes: steps, prompts, compiled steps; the original stays."""
    before, twin = copy.deepcopy(cache), WAYS[way](cache)
    assert_same_state(twin, cache)
    twin.book.check()
    k, v = tokens(200)
    other = WAYS[way](cache)
    for one in (twin, other):
        one.prefill(1, k, v)
        one.append(k[:2, None], v[:2, None])
    assert_same_state(twin, other)
    assert twin.n_tok.tolist() == twin.counts.n_tok.tolist() == [301, 205]
    q = torch.randn(2, 1, 4, 64).half()
    compiled = torch.compile(lambda q: decode(q, twin, window=16, keep_sinks=True), fullgraph=True, backend="eager")
    for got, want in zip(compiled(q), decode(q, other, window=16, keep_sinks=True)):
        assert torch.equal(got, want)
    assert_same_state(cache, before)


def test_a_copy_knows_no_captured_step(cache):
    cache.reserve([0, 1], 400)
    step = torch.compile(lambda k, v: cache.append(k, v), fullgraph=True, backend="eager")
    step(*tokens(2).unflatten(1, (2, 1)))
    assert cache.is_captured
    twin = copy.deepcopy(cache)
    assert not twin.is_captured and twin.counts.n_tok.tolist() == [301, 5]
    step(*tokens(2).unflatten(1, (2, 1)))
    assert cache.n_tok.tolist() == [302, 6] and twin.n_tok.tolist() == [301, 5]


def test_rows_that_the_device_started_are_in_use_in_a_copy():
    cache = KVCache("k4v4", 4, 2, 64, max_batch=2)
    cache.n_tok[0] = 1  # as a captured step does
    assert copy.deepcopy(cache).add() == 1


def test_a_shallow_copy_is_a_view(cache):
    view = copy.copy(cache)
    view.append(*tokens(2).unflatten(1, (2, 1)))
    assert view.pool is cache.pool and view.book is cache.book
    assert cache.counts.n_tok.tolist() == cache.n_tok.tolist() == [301, 5]


def test_counters_that_moved_to_shared_memory(cache):
    twin = copy.deepcopy(cache)
    for x in vars(cache).values():
        if isinstance(x, torch.Tensor):
            x.share_memory_()
    k, v = tokens(200)
    for one in (cache, twin):
        one.prefill(0, k, v)
        one.append(k[:2, None], v[:2, None])
    assert cache.counts.n_tok.tolist() == cache.n_tok.tolist() == [501, 5]
    assert_same_state(cache, twin)


def child(cache, k, v, queue):
    cache.prefill(1, k, v)
    queue.put((cache, cache.n_tok.tolist(), cache.counts.n_tok.tolist()))


def test_another_process_gets_a_copy(cache):
    """Through a Process's arguments and a Queue; what it does to its copy, the original does not see."""
    before, context = copy.deepcopy(cache), mp.get_context("spawn")
    queue, (k, v) = context.Queue(), tokens(200)
    process = context.Process(target=child, args=(cache, k, v, queue))
    process.start()
    returned, on_device, on_host = queue.get(timeout=100)
    process.join()
    assert on_device == on_host == [300, 204]
    assert_same_state(cache, before)
    cache.prefill(1, k, v)
    assert_same_state(cache, returned)
    assert not any(x.is_shared() for x in cache.counters())
