"""O^T += V^T P^T over a packed page, on raw codes: P takes the scales, the zero-points become one sum a query row.

Centring: codes have one sign, while what they stand for cancels over tokens that weigh alike. With (ps)~ the rounded
operand and N = 2^b - 1, every few pages N/2 sum (ps)~ is taken from O again, and z is sum p (m + N/2 s): the rounding
of p s meets c - N/2, and O stays nearly as small as what it stands for, however many pages it sums up. (The tensor core
truncates its sums. Left in, the codes would add up to a thousand times of O at 128K tokens.)
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from lowbit_attn import layout, registers, subnormals
from lowbit_attn.device import numbers, ptx
from lowbit_attn.hopper.arith.fp16 import boosted_values, operands
from lowbit_attn.hopper.warp import fetch, softmax
from lowbit_attn.hopper.warp.config import WarpConfig
from lowbit_attn.hopper.warp.fetch import Lane, Piece
from lowbit_attn.hopper.warp.softmax import State


def largest_scale(cfg: WarpConfig, piece: Piece, me: Lane) -> Float32:
    """The largest scale of this lane's share of the page's tokens."""
    largest = numbers.tree(operands.all_token_meta(cfg, cfg.v, piece, me), ptx.max_u16x2)
    return numbers.widen(largest & Uint32(operands.LOW_HALF), cfg.v.storage)[0]


@cute.jit
def rescale(cfg: cutlass.Constexpr[WarpConfig], state: State, new_max: tuple, scale: Float32):
    """Bring O, z and the sums to new maxima and to E with a page's V, if either moves in any lane of the warp.

    scale: V's largest of this lane's share of the page.
    """
    moved = Int32(scale > numbers.pow2(-state.exponent[0]))
    for column in cutlass.range_constexpr(cfg.lane_rows):
        moved = moved | Int32(new_max[column] > state.row_max[column])
    if cute.arch.vote_any_sync(moved != 0):
        own = -numbers.ceil_log2(numbers.warp_max(scale), registers.MIN_SCALE_LOG2)
        exponent = cutlass.min(state.exponent[0], own)
        down = numbers.pow2(cutlass.max(exponent - state.exponent[0], Int32(-126)))
        for column in cutlass.range_constexpr(cfg.lane_rows):
            alpha = softmax.raise_max(state, column, new_max[column])
            factor = alpha * down
            for group in cutlass.range_constexpr(cfg.v.groups):
                state.zeros[column, group] = state.zeros[column, group] * alpha
            softmax.scale_column(cfg, state.acc_o, column, factor)
            if cutlass.const_expr(cfg.arithmetic.recentred_pages(cfg) > 1):
                softmax.scale_column(cfg, state.rounded, column, factor)
        state.exponent[0] = exponent


def accumulate(cfg: WarpConfig, piece: Piece, me: Lane, state: State, p: cute.Tensor, page: Int32) -> None:
    """p: fp32 accumulators of S^T, (4, token tile * col_blocks + block); page: its number among the warp's."""
    side, blocks = cfg.v, cfg.col_blocks
    atom = numbers.multiply_atom()
    up = numbers.pow2(state.exponent[0] + subnormals.PROBABILITY_SHIFT)
    softmax.add_sums(cfg, state, p)
    group_tiles = side.group_size // layout.TILE
    for ct, (run, own) in enumerate((run, own) for run in side.runs for own in range(run.col_tiles)):
        if side.groups > 1:
            fetch.fence()  # between this tile's multiplies and the next tiles' loads
        words = fetch.codes(cfg, run, piece, me, own * side.row_tiles, side.row_tiles)
        for j in range(side.groups):
            operand = scaled_p(cfg, state, p, ct, j, up, operands.token_meta(cfg, side, piece, me, j, ct), run.steps)
            ones = numbers.operand_a([Uint32(boosted_values.weight(side, run) * (side.groups == 1 or row8 == j % 2))
                                      for row8 in (0, 1, 0, 1)])
            for nt in range(blocks):
                numbers.multiply(atom, state.rounded, j // 2 * blocks + nt, ones, operand[None, nt])
            for rt in range(j * group_tiles, (j + 1) * group_tiles):
                a = numbers.operand_a(boosted_values.operand(side, run, words, own, rt))
                for nt in range(blocks):
                    numbers.multiply(atom, state.acc_o, rt * blocks + nt, a, operand[None, nt])
    recentre_if_due(cfg, state, page)


@cute.jit
def recentre_if_due(cfg: cutlass.Constexpr[WarpConfig], state: State, page: Int32):
    """``recentre`` behind every ``recentred_pages`` pages."""
    if (page + 1) % cfg.arithmetic.recentred_pages(cfg) == 0:
        recentre(cfg, state)


def recentre(cfg: WarpConfig, state: State) -> None:
    """O -= N/2 sum (ps)~ of the pages since the last time, in the accumulators' units."""
    side, blocks = cfg.v, cfg.col_blocks
    for column in range(2 * blocks):
        for row, at in enumerate(softmax.places(state.acc_o, column, blocks)):
            rt, row8 = divmod(row, 2)
            half = Float32(-side.steps / 2 * 2.0 ** (side.power(rt, row8) - subnormals.SUBNORMAL_SHIFT))
            group = layout.TILE * rt // side.group_size
            total = state.rounded[2 * (group % 2) + column % 2, group // 2 * blocks + column // 2]
            state.acc_o[at] = total * half + state.acc_o[at]
    state.rounded.fill(0.0)


def scaled_p(cfg: WarpConfig, state: State, p: cute.Tensor, tile: int, group: int, up: Float32,
             words, steps: int) -> cute.Tensor:
    """B operand (4, col_blocks) of a token tile: (ps)~ = fp16(p * s * up), transposed; z takes p (m + N/2 s).

    up: 2^(E + 15); steps: N.
    """
    blocks = cfg.col_blocks
    operand, operand_words = numbers.fragments(blocks)
    for row8, word in enumerate(words):
        scale, zero = numbers.widen(word, cfg.v.storage)
        zero = scale * Float32(steps / 2) + zero
        scale = scale * up
        for nt in range(blocks):
            pair = [p[2 * row8 + e, tile * blocks + nt] for e in (0, 1)]
            for e in (0, 1):
                column = 2 * nt + e
                state.zeros[column, group] = pair[e] * zero + state.zeros[column, group]
            operand_words[row8, nt] = ptx.movmatrix(numbers.pack(pair[0] * scale, pair[1] * scale))
    return operand


def true_scale(cfg: WarpConfig, state: State) -> None:
    """After the last packed page: O in its own units, zero-points added, z and the sums reduced over lanes.

    Two multiplies: 2^(9 - k - E) is not an fp32 number for every bf16 scale.
    """
    side, blocks = cfg.v, cfg.col_blocks
    recentre(cfg, state)
    down = numbers.pow2(-subnormals.PROBABILITY_SHIFT - state.exponent[0])
    for column in range(2 * blocks):
        z = [numbers.over_lanes(state.zeros[column, j], numbers.OVER_G, numbers.add) for j in range(side.groups)]
        for row, at in enumerate(softmax.places(state.acc_o, column, blocks)):
            rt, row8 = divmod(row, 2)
            up = Float32(2.0 ** (subnormals.SUBNORMAL_SHIFT - side.power(rt, row8)))
            state.acc_o[at] = state.acc_o[at] * up * down + z[layout.TILE * rt // side.group_size]
