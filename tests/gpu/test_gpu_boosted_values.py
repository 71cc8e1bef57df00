"""Boosted values on a GPU: decode against fp64 attention over the same cache, the cache's life against the CPU's."""

from dataclasses import replace

import pytest
import torch

from gpu import matrix
from gpu.checks import check_decode, differing_values, problem_and_expected
from lowbit_attn import KVCache, decode, testing, why_not
from lowbit_attn.reference import Attention
from lowbit_attn.testing import Case, assert_same_bytes, assert_same_state

pytestmark = pytest.mark.gpu
NAME, BF16 = "k4v2-boost", torch.bfloat16
PATHS = ("integer", "register", "small", "stream")
RAGGED = Case(NAME, num_heads=8, num_heads_kv=2, lengths=(700, 0, 128, 1300, 1, 2051), sinks=5)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setenv("LOWBIT_ATTN_ARCH", "hopper")


@pytest.mark.parametrize("splits", [None, 1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("path", PATHS)
def test_ragged_batch(hopper, path, head_dim, dtype, splits, record_property):
    case = replace(RAGGED, head_dim=head_dim, dtype=dtype)
    check_decode(case, path, f"boosted {path} d{head_dim}", record_property, splits)


@pytest.mark.parametrize("kernel", [k for k in matrix.BOOSTED if k.format != NAME or k.head_dim == 256], ids=str)
def test_other_widths(hopper, kernel, record_property):
    case = Case(kernel.format, kernel.torch_dtype, kernel.head_dim, 2 * kernel.rows, 2, (900, 300), sinks=3)
    check_decode(case, kernel.shape("hopper")[0], f"boosted {kernel}", record_property)


@pytest.mark.parametrize("heads, q_len", [(1, 1), (3, 1), (5, 1), (8, 1), (12, 1), (1, 2), (4, 4), (2, 8), (32, 1)])
def test_query_rows(hopper, heads, q_len, record_property):
    case = Case(NAME, num_heads=2 * heads, num_heads_kv=2, lengths=(900, 300), q_len=q_len, sinks=3)
    check_decode(case, None, "boosted rows", record_property)


@pytest.mark.parametrize("path", ["integer", "register"])
@pytest.mark.parametrize("data", [d for d in testing.DATA if d not in ("meta-beyond-fp16", "q-1e6-k-1e-6")])
def test_hard_inputs(hopper, path, data, record_property):
    case = Case(NAME, num_heads=8, num_heads_kv=2, lengths=(1100,), sinks=32, data=data)
    check_decode(case, path, f"boosted {path} hard", record_property, 3)


@pytest.mark.parametrize("path", ["integer", "register"])
@pytest.mark.parametrize("options", [Attention(softcap=20.0), Attention(softmax_scale=0.2),
                                     Attention(sink_logits=torch.linspace(-3, 3, 8))],
                         ids=("softcap", "scale", "sink-logits"))
def test_options(hopper, path, options, record_property):
    if options.sink_logits is not None:
        options = replace(options, sink_logits=options.sink_logits.cuda())
    case = Case(NAME, num_heads=8, num_heads_kv=2, lengths=(1500, 600), sinks=5)
    check_decode(case, path, f"boosted {path} options", record_property, 2, options)


@pytest.mark.parametrize("path", PATHS)
def test_long_sequences(hopper, path, record_property):
    case = Case(NAME, num_heads=4, num_heads_kv=1, lengths=(20_000, 5_000), sinks=32, shared_pages=True)
    for splits in (None, 1):
        check_decode(case, path, f"boosted {path} long", record_property, splits)


@pytest.mark.parametrize("path", PATHS)
def test_runs_are_alike(hopper, path):
    problem, _ = problem_and_expected(replace(RAGGED, lengths=(700, 1300, 2051)), "register")
    assert differing_values(problem, path, launches=200) == 0


def test_windows_are_refused(hopper):
    problem, _ = problem_and_expected(RAGGED, "register")
    with pytest.raises(NotImplementedError, match="feature window"):
        decode(problem.q, problem.cache, window=200)
    assert why_not(problem.cache, 8) == []


def give_scores(there: KVCache, here: KVCache) -> None:
    """The CPU's scores and order to the GPU's cache: theirs differ in the last bits."""
    for name in ("score", "seen", "order"):
        getattr(there, name).copy_(getattr(here, name))


def tokens(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K, V and queries of steps of two rows, fp16 [count, 2, 1, heads, 128]."""
    return tuple(torch.randn(count, 2, 1, heads, 128, generator=generator).half() for heads in (2, 2, 8))


def test_a_prompt_and_steps_hold_what_the_cpu_holds():
    """Given the same scores, bytes after every flush; o and lse against the CPU's, scores within their last bits."""
    here, there = (KVCache(NAME, 16, 2, 128, device=device, max_batch=2) for device in ("cpu", "cuda"))
    generator = torch.Generator().manual_seed(0)
    for row, length in enumerate((600, 40)):
        k, v, q = (torch.randn(length, heads, 128, generator=generator).half() for heads in (2, 2, 8))
        here.prefill(row, k, v, q)
        there.prefill(row, k.cuda(), v.cuda(), q.cuda())
    torch.testing.assert_close(there.score.cpu(), here.score, rtol=1e-3, atol=1e-5)
    packed = 0
    for k, v, q in zip(*tokens(300, generator)):
        give_scores(there, here)
        here.append(k, v)
        there.append(k.cuda(), v.cuda())
        for name in ("score", "seen", "order"):
            assert_same_bytes(name, getattr(there, name).cpu(), getattr(here, name))
        if int(here.n_qv.sum()) != packed:
            packed = int(here.n_qv.sum())
            assert_same_state(there, here)
        lse = decode(q, here)[1]
        got = decode(q.cuda(), there)[1]
        torch.testing.assert_close(got.cpu(), lse, rtol=1e-3, atol=1e-2)
        here.manage(q, lse)
        there.manage(q.cuda(), got)
        torch.testing.assert_close(there.score.cpu(), here.score, rtol=5e-2, atol=1e-4)
    assert packed >= 4 * 128


def test_whole_steps_in_one_graph_rank_as_eager_ones():
    """append, decode and manage in one graph, over two flushes: scores but for last bits, orders but for near-ties."""
    eager, captured = (KVCache(NAME, 16, 2, 128, device="cuda", max_batch=2) for _ in range(2))
    generator = torch.Generator().manual_seed(2)
    for row, length in enumerate((290, 170)):
        k, v, q = (torch.randn(length, heads, 128, generator=generator).half().cuda() for heads in (2, 2, 8))
        for cache in (eager, captured):
            cache.prefill(row, k, v, q)
    for cache in (eager, captured):
        cache.reserve([0, 1], 640)
    k, v, q = (x.cuda()[0] for x in tokens(1, generator))
    decode(q, captured)
    KVCache(NAME, 4, 2, 128, device="cuda", max_batch=2).append(k, v)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured.append(k, v)
        _, lse = decode(q, captured)
        captured.manage(q, lse)
    for step, news in enumerate(zip(*tokens(300, generator))):
        for to, new in zip((k, v, q), news):
            to.copy_(new)
        graph.replay()
        eager.append(k, v)
        eager.manage(q, decode(q, eager)[1])
        if step % 20 == 0:
            torch.testing.assert_close(captured.score, eager.score, rtol=1e-2, atol=1e-3)
            assert torch.equal(captured.seen, eager.seen)
    captured.sync()
    assert captured.counts.n_qk.tolist() == eager.counts.n_qk.tolist() and captured.n_qk.min() >= 256
    for row in (0, 1):
        mine, theirs = (cache.pool_positions[cache.table[row, : int(cache.n_qk[row]) // 128].long()]
                        for cache in (captured, eager))
        assert (mine == theirs).float().mean() > 0.95 and (mine != torch.arange(128, device="cuda")).any(-1).all()


def test_captured_steps_equal_eager_ones():
    """Over two flushes of each row; the order that scores gave is the one that a captured step packs in."""
    caches = [KVCache(NAME, 16, 2, 128, device="cuda", max_batch=2) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    for row, length in enumerate((290, 170)):
        k, v, q = (torch.randn(length, heads, 128, generator=generator).half().cuda() for heads in (2, 2, 8))
        for cache in caches:
            cache.prefill(row, k, v, q)
    for cache in caches:
        cache.reserve([0, 1], 640)
    assert_same_bytes("order", caches[0].order, caches[1].order)
    k, v, q = (x.cuda() for x in tokens(1, generator))
    k, v, q = k[0], v[0], q[0]
    eager, captured = caches
    decode(q, captured)
    warm = KVCache(NAME, 4, 2, 128, device="cuda", max_batch=2)
    warm.append(k, v)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured.append(k, v)
        o, lse = decode(q, captured)
    for new_k, new_v, new_q in zip(*tokens(300, generator)):
        for to, new in ((k, new_k), (v, new_v), (q, new_q)):
            to.copy_(new)
        graph.replay()
        eager.append(k, v)
        want = decode(q, eager)
        torch.testing.assert_close(o, want[0], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(lse, want[1], rtol=1e-4, atol=1e-3)
    captured.sync()
    assert_same_state(captured, eager)
    for name in ("score", "seen", "order"):
        assert_same_bytes(name, getattr(captured, name), getattr(eager, name))
