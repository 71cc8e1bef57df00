"""The end of an Ampere decode call on the CPU: who writes which row from which partial result, and the merge of splits.

Driven by the kernel's own helpers (combine, queries), with numpy threads; the arithmetic is written here, in fp32.
"""

import numpy as np
import pytest
import torch

from lowbit_attn import reference
from lowbit_attn.formats import FORMATS

pytest.importorskip("tilelang", reason="the helpers live in kernel files that import tilelang")

from lowbit_attn.ampere import combine, queries  # noqa: E402
from lowbit_attn.ampere import config as sizes  # noqa: E402

NONE = np.full(1, -np.inf, np.float32)
F = np.float32


def weight(logit, start):
    return np.exp2((logit - start) * F(combine.LOG2_E))


def origin(top):
    return np.where(top == -np.inf, F(0), top)


def log_sum(start, total):
    with np.errstate(divide="ignore"):
        return np.where(total == 0, -np.inf, start + np.log2(total) * F(combine.LN_2)).astype(F)


def weighted(value, factor):
    return np.where(factor == 0, F(0), factor * value)



def block_rows(cfg, seq, head, ratio, q_len, block):
    """The rows that the last block of a row block merges: the same for each of its warps."""
    found = set()
    for warp in range(cfg.warps):
        first = block * cfg.rows + (warp * cfg.warp_rows if cfg.shares_pages else 0)
        own = queries.Rows(seq, head * ratio, ratio, first, min(cfg.warp_rows, ratio * q_len - first), *[None] * 4)
        rows = queries.of_block(cfg, own, warp, q_len)
        found.add((int(rows.first), int(rows.count)))
    (first, count), = found
    return rows._replace(first=first, count=count)


def merge_block(cfg, rows, results):
    """combine.combine of one block: all its threads, a turn after the other."""
    lanes, (splits, batch, q_len, heads, head_dim) = cfg.head_dim // combine.CHANNELS, results.o_partial.shape
    o, lse = results.o_partial.reshape(-1, head_dim), results.lse_partial.reshape(-1)
    out, stride = results.out.reshape(-1, head_dim), combine.num_rows(results)
    assert stride == batch * q_len * heads
    for unit in range(rows.count * lanes):
        query, head = int(queries.query(rows, unit // lanes)), int(queries.head(rows, unit // lanes))
        row, first_channel = combine.row_at(results, rows.seq, query, head), combine.CHANNELS * (unit % lanes)
        channels = slice(first_channel, first_channel + combine.CHANNELS)
        top = results.sink_logits[int(combine.logit_place(results.sink_logits, head))]
        total, acc = F(top != -np.inf), np.zeros(combine.CHANNELS, F)
        for first in range(0, splits, combine.SPLITS_AT_ONCE):
            at = row + stride * np.arange(first, min(first + combine.SPLITS_AT_ONCE, splits))
            shrink, top = top, np.fmax(top, np.fmax.reduce(lse[at]))
            start = origin(top)
            total, acc = total * weight(shrink, start), acc * weight(shrink, start)
            for one in at:
                own = weight(lse[one], start)
                total, acc = total + own, acc + weighted(o[one, channels], own)
        assert np.isnan(out[row, channels]).all()  # written once
        with np.errstate(divide="ignore", invalid="ignore"):
            out[row, channels] = np.where(total == 0, F(0), acc / total)
        if first_channel == 0:
            results.lse[rows.seq, head, query] = log_sum(start, total)


def merged(cfg, o, lse, sink_logits, heads_kv):
    """out, lse of partial results [splits, batch, q_len, heads, d] and [splits, batch, q_len, heads]."""
    _, batch, q_len, heads, _ = o.shape
    results = combine.Results(o, lse, np.full(o.shape[1:], np.nan, F), np.full((batch, heads, q_len), np.nan, F),
                              sink_logits, None, len(o))
    ratio = heads // heads_kv
    for seq, head, block in np.ndindex(batch, heads_kv, -(-ratio * q_len // cfg.rows)):
        merge_block(cfg, block_rows(cfg, seq, head, ratio, q_len, block), results)
    return results.out, results.lse


def wanted(o, lse, sink_logits):
    """The same by reference.merge_states, with the sink logits as one more state whose o is 0."""
    _, batch, _, heads, _ = o.shape
    o = torch.from_numpy(np.concatenate((o, np.zeros_like(o[:1]))))
    sink = np.broadcast_to(sink_logits, (heads,))
    lse = np.concatenate((lse, np.broadcast_to(sink, lse[:1].shape)))
    return (x.numpy() for x in reference.merge_states(o, torch.from_numpy(lse).transpose(2, 3)))


def partial_results(splits, batch, q_len, heads, head_dim, seed=0):
    """Random (o, lse) with empty splits, and one row of only such."""
    random = np.random.default_rng(seed)
    o = random.standard_normal((splits, batch, q_len, heads, head_dim), F)
    lse = 20 * random.standard_normal((splits, batch, q_len, heads), F)
    empty = random.random(lse.shape) < 0.3
    empty[:, 0, 0, 0] = True
    o[empty], lse[empty] = 0, -np.inf
    return o, lse


@pytest.mark.parametrize("head_dim, rows, ratio, q_len", (
    (64, 8, 4, 1), (96, 8, 3, 2), (128, 8, 5, 4), (128, 16, 16, 1), (256, 8, 1, 1), (64, 64, 8, 9), (256, 64, 5, 3)))
@pytest.mark.parametrize("splits", (2, 8, 19))
def test_splits_are_merged(head_dim, rows, ratio, q_len, splits):
    """Every (row, channel) is written once, by its own row block, whatever share of the block's rows is there."""
    cfg = sizes.decode_config(FORMATS["k4v4"], head_dim, "float16", "sm_80", "register", rows)
    o, lse = partial_results(splits, 2, q_len, 2 * ratio, head_dim, splits)
    for sink_logits in (NONE, np.linspace(-30, 30, 2 * ratio, dtype=F)):
        out, got = merged(cfg, o, lse, sink_logits, 2)
        want, want_lse = wanted(o, lse, sink_logits)
        assert np.abs(out - want).max() < 1e-5 and not out[0, 0, 0].any()
        assert np.array_equal(got == -np.inf, want_lse == -np.inf)
        seen = got != -np.inf
        assert np.abs(got[seen] - want_lse[seen]).max() < 1e-5


def test_a_nan_stays_visible():
    """Of o, of lse and of a sink logit; not of a split that has no weight."""
    cfg = sizes.decode_config(FORMATS["k4v4"], 64, "float16", "sm_80", "register", 8)
    o, lse = partial_results(3, 1, 1, 4, 64)
    lse[:] = 0
    lse[1, 0, 0, 0], o[1, 0, 0, 0] = -np.inf, np.nan
    o[1, 0, 0, 1, 5] = lse[2, 0, 0, 2] = np.nan
    out, got = merged(cfg, o, lse, NONE, 1)
    assert np.isnan(out[0, 0]).sum(1).tolist() == [0, 1, 64, 0] and np.isnan(got[0, :, 0]).tolist() == [0, 0, 1, 0]
    out, got = merged(cfg, *partial_results(3, 1, 1, 4, 64), np.array([0, 0, 0, np.nan], F), 1)
    assert np.isnan(out[0, 0]).all(1).tolist() == [0, 0, 0, 1] and np.isnan(got[0, :, 0]).tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("sink", (-np.inf, -3.0, 40.0))
def test_one_split_is_the_whole(sink):
    """combine.with_sink: what a block of a call of one split writes is what merging that split would give."""
    cfg = sizes.decode_config(FORMATS["k4v4"], 64, "float16", "sm_80", "register", 8)
    o, lse = partial_results(1, 2, 2, 4, 64)
    out, got = merged(cfg, o, lse, np.array([sink], F), 1)
    start = origin(np.fmax(lse[0], F(sink)))
    own = weight(lse[0], start)
    total = own + weight(F(sink), start)
    factor = np.divide(own, total, out=np.zeros_like(own), where=total != 0)
    same = np.array_equal if sink == -np.inf else np.allclose  # without a sink logit o is multiplied with 1
    assert same(weighted(o[0], factor[..., None]), out)
    assert same(log_sum(start, total).transpose(0, 2, 1), got)
