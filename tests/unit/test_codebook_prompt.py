"""codebooks="prompt": each row of a batch learns its own from its first tokens, and what that cannot serve."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from lowbit_attn import FORMATS  # noqa: E402
from lowbit_attn.codebooks.calibrate import recipe_of  # noqa: E402
from lowbit_attn.codebooks.capture import captured  # noqa: E402
from lowbit_attn.codebooks.prompt import attention_squares, frequencies, learn_prompt, token_weights  # noqa: E402
from lowbit_attn.integrations import prompt as prompt_layer  # noqa: E402
from lowbit_attn.integrations.hf import CACHE_ARGUMENT, LowBitCache  # noqa: E402

SMALL = dict(hidden_size=96, intermediate_size=64, num_attention_heads=6, num_key_value_heads=2, vocab_size=97,
             max_position_embeddings=4096, num_hidden_layers=2, head_dim=64, bos_token_id=0, eos_token_id=1,
             pad_token_id=2, initializer_range=0.15)


def build(family: str = "Llama", **options):
    torch.manual_seed(1)
    cls = getattr(transformers, f"{family}ForCausalLM")
    return cls(cls.config_class(**(SMALL | options))).eval()


@pytest.fixture(scope="module")
def model():
    return build()


def tokens(count: int, batch: int = 1, seed: int = 5) -> torch.Tensor:
    return torch.randint(3, 97, (batch, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def read(model, cache, ids, sizes, mask=None):
    model.set_attn_implementation("lowbit")
    out, start = [], cache.get_seq_length()
    for size in sizes:
        seen = None if mask is None else mask[:, : start + size]
        out.append(model(ids[:, start : start + size], attention_mask=seen, **{CACHE_ARGUMENT: cache}).logits)
        start += size
    return torch.cat(out, 1)


def are_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether entries are those of the other in another order, as rounding may give a vector to another entry."""
    return bool((torch.cdist(a, b).amin(-1) < 3e-2).double().mean() > 0.98)


@pytest.fixture(scope="module")
def filled(model):
    """A cache of 1,100 tokens, and two steps after."""
    cache = LowBitCache("cq2", codebooks="prompt")
    read(model, cache, tokens(1103), (1101, 1, 1))
    return cache


def test_a_row_has_the_codebooks_of_its_own_text(model, monkeypatch):
    """They are those of learn_prompt on what its layer stored and asked, all tokens counted alike."""
    monkeypatch.setattr(prompt_layer, "token_weights", lambda squares, seen: torch.ones_like(squares))
    cache = LowBitCache("cq2", codebooks="prompt-post")
    read(model, cache, tokens(1056), (1056,))
    one, (row,) = captured(model, tokens(1056)[0], sinks=32).layers[0], cache.layers[0].rows
    sinks = torch.zeros(2, 32, 64, dtype=torch.float16)
    keys, values = (torch.cat((sinks, x.transpose(0, 1).flatten(1, 2)), 1) for x in (one.keys, one.values))
    want = learn_prompt(keys, values, one.q_moment, one.inv_freq, 4096, 32, recipe_of(FORMATS["cq2"]), "cq2")
    got = row.kv.attached.layer
    assert torch.allclose(got.k_weights, want.k_weights, rtol=1e-3)
    assert (got.k_order == want.k_order).double().mean() > 0.9
    assert torch.allclose(got.v_entries.float(), want.v_entries.float(), atol=1e-2)


def test_all_tokens_after_the_sinks_are_learned_from():
    """Those that fill no page too: an entry far from all others is theirs."""
    generator = torch.Generator().manual_seed(2)
    keys, values = (torch.randn(1, 1030, 16, generator=generator) for _ in range(2))
    options = torch.eye(16)[None], torch.zeros(8), 4096, 32, recipe_of(FORMATS["cq2"]), "cq2"
    values[0, 1029] = torch.tensor([0.1, 0.1, 0.1, 3.0]).repeat(4)
    assert (learn_prompt(keys, values, *options).v_entries.float()[..., 3] > 1.7).any(-1).all()
    sinks = values.clone()
    sinks[0, 1029], sinks[0, 31] = 1.0, values[0, 1029]
    sunk = learn_prompt(keys, sinks, *options).v_entries
    sinks[0, 31] = 7.0
    assert torch.equal(sunk, learn_prompt(keys, sinks, *options).v_entries)


def test_attention_is_that_of_every_fourth_query_whatever_the_steps():
    heads, group, pad, count = 2, 3, 5, 302
    q, k = torch.randn(heads * group, count, 16), torch.randn(heads, count, 16)
    scores = torch.einsum("hgqd,hkd->hgqk", q.view(heads, group, count, 16), k) * 0.3
    scores[..., torch.ones(count, count, dtype=torch.bool).triu(1)] = -torch.inf
    scores[..., :pad] = -torch.inf
    want = scores[:, :, pad::4].softmax(-1).square().sum((1, 2))
    squares, seen = attention_squares(q, k, pad, 0.3)
    assert torch.allclose(squares, want, atol=1e-5) and int(seen[-1]) == 1 and int(seen[pad]) == -(-(count - pad) // 4)
    first, _ = attention_squares(q[:, :98], k[:, :98], pad, 0.3)
    rest, _ = attention_squares(q[:, 98:], k, pad, 0.3)
    rest[:, :98] += first
    assert torch.allclose(rest, want, atol=1e-5)
    weights = token_weights(squares[:, pad:], seen[pad:])
    assert weights.shape == (heads, count - pad) and weights.mean().item() == pytest.approx(1.05) and weights.min() > 0
    assert token_weights(torch.zeros(1, 4), torch.ones(4, dtype=torch.int64)).tolist() == [[pytest.approx(0.05)] * 4]


def test_errors_of_tokens_that_count_more_are_smaller():
    generator = torch.Generator().manual_seed(2)
    keys, values = (torch.randn(1, 1056, 16, generator=generator) for _ in range(2))
    weights = torch.where(torch.arange(1056) % 8 == 0, 1.0, 0.01)[None]
    options = torch.eye(16)[None], torch.zeros(8), 4096, 32, recipe_of(FORMATS["cq2"], "pre"), "cq2"
    alike = learn_prompt(keys, values, *options)
    assert torch.equal(learn_prompt(keys, values, *options, weights=torch.ones(1, 1056)).v_entries, alike.v_entries)
    weighted = learn_prompt(keys, values, *options, weights=weights)
    for side, name, x in ((FORMATS["cq2"].v, "v_entries", values), (FORMATS["cq2"].k, "k_entries", keys)):
        errors = []
        for books in (alike, weighted):
            page, entries = x[:, 32:1056].unflatten(1, (8, 128))[0], getattr(books, name)
            if name == "k_entries":
                page = (page * books.k_weights[0])[..., books.k_order[0].long()]
            back = side.dequantize(side.quantize(page, False, entries), 16, entries)
            errors.append((back - page)[:, ::8].square().mean().item())
        assert errors[1] < 0.6 * errors[0], (name, errors)


def test_memory_is_that_of_the_row(filled):
    for layer in filled.layers:
        row = layer.rows[0]
        assert int(row.kv.n_qk[0]) == 1024 and layer.held is None and layer.nbytes == row.kv.nbytes
        assert row.kv.nbytes > row.books.nbytes


def test_pages_give_back_the_prompt(model, filled):
    """Within the errors of 2 bits, and the codebooks of another text are worse."""
    other = LowBitCache("cq2", codebooks="prompt")
    read(model, other, tokens(1101, seed=6), (1101,))
    ids = tokens(1056)[0]
    pages, errors = captured(model, ids, sinks=32).layers[1].values.float(), []
    for cache in (filled, other):
        entries, side = cache.layers[1].rows[0].kv.attached.layer.v_entries, FORMATS["cq2"].v
        back = side.dequantize(side.quantize(pages.flatten(0, 1), False, entries), 64, entries).view(pages.shape)
        errors.append(((back - pages).square().sum() / pages.square().sum()).item())
    assert errors[0] < 0.9 * errors[1] and errors[0] < 0.3, errors


def test_tokens_before_are_in_16_bit_and_steps_of_any_size_are_one(model):
    ids = tokens(1024)
    whole, parts = (LowBitCache("cq2", codebooks="prompt") for _ in range(2))
    one, several = read(model, whole, ids, (1024,)), read(model, parts, ids, (500, 300, 224))
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        plain = model(ids).logits
    assert torch.allclose(one, plain, atol=5e-3 * plain.abs().amax())
    assert torch.allclose(several, plain, atol=5e-3 * plain.abs().amax())
    a, b = (cache.layers[0].rows[0].books.v_entries.float() for cache in (whole, parts))
    assert are_alike(a, b)


def test_rows_are_apart_and_padding_is_not_learned(model):
    """A padded row of a batch is the row alone."""
    ids, mask = tokens(1150, 2), torch.ones(2, 1150, dtype=torch.long)
    mask[1, :100] = 0
    both, alone = (LowBitCache("cq4", codebooks="prompt") for _ in range(2))
    got = read(model, both, ids, (1149, 1), mask)
    want = read(model, alone, ids[1:, 100:], (1049, 1))
    for together, single in zip(both.layers, alone.layers, strict=True):
        first, second = together.rows
        assert not torch.equal(first.books.v_entries, second.books.v_entries)
        assert second.length == single.rows[0].length == 1050
    # values of the first layer have no position and no past, so rounding apart they are the same
    mine, its = (cache.layers[0].rows[row].books.v_entries.float() for cache, row in ((both, 1), (alone, 0)))
    assert are_alike(mine, its)
    errors = [((got[row, -1] - want[0, -1]).norm() / want[0, -1].norm()).item() for row in (0, 1)]
    assert errors[1] < 0.3 < 0.8 < errors[0], errors


def test_keys_before_rope_are_turned_back_from_where_they_stand(model):
    """A padded row, told its positions, is the row alone; and far from the start, the row near it."""
    ids, mask = tokens(1130, 2), torch.ones(2, 1130, dtype=torch.long)
    mask[1, :70] = 0
    both, alone, far = (LowBitCache("cq4", codebooks="prompt") for _ in range(3))
    got = read(model, both, ids, (1129, 1), mask)[1, -1]
    want = read(model, alone, ids[1:, 70:], (1059, 1))[0, -1]
    model.set_attn_implementation("lowbit")
    with torch.no_grad():
        for part in (slice(0, 1059), slice(1059, 1060)):
            place = torch.arange(2000, 3060)[None, part]
            there = model(ids[1:, 70:][:, part], position_ids=place, **{CACHE_ARGUMENT: far}).logits[0, -1]
    assert [int(x.layers[0].rows[-1].kv.first_positions[0]) for x in (both, alone, far)] == [70, 0, 2000]
    for other in (got, there):
        assert (other - want).norm() < 0.2 * want.norm()
    assert far.layers[1].rows[0].books.rope == "pre"


@pytest.mark.parametrize("codebooks, format, rope", [
    ("prompt", "cq2", "pre"), ("prompt-post", "cq2", "post"), ("prompt", "k4vcq2", "post")])
def test_keys_are_learned_before_their_rotary_embedding_unless_said_otherwise(model, codebooks, format, rope):
    """Where keys have no codebooks there is nothing to turn."""
    cache = LowBitCache(format, codebooks=codebooks)
    read(model, cache, tokens(1030), (1029, 1))
    for layer in cache.layers:
        books = layer.rows[0].books
        assert books.rope == rope and (books.rope_inv_freq is not None) == (rope == "pre")


def test_a_rotary_embedding_that_cannot_be_turned_back_is_refused_with_what_serves_it():
    yarn = build(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0,
                                      original_max_position_embeddings=512))
    words = "of type yarn, supported for codebooks of keys before it: .*; after it .'post', 'prompt-post'.: .*yarn"
    with pytest.raises(NotImplementedError, match=words):
        read(yarn, LowBitCache("cq2", codebooks="prompt"), tokens(1030), (1030,))
    cache = LowBitCache("cq2", codebooks="prompt-post")
    read(yarn, cache, tokens(1030), (1029, 1))
    assert cache.layers[0].rows


def test_generate(model):
    model.set_attn_implementation("lowbit")
    ids = tokens(1030)
    out = model.generate(ids, **{CACHE_ARGUMENT: LowBitCache("kcq4vcq2", codebooks="prompt")}, max_new_tokens=3,
                         min_new_tokens=3, do_sample=False)
    assert out.shape == (1, 1033)


def test_short_prompts_are_refused_at_the_first_step(model):
    cache = LowBitCache("cq2", codebooks="prompt")
    read(model, cache, tokens(1030), (1000,))
    with pytest.raises(NotImplementedError, match="'prompt' with a prompt of 1000 tokens, supported: 1024 or more"):
        read(model, cache, tokens(1030), (1,))
    assert cache.get_seq_length() == 1000
    read(model, cache, tokens(1030), (24, 1))
    assert cache.layers[0].rows


def test_what_is_refused():
    with pytest.raises(NotImplementedError, match="static: got True with codebooks='prompt'"):
        LowBitCache("cq2", codebooks="prompt", static=True, max_seqlen=2048)
    with pytest.raises(ValueError, match="got 'prompt' for format k4v4, supported: None"):
        LowBitCache("k4v4", codebooks="prompt")


def test_sequences_share_nothing(filled):
    for call in (lambda: filled.batch_repeat_interleave(2), lambda: filled.reorder_cache(torch.tensor([0]))):
        with pytest.raises(NotImplementedError, match="each sequence has codebooks of its own"):
            call()


def test_copies_crop_and_reset(model, filled):
    cache = copy.deepcopy(filled)
    assert cache.get_seq_length() == 1103 and not torch.equal(
        cache.layers[0].rows[0].kv.pool, torch.zeros_like(cache.layers[0].rows[0].kv.pool))
    cache.reset()
    assert cache.get_seq_length() == 0 and not cache.layers[0].rows and filled.layers[0].rows
    read(model, cache, tokens(1101), (1101,))
    assert torch.equal(cache.layers[1].rows[0].books.v_entries, filled.layers[1].rows[0].books.v_entries)
    drafts = LowBitCache("cq2", codebooks="prompt", max_q_len=4)
    read(model, drafts, tokens(1103), (600,))
    with pytest.raises(NotImplementedError, match="before every row has 1,024 tokens"):
        drafts.crop(-1)
    read(model, drafts, tokens(1103), (500, 3))
    drafts.crop(-2)
    assert drafts.get_seq_length() == 1101
    assert [row.length for layer in drafts.layers for row in layer.rows] == [1101, 1101]


def test_nan_in_the_prompt_is_refused(model):
    broken = copy.deepcopy(model)
    broken.model.layers[1].self_attn.v_proj.weight.data[0] = float("nan")
    with pytest.raises(ValueError, match="the prompt's keys or values have NaN or infinities"):
        read(broken, LowBitCache("cq2", codebooks="prompt"), tokens(1024), (1024,))


def test_sliding_layers_keep_their_window():
    mixed = build("Gemma3", sliding_window=48, layer_types=["sliding_attention", "full_attention"], head_dim=32)
    cache = LowBitCache("cq2", codebooks="prompt")
    read(mixed, cache, tokens(1026), (1024, 1, 1))
    assert cache.layers[0].tail is not None and not cache.layers[0].rows and len(cache.layers[1].rows) == 1


@pytest.mark.parametrize("family, options", [
    ("Llama", {}), ("Qwen2", dict(num_attention_heads=2, num_key_value_heads=1, head_dim=48)),
    ("SmolLM3", dict(num_hidden_layers=4, no_rope_layer_interval=4)),
    ("Gemma3", dict(head_dim=32, sliding_window=48, layer_types=["sliding_attention", "full_attention"])),
    ("Llama", dict(rope_parameters=dict(rope_type="llama3", rope_theta=1e4, factor=2.0, low_freq_factor=1.0,
                                        high_freq_factor=4.0, original_max_position_embeddings=512)))])
def test_frequencies_are_those_that_keys_were_seen_to_turn_by(family, options):
    network = build(family, **options)
    seen = captured(network, tokens(160)[0]).layers
    for layer, want in zip(network.model.layers, seen, strict=True):
        assert torch.allclose(frequencies(layer.self_attn, want.keys.shape[-1]), want.inv_freq)


@pytest.mark.parametrize("family", ("Glm", "Cohere"))
def test_other_rotations_are_refused(family):
    network = build(family)
    with pytest.raises(NotImplementedError, match="turns a part of each head or neighbouring channels"):
        read(network, LowBitCache("cq2", codebooks="prompt"), tokens(40), (40,))
