"""LevelCache: what its heads hold, against lists of tokens; decode against attention over them; frames and refusals."""

import copy
from unittest import mock

import pytest
import torch

from lowbit_attn import FORMATS, KVCache, PageExhaustedError, decode, why_not
from lowbit_attn.cache.significance import means, prompt_queries
from lowbit_attn.formats import levels
from lowbit_attn.levels import LevelCache
from lowbit_attn.levels.frames import FramePool
from lowbit_attn.levels.policy import HIGH, LOW, PRUNED, Cumulative, Paper, Shares
from lowbit_attn.reference import Attention, attention

H, R = 3, 2


def make(name: str = "lean", head_dim: int = 64, frames: int = 200, **options) -> LevelCache:
    pool = FramePool(name, head_dim=head_dim, frames=frames if name == "lean" else (frames, frames))
    return LevelCache(pool, H, **dict(max_seqlen=2000, sinks=5) | options)


def tokens(*lead: int, head_dim: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, *lead, H, head_dim)
    k[..., 3] += 7  # a channel with an offset
    return k.half(), v.half(), (2 * torch.randn(*lead, H * R, head_dim)).half()


def steps(cache, count: int, rows=(0,), q_len: int = 1) -> list:
    """Steps as a model takes them; returns the tokens."""
    taken = []
    for _ in range(count):
        k, v, q = tokens(len(rows), q_len, head_dim=cache.head_dim)
        cache.append(k, v, list(rows))
        if rows == (0,):
            _, lse = decode(q, cache)
        else:
            lse = torch.stack([decode_row(cache, row, q[i]) for i, row in enumerate(rows)])
        cache.manage(q, lse, list(rows))
        taken.append((k, v, q))
    return taken


def decode_row(cache, row, q):
    return torch.cat([attention(q[:, h * R : (h + 1) * R], k[None], v[None])[1] for h, (k, v) in
                      enumerate(cache.gather(row))])


def check_conserved(cache):
    """Counters of every row and head add up, and the pool's frames are free or held."""
    cache.pool.check(cache)
    for row in range(cache.max_batch):
        heads = cache.heads_of(row)
        kept = cache.c_pack[:, heads].sum(0) + cache.n_stage[:, heads].sum(0) + cache.n_drop[heads]
        assert (kept == cache.n_out[row]).all()
        recent = int(cache.n_tok[row] - cache.n_sink[row] - cache.n_out[row])
        assert 0 <= recent <= cache.slots and int(cache.n_out[row]) % 128 == 0
        assert (cache.c_sink[0, heads] == cache.n_sink[row] + cache.n_stage[0, heads]).all()
        assert (cache.c_tok[1, heads] == cache.n_stage[1, heads] + cache.n_out[row] + recent).all()
        if cache.pool.is_shared:
            odd = (cache.c_pack[1, heads] // 128) % 2 == 1
            assert ((cache.half[heads] >= 0) == odd).all()
        for head, (k, _) in enumerate(cache.gather(row)):
            assert len(k) == int(cache.n_tok[row] - cache.n_drop[heads][head])


def nearest(x: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """For each held token the place of the token of x that it is nearest to."""
    return torch.cdist(held, x.float()).argmin(1)


@pytest.mark.parametrize("name", ("lean", "lean-low", "k4v2+k4v1"))
@pytest.mark.parametrize("head_dim", (64, 128))
def test_a_prompt_goes_to_levels_by_its_scores(name, head_dim):
    """Pages, stages and counts of each head follow from the policy over a dense softmax at the 64 queries."""
    cache = make(name, head_dim)
    n = 700
    k, v, q = tokens(n, head_dim=head_dim)
    cache.prefill(0, k, v, q)
    check_conserved(cache)
    s = torch.einsum("qhrd,khd->hrqk", q.float().unflatten(1, (H, R)), k.float()) * head_dim**-0.5
    p = s.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1).amax(1)
    at = prompt_queries(n)
    later = at[:, None] > torch.arange(n)
    leaving = (n - 5 - 56) // 128 * 128
    mean = means((p[:, at] * later).sum(1), later.sum(0).int())[:, 5 : 5 + leaving]
    classes = Shares().classes(mean)
    counts = cache.counts_of(0)
    for head in range(H):
        for level, in_pages in ((HIGH, counts.high), (LOW, counts.low)):
            want = 5 + (classes[head] == level).nonzero()[:, 0]
            whole = len(want) // 128 * 128
            assert int(in_pages[head]) == whole and int(cache.n_stage[level, head]) == len(want) - whole
            fmt, size = cache.format.formats[level], cache.pool.record_bytes[level] // 128
            records = torch.stack([cache.pool.units(level)[unit : unit + size].flatten()
                                   for unit in cache.table[level, head, : whole // 128].tolist()])
            blocks = [x[want[:whole], head].float().unflatten(0, (-1, 128)) for x in (k, v)]
            assert torch.equal(records, fmt.quantize(*blocks))  # bit for bit, in order of position
            stage = (cache.hi_k[head, 5:], cache.lo_k[head])[level][: len(want) - whole]
            assert torch.equal(stage, k[want[whole:], head])
        got_k, got_v = cache.gather(0)[head]
        recent = n - 5 - leaving
        assert torch.equal(got_k[-recent - 5 :], torch.cat((k[:5, head], k[5 + leaving :, head])).float())
        assert torch.equal(got_v[-recent - 5 :], torch.cat((v[:5, head], v[5 + leaving :, head])).float())


@pytest.mark.parametrize("ratio", (1, 4, 8))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_decode_is_attention_over_what_the_heads_hold(ratio, dtype):
    """Also with heads of other lengths, softcap, sink logits and several queries, of which only recent tokens hide."""
    cache = make("lean-low", 64, policy=Cumulative(0.2, 0.6), max_batch=2, max_q_len=4, dtype=dtype)
    cache.prefill(0, *(x.to(dtype) for x in tokens(900)))
    cache.prefill(1, *(x.to(dtype) for x in tokens(40)))
    assert len({len(k) for k, _ in cache.gather(0)}) > 1
    q = torch.randn(2, 3, H * ratio, 64).to(dtype)
    for options in ({}, dict(softcap=5.0), dict(softmax_scale=0.3, sink_logits=torch.randn(H * ratio))):
        o, lse = decode(q, cache, **options)
        asked = Attention(options.get("softmax_scale"), options.get("softcap"))
        for row, n_tok in ((0, 900), (1, 40)):
            for head, (k, v) in enumerate(cache.gather(row)):
                for j in range(3):
                    seen = len(k) - 2 + j
                    mine = q[row, j : j + 1, head * ratio : (head + 1) * ratio].double().float()
                    want_o, want_lse = attention(mine, k[None, :seen], v[None, :seen], asked)
                    if "sink_logits" in options:
                        sink = options["sink_logits"][head * ratio : (head + 1) * ratio]
                        joined = torch.logaddexp(want_lse[:, 0], sink)
                        want_o = want_o * torch.exp(want_lse[:, 0] - joined)[:, None]
                        want_lse = joined[:, None]
                    got = o[row, j, head * ratio : (head + 1) * ratio].float()
                    torch.testing.assert_close(got, want_o[0], rtol=1e-2, atol=1e-2)
                    torch.testing.assert_close(lse[row, head * ratio : (head + 1) * ratio, j], want_lse[:, 0],
                                               rtol=1e-4, atol=1e-4)


def test_levels_of_very_different_values_do_not_disturb_each_other():
    """V of 1e3 in the high level beside 1e-4 in the low one: each comes back to within its own step."""
    k, v, _ = tokens(256 + 60)
    v[:128] *= 1000
    v[128:] *= 1e-4
    mixed = make(policy=Shares(0.5), sinks=0)
    mixed.prefill(0, k, v)  # unseen tokens: the earliest half is high
    for got, want in ((x[1], v[:, head].float()) for head, x in enumerate(mixed.gather(0))):
        low, high, rest = got[:128], got[128:256], got[256:]
        assert (low - want[128:256]).abs().max() < 1e-3 and (high - want[:128]).abs().max() < 500
        assert torch.equal(rest, want[256:])


def test_all_high_is_the_uniform_cache_to_rounding():
    cache, uniform = make(policy=Shares(1.0), sinks=0), KVCache("k8v4", 8, H, 64)
    k, v, q = tokens(640)
    cache.prefill(0, k, v)
    uniform.prefill(0, k[:512], v[:512])
    for step in range(512, 640):  # which stay in 16 bit: the next step would pack them
        uniform.append(k[None, step : step + 1], v[None, step : step + 1])
    assert (cache.counts_of(0).high == 512).all() and not cache.counts_of(0).low.any()
    pages = uniform.gather(0)
    for head, (got_k, got_v) in enumerate(cache.gather(0)):
        assert torch.equal(got_k, pages[0][head]) and torch.equal(got_v, pages[1][head])
    query = q[None, -1:]
    torch.testing.assert_close(decode(query, cache)[0].float(), decode(query, uniform)[0].float(), rtol=2e-3, atol=1e-4)


def test_pruned_tokens_are_in_no_buffer():
    cache = make(policy=Shares(0.25, 0.45))
    k, v, q = tokens(700)
    cache.prefill(0, k, v, q)
    steps(cache, 200)
    check_conserved(cache)
    gone = cache.counts_of(0).pruned
    assert (gone >= 0.29 * int(cache.n_out[0])).all() and cache.policy.prunes
    for head, (held, _) in enumerate(cache.gather(0)):
        found = nearest(k[:, head], held[: -len(cache.slots_of(0))]).unique()
        assert len(found) < 700 - 0.25 * 640 and held.shape[0] == int(cache.n_tok[0]) - int(gone[head])


@pytest.mark.parametrize("phase", range(8))
def test_steps_move_blocks_by_scores_of_every_eighth(phase):
    """The plan of each block is that of a dense softmax over what the cache held at the managed steps."""
    cache, history, moved = make(sinks=phase), torch.zeros(H, 0), 0
    seen = torch.zeros(0)
    for step in range(phase + 56 + 128 + 128 + 9):
        k, v, q = tokens(1, 1)
        cache.append(k, v)
        o, lse = decode(q, cache)
        history, seen = (torch.nn.functional.pad(x, (0, 1)) for x in (history, seen))
        before = int(cache.n_out[0])
        first = int(cache.n_sink[0]) + before
        if (step + 1) % 8 == 0:
            for head, (keys, _) in enumerate(cache.gather(0)):
                s = q[0, 0, head * R : (head + 1) * R].float() @ keys.T * 64**-0.5
                p = s.softmax(-1).amax(0)
                recent = step + 1 - first
                history[head, first:] += torch.cat((p[len(p) - recent : -1], p.new_zeros(1))) if recent else 0
            seen[first:-1] += 1
        cache.manage(q, lse)
        check_conserved(cache) if int(cache.n_out[0]) != before else None
        if int(cache.n_out[0]) > before:
            assert (step + 1) % 8 == 0
            block = slice(phase + before, phase + before + 128)
            classes = Shares().classes(means(history[:, block], seen[block].int()))
            assert torch.equal(cache.order, classes.argsort(dim=1, stable=True).to(torch.uint8))
            assert cache.new.tolist() == [[32] * H, [96] * H] and (cache.order[0] != torch.arange(128)).any()
            moved += 1
    assert moved == 2


def test_the_state_does_not_depend_on_the_cut_of_steps():
    """Steps of one token and of 16 with the same scores leave the same pages, stages and counters."""
    one, many = (make(max_q_len=16) for _ in range(2))
    k, v, q = tokens(1, 800)
    for cache in (one, many):
        cache.prefill(0, k[0, :240], v[0, :240], q[0, :240])
    for start in range(240, 800, 16):
        for cache, size in ((one, 1), (many, 16)):
            for at in range(start, start + 16, size):
                cache.append(k[:, at : at + size], v[:, at : at + size])
        for cache in (one, many):
            lse = 8 + torch.randn(1, H * R, 16, generator=torch.Generator().manual_seed(start))
            cache.manage(q[:, start : start + 16], lse)
    check_conserved(one)
    names = ("table", "half", "c_pack", "c_sink", "c_tok", "n_stage", "n_out", "order", "score", "seen", "lo_k", "hi_v")
    assert all(torch.equal(getattr(one, name), getattr(many, name)) for name in names)
    assert all(map(torch.equal, one.pool.memory, many.pool.memory))


@pytest.mark.parametrize("late", (1, 4, 7))
def test_a_late_manage_is_caught_up_and_a_missing_one_is_refused(late):
    cache = make(manage_every=1)
    k, v, q = tokens(1, 400)
    taken = 0
    while taken + late <= 380:
        for at in range(taken, taken + late):
            cache.append(k[:, at : at + 1], v[:, at : at + 1])
        taken += late
        cache.manage(q[:, taken - 1 : taken], torch.zeros(1, H * R, 1) + 9)
    check_conserved(cache)
    assert int(cache.n_out[0]) == 256
    skipped = make()
    with pytest.raises(RuntimeError, match="ring of 192 recent tokens full, supported: manage after each decode"):
        for at in range(400):
            skipped.append(k[:, at : at + 1], v[:, at : at + 1])
    assert int(skipped.n_tok[0]) == 5 + 192 and torch.equal(skipped.gather(0)[1][0], k[0, :197, 1].float())


def test_rows_that_find_no_frames_wait_and_others_go_on():
    cache = make(frames=4, max_batch=3)
    for row in range(3):
        cache.prefill(row, *tokens(5 + 56 + 100))
    while not int(cache.starved):
        steps(cache, 1, (0, 1, 2))
        if int(cache.n_tok[0]) > 900:
            break
    check_conserved(cache)
    assert int(cache.starved)
    before = cache.n_out.tolist()
    with pytest.raises(PageExhaustedError, match="recent tokens full, and the pool has"):
        steps(cache, 200, (0, 1, 2))
    check_conserved(cache)
    full, held = cache.waits.nonzero()[:, 0].tolist(), cache.n_tok.tolist()
    assert full and cache.n_out.tolist() == before
    cache.free([0])
    check_conserved(cache)
    k, v, q = tokens(2, 1)
    cache.manage(q, torch.full((2, H * R, 1), 9.0), [1, 2])  # tries again what found no frames
    assert int(cache.n_out[1]) > before[1] and not cache.waits[1]
    cache.append(k[:1], v[:1], [1])
    assert int(cache.n_tok[1]) == held[1] + 1
    check_conserved(cache)
    cache.free([1, 2])
    assert cache.pool.n_free == (4,) and not cache.c_pack.any() and (cache.table == -1).all()
    cache.prefill(0, *tokens(300))
    check_conserved(cache)


def test_a_prompt_without_frames_changes_nothing():
    cache = make(frames=2)
    cache.prefill(0, *tokens(40))
    before = copy.deepcopy(cache)
    with pytest.raises(PageExhaustedError, match=r"frames, \[2\] are free"):
        cache.prefill(0, *tokens(1500))
    assert cache.pool.n_free == (2,)
    for name, x in vars(cache).items():
        assert not isinstance(x, torch.Tensor) or torch.equal(x, getattr(before, name)), name


def test_caches_share_a_pool_and_copies_of_it_are_apart():
    pool = FramePool("lean", head_dim=64, frames=60)
    layers = [LevelCache(pool, H, max_seqlen=2000) for _ in range(3)]
    for cache in layers:
        cache.prefill(0, *tokens(800))
    pool.check(*layers)
    twins = copy.deepcopy(layers)
    assert len({id(cache.pool) for cache in twins}) == 1 and twins[0].pool is not pool
    with torch.inference_mode():
        other = copy.deepcopy(layers[2])
    other.prefill(0, *tokens(200))  # outside inference mode
    other.pool.grow(1)
    taken = pool.n_free
    pool.grow(10)
    assert pool.n_free[0] == taken[0] + 10 and twins[0].pool.n_free == taken
    pool.check(*layers)
    got, want = (cache.gather(0) for cache in (layers[1], twins[1]))
    assert all(torch.equal(a, b) for pair in zip(got, want) for a, b in zip(*pair))
    layers[0].free([0])
    pool.check(*layers)
    twins[0].pool.check(*twins)
    assert pool.nbytes == 70 * 13824


def test_poison_where_no_token_is_changes_nothing():
    cache = make(max_batch=2)
    for row, n in ((0, 700), (1, 90)):
        cache.prefill(row, *tokens(n))
    q = tokens(2, 1)[2]
    want = decode(q, cache)
    mine = torch.zeros(cache.pool.memory[0].view(-1, 128).shape[0], dtype=torch.bool)
    for level in (HIGH, LOW):
        for unit in cache.table[level][cache.table[level] >= 0].tolist():
            mine[unit : unit + cache.pool.record_bytes[level] // 128] = True
    cache.pool.memory[0].view(-1, 128)[~mine] = 0xFF
    cache.table[cache.table < 0] = 1 << 20
    for v in range(2 * H):
        row = v // H
        cache.hi_k[v, int(cache.c_sink[0, v]) :], cache.lo_v[v, int(cache.n_stage[1, v]) :] = torch.nan, torch.nan
        free = torch.ones(cache.slots, dtype=torch.bool)
        free[cache.slots_of(row)] = False
        cache.ring_k[v, free] = torch.nan
    assert all(map(torch.equal, decode(q, cache), want))


def test_rewind_drops_recent_tokens_alone():
    cache = make(max_q_len=4)
    k, v, q = tokens(500)
    cache.prefill(0, k, v, q)
    recent = len(cache.slots_of(0))
    cache.rewind([0], 3)
    check_conserved(cache)
    assert torch.equal(cache.gather(0)[0][0][-5:], k[492:497, 0].float())
    with pytest.raises(ValueError, match=f"tokens: got {recent} for sequence 0, supported: 0 to {recent - 3}"):
        cache.rewind([0], recent)
    short = make()
    short.prefill(0, k[:20], v[:20])
    short.rewind([0], 18)
    assert int(short.n_sink[0]) == 2 and len(short.gather(0)[0][0]) == 2
    short.prefill(0, k[2:300], v[2:300])
    check_conserved(short)


def test_chunks_with_and_without_lse_agree():
    own, given = make(), make()
    k, v, q = tokens(900)
    for start, stop in ((0, 250), (250, 640), (640, 900)):
        part = slice(start, stop)
        lse = torch.cat([_lse(given, head, q[part], k[part, head]) for head in range(H)])
        own.prefill(0, k[part], v[part], q[part])
        given.prefill(0, k[part], v[part], q[part], lse)
        torch.testing.assert_close(given.score, own.score, rtol=1e-4, atol=1e-5)
    check_conserved(own)
    assert torch.equal(own.c_pack, given.c_pack) and own.counts_of(0).high.sum() > 0


def _lse(cache, head, q, k):
    past = cache.gather(0)[head][0]
    keys = torch.cat((past, k.float()))[None]
    return attention(q[:, head * R : (head + 1) * R], keys, keys)[1]


def test_nbytes_counts_what_tokens_need():
    cache = make(sinks=5)
    k, v, q = tokens(700)
    cache.prefill(0, k, v, q)
    pages = cache.c_pack.sum(1) // 128
    sixteen = int(cache.n_stage.sum()) + H * (700 - int(cache.n_out[0]))
    records = [int(n) * FORMATS[name].record_bytes(64) for n, name in zip(pages, ("k8v4", "k4v2"))]
    assert cache.nbytes == sum(records) + sixteen * 4 * 64 and all(records)


@pytest.mark.parametrize("error, words, call", [
    (NotImplementedError, "window: got 100 over levels without", lambda c: decode(tokens(1, 1)[2], c, window=100)),
    (NotImplementedError, "no kernels", lambda c: decode(tokens(1, 1)[2], c, path="register")),
    (ValueError, "k: 2 tokens a step", lambda c: c.append(*tokens(1, 2)[:2])),
    (ValueError, "q: 4 heads, supported: multiples of num_heads_kv = 3",
     lambda c: c.prefill(0, *tokens(9)[:2], torch.zeros(9, 4, 64))),
    (ValueError, "max_seqlen = 2000", lambda c: c.prefill(0, *tokens(2001))),
    (ValueError, "seqs: got", lambda c: c.free([7])),
    (TypeError, "pool: got str", lambda c: LevelCache("lean", H, max_seqlen=9)),
    (TypeError, "policy: got Paper", lambda c: make(policy=Paper(0.1, 0.5))),
    (ValueError, "manage_every: got 0", lambda c: make(manage_every=0)),
    (ValueError, "q: got 1 queries", lambda c: c.manage(tokens(1, 1)[2], torch.zeros(1, H * R, 1))),
])
def test_what_is_not_served_is_refused_by_name(error, words, call):
    with pytest.raises(error, match=words):
        call(make())


def test_a_cpu_has_no_kernels_and_says_so():
    assert why_not(make(), H * R) == [
        "device: cpu has no kernels, supported: a CUDA device, or path='reference'"]


def test_classes_are_named():
    assert (HIGH, LOW, PRUNED) == (0, 1, 2)


def test_rows_of_a_call_are_refused():
    cache = make()
    k, v, q = tokens(64)
    cache.prefill(0, k, v, q)
    for rows in ([0], torch.zeros(1, dtype=torch.int32)):
        with pytest.raises(NotImplementedError, match="rows: got some over a LevelCache, supported: None"):
            decode(q[None, -1:], cache, rows=rows)


def test_compiled_calls_are_refused():
    cache = make()
    k, v, q = tokens(64)
    cache.prefill(0, k, v, q)
    with mock.patch("torch.compiler.is_compiling", lambda: True), pytest.raises(
            NotImplementedError, match="a LevelCache, whose calls cannot be compiled"):
        decode(q[None, -1:], cache)


def test_formats_with_codebooks_are_no_levels():
    for name, level in (("cq4+k4v2", "high"), ("k8v4+cq2", "low")):
        with pytest.raises(ValueError, match=f"{level}: got format cq., whose codes mean nothing without codebooks"):
            levels.parse(name)
