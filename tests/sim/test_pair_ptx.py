"""Both levels in one launch, by its PTX on the CPU: as two launches and their merge, and as attention in torch."""

import pytest
import torch
from unit.level_caches import of_pages

from lowbit_attn import kernels
from lowbit_attn.levels.level_cache import LevelCache
from lowbit_attn.reference import PLAIN, Attention
from sim.hopper_calls import compiled
from sim.pair_calls import decode_pair, decode_twice
from sim.ptx import program as ptx

pytest.importorskip("cutlass.cute", reason="CuTe-DSL (nvidia-cutlass-dsl) is not installed")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("ptx")


def attend(cache: LevelCache, q: torch.Tensor, ctas: int, scratch, options: Attention = PLAIN, reverse: bool = False):
    features = ("softcap",) if options.softcap is not None else ()
    key = kernels.pair_key("sm_90a", str(cache.dtype).removeprefix("torch."), cache.head_dim, cache.format, features)
    text, cfg = compiled(key, scratch)
    return decode_pair(ptx.Program(text), cfg, cache, q, options, ctas, reverse)


def near(found, want, limit: float) -> None:
    """Both results, relative to the largest value of a sequence."""
    (o, lse), (o2, lse2) = ([x.float() for x in pair] for pair in (found, want))
    for b in range(len(o)):
        assert (o[b] - o2[b]).abs().max() <= limit * o2[b].abs().max().clamp(min=1e-6), b
    torch.testing.assert_close(lse, lse2, rtol=1e-4, atol=1e-3)


def query(cache: LevelCache, ratio: int, q_len: int = 1) -> torch.Tensor:
    shape = cache.max_batch, q_len, ratio * cache.num_heads_kv, cache.head_dim
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(cache.dtype)


RAGGED = ((9, 20), (0, 13), (7, 0), (0, 0))  # (high, low) pages of two heads of two sequences
HARD = dict(scales=(1e3, 1e-4))


@pytest.mark.parametrize("name, head_dim, pages, ratio, ctas, options", [
    ("lean", 128, ((9, 20),), 4, 1, {}), ("lean", 128, RAGGED, 4, 3, dict(heads=2)),
    ("lean", 128, RAGGED, 3, 2, dict(heads=2, **HARD)), ("lean", 128, RAGGED, 4, 2, dict(heads=2, scales=(1e-4, 1e3))),
    ("k4v4+k2v2", 128, RAGGED, 4, 2, dict(heads=2)), ("k4v4+k2v2", 64, RAGGED, 4, 2, dict(heads=2, **HARD)),
    ("lean", 64, RAGGED, 6, 3, dict(heads=2)), ("lean-low", 128, RAGGED, 4, 2, dict(heads=2)),
    ("lean-low", 64, RAGGED, 1, 5, dict(heads=2)), ("lean", 64, ((1, 15),), 2, 1, {}),
], ids=("one", "ragged", "high-large", "low-large", "44-22", "44-22-hard", "two-blocks", "lean-low", "lean-low-64",
        "low-behind-a-high"))
def test_one_launch_is_two_and_their_merge(name, head_dim, pages, ratio, ctas, options, scratch):
    """Rings turn; heads without pages of a level, or of both; runs that begin and end anywhere."""
    cache = of_pages(name, head_dim, pages, **options)
    q = query(cache, ratio)
    found = attend(cache, q, ctas, scratch)
    near(found, cache.attend(q.float()), 2e-3)
    near(found, decode_twice(cache, q, PLAIN, 2, scratch), 1e-3)


def test_rows_without_tokens_or_with_stages_alone(scratch):
    cache = of_pages("lean", 64, ((0, 0),) * 4, heads=2, staged=(0, 3), recent=0, sinks=0)
    cache.n_stage[:, 2:] = 0
    cache.recount()
    q = query(cache, 4)
    o, lse = attend(cache, q, 3, scratch)
    near((o, lse), cache.attend(q.float()), 2e-3)
    assert not o[1].any() and (lse[1] == -torch.inf).all()


@pytest.mark.parametrize("head_dim", (64, 128))
def test_several_queries_hide_what_comes_after_them(head_dim, scratch):
    """Five query heads by three queries are four blocks of rows, which begin within a query's heads."""
    cache = of_pages("lean", head_dim, ((2, 3), (0, 1)), heads=2, recent=70, max_q_len=4)
    q = query(cache, 5, 3)
    near(attend(cache, q, 2, scratch), cache.attend(q.float()), 2e-3)


@pytest.mark.parametrize("name", ("lean", "lean-low"))
def test_soft_cap_and_scale(name, scratch):
    cache, options = of_pages(name, 64, ((3, 9), (0, 2)), heads=2), Attention(softmax_scale=0.3, softcap=5.0)
    q = query(cache, 4)
    near(attend(cache, q, 2, scratch, options), cache.attend(q.float(), options), 2e-3)


def test_the_order_of_turns_changes_nothing(scratch):
    cache = of_pages("lean", 64, RAGGED, heads=2)
    found = [attend(cache, query(cache, 4), 3, scratch, reverse=reverse) for reverse in (False, True)]
    assert all(map(torch.equal, *found))


def test_bfloat16(scratch):
    cache = of_pages("lean", 64, ((2, 5),), dtype=torch.bfloat16)
    q = query(cache, 4)
    near(attend(cache, q, 1, scratch), cache.attend(q.float()), 8e-3)
