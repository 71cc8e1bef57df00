"""Split-KV merge inside the launch: flash-decoding's combine, of which every split of a row block does a share.

A split leaves its sums in scratch: CHANNELS channels of O, with maximum and sum of the row, in a cell. Between calls
all words are EMPTY, a NaN that no arithmetic gives. Then each split merges every num_splits-th chunk of channels: a
lane a split reads its cell until no word is EMPTY, hence needs no fence, counter or flag, and makes the cell EMPTY
again. So all splits must run at once: the launch is cooperative. Sums are in fp32 and in a fixed order. A row without
tokens, whose sum of weights is 0, gives o = 0, lse = -inf; a NaN stays visible. A sink logit joins the denominator.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir import ir

from lowbit_attn.hopper import CELL_CHANNELS, CELL_WORDS, EMPTY
from lowbit_attn.hopper.register import numbers
from lowbit_attn.hopper.softmax import LOG2_E, LOWEST, NEG_INF
from lowbit_attn.hopper.walk import Rows, place

LN_2 = 0.6931471805599453
CHANNELS = CELL_CHANNELS  # of one thread: 16 bytes of a split's o
EMPTY_BITS = EMPTY & 0xFFFF_FFFF
FULL_WORDS = CHANNELS + 2  # of a cell
MAX_LANES_LOG2 = 5  # of a chunk: a warp


class Outputs(NamedTuple):
    """Where a CTA's result goes; lse in natural log."""

    partials: cute.Tensor  # fp32 (places, num_splits, rows of a CTA, cells of a row * CELL_WORDS)
    o: cute.Tensor  # (b, q_len, h, d)
    lse: cute.Tensor  # fp32 (b, h, q_len)
    sink_logits: cute.Tensor  # fp32, one a head, or a single -inf for all
    place: Int32  # this row block, of all KV heads and sequences: its splits are merged
    split_idx: Int32

    @property
    def num_splits(self):
        return self.partials.shape[1]

    @property
    def chunks(self) -> int:
        """Of a row."""
        return self.partials.shape[3] // CELL_WORDS


def place_of(block: tuple) -> Int32:
    """``Outputs.place`` of a CTA."""
    return block[1] * cute.arch.grid_dim()[0] + block[0]


class Row(NamedTuple):
    """A query row and its sink logit."""

    idx: Int32  # of the CTA
    batch_idx: Int32
    query: Int32
    head: Int32
    sink_logit: Float32


def find_row(out: Outputs, rows: Rows, row: Int32) -> Row:
    """Row ``row`` of the CTA, counted from 0."""
    query, head = place(rows, row)
    return Row(row, rows.batch_idx, query, head, out.sink_logits[head * Int32(out.sink_logits.shape[0] > 1)])


class Sums(NamedTuple):
    """Of CHANNELS channels of one query row over some tokens, fp32: weights are 2^(logit - top), logits in base 2."""

    acc: cute.Tensor  # sums of weighted V
    top: Float32  # LOWEST if there are no tokens
    total: Float32  # of the weights


def weight(x: Float32, origin: Float32) -> Float32:
    return cute.math.exp2(x - origin, fastmath=True)


@cute.jit
def leave(out: Outputs, row: Row, chunks: tuple, sums: tuple):
    """This split's sums of some chunks of a row, for ``merge``; a single split's are the result."""
    if out.num_splits == 1:
        share, lse = closing(row, sums[0].top, sums[0].total)
        for chunk, own in zip(chunks, sums):
            write(out, row, chunk, o_address(out, row, chunk), own.acc, share, lse)
    else:
        for chunk, own in zip(chunks, sums):
            leave_cell(out, row.idx, chunk, out.split_idx, own)


def leave_cell(out: Outputs, row: Int32, chunk: Int32, split: Int32, sums: Sums) -> None:
    """Sums of a chunk to the cell of a split."""
    rest = cute.make_rmem_tensor(2, Float32)
    rest[0], rest[1] = sums.top, sums.total
    at = cell(out, row, chunk, split)
    store(at, sums.acc)
    store(at + 4 * CHANNELS, rest)


def from_words(words: list) -> Sums:
    """Sums from the words of a cell."""
    acc = cute.make_rmem_tensor(CHANNELS, Float32)
    for e in range(CHANNELS):
        acc[e] = words[e].bitcast(Float32)
    return Sums(acc, *(word.bitcast(Float32) for word in words[CHANNELS:]))


def join(acc: cute.Tensor, top: Float32, total: Float32, other: Sums) -> tuple[Float32, Float32]:
    """Add other tokens' sums to (acc, top, total); returns the new (top, total)."""
    last, top = top, cute.arch.fmax(top, other.top)
    shrink, own = weight(last, top), weight(other.top, top)
    total = total * shrink + other.total * own
    for e in range(CHANNELS):
        acc[e] = acc[e] * shrink + other.acc[e] * own
    return top, total


class Share(NamedTuple):
    """How a split's threads share its chunks: ``lanes`` neighbours one, as many as there are splits, a warp at most.

    The last threads come first: they have least to do before.
    """

    lanes_log2: Int32  # rounded up
    group: Int32
    lane: Int32
    groups: Int32
    count: Int32  # chunks of all splits

    def unit(self, out: Outputs, first: Int32) -> Int32:
        """Number of the group's chunk in the round that starts at ``first``."""
        return first + self.group * out.num_splits + out.split_idx


def share_of(out: Outputs, rows: Rows, threads: int, thread: Int32) -> Share:
    lanes_log2 = sum((Int32(out.num_splits > (1 << i)) for i in range(MAX_LANES_LOG2)), Int32(0))
    turn = threads - 1 - thread
    return Share(lanes_log2, turn >> lanes_log2, turn & ((1 << lanes_log2) - 1), Int32(threads) >> lanes_log2,
                 rows.count * out.chunks)


@cute.jit
def prefetch(out: Outputs, rows: Rows, threads: cutlass.Constexpr[int], thread: Int32):
    """Bring the cells that ``merge`` reads first to L2: a read of EMPTY words, and a write of a part, wait for DRAM."""
    if out.num_splits > 1:
        share = share_of(out, rows, threads, thread)
        unit = share.unit(out, Int32(0))
        if unit < share.count and share.lane < out.num_splits:
            at = cell(out, unit // out.chunks, unit % out.chunks, share.lane)
            cute.arch.prefetch(access(Uint32, at, 1).iterator.llvm_ptr, cache_level="L2")


@cute.jit
def merge(out: Outputs, rows: Rows, threads: cutlass.Constexpr[int], thread: Int32):
    """This split's chunks, by ``threads`` threads of its CTA, whole warps; all of all splits call ``leave`` before."""
    share = share_of(out, rows, threads, thread)
    for first in cutlass.range(0, share.count, out.num_splits * share.groups, unroll=1):
        unit = share.unit(out, first)
        if cute.arch.vote_any_sync(unit < share.count):
            merge_chunk(out, rows, unit, unit < share.count, share)


@cute.jit
def merge_chunk(out: Outputs, rows: Rows, unit: Int32, is_live, share: Share):
    """Chunk ``unit`` of the CTA's rows, by a group of lanes; all lanes of the warp take part, live or not."""
    unit = unit * Int32(is_live)
    row, chunk = find_row(out, rows, unit // out.chunks), unit % out.chunks
    top, total = Float32(LOWEST), Float32(0.0)
    acc = cute.make_rmem_tensor(CHANNELS, Float32)
    acc.fill(0.0)
    splits, at = out.num_splits * Int32(is_live), o_address(out, row, chunk)  # before the wait
    if share.lane < splits:
        found = from_words(take(cell(out, row.idx, chunk, share.lane)))
        for e in cutlass.range_constexpr(CHANNELS):
            acc[e] = found.acc[e]
        top, total = found.top, found.total
    for split in cutlass.range(share.lane + (Int32(1) << share.lanes_log2), splits, Int32(1) << share.lanes_log2,
                               unroll=1):
        top, total = join(acc, top, total, from_words(take(cell(out, row.idx, chunk, split))))
    # of all lanes of the group
    last = top
    for i in cutlass.range_constexpr(MAX_LANES_LOG2):
        if i < share.lanes_log2:
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1 << i))
    shrink = weight(last, top)
    total = total * shrink
    for e in cutlass.range_constexpr(CHANNELS):
        acc[e] = acc[e] * shrink
    for i in cutlass.range_constexpr(MAX_LANES_LOG2):
        if i < share.lanes_log2:
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << i)
            for e in cutlass.range_constexpr(CHANNELS):
                acc[e] = acc[e] + cute.arch.shuffle_sync_bfly(acc[e], offset=1 << i)
    if is_live and share.lane == 0:
        write(out, row, chunk, at, acc, *closing(row, top, total))


@cute.jit
def take(at: Int64) -> list:
    """Wait for a cell's words and clear them."""
    words = cute.make_rmem_tensor(FULL_WORDS, Uint32)
    words.fill(EMPTY_BITS)
    while numbers.tree([words[i] for i in range(FULL_WORDS)], cutlass.max) == Uint32(EMPTY_BITS):
        found = (*load(at, CHANNELS), *load(at + 4 * CHANNELS, FULL_WORDS - CHANNELS))
        for i in cutlass.range_constexpr(FULL_WORDS):
            words[i] = found[i]
    for first, count in ((0, CHANNELS), (CHANNELS, FULL_WORDS - CHANNELS)):
        empty = cute.make_rmem_tensor(count, Uint32)
        empty.fill(EMPTY_BITS)
        store(at + 4 * first, empty)
    return [words[i] for i in range(FULL_WORDS)]


@cute.jit
def closing(row: Row, top: Float32, total: Float32) -> tuple[Float32, Float32]:
    """(what turns sums into o, lse) of a row from all its tokens."""
    sink = row.sink_logit * Float32(LOG2_E)
    origin = cute.arch.fmax(top, sink)
    own = weight(top, origin)
    total = total * own + weight(sink, origin)
    share, lse = Float32(0.0), Float32(NEG_INF)
    if total != 0.0:  # a NaN among live scores stays visible
        share = own * cute.arch.rcp_approx(total)
        lse = (origin + cute.math.log2(total, fastmath=True)) * Float32(LN_2)
    return share, lse


@cute.jit
def write(out: Outputs, row: Row, chunk: Int32, at: Int64, acc: cute.Tensor, share: Float32, lse: Float32):
    """o of a chunk, to ``at``, and, with the first one, the row's lse."""
    words = cute.make_rmem_tensor(CHANNELS // 2, Uint32)
    for i in cutlass.range_constexpr(CHANNELS // 2):
        words[i] = numbers.pack(acc[2 * i] * share, acc[2 * i + 1] * share, out.o.element_type)
    cute.autovec_copy(words, access(Uint32, at, CHANNELS // 2))
    if chunk == 0:
        out.lse[row.batch_idx, row.head, row.query] = lse


def o_address(out: Outputs, row: Row, chunk: Int32) -> Int64:
    """Of a chunk of a row of o."""
    _, q_len, heads = out.o.shape[:3]
    index = (Int64(row.batch_idx) * q_len + row.query) * heads + row.head
    return out.o.iterator.toint() + (index * out.chunks + chunk) * (2 * CHANNELS)


def cell(out: Outputs, row: Int32, chunk: Int32, split: Int32) -> Int64:
    """Address of a chunk of a row of a split of this place."""
    index = (Int64(out.place) * out.num_splits + split) * out.partials.shape[2]
    return out.partials.iterator.toint() + ((index + row) * out.chunks + chunk) * (4 * CELL_WORDS)


def access(element, at: Int64, count: int) -> cute.Tensor:
    """``count`` numbers of 32 bits of global memory, in one access."""
    return cute.make_tensor(cute.make_ptr(element, at, cute.AddressSpace.gmem, assumed_align=4 * count),
                            cute.make_layout(count))


def load(at: Int64, count: int) -> list[Uint32]:
    """Several words that other CTAs may be writing: each is an old value or a new one."""
    kind = ir.VectorType.get([count], Uint32.mlir_type)
    words = cute.arch.load(access(Uint32, at, count).iterator, kind, sem="relaxed", scope="gpu")
    words = cute.TensorSSA(words, (count,), Uint32)
    return [words[i] for i in range(count)]


def store(at: Int64, values: cute.Tensor) -> None:
    """Registers to words that other CTAs may be reading."""
    target = access(values.element_type, at, cute.size(values))
    cute.arch.store(target.iterator, values.load().ir_value(), sem="relaxed", scope="gpu")
