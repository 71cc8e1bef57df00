"""Hadamard transforms of sizes order x 256 and order x 512, order up to 64, of few rows: a Kronecker product by parts.

H = M (x) Sylvester(columns), M of the order. A row of the source is a matrix [order, columns], and so is its transform:

    M times it           tensor cores, tf32: each value is the sum of two, whose products with 1 and -1 are exact
    bits 0 and 1         of the columns: butterflies in registers
    bits 2 to 4          between lanes
    the other bits       in registers again, once the columns went through shared memory

A CTA makes up to eight rows of the result and reads all of the source, so CTAs exchange nothing but, for digits, the
largest coefficient. What does not depend on the kernel before is read before that one ends. Where there are no
clusters, digits are made by one CTA, or coefficients go to memory in fp32 (fixed.py makes digits of them).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from lowbit_attn.device import numbers, ptx
from lowbit_attn.device.linear.config import DIGIT_MAX, WARP, Chip
from lowbit_attn.device.linear.config import KRONECKER_PAD as PAD
from lowbit_attn.device.linear.hadamard import ABS_BITS, digits_of, row_of_digits, store_group, write_step
from lowbit_attn.device.linear.tables import let_next_start, wait_for_last, words_at
from lowbit_attn.device.numbers import ELEMENT
from lowbit_attn.kernels.linear import KRONECKER_ROWS

VECTOR = 4  # neighbouring columns that a lane has of a row of the source
STEP_ROWS = 8  # of the source in one multiply
BATCH_STEPS, BATCHES = 4, 2  # multiplies whose values are asked for at once; batches of the largest order
SIGNS = 2 * BATCH_STEPS * BATCHES  # of a lane
TILES = 2  # of 16 columns: a warp has 32
GROUP = 8  # results of a thread at the end
TF32_HALF, TF32_MASK = 0x1000, 0xFFFF_E000
CTAS = 8  # of a cluster, at most


class Kronecker:
    """One transform of each row of ``source`` [m, count]; kind: "digits" or "output", as in hadamard.py, or
    "coefficients": of x times scale, as they are, fp32 [m, size].

    signs: fp32 [CTAs of a row, 32 lanes, SIGNS], M as the CTAs' B operands, 0 where it has no row; order: of M.
    digits, coefficients: count and the columns of ``scale`` are multiples of VECTOR. output: out's columns are
    multiples of GROUP.
    """

    def __init__(self, kind: str, dtype: str, columns: int, chip: Chip):
        self.kind, self.dtype, self.columns, self.chip = kind, dtype, columns, chip
        self.has_clusters = kind == "digits" and chip.is_hopper
        self.smem_bytes = 4 * (KRONECKER_ROWS * (columns + PAD) + 64)

    @cute.jit
    def __call__(self, source: cute.Tensor, scale: cute.Tensor, signs: cute.Tensor, out: cute.Tensor,
                 digit_sums: cute.Tensor, steps: cute.Tensor, order: Int32, norm: Float32, stream):
        ctas = signs.shape[0]
        kernel = self.kernel(source, scale, signs, out, digit_sums, steps, order, norm)
        shape = dict(grid=(ctas, source.shape[0], 1), block=(self.columns, 1, 1), stream=stream,
                     use_pdl=self.chip.is_hopper)
        if cutlass.const_expr(self.has_clusters):
            kernel.launch(**shape, cluster=(ctas, 1, 1))
        else:
            kernel.launch(**shape)

    @cute.kernel
    def kernel(self, source: cute.Tensor, scale: cute.Tensor, signs: cute.Tensor, out: cute.Tensor,
               digit_sums: cute.Tensor, steps: cute.Tensor, order: Int32, norm: Float32):
        @cute.struct
        class Smem:
            values: cute.struct.Align[cute.struct.MemRange[Float32, KRONECKER_ROWS * (self.columns + PAD)], 128]
            notes: cute.struct.Align[cute.struct.MemRange[Int32, 64], 128]

        let_next_start(self.chip)
        smem = cutlass.memory.SmemAllocator().allocate(Smem)
        values = cute.make_tensor(smem.values.data_ptr(), cute.make_layout(KRONECKER_ROWS * (self.columns + PAD)))
        notes = cute.make_tensor(smem.notes.data_ptr(), cute.make_layout(64))
        thread, rank, row = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.block_idx()[1]
        rows = (order + signs.shape[0] - 1) // signs.shape[0]
        first, lane = rank * rows, thread % WARP
        operand = cute.make_rmem_tensor(SIGNS, Uint32)
        lane_signs = signs.iterator.toint() + Int64((rank * WARP + lane) * SIGNS) * 4
        for i in cutlass.range_constexpr(SIGNS // 4):
            four = words_at(lane_signs + 16 * i)
            for j in cutlass.range_constexpr(4):
                operand[4 * i + j] = four[j]
        place, group = thread // (self.columns // GROUP), thread % (self.columns // GROUP) * GROUP
        column = (first + place) * self.columns + group  # of the results that the thread has at the end
        is_live = (place < rows) & (first + place < order)
        factors = cute.make_rmem_tensor(GROUP, Float32)
        if cutlass.const_expr(self.kind == "output"):
            is_live = is_live & (column < out.shape[1])
            for i in cutlass.range_constexpr(GROUP):
                factors[i] = scale[cutlass.min(column + i, out.shape[1] - 1)]
        wait_for_last(self.chip)
        factor = steps[row] * norm if cutlass.const_expr(self.kind == "output") else norm
        sums = multiply_matrix(self.kind, self.dtype, self.columns, source, scale, operand, row, order, thread)
        store_sums(self.columns, values, sums, thread)
        cute.arch.sync_threads()
        largest = finish_columns(self.columns, values, thread)
        if cutlass.const_expr(self.kind == "digits"):
            if thread // WARP < KRONECKER_ROWS and lane == 0:
                notes[thread // WARP] = Int32(largest)
        cute.arch.sync_threads()
        results = results_of(self.columns, values, place, group)
        if cutlass.const_expr(self.kind == "output"):
            if is_live:
                store_output(ELEMENT[self.dtype], out, row, column, results, factors, factor)
        elif cutlass.const_expr(self.kind == "coefficients"):
            if is_live:
                store_coefficients(out, row, column, results)
        else:
            own = Int32(smem.notes.data_ptr().toint())
            largest = largest_of_row(self.has_clusters, notes, own, signs.shape[0], thread)
            inverse = write_step(DIGIT_MAX, largest, steps, row, norm, (thread == 0) & (rank == 0))
            write_digits(self.columns, out, digit_sums, notes, row, rank, column // GROUP, results, is_live, inverse,
                         thread)
            if cutlass.const_expr(self.has_clusters):
                if signs.shape[0] > 1:  # others may be reading this CTA's memory
                    cute.arch.cluster_arrive()
                    cute.arch.cluster_wait()


@cute.jit
def multiply_matrix(kind: cutlass.Constexpr[str], dtype: cutlass.Constexpr[str], columns: cutlass.Constexpr[int],
                    source: cute.Tensor, scale: cute.Tensor, operand: cute.Tensor, row: Int32, order: Int32,
                    thread: Int32) -> cute.Tensor:
    """M times a warp's 32 columns of the source: sums (row of the result's lane pair, column of VECTOR).

    A row of A is a column of the source: the lanes' neighbouring columns are rows of two tiles.
    """
    acc = cute.make_rmem_tensor((4, TILES, 2), Float32)
    acc.fill(0.0)
    data = [cute.make_rmem_tensor((VECTOR, BATCH_STEPS, 2), Float32) for _ in range(BATCHES)]
    data[1].fill(0.0)
    load_batch(kind, dtype, columns, source, scale, data[0], 0, row, order, thread)
    if order > BATCH_STEPS * STEP_ROWS:
        load_batch(kind, dtype, columns, source, scale, data[1], BATCH_STEPS * STEP_ROWS, row, order, thread)
    multiply_batch(acc, data[0], operand, 0)
    if order > BATCH_STEPS * STEP_ROWS:
        multiply_batch(acc, data[1], operand, 1)
    return sums_of_tiles(acc)


def sums_of_tiles(acc: cute.Tensor) -> cute.Tensor:
    """Both terms' sums, (column of VECTOR, row of the lane's pair)."""
    sums = cute.make_rmem_tensor((VECTOR, 2), Float32)
    for tile in range(TILES):
        for i in range(4):
            sums[2 * tile + i // 2, i % 2] = acc[i, tile, 0] + acc[i, tile, 1]
    return sums


@cute.jit
def load_batch(kind: cutlass.Constexpr[str], dtype: cutlass.Constexpr[str], columns: cutlass.Constexpr[int],
               source: cute.Tensor, scale: cute.Tensor, data: cute.Tensor, first: cutlass.Constexpr[int], row: Int32,
               order: Int32, thread: Int32):
    """A lane's columns of its rows of a batch of the source: see ``fill_batch``."""
    fill_batch(kind, dtype, columns, source, scale, data, first, row, order, thread)


def fill_batch(kind: str, dtype: str, columns: int, source: cute.Tensor, scale: cute.Tensor, data: cute.Tensor, first,
               row: Int32, order: Int32, thread: Int32) -> None:
    """A lane's columns of its rows of the source, t and t + 4 of every eight; of rows that are not there the last."""
    t, own = thread % 4, thread // WARP * WARP + thread % WARP // 4 * VECTOR
    base = source.iterator.toint()
    for step in range(BATCH_STEPS):
        for half in range(2):
            line = cutlass.min(first + STEP_ROWS * step + 4 * half + t, order - 1)
            column = line * columns + own
            if kind == "output":
                at = base + (Int64(row) * source.shape[1] + column) * 4
                cute.autovec_copy(words_at(at), cute.recast_tensor(data[None, step, half], Uint32))
            else:
                near = cutlass.min(column, source.shape[1] - VECTOR)
                words = words_at(base + (Int64(row) * source.shape[1] + near) * 2, 2)
                factors = words_at(scale.iterator.toint() + Int64(near) * 4)
                for i in range(2):
                    for j, value in enumerate(numbers.widen(words[i], dtype)):
                        factor = cutlass.select_(column < source.shape[1], factors[2 * i + j].bitcast(Float32),
                                                 Float32(0.0))
                        data[2 * i + j, step, half] = value * factor


def multiply_batch(acc: cute.Tensor, data: cute.Tensor, operand: cute.Tensor, batch: int) -> None:
    """Add the products of a batch's values, each as the sum of two of tf32, with their signs."""
    for step in range(data.shape[1]):
        at = 2 * (BATCH_STEPS * batch + step)
        for tile in range(TILES):
            values = [data[2 * tile + i % 2, step, i // 2] for i in range(4)]
            high = [(value.bitcast(Uint32) + Uint32(TF32_HALF)) & Uint32(TF32_MASK) for value in values]
            low = [(value - part.bitcast(Float32)).bitcast(Uint32) for value, part in zip(values, high)]
            for part, words in enumerate((high, low)):
                made = ptx.multiply_tf32(words, [operand[at], operand[at + 1]], [acc[i, tile, part] for i in range(4)])
                for i, value in enumerate(made):
                    acc[i, tile, part] = value


def butterflies(values: list) -> list:
    """Sylvester's transform of a power of two of values."""
    step = 1
    while step < len(values):
        values = [values[i] + values[i + step] if not i & step else values[i - step] - values[i]
                  for i in range(len(values))]
        step *= 2
    return values


@cute.jit
def store_sums(columns: cutlass.Constexpr[int], values: cute.Tensor, sums: cute.Tensor, thread: Int32):
    """The lowest five bits of a warp's columns; results to shared memory, [row of the CTA][column]."""
    lane, warp = thread % WARP, thread // WARP
    for half in cutlass.range_constexpr(2):
        four = butterflies([sums[i, half] for i in range(VECTOR)])
        for distance in (4, 8, 16):  # lanes that have the other value of a bit of g
            sign = cutlass.select_((lane & distance) != 0, Float32(-1.0), Float32(1.0))
            four = [cute.arch.shuffle_sync_bfly(value, offset=distance) + value * sign for value in four]
        made = cute.make_rmem_tensor(VECTOR, Float32)
        for i in cutlass.range_constexpr(VECTOR):
            made[i] = four[i]
        at = (2 * (lane % 4) + half) * (columns + PAD) + warp * WARP + lane // 4 * VECTOR
        cute.autovec_copy(made, aligned(values, at))


def aligned(values: cute.Tensor, at) -> cute.Tensor:
    """Four words of shared memory, in one access."""
    address = Int32(values.iterator.toint()) + 4 * at
    return cute.make_tensor(cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=16),
                            cute.make_layout(4))


@cute.jit
def finish_columns(columns: cutlass.Constexpr[int], values: cute.Tensor, thread: Int32) -> Uint32:
    """The higher bits of the columns, in place, a warp for each row; returns bits of the largest absolute value of the
    warp's row, those of a NaN are larger than any number's."""
    largest = Uint32(0)
    if thread < KRONECKER_ROWS * WARP:
        at = thread // WARP * (columns + PAD) + thread % WARP
        made = butterflies([values[at + WARP * i] for i in range(columns // WARP)])
        for i, value in enumerate(made):
            values[at + WARP * i] = value
            largest = cutlass.max(largest, value.bitcast(Uint32) & Uint32(ABS_BITS))
        largest = Uint32(cute.arch.warp_redux_sync(largest, "umax"))
    return largest


@cute.jit
def results_of(columns: cutlass.Constexpr[int], values: cute.Tensor, place: Int32, group: Int32) -> cute.Tensor:
    """Neighbouring results of a thread."""
    results = cute.make_rmem_tensor((4, GROUP // 4), Float32)
    for i in cutlass.range_constexpr(GROUP // 4):
        cute.autovec_copy(aligned(values, place * (columns + PAD) + group + 4 * i), results[None, i])
    return results


@cute.jit
def store_output(element: cutlass.Constexpr, out: cute.Tensor, row: Int32, column: Int32, results: cute.Tensor,
                 factors: cute.Tensor, factor: Float32):
    """A thread's results in 16 bits."""
    made, rounded = cute.make_rmem_tensor(GROUP, Float32), cute.make_rmem_tensor(GROUP, element)
    for i in cutlass.range_constexpr(GROUP):
        made[i] = results[i % 4, i // 4] * factor * factors[i]
    rounded.store(made.load().to(element))
    at = out.iterator.toint() + (Int64(row) * out.shape[1] + column) * 2
    cute.autovec_copy(cute.recast_tensor(rounded, Uint32), words_at(at))


@cute.jit
def store_coefficients(out: cute.Tensor, row: Int32, column: Int32, results: cute.Tensor):
    """A thread's results as they are."""
    for i in cutlass.range_constexpr(GROUP // 4):
        at = out.iterator.toint() + (Int64(row) * out.shape[1] + column + 4 * i) * 4
        cute.autovec_copy(cute.recast_tensor(results[None, i], Uint32), words_at(at))


@cute.jit
def largest_of_row(has_clusters: cutlass.Constexpr[bool], notes: cute.Tensor, own: Int32, ctas: Int32,
                   thread: Int32) -> Uint32:
    """The largest of all CTAs' maxima, which each has in its first notes; own: shared address of this CTA's."""
    lane = thread % WARP
    largest = Uint32(cute.arch.warp_redux_sync(Uint32(notes[lane % KRONECKER_ROWS]), "umax"))
    if cutlass.const_expr(has_clusters):
        if ctas > 1:
            if thread == 0:
                notes[KRONECKER_ROWS] = Int32(largest)
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            theirs = ptx.load_of_cta(ptx.of_cta(own + 4 * KRONECKER_ROWS, lane & (ctas - 1)))
            largest = Uint32(cute.arch.warp_redux_sync(theirs, "umax"))
    return largest


def pack_digits(words: cute.Tensor, results: cute.Tensor, inverse: Float32) -> tuple[Int32, Int32]:
    """Digits of eight results into words (even and odd columns, digit), which are zeros; returns both digits' sums."""
    high_sum, low_sum = Int32(0), Int32(0)
    for e in range(GROUP):
        high, low = digits_of(results[e % 4, e // 4], inverse)
        high_sum, low_sum = high_sum + high, low_sum + low
        for digit, kept in enumerate((high, low)):
            words[e % 2, digit] = words[e % 2, digit] | (Uint32(kept) & Uint32(255)) << Uint32(8 * (e // 2))
    return high_sum, low_sum


@cute.jit
def write_digits(columns: cutlass.Constexpr[int], out: cute.Tensor, digit_sums: cute.Tensor, notes: cute.Tensor,
                 row: Int32, rank: Int32, group: Int32, results: cute.Tensor, is_live, inverse: Float32,
                 thread: Int32):
    """A thread's digits, and the sums of all of the CTA's."""
    warps = columns // WARP
    lane, warp = thread % WARP, thread // WARP
    words = cute.make_rmem_tensor((2, 2), Uint32)  # even and odd columns, high and low digits
    words.fill(0)
    high_sum, low_sum = Int32(0), Int32(0)
    if is_live:
        high_sum, low_sum = pack_digits(words, results, inverse)
        store_group(words, row_of_digits(out, row), group)
    high_sum, low_sum = (Int32(cute.arch.warp_redux_sync(x, "add")) for x in (high_sum, low_sum))
    if lane == 0:
        notes[CTAS * 2 + warp], notes[CTAS * 2 + warps + warp] = high_sum, low_sum
    cute.arch.sync_threads()
    if thread < 2:
        total = Int32(0)
        for i in cutlass.range_constexpr(warps):
            total += notes[CTAS * 2 + warps * thread + i]
        digit_sums[row, rank, thread] = total
