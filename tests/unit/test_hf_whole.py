"""A step over a LowBitCache is done by every layer, or refused before any has changed, or found by the next call."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tiny_models import build, error, stepwise, tokens  # noqa: E402

from lowbit_attn import KVCache, api  # noqa: E402
from lowbit_attn.integrations import hf  # noqa: E402
from lowbit_attn.integrations import layer as layers  # noqa: E402

PROMPT = 150
KINDS = {"plain": {}, "static": dict(max_seqlen=400, static=True), "weighted": dict(format="kitty-weighted")}


@pytest.fixture(scope="module")
def llama():
    return build("llama")


@pytest.fixture(scope="module")
def gemma3():
    return build("gemma3")


def state(cache) -> list:
    """All that a step of a layer changes."""
    kept = []
    for layer in cache.layers:
        kept.append((layer.length, layer.pads, int(layer.get_seq_length()), layer.tail and layer.tail[0].shape))
        if layer.kv is not None:
            kept += [layer.kv.n_tok.tolist(), layer.kv.n_sink.tolist(), [layer.kv.gather(row) for row in range(2)]]
            kept.append(layer.kv.query_weights is None or layer.kv.query_weights.clone())
    return kept


def assert_kept(cache, before) -> None:
    torch.testing.assert_close(state(cache), before, rtol=0, atol=0)


def new_cache(kind: str) -> hf.LowBitCache:
    return hf.LowBitCache(**(dict(format="k4v4") | KINDS[kind]))


def boom(*args, **kwargs):
    raise MemoryError("pretended")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ("ready", "append", "decode", "flush"))
@pytest.mark.parametrize("length", (PROMPT, 256, 255))
def test_a_step_that_fails_changes_nothing_and_may_be_tried_again(llama, monkeypatch, kind, where, length):
    if (kind, where) == ("static", "flush"):
        where = "append"  # which packs what earlier steps filled
    ids, cache, plain = tokens(length + 2, 2), new_cache(kind), new_cache(kind)
    for one in (cache, plain):
        stepwise(llama, one, ids[:, :length], (length,))
    before = state(cache)
    owner = KVCache if where in ("append", "flush") else layers
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(owner, where, boom)
        stepwise(llama, cache, ids[:, length : length + 1], (1,))
    assert_kept(cache, before)
    got, want = (stepwise(llama, one, ids[:, length:], (1, 1)) for one in (cache, plain))
    assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ("plain", "static"))
def test_a_prompt_that_fails_in_a_row_leaves_none(llama, monkeypatch, kind):
    prefill = KVCache.prefill

    def second_fails(self, row, k, v):
        return boom() if row == 1 else prefill(self, row, k, v)

    ids, cache = tokens(PROMPT, 2), new_cache(kind)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(KVCache, "prefill", second_fails)
        stepwise(llama, cache, ids, (PROMPT,))
    assert cache.layers[0].kv.n_tok.tolist() == [0, 0] and cache.get_seq_length() == 0
    assert torch.equal(stepwise(llama, cache, ids, (PROMPT,)), stepwise(llama, new_cache(kind), ids, (PROMPT,)))


def test_a_chunk_broken_off_between_rows_is_taken_back_or_found(llama, monkeypatch):
    prefill = KVCache.prefill

    def second_fails(self, row, k, v):
        return boom() if row == 1 else prefill(self, row, k, v)

    ids = tokens(400, 2)
    for chunk, is_found in ((20, False), (130, True)):  # the longer one is packed in part
        cache = new_cache("plain")
        stepwise(llama, cache, ids[:, :PROMPT], (PROMPT,))
        before = state(cache)
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(KVCache, "prefill", second_fails)
            stepwise(llama, cache, ids[:, PROMPT : PROMPT + chunk], (chunk,))
        if not is_found:
            assert_kept(cache, before)
            continue
        with pytest.raises(RuntimeError, match=r"the pages hold \[280, 150\] tokens of \[150, 150\].*reset\(\)"):
            stepwise(llama, cache, ids[:, :1], (1,))
        cache.reset()
        stepwise(llama, cache, ids[:, :PROMPT], (PROMPT,))
        assert_kept(cache, before)


@pytest.mark.parametrize("kind", ("plain", "static"))
def test_a_path_without_a_kernel_is_refused_before_the_prompt_is_stored(llama, kind):
    with pytest.raises(ValueError, match="path: got nope, supported: .*register.*reference"):
        hf.LowBitCache("k4v4", path="nope")
    cache = hf.LowBitCache("k4v4", path="register", **KINDS[kind])
    with pytest.raises(NotImplementedError, match="cpu has no kernels"):
        stepwise(llama, cache, tokens(PROMPT, 2), (PROMPT,))
    assert all(layer.length == 0 and layer.kv.n_tok.tolist() == [0, 0] for layer in cache.layers)


@pytest.mark.parametrize("kind", ("plain", "static"))
def test_a_kernel_that_cannot_be_loaded_is_asked_for_before_the_step(llama, monkeypatch, kind):
    """A static cache asks with the prompt: a compiled step could not."""
    asked = []

    def ready(q, kv, load, **options):
        asked.append((q.shape[1], load, int(kv.n_tok[0])))

    monkeypatch.setattr(layers, "ready", ready)
    cache = new_cache(kind)
    stepwise(llama, cache, tokens(PROMPT + 1), (PROMPT, 1))
    first = (1, kind == "static", 0)
    assert asked == [first] * 2 + [(1, True, PROMPT)] * 2
    assert api.ready is not layers.ready


@pytest.mark.parametrize("sliding", ("16bit", "lowbit"))
def test_layers_of_two_kinds_stop_at_one_length(gemma3, sliding):
    ids, cache = tokens(PROMPT + 1, 2), hf.LowBitCache("k4v4", max_seqlen=PROMPT - 1, sliding=sliding)
    stepwise(gemma3, cache, ids[:, : PROMPT - 1], (PROMPT - 1,))
    before = state(cache)
    for extra in (1, 2):
        words = f"would reach {PROMPT - 1 + extra} tokens, supported: {PROMPT - 1} as given"
        with pytest.raises(ValueError, match=words):
            stepwise(gemma3, cache, ids[:, :extra], (extra,))
        assert_kept(cache, before)


@pytest.mark.parametrize("options", ({}, dict(static=True)), ids=str)
@pytest.mark.parametrize("most", (100, 200, 256, 300))
def test_max_seqlen_is_what_was_given(llama, options, most):
    ids, cache = tokens(most + 1, 2), hf.LowBitCache("k4v4", max_seqlen=most, **options)
    stepwise(llama, cache, ids[:, :most], (most - 3, 1, 1, 1))
    assert cache.get_max_length() == most == int(cache.get_seq_length())
    before = state(cache)
    with pytest.raises(ValueError, match=f"would reach {most + 1} tokens"):
        stepwise(llama, cache, ids[:, most:], (1,))
    assert_kept(cache, before)
    with pytest.raises(ValueError, match=f"would reach {most + 1} tokens"):
        stepwise(llama, hf.LowBitCache("k4v4", max_seqlen=most, **options), ids, (most + 1,))


@pytest.mark.parametrize("kind", ("plain", "static"))
def test_a_forward_call_broken_off_between_layers_is_found(llama, monkeypatch, kind):
    ids, cache = tokens(PROMPT + 1, 2), new_cache(kind)
    stepwise(llama, cache, ids[:, :PROMPT], (PROMPT,))
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(llama.model.layers[0].mlp, "forward", boom)
        stepwise(llama, cache, ids[:, PROMPT:], (1,))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"the layers hold \[{PROMPT + 1}, {PROMPT}\] tokens.*reset\(\)"):
            stepwise(llama, cache, ids[:, PROMPT:], (1,))
    cache.reset()
    got = stepwise(llama, cache, ids, (PROMPT, 1))
    assert torch.equal(got, stepwise(llama, new_cache(kind), ids, (PROMPT, 1)))


def test_a_lack_of_memory_to_grow_ends_the_call_in_the_first_layer(llama, monkeypatch):
    monkeypatch.setattr(layers, "FIRST_TOKENS", 130)
    ids, cache, grown, count = tokens(400, 2), hf.LowBitCache("k4v4"), layers.grown, []
    stepwise(llama, cache, ids[:, :PROMPT], (PROMPT,))
    before = state(cache)

    def second_fails(kv, room):
        count.append(room)
        return boom() if len(count) == 2 else grown(kv, room)

    monkeypatch.setattr(layers, "grown", second_fails)
    with pytest.raises(MemoryError):
        stepwise(llama, cache, ids[:, PROMPT:], (250,))
    assert_kept(cache, before)
    got = stepwise(llama, cache, ids[:, PROMPT:], (250,))
    assert torch.equal(got, stepwise(llama, hf.LowBitCache("k4v4"), ids, (PROMPT, 250))[:, PROMPT:])


@pytest.mark.parametrize("kind", ("weighted", "plain"))
@pytest.mark.parametrize("name, sliding", (("llama", "16bit"), ("gemma3", "16bit")))
def test_a_prompt_in_inference_mode_then_steps_outside(request, kind, name, sliding):
    model, ids = request.getfixturevalue(name), tokens(PROMPT + 2)
    cache, plain = (hf.LowBitCache(**(dict(format="k4v4", sliding=sliding) | KINDS[kind])) for _ in range(2))
    model.set_attn_implementation(hf.NAME)
    with torch.inference_mode():
        out = [model(ids[:, :PROMPT], **{hf.CACHE_ARGUMENT: cache}).logits]
    with torch.no_grad():
        out.append(model(ids[:, PROMPT:-1], **{hf.CACHE_ARGUMENT: cache}).logits)
    out.append(model(ids[:, -1:], **{hf.CACHE_ARGUMENT: cache}).logits.detach())
    assert error(torch.cat(out, 1), stepwise(model, plain, ids, (PROMPT, 1, 1))) < 1e-6
    for layer in cache.layers:
        held = layer.tail or (layer.kv.ring_k, layer.kv.query_weights)
        assert not any(x.requires_grad for x in held if x is not None)


@pytest.mark.parametrize("options, kind, words", [
    (dict(format=None), TypeError, "format: got None, supported: a Format or a name: .*k4v4"),
    (dict(format=4), TypeError, "format: got 4, supported"),
    (dict(max_seqlen=-3), ValueError, "max_seqlen: got -3, supported: 1 to"),
    (dict(max_q_len=99), ValueError, "max_q_len: got 99, supported: 1 to 16"),
    (dict(dtype=torch.float32), ValueError, "dtype: got torch.float32, supported: torch.float16, torch.bfloat16"),
    (dict(sinks=-1), ValueError, "sinks: got -1, supported: 0 to"),
    (dict(sinks=2.5), TypeError, "sinks: got 2.5, supported: an integer"),
    (dict(window=3, keep_sinks=1), TypeError, "keep_sinks: got 1, supported: True, False"),
    (dict(max_seqlen=300, static="no"), TypeError, "static: got 'no', supported: True, False"),
    (dict(rotate_keys=True), ValueError, "rotate_keys: format k4v4 groups K per channel"),
    (dict(window=2.5), TypeError, "window: got 2.5, supported: an integer"),
    (dict(window="3"), TypeError, "window: got '3', supported: an integer"),
    (dict(window=0), ValueError, "window: got 0, supported: 1 or more"),
], ids=str)
def test_arguments_are_refused_at_construction(options, kind, words):
    with pytest.raises(kind, match=words):
        hf.LowBitCache(**(dict(format="k4v4") | options))


SMALL = dict(hidden_size=128, intermediate_size=128, vocab_size=97, pad_token_id=2)
OWN = {
    "Falcon": dict(num_hidden_layers=2, num_attention_heads=2), "Mpt": dict(d_model=128, n_heads=2, n_layers=2),
    "Bloom": dict(n_layer=2, n_head=2), "Doge": dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1),
}
HYBRID = {
    "Jamba": dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, attn_layer_offset=1,
                  attn_layer_period=2, num_experts=2, use_mamba_kernels=False),
    "Qwen3Next": dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=64, num_experts=4,
                      num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64,
                      linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=32,
                      linear_value_head_dim=32, layer_types=["linear_attention", "full_attention"]),
}


def refusal(name: str, count: int = 5, **options) -> str:
    config = getattr(transformers, f"{name}Config")(**(SMALL | options)) if name != "Llama4" else (
        transformers.Llama4TextConfig(**(SMALL | options)))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with pytest.raises(NotImplementedError) as caught:
        stepwise(model, hf.LowBitCache("k4v4"), tokens(count), (count,))
    return str(caught.value)


@pytest.mark.parametrize("name", OWN)
def test_models_with_attention_of_their_own_are_told_so(name):
    message = refusal(name, **OWN[name])
    assert "attention in code of its own, on which the call has no effect" in message
    assert name.lower() in message.lower()
    assert "supported: models that take their attention from transformers' AttentionInterface (Llama" in message


@pytest.mark.parametrize("name", HYBRID)
def test_hybrids_are_told_so(name):
    assert "layers with states of their own (Mamba, linear attention, as in" in refusal(name, **HYBRID[name])


@pytest.mark.parametrize("count", (5, 40))
def test_chunked_attention_is_told_so(count):
    message = refusal("Llama4", count, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
                      num_local_experts=2, intermediate_size_mlp=128, attention_chunk_size=16)
    assert message.startswith("attention_mask: got") and "sliding_window:" not in message


@pytest.mark.filterwarnings("error:.*is deprecated:FutureWarning")
def test_the_cache_goes_by_the_name_of_this_transformers(llama):
    llama.set_attn_implementation(hf.NAME)
    for call in (lambda given: llama.generate(tokens(5), do_sample=False, max_new_tokens=2, **given),
                 lambda given: llama(tokens(5), **given)):
        cache = hf.LowBitCache("k4v4")
        with torch.no_grad():
            call({hf.CACHE_ARGUMENT: cache})
        assert cache.get_seq_length() > 0
