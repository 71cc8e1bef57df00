"""Decode over codebook caches against fp64 attention over the same dequantized cache: Hopper's kernels, and Ampere's in
the sizes that they have here and on sm_89, whose shared memory holds one codebook."""

from dataclasses import replace

import pytest
import torch

import lowbit_attn
from gpu import matrix
from gpu.checks import check_captured, check_decode, check_problem, differing_values, problem_and_expected
from lowbit_attn import testing
from lowbit_attn.reference import Attention
from lowbit_attn.testing import Case

pytestmark = pytest.mark.gpu
PATH, BF16 = "codebook", torch.bfloat16
FORMATS = ("cq2", "cq4", "kcq4vcq2")
ONE_SIDED = ("k4vcq2", "kcq4v2", "k8tvcq4")
OF_1_BIT = ("cq1", "kcq2vcq1", "k4vcq1")
AMPERE, SM_89 = "ampere", "ampere-sm_89"
# with query rows that fill a kernel; of codebook64 a quarter, to save time
PATHS = (*(("hopper", name, path, rows) for path, rows in ((PATH, 4), ("codebook8", 8), ("codebook64", 16))
           for name in FORMATS),
         *(("hopper", name, "codebook2", 2) for name in FORMATS),
         *((arch, name, PATH, rows) for arch in (AMPERE, SM_89) for rows in (2, 4, 8) for name in FORMATS))
ARCHS = [("hopper", name) for name in dict.fromkeys(kernel.format for kernel in matrix.CODEBOOK)] + [
    (AMPERE, name) for name in FORMATS]
HEAD_DIMS = (128, 64)
HARD = ("k-channel-100x", "k-channel-100x-q-0.05", "q-norm-100", "v-300x", "v-token-300x", "v-1e-4-beside-sink",
        "v-page-1e3-after-1e-4", "zero-200x-range", "flat-attention", "zero-pages", "q-1e3", "q-1e-3")
RAGGED = Case("cq2", num_heads=8, num_heads_kv=2, lengths=(700, 0, 128, 1300, 1, 2051), sinks=5)


@pytest.fixture(autouse=True)
def kernels_of_an_arch(request, monkeypatch):
    """Those of the test's parameter ``arch``, or Hopper's."""
    named = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    monkeypatch.setenv("LOWBIT_ATTN_ARCH", named.get("arch", "hopper"))


@pytest.mark.parametrize("splits", [None, 1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("arch, name, path, rows", PATHS)
def test_ragged_batch(arch, name, path, rows, head_dim, dtype, splits, record_property):
    case = replace(RAGGED, format=name, head_dim=head_dim, dtype=dtype, num_heads=2 * rows)
    check_decode(case, path, f"{arch} {path} {name} d{head_dim} r{rows}", record_property, splits)


@pytest.mark.parametrize("heads, q_len", [(1, 1), (2, 1), (3, 1), (5, 1), (8, 1), (1, 2), (4, 4), (16, 1), (2, 8),
                                          (9, 1), (8, 4), (16, 4), (9, 8)])
@pytest.mark.parametrize("arch, name", ARCHS)
def test_query_rows(arch, name, heads, q_len, record_property):
    """Of one KV head: up to 8 at once, on Hopper up to 64, more in blocks; the last queries of a step do not see each
    other's tokens."""
    case = Case(name, num_heads=2 * heads, num_heads_kv=2, lengths=(900, 300), q_len=q_len, sinks=3)
    is_tile = arch == "hopper" and (heads * q_len > 8 or name in ONE_SIDED + OF_1_BIT)
    path = "codebook64" if is_tile else None
    check_problem(*problem_and_expected(case, path), None, f"{arch} codebook {name} rows", record_property)


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("data", HARD)
@pytest.mark.parametrize("arch, name, path, rows", PATHS)
def test_hard_inputs(arch, name, path, rows, data, dtype, record_property):
    case = Case(name, dtype, num_heads=2 * rows, num_heads_kv=2, lengths=(1100,), sinks=32, data=data)
    check_decode(case, path, f"{arch} {path} {name} r{rows} hard", record_property, 3)


@pytest.mark.parametrize("options", [
    Attention(softcap=20.0), Attention(window=200), Attention(0.3, 30.0, 513, True),
    Attention(sink_logits=torch.linspace(-3, 3, 8))], ids=("softcap", "window", "both", "sink-logits"))
@pytest.mark.parametrize("rows", (4, 8))
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("arch", ["hopper", AMPERE])
def test_features(arch, name, rows, options, record_property):
    if options.sink_logits is not None:
        options = replace(options, sink_logits=options.sink_logits[:rows].cuda())
    case = Case(name, num_heads=rows, num_heads_kv=2, lengths=(1500, 600), q_len=2, sinks=5)
    check_decode(case, PATH, f"{arch} codebook {name} features", record_property, 2, options)


@pytest.mark.parametrize("rows", (9, 16, 32, 64))
@pytest.mark.parametrize("data", ("normal", "k-channel-100x", "v-page-1e3-after-1e-4"))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", FORMATS)
def test_many_rows(name, head_dim, data, rows, record_property):
    """By heads; half of them by queries."""
    q_len = 2 if rows % 4 == 0 else 1
    case = Case(name, head_dim=head_dim, num_heads=2 * rows // q_len, num_heads_kv=2, lengths=(1300, 0, 400),
                q_len=q_len, sinks=32, data=data)
    check_decode(case, "codebook64", f"hopper codebook64 {name} d{head_dim}", record_property)


@pytest.mark.parametrize("rows", (1, 4, 16))
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("name", ONE_SIDED + OF_1_BIT)
def test_codebooks_on_one_side_or_of_1_bit(name, dtype, rows, record_property):
    case = Case(name, dtype, num_heads=2 * rows, num_heads_kv=2, lengths=(1300, 0, 400), sinks=32)
    check_decode(case, "codebook64", f"hopper codebook64 {name}", record_property)


@pytest.mark.parametrize("splits", (None, 1))
@pytest.mark.parametrize("arch, name, path, rows", PATHS)
def test_long_sequences(arch, name, path, rows, splits, record_property):
    """Rings turn many times; pages are shared."""
    case = Case(name, num_heads=rows, num_heads_kv=1, lengths=(20_000, 5_000), sinks=32, shared_pages=True)
    check_decode(case, path, f"{arch} {path} {name} r{rows} long", record_property, splits)


@pytest.mark.parametrize("arch", ["hopper", AMPERE])
def test_rows_of_the_cache_in_any_order(arch):
    problem, _ = problem_and_expected(RAGGED, PATH)
    o, lse = lowbit_attn.decode(problem.q, problem.cache)
    rows = torch.tensor([3, 5, 0], dtype=torch.int32, device="cuda")
    some, some_lse = lowbit_attn.decode(problem.q[rows.long()], problem.cache, rows=rows)
    for got, want in ((some, o), (some_lse, lse)):
        assert testing.relative_error(got, want[rows.long()]) < 1e-3


@pytest.mark.parametrize("arch, name, path, rows", PATHS)
def test_launches_repeat_themselves(arch, name, path, rows):
    """A ring slot is filled again only behind the last use of what it held."""
    case = Case(name, num_heads=2 * rows, num_heads_kv=2, lengths=(5000, 3000), sinks=5)
    assert differing_values(problem_and_expected(case, path)[0], path) == 0


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("arch", ["hopper", AMPERE])
def test_a_graph_sees_new_tokens(arch, name, record_property):
    """Captured once, a call reads the lengths of the moment."""
    case = Case(name, num_heads=8, num_heads_kv=2, lengths=(700, 300), sinks=5)
    check_captured(problem_and_expected(case, PATH)[0])


@pytest.mark.parametrize("arch", ["hopper", AMPERE])
def test_what_no_kernel_serves(arch):
    not_read = f"no kernel on {arch} reads its codebooks yet"
    for name, head_dim, rope, why in (("cq1", 64, "post", not_read), ("cq2", 96, "post", not_read),
                                      *[("k4vcq2", 128, "post", not_read)] * (arch != "hopper"),
                                      ("cq2", 128, "pre", "before their rotary embedding")):
        problem = testing.build(Case(name, head_dim=head_dim, rope=rope), "cuda")
        assert why in " ".join(lowbit_attn.why_not(problem.cache, 8))
        with pytest.raises(NotImplementedError, match=why):
            lowbit_attn.decode(problem.q, problem.cache)
