"""A sample of everything that decode takes, drawn from a seed (--seed, --cases), on both architectures' kernels."""

import pytest

from gpu import matrix
from gpu.checks import check_problem
from gpu.sample import expected, problem_and_options, settled
from lowbit_attn import testing

pytestmark = pytest.mark.gpu


def pytest_generate_tests(metafunc):
    calls = matrix.sample(metafunc.config.getoption("seed"), metafunc.config.getoption("cases"))
    metafunc.parametrize("call", calls, ids=str)


def test_decode(arch, call, record_property):
    drawn, call = call, settled(call)
    if call is not drawn:
        record_property("drawn_again", str(call))
    problem, options = problem_and_options(call)
    path, rows = call.kernel.shape(arch)
    want = expected(call, "tile" if path == "tile" else "register")
    if call.has_table_per_head:
        problem = testing.Problem(problem.case, problem.q, testing.per_head_table(problem.cache), problem.k, problem.v)
    group = " ".join(("sample", arch, path, f"r{rows}", call.kernel.dtype, *call.kernel.features))
    check_problem(problem, want, path, group, record_property, call.num_splits, options)
