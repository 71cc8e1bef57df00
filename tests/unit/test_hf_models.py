"""LowBitCache in every supported family of models, tiny and with random weights, beside eager 16-bit attention."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tiny_models import FAMILIES, build, eager, error, stepwise, tokens  # noqa: E402

from lowbit_attn.integrations import hf  # noqa: E402

SLIDING = [name for name, (_, _, window) in FAMILIES.items() if window]
TOLERANCE = 0.015  # relative error of logits at 8 bits: twice what the worst family has here


@pytest.fixture(scope="module")
def built():
    return {}


@pytest.fixture
def model(request, built):
    """One model a family and module, in fp32 on the CPU."""
    name = request.param
    if name not in built:
        built[name] = build(name)
    return built[name]


@pytest.mark.parametrize("model, sliding", [*((name, "16bit") for name in FAMILIES),
                                            *((name, "lowbit") for name in SLIDING)], indirect=["model"])
def test_logits_are_close_to_eager(model, sliding, request):
    """Prefill, single tokens and a chunk over cached tokens; every layer's pages hold what they should."""
    name = request.node.callspec.params["model"]
    ids = tokens(200)
    cache = hf.LowBitCache("k8v8", sliding=sliding)
    got = stepwise(model, cache, ids, (140, 1, 1, 57, 1))
    assert error(got, eager(model, ids)) < TOLERANCE
    types = getattr(model.config, "layer_types", None)
    for i, layer in enumerate(cache.layers):
        is_sliding = name in SLIDING and (types is None or types[i] == "sliding_attention")
        assert (layer.kv is None) == (is_sliding and sliding == "16bit")
        if layer.kv is not None:
            assert layer.kv.n_qk.tolist() == [128]
    # one-bit values would be seen: the tolerance is not met by chance
    poor = stepwise(model, hf.LowBitCache("k1v1", sliding="lowbit"), ids, (140, 1, 1, 57, 1))
    assert error(poor[:, 142:], got[:, 142:]) > 2 * TOLERANCE


@pytest.mark.parametrize("sliding", hf.SLIDING)
@pytest.mark.parametrize("model", ["llama", "gemma2", "gemma3", "gpt-oss"], indirect=True)
@pytest.mark.parametrize("sizes", [(150, 1, 1), (30, 100, 20, 1, 1), (1,) * 45 + (107,)])
def test_left_padding_is_as_if_it_were_not_there(model, sliding, sizes):
    ids, pads = tokens(152, batch=3), (0, 40, 131)
    mask = torch.stack([torch.arange(152) >= pad for pad in pads]).long()
    cache = hf.LowBitCache("k8v8", sliding=sliding, sinks=4)
    got = stepwise(model, cache, ids, sizes, mask)
    for b, pad in enumerate(pads):
        alone = eager(model, ids[b : b + 1, pad:])
        assert error(got[b, pad:], alone[0]) < TOLERANCE
    full = [layer for layer in cache.layers if layer.kv is not None]
    assert all(layer.kv.n_tok.tolist() == [152 - pad for pad in pads] for layer in full)


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_greedy_generation(model):
    """A padded batch through model.generate: each token is the eager model's own choice, or within the tolerance."""
    ids = tokens(135, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    options = dict(attention_mask=mask, do_sample=False, max_new_tokens=10, min_new_tokens=10)
    model.set_attn_implementation(hf.NAME)
    cache = hf.LowBitCache("k8v8", max_seqlen=160)
    out = model.generate(ids, **{hf.CACHE_ARGUMENT: cache}, **options)
    assert cache.get_seq_length() == 144 and out.shape == (2, 145)
    whole = torch.cat((mask, torch.ones_like(out[:, 135:])), 1)
    logits = eager(model, out, whole)[:, 134:-1].clone()
    logits[..., model.generation_config.eos_token_id] = -torch.inf  # min_new_tokens forbids it
    chosen = logits.gather(2, out[:, 135:, None])[..., 0]
    spread = logits[torch.isfinite(logits)].std()
    assert ((logits.max(-1).values - chosen) < 0.05 * spread).all()
    assert (logits.argmax(-1) == out[:, 135:]).double().mean() > 0.8


def chunked(model) -> dict:
    """The option of a prompt in chunks; {} for a transformers (5.20) that with it reads into its own cache, too, what
    the cache already holds."""
    option, ids, cache = dict(prefill_chunk_size=3), tokens(12), transformers.DynamicCache()
    for count in (6, 12):
        model.generate(ids[:, :count], attention_mask=torch.ones(1, count, dtype=torch.long),
                       **{hf.CACHE_ARGUMENT: cache}, **option, max_new_tokens=1, do_sample=False)
    return option | dict(prefill_chunk_size=25) if cache.get_seq_length() == 12 else {}


@pytest.mark.parametrize("model", ["llama", "gemma3"], indirect=True)
def test_a_conversation_reuses_its_prefix(model):
    """generate again with the same cache and a longer text: only the new tokens are read, in chunks."""
    chunks = chunked(model)
    assert chunks or hf.CACHE_ARGUMENT == "past_key_values"
    model.set_attn_implementation(hf.NAME)
    options = dict(do_sample=False, max_new_tokens=6, min_new_tokens=6)
    cache, ids = hf.LowBitCache("k8v8", sinks=4), tokens(140)
    first = model.generate(ids, attention_mask=torch.ones_like(ids), **{hf.CACHE_ARGUMENT: cache}, **options)
    longer = torch.cat((first, tokens(70)[:, 10:]), 1)
    again = model.generate(longer, attention_mask=torch.ones_like(longer), **{hf.CACHE_ARGUMENT: cache},
                           **chunks, **options)
    assert cache.get_seq_length() == longer.shape[1] + 5
    fresh = model.generate(longer, attention_mask=torch.ones_like(longer),
                           **{hf.CACHE_ARGUMENT: hf.LowBitCache("k8v8")}, **options)
    logits = eager(model, again)[0, longer.shape[1] - 1 : -1]
    agree = again[0, longer.shape[1]:] == fresh[0, longer.shape[1]:]
    top = logits.topk(2).values
    assert agree[: int((top[:, 0] - top[:, 1] > 0.05 * logits.std()).long().cumprod(0).sum())].all()


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_steps_that_do_not_fit_the_padding_are_refused(model):
    ids, mask = tokens(20, batch=2), torch.ones(2, 20, dtype=torch.long)
    mask[0, :5] = 0
    cache = hf.LowBitCache("k8v8")
    stepwise(model, cache, ids, (20,), mask)
    with pytest.raises(NotImplementedError, match="attention_mask: padding"):
        stepwise(model, cache, ids[:, :1], (1,))
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("options, words", [
    (dict(sliding="8bit"), "sliding: got 8bit, supported: 16bit, lowbit"), (dict(window=0), "window: got 0"),
    (dict(keep_sinks=True), "keep_sinks: got True without a window"),
])
def test_options_are_checked(options, words):
    with pytest.raises(ValueError, match=words):
        hf.LowBitCache("k4v4", **options)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_chunked_attention_is_refused(model):
    """A mask function that only looks like a sliding window's."""
    from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

    pads = torch.zeros(1, dtype=torch.long)
    for q_offset, q_length in ((0, 100), (100, 30), (31, 1)):
        sizes = dict(batch_size=1, q_length=q_length, kv_length=q_offset + q_length, q_offset=q_offset, local_size=16)
        sliding = hf.mask(**sizes, mask_function=sliding_window_causal_mask_function(16))
        assert sliding == hf.CausalMask((0,), 16)
        chunked = hf.mask(**sizes, mask_function=chunked_causal_mask_function(16, pads))
        assert isinstance(chunked, torch.Tensor) or (q_offset + q_length) % 16 == 0
