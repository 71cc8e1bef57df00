"""Codes and metadata in registers: what the K and the V side of the register path, and boosted channels, share."""

from math import gcd

import tilelang.language as T

from lowbit_attn import layout, registers, subnormals
from lowbit_attn.ampere import mma
from lowbit_attn.ampere.config import ACCESS_BYTES, LANES, TILE, static

BLOCK = layout.BLOCK_WORDS
ONES = 0x3C003C00  # fp16 1.0 in both halves
LARGEST_HALF_LOG2 = 15  # of a power of two in fp16


# By function, not T.reinterpret: the code generator keeps the value of a reinterpreted expression in a variable and
# reuses it for the same text further on, also when a register in it has changed.
def pow2(exponent):
    """fp32 2^exponent, exponent int32 in -126 .. 127."""
    return T.call_pure_extern("float32", "__int_as_float", registers.pow2_bits(exponent))


def bits_of(value):
    """Bits of an fp32 value as int32."""
    return T.call_pure_extern("int32", "__float_as_int", value)


def value_of_half(bits, dtype: str):
    """fp32 value of the 16 bits (int32) of a metadata value."""
    if dtype == "bfloat16":
        return T.call_pure_extern("float32", "__int_as_float", T.shift_left(bits, 16))
    half = T.call_pure_extern("float16", "__ushort_as_half", T.cast(bits, "uint16"))
    return T.call_pure_extern("float32", "__half2float", half)


@T.macro
def lower_value_exponent(largest, dtype: str, work, o_factor, moved):
    """E after tokens whose largest scale has the 16 bits ``largest``: the least -ceil(log2 scale) so far; what O is
    multiplied with, and whether."""
    lowered = T.alloc_var("int32")
    lowered = -registers.ceil_log2(T.max(bits_of(value_of_half(largest, dtype)),
                                         registers.pow2_bits(registers.MIN_SCALE_LOG2)))
    lowered = T.min(lowered, work.value_exponent[0])
    moved[0] = T.cast(lowered < work.value_exponent[0], "int32")
    o_factor[0] = pow2(T.max(lowered - work.value_exponent[0], -126))
    work.value_exponent[0] = lowered


def value_at(half):
    return T.cast(half, "float32")


def code_word(piece, column_tile, row_tile):
    """First word of the codes of a column tile from a row tile on."""
    tile = column_tile * piece.row_tiles + row_tile
    return 2 * tile if piece.bits == 8 else tile // layout.tiles_per_word(piece.bits)


@T.macro
def multiply_codes(config, piece, ring, slot, lane, work, column_tile, first, count, b, step_of, acc, acc_first,
                   bits=None):
    """acc[row tile - acc_first] += codes of ``count`` row tiles from ``first`` on, one column tile, times B.

    step_of(row tile): the step of B (less the column) that a row tile is multiplied with. bits: the codes are brought
    to where codes of so many bits would stand; None: where they stand.
    """
    words = layout.words_per_lane(TILE * count, TILE, piece.bits)
    load = gcd(BLOCK, words)  # a run starts at a multiple of its own length
    per_word = layout.tiles_per_word(piece.bits)
    steps = subnormals.unpack_steps(piece.bits)
    for c in T.unroll(words // load):
        word = code_word(piece, column_tile, first) + c * load
        for v in T.vectorized(load):
            work.words[v] = ring[slot, piece.codes + layout.word_offset(word, lane) // ACCESS_BYTES, word % BLOCK + v]
        if piece.bits == 8:
            for w in T.unroll(load // 2):
                for s in steps:
                    for row8 in (0, 1):
                        work.a[s.register + row8] = (work.words[2 * w + row8] >> s.shift) & s.mask
                for n in T.unroll(config.columns):
                    tile = c * load // 2 + w
                    mma.multiply("float16", work.a, b, step_of(first + tile) * config.columns + n, acc,
                                 (first - acc_first + tile) * config.columns + n)
        else:
            for w in T.unroll(load):
                for within in static(per_word):
                    for s in steps_of_tile(steps, within):
                        work.a[s.register] = placed((work.words[w] >> s.shift) & s.mask, piece, bits,
                                                    first + (c * load + w) * per_word + within, s.register % 2)
                    for n in T.unroll(config.columns):
                        tile = (c * load + w) * per_word + within
                        mma.multiply("float16", work.a, b, step_of(first + tile) * config.columns + n, acc,
                                     (first - acc_first + tile) * config.columns + n)


def placed(register, piece, bits, row_tile, row8):
    """A register of codes of a row tile, moved to where codes of ``bits`` bits would stand."""
    if bits in (None, piece.bits):
        return register
    row = TILE * row_tile + 8 * row8
    up = registers.row_power(row, bits) - registers.row_power(row, piece.bits)
    return T.shift_right(T.shift_left(register, T.cast(T.max(up, 0), "uint32")), T.cast(T.max(-up, 0), "uint32"))


def steps_of_tile(steps, tile: int):
    return tuple(s for s in steps if s.tile == tile)


def row_power(piece, row_tile, element):
    """k of the codes behind an accumulator element."""
    return registers.row_power(TILE * row_tile + 8 * (element % 4 // 2), piece.bits)


def code_power(piece, row_tile, element):
    """2^-k of them, fp32."""
    return pow2(-row_power(piece, row_tile, element))


@T.macro
def largest_half(ring, slot, access, words, lane, low_only, out):
    """out[0]: the largest 15-bit pattern of the halves (low_only: of the low ones) of ``words`` words; in all lanes."""
    out[0] = 0
    for i in T.unroll(-(-words // LANES)):
        word = T.alloc_var("int32")
        at = T.min(lane + i * LANES, words - 1)  # the last round of some lanes: the last word again
        word = T.cast(ring[slot, access + at // BLOCK, at % BLOCK], "int32")
        out[0] = T.max(out[0], word & 0x7FFF)
        if not low_only:
            out[0] = T.max(out[0], T.shift_right(word, 16) & 0x7FFF)
    out[0] = T.warp_reduce_max(out[0])


@T.macro
def load_tokens(piece, ring, slot, group, tile, lane, meta):
    """The (scale, zero) pairs of tokens g and g + 8 of a token tile -> meta (uint32 [2])."""
    index = layout.token_meta_index(TILE * tile + lane // 4)
    row = layout.token_meta_offset(group, 0, 0) // ACCESS_BYTES
    for v in T.vectorized(2):
        meta[v] = ring[slot, piece.meta + row + index // BLOCK, index % BLOCK + v]


@T.macro
def scale_query(config, e_s, group, work):
    """q~ of one column tile and token group from q' and the scales in meta_k.

    Where instructions count (config.is_light), a scale takes its power of two in fp16, in two factors: either moves
    the scale up, which is exact, or there is one factor down, 2^-14 at least.
    """
    factor, shift = T.alloc_var("float32"), e_s + subnormals.SCALE_SHIFT
    factor = pow2(shift)
    if config.is_light and config.k.meta_dtype == "float16":
        powers = T.alloc_local((2,), "float16")
        powers[0] = T.cast(pow2(T.min(shift, LARGEST_HALF_LOG2)), "float16")
        powers[1] = T.cast(pow2(T.max(shift - LARGEST_HALF_LOG2, 0)), "float16")
    for r in T.unroll(2):
        if config.k.meta_dtype == "float16":
            for v in T.vectorized(2):
                work.pair_h[v] = (work.meta_k_v[2 * r + v] * powers[0] * powers[1] if config.is_light else
                                  T.cast(value_at(work.meta_k_v[2 * r + v]) * factor, "float16"))
            for n in T.unroll(config.columns):
                for v in T.vectorized(2):
                    work.scaled[4 * (group * config.columns + n) + 2 * r + v] = (
                        work.query[4 * n + 2 * r + v] * work.pair_h[v])
        else:
            for n in T.unroll(config.columns):
                for v in T.vectorized(2):
                    work.scaled[4 * (group * config.columns + n) + 2 * r + v] = T.cast(
                        value_at(work.query[4 * n + 2 * r + v])
                        * (value_at(work.meta_k_v[2 * r + v]) * factor), "float16")


@T.macro
def metadata_rows(config, row8, factor, work):
    """meta_k -> rows 8*row8 .. of the bias multiply's A; bf16 values times a power of two."""
    for r in T.unroll(2):
        if config.k.meta_dtype == "float16":
            work.a[2 * r + row8] = work.meta_k[r]
        else:
            for v in T.vectorized(2):
                work.pair_h[v] = T.cast(value_at(work.meta_k_v[2 * r + v]) * factor, "float16")
            work.a[2 * r + row8] = work.pair[0]
