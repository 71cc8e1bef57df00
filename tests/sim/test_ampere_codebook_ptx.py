"""Ampere's kernels over codebook caches, from their PTX on the CPU: see ampere_calls."""

from dataclasses import replace

import pytest
import torch

from lowbit_attn import kernels, testing
from lowbit_attn.formats import FORMATS
from lowbit_attn.kernels import KernelKey
from lowbit_attn.reference import Attention
from lowbit_attn.testing import Case
from sim.ampere_calls import decode, key_of

ONE_HEAD = Case("cq2", head_dim=64, num_heads=4, num_heads_kv=1, lengths=(300,), sinks=5)


def kernel_of(case: Case, options: Attention = Attention(), sizes: str = "") -> KernelKey:
    """The kernel that dispatch takes: the smallest that holds all query rows, else the largest."""
    _, rows = kernels.pick("ampere", FORMATS[case.format], case.head_dim, case.dtype,
                           case.num_heads // case.num_heads_kv * case.q_len)[0]
    return key_of(case, options, rows=rows, sizes=sizes)


@pytest.mark.parametrize("case, splits, options", [
    (replace(ONE_HEAD, head_dim=128, num_heads=8), 1, Attention()),
    (ONE_HEAD, 1, Attention()),
    (replace(ONE_HEAD, head_dim=128, data="k-channel-100x"), 1, Attention()),
    (replace(ONE_HEAD, head_dim=128, num_heads=2, lengths=(300, 0)), 2, Attention()),
    (replace(ONE_HEAD, format="cq4", head_dim=128), 1, Attention()),
    (replace(ONE_HEAD, format="cq4", head_dim=128, num_heads=1), 1, Attention()),
    (replace(ONE_HEAD, format="cq4", num_heads=8), 2, Attention()),
    (replace(ONE_HEAD, format="kcq4vcq2", num_heads=3), 1, Attention()),
    (replace(ONE_HEAD, format="kcq2vcq4-nonorm", num_heads=1), 1, Attention()),
    (replace(ONE_HEAD, dtype=torch.bfloat16, num_heads=20, num_heads_kv=2, lengths=(0, 700)), 2, Attention()),
    (replace(ONE_HEAD, format="cq4", num_heads=2, q_len=2, lengths=(500,)), 1, Attention(None, 20.0, 200)),
], ids=("cq2-d128", "cq2", "cq2-d128-hard", "cq2-d128-two", "cq4-d128", "cq4-d128-one", "cq4", "kcq4vcq2", "nonorm",
        "ragged-bf16", "features"))
def test_codebook_path(case, splits, options):
    problem = testing.build(case)
    found = decode(kernel_of(case, options), problem, options, splits)
    testing.assert_decode(*found, testing.expected(problem, options))


@pytest.mark.parametrize("name, head_dim", [("cq4", 128), ("cq2", 64)])
def test_rings_turn(name, head_dim):
    """Warps with one page and with two. The order in which they and the blocks run changes nothing."""
    case = replace(ONE_HEAD, format=name, head_dim=head_dim, num_heads=2, lengths=(128 * 13 + 40,))
    problem, key = testing.build(case), kernel_of(case)
    found = decode(key, problem)
    testing.assert_decode(*found, testing.expected(problem))
    assert all(map(torch.equal, found, decode(key, problem, reverse=True)))


@pytest.mark.parametrize("case, splits", [
    (replace(ONE_HEAD, head_dim=128, lengths=(128 * 17 + 40,)), 1),
    (replace(ONE_HEAD, format="kcq4vcq2", head_dim=128, num_heads=8, lengths=(500, 0)), 2),
    (replace(ONE_HEAD, format="cq4"), 1),
], ids=("two-rounds", "empty-splits", "cq4-d64"))
def test_in_the_shared_memory_of_sm_89(case, splits):
    """One codebook at a time, or rows of a table without their second copy."""
    problem, key = testing.build(case), kernel_of(case, sizes="sm_89")
    testing.assert_decode(*decode(key, problem, splits=splits), testing.expected(problem))
