"""y = x W^T over packed AQLM codes 2x12 by a table of products, for one row of x.

Of 32 columns, four slices of 8, a CTA has a table of the products with all 4,096 entries of both codebooks:

    T[book][entry][slice] = x_slice . entry, fp32: 128 KiB

A lane has four rows of W, of each 96 bits: the codes of four slices, in the order (i + lane) mod 4, so that lanes whose
entries have a bank in common still read different slices. CTAs share the groups of 32 columns, each with all rows,
whose sums stay in shared memory; ``Sum`` adds up those of all CTAs, always in the same order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint32, Uint64

from lowbit_attn.device import ptx
from lowbit_attn.hopper.common.numbers import ELEMENT
from lowbit_attn.hopper.linear.config import AQLM12_ROWS, TABLE_AT, TABLE_THREADS, WARP
from lowbit_attn.hopper.linear.tables import (
    advance,
    begin_kernel,
    codes_now_and_ahead,
    load_once,
    shared,
    visible,
    words_at,
)

WARPS = TABLE_THREADS // WARP
BOOKS, ENTRIES, VEC, SLICES = 2, 4096, 8, 4
BOOK_BYTES = ENTRIES * SLICES * 4
LANE_ROWS, ROW_WORDS, LOADS = 4, 3, 3
UNIT_ROWS = WARP * LANE_ROWS
X_AT = TABLE_AT + BOOKS * BOOK_BYTES  # a group's columns of x, fp32
SUMS_AT = X_AT + 4 * SLICES * VEC
ENTRY_MASK = 0xFFF0  # of a code times 16, the bytes of a table row


class Aqlm2x12:
    """Sums of a CTA's columns: partial fp32 [CTAs, 1, n of the pack], of x [1, k]; AQLM12_ROWS rows of W at most a CTA.

    codes: uint32 [k / 32, n / 128, 3, 32 lanes, 4]; codebooks: [2, 4096, 8] fp16.
    """

    smem_bytes = SUMS_AT - TABLE_AT + 4 * AQLM12_ROWS

    def __init__(self, dtype: str):
        self.element = ELEMENT[dtype]

    @cute.jit
    def __call__(self, x: cute.Tensor, codes: cute.Tensor, codebooks: cute.Tensor, partial: cute.Tensor, stream):
        parts = (codes.shape[1] * UNIT_ROWS + (AQLM12_ROWS - 1)) // AQLM12_ROWS
        self.kernel(x, codes, codebooks, partial).launch(
            grid=(partial.shape[0], parts, 1), block=(TABLE_THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, codes: cute.Tensor, codebooks: cute.Tensor, partial: cute.Tensor):
        cta = begin_kernel(self.smem_bytes)
        thread, lane, warp = cta.thread, cta.lane, cta.warp
        groups, blocks = codes.shape[0], codes.shape[1]
        first, last = cta.share(groups)
        begin = cute.arch.block_idx()[1] * (AQLM12_ROWS // UNIT_ROWS)
        end = cutlass.min(begin + AQLM12_ROWS // UNIT_ROWS, blocks)
        source = codes.iterator.toint() + lane * 16
        current, ahead = codes_now_and_ahead(LOADS)
        load_unit(current, source, first * blocks, begin + warp, end)
        asked = load_column(x, first, thread)
        for i in cutlass.range(thread, (end - begin) * UNIT_ROWS, TABLE_THREADS, unroll=4):
            shared(Float32, SUMS_AT + 4 * i, 0)[0] = Float32(0.0)
        offsets = [Uint32(ptx.opaque(((i + lane) & (SLICES - 1)) * 4)) for i in range(SLICES)]
        for group in cutlass.range(first, last, unroll=1):
            if thread < SLICES * VEC:
                shared(Float32, X_AT + 4 * thread, 0)[0] = asked
            cute.arch.sync_threads()
            make_table(codebooks, thread)
            asked = load_column(x, group + 1, thread)
            cute.arch.sync_threads()
            for block in cutlass.range(begin + warp, end, WARPS, unroll=1):
                is_last = block + WARPS >= end
                after = cutlass.select_(is_last, cutlass.min(group + 1, last - 1), group)
                load_unit(ahead, source, after * blocks, cutlass.select_(is_last, begin + warp, block + WARPS), end)
                add_rows(current, offsets, SUMS_AT + ((block - begin) * UNIT_ROWS + lane * LANE_ROWS) * 4)
                advance(current, ahead)
        cute.arch.sync_threads()
        for i in cutlass.range(thread, (end - begin) * UNIT_ROWS, TABLE_THREADS, unroll=4):
            partial[cta.index, 0, begin * UNIT_ROWS + i] = shared(Float32, SUMS_AT + 4 * i, 0)[0]


@cute.jit
def load_unit(codes: cute.Tensor, source: Int64, first: Int32, block: Int32, end: Int32):
    """Codes of a lane's rows of a unit."""
    if block < end:
        for j in cutlass.range_constexpr(LOADS):
            load_once(source + Int64((first + block) * LOADS + j) * (WARP * 16), codes[None, j])


@cute.jit
def load_column(x: cute.Tensor, group: Int32, thread: Int32) -> Float32:
    """One column of a group, of a thread of the first ones; 0 behind the last column."""
    value, column = Float32(0.0), group * (SLICES * VEC) + thread
    if thread < SLICES * VEC and column < x.shape[1]:
        value = visible(Float32(x[0, column]))
    return value


@cute.jit
def make_table(codebooks: cute.Tensor, thread: Int32):
    """Products of all entries with a group of columns: a thread has an entry and all four slices."""
    columns = cute.make_rmem_tensor(SLICES * VEC, Float32)
    for i in cutlass.range_constexpr(SLICES * VEC // 4):
        four = shared(Float32, X_AT + 16 * i, 0, 4)
        for j in cutlass.range_constexpr(4):
            columns[4 * i + j] = four[j]
    for entry in cutlass.range(thread, BOOKS * ENTRIES, TABLE_THREADS, unroll=8):
        values = cute.make_rmem_tensor(VEC, Float16)
        cute.autovec_copy(words_at(codebooks.iterator.toint() + Int64(entry) * 16), cute.recast_tensor(values, Uint32))
        place = shared(Float32, TABLE_AT + entry * (4 * SLICES), 0, SLICES)
        made = cute.make_rmem_tensor(SLICES, Float32)
        made.fill(0.0)
        for e in cutlass.range_constexpr(VEC):
            for i in cutlass.range_constexpr(SLICES):
                made[i] = made[i] + Float32(values[e]) * columns[i * VEC + e]
        cute.autovec_copy(made, place)


@cute.jit
def add_rows(codes: cute.Tensor, offsets: list, at: Int32):
    """Add a unit's sums to those of a lane's rows, which are at ``at``."""
    sums = cute.make_rmem_tensor(LANE_ROWS, Float32)
    cute.autovec_copy(shared(Float32, at, 0, LANE_ROWS), sums)
    for row in cutlass.range_constexpr(LANE_ROWS):
        words = [codes[(ROW_WORDS * row + i) % 4, (ROW_WORDS * row + i) // 4] for i in range(ROW_WORDS)]
        numbers = [shared(Float32, Int32(entry | offsets[i // BOOKS]), TABLE_AT + i % BOOKS * BOOK_BYTES)[0]
                   for i, entry in enumerate(entries(words))]
        sums[row] = sums[row] + (((numbers[0] + numbers[1]) + (numbers[2] + numbers[3]))
                                 + ((numbers[4] + numbers[5]) + (numbers[6] + numbers[7])))
    cute.autovec_copy(sums, shared(Float32, at, 0, LANE_ROWS))


def entries(words: list[Uint32]) -> list[Uint32]:
    """Eight codes of 12 bits, times 16, of three words, lowest first."""
    low, high = Uint64(words[0]) | Uint64(words[1]) << Uint64(32), Uint64(words[1]) | Uint64(words[2]) << Uint64(32)
    shifted = (words[0] << Uint32(4), words[0] >> Uint32(8), Uint32(low >> Uint64(20)), words[1],
               words[1] >> Uint32(12), Uint32(high >> Uint64(24)), words[2] >> Uint32(4), words[2] >> Uint32(16))
    return [word & Uint32(ENTRY_MASK) for word in shifted]
