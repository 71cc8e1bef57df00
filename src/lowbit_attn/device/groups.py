"""Steps of the affine quantizer (``formats.affine``) that all quantize kernels share.

A group lies in several lanes: each holds some of its values, and together they are ``Lanes``. fp32 steps are those of
the reference, one rounding each (compile with EXACT), so that the bytes are the same.
"""

from dataclasses import dataclass

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.formats.affine import MIN_SCALE, SEARCH_FACTORS, SEARCH_GRID, SEARCH_TENTHS, folds

EXACT = ("-fmad=false",)
STORED_NAN = {"float16": 0x7E00, "bfloat16": 0x7FC0}
UNIT_WORDS = 32  # the pool is addressed in units of 128 bytes
ROUND = 1.5 * 2**23  # adding it rounds an fp32 value below 2^22 to an integer, half to even, in the low bits of the sum
ROUND_BITS = 0x4B400000
NAN_BITS = 0x7FC00000
BYTES = 0x01010101
PACKERS = 1  # barrier of the threads that pack a block of tokens; 0 is that of all


@dataclass(frozen=True)
class Lanes:
    """The lanes that share a group: those at all exclusive-or sums of these distances, in the order of tree_sum."""

    distances: tuple[int, ...]

    @property
    def first_mask(self) -> int:
        """Bit of every lane that shares the group of lane 0."""
        lanes = [0]
        for distance in self.distances:
            lanes += [lane + distance for lane in lanes]
        return sum(1 << lane for lane in lanes)

    def first_of(self, lane):
        """The first of the lanes that share a lane's group."""
        return lane & (layout.LANES - 1 - sum(self.distances))


ROW_LANES = Lanes((16, 8, 4))  # those of one column: rows g
QUAD_LANES = Lanes((2, 1))  # those of one row: columns t


@T.macro
def sync_packers(threads):
    """Barrier of the first ``threads`` threads, which pack a block; others of the same block may do without."""
    T.sync_threads(PACKERS, threads)


@T.macro
def stored_span(low, high, scale, zero, storage):
    """A group's scale and zero as a reader will see them: rounded to storage, then fp32 again."""
    zero[0] = T.cast(T.cast(low, storage), "float32")
    if zero[0] == T.float32(0.0):
        zero[0] = T.float32(0.0)
    scale[0] = T.cast(T.cast(high, storage), "float32")
    if scale[0] < T.float32(MIN_SCALE):
        scale[0] = T.float32(0.0)


def fold(values: list, step):
    """step (T.min, T.max or an or) over the values, in pairs."""
    while len(values) > 1:
        values = [step(*values[i : i + 2]) if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]
    return values[0]


def tree_sum(values: list):
    """The lane's part of affine.tree_sum: index i takes i + half; the caller's shuffles finish it."""
    size = 1 << max(0, len(values) - 1).bit_length()
    while size > 1:
        size //= 2
        values = [values[i] + values[i + size] if i + size < len(values) else values[i] for i in range(size)]
    return values[0]


def pick(values, index):
    """values[index] of a static tuple for a symbolic index."""
    chosen = T.float32(values[-1])
    for i, value in reversed(list(enumerate(values[:-1]))):
        chosen = T.if_then_else(index == i, T.float32(value), chosen)
    return chosen


def storage_bits(value, storage: str):
    """Bits of an fp32 value that storage represents exactly; every NaN as the one positive quiet NaN."""
    return T.if_then_else(T.isnan(value), T.uint16(STORED_NAN[storage]),
                          T.reinterpret(T.cast(value, storage), "uint16"))


# By function, not T.reinterpret: the code generator keeps the value of a reinterpreted expression in a variable and
# reuses it for the same text further on, also when a register in it has changed.
def bits_of(value):
    """Bits of an fp32 value as uint32."""
    return T.call_pure_extern("uint32", "__float_as_uint", value)


def rounded_bits(value):
    """ROUND_BITS plus an fp32 value of less than 2^22, rounded to an integer, half to even."""
    return bits_of(value + T.float32(ROUND))


def clamped(x, zero, inverse, steps):
    """The code of a value before it is rounded; not a number gives 0."""
    return T.min(T.max((x - zero) * inverse, T.float32(0.0)), steps)


def code_bits(x, zero, inverse, steps):
    """ROUND_BITS plus the code of a value."""
    return rounded_bits(clamped(x, zero, inverse, steps))


def part_bits(x, zero, part, most, reach):
    """code_bits in parts of ``reach``, a power of two from the steps on: part = inverse / reach, most = steps / reach.

    A product saturates at 0 and 1 for nothing where a maximum takes an instruction, and a power of two moves no
    rounding but of what is 0 anyway.
    """
    value = T.min(T.call_pure_extern("float32", "__saturatef", (x - zero) * part), most)
    return bits_of(T.call_pure_extern("float32", "__fmaf_rn", value, reach, T.float32(ROUND)))


def empty_word(bits: int) -> int:
    """What a word of codes starts as, so that adding all its shifted ``code_bits`` leaves the codes alone."""
    return -sum(ROUND_BITS << shift for shift in range(0, 32, bits)) % (1 << 32)


def static(count: int) -> tuple[int, ...]:
    """0 .. count - 1 as a tuple: a loop over it is unrolled while the kernel is traced, with Python ints."""
    return tuple(range(count))


def not_a_number(is_nan, value):
    """The value, or the one NaN in its place."""
    return T.if_then_else(is_nan, T.call_pure_extern("float32", "__uint_as_float", T.uint32(NAN_BITS)), value)


@T.macro
def limits(values, lanes, lane, low, high):
    """Smallest and largest of a group, both not a number if one of its values is."""
    low[0] = fold(values, T.min)
    high[0] = fold(values, T.max)
    spoiled = fold([T.isnan(x) for x in values], T.Or)
    for distance in lanes.distances:
        low[0] = T.min(low[0], T.shfl_xor(low[0], distance))
        high[0] = T.max(high[0], T.shfl_xor(high[0], distance))
    votes = T.alloc_var("uint32")
    votes = T.cast(T.ballot(spoiled), "uint32") & (
        T.uint32(lanes.first_mask) << T.cast(lanes.first_of(lane), "uint32"))
    low[0] = not_a_number(votes != T.uint32(0), low[0])
    high[0] = not_a_number(votes != T.uint32(0), high[0])


@T.macro
def group_sum(strands, lanes, total):
    """affine.tree_sum of a group: what a lane holds, then its lanes, then the strands (columns 2t and 2t + 1)."""
    parts = T.alloc_local((len(strands),), "float32")
    for e, strand in enumerate(strands):
        parts[e] = tree_sum(strand)
        for distance in lanes.distances:
            parts[e] = parts[e] + T.shfl_xor(parts[e], distance)
    total[0] = tree_sum([parts[e] for e in range(len(strands))])


@T.macro
def inverse_of(scale, inverse):
    inverse[0] = T.if_then_else(scale[0] == T.float32(0.0), T.float32(0.0), T.float32(1.0) / scale[0])


def fold_words(bits: int):
    """affine.folds of a factor as a function of its tenths, each distance in all four bytes of a word."""
    return lambda tenths: [T.uint32(fold * BYTES) for fold in folds(tenths, bits)]


def grid_word(values, middle, inverse):
    """affine.search's distances from the midpoint of four values, a byte each."""
    low, high = (T.call_pure_extern("uint32", "__byte_perm", *pair, T.uint32(0x0040)) for pair in (
        [rounded_bits(T.abs((x - middle) * inverse)) for x in values[i : i + 2]] for i in (0, 2)))
    return T.call_pure_extern("uint32", "__byte_perm", low, high, T.uint32(0x5410))


@T.macro
def errors_of(words, count, factor_folds, errors):
    """Squared errors, one a factor, of a lane's ``count`` words of four distances each."""
    for f, tenths in enumerate(SEARCH_TENTHS):
        errors[f] = T.uint32(0)
        for i in static(count):
            miss = T.alloc_var("uint32")
            miss = words[i]
            for distance in factor_folds(tenths):
                miss = T.call_pure_extern("uint32", "__vabsdiffu4", miss, distance)
            errors[f] = byte_products(miss, miss, errors[f])


def byte_products(x, y, total):
    """total + the sum of the products of four bytes each."""
    return T.call_pure_extern("uint32", "__dp4a", x, y, total)


def byte_distances(x, y):
    """Sum of the distances of four bytes each."""
    return T.call_pure_extern("uint32", "__vsadu4", x, y)


@T.macro
def uniform_errors(bits, words, count, errors):
    """``errors_of`` codes of ``bits`` bits; of 1 and 2 bits without forming what a factor misses.

    With n distances d and the last fold about c: sum |d - c|^2 = sum d^2 - 2c sum d + n c^2. Before the last of two
    folds stand x = |d - 2c|, so that the sum is sum d^2 - 4c sum d + 5n c^2 - 2c sum x. All are exact in uint32.
    """
    if bits > 2:
        errors_of(words, count, fold_words(bits), errors)
    else:
        squares, total, some = (T.alloc_var("uint32") for _ in range(3))
        squares = byte_products(words[0], words[0], T.uint32(0))
        total = byte_products(words[0], T.uint32(BYTES), T.uint32(0))
        for i in tuple(range(1, count)):
            squares = byte_products(words[i], words[i], squares)
            total = byte_products(words[i], T.uint32(BYTES), total)
        total = total * T.uint32(bits)
        for f, tenths in enumerate(SEARCH_TENTHS):
            c = folds(tenths, bits)[-1]
            some = total
            if bits == 2:
                for i in static(count):
                    some = some + byte_distances(words[i], T.uint32(2 * c * BYTES))
            errors[f] = some * T.uint32((1 << 32) - 2 * c) + (squares + T.uint32((1, 5)[bits - 1] * 4 * count * c * c))


@T.macro
def scatter(values, count, distances, lane, step):
    """Reduce ``count`` values over lanes by ``step``; each distance halves those that a lane keeps, from values[0] on.

    A lane whose number has the bit of the first distance keeps the upper half, and so on.
    """
    for i, distance in enumerate(distances):
        half = count >> (i + 1)
        for k in static(half):
            kept, sent = T.alloc_var("uint32"), T.alloc_var("uint32")
            kept = T.if_then_else((lane & distance) != 0, values[k + half], values[k])
            sent = T.if_then_else((lane & distance) != 0, values[k], values[k + half])
            values[k] = step(kept, T.shfl_xor(sent, distance))


@T.macro
def shrink(best, inverse, lane, low, high, width):
    """Low and width of a group at the factor whose index is in the lowest three bits of ``best``.

    A group without a finite, positive inverse of its span keeps factor 1. Lane 4i of a warp names factor i.
    """
    index, factor = T.alloc_var("int32"), T.alloc_var("float32")
    index = T.if_then_else(T.And(inverse > T.float32(0.0), inverse < T.infinity("float32")),
                           T.cast(best & T.uint32(7), "int32"), 0)
    factor = T.shfl_sync(pick(SEARCH_FACTORS, lane // 4), 4 * index)
    width[0] = (high[0] - low[0]) * factor
    if index != 0:
        low[0] = low[0] + (high[0] - low[0]) * T.float32(0.5) * (T.float32(1.0) - factor)


@T.macro
def search(values, lanes, lane, bits, low, high, width):
    """affine.search: low and width of a group become those of the factor with the least squared error."""
    middle, inverse, best = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("uint32")
    middle = (low[0] + high[0]) * T.float32(0.5)
    inverse = T.float32(SEARCH_GRID) / ((high[0] - low[0]) * T.float32(0.5))
    words = T.alloc_local((len(values) // 4,), "uint32")
    for i in static(len(values) // 4):
        words[i] = grid_word(values[4 * i : 4 * i + 4], middle, inverse)
    errors = T.alloc_local((len(SEARCH_TENTHS),), "uint32")
    uniform_errors(bits, words, len(values) // 4, errors)
    scatter(errors, len(SEARCH_TENTHS), lanes.distances, lane, lambda a, b: a + b)
    kept = len(SEARCH_TENTHS) >> len(lanes.distances)
    first = sum(T.if_then_else((lane & distance) != 0, len(SEARCH_TENTHS) >> (i + 1), 0)
                for i, distance in enumerate(lanes.distances))
    best = fold([errors[f] * T.uint32(8) + T.cast(first + f, "uint32") for f in range(kept)], T.min)
    for distance in lanes.distances:
        best = T.min(best, T.shfl_xor(best, distance))
    shrink(best, inverse, lane, low, high, width)


@T.macro
def span_of(values, lanes, lane, search_bits, low, high, steps, storage, scale, zero):
    """A group's scale and zero between two levels at its ends or, with ``search_bits``, those of a code, within."""
    width = T.alloc_local((1,), "float32")
    width[0] = high[0] - low[0]
    if search_bits:
        search(values, lanes, lane, search_bits, low, high, width)
    stored_span(low[0], width[0] / steps, scale, zero, storage)


@T.macro
def two_means(strands, count, lanes, low, high, storage, scale, zero):
    """A group's two levels: the means of its ``count`` values below and from the midpoint."""
    middle = T.alloc_var("float32")
    middle = (high[0] + low[0]) * T.float32(0.5)
    below, above, num_below = (T.alloc_local((1,), "float32") for _ in range(3))
    zeroed = T.float32(0.0)
    group_sum([[T.if_then_else(x < middle, x, zeroed) for x in s] for s in strands], lanes, below)
    group_sum([[T.if_then_else(x < middle, zeroed, x) for x in s] for s in strands], lanes, above)
    group_sum([[T.if_then_else(x < middle, T.float32(1.0), zeroed) for x in s] for s in strands], lanes, num_below)
    mean_below, mean_above = T.alloc_var("float32"), T.alloc_var("float32")
    mean_below = T.if_then_else(num_below[0] > zeroed, below[0] / num_below[0], low[0])
    mean_above = T.if_then_else(num_below[0] > zeroed, above[0] / (T.float32(count) - num_below[0]), high[0])
    stored_span(mean_below, mean_above - mean_below, scale, zero, storage)


def two_means_bits(x, scale, zero):
    """ROUND_BITS plus the code of a value between two means."""
    reaches = T.And(x >= zero + scale * T.float32(0.5), scale != T.float32(0.0))
    return T.uint32(ROUND_BITS) + T.cast(reaches, "uint32")


@T.macro
def store_meta(pool_meta, unit, offset, value, storage):
    """An fp32 value that ``storage`` represents exactly -> the 16 bits at a byte offset of a record."""
    pool_meta[unit + offset // 128, offset % 128 // 2] = storage_bits(value, storage)


def load_meta(pool_meta, unit, offset):
    """The fp32 value at a byte offset of a record's metadata, a view of the pool in the storage dtype."""
    return T.cast(pool_meta[unit + offset // 128, offset % 128 // 2], "float32")
