"""Sequences that come, go, go back and share: reserve, rewind, add, free, share, and what the host knows."""

import numpy as np
import pytest
import torch

from lowbit_attn import FORMATS, CacheFaultError, KVCache, PageExhaustedError, decode, dispatch, kernels, loader
from lowbit_attn.cache.pages import PageBook
from lowbit_attn.cache.view import STEP_FIELDS
from lowbit_attn.testing import assert_same_bytes, assert_same_state, to_device
from unit.caches import DIM, HEADS, assert_account, assert_untouched, make, prefilled, snapshot, tokens

FORMATS_OF_STEPS = ("k8v8", "k4v2-g32", "k1v1-bf16", "k4tv4", "k2tv1-vg32")


def refused(cache: KVCache, error, words: str, call) -> None:
    before = snapshot(cache)
    with pytest.raises(error, match=words):
        call()
    assert_untouched(cache, before)


def stepped(k, v, q_len: int, **kwargs) -> KVCache:
    cache = make(max_q_len=q_len, **kwargs)
    for at in range(0, len(k), q_len):
        cache.append(k[None, at : at + q_len], v[None, at : at + q_len])
    cache.flush()
    return cache


@pytest.mark.parametrize("fmt", FORMATS_OF_STEPS)
@pytest.mark.parametrize("sinks, windows, q_len", [(0, (0, 0), 16), (5, (0, 128), 7), (33, (128, 128), 5)], ids=str)
def test_steps_give_the_codes_of_prefill(fmt, sinks, windows, q_len):
    dim = 64 if FORMATS[fmt].v.bits == 1 else DIM  # 1-bit V wants 64 channels
    k, v = (torch.randn(420, HEADS, dim).half() for _ in range(2))
    caches = []
    for way in ("steps", "whole"):
        named = FORMATS[fmt]
        cache = KVCache(type(named)(named.name, named.k, named.v, *windows), 8, HEADS, dim, sinks=sinks,
                        max_q_len=q_len)
        if way == "whole":
            cache.prefill(0, k, v)
        for at in range(0, 420, q_len) if way == "steps" else ():
            cache.append(k[None, at : at + q_len], v[None, at : at + q_len])
        cache.flush()
        caches.append(cache)
    assert int(caches[1].n_qv[0]) >= 128
    assert_same_state(*caches)


@pytest.mark.parametrize("name", ("kitty", "kitty-pro-bf16"))
def test_kittys_sides_are_packed_in_different_steps(name):
    k, v = (torch.randn(300, 1, 64).half() for _ in range(2))
    steps, whole = (KVCache(name, 4, 1, 64, sinks=32, max_q_len=3) for _ in range(2))
    packed = set()
    for at in range(0, 300, 3):
        steps.append(k[None, at : at + 3], v[None, at : at + 3])
        packed.add((int(steps.n_qk[0]), int(steps.n_qv[0])))
    assert packed == {(0, 0), (128, 0), (128, 128), (256, 128)}
    steps.flush()
    whole.prefill(0, k, v)
    assert_same_state(steps, whole)


# ---- reserve


def test_reserved_pages_are_taken_once():
    cache = make(pages=6, max_batch=2, sinks=5)
    cache.reserve([0, 1], [5 + 127 + 128, 5 + 128])
    assert cache.n_free == 4 and cache.n_pages.tolist() == [1, 1]
    assert cache.limit.tolist() == [5 + 127 + 128] * 2
    k, v = tokens(260)
    cache.prefill(0, k, v)
    assert cache.n_free == 4
    cache.reserve([0, 1], 5)
    assert cache.n_free == 4
    assert_account(cache)
    refused(cache, PageExhaustedError, "needs 6 pages, 4 of 6", lambda: cache.reserve([0, 1], 5 + 4 * 128))
    refused(cache, ValueError, "would reach 9000 tokens, supported: max_seqlen", lambda: cache.reserve([1], 9000))


# ---- rewind


@pytest.mark.parametrize("fmt, windows", [("k4v4", (0, 0)), ("k2v2", (0, 128)), ("k4v4", (128, 128))], ids=str)
@pytest.mark.parametrize("length", range(126, 135))
def test_rewinding_leaves_no_trace(length, fmt, windows):
    """All that is in 16 bit can go: then other tokens come, and the state is theirs."""
    k, v = tokens(420)
    cache = prefilled(k[:length], v[:length], fmt=fmt, windows=windows, sinks=3, max_q_len=4)
    whole = prefilled(k, v, fmt=fmt, windows=windows, sinks=3, max_q_len=4)
    for drafts in (4, 1, 3, 4):
        cache.append(*(x[None, :drafts] for x in tokens(drafts)))
        cache.rewind([0], drafts)
    n_qk = int(cache.n_qk[0])
    most = length - (3 + n_qk if n_qk else 0)
    assert most >= 3 or not n_qk
    refused(cache, ValueError, rf"got \[{most + 1}\] for sequences \[0\], supported: 0 to \[{most}\]",
            lambda: cache.rewind([0], most + 1))
    refused(cache, ValueError, "supported: 0 to", lambda: cache.rewind([0], -1))
    cache.rewind([0], most)
    length -= most
    assert cache.n_tok.tolist() == [length] and cache.n_sink.tolist() == [min(3, length)]
    if length:
        assert decode(torch.randn(1, 1, 4, DIM).half(), cache)[0].isfinite().all()
    for at in range(length, 420, 4):
        cache.append(k[None, at : at + 4][:, : 420 - at], v[None, at : at + 4][:, : 420 - at])
    cache.flush()
    assert_same_state(cache, whole)


def test_each_row_rewinds_its_own_number():
    k, v = tokens(8)
    cache = make(max_batch=3, sinks=6)
    for row in range(3):
        cache.prefill(row, k, v)
    cache.rewind([2, 0], [1, 7])
    assert cache.n_tok.tolist() == [1, 8, 7] and cache.n_sink.tolist() == [1, 6, 6]


# ---- rows


def test_rows_come_and_go():
    cache = make(max_batch=3, pages=3)
    k, v = tokens(130)
    assert [cache.add() for _ in range(3)] == [0, 1, 2]
    refused(cache, RuntimeError, "all max_batch = 3 rows hold sequences", cache.add)
    cache.prefill(1, k, v)
    cache.free([1, 0])
    for words, call in (("were freed before", lambda: cache.free([0])), ("were freed", lambda: cache.rewind([0], 0)),
                        ("were freed", lambda: cache.append(k[None, :1], v[None, :1])),
                        ("were freed", lambda: cache.append(k[:2, None], v[:2, None], [2, 1])),
                        ("were freed", lambda: cache.reserve([1], 5)), ("were freed", lambda: cache.share(1, 0)),
                        ("were freed", lambda: cache.clear([0])), ("were freed", lambda: cache.flush([0]))):
        refused(cache, ValueError, words, call)
    assert cache.limit.tolist() == [0, 0, 127] and cache.n_free == 3
    assert cache.gather(1)[0].shape[1] == 0
    assert cache.add() == 0
    cache.prefill(1, k, v)
    cache.append(k[:2, None], v[:2, None], [0, 1])
    assert cache.n_tok.tolist() == [1, 131, 0]
    cache.clear([1])
    cache.append(k[:2, None], v[:2, None], [0, 1])
    assert cache.n_tok.tolist() == [2, 1, 0] and cache.n_free == 3
    assert_account(cache)


def test_unused_rows_need_no_add():
    cache = make(max_batch=3)
    k, v = tokens(3)
    cache.append(k[:, None], v[:, None])
    cache.free([1])
    assert cache.add() == 1


# ---- share


@pytest.mark.parametrize("windows", ((0, 0), (0, 128), (128, 128)), ids=str)
def test_every_prefix_that_can_be_had(windows):
    """A shared prefix is what prefill of it gives, or a block ahead; other lengths are refused; then both go on."""
    k, v = tokens(700)
    kwargs = dict(windows=windows, sinks=5)
    for length in (3, 5, 100, 390, 400, 520):
        source = prefilled(k[:length], v[:length], max_batch=2, pages=9, **kwargs)
        n_qk = int(source.n_qk[0])
        wanted = {0, 2, 5, 5 + 128, 5 + 256, 5 + n_qk, 5 + n_qk + 1, length - 1, length, 200, length + 1}
        for cut in wanted:
            cache = to_device(source, "cpu")
            rest = max(0, cut - 5)
            if cut > length or (rest % 128 and rest < n_qk):
                words = f"tokens: got {cut}, supported for sequence 0"
                refused(cache, ValueError, words, lambda: cache.share(0, 1, cut))  # noqa: B023
                continue
            cache.share(0, 1, cut)
            cache.book.check()
            assert cache.n_tok.tolist() == [length, cut]
            own, theirs = cache.gather(1), cache.gather(0)
            n_qv = int(cache.n_qv[1])
            assert_same_bytes("k", own[0], theirs[0][:, :cut])
            assert_same_bytes("v", own[1][:, : 5 + n_qv], theirs[1][:, : min(cut, 5 + n_qv)])
            assert cache.book.held[1][: n_qv // 128] == cache.book.held[0][: n_qv // 128]
            assert not set(cache.book.held[1][n_qv // 128 :]) & set(cache.book.held[0])
            other = tokens(150)
            cache.prefill(1, *other)
            cache.prefill(0, k[length : length + 150], v[length : length + 150])
            assert_same_bytes("k", cache.gather(0)[0], prefilled(k[: length + 150], v[: length + 150], pages=9,
                                                                 **kwargs).gather(0)[0])
            alone = prefilled(torch.cat((k[:cut], other[0])), torch.cat((v[:cut], other[1])), pages=9, **kwargs)
            for mine, whole in zip(cache.gather(1), alone.gather(0)):
                assert_same_bytes("shared, then grown", mine, whole)


def test_pages_go_with_their_last_holder():
    k, v = tokens(300)
    cache = make(max_batch=3, pages=4)
    cache.prefill(0, k, v)
    cache.share(0, 1)
    cache.share(1, 2, 128)
    assert sorted(cache.book.refs.tolist()) == [0, 0, 2, 3] and cache.n_free == 2
    for row, free in ((0, 2), (2, 2), (1, 4)):
        cache.free([row])
        assert cache.n_free == free
        assert_account(cache)


def test_sharing_without_room_or_into_a_used_row_is_refused():
    k, v = tokens(300)
    cache = make(max_batch=3, pages=3, windows=(0, 128))
    cache.prefill(0, k, v)  # K of two pages, V of one
    cache.reserve([1], 200)
    for dst in (0, 1):
        refused(cache, ValueError, f"dst: row {dst} is src or holds tokens", lambda: cache.share(0, dst))  # noqa: B023
    refused(cache, PageExhaustedError, "needs 1 pages, 0 of 3", lambda: cache.share(0, 2))
    cache.share(0, 2, 128)
    assert cache.n_free == 0


# ---- the host's account


def test_a_book_that_lost_or_doubled_a_page_is_found():
    def book():
        made = PageBook(4, 2)
        made.take(0, 2)
        return made

    book().check()
    for spoil in (lambda b: b.free.pop(), lambda b: b.free.append(b.held[0][0]), lambda b: b.held[1].append(3),
                  lambda b: b.held[0].append(b.held[0][0]), lambda b: b.refs.__setitem__(0, 2)):
        spoiled = book()
        spoil(spoiled)
        with pytest.raises(AssertionError):
            spoiled.check()


def test_memory_of_the_caller():
    record = FORMATS["k4v4"].record_bytes(DIM)
    pool = torch.zeros(3, HEADS, record, dtype=torch.uint8)
    cache = make(pages=3, pool=pool)
    cache.prefill(0, *tokens(128))
    assert cache.pool is pool and pool.count_nonzero() > record
    for wrong in (pool[:2], pool.int(), pool.transpose(0, 1).contiguous().transpose(0, 1)):
        with pytest.raises((ValueError, TypeError), match="pool"):
            make(pages=3, pool=wrong)


class OneStepBehind(KVCache):
    """A cache whose device moved without the host: what a replayed graph leaves, on the CPU."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._counts = type(self.counts)(*(count.copy() for count in self.counts))
        self.is_captured = True


def test_after_a_captured_step_every_call_reads_the_counters_first():
    k, v = tokens(6)
    cache = OneStepBehind("k4v4", 4, HEADS, DIM, max_batch=2)
    cache.ring_k[0, :, :2], cache.ring_v[0, :, :2] = k[:2].transpose(0, 1), v[:2].transpose(0, 1)
    cache.n_tok[0] = 2  # as a replay does
    assert cache.counts.n_tok.tolist() == [0, 0]
    assert cache.nbytes == 2 * 2 * 2 * HEADS * DIM
    cache.n_tok[0] = 1
    assert cache.gather(0)[0].shape[1] == 1
    cache.n_tok[0] = 2
    cache.rewind([0], 1)
    assert cache.counts.n_tok.tolist() == [1, 0]
    assert cache.add() == 1  # row 0 holds a sequence, which only the device knew


def test_faults_are_reported_once_with_the_rows():
    cache = OneStepBehind("k4v4", 4, HEADS, DIM, max_batch=3)
    cache.faults[torch.tensor([1, 3])] = 1
    with pytest.raises(CacheFaultError, match=r"sequences \[1\] were freed or had no room .*; a row beyond 0 to"):
        cache.prefill(0, *tokens(1))
    assert not cache.faults.any()
    cache.check()
    cache.faults[2] = 1
    with pytest.raises(CacheFaultError, match=r"sequences \[2\] were"):
        cache.check()


def test_the_hosts_rule_of_a_step_is_appends():
    """_after_step, which stands for the kernels' counters, against what append does to them."""
    k, v = tokens(5)
    cache = make(windows=(0, 128), sinks=3, max_q_len=5, max_batch=2, pages=8)
    cache.prefill(1, *tokens(100))
    for _ in range(90):
        counts = cache.counts._asdict()
        after = {name: count.copy() for name, count in counts.items()} | cache._after_step(np.arange(2), 5)
        cache.append(torch.stack((k, k)), torch.stack((v, v)))
        assert {name: x.tolist() for name, x in after.items()} == {name: x.tolist() for name, x in counts.items()}
    assert cache.n_qv.tolist() == [256, 384] and cache.n_qk.tolist() == [384, 512]


def test_a_step_is_one_launch_planned_once(monkeypatch):
    """Later steps make nothing but their tokens; memory that moved is found."""
    launches, loaded = [], []

    def load(key):
        loaded.append(key.name)
        return lambda *arguments: launches.append(arguments)

    monkeypatch.setattr(loader, "load", load)
    monkeypatch.setattr(loader, "argument", lambda tensor: tensor)
    monkeypatch.setattr(dispatch, "target_of", lambda device: ("hopper", "sm_90a"))
    cache = KVCache("k2v2", 4, HEADS, 64, sinks=3, max_batch=2, max_q_len=4)
    name = "append-search_k-k2v2-float16-d64"
    k, v = (torch.randn(2 * HEADS * 64 + 1).half()[1:].view(2, 1, HEADS, 64) for _ in range(2))  # 2 bytes off
    rows = cache.row_tensor(np.array([1, 0]))
    for _ in range(2):
        dispatch._append(cache, rows, k, v)
    assert len(launches) == 2 and loaded == [name]
    for arguments in launches:
        for x, given in zip((k, v), arguments):
            assert torch.equal(given, x) and given.data_ptr() % 16 == 0
        words, halves = arguments[4:6]
        assert words.data_ptr() == halves.data_ptr() == cache.pool.data_ptr()
        state = (rows, rows, *(getattr(cache, name) for name in STEP_FIELDS[1:]))
        assert all(map(lambda a, b: a is b, (*arguments[2:4], *arguments[6:-5]), state))
        assert arguments[-5:] == (3, 3, 3, cache.strides.page, cache.strides.head)
    cache.limit = cache.limit.clone()
    dispatch._append(cache, rows, k, v)
    assert launches[-1][-8] is cache.limit and loaded == [name] * 2


def test_kernels_take_the_weights_of_formats_that_have_them(monkeypatch):
    """The tensor itself, which its owner updates in place; another one makes another plan. V has none."""
    launches = {"append": [], "quantize": []}
    monkeypatch.setattr(loader, "load", lambda key: lambda *arguments: launches[key.op].append(arguments))
    monkeypatch.setattr(loader, "argument", lambda tensor: tensor)
    monkeypatch.setattr(dispatch, "target_of", lambda device: ("hopper", "sm_90a"))
    cache = KVCache("kitty-weighted", 4, HEADS, 64, query_weights=torch.rand(HEADS, 64))
    k, v = torch.randn(2, 1, 1, HEADS, 64).half()
    for weights in (cache.query_weights, torch.rand(HEADS, 64)):
        cache.query_weights = weights
        for _ in range(2):
            dispatch._append(cache, cache.row_tensor(np.array([0])), k, v)
            assert launches["append"][-1][-6] is weights and len(launches["append"][-1]) == 25
    blocks, pages = torch.randn(1, HEADS, 128, 64).half(), torch.zeros(1, dtype=torch.int64)
    for side in "kv":
        dispatch._write_blocks(cache, pages, blocks, side)
    assert [len(arguments) for arguments in launches["quantize"]] == [7, 6]
    assert launches["quantize"][0][4] is cache.query_weights


@pytest.mark.parametrize("range_search, variant", [(None, "search_k"), (True, "search_kv"), (False, "")])
def test_the_sides_of_a_step_search_as_the_cache_says(range_search, variant):
    key = kernels.append_key("sm_90a", "float16", 128, FORMATS["k2v2"], range_search)
    assert (key.target, key.format, key.variant) == ("sm_90", "k2v2", variant)


@pytest.mark.parametrize("name", ("k4v4", "k4tv4", "kitty", "kitty-weighted", "kitty-b0-weighted"))
def test_the_step_of_every_kind_of_side_is_traced(name):
    """Without a compiler: the page quantizers and the step that calls them fit together."""
    pytest.importorskip("tilelang", reason="traces kernels")
    program = kernels.trace(kernels.append_key("sm_90", "float16", 64, FORMATS[name]))
    assert program.prim_func.attrs["global_symbol"] == "append"
    names = [parameter.name for parameter in program.prim_func.params]
    assert len(names) == 24 + FORMATS[name].k.weighs_queries
    assert any(name.startswith("query_weights") for name in names) == FORMATS[name].k.weighs_queries
