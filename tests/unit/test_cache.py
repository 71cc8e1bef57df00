"""The cache's state machine: however tokens arrive, pages, windows, reuse, exhaustion, and unused memory."""


import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit_attn import KVCache, PageExhaustedError, decode
from lowbit_attn.testing import (
    Case,
    assert_decode,
    assert_same_bytes,
    assert_same_state,
    attention_fp64,
    build,
    expected,
    permute_pages,
    poison,
    to_device,
)
from unit.caches import DIM, HEADS, assert_account, assert_untouched, make, prefilled, snapshot, tokens

WINDOWS = ((0, 0), (0, 128), (128, 128))


def packed(length, sinks, window):
    return 128 * (max(0, length - min(length, sinks) - window) // 128)


# ---- however tokens arrive


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("max_q_len", (1, 4, 16))
@pytest.mark.parametrize("sinks", (0, 5, 32))
def test_appending_equals_prefilling(sinks, max_q_len, windows):
    """At every length around the ends of sinks, windows and blocks."""
    kwargs = dict(sinks=sinks, max_q_len=max_q_len, windows=windows)
    window_k, window_v = (max(w, max_q_len - 1) for w in windows)
    ends = {sinks, *(sinks + w + 128 * n for w in (0, window_k, window_v) for n in (1, 2))}
    stops = sorted({n + d for n in ends for d in (-1, 0, 1) if n + d > 0})
    k, v = tokens(stops[-1])
    cache, length = make(**kwargs), 0
    for stop in stops:
        while length < stop:
            step = min(int(torch.randint(1, max_q_len + 1, ())), stop - length)
            cache.append(k[None, length : length + step], v[None, length : length + step])
            # this step still reads in 16 bit what it filled
            assert int(cache.n_qk[0]) == packed(length, sinks, window_k)
            assert int(cache.n_qv[0]) == packed(length, sinks, window_v)
            length += step
        flushed = to_device(cache, "cpu")
        flushed.flush()
        assert int(flushed.n_qk[0]) == packed(length, sinks, window_k)
        assert int(flushed.n_qv[0]) == packed(length, sinks, window_v)
        assert_same_state(flushed, prefilled(k[:length], v[:length], **kwargs))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300)), min_size=1, max_size=6), st.sampled_from((0, 5, 130)),
       st.sampled_from(WINDOWS), st.sampled_from(("k4v4", "k2v2-bf16", "k8tv2-g32")), st.integers(0, 2**31))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_any_cut_into_calls_gives_the_same_state(steps, sinks, windows, fmt, seed):
    torch.manual_seed(seed)
    kwargs = dict(fmt=fmt, sinks=sinks, max_q_len=4, windows=windows, pages=16)
    steps = [(fill, count if fill else 1 + count % 4) for fill, count in steps]
    k, v = tokens(sum(count for _, count in steps))
    cache, at = make(**kwargs), 0
    for fill, count in steps:
        new = k[at : at + count], v[at : at + count]
        cache.prefill(0, *new) if fill else cache.append(new[0][None], new[1][None])
        at += count
    cache.flush()
    assert_same_state(cache, prefilled(k, v, **kwargs))
    before = snapshot(cache)
    cache.flush()
    assert_untouched(cache, before)


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("fmt", ("k4v4", "k2v2", "k8tv2-g32-bf16"))
def test_contents_are_the_tokens_in_order(fmt, windows):
    """Sinks and residual bit for bit, blocks as the format alone quantizes them."""
    k, v = tokens(500)
    cache = prefilled(k, v, fmt=fmt, sinks=5, windows=windows)
    want = []
    for x, write, read, window in ((k, "write_k", "dequantize_k", windows[0]),
                                   (v, "write_v", "dequantize_v", windows[1])):
        x, n = x.float().transpose(0, 1).clone(), packed(500, 5, window)
        for start in range(5, 5 + n, 128):
            records = torch.zeros(HEADS, cache.record.nbytes, dtype=torch.uint8)
            getattr(cache.format, write)(records, x[:, start : start + 128])
            x[:, start : start + 128] = getattr(cache.format, read)(records, DIM)
        want.append(x)
    for name, got, x in zip("kv", cache.gather(0), want):
        assert_same_bytes(name, got, x)


def test_range_search_of_the_cache_reaches_the_codes():
    k, v = tokens(128)
    plain, searched, default = (prefilled(k, v, fmt="k2v2", range_search=s).gather(0) for s in (False, True, None))
    assert not torch.equal(plain[0], searched[0]) and not torch.equal(plain[1], searched[1])
    assert torch.equal(default[0], searched[0]) and torch.equal(default[1], plain[1])


def test_fp32_inputs_are_rounded_once():
    k, v = (torch.randn(300, HEADS, DIM) for _ in range(2))
    for dtype in (torch.float16, torch.bfloat16):
        kwargs = dict(fmt="k4v4-bf16", dtype=dtype, sinks=3)
        assert_same_state(prefilled(k, v, **kwargs), prefilled(k.to(dtype), v.to(dtype), **kwargs))


def test_strided_inputs_are_read_right():
    k, v = tokens(300)
    wide = torch.stack((k, v), 1)  # a fused projection: K and V side by side
    assert_same_state(prefilled(wide[:, 0], wide[:, 1], sinks=5), prefilled(k, v, sinks=5))


@pytest.mark.parametrize("length", (0, 3, 40))
def test_infinities(length):
    """Kept by default, clamped with ``saturate``."""
    k, v = tokens(300)
    k[length, 0, 1], v[length, 1, 2] = float("inf"), float("-inf")
    kept, clamped = (prefilled(k, v, sinks=5, saturate=s).gather(0) for s in (False, True))
    assert not kept[0][0, length, 1].isfinite() and not kept[1][1, length, 2].isfinite()
    assert clamped[0].isfinite().all() and clamped[1].isfinite().all()
    assert clamped[0][0, length, 1] > 6e4 and clamped[1][1, length, 2] < -6e4


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("max_q_len", (1, 4, 16))
def test_sizes(max_q_len, windows):
    cache = make(windows=windows, max_q_len=max_q_len, sinks=5, pages=3)
    for ring, window in ((cache.ring_k, windows[0]), (cache.ring_v, windows[1])):
        assert ring.shape[2] >= max(window, max_q_len - 1) + 127 + max_q_len
        assert ring.shape[2] % 64 == 0
    k, v = tokens(cache.max_seqlen)
    cache.prefill(0, k, v)  # the pool is used to the last page, and nothing is left for one token more
    assert int(cache.n_qk[0]) == 3 * 128 and int(cache.n_free) == 0
    left = 2 * cache.max_seqlen - int(cache.n_qk[0]) - int(cache.n_qv[0])
    v_bytes = int(cache.n_qv[0]) // 128 * (cache.record.nbytes - cache.record.v_offset)
    assert cache.nbytes == HEADS * (3 * cache.record.v_offset + v_bytes) + left * 2 * HEADS * DIM
    before = snapshot(cache)
    with pytest.raises(ValueError, match="max_seqlen"):
        cache.append(k[None, :1], v[None, :1])
    assert_untouched(cache, before)


# ---- drafts


@pytest.mark.parametrize("flush_first", (False, True))
@pytest.mark.parametrize("length", range(126, 136))
def test_rejected_drafts_leave_no_trace(length, flush_first):
    """Four tokens a step around a block's end; n_tok goes back by 1 to 3 of them, and others follow."""
    k, v = tokens(400)
    drafts = tokens(4)
    for rejected in (1, 2, 3):
        cache = make(max_q_len=4)
        cache.prefill(0, k[:length], v[:length])
        kept = 4 - rejected
        mixed = (torch.cat((x[length : length + kept], draft[kept:]))[None] for x, draft in zip((k, v), drafts))
        cache.append(*mixed)
        if flush_first:
            cache.flush()
        cache.rewind([0], rejected)
        at = length + kept
        q = torch.randn(1, 1, 4, DIM).half()
        whole = prefilled(k[:at], v[:at], max_q_len=4)
        ahead = int(cache.n_qk[0]) - int(whole.n_qk[0])
        assert ahead in (0, 128) if flush_first else ahead in (-128, 0)
        assert int(cache.n_qk[0]) <= at
        got_k, _ = cache.gather(0)
        n = int(cache.n_qk[0])
        assert torch.equal(got_k[:, n:], k[n:at].float().transpose(0, 1))
        assert decode(q, cache)[0].isfinite().all()
        while at < 400:
            step = min(3, 400 - at)
            cache.append(k[None, at : at + step], v[None, at : at + step])
            at += step
        cache.flush()
        assert_same_state(cache, prefilled(k, v, max_q_len=4))


# ---- several sequences and the pool


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("pafx"), st.integers(1, 400)), max_size=14),
       st.integers(0, 2**31))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_pages_are_conserved_and_sequences_apart(actions, seed):
    """Random prefill, append, free: each page is held once, and each sequence is what it would be alone."""
    torch.manual_seed(seed)
    cache = make(pages=6, max_batch=3, sinks=5, max_q_len=4, max_seqlen=900)
    mine = {row: tokens(0) for row in range(3)}
    for row, action, count in actions:
        if action == "f":
            cache.clear([row])
            mine[row] = tokens(0)
        else:
            new = tokens(count if action == "p" else 1 + count % 4)
            before = snapshot(cache)
            try:
                cache.prefill(row, *new) if action == "p" else cache.append(new[0][None], new[1][None], [row])
            except (PageExhaustedError, ValueError):
                assert_untouched(cache, before)
            else:
                mine[row] = tuple(torch.cat(pair) for pair in zip(mine[row], new))
        assert_account(cache)
    cache.flush()
    for row, (k, v) in mine.items():
        alone = prefilled(k, v, sinks=5, max_q_len=4)
        for got, want in zip(cache.gather(row), alone.gather(0)):
            assert_same_bytes(f"sequence {row}", got, want)


def test_append_serves_chosen_rows_of_different_lengths():
    k, v = tokens(300)
    cache = make(max_batch=3, sinks=5)
    cache.prefill(2, k[:132], v[:132])
    cache.prefill(0, k[:3], v[:3])
    cache.append(torch.stack((k[132:133], k[3:4])), torch.stack((v[132:133], v[3:4])), [2, 0])
    cache.flush([2])
    assert cache.n_tok.tolist() == [4, 0, 133] and cache.n_qk.tolist() == [0, 0, 128]
    for row, length in ((0, 4), (2, 133)):
        alone = prefilled(k[:length], v[:length], sinks=5)
        assert all(map(torch.equal, cache.gather(row), alone.gather(0)))


def test_exhaustion_raises_before_anything_is_written():
    k, v = tokens(700)
    cache = make(pages=3, max_batch=2)
    cache.prefill(0, k[:255], v[:255])
    cache.prefill(1, k[:255], v[:255])  # one page each, one left, both one token short of their second
    before = snapshot(cache)
    with pytest.raises(PageExhaustedError, match="needs 2 pages, 1 of 3"):
        cache.append(torch.stack((k[:1], k[:1])), torch.stack((v[:1], v[:1])))
    assert_untouched(cache, before)
    with pytest.raises(PageExhaustedError, match="needs 2 pages"):
        cache.prefill(1, k[:129], v[:129])
    assert_untouched(cache, before)
    cache.append(k[None, :1], v[None, :1], [0])
    cache.free([0])
    cache.prefill(1, k[:129], v[:129])
    assert int(cache.n_qk[1]) == 384


def test_freed_pages_are_used_again_without_a_trace():
    k, v = tokens(600)
    cache = make(pages=4, max_batch=2, sinks=5, max_seqlen=600)
    cache.prefill(0, k[:400], v[:400])
    cache.free([0])
    assert cache.n_tok.tolist() == [0, 0] and int(cache.n_free) == 4 and (cache.table == -1).all()
    with pytest.raises(ValueError, match=r"\[0\] were freed before"):
        cache.free([0])
    k, v = tokens(530)
    cache.prefill(1, k, v)
    assert all(map(torch.equal, cache.gather(1), prefilled(k, v, sinks=5).gather(0)))


@pytest.mark.parametrize("sinks, max_q_len", ((0, 1), (5, 1), (300, 16)))
def test_reach_is_the_longest_length_of_so_many_pages(sinks, max_q_len):
    """``missing_pages`` asks it first, and works out the pages only of what is longer."""
    cache = KVCache("k4v4", 8, 1, 64, sinks=sinks, max_q_len=max_q_len)
    for pages in range(4):
        reach = cache._reach(pages)
        packed = [int(cache._num_packed(length, cache.window_k)) for length in (1, reach, reach + 1)]
        assert packed == [0, pages * 128, (pages + 1) * 128]


def test_rows_of_different_lengths_take_their_own_pages():
    cache = KVCache("k4v4", 8, 1, 64, max_batch=3)
    for row, length in enumerate((126, 10, 400)):
        cache.prefill(row, *torch.randn(2, length, 1, 64))
    for pages in ([0, 0, 3], [1, 0, 3]):
        cache.append(*torch.randn(2, 3, 1, 1, 64))
        assert cache.n_pages.tolist() == pages
    cache.check()


def test_max_seqlen_is_a_limit_not_an_estimate():
    k, v = tokens(300)
    cache = make(max_seqlen=200)
    cache.prefill(0, k[:200], v[:200])
    before = snapshot(cache)
    for call in (lambda: cache.append(k[None, :1], v[None, :1]), lambda: cache.prefill(0, k[:1], v[:1])):
        with pytest.raises(ValueError, match="201 tokens, supported: max_seqlen = 200"):
            call()
    assert_untouched(cache, before)


# ---- reading


def test_the_step_that_fills_a_block_reads_it_in_16_bit():
    k, v = tokens(129)
    q = torch.randn(1, 1, 4, DIM).half()
    cache = make()
    cache.prefill(0, k[:127], v[:127])
    cache.append(k[None, 127:128], v[None, 127:128])
    exact = attention_fp64(q[0], k[:128].transpose(0, 1), v[:128].transpose(0, 1))[0]
    assert torch.allclose(decode(q.float(), cache)[0][0].double(), exact, atol=1e-5)
    cache.append(k[None, 128:], v[None, 128:])
    exact = attention_fp64(q[0], k.transpose(0, 1), v.transpose(0, 1))[0]
    assert not torch.allclose(decode(q.float(), cache)[0][0].double(), exact, atol=1e-3)


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("length", (1, 5, 6, 127, 132, 133, 134, 260, 261, 262, 390, 400))
def test_unused_memory_never_reaches_the_output(length, windows):
    """Bitwise the same after every unused byte became NaN and every page moved; and the next tokens still fit."""
    k, v = tokens(700)
    kwargs = dict(sinks=5, windows=windows, max_batch=2, max_q_len=2)
    clean = prefilled(k[:length], v[:length], **kwargs)
    q = torch.randn(2, 2, 4, DIM).half()
    dirty = to_device(clean, "cpu")
    permute_pages(dirty, 5)
    poison(dirty)
    for got, want in zip(decode(q, dirty), decode(q, clean)):
        assert_same_bytes("output", got, want)
    dirty.prefill(0, k[length:], v[length:])
    assert_same_state(dirty, prefilled(k, v, **kwargs))


def test_poison_and_permutation_do_something():
    problem, plain = build(Case(lengths=(300,), sinks=32)), build(Case(lengths=(300,), sinks=32, page_seed=None,
                                                                       poison=False))
    assert problem.cache.ring_k.isnan().any() and not plain.cache.ring_k.isnan().any()
    assert not torch.equal(problem.cache.table[0, :2], plain.cache.table[0, :2])
    assert (problem.cache.table[0, 2:] > problem.cache.num_pages).all()
    free = problem.cache.pool[problem.cache.free_list[: int(problem.cache.n_free)].long()]
    assert (free == 0xFF).all() and free.numel()
    assert_same_state(problem.cache, plain.cache)
    assert_decode(*decode(problem.q, problem.cache), expected(plain))


def test_shared_pages_read_the_same():
    """Two sequences whose tables name the same pages (a common prefix)."""
    k, v = tokens(300)
    cache = make(max_batch=2, pages=4)
    cache.prefill(0, k, v)
    cache.prefill(1, k, v)
    cache.pool[cache.table[1, :2].long()] = 0xFF
    cache.table[1, :2] = cache.table[0, :2]
    q = torch.randn(1, 1, 4, DIM).half().expand(2, -1, -1, -1)
    o, lse = decode(q, cache)
    assert torch.equal(o[0], o[1]) and torch.equal(lse[0], lse[1]) and o.isfinite().all()


def test_dequantize_pages_is_what_gather_shows():
    k, v = tokens(300)
    cache = prefilled(k, v)
    for pages, whole in zip(cache.dequantize_pages(cache.table[0, :2]), cache.gather(0)):
        assert pages.shape == (2, HEADS, 128, DIM) and pages.dtype == torch.float32
        assert torch.equal(pages.transpose(0, 1).flatten(1, 2), whole[:, :256])
