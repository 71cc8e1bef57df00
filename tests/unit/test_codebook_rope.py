"""What kernels read of codebooks of keys before their rotary embedding, and which codebooks those are."""

import math
from dataclasses import replace

import pytest
import torch

from lowbit_attn import FORMATS, KVCache, kernels
from lowbit_attn.cache import rope
from lowbit_attn.cache.attached import Attached
from lowbit_attn.codebooks.calibrate import recipe_of
from lowbit_attn.codebooks.capture import LayerSample, Sample
from lowbit_attn.codebooks.learn import balanced_order, learn_layers
from lowbit_attn.testing import normal_codebooks

HEADS, DIM, GROUPS = 2, 128, 32
BOOKS = normal_codebooks("cq2", 2, HEADS, DIM, "pre", k_shared=True)


@pytest.fixture(scope="module")
def attached():
    return Attached(BOOKS.layer(1), FORMATS["cq2"], HEADS, DIM, "cpu")


def halves(attached) -> torch.Tensor:
    """(heads, row, 128) fp16 of K's table."""
    return attached.planes[0].view(torch.int32).view(torch.float16)


def test_rows_have_4_copies_of_4_entries_divided_by_4(attached):
    copies = halves(attached)[..., :64].unflatten(-1, (4, 4, 4)).float()
    want = (attached.layer.k_entries[:, :4].float() / 4).half().float().transpose(1, 2)
    assert torch.equal(copies, want[:, :, None].expand_as(copies)) and not torch.equal(want[:, :, 0], want[:, :, 1])


def test_angles_turn_keys_as_the_cache_does(attached):
    """For every token of a page; a lane's 16 bytes are cosines of 4 channels, then their sines."""
    turns = halves(attached)[..., 64:].reshape(HEADS, 4, 128, 4, 2, 4).float()  # i, token, t, cos or sin, channel
    turns = turns.permute(4, 0, 2, 1, 3, 5).flatten(3)  # cos or sin, head, token, channel of the first half
    k = torch.randn(1, HEADS, 128, DIM)
    first, second = k[0].chunk(2, -1)
    cos, sin = turns
    got = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    want = attached.turned(k, 0, back=False)[0]
    assert (got - want).abs().max() < 2e-3 * want.abs().max() and not torch.allclose(want, k[0], atol=0.1)


def test_frequencies_turn_a_query_to_a_page(attached):
    """They are parts of 2^32 of a turn, whose products with positions wrap around; R(-p) q . k is q . R(p) k."""
    part = attached.planes[2][:, 2].view(torch.int32).long()
    for position in (5, 4096 + 7, 131_000):
        angle = (part * position).remainder(1 << 32).double() * (2 * math.pi / 2**32)
        cos, sin = angle.cos()[:, :64], angle.sin()[:, :64]
        q, k = torch.randn(2, HEADS, DIM, dtype=torch.float64)
        first, second = q.chunk(2, -1)
        back = torch.cat((first * cos + second * sin, second * cos - first * sin), -1)
        turned = attached.turned(k.float()[None, :, None], position, back=False)[0, :, 0].double()
        assert ((back * k).sum(-1) - (q * turned).sum(-1)).abs().max() < 3e-3


def test_turns_add_up(attached):
    k = torch.randn(1, HEADS, 1, DIM)
    twice = attached.turned(attached.turned(k, 100_000, back=False), 31_000, back=False)
    assert (twice - attached.turned(k, 131_000, back=False)).abs().max() < 1e-5
    assert (attached.turned(twice, 131_000, back=True) - k).abs().max() < 1e-5


def test_which_codebooks_kernels_read():
    layer, groups = BOOKS.layer(0), normal_codebooks("cq2", 1, HEADS, DIM, "pre").layer(0)
    assert rope.missing(layer) == rope.missing(BOOKS) == rope.missing(normal_codebooks("cq4")) == []
    assert "half a head apart" in rope.missing(groups)[0]
    assert "one for each group" in rope.missing(replace(groups, k_order=layer.k_order))[0]
    assert "codes of 2 channels at head_dim 128, supported: 4 at 128" in rope.missing(
        normal_codebooks("cq4", rope="pre", k_shared=True))[0]
    assert "at head_dim 64" in rope.missing(normal_codebooks("cq2", head_dim=64, rope="pre", k_shared=True))[0]


def test_paths_know_which_keys_they_read():
    def pick(rows, path=None, is_pre_rope=True):
        return kernels.pick("hopper", FORMATS["cq2"], DIM, torch.float16, rows, path, (), is_pre_rope)

    assert [pick(rows)[0] for rows in (1, 4, 5, 8, 16)] == [("prerope", 4)] * 2 + [("prerope8", 8)] * 3
    assert pick(4, is_pre_rope=False)[0] == ("codebook", 4)
    picked, reasons = pick(4, "codebook")
    assert picked is None and "before their rotary embedding, supported: after it" in reasons[0]
    assert "after their rotary embedding, supported: before it" in pick(4, "prerope", False)[1][0]
    for name, head_dim in (("cq4", 128), ("cq2", 64), ("kcq4vcq2", 128)):
        assert "before their rotary embedding yet" in kernels.no_codebooks("hopper", FORMATS[name], head_dim, True)[0]
    assert kernels.no_codebooks("hopper", FORMATS["cq2"], DIM, True) == []
    assert "before their rotary embedding yet" in kernels.no_codebooks("ampere", FORMATS["cq2"], DIM, True)[0]


def test_captured_calls_begin_at_position_0():
    cache = KVCache("cq2", 4, HEADS, DIM, codebooks=BOOKS.layer(0))
    cache.set_first_positions([0], 3)
    cache.clear([0])
    cache.is_captured = True
    with pytest.raises(ValueError, match="captured calls, whose kernels begin at 0"):
        cache.set_first_positions([0], 3)
    cache.set_first_positions([0], 0)


# ---- what calibration learns


def test_pairs_are_dealt_out_together():
    importance = torch.rand(HEADS, DIM, generator=torch.Generator().manual_seed(1)) + 0.1
    order = balanced_order(importance, 4, in_pairs=True)
    assert torch.equal(order.sort(-1).values, torch.arange(DIM).expand(HEADS, -1))
    first, second = order.chunk(2, -1)
    assert torch.equal(first + DIM // 2, second)
    products = importance.gather(1, order).log().unflatten(1, (2, 16, 4)).sum((1, 3))
    assert products.std() < 0.5 * importance.log().unflatten(1, (2, 16, 4)).sum((1, 3)).std()


def test_shared_codebooks_of_k():
    """What kernels read; their errors are near those of a codebook for each group where groups are alike."""
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(9, 1, 128, DIM, generator=generator) for _ in range(2))
    layer = LayerSample(k, v, torch.eye(DIM)[None], 0.1, 10_000.0 ** -(torch.arange(64) / 64))
    sample = Sample([layer], torch.arange(9) * 128, 4096)
    found = {shares: learn_layers(sample, recipe_of(FORMATS["cq2"], "pre", k_shared=shares))[0]
             for shares in (False, True)}
    shared = found[True]
    assert shared.k_entries.shape == found[False].k_entries.shape == (1, GROUPS, 256, 4)
    assert torch.equal(shared.k_entries, shared.k_entries[:, :4].repeat(1, 8, 1, 1))
    assert not torch.equal(shared.k_entries[:, 0], shared.k_entries[:, 1])
    assert torch.equal(shared.k_order[:, :64] + 64, shared.k_order[:, 64:])
    assert shared.logit_error < 1.1 * found[False].logit_error
    with pytest.raises(ValueError, match="k_shared: got True with rope='post'"):
        recipe_of(FORMATS["cq2"], k_shared=True)
    few = LayerSample(k[..., :16], v[..., :16], torch.eye(16)[None], 0.1, torch.ones(8))
    with pytest.raises(ValueError, match="k_shared: got head_dim 16 with codes of 4 channels, supported: multiples of"):
        learn_layers(Sample([few], sample.first, 4096), recipe_of(FORMATS["cq2"], "pre", k_shared=True))
