"""transformers over codebook caches: against 16-bit caches that hold what the pages give back, and what is refused."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from lowbit_attn import FORMATS
from lowbit_attn.codebooks.file import CodebookFileError
from lowbit_attn.codebooks.identity import config_hash
from lowbit_attn.formats import Kind
from lowbit_attn.integrations.hf import CACHE_ARGUMENT, LowBitCache
from lowbit_attn.integrations.simulator import SimulatedCache
from lowbit_attn.testing import assert_same_state, normal_codebooks

HEADS, DIM, LAYERS = 2, 64, 2
SHAPE = dict(hidden_size=96, intermediate_size=64, num_attention_heads=6, num_key_value_heads=HEADS, head_dim=DIM,
             num_hidden_layers=LAYERS, vocab_size=97, max_position_embeddings=4096, initializer_range=0.15,
             bos_token_id=0, eos_token_id=1, pad_token_id=2)
ropes = pytest.mark.parametrize("rope", ("post", "pre"))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


def ids(count: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (batch, count), generator=torch.Generator().manual_seed(5))


def books(name: str = "cq2", rope: str = "post", layers: int = LAYERS, **metadata):
    rope = rope if FORMATS[name].k.kind is Kind.CODEBOOK else "post"
    return replace(normal_codebooks(name, layers, HEADS, DIM, rope), metadata=metadata)


def made(name: str = "cq2", rope: str = "post", **options) -> LowBitCache:
    return LowBitCache(name, codebooks=books(name, rope), **options)


@torch.no_grad()
def read(model, cache, tokens, sizes=None, mask=None, position_ids=None):
    """Logits of all tokens, read in steps of these sizes (default: one)."""
    model.set_attn_implementation("lowbit")
    out, start = [], cache.get_seq_length()
    for size in sizes or (tokens.shape[1],):
        part, past = tokens[:, : size], start + size
        place = {} if position_ids is None else {"position_ids": position_ids[:, start:past]}
        out.append(model(part, **{CACHE_ARGUMENT: cache}, **place,
                         attention_mask=None if mask is None else mask[:, :past]).logits)
        tokens, start = tokens[:, size:], past
    return torch.cat(out, 1)


def from_mask(mask):
    return (mask.cumsum(1) - 1).clamp(0)


def sixteen_bit(cache: LowBitCache, row: int = 0) -> DynamicCache:
    """What a row of the cache gives back, in the model's own order of channels and without weights."""
    plain = DynamicCache()
    for index, layer in enumerate(cache.layers):
        k, v = layer.kv.gather(row)
        of_keys = layer.kv.attached.layer
        if of_keys.k_entries is not None:
            place = of_keys.k_order.long().argsort(-1)
            k = k.gather(2, place[:, None].expand_as(k)) / of_keys.k_weights[:, None]
        plain.update(k[None], v[None], index)
    return plain


@pytest.mark.parametrize("name", ("cq4", "cq2", "cq2-nonorm", "k4vcq2", "kcq4v2"))
@ropes
def test_a_step_reads_what_the_pages_give_back(model, name, rope):
    text, cache = ids(420), made(name, rope)
    read(model, cache, text[:, :400])
    assert all(int(layer.kv.n_qk[0]) == 256 for layer in cache.layers)
    for t in (400, 401):
        plain = sixteen_bit(cache)
        got = read(model, cache, text[:, t : t + 1])
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            want = model(text[:, t : t + 1], **{CACHE_ARGUMENT: plain}).logits
        assert torch.allclose(got, want, atol=2e-3 * want.abs().amax())
    stale = read(model, made(name, rope), text[:, :402])[:, -1:]  # all in 16 bit: another answer
    assert not torch.allclose(stale, got, atol=2e-3 * got.abs().amax())


@ropes
def test_steps_of_any_size_give_one_cache(model, rope):
    text = ids(400)
    whole, parts = made("cq2", rope), made("cq2", rope)
    read(model, whole, text[:, :300])
    read(model, parts, text[:, :300], (300,))
    for t in range(300, 400):
        one = read(model, whole, text[:, t : t + 1])
    for a, b in ((300, 317), (317, 399), (399, 400)):
        several = read(model, parts, text[:, a:b])[:, -1:]
    assert torch.allclose(one, several, atol=0.15 * one.abs().amax())  # other steps pack at other times
    assert [int(layer.kv.n_qk[0]) for layer in whole.layers] == [int(layer.kv.n_qk[0]) for layer in parts.layers]


@ropes
@pytest.mark.parametrize("says_positions", (True, False))
def test_padding_on_the_left(model, rope, says_positions):
    """A padded row is the row alone, at the positions that the model was told (its default: padding counts)."""
    pad, text = 37, ids(330, 2)
    mask = torch.ones(2, 330, dtype=torch.long)
    mask[1, :pad] = 0
    where = from_mask(mask) if says_positions else None
    cache, alone = made("cq2", rope), made("cq2", rope)
    got = read(model, cache, text, (329, 1), mask, where)
    want = read(model, alone, text[1:, pad:], (292, 1),
                position_ids=None if says_positions else torch.arange(pad, 330)[None])
    assert torch.allclose(got[1, pad:], want[0], atol=1e-2 * want.abs().amax())
    first = 0 if says_positions or rope == "post" else pad
    for layer, other in zip(cache.layers, alone.layers):
        assert layer.kv.first_positions.tolist() == [0, first] and other.kv.first_positions.tolist() == [first]
        assert layer.kv.n_tok.tolist() == [330, 293]
        k, other_k = layer.kv.gather(1)[0], other.kv.gather(0)[0]
        assert ((k - other_k).norm() / other_k.norm()) < 0.02


@ropes
def test_crop_takes_drafts_back(model, rope):
    text = ids(310)
    cache, plain = made("cq2", rope, max_q_len=4), made("cq2", rope, max_q_len=4)
    read(model, cache, text[:, :300])
    read(model, cache, ids(304)[:, 300:303].flip(1))
    cache.crop(-3)
    read(model, plain, text[:, :300])
    for t in range(300, 310):
        got, want = (read(model, one, text[:, t : t + 1]) for one in (cache, plain))
        assert torch.equal(got, want)
    for one, other in zip(cache.layers, plain.layers):
        assert_same_state(one.kv, other.kv)
    with pytest.raises(NotImplementedError, match="crop: got -5 with max_q_len = 4"):
        cache.crop(-5)


@ropes
def test_assisted_generation(model, rope):
    """Prompt lookup: runs over the crop of rejected drafts, and gives as many tokens as were asked for."""
    model.set_attn_implementation("lowbit")
    text = ids(40).repeat(1, 8)
    cache = made("cq4", rope, max_q_len=4)
    out = model.generate(text, attention_mask=torch.ones_like(text), **{CACHE_ARGUMENT: cache}, do_sample=False,
                         max_new_tokens=24, min_new_tokens=24, prompt_lookup_num_tokens=3, pad_token_id=2)
    assert out.shape[1] == 344 and cache.get_seq_length() in (343, 344)
    assert all(int(layer.kv.n_qk[0]) == 256 for layer in cache.layers)


@ropes
def test_generate_static_and_growing_alike(model, rope):
    model.set_attn_implementation("lowbit")
    text = ids(300)
    outs = []
    for options in (dict(), dict(max_seqlen=400), dict(max_seqlen=400, static=True)):
        cache = made("cq2", rope, **options)
        assert not cache.is_compileable
        outs.append(model.generate(text, attention_mask=torch.ones_like(text), **{CACHE_ARGUMENT: cache},
                                   do_sample=False, max_new_tokens=12, min_new_tokens=12, pad_token_id=2))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2]) and outs[0].shape[1] == 312


@ropes
def test_deepcopy_and_reset(model, rope):
    text = ids(400)
    cache = made("cq2", rope)
    where = torch.arange(7, 407)[None]
    read(model, cache, text[:, :350], position_ids=where)
    twin = copy.deepcopy(cache)
    got, want = (read(model, one, text[:, 350:351], position_ids=where) for one in (cache, twin))
    assert torch.equal(got, want) and twin.layers[0].kv is not cache.layers[0].kv
    cache.reset()
    assert cache.nbytes == books().nbytes or rope == "pre"
    assert cache.layers[0].kv.first_positions.tolist() == [0]
    fresh = made("cq2", rope)
    assert torch.equal(read(model, cache, text), read(model, fresh, text))


def test_a_pool_that_grows_keeps_codebooks_and_positions(model):
    text, where = ids(1400), torch.arange(5, 1405)[None]
    growing, whole = made("cq2", "pre"), made("cq2", "pre", max_seqlen=1500)
    sizes = (700, 650, 50)
    got, want = (read(model, cache, text, sizes, position_ids=where) for cache in (growing, whole))
    assert torch.equal(got, want) and growing.layers[0].kv.first_positions.tolist() == [5]
    assert growing.layers[1].kv.identity == whole.layers[1].kv.identity


@ropes
def test_streaming_window_and_sinks(model, rope):
    """Several tokens at once over pages under a window are what one after the other is."""
    text = ids(420)
    one, several = (made("cq4", rope, window=200, keep_sinks=True, max_q_len=8) for _ in range(2))
    for cache in (one, several):
        read(model, cache, text[:, :400])
    singly = torch.cat([read(model, one, text[:, t : t + 1]) for t in range(400, 406)], 1)
    together = read(model, several, text[:, 400:406])
    assert torch.allclose(singly, together, atol=0.02 * singly.abs().amax())
    all_seen = made("cq4", rope, max_q_len=8)
    read(model, all_seen, text[:, :400])
    assert not torch.allclose(read(model, all_seen, text[:, 400:406]), together, atol=0.02 * singly.abs().amax())


def test_sliding_layers_keep_16_bit_or_take_codebooks():
    torch.manual_seed(1)
    model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=100)).eval()
    text = ids(300)
    tails, pages = made("cq4"), made("cq4", sliding="lowbit")
    for cache in (tails, pages):
        read(model, cache, text)
    assert all(layer.kv is None for layer in tails.layers)
    assert all(int(layer.kv.n_qk[0]) == 256 for layer in pages.layers)
    assert pages.layers[0].kv.attached is not None


def test_a_file_serves(model, tmp_path):
    path = tmp_path / "tiny.cq2.safetensors"
    books(config_hash=config_hash(model.config), model="tiny").save(path)
    caches = [LowBitCache("cq2", codebooks=where) for where in (path, str(path), books())]
    outs = [read(model, cache, ids(300), (299, 1)) for cache in caches]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    assert caches[0].nbytes == sum(layer.kv.nbytes for layer in caches[0].layers) > books().nbytes


def test_refusals_before_a_model_runs(tmp_path):
    for make, error, words in (
        (lambda: LowBitCache("cq2"), ValueError, "codebooks: got none for format cq2"),
        (lambda: LowBitCache("k4v4", codebooks=books()), ValueError, "codebooks: got some for format k4v4"),
        (lambda: LowBitCache("cq4", codebooks=books()), ValueError, "codebooks: made for cq2"),
        (lambda: LowBitCache("cq2", codebooks=books().layer(0)), TypeError, "codebooks: got LayerCodebooks"),
        (lambda: LowBitCache("cq2", codebooks=tmp_path / "none"), FileNotFoundError, "no file"),
        (lambda: LowBitCache("cq2", codebooks=books(), rotate_keys=True), ValueError, "rotate_keys"),
        (lambda: SimulatedCache("cq2"), NotImplementedError, "cq2 has codebooks, supported by LowBitCache"),
        (lambda: SimulatedCache("kcq2v4"), NotImplementedError, "kcq2v4 has codebooks"),
    ):
        with pytest.raises(error, match=words):
            make()


def test_codebooks_of_another_model_are_refused_before_anything_is_stored(model):
    other = LlamaConfig(**SHAPE | {"rope_theta": 1e6, "intermediate_size": 80})
    for wrong, error, words in (
        (books(config_hash=config_hash(other), model="other"), CodebookFileError, "learned from other, whose config"),
        (books(layers=1), ValueError, "codebooks: made for 1 layers, and the model has 2"),
        (books(layers=3), ValueError, "codebooks: made for 3 layers, and the model has 2"),
        (normal_codebooks("cq2", LAYERS, 3, DIM), ValueError, "codebooks: got 3 KV heads, supported: 2"),
        (normal_codebooks("cq2", LAYERS, HEADS, 128), ValueError, "codebooks: got head_dim 128, supported: 64"),
    ):
        cache = LowBitCache("cq2", codebooks=wrong)
        with pytest.raises(error, match=words):
            read(model, cache, ids(10))
        assert cache.get_seq_length() == 0 and all(layer.kv is None for layer in cache.layers)


def test_what_moves_sequences_is_refused_by_name(model):
    cache = made()
    read(model, cache, ids(10))
    for call, name in ((lambda: cache.batch_select_indices(torch.tensor([0])), "batch_select_indices"),
                       (lambda: cache.reorder_cache(torch.tensor([0])), "reorder_cache"),
                       (lambda: cache.batch_repeat_interleave(2), "batch_repeat_interleave")):
        with pytest.raises(NotImplementedError, match=name):
            call()


def test_unknown_positions_beside_padding_are_refused(model, monkeypatch):
    """A model that tells its attention function no positions: only rows without padding are certain."""
    from lowbit_attn.integrations import layer

    unknown = property(lambda self: None, lambda self, x: None)
    monkeypatch.setattr(layer.LowBitLayer, "position_ids", unknown, raising=False)
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[1, :5] = 0
    with pytest.raises(NotImplementedError, match="position_ids: this model does not give them"):
        read(model, made("cq2", "pre"), ids(50, 2), mask=mask, position_ids=from_mask(mask))
    read(model, made("cq2", "pre"), ids(50, 2))
    read(model, made("cq2", "post"), ids(50, 2), mask=mask, position_ids=from_mask(mask))
