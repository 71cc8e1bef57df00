"""Caches with codebooks: bytes, identity, what is refused and why, and numbers that are not finite."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch

from lowbit_attn import FORMATS, KVCache, LayoutMismatchError, decode
from lowbit_attn.cache.attached import Attached
from lowbit_attn.codebooks import Codebooks
from lowbit_attn.formats import Kind
from lowbit_attn.testing import assert_same_state, normal_codebooks
from unit.codebook_caches import DIM, HEADS, NAMES, books_of, make, tokens

names = pytest.mark.parametrize("name", NAMES)
ropes = pytest.mark.parametrize("rope", ("post", "pre"))


# ---- sizes and identity


@names
def test_bytes_of_codebooks_count(name):
    cache = make(name)
    books = cache.attached.layer
    assert cache.nbytes == books.nbytes > 0
    cache.prefill(0, *tokens(160))
    record = cache.format.record(DIM)
    assert cache.nbytes == books.nbytes + HEADS * record.nbytes + 32 * 2 * HEADS * DIM * 2
    assert books.nbytes == HEADS * FORMATS[name].shared_bytes(DIM)
    bits = FORMATS[name].bits_per_element(DIM)
    assert FORMATS[name].bits_per_element(DIM, 128 * 10) == pytest.approx(
        bits + FORMATS[name].shared_bytes(DIM) * 8 / (2 * DIM * 1280))


def test_codebooks_cannot_be_exchanged():
    cache, other = make(max_batch=2), books_of("cq2", seed=1)
    cache.prefill(0, *tokens(200))
    cache.attached = Attached(other, cache.format, HEADS, DIM, "cpu")
    for call in (lambda: decode(torch.randn(1, 1, 2, DIM).half(), cache), lambda: cache.share(0, 1),
                 lambda: copy.deepcopy(cache), lambda: pickle.dumps(cache)):
        with pytest.raises(LayoutMismatchError, match="packed as cq-.*its codebooks were exchanged"):
            call()


def test_equal_codebooks_have_one_identity():
    assert make().identity == make().identity != make(books=books_of("cq2", seed=1)).identity
    assert make().identity.startswith(FORMATS["cq2"].layout_id)
    assert KVCache("k4v4", 1, 1, 64).identity == FORMATS["k4v4"].layout_id


# ---- refusals


@pytest.mark.parametrize("name, books, error, words", [
    ("cq2", None, ValueError, "codebooks: got none for format cq2.*calibrate makes such files"),
    ("cq2", "file", TypeError, "codebooks: got str, supported: a LayerCodebooks"),
    ("cq2", normal_codebooks("cq2", 2, HEADS, DIM), TypeError, "codebooks: got Codebooks, supported: a LayerCodebooks"),
    ("k4v4", books_of("cq2"), ValueError, "codebooks: got some for format k4v4, supported: None"),
    ("cq2", normal_codebooks("cq2", 1, 3, DIM).layer(0), ValueError, "codebooks: got 3 KV heads, supported: 2"),
    ("cq2", normal_codebooks("cq2", 1, HEADS, 128).layer(0), ValueError, "codebooks: got head_dim 128, supported: 64"),
    ("cq2", books_of("cq4"), ValueError, "codebooks: made for cq4, whose K is another than that of cq2"),
    ("cq2", books_of("kcq2vcq4"), ValueError, "codebooks: made for kcq2vcq4, whose V is another"),
    ("cq2", books_of("cq2-nonorm"), ValueError, "codebooks: made for cq2-nonorm, whose V is another"),
    ("cq2", books_of("kcq2v4"), ValueError, "codebooks: made for kcq2v4, whose V is another"),
    ("cq2", replace(books_of("cq2"), format="cq4"), ValueError, "codebooks: made for cq4, whose K is another"),
    ("cq4", replace(books_of("cq2"), format="cq4"), ValueError, "codebooks: K has entries of 4 channels, supported: 2"),
    ("cq2", replace(books_of("cq2"), format="cq9"), ValueError, "codebooks: made for a format that is not known here"),
])
def test_codebooks_that_do_not_fit_are_refused(name, books, error, words):
    with pytest.raises(error, match=words):
        KVCache(name, 4, HEADS, DIM, codebooks=books)


@pytest.mark.parametrize("name, books", [
    ("kcq2v4", "cq2"), ("k4vcq2", "cq2"), ("kcq2vcq2", "cq2"), ("cq2", "kcq2vcq2"),
])
def test_codebooks_serve_every_format_of_their_sides(name, books):
    cache = make(name, books=books_of(books))
    cache.prefill(0, *tokens(200))
    assert int(cache.n_qk[0]) == 128
    kept = {name for name, x in vars(cache.attached.layer).items() if isinstance(x, torch.Tensor)}
    assert kept == {f"{side}_entries" for side in "kv" if getattr(FORMATS[name], side).kind is Kind.CODEBOOK} | (
        {"k_order", "k_weights"} if FORMATS[name].k.kind is Kind.CODEBOOK else set())


def test_shared_out_tokens_are_refused_by_name():
    from lowbit_attn.parallel import ShardedKVCache

    with pytest.raises(NotImplementedError, match="format: cq2 has codebooks, supported by KVCache"):
        ShardedKVCache("cq2", 4, HEADS, DIM, codebooks=books_of("cq2"))


def test_rotated_keys_and_query_weights_are_refused():
    with pytest.raises(ValueError, match="rotate_keys"):
        make(rotate_keys=True)
    with pytest.raises(ValueError, match="query_weights: got some"):
        make(query_weights=torch.ones(HEADS, DIM))


def test_compiled_steps_are_refused_and_do_nothing():
    cache = make()
    cache.prefill(0, *tokens(100))
    before = copy.deepcopy(cache)
    for step in (lambda x: cache.append(x[..., :HEADS, :], x[..., :HEADS, :]), lambda x: decode(x, cache)[0]):
        with pytest.raises(Exception, match="has codebooks, whose"):
            torch.compile(step, backend="eager", fullgraph=True)(torch.randn(1, 1, 4, DIM).half())
    assert_same_state(cache, before)


def test_a_gpu_s_refusal_names_the_reference(monkeypatch):
    from lowbit_attn import dispatch

    monkeypatch.setattr(dispatch, "_has_kernels", lambda device: True)
    for arch, target in (("hopper", "sm_90a"), ("ampere", "sm_80")):
        monkeypatch.setattr(dispatch, "target_of", lambda device: (arch, target))  # noqa: B023
        assert dispatch.why_not(make(), 4) == []
        [reason] = dispatch.why_not(make("cq1", books=books_of("cq1")), 4)
        why = {"hopper": "head_dim with codebooks of 1 bit 64, supported: 128", "ampere": "K bits 1, supported: 4, 2"}
        assert reason.startswith(f"format cq1: no kernel on {arch} reads its codebooks yet ({why[arch]}")
        assert reason.endswith("; path='reference', any device")


# ---- hard inputs


def test_nan_shows_in_one_page_of_one_head():
    k, v = tokens(32 + 384)
    k[32 + 130, 1, 7] = float("nan")
    v[32 + 300, 0, 3] = float("inf")
    cache = make()
    cache.prefill(0, k, v)
    got_k, got_v = cache.gather(0)
    bad = ~got_k.isfinite()
    assert bad[1, 160:288].any(-1).all() and bad.sum() == 128
    bad = (~got_v.isfinite()).any(-1)
    assert bad[0, 332] and bad.sum() == 1
    assert not decode(torch.randn(1, 1, 2, DIM).half(), cache)[0][..., 1, :].isfinite().all()


def test_weights_do_not_make_finite_keys_infinite():
    books = books_of("cq2")
    k, v = torch.full((200, HEADS, DIM), 60000.0).half(), torch.randn(200, HEADS, DIM).half()
    cache = make(books=replace(books, k_weights=torch.full((HEADS, DIM), 8.0)))
    cache.prefill(0, k, v)
    assert all(x.isfinite().all() for x in cache.gather(0)) and cache.sink_k.amax() == 65504


def test_clamped_means_and_norms_are_counted():
    """Of packed pages alone, a shared one once; an infinity is none, since it shows."""
    books = replace(books_of("cq2"), k_weights=torch.ones(HEADS, DIM))
    cache = make(books=books, dtype=torch.bfloat16, max_batch=2)
    k, v = torch.randn(330, HEADS, DIM).bfloat16(), torch.randn(330, HEADS, DIM).bfloat16()
    k[32:160, 1, 5] = 1e6
    v[[40, 200, 320], 0] = 3e38
    v[50, 1, 1] = float("inf")
    cache.prefill(0, k, v)
    assert cache.count_clamped() == {"mean": 1, "norm": 2}
    cache.share(0, 1, 160)
    assert cache.count_clamped() == {"mean": 1, "norm": 2}
    cache.free([0])
    assert cache.count_clamped() == {"mean": 1, "norm": 1}
    assert make("cq2-nonorm").count_clamped() == {"mean": 0, "norm": 0} == KVCache("k4v4", 1, 1, 64).count_clamped()


def test_a_whole_model_s_codebooks_give_layers():
    whole = normal_codebooks("cq2", 3, HEADS, DIM)
    assert isinstance(whole, Codebooks)
    caches = [make(books=whole.layer(i)) for i in range(3)]
    assert len({cache.identity for cache in caches}) == 3
