"""Steps of a kernel whose K codebooks are of keys before their rotary embedding.

Token j of a page that begins at position P was turned by R(P + j) before it met q, which came turned:

    q . R(P + j) k = (R(-P) q) . (R(j) k)

q is turned once a page, in fp32, and a key by a table of positions within a page. Channels that turn together are
channel c of groups y and y + G / 2: one lane looks up both. Groups t, t + 4, ... share a codebook, of which each lane
with this t of a half warp has a copy with banks of its own; so lanes ask for their groups in order, and S needs no
masks.

K's shared memory, 256 rows of 256 bytes:    4 copies of 4 codebooks' entries / 4 | cos and sin for two tokens

Entries and means are divided by 4, so that no turned key leaves fp16's range. With up to 4 query rows columns are
(row, v): tokens g and g + 8 of 16 turn by the same angles, and q of the column v = 1 by 8 positions less.
"""

import math
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from lowbit_attn import layout
from lowbit_attn.device import numbers, ptx
from lowbit_attn.hopper.arith.codebook import books, query, steps
from lowbit_attn.hopper.arith.codebook.books import BookPlace
from lowbit_attn.hopper.arith.codebook.config import FEW, groups, lane_bytes
from lowbit_attn.hopper.warp import fetch
from lowbit_attn.hopper.warp.config import WORD, WarpConfig
from lowbit_attn.hopper.warp.fetch import Lane, Piece, read
from lowbit_attn.hopper.warp.softmax import Scores

__all__ = ["add_values", "before_values", "copy_piece", "end_books", "finish", "load_query", "place_books",
           "prefetch_query", "prepare_query", "scores", "start_books", "token_query"]

# the other steps are those of codebooks of keys after it
add_values, before_values, copy_piece, finish = steps.add_values, steps.before_values, steps.copy_piece, steps.finish
load_query, prefetch_query, token_query = steps.load_query, steps.prefetch_query, steps.token_query
place_books, start_books, end_books = steps.place_books, steps.start_books, steps.end_books

STEPS = 4  # pairs of groups that a lane has of each token
COPIES, ENTRY_BYTES = 16, 8  # of entries in a row: of four codebooks, one for each lane of half a warp
ROW, TABLE_START, TOKEN_BYTES, UNIT = 256, 128, 64, 16  # bytes: of a row, before its angles, of a token, of a lane
SHRINK_HALVES = 0x3400_3400  # 2^codebook_order.SHRINK_LOG2, of means, twice in fp16
ANGLE = 2 * math.pi / 2.0**32  # radians of a unit of the frequencies
LATER = 8  # tokens from the first half of 16 to the second


class PageQuery(NamedTuple):
    """What ``scores`` takes."""

    shared: cute.Pointer  # q', fp32 (row, channel)
    frequencies: cute.Tensor  # int32 (channels of a code, group): parts of 2^32 of a turn a position, in shared memory
    factors: tuple  # [column] query.FACTORS of the lane's row
    position: Int32 | int = 0  # of the first token of the piece at hand


def prepare_query(cfg: WarpConfig, own: query.Loaded, scale_log2: Float32, me: Lane, shared: cute.Pointer,
                  place: BookPlace) -> PageQuery:
    """q' and each row's factors to shared memory, and the frequencies, which the plane of mean entries has here."""
    factors = query.store_rows(cfg, own, scale_log2, me, shared, place)
    frequencies = query.mean_view(cfg, place.buffer)
    frequencies = cute.make_tensor(cute.recast_ptr(frequencies.iterator, dtype=Int32), frequencies.layout)
    of_rows = tuple(tuple(read(factors, row)) for row in query.own_rows(cfg, me))
    return PageQuery(shared, frequencies, of_rows)


def scores(cfg: WarpConfig, piece: Piece, me: Lane, found: PageQuery) -> Scores:
    """S of a page of codes, or of a piece of one, with the slopes of the lane's rows."""
    side = cfg.k
    acc = cute.make_rmem_tensor((4, side.row_tiles), Float32)
    acc.fill(0.0)
    q, means = page_query(cfg, me, found), page_means(cfg, piece, me)
    fetch.fence()
    codes, tables = books.Codes(cfg, piece, side, me.lane), tables_of(cfg, piece, me)
    for tile in range(side.row_tiles):
        add_keys(cfg, codes, tables, means, q, acc, tile)
    slopes = tuple(own[query.SLOPE] for own in found.factors)
    return Scores(acc, (0,) * (2 * side.row_tiles), slopes, None)


def page_query(cfg: WarpConfig, me: Lane, found: PageQuery) -> cute.Tensor:
    """R(-P) q as B operands, fp16 (4, pair of groups + STEPS * half): register j has channels 2 j, 2 j + 1 of group
    4 pair + t, or of the group that turns with it."""
    row, position = Int32(cfg.arithmetic.operand_row(me.g, 0)), found.position
    if cfg.rows == FEW:
        position = position + LATER * Int32(me.g % 2)
    rows, half = query.group_view(cfg, found.shared), groups(cfg.k) // 2
    fragments, words = numbers.fragments(2 * STEPS)
    for i in range(STEPS):
        group = 4 * i + Int32(me.t)
        angles = [Float32(position * f) * Float32(ANGLE) for f in read(found.frequencies, group)]
        trig = [(cute.math.cos(x, fastmath=True), cute.math.sin(x, fastmath=True)) for x in angles]
        pairs = list(zip(trig, read(rows, (group, row)), read(rows, (group + half, row))))
        first = [x * c + y * s for (c, s), x, y in pairs]
        second = [y * c - x * s for (c, s), x, y in pairs]
        for j in range(2):
            words[j, i] = numbers.pack(*first[2 * j : 2 * j + 2])
            words[j, STEPS + i] = numbers.pack(*second[2 * j : 2 * j + 2])
    return fragments


def page_means(cfg: WarpConfig, piece: Piece, me: Lane) -> list[list[Uint32]]:
    """[pair of groups + STEPS * half] the page's mean / 4 of a group's channels, fp16."""
    count, words = groups(cfg.k), cfg.k.group_size // 2
    view = cute.make_tensor(piece.buffer + cfg.k.meta // WORD, cute.make_layout(
        (words, count, cfg.slots, cfg.warps), stride=(1, words, cfg.slot_bytes // WORD, cfg.warp_bytes // WORD)))
    view = view[None, None, piece.slot, piece.warp]
    shrink = Uint32(ptx.opaque(Uint32(SHRINK_HALVES)))
    return [[ptx.mul_f16x2(word, shrink) for word in read(view, 4 * i + half * count // 2 + Int32(me.t))]
            for half in range(2) for i in range(STEPS)]


class Tables(NamedTuple):
    """Where a lane looks up entries and angles."""

    base: Int32  # address of K's shared memory
    copy: Uint32  # offset of the lane's copy of an entry in byte 0
    selectors: list  # [pair of groups] of the bytes of an entry's address: the codes of a word are turned by g
    angles: Int32  # address of cos and sin of the lane's first token and pair of groups

    def entry(self, word: Uint32, i: int) -> list[Uint32]:
        return ptx.lookup(self.base + Int32(ptx.permute(word, self.copy, self.selectors[i])), 0, 2)

    def rotation(self, token: int, i: int) -> tuple[list[Uint32], list[Uint32]]:
        """(cos, sin) of channels 0, 1 and 2, 3; token: that of lanes with g = 0, a multiple of 8."""
        found = ptx.lookup(self.angles, ROW * (ROW // 4 * i + token // 2), 4)
        return found[:2], found[2:]


def tables_of(cfg: WarpConfig, piece: Piece, me: Lane) -> Tables:
    base = books.base_of(cfg, piece.buffer, 0)
    selectors = [Uint32(ptx.opaque(Uint32(0x7604) + ((Uint32(i + 4) - me.g % 4) % 4) * Uint32(16)))
                 for i in range(STEPS)]
    angles = Int32(me.g // 2) * ROW + Int32(me.g % 2) * TOKEN_BYTES + Int32(me.t) * UNIT
    return Tables(base, Uint32(ptx.opaque(Int32(me.lane % COPIES) * ENTRY_BYTES)), selectors,
                  base + Int32(ptx.opaque(angles + TABLE_START)))


def add_keys(cfg: WarpConfig, codes: books.Codes, tables: Tables, means: list, q: cute.Tensor, acc: cute.Tensor,
             tile: int) -> None:
    """S of 16 tokens: g and g + 8 are rows of A."""
    words, shares = lane_bytes(cfg.k) // WORD, cfg.rows == FEW
    own = [[codes.word((2 * tile + row8) * words + half) for half in range(words)] for row8 in range(2)]
    for i in range(STEPS):
        rotated = []
        for row8 in range(2):
            if row8 == 0 or not shares:
                cos, sin = tables.rotation(layout.TILE * tile + 8 * row8, i)
            first, second = ([ptx.add_f16x2(x, m) for x, m in zip(tables.entry(own[row8][half], i),
                                                                  means[i + STEPS * half])] for half in range(2))
            rotated.append([rotate(*x) for x in zip(first, second, cos, sin)])
        for half in range(2):
            a = numbers.operand_a([rotated[row8][j][half] for j in range(2) for row8 in range(2)])
            numbers.multiply(numbers.multiply_atom(), acc, tile, a, q[None, i + STEPS * half])
    if shares:  # column 2 t + 1 has q of the later tokens
        acc[2, tile] = acc[3, tile]


def rotate(x: Uint32, y: Uint32, cos: Uint32, sin: Uint32) -> tuple[Uint32, Uint32]:
    """Two pairs of channels, fp16: (x cos - y sin, y cos + x sin)."""
    return (ptx.subtract_f16x2(ptx.mul_f16x2(x, cos), y, sin), ptx.fma_f16x2(y, cos, ptx.mul_f16x2(x, sin)))
