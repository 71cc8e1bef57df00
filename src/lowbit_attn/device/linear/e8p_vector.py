"""The product of E8P for few rows of x of up to 4,096 columns, with the transform of x inside it.

Every CTA makes the digits of all of x for itself, in shared memory, as two CTAs of ``Kronecker`` would make them: half
of its warps have eight rows of the result each. It costs no launch and no trip of the digits through memory, and it
takes its time while tables are filled and the first codes are on their way.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from lowbit_attn.device import numbers
from lowbit_attn.device.linear import kronecker
from lowbit_attn.device.linear.config import DIGIT_MAX, VECTOR_HALVES, WARP, GemvConfig
from lowbit_attn.device.linear.e8p import (
    DIGIT_WORDS,
    SUMS_AT,
    Digits,
    LaneCodes,
    clear_sums,
    fill_tables,
    load_codes,
    load_digits,
    multiply_share,
)
from lowbit_attn.device.linear.hadamard import store_group, write_step
from lowbit_attn.device.linear.kronecker import GROUP, PAD, SIGNS, STEP_ROWS, VECTOR
from lowbit_attn.device.linear.tables import begin_kernel, codes_now_and_ahead, shared, wait_for_last, words_at
from lowbit_attn.kernels.linear import KRONECKER_ROWS, VECTOR_COLUMNS

HALF = VECTOR_COLUMNS  # threads that make eight rows of the result
STEPS = VECTOR_HALVES * KRONECKER_ROWS // STEP_ROWS  # multiplies of the small matrix
VALUES_WORDS = KRONECKER_ROWS * (HALF + PAD)


class E8PVector:
    """Rows of x [m, k], m up to 4, times W: y' fp32 [m, rows of W], and the steps of x's rows, fp32 [m].

    in_scale: fp32 [k], k a multiple of VECTOR; signs: as of ``Kronecker`` with VECTOR_COLUMNS columns, of two CTAs at
    most; order: of the small matrix. The rest as ``E8PGemv``.
    """

    def __init__(self, cfg: GemvConfig, dtype: str):
        self.cfg, self.dtype = cfg, dtype
        self.smem_bytes = cfg.smem_bytes

    @cute.jit
    def __call__(self, codes: cute.Tensor, x: cute.Tensor, in_scale: cute.Tensor, signs: cute.Tensor,
                 tables: cute.Tensor, scales: cute.Tensor, out: cute.Tensor, steps: cute.Tensor, order: Int32,
                 norm: Float32, ctas: Int32, stream):
        self.kernel(codes, x, in_scale, signs, tables, scales, out, steps, order, norm).launch(
            grid=(ctas, 1, 1), block=(self.cfg.warps * WARP, 1, 1), stream=stream, use_pdl=self.cfg.chip.is_hopper)

    @cute.kernel
    def kernel(self, codes: cute.Tensor, x: cute.Tensor, in_scale: cute.Tensor, signs: cute.Tensor,
               tables: cute.Tensor, scales: cute.Tensor, out: cute.Tensor, steps: cute.Tensor, order: Int32,
               norm: Float32):
        cfg = self.cfg
        cta = begin_kernel(cfg.smem_bytes, cfg.chip)
        thread, lane = cta.thread, cta.lane
        first, last = cta.share(codes.shape[0])
        mine = LaneCodes(codes.iterator.toint() + lane * 16, Int64(codes.shape[1]) * (WARP * 16), codes.shape[1])
        place = Digits(Int32(cfg.digits_at) + lane * (4 * DIGIT_WORDS), mine.chunks, x.shape[0], lane >> 3)
        digits = cute.make_rmem_tensor((4, cfg.column_blocks, 2), Uint32)
        digits.fill(0)
        current, ahead = codes_now_and_ahead(cfg.blocks)
        load_codes(cfg, current, mine, first, last, cta.warp)
        half = thread // HALF
        operand = words_at(signs.iterator.toint() + Int64((cutlass.min(half, signs.shape[0] - 1) * WARP + lane)
                                                          * SIGNS) * 4)
        matrix = [operand[i] for i in range(2 * STEPS)]
        factors = cute.make_rmem_tensor((VECTOR, STEPS, 2), Float32)
        load_factors(in_scale, factors, order, thread % HALF)
        fill_tables(cfg.warps * WARP, tables, thread)
        clear_sums(cfg, thread)
        digit_sums_at = SUMS_AT + 4 * cfg.sums
        if thread < 2 * x.shape[0]:
            shared(Int32, digit_sums_at + 4 * thread, 0)[0] = Int32(0)
        wait_for_last(cfg.chip)
        for row in cutlass.range(x.shape[0], unroll=1):
            make_digits(cfg, self.dtype, x, factors, matrix, steps, row, order, norm, signs.shape[0], cta.index, thread)
        load_digits(cfg, digits, 0, place, cutlass.min(cta.warp, mine.chunks - 1))
        multiply_share(cfg, current, ahead, digits, mine, place, scales, out, first, last, cta)


def column_of(step: int, half: int, order: Int32, thread: Int32) -> Int32:
    """First of a lane's columns of x in a multiply: of a row of the source that is there."""
    line = cutlass.min(STEP_ROWS * step + 4 * half + thread % 4, order - 1)
    return line * HALF + thread // WARP * WARP + thread % WARP // 4 * VECTOR


@cute.jit
def load_factors(in_scale: cute.Tensor, factors: cute.Tensor, order: Int32, thread: Int32):
    """in_scale of a lane's columns, 0 where x has none."""
    for step in cutlass.range_constexpr(STEPS):
        for half in cutlass.range_constexpr(2):
            column = column_of(step, half, order, thread)
            near = cutlass.min(column, in_scale.shape[0] - VECTOR)
            words = words_at(in_scale.iterator.toint() + Int64(near) * 4)
            for i in cutlass.range_constexpr(VECTOR):
                factors[i, step, half] = cutlass.select_(column < in_scale.shape[0], words[i].bitcast(Float32),
                                                         Float32(0.0))


@cute.jit
def make_digits(cfg: cutlass.Constexpr[GemvConfig], dtype: cutlass.Constexpr[str], x: cute.Tensor,
                factors: cute.Tensor, matrix: list, steps: cute.Tensor, row: Int32, order: Int32, norm: Float32,
                halves: Int32, cta: Int32, thread: Int32):
    """Digits of a row of x in shared memory, and their sums; the row's step, by the first CTA."""
    half, own = thread // HALF, thread % HALF
    lane, warp = thread % WARP, thread // WARP
    values = cute.make_tensor(cute.make_ptr(Float32, Int32(cfg.values_at) + half * (4 * VALUES_WORDS),
                                            cute.AddressSpace.smem, assumed_align=16), cute.make_layout(VALUES_WORDS))
    notes = shared(Int32, Int32(cfg.values_at + 4 * VECTOR_HALVES * VALUES_WORDS), 0, 4)
    kronecker.store_sums(HALF, values, multiply_matrix(dtype, x, factors, matrix, row, order, own), own)
    cute.arch.sync_threads()
    largest = kronecker.finish_columns(HALF, values, own)
    if half >= halves:
        largest = Uint32(0)
    if lane == 0:
        notes[warp] = Int32(largest)
    cute.arch.sync_threads()
    rows = (order + halves - 1) // halves
    place, group = own // (HALF // GROUP), own % (HALF // GROUP) * GROUP
    line = half * rows + place
    results = kronecker.results_of(HALF, values, place, group)
    largest = Uint32(cute.arch.warp_redux_sync(Uint32(notes[lane % (VECTOR_HALVES * KRONECKER_ROWS)]), "umax"))
    inverse = write_step(DIGIT_MAX, largest, steps, row, norm, (thread == 0) & (cta == 0))
    words = cute.make_rmem_tensor((2, 2), Uint32)
    words.fill(0)
    target, sums_at = Int32(cfg.digits_at) + row * (8 * 4 * DIGIT_WORDS), SUMS_AT + 4 * cfg.sums + 8 * row
    high_sum, low_sum = Int32(0), Int32(0)
    if (place < rows) & (line < order):
        high_sum, low_sum = kronecker.pack_digits(words, results, inverse)
        store_group(words, target, (line * HALF + group) // GROUP, cute.AddressSpace.smem)
    for digit, value in enumerate((high_sum, low_sum)):
        total = Int32(cute.arch.warp_redux_sync(value, "add"))
        if lane == 0:
            cute.arch.atomic_add(shared(Int32, sums_at + 4 * digit, 0).iterator, total, sem="relaxed", scope="cta")
    cute.arch.sync_threads()


@cute.jit
def multiply_matrix(dtype: cutlass.Constexpr[str], x: cute.Tensor, factors: cute.Tensor, matrix: list, row: Int32,
                    order: Int32, thread: Int32) -> cute.Tensor:
    """The small matrix times a warp's 32 columns of x, as ``kronecker.multiply_matrix``."""
    acc = cute.make_rmem_tensor((4, kronecker.TILES, 2), Float32)
    acc.fill(0.0)
    data = cute.make_rmem_tensor((VECTOR, STEPS, 2), Float32)
    base = x.iterator.toint() + Int64(row) * x.shape[1] * 2
    for step in cutlass.range_constexpr(STEPS):
        for half in cutlass.range_constexpr(2):
            near = cutlass.min(column_of(step, half, order, thread), x.shape[1] - VECTOR)
            words = words_at(base + Int64(near) * 2, 2)
            for i in cutlass.range_constexpr(2):
                for j, value in enumerate(numbers.widen(words[i], dtype)):
                    data[2 * i + j, step, half] = value * factors[2 * i + j, step, half]
    kronecker.multiply_batch(acc, data, matrix, 0)
    return kronecker.sums_of_tiles(acc)
