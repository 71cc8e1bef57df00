"""perf/level_manage.py: its caches are at rest, score, or lose a block of every row; putting back is exact."""

import pytest
import torch
from perf_scripts import script

from unit.level_caches import check_equal, state


@pytest.fixture(scope="module")
def measured():
    with script("level_manage") as module:
        yield module


@pytest.mark.parametrize("kind", ("rest", "score", "flush"))
def test_a_step_is_of_its_kind_and_can_be_taken_back(measured, kind):
    case = measured.LevelCase("lean-low", 25, 2, 8, 4, 2048, 0.01, head_dim=64)
    cache = measured.prepared(case, kind, "cpu")
    restore, before = measured.restorer(cache), state(cache)
    cache.manage(torch.randn(2, 1, 8, 64).half(), torch.full((2, 8, 1), 5.0))
    assert torch.equal(cache.seen, before["seen"]) == (kind == "rest")
    assert (cache.n_out - before["n_out"]).tolist() == [128 * (kind == "flush")] * 2 and not cache.starved.any()
    restore()
    changed = {"score", "seen", "order", "new", "n_drop", "memory0", "memory1", "lo_k", "lo_v", "hi_k", "hi_v"}
    check_equal(*({name: x for name, x in one.items() if name not in changed} for one in (state(cache), before)))


def test_means_and_shares(measured):
    us = {"rest": 1.0, "score": 9.0, "flush": 129.0}
    assert measured.mean_us(us) == pytest.approx(1 + 8 * 15 / 128 + 128 / 128)
    assert measured.share(1.0, 99.0, 3200.0) == pytest.approx(0.005)
    assert [(case.levels, case.batch, case.seqlen) for case in measured.CASES] == [
        ("lean", 64, 4096), ("lean", 8, 32768), ("lean-low", 64, 4096), ("lean-low", 8, 32768)]
