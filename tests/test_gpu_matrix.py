"""A sample of everything that decode takes, drawn from a seed (--seed, --cases), on both architectures' kernels."""

from functools import cache

import pytest
import torch
from gpu_checks import check_problem

from lowbit_attn import gpu_matrix, testing
from lowbit_attn.reference import Attention

pytestmark = pytest.mark.gpu


def pytest_generate_tests(metafunc):
    calls = gpu_matrix.sample(metafunc.config.getoption("seed"), metafunc.config.getoption("cases"))
    metafunc.parametrize("call", calls, ids=str)


def case_of(call: gpu_matrix.Call) -> testing.Case:
    kernel, heads = call.kernel, call.ratio * call.num_heads_kv
    return testing.Case(kernel.format, kernel.torch_dtype, kernel.head_dim, heads, call.num_heads_kv, call.lengths,
                        call.q_len, call.sinks, call.data, call.range_search, shared_pages=call.shared_pages,
                        rotate_keys=call.rotate_keys, seed=call.seed)


@cache
def problem_and_options(call: gpu_matrix.Call) -> tuple[testing.Problem, Attention]:
    problem = testing.build(case_of(call), "cuda")
    logits = None
    if call.has_sink_logits:
        logits = 2 * torch.randn(call.ratio * call.num_heads_kv, generator=torch.Generator().manual_seed(call.seed))
        logits = logits.cuda()
    return problem, Attention(call.softmax_scale, call.softcap, call.window, call.keep_sinks, logits)


@cache
def expected(call: gpu_matrix.Call, path: str) -> testing.Expected:
    return testing.expected(*problem_and_options(call), path)


def test_decode(arch, call, record_property):
    problem, options = problem_and_options(call)
    path, rows = call.kernel.shape(arch)
    want = expected(call, "tile" if path == "tile" else "register")
    if call.has_table_per_head:
        problem = testing.Problem(problem.case, problem.q, testing.per_head_table(problem.cache), problem.k, problem.v)
    group = " ".join(("sample", arch, path, f"r{rows}", call.kernel.dtype, *call.kernel.features))
    check_problem(problem, want, path, group, record_property, call.num_splits, options)
