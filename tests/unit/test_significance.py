"""Scores of tokens against a dense softmax, and what follows from them: rankings and orders."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowbit_attn.cache import significance
from lowbit_attn.reference import Attention, visible

H, R, D = 2, 3, 16


def dense(q, k, options: Attention) -> torch.Tensor:
    """Group maxima of the probabilities of all queries of a sequence, in float64: [H, n, n], own tokens zero."""
    n = k.shape[1]
    s = torch.einsum("qhrd,hkd->hrqk", q.double().unflatten(1, (H, R)), k.double())
    s = s * (options.softmax_scale or D**-0.5)
    if options.softcap:
        s = options.softcap * torch.tanh(s / options.softcap)
    s = s.masked_fill(~visible(n, n, options), -torch.inf)
    if options.sink_logits is not None:
        s = torch.cat((s, options.sink_logits.double().view(H, R, 1, 1).expand(-1, -1, n, 1)), -1)
    p = s.softmax(-1)[..., :n].amax(1)
    return p.masked_fill(torch.eye(n, dtype=torch.bool), 0)


OPTIONS = [Attention(), Attention(softmax_scale=0.7), Attention(softcap=2.0), Attention(window=20),
           Attention(sink_logits=torch.tensor([2.0, -1, 0, 1, 3, -2]))]


@pytest.mark.parametrize("options", OPTIONS, ids=("plain", "scale", "softcap", "window", "sink_logits"))
@pytest.mark.parametrize("n", (1, 7, 64, 150))
def test_scores_are_sums_of_a_dense_softmax(options, n):
    q, k = 2 * torch.randn(n, H * R, D), torch.randn(H, n, D)
    at = significance.prompt_queries(n)
    got = significance.observe(q[at], at, k, 0, options)
    want = dense(q, k, options)[:, at]
    torch.testing.assert_close(got.score, want.sum(1).float(), rtol=1e-5, atol=1e-6)
    seen = visible(n, n, options)[at] & ~torch.eye(n, dtype=torch.bool)[at]
    assert torch.equal(got.seen, seen.sum(0, dtype=torch.int32))


def test_the_maximum_of_a_group_is_taken_after_normalisation():
    """A head with large logits everywhere gives no token more than its share."""
    k = torch.zeros(1, 3, D)
    k[0, :, 0] = torch.tensor([3.0, 2.0, 1.0])
    q = torch.zeros(1, 2, D)
    q[0, 0, 0], q[0, 1, 0] = 40.0, 0.0  # one head sees the first token alone, the other all alike
    got = significance.observe(q, torch.tensor([2]), k, 0)
    assert got.score[0, 0] > 0.99 and abs(got.score[0, 1] - 1 / 3) < 1e-6 and got.score[0, 2] == 0


def test_a_part_of_the_keys_needs_the_lse_of_all():
    q, k = torch.randn(5, H * R, D), torch.randn(H, 40, D)
    at = torch.arange(35, 40)
    whole = significance.observe(q, at, k, 0)
    s = torch.einsum("qhrd,hkd->hrqk", q.unflatten(1, (H, R)), k) * D**-0.5
    lse = s.masked_fill(~visible(5, 40), -torch.inf).logsumexp(-1).flatten(0, 1)
    part = significance.observe(q, at, k[:, 30:], 30, lse=lse)
    torch.testing.assert_close(part.score, whole.score[:, 30:], rtol=1e-5, atol=1e-7)
    assert torch.equal(part.seen, whole.seen[30:])
    with pytest.raises(ValueError, match="lse: got None beside keys from position 30"):
        significance.observe(q, at, k[:, 30:], 30)


@pytest.mark.parametrize("block", (1, 3, 64))
def test_scores_do_not_depend_on_the_blocks_of_queries(block, monkeypatch):
    q, k, at = torch.randn(64, H * R, D), torch.randn(H, 100, D), torch.arange(36, 100)
    want = significance.observe(q, at, k, 0)
    monkeypatch.setattr(significance, "QUERY_BLOCK", block)
    torch.testing.assert_close(significance.observe(q, at, k, 0).score, want.score, rtol=1e-5, atol=1e-7)


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that an operator makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def test_no_tensor_has_the_square_of_the_length():
    n = 3000
    q, k, at = torch.randn(n, H * R, D), torch.randn(H, n, D), significance.prompt_queries(n)
    with Largest() as largest:
        significance.observe(q[at], at, k, 0)
    assert n * H * D <= largest.elements <= 64 * n < n * n


def test_prompt_queries_are_half_spread_and_half_the_last():
    for n in (1, 63, 64):
        assert significance.prompt_queries(n).tolist() == list(range(n))
    for n in (65, 100, 1000, 32768):
        at = significance.prompt_queries(n)
        assert len(at) == 64 == len(at.unique()) and (at.diff() > 0).all()
        assert at[32:].tolist() == list(range(n - 32, n))
        gaps = at[:32].diff()
        assert int(gaps.max() - gaps.min()) <= 1


def test_ranking_has_unseen_tokens_first_and_the_earlier_of_equals():
    score, seen = torch.tensor([[1.0, 0.0, 4.0, 2.0, 0.0]]), torch.tensor([1, 0, 4, 1, 0], dtype=torch.int32)
    mean = significance.means(score, seen)
    assert significance.ranking(mean)[0].tolist() == [1, 4, 3, 0, 2]


@pytest.mark.parametrize("boosted", (16, 32, 112))
def test_orders_are_permutations_with_the_best_first_by_position(boosted):
    mean = torch.rand(4, 3, 128).round(decimals=1)  # with many ties
    order = significance.order_of(mean, boosted)
    assert order.dtype == torch.uint8 and (order.sort(-1).values == torch.arange(128)).all()
    for x, row in zip(mean.flatten(0, 1), order.flatten(0, 1).tolist()):
        best = sorted(range(128), key=lambda i: (-x[i], i))[:boosted]
        assert row == sorted(best) + sorted(set(range(128)) - set(best))


def test_without_scores_the_order_is_by_position():
    mean = significance.means(torch.zeros(2, 128), torch.zeros(128, dtype=torch.int32))
    assert (significance.order_of(mean, 32) == torch.arange(128)).all()
