"""Hopper's wgmma path on a CUDA device, unpacked codes as WGMMA's A operand in registers: its kernels against fp64."""

from dataclasses import replace

import pytest
import torch

from gpu.checks import check_decode, check_problem, differing_values, problem_and_expected
from lowbit_attn import dispatch, kernels, testing
from lowbit_attn.reference import Attention
from lowbit_attn.testing import Case

pytestmark = pytest.mark.gpu
PATH = "wgmma"


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    monkeypatch.setenv("LOWBIT_ATTN_ARCH", "hopper")


def many(rows: int, **changes) -> Case:
    """Two KV heads with that many query rows each, four queries."""
    return Case(num_heads=rows // 2, num_heads_kv=2, q_len=4, **changes)


@pytest.mark.parametrize("splits", (None, 1, 3))
@pytest.mark.parametrize("name", ("k4v4", "k2v2"))
def test_ragged_batch(name, splits, record_property):
    case = many(32, format=name, lengths=(4, 127, 130, 300, 700, 2051), sinks=5)
    check_decode(case, PATH, f"hopper {PATH} {name}", record_property, splits)


@pytest.mark.parametrize("name", ("k4v4", "k2v2", "k4tv4", "k2v4", "k4v2-g32-vg64", "k2tv2-g64-vg32"))
@pytest.mark.parametrize("head_dim", (64, 128))
def test_formats(head_dim, name, record_property):
    case = many(32, format=name, head_dim=head_dim, lengths=(1100, 390))
    check_decode(case, PATH, f"hopper {PATH} {name} d{head_dim}", record_property)


@pytest.mark.parametrize("heads, q_len", [(1, 1), (9, 1), (5, 4), (3, 8), (2, 16), (32, 1), (13, 3)])
def test_query_rows(heads, q_len, record_property):
    """Of one KV head; 39 in two blocks."""
    case = Case("k4v4", num_heads=2 * heads, num_heads_kv=2, lengths=(900, 300), q_len=q_len, sinks=3)
    check_decode(case, PATH, f"hopper {PATH} rows", record_property)


def test_draft_rows_take_this_path(record_property):
    """Without being asked for by name."""
    problem, want = problem_and_expected(many(32, lengths=(900, 300)), PATH)
    assert kernels.path_name(dispatch.kernel_of(problem.q, problem.cache, None)[0]) == PATH
    check_problem(problem, want, None, f"hopper {PATH} rows", record_property)


@pytest.mark.parametrize("options", [
    Attention(softcap=20.0), Attention(window=200), Attention(0.3, 30.0, 513, True),
    Attention(sink_logits=torch.linspace(-3, 3, 16))], ids=("softcap", "window", "both", "sink-logits"))
def test_features(options, record_property):
    if options.sink_logits is not None:
        options = replace(options, sink_logits=options.sink_logits.cuda())
    case = many(32, lengths=(1500, 600), sinks=5)
    check_decode(case, PATH, f"hopper {PATH} features", record_property, 2, options)


@pytest.mark.parametrize("data", [d for d in testing.DATA if d not in ("normal", "meta-beyond-fp16", "q-1e6-k-1e-6")])
@pytest.mark.parametrize("name", ("k4v4", "k2v2"))
def test_hard_inputs(name, data, record_property):
    case = many(32, format=name, lengths=(1100,), sinks=32, data=data)
    check_decode(case, PATH, f"hopper {PATH} {name} hard", record_property, 3)


@pytest.mark.parametrize("name", ("k4v4", "k2v2"))
def test_long_sequences(name, record_property):
    """Rings turn many times; pages are shared."""
    case = Case(name, num_heads=32, num_heads_kv=1, lengths=(20_000, 5_000), sinks=32, shared_pages=True)
    check_decode(case, PATH, f"hopper {PATH} {name} long", record_property)


@pytest.mark.parametrize("name", ("k4v4", "k2v2"))
def test_repeatable(name):
    problem, _ = problem_and_expected(many(32, format=name, lengths=(3000, 900)), PATH)
    assert differing_values(problem, PATH) == 0
