"""y' = Q x' over packed E8P codes, exact in integers: the product of QuIP# between its two Hadamard transforms.

4 w = 2 u - 15 with u = T1[pattern byte] ^ T2[sign byte], eight fields of 4 bits. Both tables are in shared memory once
for every lane: row e is [T1[e] x 32][T2[e] x 32], so lookups have no bank conflicts, and byte 1 of an address is the
code. Even fields are u8 as they are, odd ones 16 times u8: two accumulators, or odd ones are shifted.

    A  rows 0-7: first codes of 8 rows of W, rows 8-15: their residual codes (of one stage: 8 more rows)
    B  column 2 i: high digits of row i of x, column 2 i + 1: low digits; X = 256 high + low

CTAs share the row blocks evenly, with all columns; a CTA's warps take chunks of 128 columns in turn and add their sums,
which are integers, in shared memory: no order and no number of CTAs or warps changes a bit of y'.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from lowbit_attn.device import ptx
from lowbit_attn.device.linear.config import (
    COLUMNS,
    HALF_ROW,
    ROW_BYTES,
    SELECT,
    TABLE_AT,
    TABLE_BYTES,
    WARP,
    GemvConfig,
)
from lowbit_attn.device.linear.tables import (
    Cta,
    advance,
    begin_kernel,
    codes_now_and_ahead,
    load_once,
    shared,
    wait_for_last,
    words_at,
)

EVEN, ODD = 0x0F0F_0F0F, 0xF0F0_F0F0
XOR_AND = 0x28  # lop3 table of (a ^ b) & c
DIGIT_WORDS = 8  # of a lane, column block and chunk
SUMS_AT = TABLE_AT + TABLE_BYTES


class Digits(NamedTuple):
    """Where a lane's digits of x are."""

    source: Int64 | Int32  # of column block 0 and chunk 0; a shared address where the kernel has made them
    chunks: Int32
    m: Int32
    first_row: Int32  # of x, in column block 0


class LaneCodes(NamedTuple):
    """Where a lane's codes are."""

    source: Int64  # of row block 0 and chunk 0
    row_bytes: Int64  # of a row block
    chunks: Int32


class E8PGemv:
    """Rows of x' as digits times W: y' fp32 [m, rows of W].

    codes: uint32 [row blocks, chunks, 32 lanes, 4]; digits: uint32 [column blocks, chunks, 32 lanes, 8], as
    ``hadamard`` writes them; digit_sums: int32 [m, parts, 2 digits], whose parts add up; tables: uint32 [2, 256];
    scales: fp32 [stages]. y' is in steps of x's fixed point, by which the transform after it multiplies.
    """

    def __init__(self, cfg: GemvConfig):
        self.cfg = cfg
        self.smem_bytes = cfg.smem_bytes

    @cute.jit
    def __call__(self, codes: cute.Tensor, digits: cute.Tensor, digit_sums: cute.Tensor,
                 tables: cute.Tensor, scales: cute.Tensor, out: cute.Tensor, ctas: Int32, stream):
        self.kernel(codes, digits, digit_sums, tables, scales, out).launch(
            grid=(ctas, 1, 1), block=(self.cfg.warps * WARP, 1, 1), stream=stream, use_pdl=self.cfg.chip.is_hopper)

    @cute.kernel
    def kernel(self, codes: cute.Tensor, digits: cute.Tensor, digit_sums: cute.Tensor,
               tables: cute.Tensor, scales: cute.Tensor, out: cute.Tensor):
        cfg = self.cfg
        cta = begin_kernel(cfg.smem_bytes, cfg.chip)
        thread, lane, warp = cta.thread, cta.lane, cta.warp
        blocks, chunks = codes.shape[0], codes.shape[1]
        first, last = cta.share(blocks)
        mine = LaneCodes(codes.iterator.toint() + lane * 16, Int64(chunks) * (WARP * 16), chunks)
        place = Digits(digits.iterator.toint() + lane * (4 * DIGIT_WORDS), digits.shape[1], digit_sums.shape[0],
                       lane >> 3)
        x = cute.make_rmem_tensor((4, cfg.column_blocks, 2), Uint32)
        x.fill(0)
        current, ahead = codes_now_and_ahead(cfg.blocks)
        load_codes(cfg, current, mine, first, last, warp)
        fill_tables(cfg.warps * WARP, tables, thread)
        clear_sums(cfg, thread)
        wait_for_last(cfg.chip)
        load_digits(cfg, x, 0, place, cutlass.min(warp, chunks - 1))
        add_digit_sums(cfg, digit_sums, thread)
        cute.arch.sync_threads()
        multiply_share(cfg, current, ahead, x, mine, place, scales, out, first, last, cta)


@cute.jit
def multiply_share(cfg: cutlass.Constexpr[GemvConfig], current: cute.Tensor, ahead: cute.Tensor, x: cute.Tensor,
                   codes: LaneCodes, place: Digits, scales: cute.Tensor, out: cute.Tensor, first: Int32, last: Int32,
                   cta: Cta):
    """A CTA's row blocks, phase by phase: their products and y'. current: a warp's first codes, x: its first digits."""
    offset = Uint32(ptx.opaque(cta.lane * 4))
    for start in cutlass.range(first, last, cfg.phase_blocks, unroll=1):
        end = cutlass.min(start + cfg.phase_blocks, last)
        for block in cutlass.range(start, end, cfg.blocks, unroll=1):
            multiply_blocks(cfg, current, ahead, x, codes, place, block, start, last, cta.warp, cta.lane, offset)
        cute.arch.sync_threads()
        write_rows(cfg, place.m, scales, out, start, end, cta.thread)
        if start + cfg.phase_blocks < last:
            cute.arch.sync_threads()
            clear_sums(cfg, cta.thread)
            cute.arch.sync_threads()


@cute.jit
def add_digit_sums(cfg: cutlass.Constexpr[GemvConfig], digit_sums: cute.Tensor, thread: Int32):
    """Sums of the rows' digits, [row of x][digit], over the parts that were summed apart."""
    at = SUMS_AT + 4 * cfg.sums
    if thread < 2 * digit_sums.shape[0]:
        total = Int32(0)
        for part in cutlass.range(digit_sums.shape[1], unroll=8):
            total += digit_sums[thread // 2, part, thread % 2]
        shared(Int32, at + 4 * thread, 0)[0] = total


@cute.jit
def fill_tables(threads: cutlass.Constexpr[int], tables: cute.Tensor, thread: Int32):
    """Both tables, once for every lane. A thread writes the copies of one entry, neighbours to different banks."""
    for entry in cutlass.range(thread, 512, threads, unroll=1):
        word = tables[entry & 1, entry >> 1]
        at = TABLE_AT + (entry >> 1) * ROW_BYTES + (entry & 1) * HALF_ROW
        for i in cutlass.range_constexpr(8):
            place = shared(Uint32, at + 16 * ((i + entry) & 7), 0, 4)
            for j in cutlass.range_constexpr(4):
                place[j] = word


@cute.jit
def clear_sums(cfg: cutlass.Constexpr[GemvConfig], thread: Int32):
    for i in cutlass.range(thread, cfg.sums, cfg.warps * WARP, unroll=4):
        shared(Int32, SUMS_AT + 4 * i, 0)[0] = Int32(0)


@cute.jit
def load_codes(cfg: cutlass.Constexpr[GemvConfig], words: cute.Tensor, codes: LaneCodes, block: Int32, last: Int32,
               chunk: Int32):
    """A lane's words of a chunk of some row blocks; those that are not there stay as they are."""
    at = codes.source + Int64(block) * codes.row_bytes + Int64(chunk) * (WARP * 16)
    for b in cutlass.range_constexpr(cfg.blocks):
        if block + b < last and chunk < codes.chunks:
            load_once(at + b * codes.row_bytes, words[None, b], cfg.chip)


@cute.jit
def load_digits(cfg: cutlass.Constexpr[GemvConfig], x: cute.Tensor, half: cutlass.Constexpr[int], place: Digits,
                chunk: Int32):
    """A lane's digits of half a chunk; of rows that x has not they stay 0."""
    for column in cutlass.range_constexpr(cfg.column_blocks):
        if place.first_row + column * COLUMNS < place.m:
            at = (column * place.chunks + chunk) * (WARP * 4 * DIGIT_WORDS) + 16 * half
            digits = shared(Uint32, place.source + at, 0, 4) if cfg.has_transform else words_at(place.source + at)
            cute.autovec_copy(digits, x[None, column, half])


@cute.jit
def multiply_blocks(cfg: cutlass.Constexpr[GemvConfig], current: cute.Tensor, ahead: cute.Tensor, x: cute.Tensor,
                    codes: LaneCodes, place: Digits, block: Int32, start: Int32, last: Int32, warp: Int32, lane: Int32,
                    offset: Uint32):
    """A warp's chunks of some row blocks: adds their products to the CTA's sums.

    Codes of the next chunk, and digits of the next half of one, are on their way meanwhile.
    """
    acc = cute.make_rmem_tensor((4, cfg.blocks, cfg.column_blocks, cfg.accumulators), Uint32)
    acc.fill(0)
    for chunk in cutlass.range(warp, codes.chunks, cfg.warps, unroll=1):
        is_end = chunk + cfg.warps >= codes.chunks
        next_block = block + cfg.blocks * Int32(is_end)
        next_chunk = cutlass.select_(is_end, warp, chunk + cfg.warps)
        load_codes(cfg, ahead, codes, next_block, last, next_chunk)
        cute.arch.sync_warp()  # ptxas would put these loads off: a quarter of the time
        for half in cutlass.range_constexpr(2):
            load_digits(cfg, x, 1 - half, place, chunk if half == 0 else next_chunk)
            for b in cutlass.range_constexpr(cfg.blocks):
                operands = weights(cfg, current, b, half, offset)
                for column in cutlass.range_constexpr(cfg.column_blocks):
                    for odd in cutlass.range_constexpr(2):
                        add_product(acc[None, b, column, odd % cfg.accumulators], operands[odd],
                                    [x[2 * odd, column, half], x[2 * odd + 1, column, half]])
        advance(current, ahead)
    add_sums(cfg, acc, block - start, last - block, place.m, lane)


def weights(cfg: GemvConfig, codes: cute.Tensor, b: int, half: int, offset: Uint32) -> tuple[list, list]:
    """A operands of 32 columns: (even fields, odd fields, times 16 if they have an accumulator of their own) of two
    vectors of 8, first and second code each."""
    even, odd = [], []
    for word in (codes[2 * half, b], codes[2 * half + 1, b]):
        for code in range(2):
            first, second = (lookup(word, offset, 2 * code + byte, byte * HALF_ROW) for byte in range(2))
            fields = [cute.arch.lop3(Uint32(first), Uint32(second), Uint32(mask), XOR_AND) for mask in (EVEN, ODD)]
            even.append(fields[0])
            odd.append(fields[1] if cfg.accumulators == 2 else fields[1] >> Uint32(4))
    return even, odd


def lookup(word: Uint32, offset: Uint32, byte: int, table: int) -> Uint32:
    """This lane's copy of the entry that a byte of a word names."""
    address = ptx.permute(word, offset, SELECT | byte << 4)
    return shared(Uint32, Int32(address), TABLE_AT + table)[0]


def add_product(acc: cute.Tensor, a: list[Uint32], digits: list[Uint32]) -> None:
    made = ptx.multiply_bytes(a, digits, [acc[i] for i in range(4)], True)
    for i, word in enumerate(made):
        acc[i] = word


@cute.jit
def add_sums(cfg: cutlass.Constexpr[GemvConfig], acc: cute.Tensor, first: Int32, count: Int32, m: Int32, lane: Int32):
    """Add a warp's sums to the CTA's: see ``place_of_sum``."""
    g, t, rows = lane >> 2, lane & 3, cfg.rows
    for b in cutlass.range_constexpr(cfg.blocks):
        for column in cutlass.range_constexpr(cfg.column_blocks):
            line = column * COLUMNS + t
            if b < count and line < m:
                for i in cutlass.range_constexpr(4):
                    value = Int32(acc[i, b, column, 0])
                    if cutlass.const_expr(cfg.accumulators == 2):
                        value = value + (Int32(acc[i, b, column, 1]) >> 4)
                    at = place_of_sum(rows, first + b, g + 8 * (i // 2), line, i % 2)
                    cute.arch.atomic_add(shared(Int32, at, 0).iterator, value, sem="relaxed", scope="cta")


def place_of_sum(rows: int, block, row, line, digit):
    """Address of a sum: [row block of the phase][half of an MMA's rows][digit][row of x][8 rows], so that lanes of an
    accumulator have neighbouring words."""
    return SUMS_AT + 4 * ((((block * 2 + row // 8) * 2 + digit) * rows + line) * 8 + row % 8)


@cute.jit
def write_rows(cfg: cutlass.Constexpr[GemvConfig], m: Int32, scales: cute.Tensor, out: cute.Tensor, start: Int32,
               end: Int32, thread: Int32):
    """y' of a phase's rows: sum over stages of scale / 4 (2 U - 15 X), digit by digit."""
    count = (end - start) * cfg.block_rows
    for i in cutlass.range(thread, count * m, cfg.warps * WARP, unroll=1):
        row, line = i % count, i // count
        block, inside = row // cfg.block_rows, row % cfg.block_rows
        digit_sums = shared(Int32, SUMS_AT + 4 * (cfg.sums + 2 * line), 0, 2)
        high, low = digit_sums[0], digit_sums[1]
        total = Float32(0.0)
        for stage in cutlass.range_constexpr(cfg.stages):
            pair = [shared(Int32, place_of_sum(cfg.rows, block, inside + 8 * stage, line, digit), 0)[0]
                    for digit in range(2)]
            made = Float32(2 * pair[0] - 15 * high) * 256.0 + Float32(2 * pair[1] - 15 * low)
            total = total + made * scales[stage]
        out[line, start * cfg.block_rows + row] = total * 0.25
