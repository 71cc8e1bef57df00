"""Caches with codebooks: the state machine, values against a model of their own, decode and copies."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch

from lowbit_attn import FORMATS, KVCache, decode
from lowbit_attn.formats import Kind
from lowbit_attn.reference import attention
from lowbit_attn.testing import (
    Case,
    assert_decode,
    assert_same_state,
    build,
    expected,
    normal_codebooks,
    relative_error,
)
from unit.codebook_caches import DIM, HEADS, NAMES, SINKS, learned, make, of_model, rotated, tokens

names = pytest.mark.parametrize("name", NAMES)
ropes = pytest.mark.parametrize("rope", ("post", "pre"))


# ---- the state machine


@names
@ropes
@pytest.mark.parametrize("sinks", (0, None))
def test_prefill_is_appends_and_a_flush(name, rope, sinks):
    k, v = tokens(450)
    whole, steps, parts = (make(name, rope, sinks=sinks, max_q_len=3) for _ in range(3))
    whole.prefill(0, k, v)
    for t in range(0, 450, 3):
        steps.append(k[None, t : t + 3], v[None, t : t + 3])
    steps.flush()
    for a, b in ((0, 7), (7, 300), (300, 301), (301, 450)):
        parts.prefill(0, k[a:b], v[a:b])
    assert whole.sinks == (32 if sinks is None else sinks) and int(whole.n_qk[0]) == 384
    assert_same_state(steps, whole)
    assert_same_state(parts, whole)
    whole.book.check()


@names
@ropes
def test_gather_gives_what_was_stored(name, rope):
    """16-bit tokens exactly (but for the weights' rounding), packed ones as near as entries of these tokens are."""
    k, v = tokens(32 + 384 + 50)
    rope = rope if FORMATS[name].k.kind is Kind.CODEBOOK else "post"
    cache = make(name, books=learned(name, rope, k, v))
    cache.prefill(0, k, v)
    got_k, got_v = cache.gather(0)
    k, v, back = k.float().transpose(0, 1), v.float().transpose(0, 1), of_model(cache, got_k)
    packed = torch.zeros(466, dtype=torch.bool)
    packed[32:416] = True
    assert torch.equal(got_v[:, ~packed], v[:, ~packed])
    assert torch.allclose(back[:, ~packed], k[:, ~packed], rtol=2e-3, atol=2e-3)
    for got, want, side in ((back, k, cache.format.k), (got_v, v, cache.format.v)):
        limit = {4: 0.25, 2: 0.5, 1: 0.6}[side.bits]
        assert (got - want)[:, packed].norm() <= limit * want[:, packed].norm()
        assert not torch.equal(got[:, packed], want[:, packed])


@ropes
def test_pages_hold_the_nearest_entries_of_stored_keys(rope):
    """Codes against keys that are embedded, weighted and ordered here, in fp64: where the nearest entry is clear."""
    k, v = tokens(32 + 128)
    cache = make("cq2", rope)
    cache.prefill(0, k, v)
    books = cache.attached.layer
    x = rotated(k, -torch.arange(160)) if rope == "pre" else k.double()
    x = torch.stack([(x[:, h] * books.k_weights[h])[:, books.k_order[h].long()] for h in range(HEADS)])[:, 32:]
    pages = cache.dequantize_pages(cache.table[0, :1])[0][0].double()  # before the embedding, with rope="pre"
    mean = x.mean(1, keepdim=True)
    wanted = (x - mean).unflatten(2, (-1, 4))
    got = ((pages - mean).unflatten(2, (-1, 4)) - wanted).square().sum(-1)
    best = (wanted.transpose(1, 2)[..., None, :] - books.k_entries[:, :, None].double()).square().sum(-1).amin(-1)
    assert (got.transpose(1, 2) <= best * 1.02 + 0.02).all()


def test_sinks_and_positions_are_where_they_belong():
    """Pre-RoPE keys of one value at every position have one code, if and only if they are turned back rightly."""
    one = torch.randn(1, HEADS, DIM).expand(200, -1, -1)
    for sinks, start in ((0, 0), (32, 0), (5, 1000)):
        cache = make("cq2", "pre", sinks=sinks)
        cache.set_first_positions([0], start)
        cache.prefill(0, rotated(one, torch.arange(start, start + 200)).half(), torch.randn(200, HEADS, DIM).half())
        k, _ = cache.dequantize_pages(cache.table[0, :1])
        assert (k - k[:, :, :1]).abs().amax() < 1e-6 and int(cache.n_qk[0]) == 128
    wrong = make("cq2", "pre", sinks=0)
    wrong.set_first_positions([0], 1)
    wrong.prefill(0, rotated(one, torch.arange(200)).half(), torch.randn(200, HEADS, DIM).half())
    k, _ = wrong.dequantize_pages(wrong.table[0, :1])
    assert (k - k[:, :, :1]).abs().amax() < 1e-6  # all turned by one more: still one value, but another
    assert (k[0, :, 0] - cache.dequantize_pages(cache.table[0, :1])[0][0, :, 0]).abs().amax() > 0.1


def test_first_positions_follow_their_row():
    cache = make("cq2", "pre", max_batch=3)
    k, v = tokens(300, 77)
    cache.set_first_positions([0, 2], [77, 5])
    cache.prefill(0, k, v)
    with pytest.raises(ValueError, match="seqs: got .* some of which hold tokens"):
        cache.set_first_positions([0, 1], 1)
    for wrong in (-1, 1 << 31):
        with pytest.raises(ValueError, match="positions: got"):
            cache.set_first_positions([1], wrong)
    cache.share(0, 1)
    for got, want in zip(cache.gather(1), cache.gather(0)):
        assert torch.equal(got, want)
    cache.free([0])
    cache.clear([1])
    assert cache.first_positions.tolist() == [0, 0, 5]
    plain = make("cq2", "pre")
    plain.prefill(0, *tokens(300))
    cache.prefill(0, *tokens(300))
    assert cache.first_positions[0] == 0


# ---- decode


@names
@ropes
def test_decode_is_attention_over_the_dequantized_keys_of_the_model(name, rope):
    """Order, weights and embedding cancel: plain attention of untouched queries over keys brought back by hand."""
    k, v = tokens(420)
    cache = make(name, rope)
    cache.prefill(0, k, v)
    q = torch.randn(1, 1, 6, DIM).half()
    o, lse = decode(q, cache)
    got_k, got_v = cache.gather(0)
    want, want_lse = attention(q[0], of_model(cache, got_k), got_v)
    assert torch.allclose(o[0].float(), want, atol=2e-3) and torch.allclose(lse[0], want_lse, atol=1e-3)


@ropes
def test_decode_is_near_the_attention_of_16_bit(rope):
    """... and far from it with zeros, NaN, another sequence's cache, or keys a token or a head off."""
    k, v = tokens(32 + 512)
    cache = make("cq4", books=learned("cq4", rope, k, v), max_batch=2)
    cache.prefill(0, k, v)
    q = torch.randn(1, 1, 6, DIM).half() * 0.2
    o, lse = decode(q, cache)
    want, want_lse = attention(q[0], k.transpose(0, 1), v.transpose(0, 1))

    def is_near(o, lse) -> bool:
        return relative_error(o[0].float(), want) < 0.35 and bool(((lse[0] - want_lse).abs() < 0.1).all())

    assert is_near(o, lse)
    cache.prefill(1, *tokens(544))
    stale = decode(q.expand(2, -1, -1, -1), cache)
    rolled = make("cq4", books=cache.attached.layer)
    rolled.prefill(0, k.roll(1, 0), v)
    swapped = make("cq4", books=cache.attached.layer)
    swapped.prefill(0, k.flip(1), v)
    for o, lse in ((torch.zeros_like(o), lse), (o * float("nan"), lse), (o, lse + 1), (stale[0][1:], stale[1][1:]),
                   decode(q, rolled), decode(q, swapped)):
        assert not is_near(o, lse)


def test_logits_do_not_move_with_position_when_everything_is_turned_alike():
    """Pre-RoPE pages at far positions are as good as near ones: the same codes, another embedding."""
    x = torch.randn(200, HEADS, DIM)
    v, near, far = torch.randn(200, HEADS, DIM).half(), make("cq2", "pre"), make("cq2", "pre")
    far.set_first_positions([0], 60_000)
    for cache, start in ((near, 0), (far, 60_000)):
        cache.prefill(0, rotated(x, torch.arange(start, start + 200)).half(), v)
    q = torch.randn(1, 2, DIM)
    outs = [decode(rotated(q, torch.tensor([start + 199]))[None].half(), cache)[0]
            for cache, start in ((near, 0), (far, 60_000))]
    assert relative_error(outs[1].float(), outs[0].float()) < 0.05


def test_options_of_decode():
    k, v = tokens(400)
    cache = make("cq2", max_q_len=2)
    cache.prefill(0, k, v)
    q, logits = torch.randn(1, 2, 4, DIM).half(), torch.randn(4)
    got = decode(q, cache, softmax_scale=0.2, softcap=5.0, window=100, keep_sinks=True, sink_logits=logits)
    from lowbit_attn.reference import Attention

    got_k, got_v = cache.gather(0)
    want = attention(q[0], of_model(cache, got_k), got_v, Attention(0.2, 5.0, 100, True, logits), SINKS)
    assert torch.allclose(got[0][0].float(), want[0], atol=2e-3) and torch.allclose(got[1][0], want[1], atol=1e-3)
    assert not torch.allclose(decode(q, cache)[0], got[0], atol=1e-2)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_dtypes_and_fp32_input(dtype):
    k, v = tokens(300)
    one, two = make("cq2", dtype=dtype), make("cq2", dtype=dtype)
    one.prefill(0, k.to(dtype), v.to(dtype))
    two.prefill(0, k.to(dtype).float().requires_grad_(), v.to(dtype).float())
    assert_same_state(one, two)
    assert decode(torch.randn(1, 1, 4, DIM).to(dtype), one)[0].dtype == dtype


CASES = [Case("cq2", lengths=(300, 700), head_dim=64, q_len=2, sinks=32), Case("cq4", rope="pre", lengths=(600,)),
         Case("kcq4vcq2", torch.bfloat16, 96, 6, 2, (0, 400), sinks=5, rope="pre"),
         Case("cq1", lengths=(400,), head_dim=256, shared_pages=True), Case("k4vcq2", lengths=(129, 400))]
SPOILED = {"zero": torch.zeros_like, "nan": lambda o: o * float("nan"), "one head on": lambda o: o.roll(1, 2),
           "half": lambda o: o * 0.5, "constant": lambda o: torch.full_like(o, float(o.mean()))}
SHIFTED = {"first token lost": lambda k, v: (k[:, 1:], v[:, 1:]), "v one token on": lambda k, v: (k, v.roll(1, 1)),
           "k one token on": lambda k, v: (k.roll(1, 1), v), "kv head on": lambda k, v: (k.roll(1, 0), v.roll(1, 0)),
           "k one channel on": lambda k, v: (k.roll(1, 2), v)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_comparators_judge_codebook_caches(case):
    """On caches with permuted pages and NaN in all dead memory: decode passes, spoiled and stale outputs do not."""
    problem = build(case)
    want, (o, lse) = expected(problem), decode(problem.q, problem.cache)
    assert_decode(o, lse, want)
    for spoil in SPOILED.values():
        with pytest.raises(AssertionError):
            assert_decode(spoil(o), lse, want)
    with pytest.raises(AssertionError):
        assert_decode(o, lse + 0.5, want)
    stale = build(replace(case, seed=1))
    with pytest.raises(AssertionError):
        assert_decode(*decode(stale.q, stale.cache), want)


@pytest.mark.parametrize("how", SHIFTED)
@ropes
def test_the_kernels_comparators_refuse_wrong_tokens(how, rope):
    problem = build(Case("cq2", lengths=(400,), num_heads=8, num_heads_kv=2, rope=rope))
    k, v = SHIFTED[how](*problem.cache.gather(0))
    o, lse = attention(problem.cache.queries(problem.q)[0], k, v)
    with pytest.raises(AssertionError):
        assert_decode(o[None].half(), lse[None], expected(problem))


# ---- steps of a server


@ropes
def test_share_rewind_free_and_add(rope):
    k, v = tokens(500)
    cache = make("cq2", rope, max_batch=3, max_q_len=4)
    cache.prefill(0, k[:420], v[:420])
    cache.share(0, 1, 32 + 256)
    assert cache.book.held[1] == cache.book.held[0][:2]
    cache.prefill(1, k[288:], v[288:])
    cache.append(k[None, 420:424], v[None, 420:424], [0])
    cache.rewind([0], 4)
    cache.prefill(0, k[420:], v[420:])
    for got, want in zip(cache.gather(1), cache.gather(0)):
        assert torch.equal(got, want)
    cache.free([0])
    alone = make("cq2", rope)
    alone.prefill(0, k, v)
    for got, want in zip(cache.gather(1), alone.gather(0)):
        assert torch.equal(got, want)
    assert cache.add() == 0
    cache.book.check()


@pytest.mark.parametrize("way", (copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))))
@ropes
def test_copies_are_caches_of_their_own(way, rope):
    k, v = tokens(500)
    cache = make("cq2", rope)
    cache.set_first_positions([0], 9)
    cache.prefill(0, k[:300], v[:300])
    twin, before = way(cache), cache.gather(0)
    assert twin.identity == cache.identity and twin.nbytes == cache.nbytes
    twin.prefill(0, k[300:], v[300:])
    cache.free([0])
    alone = make("cq2", rope)
    alone.set_first_positions([0], 9)
    alone.prefill(0, k, v)
    for got, want, old in zip(twin.gather(0), alone.gather(0), before):
        assert torch.equal(got, want) and torch.equal(got[:, :288], old[:, :288])


@ropes
@pytest.mark.parametrize("at", (0, 3, 11, 40, 90))
def test_a_call_that_breaks_off_changes_nothing(rope, at, monkeypatch):
    """Whatever operation of a prefill raises; afterwards the call does as if nothing had happened."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Broken(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += 1
            if self.count - 1 == at:
                raise MemoryError
            return func(*args, **(kwargs or {}))

    k, v = tokens(500)
    cache, other = make("cq2", rope, max_batch=2), make("cq2", rope, max_batch=2)
    for one in (cache, other):
        one.prefill(0, k[:200], v[:200])
    before = copy.deepcopy(cache)
    with pytest.raises(MemoryError), Broken():
        cache.prefill(0, k[200:], v[200:])
    assert_same_state(cache, before)
    assert cache.book.held == before.book.held
    for one in (cache, other):
        one.prefill(0, k[200:], v[200:])
    assert_same_state(cache, other)


@pytest.mark.parametrize("dtype, largest", [(torch.float16, 65504.0), (torch.bfloat16, 3e38)])
def test_values_near_the_dtypes_largest_read_back_finite(dtype, largest):
    """An entry above 1 times such a norm is beyond fp16; a bfloat16 cache holds it."""
    books = normal_codebooks("cq2", 1, 1, 64).layer(0)
    cache = KVCache("cq2", 2, 1, 64, dtype, codebooks=books, sinks=0)
    k, v = torch.randn(2, 256, 1, 64).to(dtype)
    v[7] = 60000.0 * torch.where(torch.arange(64) % 3 == 0, 1.0, -1.0)
    v[8, 0, 0] = float("nan")
    cache.prefill(0, k, v)
    decoded = cache.format.dequantize_v(cache.pool[:1].flatten(0, 1), 64, books.v_entries)[0]
    assert decoded[7].abs().amax() > 65504
    got = cache.gather(0)[1][0]
    assert torch.equal(got[7], decoded[7].clamp(-largest, largest)) and got[8].isnan().all()
    o, _ = decode(torch.randn(1, 1, 2, 64).to(dtype), cache)
    assert o.dtype == dtype
