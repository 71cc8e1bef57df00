"""A level of a LevelCache as an ordinary cache: decode of both levels, merged, is decode of the whole cache."""

import copy
import pickle

import pytest
import torch

from lowbit_attn import decode, dispatch, kernels, reference
from lowbit_attn.levels import LevelCache
from lowbit_attn.levels import decode as level_decode
from lowbit_attn.levels.frames import FramePool
from lowbit_attn.levels.policy import Cumulative, Shares
from lowbit_attn.levels.view import views_of
from lowbit_attn.reference import Attention

H = 3


def filled(name: str = "lean", head_dim: int = 64, rows: tuple[int, ...] = (900, 300, 20), dtype=torch.float16,
           **options) -> LevelCache:
    pool = FramePool(name, head_dim=head_dim, frames=200 if name == "lean" else (200, 200))
    cache = LevelCache(pool, H, **dict(max_batch=len(rows), max_seqlen=2000, sinks=5, dtype=dtype) | options)
    for row, tokens in enumerate(rows):
        if tokens:
            k, v = torch.randn(2, tokens, H, head_dim).to(dtype)
            cache.prefill(row, k, v, torch.randn(tokens, 2 * H, head_dim).to(dtype))
    return cache


def by_levels(q: torch.Tensor, cache, options: Attention = reference.PLAIN) -> tuple[torch.Tensor, torch.Tensor]:
    """What level_decode launches, each launch by the reference."""
    rows = level_decode.level_queries(q, cache.num_heads_kv)
    found = [reference.decode(rows, view, options) for view in views_of(cache)]
    o, lse = reference.merge_states(*(torch.stack(parts) for parts in zip(*found)))
    batch, q_len, heads, head_dim = q.shape
    o = o.unflatten(0, (batch, -1)).transpose(1, 2).reshape(batch, q_len, heads, head_dim)
    return o, lse.reshape(batch, heads, q_len)


@pytest.mark.parametrize("name, head_dim", [("lean", 64), ("lean", 128), ("lean-low", 64), ("k4v2+k4v1", 128)])
@pytest.mark.parametrize("ratio", (1, 4))
def test_two_levels_merged_are_the_cache(name, head_dim, ratio):
    cache = filled(name, head_dim, policy=Cumulative(0.2, 0.6))
    q = torch.randn(3, 1, H * ratio, head_dim).half()
    for options in (reference.PLAIN, Attention(softmax_scale=0.3, softcap=5.0)):
        want, want_lse = cache.attend(q, options)
        got, got_lse = by_levels(q, cache, options)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got_lse, want_lse, rtol=1e-5, atol=1e-5)


def test_a_level_without_tokens_has_no_weight():
    """All high, all low, a row without tokens at all."""
    for share in (0.0, 1.0):
        cache = filled(rows=(700, 0), policy=Shares(share, 1 - share), sinks=0)
        q = torch.randn(2, 1, H, 64).half()
        want, want_lse = decode(q, cache)
        got, got_lse = by_levels(q, cache)
        torch.testing.assert_close(got.half(), want, rtol=1e-3, atol=1e-4)
        assert (got[1] == 0).all() and (got_lse[1] == -torch.inf).all()
        torch.testing.assert_close(got_lse, want_lse)


@pytest.mark.parametrize("tokens", (3, 5, 8, 40, 190, 900))
def test_counters_hide_what_several_queries_must_not_see(tokens):
    """As kernels count: query j of q_len sees tokens of a 16-bit segment below its end - q_len + 1 + j, the end being
    n_tok of the level; tokens behind the sinks count from ring_start on."""
    cache = filled(rows=(tokens,), max_q_len=4)
    high, low = views_of(cache)
    first = min(tokens, 5)  # sinks
    for j in range(4):
        seen = tokens - 3 + j
        end = [int(view.n_tok[0]) - 3 + j for view in (high, low)]
        assert min(end[0], int(high.n_sink[0])) == min(seen, first) + int(cache.n_stage[0, 0])
        assert max(0, end[1] - int(low.n_sink[0]) - int(low.ring_start[0])) == max(
            0, seen - first - int(cache.n_out[0]))
        assert not int(cache.n_stage[1, 0]) or end[1] >= int(low.n_sink[0])  # none of the stage is hidden
    for view, ring in ((high, 0), (low, tokens - first - int(cache.n_out[0]))):
        assert int(view.n_tok[0] - view.n_sink[0] - view.ring_start[0]) == ring


def test_queries_become_rows_of_sequences_and_heads():
    q = torch.randn(2, 3, 2 * H, 8)
    rows = level_decode.level_queries(q, H)
    assert rows.shape == (2 * H, 3, 2, 8) and rows.is_contiguous()
    for b in range(2):
        for h in range(H):
            assert torch.equal(rows[b * H + h], q[b, :, 2 * h : 2 * h + 2])


def test_views_follow_the_memory_of_their_cache():
    cache = filled()
    views = views_of(cache)
    assert views_of(cache) is views
    cache.pool.grow(3)
    assert views_of(cache) is not views and len(views_of(cache)[0].units) > len(views[0].units)
    grown = views_of(cache)
    cache.extend(4000)
    assert views_of(cache) is not grown and views_of(cache)[1].strides.table_b == 32
    twin = copy.deepcopy(cache)
    assert views_of(twin)[0].table.data_ptr() == twin.table.data_ptr() != cache.table.data_ptr()
    assert pickle.loads(pickle.dumps(views)) == []
    q = torch.randn(3, 1, H, 64).half()
    for name in (cache, twin):
        torch.testing.assert_close(by_levels(q, name)[0], cache.attend(q)[0], rtol=1e-4, atol=1e-5)


def test_pages_begin_at_any_unit():
    """Two low records of a frame: the second one begins in the middle of it."""
    cache = filled(rows=(900,))
    low = views_of(cache)[1]
    size = low.record.nbytes // 128
    held = [unit for row in low.table.tolist() for unit in row if unit >= 0]
    assert any(unit % cache.pool.frame_units(1) == size for unit in held)
    for unit in held:
        assert torch.equal(low.pool[unit, 0], low.units[unit : unit + size].flatten())


@pytest.mark.parametrize("arch", kernels.ARCH_TARGETS)
def test_both_levels_are_served_or_say_why_not(arch):
    assert dispatch.why_not_on(arch, filled(rows=(3,)), 4 * H) == []
    reasons = dispatch.why_not_on(arch, filled(rows=(3,)), H, path="nowhere")
    assert [reason.partition(": path: 'nowhere' is not known")[0] for reason in reasons] == ["high level", "low level"]


@pytest.mark.parametrize("rows, pages, schedule", [(64, 256, "stream"), (8, 1024, "splits"), (10, 32, "splits"),
                                                   (1, 512, "splits")])
def test_rows_of_many_pages_and_few_splits_share_all_pages_evenly(rows, pages, schedule):
    """Heads may differ in length, which only the device knows."""
    pool = FramePool("lean", head_dim=128, frames=1)
    cache = LevelCache(pool, rows, max_seqlen=128 * pages)
    for view in views_of(cache):
        key = kernels.decode_key("hopper", "sm_90a", "float16", 128, view.format.name, "integer", 4)
        assert dispatch.for_shape(key, rows, pages, 132, view.known_pages(rows)).schedule == schedule
