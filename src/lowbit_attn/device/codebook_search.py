"""The nearest of 256 entries for every token of a group of channels, on Tensor Cores (``formats.codebook.nearest``).

A warp takes one group of c channels and 64 tokens at a time:

    score    |e|^2 / 2 - x . e, whose order is that of the distances |x - e|, by m16n8k16: rows are tokens, columns
             entries. x is two fp16 terms (22 bits), |e|^2 / 2 three, beside one; sums are fp32
    block    32 entries, eight a lane: the least score of each eight is kept with the number of its block
    winner   the least of all eights of a token, the lower entries of equal ones
    code     the nearest entry of those eight: distances in fp32, each step rounded as the reference rounds it

fp16 terms lose bits below 2^-14, so all factors are scaled by powers of two, exactly. With a group's scale, entries
reach to between 2^15 and fp16's largest number:

    B        entries times scale; their |e|^2 / 2 times NORM_SCALE, each further term times 2^11 more
    A        x times scale and VALUE_SCALE, ONE and parts of it beside |e|^2 / 2; a token takes its whole row times the
             power of two, of 2^5 at most, that brings its largest value to between 2^14 and 2^15
"""

from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.device.groups import bits_of, fold, static
from lowbit_attn.formats.codebook import ENTRIES, REACH

LANES, TILE = layout.LANES, layout.TILE
PAIR = 2  # channels in a register
NORM_WORDS = 2  # registers of |e|^2 / 2 in three fp16 terms
WORDS = 4  # registers of k16 that the lanes t of a row hold: channels, then |e|^2 / 2
COLUMNS, TILES = 8, 4  # entries of a multiply; multiplies of a block
BLOCK = COLUMNS * TILES  # entries of a block
BLOCKS = ENTRIES // BLOCK
OWN = BLOCK // 4  # entries of a block that a lane scores: consecutive ones
TOKENS = 64  # that are searched at once: the registers of twice as many do not fit
HELD = TOKENS // 8  # tokens of which a lane has a score: 8i + g
HELD_AT_END = HELD // 4  # tokens whose code a lane writes: 16t + 8r + g
LARGEST_EXPONENT = 15  # of fp16, and of scaled entries
VALUE_SCALE = 2.0**-9  # of scaled values in A
NORM_SCALE = 2.0**-19  # of |e|^2 / 2 of scaled entries in B, at most 8 * 2^31
ONE = VALUE_SCALE / NORM_SCALE  # in A, beside its first term
FURTHER = 2.0**11  # times which a term is stored more than the one before: fp16's bits
SMALLEST_ROW = 2.0**9  # of A, times 2^5: what brings ONE to 2^15
BIAS = 127  # of exponents in fp32


class Search(NamedTuple):
    """A warp's share of the search: registers, and entries in shared memory."""

    words: Any  # shared uint32 [warps, steps * ENTRIES, 4 entries]: words t of four entries at 4 * (entry / 4) + t
    warp: Any
    channels: int  # c
    steps: int  # multiplies of k16 that a score takes
    scale: Any  # fp32 [1], a power of two
    row: Any  # fp32 [HELD]: what A's rows of the tokens 8i + g are scaled by
    x: Any  # the group's values as A fragments: fp16 [tiles of tokens, 8]
    score: Any  # fp32 [HELD]: least so far of the tokens 8i + g
    block: Any  # int32 [HELD]: where it is


def steps_of(channels: int) -> int:
    return -(-(channels // PAIR + NORM_WORDS) // WORDS)


def shared_bytes(channels: int) -> int:
    """Shared memory of a warp's search."""
    return steps_of(channels) * ENTRIES * WORDS * layout.WORD_BYTES


def buffers(warps: int, channels: int, warp) -> Search:
    """Shared memory and registers of a search by ``warps`` warps."""
    steps = steps_of(channels)
    return Search(T.alloc_shared((warps, steps * ENTRIES, 4), "uint32"), warp, channels, steps,
                  T.alloc_local((1,), "float32"), T.alloc_local((HELD,), "float32"),
                  T.alloc_local((TOKENS // TILE * 8,), "float16"), T.alloc_local((HELD,), "float32"),
                  T.alloc_local((HELD,), "int32"))


def is_channel(s: Search, lane):
    """Whether a lane's part of A and B is channels."""
    return lane % 4 < s.channels // PAIR


def one(s: Search, lane, e: int):
    """What stands in A beside the terms of |e|^2 / 2 where a lane has no channels."""
    first = s.channels // PAIR
    last_term = T.float32(ONE / FURTHER**2 if e == 0 else 0.0)
    return T.if_then_else(lane % 4 == first, T.float32(ONE / FURTHER**e),
                          T.if_then_else(lane % 4 == first + 1, last_term, T.float32(0.0)))


def power_of_two(exponent):
    return T.call_pure_extern("float32", "__int_as_float", T.shift_left(BIAS + exponent, 23))


def exponent_of(value):
    """The exponent of a positive fp32 value."""
    return T.cast(bits_of(value) >> T.uint32(23), "int32") - BIAS


def magnitude(bits):
    """fp32 value of the 15 bits of an fp16 magnitude."""
    half = T.call_pure_extern("float16", "__ushort_as_half", T.cast(bits, "uint16"))
    return T.call_pure_extern("float32", "__half2float", half)


@T.macro
def load_entries(s, entries, head, group, lane):
    """A group's entries, scaled, negated and with |e|^2 / 2 -> shared memory; every lane takes two runs of four."""
    c = s.channels
    raw = T.alloc_local((8 * c,), "float16")
    largest, exponent = T.alloc_var("uint32"), T.alloc_var("int32")
    bits = T.view(raw, (4 * c,), "uint32")
    for run in static(2):
        for i in static(c // 2):
            for v in T.vectorized(8):
                raw[4 * c * run + 8 * i + v] = entries[head, group, 4 * c * (lane + LANES * run) + 8 * i + v]
    largest = fold([(bits[i] >> T.uint32(shift)) & T.uint32(0x7FFF) for i in range(4 * c) for shift in (0, 16)], T.max)
    largest = T.warp_reduce_max(largest)
    exponent = T.max(exponent_of(magnitude(largest)), -LARGEST_EXPONENT)
    s.scale[0] = power_of_two(LARGEST_EXPONENT - exponent)
    T.sync_warp()  # the search before is over
    for run in static(2):
        store_entries(s, raw, run, lane + LANES * run)
    T.sync_warp()


@T.macro
def store_entries(s, raw, run, position):
    """Entries 4 * position .. + 3 of a lane's registers -> the words that the lanes of a column read."""
    c, pairs = s.channels, s.channels // PAIR
    halves = T.alloc_local((s.steps * WORDS * 8,), "float16")  # [word, entry, 2]
    words = T.view(halves, (s.steps * WORDS * 4,), "uint32")
    for i in static(s.steps * WORDS * 4):
        if i // 4 >= pairs:
            words[i] = T.uint32(0)
    for n in static(4):
        norm, value = T.alloc_var("float32"), T.alloc_var("float32")
        norm = T.float32(0.0)
        for i in static(c):
            value = T.cast(raw[4 * c * run + c * n + i], "float32") * -s.scale[0]
            halves[(i // 2 * 4 + n) * 2 + i % 2] = T.cast(value, "float16")
            norm = norm + value * value
        norm = norm * T.float32(NORM_SCALE / 2)
        for i in static(3):
            at = ((pairs + i // 2) * 4 + n) * 2 + i % 2
            halves[at] = T.cast(norm, "float16")
            norm = (norm - T.cast(halves[at], "float32")) * T.float32(FURTHER)
    for word in static(s.steps * WORDS):
        for n in T.vectorized(4):
            s.words[s.warp, word // WORDS * ENTRIES + WORDS * position + word % WORDS, n] = words[4 * word + n]


@T.macro
def scale_row(s, held, values, lane):
    """s.row of token 8 * held + g, of which a lane has its two values, scaled."""
    largest = T.alloc_var("float32")
    largest = T.max(T.abs(values[0]), T.abs(values[1]))
    for distance in static(s.channels // PAIR)[1:]:  # 1 of two lanes with channels; of four 1, 2 and 3
        largest = T.max(largest, T.shfl_xor(T.max(T.abs(values[0]), T.abs(values[1])), distance))
    largest = T.max(largest * T.float32(VALUE_SCALE), T.float32(SMALLEST_ROW))
    s.row[held] = power_of_two(LARGEST_EXPONENT - 1 - exponent_of(largest))


@T.macro
def put(s, held, e, value):
    """What a lane has of token 8 * held + g, channel e of its two or a one -> A, in two terms."""
    at = held // 2 * 8 + held % 2 * 2 + e
    scaled = T.alloc_var("float32")
    scaled = value * s.row[held]
    s.x[at] = T.cast(scaled, "float16")
    s.x[at + 4] = T.cast(scaled - T.cast(s.x[at], "float32"), "float16")


@T.macro
def search(s, lane):
    """Scores of all entries; afterwards s.block [r] has the eight (of 32) that won for token 16t + 8r + g."""
    loaded = T.alloc_local((4,), "uint32")
    b, acc = T.alloc_local((s.steps * TILES * 2,), "uint32"), T.alloc_local((TILES * 4,), "float32")
    rest = T.alloc_local((TOKENS // TILE * 8,), "float16")  # A of a second step: ones alone
    if s.steps > 1:
        for i in static(TOKENS // TILE * 8):
            rest[i] = T.cast(one(s._replace(channels=0), lane, i % 2) * s.row[i // 8 * 2 + i // 2 % 2]
                             if i % 8 < 4 else T.float32(0.0), "float16")
    for i in static(HELD):
        s.score[i] = T.infinity("float32")
        s.block[i] = 0
    for block in T.serial(BLOCKS):
        for step in static(s.steps):
            for n in T.vectorized(4):
                loaded[n] = s.words[s.warp, step * ENTRIES + LANES * block + lane, n]
            for n in static(TILES):
                b[(step * TILES + n) * 2] = loaded[n]
                b[(step * TILES + n) * 2 + 1] = loaded[n]
        for tile in static(TOKENS // TILE):
            for i in static(TILES * 4):
                acc[i] = T.float32(0.0)
            for n in static(TILES):
                T.ptx_mma("float32", "m16n8k16", "row", "col", "fp16", "fp16", "fp32", s.x.data, 8 * tile, b.data,
                          2 * n, acc.data, 4 * n, T.bool(False))
                if s.steps > 1:
                    T.ptx_mma("float32", "m16n8k16", "row", "col", "fp16", "fp16", "fp32", rest.data, 8 * tile,
                              b.data, 2 * (TILES + n), acc.data, 4 * n, T.bool(False))
            for row8 in static(2):
                least = T.alloc_var("float32")
                least = fold([acc[4 * n + 2 * row8 + e] for n in range(TILES) for e in range(2)], T.min)
                s.block[2 * tile + row8] = T.if_then_else(least < s.score[2 * tile + row8], block,
                                                          s.block[2 * tile + row8])
                s.score[2 * tile + row8] = T.min(s.score[2 * tile + row8], least)
    for i in static(HELD):
        s.block[i] = s.block[i] * 4 + lane % 4
    for distance in (2, 1):
        halve(s, HELD_AT_END * distance, distance, lane)


@T.macro
def halve(s, count, distance, lane):
    """Exchange ``count`` times two tokens: a lane keeps the upper half where its number has the bit of ``distance``."""
    for k in static(count):
        score, other, block, others = (T.alloc_var(x) for x in ("float32", "float32", "int32", "int32"))
        has = (lane & distance) != 0
        other = T.shfl_xor(T.if_then_else(has, s.score[k], s.score[k + count]), distance)
        others = T.shfl_xor(T.if_then_else(has, s.block[k], s.block[k + count]), distance)
        score = T.if_then_else(has, s.score[k + count], s.score[k])
        block = T.if_then_else(has, s.block[k + count], s.block[k])
        wins = T.Or(other < score, T.And(other == score, others < block))
        s.block[k] = T.if_then_else(wins, others, block)
        s.score[k] = T.min(score, other)


def reach(s: Search, value):
    """A scaled value, no further than REACH."""
    return T.max(T.min(value, T.float32(REACH) * s.scale[0]), T.float32(-REACH) * s.scale[0])


@T.macro
def nearest_of_eight(s, winner, x, code):
    """code[0]: the nearest to the scaled values x [c] of the entries 8 * winner .. + 7, the lower of equal ones."""
    words = T.alloc_local((4 * (s.channels // PAIR),), "uint32")
    halves = T.view(words, (8 * (s.channels // PAIR),), "float16")
    least, distance, difference = (T.alloc_var("float32") for _ in range(3))
    least = T.infinity("float32")
    code[0] = 0
    for q in static(2):
        for pair in static(s.channels // PAIR):
            for n in T.vectorized(4):
                words[4 * pair + n] = s.words[s.warp, WORDS * (2 * winner + q) + pair, n]
        for n in static(4):
            for i in static(s.channels):
                difference = x[i] + T.cast(halves[(i // 2 * 4 + n) * 2 + i % 2], "float32")
                if i == 0:
                    distance = difference * difference
                else:
                    distance = distance + difference * difference
            code[0] = T.if_then_else(distance < least, 8 * winner + 4 * q + n, code[0])
            least = T.min(least, distance)
