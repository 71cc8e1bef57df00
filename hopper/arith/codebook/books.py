"""The codebooks of a CTA's KV head in shared memory, and how a lane looks entries up.

    K's entries, or their products with q (table.py) | V's entries | factors of the query rows

Row e has entry e of every group of channels, 256 bytes: an address is ``256 code + offset of the group``, and one PRMT
puts both bytes together. Lanes that look up one byte of their words at once have groups in different banks, but for
lanes g and g + 4 in K of two channels at head_dim 128: what would keep them apart costs as much (docs/lessons.md). At
head_dim 64 rows hold the entries twice, in two orders, for lanes whose groups would share banks in one of them.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from lowbit_attn.device import ptx
from lowbit_attn.formats import codebook_order as order
from lowbit_attn.hopper.arith.codebook.config import BOOK_SIDES, TABLE_BYTES, BookSide, groups
from lowbit_attn.hopper.common.abi import Rows
from lowbit_attn.hopper.common.book_abi import Books
from lowbit_attn.hopper.warp.config import WORD, SidePlan, WarpConfig
from lowbit_attn.hopper.warp.fetch import UNIT_BYTES, Arrival, Pages, Piece, Ring, read

PAIR = 2  # offsets in a register
RUN_WORDS = order.RUN // WORD


class BookPlace(NamedTuple):
    """Shared memory of the CTA's codebooks, uint32: K's, then V's; and a barrier for each."""

    buffer: cute.Pointer
    full: cute.Pointer


class Lookups(NamedTuple):
    """What a lane's lookups in one side have in common."""

    base: Int32  # address of the codebook in shared memory
    offsets: list  # [i // 2] offsets in a row of the groups of bytes i and i + 1 of a word, in bytes 0 and 1
    words: int  # of an entry
    more: int = 0  # bytes in a row that the groups lie behind the offsets

    def address(self, word: Uint32, byte: int, i: int) -> Int32:
        """Address of the entry that byte ``byte`` of a word of codes names, in the group of step ``i``."""
        selector = 0x7604 | byte << 4 | i % PAIR
        return self.base + Int32(ptx.permute(word, self.offsets[i // PAIR], selector))

    def find(self, word: Uint32, byte: int, i: int, more: int = 0) -> list[Uint32]:
        """The entry's words; more: as the field, beside it."""
        return ptx.lookup(self.address(word, byte, i), self.more + more, self.words)


def lookups(base: Int32, words: int, group_of, second: Int32 | None = None) -> Lookups:
    """words: of an entry; group_of(i): the lane's group in step i; second: bits in which offsets of the second copy of
    a row differ, in lanes that use it, 0 in the others."""
    steps = range(4)
    own = [Int32(group_of(i)) * (WORD * words) for i in steps]
    if second is not None:
        own = [x ^ second for x in own]
    pairs = [Uint32(ptx.opaque(own[i] | own[i + 1] << 8)) for i in steps[::PAIR]]
    return Lookups(base, pairs, words)


def straighten(words: list, rotation: Uint32, count: int) -> list:
    """Bring words of step 0, 1, ... of a lane that asks in step i for group i + rotation nearer to the order of groups:
    word j becomes that of group j + (rotation without its lowest ``count`` bits)."""
    for bit in range(count):
        is_set = (rotation & Uint32(1 << bit)) != 0
        words = [cutlass.select_(is_set, words[(j - (1 << bit)) % len(words)], own) for j, own in enumerate(words)]
    return words


def second_copy(side: SidePlan) -> int:
    """Bits in which offsets in the second copy of entries differ; 0: a row has one."""
    size = groups(side) * 2 * side.group_size
    return (size + size // 2) * (size < order.BOOK_ROW_BYTES)


def place_of(cfg: WarpConfig, buffer: cute.Pointer, barriers: cute.Pointer) -> BookPlace:
    """buffer, barriers: of the CTA; codebooks are behind its rings, their barriers behind all others."""
    return BookPlace(buffer + cfg.smem_plan["buffer"] // WORD, barriers + (cfg.barriers - len(BOOK_SIDES)))


def start(cfg: WarpConfig, books: Books, rows: Rows, place: BookPlace) -> None:
    """Make the barriers of both sides and start the copies; one thread does it."""
    shared, full = place
    for i in range(len(BOOK_SIDES)):
        cute.arch.mbarrier_init(full + i, 1)
    cute.arch.mbarrier_init_fence()
    for i, side in enumerate((books.k, books.v)):
        cute.arch.mbarrier_arrive_and_expect_tx(full + i, TABLE_BYTES)
        source = side.iterator.toint() + Int64(rows.head_idx) * TABLE_BYTES
        ptx.bulk_copy(shared.toint() + i * TABLE_BYTES, source, TABLE_BYTES, (full + i).toint(),
                      Int32(ptx.EVICT_UNCHANGED))


def end(cfg: WarpConfig, place: BookPlace) -> None:
    """Behind everything else: no copy may come when the CTA has ended. One without pages has not waited for V's."""
    cute.arch.mbarrier_wait(place.full + 1, 0)


def copy_piece(cfg: WarpConfig, side: BookSide, pages: Pages, ring: Ring, warp: Int32, slot: Int32,
               piece_id: Int32) -> None:
    """Start copies of a piece of a page, whose codes and what stands beside them are runs of their own."""
    page, piece = piece_id >> side.pieces.bit_length() - 1, piece_id % side.pieces
    source = pages.pool.iterator.toint() + (Int64(page) * Int64(pages.page_stride) + pages.head_units) * UNIT_BYTES
    target, full = ring.buffer.toint() + (warp * cfg.warp_bytes + slot * cfg.slot_bytes), ring.full + slot
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, side.nbytes)
        for to, nbytes, start, apart in side.copies:
            ptx.bulk_copy(target + to, source + (start + piece * apart), nbytes, full.toint(), pages.policy)


@cute.jit
def wait_for_values(arrival: Arrival):
    """Before a warp's first page of V: its codebook."""
    if arrival.page == 0:
        cute.arch.mbarrier_wait(arrival.ring.books.full + 1, 0)


def base_of(cfg: WarpConfig, buffer: cute.Pointer, side: int) -> Int32:
    """Address of a side's codebook; buffer: of the CTA's rings, in front of them."""
    return Int32(buffer.toint()) + cfg.smem_plan["buffer"] + side * TABLE_BYTES


def run_view(cfg: WarpConfig, piece: Piece, side: SidePlan, lane: Uint32) -> cute.Tensor:
    """(4 words, run): the lane's words of codes."""
    view = cute.make_tensor(piece.buffer + side.codes // WORD, cute.make_layout(
        (RUN_WORDS, order.LANES, side.nbytes // (order.LANES * order.RUN), cfg.slots, cfg.warps),
        stride=(1, RUN_WORDS, order.LANES * RUN_WORDS, cfg.slot_bytes // WORD, cfg.warp_bytes // WORD)))
    return view[None, Int32(lane), None, piece.slot, piece.warp]


class Codes:
    """A lane's words of codes of a page, read as they are asked for."""

    def __init__(self, cfg: WarpConfig, piece: Piece, side: SidePlan, lane: Uint32):
        self.view, self.runs = run_view(cfg, piece, side, lane), {}

    def word(self, i: int) -> Uint32:
        run = i // RUN_WORDS
        if run not in self.runs:
            self.runs = {run: read(self.view, run)}
        return self.runs[run][i % RUN_WORDS]
