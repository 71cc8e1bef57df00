"""Split-KV merge inside the launch: flash-decoding's combine, of which every split of a row block does a share.

A row block's chunks of CHANNELS channels are dealt to its splits in order. A split stores its sums of a chunk, with
maximum and sum of the row, in scratch, where the split that merges the chunk has those of all splits side by side: all
CTAs come at about the same time, and what that takes is the number of requests, of a sector or of a line. Between calls
all words are EMPTY, a NaN that no arithmetic gives. Who merges reads sums until no word is EMPTY, hence needs no fence,
counter or flag, and makes them EMPTY again. So all splits must run at once: the launch is cooperative. Sums are in fp32
and in a fixed order. A row without tokens, whose sum of weights is 0, gives o = 0, lse = -inf; a NaN stays visible. A
sink logit joins the denominator.
"""

from collections.abc import Iterable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from lowbit_attn.device import numbers, ptx
from lowbit_attn.device.numbers import LOWEST, NEG_INF
from lowbit_attn.hopper.common.abi import Rows, query_and_head
from lowbit_attn.hopper.common.tuning import (
    CHUNK_CHANNELS,
    EMPTY,
    LINE_WORDS,
    MOST_LANES_LOG2,
    SLOT_WORDS,
    SLOTS_AT_ONCE,
)
from lowbit_attn.registers import LN_2, LOG2_E

CHANNELS = CHUNK_CHANNELS  # of one thread: 16 bytes of a split's o
EMPTY_BITS = EMPTY & 0xFFFF_FFFF
LINE_BYTES = 4 * LINE_WORDS
LINE_LOG2 = LINE_BYTES.bit_length() - 1
WARP_LOG2 = 5
WARP = 1 << WARP_LOG2


class Outputs(NamedTuple):
    """Where a CTA's result goes; lse in natural log."""

    partials: cute.Tensor  # fp32 (places, num_splits, words)
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
        """Chunks of a row."""
        return self.o.shape[3] // CHANNELS


def block_of(block: tuple) -> Int32:
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
    query, head = query_and_head(rows, row)
    return Row(row, rows.batch_idx, query, head, out.sink_logits[head * Int32(out.sink_logits.shape[0] > 1)])


class Sums(NamedTuple):
    """What tokens add to CHANNELS channels of a query row, fp32: weights are 2^(logit - top), logits in base 2."""

    acc: cute.Tensor  # sums of weighted V
    top: Float32  # LOWEST if there are no tokens
    total: Float32  # of the weights


def weight(x: Float32, origin: Float32) -> Float32:
    return cute.math.exp2(x - origin, fastmath=True)


class Slot(NamedTuple):
    """Where a split stores its sums of a chunk, addresses. For a single split ``acc`` is o's, and there is no pair."""

    acc: Int64
    pair: Int64  # maximum and sum


def chunks_of_split(out: Outputs, count: Int32) -> Int32:
    """Chunks that a split merges, of ``count`` of a row block; the last splits may have fewer, or none."""
    return Int32((Uint32(count + out.num_splits) - Uint32(1)) // Uint32(out.num_splits))


def slot(out: Outputs, merger: Int32, split: Int32, size: Int32, i: Int32) -> Slot:
    """The slot of chunk ``i`` of the ``size`` ones that split ``merger`` of this place merges."""
    words = out.partials.shape[2]
    start = out.partials.iterator.toint() + Int64(out.place * out.num_splits) * (4 * words)
    at, count = (merger * out.num_splits + split) * size + i, out.num_splits * out.num_splits * size
    return Slot(start + 4 * CHANNELS * at, start + 4 * CHANNELS * count + 4 * (SLOT_WORDS - CHANNELS) * at)


@cute.jit
def slot_address(out: Outputs, rows: Rows, row: Row, chunk: Int32) -> Slot:
    """Where ``store_partial`` puts a chunk."""
    acc, pair = o_address(out, row, chunk), Int64(0)
    if out.num_splits > 1:
        size, unit = chunks_of_split(out, rows.count * out.chunks), row.idx * out.chunks + chunk
        merger = Int32(Uint32(unit) // Uint32(size))
        acc, pair = slot(out, merger, out.split_idx, size, unit - merger * size)
    return Slot(acc, pair)


@cute.jit
def store_partial(out: Outputs, row: Row, chunks: tuple, addresses: tuple, sums: tuple):
    """This split's sums of some chunks of a row, for ``merge``; a single split's are the result."""
    if out.num_splits == 1:
        write_all(out, row, chunks, (at.acc for at in addresses), sums)
    else:
        for at, own in zip(addresses, sums):
            store_slot(at, own)


def store_slot(at: Slot, sums: Sums) -> None:
    pair = cute.make_rmem_tensor(SLOT_WORDS - CHANNELS, Float32)
    pair[0], pair[1] = sums.top, sums.total
    store(at.acc, sums.acc)
    store(at.pair, pair)


def from_words(words: list) -> Sums:
    """Sums from the words of a slot."""
    acc = cute.make_rmem_tensor(CHANNELS, Float32)
    for e in range(CHANNELS):
        acc[e] = words[e].bitcast(Float32)
    return Sums(acc, *(word.bitcast(Float32) for word in words[CHANNELS:]))


def join(accs: tuple, top: Float32, total: Float32, others: list) -> tuple[Float32, Float32]:
    """Add other tokens' sums, each of several chunks of a row, to (accs, top, total); returns the new (top, total)."""
    last, top = top, numbers.tree([top, *(sums[0].top for sums in others)], cute.arch.fmax)
    shrink, weights = weight(last, top), [weight(sums[0].top, top) for sums in others]
    for i, acc in enumerate(accs):
        for e in range(CHANNELS):
            acc[e] = numbers.tree([acc[e] * shrink, *(w * sums[i].acc[e] for w, sums in zip(weights, others))],
                                  numbers.add)
    return top, numbers.tree([total * shrink, *(w * sums[0].total for w, sums in zip(weights, others))], numbers.add)


@cute.jit
def prefetch(out: Outputs, rows: Rows, thread: Int32):
    """Bring the slots that ``merge`` reads to L2: a read of EMPTY words, and a write of a part, wait for DRAM."""
    if out.num_splits > 1:
        size = chunks_of_split(out, rows.count * out.chunks)
        prefetch_slots(slot(out, out.split_idx, Int32(0), size, Int32(0)), out.num_splits * size, thread)


@cute.jit
def prefetch_slots(first: Slot, count: Int32, thread: Int32):
    """Bring ``count`` slots that follow each other to L2, a line a thread."""
    acc_lines, pair_lines = (count * (4 * words) + (LINE_BYTES - 1) >> LINE_LOG2
                             for words in (CHANNELS, SLOT_WORDS - CHANNELS))
    at = first.acc + LINE_BYTES * thread
    if thread >= acc_lines:
        at = first.pair + LINE_BYTES * (thread - acc_lines)
    if thread < acc_lines + pair_lines:
        cute.arch.prefetch(access(Uint32, at, 1).iterator.llvm_ptr, cache_level="L2")


@cute.jit
def merge(out: Outputs, rows: Rows, threads: cutlass.Constexpr[int], thread: Int32,
          most_lanes_log2: cutlass.Constexpr[int] = MOST_LANES_LOG2):
    """This split's chunks, by ``threads`` threads of its CTA, whole warps; all of all splits have stored before.

    The last warps come first: they have least to do before. A warp's lanes are neighbouring chunks times splits.
    most_lanes_log2: of a chunk; fewer where a split has more chunks than its CTA has threads.
    """
    total = rows.count * out.chunks
    size = chunks_of_split(out, total)
    first = size * out.split_idx
    count = cutlass.min(size, total - first)
    width_log2 = cutlass.min(ceil_log2(size, WARP_LOG2), WARP_LOG2 - ceil_log2(out.num_splits, most_lanes_log2))
    warp = (threads // WARP - 1) - thread // WARP
    for start in cutlass.range(warp << width_log2, count, (threads // WARP) << width_log2, unroll=1):
        merge_chunk(out, rows, size, start, count, width_log2, thread % WARP)


def ceil_log2(x: Int32, most: int) -> Int32:
    """log2 rounded up, ``most`` at most."""
    return sum((Int32(x > (1 << i)) for i in range(most)), Int32(0))


@cute.jit
def merge_chunk(out: Outputs, rows: Rows, size: Int32, start: Int32, count: Int32, width_log2: Int32, lane: Int32):
    """Chunks from ``start`` on of this split's, one a lane modulo 2^width_log2; by a warp."""
    own = start + (lane & ((1 << width_log2) - 1))
    is_live = own < count
    own = own * Int32(is_live)
    unit = size * out.split_idx + own
    row, chunk = find_row(out, rows, unit // out.chunks), unit % out.chunks
    at = o_address(out, row, chunk)  # before the wait
    top, total = Float32(LOWEST), Float32(0.0)
    acc = cute.make_rmem_tensor(CHANNELS, Float32)
    acc.fill(0.0)
    lanes_log2 = WARP_LOG2 - width_log2
    splits = out.num_splits * Int32(is_live)
    for split in cutlass.range(lane >> width_log2, splits, SLOTS_AT_ONCE << lanes_log2, unroll=1):
        top, total = add_partials(out, size, own, split, Int32(1) << lanes_log2, acc, top, total)
    # of all lanes of the chunk
    last = top
    for i in cutlass.range_constexpr(WARP_LOG2):
        if i >= width_log2:
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1 << i))
    shrink = weight(last, top)
    total = total * shrink
    for e in cutlass.range_constexpr(CHANNELS):
        acc[e] = acc[e] * shrink
    for i in cutlass.range_constexpr(WARP_LOG2):
        if i >= width_log2:
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << i)
            for e in cutlass.range_constexpr(CHANNELS):
                acc[e] = acc[e] + cute.arch.shuffle_sync_bfly(acc[e], offset=1 << i)
    if is_live and lane >> width_log2 == 0:
        write(out, row, chunk, at, acc, *closing(row, top, total))


@cute.jit
def add_partials(out: Outputs, size: Int32, own: Int32, first: Int32, apart: Int32, acc: cute.Tensor, top: Float32,
                 total: Float32) -> tuple[Float32, Float32]:
    """Add the sums of up to SLOTS_AT_ONCE splits ``first``, ``first + apart``, ... to acc; the new (top, total)."""
    words = cute.make_rmem_tensor((SLOT_WORDS, SLOTS_AT_ONCE), Uint32)
    neutral = cute.make_rmem_tensor(SLOT_WORDS, Float32)
    neutral.fill(0.0)
    neutral[CHANNELS] = Float32(LOWEST)
    slots = [slot(out, out.split_idx, first + i * apart, size, own) for i in range(SLOTS_AT_ONCE)]
    for i in cutlass.range_constexpr(SLOTS_AT_ONCE):
        for e in cutlass.range_constexpr(SLOT_WORDS):
            words[e, i] = cutlass.select_(first + i * apart < out.num_splits, Uint32(EMPTY_BITS),
                                          neutral[e].bitcast(Uint32))
    waits = first < out.num_splits
    while waits:
        for i in cutlass.range_constexpr(SLOTS_AT_ONCE):
            if has_empty(words[None, i]):
                load_slot(slots[i], words[None, i])
        waits = has_empty(words[None, 0])
        for i in cutlass.range_constexpr(1, SLOTS_AT_ONCE):
            waits = waits | has_empty(words[None, i])
    for i in cutlass.range_constexpr(SLOTS_AT_ONCE):
        if first + i * apart < out.num_splits:
            clear(slots[i])
    found = [from_words([words[e, i] for e in range(SLOT_WORDS)]) for i in range(SLOTS_AT_ONCE)]
    return join((acc,), top, total, [(sums,) for sums in found])


def load_slot(at: Slot, words: cute.Tensor) -> None:
    """Ask for a slot's words."""
    for i, word in enumerate((*load(at.acc, CHANNELS), *load(at.pair, SLOT_WORDS - CHANNELS))):
        words[i] = word


def has_empty(words: cute.Tensor):
    """Whether one of a slot's words has not come."""
    return numbers.tree([words[i] for i in range(SLOT_WORDS)], cutlass.max) == Uint32(EMPTY_BITS)


def clear(at: Slot) -> None:
    """Make a slot EMPTY for the next call."""
    for to, count in ((at.acc, CHANNELS), (at.pair, SLOT_WORDS - CHANNELS)):
        empty = cute.make_rmem_tensor(count, Uint32)
        empty.fill(EMPTY_BITS)
        store(to, empty)


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


def write_all(out: Outputs, row: Row, chunks: tuple, addresses: Iterable, sums: tuple) -> None:
    """o of some chunks of a row, and its lse, from the sums of all tokens."""
    share, lse = closing(row, sums[0].top, sums[0].total)
    for chunk, at, own in zip(chunks, addresses, sums):
        write(out, row, chunk, at, own.acc, share, lse)


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
    """Address of a chunk of a row of o."""
    _, q_len, heads = out.o.shape[:3]
    index = (Int64(row.batch_idx) * q_len + row.query) * heads + row.head
    return out.o.iterator.toint() + (index * out.chunks + chunk) * (2 * CHANNELS)


def access(element, at: Int64, count: int) -> cute.Tensor:
    """``count`` numbers of 32 bits of global memory, in one access."""
    return cute.make_tensor(cute.make_ptr(element, at, cute.AddressSpace.gmem, assumed_align=4 * count),
                            cute.make_layout(count))


def load(at: Int64, count: int) -> list[Uint32]:
    """Several words that other CTAs may be writing."""
    return ptx.load_relaxed(access(Uint32, at, count).iterator, count)


def store(at: Int64, values: cute.Tensor) -> None:
    """Registers to words that other CTAs may be reading."""
    target = access(values.element_type, at, cute.size(values))
    cute.arch.store(target.iterator, values.load().ir_value(), sem="relaxed", scope="gpu")
