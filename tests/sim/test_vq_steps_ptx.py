"""perf/vq_kernels.py: VQ-LLM's steps as kernels, from their PTX on the CPU: each gives what the reference gives."""

from dataclasses import replace

import pytest
import torch
from perf_scripts import script

from lowbit_attn import FORMATS, kernels, testing
from lowbit_attn.formats import codebook_order as order
from lowbit_attn.reference import Attention
from lowbit_attn.testing import Case
from sim.hopper_calls import decode, ptx_of
from sim.ptx import program as ptx

pytest.importorskip("cutlass.cute", reason="CuTe-DSL (nvidia-cutlass-dsl) is not installed")
LOOKUPS = ("global", "shared", "banks", "rotated")


@pytest.fixture(scope="module")
def steps():
    with script("vq_kernels") as module:
        yield module


def test_all_steps_are_here(steps):
    assert steps.LOOKUPS == LOOKUPS


@pytest.mark.parametrize("name, lookup", [*(("cq2", lookup) for lookup in LOOKUPS), ("cq4", "global")])
def test_a_step_is_right(steps, tmp_path, name, lookup):
    case = Case(name, num_heads=4, num_heads_kv=1, lengths=(0, 300), sinks=5)
    problem, traced = testing.build(case), steps.step_kernel(FORMATS[name], "float16", lookup)
    ours = replace(problem, cache=steps.cache_for(problem.cache, lookup))
    text = ptx_of(traced, "sm_90a", tmp_path)
    assert ("ld.global.nc" in text) == (lookup == "global")
    found = decode(ptx.Program(text), traced.entry.cfg, ours, Attention(), 1)
    testing.assert_decode(*found, testing.expected(problem))


def test_steps_differ_in_what_a_kernel_looks_up_alone(steps):
    configs = [steps.make_config(FORMATS["cq2"], "float16", lookup) for lookup in LOOKUPS]
    assert len({(cfg.warps, cfg.slots, cfg.k, cfg.v, cfg.rows) for cfg in configs}) == 1
    assert [cfg.smem_bytes < 100 << 10 for cfg in configs] == [True, False, False, False]


def test_codes_without_rotation_are_those_of_their_groups(steps):
    """A lane's byte i of K is of group 16 q + 4 i + t, its word i of V of group 4 g + i."""
    problem = testing.build(Case("cq2", num_heads_kv=1, lengths=(256,)))
    cache = problem.cache
    pages, count, start = steps.unrotated(cache), 32, cache.record.v_offset
    assert pages.shape == cache.pool.shape and not torch.equal(pages, cache.pool)
    for lane, n in ((0, 3), (13, 6), (31, 121)):
        g, t, at = lane // 4, lane % 4, n // 16 * 512 + 16 * lane + n % 16
        k = order.code_offset(n // 8 * 8 + g, n % 8 // 4 * 16 + n % 4 * 4 + t, count, False)
        v = order.code_offset(n // 16 * 16 + n % 4 // 2 * 8 + 2 * t + n % 2, 4 * g + n % 16 // 4, count, True)
        assert torch.equal(pages[..., at], cache.pool[..., k])
        assert torch.equal(pages[..., start + at], cache.pool[..., start + v])


def test_the_shipped_set_knows_no_step():
    with script("vq_steps") as timed:
        names = {timed.key_of(case.format, lookup).name for case in timed.CASES for lookup in LOOKUPS}
        kept = timed.key_of("cq2", timed.TABLE).name
    shipped = {key.name for key in kernels.shipped_keys("hopper")}
    assert len(names) == 8 and not names & shipped and kept in shipped
