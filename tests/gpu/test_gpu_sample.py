"""The GPU tests' sample, without a GPU: reproducible, of real formats, and with every value of every property."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from gpu import matrix
from gpu.sample import bound_of, settled
from lowbit_attn import kernels, testing
from lowbit_attn.formats import FORMATS
from lowbit_attn.formats.uniform import PerChannel

SEEDS, COUNT = (1, 2, 3), 252


@pytest.fixture(scope="module")
def calls():
    return [call for seed in SEEDS for call in matrix.sample(seed, COUNT)]


def test_a_seed_gives_the_same_calls_and_another_seed_others():
    assert matrix.sample(5, 60) == matrix.sample(5, 60)
    few, many = (list(dict.fromkeys(call.kernel for call in matrix.sample(5, n))) for n in (30, 60))
    assert len(few) == 5 and few == many[:5]  # a larger sample adds kernels to those of a smaller one
    assert not set(matrix.sample(5, 60)) & set(matrix.sample(6, 60))


def test_three_seeds_have_every_value(calls):
    formats = [FORMATS[call.kernel.format] for call in calls]
    assert {(f.k.bits, f.v.bits) for f in formats} == set(product(matrix.BITS, matrix.BITS))
    assert {isinstance(f.k, PerChannel) for f in formats} == {True, False}
    assert {f.k.storage for f in formats} == {torch.float16, torch.bfloat16}
    assert {f.k.group_size for f in formats} == {32, 64, 128, None}
    assert {f.v.group_size for f in formats} == {32, 64, 128, None}
    assert {f.window_v for f in formats} == {0, 128, 256}
    assert {c.kernel.dtype for c in calls} == {"float16", "bfloat16"}
    assert {c.kernel.head_dim for c in calls} == set(matrix.HEAD_DIMS)
    assert {c.kernel.features for c in calls} == {(), ("softcap",), ("window",), ("softcap", "window")}
    assert {c.ratio for c in calls} >= {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32}
    assert {c.q_len for c in calls} == set(range(1, 17))
    assert {length for c in calls for length in c.lengths} == set(matrix.LENGTHS)
    for flag in ("keep_sinks", "has_sink_logits", "rotate_keys", "has_table_per_head", "shared_pages", "range_search"):
        assert {getattr(c, flag) for c in calls} >= {True, False}, flag
    assert max(len(c.lengths) for c in calls) == 256
    assert {c.num_splits for c in calls} >= {None, 1, 40}


@pytest.mark.parametrize("arch", kernels.ARCH_TARGETS)
def test_every_call_has_a_kernel_that_the_build_is_told_of(arch, calls):
    told = {key for seed in SEEDS for key in matrix.sample_keys(arch, seed, COUNT)}
    for call in calls:
        path, rows = call.kernel.shape(arch)
        assert replace(call.kernel, rows=call.ratio * call.q_len).shape(arch) == (path, rows)
        assert set(call.kernel.keys(arch)) <= told


OF_CODEBOOKS = {"zero-pages", "q-1e3", "q-1e-3"}  # hard inputs that test_gpu_codebook_decode.py has


def test_hard_inputs_are_all_data_but_two():
    assert set(matrix.HARD) == set(testing.DATA) - {"normal", "flat-attention"} - OF_CODEBOOKS


@pytest.mark.parametrize("seed", SEEDS)
def test_few_calls_are_drawn_again_and_no_hard_input(seed):
    """Bounds of o as the GPU tests take them."""
    calls = matrix.sample(seed, COUNT)
    made = [settled(call) for call in calls]
    again = [(call, other) for call, other in zip(calls, made) if other is not call]
    assert len(again) <= matrix.most_drawn_again(COUNT) == 2
    for call, other in again:
        assert not call.is_hard_input and other.kernel == call.kernel
        assert other.data == call.data or call.data not in matrix.HARD
        assert bound_of(call) > matrix.BOUND_CEILING and (
            other.is_hard_input or bound_of(other) <= matrix.BOUND_CEILING)


def test_what_is_drawn_again_is_the_same_every_time():
    """Until a bound is low enough; hard data stay, and hard inputs as they stand are not asked for their bounds."""
    calls = matrix.sample(9, 120)
    asked = []

    def bound(call):
        asked.append(call)
        return 0.06 if call in calls or len(call.lengths) > 2 else 0.04

    first = [matrix.settle(call, bound) for call in calls]
    assert first == [matrix.settle(call, bound) for call in calls]
    for call, other in zip(calls, first):
        assert (call is other) == call.is_hard_input and other.kernel == call.kernel
        assert call.is_hard_input or other.is_hard_input or len(other.lengths) <= 2
        assert call.data not in matrix.HARD or other.data == call.data
    assert not any(call.is_hard_input for call in asked)
    assert len({call.data for call in calls if call.is_hard_input}) >= 8
    for seed in (1, 2):
        assert matrix.settle(calls[seed], lambda call: 0.05) is calls[seed]


def test_shipped_decode_kernels_are_few():
    for arch, targets in kernels.SHIPPED_TARGETS.items():
        for target in targets:
            made = [FORMATS[key.format] for key in kernels.shipped_keys(arch)
                    if key.op == "decode" and key.target == target]
            books, ordered = (sum(getattr(fmt, kind) for fmt in made) for kind in ("needs_codebooks", "orders_tokens"))
            assert books <= 48 and ordered <= 24 and len(made) - books - ordered <= 168
