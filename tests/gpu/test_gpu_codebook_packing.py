"""Codebook caches that kernels fill, against the CPU: equal pages but where two entries are as near."""

from dataclasses import replace

import pytest
import torch
from codebook_packing import assert_same_but_near_ties, hard_tokens, pages_of, uneven

from lowbit_attn import KVCache, layout
from lowbit_attn.cache.backend import BACKENDS
from lowbit_attn.formats import FORMATS, Kind
from lowbit_attn.testing import assert_same_bytes, normal_codebooks

pytestmark = pytest.mark.gpu
HEADS, SINKS, PAGES = 3, 32, 4
TOKENS = SINKS + (PAGES + 1) * layout.PAGE_TOKENS  # the last full block stays in 16 bit
CASES = [("cq2", 128, torch.float16), ("cq4", 128, torch.float16), ("cq2", 128, torch.bfloat16),
         ("cq4", 128, torch.bfloat16), ("cq1", 64, torch.float16), ("kcq4vcq2", 64, torch.bfloat16),
         ("cq2-nonorm", 96, torch.float16), ("cq4", 256, torch.float16)]


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
    k, v = (hard_tokens(HEADS, head_dim, TOKENS, seed, SINKS).to(dtype) for seed in (0, 1))
    on_cpu, on_gpu = (make(name, head_dim, dtype, device) for device in ("cpu", "cuda"))
    for cache in (on_cpu, on_gpu):
        cache.prefill(0, k.to(cache.device), v.to(cache.device))
    assert on_gpu.n_qk.tolist() == [PAGES * layout.PAGE_TOKENS]
    record_property("different_codes", check_pages(on_gpu, on_cpu, 0, k, v))
    read = on_gpu.pool.cpu(), on_cpu.pool.copy_(on_gpu.pool)
    assert torch.equal(*read)
    pages = torch.arange(PAGES)
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


@pytest.mark.parametrize("name, dtype", [("cq2", torch.float16), ("cq4", torch.bfloat16)])
def test_entries_and_values_of_many_magnitudes(name, dtype):
    fmt, head_dim, pages = FORMATS[name], 128, 2
    books = normal_codebooks(name, 1, HEADS, head_dim)
    books = replace(books, k_entries=uneven(books.k_entries.float()).half(), v_entries=uneven(books.v_entries).half())
    cache = KVCache(name, pages, HEADS, head_dim, dtype, "cuda", codebooks=books.layer(0))
    parts = (slice(0, cache.record.v_offset), slice(cache.record.v_offset, None))
    for side_name, part in zip("kv", parts):
        side = getattr(fmt, side_name)
        x = uneven(torch.randn(pages, HEADS, 128, head_dim // 8, 8)).flatten(3).to(dtype)
        BACKENDS["cuda"].write_blocks(cache, torch.arange(pages, device="cuda"), x.cuda(), side_name)
        entries = cache.attached.entries(side_name).cpu()
        want = side.quantize(x.float().flatten(0, 1), False, entries)
        want = torch.cat([want[plane].view(torch.uint8).flatten(1) for plane in side.plane_sizes(head_dim)], 1)
        got = cache.pool.cpu().flatten(0, 1)[:, part]
        assert_same_but_near_ties(side, x.float().flatten(0, 1), entries, got, want)


@pytest.mark.parametrize("name", ("cq2", "cq4"))
def test_a_thousand_launches_are_equal(name):
    k, v = (torch.randn(TOKENS, HEADS, 128, device="cuda").half() for _ in range(2))
    first = make(name, 128, torch.float16, "cuda")
    first.prefill(0, k, v)
    assert first.n_qk.tolist() == first.n_qv.tolist() == [PAGES * layout.PAGE_TOKENS]
    packed = slice(SINKS, SINKS + PAGES * layout.PAGE_TOKENS)
    blocks, values = (pages_of(x[packed]).unflatten(0, (PAGES, HEADS)).contiguous()
                      for x in (first.attached.keys(k, k.dtype).half(), v))
    want, pages = first.pool.clone(), first.table[0, :PAGES].clone()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        first.pool.fill_(0)
        BACKENDS["cuda"].write_blocks(first, pages, blocks, "k")
        BACKENDS["cuda"].write_blocks(first, pages, values, "v")
        different += (first.pool != want).sum()
    assert int(different) == 0
