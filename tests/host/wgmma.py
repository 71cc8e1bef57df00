"""Configurations of Hopper's tile path, and its tiles in shared memory read back by WGMMA's canonical layout."""

import numpy as np

from lowbit_attn.formats import FORMATS
from lowbit_attn.hopper.tile import config

FORMAT = FORMATS["k4v4"]
HEAD_DIMS = (64, 96, 128, 256)
ROWS = (8, 64)  # as WGMMA's columns, as its rows
CONFIGS = {(d, rows): config.make_config(FORMAT, d, "float16", rows) for d in HEAD_DIMS for rows in ROWS}
LANES = np.arange(32)


def read_wgmma_tile(tile: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """K-major operand, 128-byte swizzle (address bits 4-6 XOR 7-9) or 64-byte swizzle (bits 4-5 XOR 7-8).

    rows: of the whole tile."""
    row, col = np.meshgrid(np.arange(rows), np.arange(cols), indexing="ij")
    span = 64 if cols % 64 == 0 else 32
    return tile[swizzle((col // span) * rows * 2 * span + row * 2 * span + (col % span) * 2, span) // 2]


def swizzle(address, span):
    return address ^ ((address >> 3) & (0x70 if span == 64 else 0x30))
