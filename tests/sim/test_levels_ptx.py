"""``manage`` of two levels by the compiled kernels on the CPU: scores within a tolerance of the twin in torch, and
given those scores every counter, table entry, frame, stage and record bit for bit."""

import copy

import numpy as np
import pytest
import torch
from unit.level_caches import check_equal, state

from lowbit_attn.cache.significance import Scores
from lowbit_attn.formats.levels import parse
from lowbit_attn.levels import step
from lowbit_attn.levels.frames import FramePool, frame_sizes
from lowbit_attn.levels.level_cache import LevelCache
from lowbit_attn.levels.policy import Cumulative, Shares
from lowbit_attn.reference import PLAIN, Attention
from sim.ptx.levels import run_pack, run_plan

D = 64
DUE = 184  # recent tokens of a row whose block leaves


def make(name: str, recent: tuple[int, ...], frames: int = 40, heads: int = 2, sinks: int = 8, **options) -> LevelCache:
    """A row for each of ``recent`` tokens in the ring, all of which act; heads with pages and stages of their own."""
    levels = parse(name)
    sizes = len(frame_sizes(*(fmt.record_bytes(D) for fmt in levels.formats))[1])
    pool = FramePool(levels, head_dim=D, frames=(frames,) * sizes)
    cache = LevelCache(pool, heads, sinks=sinks, max_batch=len(recent), max_seqlen=2000, **options)
    for row, held in enumerate(recent):
        k, v = torch.randn(2, sinks + 128 * (1 + row) + 56, heads, D).half()
        cache.prefill(row, k, v, torch.randn(len(k), 2 * heads, D).half())
        cache.n_tok[row] = cache.n_sink[row] + cache.n_out[row] + held
    for tokens in (cache.hi_k[:, sinks:], cache.hi_v[:, sinks:], cache.lo_k, cache.lo_v, cache.ring_k, cache.ring_v):
        tokens.normal_()
    cache.n_stage.random_(0, 128)
    cache.score.uniform_()
    cache.seen.random_(0, 9)
    cache.recount()
    return cache


def call(cache: LevelCache, batch: int, q_len: int = 1, ratio: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and an lse of each."""
    heads = cache.num_heads_kv * ratio
    return torch.randn(batch, q_len, heads, D).half(), 3 + torch.randn(batch, heads, q_len)


def check(cache: LevelCache, rows: list[int], q: torch.Tensor, lse: torch.Tensor, options: Attention = PLAIN,
          seed: int = 0) -> torch.Tensor:
    """Both launches are the twin's steps, given the scores of the first; returns which rows of the call went."""
    index, before = torch.tensor(rows), copy.deepcopy(cache)
    order = np.random.default_rng(seed).permutation
    run_plan(cache, index, q, lse, options, order)
    acts = before.n_tok[index] // cache.manage_every > (before.n_tok[index] - q.shape[1]) // cache.manage_every
    want = step.observed(before, index, q, lse, acts, options)
    heads = cache.num_heads_kv
    scores = Scores(cache.score.unflatten(0, (-1, heads))[index], cache.seen[index])
    torch.testing.assert_close(scores.score, want.score, rtol=1e-4, atol=1e-5)
    assert torch.equal(scores.seen, want.seen)
    plan = step.Plan(before, index, scores, acts | before.waits[index])
    plan.write()
    run_pack(cache, index, order)
    check_equal(state(cache), state(before))
    assert not cache.arrivals.any()
    cache.pool.check(cache)
    return plan.go


@pytest.mark.parametrize("name", ("lean", "lean-low"))
def test_rows_that_act_wait_and_are_due(name):
    """Rows in another order: one due, one that waits and does not act, one that acts and is not due, one at rest."""
    cache = make(name, (184, 187, 96, 65))
    cache.waits[1] = True
    assert check(cache, [3, 1, 0, 2], *call(cache, 4)).tolist() == [False, True, True, False]


@pytest.mark.parametrize("sinks", (1, 6))
def test_a_block_leaves_at_any_phase_in_an_order_that_came_from_scores(sinks):
    """Rings of 184 to 191 tokens when the row acts, with the ring's end within the block: no order by position."""
    recent = DUE + -(sinks + DUE) % 8
    cache = make("lean", (recent,), heads=1, sinks=sinks)
    cache.n_out += 128 * sinks  # where the block begins in the ring; nothing else depends on it
    cache.n_tok += 128 * sinks
    cache.recount()
    assert check(cache, [0], *call(cache, 1)).all() and not torch.equal(cache.order[0].sort()[0], cache.order[0])


def test_a_stage_that_is_just_full_becomes_a_page():
    """A quarter of a block is high: 96 + 32 and 32 + 96 tokens."""
    cache = make("lean", (184,), heads=1)
    cache.n_stage.copy_(torch.tensor([[96], [32]]))
    cache.recount()
    assert check(cache, [0], *call(cache, 1)).all() and not cache.n_stage.any()


def test_ties_pruned_tokens_and_the_thresholds_of_the_paper():
    """Equal means on both sides of a threshold, tokens that no query has seen, heads with other numbers of tokens."""
    cache = make("lean", (184, 184), policy=Cumulative(0.2, 0.6))
    cache.score.copy_(cache.score.mul(4).round() / 4)
    cache.seen[cache.seen > 4] = 2
    q, lse = call(cache, 2)
    lse += 60  # what this call adds is nothing, so ties stay
    cache.seen[1] = 0
    assert check(cache, [0, 1], q, lse).all()
    assert cache.n_drop.any() and len(set(cache.new[0].tolist())) > 1


def test_ties_of_shares_with_tokens_that_are_pruned():
    cache = make("lean-low", (184,), policy=Shares(0.3, 0.5))
    cache.score.fill_(0.5)
    cache.seen.fill_(1)
    q, lse = call(cache, 1)
    assert check(cache, [0], q, lse + 60).all()
    assert cache.new[:, 0].tolist() == [38, 64] and cache.n_drop.tolist() == [2 * 26, 2 * 26]  # with the prompt's


@pytest.mark.parametrize("name, frames", [("lean", 2), ("lean-low", 1)])
def test_a_row_that_finds_no_frames_keeps_all_and_is_marked(name, frames):
    """Three rows in the call's order: the first takes what there is, the second needs more than is left, the third
    needs none and goes."""
    cache = make(name, (184, 184, 184), heads=1)
    cache.n_stage.copy_(torch.tensor([[0, 120, 0], [100, 100, 0]]))
    cache.half[:] = -1
    cache.c_pack[1] = cache.c_pack[1] // 256 * 256  # an even number of low records
    cache.recount()
    for free in cache.pool.lists:
        free.ends[1] = free.ends[0] + frames
    cache.pool.check = lambda *caches: None  # frames were taken out of the list here
    assert check(cache, [0, 1, 2], *call(cache, 3)).tolist() == [True, False, True]
    assert cache.waits.tolist() == [False, True, False] and int(cache.starved) == 1


def test_several_queries_with_a_soft_cap_and_many_heads():
    """Five query heads a KV head and three queries, in blocks of rows that do not end with a query's."""
    cache = make("lean", (185, 70), heads=1, max_q_len=4, manage_every=2)
    q, lse = call(cache, 2, 3, 5)
    assert check(cache, [1, 0], q, lse, Attention(softmax_scale=0.2, softcap=2.0)).tolist() == [False, True]
