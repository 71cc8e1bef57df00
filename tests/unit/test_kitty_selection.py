"""Kitty: which channels are boosted, by their own scores and by those weighted by queries."""

import numpy as np
import pytest
import torch

from lowbit_attn import FORMATS, KVCache, decode, kernels, layout
from lowbit_attn.formats.kitty import Boosted, magnitude, variance, weighted
from lowbit_attn.integrations.growth import grown
from lowbit_attn.testing import assert_same_bytes
from unit.boosted import INF, NAN, F, chosen, element, emulated_masks, formats, keys, largest


@formats
def test_the_boosted_set_is_that_of_the_scores(name, head_dim):
    side, k = FORMATS[name].k, keys(head_dim, 3)
    scores = {"magnitude": k.double().abs().mean(1), "variance": k.double().var(1)}.get(side.selection)
    channels = side.boosted_channels(k).tolist()
    for page in range(3):  # a random set is the same in every page, now and for ever
        assert channels[page] == (channels[0] if scores is None else largest(scores[page], side.boost(head_dim)))
    if (side.selection, head_dim) == ("random", 128):
        assert channels[0] == [1, 12, 13, 15, 22, 23, 38, 42, 66, 71, 78, 85, 91, 98, 106, 125]


def test_selections_differ_where_they_should():
    """A channel far from zero without spread has the largest magnitude; one around zero with spread, the variance."""
    k = torch.randn(2, 128, 64) * 0.1
    k[0, :, 8:16] += 50
    k[:, :, 40:48] *= 30
    k[1, :, 20:28] += 50  # each page has its own
    assert chosen(k, channels=8) == [[*range(8, 16)], [*range(20, 28)]]
    assert chosen(k, channels=8, selection="variance") == [[*range(40, 48)]] * 2


def test_equal_scores_take_the_lower_channel():
    k = torch.ones(1, 128, 64)
    assert chosen(k, channels=16) == [[*range(16)]]
    k[..., 20:40] = -2  # 20 equal ones for 16 places
    assert chosen(k, channels=16) == [[*range(20, 36)]]
    k[..., 63] = 3
    assert chosen(k, channels=16) == [[*range(20, 35), 63]]
    assert chosen(k, channels=0) == [[]]


# ---- channels weighted by queries


def test_query_weights_choose_what_matters_to_the_logits():
    """A large channel that no query reads loses to a small one that they read; equal scores: the lower channel."""
    k, weights = torch.ones(2, 128, 64), torch.ones(2, 64)
    k[..., 8:16], weights[0, 8:16], weights[1, 8:24] = 10, 0.05, 2
    side = Boosted(channels=8, selection="weighted")
    assert side.boosted_channels(k, weights).tolist() == [[*range(8)], [*range(8, 16)]]
    assert chosen(k, channels=8) == [[*range(8, 16)]] * 2


@pytest.mark.parametrize("name", ("kitty-weighted", "kitty-pro-weighted-bf16"))
def test_weighted_scores_are_one_product_of_the_magnitude(name):
    side, k, weights = FORMATS[name].k, keys(128, 3), torch.rand(3, 128) * 10
    scores = magnitude(k.transpose(1, 2)) * weights
    channels = side.boosted_channels(k, weights)
    assert channels.tolist() == [largest(row, side.boost(128)) for row in scores]
    assert not torch.equal(channels, FORMATS[name.replace("-weighted", "")].k.boosted_channels(k))
    planes = side.quantize(k, True, weights)
    assert torch.equal(planes["index"].long(), channels)
    for page in range(3):
        for channel in (int(channels[page, 0]), 77):
            value = element(side, planes, page, 100, channel, 128)
            assert value == F(side.dequantize(planes, 128)[page, 100, channel])


def test_equal_weights_choose_as_the_magnitude():
    k, v = keys(64), torch.randn(2, 128, 64)
    assert_same_bytes("records", FORMATS["kitty-weighted"].quantize(k, v, query_weights=torch.full((2, 64), 0.5)),
                      FORMATS["kitty"].quantize(k, v))


def test_a_cache_weighs_each_kv_head_by_its_own():
    """Pages are self-contained: weights that change later matter to later pages only."""
    tokens, weights = torch.randn(256, 2, 64).half(), torch.rand(2, 64)
    cache = KVCache("kitty-weighted", 4, 2, 64, sinks=0, query_weights=weights)
    cache.prefill(0, tokens[:128], tokens[:128])
    first = weights.clone()
    weights[:] = torch.rand(2, 64)
    cache.prefill(0, tokens[128:], tokens[128:])
    at = next(p.offset for p in cache.record.k_planes if p.name == "index")
    for page, used in enumerate((first, weights)):
        k = tokens[128 * page : 128 * page + 128].transpose(0, 1).float()
        want = cache.format.k.boosted_channels(k, used)
        assert cache.pool[cache.table[0, page], :, at : at + 8].tolist() == want.tolist()
    grown_cache = grown(cache, 2000)
    assert grown_cache.query_weights is weights and torch.equal(grown_cache.gather(0)[0], cache.gather(0)[0])


def test_decode_over_weighted_pages():
    k, v = torch.randn(2, 500, 2, 64).half()
    cache = KVCache("kitty-pro-weighted", 4, 2, 64, sinks=32, query_weights=torch.rand(2, 64))
    q = torch.randn(1, 1, 4, 64)
    cache.prefill(0, k, v)
    gathered_k, gathered_v = (x.repeat_interleave(2, 0) for x in cache.gather(0))
    logits = torch.einsum("hd,htd->ht", q[0, 0].half().float(), gathered_k) / 8
    want = torch.einsum("ht,htd->hd", logits.softmax(-1), gathered_v)
    assert torch.allclose(decode(q.half(), cache)[0][0, 0].float(), want, atol=2e-3)


@pytest.mark.parametrize("name, weights, error, words", [
    ("kitty-weighted", None, ValueError, r"query_weights: got none for format kitty-weighted, supported: fp32 \[2, 64"),
    ("kitty", torch.ones(2, 64), ValueError, "query_weights: got some for format kitty"),
    ("k4v4", torch.ones(2, 64), ValueError, "query_weights: got some for format k4v4"),
    ("kitty-weighted", torch.ones(64), ValueError, r"query_weights: got shape \[64\], supported: \[2, 64\]"),
    ("kitty-weighted", torch.ones(2, 64).half(), TypeError, "query_weights: got torch.float16"),
    ("kitty-weighted", torch.full((2, 64), NAN), ValueError, "negative or non-finite"),
    ("kitty-weighted", torch.full((2, 64), -1.0), ValueError, "negative or non-finite"),
    ("kitty-weighted", torch.ones(1, 64).expand(2, 64), ValueError, r"got strides \(0, 1\), supported: contiguous"),
])
def test_query_weights_are_checked(name, weights, error, words):
    with pytest.raises(error, match=words):
        KVCache(name, 1, 2, 64, query_weights=weights)


def test_weights_and_selections_go_together():
    with pytest.raises(ValueError, match="query_weights: got None for selection 'weighted'"):
        FORMATS["kitty-weighted"].k.quantize(keys(64), True)
    with pytest.raises(ValueError, match="query_weights: got .2, 64. for selection 'variance'"):
        FORMATS["kitty-variance"].k.boosted_channels(keys(64), torch.ones(2, 64))
    assert not kernels.quantize_missing(FORMATS["kitty-weighted"], 128, torch.float16)


@pytest.mark.parametrize("name, head_dim", [("kitty-weighted", 64), ("kitty-weighted", 128),
                                            ("kitty-pro-weighted-bf16", 96), ("kitty-pro-weighted", 256)])
def test_quantize_kernel_marks_the_channels_of_weighted_scores(name, head_dim):
    """Lane by lane: a lane's rows, its lanes at the distances of a column, then one product."""
    pytest.importorskip("tilelang", reason="the kernel's geometry lives in a file that imports tilelang")
    from lowbit_attn.device import groups
    from lowbit_attn.device.quantize_boost import BoostMatrix

    side, k, weights = FORMATS[name].k, keys(head_dim, 4), torch.rand(4, head_dim) * 10
    m = BoostMatrix(side.spec(head_dim))
    weights[:, 3:9], k[1, 5, :20], k[2, 9, 7], k[3] = 0, INF, NAN, k[3] * 0 + 1
    weights[3, 30:] = 1.5  # equal scores
    weights[0, 40] = 1e-42  # products that are subnormal numbers
    lanes = np.arange(layout.LANES) // 4  # of all lanes of a t, row g of each eight
    total = groups.tree_sum([np.abs(k.numpy()[:, 8 * i + lanes]) for i in range(m.held)])
    for distance in groups.ROW_LANES.distances:
        total = total + total[:, np.arange(layout.LANES) ^ distance]
    scores, want = torch.from_numpy(total[:, 0]) * weights, weighted(k.transpose(1, 2), weights)
    scores, want = (torch.where(x.isnan(), INF, x) for x in (scores, want))
    assert_same_bytes("scores", scores, want)
    for page, boosted in enumerate(side.boosted_channels(k, weights).tolist()):
        masks = emulated_masks(m, scores[page])
        assert [16 * w + bit for w, x in enumerate(masks) for bit in range(16) if x >> bit & 1] == boosted


def halving_sum(values) -> np.float32:
    while len(values) > 1:
        values = values[: len(values) // 2] + values[len(values) // 2 :]
    return values[0]


def test_scores_add_by_halving():
    """Bit for bit the order of the group quantizer's sums, which kernels repeat."""
    columns = torch.randn(1, 16, 128) * 10.0 ** torch.randint(-4, 5, (1, 16, 128))
    for d, x in enumerate(columns[0].numpy()):
        assert F(magnitude(columns)[0, d]) == halving_sum(np.abs(x))
        assert F(variance(columns)[0, d]) == halving_sum((x - halving_sum(x) / F(128)) ** 2)


def test_boosted_channels_have_smaller_errors():
    """4 bits instead of 2 cut a channel's squared error to a tenth or so; the largest channels matter most."""
    k, errors = keys(128), {}
    for name in ("kitty-b0", "kitty-random", "kitty", "kitty-pro"):
        side = FORMATS[name].k
        errors[name] = ((side.dequantize(side.quantize(k, True), 128) - k) ** 2).mean(1)  # [page, channel]
        boosted = side.boosted_channels(k)
        assert (errors[name].gather(1, boosted) < 0.15 * errors["kitty-b0"].gather(1, boosted)).all()
    whole = [float(error.mean()) for error in errors.values()]
    assert whole == sorted(whole, reverse=True)
