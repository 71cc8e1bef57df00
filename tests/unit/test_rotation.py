"""Rotated keys: an orthogonal matrix, unchanged attention, and what it is for: outlier channels beside K per token."""

import pytest
import torch

from lowbit_attn import KVCache, decode
from lowbit_attn.formats.rotation import hadamard
from lowbit_attn.testing import Case, assert_decode, attention_fp64, build, expected, relative_error


@pytest.mark.parametrize("head_dim", (32, 64, 128, 256))
def test_the_matrix_is_orthogonal_with_entries_of_one_size(head_dim):
    matrix = hadamard(head_dim).double()
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(head_dim, dtype=torch.float64))
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, head_dim**-0.5))
    assert not torch.equal(matrix, hadamard(head_dim).T.double())


SIGNS = [int(bit) for bit in "1000101000101010"]


def test_the_signs_never_change():
    """A cache packed by another version must decode: the first signs are written down here."""
    assert (hadamard(64)[:16, 0] > 0).int().tolist() == SIGNS


@pytest.mark.parametrize("head_dim", (96, 160))
def test_only_powers_of_two(head_dim):
    with pytest.raises(ValueError, match=f"head_dim: got {head_dim}, supported with a rotation: powers of two"):
        KVCache("k4tv4", 1, 1, head_dim, rotate_keys=True)


def test_only_keys_per_token():
    with pytest.raises(ValueError, match="rotate_keys: format k4v4 groups K per channel, supported: K per token"):
        KVCache("k4v4", 1, 1, 64, rotate_keys=True)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("q_len", (1, 3))
def test_attention_over_the_rotated_cache(dtype, q_len):
    problem = build(Case("k8tv8", dtype, 64, lengths=(0, 5, 300), q_len=q_len, sinks=4, rotate_keys=True))
    o, lse = decode(problem.q, problem.cache)
    assert_decode(o, lse, expected(problem))
    exact, _ = attention_fp64(problem.q[2], problem.k[2].transpose(0, 1), problem.v[2].transpose(0, 1))
    assert relative_error(o[2], exact) < 3e-2


def test_outlier_channels_spread_over_the_group():
    """The reason for the rotation: one channel 50x the others costs 4-bit keys per token little."""
    errors = []
    for rotate_keys in (False, True):
        problem = build(Case("k4tv8", head_dim=128, lengths=(700,), data="k-channel-100x-q-0.05",
                             rotate_keys=rotate_keys))
        o, _ = decode(problem.q, problem.cache)
        exact, _ = attention_fp64(problem.q[0], problem.k[0].transpose(0, 1), problem.v[0].transpose(0, 1))
        errors.append(relative_error(o[0], exact))
    assert errors[1] < errors[0] / 2
