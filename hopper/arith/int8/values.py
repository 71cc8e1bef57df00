"""O^T += V^T P^T over a packed page on the integer path: p s in two unsigned digits; O keeps its true scale."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from lowbit_attn import layout, registers
from lowbit_attn.device import ptx
from lowbit_attn.hopper.arith.int8 import multiply
from lowbit_attn.hopper.arith.int8.config import MAX_TILES, STEP_TILES
from lowbit_attn.hopper.common import numbers
from lowbit_attn.hopper.warp import fetch, softmax, unpack
from lowbit_attn.hopper.warp.config import WORD, SidePlan, WarpConfig
from lowbit_attn.hopper.warp.softmax import State
from lowbit_attn.hopper.warp.unpack import Lane, Piece

QUAD_BYTES = 16  # (scale, zero-point) of four tokens
SPAN = 32  # tokens over which a lane's four lie


def accumulate(cfg: WarpConfig, piece: Piece, me: Lane, state: State, p: cute.Tensor, ring: fetch.Ring,
               phase: Int32, is_single) -> None:
    """p: fp32 (4, token tile), elements 0 and 2: tokens g and g + 8 of the lane's row.

    is_single: of V, only the second half of the tokens and the metadata have come; ring, phase: to wait for the rest.
    """
    side = cfg.v
    softmax.add_sums(cfg, state, p)
    tiles = side.group // layout.TILE
    for j in range(side.groups):
        columns, down = probability_digits(cfg, piece, me, state, p, j)
        for first in range(j * tiles, (j + 1) * tiles, MAX_TILES):
            row_tiles = range(first, min(first + MAX_TILES, (j + 1) * tiles))
            is_first = True
            for run in reversed(side.runs):  # s32 sums of codes of one width, whose rows have the same powers
                acc = multiply.begin(row_tiles, False)
                steps = run_steps(run, columns)
                middle = side.early_tiles // STEP_TILES if is_first and cfg.has_halves else 0
                multiply.add(cfg, acc, piece, me, steps[middle:], row_tiles, False)
                if is_first:
                    fetch.wait_half(cfg, ring, piece.slot, phase, is_single)
                is_first = False
                multiply.add(cfg, acc, piece, me, steps[:middle], row_tiles, False)
                add_run(state, run, multiply.found_in(acc, False), row_tiles, down)


def run_steps(run: SidePlan, columns: list) -> list[multiply.Step]:
    """The multiplies of a run of tokens; columns: the digits of the page's column tiles, of which it has the first if
    it has more bits, else the last."""
    own = columns[: run.col_tiles] if run.codes_offset == 0 else columns[-run.col_tiles :]
    return [multiply.Step(run, i, own[STEP_TILES * i : STEP_TILES * (i + 1)])
            for i in range(-(-run.col_tiles // STEP_TILES))]


def add_run(state: State, run: SidePlan, found: list, row_tiles: range, down: Float32) -> None:
    """The sums of a run of tokens to O."""
    for rt, pair in zip(row_tiles, found):
        for row8, value in enumerate(pair):
            at = 2 * row8, rt
            state.acc_o[at] = value * (down * Float32(2.0 ** -run.power(rt, row8))) + state.acc_o[at]


def probability_digits(cfg: WarpConfig, piece: Piece, me: Lane, state: State, p: cute.Tensor,
                       group: int) -> tuple[list, Float32]:
    """([column tile] register of a B operand, 2^-a) of a channel group; z takes p times the zero-points."""
    pairs = token_pairs(cfg, piece, me, group)
    total, products = state.zeros[0, group], []
    for i, (scale, zero) in enumerate(pairs):
        probability = p[2 * (i % 2), i // 2]
        total = probability * zero + total
        products.append(probability * scale)
    state.zeros[0, group] = total
    largest = numbers.over_lanes(numbers.tree(list(products), cute.arch.fmax), numbers.OVER_G, cute.arch.fmax)
    a = multiply.exponent(largest, registers.UNSIGNED_GUARD, registers.UNSIGNED_TOP)
    up = numbers.pow2(a)
    words = [(x * up + Float32(registers.UNSIGNED_START)).bitcast(Uint32) for x in products]
    # both tokens' digits in halves, one a column: their transpose has two tokens of one column
    columns = [ptx.movmatrix(ptx.permute(*words[i : i + 2], multiply.DIGITS_OF_TWO)) for i in range(0, len(words), 2)]
    return columns, multiply.down(largest, a)


def token_pairs(cfg: WarpConfig, piece: Piece, me: Lane, group: int) -> list[tuple[Float32, Float32]]:
    """(scale, zero-point) of tokens g, g + 8, g + 16, ... of the page."""
    side, count = cfg.v, (cfg.v.part_bytes - cfg.v.meta_offset) // QUAD_BYTES
    view = unpack.part_view(cfg, piece, side.meta_offset, QUAD_BYTES // WORD, count)
    quads = [unpack.read(view, quad_access(group, first, Int32(me.g))) for first in range(0, layout.PAGE_TOKENS, SPAN)]
    return [numbers.widen(word, side.storage) for quad in quads for word in quad]


def quad_access(group: int, first: int, g):
    """Index of the 16 bytes with the pairs of tokens first + g, first + g + 8, + 16, + 24; first: a multiple of 32."""
    lanes_apart = layout.token_meta_offset(0, 0, 1) // QUAD_BYTES
    return layout.token_meta_offset(group, 0, first) // QUAD_BYTES + g * lanes_apart
