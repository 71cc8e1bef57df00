"""Whatever raises inside a call of KVCache, wherever: the cache is as it was, and the call can be repeated."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from lowbit_attn import FORMATS, KVCache, ops
from lowbit_attn.cache.backend import BACKENDS
from lowbit_attn.cache.state import CacheState, Counts
from lowbit_attn.formats import codebook
from lowbit_attn.testing import assert_same_bytes, assert_same_state, normal_codebooks
from unit.faults import Faults, InjectedError

HEADS, DIM, SINKS = 1, 64, 5
NEW = torch.randn(2, 600, HEADS, DIM, generator=torch.Generator().manual_seed(1)).half()


class Points:
    """The points beside torch's operations: uploads, loads of kernels, launches; ``faults``: of the present call."""

    def __init__(self, monkeypatch):
        self.faults, self.seen, self.monkeypatch = Faults(None), set(), monkeypatch
        upload = CacheState.upload
        monkeypatch.setattr(CacheState, "upload", lambda cache, values: self.point("upload") or upload(cache, values))
        nearest = codebook.nearest
        monkeypatch.setattr(codebook, "nearest", lambda *given: self.at_once("nearest", nearest, *given))

    def point(self, what: str) -> None:
        self.seen.add(what)
        self.faults.point(what)

    def at_once(self, what: str, work, *given):
        """It raises or is done."""
        self.point(what)
        was_off, self.faults.is_off = self.faults.is_off, True
        found = work(*given)
        self.faults.is_off = was_off
        return found

    def on_the_host(self) -> None:
        """torch's backend: each of its operations is a point."""
        cpu = BACKENDS["cpu"]
        self.monkeypatch.setitem(BACKENDS, "cpu", cpu._replace(
            ready=lambda cache, calls: [self.point(f"load {call}") for call in calls]))

    def on_a_device(self) -> None:
        """Kernels: loading raises or not, a launch does all of its work or none."""
        cpu = BACKENDS["cpu"]

        def launch(what, work, *arguments):
            self.at_once(f"launch {what}", work, *arguments)

        def append(cache, rows, ring_rows, k, v):
            held = ops.HeldCache(cache.format.name, list(cache.strides),
                                 {name: getattr(cache, name) for name in ops.STEP_STATE},
                                 **{name: getattr(cache, name) for name in ops.STEP_VALUES})
            held.format, held.attached = cache.format, cache.attached  # with a window of its own
            launch("append", ops._append_in_torch, held, rows, ring_rows, k, v)

        self.monkeypatch.setitem(BACKENDS, "cpu", cpu._replace(
            write_blocks=lambda cache, pages, blocks, side: launch(side, cpu.write_blocks, cache, pages, blocks, side),
            append=append, ready=lambda cache, calls: [self.point(f"load {call}") for call in calls], launches=True))


@pytest.fixture
def points(monkeypatch) -> Points:
    return Points(monkeypatch)


# no kernel knows codebooks of keys before their rotary embedding
CACHES = {"host": ("k8v8", "post"), "device": ("k8v8", "post"), "codebooks on a host": ("cq2", "post"),
          "codebooks on a device": ("kcq4vcq2", "post"), "codebooks before rope": ("cq2", "pre"),
          "by significance": ("k4v2-boost", "post")}


def make(name: str, rope: str, is_device: bool) -> KVCache:
    """Rows: 0 with pages of which one has V in 16 bit, 1 with a block that is full and not packed, 2 that two more
    tokens give a page, 3 freed, 4 unused."""
    fmt = replace(FORMATS[name], window_v=128)
    books = normal_codebooks(name, 1, HEADS, DIM, rope).layer(0) if fmt.needs_codebooks else None
    cache = KVCache(fmt, 12, HEADS, DIM, sinks=SINKS, max_batch=5, max_q_len=2, codebooks=books)
    if rope == "pre":
        cache.set_first_positions([0], 3)
    k, v = torch.randn(2, 400, HEADS, DIM).half()
    for row, count in enumerate((400, SINKS + 128, SINKS + 127, 300)):
        cache.prefill(row, k[:count], v[:count])
    cache.append(k[None, :1], v[None, :1], [1])
    cache.free([3])
    if is_device:
        cache._counts = Counts(*(x.numpy().copy() for x in cache.counters()))
    return cache


CALLS = {
    "prefill": lambda cache: cache.prefill(2, *NEW[:, :400]),
    "prefill within a page": lambda cache: cache.prefill(1, *NEW[:, :3]),
    "prefill of fp32 that needs grad": lambda cache: cache.prefill(0, *NEW[:, :130].float().requires_grad_()),
    "prefill of a freed row": lambda cache: cache.prefill(3, *NEW[:, :200]),
    "append": lambda cache: cache.append(*NEW[:, :6].unflatten(1, (3, 2)), [2, 0, 1]),
    "append to one": lambda cache: cache.append(*NEW[:, None, :1], [1]),
    "append to the first": lambda cache: cache.append(*NEW[:, :3, None]),
    "reserve": lambda cache: cache.reserve([4, 0], [300, 700]),
    "rewind": lambda cache: cache.rewind([1, 0], [2, 1]),
    "rewind one": lambda cache: cache.rewind([2], 130),
    "flush": lambda cache: cache.flush([0, 1, 2]),
    "share": lambda cache: cache.share(0, 4),
    "share a prefix": lambda cache: cache.share(0, 3, SINKS + 256),
    "add": lambda cache: cache.add(),
    "free": lambda cache: cache.free([1, 0]),
    "clear": lambda cache: cache.clear([0, 2]),
}
LAUNCHED = {"prefill": {"load k", "load v", "launch k", "launch v", "upload"}, "flush": {"load k", "launch k"},
            "append": {"load append", "launch append", "upload"}, "share": {"upload"}, "reserve": {"upload"}}


def contents(cache: KVCache) -> dict:
    """All that a call could change, but a device's pool: there bytes that hold no token mean nothing."""
    tensors = {name: x.clone() for name, x in vars(cache).items() if isinstance(x, torch.Tensor)}
    if BACKENDS["cpu"].launches:
        del tensors["pool"]
    book = {name: copy.deepcopy(x) for name, x in vars(cache.book).items()}
    return {**tensors, **book, "counts": [count.tolist() for count in cache.counts], "edits": cache.edits}


def assert_same_contents(got: KVCache, before: dict) -> None:
    for name, now in contents(got).items():
        if isinstance(now, torch.Tensor):
            assert_same_bytes(name, now, before[name])
        elif isinstance(now, np.ndarray):
            assert now.tolist() == before[name].tolist(), name
        else:
            assert now == before[name], name


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_done_or_undone(points, name, kind):
    is_device = kind.endswith("device")
    cache = make(*CACHES[kind], is_device)
    whole = copy.deepcopy(cache)
    if is_device:
        whole._counts = Counts(*(x.copy() for x in cache.counts))
    points.on_a_device() if is_device else points.on_the_host()
    CALLS[name](whole)
    held, before = copy.deepcopy(cache), contents(cache)
    for at in range(10_000):
        points.faults = Faults(at)
        try:
            with points.faults:
                CALLS[name](cache)
        except InjectedError:
            assert_same_contents(cache, before)
            if is_device:
                assert_same_state(cache, held)
        else:
            break
    passed, points.faults = points.faults.count, Faults(None)
    assert at >= 3 and at == passed, "points were passed without an exception"
    assert points.seen >= (LAUNCHED.get(name, set()) if is_device else set())
    assert_same_contents(cache, contents(whole))
    assert_same_state(cache, whole)
    cache.append(*NEW[:, 6:8, None], [0, 2]) if name not in ("free",) else cache.prefill(0, *NEW[:, :200])
    cache.book.check()


def test_a_host_that_writes_nothing_in_between(points):
    """The test's own test: a cache that enters pages before all else is found."""
    cache = make(*CACHES["host"], False)
    enter = CacheState._enter_pages

    def without_a_journal(cache, journal, rows, granted):
        class Forgetful(type(journal)):
            def keep(self, target):
                pass
        enter(cache, Forgetful(), rows, granted)

    points.monkeypatch.setattr(CacheState, "_enter_pages", without_a_journal)
    points.on_the_host()
    before, broken = contents(cache), 0
    for at in range(0, 400, 7):
        points.faults = Faults(at)
        try:
            with points.faults:
                CALLS["prefill"](cache)
        except InjectedError:
            try:
                assert_same_contents(cache, before)
            except AssertionError:
                broken += 1
        else:
            break
    assert broken
