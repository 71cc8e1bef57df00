"""Hopper's kernels of keys before their rotary embedding, from their PTX on the CPU: see hopper_calls."""

from dataclasses import replace

import pytest
import torch

from lowbit_attn import testing
from lowbit_attn.reference import Attention
from lowbit_attn.testing import Case
from sim.hopper_calls import compiled, decode, key_of
from sim.ptx import program as ptx

pytest.importorskip("cutlass.cute", reason="CuTe-DSL (nvidia-cutlass-dsl) is not installed")
ONE_HEAD = Case("cq2", num_heads=4, num_heads_kv=1, lengths=(300,), sinks=5, rope="pre", k_shared=True)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("ptx")


@pytest.mark.parametrize("case, options", [
    (ONE_HEAD, Attention()),
    (replace(ONE_HEAD, dtype=torch.bfloat16, num_heads=6, num_heads_kv=2, lengths=(0, 700)), Attention()),
    (replace(ONE_HEAD, num_heads=2, q_len=2, lengths=(500,)), Attention(None, 20.0, 200)),
], ids=("one-head", "ragged-bf16", "features"))
def test_4_rows(case, options, scratch):
    text, cfg = compiled(key_of(case, options, "prerope"), scratch)
    problem = testing.build(case)
    testing.assert_decode(*decode(ptx.Program(text), cfg, problem, options, 1), testing.expected(problem, options))


@pytest.mark.parametrize("case", [
    replace(ONE_HEAD, num_heads=8), replace(ONE_HEAD, num_heads=14, num_heads_kv=2, lengths=(700, 300)),
], ids=("one-head", "ragged"))
def test_8_rows(case, scratch):
    text, cfg = compiled(key_of(case, Attention(), "prerope8", 8), scratch)
    problem = testing.build(case)
    testing.assert_decode(*decode(ptx.Program(text), cfg, problem, Attention(), 1), testing.expected(problem))
