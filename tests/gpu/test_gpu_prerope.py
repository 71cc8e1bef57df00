"""Decode over codebooks of keys before their rotary embedding against fp64 attention over the same cache."""

from dataclasses import replace

import pytest
import torch

import lowbit_attn
from gpu.checks import check_captured, check_decode, differing_values, problem_and_expected
from lowbit_attn import testing
from lowbit_attn.reference import Attention
from lowbit_attn.testing import Case

pytestmark = pytest.mark.gpu
PATHS = ("prerope", "prerope8")
RAGGED = Case("cq2", num_heads=8, num_heads_kv=2, lengths=(700, 0, 128, 1300, 1, 2051), sinks=5, rope="pre",
              k_shared=True)
HARD = ("k-channel-100x", "k-channel-100x-q-0.05", "q-norm-100", "v-300x", "v-1e-4-beside-sink",
        "v-page-1e3-after-1e-4", "zero-200x-range", "flat-attention", "zero-pages", "q-1e3", "q-1e-3")


@pytest.fixture(autouse=True)
def kernels_of_hopper(monkeypatch):
    monkeypatch.setenv("LOWBIT_ATTN_ARCH", "hopper")


def case_of(path: str, **fields) -> Case:
    return replace(RAGGED, **{"num_heads": 16 if path == "prerope8" else 8} | fields)


@pytest.mark.parametrize("splits", [None, 1, 3, 40])
@pytest.mark.parametrize("path", PATHS)
def test_ragged_batch(path, splits, record_property):
    check_decode(case_of(path), path, f"hopper {path}", record_property, splits)


@pytest.mark.parametrize("heads, q_len", [(1, 1), (2, 1), (3, 1), (5, 1), (8, 1), (1, 2), (4, 4)])
def test_query_rows(heads, q_len, record_property):
    case = case_of("prerope", num_heads=2 * heads, lengths=(900, 300), q_len=q_len)
    check_decode(case, None, "hopper prerope rows", record_property)


@pytest.mark.parametrize("data", HARD)
@pytest.mark.parametrize("path", PATHS)
def test_hard_inputs(path, data, record_property):
    case = case_of(path, lengths=(1100,), sinks=32, data=data)
    check_decode(case, path, f"hopper {path} hard", record_property, 3)


@pytest.mark.parametrize("path", PATHS)
def test_bfloat16(path, record_property):
    check_decode(case_of(path, dtype=torch.bfloat16), path, f"hopper {path} bf16", record_property)


@pytest.mark.parametrize("path", PATHS)
def test_norms_may_be_missing(path, record_property):
    check_decode(case_of(path, format="cq2-nonorm"), path, f"hopper {path} nonorm", record_property)


@pytest.mark.parametrize("options", [Attention(softcap=20.0), Attention(0.3, 30.0, 513, True)], ids=("softcap", "both"))
def test_features(options, record_property):
    case = case_of("prerope", lengths=(1500, 600), q_len=2)
    check_decode(case, "prerope8", "hopper prerope features", record_property, 2, options)


@pytest.mark.parametrize("path", PATHS)
def test_long_sequences(path, record_property):
    """Rings turn many times, positions many turns."""
    case = case_of(path, num_heads=4, num_heads_kv=1, lengths=(20_000, 5_000), sinks=32)
    check_decode(case, path, f"hopper {path} long", record_property)


@pytest.mark.parametrize("path", PATHS)
def test_launches_repeat_themselves(path):
    assert differing_values(problem_and_expected(case_of(path, lengths=(5000, 3000)), path)[0], path) == 0


def test_a_graph_sees_new_tokens():
    check_captured(problem_and_expected(case_of("prerope", lengths=(700, 300)), "prerope")[0])


def test_what_the_kernels_do_not_read():
    """Codebooks of groups, other formats, rows that begin elsewhere, paths of keys after their embedding."""
    for fields, why in ((dict(k_shared=False), "supported: in groups half a head apart"),
                        (dict(format="cq4"), "reads codebooks of keys before their rotary embedding yet"),
                        (dict(head_dim=64), "reads codebooks of keys before their rotary embedding yet")):
        problem = testing.build(case_of("prerope", **fields), "cuda")
        assert why in " ".join(lowbit_attn.why_not(problem.cache, 8))
        with pytest.raises(NotImplementedError, match="before their rotary embedding"):
            lowbit_attn.decode(problem.q, problem.cache)
    problem = testing.build(case_of("prerope"), "cuda")
    assert "keys before their rotary embedding, supported: after it" in lowbit_attn.why_not(problem.cache, 8,
                                                                                            path="codebook")[0]
    lowbit_attn.decode(problem.q, problem.cache)
    problem.cache.free([1])
    problem.cache.set_first_positions([1], 7)
    with pytest.raises(NotImplementedError, match="rows that begin at another position"):
        lowbit_attn.decode(problem.q, problem.cache)
