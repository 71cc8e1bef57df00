"""docs/leankv.md: its lengths follow from the sizes of caches, its record map from the format."""

import re
from pathlib import Path

from lowbit_attn import FORMATS, KVCache
from lowbit_attn.levels import LevelCache
from lowbit_attn.levels.frames import FramePool

TEXT = (Path(__file__).resolve().parents[2] / "docs/leankv.md").read_text()
HEAD_DIM, SHARE, STEP = 128, 0.25, 512


def buffers(cache, names: str) -> int:
    """Bytes of a cache's 16-bit tensors."""
    return sum(getattr(cache, name).nbytes for name in names.split())


def level_bytes(name: str):
    """Bytes of one head by length: whole buffers, pages of all tokens that left the window, nothing pruned."""
    try:
        pool = FramePool(name, head_dim=HEAD_DIM, frames=1)
    except ValueError:
        pool = FramePool(name, head_dim=HEAD_DIM, frames=(1, 1))
    cache = LevelCache(pool, 1, max_seqlen=1000)
    fixed = buffers(cache, "hi_k hi_v lo_k lo_v ring_k ring_v")
    assert fixed == 245_760
    high, low = pool.frame_bytes[0], pool.frame_bytes[-1] / pool.per_low
    return lambda n: fixed + max(0, n - 32 - 56) // 128 * (SHARE * high + (1 - SHARE) * low)


def uniform_bytes(name: str):
    cache = KVCache(name, 1, 1, HEAD_DIM, sinks=32)
    fixed = buffers(cache, "sink_k sink_v ring_k ring_v")
    return lambda n: fixed + max(0, n - 32 - cache.window_v) // 128 * cache.record.nbytes


def test_levels_pay_from_the_lengths_that_stand_there():
    table = re.search(r"crossings: begin.*?-->\n(.*?)<!-- crossings: end", TEXT, re.DOTALL)[1].splitlines()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table]
    uniform = rows[0][1:]
    assert len(rows) == 6 and len(uniform) == 4
    for name, *cells in rows[2:]:
        mine = level_bytes(name)
        for other, cell in zip(uniform, cells):
            theirs = uniform_bytes(other)
            found = next((n for n in range(STEP, 1 << 18, STEP) if mine(n) < theirs(n)), None)
            assert cell == (f"{found:,}" if found else "never"), (name, other)


def test_the_record_map_is_the_formats():
    record = FORMATS["k4v2-boost"].record(HEAD_DIM)
    rows = re.findall(r"^ {4} *([\d,]+)  (\w+) (\w+) +([\d,]+) B|^ {4}([\d,]+)  (positions) () +(\d+) B", TEXT, re.M)
    shown = [tuple(int(x.replace(",", "")) for x in (row[0] or row[4], row[3] or row[7])) for row in rows]
    assert shown == [(plane.offset, plane.nbytes) for plane in (*record.k_planes, *record.v_planes)]
    assert f"{record.nbytes:,} bytes" in TEXT


def test_presets_are_described():
    from lowbit_attn.formats import boosted_values, levels

    assert all(f"`{name}`" in TEXT for name in levels.PRESETS)
    assert boosted_values.GRAMMAR.replace(", a multiple of 16", "") in TEXT and levels.GRAMMAR in TEXT
