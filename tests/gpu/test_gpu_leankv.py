"""The torch reference of levels and scores on a GPU: what it gives on the CPU, up to the last bits of scores."""

import pytest
import torch

from lowbit_attn import decode, significance, why_not
from lowbit_attn.frames import FramePool
from lowbit_attn.levels import LevelCache

pytestmark = pytest.mark.gpu


def filled(device: str) -> LevelCache:
    pool = FramePool("lean", head_dim=128, frames=64, device=device)
    cache = LevelCache(pool, 2, max_seqlen=2000)
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 900, 2, 128, generator=generator).half().to(device)
    cache.prefill(0, k, v, torch.randn(900, 8, 128, generator=generator).half().to(device))
    for _ in range(200):
        k, v = torch.randn(2, 1, 1, 2, 128, generator=generator).half().to(device)
        q = torch.randn(1, 1, 8, 128, generator=generator).half().to(device)
        cache.append(k, v)
        _, lse = decode(q, cache, path="reference")
        cache.manage(q, lse)
    cache.pool.check(cache)
    return cache


def test_levels_hold_what_they_hold_on_the_cpu():
    there, here = filled("cuda"), filled("cpu")
    for name in ("c_pack", "c_sink", "c_tok", "n_stage", "n_out", "table", "half", "new"):
        assert torch.equal(getattr(there, name).cpu(), getattr(here, name)), name
    same = (there.order.cpu() == here.order).float().mean()
    assert same > 0.98  # near-ties of scores may fall otherwise
    torch.testing.assert_close(there.score.cpu(), here.score, rtol=1e-3, atol=1e-5)
    q = torch.randn(1, 1, 8, 128).half()
    got, want = decode(q.cuda(), there, path="reference")[0].cpu(), decode(q, here)[0]
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)


def test_without_a_path_the_lack_of_kernels_raises():
    cache = filled("cuda")
    assert why_not(cache, 8) == ["levels lean: a LevelCache has no kernels yet, supported: path='reference'"]
    with pytest.raises(NotImplementedError, match="no kernels yet"):
        decode(torch.randn(1, 1, 8, 128, device="cuda").half(), cache)


def test_scores_follow_the_cpu():
    q, k, at = torch.randn(64, 8, 128), torch.randn(2, 700, 128), torch.arange(600, 664)
    there = significance.observe(q.cuda(), at.cuda(), k.cuda(), 0)
    here = significance.observe(q, at, k, 0)
    torch.testing.assert_close(there.score.cpu(), here.score, rtol=1e-4, atol=1e-6)
    assert torch.equal(there.seen.cpu(), here.seen)
