"""The transformers cache on a GPU's kernels beside the reference: perplexity, greedy tokens, padding, Gemma."""

import pytest
import torch

pytest.importorskip("transformers")

from tiny_models import build, error, stepwise, tokens  # noqa: E402

from lowbit_attn import quality  # noqa: E402
from lowbit_attn.integrations import hf  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LLAMA = dict(head_dim=128, num_attention_heads=8, hidden_size=128, initializer_range=0.08)
SIZES = (128, 128, 100, 2, 3, *[1] * 60)  # first chunk, chunks over cached tokens, single tokens
FORMATS = ("k4v4", "k2v2")
PERPLEXITY_TOLERANCE = 0.005
LOGIT_TOLERANCE = 0.02  # relative, kernels against the reference over the same cache, fp16 models


def on_gpu(name: str, **options):
    return build(name, **options).half().cuda()


def read(model, ids, mask=None, **options):
    """Logits fp32 on the CPU of ids read through a fresh cache."""
    mask = None if mask is None else mask.to(model.device)
    return stepwise(model, hf.LowBitCache(**options), ids.to(model.device), SIZES, mask).float().cpu()


@pytest.mark.parametrize("name", FORMATS)
def test_perplexity_is_that_of_the_cpu(arch, name):
    ids = tokens(700)
    want = quality.evaluate(build("llama", **LLAMA), ids, dict(format=name))
    model = on_gpu("llama", **LLAMA)
    got = quality.evaluate(model, ids.cuda(), dict(format=name))
    assert got.perplexity == pytest.approx(want.perplexity, rel=PERPLEXITY_TOLERANCE)
    assert got.cache_bytes == want.cache_bytes
    # the same by single tokens, which the decode kernels read
    places = sum(SIZES) - 1
    ids = ids[:, : places + 1]
    ours, theirs = (
        quality.perplexity(quality.negative_log_likelihood(read(m, ids, format=name)[0, :-1], ids[0, 1:]), places)
        for m in (model, build("llama", **LLAMA)))
    assert ours == pytest.approx(theirs, rel=PERPLEXITY_TOLERANCE)


@pytest.mark.parametrize("family, name, options", [
    ("llama", "k4v4", dict(sinks=32)), ("llama", "k2v2", dict()), ("llama", "k4v4", dict(window=150, keep_sinks=True,
                                                                                       sinks=32)),
    ("gemma2", "k4v4", dict()), ("gemma2", "k4v4", dict(sliding="lowbit")), ("gemma3", "k4v4", dict(sliding="lowbit")),
])
@pytest.mark.parametrize("pads", [(0, 0), (0, 60)])
def test_kernels_give_the_references_logits(arch, family, name, options, pads):
    model, ids = on_gpu(family, **(LLAMA if family == "llama" else {})), tokens(sum(SIZES), batch=2)
    mask = torch.stack([torch.arange(ids.shape[1]) >= pad for pad in pads]).long()
    got, want = (read(model, ids, mask, format=name, path=path, **options) for path in (None, "reference"))
    for b, pad in enumerate(pads):
        assert torch.isfinite(got[b, pad:]).all() and error(got[b, pad:], want[b, pad:]) < LOGIT_TOLERANCE


@pytest.mark.parametrize("name", FORMATS)
def test_greedy_tokens_are_the_references(arch, name):
    """A batch padded on the left through generate, 140 tokens long so that a block is packed on the way."""
    model, ids = on_gpu("llama", **LLAMA), tokens(200, batch=2).cuda()
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    model.set_attn_implementation(hf.NAME)
    new = 140
    options = dict(do_sample=False, max_new_tokens=new, min_new_tokens=new)
    cache = hf.LowBitCache(name, max_seqlen=400)
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    # the reference reads what the kernels chose, so that one difference does not make the rest incomparable
    whole = torch.cat((mask, torch.ones_like(out[:, 200:])), 1)
    reference = hf.LowBitCache(name, path="reference")
    logits = stepwise(model, reference, out, (200, *[1] * new), whole)[:, 199:-1].float()
    logits[..., model.generation_config.eos_token_id] = -torch.inf
    top = logits.topk(2).values
    margin = 2 * LOGIT_TOLERANCE * logits[torch.isfinite(logits)].std()
    clear = top[..., 0] - top[..., 1] > margin
    assert clear.double().mean() > 0.75
    assert (logits.argmax(-1) == out[:, 200:])[clear].all()
    assert [layer.kv.n_tok.tolist() for layer in cache.layers] == [[339, 309]] * 2


@pytest.mark.parametrize("name", ("k4v4",))
def test_bf16_and_static_room(arch, name):
    """A bf16 model with max_seqlen given: the pool is where it was after every step."""
    model, ids = build("llama", **LLAMA).bfloat16().cuda(), tokens(sum(SIZES))
    cache = hf.LowBitCache(name, max_seqlen=sum(SIZES))
    stepwise(model, cache, ids[:, :128].cuda(), (128,))
    places = [layer.kv.pool.data_ptr() for layer in cache.layers]
    got = stepwise(model, cache, ids[:, 128:].cuda(), SIZES[1:]).float().cpu()
    assert [layer.kv.pool.data_ptr() for layer in cache.layers] == places and got.isfinite().all()
    assert [len(layer.kv.plans) for layer in cache.layers] == [2, 2]  # append and decode of single tokens, no chunk's
    want = read(model, ids, format=name, path="reference")[:, 128:]
    assert error(got, want) < 4 * LOGIT_TOLERANCE  # bf16 rounds eight times coarser; errors of a few layers
