"""Caches of boosted values: what they hold, the order of their pages, and every call that moves tokens or scores."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from lowbit_attn import FORMATS, KVCache, decode
from lowbit_attn.cache import significance
from lowbit_attn.formats import Format
from lowbit_attn.integrations.growth import grown
from lowbit_attn.reference import Attention, attention
from lowbit_attn.testing import normal_codebooks

H, R, D = 2, 2, 64


def tokens(*lead: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K, V [*lead, H, D] and queries [*lead, H R, D] that care for some tokens more than for others."""
    k, v = torch.randn(2, *lead, H, D).half()
    return k, v, (2 * torch.randn(*lead, H * R, D)).half()


def steps(cache, count: int, q_len: int = 1, rows=(0,)) -> None:
    """Steps as a model takes them: append, decode, manage, and flush as an eager cache does."""
    for _ in range(count):
        k, v, q = tokens(len(rows), q_len)
        cache.append(k, v, list(rows))
        _, lse = decode(q, cache)
        cache.manage(q, lse, list(rows))
        cache.flush(list(rows))


def orders(cache, row: int = 0) -> torch.Tensor:
    """Positions of the stored tokens of a row's pages: [pages, H, 128]."""
    return cache.pool_positions[cache.table[row, : int(cache.n_qk[row]) // 128].long()]


def test_without_queries_pages_hold_tokens_by_position():
    cache = KVCache("k4v2-boost", 4, H, D)
    k, v, _ = tokens(600)
    cache.prefill(0, k, v)
    assert int(cache.n_qk[0]) == int(cache.n_qv[0]) == 384  # 32 sinks, 128 to 255 tokens in the window
    assert (orders(cache) == torch.arange(128)).all()
    uniform = [KVCache(name, 4, H, D, sinks=32) for name in ("k4v4", "k4v2")]
    for other in uniform:
        other.prefill(0, k, v)
    got, wide, narrow = (c.gather(0) for c in (cache, *uniform))
    is_boosted = (torch.arange(600) - 32) % 128 < 32
    assert torch.equal(got[0][:, :416], wide[0][:, :416])
    want = torch.where(is_boosted[:, None], wide[1], narrow[1])
    assert torch.equal(got[1][:, 32:416], want[:, 32:416])
    assert torch.equal(got[1][:, 416:], v[416:].float().transpose(0, 1))


def test_a_prompt_is_ordered_by_its_queries():
    cache = KVCache("k4v2-boost", 8, H, D, sinks=5)
    k, v, q = tokens(700)
    cache.prefill(0, k, v, q)
    s = torch.einsum("qhrd,khd->hrqk", q.float().unflatten(1, (H, R)), k.float()) * D**-0.5
    p = s.masked_fill(torch.ones(700, 700).triu(1).bool(), -torch.inf).softmax(-1).amax(1)
    at = significance.prompt_queries(700)
    later = at[:, None] > torch.arange(700)
    mean = (p[:, at] * later).sum(1) / later.sum(0)
    want = significance.order_of(mean[:, 5 : 5 + 512].unflatten(1, (4, 128)).transpose(0, 1), 32)
    assert torch.equal(orders(cache), want) and (want != torch.arange(128)).any()
    open_slots = torch.arange(512, 695) % cache.seen.shape[1]
    torch.testing.assert_close(cache.score[0][:, open_slots], (p[:, at] * later).sum(1)[:, 517:], rtol=1e-4, atol=1e-5)
    assert torch.equal(cache.seen[0, open_slots], later.sum(0)[517:].int())
    assert int(cache.seen.sum()) == int(cache.seen[0, open_slots].sum())  # none is left of packed tokens
    assert torch.equal(cache.order[0], significance.order_of(mean[:, 517 : 517 + 128], 32))


def test_chunks_score_what_is_open_over_all_that_their_queries_see():
    """The lse of the caller and the one computed over what the cache holds give one result."""
    own, given = (KVCache("k4v2-boost", 8, H, D) for _ in range(2))
    k, v, q = tokens(800)
    for start, stop in ((0, 300), (300, 310), (310, 680), (680, 800)):
        chunk = slice(start, stop)
        past_k, past_v = given.gather(0)
        all_k, all_v = (torch.cat((past, new[chunk].float().transpose(0, 1)), 1) for past, new in ((past_k, k),
                                                                                                   (past_v, v)))
        _, lse = attention(q[chunk], all_k, all_v)
        own.prefill(0, k[chunk], v[chunk], q[chunk])
        given.prefill(0, k[chunk], v[chunk], q[chunk], lse)
        torch.testing.assert_close(given.score, own.score, rtol=1e-4, atol=1e-6)
        assert torch.equal(given.seen, own.seen)
    assert (orders(given) == orders(own)).float().mean() > 0.99 and (orders(own) != torch.arange(128)).any()


@pytest.mark.parametrize("phase", range(8))
def test_a_page_has_an_order_from_scores_at_every_phase(phase):
    """Blocks are full at another remainder of 8 for each number of sinks; the last managed step gave the order."""
    cache = KVCache("k4v2-boost", 3, H, D, sinks=phase)
    history = torch.zeros(H, 0)
    seen, pages, order = torch.zeros(0), 0, None
    for step in range(phase + 128 + 128 + 128 + 9):
        k, v, q = tokens(1, 1)
        cache.append(k, v)
        _, lse = decode(q, cache)
        history, seen = (torch.nn.functional.pad(x, (0, 1)) for x in (history, seen))
        if (step + 1) % 8 == 0:
            s = torch.einsum("hrd,hkd->hrk", q[0, 0].float().unflatten(0, (H, R)), cache.gather(0)[0]) * D**-0.5
            p = s.softmax(-1).amax(1)
            history[:, :-1] += p[:, :-1]
            seen[:-1] += 1
            first = min(step + 1, phase) + 128 * pages
            if history.shape[1] - first >= 128:
                block = significance.means(history, seen.int())[:, first : first + 128]
                order = significance.order_of(block, 32)
        cache.manage(q, lse)
        cache.flush()
        if int(cache.n_qk[0]) > 128 * pages:
            assert torch.equal(orders(cache)[pages], order) and (order[0] != torch.arange(128)).any()
            pages += 1
    assert pages == 2


@pytest.mark.parametrize("q_len, options", [(1, {}), (4, dict(softcap=5.0, window=150))])
def test_manage_in_a_graph_is_manage(monkeypatch, q_len, options):
    """From the counters alone, in fixed shapes: scores but for their last bits, observations and orders."""
    eager = KVCache("k4v2-boost", 30, H, D, max_batch=3, max_q_len=4)
    for row, length in enumerate((500, 150, 20)):
        eager.prefill(row, *tokens(length))
    graph, acted = copy.deepcopy(eager), 0
    for step in range(140):
        k, v, q = tokens(3, q_len)
        lse = 6 + torch.rand(3, H * R, q_len)
        for cache in (eager, graph):
            cache.append(k, v)
        before = graph.seen.clone()
        eager.manage(q, lse, **options)
        with monkeypatch.context() as patch:
            patch.setattr(KVCache, "is_capturing", lambda self: True)
            graph.manage(q, lse, **options)
        acted += not torch.equal(graph.seen, before)
        torch.testing.assert_close(graph.score, eager.score, rtol=1e-5, atol=1e-6)
        assert torch.equal(graph.seen, eager.seen)
        assert (graph.order == eager.order).float().mean() > 0.99
        graph.score.copy_(eager.score)  # so that last bits do not add up
        graph.order.copy_(eager.order)
        for cache in (eager, graph):
            cache.flush()
    assert acted > 20 and (eager.n_qk > 0).sum() >= 2 and torch.equal(eager.n_qk, graph.n_qk)


def test_manage_in_a_graph_needs_nothing_of_the_host(monkeypatch):
    """On tensors without values, which no operation can read."""
    meta = dict(device="meta")
    cache = SimpleNamespace(
        max_batch=3, max_q_len=4, format=FORMATS["k4v2-boost"], ring_k=torch.zeros(3, H, 320, D, **meta),
        score=torch.zeros(3, H, 320, **meta), seen=torch.zeros(3, 320, dtype=torch.int32, **meta),
        order=torch.zeros(3, H, 128, dtype=torch.uint8, **meta),
        **{name: torch.zeros(3, dtype=torch.int32, **meta) for name in ("n_sink", "n_qk", "n_tok")})
    q, lse = torch.zeros(2, 1, H * R, D, **meta), torch.zeros(2, H * R, 1, **meta)
    significance.manage_in_graph(cache, q, lse, Attention(), 8)
    with pytest.raises(ValueError, match="supported: at most max_batch = 3, 1 to max_q_len = 4, the lse of decode"):
        significance.manage_in_graph(cache, q, None, Attention(), 8)
    real = KVCache("k4v2-boost", 4, H, D)
    monkeypatch.setattr(KVCache, "is_capturing", lambda self: True)
    with pytest.raises(NotImplementedError, match="seqs: got rows while a CUDA graph is captured"):
        real.manage(torch.zeros(1, 1, H * R, D), torch.zeros(1, H * R, 1), [0])


def test_steps_and_their_cuts_leave_one_state():
    """Steps of one token and of 16, the same scores: the same orders and bytes."""
    one, many = (KVCache("k4v2-boost", 4, H, D, max_q_len=16) for _ in range(2))
    k, v, q = tokens(1, 560)
    one.prefill(0, k[0, :240], v[0, :240], q[0, :240])
    many.prefill(0, k[0, :240], v[0, :240], q[0, :240])
    for start in range(240, 560, 16):
        for cache, size in ((one, 1), (many, 16)):
            for at in range(start, start + 16, size):
                cache.append(k[:, at : at + size], v[:, at : at + size])
                cache.flush()
        for cache in (one, many):
            lse = torch.randn(1, H * R, 16, generator=torch.Generator().manual_seed(start)) + 8
            cache.manage(q[:, start : start + 16], lse)
    assert all(torch.equal(getattr(one, name), getattr(many, name)) for name in (*significance.STATE, "pool", "n_qk"))


def test_only_steps_that_come_to_a_multiple_score():
    cache = KVCache("k4v2-boost", 2, H, D, sinks=0, max_q_len=4)
    for step in range(6):
        before = int(cache.seen.sum())
        steps(cache, 1, 4)
        assert (int(cache.seen.sum()) > before) == (step % 2 == 1)
    k, v, q = tokens(1, 1)
    cache.append(k, v)
    before = int(cache.seen.sum())
    cache.manage(q, torch.zeros(1, H * R, 1), every=1)
    assert int(cache.seen.sum()) == before + 24


@pytest.mark.parametrize("options", (dict(window=200), dict(window=200, keep_sinks=True), dict(softcap=3.0), {}))
def test_decode_takes_positions_from_the_records(options):
    """Attention over tokens as stored, under a mask made of the planes of positions, is what decode gives."""
    cache = KVCache("k4v2-boost", 4, H, D, max_q_len=3)
    k, v, q = tokens(700)
    cache.prefill(0, k, v, q)
    fmt, pages = cache.format, cache.table[0, : int(cache.n_qk[0]) // 128].long()
    records = cache.pool[pages].transpose(0, 1).flatten(0, 1)
    sides = fmt.dequantize_k(records, D), fmt.dequantize_v(records, D)
    stored = [x.unflatten(0, (H, -1)).flatten(1, 2) for x in sides]
    place = fmt.positions(records, D).long().unflatten(0, (H, -1)) + 32 + 128 * torch.arange(len(pages))[:, None]
    rest = [x.float().transpose(0, 1) for x in (k, v)]
    packed = 128 * len(pages)
    k_all, v_all = (torch.cat((r[:, :32], s, r[:, 32 + packed :]), 1) for r, s in zip(rest, stored))
    at = torch.cat((torch.arange(32).expand(H, -1), place.flatten(1),
                    torch.arange(32 + packed, 700).expand(H, -1)), 1)
    query = q[None, -3:]
    got, lse = decode(query, cache, **options)
    window, kept = options.get("window", 1 << 30), options.get("keep_sinks", False)
    for j in range(3):
        last = 697 + j
        seen = (at <= last) & ((at > last - window) | ((at < 32) & kept))
        for head in range(H * R):
            h = head // R
            mine = attention(query[0, j : j + 1, head : head + 1], k_all[h : h + 1, seen[h]], v_all[h : h + 1, seen[h]],
                             Attention(softcap=options.get("softcap")))
            torch.testing.assert_close(got[0, j, head].float(), mine[0][0, 0], rtol=2e-3, atol=2e-3)
            torch.testing.assert_close(lse[0, head, j], mine[1][0, 0], rtol=1e-5, atol=1e-5)


def test_copies_are_apart_and_views_are_not():
    cache = KVCache("k4v2-boost", 4, H, D)
    k, v, q = tokens(500)
    cache.prefill(0, k, v, q)
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), grown(cache, 2000)):
        assert all(torch.equal(getattr(twin, name), getattr(cache, name)) for name in significance.STATE)
        assert all(map(torch.equal, twin.gather(0), cache.gather(0)))
        before = cache.score.clone()
        steps(twin, 8)
        assert torch.equal(cache.score, before) and not torch.equal(twin.score, before)
    view = copy.copy(cache)
    steps(view, 8)
    assert torch.equal(view.score, cache.score) and not torch.equal(cache.score, before)


def test_files_hold_the_scores(tmp_path):
    cache = KVCache("k4v2-boost", 8, H, D, max_batch=2, max_seqlen=1000)
    for row, count in enumerate((700, 150)):
        k, v, q = tokens(count)
        cache.prefill(row, k, v, q)
    steps(cache, 20, rows=(0, 1))
    cache.save(tmp_path / "cache")
    twin = KVCache.load(tmp_path / "cache")
    assert twin.seen.any() and (orders(twin) != torch.arange(128)).any()
    for name in significance.STATE:
        assert torch.equal(getattr(twin, name), getattr(cache, name)), name
    assert all(torch.equal(got, want) for got, want in zip(twin.gather(0), cache.gather(0)))


def boosted_beside(name: str) -> tuple[KVCache, KVCache]:
    """Caches of a format with K of a named one and boosted values, and of the named one."""
    plain = FORMATS[name]
    books = normal_codebooks(name, 1, H, D, "pre").layer(0) if plain.needs_codebooks else None
    options = dict(sinks=5, codebooks=books, rotate_keys=books is None)
    mixed = Format("mixed", plain.k, FORMATS["k4v2-boost"].v, 128, 128)
    return tuple(KVCache(fmt, 8, H, D, **options) for fmt in (mixed, plain))


@pytest.mark.parametrize("name", ["k8tv4", "kcq2v4"])
def test_scores_and_order_beside_keys_that_are_stored_turned(name):
    """Rotated keys, and keys of codebooks before their rotary embedding: logits, so scores, are the model's."""
    cache, plain = boosted_beside(name)
    same = KVCache("k8v2-boost", 8, H, D, sinks=5)
    k, v, q = tokens(640)
    for one in (cache, same):
        one.prefill(0, k, v, q)
    plain.prefill(0, k, v)
    assert torch.equal(cache.seen, same.seen)
    torch.testing.assert_close(cache.score, same.score, rtol=0.03, atol=2e-3)
    assert int(cache.n_qk[0]) == 384 and (orders(cache) != torch.arange(128)).any()
    torch.testing.assert_close(cache.gather(0)[0][:, :389], plain.gather(0)[0][:, :389], rtol=2e-3, atol=2e-3)
    before = cache.score.clone()
    for one in (cache, same):
        torch.manual_seed(1)
        steps(one, 8)
    assert not torch.equal(cache.score, before)
    torch.testing.assert_close(cache.score, same.score, rtol=0.1, atol=0.02)


def test_share_copies_pages_and_the_scores_of_open_tokens():
    cache = KVCache("k4v2-boost", 8, H, D, max_batch=3)
    k, v, q = tokens(500)
    cache.prefill(0, k, v, q)
    cache.share(0, 1)
    cache.share(0, 2, 32 + 128)
    assert all(torch.equal(getattr(cache, name)[0], getattr(cache, name)[1]) for name in significance.STATE)
    assert not cache.seen[2].any() and not cache.score[2].any() and (cache.order[2] == torch.arange(128)).all()
    for row, length in ((1, 500), (2, 160)):
        assert all(torch.equal(got, want[:, :length]) for got, want in zip(cache.gather(row), cache.gather(0)))


def test_rewinding_drops_the_scores_of_what_it_drops():
    cache = KVCache("k4v2-boost", 4, H, D, max_q_len=4)
    k, v, q = tokens(500)
    cache.prefill(0, k, v, q)
    order, slots = cache.order.clone(), torch.arange(256, 468) % cache.seen.shape[1]
    kept = cache.seen[0, slots].clone()
    cache.rewind([0], 8)
    assert torch.equal(cache.seen[0, slots[:-8]], kept[:-8]) and not cache.seen[0, slots[-8:]].any()
    assert torch.equal(cache.order, order)
    cache.rewind([0], 100)  # into the block that would be packed next
    assert (cache.order[0] == torch.arange(128)).all()
    cache.clear([0])
    assert not cache.seen.any() and not cache.score.any()


def test_calls_that_raise_change_nothing():
    cache, plain = KVCache("k4v2-boost", 1, H, D), KVCache("k4v4", 1, H, D)
    k, v, q = tokens(300)
    lse = torch.zeros(H * R, 300)
    cache.prefill(0, k[:20], v[:20], q[:20])
    before = copy.deepcopy(cache)
    for error, words, call in (
        (ValueError, "q: got queries for format k4v4", lambda: plain.prefill(0, k, v, q)),
        (ValueError, "q: got queries for format k4v4", lambda: plain.manage(q[None, :1], lse[None, :, :1])),
        (ValueError, "q: 3 heads, supported: multiples of num_heads_kv = 2", lambda: cache.prefill(0, k, v, q[:, :3])),
        (ValueError, r"q: got shape \[299, 4, 64\]", lambda: cache.prefill(0, k, v, q[1:])),
        (ValueError, r"lse: got shape \[4, 299\]", lambda: cache.prefill(0, k, v, q, lse[:, 1:])),
        (TypeError, "q: got torch.float64", lambda: cache.prefill(0, k, v, q.double())),
        (TypeError, "shape", lambda: cache.prefill(0, k, v, q, shape=3)),
        (ValueError, "a sequence would reach 620 tokens", lambda: cache.prefill(0, *tokens(600))),
        (TypeError, "lse: got None", lambda: cache.manage(q[None, :1], None)),
        (ValueError, "every: got 0", lambda: cache.manage(q[None, :1], lse[None, :, :1], every=0)),
        (ValueError, "q: got 1 sequences of 2 queries", lambda: cache.manage(q[None, :2], lse[None, :, :2])),
        (ValueError, "lse: got shape", lambda: cache.manage(q[None, :1], lse[None])),
    ):
        with pytest.raises(error, match=words):
            call()
        names = (*significance.STATE, "n_tok", "ring_k", "pool")
        assert all(torch.equal(getattr(cache, name), getattr(before, name)) for name in names)


def test_torch_compile_is_refused():
    cache = KVCache("k4v2-boost", 1, H, D)
    with pytest.raises(NotImplementedError, match="orders tokens by significance, supported under torch.compile"):
        cache._append_traced(torch.zeros(1, 1, H, D), torch.zeros(1, 1, H, D), None)


class BoostedLife(RuleBasedStateMachine):
    """Random calls on two rows of 8 / 4-bit values against lists of tokens."""

    @initialize(sinks=st.sampled_from((0, 5)))
    def start(self, sinks):
        self.cache = KVCache("k8v4-boost", 12, 1, 32, sinks=sinks, max_batch=2, max_q_len=4, max_seqlen=900)
        self.rows, self.values = [[], []], torch.rand(2, 4096, 1, 32).mul(2).sub(1).half()
        self.next = 0

    def fresh(self, count):
        ids = [(self.next + i) % 4096 for i in range(count)]
        self.next += count
        return ids

    @rule(row=st.integers(0, 1), count=st.integers(0, 400), scored=st.booleans())
    def prefill(self, row, count, scored):
        if len(self.rows[row]) + count <= 900:
            ids = self.fresh(count)
            q = torch.randn(count, 2, 32) if scored else None
            self.cache.prefill(row, *self.values[:, ids], q)
            self.rows[row] += ids

    @rule(row=st.integers(0, 1), count=st.integers(1, 4), times=st.integers(1, 40), managed=st.booleans(),
          flushed=st.booleans())
    def step(self, row, count, times, managed, flushed):
        for _ in range(times):
            if len(self.rows[row]) + count <= 900:
                ids = self.fresh(count)
                self.cache.append(*self.values[:, ids].unsqueeze(1), [row])
                self.rows[row] += ids
                if managed:
                    self.cache.manage(torch.randn(1, count, 2, 32), torch.randn(1, 2, count) + 6, [row])
                if flushed:
                    self.cache.flush([row])

    @rule(row=st.integers(0, 1), count=st.integers(1, 3))
    def rewind(self, row, count):
        if len(self.rows[row]) - int(self.cache.n_qk[row]) - int(self.cache.n_sink[row]) >= count:
            self.cache.rewind([row], count)
            del self.rows[row][-count:]

    @rule(row=st.integers(0, 1))
    def clear(self, row):
        self.cache.clear([row])
        self.rows[row] = []

    @rule(row=st.integers(0, 1))
    def share(self, row):
        self.cache.clear([1 - row])
        self.cache.share(row, 1 - row)
        self.rows[1 - row] = list(self.rows[row])

    @rule()
    def copy(self):
        self.cache = copy.deepcopy(self.cache)

    @invariant()
    def every_token_is_there_in_order(self):
        for row, ids in enumerate(getattr(self, "rows", ())):
            for got, values, atol in zip(self.cache.gather(row), self.values, (2 / 255, 2 / 15)):
                assert got.shape[1] == len(ids)
                assert not ids or (got[0] - values[ids, 0]).abs().max() <= atol
            open_tokens = len(ids) - int(self.cache.n_sink[row] + self.cache.n_qk[row])
            slots = (int(self.cache.n_qk[row]) + torch.arange(open_tokens)) % self.cache.seen.shape[1]
            assert int(self.cache.seen[row].sum()) == int(self.cache.seen[row, slots].sum())
        self.cache.book.check() if hasattr(self, "rows") else None


def test_a_cache_at_random():
    run_state_machine_as_test(BoostedLife, settings=settings(
        max_examples=20, stateful_step_count=25, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck)))
