"""Prefix sharing of level caches: a row with common frames is what a row with its own would be, whatever either does
next; frames go back when their last holder returns them."""

import copy

import pytest
import torch

from lowbit_attn import PageExhaustedError, decode
from lowbit_attn.formats.levels import parse
from lowbit_attn.levels import FramePool, LevelCache
from lowbit_attn.levels.frames import frame_sizes
from lowbit_attn.levels.policy import Cumulative, Shares
from unit.level_caches import check_equal, state

H, D = 3, 64
COUNTERS = ("c_pack", "c_sink", "c_tok", "c_out", "n_stage", "n_out", "n_tok", "n_sink", "limit", "n_drop", "seen")


def make(name: str = "lean", frames: int = 90, **options) -> LevelCache:
    sizes = len(frame_sizes(*(fmt.record_bytes(D) for fmt in parse(name).formats))[1])
    pool = FramePool(name, head_dim=D, frames=(frames,) * sizes)
    return LevelCache(pool, H, **dict(policy=Cumulative(0.05, 0.6), max_seqlen=2000, sinks=5, max_batch=4) | options)


def tokens(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, count, H, D, generator=generator).half()
    return k, v, torch.randn(count, 2 * H, D, generator=generator).half()


def steps(cache, rows: list[int], count: int, seed: int) -> None:
    """Steps of these rows, each with tokens and queries of its own."""
    k, v, q = (x.unflatten(0, (count, len(rows))) for x in tokens(count * len(rows), seed))
    for i in range(count):
        cache.append(k[i][:, None], v[i][:, None], rows)
        cache.manage(q[i][:, None], torch.full((len(rows), 2 * H, 1), 6.0), rows)


def held(cache, row: int) -> list[torch.Tensor]:
    return [x for sides in cache.gather(row) for x in sides]


def same(one: list, other: list) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("name", ("lean", "lean-low", "k8v2+k2v1", "k8v8+k1v1"))
@pytest.mark.parametrize("length, cut", [(900, 0), (900, 31), (640, 7), (130, 100), (3, 1)])
def test_a_shared_prefix_is_a_row_of_its_own(name, length, cut):
    """Both rows go on with tokens of their own over two flushes, as rows that were read apart and cut do."""
    cache, apart = make(name), make(name)
    k, v, q = tokens(length)
    cache.prefill(0, k, v, q)
    cache.share(0, 2, length - cut)
    for row in (0, 2):
        apart.prefill(row, k, v, q)
    apart.rewind([2], cut)
    for i in range(4):
        for one in (cache, apart):
            one.pool.check(one)
        assert same(held(cache, 0), held(apart, 0)) and same(held(cache, 2), held(apart, 2)), i
        for x in COUNTERS:
            assert torch.equal(getattr(cache, x), getattr(apart, x)), x
        assert torch.equal(cache.half < 0, apart.half < 0)
        for one in (cache, apart):
            steps(one, [2, 0], 70, i)
    q = q[None, -1:].repeat(3, 1, 1, 1)
    assert torch.equal(decode(q, cache)[0], decode(q, apart)[0])


def test_pairs_with_other_numbers_of_low_records_in_a_frame_are_among_them():
    assert [make(name).pool.per_low for name in ("lean", "lean-low", "k8v2+k2v1", "k8v8+k1v1")] == [2, 1, 3, 6]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_frames_are_free_once_their_last_holder_returns_them(order):
    cache = make(frames=40)
    k, v, q = tokens(900)
    cache.prefill(0, k, v, q)
    before, free = held(cache, 0), cache.pool.n_free[0]
    opened = int((cache.half[:H] >= 0).sum())
    cache.share(0, 1)
    cache.share(1, 2)
    assert opened and cache.pool.n_free == (free - 2 * opened,)
    for i, row in enumerate(order):
        left = cache.pool.n_free[0]
        cache.free([row])
        cache.pool.check(cache)
        assert cache.pool.n_free[0] - left == (opened if i < 2 else opened + 40 - free - opened)
        assert all(same(held(cache, other), before) for other in order[i + 1 :])
        cache.prefill(3, *tokens(900, 5))  # what is free may be written to
        assert all(same(held(cache, other), before) for other in order[i + 1 :])
        cache.free([3])
    assert cache.pool.n_free == (40,) and not cache.pool.lists[0].shared.any()


def test_shared_pages_are_counted_once():
    cache = make("lean-low")
    cache.prefill(0, *tokens(900))
    alone = cache.nbytes
    pages = sum(int(cache.c_pack[level].sum()) // 128 * cache.pool.record_bytes[level] for level in (0, 1))
    cache.share(0, 1)
    assert cache.nbytes == alone + (alone - pages)


@pytest.mark.parametrize("name", ("lean", "k8v8+k1v1"))
def test_without_frames_for_the_copies_nothing_changes(name):
    cache = make(name)
    cache.prefill(0, *tokens(900))
    needed = int((cache.half[:H] >= 0).sum())
    free = cache.pool.lists[0]
    taken = free.take(free.n_free - needed + 1)
    before = state(cache) | {"shared": free.shared.clone()}
    with pytest.raises(PageExhaustedError, match=rf"needs \[{needed}\] frames, \[{needed - 1}\] are free"):
        cache.share(0, 1)
    assert needed
    check_equal(state(cache) | {"shared": free.shared}, before)
    free.give(taken)
    cache.share(0, 1)
    cache.pool.check(cache)


def test_growth_and_copies_keep_who_shares():
    cache = make()
    cache.prefill(0, *tokens(900))
    cache.share(0, 1)
    cache.pool.grow(5)
    twin = copy.deepcopy(cache)
    for one in (cache, twin):
        one.pool.check(one)
        one.free([0])
        one.free([1])
        assert one.pool.n_free == (95,)


def test_a_row_that_waits_for_frames_is_shared_with_its_wait():
    cache = make(frames=8, policy=Shares(1.0, 0.0))
    cache.prefill(0, *tokens(5 + 128 + 60)[:2])
    taken = cache.pool.lists[0].take(cache.pool.n_free[0])
    steps(cache, [0], 128, 1)
    assert cache.waits[0] and int(cache.starved)
    cache.pool.lists[0].give(taken)
    cache.share(0, 1)
    cache.share(0, 2, int(cache.n_tok[0]) - 20)
    assert cache.waits.tolist() == [True, True, False, False]
    steps(cache, [1], 1, 2)
    assert int(cache.n_out[1]) == int(cache.n_out[0]) + 128 and not cache.waits[1]
    cache.pool.check(cache)


def test_what_cannot_be_shared_is_refused(monkeypatch):
    cache = make()
    cache.prefill(0, *tokens(700))
    cache.prefill(1, *tokens(9)[:2])
    least = cache.first_recent(0)
    before = state(cache)
    for call, words in ((lambda: cache.share(0, 0), "dst: row 0 is src or holds tokens"),
                        (lambda: cache.share(0, 1), "dst: row 1 is src or holds tokens"),
                        (lambda: cache.share(0, 7), r"seqs: got \[7\]"),
                        (lambda: cache.share(0, 2, least - 1), f"tokens: got {least - 1}, supported for sequence 0: "
                                                               f"{least} to 700"),
                        (lambda: cache.share(0, 2, 701), "tokens: got 701"),
                        (lambda: cache.share(1, 2, -1), "tokens: got -1, supported for sequence 1: 0 to 9")):
        with pytest.raises(ValueError, match=words):
            call()
    monkeypatch.setattr(LevelCache, "is_capturing", lambda self: True)
    with pytest.raises(RuntimeError, match="share: called while a CUDA graph is captured"):
        cache.share(0, 2)
    check_equal(state(cache), before)
