"""Hadamard coefficients in fp32 to digits: the second launch of transforms whose CTAs are no cluster."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from lowbit_attn.device.linear.config import DIGIT_MAX, HADAMARD_THREADS, WARP, Chip
from lowbit_attn.device.linear.hadamard import (
    ABS_BITS,
    GROUP,
    digits_of,
    row_of_digits,
    store_group,
    write_step,
    write_sums,
)
from lowbit_attn.device.linear.tables import let_next_start, wait_for_last, words_at
from lowbit_attn.kernels.linear import FIXED_PARTS as PARTS

THREADS, WARPS = HADAMARD_THREADS, HADAMARD_THREADS // WARP
LOAD = 4  # coefficients in one access


class FixedDigits:
    """Digits of rows of ``source`` fp32 [m, size], size a multiple of LOAD, in steps of their largest. Each CTA of a
    row looks at all of it for the largest, and writes its part.

    out: uint32 [column blocks, chunks, 32 lanes, 8], as ``Hadamard`` writes it; digit_sums: int32 [m, PARTS, 2]; steps:
    fp32 [m], the largest coefficient over DIGIT_MAX, times norm: NaN for a row with a NaN or an infinity.
    """

    smem_bytes = 4 * 3 * WARPS

    def __init__(self, chip: Chip):
        self.chip = chip

    @cute.jit
    def __call__(self, source: cute.Tensor, out: cute.Tensor, digit_sums: cute.Tensor, steps: cute.Tensor,
                 norm: Float32, stream):
        self.kernel(source, out, digit_sums, steps, norm).launch(
            grid=(PARTS, source.shape[0], 1), block=(THREADS, 1, 1), stream=stream, use_pdl=self.chip.is_hopper)

    @cute.kernel
    def kernel(self, source: cute.Tensor, out: cute.Tensor, digit_sums: cute.Tensor, steps: cute.Tensor,
               norm: Float32):
        @cute.struct
        class Smem:
            notes: cute.struct.Align[cute.struct.MemRange[Int32, 3 * WARPS], 128]

        let_next_start(self.chip)
        notes = cute.make_tensor(cutlass.memory.SmemAllocator().allocate(Smem).notes.data_ptr(),
                                 cute.make_layout(3 * WARPS))
        thread, part, row = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.block_idx()[1]
        size, chunks = source.shape[1], out.shape[1]
        values = source.iterator.toint() + Int64(row) * size * 4
        wait_for_last(self.chip)
        largest = largest_of_row(values, size, notes, thread)
        inverse = write_step(DIGIT_MAX, largest, steps, row, norm, (thread == 0) & (part == 0))
        groups, words_of_row = chunks * 16, row_of_digits(out, row)
        high_sum, low_sum = Int32(0), Int32(0)
        for group in cutlass.range(groups * part // PARTS + thread, groups * (part + 1) // PARTS, THREADS, unroll=1):
            words = cute.make_rmem_tensor((2, 2), Uint32)  # even and odd columns, high and low digits
            words.fill(0)
            for half in cutlass.range_constexpr(GROUP // LOAD):
                first = group * GROUP + half * LOAD
                if first < size:
                    four = words_at(values + Int64(first) * 4)
                    for i in cutlass.range_constexpr(LOAD):
                        e = half * LOAD + i
                        high, low = digits_of(four[i].bitcast(Float32), inverse)
                        high_sum, low_sum = high_sum + high, low_sum + low
                        for digit, kept in enumerate((high, low)):
                            words[e % 2, digit] = (words[e % 2, digit]
                                                   | (Uint32(kept) & Uint32(255)) << Uint32(8 * (e // 2)))
            store_group(words, words_of_row, group)
        write_sums(notes, digit_sums, row, part, high_sum, low_sum, thread)


@cute.jit
def largest_of_row(values: Int64, size: Int32, notes: cute.Tensor, thread: Int32) -> Uint32:
    """Bits of the largest absolute value of a row; those of a NaN are larger than any number's."""
    largest = Uint32(0)
    for i in cutlass.range(thread, size // LOAD, THREADS, unroll=4):
        four = words_at(values + Int64(i) * (4 * LOAD))
        for j in cutlass.range_constexpr(LOAD):
            largest = cutlass.max(largest, four[j] & Uint32(ABS_BITS))
    largest = Uint32(cute.arch.warp_redux_sync(largest, "umax"))
    if thread % WARP == 0:
        notes[thread // WARP] = Int32(largest)
    cute.arch.sync_threads()
    return Uint32(cute.arch.warp_redux_sync(Uint32(notes[thread % WARP % WARPS]), "umax"))
