"""LowBitCache of boosted values: what it gives beside eager attention, and that its pages are ordered by queries."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

from tiny_models import build, eager, error, stepwise, tokens  # noqa: E402

from lowbit_attn.integrations import hf  # noqa: E402

SIZES = (300, 1, 130, *(1,) * 160)


@pytest.mark.parametrize("name", ("llama", "gemma2", "gpt-oss"))
def test_steps_follow_the_model(name):
    """8-bit K and 8/4-bit V: within the error of 4 bits of a model's own attention, over prompt, chunk and steps."""
    model = build(name)
    ids = tokens(sum(SIZES))
    cache = hf.LowBitCache("k8v4-boost", sliding="lowbit")
    got, want = stepwise(model, cache, ids, SIZES), eager(model, ids)
    assert error(got, want) < 0.08
    for layer in cache.layers:
        assert int(layer.kv.n_qk[0]) == 384
        orders = layer.kv.pool_positions[layer.kv.table[0, :3].long()]
        assert (orders != torch.arange(128)).any(-1).all()  # the prompt's page, and those of steps


def test_left_padding_scores_no_padding():
    """A padded row has the pages that it has alone."""
    model, ids = build("llama"), tokens(420)
    sizes = (400, *(1,) * 20)
    alone = hf.LowBitCache("k4v2-boost")
    stepwise(model, alone, ids, sizes)
    batch = torch.cat((torch.cat((torch.full((1, 30), 2), ids), 1), tokens(450)))
    mask = torch.ones_like(batch)
    mask[0, :30] = 0
    padded = hf.LowBitCache("k4v2-boost")
    stepwise(model, padded, batch, (430, *(1,) * 20), mask)
    for one, both in zip(alone.layers, padded.layers):
        mine, theirs = (layer.kv.pool_positions[layer.kv.table[0, :2].long()] for layer in (one, both))
        assert (mine == theirs).float().mean() > 0.97  # sums of padded batches differ in their last bits
        assert (mine != torch.arange(128)).any()


def test_generate_with_crop_reset_and_deepcopy():
    model, ids = build("llama"), tokens(320)
    model.set_attn_implementation(hf.NAME)
    options = dict(do_sample=False, max_new_tokens=24, attention_mask=torch.ones_like(ids), pad_token_id=2)
    caches = [hf.LowBitCache("k4v2-boost", max_q_len=4) for _ in range(2)]
    first, second = (model.generate(ids, **{hf.CACHE_ARGUMENT: cache}, **options) for cache in caches)
    assert torch.equal(first, second)
    twin = copy.deepcopy(caches[0])
    for ours, theirs in zip(caches[0].layers, twin.layers):
        assert torch.equal(ours.kv.score, theirs.kv.score) and ours.kv.score is not theirs.kv.score
    twin.crop(-3)
    assert twin.get_seq_length() == caches[0].get_seq_length() - 3
    caches[0].reset()
    assert not any(layer.kv.seen.any() for layer in caches[0].layers)
    assert torch.equal(model.generate(ids, **{hf.CACHE_ARGUMENT: caches[0]}, **options), first)


def test_a_step_that_fails_leaves_scores(monkeypatch):
    model, ids = build("llama"), tokens(303)  # the step brings the length to 304, where rows are scored
    cache = hf.LowBitCache("k4v2-boost")
    stepwise(model, cache, ids, (303,))
    layer = cache.layers[0]
    before = copy.deepcopy(layer.kv)

    def broken(*_):
        raise MemoryError

    monkeypatch.setattr(type(layer.kv), "flush", broken)
    with pytest.raises(MemoryError):
        stepwise(model, cache, tokens(1), (1,))
    assert all(torch.equal(getattr(layer.kv, name), getattr(before, name)) for name in ("score", "seen", "order",
                                                                                        "n_tok"))


def test_the_simulator_is_refused_by_name():
    from lowbit_attn.integrations.simulator import SimulatedCache

    with pytest.raises(NotImplementedError, match="format: k4v2-boost, supported: V per token"):
        SimulatedCache("k4v2-boost")


def test_static_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="static: got True for format k4v2-boost"):
        hf.LowBitCache("k4v2-boost", static=True, max_seqlen=512)
