"""Scores of a packed page on the integer path: q s in two signed digits, the zero-points as one fp32 sum a query row.

A lane of row t reads its logits from columns 2t and 2t + 1, one a digit. Making the operand, lane 4g + t works for
column g: query row g // 2, digit g % 2. The two lanes of a row share its products: lane parity p = g % 2 takes column
tile 2i + p of each step i, then gives the other lane that lane's digit of it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from lowbit_attn import layout, registers
from lowbit_attn.device import ptx
from lowbit_attn.hopper.arith.int8 import boost, multiply
from lowbit_attn.hopper.arith.int8.config import STEP_TILES
from lowbit_attn.hopper.arith.int8.multiply import Step
from lowbit_attn.hopper.common import numbers
from lowbit_attn.hopper.warp import unpack
from lowbit_attn.hopper.warp.config import ROW_TILES, WARP, SidePlan, WarpConfig
from lowbit_attn.hopper.warp.query import Query
from lowbit_attn.hopper.warp.softmax import Scores
from lowbit_attn.hopper.warp.unpack import Lane, Piece

OVER_ROW = (*numbers.OVER_T, 4)  # lane distances of the eight lanes that share a query row
SIGN_FLIPS = 0x8080_0000  # low + 128 as a byte, its highest bit flipped, is low; of the two low digits of a pair
LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632  # selectors


@cute.jit
def prepare(cfg: cutlass.Constexpr[WarpConfig], words: cute.Tensor, scale_log2: Float32, me: Lane,
            shared: cute.Pointer, channels: cute.Pointer) -> Query:
    """q * softmax_scale_log2 to shared memory, by the last warp; with boosted channels, to ``channels`` too. A barrier
    of the CTA follows.

    Operand: fp32 (4, lane, step) in the order of a word.
    """
    view = shared_view(cfg, shared)
    if me.warp == cfg.warps - 1:
        store_query(cfg, words, scale_log2, me, view, channels)
    return Query(view, (), channels)


def shared_view(cfg: WarpConfig, shared: cute.Pointer) -> cute.Tensor:
    """(word byte, lane, step), fp32."""
    return cute.make_tensor(cute.recast_ptr(shared, dtype=Float32), cute.make_layout(
        (layout.WORD_BYTES, WARP, cfg.k.col_tiles // STEP_TILES),
        stride=(1, layout.WORD_BYTES, layout.WORD_BYTES * WARP)))


def store_query(cfg: WarpConfig, words: cute.Tensor, scale_log2: Float32, me: Lane, view: cute.Tensor,
          channels: cute.Pointer) -> None:
    """``prepare``'s part of one warp."""
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
            boost.store_channels(cfg, own, step, me, channels)


def of_page(cfg: WarpConfig, piece: Piece, me: Lane, queries: Query, tile: Uint32 | None = None) -> Scores:
    """S of the page whose K part is ``piece``: elements 0 and 2 of each row tile.

    tile: of one of its row tiles alone, chosen at run time, as row tile 0.
    """
    side, count = cfg.k, ROW_TILES if tile is None else 1
    acc = cute.make_rmem_tensor((4, count), Float32)
    tiles = side.group // layout.TILE
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
        part = multiply.sums(cfg, piece, me, [steps[i] for i in run], row_tiles, True, tile)
        total = part if total is None else [[x + y for x, y in zip(*pairs)] for pairs in zip(total, part)]
    return total


def query_steps(cfg: WarpConfig, piece: Piece, me: Lane, queries: Query,
                group) -> tuple[list[Step], Float32, Float32]:
    """(multiplies of all channels, then of boosted ones; slope, offset) of a token group; the last two of row t."""
    steps = range(cfg.k.col_tiles // STEP_TILES)
    scales, zeros = ([own_metadata(cfg, piece, me, group, is_zero, step) for step in steps] for is_zero in (0, 1))
    rows = [unpack.read(queries.operand[None, None, step], Int32(me.lane)) for step in steps]
    products = [[x * scale for x, scale in zip(rows[step], scales[step])] for step in steps]
    sides = [(cfg.k, step) for step in steps]
    if cfg.boost:
        boosted = boost.products(cfg, piece, me, queries.channels)
        products += boosted
        sides += [(cfg.boost.high, i) for i in range(len(boosted))]
    largest = numbers.tree([cute.math.absf(x) for step in products for x in step], cute.arch.fmax)
    largest = numbers.over_lanes(largest, OVER_ROW, cute.arch.fmax)
    up = numbers.pow2(fixed_point(largest))
    found = [Step(*place, operand(me, [x * up + Float32(registers.SIGNED_START + registers.HALF_DIGIT) for x in own]))
             for place, own in zip(sides, products)]
    bias = Float32(0.0)
    for step in steps:
        for i in range(layout.WORD_BYTES):
            bias = rows[step][i] * zeros[step][i] + bias
    bias = numbers.over_lanes(bias, OVER_ROW, numbers.add)
    largest, offset = (cute.arch.shuffle_sync(x, Int32(8 * me.t)) for x in (largest, bias))  # row t has lane 4 * 2t
    return found, multiply.down(largest, fixed_point(largest)), offset


def fixed_point(largest: Float32) -> Int32:
    return multiply.exponent(largest, registers.SIGNED_GUARD, registers.SIGNED_TOP)


def own_metadata(cfg: WarpConfig, piece: Piece, me: Lane, group, is_zero: int, step: int) -> list[Float32]:
    """Scales or zero-points of the lane's column tile of a step, in the order of a word's bytes."""
    side = cfg.k
    at = own_access(side, group, is_zero, step, Int32(me.g), Int32(me.t))
    words = unpack.read(unpack.meta_view(cfg, side, piece), at)
    halves = [numbers.widen(word, side.storage) for word in words]
    return [halves[i % 2][i // 2] for i in range(layout.WORD_BYTES)]  # byte i: word col8 = i % 2, half e = i // 2


def own_access(side: SidePlan, group, is_zero: int, step: int, g, t):
    """Index of the 8 bytes with the metadata of column tile 2 * step + g % 2: words col8 = 0 and 1."""
    return side.channel_access(group, is_zero, STEP_TILES * step, t) + g % 2 * side.channel_access(0, 0, 1, 0)


def operand(me: Lane, values: list[Float32]) -> list[Uint32]:
    """B operand of a step from the lane's share of its products, as start + 128 + X."""
    words = [x.bitcast(Uint32) for x in values]
    pairs = [ptx.permute(*words[i : i + 2], multiply.DIGITS_OF_TWO) ^ Uint32(SIGN_FLIPS)
             for i in range(0, len(words), 2)]
    return boost.joined(me, *pairs) if len(pairs) == 1 else exchanged(me, pairs)


def exchanged(me: Lane, pairs: list[Uint32]) -> list[Uint32]:
    """The two registers from the digits of the four products of the lane's column tile."""
    is_odd = me.g % 2 != 0
    mine, theirs = (LOW_HALVES, HIGH_HALVES), (HIGH_HALVES, LOW_HALVES)
    own, other = (ptx.permute(*pairs, Uint32(cutlass.select_(is_odd, Uint32(odd), Uint32(even))))
                  for even, odd in (mine, theirs))
    got = cute.arch.shuffle_sync_bfly(other, offset=4)
    return [Uint32(cutlass.select_(is_odd, *pair)) for pair in ((got, own), (own, got))]
