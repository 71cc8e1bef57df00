"""Hopper's tile path over codebook caches, from its PTX on the CPU: see hopper_calls."""

from dataclasses import replace

import pytest
import torch

from lowbit_attn import testing
from lowbit_attn.reference import Attention
from lowbit_attn.testing import Case
from sim.hopper_calls import compiled, decode, key_of
from sim.ptx import program as ptx

pytest.importorskip("cutlass.cute", reason="CuTe-DSL (nvidia-cutlass-dsl) is not installed")
PATH, ROWS = "codebook64", 64
ONE_HEAD = Case("cq2", head_dim=64, num_heads=9, num_heads_kv=1, lengths=(430,), sinks=5)
FEATURES = Attention(None, 20.0, 200)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("ptx")


@pytest.mark.parametrize("case, splits, options", [
    (replace(ONE_HEAD, head_dim=128), 1, Attention()),
    (replace(ONE_HEAD, format="cq4", head_dim=128, num_heads=16), 1, Attention()),
    (replace(ONE_HEAD, num_heads=32, num_heads_kv=2, lengths=(300, 0, 700)), 2, Attention()),
    (replace(ONE_HEAD, format="cq4", q_len=4, lengths=(500,)), 1, FEATURES),
    (replace(ONE_HEAD, format="kcq4vcq2", dtype=torch.bfloat16, num_heads=64), 1, Attention()),
    (replace(ONE_HEAD, format="kcq2vcq4-nonorm", head_dim=128, dtype=torch.bfloat16), 1, Attention()),
    (replace(ONE_HEAD, format="cq2-nonorm"), 1, Attention(sink_logits=torch.linspace(-3, 3, 9))),
    (replace(ONE_HEAD, format="k4vcq2", head_dim=128), 1, Attention()),
    (replace(ONE_HEAD, format="kcq4v2-vg32-bf16", num_heads=3), 2, Attention()),
    (replace(ONE_HEAD, format="k8tvcq4", dtype=torch.bfloat16, num_heads=4, q_len=2), 1, FEATURES),
    (replace(ONE_HEAD, format="cq1", head_dim=128), 1, Attention()),
    (replace(ONE_HEAD, format="kcq2vcq1", head_dim=128, dtype=torch.bfloat16, num_heads=3), 2, Attention()),
    (replace(ONE_HEAD, format="kcq1v4", head_dim=128, q_len=2), 1, FEATURES),
], ids=("cq2-d128", "cq4-d128", "cq2-ragged", "cq4-features", "kcq4vcq2-bf16", "kcq2vcq4-bf16", "nonorm", "k4vcq2",
        "kcq4v2", "k8tvcq4", "cq1", "kcq2vcq1-bf16", "kcq1v4"))
def test_codebook_tile_path(case, splits, options, scratch):
    text, cfg = compiled(key_of(case, options, PATH, ROWS), scratch)
    problem = testing.build(case)
    testing.assert_decode(*decode(ptx.Program(text), cfg, problem, options, splits),
                          testing.expected(problem, options, "tile"))
