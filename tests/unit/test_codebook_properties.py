"""Properties of codebook formats over drawn shapes and values: cuts of a text, round trips, and what both would see."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit_attn import FORMATS
from lowbit_attn.formats import Kind
from lowbit_attn.testing import assert_same_state, normal_codebooks
from unit.codebook_caches import DIM, HEADS, NAMES, make, tokens

drawn = settings(max_examples=30, deadline=None, derandomize=True)
sides = pytest.mark.parametrize("side", ("k", "v"))
PAGES = 2 * HEADS
DATA = ("normal", "far from zero", "one loud channel", "one loud token", "half of them zeros", "small")


# ---- prefill == appends

@drawn
@given(st.data())
def test_a_text_in_any_pieces_is_one_prefill(data):
    """Prefills and appends of drawn sizes, then what is due is packed: the bytes, rings, sinks and counters of one."""
    name, rope = data.draw(st.sampled_from(NAMES)), data.draw(st.sampled_from(("post", "pre")))
    length, first = data.draw(st.integers(1, 450)), data.draw(st.sampled_from((0, 7, 5000)))
    options = dict(sinks=data.draw(st.integers(0, 40)), max_q_len=data.draw(st.integers(1, 8)))
    whole, parts = make(name, rope, **options), make(name, rope, **options)
    k, v = tokens(length, first)
    for cache in (whole, parts):
        cache.set_first_positions([0], first)
    whole.prefill(0, k, v)
    start = 0
    while start < length:
        if data.draw(st.booleans()):
            end = min(length, start + data.draw(st.integers(1, 200)))
            parts.prefill(0, k[start:end], v[start:end])
        else:
            end = min(length, start + options["max_q_len"])
            parts.append(k[None, start:end], v[None, start:end])
        start = end
    parts.flush()
    assert_same_state(parts, whole)
    parts.book.check()
    other = make(name, rope, **options)
    other.set_first_positions([0], first)
    other.prefill(0, k.roll(1, -1), v)
    with pytest.raises(AssertionError):
        assert_same_state(other, whole)


# ---- round trips

def values(kind: str, head_dim: int, generator: torch.Generator) -> torch.Tensor:
    """[PAGES, 128, head_dim] of fp16 values."""
    x = torch.randn(PAGES, 128, head_dim, generator=generator)
    if kind == "far from zero":
        x += 20 * torch.randn(PAGES, 1, head_dim, generator=generator)
    elif kind == "one loud channel":
        x[..., 3] *= 300
    elif kind == "one loud token":
        x[:, 77] *= 1000
    elif kind == "half of them zeros":
        x[:, ::2] = 0
    elif kind == "small":
        x *= 1e-3
    return x.half().float()


def assert_nearest(got: torch.Tensor, x: torch.Tensor, table: torch.Tensor, is_key: bool, is_normed: bool) -> None:
    """Each vector came back as the entry that is nearest, about the page's mean (K) or times the token's norm (V).

    got, x: [PAGES, 128, head_dim]; table: [HEADS, groups, 256, vec_size], of the heads in turn. All in fp64 and from
    the text alone; the room is for the 16-bit means and norms.
    """
    x, entries = x.double(), table.double().repeat(PAGES // HEADS, 1, 1, 1)
    mean = x.mean(1, keepdim=True).half().double() if is_key else torch.zeros(())
    norm = x.square().mean(-1, keepdim=True).sqrt().half().double() if is_normed else torch.ones(1, 1, 1)
    room = 2e-3 * (x.abs() + mean.abs() + norm) + 1e-6
    groups, vec_size = entries.shape[1], entries.shape[-1]

    def vectors(y: torch.Tensor) -> torch.Tensor:
        return y.unflatten(2, (groups, vec_size)).transpose(1, 2)  # [PAGES, groups, 128, vec_size]

    best = torch.cdist(vectors((x - mean) / norm.clamp(min=1e-9)), entries,
                       compute_mode="donot_use_mm_for_euclid_dist").amin(-1) * norm.transpose(1, 2)
    error, slack = vectors(got.double() - x).norm(dim=-1), vectors(room).norm(dim=-1)
    assert bool((error <= best * 1.001 + slack).all())  # false for NaN


def round_trip(side: str, name: str, head_dim: int, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    part = getattr(FORMATS[name], side)
    return part.dequantize(part.quantize(x, False, table), head_dim, table)


SPOILED = {"zeros": torch.zeros_like, "NaN": lambda x: x * float("nan"), "half": lambda x: x / 2,
           "one token on": lambda x: x.roll(1, 1), "one channel on": lambda x: x.roll(1, 2),
           "one page on": lambda x: x.roll(1, 0), "one NaN": lambda x: x.masked_fill(x == x.amax(), float("nan"))}


@sides
@drawn
@given(st.data())
def test_a_page_comes_back_as_its_nearest_entries(side, data):
    names = [name for name in NAMES if getattr(FORMATS[name], side).kind is Kind.CODEBOOK]
    name, head_dim = data.draw(st.sampled_from(names)), data.draw(st.sampled_from((32, 64, 96)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x = values(data.draw(st.sampled_from(DATA)), head_dim, generator)
    table = getattr(normal_codebooks(name, 1, HEADS, head_dim).layer(0), f"{side}_entries")
    got = round_trip(side, name, head_dim, x, table)
    assert_nearest(got, x, table, side == "k", side == "v" and FORMATS[name].v.normed)


@sides
@pytest.mark.parametrize("spoil", (*SPOILED, "stale"))
def test_wrong_pages_are_not_the_nearest_entries(side, spoil):
    generator = torch.Generator().manual_seed(1)
    x, before = values("normal", DIM, generator), values("normal", DIM, generator)
    table = getattr(normal_codebooks("cq2", 1, HEADS, DIM).layer(0), f"{side}_entries")
    got = round_trip(side, "cq2", DIM, x, table)
    assert_nearest(got, x, table, side == "k", side == "v")
    wrong = round_trip(side, "cq2", DIM, before, table) if spoil == "stale" else SPOILED[spoil](got)
    with pytest.raises(AssertionError):
        assert_nearest(wrong, x, table, side == "k", side == "v")
