"""Boosted values (formats/boosted_values.py) on raw codes: the first tokens of a page have codes of more bits.

O carries the powers 2^(k - 24) that the others' codes stand at, in accumulators that last over pages. So the codes of
the first tokens are brought to these powers, which is exact. Centring takes N/2 (ps)~ of the others' N from O: the
weight N'/N of a first token's (ps)~ makes that N'/2.
"""

import struct

from cutlass import Uint32

from lowbit_attn.device import ptx
from lowbit_attn.hopper.arith.fp16 import operands
from lowbit_attn.hopper.warp.config import SidePlan

TWICE = 0x0001_0001  # a half in both halves of a word


def half(x: float) -> int:
    """The bits of an fp16 number, in both halves of a word."""
    return struct.unpack("<H", struct.pack("<e", x))[0] * TWICE


def weight(side: SidePlan, run: SidePlan) -> int:
    """What a run's (ps)~ count in the sums by which O is centred, in both halves of a word: a whole number."""
    return half(run.steps / side.steps)


def operand(side: SidePlan, run: SidePlan, words: dict[int, Uint32], col_tile: int, row_tile: int) -> list[Uint32]:
    """The four A registers of a tile of a run's column tile, at the powers of O's rows."""
    found = operands.codes_operand(run, words, col_tile * side.row_tiles + row_tile)
    ups = [side.power(row_tile, row8) - run.power(row_tile, row8) for row8 in (0, 1, 0, 1)]
    return [ptx.fma_f16x2_const(x, half(2.0**up), 0) if up else x for x, up in zip(found, ups)]
