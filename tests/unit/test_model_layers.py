"""model_layers.py: what it says of a configuration, and of a model, is what transformers' own caches hold."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from small_models import MORE, small  # noqa: E402

from lowbit_attn import budget, model_layers, quality  # noqa: E402
from lowbit_attn.budget import GPUS  # noqa: E402
from lowbit_attn.cli import config as files  # noqa: E402
from lowbit_attn.model_layers import CACHE_ARGUMENT, CHUNKED, FULL, SHARED, SLIDING, STATE  # noqa: E402

COUNT = 25  # tokens: more than the windows of 8


class Noted:
    """Mixed into a cache that changes nothing."""


@pytest.fixture(scope="module", params=MORE)
def case(request):
    """(model type, its small configuration, a random model that read COUNT tokens, the cache that holds them)."""
    torch.manual_seed(0)
    made = small(request.param)
    model = transformers.AutoModelForCausalLM.from_config(small(request.param)).eval()
    cache = model_layers.new_cache(model, Noted)
    with torch.no_grad():
        model(input_ids=torch.arange(5, 5 + COUNT)[None], use_cache=True, **{CACHE_ARGUMENT: cache})
    return request.param, made, model, cache


def test_layers_are_those_of_a_real_cache(case):
    """Which layers keep K and V, their heads, channels of K and V, and tokens under windows: from the configuration
    alone, and the same from the model."""
    _, made, model, cache = case
    held = {i: (layer.keys.shape, layer.values.shape) for i, layer in enumerate(cache.layers)
            if isinstance(getattr(layer, "keys", None), torch.Tensor) and layer.keys.numel()}
    found = model_layers.of_config(made)
    want = {}
    for layer in found.layers:
        tokens = COUNT if layer.kind.window is None else min(COUNT, layer.kind.window - 1)
        want[layer.index] = tuple((1, layer.num_heads_kv, tokens, dim) for dim in (layer.head_dim, layer.value_dim))
    assert want == held and found.layers == model_layers.of_model(model).layers
    blocks = model_layers.attention_blocks(model)
    assert blocks and len({type(block) for block in blocks}) == 1


def test_suggest_says_what_transformers_holds(case, tmp_path):
    """Bytes of the 16-bit row are those of a real cache of as many tokens; states of a fixed size apart."""
    _, made, _, cache = case
    made.save_pretrained(tmp_path)
    shape = files.read(tmp_path)
    row = budget.suggest(shape.model(), COUNT, 1, GPUS["h200"], ["k8v8"])[0]
    assert row.cache_gb * 1e9 == pytest.approx(quality.cache_bytes(cache) / 2)  # the model is in fp32


def test_sixteen_bits_are_sixteen(case):
    """A 16-bit cache takes 16 bits an element of K and V, fewer only where windows dropped tokens."""
    _, _, model, _ = case
    cache = quality.new_cache(None, model)
    with torch.no_grad():
        model(input_ids=torch.arange(5, 5 + COUNT)[None], use_cache=True, **{CACHE_ARGUMENT: cache})
    bits = quality.measured_bits(model, quality.cache_bytes(cache), COUNT)
    has_windows = any(layer.kind.window for layer in model_layers.of_model(model).layers)
    assert bits < 16 if has_windows else bits == 16


@pytest.mark.parametrize("kind, names", [
    ("llama", {FULL}), ("mistral", {SLIDING}), ("llama4_text", {FULL, CHUNKED}),
    ("gemma3n_text", {FULL, SLIDING, SHARED}),
    ("qwen3_next", {FULL, STATE}), ("gemma4_text", {FULL, SLIDING, SHARED})])
def test_kinds(kind, names):
    assert {one.name for one in model_layers.kinds_of(small(kind))} == names


def test_hybrid_heads_have_both():
    assert all(one.name == FULL and one.has_state for one in model_layers.kinds_of(small("falcon_h1")))


def test_rotary_modules_are_found_in_nested_models():
    text = dict(hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                head_dim=16, vocab_size=99, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28,
                  patch_size=14)
    made = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = transformers.Gemma3ForConditionalGeneration(made).eval()
    found = model_layers.of_model(model)
    assert [layer.kind.name for layer in found.layers] == [SLIDING, FULL]
    rotary = {model_layers.rotary_module(model, block) for block in found.blocks}
    assert rotary == {model.model.language_model.rotary_emb}


def test_a_model_that_needs_its_weights_is_asked_itself(monkeypatch):
    model = transformers.AutoModelForCausalLM.from_config(small("llama")).eval()
    want = model_layers.of_config(small("llama")).layers
    monkeypatch.setattr(model_layers, "_of_first", lambda *_: (_ for _ in ()).throw(ValueError("no meta tensors")))
    before = model.config._attn_implementation
    assert model_layers.of_model(model).layers == want and model.config._attn_implementation == before
