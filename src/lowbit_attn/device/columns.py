"""The four columns of a code matrix that a lane shares with the seven others of its t, quantized together.

A lane holds 16-bit pairs: rows 8i + g of columns 2t and 2t + 1 (e) of both halves (col8) of a column tile. Column
c = 2 col8 + e is owned by lanes 8c + t and 8c + 4 + t: they alone work on its metadata, and the others ask them.
Reductions halve the columns that a lane keeps at every exchange until its own one is left.
"""

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.device.groups import (
    ROW_LANES,
    fold,
    grid_word,
    inverse_of,
    not_a_number,
    scatter,
    shrink,
    static,
    stored_span,
    uniform_errors,
)
from lowbit_attn.formats.affine import SEARCH_GRID, SEARCH_TENTHS

COLUMNS = 4  # (col8, e)
SM_REGISTERS = 65536
REGISTERS, SEARCH_REGISTERS = 80, 128  # of a thread that holds 16 rows: 3 or 2 blocks of 256 threads hide their loads


def blocks_per_sm(threads: int, held: int, range_search: bool, more: int = 0) -> int:
    """Blocks that should fit an SM together: what bounds the registers of a thread that holds so many rows.

    more: registers of a thread beyond those that packing takes.
    """
    registers = (SEARCH_REGISTERS if range_search else REGISTERS) + COLUMNS // 2 * max(0, held - 16) + more
    return max(1, SM_REGISTERS // (threads * registers))


def own_column(lane):
    return lane // 8 % COLUMNS


def owner(column, lane):
    """The first lane that owns a column that this lane holds."""
    return 8 * column + lane % 4


def pair(held, col8, i):
    """Where row 8i + g of two columns is among a lane's pairs, for packed operations."""
    return T.Ramp(2 * (col8 * held + i), 1, 2)


def column_values(pairs, held, rows, column) -> list:
    """The values of a column, rows 8i + g for i in ``rows``, as fp32."""
    return [T.cast(pairs[2 * (column // 2 * held + i) + column % 2], "float32") for i in rows]


@T.macro
def column_limits(pairs, held, rows, lane, low, high):
    """Smallest and largest of the own column over ``rows``, both not a number if one of its values is."""
    ends, others = T.alloc_local((8,), pairs.dtype), T.alloc_local((4,), pairs.dtype)  # (low or high, col8, e)
    words, other_words = T.view(ends, (4,), "uint32"), T.view(others, (2,), "uint32")
    for k, step in enumerate((T.min2, T.max2)):
        for col8 in static(2):
            ends[T.Ramp(4 * k + 2 * col8, 1, 2)] = fold([pairs[pair(held, col8, i)] for i in rows], step)
        other_words[k] = T.shfl_xor(T.if_then_else((lane & 16) != 0, words[2 * k], words[2 * k + 1]), 16)
        words[2 * k] = T.if_then_else((lane & 16) != 0, words[2 * k + 1], words[2 * k])
        ends[T.Ramp(4 * k, 1, 2)] = step(ends[T.Ramp(4 * k, 1, 2)], others[T.Ramp(2 * k, 1, 2)])
        for distance in (8, 4):
            other_words[k] = T.shfl_xor(words[2 * k], distance)
            ends[T.Ramp(4 * k, 1, 2)] = step(ends[T.Ramp(4 * k, 1, 2)], others[T.Ramp(2 * k, 1, 2)])
    low[0] = T.cast(T.if_then_else((lane & 8) != 0, ends[1], ends[0]), "float32")
    high[0] = T.cast(T.if_then_else((lane & 8) != 0, ends[5], ends[4]), "float32")
    spoil_limits(pairs, held, rows, lane, low, high)


@T.macro
def spoil_limits(pairs, held, rows, lane, low, high):
    """Limits become not a number where the column has one; columns are looked at only if 0 times one is not 0."""
    zeros, checks = T.alloc_local((2,), pairs.dtype), T.alloc_local((4,), pairs.dtype)
    for i in T.vectorized(2):
        zeros[i] = T.cast(0.0, pairs.dtype)
    for i in T.vectorized(4):
        checks[i] = T.cast(0.0, pairs.dtype)
    for col8 in static(2):
        for i in tuple(rows):
            checks[T.Ramp(2 * col8, 1, 2)] = T.fma2(pairs[pair(held, col8, i)], zeros[T.Ramp(0, 1, 2)],
                                                    checks[T.Ramp(2 * col8, 1, 2)])
    suspect = fold([T.isnan(T.cast(checks[c], "float32")) for c in range(COLUMNS)], T.Or)
    if T.cast(T.ballot(suspect), "uint32") != T.uint32(0):
        for c in static(COLUMNS):
            votes = T.alloc_var("uint32")
            votes = T.cast(T.ballot(fold([T.isnan(x) for x in column_values(pairs, held, rows, c)], T.Or)), "uint32")
            votes = votes & (T.uint32(ROW_LANES.first_mask) << T.cast(ROW_LANES.first_of(lane), "uint32"))
            spoiled = T.And(own_column(lane) == c, votes != T.uint32(0))
            low[0] = not_a_number(spoiled, low[0])
            high[0] = not_a_number(spoiled, high[0])


@T.macro
def column_errors_of(bits, column, words, count, errors):
    """groups.uniform_errors of any column."""
    uniform_errors(bits, words, count, errors)


@T.macro
def search_columns(pairs, held, rows, lane, column_errors, low, high, width):
    """affine.search: low and width of the own column become those of the factor with the least squared error.

    column_errors(column, words, count, errors): column_errors_of as many bits, or another macro.
    """
    middle, inverse = T.alloc_var("float32"), T.alloc_var("float32")
    middle = (low[0] + high[0]) * T.float32(0.5)
    inverse = T.float32(SEARCH_GRID) / ((high[0] - low[0]) * T.float32(0.5))
    keys = T.alloc_local((COLUMNS,), "uint32")
    for c in static(COLUMNS):
        center, scaling = T.alloc_var("float32"), T.alloc_var("float32")
        center = T.shfl_sync(middle, owner(c, lane))
        scaling = T.shfl_sync(inverse, owner(c, lane))
        values = column_values(pairs, held, rows, c)
        words = T.alloc_local((len(values) // 4,), "uint32")
        for i in static(len(values) // 4):
            words[i] = grid_word(values[4 * i : 4 * i + 4], center, scaling)
        errors = T.alloc_local((len(SEARCH_TENTHS),), "uint32")
        column_errors(c, words, len(values) // 4, errors)
        scatter(errors, len(SEARCH_TENTHS), (16, 8, 4), lane, lambda a, b: a + b)
        keys[c] = errors[0] * T.uint32(8) + T.cast(lane // 4, "uint32")
    scatter(keys, COLUMNS, (16, 8), lane, T.min)
    shrink(T.min(keys[0], T.shfl_xor(keys[0], 4)), inverse, lane, low, high, width)


@T.macro
def span_columns(pairs, held, rows, lane, column_errors, steps, storage, low, high, scale, zero, inverse):
    """Scale, zero and the scale's inverse of the own column; range search if ``column_errors`` is given."""
    width = T.alloc_local((1,), "float32")
    width[0] = high[0] - low[0]
    if column_errors is not None:
        search_columns(pairs, held, rows, lane, column_errors, low, high, width)
    stored_span(low[0], width[0] / steps, scale, zero, storage)
    inverse_of(scale, inverse)


def is_writer(lane):
    """One of the two lanes that own a column."""
    return lane // 4 % 2 == 0


@T.macro
def store_words(m, pool, unit, column_tile, lane, words):
    """A lane's words of its column tile -> the plane of codes, up to 16 bytes at a time."""
    for w in T.unroll(m.words // m.store_words):
        offset = layout.word_offset(column_tile * m.words + w * m.store_words, lane)
        for i in T.vectorized(m.store_words):
            pool[unit + offset // 128, offset % 128 // 4 + i] = words[w * m.store_words + i]


@T.macro
def load_words(m, pool, unit, column_tile, lane, words):
    """The inverse of ``store_words``."""
    for w in T.unroll(m.words // m.store_words):
        offset = layout.word_offset(column_tile * m.words + w * m.store_words, lane)
        for i in T.vectorized(m.store_words):
            words[w * m.store_words + i] = pool[unit + offset // 128, offset % 128 // 4 + i]
