"""y = x W^T over packed GPTVQ codes: tiles of 256 x 256 weights with a codebook of 256 entries of 4 each.

A CTA has the codebooks of four tiles side by side in shared memory, in four copies: row e is [copy][tile] x 8 bytes.
Lane 4 g + t works in tile t, with copy g mod 4, so that lookups of 8 bytes have no bank conflicts: the slots of k of a
multiply need not be neighbouring columns. Byte 1 of an address is the code.

    A  rows 0-7: columns 0, 1 of the entries of 8 rows of W, rows 8-15: their columns 2, 3; a lookup is two registers
    B  column 2 i + h: columns 2 h, 2 h + 1 of row i of x;  y = D[g, 2 i] + D[g + 8, 2 i + 1], both lane 4 g + i's

A unit is 16 rows and 1,024 columns: eight warps, each with 8 slices of 4 columns of every tile. CTAs share the units
evenly, row tile by row tile; the codebooks of the next segment of 16 units wait in registers and go to the other
buffer. Sums of a segment, which have two buffers too where there is room, go to memory, and ``Sum`` adds them up.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint32

from lowbit_attn.device import numbers, ptx
from lowbit_attn.device.linear.config import (
    COLUMNS,
    HALF_ROW,
    ROW_BYTES,
    SELECT,
    TABLE_AT,
    TABLE_BYTES,
    TABLE_THREADS,
    WARP,
    Chip,
)
from lowbit_attn.device.linear.tables import (
    CODE_WORDS,
    advance,
    begin_kernel,
    codes_now_and_ahead,
    load_once,
    shared,
    words_at,
)

UNIT_ROWS, SEGMENT_UNITS = 16, 16
SEGMENT_COLUMNS = 1024
TEAM_WARPS = 8  # that share a unit
TEAMS = TABLE_THREADS // WARP // TEAM_WARPS
AT_ONCE = 2  # units of a team whose codes are loaded together
STEP = TEAMS * AT_ONCE
UNIT_SUMS = TEAM_WARPS * COLUMNS * UNIT_ROWS
SUMS_BYTES = 4 * SEGMENT_UNITS * UNIT_SUMS  # of a segment
SUMS_AT = TABLE_AT + TABLE_BYTES  # [buffer][unit][warp of the team][row of x][row]


class Gptvq2:
    """Sums over segments of 1,024 columns: partial fp32 [k / 1024, m, n of the pack], m up to 4.

    x: fp16 [m, columns of the pack]; codes: uint32 [n / 256, k / 1024, 16 * 8, 32 lanes, 4]; codebooks: uint32
    [n / 256, k / 1024, 512, 4], two tiles' fp16 entries each.
    """

    def __init__(self, chip: Chip):
        self.chip = chip
        self.buffers = 2 if chip.smem_limit >= TABLE_AT + TABLE_BYTES + 2 * SUMS_BYTES else 1
        self.smem_bytes = chip.before_tables + TABLE_BYTES + self.buffers * SUMS_BYTES

    @cute.jit
    def __call__(self, x: cute.Tensor, codes: cute.Tensor, codebooks: cute.Tensor, partial: cute.Tensor, ctas: Int32,
                 stream):
        self.kernel(x, codes, codebooks, partial).launch(grid=(ctas, 1, 1), block=(TABLE_THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, codes: cute.Tensor, codebooks: cute.Tensor, partial: cute.Tensor):
        cta = begin_kernel(self.smem_bytes, self.chip)
        thread, lane = cta.thread, cta.lane
        team, member = cta.warp // TEAM_WARPS, cta.warp % TEAM_WARPS
        segments = codes.shape[1]
        units = codes.shape[0] * segments * SEGMENT_UNITS
        first, last = cta.share(units)
        source = codes.iterator.toint() + member * (WARP * 16) + lane * 16
        current, ahead = codes_now_and_ahead(AT_ONCE)
        book = cute.make_rmem_tensor(4, Uint32)
        book.fill(0)
        _, x_words = numbers.fragments(CODE_WORDS)
        x_words.fill(0)
        load_units(self.chip, current, source, first + team * AT_ONCE, segment_end(first, last))
        load_book(book, codebooks, first // SEGMENT_UNITS, thread)
        store_book(book, Int32(0), thread)
        load_x(x_words, x, first // SEGMENT_UNITS % segments, member, lane)
        if segment_end(first, last) < last:
            load_book(book, codebooks, first // SEGMENT_UNITS + 1, thread)
        cute.arch.sync_threads()
        buffer = Int32(0)
        while first < last:
            end, segment = segment_end(first, last), first // SEGMENT_UNITS
            offset = Uint32(ptx.opaque(32 * ((lane >> 2) & 3) + 8 * (lane & 3) + HALF_ROW * buffer))
            for unit in cutlass.range(first, end, STEP, unroll=1):
                after = cutlass.min(unit + STEP, end)
                load_units(self.chip, ahead, source, after + team * AT_ONCE, segment_end(after, last))
                multiply_units(current, x_words, offset, unit + team * AT_ONCE, end, buffer % self.buffers, member,
                               lane, x.shape[0])
                advance(current, ahead)
            if end < last:
                store_book(book, buffer ^ 1, thread)
            cute.arch.sync_threads()
            write_segment(partial, segment, segments, first, end, buffer % self.buffers, thread)
            if cutlass.const_expr(self.buffers == 1):
                cute.arch.sync_threads()
            if end < last:
                buffer = buffer ^ 1
                load_x(x_words, x, (segment + 1) % segments, member, lane)
                if segment_end(end, last) < last:
                    load_book(book, codebooks, segment + 2, thread)
            first = end


def segment_end(unit, last):
    """Where the segment of a unit ends, or a CTA's units do."""
    return cutlass.min((unit // SEGMENT_UNITS + 1) * SEGMENT_UNITS, last)


@cute.jit
def load_units(chip: cutlass.Constexpr[Chip], codes: cute.Tensor, source: Int64, unit: Int32, end: Int32):
    """A lane's codes of a team's units of one segment; those from ``end`` on stay as they are."""
    for b in cutlass.range_constexpr(AT_ONCE):
        if unit + b < end:
            load_once(source + Int64(unit + b) * (TEAM_WARPS * WARP * 16), codes[None, b], chip)


@cute.jit
def load_book(book: cute.Tensor, codebooks: cute.Tensor, segment: Int32, thread: Int32):
    """A thread's entries of a segment's codebooks: one entry of two tiles."""
    cute.autovec_copy(words_at(codebooks.iterator.toint() + Int64(segment * TABLE_THREADS + thread) * 16), book)


@cute.jit
def store_book(book: cute.Tensor, buffer: Int32, thread: Int32):
    """Four copies of a thread's entries, neighbours to different banks."""
    entry, half = thread >> 1, thread & 1
    for i in cutlass.range_constexpr(4):
        at = TABLE_AT + entry * ROW_BYTES + buffer * HALF_ROW + ((i + entry) & 3) * 32 + half * 16
        cute.autovec_copy(book, shared(Uint32, at, 0, 4))


@cute.jit
def load_x(x_words: cute.Tensor, x: cute.Tensor, segment: Int32, member: Int32, lane: Int32):
    """B operands of a warp's slices of a segment of columns: pair h of row i of x in lanes of column 2 i + h."""
    column, t = lane >> 2, lane & 3
    row = column >> 1
    if row < x.shape[0]:
        first = segment * SEGMENT_COLUMNS + t * 256 + member * 32 + 2 * (column & 1)
        at = x.iterator.toint() + (Int64(row) * x.shape[1] + first) * 2
        for j in cutlass.range_constexpr(2 * CODE_WORDS):
            x_words[j % 2, j // 2] = words_at(at + 8 * j, 1)[0]


@cute.jit
def multiply_units(codes: cute.Tensor, x_words: cute.Tensor, offset: Uint32, unit: Int32, end: Int32, buffer: Int32,
                   member: Int32, lane: Int32, m: Int32):
    """A warp's slices of a team's units: their sums go to shared memory."""
    atom, x = numbers.multiply_atom(), cute.recast_tensor(x_words, Float16)
    g, t = lane >> 2, lane & 3
    for b in cutlass.range_constexpr(AT_ONCE):
        acc = cute.make_rmem_tensor((4, 2), Float32)
        acc.fill(0.0)
        for j in cutlass.range_constexpr(CODE_WORDS):
            for half in cutlass.range_constexpr(2):
                a = numbers.operand_a(lookup(codes[j, b], offset, half) + lookup(codes[j, b], offset, 2 + half))
                numbers.multiply(atom, acc, half, a, x[None, j])
        if unit + b < end and t < m:
            at = SUMS_AT + ((buffer * SEGMENT_UNITS + (unit + b) % SEGMENT_UNITS) * UNIT_SUMS
                            + (member * COLUMNS + t) * UNIT_ROWS + g) * 4
            for half in cutlass.range_constexpr(2):
                shared(Float32, at, 32 * half)[0] = acc[0, half] + acc[3, half]


def lookup(word: Uint32, offset: Uint32, byte: int) -> list[Uint32]:
    """Both words of this lane's copy of the entry that a byte of a word names."""
    found = shared(Uint32, Int32(ptx.permute(word, offset, SELECT | byte << 4)), TABLE_AT, 2)
    words = cute.make_rmem_tensor(2, Uint32)
    cute.autovec_copy(found, words)
    return [words[0], words[1]]


@cute.jit
def write_segment(partial: cute.Tensor, segment: Int32, segments: Int32, first: Int32, end: Int32, buffer: Int32,
                  thread: Int32):
    """Sums of a segment's rows over the warps of a team, in one order."""
    m = partial.shape[1]
    row_of_units = segment // segments * (SEGMENT_UNITS * UNIT_ROWS)
    for i in cutlass.range(thread, (end - first) * UNIT_ROWS * m, TABLE_THREADS, unroll=1):
        row, line = i % UNIT_ROWS, i // UNIT_ROWS % m
        unit = (first + i // (UNIT_ROWS * m)) % SEGMENT_UNITS
        at = SUMS_AT + ((buffer * SEGMENT_UNITS + unit) * UNIT_SUMS + line * UNIT_ROWS + row) * 4
        total = Float32(0.0)
        for warp in cutlass.range_constexpr(TEAM_WARPS):
            total = total + shared(Float32, at, warp * COLUMNS * UNIT_ROWS * 4)[0]
        partial[segment % segments, line, row_of_units + unit * UNIT_ROWS + row] = total
