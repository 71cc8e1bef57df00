"""Bookkeeping of the register path, as data: which bits of a word are which operand registers, and its exponents.

The register path multiplies raw codes: a masked b-bit code at bit k of a half is the fp16 subnormal code * 2^(k - 24),
exact, and tensor cores take subnormals at full speed. Scale and zero-point leave the inner loop too: the exponents
below keep every operand in fp16's range. What the integer path shares is in registers.py.
"""

from dataclasses import dataclass
from functools import cache

from lowbit_attn import layout

SUBNORMAL_SHIFT = 24  # an fp16 subnormal with integer bits c has the value c * 2^-24
HALF_BITS = 11  # a code at bit k needs k + bits <= 11: subnormals and the first normals are equally spaced
QUERY_SHIFT = 13  # operand fp16_rn(q (s 2^e_s) 2^(e_q + 13)): |q| 2^e_q < 2, s 2^e_s <= 1, so at most 2^14
QUERY_OWN_SHIFT = 11  # of the 13, in q' = fp16_rn(q 2^(e_q + 11)): a q 2^-20 below its row's largest stays normal
SCALE_SHIFT = QUERY_SHIFT - QUERY_OWN_SHIFT  # the rest, in s 2^(e_s + 2): a normal fp32 power for every bf16 scale
PROBABILITY_SHIFT = 15  # operand fp16_rn(p (s 2^E) 2^15): p <= 1, s 2^E <= 1, so at most 2^15
ZERO_SHIFT = 15  # bf16 zero-points enter the bias multiply as fp16(m 2^e_m), e_m = 15 - ceil(log2 max |m|)
CENTRE_SHIFT = 15  # bf16 scales enter the centring row as fp16(s 2^(e_s + 15)), to stay normal too; fp16 ones as stored
MIN_QUERY_LOG2 = -100  # max |q| is clamped at 2^-100 before its exponent is taken; a row of zeros has e_q = 0
RECENTRED_PAGES = 8  # pages of a warp whose codes add up in O before N/2 of their weights is taken from it


@dataclass(frozen=True)
class Unpack:
    """One AND: ``(word >> shift) & mask`` is operand register ``register`` of row tile ``tile`` of the word.

    register: index into the A operand of m16n8k16: row8 + 2 * col8. The value is code * 2^(power - 24).
    """

    shift: int  # 0 or 8
    mask: int  # both halves
    tile: int  # row tile within the word, 0 .. tiles_per_word - 1
    register: int
    power: int


@cache
def unpack_steps(bits: int) -> tuple[Unpack, ...]:
    """All ANDs of one word, in slot order; 8 bits: of one row8 half of a tile, whose word is 2*tile + row8.

    For 8 bits the register is that of row8 = 0; the word of row8 = 1 gives register + 1.
    """
    steps = []
    for col8 in (0, 1):
        for slot in range(layout.slots_per_byte(bits)):
            power = bits * slot
            assert power + bits <= HALF_BITS
            mask = (((1 << bits) - 1) << power) * 0x00010001
            steps.append(Unpack(8 * col8, mask, slot // 2, slot % 2 + 2 * col8, power))
    return tuple(steps)


def bias_row_group(row, groups: int):
    """Token group whose metadata stand in row ``row`` of the bias multiply's A operand (16 rows).

    Row i holds group i mod groups, so with one group every lane's accumulator has its bias. Rows 0..7 hold zero-points
    (accumulator elements 0 and 1: the bias); rows 8..15 hold scales (elements 2 and 3: sum q' s,
    for the centring).
    """
    return row % groups


def bias_lane(group, lane, groups: int):
    """Lane that holds, in its accumulator elements 0 and 1, the bias of a token group for the columns of ``lane``.

    With one group a lane holds its own; else group j's bias for columns 2t, 2t + 1 sits in lane 4*j + t.
    """
    return lane if groups == 1 else 4 * group + lane % 4
