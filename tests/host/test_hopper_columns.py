"""The tile path with query rows as WGMMA's columns, without a GPU: where its lanes find and leave what."""

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe-DSL (nvidia-cutlass-dsl) is not installed")

from host.wgmma import CONFIGS, HEAD_DIMS, LANES, ROWS, read_wgmma_tile  # noqa: E402
from lowbit_attn.device import numbers  # noqa: E402
from lowbit_attn.hopper.tile import columns, masks, softmax  # noqa: E402
from lowbit_attn.hopper.tile.config import COLUMNS, GROUP_WARPS, TILE_M, TILE_N  # noqa: E402

CONFIG = CONFIGS[128, COLUMNS]


def lanes_of_group() -> list[masks.MmaThread]:
    return [masks.MmaThread(32 * warp + lane, warp, lane // 4, lane % 4)
            for warp in range(GROUP_WARPS) for lane in LANES]


@pytest.mark.parametrize("rows", ROWS)
def test_a_group_holds_every_score_once(rows):
    """Accumulators as the PTX manual has them: S has query rows as rows, S^T as columns."""
    cfg, seen = CONFIGS[128, rows], np.zeros((rows, TILE_N), int)
    for me in lanes_of_group():
        found = {}
        for line in masks.lines(cfg, me):
            for i, offset in line.values:
                seen[line.row, line.first + offset] += 1
                found[i] = line.row, line.first + offset
        for i, at in found.items():
            row = 16 * me.warp + me.g + 8 * (i // 2 % 2)
            if rows == COLUMNS:  # two blocks of 64 tokens
                assert at == (2 * me.t + i % 2, TILE_M * (i // 4) + row)
            else:
                assert at == (row, 8 * (i // 4) + 2 * me.t + i % 2)
    assert (seen == 1).all()


def test_weights_are_what_wgmma_reads():
    """stmatrix.trans: lane 8m + r addresses column r of matrix m, of which lane (g, t) holds columns 2t, 2t + 1."""
    rng = np.random.default_rng(0)
    p = rng.standard_normal((COLUMNS, TILE_N)).astype(np.float16)
    tile = np.full(COLUMNS * TILE_N, np.nan, np.float16)
    for warp in range(GROUP_WARPS):
        chunks = columns.weights_chunk(CONFIG, warp, LANES, 0)
        at = {m: softmax.column_values(TILE_N // TILE_M, COLUMNS, 0)[m][1:] for m in range(4)}
        for m, (block, half) in at.items():
            matrix = np.empty((8, 8), np.float16)
            for lane in LANES:
                g, t = lane // 4, lane % 4
                for e in range(2):
                    token = TILE_M * block + 16 * warp + 8 * half + g
                    matrix[g, 2 * t + e] = p[int(softmax.column(e, t)), token]
            for r in range(8):
                tile[8 * chunks[8 * m + r] : 8 * chunks[8 * m + r] + 8] = matrix[:, r]
    assert np.array_equal(read_wgmma_tile(tile, COLUMNS, TILE_N), p)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_sums_of_a_group_fit_its_tiles(head_dim):
    cfg = CONFIGS[head_dim, COLUMNS]
    pitch = cfg.v.tile_rows + columns.PAD
    assert pitch % 4 == 0  # 16-byte chunks
    assert 4 * (COLUMNS * pitch) <= cfg.k.tile_bytes and 4 * COLUMNS * (GROUP_WARPS + 1) <= cfg.v.tile_bytes
    channels = set()
    for me in lanes_of_group():
        for i, block, half in softmax.column_values(cfg.v.tile_rows // TILE_M, COLUMNS, 0):
            channels.add(TILE_M * block + 16 * me.warp + 8 * half + me.g)
    assert channels == set(range(cfg.v.tile_rows)) and head_dim <= cfg.v.tile_rows
    for half in range(2):  # one store of a warp: 32 banks
        banks = {(8 * half + lane // 4 + pitch * (2 * (lane % 4))) % 32 for lane in map(int, LANES)}
        assert len(banks) == 32


def raised(logits: np.ndarray) -> tuple[float, float, float]:
    """One row's logits tile by tile as the kernel has them: (weighted sum of positions, sum, largest weight)."""
    top, total, acc, most = np.float32(numbers.LOWEST), 0.0, 0.0, 0.0
    for first in range(0, len(logits), TILE_N):
        tile = logits[first : first + TILE_N]
        if tile.max() > top + columns.SLACK:
            new = max(top, tile.max())
            shrink = np.exp2(np.float64(top) - new)
            top, total, acc = new, total * shrink, acc * shrink
        weights = np.exp2(tile.astype(np.float64) - top)
        most = max(most, weights.max())
        total, acc = total + weights.sum(), acc + (weights * np.arange(first, first + len(tile))).sum()
    return acc, total, most


@pytest.mark.parametrize("slope", (0.0, 0.02, 0.3, -0.3, 4.0))
def test_maxima_that_lag_are_a_softmax(slope):
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal(1024) * 5 + slope * np.arange(1024)).astype(np.float32)
    logits[:TILE_N] = -np.inf  # a window's first tile
    acc, total, most = raised(logits)
    want = np.exp2(logits.astype(np.float64) - logits.max())
    assert most <= 2**columns.SLACK < 2**16
    np.testing.assert_allclose(acc / total, (want * np.arange(1024)).sum() / want.sum(), rtol=1e-9)
