"""The comparators themselves: every wrong output that a broken kernel has been seen to give must be refused."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from lowbit_attn import KVCache, decode
from lowbit_attn.testing import (
    DATA,
    Case,
    Expected,
    assert_decode,
    assert_same_bytes,
    assert_same_special,
    assert_same_state,
    attention_fp64,
    build,
    expected,
    poison,
    relative_error,
    to_device,
)

BF16_DATA = ("meta-beyond-fp16", "q-1e6-k-1e-6")
# A query of 1e3 sees one token, whose rounding is all that bounds say; one of 1e-3 sees all alike, in every head.
SAYS_NOTHING = ("q-1e3", "q-1e-3")
CASES = [
    Case(lengths=(300,)),
    Case("k2v2", lengths=(1024,), num_heads=32, num_heads_kv=8, q_len=3, sinks=32),
    Case("k8v4-bf16", torch.bfloat16, lengths=(5, 700), head_dim=64),
    Case("k4v4", lengths=(2000, 40, 129), num_heads=4, num_heads_kv=4),
    *(Case("k4v4-bf16" if data in BF16_DATA else "k4v4", torch.bfloat16 if data in BF16_DATA else torch.float16,
           lengths=(300, 500), sinks=32, data=data) for data in DATA[1:] if data not in SAYS_NOTHING),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)


@cache
def outputs(case: Case) -> tuple[torch.Tensor, torch.Tensor, Expected]:
    problem = build(case)
    return *decode(problem.q, problem.cache), expected(problem)


def constant(x):
    return torch.full_like(x, float(x.double().mean()))


SPOILED = {
    "zero": torch.zeros_like,
    "constant": constant,
    "one constant a row": lambda x: x.mean(-1, keepdim=True).expand_as(x),
    "nan": lambda x: torch.full_like(x, float("nan")),
    "one nan": lambda x: x.flatten().index_fill(0, torch.tensor([3]), float("nan")).view_as(x),
    "one infinity": lambda x: x.flatten().index_fill(0, torch.tensor([3]), float("inf")).view_as(x),
    "negated": torch.neg,
    "noise": torch.randn_like,
    "one head on": lambda x: x.roll(1, 2),
    "one channel on": lambda x: x.roll(1, 3),
    "twice": lambda x: x * 2,
    "3 % more": lambda x: x * 1.03,
    "last head missing": lambda x: torch.cat((x[:, :, :-1], torch.zeros_like(x[:, :, -1:])), 2),
    "last channels missing": lambda x: torch.cat((x[..., :-8], torch.zeros_like(x[..., -8:])), 3),
    "last sequence missing": lambda x: torch.cat((x[:-1], torch.zeros_like(x[-1:]))),
}


@cases
def test_right_outputs_pass(case):
    o, lse, want = outputs(case)
    assert_decode(o, lse, want)
    assert float(want.o_tolerance.max()) < 0.1 and float(want.lse_tolerance.max()) < 0.2


@pytest.mark.parametrize("how", SPOILED)
@cases
def test_spoiled_outputs_are_refused(case, how):
    o, lse, want = outputs(case)
    if how == "3 % more" and float(want.o_tolerance.max()) >= 0.03:
        pytest.skip("the case's own 16-bit error is larger")
    with pytest.raises(AssertionError, match="^o"):
        assert_decode(SPOILED[how](o), lse, want)


@pytest.mark.parametrize("how", ("zero", "constant", "nan", "one nan", "one infinity", "noise", "one head on",
                                 "base 2"))
@cases
def test_spoiled_lse_is_refused(case, how):
    if how == "one head on" and case.data == "flat-attention":
        pytest.skip("all heads of flat attention have nearly one lse")
    o, lse, want = outputs(case)
    bad = {"one head on": lambda x: x.roll(1, 1), "base 2": lambda x: x * 1.4427}.get(how) or SPOILED[how]
    with pytest.raises(AssertionError, match="^lse"):
        assert_decode(o, bad(lse), want)


@cases
def test_stale_outputs_are_refused(case):
    """Those of a case that differs in its numbers only."""
    _, _, want = outputs(case)
    with pytest.raises(AssertionError):
        assert_decode(*outputs(replace(case, seed=1))[:2], want)


def shifted(k, v, how, last):
    """The tokens that a kernel with an error of one token would read; ``last``: where packed pages end."""
    if how == "first token lost":
        return k[:, 1:], v[:, 1:]
    if how == "last token lost":
        return k[:, :-1], v[:, :-1]
    if how == "v one token on":
        return k, v.roll(1, 1)
    if how == "k one token on":
        return k.roll(1, 1), v
    if how == "page twice":
        return torch.cat((k, k[:, last - 128 : last]), 1), torch.cat((v, v[:, last - 128 : last]), 1)
    if how == "residual lost":
        return k[:, :last], v[:, :last]
    if how == "kv head on":
        return k.roll(1, 0), v.roll(1, 0)
    raise KeyError(how)


@pytest.mark.parametrize("how", ("first token lost", "last token lost", "v one token on", "k one token on",
                                 "page twice", "residual lost", "kv head on"))
@pytest.mark.parametrize("length, fmt, dtype", [(300, "k4v4", torch.float16), (1000, "k2v2", torch.float16),
                                                (1000, "k4v4", torch.bfloat16)])
def test_wrong_tokens_are_refused(how, length, fmt, dtype):
    problem = build(Case(fmt, dtype, lengths=(length,), num_heads=32, num_heads_kv=8))
    k, v = problem.cache.gather(0)
    o, lse = attention_fp64(problem.q[0], *shifted(k, v, how, int(problem.cache.n_qk[0])))
    with pytest.raises(AssertionError):
        assert_decode(o[None], lse[None], expected(problem))


@pytest.mark.parametrize("q_len", (2, 4))
def test_wrong_masks_are_refused(q_len):
    """All queries see all tokens, or each sees one token too few."""
    problem = build(Case(lengths=(300,), q_len=q_len, num_heads=4))
    k, v = problem.cache.gather(0)
    want = expected(problem)
    full = [attention_fp64(problem.q[0, j : j + 1], k, v) for j in range(q_len)]
    late = attention_fp64(problem.q[0], k[:, :-1], v[:, :-1])
    for o, lse in ((torch.cat([o for o, _ in full]), torch.cat([lse for _, lse in full], 1)), late):
        with pytest.raises(AssertionError):
            assert_decode(o[None], lse[None], want)


def test_blind_rows_must_be_exact():
    """Rows that see no token: exactly zero and -inf."""
    o, lse, want = outputs(Case(lengths=(0, 2), q_len=4))
    assert_decode(o, lse, want)
    for at in ((0, 0, 0, 0), (1, 1, 3, 5)):
        bad = o.clone()
        bad[at] = 1e-6
        with pytest.raises(AssertionError, match="not zero"):
            assert_decode(bad, lse, want)
    with pytest.raises(AssertionError, match="lse: -Inf differs"):
        assert_decode(o, torch.where(lse.isinf(), -1e30, lse), want)
    with pytest.raises(AssertionError, match="o: NaN differs"):
        assert_decode(torch.where(o == 0, torch.nan, o), lse, want)


def test_shapes_must_match():
    o, lse, want = outputs(Case(lengths=(300, 200)))
    with pytest.raises(AssertionError, match="o: shape"):
        assert_decode(o[:1], lse, want)
    with pytest.raises(AssertionError, match="lse: shape"):
        assert_decode(o, lse[..., 0], want)


def test_relative_error():
    x = torch.randn(100)
    assert relative_error(x, x) == 0
    assert relative_error(x * 1.01, x) == pytest.approx(0.01, rel=1e-3)
    assert relative_error(torch.zeros(5), torch.zeros(5)) == 0
    assert relative_error(torch.full((5,), 1e-30), torch.zeros(5)) == float("inf")
    assert not relative_error(torch.full((5,), torch.nan), torch.ones(5)) <= 1e9


def test_bytes_must_be_equal():
    x = torch.tensor([0.0, torch.nan, 1.0])
    assert_same_bytes("x", x.clone(), x)
    for bad in (torch.tensor([-0.0, torch.nan, 1.0]), torch.tensor([0.0, -torch.nan, 1.0]), x[:2], x.double(),
                torch.tensor([0.0, torch.nan, 1.0 + 2**-23])):
        with pytest.raises(AssertionError, match="^x: "):
            assert_same_bytes("x", bad, x)


@pytest.mark.parametrize("value", (float("nan"), float("inf"), float("-inf")))
def test_special_values_must_be_in_place(value):
    x = torch.tensor([0.0, value, 1.0])
    assert_same_special("x", x * 1.5, x)
    for bad in (x.roll(1), torch.zeros(3), -x if value == value else torch.tensor([0.0, 1.0, 1.0])):
        with pytest.raises(AssertionError, match="^x: .* differs"):
            assert_same_special("x", bad, x)


LIVE = {
    "pool": lambda c: c.pool[int(c.table[0, 0]), 0], "n_tok": lambda c: c.n_tok, "n_sink": lambda c: c.n_sink,
    "sink_k": lambda c: c.sink_k, "sink_v": lambda c: c.sink_v, "ring_k": lambda c: c.ring_k[..., :1],
    "ring_v": lambda c: c.ring_v[..., :1],
}


@pytest.mark.parametrize("name", LIVE)
def test_states_that_differ_are_refused(name):
    a = KVCache("k4v4", 2, 2, 64, sinks=4)
    a.prefill(0, *torch.randn(2, 204, 2, 64))
    b = to_device(a, "cpu")
    assert_same_state(b, a)
    poison(b)
    assert_same_state(b, a)
    LIVE[name](b).bitwise_xor_(1) if name in ("pool", "n_tok", "n_sink") else LIVE[name](b).add_(1)
    with pytest.raises(AssertionError, match="sequence 0"):
        assert_same_state(b, a)
    assert_same_state(a, a)


def test_cases_are_random_and_repeatable():
    a, b, c = build(CASES[0]), build(CASES[0]), build(replace(CASES[0], seed=1))
    assert torch.equal(a.q, b.q) and torch.equal(a.cache.pool, b.cache.pool)
    assert not torch.equal(a.q, c.q) and not torch.equal(a.k[0], c.k[0])
    with pytest.raises(ValueError, match="data: got 'zeros', supported: normal"):
        build(Case(data="zeros"))


def test_hard_inputs_are_what_they_say():
    def k_of(data, **kwargs):
        return build(Case(lengths=(300,), data=data, **kwargs))

    assert k_of("k-channel-100x").k[0][..., 5].std() > 50
    assert k_of("v-300x").v[0].std() > 200
    assert k_of("v-token-300x").v[0].std(dim=(1, 2)).argmax() == 150
    zero = k_of("zero-200x-range").k[0]
    spread = zero[:128].amax(0) - zero[:128].amin(0)
    assert (zero[:128].amin(0).abs() > 100 * spread).all() and spread.min() > 0
    problem = k_of("meta-beyond-fp16", format="k4v4-bf16", dtype=torch.bfloat16)
    assert problem.k[0].max() > 65504 and problem.cache.gather(0)[0].isfinite().all()
