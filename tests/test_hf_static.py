"""Static LowBitCaches: decode steps compiled into one graph beside eager ones, on the CPU."""

import pytest
import torch

pytest.importorskip("transformers")

from tiny_models import build, error, stepwise, tokens  # noqa: E402

from lowbit_attn import CacheFaultError  # noqa: E402
from lowbit_attn.integrations import hf  # noqa: E402

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
def steps(step, cache, ids, mask=None, start: int = PROMPT):
    """Logits of the tokens after ``start``, one at a time and without a mask."""
    out = []
    for at in range(start, ids.shape[1]):
        place = {} if mask is None else dict(position_ids=mask[:, : at + 1].sum(1, keepdim=True) - 1)
        out.append(step(ids[:, at : at + 1], past_key_values=cache, **place).logits)
        if at == start:
            torch._dynamo.config.error_on_recompile = True
    torch._dynamo.config.error_on_recompile = False
    return torch.cat(out, 1)


@pytest.mark.parametrize("model, options", [
    ("llama", dict(sinks=5)), ("llama", dict(format="kitty")), ("llama", dict(format="kitty-weighted")),
    ("llama", dict(format="k4tv4", rotate_keys=True)), ("llama", dict(window=60, keep_sinks=True, sinks=4)),
    ("qwen3", dict(saturate=True)), ("gemma2", dict(sliding="lowbit")), ("gemma3", dict(sliding="lowbit")),
    ("mistral-sliding", dict(sliding="lowbit")), ("gpt-oss", dict(sliding="lowbit")),
], indirect=["model"], ids=str)
@pytest.mark.parametrize("pads", [None, (0, 37)], ids=str)
def test_compiled_steps_are_eager_steps(model, options, pads):
    ids, mask = tokens(PROMPT + STEPS, 2), None if pads is None else padding(*pads)
    options = dict(format="k8v8") | options
    eager = hf.LowBitCache(**options)
    want = stepwise(model, eager, ids, (PROMPT, *[1] * STEPS), mask)
    cache = static(**options)
    first = stepwise(model, cache, ids[:, :PROMPT], (PROMPT,), None if mask is None else mask[:, :PROMPT])
    assert torch.equal(first, want[:, :PROMPT])
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert error(steps(step, cache, ids, mask), want[:, PROMPT:]) < 1e-5
    assert int(cache.get_seq_length()) == PROMPT + STEPS
    for ours, theirs in zip(cache.layers, eager.layers):
        assert ours.kv.n_tok.tolist() == theirs.kv.n_tok.tolist()
