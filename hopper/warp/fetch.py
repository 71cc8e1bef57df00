"""What a warp fetches: record parts, to a private ring that bulk copies fill; of these, words of codes and metadata to
registers; and query rows. No other warp takes part.

Pieces run K part, V part, K part, ... of the warp's pages; piece n lies in slot n % slots. When piece n has come, the
copy to the slot read before it starts: ``slots - 1`` pieces are under way while a warp waits, and no more than memory
needs (tuning.UNDER_WAY). What is beyond that queues up, and the queue serves some SMs a fifth faster than others. A
warp that is behind the others (page_loop.py) does not wait for piece n.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from lowbit_attn import layout
from lowbit_attn.device import ptx
from lowbit_attn.hopper.common.abi import Rows, query_and_head
from lowbit_attn.hopper.common.tuning import LINE_WORDS, PASSING_BYTES
from lowbit_attn.hopper.warp.config import META_BYTES, PIECES, WARP, WORD, SidePlan, WarpConfig

UNIT_BYTES = 128  # the pool's unit of addresses
CHUNK_BYTES = 16  # of a bulk copy's alignment, and of a cp.async


class Lane(NamedTuple):
    """This thread: its warp, and lane = 4 * g + t."""

    warp: Int32
    lane: Uint32
    g: Uint32
    t: Uint32


def lane_of(warp: Int32, lane: Uint32) -> Lane:
    return Lane(warp, lane, lane // 4, lane % 4)


def fresh(me: Lane) -> Lane:
    """This thread once more, as values of its own: what ptxas worked out of the old ones would stay in registers over
    a long loop, or be spilled."""
    return lane_of(me.warp, Uint32(cute.arch.shuffle_sync_bfly(me.lane, offset=0)))


def fence() -> None:
    """Keep loads on their side: else ptxas brings next ones forward, until registers are short, or puts them off."""
    cute.arch.sync_warp()


class Pages(NamedTuple):
    """Where the packed pages of this warp are."""

    pool: cute.Tensor  # (units, 32) uint32
    table: cute.Tensor  # (entries) int32
    first: Int32  # entry of the warp's first page, or of the sequence's where pages come in pieces
    count: Int32
    page_stride: Int32
    head_units: Int64  # head_idx * head_stride
    apart: Int32 | int  # entries from a page of the warp to its next
    policy: Int32 | None  # of L2 for what is copied
    number: Int32 | int = 0  # from there to the warp's first piece, where pages come in pieces


class Ring(NamedTuple):
    """Shared memory of this warp: ``slots`` record parts and their full barriers, then the barrier of mixed.py's
    units and, where the configuration has_halves, that of half of V."""

    buffer: cute.Pointer  # of the CTA, uint32
    full: cute.Pointer  # of this warp
    unit_full: cute.Pointer
    half_full: cute.Pointer
    books: tuple | None = None  # of an arithmetic with codebooks: books.BookPlace


class Arrival(NamedTuple):
    """What an arithmetic may know of the page at hand, beside its part."""

    page: Int32  # its number among the warp's
    ring: Ring
    phase: Int32  # to wait for the rest of V
    is_single: Boolean  # of V, only the second half of the tokens and the metadata have come


def ring_of(cfg: WarpConfig, buffer: cute.Pointer, barriers: cute.Pointer, warp: Int32) -> Ring:
    """buffer, barriers: of the CTA."""
    own = barriers + warp * cfg.warp_barriers
    return Ring(buffer, own, own + cfg.slots, own + cfg.slots + 1)


def init(cfg: WarpConfig, ring: Ring) -> None:
    """Make the ring's barriers; one lane of the warp does it."""
    for i in range(cfg.warp_barriers):
        cute.arch.mbarrier_init(ring.full + i, 1)


def part_of(piece: int) -> tuple[int, int]:
    """(page, side) of a piece: side 0 is K."""
    return piece // PIECES, piece % PIECES


@cute.jit
def page_ids(cfg: cutlass.Constexpr[WarpConfig], pages: Pages, start: Int32, lane: Uint32) -> Int32:
    """Each lane looks up one of the 32 page ids from page ``start`` of the warp on."""
    found = Int32(0)
    at = start + Int32(lane)
    if at < pages.count:
        found = id_at(cfg, pages.table, pages.first, pages.number, at * pages.apart)
    return found


def id_at(cfg: WarpConfig, table: cute.Tensor, first: Int32, number: Int32 | int, at: Int32) -> Int32:
    """The page id ``at`` entries behind ``first``; of a piece of a page, the id times ``cut`` and which piece it is."""
    cut = cfg.k.cut
    if cut == 1:
        return table[first + at]
    at = number + at
    return table[first + (at >> cut.bit_length() - 1)] * cut + at % cut


@cute.jit
def early_ids(cfg: cutlass.Constexpr[WarpConfig], table: cute.Tensor, first: Int32, entries: Int32, place: Int32,
              apart: Int32, lane: Uint32) -> Int32:
    """Page ids of the warp's first 32 pages before their number is known: of ``entries`` from ``first`` on, those
    from ``place`` on; what stands behind the last page is not used."""
    found = Int32(0)
    at = place + Int32(lane) * apart
    if at < entries * cfg.k.cut:
        found = id_at(cfg, table, first, 0, at)
    return found


def policy_of(cfg: WarpConfig, pages: Int32, row_blocks: Int32) -> Int32 | None:
    """L2's policy for a call of so many pages, of all sequences and heads. A page is read once, so its lines go first
    and what other kernels left in L2 stays: what they wrote need not go to memory meanwhile. But where much is read it
    goes all the same, little by little, which takes longer than at once. Other blocks of query rows find pages in L2.

    None on Stream-K's schedule with boosted channels: four words would be spilled.
    """
    if cfg.own_queries and cfg.boost:
        return None
    most = PASSING_BYTES // (cfg.parts * (cfg.k.nbytes + cfg.v.nbytes))
    return cutlass.select_((pages <= most) & (row_blocks == 1), Int32(ptx.EVICT_FIRST), Int32(ptx.EVICT_UNCHANGED))


def line_of(tensor: cute.Tensor) -> int:
    """Elements of a line of L2."""
    return 8 * WORD * LINE_WORDS // tensor.element_type.width


@cute.jit
def prefetch(tensor: cute.Tensor, first: Int32, count: Int32, thread: Int32):
    """Bring elements that are asked for later to L2, a line a thread."""
    if thread * line_of(tensor) < count:
        cute.arch.prefetch((tensor.iterator + (first + thread * line_of(tensor))).llvm_ptr, cache_level="L2")


@cute.jit
def issue(cfg: cutlass.Constexpr[WarpConfig], side: cutlass.Constexpr[SidePlan], pages: Pages, ring: Ring,
          warp: Int32, slot: Int32, page_id: Int32, more_bytes: cutlass.Constexpr[int] = 0):
    """Start one bulk copy: a part of a page's record into a slot. more_bytes: what else the barrier shall wait for."""
    if cutlass.const_expr(side.cut > 1):
        cfg.arithmetic.steps.copy_piece(cfg, side, pages, ring, warp, slot, page_id)
    else:
        copy(cfg, side, pages, ring, warp, slot, page_id, ring.full + slot, range(side.nbytes), more_bytes)


def is_single(cfg: WarpConfig, pages: Pages):
    """Whether the warp has one page. Its V is asked for when K has come, so that K of all SMs comes first, and comes in
    two halves, so that half of its arithmetic hides behind the other's way."""
    return pages.count == 1 if cfg.has_halves else Boolean(False)


@cute.jit
def issue_halves(cfg: cutlass.Constexpr[WarpConfig], pages: Pages, ring: Ring, me: Lane, ids: Int32):
    """``issue`` of the one page's V: the second half of its tokens with the metadata, then the first."""
    page_id, middle = cute.arch.shuffle_sync(ids, 0), cfg.v.middle
    for full, part in ((ring.half_full, range(middle, cfg.v.nbytes)), (ring.full + 1, range(middle))):
        copy(cfg, cfg.v, pages, ring, me.warp, Int32(1), page_id, full, part)


def copy(cfg: WarpConfig, side: SidePlan, pages: Pages, ring: Ring, warp: Int32, slot: Int32, page_id: Int32,
         full: cute.Pointer, part: range, more_bytes: int = 0) -> None:
    """Start a bulk copy of some bytes of a part, and tell barrier ``full`` what to wait for. The DSL's copy has no
    policy, and needs fewer registers."""
    units = Int64(page_id) * Int64(pages.page_stride) + pages.head_units
    source = pages.pool.iterator.toint() + units * UNIT_BYTES + (side.start + part.start)
    target = ring.buffer.toint() + (warp * cfg.warp_bytes + slot * cfg.slot_bytes + part.start)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, len(part) + more_bytes)
        if cutlass.const_expr(pages.policy is None):
            cute.copy(cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Uint32), words_at(source, len(part), "gmem"),
                      words_at(target, len(part), "smem"), mbar_ptr=full)
        else:
            ptx.bulk_copy(target, source, len(part), full.toint(), pages.policy)


def words_at(address, nbytes: int, space: str) -> cute.Tensor:
    """Words from a run-time address on, as a bulk copy takes them; space: "gmem" or "smem"."""
    pointer = cute.make_ptr(Uint32, address, getattr(cute.AddressSpace, space), assumed_align=CHUNK_BYTES)
    return cute.make_tensor(pointer, cute.make_layout(nbytes // WORD))


@cute.jit
def start(cfg: cutlass.Constexpr[WarpConfig], pages: Pages, ring: Ring, me: Lane, ids: Int32,
          pieces: cutlass.Constexpr[range], first: Int32 | int = 0):
    """Fill slots with the first ``pieces``, piece 0 to slot ``first``; ids: the first 32 page ids, one a lane."""
    page_ids = [cute.arch.shuffle_sync(ids, i) for i in range(-(-pieces.stop // PIECES))]
    for n in cutlass.range_constexpr(pieces.start, pieces.stop):
        if part_of(n)[0] < pages.count:
            slot = Int32(first + n)
            issue(cfg, cfg.v if cutlass.const_expr(part_of(n)[1]) else cfg.k, pages, ring, me.warp,
                  slot - cfg.slots * Int32(slot >= cfg.slots), page_ids[part_of(n)[0]])


@cute.jit
def refill(cfg: cutlass.Constexpr[WarpConfig], side_idx: cutlass.Constexpr[int], pages: Pages, ring: Ring, me: Lane,
           page: Int32, slot: Int32, ids: Int32) -> Int32:
    """Piece (page, side_idx) comes to ``slot``; all lanes have read the one before: refill its slot. Returns ids."""
    ahead, side = part_of(side_idx + cfg.slots - 1)
    cute.arch.sync_warp()
    later = page + ahead
    is_new = later < pages.count
    if cutlass.const_expr(side_idx == 0):
        is_new = is_new & (page > 0)  # ``start`` filled all slots
    if is_new:
        if cutlass.const_expr(side == 0):
            if later % WARP == 0:
                ids = page_ids(cfg, pages, later, me.lane)
        last = slot - 1 + cfg.slots * Int32(slot == 0)
        issue(cfg, cfg.v if cutlass.const_expr(side) else cfg.k, pages, ring, me.warp, last,
              cute.arch.shuffle_sync(ids, later % WARP))
    return ids


def has_come(ring: Ring, slot: Int32, phase: Int32):
    """Whether the piece in ``slot`` has come."""
    return cute.arch.vote_all_sync(cute.arch.mbarrier_test_wait(ring.full + slot, phase))


@cute.jit
def refill_early(cfg: cutlass.Constexpr[WarpConfig], side_idx: cutlass.Constexpr[int], pages: Pages, ring: Ring,
                 me: Lane, page: Int32, slot: Int32, ids: Int32, is_early) -> Int32:
    """Before ``wait``: ``refill`` if ``is_early``. Returns the ids."""
    if is_early:
        ids = refill(cfg, side_idx, pages, ring, me, page, slot, ids)
    return ids


@cute.jit
def wait(cfg: cutlass.Constexpr[WarpConfig], side_idx: cutlass.Constexpr[int], pages: Pages, ring: Ring, me: Lane,
         page: Int32, slot: Int32, phase: Int32, ids: Int32, is_early) -> Int32:
    """Wait for piece (page, side_idx) in ``slot``, or half; refill the slot before if not done. Returns the ids."""
    if cutlass.const_expr(side_idx == 0):
        cute.arch.mbarrier_wait(ring.full + slot, phase)
        if is_single(cfg, pages):
            issue_halves(cfg, pages, ring, me, ids)
    elif is_single(cfg, pages):
        cute.arch.mbarrier_wait(ring.half_full, 0)
    else:
        cute.arch.mbarrier_wait(ring.full + slot, phase)
    if ~is_early:
        ids = refill(cfg, side_idx, pages, ring, me, page, slot, ids)
    return ids


@cute.jit
def wait_half(cfg: cutlass.Constexpr[WarpConfig], arrival: Arrival, slot: Int32):
    """Wait for the other half of V."""
    if arrival.is_single:
        cute.arch.mbarrier_wait(arrival.ring.full + slot, arrival.phase)


def advance(cfg: WarpConfig, slot: Int32, phase: Int32) -> tuple[Int32, Int32]:
    """The next slot and its parity."""
    wraps = Int32(slot == cfg.slots - 1)
    return (slot + 1) * (1 - wraps), phase ^ wraps


# ---- to registers: words of a piece, and query rows


class Piece(NamedTuple):
    """A record part in shared memory."""

    buffer: cute.Pointer
    warp: Int32
    slot: Int32


def part_view(cfg: WarpConfig, piece: Piece, offset: int, words: int, count: int) -> cute.Tensor:
    """(words, count) accesses of ``words`` 32-bit words from byte ``offset`` of the part on, aligned to their size."""
    view = cute.make_tensor(piece.buffer + offset // WORD, cute.make_layout(
        (words, count, cfg.slots, cfg.warps), stride=(1, words, cfg.slot_bytes // WORD, cfg.warp_bytes // WORD)))
    return view[None, None, piece.slot, piece.warp]


def read(view: cute.Tensor, index) -> list:
    """One access: its words, or what else the view has."""
    words = cute.make_rmem_tensor(cute.size(view, mode=[0]), view.element_type)
    cute.autovec_copy(view[None, index], words)
    return [words[i] for i in range(cute.size(words))]


def codes(cfg: WarpConfig, side: SidePlan, piece: Piece, me: Lane, first_tile: int, tiles: int,
          skip=0) -> dict[int, Uint32]:
    """The lane's words of a run of tiles, by word index; ``skip``, an int or Int32: whole blocks of words to skip."""
    first, count = side.words_of(first_tile), side.words_of(tiles)
    width = math.gcd(count, layout.BLOCK_WORDS)  # runs of head_dim 96 start anywhere in a block
    accesses = layout.plane_bytes(side.rows, side.cols, side.bits) // (width * WORD)
    view = part_view(cfg, piece, side.codes, width, accesses)
    found = {}
    for word in range(first, first + count, width):
        values = read(view, side.code_access(word, width, Int32(me.lane)) + skip * side.block_accesses(width))
        found |= {word + i: value for i, value in enumerate(values)}
    return found


def meta_view(cfg: WarpConfig, side: SidePlan, piece: Piece) -> cute.Tensor:
    """(words, accesses): the part's metadata in accesses of META_BYTES."""
    accesses = (side.nbytes - side.meta) // META_BYTES
    return part_view(cfg, piece, side.meta, META_BYTES // WORD, accesses)


def elements(cfg: WarpConfig, piece: Piece, offset: int, count: int, element) -> cute.Tensor:
    """``count`` integers of 8 or 16 bits from byte ``offset`` of the part on."""
    apart = WORD * 8 // element.width  # elements in a word
    view = cute.make_tensor(cute.recast_ptr(piece.buffer + offset // WORD, dtype=element), cute.make_layout(
        (count, cfg.slots, cfg.warps), stride=(1, cfg.slot_bytes // WORD * apart, cfg.warp_bytes // WORD * apart)))
    return view[None, piece.slot, piece.warp]


class Query(NamedTuple):
    """What an arithmetic multiplies K with, and what turns accumulators into base-2 logits."""

    operand: cute.Tensor  # in registers: fp16 (4, column tile * col_blocks + block); else its words in shared memory
    factor: tuple  # [query column of this lane] softmax_scale_log2 * 2^-(e_q + 11)
    channels: cute.Pointer  # boosted K: q' by channel in shared memory (boost.py)


def query_offset(cfg: WarpConfig, q: cute.Tensor, rows: Rows, row) -> Int64:
    """Bytes of q before a row of this CTA."""
    query, head = query_and_head(rows, row)
    return Int64((rows.batch_idx * q.shape[1] + query) * q.shape[2] + head) * cfg.row_bytes


@cute.jit
def prefetch_query(cfg: cutlass.Constexpr[WarpConfig], q: cute.Tensor, rows: Rows, thread: Int32):
    """Bring q to L2, a line a thread."""
    at = thread * (LINE_WORDS * WORD)
    if at < rows.count * cfg.row_bytes:
        start = q.iterator.toint() + query_offset(cfg, q, rows, at // cfg.row_bytes) + at % cfg.row_bytes
        line = cute.make_ptr(Uint32, start, cute.AddressSpace.gmem, assumed_align=WORD)
        cute.arch.prefetch(line.llvm_ptr, cache_level="L2")


@cute.jit
def load_query(cfg: cutlass.Constexpr[WarpConfig], q: cute.Tensor, rows: Rows, me: Lane) -> cute.Tensor:
    """q words as B operand, (2, column tile * col_blocks + block); rows beyond the last one are zero."""
    words = cute.make_rmem_tensor((2, cfg.k.col_tiles * cfg.col_blocks), Uint32)
    words.fill(0)
    for block in cutlass.range_constexpr(cfg.col_blocks):
        row = cfg.arithmetic.operand_row(Int32(me.g), block)
        if row < rows.count:
            start = q.iterator.toint() + query_offset(cfg, q, rows, row)
            found = cute.make_tensor(cute.make_ptr(Uint32, start, cute.AddressSpace.gmem, assumed_align=WORD),
                                     cute.make_layout(cfg.row_bytes // WORD))
            for col_tile in cutlass.range_constexpr(cfg.k.col_tiles):
                for col8 in cutlass.range_constexpr(2):
                    words[col8, col_tile * cfg.col_blocks + block] = found[
                        (layout.TILE // 2) * col_tile + 4 * col8 + Int32(me.t)]
    return words
