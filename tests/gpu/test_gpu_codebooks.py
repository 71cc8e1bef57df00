"""Codebook caches on a GPU, which kernels fill (torch, those of keys before their rotary embedding) and torch reads in
decode, against the CPU."""

import pytest
import torch
from codebook_packing import NEAR_TIES

from lowbit_attn import KVCache, decode, why_not
from lowbit_attn.testing import assert_same_bytes, normal_codebooks, relative_error

HEADS, DIM = 2, 128
pytestmark = pytest.mark.gpu


def make(name: str, rope: str, device: str, head_dim: int = DIM) -> KVCache:
    books = normal_codebooks(name, 1, HEADS, head_dim, rope if name.startswith(("cq", "kcq")) else "post").layer(0)
    return KVCache(name, 12, HEADS, head_dim, device=device, codebooks=books, max_batch=2, max_q_len=2)


@pytest.mark.parametrize("name", ("cq4", "cq2", "cq1", "cq2-nonorm", "k4vcq2", "kcq4v2"))
@pytest.mark.parametrize("rope", ("post", "pre"))
def test_a_gpu_s_cache_is_the_cpu_s(name, rope, tmp_path):
    """Prompt, steps, share and rewind: equal bytes but where sines differ or entries are as near, equal attention;
    saved here, read there."""
    k, v = torch.randn(2, 600, HEADS, DIM).half()
    caches = [make(name, rope, device) for device in ("cpu", "cuda")]
    for cache in caches:
        mine, yours = k.to(cache.device), v.to(cache.device)
        cache.set_first_positions([0], 50)
        cache.prefill(0, mine[:400], yours[:400])
        cache.share(0, 1, 32 + 256)
        for t in range(400, 440, 2):
            cache.append(mine[None, t : t + 2], yours[None, t : t + 2], [0])
        cache.rewind([0], 1)
    on_cpu, on_gpu = caches
    q = torch.randn(2, 1, 8, DIM).half()
    o, lse = decode(q, on_cpu)
    got, got_lse = decode(q.cuda(), on_gpu, path="reference")
    if rope == "post":
        assert int((on_gpu.pool.cpu() != on_cpu.pool).sum()) <= NEAR_TIES * on_cpu.pool.numel()
    assert relative_error(got.cpu(), o) < 2e-2 and (got_lse.cpu() - lse).abs().max() < 2e-2
    on_gpu.save(tmp_path / "cache")
    found = KVCache.load(tmp_path / "cache", codebooks=on_cpu.attached.layer)
    assert_same_bytes("pool", found.pool[:3], on_gpu.pool[:3].cpu())
    assert found.n_tok.tolist() == on_gpu.n_tok.tolist() == [439, 288]


def test_a_call_that_names_no_path_is_refused_where_no_kernel_serves_it():
    cache = make("cq1", "post", "cuda", 64)
    cache.prefill(0, *torch.randn(2, 200, HEADS, 64).half().cuda())
    assert "no kernel on" in why_not(cache, 8)[0]
    with pytest.raises(NotImplementedError, match="reads its codebooks yet .*path='reference', any device"):
        decode(torch.randn(1, 1, 8, 64).half().cuda(), cache)


def test_a_step_with_keys_before_their_embedding_cannot_be_captured():
    cache = make("cq2", "pre", "cuda")
    k = torch.randn(1, 1, HEADS, DIM).half().cuda()
    cache.append(k, k)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(NotImplementedError, match="before their rotary embedding, whose steps cannot be captured"):
        with torch.cuda.graph(graph):
            cache.append(k, k)
    assert cache.n_tok.tolist() == [1, 0]
