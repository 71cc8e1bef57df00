"""Split-KV merge by the last CTA of a row block to finish: flash-decoding's combine without a launch of its own.

Every CTA leaves the (o, lse) of its split; the one that finds all others to have done so merges them, in fp32 and in
the order of the splits, whichever CTA it is. An empty split has lse -inf; a row of only such gives o = 0, lse = -inf; a
NaN stays visible. A sink logit joins the denominator. A single split has nothing to wait for.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from lowbit_attn.hopper.register import numbers
from lowbit_attn.hopper.register.config import SPLITS_AT_ONCE
from lowbit_attn.hopper.softmax import LOG2_E, NEG_INF
from lowbit_attn.hopper.walk import Rows, place

LN_2 = 0.6931471805599453
CHANNELS = 4  # of one thread: 16 bytes of a split's o


class Outputs(NamedTuple):
    """Where a CTA's result goes; lse in natural log."""

    o_partial: cute.Tensor  # fp32 (num_splits, b, q_len, h, d)
    lse_partial: cute.Tensor  # fp32 (num_splits, b, q_len, h)
    o: cute.Tensor  # (b, q_len, h, d)
    lse: cute.Tensor  # fp32 (b, h, q_len)
    sink_logits: cute.Tensor  # fp32, one a head, or a single -inf for all
    arrived: cute.Pointer  # int32 of this row block: CTAs that have left their split; 0 between calls
    split_idx: Int32

    @property
    def num_splits(self):
        return self.o_partial.shape[0]

    @property
    def split_rows(self):
        """Query rows of a split, of all sequences and heads."""
        batch, q_len, heads = self.o.shape[:3]
        return batch * q_len * heads


def counter(arrivals: cute.Tensor, block: tuple) -> cute.Pointer:
    """That of a CTA's row block: all splits share it."""
    return arrivals.iterator + (block[1] * cute.arch.grid_dim()[0] + block[0])


class Row(NamedTuple):
    """A query row and its sink logit."""

    batch_idx: Int32
    query: Int32
    head: Int32
    sink_logit: Float32


def find_row(out: Outputs, rows: Rows, row: Int32) -> Row:
    """Row ``row`` of the CTA, counted from 0."""
    query, head = place(rows, row)
    return Row(rows.batch_idx, query, head, out.sink_logits[head * Int32(out.sink_logits.shape[0] > 1)])


@cute.jit
def origin_of(top: Float32) -> Float32:
    """What weights are measured from: -inf would make those of an all-empty row NaN instead of 0."""
    return Float32(0.0) if top == NEG_INF else top


def weight(x: Float32, origin: Float32) -> Float32:
    return cute.math.exp2((x - origin) * Float32(LOG2_E), fastmath=True)


@cute.jit
def total_lse(origin: Float32, total: Float32) -> Float32:
    lse = Float32(NEG_INF)
    if total != 0.0:
        lse = origin + cute.math.log2(total, fastmath=True) * Float32(LN_2)
    return lse


@cute.jit
def reciprocal(total: Float32) -> Float32:
    """0 for a row without tokens."""
    inverse = Float32(0.0)
    if total != 0.0:
        inverse = Float32(1.0) / total
    return inverse


@cute.jit
def leave(out: Outputs, row: Row, channels: tuple, values: tuple, lse: Float32, has_lse):
    """Some channels of this split's o and, by the thread that ``has_lse``, its lse: all there is, or a part."""
    if out.num_splits == 1:
        origin = origin_of(cute.arch.fmax(row.sink_logit, lse))
        own = weight(lse, origin)
        total = own + weight(row.sink_logit, origin)
        share = own * reciprocal(total)
        for d, value in zip(channels, values):
            out.o[row.batch_idx, row.query, row.head, d] = (value * share).to(out.o.element_type)
        if has_lse:
            out.lse[row.batch_idx, row.head, row.query] = total_lse(origin, total)
    else:
        for d, value in zip(channels, values):
            out.o_partial[out.split_idx, row.batch_idx, row.query, row.head, d] = value
        if has_lse:
            out.lse_partial[out.split_idx, row.batch_idx, row.query, row.head] = lse


@cute.jit
def leave_chunk(out: Outputs, row: Row, head_dim: cutlass.Constexpr[int], chunk: Int32, values: cute.Tensor,
                lse: Float32):
    """The same of CHANNELS channels, fp32 in registers, that follow each other."""
    if out.num_splits == 1:
        origin = origin_of(cute.arch.fmax(row.sink_logit, lse))
        own = weight(lse, origin)
        total = own + weight(row.sink_logit, origin)
        write_chunk(out, row, head_dim, chunk, values, own * reciprocal(total))
        if chunk == 0:
            out.lse[row.batch_idx, row.head, row.query] = total_lse(origin, total)
    else:
        cute.autovec_copy(values, part_of(out, row, head_dim, out.split_idx, chunk))
        if chunk == 0:
            out.lse_partial[out.split_idx, row.batch_idx, row.query, row.head] = lse


def write_chunk(out: Outputs, row: Row, head_dim: int, chunk: Int32, values: cute.Tensor, share: Float32) -> None:
    """CHANNELS channels of o, ``values`` times ``share``."""
    words = cute.make_rmem_tensor(CHANNELS // 2, Uint32)
    for i in range(CHANNELS // 2):
        words[i] = numbers.pack(values[2 * i] * share, values[2 * i + 1] * share, out.o.element_type)
    cute.autovec_copy(words, chunk_of(out, row, head_dim, chunk))


@cute.jit
def merge(out: Outputs, rows: Rows, head_dim: cutlass.Constexpr[int], threads: cutlass.Constexpr[int], thread: Int32,
          barrier: cutlass.Constexpr[int], flag: cute.Pointer):
    """By the ``threads`` threads that left the rows and share the barrier; flag: an int32 in shared memory."""
    if out.num_splits > 1:
        shared = cute.make_tensor(cute.recast_ptr(flag, dtype=Int32), cute.make_layout(1))
        cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)
        if thread == 0:
            shared[0] = cute.arch.atomic_add(out.arrived, Int32(1), sem="acq_rel", scope="gpu")
        cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)
        if shared[0] == out.num_splits - 1:
            if thread == 0:
                cute.make_tensor(out.arrived, cute.make_layout(1))[0] = Int32(0)
            chunks = head_dim // CHANNELS
            for first in cutlass.range(0, rows.count * chunks, threads, unroll=1):
                row = (first + thread) // chunks
                if row < rows.count:
                    merge_row(out, find_row(out, rows, row), head_dim, (first + thread) % chunks)


@cute.jit
def merge_row(out: Outputs, row: Row, head_dim: cutlass.Constexpr[int], chunk: Int32):
    """CHANNELS channels of one row over all splits."""
    top, acc = row.sink_logit, cute.make_rmem_tensor(CHANNELS, Float32)
    total = weight(top, origin_of(top))
    acc.fill(0.0)
    lses, values = (cute.make_rmem_tensor(shape, Float32) for shape in (SPLITS_AT_ONCE, (CHANNELS, SPLITS_AT_ONCE)))
    rows, first_row = out.split_rows, row_index(out, row)
    for first in cutlass.range(0, out.num_splits, SPLITS_AT_ONCE, unroll=1):
        lses.fill(NEG_INF)
        values.fill(0.0)
        at = first_row + Int64(first) * rows
        for i in cutlass.range_constexpr(SPLITS_AT_ONCE):
            if first + i < out.num_splits:
                lses[i] = access(out.lse_partial, Float32, at, 1, 0, 4, rows, i)[0]
                cute.autovec_copy(access(out.o_partial, Float32, at, head_dim, chunk, 16, rows, i), values[None, i])
        last = top
        for i in cutlass.range_constexpr(SPLITS_AT_ONCE):
            top = cute.arch.fmax(top, lses[i])
        origin = origin_of(top)
        shrink = weight(last, origin)
        total = total * shrink
        for e in cutlass.range_constexpr(CHANNELS):
            acc[e] = acc[e] * shrink
        for i in cutlass.range_constexpr(SPLITS_AT_ONCE):
            own = weight(lses[i], origin)
            total = total + own
            for e in cutlass.range_constexpr(CHANNELS):
                acc[e] = acc[e] + own * values[e, i]
    write_chunk(out, row, head_dim, chunk, acc, reciprocal(total))
    if chunk == 0:
        out.lse[row.batch_idx, row.head, row.query] = total_lse(origin_of(top), total)


def part_of(out: Outputs, row: Row, head_dim: int, split: Int32, chunk: Int32) -> cute.Tensor:
    """CHANNELS values of a split's o, in one access."""
    return access(out.o_partial, Float32, row_index(out, row) + Int64(split) * out.split_rows, head_dim, chunk, 16)


def chunk_of(out: Outputs, row: Row, head_dim: int, chunk: Int32) -> cute.Tensor:
    """The same channels of the merged o, as words of two."""
    return access(out.o, Uint32, row_index(out, row), head_dim // 2, chunk, 8)


def row_index(out: Outputs, row: Row) -> Int64:
    """Of a query row, among those of o or of one split."""
    _, q_len, heads = out.o.shape[:3]
    return (Int64(row.batch_idx) * q_len + row.query) * heads + row.head


def access(tensor: cute.Tensor, element, row: Int64, width: int, chunk: Int32, nbytes: int, step: Int32 = 0,
           steps: int = 0) -> cute.Tensor:
    """Access ``chunk`` of ``nbytes`` of a row of ``width`` elements of a tensor whose rows follow each other.

    The row lies ``steps`` times ``step`` rows behind ``row``: of several, an instruction each.
    """
    count, size = nbytes * 8 // element.width, element.width // 8
    address = tensor.iterator.toint() + (row * width + chunk * count) * size
    if steps:
        address = address + Int64(step) * (width * size * steps)
    return cute.make_tensor(cute.make_ptr(element, address, cute.AddressSpace.gmem, assumed_align=nbytes),
                            cute.make_layout(count))
