"""Hopper's tile path from its PTX on the CPU: bulk copies, stmatrix, wgmma and the barriers between its roles."""

from dataclasses import replace

import pytest
import torch

from lowbit_attn import testing
from lowbit_attn.reference import Attention
from lowbit_attn.testing import Case
from sim.hopper_calls import compiled, decode, key_of
from sim.ptx import program as ptx

pytest.importorskip("cutlass.cute", reason="CuTe-DSL (nvidia-cutlass-dsl) is not installed")
pytestmark = pytest.mark.usefixtures("windowed_formats")
ONE_HEAD = Case("k4v4", head_dim=64, num_heads=4, num_heads_kv=1, lengths=(430,), sinks=5)
RAGGED = replace(ONE_HEAD, num_heads_kv=2, lengths=(0, 300))
FEATURES = Attention(None, 20.0, 200)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("ptx")


@pytest.mark.parametrize("case, rows, splits, options", [
    (replace(ONE_HEAD, lengths=(1100,)), 8, 1, Attention()),
    (RAGGED, 8, 3, Attention(sink_logits=torch.linspace(-3, 3, 4))),
    (replace(ONE_HEAD, format="k2v2-g64-vg32-bf16", dtype=torch.bfloat16, q_len=2, lengths=(340,)), 8, 1, FEATURES),
    (replace(ONE_HEAD, lengths=(700,)), 64, 1, Attention()),
    (replace(ONE_HEAD, format="k8tv8", head_dim=96, q_len=4), 64, 2, FEATURES),
    (replace(ONE_HEAD, format="k4v4+w128", head_dim=256), 64, 1, Attention()),
], ids=("columns", "columns-ragged", "columns-features", "rows", "rows-features", "wide-mixed"))
def test_tile_path(case, rows, splits, options, scratch):
    """Query rows as columns of the multiplies, or as rows; pages of both groups, 16-bit tiles, and splits."""
    text, cfg = compiled(key_of(case, options, "tile", rows), scratch)
    problem = testing.build(case)
    testing.assert_decode(*decode(ptx.Program(text), cfg, problem, options, splits), testing.expected(problem, options))


@pytest.mark.parametrize("rows", (8, 64))
def test_the_order_of_turns_changes_nothing(rows, scratch):
    text, cfg = compiled(key_of(RAGGED, Attention(), "tile", rows), scratch)
    problem, program = testing.build(RAGGED), ptx.Program(text)
    for first, second in zip(*(decode(program, cfg, problem, Attention(), 2, reverse) for reverse in (False, True))):
        assert torch.equal(first, second)


@pytest.mark.parametrize("right, wrong, message", [
    ("fence.proxy.async.shared::cta", "fence.mbarrier_init.release.cluster", "no fence"),
    ("wgmma.wait_group.sync.aligned \t0", "wgmma.wait_group.sync.aligned \t1", "read before it is written"),
])
def test_a_multiply_without_its_fences_is_found(right, wrong, message, scratch):
    text, cfg = compiled(key_of(ONE_HEAD, Attention(), "tile", 64), scratch)
    assert right in text
    problem = testing.build(ONE_HEAD)
    with pytest.raises(AssertionError, match=message):
        decode(ptx.Program(text.replace(right, wrong)), cfg, problem, Attention(), 1)
