"""Long contexts on a CUDA device: what a warp sums up over many pages stays within the tolerance of short ones."""

import pytest
import torch

from gpu.checks import check_problem
from lowbit_attn import KVCache, layout, testing

pytestmark = pytest.mark.gpu
TOKENS = 1 << 16


def long_problem(name: str) -> testing.Problem:
    """Random tokens in two heads, packed on the device; the cache holds what the kernels wrote."""
    case = testing.Case(name, num_heads=2, num_heads_kv=2, lengths=(TOKENS,), poison=False)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(n, 2, case.head_dim, generator=generator, device="cuda").half() for n in (1, TOKENS, TOKENS))
    cache = KVCache(name, TOKENS // layout.PAGE_TOKENS, 2, case.head_dim, device="cuda", sinks=0)
    cache.prefill(0, k, v)
    return testing.Problem(case, q[None], cache, (k,), (v,))


def expected_on_device(problem: testing.Problem) -> testing.Expected:
    """testing.expected for random tokens, computed where the cache is."""
    k, v = problem.cache.gather(0)
    o, lse = testing.attention_fp64(problem.q[0], k, v)
    beta = testing.logit_bound(problem.q[0], k, problem.cache, 0)
    return testing.Expected(o[None].cpu(), lse[None].cpu(), torch.tensor([2e-3]), torch.tensor([3 * beta + 1e-3]))


@pytest.mark.parametrize("name", ("k4v4", "k2v2"))
def test_one_split_of_many_pages(arch, name, record_property):
    """512 pages of one split: each warp adds up dozens of them, and the tensor core truncates every sum."""
    problem = long_problem(name)
    check_problem(problem, expected_on_device(problem), "register", f"{arch} long {name}", record_property, 1)
