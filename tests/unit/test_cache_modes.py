"""A cache under a default device, a default dtype, autocast, inference mode and gradients: it follows none."""

import contextlib
import copy

import pytest
import torch

from lowbit_attn import FORMATS, KVCache, decode, merge_states, reference, scratch
from lowbit_attn.formats import rotation
from lowbit_attn.testing import assert_same_bytes, assert_same_state
from unit.caller_modes import MODES, default_dtype, forget, lead

HEADS, DIM = 2, 64
K, V = torch.randn(2, 400, HEADS, DIM, generator=torch.Generator().manual_seed(2))
Q = torch.randn(1, 1, 4, DIM, generator=torch.Generator().manual_seed(3))


CACHES = {"k4v4": {}, "k2v2": {}, "k1v1": {}, "kitty-random": {}, "kitty": dict(dtype=torch.bfloat16),
          "k4tv4": dict(rotate_keys=True)}


def life(name: str, mode=contextlib.nullcontext) -> tuple:
    """All calls, then decode, each in the mode; what they give."""
    with mode():
        cache = KVCache(name, 12, HEADS, DIM, max_batch=3, max_q_len=2, **CACHES[name])
        cache.prefill(0, K[:300], V[:300])
    with mode():
        lead(cache, K, V)
        read = *cache.gather(0), *cache.dequantize_pages([0, 1])
        o, lse = decode(Q, cache, window=300)
        merged = merge_states(torch.stack((o, o)), torch.stack((lse, lse)))
    return cache, (*read, o, lse, *merged, cache.free_list)


@pytest.fixture
def nothing_kept(monkeypatch):
    """Without what earlier calls of the process made for all."""
    forget()
    yield
    forget()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CACHES)
def test_the_mode_changes_nothing(name, mode, nothing_kept):
    """Not in its calls, and nothing that they keep is of the mode: the calls after it give the same, too."""
    cache, under = life(name, MODES[mode])
    _, after = life(name)
    forget()
    plain, want = life(name)
    for found in (under, after):
        for i, (got, x) in enumerate(zip(found, want)):
            assert_same_bytes(f"result {i}", got, x)
    assert_same_state(cache, plain)
    assert not any(x.is_inference() for x in vars(cache).values() if isinstance(x, torch.Tensor))
    cache.append(K[:1, None], V[:1, None])  # outside the mode that the cache was made in
    assert cache.n_tok.tolist() == [399, 0, 399]


@pytest.mark.parametrize("mode", MODES)
def test_formats_and_the_reference_alone(mode):
    k = K[:256].unflatten(0, (2, 128)).transpose(1, 2).flatten(0, 1).contiguous()
    want = FORMATS["k2v2"].quantize(k, k), *reference.attention(Q[0], K.transpose(0, 1), K.transpose(0, 1))
    with MODES[mode]():
        got = FORMATS["k2v2"].quantize(k, k), *reference.attention(Q[0], K.transpose(0, 1), K.transpose(0, 1))
        rotated = rotation.hadamard(DIM)
    for i, (x, y) in enumerate(zip(got, want)):
        assert_same_bytes(f"result {i}", x, y)
    assert rotated.dtype == torch.float32 and rotated.device.type == "cpu"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ("kitty-random", "kitty-b24-random"))
def test_the_channels_that_kernels_are_made_for(name, mode):
    side = FORMATS[name].k
    want = side.spec(128).high.fixed
    with MODES[mode]():
        assert side.spec(128).high.fixed == want
    assert list(want) == side.boosted_channels(torch.zeros(1, 128, 128))[0].tolist()


def test_shared_memory_of_decode_calls_has_a_dtype_of_its_own(monkeypatch):
    monkeypatch.setattr(scratch, "_NO_SINK_LOGIT", {})
    with default_dtype(torch.float64):
        assert scratch.no_sink_logit(torch.device("cpu")).dtype == torch.float32


@pytest.mark.parametrize("made, used", [("inference mode", "plain"), ("plain", "inference mode")])
def test_a_cache_made_in_one_mode_serves_the_other(made, used):
    modes = {"plain": contextlib.nullcontext, **MODES}
    with modes[made]():
        cache = KVCache("k4v4", 6, HEADS, DIM, max_batch=2)
        cache.append(K[:1, None], V[:1, None], [1])  # rows of its own are kept on the device
    with modes[used]():
        cache.append(K[:1, None], V[:1, None], [1])
        cache.prefill(0, K[:300], V[:300])
        cache.free([1])
        twin = copy.deepcopy(cache)
    twin.append(K[:1, None], V[:1, None])
    assert twin.n_tok.tolist() == [301, 0] and cache.n_tok.tolist() == [300, 0]


def test_a_pool_that_only_inference_mode_can_write_is_refused():
    with torch.inference_mode():
        pool = torch.zeros(2, HEADS, FORMATS["k4v4"].record_bytes(DIM), dtype=torch.uint8)
        with pytest.raises(ValueError, match="pool: got memory made under torch.inference_mode"):
            KVCache("k4v4", 2, HEADS, DIM, pool=pool)


@pytest.mark.parametrize("name", CACHES)
def test_nothing_keeps_gradients(name):
    k, v, q = (x.clone().requires_grad_() for x in (K, V, Q))
    cache, plain = (KVCache(name, 6, HEADS, DIM, sinks=3, **CACHES[name]) for _ in range(2))
    for one, (x, y) in ((cache, (k, v)), (plain, (K, V))):
        one.prefill(0, x[:300], y[:300])
        for at in range(300, 303):
            one.append(x[None, at : at + 1], y[None, at : at + 1])
    assert_same_state(cache, plain)
    assert not any(x.requires_grad for x in vars(cache).values() if isinstance(x, torch.Tensor))
    out = torch.empty_like(Q).requires_grad_()
    logits = torch.zeros(4, requires_grad=True)
    for o, lse in (decode(q, cache), decode(q, cache, out=out, sink_logits=logits)):
        assert o.grad_fn is None and not lse.requires_grad
    copy.deepcopy(cache)


def test_query_weights_that_need_grad():
    weights = torch.rand(HEADS, DIM, requires_grad=True)
    cache = KVCache("kitty-weighted", 4, HEADS, DIM, query_weights=weights)
    assert not cache.query_weights.requires_grad and cache.query_weights.data_ptr() == weights.data_ptr()


# ---- saturate


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", ("k4v4", "k1v1", "k2v2", "k8v8", "k4v4-bf16", "k1v1-bf16", "kitty", "kitty-pro-bf16",
                                  "k1tv1-bf16", "k4tv4-g32"))
def test_saturated_infinities_are_finite_in_pages(name, dtype):
    """Both infinities in one group, beside finite values beyond the metadata; in sinks, pages and the open block."""
    cache = KVCache(name, 4, HEADS, DIM, dtype, sinks=2, saturate=True)
    k, v = K[:300].clone(), V[:300].clone()
    for x in (k, v):
        x[1, :, 5], x[30, 0, 3], x[31, 0, 3], x[32, 0, 4], x[299, 1, 1] = (torch.inf, torch.inf, -torch.inf, 1e38,
                                                                           -torch.inf)
        x[40], x[41], x[90, 1] = torch.inf, -torch.inf, 3e38  # whole tokens
    cache.prefill(0, k, v)
    cache.append(k[None, 30:31], v[None, 30:31])
    assert int(cache.n_qk[0]) >= 128
    for x in cache.gather(0):
        assert x.isfinite().all()
    for x in decode(Q, cache):
        assert x.isfinite().all()
    largest = max(cache.largest)
    assert cache.sink_k.max() == cache.largest[0] == cache.sink_k[0, 0, 1, 5] and largest <= torch.finfo(dtype).max


def test_what_saturate_clamps_to():
    for name, dtype, largest in (("k4v1", torch.float16, (65504, 32752)), ("k1v4", torch.bfloat16, (32640, 65280)),
                                 ("k4v4-bf16", torch.bfloat16, (2.0**118, 2.0**118)),
                                 ("k4v4-bf16", torch.float16, (65504, 65504))):
        assert KVCache(name, 1, 1, 64, dtype).largest == largest


def test_saturated_and_rotated():
    """An infinity is clamped before it is rotated: else it would make a NaN of the whole token."""
    cache = KVCache("k4tv4", 4, HEADS, DIM, torch.bfloat16, saturate=True, rotate_keys=True)
    k = K[:200].clone()
    k[3, 0, 3], k[4] = torch.inf, -torch.inf
    cache.prefill(0, k, V[:200])
    assert cache.gather(0)[0].isfinite().all()
