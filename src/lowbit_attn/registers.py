"""Bookkeeping of operands, as data: powers of two of their rows, which lane has what, and the integer path's numbers.

The unpacking of a word is one AND an operand register, and what is left over, a power of two, depends only on the slot,
that is on the *row* of the matrix: it leaves the inner loop with the accumulator's post-scale. Everything here is
Python ints; kernels, the emulation and the tests read the same tables. subnormals.py has the register path's.
"""

from lowbit_attn import layout

LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453  # softmax by exp2 and log2
WIDE_HEAD_DIM = 128  # above it the accumulators of a query row take so many registers that fewer rows fit
MIN_SCALE_LOG2 = -40  # maxima of scales and |zero-points| are clamped at 2^-40 before their exponent is taken
MAX_VALUE_EXPONENT = -MIN_SCALE_LOG2  # E of a warp that has seen no page: the largest e_v, so min() needs no first case
FP32_BIAS, FP32_MANTISSA_BITS = 127, 23
CHUNK = 8  # 16-bit values in 16 bytes: a row of an 8x8 matrix of ldmatrix and stmatrix, the unit of the swizzles

# The integer path multiplies raw masked bytes, m16n8k32 with u8 codes: value = code * 2^k. The other operand is a
# 16-bit fixed-point number X in two 8-bit digits, X = 256 high + low, each with a column of its own. The s32 sums start
# at the bits of an fp32 number whose ulp is 1, so that as fp32 they are start + sum.
DIGIT_BASE = 256
BYTE_STEP = 32  # k of one multiply: two column tiles
SIGNED_START_BITS, SIGNED_START = 0x4B40_0000, 1.5 * 2.0**23  # -2^22 <= sum < 2^22: q s, digits of -128 .. 127
UNSIGNED_START_BITS, UNSIGNED_START = 0x4B00_0000, 2.0**23  # 0 <= sum < 2^23: p s, digits of 0 .. 255
SIGNED_LIMIT, UNSIGNED_LIMIT = 2**22, 2**23  # of those sums
UNSIGNED_COLUMNS = 128  # tokens of a page: 128 * 255 * 255 fits
HALF_DIGIT = 128  # added to X for its high digit to round to nearest; the low byte then is low + 128
SIGNED_TOP, SIGNED_GUARD = 14, 1 + 2.0**-7  # X = rn(x 2^a), a = 14 - floor(log2(guard max |x|)): |X| <= 32,514
UNSIGNED_TOP, UNSIGNED_GUARD = 15, 1 + 2.0**-15  # a = 15 - floor(log2(guard max x)): X <= 65,534
MIN_FIXED_POINT = 2.0**-100  # maxima are clamped here before their exponent is taken


def floor_log2(bits):
    """floor(log2 x) of a positive normal fp32 x given as its bits."""
    return (bits >> FP32_MANTISSA_BITS) - FP32_BIAS


def ceil_log2(bits):
    """ceil(log2 x) of a positive normal fp32 x given as its bits."""
    return ((bits + ((1 << FP32_MANTISSA_BITS) - 1)) >> FP32_MANTISSA_BITS) - FP32_BIAS


def pow2_bits(exponent):
    """Bits of the fp32 2^exponent; exponent in -126..127, which the clamps above guarantee but for S's post-scale."""
    return (exponent + FP32_BIAS) << FP32_MANTISSA_BITS


def row_power(row, bits: int):
    """k of a row of the code matrix: the codes of this row enter the multiply as code * 2^(k - 24)."""
    if bits == 8:
        return 0 * row
    return bits * ((row % layout.TILE) // 8 + 2 * ((row // layout.TILE) % layout.tiles_per_word(bits)))


def byte_mask(row, bits: int):
    """Mask of the codes of a row of the code matrix in their word: the four bytes of an A register of m16n8k32."""
    return (((1 << bits) - 1) << row_power(row, bits)) * 0x01010101


def largest_byte(bits: int) -> int:
    """The largest masked byte: the largest code at the highest bits."""
    return 256 - (1 << (8 - bits))


def signed_runs(steps: int, bits: int) -> list[range]:
    """``steps`` multiplies of BYTE_STEP columns of K in the fewest runs whose sums stay within SIGNED_LIMIT, of about
    equal length: the accumulators restart with each."""
    most = (SIGNED_LIMIT - 1) // (largest_byte(bits) * HALF_DIGIT * BYTE_STEP)
    run = -(-steps // -(-steps // most))
    return [range(first, min(first + run, steps)) for first in range(0, steps, run)]


def byte_column(byte):
    """Column within a 16x16 tile, less 2t, of a byte of a word: the order of the digits in the B operand."""
    return 8 * (byte % 2) + byte // 2


def accumulator_row(lane, index):
    """Row within a 16x8 fp32 accumulator tile of element ``index`` (0..3) that a lane holds."""
    return lane // 4 + 8 * (index // 2)


def accumulator_col(lane, index):
    """Column (query row) within a 16x8 fp32 accumulator tile of element ``index`` (0..3) that a lane holds."""
    return 2 * (lane % 4) + index % 2


def matrix_place(matrix):
    """(row8, col8) within a 16x16 tile of the 8x8 matrix that register ``matrix`` of ldmatrix or stmatrix .x4 holds."""
    return matrix % 2, matrix // 2


def lane_place(lane):
    """(row within a 16x16 tile, col8) of the 16 bytes, one row of an 8x8 matrix, that ``lane`` addresses in such an
    access."""
    row8, col8 = matrix_place(lane // 8)
    return 8 * row8 + lane % 8, col8
