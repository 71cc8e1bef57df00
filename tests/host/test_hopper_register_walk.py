"""What the warps of the Hopper register path visit, without a GPU: pages, units of the mixed segment, 16-bit units."""

import dataclasses
import itertools

import pytest

from lowbit_attn import layout
from lowbit_attn.formats import FORMATS

pytest.importorskip("cutlass", reason="CuTe-DSL (nvidia-cutlass-dsl) is not installed")

from lowbit_attn.hopper.arith.fp16 import config as fp16  # noqa: E402
from lowbit_attn.hopper.config import make_config  # noqa: E402
from lowbit_attn.hopper.warp import config, mixed, page_loop, softmax  # noqa: E402
from lowbit_attn.hopper.warp.residual import is_seen  # noqa: E402


def value(x) -> int:
    """A Python int from one, or from a DSL integer."""
    return int(getattr(x, "value", x))


def mixed_units(w: page_loop.Walk, takers: int) -> list[tuple[int, int]]:
    """(page, row tile) of a warp's units of the mixed segment."""
    places = [mixed.unit_place(i) for i in range(w.first_mixed, w.num_mixed, takers)]
    return [(w.mixed_page + page, tile) for page, tile in places]


@pytest.mark.usefixtures("numpy_walk")
@pytest.mark.parametrize("n_sink, n_qk, residual", [(0, 0, 0), (4, 0, 0), (3, 0, 5), (0, 128, 0), (130, 1280, 255),
                                                    (0, 640, 128), (128, 384, 1), (32, 4096, 129)])
@pytest.mark.parametrize("third_pages", (0, 1, 2, 9))
@pytest.mark.parametrize("num_splits, warps, page_warps", [(1, 8, 8), (2, 7, 7), (3, 4, 4), (7, 12, 8), (40, 8, 8),
                                                           (2, 12, 8), (1, 3, 2)])
def test_walk_visits_every_token_once(n_sink, n_qk, residual, third_pages, num_splits, warps, page_warps):
    visited, dealt, pages, takers = [], {}, [], warps * num_splits
    n_qv = max(0, n_qk - third_pages * layout.PAGE_TOKENS)
    for split, warp in itertools.product(range(num_splits), range(warps)):
        w = page_loop.plan_walk(n_sink, n_qk, n_qv, n_sink + n_qk + residual, n_qk, 1, None, split, num_splits, warp,
                                warps, page_warps)
        w = page_loop.Walk(*(value(x) for x in w))
        apart = page_loop.pages_apart(num_splits, page_warps)
        assert apart == page_warps * num_splits
        visited += [("page", w.first_page + i * apart) for i in range(w.num_pages)]
        assert w.first_page == page_loop.page_place(split, num_splits, warp), "the kernel asks for its id at once"
        pages.append(w.num_pages)
        units = mixed_units(w, takers)
        visited += [("third", *unit) for unit in units]
        dealt[split, warp] = len(units) + len(range(w.first_unit, w.num_units, takers))
        for i in range(w.first_unit, w.num_units, takers):
            start, live, is_sink, _ = (value(x) for x in page_loop.unit(w, i, 1))
            assert 1 <= live <= config.UNIT_TOKENS and start % config.UNIT_TOKENS == 0
            visited += [("sink" if is_sink else "residual", start + j) for j in range(live)]
        assert w.ring_start == n_qk, "the residual starts where K is no longer packed"
    packed_v = n_qv // layout.PAGE_TOKENS
    want = [("page", i) for i in range(packed_v)]
    want += [("third", i, tile) for i in range(packed_v, n_qk // layout.PAGE_TOKENS) for tile in range(8)]
    want += [("sink", i) for i in range(n_sink)] + [("residual", i) for i in range(residual)]
    assert sorted(visited) == sorted(want)
    of_splits = [sum(pages[first : first + warps]) for first in range(0, len(pages), warps)]
    assert max(of_splits) - min(of_splits) <= 1
    counts = [dealt[split, warp] for warp in range(warps) for split in reversed(range(num_splits))]
    assert sorted(counts) == counts and counts[-1] - counts[0] <= 1, "not shared out evenly, late warps first"


@pytest.mark.usefixtures("numpy_walk")
@pytest.mark.parametrize("n_sink, n_qk, residual", [(0, 0, 0), (4, 0, 1), (3, 0, 40), (0, 128, 16), (130, 1280, 255),
                                                    (0, 640, 128), (128, 384, 17), (32, 4096, 129)])
@pytest.mark.parametrize("third_pages", (0, 2, 9))
@pytest.mark.parametrize("q_len, window", [(1, 1), (1, 128), (1, 300), (5, 200), (16, 1000), (4, 2**30), (16, 1)])
def test_window_leaves_out_the_pages_that_no_query_sees(n_sink, n_qk, residual, third_pages, q_len, window):
    n_tok, pages = n_sink + n_qk + residual, n_qk // layout.PAGE_TOKENS
    packed_v = max(0, pages - third_pages)
    lowest = n_tok - q_len - window + 1  # position that query 0 sees first
    want = [p for p in range(pages) if n_sink + layout.PAGE_TOKENS * (p + 1) > lowest]
    for num_splits, warps in ((1, 8), (3, 4), (7, 2), (40, 8)):
        visited = []
        for split, warp in itertools.product(range(num_splits), range(warps)):
            w = page_loop.plan_walk(n_sink, n_qk, packed_v * layout.PAGE_TOKENS, n_tok, n_qk, q_len, window, split,
                                    num_splits, warp, warps, warps)
            w = page_loop.Walk(*(value(x) for x in w))
            assert w.first_seen == lowest - n_sink
            packed = [w.first_page + i * page_loop.pages_apart(num_splits, warps) for i in range(w.num_pages)]
            units = mixed_units(w, warps * num_splits)
            assert all(p < packed_v for p in packed) and all(p >= packed_v for p, _ in units)
            visited += [(p, tile) for p in packed for tile in range(8)] + units
        assert sorted(visited) == [(p, tile) for p in want for tile in range(8)]


@pytest.mark.parametrize("n_sink, n_qk, residual", [(0, 0, 1), (4, 0, 0), (3, 0, 40), (0, 128, 16), (130, 1280, 255),
                                                    (33, 384, 17)])
@pytest.mark.parametrize("q_len, window, sink_window", [(1, None, None), (5, None, None), (1, 40, 2**30), (5, 1, 600),
                                                        (16, 1000, 2**30), (16, 20, 30), (4, 2**30, 2**30)])
def test_each_query_sees_its_tokens(n_sink, n_qk, residual, q_len, window, sink_window):
    features = () if window is None else ("window",)
    cfg = make_config("register", FORMATS["k4v4"], 128, "float16", 8, features=features)
    limits, n_tok, warps, splits = softmax.Limits(None, None, window, sink_window), n_sink + n_qk + residual, 4, 2
    seen = {j: [] for j in range(q_len)}
    for split, warp in itertools.product(range(splits), range(warps)):
        w = page_loop.plan_walk(n_sink, n_qk, n_qk, n_tok, n_qk, q_len, window, split, splits, warp, warps, warps)
        w = page_loop.Walk(*(value(x) for x in w))
        for i in range(w.first_unit, w.num_units, warps * splits):
            unit = page_loop.Unit(*(value(x) for x in page_loop.unit(w, i, q_len)))
            start = unit.start + (0 if unit.is_sink else n_sink + n_qk)
            for j, token in itertools.product(range(q_len), range(config.UNIT_TOKENS)):
                if is_seen(cfg, w, unit, j, token, limits):
                    seen[j].append(start + token)
    for j, positions in seen.items():
        high = n_tok - q_len + j
        low, sink_low = (high - (2**40 if x is None else x) + 1 for x in (window, sink_window))
        want = [p for p in range(n_sink) if sink_low <= p <= high]
        want += [p for p in range(n_sink + n_qk, n_tok) if low <= p <= high]
        assert sorted(positions) == want


class UnitBarrier:
    """ring.unit_full: a fill must meet an idle barrier, a wait a barrier that has completed the phase it names."""

    def __init__(self):
        self.fills = 0

    def fill(self):
        self.fills += 1

    def wait(self, phase: int):
        assert (self.fills - 1) % 2 == phase, "the wait would not pass, or would pass a phase too early"


WINDOWED = [("k4v4", 128, 192), ("k2v2", 64, 128), ("k8v8", 128, 448), ("k1v1", 64, 320), ("k4tv4", 128, 384),
            ("k2v2", 96, 192), ("k8v4", 256, 256), ("k1v1", 256, 192), ("kitty", 128, 256), ("kitty-b128", 128, 256)]


@pytest.mark.parametrize("name, head_dim, slots_v", WINDOWED)
@pytest.mark.parametrize("rows", (8, 16))
def test_values_beside_packed_keys_come_once_and_from_their_slots(name, head_dim, slots_v, rows):
    fmt = dataclasses.replace(FORMATS[name], window_v=128)
    cfg = make_config("register", fmt, head_dim, "float16", min(rows, fp16.MAX_ROWS.get(head_dim, 16)))
    assert cfg.has_mixed and cfg.mixed_row * cfg.row_pitch >= cfg.k.nbytes
    assert (cfg.mixed_row + config.UNIT_TOKENS) * cfg.row_pitch <= cfg.warp_bytes
    found, pages, start = [], 3, 5 * layout.PAGE_TOKENS
    for warp in range(cfg.warps):
        barrier, phase = UnitBarrier(), 0
        w = page_loop.plan_walk(0, start + pages * 128, start, *2 * (start + pages * 128,), 1, None, 0, 1, warp,
                                cfg.warps, cfg.page_warps)
        w = page_loop.Walk(*(value(x) for x in w))
        for i in range(w.first_mixed, w.num_mixed, cfg.warps):
            first_token = w.mixed_page * layout.PAGE_TOKENS + i * config.UNIT_TOKENS
            page, tile = mixed.unit_place(i)
            assert first_token == (w.mixed_page + page) * layout.PAGE_TOKENS + tile * layout.TILE
            for lane in range(config.UNIT_TOKENS):
                found.append(first_token + lane)
                assert value(mixed.value_row(first_token, slots_v, lane)) == found[-1] % slots_v
            barrier.fill()
            barrier.wait(phase)
            phase ^= 1
        assert barrier.fills % 2 == phase, "the first 16-bit unit waits for the parity that is handed on"
    assert sorted(found) == list(range(start, start + pages * 128))
