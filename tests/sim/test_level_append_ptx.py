"""``append`` of two levels by the compiled kernel on the CPU: bytes and counters are what torch operations leave."""

import copy
import re

import numpy as np
import pytest
import torch
from unit.level_caches import SCRATCH

from lowbit_attn import emit, kernels, sass, toolchain
from lowbit_attn.formats.levels import parse
from lowbit_attn.kernels.registry import OVERLAPPING
from lowbit_attn.levels import step
from lowbit_attn.levels.frames import FramePool
from lowbit_attn.levels.level_cache import LevelCache
from sim.ptx import build
from sim.ptx.levels import run_append

LENGTHS = (0, 3, 9, 250, 700)  # of rows: empty, in the sinks, just behind them, with stages, with pages


def make(head_dim: int, dtype: torch.dtype, heads: int, sinks: int, max_q_len: int = 16) -> LevelCache:
    pool = FramePool("lean", head_dim=head_dim, frames=60)
    cache = LevelCache(pool, heads, sinks=sinks, max_batch=len(LENGTHS), max_seqlen=900, max_q_len=max_q_len,
                       dtype=dtype)
    for row, length in enumerate(LENGTHS):
        k, v = torch.randn(2, length, heads, head_dim).to(dtype)
        cache.prefill(row, k, v, torch.randn(length, 2 * heads, head_dim).to(dtype) if length else None)
    return cache


def everything(cache: LevelCache) -> dict[str, torch.Tensor]:
    """All tensors of a cache, bytes that mean nothing included."""
    return {name: x.clone() for name, x in vars(cache).items() if isinstance(x, torch.Tensor) and name not in SCRATCH}


def check(cache: LevelCache, rows: list[int], tokens: int, seed: int = 0) -> None:
    index, twin = torch.tensor(rows), copy.deepcopy(cache)
    k, v = (torch.randn(len(rows), tokens, cache.num_heads_kv, cache.head_dim).to(cache.dtype) for _ in range(2))
    step.append(twin, index, k, v)
    run_append(cache, index, k, v, np.random.default_rng(seed).permutation)
    want = everything(twin)
    for name, x in everything(cache).items():
        assert torch.equal(x, want[name]), name


@pytest.mark.parametrize("head_dim, dtype, heads, sinks, tokens", [
    (64, torch.float16, 2, 8, 1), (128, torch.bfloat16, 1, 8, 1), (96, torch.float16, 3, 8, 5),
    (64, torch.bfloat16, 1, 0, 16), (128, torch.float16, 2, 12, 16)])
def test_new_tokens_go_to_sinks_and_rings(head_dim, dtype, heads, sinks, tokens):
    """Rows in the cache's order and in another, over the end of the sinks and of the ring."""
    cache = make(head_dim, dtype, heads, sinks)
    check(cache, list(range(len(LENGTHS))), tokens)
    for seed in range(3):
        check(cache, [4, 0, 3, 1], tokens, seed)
    assert not cache.faults.any() and cache.n_tok.tolist() == [
        n + tokens * times for n, times in zip(LENGTHS, (4, 4, 1, 4, 4))]


def test_rows_without_room_keep_all_and_are_marked():
    """Rings that are full, or a token short of it, and a sequence at its longest."""
    cache = make(64, torch.float16, 2, 8)
    room = cache.limit - cache.n_tok
    cache.n_tok += torch.tensor([room[0], room[1] - 2, 0, room[3] - 3, room[4] + 5]).int()
    cache.n_sink.clamp_(min=0).copy_(cache.n_tok.clamp(max=8))
    cache.recount()
    check(cache, [0, 1, 2, 3, 4], 3)
    assert cache.faults.tolist() == [1, 1, 0, 0, 1]
    check(cache, [3, 2, 0], 1)
    assert cache.faults.tolist() == [1, 1, 0, 1, 1]


def test_one_head_after_another_in_any_order_sees_the_counters_of_before():
    """Many heads: those that come after the first one's CTA must not count from the row's new length."""
    cache = make(64, torch.float16, 12, 8)
    for seed in range(4):
        check(cache, [1, 2], 2, seed)


@pytest.mark.parametrize("op", OVERLAPPING)
def test_kernels_that_start_early_wait_for_the_one_before_ahead_of_any_access(op):
    """Their launches ask for it on sm_90; sm_80 knows neither."""
    for target, waits in (("sm_90", 1), ("sm_80", 0))[: 1 + (op == "level_append")]:  # the others take long to compile
        keys = {key.op: key for key in (kernels.level_append_key(target, "float16", 64),
                                        *kernels.manage_keys(target, "float16", 64, parse("lean")))}
        text = build.compiled(keys[op], "ptx").decode()
        assert kernels.trace(keys[op]).overlaps and emit.may_overlap(keys[op]) == waits
        before, *after = text.split("griddepcontrol.wait;")
        assert len(after) == waits
        if waits:
            assert not re.search(r"\b(ld|st|atom|red|cp)\.(async\.)?[a-z.]*global", before)
            assert re.search(r"\bld\.global", after[0])


@pytest.mark.parametrize("head_dim, target", [(64, "sm_90"), (96, "sm_90"), (128, "sm_90"), (128, "sm_80")])
def test_it_spills_no_registers(head_dim, target):
    try:
        toolchain.find_tool("nvdisasm"), toolchain.find_tool("cuobjdump")
    except toolchain.ToolMissingError as error:
        pytest.skip(str(error))
    key = kernels.level_append_key(target, "float16", head_dim)
    kernel, = sass.inspect_bytes(build.compiled(key, "cubin"))
    assert [op for op in sass.SPILLS if kernel.ops[op]] == [] and kernel.registers <= 64
    assert kernel.ops["STG.E.128"] or kernel.ops["STG"]
