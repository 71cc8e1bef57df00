"""The register and the integer path on a CUDA device: the kernels of the matrix against fp64, hard inputs too."""

from dataclasses import replace

import pytest
import torch

import lowbit_attn
from gpu import matrix
from gpu.checks import check_decode, check_problem, differing_values, problem_and_expected
from lowbit_attn import dispatch, kernels, testing
from lowbit_attn.reference import Attention

pytestmark = pytest.mark.gpu
LENGTHS = (0, 1, 127, 128, 129, 300, 1100)
NEEDS_BF16 = {"meta-beyond-fp16": "-bf16", "q-1e6-k-1e-6": ""}  # these inputs overflow fp16; the first its metadata too
PAGE_PATHS = matrix.REGISTER + matrix.INTEGER
OTHER_CTAS = pytest.mark.parametrize(
    "path, kernel", [pytest.param(path, kernel, id=f"{path}-{kernel}") for path, served in (
        ("small", matrix.SMALL), ("stream", matrix.STREAM)) for kernel in served])
MATRIX = pytest.mark.parametrize("kernel", PAGE_PATHS, ids=str)


def path_of(arch: str, kernel) -> str:
    """The path a kernel of REGISTER or INTEGER is for; skips the test where the architecture has none."""
    path = "integer" if kernel in matrix.INTEGER else "register"
    skip_without(path, arch)
    return path


def skip_without(path: str, arch: str) -> None:
    if path not in kernels.arch_package(arch).PATHS:
        pytest.skip(f"no {path} path on {arch}")


def skip_without_few(arch: str, kernel) -> None:
    if not kernel.shape(arch, "tile"):
        pytest.skip(f"not on {arch}'s tile path")


def case_of(kernel, **changes) -> testing.Case:
    ratio = changes.pop("ratio", kernel.rows)
    return testing.Case(kernel.format, kernel.torch_dtype, kernel.head_dim, 2 * ratio, 2, **changes)


def skip_overflow(kernel, data: str) -> None:
    needed = NEEDS_BF16.get(data)
    if needed is not None and (kernel.dtype != "bfloat16" or needed not in kernel.format):
        pytest.skip(f"{data} overflows fp16")


def skip_repeated(arch: str, kernel) -> None:
    """Kitty's kernels of few rows are those of more on an architecture that has none for few: tested once."""
    for other in matrix.KITTY:
        if other.rows > kernel.rows and replace(other, rows=kernel.rows) == kernel and (
                other.shape(arch) == kernel.shape(arch)):
            pytest.skip("the same kernel as another's")


def assert_repeatable(kernel, path: str, ratio: int, q_len: int = 1) -> None:
    """1,000 launches beside a busy stream give the same bits."""
    options = options_of(kernel)
    case = case_of(kernel, lengths=(1500, 77, 4000), sinks=4, ratio=ratio, q_len=q_len)
    problem, _ = problem_and_expected(case, path, options)
    assert differing_values(problem, path, options=options) == 0


def options_of(kernel, window: int = 200) -> Attention:
    """What asks for the kernel's features."""
    return Attention(softcap=20.0 if "softcap" in kernel.features else None,
                     window=window if "window" in kernel.features else None)


@pytest.mark.parametrize("sinks, num_splits", ((0, None), (33, 3)))
@pytest.mark.parametrize("part", (1, 0))
@MATRIX
def test_decode(arch, kernel, part, sinks, num_splits, record_property):
    """part 1: all rows of the kernel are heads; 0: another number (1, 3, 5, 7 or 9 .. 15 by the kernel)."""
    few = (1, 3, 5, 7)[len(str(kernel)) % 4] + (8 if kernel.rows == 16 else 0)
    case = case_of(kernel, ratio=kernel.rows if part else few, lengths=LENGTHS, sinks=sinks, seed=sinks)
    path = path_of(arch, kernel)
    check_decode(case, path, f"{arch} {path} {kernel.format}", record_property, num_splits, options_of(kernel))


@pytest.mark.parametrize("kernel", PAGE_PATHS + matrix.WIDE + matrix.KITTY, ids=str)
def test_one_small_case(arch, kernel, record_property):
    """Every variant once, over all segments: what compute-sanitizer is run on (perf/sanitize.py)."""
    skip_repeated(arch, kernel)
    is_wide = kernel.rows > 16
    path = path_of(arch, kernel) if kernel in PAGE_PATHS else kernel.shape(arch)[0]
    ratio, q_len = (6, 4) if is_wide else (kernel.rows // 2, 2)
    case = case_of(kernel, ratio=ratio, q_len=q_len, lengths=(3, 700), sinks=5)
    check_decode(case, path, f"{arch} small {path}", record_property, 2, options_of(kernel))


@pytest.mark.parametrize("kernel", matrix.FEW, ids=str)
def test_one_small_case_of_the_tile_path(arch, kernel, record_property):
    skip_without_few(arch, kernel)
    case = case_of(kernel, ratio=4, q_len=2, lengths=(3, 700), sinks=5)
    check_decode(case, "tile", f"{arch} small tile", record_property, 2, options_of(kernel))


@OTHER_CTAS
def test_one_small_case_of_other_ctas(arch, path, kernel, record_property):
    """The integer path's kernels with four CTAs an SM, and on Stream-K's schedule."""
    skip_without(path, arch)
    case = case_of(kernel, ratio=2, q_len=2, lengths=(3, 700), sinks=5)
    check_decode(case, path, f"{arch} small {path}", record_property, 2)


@pytest.mark.parametrize("num_splits", (None, 1, 3))
@OTHER_CTAS
def test_other_ctas(arch, path, kernel, num_splits, record_property):
    skip_without(path, arch)
    case = case_of(kernel, lengths=LENGTHS, sinks=5)
    check_decode(case, path, f"{arch} {path} {kernel.format}", record_property, num_splits)


@pytest.mark.parametrize("path, lengths", [
    ("small", (300, 0, 17, 120, 128, 260, 1, 64)), ("stream", (300, 0, 17, 3000, 128, 2500, 1, 64))])
@pytest.mark.parametrize("name", ("k2v2", "kitty"))
def test_many_sequences_take_other_ctas(arch, name, path, lengths, record_property):
    """Three times more blocks of query rows than SMs, with few pages each, or some with many."""
    case = testing.Case(name, num_heads=192, num_heads_kv=48, lengths=lengths)
    problem, want = problem_and_expected(case, None)
    found = check_problem(problem, want, None, f"{arch} many {name}", record_property)
    if path in kernels.arch_package(arch).PATHS:
        assert kernels.path_name(dispatch.kernel_of(problem.q, problem.cache, None)[0]) == path
        assert torch.equal(found, lowbit_attn.decode(problem.q, problem.cache, path=path)[0])


@pytest.mark.parametrize("name", ("k4v4", "k2v2"))
def test_one_long_sequence_is_shared_out_evenly(arch, name, record_property):
    """What the host knows of lengths picks the CTAs; equal ones take splits."""
    case = testing.Case(name, num_heads=32, num_heads_kv=8, lengths=(30_000, 300, 17, 0))
    problem, want = problem_and_expected(case, None)
    found = check_problem(problem, want, None, f"{arch} one long {name}", record_property)
    picked = kernels.path_name(dispatch.kernel_of(problem.q, problem.cache, None)[0])
    assert (picked == "stream") == ("stream" in kernels.arch_package(arch).PATHS)
    assert torch.equal(found, lowbit_attn.decode(problem.q, problem.cache, path=picked)[0])


@pytest.mark.parametrize("num_heads_kv, num_splits", [(1, None), (4, None), (4, 1)])
def test_a_schedule_of_more_sequences_than_a_warp_looks_at(arch, num_heads_kv, num_splits, record_property):
    skip_without("stream", arch)
    lengths = tuple(37 * i % 401 for i in range(150))
    case = testing.Case("k2v2", num_heads=4 * num_heads_kv, num_heads_kv=num_heads_kv, lengths=lengths, sinks=3)
    check_decode(case, "stream", f"{arch} long schedule", record_property, num_splits)


@pytest.mark.parametrize("data", [d for d in testing.DATA if d != "normal"])
@MATRIX
def test_hard_data(arch, kernel, data, record_property):
    skip_overflow(kernel, data)
    case = case_of(kernel, lengths=(700, 1300), sinks=16, data=data, ratio=4 if kernel.rows <= 8 else 12)
    path = path_of(arch, kernel)
    check_decode(case, path, f"{arch} {path} hard data {data}", record_property, options=options_of(kernel))


@pytest.mark.parametrize("kernel", [k for k in PAGE_PATHS if "+w" in k.format], ids=str)
def test_packed_keys_beside_values_in_16_bit(arch, kernel, record_property):
    """The third segment: V is packed a window later than K."""
    case, path = case_of(kernel, lengths=(100, 200, 300, 1000), sinks=5), path_of(arch, kernel)
    problem, _ = problem_and_expected(case, path)
    assert (problem.cache.n_qk > problem.cache.n_qv).any()
    check_decode(case, path, f"{arch} {path} {kernel.format}", record_property, options=options_of(kernel))


@pytest.mark.parametrize("num_splits, keep_sinks", ((None, True), (1, False), (7, True)))
@pytest.mark.parametrize("window", (1, 128, 500))
@pytest.mark.parametrize("kernel", [k for k in PAGE_PATHS if "window" in k.features], ids=str)
def test_windows(arch, kernel, window, num_splits, keep_sinks, record_property):
    case = case_of(kernel, lengths=(3, 130, 300, 1000), sinks=40, q_len=4, ratio=kernel.rows // 4)
    options = replace(options_of(kernel, window), keep_sinks=keep_sinks)
    path = path_of(arch, kernel)
    check_decode(case, path, f"{arch} {path} window", record_property, num_splits, options)


@pytest.mark.parametrize("q_len, ratio", ((1, 2), (2, 3), (3, 1), (5, 1), (8, 1), (2, 8), (16, 1), (7, 2)))
@pytest.mark.parametrize("kernel", [k for k in PAGE_PATHS if k.format in ("k4v4", "k2v2", "k4v4+w128")
                                    and not k.features], ids=str)
def test_several_queries(arch, kernel, q_len, ratio, record_property):
    """The causal mask within a step's own tokens; more rows than the kernel holds go in blocks."""
    case = case_of(kernel, lengths=(2, 17, 130, 300, 1000), sinks=6, q_len=q_len, ratio=ratio)
    path = path_of(arch, kernel)
    support = kernels.arch_package(arch).PATHS[path]
    if support.rows_for(q_len * ratio, kernel.head_dim) != kernel.shape(arch, path)[1]:
        pytest.skip("another kernel")
    check_decode(case, path, f"{arch} {path} q_len", record_property)


@pytest.mark.parametrize("num_splits", (None, 3))
@pytest.mark.parametrize("ratio, q_len, sinks", ((1, 1, 32), (2, 2, 5), (4, 1, 33), (5, 1, 0), (8, 1, 33), (3, 5, 32),
                                                 (16, 4, 7)))
@pytest.mark.parametrize("kernel", matrix.KITTY, ids=str)
def test_boosted_channels(arch, kernel, ratio, q_len, sinks, num_splits, record_property):
    """Kitty: both planes of K, the packed keys whose V is still in 16 bit included."""
    path, rows = replace(kernel, rows=ratio * q_len).shape(arch)
    if (path, rows) != kernel.shape(arch):
        pytest.skip("another kernel")
    skip_repeated(arch, kernel)
    case = case_of(kernel, lengths=LENGTHS, sinks=sinks, q_len=q_len, ratio=ratio)
    check_decode(case, path, f"{arch} kitty {kernel.format}", record_property, num_splits, options_of(kernel))


@pytest.mark.parametrize("data", [d for d in testing.DATA if d != "normal"])
@pytest.mark.parametrize("kernel", matrix.KITTY, ids=str)
def test_boosted_channels_of_hard_data(arch, kernel, data, record_property):
    skip_overflow(kernel, data)
    skip_repeated(arch, kernel)
    path, _ = kernel.shape(arch)
    ratio, q_len = (8, 4) if kernel.rows > 16 else (kernel.rows * 3 // 4, 1)
    case = case_of(kernel, lengths=(700, 1300), sinks=16, data=data, ratio=ratio, q_len=q_len)
    check_decode(case, path, f"{arch} kitty hard data {data}", record_property, options=options_of(kernel))


@pytest.mark.parametrize("kernel", matrix.KITTY, ids=str)
def test_many_launches_over_boosted_channels_are_bitwise_equal(arch, kernel):
    skip_repeated(arch, kernel)
    ratio, q_len = (8, 4) if kernel.rows > 16 else (kernel.rows, 1)
    assert_repeatable(kernel, kernel.shape(arch)[0], ratio, q_len)


@pytest.mark.parametrize("num_splits", (None, 3))
@pytest.mark.parametrize("ratio, q_len, sinks", ((4, 8, 0), (8, 8, 33), (1, 16, 5), (20, 1, 0), (32, 4, 7), (5, 5, 2)))
@pytest.mark.parametrize("kernel", matrix.WIDE, ids=str)
def test_many_query_rows(arch, kernel, ratio, q_len, sinks, num_splits, record_property):
    """The tile path on Hopper, warps that share pages on Ampere; above 64 rows in blocks."""
    path, rows = kernel.shape(arch)
    if kernels.arch_package(arch).PATHS[path].rows_for(ratio * q_len, kernel.head_dim) != rows:
        pytest.skip("fewer rows: another kernel")
    case = case_of(kernel, lengths=LENGTHS, sinks=sinks, q_len=q_len, ratio=ratio)
    check_decode(case, path, f"{arch} wide {path} {kernel.format}", record_property, num_splits, options_of(kernel))


@pytest.mark.parametrize("data", [d for d in testing.DATA if d != "normal"])
@pytest.mark.parametrize("kernel", matrix.WIDE, ids=str)
def test_many_query_rows_of_hard_data(arch, kernel, data, record_property):
    skip_overflow(kernel, data)
    path, _ = kernel.shape(arch)
    case = case_of(kernel, lengths=(700, 1300), sinks=16, data=data, ratio=8, q_len=4)
    check_decode(case, path, f"{arch} wide {path} hard data {data}", record_property, options=options_of(kernel))


@pytest.mark.parametrize("kernel", matrix.WIDE, ids=str)
def test_many_launches_of_wide_kernels_are_bitwise_equal(arch, kernel):
    assert_repeatable(kernel, kernel.shape(arch)[0], ratio=8, q_len=4)


@pytest.mark.parametrize("num_splits", (None, 3))
@pytest.mark.parametrize("ratio, q_len, sinks", ((1, 1, 33), (4, 2, 5), (7, 1, 0), (2, 3, 32), (1, 8, 7)))
@pytest.mark.parametrize("kernel", matrix.FEW, ids=str)
def test_few_query_rows_of_the_tile_path(arch, kernel, ratio, q_len, sinks, num_splits, record_property):
    skip_without_few(arch, kernel)
    case = case_of(kernel, lengths=LENGTHS, sinks=sinks, q_len=q_len, ratio=ratio)
    check_decode(case, "tile", f"{arch} few tile {kernel.format}", record_property, num_splits, options_of(kernel))


@pytest.mark.parametrize("data", [d for d in testing.DATA if d != "normal"])
@pytest.mark.parametrize("kernel", matrix.FEW, ids=str)
def test_few_query_rows_of_hard_data(arch, kernel, data, record_property):
    skip_without_few(arch, kernel)
    skip_overflow(kernel, data)
    case = case_of(kernel, lengths=(700, 1300), sinks=16, data=data, ratio=3, q_len=2)
    check_decode(case, "tile", f"{arch} few tile hard data {data}", record_property, options=options_of(kernel))


@pytest.mark.parametrize("kernel", matrix.FEW, ids=str)
def test_many_launches_of_few_rows_are_bitwise_equal(arch, kernel):
    skip_without_few(arch, kernel)
    assert_repeatable(kernel, "tile", ratio=4, q_len=2)


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


@MATRIX
def test_many_launches_beside_another_stream_are_bitwise_equal(arch, kernel):
    assert_repeatable(kernel, path_of(arch, kernel), kernel.rows)


@pytest.mark.parametrize("ratio, q_len, path", ((1, 1, "integer"), (4, 1, "integer"), (2, 2, "integer"),
                                                (5, 1, "register"), (2, 3, "register")))
@pytest.mark.parametrize("kernel", matrix.INTEGER_BESIDE_REGISTER, ids=str)
def test_up_to_four_rows_take_the_integer_path(arch, kernel, ratio, q_len, path):
    """What decode picks is bit for bit the path asked for by name."""
    if arch != "hopper":
        pytest.skip("no integer path")
    options = options_of(kernel)
    problem, _ = problem_and_expected(case_of(kernel, lengths=(300, 1100), q_len=q_len, ratio=ratio), path, options)
    picked, asked = (lowbit_attn.decode(problem.q, problem.cache, path=p, **vars(options)) for p in (None, path))
    assert torch.equal(picked[0], asked[0]) and torch.equal(picked[1], asked[1])


def test_one_page_read_in_any_order(arch):
    """Pages in another place of the pool change nothing."""
    case = testing.Case("k2v2", head_dim=128, num_heads=8, num_heads_kv=2, lengths=(2000,))
    outputs = [lowbit_attn.decode(p.q, p.cache, path="register")[0]
               for p, _ in (problem_and_expected(replace(case, page_seed=seed), "register") for seed in (None, 1, 2))]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
