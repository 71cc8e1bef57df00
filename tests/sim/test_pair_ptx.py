"""Both levels in one launch, by its PTX on the CPU: equal to two launches and their merge, and to attention in torch."""

import pytest
import torch

from lowbit_attn import kernels
from lowbit_attn.formats.levels import parse
from lowbit_attn.levels.frames import FramePool, frame_sizes
from lowbit_attn.levels.level_cache import LevelCache
from lowbit_attn.levels.policy import Cumulative, Shares
from lowbit_attn.reference import PLAIN, Attention
from sim.hopper_calls import compiled
from sim.pair_calls import decode_pair, decode_twice
from sim.ptx import program as ptx

pytest.importorskip("cutlass.cute", reason="CuTe-DSL (nvidia-cutlass-dsl) is not installed")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("ptx")


def filled(name: str, head_dim: int, lengths: tuple[int, ...], heads: int = 2, sinks: int = 5, scale=None,
           **options) -> LevelCache:
    """Sequences whose heads are cut at thresholds of their own, so that they are ragged. scale: of values by token,
    as a function of (tokens, their significance)."""
    levels = parse(name)
    sizes = len(frame_sizes(*(fmt.record_bytes(head_dim) for fmt in levels.formats))[1])
    cache = LevelCache(FramePool(levels, head_dim=head_dim, frames=(60,) * sizes), heads,
                       **dict(policy=Cumulative(0.2, 0.6), sinks=sinks, max_batch=len(lengths), max_seqlen=3000)
                       | options)
    for row, length in enumerate(lengths):
        if length:
            k, v = torch.randn(2, length, heads, head_dim)
            k[..., 3] += 5  # a channel with an offset
            cache.prefill(row, k.half(), v.half(), torch.randn(length, 2 * heads, head_dim).half())
    return cache


def attend(cache: LevelCache, q: torch.Tensor, ctas: int, scratch, options: Attention = PLAIN, reverse: bool = False):
    features = ("softcap",) if options.softcap is not None else ()
    key = kernels.pair_key("sm_90a", "float16", cache.head_dim, cache.format, features)
    text, entry = compiled_pair(key, scratch)
    return decode_pair(ptx.Program(text), entry, cache, q, options, ctas, reverse)


def compiled_pair(key, scratch):
    text, _ = compiled(key, scratch)
    from lowbit_attn.hopper.pair.config import config_of

    return text, config_of(key)


def near(found, want, limit: float) -> None:
    """Both results, relative to the largest value of a sequence."""
    (o, lse), (o2, lse2) = ([x.float() for x in pair] for pair in (found, want))
    for b in range(len(o)):
        assert (o[b] - o2[b]).abs().max() <= limit * o2[b].abs().max().clamp(min=1e-6), b
    torch.testing.assert_close(lse, lse2, rtol=1e-4, atol=1e-3)


def test_first(scratch):
    torch.manual_seed(0)
    cache = filled("lean", 128, (700,), heads=1)
    print(cache.c_pack, cache.c_sink, cache.c_tok, cache.c_out)
    q = torch.randn(1, 1, 4, 128).half()
    found = attend(cache, q, 1, scratch)
    near(found, cache.attend(q), 2e-3)
    near(found, decode_twice(cache, q, PLAIN, 1, scratch), 1e-3)
