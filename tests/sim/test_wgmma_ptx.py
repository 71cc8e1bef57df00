"""Hopper's wgmma path from its PTX on the CPU: codes unpacked to A operands in registers, and its rings by group."""

from dataclasses import replace

import pytest
import torch

from lowbit_attn import testing
from lowbit_attn.reference import Attention
from lowbit_attn.testing import Case
from sim.hopper_calls import compiled, decode, key_of
from sim.ptx import program as ptx

pytest.importorskip("cutlass.cute", reason="CuTe-DSL (nvidia-cutlass-dsl) is not installed")
PATH, ROWS = "wgmma", 32
ONE_HEAD = Case("k4v4", num_heads=4, num_heads_kv=1, q_len=4, lengths=(430,), sinks=5)
FEATURES = Attention(None, 20.0, 200)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("ptx")


@pytest.mark.parametrize("case, splits, options", [
    (replace(ONE_HEAD, format="k2v2", lengths=(1100, 0)), 2, Attention()),
    (replace(ONE_HEAD, q_len=5, lengths=(800,)), 1, Attention(sink_logits=torch.linspace(-3, 3, 4))),
    (replace(ONE_HEAD, format="k2tv4", q_len=8, lengths=(300, 900)), 1, Attention()),
    (replace(ONE_HEAD, format="k4v2-g64-vg32", head_dim=64, lengths=(1100,)), 3, FEATURES),
], ids=("k2v2", "sink-logits", "keys-per-token", "features"))
def test_wgmma_path(case, splits, options, scratch):
    """Pages of all groups, 16-bit tiles of a part of them, and splits."""
    text, cfg = compiled(key_of(case, options, PATH, ROWS), scratch)
    problem = testing.build(case)
    testing.assert_decode(*decode(ptx.Program(text), cfg, problem, options, splits),
                          testing.expected(problem, options, PATH))


def test_the_order_of_turns_changes_nothing(scratch):
    text, cfg = compiled(key_of(ONE_HEAD, Attention(), PATH, ROWS), scratch)
    problem, program = testing.build(ONE_HEAD), ptx.Program(text)
    for first, second in zip(*(decode(program, cfg, problem, Attention(), 2, reverse) for reverse in (False, True))):
        assert torch.equal(first, second)


@pytest.mark.parametrize("right, wrong, message", [
    ("fence.proxy.async.shared::cta", "fence.mbarrier_init.release.cluster", "no fence"),
    ("wgmma.wait_group.sync.aligned \t0", "wgmma.wait_group.sync.aligned \t1", "read before it is written"),
])
def test_a_multiply_without_its_fences_is_found(right, wrong, message, scratch):
    text, cfg = compiled(key_of(ONE_HEAD, Attention(), PATH, ROWS), scratch)
    assert right in text
    problem = testing.build(replace(ONE_HEAD, lengths=(100,)))  # an accumulator's first product is not waited for
    with pytest.raises(AssertionError, match=message):
        decode(ptx.Program(text.replace(right, wrong)), cfg, problem, Attention(), 1)
