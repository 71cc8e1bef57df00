"""Query rows as stored keys want them: in the order of stored channels, divided by their weights, in fp32.

q' = q 2^e with e of each row, so that 1 <= max |q'| < 2, or 2^11 times that where q' is turned before it is an operand.
It lies in shared memory, by row: K's table or operand, its mean, and 16-bit tokens are multiplied with it.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from lowbit_attn import layout, registers, subnormals
from lowbit_attn.device import numbers
from lowbit_attn.formats import codebook_order as order
from lowbit_attn.hopper.arith.codebook import table
from lowbit_attn.hopper.arith.codebook.books import BookPlace
from lowbit_attn.hopper.arith.codebook.config import FACTORS, TABLE_BYTES, uses_table
from lowbit_attn.hopper.common.abi import Rows
from lowbit_attn.hopper.common.book_abi import BOOK_CHANNEL_PLANES
from lowbit_attn.hopper.warp import fetch
from lowbit_attn.hopper.warp.config import WARP, WarpConfig
from lowbit_attn.hopper.warp.fetch import Lane, Ring, read
from lowbit_attn.hopper.warp.page_loop import Call

ORDER, RECIPROCAL, MEAN, REACH = range(BOOK_CHANNEL_PLANES)  # planes of abi.Books.channels
SLOPE, TOKEN_SLOPE, OFFSET, UP = range(FACTORS)  # of a row: see prepare
OPERAND_SHIFT = 11  # of q' as an operand: a channel 2^-25 of its row's largest stays normal
TABLE_TOP = 13  # |products| of a table are below 2^13, so that sums of four stay fp16
MAX_EXPONENT, MIN_BOUND_LOG2 = 126, -60


class Loaded(NamedTuple):
    """A lane's channels of the query row that its warp prepares, fp32 (channels)."""

    q: cute.Tensor  # divided by the weights
    mean: cute.Tensor  # of the entries
    reach: cute.Tensor  # of the entries from it


class BookQuery(NamedTuple):
    """What ``scores`` takes."""

    shared: cute.Pointer  # q', fp32 (row, channel)
    factors: tuple  # [column] FACTORS of the lane's row
    operand: cute.Tensor | None  # K without a table: fp16 (4, fragments)


def own_channels(cfg: WarpConfig) -> int:
    """Consecutive channels of a lane."""
    return cfg.head_dim // WARP


def row_view(cfg: WarpConfig, shared: cute.Pointer) -> cute.Tensor:
    """(a lane's channels, (lane, row)) of q'."""
    count = own_channels(cfg)
    return cute.make_tensor(cute.recast_ptr(shared, dtype=Float32), cute.make_layout(
        (count, (WARP, cfg.rows)), stride=(1, (count, cfg.head_dim))))


def group_view(cfg: WarpConfig, shared: cute.Pointer) -> cute.Tensor:
    """(channels of a code, (group, row)) of q'."""
    size = cfg.k.group_size
    return cute.make_tensor(cute.recast_ptr(shared, dtype=Float32), cute.make_layout(
        (size, (cfg.head_dim // size, cfg.rows)), stride=(1, (size, cfg.head_dim))))


def mean_view(cfg: WarpConfig, books: cute.Pointer) -> cute.Tensor:
    """(channels of a code, group) of the mean entries, behind the factors."""
    start = cute.recast_ptr(books, dtype=Float32) + 2 * TABLE_BYTES // 4 + FACTORS * cfg.rows
    return cute.make_tensor(start, cute.make_layout((cfg.k.group_size, cfg.head_dim // cfg.k.group_size)))


def factor_view(cfg: WarpConfig, books: cute.Pointer) -> cute.Tensor:
    """(FACTORS, row), behind the codebooks."""
    return cute.make_tensor(cute.recast_ptr(books, dtype=Float32) + 2 * TABLE_BYTES // 4,
                            cute.make_layout((FACTORS, cfg.rows)))


@cute.jit
def load(cfg: cutlass.Constexpr[WarpConfig], call: Call, rows: Rows, me: Lane) -> Loaded:
    """Warp w reads row w; rows that do not exist are zero."""
    count, planes = own_channels(cfg), call.view.books.channels
    found = Loaded(*(cute.make_rmem_tensor(count, Float32) for _ in Loaded._fields))
    for x in found:
        x.fill(0.0)
    if me.warp < rows.count:
        own = cute.make_rmem_tensor((count, BOOK_CHANNEL_PLANES), Float32)
        for i in cutlass.range_constexpr(BOOK_CHANNEL_PLANES):
            for j in cutlass.range_constexpr(count):
                own[j, i] = planes[rows.head_idx, i, count * Int32(me.lane) + j]
        start = call.q.iterator.toint() + fetch.query_offset(cfg, call.q, rows, me.warp)
        row = cute.make_tensor(cute.make_ptr(numbers.ELEMENT[cfg.dtype], start, cute.AddressSpace.gmem,
                                             assumed_align=2), cute.make_layout(cfg.head_dim))
        for j in cutlass.range_constexpr(count):
            found.q[j] = Float32(row[own[j, ORDER].bitcast(Int32)]) * own[j, RECIPROCAL]
            found.mean[j], found.reach[j] = own[j, MEAN], own[j, REACH]
    return found


@cute.jit
def prepare(cfg: cutlass.Constexpr[WarpConfig], own: Loaded, scale_log2: Float32, me: Lane, shared: cute.Pointer,
            place: BookPlace) -> BookQuery:
    """q' and each row's factors to shared memory; K's table, or its operand. A barrier of the CTA follows.

    Logits of packed keys are ``SLOPE S + q'. mean TOKEN_SLOPE + OFFSET``, those of 16-bit keys ``TOKEN_SLOPE q'. k``.
    UP: what q' is multiplied with as table or operand. Products are of entries less their mean over the codebook, whose
    product with q' is OFFSET: fp16 sums then keep their digits where all entries of a group are alike.
    """
    factors = store_rows(cfg, own, scale_log2, me, shared, place)
    operand, rows = None, group_view(cfg, shared)
    if cutlass.const_expr(uses_table(cfg)):
        table.build(cfg, me, rows, factors, place.buffer, mean_view(cfg, place.buffer))
    else:
        operand = table.operand(cfg, me, rows, factors)
    factors = tuple(tuple(read(factors, row)) for row in own_rows(cfg, me))
    return BookQuery(shared, factors, operand)


@cute.jit
def store_rows(cfg: cutlass.Constexpr[WarpConfig], own: Loaded, scale_log2: Float32, me: Lane, shared: cute.Pointer,
               place: BookPlace) -> cute.Tensor:
    """q' and each row's factors, which it returns, and the mean entries to shared memory; waits for K's codebook."""
    factors = factor_view(cfg, place.buffer)
    if me.warp < cfg.rows:
        store_row(cfg, own, scale_log2, me, shared, factors)
    if me.warp == 0:  # which has a row in every CTA
        means = cute.make_tensor(mean_view(cfg, place.buffer).iterator, cute.make_layout((own_channels(cfg), WARP)))
        cute.autovec_copy(own.mean, means[None, Int32(me.lane)])
    cute.arch.sync_threads()
    cute.arch.mbarrier_wait(place.full, 0)
    return factors


def store_row(cfg: WarpConfig, own: Loaded, scale_log2: Float32, me: Lane, shared: cute.Pointer,
              factors: cute.Tensor) -> None:
    """One row, by the warp of its number."""
    count = own_channels(cfg)
    largest = numbers.warp_max(numbers.tree([cute.math.absf(own.q[j]) for j in range(count)], cute.arch.fmax))
    clamped = cute.arch.fmax(largest, Float32(2.0**subnormals.MIN_QUERY_LOG2))
    exponent = cutlass.min(registers.floor_log2(clamped.bitcast(Int32)), Int32(MAX_EXPONENT))
    exponent = exponent - cfg.arithmetic.query_shift
    up = numbers.pow2(-exponent)
    row = cute.make_rmem_tensor(count, Float32)
    for j in range(count):
        row[j] = own.q[j] * up
    cute.autovec_copy(row, row_view(cfg, shared)[None, (Int32(me.lane), me.warp)])
    reach = numbers.warp_max(numbers.tree([cute.math.absf(row[j]) * own.reach[j] for j in range(count)],
                                          cute.arch.fmax))
    shift, offset = Int32(OPERAND_SHIFT if cfg.arithmetic.query_shift == 0 else order.SHRINK_LOG2), Float32(0.0)
    if uses_table(cfg):
        shift = TABLE_TOP - numbers.ceil_log2(reach * Float32(cfg.k.group_size), MIN_BOUND_LOG2)
        offset = numbers.over_lanes(numbers.tree([row[j] * own.mean[j] for j in range(count)], numbers.add),
                                    (1, 2, 4, 8, 16), numbers.add)
    shift = cutlass.max(shift, Int32(-MAX_EXPONENT))
    token_slope = scale_log2 * numbers.pow2(exponent)
    values = {SLOPE: token_slope * numbers.pow2(-shift), TOKEN_SLOPE: token_slope, OFFSET: offset * token_slope,
              UP: numbers.pow2(shift)}
    words = cute.make_rmem_tensor(FACTORS, Float32)
    for i, value in values.items():
        words[i] = value
    with cute.arch.elect_one():
        cute.autovec_copy(words, factors[None, me.warp])


def own_rows(cfg: WarpConfig, me: Lane) -> list[Int32]:
    """[column] the lane's query rows."""
    return [Int32(cfg.arithmetic.column_row(me.t, column)) for column in range(cfg.lane_rows)]


def mean_product(cfg: WarpConfig, found: BookQuery, mean: list, me: Lane) -> list[Float32]:
    """[column] q'. mean of the lane's rows; mean: of the lane's channels."""
    view, count, row_of = row_view(cfg, found.shared), cfg.lane_rows, cfg.arithmetic.column_row
    rows = [read(view, (Int32(me.lane), r)) for r in range(cfg.rows)]
    sums = [numbers.tree([x * y for x, y in zip(row, mean)], numbers.add) for row in rows]
    sums = [sums[row_of(t, column)] for t in range(4) for column in range(count)]
    for bit in (1, 2):  # each lane keeps the rows whose t has its own lane's bit
        is_set, pairs = (me.t & Uint32(bit)) != 0, range(0, len(sums), 2 * count)
        low, high = ([sums[i + more + j] for i in pairs for j in range(count)] for more in (0, count))
        sums = [cutlass.select_(is_set, y, x) + cute.arch.shuffle_sync_bfly(cutlass.select_(is_set, x, y), offset=bit)
                for x, y in zip(low, high)]
    return numbers.all_over_lanes(sums, numbers.OVER_G, numbers.add)


def token_words(cfg: WarpConfig, shared: cute.Pointer, ring: Ring, me: Lane):
    """(words (2, column tile), [column] slope) of q' for 16-bit tokens: as B operand in the cache's dtype, then what
    its rounding leaves; a channel of large keys needs both."""
    element, count = numbers.ELEMENT[cfg.dtype], cfg.k.col_tiles
    words = cute.make_rmem_tensor((2, cfg.arithmetic.query_parts * count), Uint32)
    view = cute.make_tensor(cute.recast_ptr(shared, dtype=Float32), cute.make_layout(
        (2, (cfg.head_dim // 2, cfg.rows)), stride=(1, (2, cfg.head_dim))))
    for tile in range(count):
        for col8 in range(2):
            at = (layout.TILE * tile + 8 * col8) // 2 + Int32(me.t)
            pair = read(view, (at, Int32(cfg.arithmetic.operand_row(me.g, 0))))
            high = words[col8, tile] = numbers.pack(*pair, element)
            words[col8, count + tile] = numbers.pack(*(x - y for x, y in zip(pair, numbers.widen(high, cfg.dtype))),
                                                     element)
    factors = factor_view(cfg, ring.books.buffer)
    return words, [factors[TOKEN_SLOPE, row] for row in own_rows(cfg, me)]
