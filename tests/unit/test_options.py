"""Options of decode on the reference path: softcap, window, kept sinks, sink logits, and what they refuse."""

import pytest
import torch
import windowed

from lowbit_attn import KVCache, decode
from lowbit_attn.reference import Attention
from lowbit_attn.testing import Case, assert_decode, build, expected, per_head_table, share_pages


@pytest.fixture(scope="module")
def problem():
    return build(Case("k4v4", num_heads=6, num_heads_kv=2, head_dim=64, lengths=(0, 3, 140, 700), q_len=4, sinks=5))


@pytest.mark.parametrize("options", (
    dict(softcap=5.0), dict(window=1), dict(window=100), dict(window=300, keep_sinks=True), dict(softmax_scale=0.3),
    dict(softcap=20.0, window=64, keep_sinks=True, softmax_scale=0.2),
), ids=str)
@pytest.mark.parametrize("has_sink_logits", (False, True))
def test_decode(problem, options, has_sink_logits):
    if has_sink_logits:
        options = options | {"sink_logits": torch.randn(6)}
    o, lse = decode(problem.q, problem.cache, **options)
    assert_decode(o, lse, expected(problem, Attention(**options)))
    plain = expected(problem)
    with pytest.raises(AssertionError):
        assert_decode(o, lse, plain)


def test_a_sink_logit_is_all_that_an_empty_sequence_sees(problem):
    logits = torch.randn(6)
    o, lse = decode(problem.q, problem.cache, sink_logits=logits)
    assert not o[0].any() and torch.equal(lse[0], logits[:, None].expand(6, 4))


def test_sequences_that_share_pages():
    problem = build(Case("k2v2", num_heads=2, head_dim=64, lengths=(400, 500, 130), seed=3, shared_pages=True))
    table = problem.cache.table
    assert torch.equal(table[0, :3], table[1, :3]) and table[0, 0] == table[2, 0]
    assert_decode(*decode(problem.q, problem.cache), expected(problem))


def test_a_table_row_for_each_kv_head_finds_the_same_records():
    cache = build(Case("k2v2", num_heads_kv=3, num_heads=3, lengths=(400, 130), poison=False)).cache
    view, unit = per_head_table(cache), 128
    for row, n_pages in ((0, 3), (1, 1)):
        for head in range(3):
            for page in range(n_pages):
                records = []
                for c in (cache, view):
                    s, entry = c.strides, row * c.strides.table_b + head * c.strides.table_h + page
                    first = (int(c.table.view(-1)[entry]) * s.page + head * s.head) * unit
                    records.append(c.pool.view(-1)[first : first + c.record.nbytes])
                assert torch.equal(*records)


@pytest.mark.parametrize("options, message", (
    (dict(softcap=0.0), "softcap: got 0.0, supported: positive"), (dict(softcap=float("inf")), "softcap: got inf"),
    (dict(window=0), "window: got 0, supported: 1 or more"), (dict(keep_sinks=True), "keep_sinks: got True without"),
    (dict(softmax_scale=-1.0), "softmax_scale: got -1.0"),
))
def test_refused(problem, options, message):
    with pytest.raises(ValueError, match=message):
        decode(problem.q, problem.cache, **options)


@pytest.mark.parametrize("value", (1, 0, None, "no"))
def test_keep_sinks_is_a_truth_value(problem, value):
    with pytest.raises(TypeError, match=f"keep_sinks: got {value!r}, supported: True, False"):
        decode(problem.q, problem.cache, window=30, keep_sinks=value)


@pytest.mark.parametrize("logits, error", (
    (torch.zeros(5), ValueError), (torch.zeros(6, dtype=torch.float16), TypeError), ([0.0] * 6, TypeError)))
def test_sink_logits_refused(problem, logits, error):
    with pytest.raises(error, match="sink_logits: got"):
        decode(problem.q, problem.cache, sink_logits=logits)


def test_pages_are_shared_only_where_both_sides_are_packed():
    cache = KVCache(windowed.FORMATS["k4v4+w128"], 12, 1, 64, max_batch=2)
    for row in range(2):
        cache.prefill(row, torch.randn(500, 1, 64), torch.randn(500, 1, 64))
    before = cache.table.clone()
    share_pages(cache)
    assert torch.equal(cache.table[1, :2], cache.table[0, :2]) and cache.table[1, 2] == before[1, 2]
