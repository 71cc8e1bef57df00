"""Scores of a packed page, S^T = K Q^T, on raw codes: scale and zero-point stay outside of the multiply.

A base-2 logit is slope * 2^-k * S + offset, where k is the power of two that a row's place in its word leaves in the
codes (``registers.row_power``).
"""


import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from lowbit_attn import layout, registers, subnormals
from lowbit_attn.device import numbers, ptx
from lowbit_attn.hopper.arith.fp16 import boost, operands
from lowbit_attn.hopper.arith.fp16.config import chunk_tiles, loops_over_groups
from lowbit_attn.hopper.arith.fp16.query import query_operand
from lowbit_attn.hopper.warp import fetch
from lowbit_attn.hopper.warp.config import ROW_TILES, WarpConfig
from lowbit_attn.hopper.warp.fetch import Lane, Piece, Query
from lowbit_attn.hopper.warp.softmax import Scores

POST_SHIFT = subnormals.SUBNORMAL_SHIFT - subnormals.SCALE_SHIFT  # 24 of the codes less what s brought
MAX_POW2 = 127  # bf16 scales beyond 2^105 would ask for more


def of_page(cfg: WarpConfig, piece: Piece, me: Lane, query: Query, tile: Uint32 | None = None) -> Scores:
    """S of the page whose K part is ``piece``; tile: of one of its row tiles alone, chosen at run time."""
    return (per_token if cfg.k.is_per_token else per_channel)(cfg, piece, me, query, tile)


def per_channel(cfg: WarpConfig, piece: Piece, me: Lane, query: Query, tile: Uint32 | None) -> Scores:
    """K grouped per channel over runs of tokens: Q takes the scales, the zero-points become one bias a query row.

    Boosted channels (one group of tokens) add the rest of their codes: boost.py.
    """
    side, blocks = cfg.k, cfg.col_blocks
    atom = numbers.multiply_atom()
    groups, own = (side.groups, me.g % side.groups) if tile is None else (1, tile // (side.group_size // layout.TILE))
    scales = [operands.channel_meta(cfg, side, piece, me, own, 0, ct) for ct in range(side.col_tiles)]
    own_e_s = scale_exponent(cfg, piece, me, scales, groups, own)
    bias, zero_down = bias_accumulators(cfg, piece, me, query, scales, own_e_s, own)
    e_s = [own_e_s if groups == 1 else cute.arch.shuffle_sync(own_e_s, subnormals.bias_lane(j, 0, groups))
           for j in range(groups)]

    row_tiles = ROW_TILES if tile is None else 1
    acc, ones = (cute.make_rmem_tensor((4, n * blocks), Float32) for n in (row_tiles, 1))
    acc.fill(0.0)
    ones.fill(0.0)
    ups = [scale_up(side.storage, e) for e in e_s]
    for ct in range(side.col_tiles):
        if groups > 1:
            fetch.fence()  # between this tile's multiplies and the next tiles' loads
        words = operands.column_codes(cfg, side, piece, me, ct, tile)
        scaled, scaled_words = numbers.fragments(groups * blocks)
        _, query_words = query_operand(cfg, query, me, ct)
        for j in range(groups):
            pair = scales[ct] if groups == 1 else operands.channel_meta(cfg, side, piece, me, j, 0, ct)
            for col8 in (0, 1):
                times = ups[j](pair[col8])
                for nt in range(blocks):
                    scaled_words[col8, j * blocks + nt] = times(query_words[col8, nt])
            # rows of group j only: lane 4g + t then sums its own group g % groups
            one = Uint32(operands.ONES) * Uint32(own == j) if groups > 1 else Uint32(operands.ONES)
            a = numbers.operand_a([one] * 4)
            for nt in range(blocks):
                numbers.multiply(atom, ones, nt, a, scaled[None, j * blocks + nt])
        for rt in range(row_tiles):
            a = numbers.operand_a(operands.codes_operand(side, words, ct * ROW_TILES + rt))
            for nt in range(blocks):
                b = scaled[None, layout.TILE * rt // side.group_size * blocks + nt]
                numbers.multiply(atom, acc, rt * blocks + nt, a, b)
    if cfg.boost:
        boost.add(cfg, piece, me, query.channels, ups[0], own_e_s, boost.PageSums(acc, ones, bias), tile)
    own_offset = own_offsets(cfg, query, bias, ones, own_e_s, zero_down)
    kinds = tuple((layout.TILE * (i // 2) // side.group_size, side.power(i // 2, i % 2)) for i in range(2 * row_tiles))
    posts = [numbers.pow2(cutlass.min(POST_SHIFT - e, Int32(MAX_POW2))) for e in e_s]
    slopes = [[f * post for f in query.factor] for post in posts]
    if groups == 1:
        return Scores(acc, tuple(k for _, k in kinds), tuple(slopes[0]), tuple(own_offset))
    to_logits(cfg, me, acc, kinds, slopes, own_offset)
    return Scores(acc, (0,) * len(kinds), None, None)


def to_logits(cfg: WarpConfig, me: Lane, acc: cute.Tensor, kinds: tuple, slopes: list, own_offset: list) -> None:
    """Several token groups: S becomes logits group by group, so that not all their slopes and offsets stay live."""
    for column, own in enumerate(own_offset):
        nt, e = divmod(column, 2)
        for j, slope in enumerate(slopes):
            offset = cute.arch.shuffle_sync(own, Int32(subnormals.bias_lane(j, me.lane, cfg.k.groups)))
            for row in (row for row, (group, _) in enumerate(kinds) if group == j):
                at = (2 * (row % 2) + e, row // 2 * cfg.col_blocks + nt)
                acc[at] = acc[at] * (slope[column] * Float32(2.0 ** -kinds[row][1])) + offset


def scale_exponent(cfg: WarpConfig, piece: Piece, me: Lane, scales: list, groups: int, own) -> Int32:
    """e_s of the lane's token group ``own``; of one group for all lanes, each looks at its share of the scales."""
    if groups == 1:
        largest = numbers.tree(operands.all_scales(cfg, cfg.k, piece, me, own), ptx.max_u16x2)
        largest = operands.warp_max_half(ptx.max_u16x2(largest, largest >> Uint32(16)), cfg.k.storage)
    else:
        largest = numbers.tree([w for pair in scales for w in pair], ptx.max_u16x2)
        largest = numbers.max_half(numbers.over_lanes(largest, numbers.OVER_T, ptx.max_u16x2), cfg.k.storage)
    at_least = operands.MIN_FP16_SCALE_LOG2 if cfg.k.storage == "float16" else registers.MIN_SCALE_LOG2
    return -numbers.ceil_log2(largest, at_least)


def zero_exponent(cfg: WarpConfig, zeros: list) -> Int32:
    """e_m of the lane's token group, bf16 zero-points only."""
    largest = numbers.tree([w & Uint32(operands.NO_SIGNS) for pair in zeros for w in pair], ptx.max_u16x2)
    largest = numbers.max_half(numbers.over_lanes(largest, numbers.OVER_T, ptx.max_u16x2), cfg.k.storage)
    return subnormals.ZERO_SHIFT - numbers.ceil_log2(largest, registers.MIN_SCALE_LOG2)


def scale_up(storage: str, e_s: Int32):
    """The function from a word of two scales to that from a word of q' to fp16(q' s * 2^(e_s + 2)).

    fp16 scales take an exact multiply by a power of two; bf16 ones reach far below their largest, so their product
    with q' is rounded once, from fp32.
    """
    up = numbers.pow2(e_s + subnormals.SCALE_SHIFT)
    if storage == "bfloat16":
        def times(word: Uint32):
            scales = [half * up for half in numbers.widen(word, storage)]
            return lambda q: numbers.pack(*(x * s for x, s in zip(numbers.widen(q, "float16"), scales)))
        return times
    factor = numbers.pack(up, up)

    def times_exact(word: Uint32):
        scale = ptx.mul_f16x2(word, factor)
        return lambda q: ptx.mul_f16x2(q, scale)
    return times_exact


def bias_accumulators(cfg: WarpConfig, piece: Piece, me: Lane, query: Query, scales: list, own_e_s: Int32, own):
    """One multiply a column tile brings sum q' m (elements 0, 1) and sum q' s (2, 3) of token group g % groups.

    Returns the accumulators and 2^-e_m (None: fp16 metadata enter as stored).
    """
    side, blocks = cfg.k, cfg.col_blocks
    atom = numbers.multiply_atom()
    zeros = [operands.channel_meta(cfg, side, piece, me, own, 1, ct) for ct in range(side.col_tiles)]
    zero_down = None
    if side.storage == "bfloat16":
        e_m = zero_exponent(cfg, zeros)
        zero_down = numbers.pow2(-e_m)
        zeros = [[operands.rounded(w, side.storage, numbers.pow2(e_m)) for w in pair] for pair in zeros]
        scale_up_own = numbers.pow2(own_e_s + subnormals.CENTRE_SHIFT)
        scales = [[operands.rounded(w, side.storage, scale_up_own) for w in pair] for pair in scales]
    acc = cute.make_rmem_tensor((4, blocks), Float32)
    acc.fill(0.0)
    for ct in range(side.col_tiles):
        (m0, m1), (s0, s1) = zeros[ct], scales[ct]
        a = numbers.operand_a([m0, s0, m1, s1])
        b, _ = query_operand(cfg, query, me, ct)
        for nt in range(blocks):
            numbers.multiply(atom, acc, nt, a, b[None, nt])
    return acc, zero_down


def own_offsets(cfg: WarpConfig, query: Query, bias: cute.Tensor, ones: cute.Tensor, own_e_s: Int32,
                zero_down) -> list[Float32]:
    """[column]: the part of the logits that all tokens of token group g % groups share."""
    side = cfg.k
    own = []
    for column, factor in enumerate(query.factor):
        nt, e = divmod(column, 2)
        total = bias[e, nt] if zero_down is None else bias[e, nt] * zero_down
        sums = bias[2 + e, nt]
        if zero_down is not None:
            sums = sums * numbers.pow2(-(own_e_s + subnormals.CENTRE_SHIFT))
        rounding = sums - ones[e, nt] * numbers.pow2(-(own_e_s + subnormals.SCALE_SHIFT))
        total = total + rounding * Float32(side.steps / 2)
        own.append(total * factor)
    return own


def per_token(cfg: WarpConfig, piece: Piece, me: Lane, query: Query, tile: Uint32 | None) -> Scores:
    """K grouped per token over runs of channels: each group's product takes its token's scale and zero-point.

    S is in units of 2^24, so that no bf16 scale overflows.
    """
    row_tiles = ROW_TILES if tile is None else 1
    acc = cute.make_rmem_tensor((4, row_tiles * cfg.col_blocks), Float32)
    acc.fill(0.0)
    add_groups(cfg, piece, me, query, acc, tile)
    up = Float32(2.0**subnormals.SUBNORMAL_SHIFT)
    return Scores(acc, (0,) * (2 * row_tiles), tuple(f * up for f in query.factor), None)


@cute.jit
def add_groups(cfg: cutlass.Constexpr[WarpConfig], piece: Piece, me: Lane, query: Query, acc: cute.Tensor,
               tile: Uint32 | None):
    """All channel groups; a loop at run time where ptxas would otherwise hold two groups' registers at once."""
    if cutlass.const_expr(loops_over_groups(cfg)):
        for j in cutlass.range(cfg.k.groups, unroll=1):
            add_group(cfg, piece, me, query, acc, j, tile)
    else:
        for j in cutlass.range_constexpr(cfg.k.groups):
            add_group(cfg, piece, me, query, acc, j, tile)


def add_group(cfg: WarpConfig, piece: Piece, me: Lane, query: Query, acc: cute.Tensor, j, tile) -> None:
    """acc += scale * S + zero-point * sum of q' of channel group ``j``, an int or Int32."""
    side, blocks = cfg.k, cfg.col_blocks
    row_tiles, chunk = (ROW_TILES, chunk_tiles(cfg)) if tile is None else (1, 1)
    atom = numbers.multiply_atom()
    tiles = side.group_size // layout.TILE
    group_blocks = side.words_of(tiles * ROW_TILES) // layout.BLOCK_WORDS
    sums = [x * Float32(2.0**-subnormals.SUBNORMAL_SHIFT) for x in query_sums(cfg, me, query, j)]
    for first in range(0, row_tiles, chunk):
        if chunk < row_tiles:
            fetch.fence()  # between this chunk's multiplies and the next chunk's loads
        part = cute.make_rmem_tensor((4, chunk * blocks), Float32)
        part.fill(0.0)
        for i_ct in range(tiles):
            start = i_ct * ROW_TILES + first
            words = (fetch.codes(cfg, side, piece, me, start, chunk, j * group_blocks) if tile is None else
                     cfg.mixed_steps.tile_codes(cfg, side, piece, me, start, tile, j * group_blocks))
            b, _ = query_operand(cfg, query, me, j * tiles + i_ct)
            for i in range(chunk):
                a = numbers.operand_a(operands.codes_operand(side, words, start + i))
                for nt in range(blocks):
                    numbers.multiply(atom, part, i * blocks + nt, a, b[None, nt])
        for rt, row8, scale, zero in token_pairs(cfg, piece, me, j, range(first, first + chunk), tile):
            scale = scale * Float32(2.0**-side.power(rt, row8))
            for column, total in enumerate(sums):
                place, nt = 2 * row8 + column % 2, column // 2
                at = place, rt * blocks + nt
                acc[at] = part[place, (rt - first) * blocks + nt] * scale + (zero * total + acc[at])


def token_pairs(cfg: WarpConfig, piece: Piece, me: Lane, group, row_tiles: range, tile: Uint32 | None):
    """(row tile, row8, scale, zero-point) of this lane's tokens; those of ``tile`` as row tile 0."""
    for rt in row_tiles:
        for row8, word in enumerate(operands.token_meta(cfg, cfg.k, piece, me, group, rt if tile is None else tile)):
            yield rt, row8, *numbers.widen(word, cfg.k.storage)


def query_sums(cfg: WarpConfig, me: Lane, query: Query, group) -> list[Float32]:
    """[column] sum of q' over a channel group, by a multiply with ones: registers that only a page's fold holds."""
    blocks, tiles = cfg.col_blocks, cfg.k.group_size // layout.TILE
    acc = cute.make_rmem_tensor((4, blocks), Float32)
    acc.fill(0.0)
    ones = numbers.operand_a([Uint32(operands.ONES)] * 4)
    for ct in range(tiles):
        b, _ = query_operand(cfg, query, me, group * tiles + ct)
        for nt in range(blocks):
            numbers.multiply(numbers.multiply_atom(), acc, nt, ones, b[None, nt])
    return [acc[column % 2, column // 2] for column in range(2 * blocks)]
