"""The register path on a CUDA device: the kernels of gpu_matrix against fp64, hard inputs too, and the tile path."""

from dataclasses import replace

import pytest
import torch
from gpu_checks import check_decode, differing_values, problem_and_expected

import lowbit_attn
from lowbit_attn import gpu_matrix, testing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = (0, 1, 127, 128, 129, 300, 1100)
NEEDS_BF16 = {"meta-beyond-fp16": "-bf16", "q-1e6-k-1e-6": ""}  # these inputs overflow fp16; the first its metadata too
MATRIX = pytest.mark.parametrize("kernel", gpu_matrix.REGISTER, ids=str)


def case_of(kernel, **changes) -> testing.Case:
    ratio = changes.pop("ratio", kernel.rows)
    return testing.Case(kernel.format, kernel.torch_dtype, kernel.head_dim, 2 * ratio, 2, **changes)


def skip_unless_served(kernel, arch: str) -> None:
    if reasons := gpu_matrix.served(kernel, arch):
        pytest.skip("; ".join(reasons))


@pytest.mark.parametrize("sinks, num_splits", ((0, None), (33, 3)))
@pytest.mark.parametrize("part", (1, 0))
@MATRIX
def test_decode(arch, kernel, part, sinks, num_splits, record_property):
    """part 1: all rows of the kernel are heads; 0: fewer (1, 3, 5, 7 or 9 .. 15 by the kernel)."""
    skip_unless_served(kernel, arch)
    few = (1, 3, 5, 7)[len(str(kernel)) % 4] + (8 if kernel.rows == 16 else 0)
    case = case_of(kernel, ratio=kernel.rows if part else few, lengths=LENGTHS, sinks=sinks, seed=sinks)
    check_decode(case, "register", f"{arch} register {kernel.format}", record_property, num_splits)


@pytest.mark.parametrize("data", [d for d in testing.DATA if d != "normal"])
@MATRIX
def test_hard_data(arch, kernel, data, record_property):
    skip_unless_served(kernel, arch)
    needed = NEEDS_BF16.get(data)
    if needed is not None and (kernel.dtype != "bfloat16" or needed not in kernel.format):
        pytest.skip(f"{data} overflows fp16")
    case = case_of(kernel, lengths=(700, 1300), sinks=16, data=data, ratio=4 if kernel.rows == 8 else 12)
    check_decode(case, "register", f"{arch} register hard data {data}", record_property)


@pytest.mark.parametrize("kernel", [k for k in gpu_matrix.REGISTER if "+w" in k.format], ids=str)
def test_packed_keys_beside_values_in_16_bit(arch, kernel, record_property):
    """The third segment: V is packed a window later than K."""
    skip_unless_served(kernel, arch)
    case = case_of(kernel, lengths=(100, 200, 300, 1000), sinks=5)
    problem, _ = problem_and_expected(case, "register")
    assert (problem.cache.n_qk > problem.cache.n_qv).any()
    check_decode(case, "register", f"{arch} register {kernel.format}", record_property)


@pytest.mark.parametrize("data", [d for d in testing.DATA if d not in NEEDS_BF16])
@pytest.mark.parametrize("head_dim", (64, 128))
def test_agrees_with_the_tile_path(arch, head_dim, data, record_property):
    """Both within the tolerance of fp64, and so within twice of each other."""
    case = testing.Case("k4v4", head_dim=head_dim, num_heads=8, num_heads_kv=2, lengths=(700, 1300), sinks=16,
                        data=data)
    _, want = problem_and_expected(case, "tile")
    register, tile = (check_decode(case, path, f"{arch} {path} beside the other", record_property)
                      for path in ("register", "tile"))
    for row in range(case.batch):
        assert testing.relative_error(register[row].cpu(), tile[row].cpu()) <= 2 * float(want.o_tolerance[row])


@pytest.mark.parametrize("without", gpu_matrix.ABLATED, ids="+".join)
@pytest.mark.parametrize("name", ("k4v4", "k2v2"))
def test_ablated_kernels_serve_ordinary_data(arch, monkeypatch, name, without, record_property):
    monkeypatch.setenv("LOWBIT_ATTN_WITHOUT", ",".join(without))
    case = testing.Case(name, head_dim=128, num_heads=8, num_heads_kv=2, lengths=LENGTHS, sinks=5)
    group = f"{arch} register {name} without {'+'.join(without)}"
    check_decode(case, "register", group, record_property)


@pytest.mark.parametrize("kernel", [k for k in gpu_matrix.REGISTER if k.format in ("k4v4", "k2v2")], ids=str)
def test_many_launches_beside_another_stream_are_bitwise_equal(arch, kernel):
    skip_unless_served(kernel, arch)
    problem, _ = problem_and_expected(case_of(kernel, lengths=(1500, 77, 4000), sinks=4), "register")
    assert differing_values(problem, "register") == 0


def test_one_page_read_in_any_order(arch):
    """Pages in another place of the pool change nothing."""
    case = testing.Case("k2v2", head_dim=128, num_heads=8, num_heads_kv=2, lengths=(2000,))
    outputs = [lowbit_attn.decode(p.q, p.cache, path="register")[0]
               for p, _ in (problem_and_expected(replace(case, page_seed=seed), "register") for seed in (None, 1, 2))]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
