"""Hadamard transforms of sizes order x 64 to order x 512, order up to 256, of few rows: ``Kronecker`` in more parts.

A CTA makes eight rows of the result of all rows of the source, 32 of them at a time, while the next ones are on their
way. There may be more CTAs of a row than a cluster has, so that coefficients go to memory, and fixed.py makes digits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from lowbit_attn.device.linear.config import WARP, Chip
from lowbit_attn.device.linear.kronecker import (
    BATCH_STEPS,
    GROUP,
    PAD,
    TILES,
    VECTOR,
    butterflies,
    fill_batch,
    multiply_batch,
    results_of,
    store_coefficients,
    store_output,
    store_sums,
    sums_of_tiles,
)
from lowbit_attn.device.linear.tables import let_next_start, wait_for_last, words_at
from lowbit_attn.device.numbers import ELEMENT
from lowbit_attn.kernels.linear import KRONECKER_ROWS as ROWS
from lowbit_attn.kernels.linear import WIDE_BATCH as BATCH_ROWS

BATCH_SIGNS = 2 * BATCH_STEPS  # of a lane


class Wide:
    """One transform of each row of ``source`` [m, count]; kind: "output" or "coefficients", as of ``Kronecker``.

    signs: fp32 [CTAs of a row times batches, 32 lanes, BATCH_SIGNS], M as the CTAs' B operands of BATCH_ROWS rows of
    the source each, 0 where it has no row. The rest as of ``Kronecker``.
    """

    def __init__(self, kind: str, dtype: str, columns: int, chip: Chip):
        self.kind, self.dtype, self.columns, self.chip = kind, dtype, columns, chip
        self.smem_bytes = 4 * ROWS * (columns + PAD)

    @cute.jit
    def __call__(self, source: cute.Tensor, scale: cute.Tensor, signs: cute.Tensor, out: cute.Tensor,
                 digit_sums: cute.Tensor, steps: cute.Tensor, order: Int32, norm: Float32, stream):
        self.kernel(source, scale, signs, out, steps, order, norm).launch(
            grid=((order + (ROWS - 1)) // ROWS, source.shape[0], 1), block=(self.columns, 1, 1), stream=stream,
            use_pdl=self.chip.is_hopper)

    @cute.kernel
    def kernel(self, source: cute.Tensor, scale: cute.Tensor, signs: cute.Tensor, out: cute.Tensor,
               steps: cute.Tensor, order: Int32, norm: Float32):
        @cute.struct
        class Smem:
            values: cute.struct.Align[cute.struct.MemRange[Float32, ROWS * (self.columns + PAD)], 128]

        let_next_start(self.chip)
        values = cute.make_tensor(cutlass.memory.SmemAllocator().allocate(Smem).values.data_ptr(),
                                  cute.make_layout(ROWS * (self.columns + PAD)))
        thread, rank, row = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.block_idx()[1]
        place, group = thread // (self.columns // GROUP), thread % (self.columns // GROUP) * GROUP
        column = (rank * ROWS + place) * self.columns + group  # of the results that the thread has at the end
        is_live = rank * ROWS + place < order
        factors = cute.make_rmem_tensor(GROUP, Float32)
        if cutlass.const_expr(self.kind == "output"):
            is_live = is_live & (column < out.shape[1])
            for i in cutlass.range_constexpr(GROUP):
                factors[i] = scale[cutlass.min(column + i, out.shape[1] - 1)]
        wait_for_last(self.chip)
        factor = steps[row] * norm if cutlass.const_expr(self.kind == "output") else norm
        sums = multiply_rows(self.kind, self.dtype, self.columns, source, scale, signs, row, rank, order, thread)
        store_sums(self.columns, values, sums, thread)
        cute.arch.sync_threads()
        finish_rows(self.columns, values, thread)
        cute.arch.sync_threads()
        results = results_of(self.columns, values, place, group)
        if is_live:
            if cutlass.const_expr(self.kind == "output"):
                store_output(ELEMENT[self.dtype], out, row, column, results, factors, factor)
            else:
                store_coefficients(out, row, column, results)


@cute.jit
def multiply_rows(kind: cutlass.Constexpr[str], dtype: cutlass.Constexpr[str], columns: cutlass.Constexpr[int],
                  source: cute.Tensor, scale: cute.Tensor, signs: cute.Tensor, row: Int32, rank: Int32, order: Int32,
                  thread: Int32) -> cute.Tensor:
    """M times a warp's 32 columns of the source, as ``kronecker.multiply_matrix``."""
    acc = cute.make_rmem_tensor((4, TILES, 2), Float32)
    acc.fill(0.0)
    data, ahead = (cute.make_rmem_tensor((VECTOR, BATCH_STEPS, 2), Float32) for _ in range(2))
    operand, operand_ahead = (cute.make_rmem_tensor(BATCH_SIGNS, Uint32) for _ in range(2))
    batches = (order + (BATCH_ROWS - 1)) // BATCH_ROWS
    own_signs = signs.iterator.toint() + Int64((rank * batches * WARP + thread % WARP) * BATCH_SIGNS) * 4
    load(kind, dtype, columns, source, scale, own_signs, data, operand, Int32(0), row, order, thread)
    for batch in cutlass.range(batches, unroll=1):
        after = cutlass.min(batch + 1, batches - 1)
        load(kind, dtype, columns, source, scale, own_signs, ahead, operand_ahead, after, row, order, thread)
        multiply_batch(acc, data, operand, 0)
        for i in cutlass.range_constexpr(BATCH_SIGNS):
            operand[i] = operand_ahead[i]
            for j in cutlass.range_constexpr(VECTOR):
                data[j, i % BATCH_STEPS, i // BATCH_STEPS] = ahead[j, i % BATCH_STEPS, i // BATCH_STEPS]
    return sums_of_tiles(acc)


@cute.jit
def load(kind: cutlass.Constexpr[str], dtype: cutlass.Constexpr[str], columns: cutlass.Constexpr[int],
         source: cute.Tensor, scale: cute.Tensor, own_signs: Int64, data: cute.Tensor, operand: cute.Tensor,
         batch: Int32, row: Int32, order: Int32, thread: Int32):
    """A lane's columns of its rows of a batch, and their signs."""
    for i in cutlass.range_constexpr(BATCH_SIGNS // 4):
        four = words_at(own_signs + Int64(batch) * (WARP * BATCH_SIGNS * 4) + 16 * i)
        for j in cutlass.range_constexpr(4):
            operand[4 * i + j] = four[j]
    fill_batch(kind, dtype, columns, source, scale, data, batch * BATCH_ROWS, row, order, thread)


@cute.jit
def finish_rows(columns: cutlass.Constexpr[int], values: cute.Tensor, thread: Int32):
    """The higher bits of the columns, in place, a warp for each row in turn."""
    warps = columns // WARP
    for i in cutlass.range_constexpr((ROWS + warps - 1) // warps):
        line = thread // WARP + i * warps
        if line < ROWS:
            at = line * (columns + PAD) + thread % WARP
            made = butterflies([values[at + WARP * part] for part in range(warps)])
            for part, value in enumerate(made):
                values[at + WARP * part] = value
