"""Planned calls, operators, compiled and captured decode on a CUDA device."""

import sys
from pathlib import Path

import pytest
import torch
from operators import arguments, assert_same, step_arguments

import lowbit_attn
import lowbit_attn.ops
from lowbit_attn import scratch, testing
from lowbit_attn.hopper import EMPTY

sys.path.append(str(Path(__file__).parents[2] / "perf"))

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_compiler")]
HOST_BOUND_US = 60  # beside other processes that share the CPU; perf/host_time.py measures it alone
OPTIONS = (dict(), dict(softcap=9.0, softmax_scale=0.1))


def tokens(*size) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.float16, device="cuda")


@pytest.fixture
def cache():
    """Two sequences of 700 and 70 tokens, room for 2,000 more."""
    found = lowbit_attn.KVCache("k4v4", 40, 2, 128, device="cuda", sinks=3, max_batch=2, max_q_len=2, max_seqlen=2800)
    for row, length in enumerate((700, 70)):
        found.prefill(row, tokens(length, 2, 128), tokens(length, 2, 128))
    return found


@pytest.fixture
def q():
    return tokens(2, 2, 8, 128)


def unplanned(q, cache, **options):
    """The same call as a cache's first: a copy has no plan for its own memory."""
    return lowbit_attn.decode(q, testing.to_device(cache, "cuda"), **options)


@pytest.mark.parametrize("options", OPTIONS, ids=("plain", "options"))
def test_planned_calls_follow_the_cache(arch, cache, q, options):
    for _ in range(4):
        for _ in range(2):
            assert_same(lowbit_attn.decode(q, cache, **options), unplanned(q, cache, **options))
        cache.prefill(0, tokens(150, 2, 128), tokens(150, 2, 128))
        cache.prefill(1, tokens(333, 2, 128), tokens(333, 2, 128))
        want = lowbit_attn.decode(q, cache, path="reference", **options)[0]
        assert testing.relative_error(lowbit_attn.decode(q, cache, **options)[0].cpu(), want.cpu()) < 2e-3


def test_outputs_of_every_layout(arch, cache, q):
    want = lowbit_attn.decode(q, cache)
    for step in (1, 2):
        out = torch.zeros(2, 2 * step, 8, 128, dtype=q.dtype, device="cuda")[:, ::step]
        lse = torch.zeros(2, 8 * step, 2, device="cuda")[:, ::step]
        got = lowbit_attn.decode(q, cache, out=out, lse=lse)
        assert got[0] is out and got[1] is lse
        assert_same(got, want)
    wide = tokens(2, 2, 16, 128)
    wide[:, :, 8:] = q
    assert_same(lowbit_attn.decode(wide[:, :, 8:], cache), want)
    assert_same([x.half() if x.dtype == torch.float32 and x.dim() == 4 else x
                 for x in lowbit_attn.decode(q.float(), cache)], want)


def test_two_streams_do_not_share_scratch(arch, cache):
    """The same kind of call on two streams at once, 300 times: each gets its own result."""
    streams, queries = [torch.cuda.Stream() for _ in range(2)], [tokens(2, 2, 8, 128) for _ in range(2)]
    wants = [unplanned(x, cache) for x in queries]
    wrong = torch.zeros(2, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for _ in range(300):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                o, lse = lowbit_attn.decode(queries[i], cache)
                wrong[i] += (o != wants[i][0]).sum() + (lse != wants[i][1]).sum()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0]


def test_a_captured_call_serves_every_length_and_allocates_nothing(arch, cache, q):
    lowbit_attn.decode(q, cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = lowbit_attn.decode(q, cache)
    cache.plans.clear()  # a graph outlives its plan
    junk = [torch.full((1 << n,), 7.0, device="cuda") for n in range(20)]
    for length in (0, 1, 127, 128, 500):
        if length:
            cache.prefill(1, tokens(length, 2, 128), tokens(length, 2, 128))
        q.copy_(tokens(*q.shape))
        want = lowbit_attn.decode(q, cache)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(3):
            graph.replay()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert_same(got, want)
    assert all((x == 7).all() for x in junk)


def test_the_first_call_of_a_kind_may_be_a_captured_one(arch, cache, q):
    """Its plan belongs to the graph: the next eager call makes another."""
    lowbit_attn.decode(q, cache, softmax_scale=0.1)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = lowbit_attn.decode(q, cache)
    eager = lowbit_attn.decode(q, cache)
    graph.replay()
    assert_same(got, eager)
    assert_same(eager, unplanned(q, cache))


def test_captured_calls_of_one_graph_share_scratch(arch, cache, q):
    """The calls of a model's layers run one after the other: a graph takes from the stock once, not once a layer."""
    want = lowbit_attn.decode(q, cache)
    taken = []
    for calls in (1, 3):
        before = len(scratch._FREE.get((q.device, EMPTY), ()))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = [lowbit_attn.decode(q, cache) for _ in range(calls)]
        taken.append(before - len(scratch._FREE.get((q.device, EMPTY), ())))
        for _ in range(3):
            graph.replay()
            for x in got:
                assert_same(x, want)
    assert taken[0] == taken[1] and (taken[0] > 0) == (arch == "hopper")


@pytest.mark.parametrize("options", OPTIONS, ids=("plain", "options"))
def test_opcheck(arch, cache, q, options):
    given = arguments(cache, **options)
    want = lowbit_attn.decode(q, cache, **options)
    torch.library.opcheck(torch.ops.lowbit_attn.decode.default, (q, *given))
    out, lse = torch.full_like(q, torch.nan), torch.full_like(want[1], torch.nan)
    torch.library.opcheck(torch.ops.lowbit_attn.decode_out.default, (q, out, lse, *given))
    torch.ops.lowbit_attn.decode_out(q, out, lse, *given)
    assert_same((out, lse), want)


@pytest.mark.parametrize("mode", ("aot_eager", "inductor", "reduce-overhead"))
def test_compiled_in_one_graph(arch, cache, q, mode):
    lowbit_attn.ops.mark_static(cache)
    how = dict(mode=mode) if mode == "reduce-overhead" else dict(backend=mode)
    step = torch.compile(lambda q: lowbit_attn.decode(q, cache), fullgraph=True, **how)
    for _ in range(4):
        got = [x.clone() for x in step(q)]
        assert_same(got, lowbit_attn.decode(q, cache))
        cache.prefill(0, tokens(200, 2, 128), tokens(200, 2, 128))


def test_host_time_of_an_eager_call(arch):
    import host_time

    steps = host_time.decode_steps("k4v4", 1, "cuda")
    for name in ("decode", "decode, own out and lse"):
        steps[name]()
        us = host_time.call_us(steps[name], calls=200, rounds=20, over=min)
        assert us < HOST_BOUND_US, f"{name}: {us:.1f} us"


def test_opcheck_of_append(arch, cache):
    cache.reserve([0, 1], 900)
    rows = torch.tensor([1, 0], dtype=torch.int32, device="cuda")
    given = (tokens(2, 2, 2, 128), tokens(2, 2, 2, 128), rows, rows, *step_arguments(cache))
    torch.library.opcheck(torch.ops.lowbit_attn.append.default, given)


@pytest.mark.parametrize("mode", ("aot_eager", "inductor", "reduce-overhead"))
def test_compiled_steps_are_eager_steps(arch, cache, mode):
    """Append and decode in one graph over 150 steps, which pack blocks in both sequences."""
    cache.reserve([0, 1], 1100)
    eager = testing.to_device(cache, "cuda")
    lowbit_attn.ops.mark_static(cache)

    def both(q, k, v):
        cache.append(k, v)
        return lowbit_attn.decode(q, cache)

    how = dict(mode=mode) if mode == "reduce-overhead" else dict(backend=mode)
    step = torch.compile(both, fullgraph=True, **how)
    for _ in range(150):
        q, k, v = tokens(2, 2, 8, 128), tokens(2, 2, 2, 128), tokens(2, 2, 2, 128)
        eager.append(k, v)
        assert_same([x.clone() for x in step(q, k, v)], lowbit_attn.decode(q, eager))
    cache.sync()
    testing.assert_same_state(cache, eager)
