"""The transformers cache on a GPU's kernels beside the reference: perplexity, greedy tokens, padding, Gemma."""

import pytest
import torch

pytest.importorskip("transformers")

from tiny_models import build, error, positions, stepwise, tokens  # noqa: E402

from lowbit_attn import quality  # noqa: E402
from lowbit_attn.integrations import hf  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_compiler")]
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


@pytest.mark.parametrize("static", (False, True), ids=("eager", "compiled"))
@pytest.mark.parametrize("name", FORMATS)
def test_greedy_tokens_are_the_references(arch, name, static):
    """A batch padded on the left through generate, 140 tokens long so that a block is packed on the way.

    Over a static cache generate compiles the model by itself, with mode="reduce-overhead".
    """
    model, ids = on_gpu("llama", **LLAMA), tokens(200, batch=2).cuda()
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    model.set_attn_implementation(hf.NAME)
    new = 140
    options = dict(do_sample=False, max_new_tokens=new, min_new_tokens=new)
    cache = hf.LowBitCache(name, max_seqlen=400, static=static)
    out = model.generate(ids, attention_mask=mask, **{hf.CACHE_ARGUMENT: cache}, **options)
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
    cache.check()


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


PROMPT, STEPS = 120, 150  # two blocks fill and are packed on the way
STATIC = [  # family, format, options, padding of two rows
    ("llama", "k4v4", dict(sinks=32), None), ("llama", "k2v2", dict(), (0, 37)), ("llama", "kitty", dict(), (0, 0)),
    ("llama", "kitty-weighted", dict(), (0, 0)),
    ("llama", "k4v4", dict(window=60, keep_sinks=True, sinks=4), (37, 0)),
    ("gemma3", "k4v4", dict(sliding="lowbit"), (0, 37)),
]


class Steps:
    """A model's decode steps over a static cache that has read the prompt, beside those over a cache that is not."""

    def __init__(self, family, name, options, pads):
        self.model = on_gpu(family, **(LLAMA if family == "llama" else {}))
        self.ids = tokens(PROMPT + STEPS, batch=2).cuda()
        real = [torch.arange(PROMPT + STEPS) >= pad for pad in pads or ()]
        mask = torch.stack(real).long().cuda() if real else None
        self.place = positions(mask)
        room = dict(max_seqlen=PROMPT + STEPS)
        self.plain, self.cache = (hf.LowBitCache(name, **options, **room, static=static) for static in (False, True))
        self.want = stepwise(self.model, self.plain, self.ids, (PROMPT, *[1] * STEPS), mask)[:, PROMPT:]
        stepwise(self.model, self.cache, self.ids[:, :PROMPT], (PROMPT,), None if mask is None else mask[:, :PROMPT])

    def inputs(self, at: int) -> dict:
        """The model's arguments of the step ``at``; positions are the cache's own where nothing is padded."""
        own = {name: x[:, at : at + 1].contiguous() for name, x in self.place.items()}
        return dict(input_ids=self.ids[:, at : at + 1].contiguous(), **{hf.CACHE_ARGUMENT: self.cache}) | own

    def check(self, logits) -> None:
        self.cache.check()
        assert error(torch.cat(logits, 1).float(), self.want.float()) < LOGIT_TOLERANCE
        assert int(self.cache.get_seq_length()) == PROMPT + STEPS
        for ours, theirs in zip(self.cache.layers, self.plain.layers):
            ours.kv.flush()
            assert [x.tolist() for x in ours.kv.counters()] == [x.tolist() for x in theirs.kv.counters()]


@pytest.mark.parametrize("case", STATIC, ids=str)
@torch.no_grad()
def test_a_captured_step_serves_every_length(arch, case):
    steps = Steps(*case)
    held = steps.inputs(PROMPT)
    logits = [steps.model(**held).logits]  # a step to warm up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = steps.model(**held).logits
    for at in range(PROMPT + 1, PROMPT + STEPS):
        for name, x in steps.inputs(at).items():
            if name != hf.CACHE_ARGUMENT:
                held[name].copy_(x)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        graph.replay()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        logits.append(out.clone())
    steps.check(logits)


@torch.no_grad()
def test_capturing_another_cache_names_the_static_one(arch):
    steps = Steps("llama", "k4v4", {}, None)
    with pytest.raises(NotImplementedError, match="static=True"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        steps.model(steps.ids[:, :1], **{hf.CACHE_ARGUMENT: steps.plain})


@pytest.mark.parametrize("mode", ("aot_eager", "inductor", "reduce-overhead"))
@pytest.mark.parametrize("case", (STATIC[1], STATIC[-1]), ids=str)
@torch.no_grad()
def test_compiled_steps_are_eager_steps(arch, case, mode):
    steps = Steps(*case)
    how = dict(mode=mode) if mode == "reduce-overhead" else dict(backend=mode)
    step, logits = torch.compile(steps.model, fullgraph=True, **how), []
    for at in range(PROMPT, PROMPT + STEPS):
        with torch._dynamo.config.patch(error_on_recompile=at > PROMPT):
            logits.append(step(**steps.inputs(at)).logits.clone())
    steps.check(logits)
