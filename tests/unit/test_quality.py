"""quality.py: its arithmetic, and scores of a tiny model that can be had another way."""

import math

import pytest
import torch

transformers = pytest.importorskip("transformers")

from lowbit_attn import quality  # noqa: E402
from lowbit_attn.integrations.hf import CACHE_ARGUMENT  # noqa: E402


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                                      num_key_value_heads=1, head_dim=64, vocab_size=50, max_position_embeddings=512,
                                      initializer_range=0.1)
    return transformers.LlamaForCausalLM(config).eval()


def test_arithmetic():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
    nll = quality.negative_log_likelihood(logits, torch.tensor([0, 1]))
    assert nll == pytest.approx(-math.log(0.5) - math.log(0.1), rel=1e-6)
    assert quality.perplexity(nll, 2) == pytest.approx(math.sqrt(20), rel=1e-6)
    assert quality.agreement(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 0, 4])) == 0.75
    a, b = torch.log(torch.tensor([[0.5, 0.5]])), torch.log(torch.tensor([[0.9, 0.1]]))
    assert quality.kl_divergence(a, b) == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(5), rel=1e-5)


def test_spread_is_of_the_difference_to_the_baseline():
    """By the jackknife over chunks, which for equal chunks is the same standard error."""
    baseline, tokens = [100.0, 300.0, 200.0, 250.0], [50] * 4
    nll = [b + d for b, d in zip(baseline, (1.0, 2.0, 4.0, 3.0))]
    means = [sum(a - b for j, (a, b) in enumerate(zip(nll, baseline)) if j != i) / 150 for i in range(4)]
    middle = sum(means) / 4
    want = math.sqrt(3 / 4 * sum((m - middle) ** 2 for m in means))
    assert quality.spread(12.0, nll, baseline, tokens) == pytest.approx(12 * want)
    assert quality.spread(12.0, baseline, baseline, tokens) == 0 and quality.spread(12.0, [1.0], [2.0], [5]) is None
    same_a_token = [b + n * 0.1 for b, n in zip(baseline, (1, 2, 3, 4))]
    assert quality.spread(12.0, same_a_token, baseline, [1, 2, 3, 4]) == pytest.approx(0, abs=1e-9)


def test_ratio_error_is_that_of_the_mean_of_equal_chunks():
    sums, counts = [10.0, 30.0, 20.0], [10, 10, 10]
    assert quality.ratio_error(sums, counts) == pytest.approx(1 / math.sqrt(3))  # of 1, 3 and 2 a token
    assert quality.ratio_error([1.0], [10]) is None and quality.ratio_error([5.0, 10.0], [10, 20]) == 0


def test_chunks_predict_every_token_but_the_first():
    ids = torch.arange(300)[None]
    parts = list(quality.chunks(ids))
    assert [c.shape[1] for c, _ in parts] == [128, 128, 44]
    assert torch.cat([t for _, t in parts]).tolist() == list(range(1, 300))


@pytest.mark.parametrize("shape", [(1,), (2, 5), (1, 1), (1, 1, 4)])
def test_tokens_are_checked(shape):
    with pytest.raises(ValueError, match="tokens: got shape"):
        quality.check_tokens(torch.zeros(shape, dtype=torch.long))


def test_scores_are_those_of_whole_passes(tiny):
    """300 tokens; the 16-bit model in one pass and a 2-bit cache read by hand are what the sums must come to."""
    ids, counts = torch.randint(3, 50, (1, 300)), []
    options = dict(format="k2v2", sinks=16)
    before = tiny.config._attn_implementation
    scores = quality.compare(tiny, ids, {"a": None, "b": options, "c": dict(format="k8v8")}, counts.append)
    assert counts == [128, 128, 44] and tiny.config._attn_implementation == before
    with torch.no_grad():
        whole = tiny(ids, labels=ids)
    assert scores["a"].perplexity == pytest.approx(whole.loss.exp().item(), rel=1e-3)
    assert (scores["a"].kl, scores["a"].top1, scores["a"].bits_per_element) == (0, 1, 16)
    assert scores["a"].cosine == pytest.approx((1, 1), abs=1e-5) and scores["a"].cache_bytes == 300 * 2 * 2 * 64 * 2
    # by hand: logits and layer outputs of the 2-bit run against the one-pass run
    cache, logits = quality.new_cache(options), []
    quality.use_cache_kind(tiny, options)
    with torch.no_grad():
        for chunk, _ in quality.chunks(ids):
            logits.append(tiny(chunk, **{CACHE_ARGUMENT: cache}).logits[0])
    quality.use_cache_kind(tiny, None)
    logits = torch.cat(logits)
    kl = quality.kl_divergence(whole.logits[0], logits) / 300
    assert scores["b"].kl == pytest.approx(kl, rel=2e-2) and kl > 0
    sums = [quality.kl_divergence(whole.logits[0, i : i + 128], logits[i : i + 128]) for i in range(0, 300, 128)]
    assert scores["b"].kl_error == pytest.approx(quality.ratio_error(sums, [128, 128, 44]), rel=5e-2)
    assert scores["a"].kl_error == scores["a"].top1_error == 0 < scores["b"].top1_error
    assert scores["b"].top1 == pytest.approx(quality.agreement(logits.argmax(-1), whole.logits[0].argmax(-1)), abs=0.02)
    assert scores["b"].cache_bytes == cache.nbytes < scores["c"].cache_bytes < scores["a"].cache_bytes
    assert scores["a"].spread == 0 and scores["b"].spread > scores["c"].spread > 0
    assert scores["c"].kl < scores["b"].kl and scores["c"].top1 > scores["b"].top1
    assert all(b < c < 1 for b, c in zip(scores["b"].cosine, scores["c"].cosine)) and len(scores["b"].cosine) == 2
    alone = quality.evaluate(tiny, ids[0], options)
    assert (alone.kl, alone.perplexity) == (scores["b"].kl, scores["b"].perplexity)


def test_positions_and_scored_parts(tiny):
    """Read far from the start, the model itself says the same (its positions are relative); and halves make a whole."""
    ids, options = torch.randint(3, 50, (1, 384)), dict(format="k4v4", sinks=16)
    near, far = (quality.compare(tiny, ids, {"16": None, "k4v4": options}, first_position=p) for p in (0, 5000))
    assert far["16"].perplexity == pytest.approx(near["16"].perplexity, rel=1e-3)
    assert far["k4v4"].kl != near["k4v4"].kl and far["k4v4"].kl == pytest.approx(near["k4v4"].kl, rel=0.5)
    whole, end = (quality.compare(tiny, ids, {"k2": dict(format="k2v2")}, scored_from=n)["k2"] for n in (0, 128))
    assert whole.kl * 384 == pytest.approx(end.kl * 256, rel=0.02)  # the first chunk is read in 16 bit
    with pytest.raises(ValueError, match="scored_from: got 100, supported: multiples of 128 below the 383"):
        quality.compare(tiny, ids, {"16": None}, scored_from=100)
    with pytest.raises(ValueError, match="scored_from: got 384"):
        quality.compare(tiny, ids, {"16": None}, scored_from=384)
