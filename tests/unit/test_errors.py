"""Bad input: the error names the argument, what it got and what is supported, and nothing is written."""

import pytest
import torch

import lowbit_attn
from lowbit_attn import KVCache, LayoutMismatchError, api, decode, layout, merge_states
from unit.refusals import DIM, GOOD, HEADS, refused


@pytest.fixture
def cache() -> KVCache:
    cache = KVCache("k4v4", 4, HEADS, DIM, sinks=4, max_batch=2, max_q_len=4)
    for row in range(2):
        cache.prefill(row, *torch.randn(2, 150, HEADS, DIM))
    return cache


@pytest.mark.parametrize("change, error, words", [
    (dict(dtype=torch.float32), ValueError, ("dtype", "float32", "float16", "bfloat16")),
    (dict(dtype=torch.int8), ValueError, ("dtype", "int8", "float16")),
    (dict(num_pages=-1), ValueError, ("num_pages", "-1", "supported")),
    (dict(num_heads_kv=0), ValueError, ("num_heads_kv", "0", "supported", "1")),
    (dict(sinks=-1), ValueError, ("sinks", "-1", "supported", "0")),
    (dict(max_batch=0), ValueError, ("max_batch", "0", "supported", "1")),
    (dict(max_q_len=0), ValueError, ("max_q_len", "0", "1 to 16")),
    (dict(max_q_len=17), ValueError, ("max_q_len", "17", "1 to 16")),
    (dict(max_seqlen=-5), ValueError, ("max_seqlen", "-5", "supported")),
    (dict(head_dim=80), ValueError, ("k4v4", "head_dim 80", "multiple of 32")),
    (dict(head_dim=0), ValueError, ("head_dim 0", "multiple of 32")),
    (dict(format="k4v1", head_dim=96), ValueError, ("k4v1", "head_dim 96", "multiple of 64")),
    (dict(format="k4v4-vg64", head_dim=96), ValueError, ("group 64", "head_dim 96", "supported")),
    (dict(format="k4v5"), KeyError, ("'k4v5'", "did you mean k4v4")),
    (dict(format="int4"), KeyError, ("'int4'", "did you mean k4v4?", "presets", "k4v2", "docs/formats.md")),
    (dict(format=""), KeyError, ("''", "presets")),
    (dict(format=4), (TypeError, KeyError), ("format", "4", "k4v4")),
], ids=str)
def test_cache_arguments(change, error, words):
    KVCache(**GOOD)
    with pytest.raises(error) as caught:
        KVCache(**{**GOOD, **change})
    at = 0
    for word in words:
        assert word in str(caught.value)[at:], f"{word!r} in: {caught.value}"
        at = str(caught.value).index(word, at)


def wide(*shape):
    """A tensor of this shape whose last axis has stride 2."""
    return torch.randn(*shape, 2)[..., 0]


TOKENS = {
    "heads": (lambda lead: torch.randn(*lead, 3, DIM), ValueError, ("3, 64", "supported", "2, 64")),
    "head_dim": (lambda lead: torch.randn(*lead, HEADS, 32), ValueError, ("2, 32", "supported", "2, 64")),
    "no head axis": (lambda lead: torch.randn(*lead, DIM), ValueError, ("64]", "supported", "2, 64")),
    "one axis": (lambda lead: torch.randn(DIM), ValueError, ("[64]", "supported")),
    "no axis": (lambda lead: torch.tensor(1.0), ValueError, ("[]", "supported")),
    "fp64": (lambda lead: torch.randn(*lead, HEADS, DIM).double(), TypeError, ("float64", "float16", "float32")),
    "other 16 bit": (lambda lead: torch.randn(*lead, HEADS, DIM).bfloat16(), TypeError, ("bfloat16", "float16")),
    "ints": (lambda lead: torch.ones(*lead, HEADS, DIM, dtype=torch.int32), TypeError, ("int32", "float16")),
    "meta device": (lambda lead: torch.empty(*lead, HEADS, DIM, device="meta"), ValueError, ("meta", "cpu")),
    "strides": (lambda lead: wide(*lead, HEADS, DIM), ValueError, ("strides", "stride 1 on the last axis")),
    "list": (lambda lead: [[1.0]], TypeError, ("list", "torch.Tensor")),
    "None": (lambda lead: None, TypeError, ("NoneType", "torch.Tensor")),
}


@pytest.mark.parametrize("which", "kv")
@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("method, lead", [("prefill", (7,)), ("append", (2, 3))])
def test_tokens(cache, method, lead, name, which):
    make, error, words = TOKENS[name]
    good = torch.randn(*lead, HEADS, DIM)
    k, v = (make(lead), good) if which == "k" else (good, make(lead))
    args = (0, k, v) if method == "prefill" else (k, v)
    refused(cache, lambda: getattr(cache, method)(*args), error, f"{which}: ", *words)


def test_k_and_v_of_different_lengths(cache):
    k, v = torch.randn(5, HEADS, DIM), torch.randn(4, HEADS, DIM)
    refused(cache, lambda: cache.prefill(0, k, v), ValueError, "v: ", "[4, 2, 64]", "[5, 2, 64]")
    refused(cache, lambda: cache.append(k[None, :3], v[None, :2]), ValueError, "v: ", "[1, 2, 2, 64]", "[1, 3, 2, 64]")


@pytest.mark.parametrize("count", (0, 5))
def test_too_many_tokens_a_step(cache, count):
    k = torch.randn(2, count, HEADS, DIM)
    refused(cache, lambda: cache.append(k, k), ValueError, "k: ", str(count), "1 to max_q_len = 4", "prefill")


@pytest.mark.parametrize("seqs", ([2, 0], [-1, 0], [0, 0], [0, 99]))
def test_rows_of_the_cache(cache, seqs):
    k = torch.randn(2, 1, HEADS, DIM)
    words = ("seqs", str(seqs), "distinct rows 0 to", "1")
    refused(cache, lambda: cache.append(k, k, seqs), ValueError, *words)
    refused(cache, lambda: cache.flush(seqs), ValueError, *words)
    refused(cache, lambda: cache.free(seqs), ValueError, *words)


def test_row_of_prefill_and_gather(cache):
    k = torch.randn(3, HEADS, DIM)
    refused(cache, lambda: cache.prefill(2, k, k), ValueError, "2", "0 to", "1")
    refused(cache, lambda: cache.gather(-1), ValueError, "-1", "0 to", "1")


def test_rows_that_do_not_match_the_batch(cache):
    k = torch.randn(2, 1, HEADS, DIM)
    refused(cache, lambda: cache.append(k, k, [0]), ValueError, "k: ", "[2, 1, 2, 64]", "[1, 1, 2, 64]")
    k = torch.randn(3, 1, HEADS, DIM)
    refused(cache, lambda: cache.append(k, k), ValueError, "supported", "1")


def q_of(heads=4, q_len=2, batch=2, head_dim=DIM, dtype=torch.float16):
    return torch.randn(batch, q_len, heads, head_dim).to(dtype)


QUERIES = {
    "ratio": (lambda: q_of(heads=3), ValueError, ("3 heads", "multiples of num_heads_kv = 2")),
    "fewer heads": (lambda: q_of(heads=1), ValueError, ("1 heads", "multiples of num_heads_kv = 2")),
    "no heads": (lambda: q_of(heads=0), ValueError, ("0 heads", "multiples")),
    "head_dim": (lambda: q_of(head_dim=128), ValueError, ("128]", "64]")),
    "batch": (lambda: q_of(batch=3), ValueError, ("batch 3", "1 to", "max_batch = 2")),
    "no batch": (lambda: q_of(batch=0), ValueError, ("batch 0", "1 to")),
    "q_len": (lambda: q_of(q_len=5), ValueError, ("q_len 5", "max_q_len = 4")),
    "no q_len": (lambda: q_of(q_len=0), ValueError, ("q_len 0", "max_q_len = 4")),
    "rank": (lambda: q_of()[0], ValueError, ("[2, 4, 64]", "[batch, q_len, num_heads, head_dim]")),
    "dtype": (lambda: q_of(dtype=torch.bfloat16), TypeError, ("bfloat16", "float16")),
    "device": (lambda: q_of().to("meta"), ValueError, ("meta", "cpu")),
    "strides": (lambda: wide(2, 2, 4, DIM).half(), ValueError, ("strides", "stride 1 on the last axis")),
    "list": (lambda: [1.0], (ValueError, TypeError), ("list", "supported")),
}


@pytest.mark.parametrize("name", QUERIES)
def test_queries(cache, name):
    make, error, words = QUERIES[name]
    q = wide(2, 2, 4, DIM) if name == "strides" else make()
    out, lse = torch.full((2, 2, 4, DIM), 7.0, dtype=torch.float16), torch.full((2, 4, 2), 7.0)
    refused(cache, lambda: decode(q, cache, out=out, lse=lse), error, "q: ", *words)
    assert (out == 7).all() and (lse == 7).all()


@pytest.mark.parametrize("name, value, error, words", [
    ("out", torch.full((2, 2, 4, 32), 7.0).half(), ValueError, ("[2, 2, 4, 32]", "[2, 2, 4, 64]")),
    ("out", torch.full((2, 2, 4, DIM), 7.0), TypeError, ("float32", "float16")),
    ("out", torch.full((2, 2, 4, DIM, 2), 7.0).half()[..., 0], ValueError, ("strides", "stride 1")),
    ("out", torch.empty(2, 2, 4, DIM, device="meta").half(), ValueError, ("meta", "cpu")),
    ("lse", torch.full((2, 2, 4), 7.0), ValueError, ("[2, 2, 4]", "[2, 4, 2]")),
    ("lse", torch.full((2, 4, 2), 7.0).half(), TypeError, ("float16", "float32")),
    ("num_splits", 0, ValueError, ("0", "1 or more")),
    ("num_splits", -2, ValueError, ("-2", "1 or more")),
    ("softmax_scale", 0.0, ValueError, ("0.0", "positive")),
    ("softmax_scale", -1.0, ValueError, ("-1.0", "positive")),
    ("softmax_scale", float("nan"), ValueError, ("nan", "positive")),
    ("softmax_scale", "x", TypeError, ("'x'", "a number")),
    ("softmax_scale", True, TypeError, ("True", "a number")),
    ("softcap", [1.0], TypeError, ("[1.0]", "a number")),
    ("window", True, TypeError, ("True", "an integer")),
    ("window", 2.5, TypeError, ("2.5", "an integer")),
    ("window", "3", TypeError, ("'3'", "an integer")),
    ("num_splits", 1.5, TypeError, ("1.5", "an integer")),
], ids=str)
def test_outputs_and_options(cache, name, value, error, words):
    buffers = dict(out=torch.full((2, 2, 4, DIM), 7.0).half(), lse=torch.full((2, 4, 2), 7.0))
    refused(cache, lambda: decode(q_of(), cache, **{**buffers, name: value}), error, f"{name}: ", *words)
    assert all((x == 7).all() for x in buffers.values())


@pytest.mark.parametrize("given", (None, [1], torch.zeros(2)), ids=("None", "list", "tensor"))
def test_what_is_no_cache(given):
    with pytest.raises(TypeError, match=f"cache: got {type(given).__name__}, supported: a KVCache"):
        decode(q_of(), given)


def test_ready_refuses_what_decode_refuses(cache):
    """Without running, and before anything is written."""
    api.ready(q_of(), cache, window=3, path="reference", sink_logits=torch.zeros(4))
    refused(cache, lambda: api.ready(q_of(heads=3), cache), ValueError, "q: 3 heads")
    refused(cache, lambda: api.ready(q_of(), cache, window=0), ValueError, "window: got 0")
    refused(cache, lambda: api.ready(q_of(), cache, path="tile"), NotImplementedError, "cpu", "path='reference'")
    refused(cache, lambda: api.ready(q_of(), cache, sink_logits=torch.zeros(3)), ValueError, "sink_logits: got shape")


def test_kernel_paths_need_a_device(cache):
    q = q_of()
    out = torch.full_like(q, 7.0)
    for path in ("register", "nonsense"):
        refused(cache, lambda: decode(q, cache, out=out, path=path), NotImplementedError, "cpu", "path='reference'")
    assert (out == 7).all()
    reasons = lowbit_attn.why_not(cache, num_heads=4)
    assert len(reasons) == 1 and "cpu" in reasons[0] and "supported: " in reasons[0]


def test_a_cache_of_another_layout_is_refused(cache):
    cache.layout_id = "0123456789abcdef"
    refused(cache, lambda: decode(q_of(), cache), LayoutMismatchError, "cache: ", "0123456789abcdef", layout.LAYOUT_ID)


def test_merge_arguments():
    o, lse = torch.randn(2, 1, 1, 4, 8), torch.randn(2, 1, 4, 1)
    merge_states(o, lse)
    for bad, error, words in (((o[0], lse), ValueError, r"o: .*\[1, 1, 4, 8\].*num_states"),
                              ((o, lse[..., 0]), ValueError, r"lse: .*\[2, 1, 4\].*\[2, 1, 4, 1\]"),
                              ((o.int(), lse), TypeError, "o: .*int32.*floating point"),
                              ((o, lse.half()), TypeError, "lse: .*float16.*float32"),
                              ((o, lse.to("meta")), ValueError, "lse: .*meta.*cpu"),
                              (([1.0], lse), (TypeError, ValueError), "o: .*list.*supported")):
        with pytest.raises(error, match=words):
            merge_states(*bad)
