"""Stream-K's schedule of the Hopper integer path without a GPU: every page and unit once, evenly; shared memory."""

import itertools
import random

import pytest
import torch
from gpu import matrix

from lowbit_attn import kernels, layout
from lowbit_attn.formats import FORMATS

pytest.importorskip("cutlass", reason="CuTe-DSL (nvidia-cutlass-dsl) is not installed")

from lowbit_attn.hopper import decode  # noqa: E402
from lowbit_attn.hopper.common import tuning  # noqa: E402
from lowbit_attn.hopper.config import make_config  # noqa: E402
from lowbit_attn.hopper.schedule import items, stream  # noqa: E402
from lowbit_attn.hopper.warp import mixed, page_loop, plan  # noqa: E402

COUNTS = [(0, 0, 0, 0), (4, 0, 0, 3), (0, 128, 0, 0), (130, 1280, 2, 255), (0, 640, 5, 128), (32, 4096, 1, 129)]
pytestmark = pytest.mark.usefixtures("numpy_walk", "windowed_formats")


def tokens(n_sink: int, n_qk: int, third_pages: int, residual: int) -> tuple[int, int, int, int]:
    """n_sink, n_qk, n_qv, n_tok."""
    return n_sink, n_qk, n_qk - third_pages * layout.PAGE_TOKENS, n_sink + n_qk + residual


@pytest.mark.parametrize("counts", COUNTS)
def test_pieces_of_an_item_visit_every_token_once(counts):
    n_sink, n_qk, n_qv, n_tok = tokens(*counts)
    size, draw = int(items.work_item(n_sink, n_qk, n_qv, n_tok, n_qk).positions), random.Random(0)
    for pieces in (1, 2, 5, size):
        cuts = sorted({0, size, *(draw.randrange(size) for _ in range(pieces - 1))})
        visited, left = [], 0
        for first, end in itertools.pairwise(cuts):
            w = page_loop.Walk(*map(int, items.walk_of(n_sink, n_qk, n_qv, n_tok, n_qk, first, end - first)))
            visited += [("page", w.first_page + i) for i in range(w.num_pages)]
            visited += [("third", w.mixed_page + page, tile) for page, tile in (
                mixed.unit_place(i) for i in range(w.first_mixed, w.num_mixed))]
            for i in range(w.first_unit, w.num_units):
                start, live, is_sink, _ = map(int, page_loop.unit(w, i, 1))
                visited += [("sink" if is_sink else "residual", start + j) for j in range(live)]
            left += w.num_pages + len(range(w.first_mixed, w.num_mixed)) + len(range(w.first_unit, w.num_units))
        want = [("page", i) for i in range(n_qv // layout.PAGE_TOKENS)]
        want += [("third", i, tile) for i in range(n_qv // layout.PAGE_TOKENS, n_qk // layout.PAGE_TOKENS)
                 for tile in range(8)]
        want += [("sink", i) for i in range(n_sink)] + [("residual", i) for i in range(n_tok - n_sink - n_qk)]
        assert visited == want and max(1, left) == size, "in another order, or a position without a page or a unit"


@pytest.mark.parametrize("total, parts", [(0, 3), (1, 5), (5, 5), (17, 5), (131, 132), (100_000, 132)])
def test_shares_are_even_and_in_order(total, parts):
    shares = [tuple(map(int, items.share(total, parts, i))) for i in range(parts)]
    assert [x for first, count in shares for x in range(first, first + count)] == list(range(total))
    assert max(count for _, count in shares) - min(count for _, count in shares) <= 1
    for part, (first, count) in enumerate(shares):
        for thing in {first, first + count - 1} if count else ():
            assert int(items.part_of(total, parts, thing)) == part


def test_the_next_item():
    cursor = items.Cursor(3, 4, 7, 20, 100, 1000, 1, 9)
    assert items.after(cursor, 5, 6) == items.Cursor(3, 5, 0, 15, 105, 1000, 1, 14)
    assert items.after(cursor, 20, 5) == items.Cursor(4, 0, 0, 0, 120, 1000, 1, 29)


@pytest.mark.parametrize("kernel", matrix.STREAM, ids=str)
def test_shared_memory_plan(kernel, monkeypatch):
    """Each warp has queries and the sums of two items beside its ring, which units reuse."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    cfg = make_config("stream", FORMATS[kernel.format], kernel.head_dim, kernel.dtype, 4)
    assert stream.StreamSm90(cfg).storage().size_in_bytes() == cfg.smem_bytes <= plan.SMEM_LIMIT
    assert cfg.slots >= tuning.MIN_SLOTS and 4 <= cfg.warps <= tuning.MANY_WARPS
    assert cfg.warp_bytes >= plan.reuse_bytes(cfg) >= cfg.unit_bytes
    assert 2 * cfg.warps < 32, "parts are numbered by the lanes of a warp"
    assert cfg.rows * cfg.head_dim // 4 % 32 == 0, "a warp's lanes add up parts of one item"
    key, = kernel.keys("hopper", "stream")
    assert kernels.ctas_per_sm(key) == 1 and kernels.trace(key).entry.cfg == cfg


def test_what_the_path_does_not_serve():
    for head_dim, features, message in ((256, (), "head_dim 256, supported: 64, 96, 128"),
                                        (128, ("window",), "window")):
        picked, reasons = kernels.pick("hopper", FORMATS["k4v4"], head_dim, torch.float16, 4, "stream", features)
        assert picked is None and message in reasons[0]
    assert "stream" not in {kernels.pick("hopper", FORMATS["k4v4"], 128, torch.float16, rows)[0][0]
                            for rows in range(1, 20)}
    assert decode.PATHS["stream"].rows == (4,)
