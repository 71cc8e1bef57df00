"""A warp's private ring of record parts: bulk copies in, codes and metadata out. No other warp takes part.

Pieces run K part, V part, K part, ... of the warp's pages; piece n lies in slot n % slots. When piece n has come, the
copy to the slot read before it starts: ``slots - 1`` pieces are under way while a warp waits, and no more than memory
needs (config.UNDER_WAY). What is beyond that queues up, and the queue serves some SMs a fifth faster than others. A
warp that is behind the others (pace.py) does not wait for piece n.

16-bit rows of a unit follow each other in memory and come by cp.async, to rows a little apart: as 32 bulk copies, which
a warp starts one after the other, they took it a microsecond.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from lowbit_attn import layout
from lowbit_attn.device import ptx
from lowbit_attn.hopper.common.scratch import LINE_WORDS
from lowbit_attn.hopper.warp.config import META_BYTES, PIECES, UNIT_TOKENS, WARP, WORD, RegisterConfig, SidePlan
from lowbit_attn.hopper.warp.walk import Unit, Walk

UNIT_BYTES = 128  # the pool's unit of addresses
CHUNK_BYTES = 16  # of a cp.async
BLOCK_WORDS = layout.BLOCK_WORDS
PASSING_BYTES = 200 << 20  # of a call whose lines L2 need not keep: more than three times what it holds


class Lane(NamedTuple):
    """This thread: its warp, and lane = 4 * g + t."""

    warp: Int32
    lane: Uint32
    g: Uint32
    t: Uint32


def lane_of(warp: Int32, lane: Uint32) -> Lane:
    return Lane(warp, lane, lane // 4, lane % 4)


class Pages(NamedTuple):
    """Where the packed pages of this warp are."""

    pool: cute.Tensor  # (units, 32) uint32
    table: cute.Tensor  # (entries) int32
    first: Int32  # entry of the warp's first page
    count: Int32
    page_stride: Int32
    head_units: Int64  # head_idx * head_stride
    apart: Int32 | int  # entries from a page of the warp to its next
    policy: Int32 | None  # of L2 for what is copied


class Ring(NamedTuple):
    """Shared memory of this warp: ``slots`` record parts and their full barriers, then one of third.py's units and,
    where the configuration has_halves, one of half of V."""

    buffer: cute.Pointer  # of the CTA, uint32
    full: cute.Pointer  # of this warp
    unit_full: cute.Pointer
    half_full: cute.Pointer


class Piece(NamedTuple):
    """A record part in shared memory."""

    buffer: cute.Pointer
    warp: Int32
    slot: Int32


def ring_of(cfg: RegisterConfig, buffer: cute.Pointer, barriers: cute.Pointer, warp: Int32) -> Ring:
    """buffer, barriers: of the CTA."""
    own = barriers + warp * cfg.warp_barriers
    return Ring(buffer, own, own + cfg.slots, own + cfg.slots + 1)


def init(cfg: RegisterConfig, ring: Ring) -> None:
    """By one lane of the warp."""
    for i in range(cfg.warp_barriers):
        cute.arch.mbarrier_init(ring.full + i, 1)


def part_of(piece: int) -> tuple[int, int]:
    """(page, side) of a piece: side 0 is K."""
    return piece // PIECES, piece % PIECES


@cute.jit
def page_ids(pages: Pages, start: Int32, lane: Uint32) -> Int32:
    """Each lane looks up one of the 32 page ids from page ``start`` of the warp on."""
    found = Int32(0)
    at = start + Int32(lane)
    if at < pages.count:
        found = pages.table[pages.first + at * pages.apart]
    return found


@cute.jit
def early_ids(table: cute.Tensor, first: Int32, entries: Int32, place: Int32, apart: Int32, lane: Uint32) -> Int32:
    """The same of the warp's first 32 pages before their number is known: of the ``entries`` from ``first`` on, those
    from ``place`` on; what stands behind the last page is not used."""
    found = Int32(0)
    at = place + Int32(lane) * apart
    if at < entries:
        found = table[first + at]
    return found


def policy_of(cfg: RegisterConfig, pages: Int32, row_blocks: Int32) -> Int32 | None:
    """L2's policy for a call of so many pages, of all sequences and heads. A page is read once, so its lines go first
    and what other kernels left in L2 stays: what they wrote need not go to memory meanwhile. But where much is read it
    goes all the same, little by little, which takes longer than at once. Other blocks of query rows find pages in L2.

    None on Stream-K's schedule with boosted channels: four words would be spilled.
    """
    if cfg.own_queries and cfg.boost:
        return None
    most = PASSING_BYTES // (cfg.k.part_bytes + cfg.v.part_bytes)
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
def issue(cfg: cutlass.Constexpr[RegisterConfig], side: cutlass.Constexpr[SidePlan], pages: Pages, ring: Ring,
          warp: Int32, slot: Int32, page_id: Int32, more_bytes: cutlass.Constexpr[int] = 0):
    """Start one bulk copy: a part of a page's record into a slot. more_bytes: what else the barrier shall wait for."""
    copy(cfg, side, pages, ring, warp, slot, page_id, ring.full + slot, range(side.part_bytes), more_bytes)


def is_single(cfg: RegisterConfig, pages: Pages):
    """Whether the warp has one page. Its V is asked for when K has come, so that K of all SMs comes first, and comes in
    two halves, so that half of its arithmetic hides behind the other's way."""
    return pages.count == 1 if cfg.has_halves else Boolean(False)


@cute.jit
def issue_halves(cfg: cutlass.Constexpr[RegisterConfig], pages: Pages, ring: Ring, me: Lane, ids: Int32):
    """``issue`` of the one page's V: the second half of its tokens with the metadata, then the first."""
    page_id, middle = cute.arch.shuffle_sync(ids, 0), cfg.v.middle
    for full, part in ((ring.half_full, range(middle, cfg.v.part_bytes)), (ring.full + 1, range(middle))):
        copy(cfg, cfg.v, pages, ring, me.warp, Int32(1), page_id, full, part)


def copy(cfg: RegisterConfig, side: SidePlan, pages: Pages, ring: Ring, warp: Int32, slot: Int32, page_id: Int32,
         full: cute.Pointer, part: range, more_bytes: int = 0) -> None:
    """Start a bulk copy of some bytes of a part, and tell barrier ``full`` what to wait for. The DSL's copy has no
    policy, and needs fewer registers."""
    units = Int64(page_id) * Int64(pages.page_stride) + pages.head_units
    source = pages.pool.iterator.toint() + units * UNIT_BYTES + (side.part_offset + part.start)
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
def start(cfg: cutlass.Constexpr[RegisterConfig], pages: Pages, ring: Ring, me: Lane, ids: Int32,
          pieces: cutlass.Constexpr[range], first: Int32 | int = 0):
    """Fill slots with the first ``pieces``, piece 0 to slot ``first``; ids: the first 32 page ids, one a lane."""
    page_ids = [cute.arch.shuffle_sync(ids, i) for i in range(-(-pieces.stop // PIECES))]
    for n in cutlass.range_constexpr(pieces.start, pieces.stop):
        if part_of(n)[0] < pages.count:
            slot = Int32(first + n)
            issue(cfg, cfg.v if cutlass.const_expr(part_of(n)[1]) else cfg.k, pages, ring, me.warp,
                  slot - cfg.slots * Int32(slot >= cfg.slots), page_ids[part_of(n)[0]])


@cute.jit
def refill(cfg: cutlass.Constexpr[RegisterConfig], side_idx: cutlass.Constexpr[int], pages: Pages, ring: Ring, me: Lane,
           page: Int32, slot: Int32, ids: Int32) -> Int32:
    """Piece (page, side_idx) comes to ``slot``, and all lanes have read the one before it: start the piece that goes to
    its slot. Returns the ids."""
    ahead, side = part_of(side_idx + cfg.slots - 1)
    cute.arch.sync_warp()
    later = page + ahead
    is_new = later < pages.count
    if cutlass.const_expr(side_idx == 0):
        is_new = is_new & (page > 0)  # ``start`` filled all slots
    if is_new:
        if cutlass.const_expr(side == 0):
            if later % WARP == 0:
                ids = page_ids(pages, later, me.lane)
        last = slot - 1 + cfg.slots * Int32(slot == 0)
        issue(cfg, cfg.v if cutlass.const_expr(side) else cfg.k, pages, ring, me.warp, last,
              cute.arch.shuffle_sync(ids, later % WARP))
    return ids


def has_come(ring: Ring, slot: Int32, phase: Int32):
    """Whether the piece in ``slot`` has come."""
    return cute.arch.vote_all_sync(cute.arch.mbarrier_test_wait(ring.full + slot, phase))


@cute.jit
def refill_early(cfg: cutlass.Constexpr[RegisterConfig], side_idx: cutlass.Constexpr[int], pages: Pages, ring: Ring,
                 me: Lane, page: Int32, slot: Int32, ids: Int32, is_early) -> Int32:
    """Before ``wait``: ``refill`` if ``is_early``. Returns the ids."""
    if is_early:
        ids = refill(cfg, side_idx, pages, ring, me, page, slot, ids)
    return ids


@cute.jit
def wait(cfg: cutlass.Constexpr[RegisterConfig], side_idx: cutlass.Constexpr[int], pages: Pages, ring: Ring, me: Lane,
         page: Int32, slot: Int32, phase: Int32, ids: Int32, is_early) -> Int32:
    """Wait for piece (page, side_idx) in ``slot``, or half of it, and refill the slot before if not done early. Returns
    the ids."""
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
def wait_half(cfg: cutlass.Constexpr[RegisterConfig], ring: Ring, slot: Int32, phase: Int32, is_single):
    """Wait for the other half of V."""
    if is_single:
        cute.arch.mbarrier_wait(ring.full + slot, phase)


def advance(cfg: RegisterConfig, slot: Int32, phase: Int32) -> tuple[Int32, Int32]:
    """The next slot and its parity."""
    wraps = Int32(slot == cfg.slots - 1)
    return (slot + 1) * (1 - wraps), phase ^ wraps


# ---- shared memory to registers


def part_view(cfg: RegisterConfig, piece: Piece, offset: int, words: int, count: int) -> cute.Tensor:
    """(words, count) accesses of ``words`` 32-bit words from byte ``offset`` of the part on, aligned to their size."""
    view = cute.make_tensor(piece.buffer + offset // WORD, cute.make_layout(
        (words, count, cfg.slots, cfg.warps), stride=(1, words, cfg.slot_bytes // WORD, cfg.warp_bytes // WORD)))
    return view[None, None, piece.slot, piece.warp]


def read(view: cute.Tensor, index) -> list:
    """One access: its words, or what else the view has."""
    words = cute.make_rmem_tensor(cute.size(view, mode=[0]), view.element_type)
    cute.autovec_copy(view[None, index], words)
    return [words[i] for i in range(cute.size(words))]


def codes(cfg: RegisterConfig, side: SidePlan, piece: Piece, me: Lane, first_tile: int, tiles: int,
          skip=0) -> dict[int, Uint32]:
    """The lane's words of a run of tiles, by word index; ``skip``, an int or Int32: whole blocks of words to skip."""
    first, count = side.words_of(first_tile), side.words_of(tiles)
    width = math.gcd(count, BLOCK_WORDS)  # runs of head_dim 96 start anywhere in a block
    accesses = layout.plane_bytes(side.rows, side.cols, side.bits) // (width * WORD)
    view = part_view(cfg, piece, side.codes_offset, width, accesses)
    found = {}
    for word in range(first, first + count, width):
        values = read(view, side.code_access(word, width, Int32(me.lane)) + skip * side.block_accesses(width))
        found |= {word + i: value for i, value in enumerate(values)}
    return found


def tile_codes(cfg: RegisterConfig, side: SidePlan, piece: Piece, me: Lane, first_tile: int, tile: Uint32,
               skip=0) -> dict[int, Uint32]:
    """``codes`` of one row tile, chosen at run time, of the column tile from ``first_tile`` on.

    They stand where those of row tile 0 would: ``operand`` of first_tile, and the powers of row tile 0.
    """
    first, width = side.words_of(first_tile), max(1, side.words_of(1))
    view = part_view(cfg, piece, side.codes_offset, width,
                     layout.plane_bytes(side.rows, side.cols, side.bits) // (width * WORD))
    at = tile_access(side, first_tile, tile, width) + side.code_access(0, width, me.lane)
    values = read(view, Int32(at) + skip * side.block_accesses(width))
    return {first + i: value >> tile_shift(side, tile) if side.bits < 4 else value for i, value in enumerate(values)}


def tile_access(side: SidePlan, first_tile: int, tile, width: int):
    """Index of lane 0's access of ``width`` words with row tile ``tile`` of the column tile from ``first_tile`` on."""
    own = tile // layout.tiles_per_word(side.bits) * width  # within the column tile: whole blocks, or of one block
    return side.code_access(side.words_of(first_tile), width, 0) + side.code_access(own, width, 0)


def tile_shift(side: SidePlan, tile):
    """How far to the right the tile's codes go, to where the word has its first tile's."""
    return tile % layout.tiles_per_word(side.bits) * (2 * side.bits)


def column_codes(cfg: RegisterConfig, side: SidePlan, piece: Piece, me: Lane, col_tile: int,
                 tile: Uint32 | None) -> dict[int, Uint32]:
    """Words of a column tile: of all its row tiles, or of ``tile`` alone."""
    first = col_tile * side.row_tiles
    if tile is None:
        return codes(cfg, side, piece, me, first, side.row_tiles)
    return tile_codes(cfg, side, piece, me, first, tile)


def operand(side: SidePlan, words: dict[int, Uint32], tile: int) -> list[Uint32]:
    """The four A registers of a tile: raw codes as fp16 subnormals."""
    return [(words[word] >> Uint32(shift) if shift else words[word]) & Uint32(mask)
            for word, shift, mask in side.operand(tile)]


def meta_view(cfg: RegisterConfig, side: SidePlan, piece: Piece) -> cute.Tensor:
    """(words, accesses): the part's metadata in accesses of META_BYTES."""
    accesses = (side.part_bytes - side.meta_offset) // META_BYTES
    return part_view(cfg, piece, side.meta_offset, META_BYTES // WORD, accesses)


def channel_meta(cfg: RegisterConfig, side: SidePlan, piece: Piece, me: Lane, group, is_zero: int,
                 col_tile: int) -> list[Uint32]:
    """[col8] words of a token group's scales or zero-points: channels 2t, 2t + 1 of each 8 of a column tile."""
    return read(meta_view(cfg, side, piece), side.channel_access(Int32(group), is_zero, col_tile, Int32(me.t)))


def all_scales(cfg: RegisterConfig, side: SidePlan, piece: Piece, me: Lane, group) -> list[Uint32]:
    """This lane's share of a token group's scales, in no useful order; with few channels lanes share a share."""
    view = meta_view(cfg, side, piece)
    return [word for index in scale_accesses(side, Int32(group), me.lane) for word in read(view, Int32(index))]


def scale_accesses(side: SidePlan, group, lane) -> list:
    """Indices of a lane's accesses of META_BYTES, which all lanes together make to a token group's scales."""
    count = layout.META_BYTES * side.head_dim // META_BYTES
    own = lane % min(count, WARP)
    return [side.channel_access(group, 0, 0, 0) + start + own for start in range(0, count, WARP)]


def token_meta(cfg: RegisterConfig, side: SidePlan, piece: Piece, me: Lane, group: int, tile) -> list[Uint32]:
    """[half] (scale, zero) words of tokens 16 * tile + 8 * half + g: scale in the low half."""
    return read(meta_view(cfg, side, piece), Int32(side.token_access(group, tile, Int32(me.g))))


def all_token_meta(cfg: RegisterConfig, side: SidePlan, piece: Piece, me: Lane) -> list[Uint32]:
    """This lane's share of all (scale, zero) words, in no useful order: each word is read by one lane."""
    accesses = side.groups * layout.PAGE_TOKENS // BLOCK_WORDS
    view = part_view(cfg, piece, side.meta_offset, BLOCK_WORDS, accesses)
    return [word for first in range(0, accesses, WARP) for word in read(view, Int32(me.lane) + first)]


# ---- 16-bit tokens


class Plain(NamedTuple):
    """16-bit K and V of this sequence and KV head: sinks and ring, as addresses of row 0 and slots of the rings."""

    sink_k: Int64
    sink_v: Int64
    ring_k: Int64
    ring_v: Int64
    slots_k: Int32
    slots_v: Int32


@cute.jit
def load_unit(cfg: cutlass.Constexpr[RegisterConfig], plain: Plain, walk: Walk, unit: Unit, ring: Ring, me: Lane):
    """Start copies of a unit's rows of K, then of V, to the start of the ring: a group of cp.async."""
    # rings hold whole blocks of 64 tokens, so 16 aligned tokens never wrap around
    sides = ((plain.sink_k, plain.ring_k, plain.slots_k), (plain.sink_v, plain.ring_v, plain.slots_v))
    cute.arch.sync_warp()  # all lanes have read what lies there
    for side, (sink, residual, slots) in enumerate(sides):
        source = residual + Int64((walk.n_packed + unit.start) % slots) * cfg.row_bytes
        if unit.is_sink == 1:
            source = sink + Int64(unit.start) * cfg.row_bytes
        copy_rows(cfg, ring, me, source, side * UNIT_TOKENS, unit.live)
    cute.arch.cp_async_commit_group()


@cute.jit
def copy_rows(cfg: cutlass.Constexpr[RegisterConfig], ring: Ring, me: Lane, source: Int64,
              first_row: cutlass.Constexpr[int], live: Int32):
    """UNIT_TOKENS rows that follow each other in memory, 16 bytes a lane; dead rows are not touched."""
    words, chunks = CHUNK_BYTES // WORD, cfg.row_bytes // CHUNK_BYTES
    together = WARP // chunks  # rows, by the first lanes
    row, chunk = Int32(me.lane // chunks), Int32(me.lane % chunks)
    at = (first_row + row) * cfg.row_pitch + chunk * CHUNK_BYTES + me.warp * cfg.warp_bytes
    target = cute.make_tensor(
        cute.make_ptr(Uint32, ring.buffer.toint() + at, cute.AddressSpace.smem, assumed_align=CHUNK_BYTES),
        cute.make_layout((words, UNIT_TOKENS), stride=(1, cfg.row_pitch // WORD)))
    own = cute.make_tensor(
        cute.make_ptr(Uint32, source + Int64(me.lane) * CHUNK_BYTES, cute.AddressSpace.gmem,
                      assumed_align=CHUNK_BYTES), cute.make_layout((words, UNIT_TOKENS), stride=(1, words * chunks)))
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), Uint32,
                               num_bits_per_copy=8 * CHUNK_BYTES)
    left = live - row
    if row >= together:
        left = Int32(0)
    for i in cutlass.range_constexpr(0, UNIT_TOKENS, together):
        if left > i:
            cute.copy(atom, own[None, i], target[None, i])
