"""The integer path's arithmetic on the CPU: formats, sizes and hard inputs within the tolerances of the kernels."""

import dataclasses
from itertools import product

import numpy as np
import pytest
import torch

from lowbit_attn import layout, registers, testing
from lowbit_attn.cache import KVCache
from lowbit_attn.formats import FORMATS, packing
from lowbit_attn.testing import Case
from sim import emulation, integer_emulation

FP16, BF16 = torch.float16, torch.bfloat16
LENGTHS = (0, 1, 127, 128, 129, 300, 1100)
BITS = (8, 4, 2, 1)


def within(problem: testing.Problem, num_splits: int = 2, warps: int = 2) -> None:
    """Decode as the kernel does; the tolerance of lse is that of centred rounding, 2 beta + 1e-3."""
    want = testing.expected(problem)
    want = dataclasses.replace(want, lse_tolerance=(want.lse_tolerance - 1e-3) * 2 / 3 + 1e-3)
    o, lse = emulation.decode(problem.q, problem.cache, num_splits, warps, make_warp=integer_emulation.Warp)
    testing.assert_decode(o, lse, want)


def check(case: Case, **kwargs) -> None:
    within(testing.build(case), **kwargs)


@pytest.mark.parametrize("rows", (64, 128))
@pytest.mark.parametrize("bits", BITS)
def test_masked_bytes_are_the_a_operand(bits, rows):
    """Each element is code * 2^k, its column that of the PTX manual's k index in the order 2t, 2t+8, 2t+1, 2t+9."""
    codes = torch.randint(0, 1 << bits, (rows, 64), dtype=torch.uint8)
    words = emulation.load_words(packing.pack_codes(codes, bits).numpy())
    a = integer_emulation.a_bytes(words, rows, bits)
    got = np.full((rows, 64), -1.0)
    for rt, step, register, lane, byte in np.ndindex(a.shape):
        row = 16 * rt + 8 * (register % 2) + lane // 4
        column = 32 * step + 16 * (register // 2) + 2 * (lane % 4) + (0, 8, 1, 9)[byte]
        got[row, column] = a[rt, step, register, lane, byte] * 2.0 ** -registers.row_power(row, bits)
    np.testing.assert_array_equal(got, codes.numpy())


def test_digits_stay_in_range():
    """Both signs of the largest X, and the largest sums that a run of columns can have."""
    x = np.float32([1.0, 0.9999999, 1.9999999, 65504.0, 3e-20, 1e30])
    for top, guard, limit in ((registers.SIGNED_TOP, registers.SIGNED_GUARD, 32639),
                              (registers.UNSIGNED_TOP, registers.UNSIGNED_GUARD, 65535)):
        fixed = np.rint(x.astype(np.float64) * 2.0 ** integer_emulation.exponent(x, guard, top))
        assert (fixed > limit / 2.1).all() and (fixed <= limit).all()
    assert registers.UNSIGNED_COLUMNS * 255 * 255 < registers.UNSIGNED_LIMIT
    for start, bits in ((registers.SIGNED_START, registers.SIGNED_START_BITS),
                        (registers.UNSIGNED_START, registers.UNSIGNED_START_BITS)):
        assert np.float32(start).view(np.int32) == bits and np.float32(257 * start) == 257 * start


@pytest.mark.parametrize("bits", BITS)
def test_runs_of_columns_stay_within_the_accumulators(bits):
    """By the largest byte that a mask lets through; 160 columns of 2 bits (kitty-pro, head_dim 128) are one run."""
    top = max(registers.byte_mask(row, bits) for row in range(layout.PAGE_TOKENS)) & 0xFF
    assert top == registers.largest_byte(bits)
    for steps in range(1, 17):
        runs = registers.signed_runs(steps, bits)
        assert [step for run in runs for step in run] == list(range(steps))
        longest, few = max(map(len, runs)), len(runs) - 1
        assert longest * registers.BYTE_STEP * top * 128 < registers.SIGNED_LIMIT
        if few:
            assert -(-steps // few) * registers.BYTE_STEP * top * 128 >= registers.SIGNED_LIMIT, "fewer would do"
    assert len(registers.signed_runs(5, 2)) == 1 and registers.signed_runs(8, bits) == [range(4), range(4, 8)]


@pytest.mark.parametrize("k, v", list(product(BITS, BITS)))
def test_every_pair_of_widths(k, v):
    head_dim = 64 if (k + v) % 3 else 128
    check(Case(f"k{k}v{v}", head_dim=head_dim, lengths=(300, 129), num_heads=4, num_heads_kv=1))


@pytest.mark.parametrize("name, dtype, head_dim", [
    ("k4v2-g32-vg32", FP16, 64), ("k2v4-g64-vg64-bf16", BF16, 128), ("k1v1-g32", FP16, 64), ("k8v2-vg32", BF16, 64),
    ("k4v4-bf16", FP16, 128), ("k4v4", FP16, 96), ("k8v8", FP16, 256), ("k2v1-g32-vg32-bf16", BF16, 256)])
def test_groups_types_and_sizes(name, dtype, head_dim):
    check(Case(name, dtype, head_dim=head_dim, lengths=(300, 400), num_heads=3, num_heads_kv=1, sinks=5))


@pytest.mark.parametrize("name", ("k8v8", "k4v4-g32-vg32", "k2v2", "k1v1-g64"))
@pytest.mark.parametrize("data", testing.DATA)
def test_hard_data(data, name):
    bf16 = data in ("meta-beyond-fp16", "q-1e6-k-1e-6")
    name, dtype = (name + "-bf16", BF16) if bf16 else (name, FP16)
    check(Case(name, dtype, lengths=LENGTHS, sinks=32, data=data, num_heads=4))


@pytest.mark.parametrize("name, dtype, head_dim", [
    ("kitty", FP16, 128), ("kitty-pro", FP16, 128), ("kitty-pro", BF16, 128), ("kitty", FP16, 64),
    ("kitty-pro-bf16", BF16, 64), ("kitty-b40-vg64", FP16, 128), ("kitty-b0", FP16, 128), ("kitty-b128", FP16, 128),
    ("kitty-b8-vg32-bf16", FP16, 96), ("kitty-pro", FP16, 96), ("kitty-b72-variance", BF16, 128)])
def test_boosted_channels(name, dtype, head_dim):
    """Half a column tile of slots, a lone one, several; the packed keys whose V is still in 16 bit included."""
    check(Case(name, dtype, head_dim=head_dim, lengths=(0, 127, 129, 300, 700), num_heads=3, num_heads_kv=1, sinks=5))


@pytest.mark.parametrize("name", ("kitty", "kitty-pro", "kitty-b40-vg32"))
@pytest.mark.parametrize("data", testing.DATA)
def test_boosted_channels_of_hard_data(data, name):
    bf16 = data in ("meta-beyond-fp16", "q-1e6-k-1e-6")
    name, dtype = (name + "-bf16", BF16) if bf16 else (name, FP16)
    check(Case(name, dtype, lengths=LENGTHS, sinks=32, data=data, num_heads=4))


@pytest.mark.parametrize("window_v", (128, 256))
@pytest.mark.parametrize("name", ("k8v8", "k4v4-g32", "k2v1-g64-bf16", "k1v2"))
@pytest.mark.parametrize("data", ("normal", "v-1e-4-beside-sink", "v-page-1e3-after-1e-4"))
def test_packed_keys_beside_values_in_16_bit(name, data, window_v):
    fmt = dataclasses.replace(FORMATS[name], window_v=window_v)
    check(Case(fmt, BF16 if "bf16" in name else FP16, lengths=LENGTHS, sinks=3, data=data, num_heads=4))


@pytest.mark.parametrize("ratio, sinks, num_splits, warps",
                         [(1, 0, 1, 1), (2, 1, 3, 4), (3, 40, 11, 2), (4, 130, 2, 3)])
def test_rows_splits_warps_and_sinks(ratio, sinks, num_splits, warps):
    case = Case("k4v2", head_dim=64, num_heads=2 * ratio, num_heads_kv=2, lengths=LENGTHS, sinks=sinks)
    check(case, num_splits=num_splits, warps=warps)


def check_values(k, v, q, name: str) -> None:
    """One sequence of given K, V [tokens, 1, head_dim] and q [1, 1, heads, head_dim]; tolerance of hard data."""
    cache = KVCache(name, 8, 1, k.shape[-1], BF16, sinks=0)
    cache.prefill(0, k, v)
    case = Case(name, BF16, k.shape[-1], q.shape[2], 1, (len(k),), data="custom")
    within(testing.Problem(case, q.to(BF16), cache, (k,), (v,)), num_splits=1, warps=1)


NAMES = ("k4v4-bf16", "k2v2-g32-vg32-bf16", "kitty-pro-bf16")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", (0.0, -3.5, 1e-30, 1e30))
def test_constant_pages_have_scale_zero(name, value):
    k = torch.randn(300, 1, 64)
    k[:128] = 2.0
    check_values(k, torch.full_like(k, value), torch.randn(1, 1, 4, 64), name)


@pytest.mark.parametrize("name", NAMES)
def test_zero_k_and_zero_query_rows(name):
    k, v, q = torch.zeros(300, 1, 64), torch.randn(300, 1, 64), torch.randn(1, 1, 4, 64)
    q[:, :, 1:3] = 0
    check_values(k, v, q, name)
    check_values(torch.randn(300, 1, 64), v, q, name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("q_size, k_size, first, second", [
    (1e30, 1e-30, 1e-30, 1e30), (1e-30, 1e30, 1e33, 1e-3), (1e-36, 1e36, 1e35, 1e35), (1e-3, 1e3, 1e35, 1e-12)])
def test_sizes_far_apart(name, q_size, k_size, first, second):
    q, k, v = torch.randn(1, 1, 4, 64), torch.randn(300, 1, 64), torch.randn(300, 1, 64)
    v[:128] *= first
    v[128:] *= second
    check_values(k * k_size, v, q * q_size, name)


@pytest.mark.parametrize("name", ("k8v8", "k4v4", "k2v2", "k1v1"))
def test_logits_are_closer_than_the_register_path_s(name):
    """16-bit fixed point against an fp16 rounding of q s, without and with centring."""
    problem = testing.build(Case(name, num_heads=4, num_heads_kv=1, lengths=(257,), poison=False))
    cache, page = problem.cache, int(problem.cache.table[0, 0])
    k = cache.dequantize_pages(torch.tensor([page]))[0][0, 0].double()
    want = emulation.LOG2_E * (problem.q[0, 0].double() @ k.T).numpy()
    record = cache.pool[page, 0].numpy()

    def error(warp, rows) -> float:
        got = np.empty((8, layout.PAGE_TOKENS))
        token = layout.TILE * np.arange(8)[:, None, None] + emulation.C_ROW
        got[emulation.C_COL, token] = warp.logits(record)[0]
        return float(np.sqrt(((got[rows] - want) ** 2).mean()))

    integer = error(integer_emulation.Warp(cache, problem.q[0, 0], emulation.LOG2_E), slice(None, None, 2))
    register = error(emulation.Warp(cache, problem.q[0, 0], 8, emulation.LOG2_E, True), slice(0, 4))
    assert integer < register
