"""Windows over level caches on a GPU: kernels of both architectures beside the reference in torch; positions as steps
leave them; graphs that follow the counters."""

import pytest
import torch
from unit.level_caches import of_pages
from unit.level_texts import ROWS, H, R, Text, make, tokens

from lowbit_attn import decode, kernels
from lowbit_attn.levels import LevelCache, windows
from lowbit_attn.levels.view import views_of

pytestmark = pytest.mark.gpu
RAGGED = ((60, 140), (0, 90), (41, 0), (0, 0), (1, 300), (200, 3))  # (high, low) pages of two heads of three sequences
WINDOWS = (40, 200, 700, 4096, 20_000, 60_000)  # in the ring, of stages alone for some heads, pages, all of a head's


def query(cache: LevelCache, ratio: int) -> torch.Tensor:
    shape = cache.max_batch, 1, ratio * cache.num_heads_kv, cache.head_dim
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(cache.dtype).cuda()


def near(found: tuple, want: tuple, limit: float) -> None:
    """Both results, o relative to the largest value of a sequence."""
    for one, other in zip(found[0].float(), want[0].float()):
        assert (one - other).abs().max() <= limit * other.abs().max().clamp(min=1e-6)
    torch.testing.assert_close(found[1], want[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name, head_dim, ratio, scales, options", [
    ("lean", 128, 4, (1, 1), {}), ("lean-low", 128, 7, (1e3, 1e-4), dict(softcap=5.0, softmax_scale=0.3)),
    ("lean", 64, 16, (1e-4, 1e3), {})])
def test_kernels_are_the_reference(arch, name, head_dim, ratio, scales, options):
    cache = of_pages(name, head_dim, RAGGED, heads=2, scales=scales, device="cuda", windows=True)
    q, sinks = query(cache, ratio), torch.linspace(-3, 3, 2 * ratio, device="cuda")
    for window in WINDOWS:
        for asked in (dict(), dict(keep_sinks=True, sink_logits=sinks)):
            found = decode(q, cache, window=window, **asked, **options)
            assert torch.equal(views_of(cache).hidden, windows.hidden(cache, cache.n_tok - window))
            near(found, decode(q.float(), cache, window=window, path="reference", **asked, **options), 2e-3)
            again = decode(q, cache, window=window, path="merge", **asked, **options)
            assert all(map(torch.equal, found, again))


def test_steps_keep_positions(arch):
    """Over flushes by the kernels of manage; then a row is trimmed, and steps go on."""
    text = Text(make("lean", device="cuda"))
    text.prefill(0, 300, 1)
    assert text.cache.why_torch() == []
    text.steps([0, 1, 2], 330, 2)
    text.check()
    q = tokens(ROWS, 9)[2][:, None].cuda()
    before = decode(q, text.cache, window=200)
    text.cache.trim(200)
    near(decode(q, text.cache, window=200), before, 1e-3)
    text.steps([2, 0], 150, 3)
    text.check()
    text.cache.pool.check(text.cache)
    assert text.cache.n_drop.all()


def test_one_small_case(arch):
    """A block leaves the ring; windows that begin in a page, in a stage and in the ring; what sanitizers run."""
    text = Text(make("lean", device="cuda"))
    text.prefill(0, 444, 1)
    text.prefill(1, 443, 2)
    text.steps([0, 1, 2], 5, 3)
    assert text.cache.n_out.tolist() == [384, 384, 0]
    q = tokens(ROWS, 9)[2][:, None].cuda()
    for window in (300, 200, 20):
        near(decode(q, text.cache, window=window, keep_sinks=True),
             decode(q.float(), text.cache, window=window, keep_sinks=True, path="reference"), 2e-3)


def test_a_graph_follows_counters_and_classes(arch):
    cache = of_pages("lean", 128, RAGGED, heads=2, device="cuda", windows=True, recent=100)
    q = query(cache, 4)
    decode(q, cache, window=3000)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = decode(q, cache, window=3000)
    for step in range(4):
        cache.n_tok -= 7
        cache.recount()
        cache.classes.copy_(cache.classes.roll(1, 2))  # as many of each block
        graph.replay()
        assert all(map(torch.equal, (o, lse), decode(q, cache, window=3000)))
        near((o, lse), decode(q.float(), cache, window=3000, path="reference"), 2e-3)


def test_a_captured_step_keeps_positions(arch):
    """append, decode and manage under a window, replayed over two flushes."""
    text = Text(make("lean", device="cuda", manage_every=1))
    for row in range(ROWS):
        text.prefill(row, 70, row)
    cache, (k, v, q) = text.cache, (x.cuda() for x in tokens(ROWS * 300, 7))
    k, v, q = (x.unflatten(0, (300, ROWS, 1)) for x in (k, v, q))
    now = [x[0].clone() for x in (k, v, q)]

    def step():
        cache.append(*now[:2])
        o, lse = decode(now[2], cache, window=150, keep_sinks=True)
        cache.manage(now[2], lse, window=100_000)  # wider than the ring: what kernels serve
        return o, lse

    step()
    cache.rewind(range(ROWS), 1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for i in range(300):
        for mine, new in zip(now, (k, v, q)):
            mine.copy_(new[i])
        graph.replay()
        text.keys = [torch.cat((old, new.float())) for old, new in zip(text.keys, k[i])]
        if i % 60 == 59:
            near(found, decode(now[2].float(), cache, window=150, keep_sinks=True, path="reference"), 2e-3)
    cache.check()
    text.check()
    assert (cache.n_out >= 256).all()


def test_what_is_refused(arch):
    cache = of_pages("lean", 128, RAGGED, heads=2, device="cuda", windows=True, max_q_len=4)
    q = query(cache, 4)
    with pytest.raises(NotImplementedError, match="window: got 300 over levels for 2 queries, supported: 1, or"):
        decode(q.repeat(1, 2, 1, 1), cache, window=300)
    if arch == "hopper":
        with pytest.raises(NotImplementedError, match="pair path: feature window, supported: softcap"):
            decode(q, cache, window=300, path="pair")
    assert kernels.LEVEL_WINDOW not in kernels.FEATURES and R * H == 4
