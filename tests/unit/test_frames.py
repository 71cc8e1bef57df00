"""Frames: sizes of records, grants by prefix sums, and 10^5 random steps in which no frame is lost or held twice."""

import random

import pytest
import torch

from lowbit_attn import FORMATS, PageExhaustedError
from lowbit_attn.cache.journal import Journal
from lowbit_attn.formats import levels
from lowbit_attn.levels.frames import FramePool, FreeList


@pytest.mark.parametrize("name, head_dim, frame_bytes", [
    ("k8v4+k4v2", 128, (26624,)), ("k4v4+k2v2", 128, (18432,)), ("k8v8+k4v4", 128, (34816,)),
    ("k8v4+k4v2", 64, (13824,)), ("k4v4+k2v2", 64, (9728,)), ("k8v4+k4v2", 256, (52224,)),
    ("k4v4+kitty-pro", 128, (17408, 10368))])
def test_frames_have_the_size_of_one_high_or_two_low_records(name, head_dim, frame_bytes):
    pool = FramePool(name, head_dim=head_dim, frames=4 if len(frame_bytes) == 1 else (4, 4))
    assert pool.frame_bytes == frame_bytes and pool.is_shared == (len(frame_bytes) == 1)
    assert pool.per_low == (2 if pool.is_shared else 1)
    assert pool.nbytes == sum(4 * n for n in frame_bytes)


def test_levels_are_pairs_by_name():
    assert levels.parse("lean").formats == (FORMATS["k8v4"], FORMATS["k4v2"])
    assert levels.parse("lean-low").formats == (FORMATS["k4v4"], FORMATS["kitty-pro"])
    assert levels.parse("k4v4-bf16+k2v2-vg32-high10").percent == 10 and levels.parse("lean").percent == 25
    assert levels.parse("lean-low").bits_per_element(128) == pytest.approx(2.96, abs=0.005)
    assert levels.parse("lean").bits_per_element(128) == 4.0
    for name in ("k4v4", "k4v4+", "k4v4+nothing", "k4v4+k2v2-high0", "k4v4+k2v2-high100", "k4v4+k4v2+k2v2"):
        assert levels.parse(name) is None
    for name in ("lean", "k4v4-bf16+k2v2-vg32-high10"):
        assert not set(str(levels.parse(name))) & set('/\\:*?"<>| ')


@pytest.mark.parametrize("name, words", [
    ("k4tv4+k4v2", "high: got format k4tv4, K per token of 4 bits, supported: K per channel, or per token of 8 bits"),
    ("k8v8+k2tv2", "low: got format k2tv2, K per token of 2 bits"), ("k4tv4+k4v2", "perplexity 4.45 to 38.6"),
    ("k4v2-boost+k2v2", "high: got format k4v2-boost, which orders tokens"),
    ("k4v4+kitty-weighted", "low: got format kitty-weighted, which orders tokens or weighs queries")])
def test_pairs_that_are_refused(name, words):
    with pytest.raises(ValueError, match=words):
        levels.parse(name)
    assert levels.parse("k8tv4+k4v2")  # K per token of 8 bits


@pytest.mark.parametrize("arguments, error, words", [
    (dict(high="k4v4"), ValueError, "high: got 'k4v4' alone"), (dict(high="k4v4", low=3), TypeError, "high, low: got"),
    (dict(high="k2v2", low="k4v4"), ValueError, "supported: the larger records first"),
    (dict(high="lean", frames=(3, 3)), ValueError, "one number, for a frame serves both levels"),
    (dict(high="lean-low", frames=3), ValueError, r"\(high, low\), as sizes differ"),
    (dict(high="lean", frames=0), ValueError, "1 or more")])
def test_pools_that_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        FramePool(**dict(head_dim=128, frames=4) | arguments)


def test_the_list_gives_ids_in_order_and_wraps():
    free = FreeList(5, torch.device("cpu"))
    assert free.take(3).tolist() == [0, 1, 2] and free.n_free == 2
    free.give(torch.tensor([1, 0], dtype=torch.int32))
    assert free.free_ids().tolist() == [3, 4, 1, 0]
    assert free.take(4).tolist() == [3, 4, 1, 0] and free.n_free == 0
    free.ends += (1 << 40) // 5 * 5  # counters are int64 and only grow
    free.give(torch.tensor([2, 3], dtype=torch.int32))
    assert free.free_ids().tolist() == [2, 3]
    free.extend(2, Journal())
    assert free.free_ids().tolist() == [2, 3, 5, 6] and len(free.ids) == 7


def test_grants_are_all_or_nothing_in_row_order():
    pool = FramePool("lean-low", head_dim=64, frames=(5, 4))
    needs = torch.tensor([[2, 0, 2, 2, 0, 1], [1, 0, 3, 1, 0, 0]])
    assert pool.grant(needs).tolist() == [True, True, True, False, True, False]
    assert pool.grant(needs[:, 3:]).tolist() == [True, True, True]
    with pytest.raises(PageExhaustedError, match=r"needs \[6, 1\] frames, \[5, 4\] are free"):
        pool.take([6, 1])
    assert pool.n_free == (5, 4)


def test_needs_fill_open_frames_first():
    pool = FramePool("lean", head_dim=64, frames=4)
    high, low, open_parts = torch.tensor([1, 0, 0, 2]), torch.tensor([0, 1, 3, 2]), torch.tensor([1, 1, 1, 0])
    assert pool.needs(high, low, open_parts).tolist() == [[1, 0, 1, 3]]
    apart = FramePool("lean-low", head_dim=64, frames=(4, 4))
    assert apart.needs(high, low, torch.zeros(4, dtype=torch.int64)).tolist() == [[1, 0, 0, 2], [0, 1, 3, 2]]


def test_require_counts_the_worst_case():
    pool = FramePool("lean", head_dim=64, frames=24)
    pool.require(rows=2, tokens=128, num_heads_kv=3, layers=2)
    with pytest.raises(PageExhaustedError, match=r"2 rows of 3 KV heads and 2 layers may take \[48\] frames in 129"):
        pool.require(rows=2, tokens=129, num_heads_kv=3, layers=2)


class Holder:
    """Frames of rows as sets, for ``FramePool.check``."""

    def __init__(self, rows: int, sizes: int):
        self.held = [[[] for _ in range(sizes)] for _ in range(rows)]

    def held_frames(self, size: int) -> list[int]:
        return [frame for row in self.held for frame in row[size]]


@pytest.mark.parametrize("name, frames", [("lean", 97), ("lean-low", (61, 83))])
def test_a_hundred_thousand_steps_conserve_every_frame(name, frames):
    """Random needs of six rows, releases and growth of nothing: after every step each frame is free or held, once."""
    rng, rows = random.Random(0), 6
    pool = FramePool(name, head_dim=64, frames=frames)
    sizes = len(pool.lists)
    holder, total, refused, granted = Holder(rows, sizes), [len(free.ids) for free in pool.lists], 0, 0
    for step in range(50_000):
        if rng.random() < 0.8:
            needs = [[rng.choice((0, 0, 0, 1, 2, 3)) for _ in range(rows)] for _ in range(sizes)]
            go = pool.grant(torch.tensor(needs)).tolist()
            for row in range(rows):
                wanted = [need[row] for need in needs]
                if go[row]:
                    for mine, ids in zip(holder.held[row], pool.take(wanted)):
                        mine += ids.tolist()
                granted, refused = granted + go[row] * sum(wanted), refused + (not go[row])
        else:
            row = rng.randrange(rows)
            pool.give([torch.tensor(ids, dtype=torch.int32) for ids in holder.held[row]])
            holder.held[row] = [[] for _ in range(sizes)]
        if step % 25 == 0:
            pool.check(holder)
        assert [n + len(holder.held_frames(size)) for size, n in enumerate(pool.n_free)] == total
    assert refused > 1000 and granted > 50 * sum(total)
    assert all(int(free.ends[0]) > 20 * len(free.ids) for free in pool.lists)  # the lists wrapped many times
    holder.held[0][0].append(0)
    with pytest.raises(AssertionError, match="frames free or held"):
        pool.check(holder)
