"""LowBitCache of two levels: what it gives beside eager attention, padding, growth, and what it refuses."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

from tiny_models import build, eager, error, stepwise, tokens  # noqa: E402

from lowbit_attn.integrations import hf  # noqa: E402
from lowbit_attn.levels.policy import Paper, Shares  # noqa: E402

SIZES = (300, 1, 130, *(1,) * 160)


def check_pool(cache) -> None:
    """Every frame is free or held by one layer."""
    layers = [layer.kv for layer in cache.layers if layer.kv is not None]
    assert len({id(kv.pool) for kv in layers}) == 1
    layers[0].pool.check(*layers)


@pytest.mark.parametrize("format, limit", [("k8v8+k8v4", 0.06), ("lean", 0.25), ("lean-low", 0.35)])
def test_steps_follow_the_model(format, limit):
    model = build("llama")
    ids = tokens(sum(SIZES))
    cache = hf.LowBitCache(format)
    assert error(stepwise(model, cache, ids, SIZES), eager(model, ids)) < limit
    check_pool(cache)
    for layer in cache.layers:
        counts = layer.kv.counts_of(0)
        assert int(layer.kv.n_out[0]) == 384 and (counts.high + counts.low + counts.staged == 384).all()
        assert not counts.pruned.any() and counts.low.any() and layer.kv.new.tolist() == [[32] * 2, [96] * 2]


@pytest.mark.parametrize("name", ("gemma2", "gpt-oss"))
def test_windows_of_the_model_are_in_16_bit_or_in_levels(name):
    model, ids = build(name), tokens(330)
    cache = hf.LowBitCache("k8v8+k8v4")
    assert error(stepwise(model, cache, ids, (300, *(1,) * 30)), eager(model, ids)) < 0.06
    assert [layer.kv is None for layer in cache.layers] == [True, False]
    cache = hf.LowBitCache("k8v8+k8v4", sliding="lowbit")
    assert error(stepwise(model, cache, ids, (270, 20, *(1,) * 40)), eager(model, ids)) < 0.06
    assert [layer.kv.windows for layer in cache.layers] == [True, False]
    check_pool(cache)


@pytest.mark.parametrize("window, keep_sinks", [(100, True), (300, False)])
def test_a_window_of_the_cache(window, keep_sinks):
    """Beside a uniform cache with the same window: in steps, chunks of several tokens, and rows with padding."""
    model, sizes = build("llama"), (500, 30, *(1,) * 130)
    batch = torch.cat((torch.cat((torch.full((1, 40), 2), tokens(620)), 1), tokens(660)))
    mask = torch.ones_like(batch)
    mask[0, :40] = 0
    options = dict(window=window, keep_sinks=keep_sinks, sinks=32)
    cache, uniform = hf.LowBitCache("k8v8+k8v4-high95", **options), hf.LowBitCache("k8v8", **options)
    got, want = (stepwise(model, one, batch, sizes, mask) for one in (cache, uniform))
    whole = stepwise(model, hf.LowBitCache("k8v8", sinks=32), batch, sizes, mask)
    assert error(got[:, 500:], want[:, 500:]) < 0.03 < error(whole[:, 500:], want[:, 500:])
    check_pool(cache)


def test_pages_that_left_the_window_of_a_cache_go_back():
    model, ids = build("llama"), tokens(1300)
    cache = hf.LowBitCache("lean", window=200, sinks=8)
    stepwise(model, cache, ids, (1290, *(1,) * 10))
    layer = cache.layers[0].kv
    assert (layer.c_pack.sum(0) <= 512).all() and (layer.n_drop > 600).all()
    check_pool(cache)
    cache.reset()
    assert stepwise(model, cache, ids, (300, *(1,) * 10)).isfinite().all()


@pytest.mark.parametrize("format", ("lean", "lean-low", "k4v2-boost"))
def test_sixty_four_greedy_tokens_are_the_models_but_at_near_ties(format):
    """A block leaves the window meanwhile. Beside a model that reads the same tokens without a low-bit cache, each is
    the likeliest one, or nearly."""
    model, ids = build("llama"), tokens(300)
    model.set_attn_implementation(hf.NAME)
    cache = hf.LowBitCache(format)
    out = model.generate(ids, **{hf.CACHE_ARGUMENT: cache}, do_sample=False, max_new_tokens=64, min_new_tokens=64,
                         attention_mask=torch.ones_like(ids), pad_token_id=2)
    assert out.shape[1] == 364 and cache.get_seq_length() == 363
    held = cache.layers[0].kv
    assert int(held.n_qk[0] if format == "k4v2-boost" else held.n_out[0]) == (128 if format == "k4v2-boost" else 256)
    logits, chosen = eager(model, out[:, :-1])[0, 299:], out[0, 300:]
    logits[:, model.config.eos_token_id] = -torch.inf  # which min_new_tokens rules out
    spread = logits[logits.isfinite()].std()
    short = logits.amax(-1) - logits[range(64), chosen]
    assert (logits.argmax(-1) == chosen).sum() > 35 and short.max() < 1.5 * spread
    again = stepwise(model, hf.LowBitCache(format), out[:, :-1], (300, *(1,) * 63))[0, 299:]
    again[:, model.config.eos_token_id] = -torch.inf
    assert torch.equal(again.argmax(-1), chosen)


def test_left_padding_is_not_stored():
    model, ids = build("llama"), tokens(420)
    sizes = (400, *(1,) * 20)
    alone, padded = hf.LowBitCache("k8v8+k8v4"), hf.LowBitCache("k8v8+k8v4")
    want = stepwise(model, alone, ids, sizes)
    batch = torch.cat((torch.cat((torch.full((1, 30), 2), ids), 1), tokens(450)))
    mask = torch.ones_like(batch)
    mask[0, :30] = 0
    got = stepwise(model, padded, batch, (430, *(1,) * 20), mask)
    assert error(got[:1, -20:], want[:, -20:]) < 0.02
    assert padded.layers[0].kv.n_tok.tolist() == [420, 450]
    check_pool(padded)


def test_generate_reset_crop_and_deepcopy():
    model, ids = build("llama"), tokens(320)
    model.set_attn_implementation(hf.NAME)
    options = dict(do_sample=False, max_new_tokens=24, attention_mask=torch.ones_like(ids), pad_token_id=2)
    cache = hf.LowBitCache("lean-low", max_q_len=4)
    first = model.generate(ids, **{hf.CACHE_ARGUMENT: cache}, **options)
    check_pool(cache)
    twin = copy.deepcopy(cache)
    assert twin.layers[0].kv.pool is not cache.layers[0].kv.pool
    check_pool(twin)
    twin.crop(-3)
    assert twin.get_seq_length() == cache.get_seq_length() - 3 == int(twin.layers[1].kv.n_tok[0])
    cache.reset()
    check_pool(cache)
    pool = cache.layers[0].kv.pool
    assert pool.n_free == tuple(len(free.ids) for free in pool.lists)
    assert torch.equal(model.generate(ids, **{hf.CACHE_ARGUMENT: cache}, **options), first)
    assert not torch.equal(twin.layers[0].kv.n_tok, cache.layers[0].kv.n_tok)


def test_a_cache_of_unknown_length_grows():
    """Tables and the pool double; bytes are those of the present tokens."""
    model, ids = build("llama"), tokens(1300)
    cache = hf.LowBitCache("lean")
    stepwise(model, cache, ids, (700, 600))
    layer = cache.layers[0].kv
    assert layer.max_seqlen >= 1300 and layer.gather(0)[0][0].shape[0] == 1300
    check_pool(cache)
    sixteen = 2 * 2 * 1300 * 2 * 64 * 2
    assert 0.3 * sixteen < cache.nbytes < 0.6 * sixteen
    full = hf.LowBitCache("lean", max_seqlen=400)
    stepwise(model, full, ids, (390,))
    with pytest.raises(ValueError, match="max_seqlen: the sequences would reach 401"):
        stepwise(model, full, ids, (11,))


def test_pruning_is_asked_for_by_a_policy():
    model, ids = build("llama"), tokens(700)
    cache = hf.LowBitCache("lean", policy=Shares(0.25, 0.5))
    stepwise(model, cache, ids, (700,))
    counts = cache.layers[0].kv.counts_of(0)
    assert (counts.pruned == round(0.25 * 512)).all()
    check_pool(cache)


@pytest.mark.parametrize("options, raised, words", [
    (dict(static=True, max_seqlen=512), NotImplementedError, "static: got True for levels lean"),
    (dict(rotate_keys=True), NotImplementedError, "rotate_keys: got True for levels lean"),
    (dict(codebooks="prompt"), ValueError, "codebooks: got some for levels lean, supported: None"),
    (dict(format="k4v4+cq2"), ValueError, "low: got format cq2, whose codes mean nothing without codebooks"),
    (dict(policy=Paper(0, 1)), TypeError, "policy: got Paper"),
    (dict(format="k4v4", policy=Shares()), ValueError, "policy: got Shares.* for format k4v4, supported: beside lev"),
    (dict(format="k4tv4+k2v2"), ValueError, "K per token of 4 bits"),
    (dict(format="k4v4+"), KeyError, "format 'k4v4\\+' is not known"),
    (dict(path="nothing"), ValueError, "path: got nothing"),
])
def test_options_that_are_refused(options, raised, words):
    with pytest.raises(raised, match=words):
        hf.LowBitCache(**dict(format="lean") | options)
