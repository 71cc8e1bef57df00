"""Hadamard transforms around the product of QuIP#: before it, H^T (x s) as digits, after it (H y') s.

H = matrix of a small order (x) Sylvester's of 2^bits, over sqrt(size). A row is transformed by one CTA or by a cluster
of eight, which share the columns of the Sylvester part: its low bits and the small matrix stay within a CTA, the three
high bits are one exchange through distributed shared memory, an eighth of all coefficients by each CTA. Where there are
no clusters, one CTA transforms a row.

    load -> [radix 8 in registers, through shared memory] x bits / 3 -> small matrix -> exchange -> result
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Int64, Uint32

from lowbit_attn.device import ptx
from lowbit_attn.device.linear.config import COLUMNS, DIGIT_MAX, HADAMARD_THREADS, SMALLEST, WARP, Chip
from lowbit_attn.device.linear.tables import let_next_start, wait_for_last
from lowbit_attn.device.numbers import ELEMENT
from lowbit_attn.kernels.linear import CLUSTER_LOG2, hadamard_limit

CTAS = 1 << CLUSTER_LOG2
THREADS, WARPS = HADAMARD_THREADS, HADAMARD_THREADS // WARP
LOADS = 8  # of a thread that are on their way at once
MANY = 1 << 30  # columns: more than any matrix has
GROUP = 8  # coefficients that a thread has at once
NOTES_WORDS = 3 * WARPS + 16  # of each warp: maximum and two sums; of the CTA: maximum
ROUND = 12_582_912.0  # 1.5 * 2^23: added, it leaves an integer in the low bits
ROUND_BITS = 0x4B40_0000
INFINITY_BITS, NAN_BITS, ABS_BITS = 0x7F80_0000, 0x7FC0_0000, 0x7FFF_FFFF


def place(i):
    """Word of a coefficient in a buffer: four words are free behind every 32: strides of 8 have no conflicts."""
    return i + 4 * (i >> 5)


def groups_of(count):
    """Groups of coefficients that a CTA of a cluster gets of each CTA's."""
    return (count // GROUP + CTAS - 1) // CTAS


def share_of(count, rank):
    """Coefficients that a CTA of a cluster gets of each CTA's: the last ones get fewer."""
    size = groups_of(count) * GROUP
    return cutlass.max(cutlass.min(size, count - rank * size), Int32(0))


class Share(NamedTuple):
    """Which coefficients a CTA has at the end: of each CTA of the cluster as many, one part after the other."""

    rank: Int32
    count: Int32  # coefficients of a CTA before the exchange
    share: Int32  # of a part
    bits: Int32
    low_bits: Int32
    cluster_log2: Int32

    @property
    def first(self):
        """First of its share of each CTA's coefficients."""
        return self.rank * groups_of(self.count) * GROUP

    def column(self, part, i):
        """Coefficient of the row that is number i of a part's: of CTA ``part`` of the cluster."""
        local = self.first + i
        return (local >> self.low_bits << self.bits) + (part << self.low_bits) + (local & ((1 << self.low_bits) - 1))


class Hadamard:
    """One transform of each row of ``source`` [m, count]; kind: "digits", "rotate" or "output".

    digits, rotate: source times scale [count], filled with zeros up to the transform's size, H^T, in steps of its row:
    as 16-bit fixed point (its largest is DIGIT_MAX), or as fp16 (1), with zeros behind the last coefficient. steps fp32
    [m]: NaN for a row with a NaN or an infinity. output: H of the first size columns of source fp32, times scale [count
    of results] and the row's step.
    """

    def __init__(self, kind: str, dtype: str, chip: Chip):
        self.kind, self.element, self.chip = kind, ELEMENT[dtype], chip
        limit = hadamard_limit(chip.is_hopper)
        self.buffer_words = limit + limit // 8  # place(limit)
        self.smem_bytes = 4 * (2 * self.buffer_words + NOTES_WORDS)

    @cute.jit
    def __call__(self, source: cute.Tensor, scale: cute.Tensor, matrix: cute.Tensor, out: cute.Tensor,
                 digit_sums: cute.Tensor, steps: cute.Tensor, bits: Int32, cluster_log2: Int32, norm: Float32, stream):
        if cutlass.const_expr(self.chip.is_hopper):
            ctas = Int32(1) << cluster_log2
            self.kernel(source, scale, matrix, out, digit_sums, steps, bits, cluster_log2, norm).launch(
                grid=(ctas, source.shape[0], 1), block=(THREADS, 1, 1), cluster=(ctas, 1, 1), stream=stream,
                use_pdl=self.kind == "output")
        else:
            self.kernel(source, scale, matrix, out, digit_sums, steps, bits, 0, norm).launch(
                grid=(1, source.shape[0], 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, source: cute.Tensor, scale: cute.Tensor, matrix: cute.Tensor, out: cute.Tensor,
               digit_sums: cute.Tensor, steps: cute.Tensor, bits: Int32, log2: Int32, norm: Float32):
        @cute.struct
        class Smem:
            first: cute.struct.Align[cute.struct.MemRange[Float32, self.buffer_words], 128]
            second: cute.struct.Align[cute.struct.MemRange[Float32, self.buffer_words], 128]
            notes: cute.struct.Align[cute.struct.MemRange[Int32, NOTES_WORDS], 64]

        let_next_start(self.chip)
        cluster_log2 = log2 if cutlass.const_expr(self.chip.is_hopper) else Int32(0)
        smem = cutlass.memory.SmemAllocator().allocate(Smem)
        buffers = cute.make_tensor(smem.first.data_ptr(), cute.make_layout(2 * self.buffer_words))
        notes = cute.make_tensor(smem.notes.data_ptr(), cute.make_layout(NOTES_WORDS))
        thread, rank, row = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.block_idx()[1]
        order, low_bits = matrix.shape[0], bits - cluster_log2
        count = order << low_bits
        if cutlass.const_expr(self.kind == "output"):
            wait_for_last(self.chip)
        load(self.kind, source, scale, buffers, row, rank, bits, low_bits, count, thread)
        cute.arch.sync_threads()
        sylvester(buffers, count, low_bits, thread)
        at = Int32(0)
        if order > 1:
            small_matrix(self.buffer_words, matrix, buffers, order, low_bits, thread)
            cute.arch.sync_threads()
            at = Int32(self.buffer_words)
        share = count
        if cutlass.const_expr(self.chip.is_hopper):
            if cluster_log2 > 0:
                cute.arch.cluster_arrive()
                cute.arch.cluster_wait()
                share = share_of(count, rank)
                exchange(self.buffer_words, Int32(smem.first.data_ptr().toint()), buffers, at,
                         Share(rank, count, share, bits, low_bits, cluster_log2), thread)
                cute.arch.sync_threads()
                at = self.buffer_words - at
        mine = Share(rank, count, share, bits, low_bits, cluster_log2)
        if cutlass.const_expr(self.kind == "output"):
            write_output(self.element, buffers, at, scale, steps, out, row, mine, norm, thread)
        else:
            largest = largest_of(self.chip, buffers, at, notes, Int32(smem.notes.data_ptr().toint()), mine, thread)
            top = DIGIT_MAX if self.kind == "digits" else 1
            inverse = write_step(top, largest, steps, row, norm, (thread == 0) & (mine.rank == 0))
            if cutlass.const_expr(self.kind == "digits"):
                write_digits(buffers, at, notes, out, digit_sums, row, mine, inverse, thread)
            else:
                write_rotated(buffers, at, out, row, mine, inverse, thread)
        if cutlass.const_expr(self.chip.is_hopper):
            if cluster_log2 > 0:  # others may be reading this CTA's memory
                cute.arch.cluster_arrive()
                cute.arch.cluster_wait()


@cute.jit
def load(kind: cutlass.Constexpr[str], source: cute.Tensor, scale: cute.Tensor, buffers: cute.Tensor, row: Int32,
         rank: Int32, bits: Int32, low_bits: Int32, count: Int32, thread: Int32):
    """A CTA's columns of a row of the source: a thread asks for several before it uses any."""
    values, factors = (cute.make_rmem_tensor(LOADS, Float32) for _ in range(2))
    live = source.shape[1] if cutlass.const_expr(kind != "output") else Int32(MANY)
    for first in cutlass.range(thread, count, LOADS * THREADS, unroll=1):
        for u in cutlass.range_constexpr(LOADS):
            i = cutlass.min(first + u * THREADS, count - 1)
            column = (i >> low_bits << bits) + (rank << low_bits) + (i & ((1 << low_bits) - 1))
            near = cutlass.min(column, live - 1)
            values[u], factors[u] = Float32(source[row, near]), Float32(1.0)
            if cutlass.const_expr(kind != "output"):
                factors[u] = cutlass.select_(column < live, scale[near], Float32(0.0))
        for u in cutlass.range_constexpr(LOADS):
            i = first + u * THREADS
            if i < count:
                buffers[place(i)] = values[u] if cutlass.const_expr(kind == "output") else values[u] * factors[u]


@cute.jit
def sylvester(buffers: cute.Tensor, count: Int32, low_bits: Int32, thread: Int32):
    """Sums and differences over the low bits of the columns, three bits at a time, then one at a time."""
    bit = Int32(0)
    while bit + 3 <= low_bits:
        # place(base + (i << bit)) - place(base): bit is a multiple of 3
        stride = cutlass.select_(bit < 6, Int32(1) << bit, Int32(9) << cutlass.max(bit - 3, Int32(0)))
        offsets = [i * stride + (i >> 2) * 4 * Int32(bit == 3) for i in range(GROUP)]
        for group in cutlass.range(thread, count >> 3, THREADS, unroll=1):
            base = place(((group >> bit) << (bit + 3)) + (group & ((1 << bit) - 1)))
            values = [buffers[base + offset] for offset in offsets]
            for offset, value in zip(offsets, butterflies(values)):
                buffers[base + offset] = value
        cute.arch.sync_threads()
        bit += 3
    while bit < low_bits:
        for pair in cutlass.range(thread, count >> 1, THREADS, unroll=2):
            base = ((pair >> bit) << (bit + 1)) + (pair & ((1 << bit) - 1))
            low, high = buffers[place(base)], buffers[place(base + (1 << bit))]
            buffers[place(base)] = low + high
            buffers[place(base + (1 << bit))] = low - high
        cute.arch.sync_threads()
        bit += 1


def butterflies(values: list) -> list:
    """Sylvester's transform of eight values."""
    for step in (1, 2, 4):
        values = [values[i] + values[i + step] if not i & step else values[i - step] - values[i] for i in range(GROUP)]
    return values


@cute.jit
def small_matrix(second: cutlass.Constexpr[int], matrix: cute.Tensor, buffers: cute.Tensor, order: Int32,
                 low_bits: Int32, thread: Int32):
    """The small matrix [source row, result row] over the blocks of 2^low_bits columns, to the second buffer, so many
    words behind the first.

    A thread has four results of four columns, or of one where there are few.
    """
    if low_bits >= 5:
        matrix_tiles(second, matrix, buffers, order, low_bits, thread, 4)
    else:
        matrix_tiles(second, matrix, buffers, order, low_bits, thread, 1)


@cute.jit
def matrix_tiles(second: cutlass.Constexpr[int], matrix: cute.Tensor, buffers: cute.Tensor, order: Int32,
                 low_bits: Int32, thread: Int32, width: cutlass.Constexpr[int]):
    """``small_matrix`` with so many columns a thread."""
    log2 = width.bit_length() - 1
    tiles_log2 = low_bits - log2
    signs, values = cute.make_rmem_tensor(4, Float32), cute.make_rmem_tensor(width, Float32)
    row_bytes = Int64(order) * 4
    own = buffers.iterator.toint()
    for i in cutlass.range(thread, (order >> 2) << tiles_log2, THREADS, unroll=1):
        column, first = (i & ((1 << tiles_log2) - 1)) << log2, (i >> tiles_log2) * 4
        made = cute.make_rmem_tensor((width, 4), Float32)
        made.fill(0.0)
        at = matrix.iterator.toint() + first * 4
        for j in cutlass.range(order, unroll=4):
            pointer = cute.make_ptr(Float32, at, cute.AddressSpace.gmem, assumed_align=16)
            cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), signs)
            at += row_bytes
            near = cute.make_ptr(Float32, Int32(own) + 4 * place((j << low_bits) + column), cute.AddressSpace.smem,
                                 assumed_align=4 * width)
            cute.autovec_copy(cute.make_tensor(near, cute.make_layout(width)), values)
            for r in cutlass.range_constexpr(4):
                for c in cutlass.range_constexpr(width):
                    made[c, r] = made[c, r] + signs[r] * values[c]
        for r in cutlass.range_constexpr(4):
            to = cute.make_ptr(Float32, Int32(own) + 4 * (second + place(((first + r) << low_bits) + column)),
                               cute.AddressSpace.smem, assumed_align=4 * width)
            cute.autovec_copy(made[None, r], cute.make_tensor(to, cute.make_layout(width)))


@cute.jit
def exchange(second: cutlass.Constexpr[int], own: Int32, buffers: cute.Tensor, at: Int32, mine: Share, thread: Int32):
    """The high bits: a CTA's share of each CTA's coefficients, from ``at`` on, to the other buffer, part by part.

    own: shared address of the buffers, the second one so many words behind the first.
    """
    parts = [ptx.of_cta(own, Int32(part)) for part in range(CTAS)]
    for i in cutlass.range(thread, mine.share, THREADS, unroll=1):
        word = Uint32(4 * (at + place(mine.first + i)))
        values = butterflies([ptx.load_of_cta(part + word).bitcast(Float32) for part in parts])
        for part, value in enumerate(values):
            buffers[second - at + place(part * mine.share + i)] = value


@cute.jit
def write_output(element: cutlass.Constexpr, buffers: cute.Tensor, at: Int32, scale: cute.Tensor, steps: cute.Tensor,
                 out: cute.Tensor, row: Int32, mine: Share, norm: Float32, thread: Int32):
    """Those results that ``out`` has, in 16 bits."""
    factor = steps[row] * norm
    for part in cutlass.range(Int32(1) << mine.cluster_log2, unroll=1):
        for i in cutlass.range(thread, mine.share, THREADS, unroll=2):
            column = mine.column(part, i)
            if column < out.shape[1]:
                out[row, column] = element(buffers[at + place(part * mine.share + i)] * factor * scale[column])


@cute.jit
def write_rotated(buffers: cute.Tensor, at: Int32, out: cute.Tensor, row: Int32, mine: Share, inverse: Float32,
                  thread: Int32):
    """Coefficients as fp16, and zeros behind those that one CTA has."""
    for part in cutlass.range(Int32(1) << mine.cluster_log2, unroll=1):
        for i in cutlass.range(thread, mine.share, THREADS, unroll=2):
            out[row, mine.column(part, i)] = Float16(buffers[at + place(part * mine.share + i)] * inverse)
    if mine.cluster_log2 == 0:
        for column in cutlass.range(mine.share + thread, out.shape[1], THREADS, unroll=1):
            out[row, column] = Float16(0.0)


@cute.jit
def largest_of(chip: cutlass.Constexpr[Chip], buffers: cute.Tensor, at: Int32, notes: cute.Tensor, own_notes: Int32,
               mine: Share, thread: Int32) -> Uint32:
    """Bits of the largest absolute value of a row; those of a NaN are larger than any number's."""
    lane, warp = thread % WARP, thread // WARP
    largest = Uint32(0)
    for i in cutlass.range(thread, mine.share << mine.cluster_log2, THREADS, unroll=4):
        largest = cutlass.max(largest, buffers[at + place(i)].bitcast(Uint32) & Uint32(ABS_BITS))
    largest = Uint32(cute.arch.warp_redux_sync(largest, "umax"))
    if lane == 0:
        notes[warp] = Int32(largest)
    cute.arch.sync_threads()
    largest = Uint32(cute.arch.warp_redux_sync(Uint32(notes[lane % WARPS]), "umax"))
    if cutlass.const_expr(chip.is_hopper):
        if mine.cluster_log2 > 0:
            if thread == 0:
                notes[3 * WARPS] = Int32(largest)
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            theirs = ptx.load_of_cta(ptx.of_cta(own_notes + 4 * (3 * WARPS), lane % CTAS))
            largest = Uint32(cute.arch.warp_redux_sync(theirs, "umax"))
    return largest


@cute.jit
def write_step(top: cutlass.Constexpr[int], largest: Uint32, steps: cute.Tensor, row: Int32, norm: Float32,
               is_first: Boolean) -> Float32:
    """Write a row's step, with which its largest coefficient is ``top`` steps; returns steps a value of the buffer."""
    value = largest.bitcast(Float32)
    inverse, step = Float32(0.0), value * norm * Float32(1 / top)
    if largest >= INFINITY_BITS:  # a NaN or an infinity: nothing else may hide it
        step = Uint32(NAN_BITS).bitcast(Float32)
    elif value >= Float32(SMALLEST):
        inverse = Float32(top) / value
    if is_first:
        steps[row] = step
    return inverse


@cute.jit
def write_digits(buffers: cute.Tensor, at: Int32, notes: cute.Tensor, out: cute.Tensor, digit_sums: cute.Tensor,
                 row: Int32, mine: Share, inverse: Float32, thread: Int32):
    """Digits of a row, and their sums."""
    high_sum, low_sum = store_digits(buffers, at, out, row, mine, Int32(1) << mine.cluster_log2, inverse, thread)
    write_sums(notes, digit_sums, row, mine.rank, high_sum, low_sum, thread)


@cute.jit
def write_sums(notes: cute.Tensor, digit_sums: cute.Tensor, row: Int32, part: Int32, high_sum: Int32, low_sum: Int32,
               thread: Int32):
    """Sums of all threads' digits, of those of a row that the CTA has."""
    lane, warp = thread % WARP, thread // WARP
    high_sum, low_sum = (Int32(cute.arch.warp_redux_sync(x, "add")) for x in (high_sum, low_sum))
    if lane == 0:
        notes[WARPS + warp], notes[2 * WARPS + warp] = high_sum, low_sum
    cute.arch.sync_threads()
    if thread < 2:
        total = Int32(0)
        for i in cutlass.range_constexpr(WARPS):
            total += notes[WARPS * (1 + thread) + i]
        digit_sums[row, part, thread] = total


@cute.jit
def store_digits(buffers: cute.Tensor, at: Int32, out: cute.Tensor, row: Int32, mine: Share, parts: Int32,
                 inverse: Float32, thread: Int32) -> tuple[Int32, Int32]:
    """Digits of groups of eight columns, in the order of the product's B operand; returns the sums of both digits.

    Of a row that one CTA has, columns behind the last one get zeros.
    """
    chunks = out.shape[1]
    groups = mine.share // GROUP
    if mine.cluster_log2 == 0:
        groups = chunks * 16
    high_sum, low_sum = Int32(0), Int32(0)
    row_words = row_of_digits(out, row)
    for i in cutlass.range(thread, groups * parts, THREADS, unroll=1):
        part, inside = i // groups, (i % groups) * GROUP
        words = cute.make_rmem_tensor((2, 2), Uint32)  # even and odd columns, high and low digits
        words.fill(0)
        for e in cutlass.range_constexpr(GROUP):
            if inside + e < mine.share:
                value = buffers[at + place(part * mine.share + inside + e)]
                high, low = digits_of(value, inverse)
                high_sum += high
                low_sum += low
                for digit, kept in enumerate((high, low)):
                    words[e % 2, digit] = words[e % 2, digit] | (Uint32(kept) & Uint32(255)) << Uint32(8 * (e // 2))
        store_group(words, row_words, mine.column(part, inside) // GROUP)
    return high_sum, low_sum


def digits_of(value: Float32, inverse: Float32) -> tuple[Int32, Int32]:
    """(high, low) digit of a coefficient, both signed bytes: 256 high + low is its number of steps."""
    number = (value * inverse + ROUND).bitcast(Int32) - ROUND_BITS
    high = (number + 128) >> 8
    return high, number - (high << 8)


def row_of_digits(out: cute.Tensor, row: Int32) -> Int64:
    """Address of a row's digits in chunk 0."""
    return out.iterator.toint() + (Int64(row // COLUMNS) * out.shape[1] * (WARP * 8) + (row % COLUMNS) * 64) * 4


def store_group(words: cute.Tensor, row_words, group: Int32,
                space: cute.AddressSpace = cute.AddressSpace.gmem) -> None:
    """Digits of eight columns, (even and odd columns, digit), to where the product's B operand has them: a lane's words
    of two groups are even columns of both, then odd ones, so that an operand is two neighbouring registers."""
    chunk, j, t = group >> 4, (group >> 2) & 3, group & 3
    for digit in range(2):
        target = row_words + row_words.dtype(chunk * (WARP * 8) + (4 * digit + t) * 8 + 4 * (j >> 1) + (j & 1)) * 4
        for parity in range(2):
            word = cute.make_ptr(Uint32, target + 8 * parity, space, assumed_align=4)
            cute.make_tensor(word, cute.make_layout(1))[0] = words[parity, digit]
