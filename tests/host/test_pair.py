"""The even share of two levels without a GPU: every page and unit once, high pages twice as long; shared memory; which
calls take one launch, and why others do not."""

import itertools
import random

import pytest
import torch
from unit.level_caches import of_pages

from lowbit_attn import dispatch, kernels, loader
from lowbit_attn.formats.levels import parse
from lowbit_attn.levels import decode as level_decode
from lowbit_attn.levels import pair
from lowbit_attn.reference import PLAIN, Attention

pytest.importorskip("cutlass", reason="CuTe-DSL (nvidia-cutlass-dsl) is not installed")

from lowbit_attn.hopper.pair import config, items  # noqa: E402
from lowbit_attn.hopper.pair.decode import PairSm90  # noqa: E402
from lowbit_attn.hopper.warp import page_loop, plan  # noqa: E402

LEVELS = ("lean", "lean-low", "k4v4+k2v2", "k8v8+k4v4")
COUNTS = [  # high pages, stage with sinks; low pages, stage, ring
    (0, 0, 0, 0, 0), (1, 0, 0, 0, 0), (0, 0, 1, 0, 7), (5, 37, 0, 127, 120), (0, 5, 9, 0, 0), (7, 129, 20, 16, 183)]


@pytest.mark.usefixtures("numpy_walk")
@pytest.mark.parametrize("counts", COUNTS)
def test_pieces_of_an_item_visit_every_token_once(counts):
    high, sinks, low, staged, ring = counts
    counters = (sinks, 128 * high, sinks + 999, 999, staged, 128 * low, staged + 640 + ring, 640)
    size, draw = int(items.level_item(*counters).positions), random.Random(0)
    assert size == max(1, 2 * high + low + sum(-(-n // 16) for n in (sinks, staged, ring)))
    for pieces in (1, 2, 5, size):
        cuts = sorted({0, size, *(draw.randrange(size) for _ in range(pieces - 1))})
        visited = [], []
        for first, end in itertools.pairwise(cuts):
            walks = [page_loop.Walk(*map(int, w)) for w in items.walks_of(*counters, first=first, count=end - first)]
            assert walks[0].num_pages <= (end - first + 1) // 2
            for found, w in zip(visited, walks):
                found += [("page", w.first_page + i) for i in range(w.num_pages)]
                for i in range(w.first_unit, w.num_units):
                    start, live, is_sink, _ = map(int, page_loop.unit(w, i, 1))
                    found += [("sink" if is_sink else "ring", start + j) for j in range(live)]
        for found, pages, held, recent in zip(visited, (high, low), (sinks, staged), (0, ring)):
            assert sorted(found) == sorted([*(("page", i) for i in range(pages)), *(("sink", i) for i in range(held)),
                                            *(("ring", i) for i in range(recent))])


@pytest.mark.parametrize("head_dim", config.HEAD_DIMS)
@pytest.mark.parametrize("name", LEVELS)
def test_shared_memory_plan(name, head_dim, monkeypatch):
    """Both levels' parts fit the slots, and both count the same places."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    cfg = config.make_config(parse(name), head_dim, "float16")
    assert PairSm90(cfg).storage().size_in_bytes() == cfg.smem_bytes <= plan.SMEM_LIMIT
    parts = [side.nbytes for level in (cfg.high, cfg.low) for side in (level.k, level.v)]
    assert cfg.high.slot_bytes == cfg.low.slot_bytes == max(parts) and cfg.high.warp_bytes == cfg.low.warp_bytes
    assert (cfg.high.warps, cfg.high.slots) == (cfg.low.warps, cfg.low.slots) and cfg.low.warps >= 4


@pytest.mark.parametrize("levels, head_dim, features, reason", [
    ("lean", 96, (), "head_dim 96, supported: 64, 128"), ("k8tv8+k4v2", 128, (), "high level: format k8tv8"),
    ("k4v4+k8tv2", 128, (), "low level: format k8tv2"),
    ("lean", 128, ("window",), "feature window, supported: softcap"),
    ("kitty+k2v2", 128, (), "high level: format kitty, supported: K without boosted channels")])
def test_what_one_launch_does_not_serve_says_why(levels, head_dim, features, reason):
    found, = kernels.no_pair("hopper", parse(levels), head_dim, torch.float16, features)
    assert found.startswith(f"pair path: {reason}")
    with pytest.raises(ValueError, match=reason):
        config.make_config(parse(levels), head_dim, "float16", features)
    assert "supported: hopper" in kernels.no_pair("ampere", parse("lean"), 128, torch.float16)[0]


def test_many_rows_of_up_to_four_queries_take_one_launch_where_it_serves_them(monkeypatch):
    """Named, it serves blocks of rows too; what it does not serve goes to two launches, or is refused by name."""
    monkeypatch.setattr(dispatch, "target_of", lambda device: ("hopper", "sm_90a"))
    cache = of_pages("lean", 64, ((1, 1),))

    def serves(ratio: int, options: Attention = PLAIN, splits: int | None = None, path: str | None = None,
               rows: int = pair.LEAST_ROWS) -> bool:
        return pair.serves(cache, level_decode.level_queries(torch.zeros(rows, 1, ratio, 64), 1), options, splits, path)

    assert not serves(4, rows=pair.LEAST_ROWS - 1) and serves(4, rows=1, path="pair")
    assert serves(4) and serves(1, Attention(softcap=5.0)) and serves(9, path="pair")
    assert not any((serves(5), serves(4, path="merge"), serves(4, path="stream"), serves(4, splits=3),
                    serves(4, Attention(sink_logits=torch.zeros(4)))))
    for refused, reason in ((dict(splits=3), "num_splits 3"), (dict(options=Attention(sink_logits=torch.zeros(4))),
                                                                "sink_logits, supported: None")):
        with pytest.raises(NotImplementedError, match=f"pair path: {reason}"):
            serves(4, path="pair", **refused)
    assert dispatch.why_not_on("hopper", cache, 4, path="pair") == []
    assert dispatch.why_not_on("hopper", cache, 4, path="merge") == []
    assert dispatch.why_not_on("hopper", cache, 4, 17, path="pair") == ["q_len 17, supported: 1 to 16"]


def test_a_call_is_one_launch_over_the_memory_of_both_levels(monkeypatch):
    """The kernel gets what its signature names; its plan is kept until the memory of the cache is another one."""
    launches, loaded = [], []
    monkeypatch.setattr(dispatch, "target_of", lambda device: ("hopper", "sm_90a"))
    monkeypatch.setattr(dispatch, "running_ctas", lambda device, ctas_per_sm: 3)
    monkeypatch.setattr(loader, "argument", lambda x: x)
    monkeypatch.setattr(loader, "load", lambda key: loaded.append(key) or (lambda *found: launches.append(found)))
    cache = of_pages("lean", 64, ((1, 1), (2, 0)), heads=2, max_q_len=4)
    rows = level_decode.level_queries(torch.randn(1, 1, 8, 64).half(), 2)
    o, lse = torch.empty(1, 1, 8, 64).half(), torch.empty(1, 8, 1)
    for _ in range(2):
        pair.launch(pair.plan_of(cache, rows, PLAIN, None, pair.PATH), 2, rows, o, lse)
    assert loaded == [kernels.pair_key("sm_90a", "float16", 64, cache.format)] and len(launches) == 2
    names = PairSm90.__call__.__wrapped__.__code__.co_varnames[1:22]
    given = dict(zip(names, launches[1], strict=True))
    assert given["q"] is rows and given["out"].data_ptr() == o.data_ptr() and given["out"].shape == rows.shape
    assert given["c_sink"] is cache.c_sink and given["c_out"] is cache.c_out and given["c_tok"] is cache.c_tok
    assert given["table"] is cache.table and given["c_pack"] is cache.c_pack and given["partials"].shape[0] == 3
    for level, pool in enumerate(("high_pool", "low_pool")):
        assert given[pool].data_ptr() == cache.pool.units(level).data_ptr() and given[pool].dtype == torch.uint32
    for name, x in (("high_k", cache.hi_k), ("high_v", cache.hi_v), ("low_k", cache.lo_k), ("ring_v", cache.ring_v)):
        assert given[name].data_ptr() == x.data_ptr() and given[name].shape[1] == 1
    cache.extend(9000)
    pair.plan_of(cache, rows, PLAIN, None, pair.PATH)
    assert len(loaded) == 2
