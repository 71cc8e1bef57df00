"""Codebook caches that kernels fill, against the CPU: equal pages but where two entries are as near."""

import pytest
import torch
from codebook_packing import assert_same_but_near_ties, hard_tokens, pages_of

from lowbit_attn import KVCache, layout
from lowbit_attn.backend import BACKENDS
from lowbit_attn.formats import Kind
from lowbit_attn.testing import assert_same_bytes, normal_codebooks

pytestmark = pytest.mark.gpu
HEADS, SINKS, TOKENS = 3, 32, 32 + 4 * 128
CASES = [("cq2", 128, torch.float16), ("cq4", 128, torch.float16), ("cq2", 128, torch.bfloat16),
         ("cq1", 64, torch.float16), ("kcq4vcq2", 64, torch.bfloat16), ("cq2-nonorm", 96, torch.float16),
         ("cq4", 256, torch.float16)]


def make(name: str, head_dim: int, dtype: torch.dtype, device: str, rows: int = 1) -> KVCache:
    books = normal_codebooks(name, 1, HEADS, head_dim).layer(0)
    return KVCache(name, 12 * rows, HEADS, head_dim, dtype, device, SINKS, codebooks=books, max_batch=rows, max_q_len=4)


def check_pages(on_gpu: KVCache, on_cpu: KVCache, row: int, k: torch.Tensor, v: torch.Tensor) -> int:
    """Every packed page of a row, whose tokens k, v [tokens, heads, head_dim] are; returns differing codes."""
    count, different = int(on_cpu.n_qk[row]), 0
    assert count and on_gpu.n_qk.tolist() == on_cpu.n_qk.tolist() and on_gpu.n_qv.tolist() == on_cpu.n_qv.tolist()
    pages = count // layout.PAGE_TOKENS
    got, want = (c.pool.cpu()[c.table[row, :pages].long().cpu()].flatten(0, 1) for c in (on_gpu, on_cpu))
    stored = on_cpu.attached.keys(k, on_cpu.dtype).to(on_cpu.dtype)
    parts = (slice(0, on_cpu.record.v_offset), slice(on_cpu.record.v_offset, None))
    for name, x, part in zip("kv", (stored, v), parts):
        side = getattr(on_cpu.format, name)
        assert side.kind is Kind.CODEBOOK
        x = pages_of(x[SINKS : SINKS + count]).float()
        different += assert_same_but_near_ties(side, x, on_cpu.attached.entries(name), got[:, part], want[:, part])
    return different


@pytest.mark.parametrize("name, head_dim, dtype", CASES)
def test_a_prompt_s_pages_are_the_cpu_s(name, head_dim, dtype, record_property):
    k, v = (hard_tokens(HEADS, head_dim, TOKENS, seed).to(dtype) for seed in (0, 1))
    on_cpu, on_gpu = (make(name, head_dim, dtype, device) for device in ("cpu", "cuda"))
    for cache in (on_cpu, on_gpu):
        cache.prefill(0, k.to(cache.device), v.to(cache.device))
    record_property("different_codes", check_pages(on_gpu, on_cpu, 0, k, v))
    read = on_gpu.pool.cpu(), on_cpu.pool.copy_(on_gpu.pool)
    assert torch.equal(*read)
    pages = torch.arange(4)
    for got, want in zip(BACKENDS["cuda"].read_pages(on_gpu, pages.cuda()), BACKENDS["cpu"].read_pages(on_cpu, pages)):
        assert torch.equal(got.cpu().nan_to_num(nan=7.0), want.nan_to_num(nan=7.0))


@pytest.mark.parametrize("name, head_dim, dtype", CASES)
def test_steps_pack_what_a_prompt_packs(name, head_dim, dtype):
    """Rows of uneven lengths, captured and not."""
    k, v = (torch.randn(3, 320, HEADS, head_dim).to(dtype) for _ in range(2))
    on_cpu, on_gpu = (make(name, head_dim, dtype, device, rows=3) for device in ("cpu", "cuda"))
    lengths = (150, 159, 260)
    for cache in (on_cpu, on_gpu):
        for row, length in enumerate(lengths):
            cache.prefill(row, k[row, :length].to(cache.device), v[row, :length].to(cache.device))
        cache.reserve(range(3), 320)
    step_k, step_v = (torch.empty(3, 1, HEADS, head_dim, dtype=dtype, device="cuda") for _ in range(2))
    graph = None
    for t in range(40):
        new = [torch.stack([x[row, lengths[row] + t] for row in range(3)])[:, None] for x in (k, v)]
        on_cpu.append(*new)
        for held, x in zip((step_k, step_v), new):
            held.copy_(x)
        if t == 2:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                on_gpu.append(step_k, step_v)
        on_gpu.append(step_k, step_v) if graph is None else graph.replay()
    on_gpu.sync()
    for row in range(3):
        check_pages(on_gpu, on_cpu, row, k[row], v[row])
        assert_same_bytes("ring_k", on_gpu.ring_k[row].cpu(), on_cpu.ring_k[row])
    assert on_gpu.n_tok.tolist() == on_cpu.n_tok.tolist() == [190, 199, 300]


def test_a_thousand_launches_are_equal():
    k, v = (torch.randn(TOKENS, HEADS, 128, device="cuda").half() for _ in range(2))
    first = make("cq2", 128, torch.float16, "cuda")
    first.prefill(0, k, v)
    blocks = pages_of(first.attached.keys(k, k.dtype).half()[SINKS:]).unflatten(0, (4, HEADS)).contiguous()
    values = pages_of(v[SINKS:]).unflatten(0, (4, HEADS)).contiguous()
    want, pages = first.pool.clone(), first.table[0, :4].clone()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        first.pool.fill_(0)
        BACKENDS["cuda"].write_blocks(first, pages, blocks, "k")
        BACKENDS["cuda"].write_blocks(first, pages, values, "v")
        different += (first.pool != want).sum()
    assert int(different) == 0
