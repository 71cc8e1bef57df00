"""The affine group quantizer against a scalar implementation, one element at a time, and its rules."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.search_rule import factors, hinging_groups, quotients

from lowbit_attn.formats.affine import (
    SEARCH_FACTORS,
    SEARCH_GRID,
    SEARCH_TENTHS,
    Quantized,
    demote,
    dequantize_groups,
    quantize_groups,
    search,
    squared_error,
    tree_sum,
)

BITS = (8, 4, 2, 1)
STORAGE = (torch.float16, torch.bfloat16)
F = np.float32
GROUPS = st.lists(st.floats(-3e4, 3e4, width=32), min_size=1, max_size=40)
bounded = settings(max_examples=60, deadline=None, derandomize=True)


# ---- an independent implementation, from the text


def stored(value, storage) -> np.float32:
    """Round to nearest even to fp16 or bf16; one NaN, one zero."""
    value = F(value)
    if storage == torch.float16:
        return F(np.float16(value)) + F(0)
    if not np.isfinite(value):
        return value
    word = int(value.view(np.uint32))
    word = (word + 0x7FFF + (word >> 16 & 1)) & 0xFFFF0000
    return np.uint32(word).view(F) + F(0)


def encode(group, low, width, bits, storage):
    steps = (1 << bits) - 1
    zero, scale = stored(low, storage), stored(width / F(steps), storage)
    scale = F(0) if scale < 2.0**-126 else scale
    codes = []
    for x in group:
        r = F(0) if scale == 0 else F(1) / scale
        q = np.rint((x - zero) * r)
        codes.append(0 if np.isnan(q) else int(min(max(q, 0), steps)))
    return codes, scale, zero


def halving_sum(values) -> np.float32:
    values = list(values) + [F(0)] * ((1 << (len(values) - 1).bit_length()) - len(values))
    while len(values) > 1:
        values = [a + b for a, b in zip(values[: len(values) // 2], values[len(values) // 2 :])]
    return values[0]


def error_of(group, codes, scale, zero) -> np.float32:
    return halving_sum([(x - (F(c) * scale + zero)) ** 2 for x, c in zip(group, codes)])


def searched(group, bits, storage):
    """The range whose levels, on a grid of 150 steps from the midpoint to the ends, miss the group least."""
    low, high = group.min(), group.max()
    half, middle = (high - low) * F(0.5), (low + high) * F(0.5)
    grid = [int(np.rint((x - middle) * (F(150) / half))) for x in group]
    errors = {}
    for tenths in (10, 9, 8, 7, 6, 5, 4, 3):
        steps = (1 << bits) - 1
        levels = [15 * tenths * (2 * i - steps) // steps for i in range(steps + 1)]
        errors[tenths] = sum(min((x - level) ** 2 for level in levels) for x in grid)
    tenths = min(errors, key=lambda t: (errors[t], -t))
    bottom = low + half * (F(1) - F(tenths / 10)) if tenths < 10 else low
    return encode(group, bottom, (high - low) * F(tenths / 10), bits, storage)


def same(q: Quantized, index: int, codes, scale, zero) -> bool:
    return (q.codes[index].tolist() == codes and np.array_equal(F(q.scale[index].float()), scale, equal_nan=True)
            and np.array_equal(F(q.zero[index].float()), zero, equal_nan=True))


def hard_groups() -> dict[str, torch.Tensor]:
    normal = torch.randn(64, generator=torch.Generator().manual_seed(3))
    return {
        "normal": normal,
        "constant": torch.full((64,), 0.3),
        "zero": torch.zeros(64),
        "negative zero": torch.full((64,), -0.0),
        "two-valued": torch.where(normal > 0, 1.7, -0.4),
        "outlier": torch.cat((normal[:63], torch.tensor([1e4]))),
        "fp16 max": torch.cat((normal[:62], torch.tensor([65504.0, -65504.0]))),
        "subnormal scale": normal * 1e-7,
        "subnormal values": normal * 1e-39,
        "mean over range": normal * 0.01 + 20,
        "beyond fp16": normal * 1e6 + 3e5,
        "nan": torch.where(torch.arange(64) == 7, float("nan"), normal),
        "inf": torch.where(torch.arange(64) == 7, float("inf"), normal),
        "minus inf": torch.where(torch.arange(64) == 7, float("-inf"), normal),
        "both infinities": torch.where(torch.arange(64) == 7, float("inf"), -float("inf")),
        "adjacent floats": torch.tensor([1.0, 1.0 + 2**-23] * 32),
    }


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("storage", STORAGE, ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", hard_groups())
def test_minmax_equals_the_scalar_rules(name, bits, storage):
    group = hard_groups()[name]
    q = quantize_groups(group[None], bits, storage)
    array = group.numpy()
    assert same(q, 0, *encode(array, np.min(array), np.max(array) - np.min(array), bits, storage))


@pytest.mark.parametrize("storage", STORAGE, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_minmax_equals_the_scalar_rules_on_many_groups(bits, storage):
    groups = torch.randn(30, 32) * torch.logspace(-6, 3, 30)[:, None] + torch.randn(30, 1) * 20
    q = quantize_groups(groups, bits, storage)
    for i, group in enumerate(groups.numpy()):
        assert same(q, i, *encode(group, group.min(), group.max() - group.min(), bits, storage))


@pytest.mark.parametrize("bits", (4, 2, 1))
@pytest.mark.parametrize("size", (32, 96, 128))
def test_search_equals_the_scalar_rules(bits, size):
    groups = torch.randn(6, size) ** 3
    q = quantize_groups(groups, bits, torch.float16, "search")
    for i, group in enumerate(groups.numpy()):
        assert same(q, i, *searched(group, bits, torch.float16))


@pytest.mark.parametrize("dtype, count", [(torch.float16, 300), (torch.bfloat16, 16)], ids=str)
@pytest.mark.parametrize("bits", (4, 2, 1))
def test_search_rounds_its_quotient_once(bits, dtype, count):
    """Torch multiplies by a rounded reciprocal where a number is divided by a tensor."""
    groups = hinging_groups(count, 128, bits, dtype, seed=0)
    x, want = torch.from_numpy(groups), torch.from_numpy(factors(groups, quotients(groups), bits))
    assert torch.equal(search(x, x.amin(-1), x.amax(-1), bits), want)


@pytest.mark.parametrize("name", hard_groups())
def test_search_keeps_the_whole_range_of_groups_without_a_finite_one(name):
    group = hard_groups()[name][None]
    plain, tried = (quantize_groups(group, 2, torch.bfloat16, levels) for levels in ("minmax", "search"))
    if not 0 < float(group.max() - group.min()) < torch.inf:
        assert torch.equal(plain.codes, tried.codes) and torch.equal(plain.scale.isnan(), tried.scale.isnan())
        assert torch.equal(plain.zero.nan_to_num(), tried.zero.nan_to_num())
    assert tried.codes.max() <= 3


def test_eight_bits_keep_the_whole_range():
    """Why ``search`` may skip them: 5 % off both ends costs more than finer steps gain, for any group up to 256."""
    x = torch.randn(20, 256) ** 3
    low, high = x.amin(-1), x.amax(-1)
    tried = quantize_groups(x, 8, torch.float16, "search")
    assert torch.equal(tried.codes, quantize_groups(x, 8, torch.float16).codes)
    for factor in SEARCH_FACTORS[1:]:
        middle, half = (low + high)[:, None] / 2, factor * (high - low)[:, None] / 2
        shrunk = quantize_groups(x.clamp(middle - half, middle + half), 8, torch.float16)
        assert (squared_error(x, shrunk) > squared_error(x, tried)).all()


# ---- rules, one at a time


@pytest.mark.parametrize("storage", STORAGE, ids=str)
@pytest.mark.parametrize("levels, bits", [("minmax", 8), ("minmax", 1), ("search", 2), ("search", 1), ("two-means", 1)])
@pytest.mark.parametrize("value", (0.0, -0.0, 0.3, -65504.0, 1e-6))
def test_constant_group_is_exact(value, levels, bits, storage):
    q = quantize_groups(torch.full((1, 32), value), bits, storage, levels)
    assert q.scale == 0 and not q.codes.any()
    assert torch.equal(dequantize_groups(q), torch.full((1, 32), value).to(storage).float())


@pytest.mark.parametrize("levels, bits", [("minmax", 4), ("search", 2), ("two-means", 1)])
@pytest.mark.parametrize("where", (0, 13, 31))
def test_nan_shows_in_its_group_only(levels, bits, where):
    x = torch.randn(3, 32)
    x[1, where] = float("nan")
    q = quantize_groups(x, bits, torch.float16, levels)
    values = dequantize_groups(q)
    assert values[1].isnan().all() and values[[0, 2]].isfinite().all()
    assert q.zero[1].view(torch.int16) == torch.tensor(float("nan"), dtype=torch.float16).view(torch.int16)


@pytest.mark.parametrize("levels, bits", [("minmax", 4), ("search", 2), ("two-means", 1)])
@pytest.mark.parametrize("value", (float("inf"), float("-inf")))
def test_infinity_is_never_silently_finite(levels, bits, value):
    x = torch.randn(1, 32)
    x[0, 5] = value
    q = quantize_groups(x, bits, torch.float16, levels)
    assert not dequantize_groups(q)[0, 5].isfinite()
    assert q.scale.isinf().any() or q.zero.isinf().any()


@pytest.mark.parametrize("bits", (8, 4, 2))
def test_halves_round_to_even_and_clamp(bits):
    """Zero 0 and scale 1: every x.5 lies exactly between two codes."""
    steps = (1 << bits) - 1
    halves = torch.arange(steps) + 0.5
    q = quantize_groups(torch.cat((torch.tensor([0.0, steps]), halves))[None], bits, torch.float16)
    assert (q.scale, q.zero) == (1, 0)
    assert q.codes[0, 2:].tolist() == [i + i % 2 for i in range(steps)]


def test_codes_use_the_stored_metadata():
    """A mean of 20 with a range of 0.3 in bf16: the stored zero is off by up to 0.06, which the codes absorb."""
    x = torch.rand(200, 128) * 0.3 + 20 + torch.rand(200, 1)
    q = quantize_groups(x, 8, torch.bfloat16)
    unrounded = ((x - x.amin(-1, True)) / ((x.amax(-1, True) - x.amin(-1, True)) / 255)).round()
    naive = unrounded * q.scale.float()[:, None] + q.zero.float()[:, None]
    assert (x - dequantize_groups(q)).square().mean() < 0.5 * (x - naive).square().mean()


@pytest.mark.parametrize("bits", BITS)
def test_tiny_scales_count_as_zero(bits):
    """bf16 can store a scale below 2^-126, whose inverse has no fp32 value."""
    q = quantize_groups(torch.tensor([[0.0, 2.0**-127]]), bits, torch.bfloat16)
    assert q.scale == 0 and not q.codes.any() and dequantize_groups(q).isfinite().all()
    q = quantize_groups(torch.tensor([[0.0, 2.0**-126 * ((1 << bits) - 1)]]), bits, torch.bfloat16)
    assert q.scale == 2.0**-126 and q.codes.tolist() == [[0, (1 << bits) - 1]]


@given(st.sampled_from(BITS), st.sampled_from(STORAGE), GROUPS)
@bounded
def test_error_is_within_the_bound(bits, storage, values):
    x, steps = torch.tensor([values]), (1 << bits) - 1
    q = quantize_groups(x, bits, storage)
    low, high = x.amin().double(), x.amax().double()
    scale, zero = q.scale.double(), q.zero.double()
    bound = scale / 2 + (zero - low).abs() + steps * (scale - (high - low) / steps).abs()
    bound = bound + 2.0**-21 * (zero.abs() + steps * scale + (high - low)) + 1e-45
    assert ((x - dequantize_groups(q)).double().abs() <= bound).all()
    assert int(q.codes.max()) <= steps


@given(st.sampled_from(BITS), GROUPS)
@bounded
def test_search_is_never_worse_but_by_rounding(bits, values):
    """Its errors leave out that scale and zero are rounded (2^-11 of each) and rounds values to 1/300 of the range."""
    x = torch.tensor([values])
    best, plain = (squared_error(x, quantize_groups(x, bits, torch.float16, levels)).sqrt()
                   for levels in ("search", "minmax"))
    rounding = 2**-10 * (x.abs().max() + 1) + (x.max() - x.min()) / SEARCH_GRID
    assert best <= plain + rounding * len(values) ** 0.5


@given(st.sampled_from(BITS), st.lists(st.floats(-100, 100, width=16), min_size=2, max_size=40), st.randoms())
@bounded
def test_order_in_a_group_changes_nothing(bits, values, random):
    order = list(range(len(values)))
    random.shuffle(order)
    x = torch.tensor([values])
    a, b = quantize_groups(x, bits, torch.float16), quantize_groups(x[:, order], bits, torch.float16)
    assert torch.equal(a.codes[:, order], b.codes) and a.scale == b.scale and a.zero == b.zero


def test_search_ties_keep_the_larger_range():
    """At 1 bit, levels at 150 steps miss 135 by as much as levels at 135 steps miss 150."""
    for values, best in (([135.0, -135.0], 0), ([134.0, -134.0], 1), ([136.0, -136.0], 0)):
        x = torch.tensor([[-150.0, 150.0, *values]])
        assert SEARCH_TENTHS[int(search(x, x.amin(-1), x.amax(-1), 1)[0])] == 10 - best
    assert SEARCH_FACTORS[0] == 1 and list(SEARCH_FACTORS) == sorted(SEARCH_FACTORS, reverse=True)


@pytest.mark.parametrize("bits, size, before, after", [(1, 32, 1.96, 0.35), (1, 128, 3.58, 0.38), (2, 32, 0.154, 0.097),
                                                       (2, 128, 0.252, 0.118), (4, 128, 0.0099, 0.0088)])
def test_search_gains_on_normal_data(bits, size, before, after):
    """Mean squared error relative to the variance, as measured when the search was chosen."""
    x = torch.randn(2000, size)
    for levels, want in (("minmax", before), ("search", after)):
        error = squared_error(x, quantize_groups(x, bits, torch.float16, levels)).mean() / size
        assert error == pytest.approx(want, rel=0.06)


def test_two_means_levels():
    """Sums of multiples of 1/8 are exact in any order: low and high means of the halves around the midpoint."""
    x = torch.randint(-40, 41, (50, 64)) / 8.0
    q = quantize_groups(x, 1, torch.float16, "two-means")
    for i, group in enumerate(x.numpy()):
        below = group < (group.min() + group.max()) / 2
        low, high = group[below].mean(dtype=np.float32), group[~below].mean(dtype=np.float32)
        assert q.zero[i] == np.float16(low) and q.scale[i] == np.float16(high - low)
        threshold = F(np.float16(low)) + F(np.float16(high - low)) / 2
        assert q.codes[i].tolist() == [int(value >= threshold) for value in group]


def test_two_means_beats_minmax_and_the_mean():
    x = torch.randn(500, 128)
    two_means, minmax = (squared_error(x, quantize_groups(x, 1, torch.float16, levels)).mean() / 128
                         for levels in ("two-means", "minmax"))
    assert two_means < 0.5 < 1 < minmax


def test_two_means_of_adjacent_floats():
    """The midpoint rounds onto the lower value, so nothing lies below it."""
    x = torch.tensor([[1.0, 1.0 + 2**-23] * 16])
    q = quantize_groups(x, 1, torch.float16, "two-means")
    assert torch.allclose(dequantize_groups(q), x, rtol=1e-3)


@pytest.mark.parametrize("size", (1, 2, 3, 32, 96, 128))
def test_tree_sum_order(size):
    x = torch.randn(size) * 10.0 ** torch.randint(-4, 5, (size,))
    assert float(tree_sum(x)) == halving_sum(x.numpy())


@pytest.mark.parametrize("storage", STORAGE, ids=str)
@pytest.mark.parametrize("bits", (8, 4, 2))
def test_demotion_equals_direct_quantization_at_all_codes(bits, storage):
    """8 -> 4 -> 2 -> 1: affine codes that reach both ends are nested."""
    q = Quantized(torch.arange(1 << bits, dtype=torch.uint8)[None], torch.tensor([2**-5]).to(storage),
                  torch.tensor([-1.5]).to(storage))
    while bits > 1:
        low = demote(q, bits)
        bits //= 2
        direct = quantize_groups(dequantize_groups(q), bits, storage)
        assert torch.equal(low.codes, direct.codes)
        assert torch.equal(low.scale, direct.scale) and torch.equal(low.zero, direct.zero)
        assert low.codes.unique().tolist() == list(range(1 << bits))
        q = low


@pytest.mark.parametrize("bits, codes", [
    (8, [0, 8, 9, 25, 26, 255]), (4, [0, 2, 3, 7, 8, 15]), (2, [0, 1, 2, 3]),
])
def test_demotion_boundaries(bits, codes):
    """The last code that falls to a level and the first that rises."""
    q = Quantized(torch.tensor([codes], dtype=torch.uint8), torch.ones(1, dtype=torch.float16),
                  torch.zeros(1, dtype=torch.float16))
    want = {8: [0, 0, 1, 1, 2, 15], 4: [0, 0, 1, 1, 2, 3], 2: [0, 0, 1, 1]}[bits]
    assert demote(q, bits).codes.tolist() == [want]


def test_unsupported_calls_are_refused():
    x = torch.randn(1, 8)
    with pytest.raises(ValueError, match="levels: .*'kmeans'.*minmax"):
        quantize_groups(x, 4, torch.float16, "kmeans")
    with pytest.raises(ValueError, match="levels: two-means is for 1 bit, got 2"):
        quantize_groups(x, 2, torch.float16, "two-means")
    with pytest.raises(ValueError, match="bits: 1 .*supported: 8, 4, 2"):
        demote(quantize_groups(x, 1, torch.float16), 1)
