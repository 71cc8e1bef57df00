"""The torch operators and decode under torch.compile, on the CPU: against decode called directly."""

import pytest
import torch
from operators import arguments, assert_same, step_arguments

from lowbit_attn import CacheFaultError, KVCache, decode, ops
from lowbit_attn.formats import FORMATS
from lowbit_attn.testing import Case, assert_same_state, build, to_device

CASE = Case("k4v4", num_heads=4, num_heads_kv=2, head_dim=64, lengths=(0, 3, 300), q_len=2, sinks=2, poison=False)
pytestmark = pytest.mark.usefixtures("fresh_compiler")
OPTIONS = (dict(), dict(softmax_scale=0.2, softcap=9.0, window=40, keep_sinks=True))


@pytest.fixture(scope="module")
def problem():
    return build(CASE)


@pytest.mark.parametrize("options", OPTIONS, ids=("plain", "options"))
def test_opcheck(problem, options):
    options = options | {"sink_logits": torch.randn(4)} if options else options
    q, given = problem.q, arguments(problem.cache, **options)
    want = decode(q, problem.cache, **options)
    torch.library.opcheck(torch.ops.lowbit_attn.decode.default, (q, *given))
    assert_same(torch.ops.lowbit_attn.decode(q, *given), want)
    out, lse = torch.full_like(q, torch.nan), torch.full_like(want[1], torch.nan)
    torch.library.opcheck(torch.ops.lowbit_attn.decode_out.default, (q, out, lse, *given))
    torch.ops.lowbit_attn.decode_out(q, out, lse, *given)
    assert_same((out, lse), want)


@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
@pytest.mark.parametrize("options", OPTIONS, ids=("plain", "options"))
def test_compiled_in_one_graph(problem, backend, options):
    @torch.compile(fullgraph=True, backend=backend)
    def step(q, cache):
        return decode(q * 2, cache, **options)

    assert_same(step(problem.q, problem.cache), decode(problem.q * 2, problem.cache, **options))


@pytest.mark.parametrize("given", (("out",), ("lse",), ("out", "lse")), ids="+".join)
def test_compiled_into_own_buffers(problem, given):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, cache, buffers):
        return decode(q, cache, **buffers)

    want = decode(problem.q, problem.cache)
    buffers = {name: torch.full_like(x, torch.nan) for name, x in zip(("out", "lse"), want) if name in given}
    got = step(problem.q, problem.cache, buffers)
    assert_same(got, want)
    for name, x in zip(("out", "lse"), got):
        assert name not in given or x.data_ptr() == buffers[name].data_ptr()


def test_one_graph_serves_every_length():
    """Appends and flushes between calls change what it reads, never the graph."""
    cache = KVCache("k4v4", 6, 2, 32, sinks=3, max_batch=2)
    k, v = torch.randn(2, 300, 2, 32), torch.randn(2, 300, 2, 32)
    q = torch.randn(2, 1, 4, 32).half()
    ops.mark_static(cache)
    step = torch.compile(lambda q, cache: decode(q, cache), fullgraph=True, backend="aot_eager")
    step(q, cache)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for start in range(0, 300, 60):
            for row in range(2):
                cache.prefill(row, k[row, start : start + 60], v[row, start : start + 60])
            assert_same(step(q, cache), decode(q, cache))


def test_rotated_keys_and_fp32_queries():
    cache = KVCache("k4tv4", 3, 2, 32, rotate_keys=True)
    cache.prefill(0, torch.randn(200, 2, 32), torch.randn(200, 2, 32))
    step = torch.compile(lambda q: decode(q, cache), fullgraph=True, backend="aot_eager")
    for dtype in (torch.float16, torch.float32):
        q = torch.randn(1, 1, 4, 32, dtype=dtype)
        assert_same(step(q), decode(q, cache))


def test_a_format_without_a_name_is_refused():
    other = FORMATS["k2v2"]
    cache = KVCache(type(other)("k4v4", other.k, other.v), 2, 1, 32)
    step = torch.compile(lambda q: decode(q, cache), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="FORMATS does not give under this name"):
        step(torch.zeros(1, 1, 1, 32, dtype=torch.float16))


def test_operators_take_no_path_that_the_device_lacks(problem):
    given = list(arguments(problem.cache))
    given[-1] = "register"
    with pytest.raises(NotImplementedError, match="path='reference'"):
        torch.ops.lowbit_attn.decode(problem.q, *given)


def growing_cache(format: str = "k4v4", tokens: int = 100, **options) -> KVCache:
    cache = KVCache(format, 6, 2, 64, sinks=3, max_batch=2, max_q_len=2, **options)
    for row in range(2):
        cache.prefill(row, torch.randn(tokens, 2, 64), torch.randn(tokens, 2, 64))
    cache.reserve([0, 1], tokens + 300)
    return cache


@pytest.mark.parametrize("tokens", (100, 132), ids=("stores", "packs"))
def test_opcheck_of_append(tokens):
    cache, rows = growing_cache(tokens=tokens), torch.tensor([1, 0], dtype=torch.int32)
    k, v = (torch.randn(2, 2, 2, 64).half() for _ in range(2))
    torch.library.opcheck(torch.ops.lowbit_attn.append.default, (k, v, rows, rows, *step_arguments(cache)))


@pytest.mark.parametrize("format, backend", (("k4v4", "eager"), ("kitty-weighted", "eager"), ("kitty", "aot_eager")))
def test_compiled_steps_are_eager_steps(format, backend):
    """Append, then decode, compiled into one graph, over blocks and their packing."""
    @torch.compile(fullgraph=True, backend=backend)
    def step(cache, q, k, v):
        cache.append(k, v)
        return decode(q, cache)

    weighted = {"query_weights": torch.rand(2, 64)} if format.endswith("weighted") else {}
    eager = growing_cache(format, **weighted)
    compiled = to_device(eager, "cpu")
    for i in range(60):
        q, k, v = torch.randn(2, 2, 4, 64).half(), torch.randn(2, 2, 2, 64).half(), torch.randn(2, 2, 2, 64).half()
        eager.append(k, v)
        assert_same(step(compiled, q, k, v), decode(q, eager))
    assert_same_state(compiled, eager)
    compiled.append(k, v)  # the host takes over again
    eager.append(k, v)
    assert_same_state(compiled, eager)


def test_a_compiled_step_without_room_leaves_a_mark():
    cache = growing_cache()
    step = torch.compile(lambda k, rows: cache.append(k, k, rows), fullgraph=True, backend="eager")
    cache.free([1])
    before = to_device(cache, "cpu")
    for rows, words in (([1], r"\[1\]"), ([7], "beyond")):
        step(torch.randn(1, 2, 2, 64).half(), torch.tensor(rows, dtype=torch.int32))
        assert_same_state(cache, before)
        with pytest.raises(CacheFaultError, match=words):
            cache.sync()
    cache.sync()
    with pytest.raises(Exception, match="supported: at most max_batch"):
        step(torch.randn(3, 2, 2, 64).half(), torch.arange(3, dtype=torch.int32))
