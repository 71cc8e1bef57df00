"""The transformers cache and attention function, on a tiny random Llama."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: E402

from lowbit_attn import KVCache  # noqa: E402
from lowbit_attn.integrations import hf  # noqa: E402
from lowbit_attn.integrations import layer as layers  # noqa: E402
from lowbit_attn.integrations.growth import grown  # noqa: E402
from lowbit_attn.reference import Attention  # noqa: E402

HEADS, HEADS_KV, DIM = 4, 2, 64


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=HEADS,
                         num_key_value_heads=HEADS_KV, head_dim=DIM, vocab_size=97, max_position_embeddings=2048,
                         bos_token_id=0, eos_token_id=1, pad_token_id=2, initializer_range=0.1)
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def model(llama):
    llama.set_attn_implementation(hf.NAME)
    yield llama
    llama.set_attn_implementation("sdpa")


def tokens(count: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (batch, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def feed(model, ids, cache, *sizes):
    """Logits [batch, tokens, vocabulary] of ids read in steps of these sizes."""
    assert sum(sizes) == ids.shape[1]
    return torch.cat([model(part, **{hf.CACHE_ARGUMENT: cache}).logits for part in ids.split(sizes, 1)], 1)


def new_kv(steps, layer, *sizes):
    """Feed random K and V of these step sizes to a layer; the queries are random too."""
    for k, v, q in zip(*(x.split(sizes, 2) for x in steps)):
        layer.attend(layer.update(k, v)[0], q)


def random_steps(count: int, batch: int = 1):
    torch.manual_seed(3)
    k, v = torch.randn(2, batch, HEADS_KV, count, DIM)
    return k, v, torch.randn(batch, HEADS, count, DIM)


def plain_attention(q, k, v, softcap=None, window=None, keep_sinks=False, sink_logits=None, n_sink=0):
    """fp32; q [heads, q_len, D] are the last queries over k, v [heads_kv, seqlen, D]; returns [q_len, heads, D]."""
    k, v = (x.repeat_interleave(HEADS // HEADS_KV, 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) / DIM**0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    ones = torch.ones(scores.shape[1:], dtype=torch.bool)
    hidden = ones.triu(k.shape[1] - q.shape[1] + 1)
    if window:
        hidden |= ones.tril(k.shape[1] - q.shape[1] - window) & ~(keep_sinks & (torch.arange(k.shape[1]) < n_sink))
    scores = scores.masked_fill(hidden, float("-inf"))
    extra = torch.full((HEADS,), -torch.inf) if sink_logits is None else sink_logits
    scores = torch.cat((scores, extra[:, None, None].expand(-1, q.shape[1], 1)), 2)
    return (scores.softmax(-1)[..., :-1] @ v).transpose(0, 1)


@pytest.mark.parametrize("batch", [1, 2])
def test_generate_in_five_lines(model, batch):
    ids = tokens(150, batch)
    options = dict(attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, min_new_tokens=12)
    cache = hf.LowBitCache("k8v8")
    out = model.generate(ids, **{hf.CACHE_ARGUMENT: cache}, **options)
    model.set_attn_implementation("sdpa")
    assert torch.equal(out, model.generate(ids, **options))  # 8 bits do not move the greedy choice here
    assert cache.get_seq_length() == 161 and len(cache) == 2 and cache.batch_size == batch
    assert cache.layers[0].kv.n_qk.tolist() == [128] * batch


SINK_LOGITS = torch.tensor([0.5, -1.0, 3.0, 0.0])
CALLS = {  # what the model asks of a layer, and the layer's own options
    "plain": (dict(), dict()),
    "sinks": (dict(), dict(sinks=32)),
    "softcap": (dict(softcap=1.5), dict()),
    "sink logits": (dict(sink_logits=SINK_LOGITS), dict(sinks=5)),
    "window of the model": (dict(window=50), dict(sliding="lowbit")),
    "window and softcap of the model": (dict(window=150, softcap=2.0, sink_logits=SINK_LOGITS), dict(sliding="lowbit")),
    "window of the cache": (dict(), dict(window=60)),
    "window of the cache, sinks": (dict(), dict(window=60, keep_sinks=True, sinks=7)),
    "rotated keys": (dict(), dict(rotate_keys=True)),
    "rotated keys, window": (dict(window=50), dict(rotate_keys=True, sliding="lowbit")),
}


@pytest.mark.parametrize("sizes", [(200, 1, 60, 1, 1), (130, 130), (1,) * 140])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("pads", [(0, 0), (0, 37)])
def test_attention_is_that_over_the_gathered_cache(sizes, call, pads):
    """Every step against the values that the cache held before it, and the step's own in 16 bit."""
    if len(sizes) > 10 and call not in ("plain", "window of the cache, sinks"):
        sizes = (1,) * 5
    asked, own = CALLS[call]
    k, v, q = random_steps(sum(sizes), batch=2)
    layer = hf.LowBitCache("k2tv2", **own).layer_class_to_replicate()
    expects = asked | {name: own[name] for name in ("window", "keep_sinks") if name in own} | dict(
        n_sink=own.get("sinks", 0))
    start = 0
    for size in sizes:
        new = slice(start, start + size)
        started = [start > pad for pad in pads]
        before = [layer.kv.gather(b) if started[b] else (k[b, :, :0], v[b, :, :0]) for b in range(2)]
        seen_pads = tuple(min(pad, start + size) for pad in pads)
        out = layer.attend(layer.update(k[:, :, new], v[:, :, new])[0], q[:, :, new], Attention(**asked), seen_pads)
        for b in range(2):
            skip = max(0, seen_pads[b] - start)
            own_k, own_v, own_q = (x[b, :, new][:, skip:] for x in (k.half().float(), v.half().float(), q))
            if own.get("rotate_keys"):
                # cached keys are rotated already; a step's own are compared as they are stored, rotated and rounded
                own_k, own_q = layer.kv.rotate(own_k).float(), (own_q @ layer.kv.rotation)
            seen = (torch.cat((old, x), 1) for old, x in zip(before[b], (own_k, own_v)))
            expected = plain_attention(own_q, *seen, **expects)
            tolerance = 2e-3 if own.get("rotate_keys") else 1e-5
            torch.testing.assert_close(out[b, skip:], expected, rtol=tolerance, atol=tolerance)
        start += size
    assert layer.kv.n_tok.tolist() == [sum(sizes) - min(pad, sum(sizes)) for pad in pads]


@pytest.mark.parametrize("pads", [(0, 0), (90, 3)])
@pytest.mark.parametrize("asked", [dict(), dict(softcap=1.5), dict(sink_logits=SINK_LOGITS)])
def test_a_sliding_layer_keeps_its_window_in_16_bit(asked, pads):
    k, v, q = random_steps(140, batch=2)
    layer = hf.LowBitCache("k2v2").layer_class_to_replicate()
    start = 0
    for size in (70, 1, 60, 1, 8):
        new, stop = slice(start, start + size), start + size
        out = layer.attend(layer.update(k[:, :, new], v[:, :, new])[0], q[:, :, new], Attention(window=20, **asked),
                           tuple(min(pad, stop) for pad in pads))
        for b in range(2):
            skip = max(0, pads[b] - start)
            seen = (x[b, :, pads[b]:stop].half().float() for x in (k, v))
            expected = plain_attention(q[b, :, new][:, skip:], *seen, window=20, **asked)
            torch.testing.assert_close(out[b, skip:], expected, rtol=1e-5, atol=1e-5)
        start = stop
    assert layer.kv is None and layer.nbytes == 2 * 2 * HEADS_KV * 19 * DIM * 2 and layer.get_seq_length() == 140
    layer.reset()
    assert layer.nbytes == 0 and layer.get_seq_length() == 0


def test_logits_match_a_model_that_sees_the_gathered_values(model):
    ids = tokens(300)
    cache = hf.LowBitCache("k4v2")
    got = feed(model, ids, cache, 299, 1)[:, -1]
    gathered = [layer.kv.gather(0) for layer in cache.layers]
    plain = DynamicCache()
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        model(ids[:, :299], **{hf.CACHE_ARGUMENT: plain})
        for layer, (k, v) in zip(plain.layers, gathered):
            layer.keys, layer.values = k[None, :, :299], v[None, :, :299]
        expected = model(ids[:, 299:], **{hf.CACHE_ARGUMENT: plain}).logits[:, -1]
        exact = model(ids).logits[:, -1]
    # the last token's own K and V are rounded to fp16 in the cache and not in the comparison
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)
    assert (got - exact).abs().max() > 10 * (got - expected).abs().max()


def test_chunks_aligned_with_blocks_equal_single_tokens(model):
    ids = tokens(260)
    chunked = feed(model, ids, hf.LowBitCache("k2v2"), 128, 128, 4)
    single = feed(model, ids, hf.LowBitCache("k2v2"), *[1] * 260)
    # the same arithmetic in other matrix shapes; a code may flip where fp32 rounds the other way
    assert (chunked - single).norm() < 2e-3 * single.norm()
    assert (chunked - feed(model, ids, hf.LowBitCache("k4v4"), 128, 128, 4)).norm() > 1e-2 * single.norm()


def test_state_does_not_depend_on_the_steps():
    steps = random_steps(700, batch=2)
    layers = []
    for sizes in ((700,), (1,) * 700, (300, 1, 1, 200, 198)):
        layer = hf.LowBitCache("k4v2", sinks=5).layer_class_to_replicate()
        new_kv(steps, layer, *sizes)
        layers.append(layer)
    expected = KVCache("k4v2", 10, HEADS_KV, DIM, sinks=5, max_batch=2, max_seqlen=700)
    for b in range(2):
        expected.prefill(b, steps[0][b].transpose(0, 1), steps[1][b].transpose(0, 1))
    for layer in layers:
        assert layer.get_seq_length() == 700
        for b in range(2):
            for got, want in zip(layer.kv.gather(b), expected.gather(b)):
                assert torch.equal(got, want)
        assert layer.nbytes == expected.nbytes


@pytest.mark.parametrize("name", ("kitty", "kitty-pro"))
def test_generate_with_kitty(model, name):
    """Its own 32 sinks unless told otherwise; V is packed a page later than K."""
    ids = tokens(300)
    options = dict(attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, min_new_tokens=24)
    cache, told = hf.LowBitCache(name), hf.LowBitCache(name, sinks=32)
    out = model.generate(ids, **{hf.CACHE_ARGUMENT: cache}, **options)
    kv = cache.layers[0].kv
    assert (kv.sinks, int(kv.n_sink[0]), int(kv.n_qk[0]), int(kv.n_qv[0])) == (32, 32, 256, 128)
    assert torch.equal(out, model.generate(ids, **{hf.CACHE_ARGUMENT: told}, **options)) and told.nbytes == cache.nbytes
    bare = hf.LowBitCache(name, sinks=0)
    feed(model, ids, bare, 300)
    assert bare.layers[0].kv.sinks == 0 and hf.LowBitCache("k2v2").layer_class_to_replicate().sinks == 0
    got = feed(model, ids, hf.LowBitCache(name), 128, 128, 44)[:, -1]
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        exact = model(ids).logits[:, -1]
    error = (got - exact).norm() / exact.norm()
    assert 1e-4 < error < 0.25


def test_weighted_kitty_learns_from_the_queries_it_sees(model):
    """The mean |q| of every query so far, over the query heads of each KV head, whatever the steps were."""
    k, v, q = random_steps(500)
    for sizes in ((500,), (300, 1, 199)):
        layer = hf.LowBitCache("kitty-weighted", sinks=0).layer_class_to_replicate()
        new_kv((k, v, q), layer, *sizes)
        want = q[0].abs().unflatten(0, (HEADS_KV, -1)).mean((1, 2))
        torch.testing.assert_close(layer.kv.query_weights, want)
    blocks = k[0, :, 256:384].half().float()
    stored = layer.kv.pool[layer.kv.table[0, 2]]
    at = next(p.offset for p in layer.kv.record.k_planes if p.name == "index")
    assert stored[:, at : at + 8].tolist() == layer.format.k.boosted_channels(blocks, want).tolist()
    out = model.generate(tokens(200), **{hf.CACHE_ARGUMENT: hf.LowBitCache("kitty-weighted")}, do_sample=False,
                         attention_mask=torch.ones(1, 200), max_new_tokens=5, min_new_tokens=5)
    assert out.shape == (1, 205)


def test_pool_grows_without_changing_its_contents(monkeypatch):
    monkeypatch.setattr(layers, "FIRST_TOKENS", 130)
    steps = random_steps(900)
    growing = hf.LowBitCache("k4v4").layer_class_to_replicate()
    new_kv(steps, growing, 130, *[1] * 170, 600)
    fixed = hf.LowBitCache("k4v4", max_seqlen=900).layer_class_to_replicate()
    new_kv(steps, fixed, 900)
    assert growing.kv.num_pages > 1
    for got, want in zip(growing.kv.gather(0), fixed.kv.gather(0)):
        assert torch.equal(got, want)
    assert int(growing.kv.n_free) + int(growing.kv.n_pages) == growing.kv.num_pages
    used = growing.kv.table[0, : int(growing.kv.n_pages)].tolist()
    free = growing.kv.free_list[: int(growing.kv.n_free)].tolist()
    assert sorted(used + free) == list(range(growing.kv.num_pages))
    with pytest.raises(ValueError, match="tokens"):
        grown(growing.kv, 10)


def test_max_seqlen_is_kept_and_reset_starts_again(model):
    ids = tokens(200)
    cache = hf.LowBitCache("k4v4", max_seqlen=200)
    first = feed(model, ids, cache, 200)
    assert cache.get_max_length() == 200
    with pytest.raises(ValueError, match="max_seqlen"):
        feed(model, tokens(400), cache, 400)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    assert torch.equal(feed(model, ids, cache, 200), first)
    assert hf.LowBitCache("k4v4").layer_class_to_replicate().get_max_length() == -1


def test_inference_mode_and_no_grad_may_alternate(model):
    cache = hf.LowBitCache("k4v4")
    with torch.inference_mode():
        model(tokens(5), **{hf.CACHE_ARGUMENT: cache})
    assert feed(model, tokens(1), cache, 1).shape[1] == 1
    assert cache.get_seq_length() == 6


@pytest.mark.parametrize("name, arguments", [
    ("attention_mask", dict(attention_mask=torch.tensor([[0, 1, 0, 1], [1, 1, 1, 1]]))),
    ("attention_mask", dict(attention_mask=torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]))),
    ("attention_mask", dict(attention_mask=torch.ones(2, 1, 4, 4, dtype=torch.bool))),
    ("output_attentions", dict(output_attentions=True)),
    ("sliding_window", dict(sliding_window=16)),
    ("is_causal", dict(is_causal=False)),
    ("something_new", dict(something_new=1)),
])
def test_refuses_what_it_cannot_honour(model, name, arguments):
    cache = hf.LowBitCache("k4v4")
    with torch.no_grad(), pytest.raises(NotImplementedError, match=name):
        model(tokens(4, batch=2), **{hf.CACHE_ARGUMENT: cache}, **arguments)
    assert cache.get_seq_length() == 0
    assert feed(model, tokens(4, batch=2), cache, 4).shape[1] == 4  # nothing was written: the cache is usable


def test_accepts_explicit_causal_masks(model):
    ids = tokens(40)
    expected = feed(model, ids, hf.LowBitCache("k4v4"), 30, 10)
    cache = hf.LowBitCache("k4v4")
    causal = torch.ones(40, 40, dtype=torch.bool).tril()[None, None]
    additive = torch.where(causal, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        first = model(ids[:, :30], **{hf.CACHE_ARGUMENT: cache}, attention_mask=causal[..., :30, :30]).logits
        second = model(ids[:, 30:], **{hf.CACHE_ARGUMENT: cache}, attention_mask=additive[..., 30:, :]).logits
    assert torch.equal(torch.cat((first, second), 1), expected)


def test_refuses_training_beams_and_cropping_without_drafts(model):
    model.train()
    try:
        with pytest.raises(NotImplementedError, match="training"):
            model(tokens(4), **{hf.CACHE_ARGUMENT: hf.LowBitCache("k4v4")})
    finally:
        model.eval()
    with pytest.raises(NotImplementedError, match="reorder_cache"):
        model.generate(tokens(4), **{hf.CACHE_ARGUMENT: hf.LowBitCache("k4v4")}, num_beams=2, max_new_tokens=3)
    cache = hf.LowBitCache("k4v4")
    feed(model, tokens(4), cache, 4)
    assert not cache.is_croppable and not cache.is_compileable
    cache.crop(0)
    for call in (lambda: cache.crop(-1), lambda: cache.batch_repeat_interleave(2),
                 lambda: cache.batch_select_indices(torch.tensor([0]))):
        with pytest.raises(NotImplementedError):
            call()
    with pytest.raises(ValueError, match="batch 2"):
        feed(model, tokens(4, batch=2), cache, 4)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("start", [100, 122, 125, 126, 127, 128, 129, 130, 131, 132, 150])
def test_cropped_drafts_leave_no_trace(start, window):
    """Two right and four wrong drafts at every place around a block's end; then as if there were no wrong ones."""
    k, v, q = random_steps(start + 150, batch=2)
    asked, wrong = Attention(window=window), torch.randn(3, 2, HEADS_KV, 4, DIM)
    drafted, plain = (hf.LowBitCache("k8v8", max_q_len=5).layer_class_to_replicate() for _ in range(2))

    def step(layer, first, last, extra=None):
        new_k, new_v, new_q = (x[:, :, first:last] for x in (k, v, q))
        if extra is not None:
            new_k, new_v = torch.cat((new_k, wrong[0]), 2), torch.cat((new_v, wrong[1]), 2)
            new_q = torch.cat((new_q, wrong[2].repeat_interleave(HEADS // HEADS_KV, 1)), 2)
        return layer.attend(layer.update(new_k, new_v)[0], new_q, asked)[:, : last - first]

    for layer in (drafted, plain):
        step(layer, 0, start)
    torch.testing.assert_close(step(drafted, start, start + 2, wrong), step(plain, start, start + 2))
    drafted.crop(-4)
    assert drafted.get_seq_length() == plain.get_seq_length() == start + 2
    for first, last in ((2, 3), (3, 4), (4, 20), (20, 150)):
        first, last = start + first, start + last
        torch.testing.assert_close(step(drafted, first, last), step(plain, first, last), rtol=0.02, atol=0.01)
    for got, want in zip(drafted.tail, plain.tail) if window else zip(drafted.kv.gather(1), plain.kv.gather(1)):
        assert torch.equal(got, want)


@pytest.mark.parametrize("tokens_to_remove", [-5, 1, -100])
def test_crops_beyond_the_drafts_are_refused(tokens_to_remove):
    layer = hf.LowBitCache("k8v8", max_q_len=5).layer_class_to_replicate()
    new_kv(random_steps(300), layer, 300)
    with pytest.raises(NotImplementedError, match=f"crop: got {tokens_to_remove} with max_q_len = 5"):
        layer.crop(tokens_to_remove)
    assert layer.get_seq_length() == 300


def test_prompt_lookup_drafts_give_the_same_tokens(model):
    """transformers' assisted generation: drafts from the prompt, the rejected ones cropped."""
    ids = tokens(30).repeat(1, 5)
    options = dict(attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, min_new_tokens=24)
    cache = hf.LowBitCache("k8v8", max_q_len=8)
    out = model.generate(ids, **{hf.CACHE_ARGUMENT: cache}, prompt_lookup_num_tokens=6, **options)
    assert torch.equal(out, model.generate(ids, **{hf.CACHE_ARGUMENT: hf.LowBitCache("k8v8")}, **options))
    assert cache.is_croppable and cache.get_seq_length() == 150 + 23


def test_wrong_pairings_name_the_remedy(llama):
    for name in ("sdpa", "eager"):
        llama.set_attn_implementation(name)
        with pytest.raises(NotImplementedError, match="set_attn_implementation"):
            feed(llama, tokens(4), hf.LowBitCache("k4v4"), 4)
    llama.set_attn_implementation(hf.NAME)
    with pytest.raises(NotImplementedError, match="LowBitCache"):
        llama(tokens(4))
    llama.set_attn_implementation("sdpa")


def test_a_handle_is_read_once():
    k, v, q = random_steps(3)
    layer = hf.LowBitCache("k4v4").layer_class_to_replicate()
    handle, _ = layer.update(k, v)
    layer.attend(handle, q)
    with pytest.raises(NotImplementedError, match="already stored"):
        layer.attend(handle, q)
    with pytest.raises(NotImplementedError, match="set_attn_implementation"):
        torch.matmul(q, handle)


def test_half_models_keep_their_dtype(llama):
    model = LlamaForCausalLM(llama.config).to(torch.bfloat16).eval()
    model.set_attn_implementation(hf.NAME)
    cache = hf.LowBitCache("k4v4")
    assert feed(model, tokens(130), cache, 129, 1).dtype == torch.bfloat16
    assert cache.layers[0].kv.dtype == torch.bfloat16
    llama.set_attn_implementation("sdpa")


def test_importing_the_package_does_not_import_transformers():
    code = "import sys, lowbit_attn; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
