"""y = x W^T over packed AQLM codes 2x8 by a table of products, for one row of x.

All rows of W share two codebooks of 256 entries. For 256 columns, 32 slices of 8, a CTA has a table of

    T[entry][book][slice] = x_slice . entry, fp32: 256 rows of 256 bytes

and a row of W is the sum of 64 of its numbers. Lane l has a row of W of its own and at step i reads slice
(i + l) mod 32: neighbours read different banks, and no sum crosses lanes. Byte 1 of an address is the code.

CTAs share units of 32 rows and 256 columns evenly, groups of columns first: a table serves all rows of a group that a
CTA has. Sums of a group of columns go to memory; ``Sum`` adds them up, always in the same order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint32

from lowbit_attn.device import ptx
from lowbit_attn.device.linear.config import HALF_ROW, TABLE_AT, TABLE_BYTES, TABLE_THREADS, WARP, Chip
from lowbit_attn.device.linear.tables import (
    advance,
    begin_kernel,
    codes_now_and_ahead,
    load_once,
    shared,
    visible,
    wait_for_last,
    words_at,
)
from lowbit_attn.device.numbers import ELEMENT

WARPS = TABLE_THREADS // WARP
BOOKS, ENTRIES, VEC, SLICES = 2, 256, 8, 32
LOADS, LOAD_STEPS = 4, 8  # of 16 bytes in a unit, each of 8 slices' two codes
ENTRIES_AT = TABLE_AT + TABLE_BYTES  # codebooks in fp32, [entry][book][8]


class Aqlm2x8:
    """Sums over groups of 256 columns: partial fp32 [k / 256, 1, n of the pack], of x [1, k].

    codes: uint32 [k / 256, n / 32, 4, 32 lanes, 4]; codebooks: [2, 256, 8] fp16.
    """

    def __init__(self, dtype: str, chip: Chip):
        self.element, self.chip = ELEMENT[dtype], chip
        self.smem_bytes = chip.before_tables + TABLE_BYTES + 4 * BOOKS * ENTRIES * VEC

    @cute.jit
    def __call__(self, x: cute.Tensor, codes: cute.Tensor, codebooks: cute.Tensor, partial: cute.Tensor, ctas: Int32,
                 stream):
        self.kernel(x, codes, codebooks, partial).launch(grid=(ctas, 1, 1), block=(TABLE_THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, codes: cute.Tensor, codebooks: cute.Tensor, partial: cute.Tensor):
        cta = begin_kernel(self.smem_bytes, self.chip)
        thread, lane, warp = cta.thread, cta.lane, cta.warp
        blocks = codes.shape[1]
        units = codes.shape[0] * blocks
        first, last = cta.share(units)
        source = codes.iterator.toint() + lane * 16
        current, ahead = codes_now_and_ahead(LOADS)
        unit = first + warp
        load_unit(self.chip, current, source, unit, last)
        slice_of_x = cute.make_rmem_tensor(VEC, self.element)
        load_slice(self.element, x, slice_of_x, first // blocks, lane)
        widen_codebooks(codebooks, thread)
        cute.arch.sync_threads()
        while first < last:
            group = first // blocks
            end = cutlass.min((group + 1) * blocks, last)
            make_table(slice_of_x, warp, lane)
            cute.arch.sync_threads()
            offsets = [Uint32(ptx.opaque(offsets_of(q, lane))) for q in range(8)]
            if end < last:
                load_slice(self.element, x, slice_of_x, group + 1, lane)
            while unit < end:
                load_unit(self.chip, ahead, source, unit + WARPS, last)
                partial[group, 0, (unit - group * blocks) * WARP + lane] = row_sum(current, offsets)
                advance(current, ahead)
                unit += WARPS
            cute.arch.sync_threads()
            first = end


@cute.jit
def load_unit(chip: cutlass.Constexpr[Chip], codes: cute.Tensor, source: Int64, unit: Int32, last: Int32):
    """Codes of a lane's row of a unit."""
    if unit < last:
        for j in cutlass.range_constexpr(LOADS):
            load_once(source + Int64(unit * LOADS + j) * (WARP * 16), codes[None, j], chip)


@cute.jit
def widen_codebooks(codebooks: cute.Tensor, thread: Int32):
    """Both codebooks to shared memory in fp32: a thread has an entry of one book."""
    for i in cutlass.range(thread, BOOKS * ENTRIES, TABLE_THREADS, unroll=1):
        book, entry = i // ENTRIES, i % ENTRIES
        values = cute.make_rmem_tensor(VEC, Float16)
        cute.autovec_copy(words_at(codebooks.iterator.toint() + Int64(i) * 16), cute.recast_tensor(values, Uint32))
        for half in cutlass.range_constexpr(2):
            place = shared(Float32, ENTRIES_AT + ((entry * BOOKS + book) * VEC + 4 * half) * 4, 0, 4)
            for e in cutlass.range_constexpr(4):
                place[e] = Float32(values[4 * half + e])


@cute.jit
def load_slice(element: cutlass.Constexpr, x: cute.Tensor, slice_of_x: cute.Tensor, group: Int32, lane: Int32):
    """A lane's slice of a group of columns, as it is in memory; zeros behind the last column."""
    for e in cutlass.range_constexpr(VEC):
        column = (group * SLICES + lane) * VEC + e
        slice_of_x[e] = element(0.0)
        if column < x.shape[1]:
            slice_of_x[e] = x[0, column]


@cute.jit
def make_table(asked: cute.Tensor, warp: Int32, lane: Int32):
    """Products of all entries with a group of columns: a lane has a slice, a warp as many entries as another."""
    slice_of_x = [visible(Float32(asked[e])) for e in range(VEC)]
    for i in cutlass.range(warp * (BOOKS * ENTRIES // WARPS), (warp + 1) * (BOOKS * ENTRIES // WARPS), unroll=4):
        entry = cute.make_rmem_tensor((4, 2), Float32)
        for half in cutlass.range_constexpr(2):
            cute.autovec_copy(shared(Float32, ENTRIES_AT + (i * VEC + 4 * half) * 4, 0, 4), entry[None, half])
        made = [entry[e % 4, e // 4] * slice_of_x[e] for e in range(VEC)]
        total = ((made[0] + made[1]) + (made[2] + made[3])) + ((made[4] + made[5]) + (made[6] + made[7]))
        shared(Float32, TABLE_AT + i * HALF_ROW + lane * 4, 0)[0] = total


def offsets_of(q: int, lane: Int32) -> Uint32:
    """Bytes from a table row's start at which the slices of steps 4 q to 4 q + 3 are, one a byte."""
    return sum((Uint32(((4 * q + z + lane) & (SLICES - 1)) * 4) << Uint32(8 * z) for z in range(4)), Uint32(0))


def row_sum(codes: cute.Tensor, offsets: list[Uint32]) -> Float32:
    """Sum of a lane's 64 numbers of the table."""
    sums = [Float32(0.0)] * 4
    for j in range(LOADS):
        for b in range(16):
            step, book = LOAD_STEPS * j + b // 2, b % 2
            sign = 12 + step % 4  # the sign of an offset's byte: zeros
            select = 4 + step % 4 | (b % 4) << 4 | sign << 8 | sign << 12
            address = ptx.permute(codes[b // 4, j], offsets[step // 4], select)
            sums[b % 4] = sums[b % 4] + shared(Float32, Int32(address), TABLE_AT + book * HALF_ROW)[0]
    return (sums[0] + sums[1]) + (sums[2] + sums[3])


class Sum:
    """y [m, n] = scales times the sum of partial fp32 [parts, m, n of the pack] over its parts; 32 columns a CTA."""

    smem_bytes = 4 * TABLE_THREADS

    def __init__(self, dtype: str, chip: Chip):
        self.element, self.chip = ELEMENT[dtype], chip

    @cute.jit
    def __call__(self, partial: cute.Tensor, scales: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(partial, scales, y).launch(grid=((y.shape[1] + WARP - 1) // WARP, y.shape[0], 1),
                                               block=(TABLE_THREADS, 1, 1), stream=stream, use_pdl=self.chip.is_hopper)

    @cute.kernel
    def kernel(self, partial: cute.Tensor, scales: cute.Tensor, y: cute.Tensor):
        @cute.struct
        class Smem:
            sums: cute.struct.Align[cute.struct.MemRange[Float32, TABLE_THREADS], 128]

        sums = cute.make_tensor(cutlass.memory.SmemAllocator().allocate(Smem).sums.data_ptr(),
                                cute.make_layout(TABLE_THREADS))
        thread, row = cute.arch.thread_idx()[0], cute.arch.block_idx()[1]
        column = cute.arch.block_idx()[0] * WARP + thread % WARP
        is_there = column < y.shape[1]
        wait_for_last(self.chip)
        total = Float32(0.0)
        if is_there:
            for part in cutlass.range(thread // WARP, partial.shape[0], WARPS, unroll=8):
                total += partial[part, row, column]
        sums[thread] = total
        cute.arch.sync_threads()
        if thread < WARP and is_there:
            for i in cutlass.range_constexpr(1, WARPS):
                total += sums[thread + i * WARP]
            y[row, column] = self.element(visible(total) * scales[column])  # only x can bring an infinity
