"""Codebooks and caches of levels on a GPU while torch.set_default_device("cuda"), a default dtype or autocast is in
force, as in engines that make a model; in torch alone, so no kernel is needed."""

import contextlib

import pytest
import torch

from lowbit_attn import FORMATS, decode
from lowbit_attn.codebooks import Codebooks
from lowbit_attn.codebooks.calibrate import recipe_of
from lowbit_attn.codebooks.prompt import learn_prompt
from lowbit_attn.levels import LevelCache
from lowbit_attn.levels.frames import FramePool
from lowbit_attn.testing import assert_same_bytes, normal_codebooks

pytestmark = pytest.mark.gpu
HEADS, DIM = 2, 64
K, V, Q = torch.randn(3, 600, HEADS, DIM, generator=torch.Generator().manual_seed(2)).half()


@contextlib.contextmanager
def an_engine():
    """What vLLM has in force while it makes a model, and autocast."""
    torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def both(call) -> None:
    want = call()
    with an_engine():
        found = call()
    for i, (got, x) in enumerate(zip(found, want, strict=True)):
        assert_same_bytes(f"result {i}", got, x)


def test_codebooks_are_made_saved_loaded_and_moved(tmp_path):
    def life():
        books = normal_codebooks("cq2", 2, HEADS, DIM, "pre")
        books.save(tmp_path / "books.safetensors")
        read = Codebooks.load(tmp_path / "books.safetensors")
        layer = read.layer(1).to("cuda:0")
        assert all(x.device.type == "cuda" for x in layer.tensors.values())
        return [*books.tensors.values(), *read.tensors.values(), *layer.tensors.values()]

    both(life)


def test_a_prompt_s_codebooks_are_learned_on_the_gpu():
    """k-means on a GPU sums in any order: the shapes and devices are compared, and that entries are of this data."""
    freq = 10_000.0 ** -(torch.arange(DIM // 2, dtype=torch.float32, device="cuda") / (DIM // 2))
    moment = torch.eye(DIM, dtype=torch.float32, device="cuda").expand(HEADS, DIM, DIM)
    k, v = (x.transpose(0, 1).cuda() for x in (K, V))
    with an_engine():
        books = learn_prompt(k, v, moment, freq, 4096, 5, recipe_of(FORMATS["cq2"], "pre"), "cq2")
    for name, x in books.tensors.items():
        assert x.device.type == "cuda" and x.isfinite().all(), name
    assert books.k_entries.dtype == torch.float16 and 0.1 < books.v_entries.float().std() < 3


def test_the_life_of_a_cache_of_levels():
    def life():
        pool = FramePool("lean", head_dim=DIM, frames=60, device="cuda")
        cache = LevelCache(pool, HEADS, sinks=5, max_batch=2, max_seqlen=800)
        k, v, q = (x.cuda() for x in (K, V, Q))
        cache.prefill(0, k[:420], v[:420], q[:420])
        cache.prefill(1, k[:30], v[:30])
        out = []
        for at in range(420, 500):
            cache.append(k[None, at : at + 1], v[None, at : at + 1], [0])
            o, lse = decode(q[None, at : at + 1], cache, path="reference")
            cache.manage(q[None, at : at + 1], lse, [0], path="reference")
            out += [o, lse]
        cache.rewind([0], 3)
        pool.grow(9)
        cache.free([1])
        return [*out, *pool.memory, *(x for sides in cache.gather(0) for x in sides)]

    both(life)
