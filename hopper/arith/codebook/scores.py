"""S of a page of codes: 16 tokens at a time, rows of the A operand; query rows are columns, as everywhere.

A lane asks for the groups of its token in an order turned by g (codebook_order), and this is how it comes right:

    table   products of a token's groups are added up anyhow, so their order does not matter: fp16 sums of a word,
            then a multiply with ones that adds up the lanes in fp32 and brings row r to column 2r
    entries columns are (row, rotation): B has, for rotation rho, q' of the groups that lanes of g mod 4 = rho ask for;
            each lane keeps the column of its own rotation; selects of a lane's own words (``config.selects``) leave
            fewer rotations
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from lowbit_attn.device import numbers, ptx
from lowbit_attn.hopper.arith.codebook import books, query, table
from lowbit_attn.hopper.arith.codebook.config import (
    TWO,
    columns_a_row,
    lane_bytes,
    rotations,
    rotations_left,
    selects,
    stride,
    uses_table,
)
from lowbit_attn.hopper.warp.config import WORD, WarpConfig
from lowbit_attn.hopper.warp.fetch import Lane, Piece
from lowbit_attn.hopper.warp.softmax import Scores

STEPS = 4  # bytes of a word
ONE, HIGH_ONE = 0x3C00, 0x3C00_0000  # fp16 1 in the low or the high half


def of_page(cfg: WarpConfig, piece: Piece, me: Lane, found: query.BookQuery) -> Scores:
    """S with the slopes and offsets of the lane's rows."""
    return with_mean(cfg, piece, me, found, of_codes(cfg, piece, me, found))


def of_codes(cfg: WarpConfig, piece: Piece, me: Lane, found: query.BookQuery) -> cute.Tensor:
    """Products of a piece's codes."""
    side = cfg.k
    acc = cute.make_rmem_tensor((4, side.row_tiles), Float32)
    acc.fill(0.0)
    codes = books.Codes(cfg, piece, side, me.lane)
    entries = lookups(cfg, piece, me)
    if uses_table(cfg):
        selectors = row_selectors(cfg, me)
        for tile in range(side.row_tiles):
            add_products(cfg, codes, entries, selectors, acc, tile)
    else:
        for tile in range(side.row_tiles):
            add_entries(cfg, codes, entries, me, found.operand, acc, tile)
    return acc


def with_mean(cfg: WarpConfig, piece: Piece, me: Lane, found: query.BookQuery, acc: cute.Tensor) -> Scores:
    """S of a page's codes with the slopes of the lane's rows, and the page's mean times q' as their offset."""
    products = query.mean_product(cfg, found, page_mean(cfg, piece, me), me)
    offsets = [x * own[query.TOKEN_SLOPE] + own[query.OFFSET] for x, own in zip(products, found.factors)]
    # a mean that is no number makes the page's weights so
    slopes = [x * Float32(0.0) + own[query.SLOPE] for x, own in zip(offsets, found.factors)]
    return Scores(acc, (0,) * (2 * cute.size(acc, mode=[1])), tuple(slopes), tuple(offsets))


def lookups(cfg: WarpConfig, piece: Piece, me: Lane) -> list[books.Lookups]:
    """[word of an eight] K's lookups: a word's byte i is of its group 4 ((i + g) mod R) + t."""
    side, base = cfg.k, books.base_of(cfg, piece.buffer, 0)
    period, count, second = rotations(side), lane_bytes(side) // WORD, 0
    words = side.group_size // 2
    if not uses_table(cfg):
        second = books.second_copy(side) * (words == 1)
    elif cfg.rows == TWO:
        words, second = 1, table.SECOND_COPY

    def of_word(q: int) -> books.Lookups:
        copy = Int32(me.g // 4) * second if second else None
        return books.lookups(base, words, lambda i: 4 * period * q + 4 * ((i + Int32(me.g)) % period) + Int32(me.t),
                             copy)

    if second:
        return [of_word(q) for q in range(count)]
    first = of_word(0)
    return [first._replace(more=4 * period * WORD * words * q) for q in range(count)]


def page_mean(cfg: WarpConfig, piece: Piece, me: Lane) -> list[Float32]:
    """The page's mean of the lane's channels."""
    count = query.own_channels(cfg)
    offset = cfg.k.meta + count * 2 * Int32(me.lane)
    address = Int32(piece.buffer.toint()) + piece.warp * cfg.warp_bytes + piece.slot * cfg.slot_bytes + offset
    view = cute.make_tensor(cute.make_ptr(Uint32, address, cute.AddressSpace.smem, assumed_align=2 * count),
                            cute.make_layout(count // 2))
    words = cute.make_rmem_tensor(count // 2, Uint32)
    cute.autovec_copy(view, words)
    return [half for i in range(count // 2) for half in numbers.widen(words[i], "float16")]


def row_selectors(cfg: WarpConfig, me: Lane) -> cute.Tensor:
    """B operand of ones: a column takes the k-slots of its row. Register j, half e: row 2 j + e, of two rows e."""
    ones, words = numbers.fragments(1)
    row = Int32(cfg.arithmetic.operand_row(me.g, 0))
    for j in range(2):
        first = 2 * j % cfg.rows
        words[j, 0] = Uint32(Int32(row == first)) * Uint32(ONE) + Uint32(Int32(row == first + 1)) * Uint32(HIGH_ONE)
    return ones[None, 0]


def add_products(cfg: WarpConfig, codes: books.Codes, tables: list, selectors: cute.Tensor, acc: cute.Tensor,
                 tile: int) -> None:
    """16 tokens by table: rows g and g + 8 of A, whose registers have rows 0 and 1, rows 2 and 3; of two rows, a word's
    sums and the next one's."""
    words = lane_bytes(cfg.k) // WORD
    sums = [[sums_of_word(tables[q], codes.word((2 * tile + row8) * words + q)) for row8 in range(2)]
            for q in range(words)]
    if cfg.rows == TWO:
        zero = [[Uint32(0)]] * 2
        operands = [[x[0] for q in (*sums, zero)[:2] for x in q]]
    else:
        operands = [[x[pair] for pair in range(2) for x in q] for q in sums]
    for a in operands:
        numbers.multiply(numbers.multiply_atom(), acc, tile, numbers.operand_a(a), selectors)


def sums_of_word(table: books.Lookups, word: Uint32) -> list[Uint32]:
    """[pair of rows] fp16 sums of the products that a word's codes name."""
    found = [table.find(word, i, i) for i in range(STEPS)]
    return [numbers.tree([x[pair] for x in found], ptx.add_f16x2) for pair in range(table.words)]


def add_entries(cfg: WarpConfig, codes: books.Codes, tables: list, me: Lane, operand: cute.Tensor,
                acc: cute.Tensor, tile: int) -> None:
    """16 tokens by entries: an A operand has two of two channels, or one of four, of each token."""
    words, steps, each = lane_bytes(cfg.k) // WORD, table.operand_steps(cfg), 4 // cfg.k.group_size
    count = max(1, rotations_left(cfg, cfg.k) // columns_a_row(cfg))  # multiplies of an operand
    rotated = cute.make_rmem_tensor((4, count), Float32)
    rotated.fill(0.0)
    found = [found_of_words(cfg, tables, codes, (2 * tile + row8) * words, me) for row8 in range(2)]
    for q in range(words):
        own = [of_token[q] for of_token in found]
        for i in range(0, STEPS, each):
            a = numbers.operand_a([of_token[j][word] for j in range(i, i + each) for word in range(2 // each)
                                   for of_token in own])
            for x in range(count):
                step = (i + stride(cfg, cfg.k) * columns_a_row(cfg) * x) % rotations(cfg.k)
                numbers.multiply(numbers.multiply_atom(), rotated, x, a,
                                 operand[None, len(steps) * q + steps.index(step)])
    for row8 in range(2):
        columns = [rotated[2 * row8 + e, x] for x in range(count) for e in range(2)]
        for e, product in enumerate(own_rotation(cfg, me, columns)):
            acc[2 * row8 + e, tile] = product


def found_of_words(cfg: WarpConfig, tables: list, codes: books.Codes, first: int, me: Lane) -> list[list]:
    """[word][step] the entries that a token's codes name."""
    found = [[table.find(codes.word(first + q), i, i) for i in range(STEPS)] for q, table in enumerate(tables)]
    return [[list(x) for x in zip(*(books.straighten(list(x), me.g, selects(cfg, cfg.k)) for x in zip(*of_word)))]
            for of_word in found]


def own_rotation(cfg: WarpConfig, me: Lane, found: list[Float32]) -> list[Float32]:
    """[column of the lane's rows] products of the rotation that token g has; found: [multiply, column 2t + e]."""
    own, left = me.g >> selects(cfg, cfg.k), rotations_left(cfg, cfg.k)
    if cfg.lane_rows == 2:
        return [choose(own, found[e::2][:left]) for e in range(2)]
    if columns_a_row(cfg) < left or left == 2:
        return [choose(own, found[:left])]
    mine = choose(own, found)  # columns of lanes t and t ^ 1 are of one row
    other = cute.arch.shuffle_sync_bfly(mine, offset=1)
    return [cutlass.select_(((me.t ^ (me.g >> 1)) & Uint32(1)) == 0, mine, other)]


def choose(number: Uint32, found: list[Float32]) -> Float32:
    """found[number mod len(found)], of a power of two."""
    bit = 1
    while len(found) > 1:
        is_set = (number & Uint32(bit)) != 0
        found = [cutlass.select_(is_set, late, early) for early, late in zip(found[::2], found[1::2])]
        bit *= 2
    return found[0]
