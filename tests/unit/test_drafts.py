"""Drafts of a layer: read as single steps are, and taken back over packed blocks without a trace."""

import pytest
import torch

pytest.importorskip("transformers")

from tiny_models import build, tokens  # noqa: E402
from transformers import GenerationMixin  # noqa: E402

from lowbit_attn.integrations import hf  # noqa: E402
from lowbit_attn.integrations.drafts import Recording  # noqa: E402
from lowbit_attn.reference import Attention  # noqa: E402

HEADS, HEADS_KV, DIM = 4, 2, 64
DRAFTS = 12


def steps_of(count: int, seed: int):
    torch.manual_seed(seed)
    return (*torch.randn(2, 2, HEADS_KV, count, DIM), torch.randn(2, HEADS, count, DIM))


def attend(layer, step, options, drafted: int = 0) -> torch.Tensor:
    k, v, query = step
    handle = layer.update(k, v)[0]
    layer.drafted = drafted
    return layer.attend(handle, query, options)


@pytest.mark.parametrize("accepted", (0, 1, 5, DRAFTS))
@pytest.mark.parametrize("start", (3, 117, 127, 128, 140, 150))
@pytest.mark.parametrize("format, options, asked", [
    ("k4v4", {}, {}), ("k4v4", dict(sinks=4, max_q_len=5), {}), ("kitty", {}, {}), ("kitty-weighted", {}, {}),
    ("k4v4", dict(window=30, keep_sinks=True, sinks=3), {}), ("k4v4", {}, dict(window=40)),
    ("k4v4", dict(sliding="lowbit"), dict(window=40)), ("k4v2-boost", dict(max_q_len=2), {}),
    ("k4tv4", dict(rotate_keys=True), {}), ("k4v4", dict(static=True, max_seqlen=200), {})], ids=str)
def test_drafts_are_read_as_single_steps_and_leave_no_trace(format, options, asked, start, accepted):
    drafted, plain = (hf.LowBitCache(format, **options).layer_class_to_replicate() for _ in range(2))
    asked, prompt, drafts, more = Attention(**asked), steps_of(start, 1), steps_of(DRAFTS, 2), steps_of(2, 3)
    got, want = [attend(drafted, prompt, asked)], [attend(plain, prompt, asked)]
    got.append(attend(drafted, drafts, asked, DRAFTS)[:, :accepted])
    drafted.crop(accepted - DRAFTS)
    want += [attend(plain, [x[:, :, i : i + 1] for x in drafts], asked) for i in range(accepted)]
    for i in range(2):
        one = [x[:, :, i : i + 1] for x in more]
        got.append(attend(drafted, one, asked))
        want.append(attend(plain, one, asked))
    # a part reads its own keys as they came, a single step rotated and rounded again
    close = 1e-3 if options.get("rotate_keys") else 1e-4
    torch.testing.assert_close(torch.cat(got, 1), torch.cat(want, 1), rtol=close, atol=close)
    assert int(drafted.get_seq_length()) == int(plain.get_seq_length()) == start + accepted + 2
    if plain.tail is not None:
        size = min(x.tail[0].shape[2] for x in (drafted, plain))
        pairs = [(a[:, :, -size:], b[:, :, -size:]) for a, b in zip(drafted.tail, plain.tail)]
    else:
        pairs = [*zip(drafted.kv.gather(1), plain.kv.gather(1)), *zip(drafted.kv.counters(), plain.kv.counters())]
        drafted.kv.book.check()
    for a, b in pairs:
        assert torch.equal(a, b)


def test_drafts_are_taken_back_in_several_crops():
    layer = hf.LowBitCache("k4v4").layer_class_to_replicate()
    attend(layer, steps_of(120, 1), Attention())
    before = [x.clone() for x in layer.kv.gather(0)]
    attend(layer, steps_of(DRAFTS, 2), Attention(), DRAFTS)
    for tokens_to_remove in (-2, torch.tensor(-4), -6):  # a tensor from older transformers
        layer.crop(tokens_to_remove)
    assert layer.length == 120 and isinstance(layer.length, int) and all(map(torch.equal, layer.kv.gather(0), before))
    with pytest.raises(NotImplementedError, match="crop: got -1 with max_q_len = 1"):
        layer.crop(-1)


def test_which_tokens_are_drafts():
    recording = Recording()
    with recording.of_prompt(50):
        assert recording.drafts(0, 60) == 0  # nothing is taken back before transformers says so
    with recording.of_prompt(50):
        recording.is_on = True
        assert recording.drafts(0, 57) == 7 and recording.drafts(50, 5) == 5
    assert recording.drafts(50, 5) == 0 and not recording.is_on
    with recording.of_prompt(50):
        recording.is_on = True
        assert recording.drafts(40, 14) == 4  # the prompt's tokens that the cache holds are not brought again
    recording.is_on = True
    assert recording.drafts(0, 30) == 0 and recording.drafts(30, 3) == 3


@pytest.fixture(scope="module")
def model():
    model = build("llama")
    model.set_attn_implementation(hf.NAME)
    return model


def generate(model, cache, batch: int = 1, **options):
    ids = tokens(20, batch).repeat(1, 5)
    return model.generate(ids, attention_mask=torch.ones_like(ids), **{hf.CACHE_ARGUMENT: cache}, do_sample=False,
                          max_new_tokens=12, min_new_tokens=12, **options)


@pytest.mark.parametrize("format, options", [("lean", {}), ("k4v2-boost", {}), ("cq2", dict(codebooks="prompt"))])
def test_formats_that_keep_drafts_out_of_pages_ask_for_room(model, format, options):
    cache = hf.LowBitCache(format, **options)
    with pytest.raises(NotImplementedError, match="max_q_len: got 1 for assisted generation with"):
        generate(model, cache, prompt_lookup_num_tokens=3)
    assert not cache.layers


def test_levels_refuse_more_drafts_than_their_room_before_they_store_any(model):
    cache = hf.LowBitCache("lean", max_q_len=4)
    with pytest.raises(NotImplementedError, match="max_q_len: got 4 and 9 drafts in one step"):
        generate(model, cache, prompt_lookup_num_tokens=9)
    assert not cache.layers
    assert generate(model, hf.LowBitCache("lean", max_q_len=4), prompt_lookup_num_tokens=3).shape[1] == 112


def test_transformers_limits_are_its_own(model):
    with pytest.raises(ValueError, match="batch_size = 1"):
        generate(model, hf.LowBitCache("k4v4"), batch=2, prompt_lookup_num_tokens=3)


def test_transformers_has_the_method_that_says_where_a_prompt_ends():
    assert GenerationMixin._assisted_decoding.__wrapped__


def test_a_reset_ends_what_generation_began(model):
    cache = hf.LowBitCache("k4v4")
    cache.activate_past_recording()
    with torch.no_grad():
        for part in tokens(140).split((120, 20), 1):
            model(part, **{hf.CACHE_ARGUMENT: cache})
    assert cache.is_croppable
    cache.crop(-15)
    assert cache.get_seq_length() == 125
    cache.reset()
    with torch.no_grad():
        model(tokens(130), **{hf.CACHE_ARGUMENT: cache})
    assert not cache.is_croppable
