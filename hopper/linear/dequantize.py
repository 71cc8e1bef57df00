"""Packed codes of AQLM and GPTVQ to rows of W in 16 bits: an item of a thread is one load of codes.

Rows ``first`` (in units of the pack) on, as many as ``out`` [rows, columns of the pack] has; scales of rows included.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint32

from lowbit_attn.hopper.common.numbers import ELEMENT
from lowbit_attn.hopper.linear.aqlm12 import entries
from lowbit_attn.hopper.linear.config import WARP
from lowbit_attn.hopper.linear.tables import words_at


class Dequantize:
    """The kernel of a format; scales: fp32 [n], of GPTVQ of any length."""

    threads, smem_bytes = 256, 0

    def __init__(self, format: str, dtype: str):
        self.element = ELEMENT[dtype]
        self.items, self.write = {"aqlm_2x8": (4 * WARP, write_aqlm_2x8), "aqlm_2x12": (4 * WARP, write_aqlm_2x12),
                                  "aqlm_1x16": (1, write_aqlm_1x16), "gptvq2": (128 * WARP, write_gptvq2)}[format]
        self.is_row_major = format in ("aqlm_1x16", "gptvq2")

    @cute.jit
    def __call__(self, codes: cute.Tensor, codebooks: cute.Tensor, scales: cute.Tensor, out: cute.Tensor, first: Int32,
                 blocks: Int32, ctas: Int32, stream):
        self.kernel(codes, codebooks, scales, out, first, blocks).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, codes: cute.Tensor, codebooks: cute.Tensor, scales: cute.Tensor, out: cute.Tensor, first: Int32,
               blocks: Int32):
        groups = codes.shape[1 if self.is_row_major else 0]
        start = cute.arch.block_idx()[0] * self.threads + cute.arch.thread_idx()[0]
        for item in cutlass.range(start, groups * blocks * self.items, cute.arch.grid_dim()[0] * self.threads,
                                  unroll=1):
            inside, place = item % self.items, item // self.items
            block, group = place // groups, place % groups
            self.write(self.element, codes, codebooks, scales, out, first, block, group, inside)


def entry_of(codebooks: cute.Tensor, index: Int32, words: int = 4) -> list[Float32]:
    """The numbers of an entry of fp16."""
    values = cute.make_rmem_tensor(2 * words, Float16)
    cute.autovec_copy(words_at(codebooks.iterator.toint() + Int64(index) * (4 * words), words),
                      cute.recast_tensor(values, Uint32))
    return [Float32(values[i]) for i in range(2 * words)]


def store(element, out: cute.Tensor, row: Int32, column: Int32, values: list[Float32]) -> None:
    """Neighbouring numbers of a row, in one access."""
    made, rounded = cute.make_rmem_tensor(len(values), Float32), cute.make_rmem_tensor(len(values), element)
    for i, value in enumerate(values):
        made[i] = value
    rounded.store(made.load().to(element))
    at = out.iterator.toint() + (Int64(row) * out.shape[1] + column) * 2
    cute.autovec_copy(cute.recast_tensor(rounded, Uint32), words_at(at, len(values) // 2))


@cute.jit
def scale_of(scales: cute.Tensor, row: Int32) -> Float32:
    """A row's scale; rows of the padding have none."""
    scale = Float32(0.0)
    if row < scales.shape[0]:
        scale = scales[row]
    return scale


@cute.jit
def write_aqlm_2x8(element: cutlass.Constexpr, codes: cute.Tensor, codebooks: cute.Tensor, scales: cute.Tensor,
                   out: cute.Tensor, first: Int32, block: Int32, group: Int32, inside: Int32):
    """Eight slices of a row."""
    load, lane = inside // WARP, inside % WARP
    words = cute.make_rmem_tensor(4, Uint32)
    at = ((group * codes.shape[1] + first + block) * 4 + load) * WARP + lane
    cute.autovec_copy(words_at(codes.iterator.toint() + Int64(at) * 16), words)
    row = block * WARP + lane
    scale = scale_of(scales, first * WARP + row)
    for i in cutlass.range_constexpr(8):
        pair = [Int32((words[i // 2] >> Uint32(16 * (i % 2) + 8 * book)) & Uint32(255)) + 256 * book
                for book in range(2)]
        low, high = (entry_of(codebooks, index) for index in pair)
        column = (group * 32 + ((8 * load + i + lane) & 31)) * 8
        store(element, out, row, column, [(a + b) * scale for a, b in zip(low, high)])


@cute.jit
def write_aqlm_2x12(element: cutlass.Constexpr, codes: cute.Tensor, codebooks: cute.Tensor, scales: cute.Tensor,
                    out: cute.Tensor, first: Int32, block: Int32, group: Int32, inside: Int32):
    """Four slices of a row."""
    lane, own = inside // 4, inside % 4
    start = codes.iterator.toint() + Int64((group * codes.shape[1] + first + block) * 3) * (WARP * 16)
    places = [3 * own + i for i in range(3)]
    words = [words_at(start + ((i // 4) * WARP + lane) * 16 + i % 4 * 4, 1)[0] for i in places]
    row = block * 128 + lane * 4 + own
    scale, found = scale_of(scales, first * 128 + row), entries(words)
    for i in cutlass.range_constexpr(4):
        low, high = (entry_of(codebooks, Int32(found[2 * i + book] >> Uint32(4)) + 4096 * book) for book in range(2))
        column = (group * 4 + ((i + lane) & 3)) * 8
        store(element, out, row, column, [(a + b) * scale for a, b in zip(low, high)])


@cute.jit
def write_aqlm_1x16(element: cutlass.Constexpr, codes: cute.Tensor, codebooks: cute.Tensor, scales: cute.Tensor,
                    out: cute.Tensor, first: Int32, block: Int32, group: Int32, inside: Int32):
    """One slice of a row."""
    scale = scale_of(scales, first + block)
    entry = entry_of(codebooks, Int32(codes[first + block, group]))
    store(element, out, block, group * 8, [value * scale for value in entry])


@cute.jit
def write_gptvq2(element: cutlass.Constexpr, codes: cute.Tensor, codebooks: cute.Tensor, scales: cute.Tensor,
                 out: cute.Tensor, first: Int32, block: Int32, group: Int32, inside: Int32):
    """Eight slices of four columns of two rows."""
    lane, piece = inside % WARP, inside // WARP
    g, t = lane >> 2, lane & 3
    segment = (first + block) * codes.shape[1] + group
    words = cute.make_rmem_tensor(4, Uint32)
    at = (Int64(segment) * 128 + piece) * WARP + lane
    cute.autovec_copy(words_at(codes.iterator.toint() + at * 16), words)
    for j in cutlass.range_constexpr(8):
        for half in cutlass.range_constexpr(2):
            code = Int32((words[j // 2] >> Uint32(16 * (j % 2) + 8 * half)) & Uint32(255))
            row = block * 256 + piece // 8 * 16 + 8 * half + g
            column = group * 1024 + t * 256 + (piece % 8 * 8 + j) * 4
            store(element, out, row, column, entry_of(codebooks, (segment * 256 + code) * 4 + t, 2))
