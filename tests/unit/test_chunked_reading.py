"""evaluation/reading.py: prompts read in chunks, what they share read once, and what attended to packed pages."""

import pytest
import torch

pytest.importorskip("transformers")

from tiny_models import build, tokens  # noqa: E402

from lowbit_attn import quality  # noqa: E402
from lowbit_attn.evaluation.reading import Reader, Wanted, is_packed  # noqa: E402
from lowbit_attn.integrations.hf import CACHE_ARGUMENT  # noqa: E402

K1V1 = dict(format="k1v1", sinks=0)


@pytest.fixture(scope="module")
def network():
    return build("llama")


@pytest.mark.parametrize("chunk, packed", [(128, 4), (64, 4), (1000, 0)])
def test_chunks_attend_to_packed_pages_and_one_call_does_not(network, chunk, packed):
    """The last 4 logits of 300 tokens, beside the 16-bit model's of one pass."""
    ids = tokens(300)[0].tolist()
    reader = Reader(network, K1V1, chunk)
    logits, cache = reader.read(Wanted(ids, 4))
    network.set_attn_implementation("sdpa")
    with torch.no_grad():
        want = network(torch.tensor([ids])).logits[0, -4:]
    assert logits.shape == want.shape and cache.get_seq_length() == 300
    error = ((logits - want).norm() / want.norm()).item()
    assert (error > 0.1) if packed else (error < 2e-3)
    assert (reader.attended.packed, reader.attended.tokens) == (packed, 4)
    assert reader.attended.share == packed / 4


def test_what_lists_share_is_read_once_and_changes_nothing(network):
    calls, ids = [], tokens(300)[0].tolist()
    reader = Reader(network, K1V1, 128)
    step = reader.step
    reader.step = lambda cache, ids, keep=1: (calls.append(len(ids)), step(cache, ids, keep))[1]
    wanted = [Wanted(ids + [3 + i], 2) for i in range(3)] + [Wanted(ids[50:])]
    found = [reader.read(one, following)[0] for one, following in zip(wanted, [*wanted[1:], None])]
    assert calls == [128, 128, 45, 45, 45, 128, 122]
    for one, got in zip(wanted, found):
        assert torch.equal(got, Reader(network, K1V1, 128).read(one)[0])


def test_shared_chunks_end_before_what_is_scored():
    ids = list(range(300))
    assert Wanted(ids, 1).whole_chunks(128) == 256 and Wanted(ids, 50).whole_chunks(128) == 128
    assert Wanted(ids).whole_chunks(128, Wanted(ids[:200] + [0] * 100)) == 128
    assert Wanted(ids).whole_chunks(128, Wanted(ids[:256])) == 128 == Wanted(ids[:256]).whole_chunks(128, Wanted(ids))
    assert Wanted(ids).whole_chunks(128, Wanted([7])) == 0


def test_levels_count_what_has_left_the_stage(network):
    cache = quality.new_cache(dict(format="lean", sinks=0))
    quality.use_cache_kind(network, dict(format="lean"))
    seen = []
    with torch.no_grad():
        for _ in range(4):
            network(tokens(128), **{CACHE_ARGUMENT: cache})
            seen.append(is_packed(cache))
    assert seen[0] is False and seen[-1] is True and not is_packed(quality.new_cache(None))
