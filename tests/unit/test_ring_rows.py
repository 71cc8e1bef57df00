"""A step whose sinks and rings are in other rows than its counters: the same tokens, pages and counters."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import assert_same, step_arguments

from lowbit_attn import KVCache, decode, ops
from lowbit_attn.cache.extend import Extension
from lowbit_attn.cache.journal import Journal

HEADS, DIM, BATCH, RINGS, MAX_Q_LEN = 2, 64, 2, 5, 4
MOVED = ("sink_k", "sink_v", "ring_k", "ring_v")
SCORES = ("score", "seen", "order")


def filled(name: str, lengths: tuple[int, ...], **options) -> KVCache:
    """A cache of rows of these lengths, filled by steps, so that full blocks may still be in the ring."""
    cache = KVCache(name, 10, HEADS, DIM, sinks=5, max_batch=BATCH, max_q_len=MAX_Q_LEN, **options)
    for row, length in enumerate(lengths):
        for at in range(0, length, MAX_Q_LEN):
            cache.append(*torch.randn(2, 1, min(MAX_Q_LEN, length - at), HEADS, DIM).half(), seqs=[row])
    cache.reserve(range(BATCH), [length + 4 * MAX_Q_LEN for length in lengths])
    return cache


def elsewhere(cache: KVCache, ring_rows: list[int], names: tuple[str, ...] = MOVED) -> dict[str, torch.Tensor]:
    """What is by rows of rings, row r of the cache in row ring_rows[r] of RINGS, and nothing but 7 in the others."""
    found = {}
    for name in names:
        held = getattr(cache, name)
        found[name] = held.new_full((RINGS, *held.shape[1:]), 7)
        found[name][ring_rows] = held
    return found


def assert_moved(found: dict[str, torch.Tensor], cache: KVCache, ring_rows: list[int]) -> None:
    """These tensors hold what the cache has, in other rows, and nothing was written to the rest."""
    for name, value in found.items():
        want = elsewhere(cache, ring_rows, (name,))[name]
        assert torch.equal(value, want), name


lengths = st.tuples(*[st.sampled_from((0, 3, 100, 131, 132, 133, 260)) for _ in range(BATCH)])
ring_orders = st.permutations(range(RINGS)).map(lambda rows: rows[:BATCH])


@settings(max_examples=40)
@given(st.sampled_from(("k4v4", "kitty", "k2tv2")), lengths, ring_orders, st.permutations(range(BATCH)),
       st.integers(1, MAX_Q_LEN))
def test_steps_are_the_same_with_rings_elsewhere(name, held, ring_rows, rows, tokens):
    """By the operator, over steps that store and steps that pack; decode reads the same from either."""
    want = filled(name, held)
    cache = copy.deepcopy(want)
    rings = elsewhere(cache, ring_rows)
    batch_rows = torch.tensor(rows, dtype=torch.int32)
    batch_rings = torch.tensor([ring_rows[row] for row in rows], dtype=torch.int32)
    for _ in range(3):
        k, v = torch.randn(2, BATCH, tokens, HEADS, DIM).half()
        want.append(k, v, seqs=rows)
        given = dict(zip(ops.STEP_STATE, step_arguments(cache))) | rings
        torch.ops.lowbit_attn.append(k, v, batch_rows, batch_rings, *given.values(),
                                     *step_arguments(cache)[len(ops.STEP_STATE) :])
        assert_moved(rings, want, ring_rows)
        for field in ("pool", "table", "n_sink", "n_qk", "n_qv", "n_tok", "faults"):
            assert torch.equal(getattr(cache, field), getattr(want, field)), field
    q = torch.randn(BATCH, 1, 2 * HEADS, DIM).half()
    state = {name: getattr(cache, name) for name in ops.STATE} | rings
    assert_same(torch.ops.lowbit_attn.decode(q, batch_rows, batch_rings, *state.values(), None, name,
                                             list(cache.strides), None, None, None, False, None, None),
                decode(q, want, rows=rows))


@pytest.mark.parametrize("ring_rows", ([3, 0], [1, 4]))
def test_scores_are_by_rows_of_rings(ring_rows):
    """A format that orders tokens: the order of a packed block and the scores that are left are the ring's."""
    cache = filled("k4v2-boost", (262, 150))
    cache.order.copy_(torch.stack([torch.randperm(128) for _ in range(2 * HEADS)]).view(BATCH, HEADS, -1))
    cache.score.copy_(torch.rand(cache.score.shape))
    cache.seen.fill_(3)
    want, rings = copy.deepcopy(cache), elsewhere(cache, ring_rows, MOVED + SCORES)
    k, v = torch.randn(2, BATCH, 3, HEADS, DIM).half()
    want.append(k, v)
    assert want.n_qv.tolist() != cache.n_qv.tolist()
    for name, value in rings.items():
        setattr(cache, name, value)
    for row in range(BATCH):
        extension = Extension(cache, row, k[row], v[row], pack=False, ring_row=ring_rows[row])
        with Journal() as journal:
            extension.write(journal)
            cache._write_counters(journal, np.array([row]), extension.counts)
    assert_moved(rings, want, ring_rows)
    assert torch.equal(cache.pool, want.pool) and torch.equal(cache.n_qv, want.n_qv)


def test_rows_beyond_the_counters_are_marked_with_more_rings_than_rows():
    cache = filled("k4v4", (10, 20))
    rings = elsewhere(cache, [4, 3])
    before = {name: value.clone() for name, value in rings.items()}
    given = dict(zip(ops.STEP_STATE, step_arguments(cache))) | rings
    k, v = torch.randn(2, 1, 1, HEADS, DIM).half()
    row, ring = (torch.tensor([i], dtype=torch.int32) for i in (BATCH, 0))
    torch.ops.lowbit_attn.append(k, v, row, ring, *given.values(), *step_arguments(cache)[len(ops.STEP_STATE) :])
    assert cache.faults.tolist() == [0, 0, 1]
    assert all(torch.equal(value, before[name]) for name, value in rings.items())


@pytest.mark.parametrize("wrong", (-1, RINGS))
def test_rings_that_are_not_there_are_refused_before_anything_is_written(wrong):
    cache = filled("k4v4", (10, 20))
    rings = elsewhere(cache, [4, 3])
    before = [x.clone() for x in (*rings.values(), cache.n_tok)]
    given = dict(zip(ops.STEP_STATE, step_arguments(cache))) | rings
    k, v = torch.randn(2, BATCH, 1, HEADS, DIM).half()
    rows, ring_rows = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [4, wrong]))
    with pytest.raises(IndexError, match=f"ring_rows: got .*supported: 0 to {RINGS - 1}"):
        torch.ops.lowbit_attn.append(k, v, rows, ring_rows, *given.values(),
                                     *step_arguments(cache)[len(ops.STEP_STATE) :])
    assert all(map(torch.equal, before, (*rings.values(), cache.n_tok)))
