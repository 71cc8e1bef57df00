"""The accuracy simulator against the paged cache, and what it does that the paged cache cannot."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from lowbit_attn import FORMATS, quality  # noqa: E402
from lowbit_attn.integrations.hf import CACHE_ARGUMENT, LowBitCache  # noqa: E402
from lowbit_attn.integrations.simulator import SimulatedCache, fake_quantized  # noqa: E402

HEADS, DIM = 2, 64
STEPS = (100, 60, 1, 1, 130, 1, 92, 1, 1)  # 387 tokens, across block boundaries with and without 32 sinks


def tokens(count: int):
    """K and V fp16 values [1, HEADS, count, DIM], fp32."""
    return (torch.randn(1, HEADS, count, DIM).half().float() for _ in range(2))


def feed(cache, k, v, sizes):
    """A layer that was brought K and V in steps of these sizes; whatever was due is quantized."""
    layer = cache.layer_class_to_replicate()
    for new_k, new_v in zip(k.split(sizes, 2), v.split(sizes, 2)):
        if isinstance(cache, LowBitCache):
            layer.attend(layer.update(new_k, new_v)[0], new_k)
        else:
            layer.update(new_k, new_v)
    return layer


@pytest.mark.parametrize("name, options", [
    ("kitty", {}), ("kitty-pro-variance", dict(sinks=5)), ("k2v2", dict(sinks=32)), ("k4tv4", {}),
    ("k2v2-g32-vg32", dict(range_search=False)),
])
def test_whole_steps_of_v_are_the_paged_cache(name, options):
    k, v = tokens(sum(STEPS))
    paged = feed(LowBitCache(name, **options), k, v, STEPS)
    simulated = feed(SimulatedCache(name, v_step=128, **options), k, v, STEPS)
    simulated.settle()
    for got, want in zip((simulated.keys, simulated.values), paged.kv.gather(0)):
        assert torch.equal(got[0], want)
    assert (simulated.n_qk, simulated.n_qv) == (int(paged.kv.n_qk[0]), int(paged.kv.n_qv[0])) != (0, 0)
    assert simulated.nbytes == paged.nbytes


@pytest.mark.parametrize("sinks", (0, 32))
def test_steps_of_one_keep_the_window_exactly(sinks):
    """V beyond it reads as a page of it would; K does not depend on the steps of V."""
    k, v = tokens(sum(STEPS))
    cache = SimulatedCache("kitty", sinks=sinks, v_step=1)
    layer = cache.layer_class_to_replicate()
    seen = 0
    for new_k, new_v in zip(k.split(STEPS, 2), v.split(STEPS, 2)):
        before, old = seen, max(sinks, seen - 128)
        keys, values = layer.update(new_k, new_v)
        seen += new_k.shape[2]
        packed = fake_quantized(FORMATS["kitty"].v, v[:, :, sinks:old])
        assert torch.equal(values, torch.cat((v[:, :, :sinks], packed, v[:, :, old:]), 2)[:, :, :seen])
        assert not before > old > sinks or not torch.equal(values[:, :, old - 1], v[:, :, old - 1])
        assert torch.equal(keys[:, :, sinks + (max(0, before - sinks) // 128) * 128 :],
                           k[:, :, sinks + (max(0, before - sinks) // 128) * 128 : seen])
    wide = feed(SimulatedCache("kitty", sinks=sinks, v_step=128), k, v, STEPS)
    assert torch.equal(layer.keys, wide.keys) and not torch.equal(layer.values, wide.values)
    assert layer.nbytes < wide.nbytes


def test_parts_of_pages_read_as_pages():
    v = next(tokens(128))
    side = FORMATS["kitty-vg32"].v
    whole = fake_quantized(side, v)
    assert torch.equal(fake_quantized(side, v[:, :, 50:51]), whole[:, :, 50:51])
    assert not torch.equal(whole, v)
    with pytest.raises(ValueError, match="x: got 100 tokens, supported: multiples of 128"):
        fake_quantized(FORMATS["kitty"].k, v[:, :, :100])


def test_kivi_is_another_window_and_step():
    k, v = tokens(300)
    layer = feed(SimulatedCache("k2v2-g32-vg32", range_search=False, window_v=128, v_step=1), k, v, (299, 1))
    layer.settle()
    assert (layer.n_qk, layer.n_qv) == (256, 172)
    assert torch.equal(layer.values[:, :, 172:], v[:, :, 172:]) and torch.equal(layer.keys[:, :, 256:], k[:, :, 256:])


def test_a_model_reads_it_and_quality_scores_it():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                                      num_key_value_heads=1, head_dim=64, vocab_size=50, max_position_embeddings=512,
                                      initializer_range=0.1)
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.randint(3, 50, (400,))
    scores = quality.compare(model, ids, {
        "paged": dict(format="kitty"), "wide": dict(format="kitty", v_step=128), "one": dict(format="kitty", v_step=1)})
    assert scores["wide"].perplexity == pytest.approx(scores["paged"].perplexity, rel=1e-4)
    assert scores["wide"].kl == pytest.approx(scores["paged"].kl, rel=1e-2) and scores["wide"].kl > 0
    assert scores["one"].kl > 1.01 * scores["wide"].kl  # fewer tokens of V in 16 bit
    assert scores["one"].cache_bytes < scores["wide"].cache_bytes == scores["paged"].cache_bytes
    model.set_attn_implementation("sdpa")
    out = model.generate(ids[None, :200], **{CACHE_ARGUMENT: SimulatedCache("k8v8")}, attention_mask=torch.ones(1, 200),
                         do_sample=False, max_new_tokens=5, min_new_tokens=5, pad_token_id=0)
    plain = model.generate(ids[None, :200], attention_mask=torch.ones(1, 200), do_sample=False, max_new_tokens=5,
                           min_new_tokens=5, pad_token_id=0)
    assert torch.equal(out, plain)


def test_reset_starts_again():
    k, v = tokens(300)
    cache = SimulatedCache("kitty")
    layer = feed(cache, k, v, (300,))
    layer.settle()
    layer.reset()
    again, fresh = layer.update(k, v), feed(cache, k, v, (300,))
    assert (layer.n_qk, layer.n_qv) == (0, 0)
    assert torch.equal(again[0], fresh.keys) and torch.equal(again[1], fresh.values)


@pytest.mark.parametrize("options, error, words", [
    (dict(format="kitty-weighted"), NotImplementedError, "kitty-weighted weighs channels by queries"),
    (dict(format="kitty", v_step=0), ValueError, "v_step: got 0, supported: 1 to 128"),
    (dict(format="kitty", v_step=129), ValueError, "v_step: got 129, supported: 1 to 128"),
    (dict(format="kitty", window_v=-1), ValueError, "window_v: got -1, supported: 0 to any"),
    (dict(format="kitty", sinks=-1), ValueError, "sinks: got -1"),
    (dict(format="kitty", sinks=2.5), TypeError, "sinks: got 2.5, supported: an integer"),
    (dict(format="kitty", v_step="1"), TypeError, "v_step: got '1', supported: an integer"),
    (dict(format="kitty", range_search="no"), TypeError, "range_search: got 'no', supported: True, False, None"),
    (dict(format=None), TypeError, "format: got None, supported: a Format or a name: .*k4v4"),
    (dict(format="kity"), KeyError, "is not known; did you mean kitty"),
])
def test_refused(options, error, words):
    with pytest.raises(error, match=words):
        SimulatedCache(**options)
