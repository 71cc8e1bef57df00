"""The steps of a kernel on int8 digits (warp.config.Arithmetic): q s in two signed digits, p s in two unsigned ones.

A lane of row t reads its logits from columns 2t and 2t + 1, one a digit. Making the operand, lane 4g + t works for
column g: query row g // 2, digit g % 2. The two lanes of a row share its products: lane parity p = g % 2 takes column
tile 2i + p of each step i, then gives the other lane that lane's digit of it.

K's zero-points are one fp32 sum a query row; O keeps its true scale.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from lowbit_attn import layout, registers
from lowbit_attn.device import numbers, ptx
from lowbit_attn.hopper.arith.int8.config import MAX_TILES, STEP_TILES
from lowbit_attn.hopper.common.abi import Rows
from lowbit_attn.hopper.warp import fetch, softmax
from lowbit_attn.hopper.warp.config import ROW_TILES, WARP, WORD, SidePlan, WarpConfig
from lowbit_attn.hopper.warp.fetch import Lane, Piece, Query
from lowbit_attn.hopper.warp.page_loop import Call
from lowbit_attn.hopper.warp.softmax import Scores, State

__all__ = ["add_values", "before_values", "finish", "load_query", "prefetch_query", "prepare_own_query",
           "prepare_query", "scores"]

OVER_ROW = (*numbers.OVER_T, 4)  # lane distances of the eight lanes that share a query row
SIGN_FLIPS = 0x8080_0000  # low + 128 as a byte, its highest bit flipped, is low; of the two low digits of a pair
LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632  # selectors
DIGITS_OF_TWO = 0x4051  # of words a, b whose low halves are X: high digits of a, b, then their low digits
ALL_BITS = 0xFFFF_FFFF
QUAD_BYTES = 16  # (scale, zero-point) of four tokens
SPAN = 32  # tokens over which a lane's four lie


class Step(NamedTuple):
    """One multiply's column tiles of a matrix of codes: STEP_TILES of them, or the last one alone."""

    side: SidePlan
    index: int
    digits: list[Uint32]  # the B operand: a register a column tile

    @property
    def col_tiles(self) -> range:
        first = STEP_TILES * self.index
        return range(first, min(first + STEP_TILES, self.side.col_tiles))


def prefetch_query(cfg: WarpConfig, q: cute.Tensor, rows: Rows, me: Lane, thread: Int32) -> cute.Tensor:
    """q words for ``prepare_query``, by the last warp: none has fewer pages."""
    return fetch.load_query(cfg, q, rows._replace(count=rows.count * Int32(me.warp == cfg.warps - 1)), me)


def load_query(cfg: WarpConfig, call: Call, rows: Rows, me: Lane, early: cute.Tensor) -> cute.Tensor:
    return early


@cute.jit
def prepare_query(cfg: cutlass.Constexpr[WarpConfig], words: cute.Tensor, scale_log2: Float32, me: Lane,
            shared: cute.Pointer, channels: cute.Pointer) -> Query:
    """q * softmax_scale_log2 to shared memory, by the last warp; with boosted channels, to ``channels`` too. A barrier
    of the CTA follows.

    Operand: fp32 (4, lane, step) in the order of a word.
    """
    view = shared_view(cfg, shared)
    if me.warp == cfg.warps - 1:
        store_query(cfg, words, scale_log2, me, view, channels)
    return Query(view, (), channels)


def prepare_own_query(cfg: WarpConfig, words: cute.Tensor, scale_log2: Float32, me: Lane, shared: cute.Pointer,
                      channels: cute.Pointer) -> Query:
    """The operand of ``scores`` of a warp with rows of its own; a barrier of the warp must follow."""
    view = shared_view(cfg, shared)
    store_query(cfg, words, scale_log2, me, view, channels)
    return Query(view, (), channels)


def shared_view(cfg: WarpConfig, shared: cute.Pointer) -> cute.Tensor:
    """(word byte, lane, step), fp32."""
    return cute.make_tensor(cute.recast_ptr(shared, dtype=Float32), cute.make_layout(
        (layout.WORD_BYTES, WARP, cfg.k.col_tiles // STEP_TILES),
        stride=(1, layout.WORD_BYTES, layout.WORD_BYTES * WARP)))


def store_query(cfg: WarpConfig, words: cute.Tensor, scale_log2: Float32, me: Lane, view: cute.Tensor,
          channels: cute.Pointer) -> None:
    """``prepare_query``'s part of one warp."""
    is_odd = me.g % 2 != 0
    for step in range(cfg.k.col_tiles // STEP_TILES):
        own = cute.make_rmem_tensor(layout.WORD_BYTES, Float32)
        for col8 in range(2):
            pair = words[col8, STEP_TILES * step + 1], words[col8, STEP_TILES * step]
            halves = numbers.widen(Uint32(cutlass.select_(is_odd, *pair)), cfg.dtype)
            for e in range(2):
                own[col8 + 2 * e] = halves[e] * scale_log2
        cute.autovec_copy(own, view[None, Int32(me.lane), step])
        if cfg.boost:
            cfg.arithmetic.boost.store_channels(cfg, own, step, me, channels)


def scores(cfg: WarpConfig, piece: Piece, me: Lane, queries: Query, tile: Uint32 | None = None) -> Scores:
    """S of the page whose K part is ``piece``: elements 0 and 2 of each row tile.

    tile: of one of its row tiles alone, chosen at run time, as row tile 0.
    """
    side, count = cfg.k, ROW_TILES if tile is None else 1
    acc = cute.make_rmem_tensor((4, count), Float32)
    tiles = side.group_size // layout.TILE
    is_whole = side.groups == 1 or tile is not None  # one slope and one offset
    for j in range(side.groups if tile is None else 1):
        group = j if tile is None or side.groups == 1 else Int32(tile // tiles)
        steps, slope, offset = query_steps(cfg, piece, me, queries, group)
        row_tiles = range(j * tiles, (j + 1) * tiles) if tile is None else range(1)
        found = page_sums(cfg, piece, me, steps, row_tiles, tile)
        for rt, pair in zip(row_tiles, found):
            for row8, value in enumerate(pair):
                if not is_whole:
                    value = value * (slope * Float32(2.0 ** -side.power(rt, row8))) + offset
                acc[2 * row8, rt] = value
    if not is_whole:
        return Scores(acc, (0,) * (2 * count), None, None)
    powers = tuple(side.power(rt, row8) for rt in range(count) for row8 in (0, 1))
    return Scores(acc, powers, (slope,), (offset,))


def page_sums(cfg: WarpConfig, piece: Piece, me: Lane, steps: list[Step], row_tiles: range,
              tile: Uint32 | None) -> list:
    """[row tile][row8] sum over all channels, in runs that the accumulators hold."""
    total = None
    for run in registers.signed_runs(len(steps), cfg.k.bits):
        acc = begin_sums(row_tiles, True)
        add_columns(cfg, acc, piece, me, [steps[i] for i in run], row_tiles, True, tile)
        part = sums_in(acc, True)
        total = part if total is None else [[x + y for x, y in zip(*pairs)] for pairs in zip(total, part)]
    return total


def query_steps(cfg: WarpConfig, piece: Piece, me: Lane, queries: Query,
                group) -> tuple[list[Step], Float32, Float32]:
    """(multiplies of all channels, then of boosted ones; slope, offset) of a token group; the last two of row t."""
    steps = range(cfg.k.col_tiles // STEP_TILES)
    scales, zeros = ([own_metadata(cfg, piece, me, group, is_zero, step) for step in steps] for is_zero in (0, 1))
    rows = [fetch.read(queries.operand[None, None, step], Int32(me.lane)) for step in steps]
    products = [[x * scale for x, scale in zip(rows[step], scales[step])] for step in steps]
    sides = [(cfg.k, step) for step in steps]
    if cfg.boost:
        boosted = cfg.arithmetic.boost.products(cfg, piece, me, queries.channels)
        products += boosted
        sides += [(cfg.boost, i) for i in range(len(boosted))]
    largest = numbers.tree([cute.math.absf(x) for step in products for x in step], cute.arch.fmax)
    largest = numbers.over_lanes(largest, OVER_ROW, cute.arch.fmax)
    up = numbers.pow2(fixed_point(largest))
    start = Float32(registers.SIGNED_START + registers.HALF_DIGIT)
    found = [Step(*place, operand(cfg, me, [x * up + start for x in own])) for place, own in zip(sides, products)]
    bias = Float32(0.0)
    for step in steps:
        for i in range(layout.WORD_BYTES):
            bias = rows[step][i] * zeros[step][i] + bias
    bias = numbers.over_lanes(bias, OVER_ROW, numbers.add)
    largest, offset = (cute.arch.shuffle_sync(x, Int32(8 * me.t)) for x in (largest, bias))  # row t has lane 4 * 2t
    return found, two_to_minus(largest, fixed_point(largest)), offset


def fixed_point(largest: Float32) -> Int32:
    return digit_exponent(largest, registers.SIGNED_GUARD, registers.SIGNED_TOP)


def own_metadata(cfg: WarpConfig, piece: Piece, me: Lane, group, is_zero: int, step: int) -> list[Float32]:
    """Scales or zero-points of the lane's column tile of a step, in the order of a word's bytes."""
    side = cfg.k
    at = own_access(side, group, is_zero, step, Int32(me.g), Int32(me.t))
    words = fetch.read(fetch.meta_view(cfg, side, piece), at)
    halves = [numbers.widen(word, side.storage) for word in words]
    return [halves[i % 2][i // 2] for i in range(layout.WORD_BYTES)]  # byte i: word col8 = i % 2, half e = i // 2


def own_access(side: SidePlan, group, is_zero: int, step: int, g, t):
    """Index of the 8 bytes with the metadata of column tile 2 * step + g % 2: words col8 = 0 and 1."""
    return side.channel_access(group, is_zero, STEP_TILES * step, t) + g % 2 * side.channel_access(0, 0, 1, 0)


def operand(cfg: WarpConfig, me: Lane, values: list[Float32]) -> list[Uint32]:
    """B operand of a step from the lane's share of its products, as start + 128 + X."""
    words = [x.bitcast(Uint32) for x in values]
    pairs = [ptx.permute(*words[i : i + 2], DIGITS_OF_TWO) ^ Uint32(SIGN_FLIPS)
             for i in range(0, len(words), 2)]
    return cfg.arithmetic.boost.joined(me, *pairs) if len(pairs) == 1 else exchanged(me, pairs)


def exchanged(me: Lane, pairs: list[Uint32]) -> list[Uint32]:
    """The two registers from the digits of the four products of the lane's column tile."""
    is_odd = me.g % 2 != 0
    mine, theirs = (LOW_HALVES, HIGH_HALVES), (HIGH_HALVES, LOW_HALVES)
    own, other = (ptx.permute(*pairs, Uint32(cutlass.select_(is_odd, Uint32(odd), Uint32(even))))
                  for even, odd in (mine, theirs))
    got = cute.arch.shuffle_sync_bfly(other, offset=4)
    return [Uint32(cutlass.select_(is_odd, *pair)) for pair in ((got, own), (own, got))]


def before_values(cfg: WarpConfig, state: State, maxima: tuple) -> None:
    """O is in its own units: it goes to the new maxima while V is on its way."""
    softmax.rescale(cfg, state, maxima)


def add_values(cfg: WarpConfig, piece: Piece, me: Lane, state: State, p: cute.Tensor,
               maxima: tuple[Float32, ...], arrival: fetch.Arrival) -> None:
    """O += P V. p: fp32 (4, token tile), elements 0 and 2: tokens g and g + 8 of the lane's row."""
    side = cfg.v
    softmax.add_sums(cfg, state, p)
    tiles = side.group_size // layout.TILE
    for j in range(side.groups):
        first_run, *last_run = probability_digits(cfg, piece, me, state, p, j)
        late, *early = *last_run, first_run  # with one run it is the last, too
        middle = side.early_tiles // STEP_TILES if cfg.has_halves else 0
        for first in range(j * tiles, (j + 1) * tiles, MAX_TILES):
            row_tiles = range(first, min(first + MAX_TILES, (j + 1) * tiles))
            acc = begin_sums(row_tiles, False)
            add_columns(cfg, acc, piece, me, late.steps[middle:], row_tiles, False)
            fetch.wait_half(cfg, arrival, piece.slot)
            add_columns(cfg, acc, piece, me, late.steps[:middle], row_tiles, False)
            add_sums(state, late, acc, row_tiles)
            for run in early:
                acc = begin_sums(row_tiles, False)
                add_columns(cfg, acc, piece, me, run.steps, row_tiles, False)
                add_sums(state, run, acc, row_tiles)


def finish(cfg: WarpConfig, state: State, me: Lane, ring: fetch.Ring) -> None:
    """O is in its own units already."""


class RunDigits(NamedTuple):
    """p s of a run of tokens whose codes have one width (boosted values), else of all: in fixed point of its own."""

    side: SidePlan  # of the run
    steps: list[Step]
    down: Float32  # 2^-a


def add_sums(state: State, run: RunDigits, acc: list, row_tiles: range) -> None:
    """The sums of a run to O."""
    for rt, pair in zip(row_tiles, sums_in(acc, False)):
        for row8, value in enumerate(pair):
            at = 2 * row8, rt
            state.acc_o[at] = value * (run.down * Float32(2.0 ** -run.side.power(rt, row8))) + state.acc_o[at]


def probability_digits(cfg: WarpConfig, piece: Piece, me: Lane, state: State, p: cute.Tensor,
                       group: int) -> list[RunDigits]:
    """The runs of a channel group; z takes p times the zero-points."""
    pairs = token_pairs(cfg, piece, me, group)
    total, products = state.zeros[0, group], []
    for i, (scale, zero) in enumerate(pairs):
        probability = p[2 * (i % 2), i // 2]
        total = probability * zero + total
        products.append(probability * scale)
    state.zeros[0, group] = total
    sides = cfg.v.runs
    parts = [products[side.first_col // 8 : (side.first_col + side.cols) // 8] for side in sides]
    largest = [numbers.tree(list(part), cute.arch.fmax) for part in parts]
    largest = numbers.all_over_lanes(largest, numbers.OVER_G, cute.arch.fmax)
    return [run_digits(*run) for run in zip(sides, parts, largest)]


def run_digits(side: SidePlan, products: list[Float32], largest: Float32) -> RunDigits:
    """products: p s of tokens g, g + 8, g + 16, ... of a run; largest: of all lanes'."""
    a = digit_exponent(largest, registers.UNSIGNED_GUARD, registers.UNSIGNED_TOP)
    up = numbers.pow2(a)
    words = [(x * up + Float32(registers.UNSIGNED_START)).bitcast(Uint32) for x in products]
    # both tokens' digits in halves, one a column: their transpose has two tokens of one column
    columns = [ptx.movmatrix(ptx.permute(*words[i : i + 2], DIGITS_OF_TWO)) for i in range(0, len(words), 2)]
    steps = [Step(side, i // STEP_TILES, columns[i : i + STEP_TILES]) for i in range(0, len(columns), STEP_TILES)]
    return RunDigits(side, steps, two_to_minus(largest, a))


def token_pairs(cfg: WarpConfig, piece: Piece, me: Lane, group: int) -> list[tuple[Float32, Float32]]:
    """(scale, zero-point) of tokens g, g + 8, g + 16, ... of the page."""
    side, count = cfg.v, (cfg.v.nbytes - cfg.v.meta) // QUAD_BYTES
    view = fetch.part_view(cfg, piece, side.meta, QUAD_BYTES // WORD, count)
    quads = [fetch.read(view, quad_access(group, first, Int32(me.g))) for first in range(0, layout.PAGE_TOKENS, SPAN)]
    return [numbers.widen(word, side.storage) for quad in quads for word in quad]


def quad_access(group: int, first: int, g):
    """Index of the 16 bytes with the pairs of tokens first + g, first + g + 8, + 16, + 24; first: a multiple of 32."""
    lanes_apart = layout.token_meta_offset(0, 0, 1) // QUAD_BYTES
    return layout.token_meta_offset(group, 0, first) // QUAD_BYTES + g * lanes_apart


# ---- codes times digits: m16n8k32 on masked bytes, and from its s32 sums to fp32


def digit_exponent(largest: Float32, guard: float, top: int) -> Int32:
    """a, so that rounding x * 2^a gives two digits for every |x| <= largest."""
    clamped = cute.arch.fmax(largest * Float32(guard), Float32(registers.MIN_FIXED_POINT))
    return top - registers.floor_log2(clamped.bitcast(Int32))


def two_to_minus(largest: Float32, a: Int32) -> Float32:
    """2^-a; NaN where largest is infinite, so that it stays visible."""
    return largest * Float32(0.0) + numbers.pow2(-a)


def masks_of(side: SidePlan, row_tile: int, col_tile: int) -> list[tuple[int, int]]:
    """[row8] (word, mask) of a tile's two A registers."""
    found = []
    for row8 in (0, 1):
        row = layout.TILE * row_tile + 8 * row8
        word, _, _, _ = layout.code_slot(row, layout.TILE * col_tile, side.rows, side.bits)
        found.append((word, registers.byte_mask(row, side.bits)))
    return found


def masked(words: dict[int, Uint32], word: int, mask: int) -> Uint32:
    return words[word] if mask == ALL_BITS else words[word] & Uint32(mask)


def tile_words(cfg: WarpConfig, side: SidePlan, piece: Piece, me: Lane, col_tile: int, row_tiles: range,
               tile: Uint32 | None) -> dict[int, Uint32]:
    """The lane's words with the codes of consecutive row tiles of a column tile; tile: of this one, as row tile 0."""
    if tile is not None:
        return cfg.mixed_steps.tile_codes(cfg, side, piece, me, col_tile * side.row_tiles, tile)
    return fetch.codes(cfg, side, piece, me, *run_of(side, col_tile, row_tiles))


def run_of(side: SidePlan, col_tile: int, row_tiles: range) -> tuple[int, int]:
    """(first tile, tiles) of the whole words that hold consecutive row tiles of a column tile."""
    n = layout.tiles_per_word(side.bits)
    first, stop = row_tiles.start // n * n, -(-row_tiles.stop // n) * n
    return col_tile * side.row_tiles + first, stop - first


def begin_sums(row_tiles: range, is_signed: bool) -> list[list[Uint32]]:
    """[row tile] accumulators."""
    start = registers.SIGNED_START_BITS if is_signed else registers.UNSIGNED_START_BITS
    return [[Uint32(start)] * 4 for _ in row_tiles]


def add_columns(cfg: WarpConfig, acc: list, piece: Piece, me: Lane, steps: list[Step], row_tiles: range,
                is_signed: bool, tile: Uint32 | None = None) -> None:
    """The columns of ``steps`` to ``acc``; tile: one row tile alone, chosen at run time, as that of ``row_tiles``."""
    for step in steps:
        words = [tile_words(cfg, step.side, piece, me, ct, row_tiles, tile) for ct in step.col_tiles]
        for at, row_tile in enumerate(row_tiles):
            a = [masked(found, *place) for found, ct in zip(words, step.col_tiles)
                 for place in masks_of(step.side, row_tile, ct)]
            acc[at] = ptx.multiply_bytes(a, step.digits, acc[at], is_signed)


def sums_in(acc: list, is_signed: bool) -> list[list[Float32]]:
    """[row tile][row8] of this lane's row t: sum of code * 2^k * X, from accumulators."""
    return [[joined(*tile[2 * row8 : 2 * row8 + 2], is_signed) for row8 in (0, 1)] for tile in acc]


def joined(high: Uint32, low: Uint32, is_signed: bool) -> Float32:
    """256 high + low of two accumulators, read as start + sum."""
    start = registers.SIGNED_START if is_signed else registers.UNSIGNED_START
    base = registers.DIGIT_BASE
    return high.bitcast(Float32) * Float32(base) - Float32((base + 1) * start) + low.bitcast(Float32)
