"""Steps of a LevelCache as a device takes them: nothing needs the host, they equal the steps through the host, their
pages are those that the prompt's way of packing writes, and a row without frames or room keeps all that it has."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from perf_scripts import script
from torch.utils._python_dispatch import TorchDispatchMode

from lowbit_attn import CacheFaultError, PageExhaustedError
from lowbit_attn.cache.significance import Scores, means, observe
from lowbit_attn.formats import affine, packing
from lowbit_attn.formats.levels import parse
from lowbit_attn.levels import manage, step
from lowbit_attn.levels.frames import FramePool, frame_sizes
from lowbit_attn.levels.level_cache import LevelCache
from lowbit_attn.levels.moves import LEVELS, Departure
from lowbit_attn.levels.policy import PRUNED, Cumulative, Shares
from lowbit_attn.reference import PLAIN
from unit.level_caches import check_equal, state

H, R, D = 3, 2, 64
DEVICE_CONSTANTS = (packing._source, packing._code_source, affine._factors)


def make(name: str = "lean", frames: int = 200, device: str = "cpu", **options) -> LevelCache:
    sizes = len(frame_sizes(*(fmt.record_bytes(D) for fmt in parse(name).formats))[1])
    pool = FramePool(name, head_dim=D, frames=(frames,) * sizes, device=device)
    return LevelCache(pool, H, **dict(max_seqlen=2000, sinks=5, max_batch=3) | options)


def tokens(*lead: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, *lead, H, D, device=device)
    return k.half(), v.half(), torch.randn(*lead, H * R, D, device=device).half()


def run(cache, steps: int, q_len: int, seed: int = 0) -> None:
    """Steps of all rows, with queries whose lse is any number."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        k, v = torch.randn(2, cache.max_batch, q_len, H, D, generator=generator).half()
        q = torch.randn(cache.max_batch, q_len, H * R, D, generator=generator).half()
        cache.append(k, v)
        cache.manage(q, 8 + torch.randn(cache.max_batch, H * R, q_len, generator=generator))


@pytest.fixture
def captured(monkeypatch):
    """A call that makes caches take their steps as in a captured graph."""
    return partial(monkeypatch.setattr, LevelCache, "is_capturing")


class OnDevice(TorchDispatchMode):
    """Fails at operations that read a value on the host or bring one from there."""

    HOST = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        name = func.overloadpacket.__name__
        assert name not in self.HOST, name
        for x in (*torch.utils._pytree.tree_leaves((args, kwargs)), *torch.utils._pytree.tree_leaves(out)):
            assert not isinstance(x, torch.Tensor) or x.device.type == "meta", (name, x)
        self.names.add(name)
        return out


@pytest.mark.parametrize("name", ("lean", "lean-low", "k4v2+k4v1"))
@pytest.mark.parametrize("policy", (Shares(0.25, 0.5), Cumulative(0.1, 0.6)))
def test_a_captured_step_needs_nothing_of_the_host(captured, name, policy):
    """On tensors without values: what asks for a value, or mixes devices, raises."""
    captured(lambda self: True)
    try:
        cache, lse = make(name, device="meta", policy=policy, max_q_len=2), torch.zeros(3, H * R, 2, device="meta")
        guard = OnDevice()
        for mode in (nullcontext(), guard):  # the first step makes constants, which are kept
            k, v, q = tokens(3, 2, device="meta")
            with mode:
                cache.append(k, v)
                cache.manage(q, lse, softcap=5.0)
        assert {"index_put_", "cumsum", "bmm", "sort"} <= guard.names
    finally:
        for constant in DEVICE_CONSTANTS:
            constant.cache_clear()


@pytest.mark.parametrize("read", (lambda x: int(x[0]), lambda x: x.nonzero(), lambda x: x + torch.tensor([1, 2, 3]),
                                  lambda x: x.tolist(), lambda x: x.cpu(), lambda x: x if x.any() else None))
def test_the_guard_finds_what_needs_the_host(read):
    with pytest.raises((RuntimeError, NotImplementedError, AssertionError)), OnDevice():
        read(torch.arange(3, device="meta"))


@pytest.mark.parametrize("name, q_len", [("lean", 1), ("lean-low", 4)])
def test_captured_steps_equal_eager_ones_over_seven_flushes(captured, name, q_len):
    """Each step launches manage for all rows, of other lengths; eager steps only for those that act."""
    eager = make(name, max_q_len=4)
    for row, length in enumerate((300, 97, 4)):
        eager.prefill(row, *tokens(length))
    graph = copy.deepcopy(eager)
    run(eager, 7 * 128 // q_len + 20, q_len)
    captured(lambda self: self is graph)
    run(graph, 7 * 128 // q_len + 20, q_len)
    captured(lambda self: False)
    assert (eager.n_out >= 6 * 128).all()
    check_equal(state(eager), state(graph))
    graph.check()
    graph.pool.check(graph)


@pytest.mark.parametrize("name, policy", [("lean", Shares()), ("lean-low", Shares(0.4, 0.3)),
                                          ("lean", Cumulative(0.2, 0.6)), ("k4v2+k4v1", Cumulative(0, 0.5))])
def test_blocks_that_leave_are_what_a_prompts_are_given_the_scores(name, policy):
    """Counts, order, units, records and stages of a plan are exactly those of tokens that leave within a prompt."""
    cache, flushes = make(name, policy=policy, max_batch=2), 0
    for row, length in enumerate((1200, 63)):
        cache.prefill(row, *tokens(length))
    while flushes < 5:
        run(cache, 1, 1, seed=int(cache.n_tok[0]))
        if (cache.n_tok - cache.n_sink - cache.n_out < 184).all():
            continue
        rows = torch.arange(2)
        scores = Scores(torch.rand(2, H, cache.slots), torch.randint(0, 3, (2, cache.slots), dtype=torch.int32))
        twin = copy.deepcopy(cache)
        plan = step.Plan(cache, rows, scores, torch.ones(2, dtype=torch.bool))
        if not plan.due.any():
            continue
        plan.write()
        for row in plan.due.nonzero()[:, 0].tolist():
            flushes += 1
            heads, slots = twin.heads_of(row), twin.slots_of(row)[:128]
            classes = policy.classes(means(scores.score[row][:, slots], scores.seen[row, slots]))
            departure = Departure(twin, row, twin.ring_k[heads][:, slots], twin.ring_v[heads][:, slots], classes)
            departure.write(twin.pool.take(departure.needs.tolist()))
            twin.n_out[row] += 128
            twin.recount()
            assert torch.equal(cache.order[heads], classes.argsort(dim=1, stable=True).to(torch.uint8))
            for level in LEVELS:
                assert torch.equal(cache.new[level, heads], (classes == level).sum(1, dtype=torch.int32))
            assert (twin.n_drop[heads] >= (classes == PRUNED).sum(1)).all()
            assert not cache.score[heads][:, slots].any() and not cache.seen[row, slots].any()
        planned = ("score", "seen", "order", "new")
        mine, theirs = ({key: x for key, x in state(one).items() if key not in planned} for one in (cache, twin))
        check_equal(mine, theirs)


class Reads(TorchDispatchMode):
    """Counts values that the host reads, and operations whose shapes would need one."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in OnDevice.HOST
        return func(*args, **kwargs or {})


def test_a_prompt_asks_the_device_as_often_for_any_number_of_heads_and_pages():
    counts = []
    for heads, length in ((1, 600), (6, 1900)):
        cache = LevelCache(FramePool("lean", head_dim=D, frames=120), heads, max_seqlen=2000)
        k, v, q = (torch.randn(length, n, D).half() for n in (heads, heads, 2 * heads))
        lse = torch.full((2 * heads, length), 9.0)
        cache.prefill(0, k[:200], v[:200], q[:200], lse[:, :200])
        with Reads() as reads:
            cache.prefill(0, k[200:], v[200:], q[200:], lse[:, 200:])
        counts.append(reads.count)
        assert cache.c_pack.all()
    assert counts[0] == counts[1] < 20


def test_scores_are_those_of_observe_and_other_slots_have_none():
    cache = make(max_q_len=4)
    for row, length in enumerate((300, 97, 2)):
        cache.prefill(row, *tokens(length)[:2])
    q, lse, acts = tokens(3, 2)[2], 5 + torch.randn(3, H * R, 2), torch.tensor([True, True, False])
    cache.ring_k[0][[i for i in range(cache.slots) if i not in cache.slots_of(0)]] = torch.nan
    found = step.observed(cache, torch.arange(3), q, lse, acts, PLAIN)
    for row in range(2):
        slots, n_tok = cache.slots_of(row), int(cache.n_tok[row])
        keys = cache.ring_k[cache.heads_of(row)][:, slots]
        want = observe(q[row], torch.arange(n_tok - 2, n_tok), keys, cache.first_recent(row), PLAIN, lse[row])
        torch.testing.assert_close(found.score[row][:, slots], want.score, rtol=1e-5, atol=1e-7)
        assert torch.equal(found.seen[row, slots], want.seen) and want.score.any()
        assert int(found.seen[row].sum()) == int(want.seen.sum())
    assert not found.score[2].any() and not found.seen[2].any()


def test_without_frames_a_captured_step_changes_nothing_and_is_told_of(captured):
    """The ring fills, then a step is refused on the device alone; other rows go on; with frames it goes on too."""
    cache = make(frames=2, max_batch=2)
    cache.prefill(0, *tokens(5 + 128 + 106))  # the next block makes three low records
    cache.prefill(1, *tokens(2))
    captured(lambda self: True)
    run(cache, 84, 1)
    assert not cache.faults.any() and int(cache.starved) > 0 and cache.waits.tolist() == [True, False]
    before, held = state(cache), int(cache.n_tok[0])
    while not cache.faults[0]:
        before = state(cache)
        run(cache, 1, 1, seed=int(cache.n_tok[0]))
    after = state(cache)
    mine = cache.heads_of(0)
    for name in ("hi_k", "hi_v", "lo_k", "ring_k", "ring_v", "half", "n_drop"):
        assert torch.equal(before[name][mine], after[name][mine]), name
    for name in ("table", "c_pack", "c_sink", "c_tok", "n_stage"):
        assert torch.equal(before[name][:, mine], after[name][:, mine]), name
    assert int(before["n_tok"][0]) == int(cache.n_tok[0]) == 5 + 128 + cache.slots >= held
    assert int(cache.n_tok[1]) == int(before["n_tok"][1]) + 1
    captured(lambda self: False)
    with pytest.raises(CacheFaultError, match=r"sequences \[0\] had no room in their rings of 192 .* \[2\] frames"):
        cache.check()
    cache.check()
    cache.pool.grow(20)
    captured(lambda self: True)
    run(cache, 1, 1)  # refused once more, and its manage makes room
    assert cache.faults.tolist() == [1, 0] and int(cache.n_out[0]) == 256 and not cache.waits.any()
    cache.faults.zero_()
    run(cache, 20, 1)
    captured(lambda self: False)
    assert int(cache.n_tok[0]) == 5 + 128 + 192 + 20 and not cache.faults.any()
    cache.pool.check(cache)


@pytest.mark.parametrize("name", ("lean", "lean-low"))
def test_steps_that_require_allows_find_their_frames(captured, name):
    """The watermark: what it lets pass never starves, from rings that are nearly full on, whatever the classes."""
    cache = make(name, frames=1, policy=Cumulative(0, 0.5))
    for row, length in enumerate((188, 187, 100)):
        for at in range(length):
            cache.append(*tokens(1, 1)[:2], [row])
    wanted = cache.pool.most(3 * H, 200)
    cache.pool.grow(tuple(n - 2 for n in wanted))
    with pytest.raises(PageExhaustedError, match="3 rows of 3 KV heads and 1 layers may take"):
        cache.pool.require(3, 200, H)
    cache.pool.grow((1,) * len(wanted))
    cache.pool.require(3, 200, H)
    captured(lambda self: True)
    run(cache, 200, 1)
    captured(lambda self: False)
    cache.check()
    assert not cache.starved.any() and (cache.n_out >= 128).all() and cache.c_pack.any()


def test_rows_of_ones_own_are_refused_in_a_captured_step(captured):
    cache = make()
    captured(lambda self: True)
    k, v, _ = tokens(1, 1)
    with pytest.raises(NotImplementedError, match=r"seqs: got \[2\] while a CUDA graph is captured"):
        cache.append(k, v, [2])
    with pytest.raises(RuntimeError, match="check: called while a CUDA graph is captured"):
        cache.check()


@pytest.mark.parametrize("name", ("lean", "lean-low"))
def test_random_steps_conserve_every_frame(name):
    """The run of docs/leankv.md, shorter: after each step every frame is free or held once; pages are as written."""
    with script("frames") as frames:
        done = frames.life(name, steps=300, seed=1)
    assert done.pages > 120 and done.refused > 20 and done.wraps and done.releases > 30 and done.checked > 120
    assert done.shares > 5 and done.common > 20


def test_manage_is_done_by_kernels_where_they_serve_and_says_where_not(monkeypatch):
    """Stand-ins for kernels get the rows that act; torch does what they do not serve and what it is asked for."""
    cache = make(max_batch=2)
    cache.prefill(0, *tokens(87)[:2])
    cache.prefill(1, *tokens(84)[:2])
    cache.append(*tokens(2, 1)[:2])
    q, lse = tokens(2, 1)[2], torch.zeros(2, H * R, 1)
    assert cache.why_torch() == ["device: cpu has no kernels, supported: cuda"]
    called = []
    stand_in = step.Kernels(manage.why_not_on, lambda _, rows, q, lse, options: called.append((rows, q, options)), None,
                            lambda _, rows, k, v: called.append((rows, k, v)))
    monkeypatch.setitem(step.KERNELS, "cpu", stand_in)
    assert cache.why_torch() == [] and cache.why_torch(window=192) == []
    assert cache.why_torch(window=9) == ["window 9, supported: None, or 192 and more, the ring's slots"]
    cache.manage(q, lse, softcap=5.0)
    (rows, asked, options), = called
    assert rows.tolist() == [0] and torch.equal(asked, q[:1]) and options.softcap == 5.0 and not cache.seen.any()
    cache.manage(q, lse, path="reference")
    assert len(called) == 1 and cache.seen[0].any() and not cache.seen[1].any()
    cache.manage(q, lse, window=60)
    assert len(called) == 1
    with pytest.raises(ValueError, match="path: got stream, supported: None, reference"):
        cache.manage(q, lse, path="stream")
    before, (k, v, _) = cache.n_tok.clone(), tokens(1, 1)
    cache.append(k, v.float(), [1])
    rows, *stored = called.pop()
    assert rows.tolist() == [1] and all(map(torch.equal, stored, (k, v))) and torch.equal(cache.n_tok, before)
    with pytest.raises(RuntimeError, match="ring of 192 recent tokens full"):  # before any launch
        cache.n_tok += cache.limit - cache.n_tok
        cache.append(k, v, [1])
    assert len(called) == 1


def test_pairs_and_heads_that_no_kernel_manages():
    wide = LevelCache(FramePool("lean", head_dim=256, frames=1), 1, max_seqlen=300)
    assert manage.why_not_on(wide, PLAIN) == ["head_dim 256, supported: 64, 96, 128"]
    single = LevelCache(FramePool("k8v4+k4v2-high10", head_dim=D, frames=1), 1, max_seqlen=300, dtype=torch.bfloat16)
    assert manage.why_not_on(single, PLAIN) == []
    assert (one := manage.append_key_of(single, "sm_89")).name == "level_append-bfloat16-d64" and one.target == "sm_80"
    plan, pack = manage.keys_of(single, "sm_89")
    assert (plan.name, plan.target, pack.name) == ("plan-bfloat16-d64", "sm_80", "pack-k8v4+k4v2-bfloat16-d64")
    low = LevelCache(FramePool("lean-low", head_dim=D, frames=(1, 1)), 1, max_seqlen=300)
    assert manage.keys_of(low, "sm_90a")[1].name == "pack-search__k-k4v4+kitty-pro-float16-d64"
