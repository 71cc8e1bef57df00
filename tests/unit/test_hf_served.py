"""Models that a LowBitCache does not hold are refused before a layer stores a token, with the reason."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from small_models import small  # noqa: E402
from tiny_models import SMALL, eager, error, stepwise, tokens  # noqa: E402

from lowbit_attn import quality  # noqa: E402
from lowbit_attn.integrations import hf, served  # noqa: E402

SWITCH = 48  # tokens up to which the longrope model turns its keys by the short factors
GEMMA4 = dict(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64, global_head_dim=128,
              num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=48, hidden_size_per_layer_input=32,
              vocab_size_per_layer_input=97, layer_types=["sliding_attention", "full_attention"] * 2)


def longrope():
    rope = dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0] * 32, long_factor=[4.0] * 32,
                original_max_position_embeddings=SWITCH)
    torch.manual_seed(1)
    made = transformers.Phi3Config(**(SMALL | dict(hidden_size=128, num_attention_heads=2, num_key_value_heads=1)),
                                   num_hidden_layers=2, rope_scaling=rope, original_max_position_embeddings=SWITCH)
    return transformers.Phi3ForCausalLM(made).eval()


def gemma4(**more):
    torch.manual_seed(1)
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**(SMALL | GEMMA4 | more))).eval()


def refused(model, count: int = 5, **options) -> str:
    """What a cache says; it holds nothing afterwards."""
    cache = hf.LowBitCache(**({"format": "k8v8"} | options))
    with pytest.raises((NotImplementedError, ValueError)) as caught:
        stepwise(model, cache, tokens(count), (count,))
    assert not any(layer.length for layer in cache.layers)
    return str(caught.value)


@pytest.mark.parametrize("options", (dict(), dict(sliding="lowbit"), dict(format="lean", sinks=0)))
def test_layers_that_share_k_and_v(options):
    message = refused(gemma4(num_kv_shared_layers=2), **options)
    assert "read the K and V of an earlier layer" in message and "2 of 4, the first of them layer 2" in message


@pytest.mark.parametrize("sliding", hf.SLIDING)
def test_layers_of_several_shapes_are_held(sliding):
    model, ids = gemma4(num_kv_shared_layers=0), tokens(150)
    want = eager(model, ids)
    got = stepwise(model, hf.LowBitCache("k8v8-g32-vg32", sliding=sliding), ids, (140, 9, 1))
    assert error(got, want) < 2e-2


def test_levels_of_several_head_dims():
    assert "have head_dims 64, 128" in refused(gemma4(num_kv_shared_layers=0), format="lean", sliding="lowbit")


def test_a_head_dim_of_a_later_layer():
    """The first layers are narrower, and would store their tokens before a later one refuses them."""
    assert "head_dim 80 is not supported" in refused(gemma4(num_kv_shared_layers=0, global_head_dim=80))


@pytest.mark.parametrize("count, options", ((5, {}), (SWITCH, {}), (5, dict(max_seqlen=SWITCH + 1))))
def test_longrope_that_may_switch(count, options):
    message = refused(longrope(), count, **options)
    assert "rope" in message and f"max_seqlen={SWITCH}" in message


@pytest.mark.parametrize("sizes, options", (((20, 5, 1), dict(max_seqlen=SWITCH)), ((SWITCH + 2, 5, 1), {})))
def test_longrope_on_one_side_of_its_switch(sizes, options):
    """Sequences that never cross are served, the long ones with the long factors from their first token."""
    model, ids = longrope(), tokens(sum(sizes))
    assert error(stepwise(model, hf.LowBitCache("k8v8", **options), ids, sizes), eager(model, ids)) < 2e-2


def test_generate_over_longrope():
    model, ids = longrope(), tokens(20)
    model.set_attn_implementation(hf.NAME)
    cache = quality.new_cache(dict(format="k8v8"), model, 30)
    assert model.generate(ids, **{hf.CACHE_ARGUMENT: cache}, max_new_tokens=10, do_sample=False,
                          eos_token_id=None).shape == (1, 30)
    cache = hf.LowBitCache("k8v8")
    with pytest.raises(NotImplementedError, match="rope_type longrope"):
        model.generate(ids, **{hf.CACHE_ARGUMENT: cache}, max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("kind, words", [
    ("jamba", "states of their own"), ("falcon_h1", "states of their own"), ("llama4_text", "one chunk alone"),
    ("gemma3n_text", "an earlier layer"), ("llama", ""), ("mistral", ""), ("gpt_oss", "")])
def test_why_not(kind, words):
    assert (words in served.why_not(small(kind))) if words else not served.why_not(small(kind))
