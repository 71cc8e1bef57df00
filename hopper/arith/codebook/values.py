"""O^T += V^T P^T over a page of codes: entries of two tokens become the A operand, P takes the norms.

Lane 4 g + t asks in step i for entries of tokens 2t, 2t + 1 of two eights, of group R g + (i + t) mod R. The k-slots of
one multiply so belong to R groups of the row, or to fewer behind selects of a lane's own words (``config.selects``).
Columns are (query row, v): with P masked to the slots of one group, a column adds up what belongs to that group.
A lane's accumulators are all of its own query rows:

    O[2 c8 + e, (pair of channels, x)]    channel c8 of the pair, of the row and v of column 2t + e and of group
                                          R g + x + X v, X accumulators of a pair

``finish`` brings them to the order that the 16-bit tokens and the merge have, through the warp's ring.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from lowbit_attn import registers, subnormals
from lowbit_attn.device import numbers, ptx
from lowbit_attn.formats.codebook_order import BOOK_ROW_BYTES
from lowbit_attn.hopper.arith.codebook import books
from lowbit_attn.hopper.arith.codebook.config import (
    columns_a_row,
    groups,
    lane_bytes,
    rotations,
    rotations_left,
    selects,
    stride,
)
from lowbit_attn.hopper.warp import softmax
from lowbit_attn.hopper.warp.config import WORD, WarpConfig
from lowbit_attn.hopper.warp.fetch import Lane, Piece, Ring, read
from lowbit_attn.hopper.warp.softmax import State

SPAN = 32  # tokens whose norms a lane reads at once
LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632  # selectors
ALL_BITS = 0xFFFF_FFFF


def runs(cfg: WarpConfig) -> int:
    """S of codebook_order: words of a lane and step in 16 tokens."""
    return lane_bytes(cfg.v) // (4 * rotations(cfg.v))


def places(cfg: WarpConfig) -> list[tuple[int, int]]:
    """[accumulator // x] (run, pair of channels of an entry)."""
    return [(run, pair) for run in range(runs(cfg)) for pair in range(cfg.v.group_size // 2)]


def accumulators(cfg: WarpConfig) -> int:
    """How many a pair of channels has: X, so that every group has its column."""
    return max(1, rotations(cfg.v) // columns_a_row(cfg))


def norm_words(cfg: WarpConfig, piece: Piece, me: Lane) -> list[Uint32]:
    """[tile] norms of tokens g and g + 8 of each 16, fp16 in the halves of a word."""
    quad = 4  # words
    view = cute.make_tensor(piece.buffer + cfg.v.meta // WORD, cute.make_layout(
        (quad, cfg.v.cols * 2 // (quad * WORD), cfg.slots, cfg.warps),
        stride=(1, quad, cfg.slot_bytes // WORD, cfg.warp_bytes // WORD)))[None, None, piece.slot, piece.warp]
    selector = Uint32(LOW_HALVES) + Uint32(me.g % 2) * Uint32(HIGH_HALVES - LOW_HALVES)
    found = []
    for first in range(0, cfg.v.cols, SPAN):
        words = read(view, first // 8 + Int32(me.g // 2))
        found += [ptx.permute(words[2 * i], words[2 * i + 1], selector) for i in range(2)]
    return found


@cute.jit
def rescale(cfg: cutlass.Constexpr[WarpConfig], state: State, tops: tuple, scale: Float32 | None):
    """Bring O and the sums to new maxima and to E with a page's norms, if either moves in any lane of the warp."""
    moved = Int32(0)
    for column in cutlass.range_constexpr(cfg.lane_rows):
        moved = moved | Int32(tops[column] > state.row_max[column])
    if cutlass.const_expr(scale is not None):
        moved = moved | Int32(scale > numbers.pow2(-state.exponent[0]))
    if cute.arch.vote_any_sync(moved != 0):
        exponent = state.exponent[0]
        if cutlass.const_expr(scale is not None):
            exponent = cutlass.min(exponent, -numbers.ceil_log2(numbers.warp_max(scale), registers.MIN_SCALE_LOG2))
        down = numbers.pow2(cutlass.max(exponent - state.exponent[0], Int32(-126)))
        for column in cutlass.range_constexpr(cfg.lane_rows):
            alpha = cute.math.exp2(state.row_max[column] - tops[column], fastmath=True)
            state.row_max[column] = tops[column]
            state.row_sum[column] = state.row_sum[column] * alpha
            for i in cutlass.range_constexpr(len(places(cfg)) * accumulators(cfg)):
                for x in cutlass.range_constexpr(column, 4, cfg.lane_rows):
                    state.acc_o[x, i] = state.acc_o[x, i] * (alpha * down)
        state.exponent[0] = exponent


def accumulate(cfg: WarpConfig, piece: Piece, me: Lane, state: State, p: cute.Tensor, tops: tuple,
               looked_up_by=None) -> None:
    """p: fp32 accumulators of S^T, weights of the lane's rows; tops: their maxima; looked_up_by(cfg, piece, me): the
    lookups and rotation, of another order of codes or entries than this file's."""
    norms, largest = None, None
    if cfg.v.has_meta:
        norms = norm_words(cfg, piece, me)
        word = numbers.tree(norms, ptx.max_u16x2)
        largest = numbers.max_half(word, "float16")
    rescale(cfg, state, tops, largest)
    softmax.add_sums(cfg, state, p)
    up = numbers.pow2((state.exponent[0] if norms else Int32(0)) + subnormals.PROBABILITY_SHIFT)
    codes = books.Codes(cfg, piece, cfg.v, me.lane)
    entries, rotation = (looked_up_by or rotated)(cfg, piece, me)
    masks = rotation_masks(cfg, me, rotation)
    for tile in range(cfg.v.col_tiles):
        scales = [up] * 2
        if norms:
            scales = [norm * up for norm in numbers.widen(norms[tile], "float16")]
        own = weights(cfg, me, [[p[2 * row8 + e, tile] * scale for e in range(cfg.lane_rows)]
                                for row8, scale in enumerate(scales)])
        masked = [masked_operand(own, mask) for mask in masks]
        add_tile(cfg, codes, entries, rotation, masked, state, tile)


def rotated(cfg: WarpConfig, piece: Piece, me: Lane) -> tuple[books.Lookups, Uint32]:
    """Lookups, and by how many groups they are turned."""
    return lookups(cfg, piece, me), me.t


def lookups(cfg: WarpConfig, piece: Piece, me: Lane) -> books.Lookups:
    """V's lookups: in step i a lane asks for group R g + (i + t) mod R of each run."""
    side, period, second = cfg.v, rotations(cfg.v), None
    if period < 4:
        second = Int32(me.t // 2) * books.second_copy(side)
    return books.lookups(books.base_of(cfg, piece.buffer, 1), side.group_size // 2,
                         lambda i: period * Int32(me.g) + (i + Int32(me.t)) % period, second)


def rotation_masks(cfg: WarpConfig, me: Lane, rotation: Uint32) -> list[Uint32 | None]:
    """[k] all ones in lanes whose words are turned k strides further than the group of the lane's column; None: in
    all."""
    left, apart = rotations_left(cfg, cfg.v), accumulators(cfg) // stride(cfg, cfg.v)
    if left == 1:
        return [None]
    own = Int32(rotation >> selects(cfg, cfg.v)) - apart * (Int32(me.g) % columns_a_row(cfg))
    found = [(own + 4 * left - k) % left for k in range(left)]
    return [Uint32(ptx.opaque(Uint32(Int32(x == 0)) * Uint32(ALL_BITS))) for x in found]


def weights(cfg: WarpConfig, me: Lane, p: list[list[Float32]]) -> list[Uint32]:
    """[eight] P of tokens 2t, 2t + 1 of an eight and the row of column g; p: [eight][column] P of token g of both."""
    if cfg.lane_rows == 2:
        return [ptx.movmatrix(numbers.pack(*pair)) for pair in p]
    own = ptx.movmatrix(numbers.pack(p[0][0], p[1][0]))  # even g: of the first eight, odd g: of the second
    other = cute.arch.shuffle_sync_bfly(own, offset=4)
    is_odd = (me.g & Uint32(1)) != 0
    return [Uint32(cutlass.select_(is_odd, other, own)), Uint32(cutlass.select_(is_odd, own, other))]


def masked_operand(words: list[Uint32], mask: Uint32 | None) -> cute.Tensor:
    operand, operand_words = numbers.fragments(1)
    for i, word in enumerate(words):
        operand_words[i, 0] = word if mask is None else word & mask
    return operand[None, 0]


def add_tile(cfg: WarpConfig, codes: books.Codes, entries: books.Lookups, rotation: Uint32, masked: list, state: State,
             tile: int) -> None:
    """16 tokens."""
    period, count, apart = rotations(cfg.v), accumulators(cfg), stride(cfg, cfg.v)
    for run in range(runs(cfg)):
        words = [codes.word((tile * runs(cfg) + run) * period + i) for i in range(period)]
        for pair, of_steps in enumerate(operands(cfg, entries, rotation, words, run * BOOK_ROW_BYTES // 2)):
            for j, a in enumerate(of_steps):
                for x in range(j % min(apart, count), count, apart):
                    numbers.multiply(numbers.multiply_atom(), state.acc_o, places(cfg).index((run, pair)) * count + x,
                                     a, masked[(x - j) // apart % len(masked)])


def operands(cfg: WarpConfig, entries: books.Lookups, rotation: Uint32, words: list[Uint32], more: int) -> list[list]:
    """[pair of channels][step] the A operand of 16 tokens: what a word of each step names, ``more`` bytes further."""
    found = [[entries.find(word, token, i, more) for token in range(4)] for i, word in enumerate(words)]
    joined = [[[join(*(found[i][first + e][pair] for e in range(2))) for i in range(len(words))] for first in (0, 2)
               for join in (ptx.low_halves, ptx.high_halves)] for pair in range(cfg.v.group_size // 2)]
    count = selects(cfg, cfg.v)
    straight = [[books.straighten(register, rotation, count) for register in of_pair] for of_pair in joined]
    return [[numbers.operand_a([register[i] for register in of_pair]) for i in range(len(words))]
            for of_pair in straight]


@cute.jit
def finish(cfg: cutlass.Constexpr[WarpConfig], state: State, me: Lane, ring: Ring):
    """After the last packed page: O in its own units and in the order of V^T P^T."""
    side, count = cfg.v, accumulators(cfg)
    own = cute.make_tensor(cute.recast_ptr(ring.buffer, dtype=Float32) + me.warp * (cfg.warp_bytes // WORD),
                           cute.make_layout((cfg.head_dim, cfg.rows), stride=(1, cfg.merge_pitch)))
    rows = [Int32(cfg.arithmetic.column_row(me.t, column)) for column in range(cfg.lane_rows)]
    down = numbers.pow2(-subnormals.PROBABILITY_SHIFT - (state.exponent[0] if side.has_meta else Int32(0)))
    cute.arch.sync_warp()
    for i, (run, pair) in enumerate(places(cfg)):
        for x in cutlass.range_constexpr(count):
            for element in cutlass.range_constexpr(4):
                # of the columns beside a row that are the lane's
                column, rotation = (0, element % 2) if cfg.lane_rows == 1 else (element % 2, 0)
                if cutlass.const_expr(columns_a_row(cfg) == 4):
                    rotation = (2 * Int32(me.t % 2) + rotation) % rotations(side)
                first = groups(side) // runs(cfg) * run + rotations(side) * Int32(me.g)
                group = first + x + count * rotation
                own[side.group_size * group + 2 * pair + element // 2, rows[column]] = (
                    state.acc_o[element, i * count + x] * down)
    cute.arch.sync_warp()
    state.acc_o.fill(0.0)
    for column in cutlass.range_constexpr(cfg.lane_rows):
        for row, at in enumerate(softmax.places(state.acc_o, column, 1)):
            state.acc_o[at] = own[8 * row + Int32(me.g), rows[column]]
