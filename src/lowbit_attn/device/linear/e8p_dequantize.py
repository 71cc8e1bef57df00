"""Packed E8P codes to rows of Q in fp16: what cuBLAS multiplies where there are many rows of x.

Lookups are those of the product, e8p.py: u = T1[pattern byte] ^ T2[sign byte], eight fields of 4 bits. Fields i and
i + 4 become the mantissas of two fp16 numbers 64 + u, so that q = u - 15/2 is one subtraction, exact, and a weight is
q first factor + q' second factor in fp16: rounded three times, each by half a unit of its last place.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from lowbit_attn.device import ptx
from lowbit_attn.device.linear.config import HALF_ROW, TABLE_BYTES, WARP, Chip
from lowbit_attn.device.linear.e8p import fill_tables, lookup
from lowbit_attn.device.linear.tables import CODE_WORDS, begin_kernel, load_once, words_at
from lowbit_attn.device.numbers import pack

FIELD, MAGIC, MINUS = 0x00F0_00F0, 0x5400_5400, 0xD478_D478  # of two fp16: mantissa bits of u; 64; -(64 + 15/2)
SMALLEST = 2.0**-100  # of the largest scale


class E8PDequantize:
    """Rows of Q / the largest scale, fp16 [rows, columns of the pack]: a lane writes what its words of codes stand for.

    codes: uint32 [row blocks, chunks, 32 lanes, 4]; tables: uint32 [2, 256]; scales: fp32 [stages].
    """

    threads = 1024

    def __init__(self, stages: int, chip: Chip):
        self.stages, self.chip = stages, chip
        self.smem_bytes = chip.before_tables + TABLE_BYTES

    @cute.jit
    def __call__(self, codes: cute.Tensor, tables: cute.Tensor, scales: cute.Tensor, out: cute.Tensor, ctas: Int32,
                 stream):
        self.kernel(codes, tables, scales, out).launch(grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, codes: cute.Tensor, tables: cute.Tensor, scales: cute.Tensor, out: cute.Tensor):
        cta = begin_kernel(self.smem_bytes, self.chip)
        source, chunks = codes.iterator.toint(), codes.shape[1]
        count = codes.shape[0] * chunks * WARP
        words, ahead = (cute.make_rmem_tensor(CODE_WORDS, Uint32) for _ in range(2))
        words.fill(0)
        ahead.fill(0)
        first, step = cta.index * self.threads + cta.thread, cta.count * self.threads
        if first < count:
            load_once(source + Int64(first) * 16, words, self.chip)
        fill_tables(self.threads, tables, cta.thread)
        factors = factors_of(self.stages, scales)
        minus, offset = ptx.opaque(MINUS), Uint32(ptx.opaque(cta.lane * 4))
        cute.arch.sync_threads()
        for item in cutlass.range(first, count, step, unroll=1):
            if item + step < count:
                load_once(source + Int64(item + step) * 16, ahead, self.chip)
            place = item // WARP
            block, chunk = place // chunks, place % chunks
            for j in cutlass.range_constexpr(CODE_WORDS):
                column = chunk * 128 + 8 * (4 * j + (cta.lane & 3))
                numbers = [quarter(words[j], offset, code, minus) for code in range(2)]
                if cutlass.const_expr(self.stages == 2):
                    pairs = [ptx.fma_f16x2(q, factors[0], ptx.mul_f16x2(r, factors[1])) for q, r in zip(*numbers)]
                    store(out, block * 8 + (cta.lane >> 2), column, pairs)
                else:
                    for half in cutlass.range_constexpr(2):
                        pairs = [ptx.mul_f16x2(q, factors[0]) for q in numbers[half]]
                        store(out, block * 16 + half * 8 + (cta.lane >> 2), column, pairs)
            for j in cutlass.range_constexpr(CODE_WORDS):
                words[j] = ahead[j]


def factors_of(stages: int, scales: cute.Tensor) -> list[Uint32]:
    """Half of each scale over the largest one, in both halves of a word."""
    sizes = [cute.arch.fmax(scales[i], -scales[i]) for i in range(stages)]
    largest = cute.arch.fmax(sizes[0], sizes[-1])
    over = Float32(0.5) / cute.arch.fmax(largest, Float32(SMALLEST))
    return [pack(scales[i] * over, scales[i] * over) for i in range(stages)]


def quarter(word: Uint32, offset: Uint32, code: int, minus: Uint32) -> list[Uint32]:
    """q of the eight weights of a word's first or second code: of weights i and i + 4, in halves of word i."""
    first, second = (lookup(word, offset, 2 * code + byte, byte * HALF_ROW) for byte in range(2))
    u = first ^ second
    shifted = (u << Uint32(4), u, u >> Uint32(4), u >> Uint32(8))
    return [ptx.add_f16x2((field & Uint32(FIELD)) | Uint32(MAGIC), minus) for field in shifted]


def store(out: cute.Tensor, row: Int32, column: Int32, pairs: list[Uint32]) -> None:
    """Eight weights of a row, of which word i has the i-th and the (i + 4)-th."""
    words = cute.make_rmem_tensor(4, Uint32)
    for i, halves in enumerate((ptx.low_halves, ptx.high_halves)):
        words[2 * i], words[2 * i + 1] = halves(pairs[0], pairs[1]), halves(pairs[2], pairs[3])
    at = out.iterator.toint() + (Int64(row) * out.shape[1] + column) * 2
    cute.autovec_copy(words, words_at(at))
