"""The fp32 reference against a per-query loop in fp64 and torch's own attention, and the merge of partial states."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit_attn import KVCache, decode, merge_states
from lowbit_attn.reference import Attention, attention
from lowbit_attn.testing import Case, assert_decode, attention_fp64, build, expected, relative_error

RATIOS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)


def inputs(q_len, ratio, seqlen, num_heads_kv=2, head_dim=32):
    q = torch.randn(q_len, ratio * num_heads_kv, head_dim)
    return q, *(torch.randn(num_heads_kv, seqlen, head_dim) for _ in range(2))


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("q_len", (1, 3))
def test_query_heads_share_their_kv_head(ratio, q_len):
    q, k, v = inputs(q_len, ratio, 50)
    o, lse = attention(q, k, v)
    want, want_lse = attention_fp64(q, k, v)
    assert relative_error(o, want) < 1e-6
    assert torch.allclose(lse.double(), want_lse, atol=1e-5)


@pytest.mark.parametrize("q_len", range(1, 9))
@pytest.mark.parametrize("seqlen", (1, 2, 7, 8, 9, 130))
def test_causal_queries(q_len, seqlen):
    """Query j sees positions <= seqlen - q_len + j; the queries before the first position see nothing."""
    q, k, v = inputs(q_len, 3, seqlen)
    o, lse = attention(q, k, v)
    want, want_lse = attention_fp64(q, k, v)
    assert relative_error(o, want) < 1e-6
    blind = max(0, q_len - seqlen)
    assert not o[:blind].any() and (lse[:, :blind] == -torch.inf).all()
    assert torch.allclose(lse[:, blind:].double(), want_lse[:, blind:], atol=1e-5)
    last = attention(q[-1:], k, v)
    assert torch.allclose(o[-1:], last[0], atol=1e-6)


@pytest.mark.parametrize("scale", (None, 0.3, 0.0, -0.1))
def test_scale_and_torch_agree(scale):
    q, k, v = inputs(5, 4, 40)
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.repeat_interleave(4, 0)[None], v.repeat_interleave(4, 0)[None], scale=scale)
    o, _ = attention(q, k, v, Attention(scale), causal=False)
    assert torch.allclose(o, want[0].transpose(0, 1), atol=1e-5)
    if scale is not None and scale < 0:
        assert not torch.allclose(o, attention(q, k, v, Attention(-scale), causal=False)[0], atol=1e-2)


@pytest.mark.parametrize("n_sink, keep_sinks", ((0, False), (6, False), (6, True)))
@pytest.mark.parametrize("window", (None, 1, 5, 40, 200))
@pytest.mark.parametrize("softcap", (None, 3.0))
@pytest.mark.parametrize("has_sink_logits", (False, True))
def test_softcap_window_and_sink_logits(n_sink, keep_sinks, window, softcap, has_sink_logits):
    q, k, v = inputs(4, 3, 50)
    options = Attention(0.4, softcap, window, keep_sinks, torch.randn(6) if has_sink_logits else None)
    o, lse = attention(q, k, v, options, n_sink)
    want, want_lse = attention_fp64(q, k, v, options, None, n_sink)
    assert relative_error(o, want) < 1e-6
    assert torch.allclose(lse.double(), want_lse, atol=1e-5)


def test_a_window_of_everything_and_a_far_cap_change_nothing():
    q, k, v = inputs(4, 3, 50)
    o, lse = attention(q, k, v)
    for options in (Attention(window=50), Attention(softcap=1e6), Attention(sink_logits=torch.full((6,), -100.0))):
        assert torch.allclose(attention(q, k, v, options)[0], o, atol=1e-5)
    with_sinks, sink_lse = attention(q, k, v, Attention(sink_logits=torch.full((6,), 3.0)))
    assert torch.allclose(with_sinks * (sink_lse - lse).exp().T[..., None], o, atol=1e-5)
    assert torch.allclose(sink_lse.exp(), lse.exp() + torch.tensor(3.0).exp(), rtol=1e-5)


def test_no_tokens_give_zero_and_minus_infinity():
    q, k, v = inputs(2, 3, 0)
    o, lse = attention(q, k, v)
    assert o.shape == q.shape and not o.any() and (lse == -torch.inf).all()


def test_large_logits_do_not_overflow():
    q, k, v = inputs(1, 2, 30)
    o, lse = attention(q * 1e4, k, v)
    assert o.isfinite().all() and lse.isfinite().all()
    assert relative_error(o, attention_fp64(q * 1e4, k, v)[0]) < 1e-3


def states(q, k, v, cuts):
    """Partial (o, lse) of the runs of tokens between the cuts, stacked, with a batch axis."""
    parts = [attention(q, k[:, a:b], v[:, a:b], causal=False) for a, b in zip(cuts, cuts[1:])]
    return torch.stack([o for o, _ in parts])[:, None], torch.stack([lse for _, lse in parts])[:, None]


@given(st.lists(st.integers(0, 60), max_size=8), st.integers(1, 4), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_merge_is_the_same_however_tokens_are_split(cuts, ratio, seed):
    torch.manual_seed(seed)
    q, k, v = inputs(2, ratio, 60)
    cuts = [0, *sorted(cuts), 60]  # equal neighbours are empty splits
    o, lse = merge_states(*states(q, k * 3, v, cuts))
    want, want_lse = attention(q, k * 3, v, causal=False)
    assert torch.allclose(o[0], want, atol=2e-6) and torch.allclose(lse[0], want_lse, atol=1e-5)


def test_merge_ignores_what_an_empty_state_holds():
    q, k, v = inputs(2, 2, 60)
    o, lse = states(q, k, v, [0, 30, 30, 60])
    o[1] = float("nan")
    merged, merged_lse = merge_states(o, lse)
    want, want_lse = attention(q, k, v, causal=False)
    assert torch.allclose(merged[0], want, atol=2e-6) and torch.allclose(merged_lse[0], want_lse, atol=1e-5)


def test_merge_of_empty_states_is_empty():
    o, lse = torch.full((3, 1, 2, 4, 32), float("nan")), torch.full((3, 1, 4, 2), -torch.inf)
    merged, merged_lse = merge_states(o, lse)
    assert not merged.any() and (merged_lse == -torch.inf).all()


def test_merge_weighs_by_lse():
    """A state 50 nats above the other decides alone; equal ones average."""
    o = torch.stack((torch.zeros(1, 1, 1, 8), torch.ones(1, 1, 1, 8)))
    for difference, want in ((0.0, 0.5), (50.0, 1.0), (-50.0, 0.0), (1.0, torch.e / (1 + torch.e))):
        merged, lse = merge_states(o, torch.tensor([1000.0, 1000.0 + difference])[:, None, None, None])
        assert torch.allclose(merged, torch.full_like(merged, want), atol=1e-4)
        assert lse.item() == pytest.approx(1000 + torch.tensor([0.0, difference]).logsumexp(0).item(), abs=1e-3)


def test_merge_keeps_the_type_of_o():
    o, lse = torch.randn(2, 1, 1, 4, 32).half(), torch.randn(2, 1, 4, 1)
    merged, merged_lse = merge_states(o, lse)
    assert merged.dtype == torch.float16 and merged_lse.dtype == torch.float32


CASES = [
    Case("k8v4", lengths=(300, 5, 0), sinks=32, q_len=2),
    Case("k4v4", lengths=(128, 129, 127), num_heads=12, num_heads_kv=1, head_dim=64),
    Case("k2v2", lengths=(513,), q_len=8, num_heads=6, num_heads_kv=3, head_dim=96),
    Case("k4v1", lengths=(300, 700), sinks=4, num_heads=64, num_heads_kv=2),
    Case("k2tv2-g32-vg32-bf16", torch.bfloat16, lengths=(260, 1), head_dim=64),
    Case("k4v4", lengths=(200,), head_dim=256, num_heads=7, num_heads_kv=7),
    *(Case("k4v4", lengths=(300, 700), sinks=32, data=data) for data in (
        "k-channel-100x", "k-channel-100x-q-0.05", "q-norm-100", "v-300x", "v-token-300x", "v-1e-4-beside-sink",
        "v-page-1e3-after-1e-4", "zero-200x-range")),
    *(Case("k4v4-bf16", torch.bfloat16, lengths=(300,), data=data) for data in ("meta-beyond-fp16", "q-1e6-k-1e-6")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode_meets_the_tolerances(case):
    """Pages permuted, all unused memory NaN, outputs NaN before the call."""
    problem = build(case)
    out = torch.full_like(problem.q, float("nan"))
    lse = torch.full((case.batch, case.num_heads, case.q_len), float("nan"))
    o, got_lse = decode(problem.q, problem.cache, out=out, lse=lse)
    assert o is out and got_lse is lse
    assert_decode(o, lse, expected(problem))


def test_decode_uses_the_scale():
    problem = build(Case(lengths=(300,)))
    o, lse = decode(problem.q, problem.cache, softmax_scale=0.5)
    assert_decode(o, lse, expected(problem, Attention(0.5)))
    with pytest.raises(AssertionError):
        assert_decode(o, lse, expected(problem))


def test_an_empty_cache_gives_zeros_and_minus_infinity():
    cache = KVCache("k4v4", 1, 2, 64, max_batch=3, max_q_len=4)
    q = torch.randn(3, 4, 4, 64).half()
    o, lse = decode(q, cache, out=torch.full_like(q, float("nan")))
    assert not o.any() and (lse == -torch.inf).all() and lse.shape == (3, 4, 4)


def test_decode_takes_rows_of_a_larger_cache():
    problem = build(Case(lengths=(300, 40)))
    o, lse = decode(problem.q, problem.cache)
    first, first_lse = decode(problem.q[:1], problem.cache)
    assert torch.equal(first, o[:1]) and torch.equal(first_lse, lse[:1])
