"""End of a CTA of Stream-K's schedule: items that several warps, or several CTAs, have shared are added up.

A warp's run may begin inside an item and end inside one: it keeps the sums of either in shared memory, its head and its
tail, as parts 2 * warp and 2 * warp + 1. Parts of one item follow each other: a tail, then heads. Of an item that goes
on in later CTAs, these leave their sums in scratch, as combine.py's splits do, and the CTA that begins it adds them up.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from lowbit_attn.device.numbers import LOWEST
from lowbit_attn.hopper.common import combine
from lowbit_attn.hopper.common.abi import Rows
from lowbit_attn.hopper.common.tuning import PARTS_AT_ONCE, UNIT_CHUNKS
from lowbit_attn.hopper.schedule.config import CURSOR_WORDS, RECORD_WORDS
from lowbit_attn.hopper.schedule.items import Cursor
from lowbit_attn.hopper.warp import merge as warps
from lowbit_attn.hopper.warp.config import PLAN_WORDS, WARP, WarpConfig
from lowbit_attn.hopper.warp.fetch import Lane
from lowbit_attn.hopper.warp.page_loop import Call, rows_of
from lowbit_attn.hopper.warp.softmax import State

CHANNELS = combine.CHANNELS
TAILS = 0xAAAA_AAAA  # parts that are tails


class RunSums(NamedTuple):
    """What warps keep for themselves and for the CTA's end."""

    cursors: cute.Tensor  # int32 (CURSOR_WORDS, warps)
    records: cute.Tensor  # int32 (RECORD_WORDS, parts): 1 if there are sums; the item and its last CTA
    sums: warps.WarpSums  # by part

    def store_cursor(self, warp: Int32, cursor: Cursor) -> None:
        """Write a warp's cursor; one lane does it."""
        own = cute.make_rmem_tensor(CURSOR_WORDS, Int32)
        own.fill(0)
        for i, value in enumerate(cursor):
            own[i] = Int32(value)
        cute.autovec_copy(own, self.cursors[None, warp])

    def cursor(self, warp: Int32) -> Cursor:
        own = cute.make_rmem_tensor(CURSOR_WORDS, Int32)
        cute.autovec_copy(self.cursors[None, warp], own)
        return Cursor(*(own[i] for i in range(len(Cursor._fields))))

    def clear(self, warp: Int32) -> None:
        """No sums yet; by one lane."""
        for i in range(2):
            self.records[0, 2 * warp + i] = Int32(0)

    def record(self, part: Int32, cursor: Cursor, is_shared: Int32, last_cta: Int32) -> None:
        """Whether a part has sums for the CTA's end, and of what; by one lane."""
        for i, value in enumerate((is_shared, cursor.batch_idx, cursor.block, last_cta)):
            self.records[i, part] = Int32(value)


def views(cfg: WarpConfig, plans: cute.Pointer, sums: cute.Pointer) -> RunSums:
    """plans: int32, of the CTA, behind the warps' walks; sums: fp32."""
    cursors = plans + PLAN_WORDS * cfg.warps
    records = cursors + CURSOR_WORDS * cfg.warps
    return RunSums(cute.make_tensor(cursors, cute.make_layout((CURSOR_WORDS, cfg.warps))),
                  cute.make_tensor(records, cute.make_layout((RECORD_WORDS, 2 * cfg.warps))),
                  warps.sums_views(cfg, sums, 2 * cfg.warps, cfg.merge_bytes // 4))


@cute.jit
def prefetch(cfg: cutlass.Constexpr[WarpConfig], out: combine.Outputs, ctas: Int32):
    """Bring the slots that this CTA leaves, and those that it reads first, to L2 (combine.prefetch)."""
    for place in (out.place, out.place + Int32(out.place + 1 < ctas)):
        combine.prefetch_slots(slot_of(cfg, out._replace(place=place), Int32(0)), Int32(cfg.rows * out.chunks),
                               cute.arch.thread_idx()[0])


@cute.jit
def store_sums(cfg: cutlass.Constexpr[WarpConfig], shared: RunSums, part: Int32, me: Lane, state: State):
    """This warp's O, maximum and sum of an item."""
    warps.store_sums(cfg, shared.sums, me._replace(warp=part), state)


@cute.jit
def write_whole(cfg: cutlass.Constexpr[WarpConfig], shared: RunSums, part: Int32, rows: Rows, out: combine.Outputs,
                me: Lane):
    """The result of an item of which this warp has all."""
    for unit in cutlass.range(Int32(me.lane), rows.count * row_units(out), WARP, unroll=1):
        row, chunks = unit_place(out, unit)
        write(out, combine.find_row(out, rows, row), chunks, sums_of(shared, part, row, chunks))


def row_units(out: combine.Outputs) -> int:
    """Units of a row."""
    return out.chunks // UNIT_CHUNKS


def unit_place(out: combine.Outputs, unit: Int32) -> tuple[Int32, tuple]:
    """(row, chunks) of a unit."""
    first = unit % row_units(out) * UNIT_CHUNKS
    return unit // row_units(out), tuple(first + i for i in range(UNIT_CHUNKS))


@cute.jit
def sums_of(shared: RunSums, part: Int32, row: Int32, chunks: tuple, is_there=True) -> tuple:
    """Sums of a part's tokens, or of none."""
    accs = cute.make_rmem_tensor((CHANNELS, len(chunks)), Float32)
    accs.fill(0.0)
    pair = cute.make_rmem_tensor(2, Float32)
    pair[0], pair[1] = Float32(LOWEST), Float32(0.0)
    if is_there:
        cute.autovec_copy(shared.sums.pairs[None, (row, part)], pair)
        for i, chunk in enumerate(chunks):
            cute.autovec_copy(shared.sums.chunks[None, (chunk, row, part)], accs[None, i])
    return tuple(combine.Sums(accs[None, i], pair[0], pair[1]) for i in range(len(chunks)))


def write(out: combine.Outputs, row: combine.Row, chunks: tuple, sums: tuple) -> None:
    combine.write_all(out, row, chunks, (combine.o_address(out, row, chunk) for chunk in chunks), sums)


@cute.jit
def merge(cfg: cutlass.Constexpr[WarpConfig], call: Call, shared: RunSums, out: combine.Outputs):
    """All items that the CTA's warps have shared, after a barrier; what another CTA waits for comes first."""
    thread, parts = cute.arch.thread_idx()[0], 2 * cfg.warps
    lane = thread % WARP
    has = Int32(0)
    if lane < parts:
        has = shared.records[0, lane]
    present = Uint32(cute.arch.vote_ballot_sync(has != 0))
    starts = present & Uint32(TAILS | 1)
    units = cfg.rows * row_units(out)
    for unit in cutlass.range(thread, Int32(cute.arch.popc(starts)) * units, cfg.threads, unroll=1):
        left = starts
        for _ in cutlass.range(unit // units, unroll=1):
            left = left & (left - Uint32(1))
        merge_run(cfg, call, shared, out, lowest(left), present, unit % units)


def slot_of(cfg: WarpConfig, out: combine.Outputs, i: Int32) -> combine.Slot:
    """The slot of chunk ``i`` of the one item that goes from a CTA to those before it."""
    return combine.slot(out, Int32(0), Int32(0), Int32(cfg.rows * out.chunks), i)


@cute.jit
def load_slots(slots: tuple) -> tuple:
    """Wait for the sums of some slots, and clear them."""
    words = cute.make_rmem_tensor((combine.SLOT_WORDS, len(slots)), Uint32)
    words.fill(combine.EMPTY_BITS)
    waits = True
    while waits:
        for i, at in enumerate(slots):
            combine.load_slot(at, words[None, i])
        waits = combine.has_empty(words[None, 0])
        for i in cutlass.range_constexpr(1, len(slots)):
            waits = waits | combine.has_empty(words[None, i])
    for at in slots:
        combine.clear(at)
    return tuple(combine.from_words([words[e, i] for e in range(combine.SLOT_WORDS)]) for i in range(len(slots)))


def lowest(bits: Uint32) -> Int32:
    """Number of the lowest set bit."""
    return Int32(cute.arch.popc((bits & (Uint32(0) - bits)) - Uint32(1)))


def heads_of(part: Int32, present: Uint32) -> tuple[Int32, Int32]:
    """The heads that go on with a part's item, every second part from the first result on and below the second."""
    first = part // 2 * 2 + 2
    tails = present & Uint32(TAILS) & ~(Uint32(1) << Uint32(part))  # a head whose warp has a tail, too, ends its item
    ends = (~present & ~Uint32(TAILS)) | (tails << Uint32(1))
    return first, lowest(ends & (Uint32(0) - (Uint32(1) << Uint32(first))))


@cute.jit
def merge_run(cfg: cutlass.Constexpr[WarpConfig], call: Call, shared: RunSums, out: combine.Outputs, part: Int32,
              present: Uint32, unit: Int32):
    """One unit of the item whose first part here is ``part``."""
    rows = rows_of(cfg, call, (shared.records[2, part], shared.records[1, part]))
    row, chunks = unit_place(out, unit)
    if row < rows.count:
        own, last_cta = combine.find_row(out, rows, row), shared.records[3, part]
        first = sums_of(shared, part, row, chunks)
        accs, top, total = tuple(sums.acc for sums in first), first[0].top, first[0].total
        head, end = heads_of(part, present)
        for later in cutlass.range(head, end, 2 * PARTS_AT_ONCE, unroll=1):
            heads = [later + 2 * i for i in range(PARTS_AT_ONCE)]
            found = [sums_of(shared, at, row, chunks, at < end) for at in heads]
            top, total = combine.join(accs, top, total, found)
        numbers = [row * out.chunks + chunk for chunk in chunks]
        if part == 0:
            for i, acc in zip(numbers, accs):
                combine.store_slot(slot_of(cfg, out, i), combine.Sums(acc, top, total))
        else:
            for place in cutlass.range(out.place + 1, last_cta + 1, unroll=1):
                there = out._replace(place=place)
                found = load_slots(tuple(slot_of(cfg, there, i) for i in numbers))
                top, total = combine.join(accs, top, total, [found])
            write(out, own, chunks, tuple(combine.Sums(acc, top, total) for acc in accs))
