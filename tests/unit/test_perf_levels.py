"""perf/levels.py: its caches hold what decode may read, and its bytes are theirs."""

import pytest
import torch
from perf_scripts import script

from lowbit_attn import decode


@pytest.fixture(scope="module")
def measured():
    with script("levels") as module:
        yield module


@pytest.mark.parametrize("levels", ("lean", "k4v4+k2v2", "lean-low"))
@pytest.mark.parametrize("ragged", (False, True))
def test_every_page_has_memory_of_its_own(measured, levels, ragged):
    case = measured.LevelCase(levels, 25, 2, 8, 4, 2048, 1.0, ragged=ragged, head_dim=64)
    cache = measured.make_cache(case, "cpu")
    ends = []
    for level in (0, 1):
        held = [unit for row, count in zip(cache.table[level].tolist(), (cache.c_pack[level] // 128).tolist())
                for unit in row[:count]]
        assert min(held) >= 0 and len(held) == sum(counts[level] for counts in case.pages)
        size = cache.pool.record_bytes[level] // 128
        ends += [(cache.pool.sizes[level], unit, unit + size) for unit in held]
    ends.sort()
    assert all(one[0] != two[0] or one[2] <= two[1] for one, two in zip(ends, ends[1:]))
    o, lse = decode(torch.randn(2, 1, 8, 64).half(), cache)
    assert torch.isfinite(o).all() and torch.isfinite(lse).all()
    beside = 8 * (2 * measured.STAGED + measured.SINKS + measured.RECENT) * 4 * 64
    pages = sum(int(n) // 128 * size for row, size in zip(cache.c_pack, cache.pool.record_bytes) for n in row)
    assert measured.call_bytes(case, cache) == pages + beside + 2 * 2 * 8 * 64 * 2
    lengths = [sum(counts) for counts in case.pages[:4]]
    assert max(lengths) / min(lengths) > 3 if ragged else len(set(lengths)) == 1


def test_cases_are_those_of_the_targets(measured):
    assert [(case.batch, case.num_heads_kv, case.seqlen, case.target) for case in measured.CASES] == [
        (1, 8, 131072, 1.35), (8, 8, 32768, 1.2), (8, 8, 32768, 1.2), (64, 8, 4096, 1.25), (1, 32, 131072, 1.1),
        (8, 8, 32768, 1.25)]
