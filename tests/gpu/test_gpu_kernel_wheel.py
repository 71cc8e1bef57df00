"""Presets with kernels, served by an installed kernel wheel alone: nothing is compiled. Run it where one is."""

import pytest
import torch

import lowbit_attn
from lowbit_attn import FORMATS, kernels, loader, prebuilt, testing

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
TOKENS, STEPS = 300, 150  # so that steps fill a block and pack it
CASES = [(name, head_dim) for name in kernels.SHIPPED_FORMATS for head_dim in kernels.SHIPPED_HEAD_DIMS
         if not kernels.no_codebooks("hopper", FORMATS[name], head_dim)]


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch, tmp_path):
    """An empty cache of its own, and no compiling."""
    if not prebuilt.folders():
        pytest.skip("no kernel wheel is installed: make kernel-wheel ARCH=hopper")
    monkeypatch.setenv("LOWBIT_ATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("LOWBIT_ATTN_NO_JIT", "1")
    loader.load.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name, head_dim", CASES)
def test_a_wheel_serves_every_preset(name, head_dim, dtype):
    """A prompt, steps that pack a block, and decode of one and of four queries equal the CPU's reference."""
    k, v = (torch.randn(TOKENS + STEPS, 2, head_dim).to(dtype) for _ in range(2))
    books = testing.normal_codebooks(name, 1, 2, head_dim).layer(0) if FORMATS[name].needs_codebooks else None
    caches = {where: lowbit_attn.KVCache(name, 8, 2, head_dim, dtype, where, max_batch=1, max_q_len=4, codebooks=books)
              for where in ("cpu", DEVICE)}
    for where, cache in caches.items():
        cache.prefill(0, k[:TOKENS].to(where), v[:TOKENS].to(where))
        for i in range(TOKENS, TOKENS + STEPS):
            cache.append(k[None, i : i + 1].to(where), v[None, i : i + 1].to(where))
        cache.flush()
    if books is None:
        testing.assert_same_state(caches[DEVICE], caches["cpu"])
    else:  # nearest entries and norms are equal but for near-ties of two orders of summation
        assert (caches[DEVICE].pool.cpu() != caches["cpu"].pool).float().mean() < 1e-3
    for q_len in (1, 4):
        q = torch.randn(1, q_len, 8, head_dim).to(dtype)
        want, want_lse = lowbit_attn.decode(q, caches["cpu"])
        o, lse = lowbit_attn.decode(q.to(DEVICE), caches[DEVICE])
        assert testing.relative_error(o.cpu(), want) < 2e-2
        assert (lse.cpu() - want_lse).abs().max() < 2e-2
    assert not list(loader.compile.cache_dir().glob("**/*.so")), "nothing was compiled"
