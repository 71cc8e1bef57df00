"""Instruction counts predicted from arithmetic, to hold against the disassembly (SASS) of a built kernel.

EXPECTED[head_dim] counts one warp's work on one packed page. The page's code is straight-line and appears once in the
SASS, so static counts are these plus what stands outside the page loop (``expected_static``): the copies of the first
``slots`` parts, one tile of 16-bit tokens, and the merge. Integer instructions of addresses, masks and guards are not
predicted: LOP3 comes out up to half as much again.
"""

from lowbit_attn import layout
from lowbit_attn.ampere import dequant
from lowbit_attn.ampere.config import ACCESS_BYTES, LANES, TILE, DecodeConfig

META_LOADS = 2  # 16-byte loads that bring scales and zero-points of 32 columns


def per_page(head_dim: int, bits: int) -> dict[str, int]:
    """Counts of one packed page and warp: K and V of 4 or 8 bits, one group of metadata each."""
    tiles = 2 * (layout.PAGE_TOKENS // TILE) * (head_dim // TILE)  # 16x16 tiles of K and of V^T
    code_loads = 2 * layout.plane_bytes(layout.PAGE_TOKENS, head_dim, bits) // (LANES * ACCESS_BYTES)
    meta_loads = META_LOADS * (head_dim + layout.PAGE_TOKENS) // (2 * TILE)
    codes = layout.plane_bytes(layout.PAGE_TOKENS, head_dim, bits)
    side_bytes = (codes + 2 * layout.META_BYTES * n for n in (head_dim, layout.PAGE_TOKENS))
    copies = (-(-layout.align_record(n) // (LANES * ACCESS_BYTES)) for n in side_bytes)
    lowest = sum(dequant.register_source(0, 0, r, layout.PAGE_TOKENS, bits)[1].exponent == 0 for r in range(4))
    return {
        "HMMA": tiles,
        "LDS": code_loads + meta_loads,
        "LOP3": 4 * tiles,  # x & mask | magic, once a register
        "HADD2": lowest * tiles,  # registers whose codes sit in the lowest slot: 1024 + code needs only a subtraction
        "HFMA2": (8 - lowest) * tiles,  # the other integers, and scale and zero-point of all
        "LDGSTS": sum(copies),
        "MOVM": 2 * layout.PAGE_TOKENS // TILE,
    }


EXPECTED = {head_dim: per_page(head_dim, 4) for head_dim in (64, 128)}


def expected_static(config: DecodeConfig) -> dict[str, int]:
    """Static counts of a kernel's SASS."""
    page = EXPECTED[config.head_dim]
    tiles = config.tile16_tokens // TILE
    fragments = 2 * tiles * (config.head_dim // TILE)  # of K and V of one 16-bit tile
    part_copies = [-(-piece.accesses // LANES) for piece in config.pieces]
    token_copies = 2 * 2 * config.tile16_tokens * config.row_accesses // LANES  # sinks and residual, K and V
    return page | {
        "HMMA": page["HMMA"] + fragments,
        "LDSM": fragments,
        "LDS": page["LDS"] + 3 * config.warps,  # merge: maximum, sum, one channel of each warp
        "LDGSTS": page["LDGSTS"] + sum(part_copies[part % 2] for part in range(config.slots)) + token_copies,
        "MOVM": page["MOVM"] + 2 * tiles,
    }
