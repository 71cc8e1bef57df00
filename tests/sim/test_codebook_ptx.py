"""Hopper's kernels over codebook caches, from their PTX on the CPU: see hopper_calls."""

from dataclasses import replace

import pytest
import torch

from lowbit_attn import testing
from lowbit_attn.reference import Attention
from lowbit_attn.testing import Case
from sim.hopper_calls import compiled, decode, key_of, run
from sim.ptx import program as ptx

pytest.importorskip("cutlass.cute", reason="CuTe-DSL (nvidia-cutlass-dsl) is not installed")
ONE_HEAD = Case("cq2", head_dim=64, num_heads=4, num_heads_kv=1, lengths=(300,), sinks=5)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("ptx")


@pytest.mark.parametrize("case, splits, options", [
    (replace(ONE_HEAD, head_dim=128), 1, Attention()),
    (ONE_HEAD, 1, Attention()),
    (replace(ONE_HEAD, format="cq4", head_dim=128), 1, Attention()),
    (replace(ONE_HEAD, format="cq4"), 1, Attention()),
    (replace(ONE_HEAD, format="kcq4vcq2", num_heads=3), 1, Attention()),
    (replace(ONE_HEAD, format="kcq2vcq4-nonorm", num_heads=1), 1, Attention()),
    (replace(ONE_HEAD, dtype=torch.bfloat16, num_heads=10, num_heads_kv=2, lengths=(0, 700)), 2, Attention()),
    (replace(ONE_HEAD, format="cq4", num_heads=2, q_len=2, lengths=(500,)), 1, Attention(None, 20.0, 200)),
    (replace(ONE_HEAD, format="cq4", head_dim=128, num_heads=2, q_len=2, lengths=(560,)), 1,
     Attention(None, 20.0, 330)),
    (replace(ONE_HEAD, format="cq4", head_dim=128, lengths=(0, 70)), 2, Attention()),
], ids=("cq2-d128", "cq2", "cq4-d128", "cq4", "kcq4vcq2", "nonorm", "ragged-bf16", "features", "features-d128",
        "no-pages"))
def test_codebook_path(case, splits, options, scratch):
    text, cfg = compiled(key_of(case, options, "codebook"), scratch)
    problem = testing.build(case)
    testing.assert_decode(*decode(ptx.Program(text), cfg, problem, options, splits), testing.expected(problem, options))


@pytest.mark.parametrize("case, options", [
    (replace(ONE_HEAD, format="cq4", head_dim=128, num_heads=8), Attention()),
    (replace(ONE_HEAD, format="kcq4vcq2", num_heads=16, num_heads_kv=2, lengths=(300, 0, 700)), Attention()),
    (replace(ONE_HEAD, format="cq4", num_heads=7, q_len=3, lengths=(500,)), Attention(None, 20.0, 200)),
    (replace(ONE_HEAD, head_dim=128, num_heads=8, dtype=torch.bfloat16), Attention()),
    (replace(ONE_HEAD, format="cq2-nonorm", num_heads=8), Attention()),
    (replace(ONE_HEAD, format="kcq4vcq2", head_dim=128, num_heads=7, lengths=(560,)), Attention(None, 20.0, 330)),
], ids=("cq4-d128", "kcq4vcq2", "features", "cq2-d128-bf16", "cq2-nonorm", "features-d128"))
def test_codebook_path_of_8_rows(case, options, scratch):
    text, cfg = compiled(key_of(case, options, "codebook8", 8), scratch)
    problem = testing.build(case)
    testing.assert_decode(*decode(ptx.Program(text), cfg, problem, options, 1), testing.expected(problem, options))


@pytest.mark.parametrize("name, head_dim", [("cq4", 128), ("cq2", 64)])
def test_rings_turn(name, head_dim, scratch):
    """Several pages, or pieces of pages, a warp; two splits. The order in which warps and CTAs run changes nothing."""
    case = replace(ONE_HEAD, format=name, head_dim=head_dim, num_heads=2, lengths=(128 * 36 + 40,))
    text, cfg = compiled(key_of(case, Attention(), "codebook"), scratch)
    assert cfg.slots * cfg.warps < 36 * cfg.k.cut
    problem, program = testing.build(case), ptx.Program(text)
    found = decode(program, cfg, problem, Attention(), 2)
    testing.assert_decode(*found, testing.expected(problem))
    assert all(map(torch.equal, found, decode(program, cfg, problem, Attention(), 2, reverse=True)))


@pytest.mark.parametrize("case, options", [
    (replace(ONE_HEAD, head_dim=128, num_heads=2), Attention()),
    (replace(ONE_HEAD, num_heads=2, num_heads_kv=2, lengths=(300, 0, 700)), Attention()),
    (replace(ONE_HEAD, format="kcq2vcq4", num_heads=1, q_len=2, lengths=(500,)), Attention(None, 20.0, 200)),
    (replace(ONE_HEAD, format="cq4", head_dim=128, num_heads=2, lengths=(700,)), Attention()),
], ids=("cq2-d128", "cq2", "kcq2vcq4", "cq4-d128"))
def test_codebook_path_of_2_rows(case, options, scratch):
    """With 11 warps, of which some build an entry of the table less, none races with another."""
    text, cfg = compiled(key_of(case, options, "codebook2", 2), scratch)
    problem = testing.build(case)
    call = run(ptx.Program(text), cfg, problem, options, 1, False, sees_races=case.head_dim == 128)
    testing.assert_decode(*call.found(), testing.expected(problem, options))
