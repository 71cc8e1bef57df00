"""``append`` of two levels on a GPU: bytes and counters are those of the torch operations on the same cache."""

import copy

import pytest
import torch

from lowbit_attn import decode
from lowbit_attn.levels import LevelCache, step
from lowbit_attn.levels.frames import FramePool

pytestmark = pytest.mark.gpu
H = 3
LENGTHS = (0, 3, 30, 250, 700)


def make(head_dim: int, dtype: torch.dtype, sinks: int = 32) -> LevelCache:
    """Rows that are empty, in their sinks, just before their end, with stages, with pages."""
    pool = FramePool("lean", head_dim=head_dim, frames=60, device="cuda")
    cache = LevelCache(pool, H, sinks=sinks, max_batch=len(LENGTHS), max_seqlen=900, max_q_len=16, dtype=dtype)
    for row, length in enumerate(LENGTHS):
        k, v = torch.randn(2, length, H, head_dim).to("cuda", dtype)
        cache.prefill(row, k, v, torch.randn(length, 2 * H, head_dim).to("cuda", dtype) if length else None)
    return cache


def check(cache: LevelCache, rows: list[int] | None, tokens: int) -> None:
    """A step by the kernel and by torch leave the same in every tensor."""
    index = cache.row_tensor(list(range(cache.max_batch)) if rows is None else rows)
    k, v = torch.randn(2, len(index), tokens, H, cache.head_dim).to("cuda", cache.dtype)
    twin = copy.deepcopy(cache)
    step.append(twin, index, k, v)
    step.KERNELS["cuda"].append(cache, index, k, v)
    for name, x in vars(cache).items():
        assert not isinstance(x, torch.Tensor) or torch.equal(x, getattr(twin, name)), name


@pytest.mark.parametrize("head_dim, dtype, tokens", [
    (128, torch.float16, 1), (128, torch.bfloat16, 4), (64, torch.float16, 1), (64, torch.float16, 16),
    (96, torch.bfloat16, 3)])
def test_one_small_case_of_append_is_that_of_torch(head_dim, dtype, tokens):
    cache = make(head_dim, dtype)
    assert cache.why_torch() == []
    for rows in (None, [4, 0, 3, 1], [2]):
        check(cache, rows, tokens)
    assert not cache.faults.any()
    cache.n_tok += cache.limit - cache.n_tok - torch.tensor([0, tokens, tokens - 1, 99, 0], device="cuda").int()
    cache.n_sink.copy_(cache.n_tok.clamp(max=cache.sinks))
    cache.recount()
    check(cache, [4, 2, 1, 0], tokens)
    assert cache.faults.tolist() == [1, 0, 1, 0, 1]


def test_tokens_from_any_address_and_of_any_strides():
    """K and V as a model has them, [batch, heads, tokens, D], at odd addresses, and of fp32."""
    cache = make(64, torch.float16)
    twin = copy.deepcopy(cache)
    k, v = (torch.randn(5 * H * 2 * 64 + 1, device="cuda").half()[1:].view(5, H, 2, 64).transpose(1, 2)
            for _ in range(2))
    cache.append(k, v)
    step.append(twin, twin.all_rows, k, v)
    cache.append(k.float(), v.float())
    step.append(twin, twin.all_rows, k, v)
    cache.append(k[:0], v[:0], [])  # no rows, no launch
    for name in ("ring_k", "ring_v", "hi_k", "hi_v", "n_tok", "c_tok"):
        assert torch.equal(getattr(cache, name), getattr(twin, name)), name


def test_steps_of_one_graph_follow_the_counters():
    """200 replays over two flushes: each token is in its slot, and what a step reads is what the last one wrote."""
    cache = make(128, torch.float16)
    k, v, q = (torch.zeros(5, 1, heads, 128, dtype=torch.float16, device="cuda") for heads in (H, H, 2 * H))
    decode(q, cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.append(k, v)
        _, lse = decode(q, cache)
        cache.manage(q, lse)
    for i in range(160):
        for x in (k, v, q):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(i)))
        graph.replay()
        for row in range(5):
            position = LENGTHS[row] + i
            heads = cache.heads_of(row)
            slot = (position - 32) % cache.slots
            held = (cache.hi_k[heads, position], cache.hi_v[heads, position]) if position < 32 else (
                cache.ring_k[heads, slot], cache.ring_v[heads, slot])
            assert torch.equal(held[0], k[row, 0]) and torch.equal(held[1], v[row, 0]), (i, row)
    cache.check()
    cache.pool.check(cache)
    assert cache.n_tok.tolist() == [length + 160 for length in LENGTHS] and (cache.n_out[3:] >= 128 + 128).all()
