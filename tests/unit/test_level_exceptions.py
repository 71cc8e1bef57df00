"""Whatever raises inside a call of LevelCache or FramePool, wherever: all is as it was, and the call is repeatable."""

import copy

import pytest
import torch

from lowbit_attn import decode
from lowbit_attn.layout import RECORD_ALIGN
from lowbit_attn.levels import LevelCache
from lowbit_attn.levels.frames import FramePool
from lowbit_attn.levels.moves import Departure
from lowbit_attn.levels.policy import Cumulative
from unit.faults import Faults, InjectedError
from unit.level_caches import check_equal, state

HEADS, SINKS = 2, 5
CACHES = {"lean": 64, "k8v8+k8v4": 32}  # a frame of both levels, frames of each


def tokens(count: int, head_dim: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, count, HEADS, head_dim, generator=generator).half()
    return k, v, torch.randn(count, 2 * HEADS, head_dim, generator=generator).half()


def make(name: str) -> LevelCache:
    """Rows: 0 with pages, stages and a block that manage moves; 1 with none due; 2 in its sinks; 3 freed; 4 unused."""
    pool = FramePool(name, head_dim=CACHES[name], frames=30 if name == "lean" else (30, 30))
    cache = LevelCache(pool, HEADS, policy=Cumulative(0.02, 0.6), sinks=SINKS, max_batch=5, max_seqlen=900, max_q_len=2)
    k, v, q = tokens(448, cache.head_dim)
    for row, count in enumerate((416, 440, 3, 300)):
        cache.prefill(row, k[:count], v[:count], q[:count])
    for at in range(416, 448, 2):
        cache.append(k[None, at : at + 2], v[None, at : at + 2], [0])
    cache.free([3])
    return cache


def step_tokens(cache, rows: int) -> tuple[torch.Tensor, ...]:
    return tuple(x[: 2 * rows].unflatten(0, (rows, 2)) for x in tokens(2 * rows, cache.head_dim, 7))


def manage(cache, rows: list[int]) -> None:
    q = step_tokens(cache, len(rows))[2]
    cache.manage(q, torch.full((len(rows), 2 * HEADS, 2), 5.0, device="cpu"), rows)


def grow(cache) -> None:
    cache.pool.grow(3 if cache.pool.is_shared else (3, 2))


CALLS = {
    "prefill": lambda cache: cache.prefill(1, *tokens(60, cache.head_dim, 3)[: 3 if cache.pool.is_shared else 2]),
    "prefill of an empty row": lambda cache: cache.prefill(4, *tokens(200, cache.head_dim, 3)[:2]),
    "prefill within the ring": lambda cache: cache.prefill(2, *tokens(9, cache.head_dim, 3)[:2]),
    "append": lambda cache: cache.append(*step_tokens(cache, 3)[:2], [2, 0, 1]),
    "append to the first": lambda cache: cache.append(*step_tokens(cache, 3)[:2]),
    "manage that moves a block": lambda cache: manage(cache, [1, 0]),
    "manage that scores": lambda cache: manage(cache, [1]),
    "rewind": lambda cache: cache.rewind([0, 2], [9, 2]),
    "free": lambda cache: cache.free([1, 0]),
    "share": lambda cache: cache.share(0, 4),
    "share of a prefix in 16 bit": lambda cache: cache.share(2, 3, 2),
    "extend": lambda cache: cache.extend(2000),
    "grow": grow,
}


def contents(cache) -> dict:
    """All that a call could change, but bytes of frames and stages that hold no token."""
    found = {name: x for name, x in state(cache).items() if not name.startswith("memory")}
    for level in (0, 1):
        units, size = cache.pool.units(level), cache.pool.record_bytes[level] // RECORD_ALIGN
        for v in range(cache.table.shape[1]):
            for page, first in enumerate(cache.table[level, v, : int(cache.c_pack[level, v]) // 128].tolist()):
                found[f"record {level, v, page}"] = units[first : first + size].clone()
    found |= {f"shared {i}": free.shared.clone() for i, free in enumerate(cache.pool.lists)}
    numbers = (cache.max_seqlen, *(len(memory) for memory in cache.pool.memory))
    return found | {"numbers": torch.tensor(numbers, device="cpu")}


def versions(cache) -> list[tuple]:
    """What changes with every write to a tensor of a cache or its pool, and where a tensor takes another's place."""
    pool = cache.pool
    of_lists = (x for free in pool.lists for x in (free.ids, free.ends, free.shared))
    tensors = [*vars(cache).values(), *pool.memory, *of_lists]
    return [(id(x), x._version) for x in tensors if isinstance(x, torch.Tensor)] + [cache.max_seqlen]


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_done_or_undone(call, name):
    cache = make(name)
    whole = copy.deepcopy(cache)
    CALLS[call](whole)
    before, want = contents(cache), contents(whole)
    assert any(key not in want or not torch.equal(x, want[key]) for key, x in before.items()), "the call does nothing"
    for at in range(10_000):
        faults, untouched = Faults(at), versions(cache)
        try:
            with faults:
                CALLS[call](cache)
        except InjectedError:
            if versions(cache) != untouched:  # else nothing was written
                after = contents(cache)
                assert set(after) == set(before)
                check_equal(after, before)
                cache.pool.check(cache)
        else:
            break
    assert at >= 3 and at == faults.count, "points were passed without an exception"
    assert set(contents(cache)) == set(contents(whole))
    check_equal(contents(cache), contents(whole))
    cache.pool.check(cache)
    cache.append(*step_tokens(cache, 2)[:2], [2, 4])
    decode(tokens(2, cache.head_dim)[2][None], cache)


def test_writes_that_are_not_undone_would_be_found(monkeypatch):
    """The test's own test: a cache that keeps nothing is found in some of its calls."""
    monkeypatch.setattr(LevelCache, "undoing", lambda cache, names, row=None: torch.no_grad())
    cache = make("lean")
    before, broken = contents(cache), 0
    for at in range(0, 100):
        one = copy.deepcopy(cache)
        try:
            with Faults(at):
                one.free([1, 0])
        except InjectedError:
            after = contents(one)
            broken += set(after) != set(before) or any(not torch.equal(x, before[key]) for key, x in after.items())
    assert broken > 5


class NoSecond(Exception):
    pass


def test_nothing_of_a_departure_is_written_before_all_of_it_is_known(monkeypatch):
    """Records are packed, and frames are there, before the first write of a prompt."""
    cache = make("lean")
    before = contents(cache)

    def write(departure, frames):
        check_equal(contents(cache) | {f"ends{i}": before[f"ends{i}"] for i in range(len(frames))}, before)
        raise NoSecond

    monkeypatch.setattr(Departure, "write", write)
    with pytest.raises(NoSecond):
        CALLS["prefill"](cache)
    check_equal(contents(cache), before)
