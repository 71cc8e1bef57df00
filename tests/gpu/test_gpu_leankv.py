"""Two levels on a GPU: decode by the kernels of both levels and their merge, against the torch reference on the same
cache; scores and classes against the CPU's."""

import copy
import functools

import pytest
import torch
from unit.level_caches import state

from lowbit_attn import CacheFaultError, decode, dispatch, loader, why_not
from lowbit_attn.cache import significance
from lowbit_attn.formats.levels import parse
from lowbit_attn.levels import LevelCache, manage
from lowbit_attn.levels import step as torch_step
from lowbit_attn.levels.frames import FramePool, frame_sizes
from lowbit_attn.levels.policy import Cumulative, Shares
from lowbit_attn.reference import Attention

pytestmark = pytest.mark.gpu
H = 2


def randn(*shape: int, seed: int = 0, dtype=torch.float16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@functools.cache
def of_lengths(name: str, head_dim: int, dtype: torch.dtype, lengths: tuple[int, ...] = (2500, 700, 300, 20, 0),
               max_q_len: int = 4) -> LevelCache:
    """Sequences of these lengths, their heads cut at thresholds of their own, so that they are ragged."""
    pool = FramePool(name, head_dim=head_dim, frames=120 if name == "lean" else (120, 120), device="cuda")
    cache = LevelCache(pool, H, policy=Cumulative(0.2, 0.6), max_batch=len(lengths), max_seqlen=4000, dtype=dtype,
                       max_q_len=max_q_len)
    for row, length in enumerate(lengths):
        if length:
            k, v = randn(2, length, H, head_dim, seed=row, dtype=dtype).cuda()
            k[..., 3] += 5  # a channel with an offset
            cache.prefill(row, k, v, randn(length, 4 * H, head_dim, seed=9 + row, dtype=dtype).cuda())
    return cache


def check(cache: LevelCache, q: torch.Tensor, **options) -> torch.Tensor:
    """Decode into NaN-filled outputs is the reference over the same cache; returns o."""
    out, lse = torch.full_like(q, torch.nan), q.new_full((len(q), q.shape[2], q.shape[1]), torch.nan).float()
    decode(q, cache, out=out, lse=lse, **options)
    want, want_lse = decode(q.float(), cache, path="reference", **options)
    limit = 8e-3 if q.dtype == torch.bfloat16 else 2e-3
    for b in range(len(q)):
        scale = want[b].abs().max().clamp(min=1e-6)
        assert ((out[b].float() - want[b]).abs().max() / scale) < limit, b
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)
    return out


@pytest.mark.parametrize("name, head_dim, dtype, ratio, q_len", [
    ("lean", 128, torch.float16, 4, 1), ("lean", 128, torch.float16, 1, 1), ("lean", 128, torch.float16, 4, 4),
    ("lean", 64, torch.float16, 4, 1), ("lean-low", 128, torch.float16, 4, 1), ("lean", 128, torch.bfloat16, 4, 1)])
def test_decode_is_the_reference_over_the_same_cache(arch, name, head_dim, dtype, ratio, q_len):
    """Ragged heads, stages alone, sinks alone, no tokens; fewer sequences than the cache has."""
    cache = of_lengths(name, head_dim, dtype)
    assert why_not(cache, H * ratio, q_len) == []
    q = randn(5, q_len, H * ratio, head_dim, seed=3, dtype=dtype).cuda()
    o = check(cache, q)
    assert (o[4] == 0).all()
    assert torch.equal(check(cache, q[:2]), o[:2])
    assert all(torch.equal(decode(q, cache)[0], o) for _ in range(20))


def test_an_even_share_of_all_pages_gives_the_same():
    cache, q = of_lengths("lean", 128, torch.float16), randn(5, 1, 4 * H, 128, seed=3).cuda()
    (o, lse), (even, even_lse) = decode(q, cache), decode(q, cache, path="stream")
    torch.testing.assert_close(even, o, rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(even_lse, lse, rtol=1e-4, atol=1e-4)


def test_results_go_where_the_caller_wants_them():
    """Buffers with gaps, at an odd address, of fp32 queries; and one query that asks for a gradient."""
    cache, q = of_lengths("lean", 128, torch.float16), randn(5, 1, 4 * H, 128, seed=3).cuda()
    want, want_lse = decode(q, cache)
    gaps = torch.zeros(5, 1, 4 * H, 256, dtype=torch.float16, device="cuda")[..., :128]
    odd = torch.zeros(q.numel() + 1, dtype=torch.float16, device="cuda")[1:].view(q.shape)
    columns = torch.zeros(1, 4 * H, 5, device="cuda").permute(2, 1, 0)
    for out in (gaps, odd):
        decode(q.clone().requires_grad_(), cache, out=out, lse=columns)
        assert torch.equal(out, want) and torch.equal(columns, want_lse)
    wide, _ = decode(q.float(), cache)
    assert wide.dtype == torch.float32 and torch.equal(wide, want.float())


def test_sink_logits_scale_and_soft_cap(arch):
    cache, q = of_lengths("lean", 128, torch.float16), randn(5, 1, 4 * H, 128, seed=4).cuda()
    check(cache, q, sink_logits=randn(4 * H, seed=5).float().cuda(), softmax_scale=0.2)
    if arch == "hopper":
        check(cache, q, softcap=5.0)


def test_levels_of_very_different_values_and_poison_where_no_token_is(arch):
    cache = of_lengths("lean", 128, torch.float16, (1500, 90))
    q = randn(2, 1, 4 * H, 128, seed=6).cuda()
    want = decode(q, cache)
    used = torch.zeros(len(cache.pool.units(0)), dtype=torch.bool, device="cuda")
    for level in (0, 1):
        for unit in cache.table[level][cache.table[level] >= 0].tolist():
            used[unit : unit + cache.pool.record_bytes[level] // 128] = True
    cache.pool.units(0)[~used] = 0xFF
    cache.table[cache.table < 0] = 1 << 20
    for v in range(2 * H):
        cache.hi_k[v, int(cache.c_sink[0, v]) :], cache.lo_v[v, int(cache.n_stage[1, v]) :] = torch.nan, torch.nan
        free = torch.ones(cache.slots, dtype=torch.bool, device="cuda")
        free[cache.slots_of(v // H)] = False
        cache.ring_k[v, free] = torch.nan
    assert all(map(torch.equal, decode(q, cache), want))


def test_a_captured_step_follows_counters_tables_and_pages(arch):
    """One graph of decode serves every length; what moves blocks runs between its replays."""
    pool = FramePool("lean", head_dim=128, frames=64, device="cuda")
    cache = LevelCache(pool, H, max_seqlen=2000)
    cache.prefill(0, *randn(2, 300, H, 128).cuda(), randn(300, 4 * H, 128).cuda())
    q = randn(1, 1, 4 * H, 128, seed=1).cuda()
    decode(q, cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = decode(q, cache)
    flushes = int(cache.n_out[0])
    for step in range(300):
        k, v = randn(2, 1, 1, H, 128, seed=step).cuda()
        q.copy_(randn(1, 1, 4 * H, 128, seed=1000 + step))
        cache.append(k, v)
        graph.replay()
        if step % 37 == 0:
            eager, eager_lse = decode(q, cache)
            assert torch.equal(o, eager) and torch.equal(lse, eager_lse)
            want = decode(q.float(), cache, path="reference")[0]
            assert (o.float() - want).abs().max() / want.abs().max() < 2e-3
        cache.manage(q, lse)
    assert int(cache.n_out[0]) - flushes >= 256
    pool.check(cache)


@pytest.mark.parametrize("name", ("lean", "lean-low"))
def test_whole_steps_in_one_graph_equal_eager_ones_over_seven_flushes(arch, name):
    """append, decode and manage in one graph; rows of other lengths act together, so that both see equal shapes."""
    eager = of_lengths(name, 128, torch.float16, (900, 300, 20), max_q_len=1)
    eager = copy.deepcopy(eager)
    captured = copy.deepcopy(eager)
    k, v, q = (torch.zeros(3, 1, heads, 128, dtype=torch.float16, device="cuda") for heads in (H, H, 4 * H))
    decode(q, captured)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.append(k, v)
        o, lse = decode(q, captured)
        captured.manage(q, lse)
    for step in range(7 * 128 + 60):
        for mine, new in zip((k, v, q), (randn(3, 1, H, 128, seed=step), randn(3, 1, H, 128, seed=5000 + step),
                                         randn(3, 1, 4 * H, 128, seed=9000 + step))):
            mine.copy_(new)
        graph.replay()
        eager.append(k, v)
        want, want_lse = decode(q, eager)
        assert torch.equal(o, want) and torch.equal(lse, want_lse), step
        eager.manage(q, want_lse)
    for part in ("table", "half", "c_pack", "c_sink", "c_tok", "n_stage", "n_out", "n_tok", "order", "new", "score"):
        assert torch.equal(getattr(captured, part), getattr(eager, part)), part
    assert (captured.n_out >= 6 * 128).all() and not captured.starved.any()
    captured.check()
    captured.pool.check(captured)


def test_a_captured_step_without_frames_is_told_of(arch):
    pool = FramePool("lean", head_dim=128, frames=1, device="cuda")
    cache = LevelCache(pool, H, max_seqlen=2000)
    cache.prefill(0, *randn(2, 200, H, 128).cuda(), randn(200, 4 * H, 128).cuda())
    k, v, q = (torch.zeros(1, 1, heads, 128, dtype=torch.float16, device="cuda") for heads in (H, H, 4 * H))
    decode(q, cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.append(k, v)
        _, lse = decode(q, cache)
        cache.manage(q, lse)
    for _ in range(400):
        graph.replay()
    held = cache.n_tok.item()
    assert cache.starved.item() and held == 32 + cache.n_out.item() + cache.slots
    with pytest.raises(CacheFaultError, match=r"sequences \[0\] had no room"):
        cache.check()
    pool.check(cache)


def due(name: str, head_dim: int, dtype: torch.dtype, recent: tuple[int, ...], sinks: int, frames: int = 60,
        **options) -> LevelCache:
    """Rows with so many tokens in their rings, heads with pages and stages of their own, random scores."""
    levels = parse(name)
    sizes = len(frame_sizes(*(fmt.record_bytes(head_dim) for fmt in levels.formats))[1])
    pool = FramePool(levels, head_dim=head_dim, frames=(frames,) * sizes, device="cuda")
    cache = LevelCache(pool, H, sinks=sinks, max_batch=len(recent), max_seqlen=9000, dtype=dtype, **options)
    for row, held in enumerate(recent):
        k, v = randn(2, sinks + 128 * (1 + row) + 56, H, head_dim, seed=row, dtype=dtype).cuda()
        cache.prefill(row, k, v, randn(len(k), 4 * H, head_dim, seed=9 + row, dtype=dtype).cuda())
        cache.n_tok[row] = cache.n_sink[row] + cache.n_out[row] + held
    for tokens in (cache.hi_k[:, sinks:], cache.hi_v[:, sinks:], cache.lo_k, cache.lo_v, cache.ring_k, cache.ring_v):
        tokens.normal_()
    cache.n_stage.copy_(torch.randint(0, 128, cache.n_stage.shape))
    cache.score.copy_(torch.rand(cache.score.shape))
    cache.seen.copy_(torch.randint(0, 9, cache.seen.shape))
    cache.recount()
    return cache


def check_manage(cache: LevelCache, rows: list[int], q: torch.Tensor, lse: torch.Tensor,
                 **attention) -> torch_step.Plan:
    """The kernels' scores are those of torch within a tolerance; given them, all else is bit for bit torch's."""
    index, before, options = torch.tensor(rows, device="cuda"), copy.deepcopy(cache), Attention(**attention)
    assert cache.why_torch(**attention) == []
    plan, pack = map(loader.load, manage.keys_of(cache, dispatch.target_of(cache.device)[1]))
    plan(*manage.plan_arguments(cache, index, q, lse, options).values())
    acts = before.n_tok[index] // cache.manage_every > (before.n_tok[index] - q.shape[1]) // cache.manage_every
    want = torch_step.observed(before, index, q, lse, acts, options)
    scores = significance.Scores(cache.score.unflatten(0, (-1, H))[index], cache.seen[index])
    torch.testing.assert_close(scores.score, want.score, rtol=1e-4, atol=1e-5)
    assert torch.equal(scores.seen, want.seen)
    twin = torch_step.Plan(before, index, scores, acts | before.waits[index])
    twin.write()
    pack(*manage.pack_arguments(cache, index).values())
    theirs = state(before)
    for part, x in state(cache).items():
        assert torch.equal(x, theirs[part]), part
    assert not cache.arrivals.any()
    return twin


@pytest.mark.parametrize("name, head_dim, dtype, q_len, options", [
    ("lean", 128, torch.float16, 1, {}), ("lean", 64, torch.bfloat16, 4, {"policy": Cumulative(0.2, 0.6)}),
    ("lean-low", 128, torch.bfloat16, 1, {"policy": Shares(0.3, 0.5)}), ("lean-low", 64, torch.float16, 1, {}),
    ("lean-low", 128, torch.float16, 4, {"range_search": True}), ("lean", 96, torch.float16, 1, {}),
    ("k4v4+k2v2", 128, torch.float16, 1, {}), ("k4v2+k4v1", 64, torch.float16, 1, {"range_search": False}),
    ("k8v8+k4v4", 128, torch.bfloat16, 1, {})])
def test_manage_by_kernels_is_manage_in_torch_given_the_scores(arch, name, head_dim, dtype, q_len, options):
    """Rows that are due, that wait, that act and are not due, and at rest, in another order than the cache's."""
    cache = due(name, head_dim, dtype, (184, 187, 96, 65), 8, max_q_len=4, manage_every=8, **options)
    cache.waits[1] = True
    q = randn(4, q_len, 4 * H, head_dim, seed=3, dtype=dtype).cuda()
    lse = 4 + randn(4, 4 * H, q_len, seed=4, dtype=torch.float32).cuda()
    plan = check_manage(cache, [3, 1, 0, 2], q, lse)
    assert plan.go.tolist()[1:3] == [True, True] and not torch.equal(cache.order[0].sort()[0], cache.order[0])
    check_manage(cache, [0, 1], q[:2], lse[:2], softcap=5.0, softmax_scale=0.2)


@pytest.mark.parametrize("sinks", range(8))
def test_a_flush_at_each_phase_has_an_order_that_came_from_scores(arch, sinks):
    """Rings of 184 to 191 tokens when the row acts; the block goes round the ring's end."""
    cache = due("lean", 128, torch.float16, (184 + -(sinks + 184) % 8,), sinks)
    cache.n_out += 128 * sinks
    cache.n_tok += 128 * sinks
    cache.recount()
    lse = 4 + randn(1, 4 * H, 1, seed=4, dtype=torch.float32).cuda()
    assert check_manage(cache, [0], randn(1, 1, 4 * H, 128, seed=3).cuda(), lse).go.all()
    assert not torch.equal(cache.order[0].sort()[0], cache.order[0])


def test_rows_share_what_frames_there_are(arch):
    """40 rows in another order, more than a warp: those that find frames go, the others keep all and go with more."""
    cache = due("lean", 64, torch.float16, (184,) * 40, 8, frames=40 * 41 * H)
    q, lse = randn(40, 1, 4 * H, 64, seed=3).cuda(), torch.full((40, 4 * H, 1), 5.0, device="cuda")
    free = cache.pool.lists[0]
    taken = free.take(free.n_free - 30)  # by another cache
    rows = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
    plan = check_manage(cache, rows, q, lse)
    assert plan.go.any() and not plan.go.all() and int(cache.starved) == int((~plan.go).sum())
    assert cache.waits[rows].tolist() == (~plan.go).tolist()
    free.give(taken)
    assert torch.equal(check_manage(cache, rows, q, lse).go, ~plan.go)


def test_calls_that_no_kernel_manages_say_so_and_stay_in_torch(monkeypatch):
    cache = of_lengths("lean", 128, torch.float16)
    assert cache.why_torch() == [] and cache.why_torch(window=9) == ["window 9, supported: None"]
    pool = FramePool("lean", head_dim=256, frames=4, device="cuda")
    wide = LevelCache(pool, 1, max_seqlen=300, manage_every=1)
    assert wide.why_torch() == ["head_dim 256, supported: 64, 96, 128"]
    monkeypatch.setitem(torch_step.KERNELS, "cuda", torch_step.KERNELS["cuda"]._replace(manage=None))
    wide.append(*torch.zeros(2, 1, 1, 1, 256, device="cuda").half())
    wide.manage(torch.zeros(1, 1, 1, 256, device="cuda").half(), torch.zeros(1, 1, 1, device="cuda"))


@pytest.mark.parametrize("name", ("lean", "lean-low"))
@pytest.mark.parametrize("pads", [(0, 0), (0, 60)])
def test_a_model_reads_through_kernels_what_it_reads_through_the_reference(arch, name, pads):
    """A prompt, then steps over a flush; classes may fall otherwise where scores nearly tie."""
    pytest.importorskip("transformers")
    from tiny_models import build, error, stepwise, tokens

    from lowbit_attn.integrations import hf

    model = build("llama", head_dim=128, num_attention_heads=8, hidden_size=128, initializer_range=0.08).half().cuda()
    sizes = (300, *(1,) * 150)
    ids = tokens(sum(sizes), batch=2).cuda()
    mask = torch.stack([torch.arange(ids.shape[1]) >= pad for pad in pads]).long().cuda()
    caches = [hf.LowBitCache(name, path=path) for path in (None, "reference")]
    got, want = (stepwise(model, cache, ids, sizes, mask).float().cpu() for cache in caches)
    for b, pad in enumerate(pads):
        assert torch.isfinite(got[b, pad:]).all() and error(got[b, pad:], want[b, pad:]) < 0.05
    kv = [layer.kv for layer in caches[0].layers]
    kv[0].pool.check(*kv)
    assert all((layer.n_out > 128).all() and layer.c_pack.any() for layer in kv)
    caches[0].reset()
    assert kv[0].pool.n_free == tuple(len(mine.ids) for mine in kv[0].pool.lists)


@pytest.mark.parametrize("name", ("lean", "lean-low"))
def test_greedy_tokens_of_smollm2_are_the_references_but_at_near_ties(arch, name):
    """64 tokens after a prompt, over a flush; both paths see the tokens that the kernels chose."""
    pytest.importorskip("transformers")
    from perf_scripts import script

    from lowbit_attn import quality
    from lowbit_attn.demo import model as models
    from lowbit_attn.demo import scoring

    gguf = models.default_folder() / models.GGUF
    if not gguf.exists():
        pytest.skip("SmolLM2 is not there: make demo fetches it")
    model, tokenizer = models.load(gguf, "cuda")
    quality.use_cache_kind(model, dict(format=name))
    with script("gpu_model") as gpu_model:
        found = gpu_model.greedy_against_reference(model, scoring.question(tokenizer, 600).cuda(), dict(format=name),
                                                   64)
    assert found["differing"] <= 6 and all(margin <= 2 * found["max_logit_error"] for margin in found["margins"])
    assert found["max_logit_error"] < 1.5


def filled(device: str, path: str | None) -> LevelCache:
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
        cache.manage(q, lse, path=path)
    cache.pool.check(cache)
    return cache


@pytest.mark.parametrize("path", (None, "reference"))
def test_levels_hold_what_they_hold_on_the_cpu(arch, path):
    there, here = filled("cuda", path), filled("cpu", None)
    for name in ("c_pack", "c_sink", "c_tok", "n_stage", "n_out", "table", "half", "new"):
        assert torch.equal(getattr(there, name).cpu(), getattr(here, name)), name
    same = (there.order.cpu() == here.order).float().mean()
    assert same > 0.98  # near-ties of scores may fall otherwise
    torch.testing.assert_close(there.score.cpu(), here.score, rtol=1e-3, atol=1e-5)
    q = torch.randn(1, 1, 8, 128).half()
    got, want = decode(q.cuda(), there, path="reference")[0].cpu(), decode(q, here)[0]
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)


def test_what_no_kernel_serves_is_refused():
    cache = of_lengths("lean", 128, torch.float16)
    q = torch.randn(5, 1, 8, 128, device="cuda").half()
    with pytest.raises(NotImplementedError, match="window: got 9 over levels"):
        decode(q, cache, window=9)
    with pytest.raises(NotImplementedError, match="path: 'nowhere' is not known"):
        decode(q, cache, path="nowhere")


def test_scores_follow_the_cpu():
    q, k, at = torch.randn(64, 8, 128), torch.randn(2, 700, 128), torch.arange(600, 664)
    there = significance.observe(q.cuda(), at.cuda(), k.cuda(), 0)
    here = significance.observe(q, at, k, 0)
    torch.testing.assert_close(there.score.cpu(), here.score, rtol=1e-4, atol=1e-6)
    assert torch.equal(there.seen.cpu(), here.seen)
