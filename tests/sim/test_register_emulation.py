"""The register path's arithmetic on the CPU: every format, size and hard input within the tolerances of the kernels."""

import dataclasses

import numpy as np
import pytest
import torch

from lowbit_attn import layout, registers, subnormals, testing
from lowbit_attn.cache import KVCache
from lowbit_attn.formats import FORMATS, packing
from lowbit_attn.testing import Case
from sim import emulation

FP16, BF16 = torch.float16, torch.bfloat16
LENGTHS = (0, 1, 127, 128, 129, 300, 1100)
BITS = (8, 4, 2, 1)


def check(case: Case, centring: bool = True, num_splits: int = 2, warps: int = 2) -> None:
    problem = testing.build(case)
    want = testing.expected(problem)
    if centring:  # 3 beta + 1e-3 without, 2 beta + 1e-3 with centring
        want = dataclasses.replace(want, lse_tolerance=(want.lse_tolerance - 1e-3) * 2 / 3 + 1e-3)
    o, lse = emulation.decode(problem.q, problem.cache, num_splits, warps, centring)
    testing.assert_decode(o, lse, want)


@pytest.mark.parametrize("rows", (64, 128))
@pytest.mark.parametrize("bits", BITS)
def test_unpacking_gives_the_a_operand(bits, rows):
    """Each element is the fp16 subnormal code * 2^(k - 24), exactly, with k a function of the row."""
    codes = torch.randint(0, 1 << bits, (rows, 64), dtype=torch.uint8)
    words = emulation.load_words(packing.pack_codes(codes, bits).numpy())
    a = emulation.unpack(words, bits)
    assert a.dtype == np.float16
    tiles = emulation.a_matrix(a).reshape(4, rows // 16, 16, 16)  # column tile, row tile
    got = tiles.transpose(1, 2, 0, 3).reshape(rows, 64)
    power = np.array([registers.row_power(row, bits) for row in range(rows)])[:, None]
    np.testing.assert_array_equal(got, codes.numpy() * 2.0 ** (power - subnormals.SUBNORMAL_SHIFT))
    steps = subnormals.unpack_steps(bits)
    assert len(steps) == {8: 2, 4: 4, 2: 8, 1: 16}[bits]  # ANDs a word
    assert {step.power for step in steps} == set(power.flatten().tolist())


@pytest.mark.parametrize("groups", (1, 2, 4))
def test_bias_lanes_have_the_same_columns(groups):
    """The lane that holds a group's bias holds that group's row, for the columns of the asking lane."""
    for group in range(groups):
        for lane in range(layout.LANES):
            source = subnormals.bias_lane(group, lane, groups)
            for element in (0, 1, 2, 3):
                row = registers.accumulator_row(source, element)
                assert subnormals.bias_row_group(row, groups) == group
                column = registers.accumulator_col(lane, element)
                assert registers.accumulator_col(source, element) == column


def test_exponents_from_bits():
    x = np.array([2.0**-40, 1.0, 1.5, 65504.0, 3e38, 1.0000001, 0.99999994, 2.0**-126], np.float32)
    exact = np.log2(x.astype(np.float64))
    np.testing.assert_array_equal(registers.floor_log2(emulation.bits_of(x)), np.floor(exact))
    np.testing.assert_array_equal(registers.ceil_log2(emulation.bits_of(x)), np.ceil(exact))
    np.testing.assert_array_equal(emulation.pow2(np.array([-126, 0, 127])), np.float32([2.0**-126, 1, 2.0**127]))


@pytest.mark.parametrize("v_bits", BITS)
@pytest.mark.parametrize("k", [f"k{bits}{per}" for bits in BITS for per in ("", "t")])
@pytest.mark.parametrize("head_dim", (64, 128))
def test_every_pair_of_widths(k, v_bits, head_dim):
    check(Case(f"{k}v{v_bits}", head_dim=head_dim, lengths=(300, 129), num_heads=2, num_heads_kv=1))


@pytest.mark.parametrize("storage, dtype", [("", FP16), ("", BF16), ("-bf16", FP16), ("-bf16", BF16)])
@pytest.mark.parametrize("k_group, v_group", [(32, 32), (64, 64), (128, None), (32, 128)])
@pytest.mark.parametrize("k, centring", [("k4", True), ("k4", False), ("k1", True), ("k1", False), ("k2t", True),
                                         ("k8t", True)])
def test_groups_and_types(k, k_group, v_group, storage, dtype, centring):
    name = f"{k}v2-g{k_group}" + (f"-vg{v_group}" if v_group else "") + storage
    check(Case(name, dtype, lengths=(300, 400), num_heads=3, num_heads_kv=1, sinks=5), centring)


@pytest.mark.parametrize("centring", (True, False))
@pytest.mark.parametrize("name", ("k8v8", "k4v4", "k4v4-g32-vg32", "k2v2", "k1v1-g64", "k4tv4", "k2tv2-g32-vg64"))
@pytest.mark.parametrize("data", testing.DATA)
def test_hard_data(data, name, centring):
    bf16 = data in ("meta-beyond-fp16", "q-1e6-k-1e-6")
    name, dtype = (name + "-bf16", BF16) if bf16 else (name, FP16)
    check(Case(name, dtype, lengths=LENGTHS, sinks=32, data=data, num_heads=4), centring)


@pytest.mark.parametrize("ratio", range(1, 17))
def test_ratios(ratio):
    name, head_dim = ("k4v4-g64", 64) if ratio % 2 else ("k2tv4-g64", 128)
    check(Case(name, head_dim=head_dim, num_heads=2 * ratio, num_heads_kv=2, lengths=(200, 300)), warps=1 + ratio % 3)


@pytest.mark.parametrize("window_v", (128, 256))
@pytest.mark.parametrize("name", ("k4v4-g32", "k2tv2-bf16"))
@pytest.mark.parametrize("data", ("normal", "v-1e-4-beside-sink", "v-page-1e3-after-1e-4"))
def test_third_segment(name, data, window_v):
    fmt = dataclasses.replace(FORMATS[name], window_v=window_v)
    check(Case(fmt, BF16 if "bf16" in name else FP16, lengths=LENGTHS, sinks=3, data=data, num_heads=4))


@pytest.mark.parametrize("num_splits", (1, 3, 11))
@pytest.mark.parametrize("warps", (1, 4))
@pytest.mark.parametrize("sinks", (0, 1, 40, 130))
def test_splits_warps_and_sinks(num_splits, warps, sinks):
    check(Case("k4v2", head_dim=64, lengths=LENGTHS, sinks=sinks), num_splits=num_splits, warps=warps)


def logit_errors(name: str, centring: bool) -> float:
    """Root mean square error of one page's base-2 logits against those of its dequantized K in fp64."""
    case = Case(name, num_heads=8, num_heads_kv=1, lengths=(257,), poison=False)
    problem = testing.build(case)
    cache, page = problem.cache, int(problem.cache.table[0, 0])
    warp = emulation.Warp(cache, problem.q[0, 0], 8, emulation.LOG2_E, centring)
    got = np.empty((8, layout.PAGE_TOKENS))
    token = layout.TILE * np.arange(8)[:, None, None] + emulation.C_ROW
    got[emulation.C_COL, token] = warp.logits(cache.pool[page, 0].numpy())[0]
    k = cache.dequantize_pages(torch.tensor([page]))[0][0, 0].double()
    want = emulation.LOG2_E * (problem.q[0, 0].double() @ k.T).numpy()
    return float(np.sqrt(((got - want) ** 2).mean()))


@pytest.mark.parametrize("name", ("k8v8", "k4v4", "k2v2", "k2v2-g32", "k1v1", "k4v4-bf16"))
def test_centring_lowers_the_error(name):
    centred, plain = logit_errors(name, True), logit_errors(name, False)
    assert centred < 0.8 * plain


def test_k_per_token_rounds_nothing_of_k():
    assert logit_errors("k4tv4-g32", True) < 1e-5


@pytest.mark.parametrize("shift, name", [("QUERY_OWN_SHIFT", "k4v4-bf16"), ("QUERY_OWN_SHIFT", "k2v2-g32-bf16"),
                                         ("QUERY_OWN_SHIFT", "k4tv4-bf16"), ("CENTRE_SHIFT", "k4v4-bf16"),
                                         ("CENTRE_SHIFT", "k2v2-g32-bf16")])
def test_shifts_keep_small_operands_normal(monkeypatch, shift, name):
    """Without the shift, metadata beyond fp16 push the other channels into the subnormals."""
    monkeypatch.setattr(subnormals, shift, 0)
    monkeypatch.setattr(subnormals, "SCALE_SHIFT", subnormals.QUERY_SHIFT - subnormals.QUERY_OWN_SHIFT)
    with pytest.raises(AssertionError, match="relative error|lse of sequence"):
        check(Case(name, BF16, lengths=(300, 1100), data="meta-beyond-fp16"))


@pytest.mark.parametrize("data", testing.DATA)
def test_operands_stay_in_range(monkeypatch, data):
    """Every 16-bit operand is at most 2^15, half of fp16's range, whatever the data."""
    largest = []
    real = emulation.rounded

    def spy(x, dtype=FP16):
        if dtype is FP16:
            largest.append(np.abs(x).max(initial=0))
        return real(x, dtype)

    monkeypatch.setattr(emulation, "rounded", spy)
    problem = testing.build(Case("k4v4-g32-vg32-bf16", BF16, lengths=(700,), sinks=8, data=data))
    emulation.decode(problem.q, problem.cache)
    assert 0 < max(largest) <= 2.0**15


def check_values(k, v, q, name: str, dtype=BF16) -> None:
    """One sequence of given K, V [tokens, 1, head_dim] and q [1, 1, heads, head_dim]; tolerance of hard data."""
    cache = KVCache(name, 8, 1, k.shape[-1], dtype, sinks=0)
    cache.prefill(0, k, v)
    case = Case(name, dtype, k.shape[-1], q.shape[2], 1, (len(k),), data="custom")
    problem = testing.Problem(case, q.to(dtype), cache, (k,), (v,))
    for centring in (True, False):
        o, lse = emulation.decode(problem.q, cache, 1, 1, centring)  # one warp sees all pages
        testing.assert_decode(o, lse, testing.expected(problem))


NAMES = ("k4v4-bf16", "k2v2-g32-vg32-bf16", "k4tv4-g32-bf16", "k8v1-bf16")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", (0.0, 1.0, -3.5, 1e-30, 1e30))
def test_constant_pages_have_scale_zero(name, value):
    k = torch.randn(300, 1, 64)
    v = torch.full_like(k, value)
    k[:128] = 2.0
    check_values(k, v, torch.randn(1, 1, 4, 64), name)


@pytest.mark.parametrize("name", NAMES)
def test_zero_k_and_zero_query_rows(name):
    k, v = torch.zeros(300, 1, 64), torch.randn(300, 1, 64)
    q = torch.randn(1, 1, 4, 64)
    q[:, :, 1:3] = 0
    check_values(k, v, q, name)
    check_values(torch.randn(300, 1, 64), v, q, name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("q_size, k_size", [(1e30, 1e-30), (1e-30, 1e30), (1e-36, 1e36), (1e-38, 1.0), (1e-3, 1e3)])
def test_exponents_far_apart(name, q_size, k_size):
    """q of any size against k of the inverse size; K below 2^-40 is beyond the clamp, and only has to stay finite."""
    q, k, v = torch.randn(1, 1, 4, 64), torch.randn(300, 1, 64), torch.randn(300, 1, 64)
    if k_size < 2.0**registers.MIN_SCALE_LOG2:
        cache = KVCache(name, 8, 1, 64, BF16, sinks=0)
        cache.prefill(0, k * k_size, v)
        o, lse = emulation.decode((q * q_size).to(BF16), cache)
        assert o.isfinite().all() and lse.isfinite().all()
    else:
        check_values(k * k_size, v, q * q_size, name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("first, second", [(1e-30, 1e30), (1e33, 1e-3), (1e-12, 1e-9), (1e35, 1e35), (1e35, 1e-12)])
def test_values_of_any_size(name, first, second):
    v = torch.randn(300, 1, 64)
    v[:128] *= first
    v[128:] *= second
    check_values(torch.randn(300, 1, 64), v, torch.randn(1, 1, 4, 64), name)


def carried(warp: emulation.Warp) -> None:
    """What centring takes from O, taken from z instead: it meets O only after the last page."""
    half_steps = np.float32(((1 << warp.format.v.bits) - 1) / 2)
    total, warp.rounded = warp.rounded, np.zeros_like(warp.z)
    warp.z -= half_steps * emulation.pow2(-subnormals.PROBABILITY_SHIFT - warp.exponent) * total / 8  # a lane's share


@pytest.mark.parametrize("name", ("k4v4", "k2v2"))
def test_truncated_sums_of_many_pages(monkeypatch, name):
    """Tensor cores truncate, so O must not grow with the codes' one sign: 64 pages a warp lose nothing by it."""
    problem = testing.build(Case(name, head_dim=64, num_heads=2, num_heads_kv=1, lengths=(8193,), poison=False))
    want = testing.expected(problem).o[0]

    def error() -> float:
        return testing.relative_error(emulation.decode(problem.q, problem.cache, 1, 1)[0][0], want)

    exact_sums = error()
    monkeypatch.setattr(emulation, "ROUNDING", emulation.toward_zero)
    assert error() < 1.1 * exact_sums
    monkeypatch.setattr(emulation.Warp, "recentre", carried)
    assert error() > 3 * exact_sums
