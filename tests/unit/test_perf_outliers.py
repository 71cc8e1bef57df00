"""perf/outliers.py: every query row is measured once, and an error in o shows."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_models
import torch
from perf_scripts import script

from lowbit_attn import FORMATS, decode, kernels


@pytest.fixture(scope="module")
def outliers():
    with script("outliers") as module:
        yield module


def layer(outliers, num_heads=6, num_heads_kv=2, head_dim=64, tokens=300, softmax_scale=0.1):
    q = torch.randn(outliers.QUERIES, num_heads, head_dim).half()
    k, v = (torch.randn(tokens, num_heads_kv, head_dim).half() for _ in range(2))
    return outliers.Layer("random", 0, q, k, v, softmax_scale)


def test_query_rows_hold_every_one_once(outliers):
    of = layer(outliers)
    for head_kv, got in enumerate(outliers.query_rows(of)):
        want = of.q[:, 3 * head_kv : 3 * head_kv + 3].reshape(-1, 64)
        assert torch.equal(got, want)


@pytest.mark.parametrize("path", ("integer", "register"))
def test_kernels_get_every_query_row_once(outliers, monkeypatch, path):
    """Calls of ROWS query rows a KV head, whose o is compared with the attention of the same rows."""
    asked = []

    def kernel(q, cache, softmax_scale, path):
        asked.append((q.shape[2], path))
        return decode(q, cache, softmax_scale=softmax_scale, path="reference")

    monkeypatch.setattr(outliers, "decode", kernel)
    monkeypatch.setitem(outliers.DEVICES, True, "cpu")
    of = layer(outliers)
    ours, theirs = outliers.errors(of, "k4v4", path, True)
    assert len(ours) == len(theirs) == outliers.QUERIES * 6
    assert 0 < ours.max() < 1e-3  # o's rounding; rows in another order would be far from each other
    rows = outliers.ROWS[path]
    assert asked == [(2 * rows, path)] * (outliers.QUERIES * 3 // rows)


@pytest.mark.parametrize("path", ("integer", "register"))
def test_an_error_in_o_shows(outliers, monkeypatch, path):
    of = layer(outliers)
    ours, theirs = outliers.errors(of, "k4v4", path, False)
    assert len(ours) == len(theirs) == outliers.QUERIES * 6
    assert not outliers.is_over(ours, theirs)
    real = outliers.emulated
    monkeypatch.setattr(outliers, "emulated", lambda *args: 1.01 * real(*args))
    worse, same = outliers.errors(of, "k4v4", path, False)
    np.testing.assert_array_equal(same, theirs)
    np.testing.assert_allclose(worse, 0.01, rtol=0.1)
    assert outliers.is_over(worse, same)


def test_larger_channels_and_tokens(outliers):
    """Each draw of a case is scaled where its name says, and nowhere else."""
    found = {(of.model, of.index): of for of in outliers.synthetic()}
    assert len(found) == len(outliers.SYNTHETIC) * outliers.DRAWS
    plain = found["normal", 1]
    channel, k_token, v_token = (found[name, 1] for name in ("k-channel-100x", "k-token-50x", "v-token-50x"))
    ratio = (channel.k.float() / plain.k.float()).nanmedian(0).values
    assert (ratio[:, 5] - 100).abs().max() < 0.1 and (ratio.sum(1) - 227).abs().max() < 0.1
    for changed, base, other in ((k_token.k, plain.k, k_token.v), (v_token.v, plain.v, v_token.k)):
        rows = (changed != base).any(-1).any(-1).nonzero()
        assert len(rows) == 1 and torch.allclose(changed[rows].float(), 50 * base[rows].float(), rtol=2e-3)
        assert torch.equal(other, plain.v if other is k_token.v else plain.k)


@pytest.mark.parametrize("queries", (3, 8))
def test_capture_keeps_the_last_queries(outliers, monkeypatch, tmp_path, queries):
    network, ids = tiny_models.build("gemma3"), tiny_models.tokens(200)

    def tokenizer(text, return_tensors):
        return SimpleNamespace(input_ids=ids)

    monkeypatch.setattr("lowbit_attn.demo.model.load", lambda gguf, device: (network, tokenizer))
    found = []
    for count in (16, queries):
        outliers.capture(tmp_path, "tiny", tmp_path / "a.npz", 180, count)
        found.append(list(outliers.captured(tmp_path / "a.npz")))
    window = network.config.sliding_window + outliers.LEFT_IN_16_BIT  # below 180
    for more, fewer, kind in zip(*found, network.config.layer_types, strict=True):
        assert len(fewer.q) == queries and torch.equal(fewer.q, more.q[-queries:])
        assert len(fewer.k) == len(fewer.v) == (window if kind == "sliding_attention" else 180)


def test_captured_layers_come_back(outliers, tmp_path):
    of = layer(outliers)
    arrays = {f"{name}0": getattr(of, name).numpy() for name in "qkv"}
    np.savez(tmp_path / "a.npz", model=np.array(of.model), scale0=np.array(of.softmax_scale), **arrays)
    found, = outliers.captured(tmp_path / "a.npz")
    assert found[:2] == of[:2] and found.softmax_scale == of.softmax_scale
    assert all(torch.equal(*pair) for pair in zip(found[2:5], of[2:5]))


def test_needed_kernels_exist(outliers):
    keys = outliers.needed_keys([layer(outliers), layer(outliers, head_dim=256)])
    decoding = [key for key in keys if key.op == "decode"]
    assert len(set(keys)) == len(keys) and len(decoding) == 2 * sum(map(len, outliers.FORMATS.values()))
    assert {(kernels.path_name(key), key.rows) for key in decoding} == set(outliers.ROWS.items())
    for head_dim, name in product((64, 256), set().union(*outliers.FORMATS.values())):
        assert set(kernels.packing_keys("sm_90a", "float16", head_dim, FORMATS[name])) <= set(keys)
