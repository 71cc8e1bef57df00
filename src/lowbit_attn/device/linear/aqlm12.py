"""y = x W^T over packed AQLM codes 2x12 by a table of products, for one row of x.

Of 32 columns, four slices of 8, a CTA has a table of the products with all 4,096 entries of both codebooks:

    T[book][entry][slice] = x_slice . entry, fp32: 128 KiB

or, where there is room for half of it, first of the lower two slices and then of the others, each over all rows.

A lane has four rows of W, of each 96 bits: the codes of four slices, in the order (i + lane) mod 4, so that lanes whose
entries have a bank in common still read different slices. CTAs share the groups of 32 columns, each with all rows,
whose sums stay in shared memory; ``Sum`` adds up those of all CTAs, always in the same order.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint32, Uint64

from lowbit_attn.device import ptx
from lowbit_attn.device.linear.config import TABLE_AT, TABLE_THREADS, WARP, Chip
from lowbit_attn.device.linear.tables import (
    advance,
    begin_kernel,
    codes_now_and_ahead,
    load_once,
    shared,
    visible,
    words_at,
)
from lowbit_attn.device.numbers import ELEMENT

WARPS = TABLE_THREADS // WARP
BOOKS, ENTRIES, VEC, SLICES = 2, 4096, 8, 4
LANE_ROWS, ROW_WORDS, LOADS = 4, 3, 3
UNIT_ROWS = WARP * LANE_ROWS
MOST_ROWS = 24_576  # of W in a CTA
ENTRY_MASK = 0xFFF0  # of a code times 16, the bytes of four slices of a table


@dataclass(frozen=True)
class Sizes:
    """What a CTA has in shared memory: a table of so many slices, a group's columns of x, sums of so many rows."""

    slices: int
    rows: int

    @property
    def book_bytes(self) -> int:
        return ENTRIES * self.slices * 4

    @property
    def x_at(self) -> int:
        return TABLE_AT + BOOKS * self.book_bytes

    @property
    def sums_at(self) -> int:
        return self.x_at + 4 * SLICES * VEC

    @property
    def smem_bytes(self) -> int:
        """From TABLE_AT on."""
        return self.sums_at - TABLE_AT + 4 * self.rows


def sizes_of(chip: Chip) -> Sizes:
    """As much as there is room for."""
    for slices in (SLICES, SLICES // 2):
        room = (chip.smem_limit - chip.before_tables - Sizes(slices, 0).smem_bytes) // 4
        if room >= UNIT_ROWS:
            return Sizes(slices, min(MOST_ROWS, room // UNIT_ROWS * UNIT_ROWS))
    raise ValueError(f"{chip.smem_limit} bytes of shared memory, supported: enough for a table of two slices")


class Aqlm2x12:
    """Sums of a CTA's columns: partial fp32 [CTAs, 1, n of the pack], of x [1, k].

    codes: uint32 [k / 32, n / 128, 3, 32 lanes, 4]; codebooks: [2, 4096, 8] fp16.
    """

    def __init__(self, dtype: str, chip: Chip):
        self.element, self.chip, self.sizes = ELEMENT[dtype], chip, sizes_of(chip)
        self.smem_bytes = chip.before_tables + self.sizes.smem_bytes

    @cute.jit
    def __call__(self, x: cute.Tensor, codes: cute.Tensor, codebooks: cute.Tensor, partial: cute.Tensor, stream):
        parts = (codes.shape[1] * UNIT_ROWS + (self.sizes.rows - 1)) // self.sizes.rows
        self.kernel(x, codes, codebooks, partial).launch(
            grid=(partial.shape[0], parts, 1), block=(TABLE_THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, codes: cute.Tensor, codebooks: cute.Tensor, partial: cute.Tensor):
        steps = SLICES // self.sizes.slices  # of a group: tables
        cta = begin_kernel(self.smem_bytes, self.chip)
        thread, lane, warp = cta.thread, cta.lane, cta.warp
        groups, blocks = codes.shape[0], codes.shape[1]
        first, last = cta.share(groups)
        begin = cute.arch.block_idx()[1] * (self.sizes.rows // UNIT_ROWS)
        end = cutlass.min(begin + self.sizes.rows // UNIT_ROWS, blocks)
        source = codes.iterator.toint() + lane * 16
        current, ahead = codes_now_and_ahead(LOADS)
        load_unit(self.chip, current, source, first * blocks, begin + warp, end)
        asked = load_column(x, first, thread)
        for i in cutlass.range(thread, (end - begin) * UNIT_ROWS, TABLE_THREADS, unroll=4):
            at = self.sizes.sums_at + 4 * i
            shared(Float32, at, 0)[0] = Float32(0.0)
        offsets = [Uint32(ptx.opaque(((i + lane) & (self.sizes.slices - 1)) * 4)) for i in range(self.sizes.slices)]
        for step in cutlass.range(first * steps, last * steps, unroll=1):
            group, half = step // steps, step % steps
            x_at = self.sizes.x_at + 4 * thread
            if thread < SLICES * VEC:
                shared(Float32, x_at, 0)[0] = asked
            cute.arch.sync_threads()
            make_table(self.sizes, codebooks, half, thread)
            asked = load_column(x, (step + 1) // steps, thread)
            cute.arch.sync_threads()
            for block in cutlass.range(begin + warp, end, WARPS, unroll=1):
                is_last = block + WARPS >= end
                after = cutlass.select_(is_last, cutlass.min((step + 1) // steps, last - 1), group)
                load_unit(self.chip, ahead, source, after * blocks,
                          cutlass.select_(is_last, begin + warp, block + WARPS), end)
                at = self.sizes.sums_at + ((block - begin) * UNIT_ROWS + lane * LANE_ROWS) * 4
                add_rows(self.sizes, current, offsets, half, lane, at)
                advance(current, ahead)
        cute.arch.sync_threads()
        for i in cutlass.range(thread, (end - begin) * UNIT_ROWS, TABLE_THREADS, unroll=4):
            partial[cta.index, 0, begin * UNIT_ROWS + i] = shared(Float32, self.sizes.sums_at + 4 * i, 0)[0]


@cute.jit
def load_unit(chip: cutlass.Constexpr[Chip], codes: cute.Tensor, source: Int64, first: Int32, block: Int32,
              end: Int32):
    """Codes of a lane's rows of a unit."""
    if block < end:
        for j in cutlass.range_constexpr(LOADS):
            load_once(source + Int64((first + block) * LOADS + j) * (WARP * 16), codes[None, j], chip)


@cute.jit
def load_column(x: cute.Tensor, group: Int32, thread: Int32) -> Float32:
    """One column of a group, of a thread of the first ones; 0 behind the last column."""
    value, column = Float32(0.0), group * (SLICES * VEC) + thread
    if thread < SLICES * VEC and column < x.shape[1]:
        value = visible(Float32(x[0, column]))
    return value


@cute.jit
def make_table(sizes: cutlass.Constexpr[Sizes], codebooks: cute.Tensor, half: Int32, thread: Int32):
    """Products of all entries with a group of columns: a thread has an entry and all slices of the table."""
    columns = cute.make_rmem_tensor(sizes.slices * VEC, Float32)
    for i in cutlass.range_constexpr(sizes.slices * VEC // 4):
        four = shared(Float32, sizes.x_at + half * (4 * sizes.slices * VEC) + 16 * i, 0, 4)
        for j in cutlass.range_constexpr(4):
            columns[4 * i + j] = four[j]
    for entry in cutlass.range(thread, BOOKS * ENTRIES, TABLE_THREADS, unroll=8):
        values = cute.make_rmem_tensor(VEC, Float16)
        cute.autovec_copy(words_at(codebooks.iterator.toint() + Int64(entry) * 16), cute.recast_tensor(values, Uint32))
        place = shared(Float32, TABLE_AT + entry * (4 * sizes.slices), 0, sizes.slices)
        made = cute.make_rmem_tensor(sizes.slices, Float32)
        made.fill(0.0)
        for e in cutlass.range_constexpr(VEC):
            for i in cutlass.range_constexpr(sizes.slices):
                made[i] = made[i] + Float32(values[e]) * columns[i * VEC + e]
        cute.autovec_copy(made, place)


@cute.jit
def add_rows(sizes: cutlass.Constexpr[Sizes], codes: cute.Tensor, offsets: list, half: Int32, lane: Int32, at: Int32):
    """Add a unit's sums to those of a lane's rows, which are at ``at``. half: which slices the table has."""
    sums = cute.make_rmem_tensor(LANE_ROWS, Float32)
    cute.autovec_copy(shared(Float32, at, 0, LANE_ROWS), sums)
    for row in cutlass.range_constexpr(LANE_ROWS):
        words = [codes[(ROW_WORDS * row + i) % 4, (ROW_WORDS * row + i) // 4] for i in range(ROW_WORDS)]
        found = entries(words)
        if cutlass.const_expr(sizes.slices < SLICES):
            found = half_of(found, half, lane)
        numbers = [shared(Float32, Int32(entry | offsets[i // BOOKS]), TABLE_AT + i % BOOKS * sizes.book_bytes)[0]
                   for i, entry in enumerate(found)]
        sums[row] = sums[row] + sum_of(numbers)
    cute.autovec_copy(sums, shared(Float32, at, 0, LANE_ROWS))


def sum_of(numbers: list[Float32]) -> Float32:
    """Their sum, of neighbours first."""
    while len(numbers) > 1:
        numbers = [numbers[i] + numbers[i + 1] for i in range(0, len(numbers), 2)]
    return numbers[0]


def half_of(found: list[Uint32], half: Int32, lane: Int32) -> list[Uint32]:
    """Codes of a row's slices 2 half and 2 half + 1, times 8: of places i and i + 2 each half has one."""
    kept = []
    for i in range(SLICES // 2):
        is_first = (((i + lane) >> 1) & 1) == half
        kept += [cutlass.select_(is_first, found[BOOKS * i + book], found[BOOKS * (i + 2) + book]) >> Uint32(1)
                 for book in range(BOOKS)]
    return kept


def entries(words: list[Uint32]) -> list[Uint32]:
    """Eight codes of 12 bits, times 16, of three words, lowest first."""
    low, high = Uint64(words[0]) | Uint64(words[1]) << Uint64(32), Uint64(words[1]) | Uint64(words[2]) << Uint64(32)
    shifted = (words[0] << Uint32(4), words[0] >> Uint32(8), Uint32(low >> Uint64(20)), words[1],
               words[1] >> Uint32(12), Uint32(high >> Uint64(24)), words[2] >> Uint32(4), words[2] >> Uint32(16))
    return [word & Uint32(ENTRY_MASK) for word in shifted]
