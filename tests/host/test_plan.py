"""Planned decode calls on the host: stand-ins for the kernels show what they get and return known results."""

import copy
import pickle
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from lowbit_attn import KVCache, _private, decode, dispatch, hopper, kernels, loader, plan
from lowbit_attn.api import ready
from lowbit_attn.cache.view import STATE, Strides
from lowbit_attn.dispatch import LOG2_E, NO_WINDOW
from lowbit_attn.hopper import EMPTY
from lowbit_attn.hopper.common.tuning import CLUSTER_WORDS
from lowbit_attn.plan import Buffer, Plans
from lowbit_attn.reference import Attention
from lowbit_attn.testing import permute_pages

sys.path.append(str(Path(__file__).parents[2] / "perf"))
tvm_ffi = pytest.importorskip("tvm_ffi", reason="kernels are called through it")

# Host time of a planned call, in times of one allocation and one view: measured 1.9 on an idle machine (4.7 us) and on
# a busy one (7.8 us); a call that makes its plan takes 40.
HOST_BOUND = 6


PARTIALS, OUT, LSE, SINK_LOGITS, SCALARS = range(14, 19)  # among the kernel's arguments


class Stage:
    """A stand-in for the decode kernel: keeps its arguments, writes 1, 2, 3, ... into its outputs."""

    def __init__(self):
        self.loaded, self.calls = [], []

    def load(self, key):
        self.loaded.append(key)
        return self.decode

    def decode(self, *arguments):
        self.calls.append(arguments)
        for x in arguments[OUT : LSE + 1]:
            x.copy_(torch.arange(1, x.numel() + 1).view(x.shape))


@pytest.fixture
def stage(monkeypatch):
    found = Stage()
    monkeypatch.setattr(loader, "load", found.load)
    monkeypatch.setattr(loader, "argument", lambda tensor: tensor)
    monkeypatch.setattr(dispatch, "_has_kernels", lambda device: True)
    monkeypatch.setattr(dispatch, "target_of", lambda device: ("hopper", "sm_90a"))
    monkeypatch.setattr(dispatch, "default_splits", lambda *arguments: 3)
    monkeypatch.setattr(dispatch, "running_ctas", lambda *arguments: 132)
    return found


@pytest.fixture
def cache():
    found = KVCache("k4v4", 6, 2, 64, sinks=2, max_batch=3, max_q_len=2)
    found.prefill(0, torch.randn(200, 2, 64), torch.randn(200, 2, 64))
    return found


def queries(dtype=torch.float16) -> torch.Tensor:
    return torch.randn(2, 2, 4, 64, dtype=dtype)


def call(q, cache, **options):
    return decode(q, cache, path="register", **options)


def test_the_kernels_get_the_call(stage, cache):
    q = queries()
    call(q, cache, softmax_scale=0.5, softcap=2.0, window=9, keep_sinks=True)
    given = stage.calls[0]
    assert [key.features for key in stage.loaded] == [("softcap", "window")]
    state = [getattr(cache, name) for name in STATE]
    for mine, theirs in zip(given, (q, cache.all_rows, cache.all_rows, *state)):
        assert mine.data_ptr() == theirs.data_ptr()
    assert given[1].tolist() == given[2].tolist() == [0, 1]
    assert given[3].shape == (cache.pool.numel() // 128, 32) and given[3].dtype == torch.uint32
    # a block of rows in each of two sequences and two KV heads, 3 splits; 3 merge 43 of the 8 x 16 chunks, 6 words each
    assert given[PARTIALS].shape == (4, 3, 800) and (given[PARTIALS].view(torch.int32) == EMPTY).all()
    assert given[OUT].shape == q.shape and given[LSE].shape == (2, 4, 2) and given[SINK_LOGITS].tolist() == [-torch.inf]
    assert given[SCALARS:] == (0.5 * LOG2_E, 2.0 * LOG2_E, 9, NO_WINDOW, *cache.strides)


def test_ampere_kernels_get_partial_results_and_counters(stage, cache, monkeypatch):
    monkeypatch.setattr(dispatch, "target_of", lambda device: ("ampere", "sm_80"))
    call(queries(), cache)
    given = stage.calls[0]
    assert given[PARTIALS].shape == (3, 2, 2, 4, 64) and given[PARTIALS + 1].shape == (3, 2, 2, 4)
    assert given[SINK_LOGITS + 1].tolist() == [-torch.inf] and given[SINK_LOGITS + 2].tolist() == [0] * 4


@pytest.mark.parametrize("arch, target, splits", (("hopper", "sm_90a", 5), ("ampere", "sm_80", 9)))
def test_splits_that_meet_fit_on_the_gpu(stage, cache, monkeypatch, arch, target, splits):
    """Hopper's splits wait for each other, so a call takes no more than run at once: here 23 CTAs."""
    monkeypatch.setattr(dispatch, "target_of", lambda device: (arch, target))
    monkeypatch.setattr(dispatch, "running_ctas", lambda device, ctas_per_sm: 23)
    for asked, got in ((9, splits), (2, 2)):
        call(queries(), cache, num_splits=asked)
        given = stage.calls[-1][PARTIALS]
        assert given.shape[1 if arch == "hopper" else 0] == got


@pytest.mark.parametrize("path, blocks, pages, splits", [
    ("tile", 8, 64, 16), ("tile", 8, 63, 16), ("tile", 8, 16, 4), ("tile", 8, 3, 1), ("tile", 8, 4096, 16),
    ("integer", 8, 64, 8), ("integer", 8, 128, 8), ("integer", 8, 129, 16), ("integer", 8, 15, 4),
    ("integer", 8, 12, 2), ("integer", 8, 0, 1), ("integer", 24, 64, 4), ("integer", 24, 65, 5),
    ("integer", 64, 256, 2), ("integer", 11, 64, 4), ("integer", 512, 4096, 1), ("register", 8, 64, 8),
    ("small", 512, 31, 1)])
def test_splits_fill_the_gpu_but_have_pages_enough(path, blocks, pages, splits):
    """With few pages a cluster of fewer CTAs."""
    assert dispatch.filling_splits(key_of(path), blocks, pages, 132) == splits


def key_of(path: str, head_dim: int = 128) -> kernels.KernelKey:
    rows = 8 if path in ("tile", "register") else 4
    return kernels.decode_key("hopper", "sm_90a", "float16", head_dim, "k4v4", path, rows)


@pytest.mark.parametrize("path, head_dim, blocks, sizes", [
    ("integer", 128, 8, (2, 4, 8)), ("integer", 128, 11, (2, 4)), ("integer", 128, 30, (2,)),
    ("integer", 128, 66, (2,)), ("integer", 128, 67, ()), ("integer", 256, 8, ()), ("small", 128, 8, ()),
    ("stream", 128, 8, ()), ("tile", 128, 8, ())])
def test_clusters_surely_fit_on_the_gpu(path, head_dim, blocks, sizes):
    """8 GPCs of 16 or 18 SMs, of which a cluster may leave some over."""
    assert kernels.clusters(key_of(path, head_dim), blocks, 132) == sizes


@pytest.mark.parametrize("splits, found", [
    (2, hopper.cluster_scratch(2)), (8, hopper.cluster_scratch(8)), (3, hopper.scratch((2, 2, 4, 64), 8, 4, 3))])
def test_splits_of_a_cluster_need_no_scratch(stage, cache, splits, found):
    """What tells the kernel that they are one."""
    call(queries(), cache, num_splits=splits)
    assert stage.calls[-1][PARTIALS].shape == found.shapes[0]
    assert (found.shapes[0][2] == CLUSTER_WORDS) == (splits != 3)


def test_the_second_call_repeats_the_plan(stage, cache):
    first, second = queries(), queries()
    logits = torch.randn(4)
    call(first, cache)
    call(second, cache, sink_logits=logits)
    assert len(stage.loaded) == 1 and len(cache.plans) == 1
    (a, *rest), (b, *others) = stage.calls
    assert a.data_ptr() == first.data_ptr() and b.data_ptr() == second.data_ptr()
    assert all(x is y for x, y in zip(rest[: OUT - 1], others[: OUT - 1])) and rest[SCALARS:] == others[SCALARS:]
    assert others[SINK_LOGITS - 1] is logits


@pytest.mark.parametrize("planned", (False, True))
@pytest.mark.parametrize("dtype", (torch.float16, torch.float32))
@pytest.mark.parametrize("layout", ("fresh", "own", "strided", "misaligned"))
def test_outputs(stage, cache, layout, dtype, planned):
    """Whatever the buffers' layout: o in the order of rows, lse too, in q's dtype, in the buffers given."""
    q = queries(dtype)
    if planned:
        call(q, cache)
    buffers = {}
    if layout != "fresh":
        step = 1 + (layout == "strided")
        buffers = {"out": torch.zeros(2, 2 * step, 4, 64, dtype=dtype)[:, ::step],
                   "lse": torch.zeros(2, 4 * step, 2)[:, ::step]}
        if layout == "misaligned":
            buffers = {name: torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape) for name, x in buffers.items()}
    o, lse = call(q, cache, **buffers)
    assert torch.equal(o.flatten(), torch.arange(1, 2 * 2 * 4 * 64 + 1).half().to(dtype)) and o.dtype == dtype
    assert torch.equal(lse.flatten(), torch.arange(1, 17).float()) and lse.shape == (2, 4, 2)
    for name, x, written in (("out", o, stage.calls[-1][OUT]), ("lse", lse, stage.calls[-1][LSE])):
        assert name not in buffers or x is buffers[name]
        assert written.is_contiguous() and written.data_ptr() % 16 == 0
        assert (written is x) == (layout in ("fresh", "own") and dtype == (torch.float16 if name == "out" else dtype))
    assert stage.calls[-1][0].dtype == torch.float16 and len(cache.plans) == 1


def test_queries_that_are_not_contiguous(stage, cache):
    wide = torch.randn(2, 2, 8, 64, dtype=torch.float16)
    for q in (wide[:, :, :4], wide[:, :, 4:]):
        call(q, cache)
        assert torch.equal(stage.calls[-1][0], q) and stage.calls[-1][0].is_contiguous()
    assert len(cache.plans) == 1
    with pytest.raises(ValueError, match="q: got strides"):
        call(wide.transpose(2, 3).contiguous().transpose(2, 3)[:, :, :4], cache)


@pytest.mark.parametrize("planned", (False, True))
@pytest.mark.parametrize("dtype", (torch.float16, torch.float32))
def test_queries_that_kernels_could_not_load(stage, cache, dtype, planned):
    """At an address of no 16-byte load, or with gradients: copied, as new tokens are. So are sink logits."""
    if planned:
        call(queries(dtype), cache)
    whole = queries(dtype)
    for off in (1, 2, 4):
        q = torch.zeros(whole.numel() + off, dtype=dtype)[off:].view(whole.shape).copy_(whole)
        logits = torch.zeros(5)[1:]
        call(q, cache, sink_logits=logits)
        given = stage.calls[-1]
        assert torch.equal(given[0], whole.half()) and given[SINK_LOGITS].tolist() == [0] * 4
        assert given[0].data_ptr() % 16 == given[SINK_LOGITS].data_ptr() % 16 == 0
    call(whole.requires_grad_(), cache, sink_logits=torch.zeros(4, requires_grad=True))
    assert not stage.calls[-1][0].requires_grad and not stage.calls[-1][SINK_LOGITS].requires_grad
    assert len(cache.plans) == 1


def test_a_call_made_ready_is_checked_and_planned(stage, cache):
    """Its kernel is loaded, nothing is launched; the call then finds the plan."""
    ready(queries(), cache, path="register", window=5)
    assert len(stage.loaded) == 1 and not stage.calls
    for _ in range(2):
        ready(queries(), cache, path="register", window=5)
        call(queries(), cache, window=5)
    assert len(stage.loaded) == 1 and len(stage.calls) == 2
    for wrong, error, words in ((dict(path="nonsense"), NotImplementedError, "path: 'nonsense' is not known"),
                                (dict(window=0), ValueError, "window: got 0"),
                                (dict(sink_logits=torch.zeros(3)), ValueError, "sink_logits: got shape")):
        with pytest.raises(error, match=words):
            ready(queries(), cache, **wrong)


def test_a_kernel_that_cannot_be_built_is_told_before_the_step(stage, cache, monkeypatch):
    def load(key):
        raise loader.KernelNotBuiltError(str(key))

    monkeypatch.setattr(loader, "load", load)
    with pytest.raises(loader.KernelNotBuiltError, match="decode-fp16-splits-k4v4"):
        ready(queries(), cache, path="register")
    assert not getattr(cache, "plans", None)


@pytest.mark.parametrize("wrong, words", (
    (dict(out=torch.zeros(2, 2, 4, 32)), "out: got shape"), (dict(lse=torch.zeros(2, 2, 4)), "lse: got shape"),
    (dict(sink_logits=torch.zeros(3)), "sink_logits: got shape"), (dict(out=[]), "out: got list"),
    (dict(lse=torch.zeros(2, 4, 2).half()), "lse: got torch.float16"),
))
def test_a_planned_call_still_checks(stage, cache, wrong, words):
    call(queries(), cache)
    with pytest.raises((ValueError, TypeError), match=words):
        call(queries(), cache, **wrong)
    assert len(stage.calls) == 1


def test_another_call_is_another_plan(stage, cache):
    kinds = (dict(), dict(softcap=3.0), dict(softcap=4.0), dict(window=5), dict(num_splits=2), dict(softmax_scale=0.1))
    for options in kinds:
        call(queries(), cache, **options)
    call(queries()[:1], cache)
    call(queries()[:, :1], cache)
    assert len(cache.plans) == len(kinds) + 2


def test_a_plan_ends_with_the_memory_it_reads(stage, cache):
    q = queries()
    call(q, cache)
    call(q, cache, softcap=1.0)
    stage.calls.pop()
    permute_pages(cache, seed=3)
    call(q, cache)
    assert len(cache.plans) == 1  # none keeps the old pool
    assert stage.calls[1][3].data_ptr() == cache.pool.data_ptr() != stage.calls[0][3].data_ptr()
    view = copy.copy(cache)
    view.table = cache.table.clone()
    loaded = len(stage.loaded)
    for x in (view, cache, view, cache):
        call(q, x)
        assert stage.calls[-1][4].data_ptr() == x.table.data_ptr()
    assert len(stage.loaded) == loaded + 1 and view.plans is not cache.plans  # a plan for the view, none twice


@pytest.mark.parametrize("name", (*(name for name in STATE if name != "ring_start"), "strides", "format"))
def test_a_cache_whose_state_was_replaced_is_never_read_by_its_plan(stage, cache, name):
    q = queries()
    for _ in range(2):
        call(q, cache)
    assert len(stage.loaded) == 1
    old, made = getattr(cache, name), next(iter(cache.plans.values()))
    new = old.clone() if isinstance(old, torch.Tensor) else Strides(*old) if name == "strides" else copy.copy(old)
    setattr(cache, name, new)
    assert not made.serves(cache)
    call(q, cache)
    assert len(stage.loaded) == 2 and list(cache.plans.values()) != [made]
    if name in STATE:
        assert any(getattr(x, "data_ptr", int)() == new.data_ptr() for x in stage.calls[-1])
        assert not any(getattr(x, "data_ptr", int)() == old.data_ptr() for x in stage.calls[-1])


def test_a_new_sequence_makes_calls_pick_their_kernel_anew(stage):
    cache = KVCache("k2v2", 8, 8, 128, max_batch=8, max_seqlen=1024 * 128)
    q, token = torch.zeros(8, 1, 32, 128, dtype=torch.float16), torch.zeros(1, 8, 128, dtype=torch.float16)

    def plan_of(path):
        """As decode finds or makes it on a GPU."""
        if dispatch.planned(q, cache, (None, None, None, False, None, path, False)) is None:
            key, _ = dispatch.kernel_of(q, cache, path)
            plan = dispatch._plan_decode(q, cache, Attention(), None, key, path, False)
            plan.run(q, q.clone(), torch.zeros(8, 32, 1), None)
        return [kernels.path_name(key) for key in stage.loaded]

    assert plan_of(None) == ["integer"] and plan_of("integer") == ["integer", "integer"]
    cache.n_qv[:] = torch.tensor([1024, *[100] * 6, 0]) * 128  # as steps would
    assert plan_of(None) == ["integer", "integer"]
    cache.prefill(7, token, token)
    assert plan_of("integer") == ["integer", "integer"] and plan_of(None) == ["integer", "integer", "stream"]


def test_queries_of_another_device_are_refused(stage, cache):
    call(queries(), cache)
    with pytest.raises(ValueError, match="q: got device meta, supported: cpu"):
        call(queries().to("meta"), cache)


@pytest.mark.parametrize("shape", ((2, 3, 4, 64), (1, 3), (5,)), ids=str)
@pytest.mark.parametrize("is_private", (True, False))
def test_buffers(monkeypatch, shape, is_private):
    """New memory is as torch.empty makes it, whether or not this torch has the function that is faster."""
    if not is_private:
        monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu")
        monkeypatch.setitem(plan._EMPTY, "cpu", _private.empty_strided("cpu"))
    buffer, like = Buffer(shape, torch.bfloat16, torch.device("cpu")), torch.empty(shape, dtype=torch.bfloat16)
    a, b = buffer.new(), buffer.new()
    assert a.shape == like.shape and a.stride() == like.stride() and a.dtype == like.dtype and a.device == like.device
    assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() and a._base is None
    assert buffer.is_like(a) and buffer.is_like(like)
    wrong = (None, [], like.half(), like[None], like.to("meta"), torch.empty(*shape, 2, dtype=like.dtype)[..., 0],
             torch.empty(like.numel() + 1, dtype=like.dtype)[1:].view(shape))
    assert not any(buffer.is_like(x) for x in wrong)


def test_a_call_while_another_device_is_current(stage, cache, monkeypatch):
    """New memory and the launch belong to the current device, so the cache's is made that."""
    call(queries(), cache)
    made, entered = next(iter(cache.plans.values())), []

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(self.device)

        def __exit__(self, *error):
            entered.append(None)

    made.is_cuda, made.index = True, 1
    monkeypatch.setattr(_private, "current_device", lambda: 1 if entered and entered[-1] else 0)
    monkeypatch.setattr(_private, "is_stream_capturing", lambda: False)
    monkeypatch.setattr(_private, "raw_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    call(queries(), cache)
    assert entered == [made.device, None] and len(stage.calls) == 2


def test_a_copied_cache_starts_without_plans(stage, cache):
    call(queries(), cache)
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert not other.plans
        call(queries(), other)
        assert stage.calls[-1][3].data_ptr() == other.pool.data_ptr()


def test_plans_are_bounded(stage, cache):
    for i in range(Plans.LIMIT + 3):
        call(queries(), cache, softmax_scale=1.0 + i)
    assert len(cache.plans) == 3


def test_scratch_is_shared_by_calls_and_not_by_plans(stage, cache):
    for _ in range(2):
        call(queries(), cache)
    logit = stage.calls[-1][SINK_LOGITS].data_ptr()
    call(queries(), cache, softcap=1.0)
    assert stage.calls[-1][SINK_LOGITS].data_ptr() == logit  # a graph that reads it may outlive any plan
    first, second, other = (x[PARTIALS].data_ptr() for x in stage.calls)
    assert first == second != other


def test_host_time_of_a_planned_call():
    import host_time

    rows = torch.empty(32, 128, dtype=torch.float16)
    with host_time.kernels_that_do_nothing():
        step = host_time.decode_steps("k4v4", 1, "cpu")["decode"]
        step()
        with mock.patch.object(dispatch, "decode", side_effect=AssertionError("no plan was found")):
            us = host_time.call_us(step, calls=100, rounds=30, over=min)
    unit_us = host_time.call_us(lambda: torch.empty_like(rows).view(1, 1, 32, 128), calls=100, rounds=30, over=min)
    assert us < HOST_BOUND * unit_us, f"{us:.1f} us, where an allocation and a view take {unit_us:.1f} us"
