"""Quality through whole caches at reduced size: the improvements of calibration are what a bar on KL asks for.

A small model whose keys have what real ones have (large constants and channels that matter more than others) stands
for the real one, whose numbers are in docs/codebooks.md.
"""

from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from lowbit_attn import FORMATS, quality  # noqa: E402
from lowbit_attn.codebooks.calibrate import learned_codebooks, recipe_of  # noqa: E402
from lowbit_attn.codebooks.capture import captured  # noqa: E402

FAR = 6000
PLAIN = dict(is_weighted=False, is_balanced=False, has_page_mean=False, has_random_positions=False)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    config = transformers.Qwen2Config(
        hidden_size=128, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=64, vocab_size=97,
        max_position_embeddings=8192, num_hidden_layers=2, initializer_range=0.06)
    network = transformers.Qwen2ForCausalLM(config).eval()
    for layer in network.model.layers:
        attention, generator = layer.self_attn, torch.Generator().manual_seed(3)
        strong = torch.randn(32, generator=generator).exp().repeat(2)  # of a pair of channels that turn together
        attention.k_proj.bias.data = 6 * torch.randn(64, generator=generator)
        # one channel of a pair varies more than the other, so that the pair turns with position like a needle
        attention.k_proj.weight.data *= torch.tensor([3.0, 0.1]).repeat_interleave(32)[:, None]
        attention.q_proj.weight.data *= strong.repeat(2)[:, None]
    return network


@pytest.fixture(scope="module")
def kl(model):
    """KL of a cache of these codebooks at a place; each is learned and read once."""
    ids = torch.randint(3, 97, (2592,), generator=torch.Generator().manual_seed(5))
    sample, known = captured(model, ids), {}
    text = torch.randint(3, 97, (640,), generator=torch.Generator().manual_seed(6))

    def measure(name: str = "cq2", rope: str = "post", first_position: int = 0, **left_out) -> float:
        key = name, rope, first_position, *left_out
        if key not in known:
            recipe = replace(recipe_of(FORMATS[name], rope), **dict.fromkeys(left_out, False))
            books = learned_codebooks(sample, recipe, name, "cpu", lambda: None, {})
            known[key] = quality.compare(model, text, {"": dict(format=name, codebooks=books)},
                                         first_position=first_position)[""].kl
        return known[key]

    return measure


def test_bits_buy_quality(kl):
    assert kl("cq4") < kl("kcq4vcq2") < kl("cq2") < kl("kcq2vcq1")


def test_plain_codebooks_are_beyond_the_bar(kl):
    bar = 1.3 * kl()
    assert kl("cq2", **PLAIN) > bar


def test_codebooks_without_random_positions_are_beyond_the_bar_far_from_the_start(kl):
    bar = 1.3 * kl()
    assert kl(first_position=FAR) < bar < kl(first_position=FAR, has_random_positions=False)
    assert kl(has_random_positions=False) < bar


def test_keys_before_rope_lose_less_at_any_position(kl):
    near, far = kl(rope="pre"), kl(rope="pre", first_position=FAR)
    assert near < kl() and far < kl(first_position=FAR)
    assert far == pytest.approx(near, rel=0.3)


def test_a_prompts_own_codebooks_serve_it(model, kl):
    """Codes of its second half, learned from the first."""
    text = torch.randint(3, 97, (1536,), generator=torch.Generator().manual_seed(7))
    scores = quality.compare(model, text, {"prompt": dict(format="cq2", codebooks="prompt"), "k2v2": dict(
        format="k2v2", sinks=32)}, scored_from=1024)
    assert 0 < scores["prompt"].kl < 0.7 * scores["k2v2"].kl
