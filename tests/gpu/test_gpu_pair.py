"""Both levels in one launch on a GPU: as two launches and their merge, on hard inputs too; bitwise the same each time;
in graphs; and what it does not serve goes to two launches."""

import pytest
import torch
from unit.level_caches import of_pages

from lowbit_attn import decode, why_not
from lowbit_attn.levels import LevelCache
from lowbit_attn.levels.pair import LEAST_ROWS

pytestmark = pytest.mark.gpu
H = 2
RAGGED = ((60, 140), (0, 90), (41, 0), (0, 0), (1, 300), (200, 3))  # (high, low) pages of two heads of three sequences


@pytest.fixture(autouse=True)
def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's kernel")


def queries(cache: LevelCache, ratio: int, q_len: int = 1) -> torch.Tensor:
    shape = cache.max_batch, q_len, ratio * cache.num_heads_kv, cache.head_dim
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(cache.dtype).cuda()


def near(found: tuple, want: tuple, limit: float) -> None:
    """Both results, o relative to the largest value of a sequence."""
    for one, other in zip(found[0].float(), want[0].float()):
        assert (one - other).abs().max() <= limit * other.abs().max().clamp(min=1e-6)
    torch.testing.assert_close(found[1], want[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name, head_dim, ratio, q_len, scales", [
    ("lean", 128, 4, 1, (1, 1)), ("lean", 128, 4, 1, (1e3, 1e-4)), ("lean", 128, 3, 1, (1e-4, 1e3)),
    ("lean", 128, 6, 1, (1, 1)), ("lean", 128, 4, 4, (1, 1)), ("lean", 64, 4, 1, (1, 1)),
    ("k4v4+k2v2", 128, 4, 1, (1, 1)), ("k4v4+k2v2", 128, 4, 1, (1e3, 1e-4)), ("lean-low", 128, 4, 1, (1, 1))])
def test_one_launch_is_two_and_their_merge(name, head_dim, ratio, q_len, scales):
    cache = of_pages(name, head_dim, RAGGED, heads=H, scales=scales, device="cuda", max_q_len=4)
    assert why_not(cache, H * ratio, q_len, path="pair") == []
    q = queries(cache, ratio, q_len)
    found = decode(q, cache, path="pair")
    near(found, decode(q, cache, path="merge"), 1e-3)
    near(found, decode(q.float(), cache, path="reference"), 2e-3)
    assert all(torch.equal(*both) for _ in range(20) for both in zip(decode(q, cache, path="pair"), found))


@pytest.mark.parametrize("name", ("lean", "lean-low"))
def test_one_small_case(name):
    """Heads without pages of a level, or of both; what sanitizers run."""
    cache = of_pages(name, 64, ((3, 5), (0, 2), (1, 0), (0, 0)), heads=H, device="cuda")
    q = queries(cache, 4)
    near(decode(q, cache, path="pair"), decode(q.float(), cache, path="reference"), 2e-3)


@pytest.mark.parametrize("ratio, copies, path", [(4, 1, "merge"), (4, 11, "pair"), (6, 11, "merge")])
def test_calls_of_many_rows_and_few_queries_take_one_launch(ratio, copies, path):
    """Few rows are faster in splits of two launches, and blocks of queries would read all pages again."""
    assert (copies * len(RAGGED) >= LEAST_ROWS) == (copies > 1)
    cache = of_pages("lean", 128, RAGGED * copies, heads=H, device="cuda")
    q = queries(cache, ratio)
    assert all(map(torch.equal, decode(q, cache), decode(q, cache, path=path)))


def test_soft_cap_and_scale():
    cache, options = of_pages("lean", 128, RAGGED, heads=H, device="cuda"), dict(softcap=5.0, softmax_scale=0.3)
    q = queries(cache, 4)
    near(decode(q, cache, path="pair", **options), decode(q, cache, path="merge", **options), 1e-3)


def test_what_one_launch_does_not_serve_takes_two():
    cache = of_pages("lean", 128, RAGGED, heads=H, device="cuda")
    q, sinks = queries(cache, 4), torch.linspace(-3, 3, 4 * H, device="cuda")
    assert all(map(torch.equal, decode(q, cache, sink_logits=sinks), decode(q, cache, sink_logits=sinks, path="merge")))
    with pytest.raises(NotImplementedError, match="pair path: sink_logits"):
        decode(q, cache, sink_logits=sinks, path="pair")


@pytest.mark.parametrize("path", ("pair", "merge"))
def test_a_graph_follows_counters_and_tables(path):
    cache = of_pages("lean", 128, RAGGED, heads=H, device="cuda")
    q = queries(cache, 4)
    decode(q, cache, path=path)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = decode(q, cache, path=path)
    for step in range(5):
        cache.c_pack.copy_((cache.c_pack - 128 * step).clamp(min=0))
        cache.table[1, 1, :90] = cache.table[1, 4, step : step + 90]
        cache.table[0, 2, :10] = cache.table[0, 5, step : step + 10]
        graph.replay()
        assert all(map(torch.equal, (o, lse), decode(q, cache, path=path)))
        near((o, lse), cache.attend(q.float()), 2e-3)
