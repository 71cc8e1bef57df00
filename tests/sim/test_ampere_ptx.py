"""Ampere's register and tile paths from their PTX on the CPU: see ampere_calls."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from lowbit_attn import KVCache, testing
from lowbit_attn.reference import Attention
from lowbit_attn.testing import Case
from sim.ampere_calls import decode, key_of
from sim.ptx import build

ONE_HEAD = Case("k4v4", head_dim=64, num_heads=4, num_heads_kv=1, lengths=(300,), sinks=5)
FEATURES = Attention(None, 20.0, 200)


@pytest.mark.parametrize("case, path, rows, splits, options", [
    (replace(ONE_HEAD, num_heads_kv=2, lengths=(0, 300)), "register", 8, 3,
     Attention(sink_logits=torch.linspace(-3, 3, 4))),
    (replace(ONE_HEAD, format="k2v2-g64-vg32-bf16", dtype=torch.bfloat16, q_len=3), "register", 16, 1, FEATURES),
    (replace(ONE_HEAD, format="kitty", q_len=2), "register", 8, 1, Attention()),
    (replace(ONE_HEAD, format="k4v2-boost", lengths=(560,)), "register", 8, 1, Attention()),
    (replace(ONE_HEAD, format="k8tv8"), "register", 8, 1, Attention()),
    (replace(ONE_HEAD, q_len=5, lengths=(560,)), "register", 64, 1, FEATURES),
    (ONE_HEAD, "tile", 8, 1, Attention()),
], ids=("ragged", "groups-features", "kitty", "boosted-values", "per-token", "shared-pages", "tile"))
def test_path(case, path, rows, splits, options):
    problem, key = testing.build(case), key_of(case, options, path, rows)
    testing.assert_decode(*decode(key, problem, options, splits), testing.expected(problem, options))


def test_scaled_queries_are_all_rounded_down():
    """q times a scale that all channels have is rounded by half a step: codes are taken off their mean for that."""
    case, top = replace(ONE_HEAD, num_heads=1, lengths=(129,), sinks=0), 1921 / 512
    scale = torch.tensor(2 * top / 15).half()
    queries = 1 + torch.arange(1024) / 1024
    lost = queries * scale.float() - (queries * scale).half().float()  # the first product is exact in fp32
    query = queries[(lost / queries).argmax()]
    problem = testing.build(case)
    k = (torch.randint(16, (129, 1, 64)) / 7.5 - 1) * top
    k[:64, 0].fill_diagonal_(-top)  # each channel's range
    k[64:128, 0].fill_diagonal_(top)
    cache = KVCache(case.format, 3, 1, 64, sinks=0)
    cache.prefill(0, k[:128], problem.v[0][:128])
    cache.append(k[None, 128:], problem.v[0][None, 128:])
    problem = replace(problem, q=torch.full_like(problem.q, float(query)), cache=cache, k=(k,))
    testing.assert_decode(*decode(key_of(case, path="register"), problem), testing.expected(problem))


def test_rings_turn():
    """Warps with one page and with two. The order in which they and the blocks run changes nothing."""
    case = replace(ONE_HEAD, format="k2v2", num_heads=2, lengths=(128 * 13 + 40,))
    problem, key = testing.build(case), key_of(case, path="register")
    found = decode(key, problem)
    testing.assert_decode(*found, testing.expected(problem))
    assert all(map(torch.equal, found, decode(key, problem, reverse=True)))


@pytest.mark.parametrize("name, path, warps, slots, reverse", (
    ("k2v4", "register", 2, 2, False), ("k2v2", "register", 4, 2, True), ("kitty", "register", 2, 3, True),
    ("k4v4", "tile", 2, 2, True)))
def test_slots_are_filled_again(monkeypatch, name, path, warps, slots, reverse):
    """Warps with no page, with one or two, and with so many that their rings turn."""
    monkeypatch.setattr("lowbit_attn.ampere.config.SHAPES", ((warps, slots),))
    for made in ("program", "source"):  # of these sizes, which the key does not name
        monkeypatch.setattr(build, made, cache(getattr(build, made).__wrapped__))
    case = replace(ONE_HEAD, format=name, num_heads=1, lengths=(70, 400, 128 * 7 + 40))
    problem, key = testing.build(case), key_of(case, path=path)
    testing.assert_decode(*decode(key, problem, reverse=reverse), testing.expected(problem))
