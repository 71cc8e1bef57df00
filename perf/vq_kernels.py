"""VQ-LLM's lookups, one step after the other, as decode kernels on Hopper that differ in nothing else; for vq_steps.py.

    global      entries in global memory, in the order in which a codebook is learned: [group][entry]   (its VQ-attn-GC)
    shared      the same in shared memory: the bank of an entry is its number's, so random              (its VQ-attn-SC)
    banks       entries by row, [entry][group]: each group has banks of its own, and lanes with other tokens of the same
                group meet there
    rotated     the same, and lanes with other tokens ask for other groups: no bank twice

All have the shipped kernel of 4 query rows around them (hopper/arith/codebook): its pages, rings, softmax, multiplies
and merge. Codes lie in pages as ``rotated`` wants them, but for ``banks``, whose pages ``unrotated`` rearranges.
head_dim 128 alone.
"""

import copy
import sys
from dataclasses import dataclass, fields
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32

from lowbit_attn.device import numbers, ptx
from lowbit_attn.formats import codebook_order as order
from lowbit_attn.hopper.arith.codebook import books, query, steps, values
from lowbit_attn.hopper.arith.codebook import scores as shipped
from lowbit_attn.hopper.arith.codebook.config import (
    BOOK_SIDES,
    FACTORS,
    FEW,
    TABLE_BYTES,
    BookConfig,
    Codebook,
    lane_bytes,
)
from lowbit_attn.hopper.common.abi import Rows
from lowbit_attn.hopper.common.book_abi import Books
from lowbit_attn.hopper.decode import fake_arguments
from lowbit_attn.hopper.schedule.config import SPLITS
from lowbit_attn.hopper.warp import plan
from lowbit_attn.hopper.warp.config import WORD, SidePlan, WarpConfig
from lowbit_attn.hopper.warp.fetch import Arrival, Lane, Piece, read
from lowbit_attn.hopper.warp.softmax import Scores, State
from lowbit_attn.kernels import CuteKernel

GLOBAL, SHARED, BANKS, ROTATED = LOOKUPS = ("global", "shared", "banks", "rotated")
HEAD_DIM, PERIOD, STEPS = 128, 4, 4  # rotations of both sides at this head_dim, and bytes of a word
ADDRESS_BYTES = 8

# what the kernel asks of its arithmetic's steps, but for what is defined below
before_values, copy_piece, finish = steps.before_values, steps.copy_piece, steps.finish
load_query, prefetch_query, token_query = steps.load_query, steps.prefetch_query, steps.token_query
end_books = steps.end_books  # both barriers have ended a phase whether copies came or addresses


class LookupStep(Codebook):
    """The arithmetic of 4 query rows with entries, never products, looked up in one of the ways above."""

    has_tables = False

    def __init__(self, lookup: str):
        super().__init__(f"codebook-{lookup}", FEW, has_parts=False)
        self.lookup = lookup

    @property
    def steps(self):
        return sys.modules[__name__]


@dataclass(frozen=True)
class StepConfig(BookConfig):
    """As the shipped kernel's; without codebooks in shared memory there are their addresses instead."""

    @property
    def book_bytes(self) -> int:
        is_global = self.arithmetic.lookup == GLOBAL
        return super().book_bytes - is_global * (len(BOOK_SIDES) * (TABLE_BYTES - ADDRESS_BYTES))


def make_config(fmt, dtype: str, lookup: str) -> StepConfig:
    """Warps and slots of a ring are those of the shipped kernel, whatever shared memory is left."""
    made = plan.make_config(fmt, HEAD_DIM, dtype, FEW, Codebook("codebook", FEW, has_parts=False), SPLITS)
    return StepConfig(**{f.name: getattr(made, f.name) for f in fields(made)} | {"arithmetic": LookupStep(lookup)})


def step_kernel(fmt, dtype: str, lookup: str) -> CuteKernel:
    """The kernel of a step and the fake arguments to compile it for."""
    cfg = make_config(fmt, dtype, lookup)
    return CuteKernel(cfg.schedule.kernel(cfg), fake_arguments(HEAD_DIM, numbers.ELEMENT[dtype], has_books=True))


# ---- what a step finds in memory


def cache_for(cache, lookup: str):
    """A view of a cache as the step's kernel reads it: codebooks in its order of entries, codes in its order."""
    view = copy.copy(cache)
    view.plans = None
    if lookup in (GLOBAL, SHARED):
        view.attached = copy.copy(cache.attached)
        sides = (cache.attached.entries(side) for side in BOOK_SIDES)
        tables = [x.contiguous().view(torch.int32).view(len(x), order.ENTRIES, -1).view(torch.uint32) for x in sides]
        view.attached.planes = (*tables, cache.attached.planes[2])
    if lookup == BANKS:
        view.pool = unrotated(cache)
    return view


def unrotated(cache) -> torch.Tensor:
    """The pool with codes in the order of lanes' words, without the rotation: byte i of a word of K is of group
    16 q + 4 i + t, word i of V of group 4 g + i."""
    at = torch.arange(cache.pool.shape[-1], device=cache.device)
    for side, start in zip(cache.format.specs(cache.head_dim), (0, cache.record.v_offset)):
        count = side.head_dim // side.group_size
        codes = torch.arange(128 * count, device=cache.device)
        token, group = order.code_at(codes, count, side.transposed)
        if side.transposed:
            plain = group // PERIOD * PERIOD + (group + PERIOD - token % 8 // 2) % PERIOD
        else:
            plain = group // 16 * 16 + (group % 16 // 4 + 2 * PERIOD - token % 8) % PERIOD * 4 + group % 4
        at[start + codes] = start + order.code_offset(token, plain, count, side.transposed)
    return cache.pool[..., at].contiguous()


# ---- lookups


class EntryLookups(NamedTuple):
    """As books.Lookups, of entries in the order [group][entry]."""

    places: list  # [i] where the entries of the group of step i begin: in shared memory, or behind ``base``
    words: int
    base: Int64 | None  # address of the codebook in global memory
    more: int = 0  # bytes in a row of the other order

    def find(self, word: Uint32, byte: int, i: int, more: int = 0) -> list[Uint32]:
        code = ptx.permute(word, Uint32(0), 0x4440 | byte)
        place, behind = self.places[i] + code * Uint32(WORD * self.words), (self.more + more) * order.ENTRIES
        if self.base is None:
            return ptx.lookup(place, behind, self.words)
        return ptx.lookup(self.base + Int64(place), behind, self.words, "global.nc")


def is_turned(cfg: WarpConfig) -> bool:
    """Whether lanes ask for groups in the rotated order, as their codes lie."""
    return cfg.arithmetic.lookup != BANKS


def lookups_of(cfg: WarpConfig, piece: Piece, side: SidePlan, number: int, group_of):
    """The side's lookups; group_of(i): the lane's group in step i."""
    words, lookup = side.group_size // 2, cfg.arithmetic.lookup
    if lookup in (BANKS, ROTATED):
        return books.lookups(books.base_of(cfg, piece.buffer, number), words, group_of)
    offsets = [Uint32(Int32(group_of(i)) * (order.ENTRIES * WORD * words)) for i in range(STEPS)]
    if lookup == SHARED:
        base = Uint32(books.base_of(cfg, piece.buffer, number))
        return EntryLookups([Uint32(ptx.opaque(base + x)) for x in offsets], words, None)
    place = Int32(piece.buffer.toint()) + cfg.smem_plan["buffer"] + cfg.book_bytes - ADDRESS_BYTES * (2 - number)
    base = cute.make_tensor(cute.make_ptr(Int64, place, cute.AddressSpace.smem, assumed_align=ADDRESS_BYTES),
                            cute.make_layout(1))[0]
    return EntryLookups(offsets, words, base)


def place_books(cfg: WarpConfig, buffer: cute.Pointer, barriers: cute.Pointer) -> books.BookPlace:
    """Where codebooks are, or would be before what follows them."""
    place = books.place_of(cfg, buffer, barriers)
    if cfg.arithmetic.lookup == GLOBAL:
        return place._replace(buffer=place.buffer - len(BOOK_SIDES) * TABLE_BYTES // WORD)
    return place


def start_books(cfg: WarpConfig, view: Books, rows: Rows, place: books.BookPlace) -> None:
    """Start the copies of codebooks, or leave their addresses; one thread does it."""
    if cfg.arithmetic.lookup != GLOBAL:
        return books.start(cfg, view, rows, place)
    behind = len(BOOK_SIDES) * TABLE_BYTES + (cfg.rows * FACTORS + cfg.head_dim) * WORD
    found = cute.make_tensor(cute.make_ptr(Int64, Int32(place.buffer.toint()) + behind, cute.AddressSpace.smem,
                                           assumed_align=ADDRESS_BYTES), cute.make_layout(len(BOOK_SIDES)))
    for i, side in enumerate((view.k, view.v)):
        found[i] = side.iterator.toint() + Int64(rows.head_idx) * TABLE_BYTES
        cute.arch.mbarrier_init(place.full + i, 1)
    cute.arch.mbarrier_init_fence()
    for i in range(len(BOOK_SIDES)):
        cute.arch.mbarrier_arrive(place.full + i)


# ---- K


def prepare_query(cfg: WarpConfig, own: query.Loaded, scale_log2: Float32, me: Lane, shared: cute.Pointer,
                  place: books.BookPlace) -> query.BookQuery:
    """The shipped one, with an operand for entries of four channels too."""
    found = query.prepare(cfg, own, scale_log2, me, shared, place)
    rows, factors = query.group_view(cfg, shared), query.factor_view(cfg, place.buffer)
    return found._replace(operand=operand(cfg, me, rows, factors))


def is_whole(cfg: WarpConfig) -> bool:
    """Whether an entry of K fills both registers of an operand."""
    return cfg.k.group_size == 4


def starts(cfg: WarpConfig) -> range:
    """First steps of the multiplies of a word."""
    return range(0, STEPS, 1 if is_whole(cfg) else 2)


def operand(cfg: WarpConfig, me: Lane, q: cute.Tensor, factors: cute.Tensor) -> cute.Tensor:
    """q' as B operands, fp16 (4, steps * word of an eight + step): columns are (row, v), and register j is of the group
    of step ``first + j`` in lanes that turn by v."""
    words, count = lane_bytes(cfg.k) // WORD, len(starts(cfg))
    row, v = Int32(cfg.arithmetic.operand_row(me.g, 0)), Int32(me.g % 2) * is_turned(cfg)
    fragments, fragment_words = numbers.fragments(count * words)
    up = factors[query.UP, row]
    for word in range(words):
        for at, first in enumerate(starts(cfg)):
            for j in range(2):
                within = (first + j * (not is_whole(cfg)) + v) % PERIOD
                pair = read(q, (16 * word + 4 * within + Int32(me.t), row))[2 * j * is_whole(cfg) :][:2]
                fragment_words[j, count * word + at] = numbers.pack(*(x * up for x in pair))
    return fragments


def scores(cfg: WarpConfig, piece: Piece, me: Lane, found: query.BookQuery) -> Scores:
    """S of a page of codes."""
    side, turn = cfg.k, Int32(me.g) if is_turned(cfg) else Int32(0)
    acc = cute.make_rmem_tensor((4, side.row_tiles), Float32)
    acc.fill(0.0)
    codes = books.Codes(cfg, piece, side, me.lane)
    first = lookups_of(cfg, piece, side, 0, lambda i: 4 * ((i + turn) % PERIOD) + Int32(me.t))
    # words of an eight are 16 groups apart
    entries = [first._replace(more=16 * 2 * side.group_size * q) for q in range(lane_bytes(side) // WORD)]
    # where codes are not rotated, a compiler must not take the second multiply of an operand for the first
    again = found.factors[0][query.TOKEN_SLOPE] * Float32(0.0)
    for tile in range(side.row_tiles):
        add_entries(cfg, codes, entries, me, found.operand, acc, tile, again)
    return shipped.with_mean(cfg, piece, me, found, acc)


def add_entries(cfg: WarpConfig, codes: books.Codes, entries: list, me: Lane, q: cute.Tensor, acc: cute.Tensor,
                tile: int, zero: Float32) -> None:
    """16 tokens: the two multiplies of an operand have the columns of rotations 0, 1 and 2, 3; a lane keeps its own."""
    words, each = len(entries), STEPS // len(starts(cfg))
    found = cute.make_rmem_tensor((4, 2), Float32)
    for i in range(4):
        found[i, 0], found[i, 1] = Float32(0.0), zero
    for word in range(words):
        own = [codes.word((2 * tile + row8) * words + word) for row8 in range(2)]
        for first in starts(cfg):
            looked = [[entries[word].find(x, i, i) for x in own] for i in range(first, first + each)]
            a = numbers.operand_a([of_token[part] for of_step in looked for part in range(2 // each)
                                   for of_token in of_step])
            for x in range(2):
                at = (first + 2 * x * is_turned(cfg)) % STEPS // each
                numbers.multiply(numbers.multiply_atom(), found, x, a, q[None, len(starts(cfg)) * word + at])
    is_odd, is_late = (me.g & Uint32(1)) != 0, (me.g & Uint32(2)) != 0
    for row8 in range(2):
        of_rotation = [found[2 * row8 + i % 2, i // 2] for i in range(4)]
        early, late = (cutlass.select_(is_odd, of_rotation[i + 1], of_rotation[i]) for i in (0, 2))
        acc[2 * row8, tile] = cutlass.select_(is_late, late, early)


# ---- V


def add_values(cfg: WarpConfig, piece: Piece, me: Lane, state: State, p: cute.Tensor, maxima: tuple[Float32, ...],
               arrival: Arrival) -> None:
    books.wait_for_values(arrival)
    values.accumulate(cfg, piece, me, state, p, maxima, value_lookups)


def value_lookups(cfg: WarpConfig, piece: Piece, me: Lane) -> tuple:
    """Lookups of V, and by how many groups a lane's are turned."""
    if not is_turned(cfg):
        me = me._replace(t=Uint32(0))
    found = lookups_of(cfg, piece, cfg.v, 1, lambda i: PERIOD * Int32(me.g) + (i + Int32(me.t)) % PERIOD)
    return found, me.t
