"""O^T += V^T P^T over a packed page, on raw codes: P takes the scales, the zero-points become one sum a query row.

Centring: codes have one sign, while what they stand for cancels over tokens that weigh alike. With (ps)~ the rounded
operand and N = 2^b - 1, every page takes N/2 sum (ps)~ from O again, and z is sum p (m + N/2 s): the rounding of p s
meets c - N/2, and O stays as small as what it stands for, however many pages it sums up. (The tensor core truncates its
sums. Left in, the codes would add up to a thousand times of O at 128K tokens.)
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from lowbit_attn import layout, registers
from lowbit_attn.device import ptx
from lowbit_attn.hopper.register import load, numbers, softmax
from lowbit_attn.hopper.register.config import RegisterConfig
from lowbit_attn.hopper.register.load import Lane, Piece
from lowbit_attn.hopper.register.softmax import State


def page_exponent(cfg: RegisterConfig, piece: Piece, me: Lane, state: State) -> Int32:
    """E with this page."""
    if not cfg.options.exponents:
        return cutlass.min(state.exponent[0], Int32(registers.FIXED_VALUE_EXPONENT))
    largest = numbers.tree(load.all_token_meta(cfg, cfg.v, piece, me), ptx.max_u16x2)
    largest = numbers.over_lanes(largest, (*numbers.OVER_T, *numbers.OVER_G), ptx.max_u16x2)
    scale, _ = numbers.widen(largest & Uint32(numbers.LOW_HALF), cfg.v.storage)
    return cutlass.min(state.exponent[0], -numbers.ceil_log2(scale, registers.MIN_SCALE_LOG2))


def accumulate(cfg: RegisterConfig, piece: Piece, me: Lane, state: State, p: cute.Tensor, exponent: Int32) -> None:
    """p: fp32 accumulators of S^T, (4, token tile * col_blocks + block)."""
    side, blocks = cfg.v, cfg.col_blocks
    atom = numbers.multiply_atom()
    up = numbers.pow2(exponent + registers.PROBABILITY_SHIFT)
    softmax.add_sums(cfg, state, p)
    group_tiles = side.group // layout.TILE
    rounded_sums = [[Float32(0.0)] * side.groups for _ in range(2 * blocks)]
    for ct in range(side.col_tiles):
        if side.groups > 1:
            cute.arch.sync_warp()  # keeps the next tiles' loads, hence registers, behind this tile's multiplies
        first = ct * side.row_tiles
        words = load.codes(cfg, side, piece, me, first, side.row_tiles)
        for j in range(side.groups):
            operand = scaled_p(cfg, state, p, ct, j, up, rounded_sums, load.token_meta(cfg, side, piece, me, j, ct))
            for rt in range(j * group_tiles, (j + 1) * group_tiles):
                a = numbers.operand_a(load.operand(side, words, first + rt))
                for nt in range(blocks):
                    numbers.multiply(atom, state.acc_o, rt * blocks + nt, a, operand[None, nt])
    if cfg.options.centring:
        recentre(cfg, state, rounded_sums)


def recentre(cfg: RegisterConfig, state: State, rounded_sums: list) -> None:
    """O -= N/2 sum (ps)~ of a page, in the accumulators' units; rounded_sums: [column][group] this lane's share."""
    side = cfg.v
    for column, sums in enumerate(rounded_sums):
        totals = [numbers.over_lanes(total, numbers.OVER_G, numbers.add) for total in sums]
        for row, at in enumerate(softmax.places(state.acc_o, column, cfg.col_blocks)):
            rt, row8 = divmod(row, 2)
            half = Float32(-side.levels / 2 * 2.0 ** (side.power(rt, row8) - registers.SUBNORMAL_SHIFT))
            state.acc_o[at] = totals[layout.TILE * rt // side.group] * half + state.acc_o[at]


def scaled_p(cfg: RegisterConfig, state: State, p: cute.Tensor, tile: int, group: int, up: Float32,
             rounded_sums: list, words) -> cute.Tensor:
    """B operand (4, col_blocks) of a token tile: (ps)~ = fp16(p * s * up), transposed; z takes p (m + N/2 s).

    up: 2^(E + 15). With centring rounded_sums [column][group] take (ps)~.
    """
    blocks = cfg.col_blocks
    operand, operand_words = numbers.fragments(blocks)
    for row8, word in enumerate(words):
        scale, zero = numbers.widen(word, cfg.v.storage)
        if cfg.options.centring:
            zero = scale * Float32(cfg.v.levels / 2) + zero
        scale = scale * up
        for nt in range(blocks):
            pair = [p[2 * row8 + e, tile * blocks + nt] for e in (0, 1)]
            for e in (0, 1):
                column = 2 * nt + e
                state.zeros[column, group] = pair[e] * zero + state.zeros[column, group]
            packed = numbers.pack(pair[0] * scale, pair[1] * scale)
            if cfg.options.centring:
                for e, rounded in enumerate(numbers.widen(packed, "float16")):
                    rounded_sums[2 * nt + e][group] = rounded_sums[2 * nt + e][group] + rounded
            operand_words[row8, nt] = ptx.movmatrix(packed)
    return operand


def true_scale(cfg: RegisterConfig, state: State) -> None:
    """After the last packed page: O in its own units, zero-points added, z and the sums reduced over lanes.

    Two multiplies: 2^(9 - k - E) is not an fp32 number for every bf16 scale.
    """
    side, blocks = cfg.v, cfg.col_blocks
    down = numbers.pow2(-registers.PROBABILITY_SHIFT - state.exponent[0])
    for column in range(2 * blocks):
        z = [numbers.over_lanes(state.zeros[column, j], numbers.OVER_G, numbers.add) for j in range(side.groups)]
        for row, at in enumerate(softmax.places(state.acc_o, column, blocks)):
            rt, row8 = divmod(row, 2)
            up = Float32(2.0 ** (registers.SUBNORMAL_SHIFT - side.power(rt, row8)))
            state.acc_o[at] = state.acc_o[at] * up * down + z[layout.TILE * rt // side.group]
