"""Prefix sharing of level caches on a GPU: rows with common frames are decoded as rows of their own, and kernels that
give frames out never write to one that is shared."""

import random

import pytest
import torch

from lowbit_attn import PageExhaustedError, decode
from lowbit_attn.levels import FramePool, LevelCache
from lowbit_attn.levels.policy import Cumulative

pytestmark = pytest.mark.gpu
H, ROWS = 2, 4


def make(name: str, frames: int, **options) -> LevelCache:
    pool = FramePool(name, head_dim=128, frames=frames if name == "lean" else (frames, frames), device="cuda")
    return LevelCache(pool, H, **dict(policy=Cumulative(0.05, 0.6), max_batch=ROWS, max_seqlen=4000) | options)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half().cuda()


def fill(cache: LevelCache, row: int, length: int, seed: int = 0) -> None:
    k, v = randn(2, length, H, 128, seed=seed)
    cache.prefill(row, k, v, randn(length, 4 * H, 128, seed=seed + 1))


def step(cache: LevelCache, seed: int) -> torch.Tensor:
    """A step of all rows, as a model takes it."""
    k, v = randn(2, ROWS, 1, H, 128, seed=seed)
    q = randn(ROWS, 1, 4 * H, 128, seed=seed + 1)
    cache.append(k, v)
    o, lse = decode(q, cache)
    cache.manage(q, lse)
    return o


@pytest.mark.parametrize("name", ("lean", "lean-low"))
def test_shared_rows_go_on_as_rows_of_their_own(arch, name):
    """Over two flushes, with tokens of their own; then their source goes, and its frames do not."""
    shared, apart = make(name, 80), make(name, 80)
    fill(shared, 0, 1300)
    for row in (1, 2, 3):
        shared.share(0, row)
    for row in range(ROWS):
        fill(apart, row, 1300)
    shared.pool.check(shared)
    assert sum(shared.pool.n_free) > sum(apart.pool.n_free)
    for i in range(300):
        assert torch.equal(step(shared, 2 * i), step(apart, 2 * i)), i
        if i == 200:
            for one in (shared, apart):
                one.free([0])
                fill(one, 0, 700, seed=50)
    for one in (shared, apart):
        one.pool.check(one)
    for name in ("c_pack", "c_sink", "c_tok", "n_stage", "n_drop", "order", "new"):
        assert torch.equal(getattr(shared, name), getattr(apart, name)), name
    for row in range(ROWS):
        for one, other in zip(shared.gather(row), apart.gather(row)):
            assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("name", ("lean", "lean-low"))
def test_one_small_case(arch, name):
    """A block leaves rows with common frames; what sanitizers run."""
    cache = make(name, 40)
    fill(cache, 0, 596)
    for row in (1, 2, 3):
        cache.share(0, row)
    for i in range(5):
        o = step(cache, 2 * i)
    assert (cache.n_out == 512).all() and o.isfinite().all()
    q = randn(ROWS, 1, 4 * H, 128, seed=50)
    want = decode(q.float(), cache, path="reference")[0]
    assert (decode(q, cache)[0] - want).abs().max() < 2e-3 * want.abs().max()
    cache.pool.check(cache)


@pytest.mark.parametrize("name", ("lean", "lean-low"))
def test_random_steps_on_the_device_conserve_every_frame(name):
    """Few frames: plans are refused, rows freed and made from others; what a row holds stays while others change."""
    draw, cache = random.Random(0), make(name, 12, max_seqlen=3000)
    refused = shares = releases = 0
    for i in range(250):
        kind = draw.random()
        if kind < 0.06 or (cache.n_tok > 2900).any():
            cache.free([int(cache.n_tok.argmax()) if kind >= 0.06 else draw.randrange(ROWS)])
            releases += 1
        elif kind < 0.16:
            src, dst = draw.sample(range(ROWS), 2)
            cache.free([dst])
            try:
                cache.share(src, dst)
                shares += 1
            except PageExhaustedError:
                refused += 1
        else:
            acting = [row for row in range(ROWS) if draw.random() < 0.6 and not cache.waits[row]]
            idle = [row for row in range(ROWS) if row not in acting]
            before = {row: cache.gather(row) for row in idle}
            for at in range(60 if acting else 0):
                rows = [row for row in acting if not cache.waits[row]]
                if not rows:
                    break
                k, v = torch.randn(2, len(rows), 1, H, 128, device="cuda").half()
                q = torch.randn(len(rows), 1, 4 * H, 128, device="cuda").half()
                cache.append(k, v, rows)
                cache.manage(q, torch.full((len(rows), 4 * H, 1), 6.0, device="cuda"), rows)
            for row in idle:
                for one, other in zip(before[row], cache.gather(row)):
                    assert all(map(torch.equal, one, other)), (i, row)
            refused += int(cache.waits.sum())
            for row in cache.waits.nonzero()[:, 0].tolist():  # else it would wait forever
                cache.free([row])
        cache.pool.check(cache)
    assert refused > 5 and shares > 8 and releases > 5 and int(cache.starved)
    cache.free(range(ROWS))
    assert cache.pool.n_free == tuple(len(free.ids) for free in cache.pool.lists)
