"""Static LowBitCaches: decode steps compiled into one graph beside eager ones, on the CPU."""

import pytest
import torch

pytest.importorskip("transformers")

from tiny_models import build, error, stepwise, tokens  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from transformers import CompileConfig  # noqa: E402

from lowbit_attn import CacheFaultError, KVCache  # noqa: E402
from lowbit_attn.integrations import hf, layer  # noqa: E402

PROMPT, STEPS = 120, 150  # two blocks fill and are packed on the way


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(scope="module")
def built():
    return {}


@pytest.fixture
def model(request, built):
    name = getattr(request, "param", "llama")
    if name not in built:
        built[name] = build(name)
    built[name].set_attn_implementation(hf.NAME)
    return built[name]


def padding(*pads: int, count: int = PROMPT + STEPS) -> torch.Tensor:
    return torch.stack([torch.arange(count) >= pad for pad in pads]).long()


def static(format="k8v8", **options) -> hf.LowBitCache:
    return hf.LowBitCache(format, max_seqlen=PROMPT + STEPS, static=True, **options)


@torch.no_grad()
def steps(step, cache, ids, mask=None, start: int = PROMPT, compiled: bool = False):
    """Logits of the tokens from ``start`` on, one at a time, without a mask; compiled: the code is there already."""
    out = []
    for at in range(start, ids.shape[1]):
        place = {} if mask is None else dict(position_ids=mask[:, : at + 1].sum(1, keepdim=True) - 1)
        with torch._dynamo.config.patch(error_on_recompile=compiled or at > start):
            out.append(step(ids[:, at : at + 1], **{hf.CACHE_ARGUMENT: cache}, **place).logits)
    return torch.cat(out, 1)


def prompt(model, cache, ids, mask=None):
    return stepwise(model, cache, ids[:, :PROMPT], (PROMPT,), None if mask is None else mask[:, :PROMPT])


@pytest.mark.parametrize("model, options, pads, count", [
    ("llama", dict(sinks=5), (0, 37), STEPS), ("llama", dict(format="kitty-weighted"), (20, 0), STEPS),
    ("llama", dict(format="k4tv4", rotate_keys=True), None, STEPS), ("qwen3", dict(saturate=True), None, 20),
    ("llama", dict(format="kitty", window=60, keep_sinks=True), (0, 37), STEPS),
    ("gemma2", dict(sliding="lowbit"), (0, 37), 20), ("gemma3", dict(sliding="lowbit"), None, 20),
    ("mistral-sliding", dict(sliding="lowbit"), None, 20), ("gpt-oss", dict(sliding="lowbit"), (0, 37), 20),
], indirect=["model"], ids=str)
def test_one_graph_serves_every_step(model, options, pads, count):
    ids, mask = tokens(PROMPT + count, 2), None if pads is None else padding(*pads, count=PROMPT + count)
    options = dict(format="k8v8") | options
    eager, cache = hf.LowBitCache(**options), static(**options)
    want = stepwise(model, eager, ids, (PROMPT, *[1] * count), mask)
    assert torch.equal(prompt(model, cache, ids, mask), want[:, :PROMPT])
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert error(steps(step, cache, ids, mask), want[:, PROMPT:]) < 1e-5
    assert int(cache.get_seq_length()) == PROMPT + count
    for ours, theirs in zip(cache.layers, eager.layers):
        assert ours.kv.n_tok.tolist() == theirs.kv.n_tok.tolist()


def test_after_reset_the_same_graph_serves_another_prompt(model):
    """The memory stays, whatever padding comes; a batch of another size is refused."""
    ids, cache = tokens(PROMPT + STEPS, 2), static("k4v4")
    step = torch.compile(model, fullgraph=True, backend="eager")
    places = None
    for mask in (padding(0, 0), padding(0, 50), padding(9, 0)):
        prompt(model, cache, ids, mask)
        got = steps(step, cache, ids[:, :140], mask, compiled=places is not None)
        want = stepwise(model, hf.LowBitCache("k4v4"), ids[:, :140], (PROMPT, *[1] * 20), mask)[:, PROMPT:]
        assert error(got, want) < 1e-5
        assert places in (None, [layer.kv.pool.data_ptr() for layer in cache.layers])
        places = [layer.kv.pool.data_ptr() for layer in cache.layers]
        cache.reset()
        assert cache.get_seq_length() == cache.nbytes == 0
    with pytest.raises(ValueError, match="batch 1, supported: 2"):
        prompt(model, cache, ids[:1])


@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
def test_chunks_and_crops_between_steps(model, compiled):
    """They go through the host, which learns of the steps that it did not see."""
    ids, caches = tokens(PROMPT + STEPS), (hf.LowBitCache("k4v4", max_q_len=4), static("k4v4", max_q_len=4))
    step = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    logits = []
    for cache, one in zip(caches, (model, step)):
        out = [prompt(model, cache, ids), steps(one, cache, ids[:, :150])]
        cache.crop(-3)
        out.append(stepwise(model, cache, ids[:, 147:200], (53,)))
        out.append(steps(one, cache, ids[:, :210], start=200, compiled=one is not model))
        logits.append(torch.cat(out, 1))
    assert error(logits[1], logits[0]) < 1e-5
    assert repr(caches[1].layers[0]) == "StaticLowBitLayer(k4v4, 210 tokens)" and caches[1].nbytes > 0


def test_a_prompt_of_one_token(model):
    ids = tokens(20, 2)
    want = stepwise(model, hf.LowBitCache("k4v4"), ids, (1,) * 20)
    assert error(stepwise(model, static("k4v4"), ids, (1,) * 20), want) < 1e-6


@pytest.mark.parametrize("model, options", [("llama", dict()), ("gemma3", dict(sliding="lowbit"))], indirect=["model"],
                         ids=str)
@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
def test_generate(model, options, compiled):
    """A padded batch, then a second turn over the same cache and by the same graph."""
    ids, mask = tokens(PROMPT, 2), padding(0, 37, count=PROMPT)
    whole = torch.cat((mask, torch.ones(2, 60, dtype=torch.long)), 1)
    config = CompileConfig(fullgraph=True, mode="default", backend="eager")
    config._compile_all_devices = compiled
    found = []
    for cache in (hf.LowBitCache("k8v8", **options), static(**options)):
        asked = dict(do_sample=False, max_new_tokens=20, min_new_tokens=20, **{hf.CACHE_ARGUMENT: cache})
        if compiled and cache.is_compileable:
            asked["compile_config"] = config
        with torch._dynamo.config.patch(error_on_recompile=True):
            first = model.generate(ids, attention_mask=mask, **asked)
            found.append(model.generate(torch.cat((first, ids[:, :40]), 1), attention_mask=whole, **asked))
        assert int(cache.get_seq_length()) == PROMPT + 20 + 40 + 19
    assert torch.equal(*found)
    assert cache.is_compileable and ("_compiled_call" in vars(model)) == compiled
    vars(model).pop("_compiled_call", None)


def test_a_step_without_room_leaves_a_mark(model):
    ids, cache = tokens(300), hf.LowBitCache("k4v4", max_seqlen=PROMPT, static=True)
    prompt(model, cache, ids)
    cache.check()
    room = cache.layers[0].kv.max_seqlen
    step = torch.compile(model, fullgraph=True, backend="eager")
    steps(step, cache, ids[:, : room + 2])
    assert int(cache.get_seq_length()) == room
    with pytest.raises(CacheFaultError, match=f"at most max_seqlen = {room}"):
        cache.check()
    cache.check()
    with pytest.raises(ValueError, match=f"max_seqlen = {room}"):
        steps(model, cache, ids[:, : room + 1], start=room)
    steps(step, cache, ids[:, : room + 1], start=room, compiled=True)
    cache.reset()  # the marks go with the tokens
    assert prompt(model, cache, ids).shape[1] == PROMPT and int(cache.get_seq_length()) == PROMPT
    cache.check()


HOST_READS = ("item", "tolist", "numpy", "cpu", "equal", "nonzero", "__bool__", "__int__", "__float__", "__index__")


class NoHostReads(TorchFunctionMode):
    """Fails where a tensor's values would come to the host, for which a CUDA graph cannot wait."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert getattr(func, "__name__", None) not in HOST_READS, f"host read: {func}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("model", ["llama", "gemma3"], indirect=True)
def test_a_captured_step_reads_nothing_on_the_host(model, monkeypatch):
    """Uncompiled, as a CUDA graph captures it, beside ``append`` and ``decode``, which are captured by themselves."""
    ids, mask = tokens(PROMPT + 1, 2), padding(0, 37, count=PROMPT + 1)
    caches = [hf.LowBitCache("k4v4", sliding="lowbit"), static("k4v4", sliding="lowbit")]
    for cache in caches:
        prompt(model, cache, ids, mask)
    monkeypatch.setattr(KVCache, "is_capturing", lambda self: True)
    monkeypatch.setattr(KVCache, "append", lambda self, k, v: None)
    monkeypatch.setattr(layer, "decode", lambda q, cache, **options: (torch.zeros_like(q), None))
    plain, cache = caches
    for given in (dict(), dict(attention_mask=mask)):
        with torch.no_grad(), NoHostReads():
            model(ids[:, :1], **{hf.CACHE_ARGUMENT: cache}, **given)
    with torch.no_grad(), NoHostReads(), pytest.raises(AssertionError, match="host read"):
        model(ids[:, :1], **{hf.CACHE_ARGUMENT: plain}, attention_mask=mask)
    with pytest.raises(NotImplementedError, match="one token a row"):
        prompt(model, cache, ids, mask)


def test_what_one_graph_cannot_hold_names_what_it_can(model):
    ids, words = tokens(PROMPT + 5), r"LowBitCache\(\.\.\., max_seqlen=, static=True\), after the prompt"
    whole = torch.compile(model, fullgraph=True, backend="eager")
    for cache in (static("k4v4"), hf.LowBitCache("k4v4", max_seqlen=300)):
        with torch.no_grad(), pytest.raises(Exception, match=words):
            whole(ids[:, :PROMPT], **{hf.CACHE_ARGUMENT: cache})
    prompt(model, cache, ids)
    with pytest.raises(Exception, match=words):
        steps(whole, cache, ids)


def test_in_several_graphs_any_cache_compiles():
    """The layer's own part runs between them."""
    model, ids = build("llama", num_hidden_layers=1), tokens(PROMPT + 1)
    pieces, cache = torch.compile(model, backend="eager"), hf.LowBitCache("k4v4")
    got = torch.cat((prompt(pieces, cache, ids), steps(pieces, cache, ids)), 1)
    assert error(got, stepwise(model, hf.LowBitCache("k4v4"), ids, (PROMPT, 1))) < 1e-6


@pytest.mark.parametrize("model", ["llama", "gemma3"], indirect=True)
def test_refusals(model, request):
    with pytest.raises(ValueError, match="static: got True without max_seqlen"):
        hf.LowBitCache("k4v4", static=True)
    ids, cache = tokens(PROMPT), static("k4v4")
    if request.node.callspec.params["model"] == "gemma3":
        with pytest.raises(NotImplementedError, match="sliding='lowbit'"):
            prompt(model, cache, ids)
        return
    causal = torch.ones(PROMPT, PROMPT, dtype=torch.bool).tril()[None, None]
    with torch.no_grad(), pytest.raises(NotImplementedError, match="attention_mask: .* over a static cache"):
        model(ids, **{hf.CACHE_ARGUMENT: cache}, attention_mask=causal)
    with pytest.raises(ValueError, match="would reach 999 tokens, supported: 270"):
        stepwise(model, cache, tokens(999), (999,))
    prompt(model, cache, ids)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="attention_mask"):
        model(ids[:, :1], **{hf.CACHE_ARGUMENT: cache}, attention_mask=causal[..., :1])
    assert int(cache.get_seq_length()) == PROMPT
