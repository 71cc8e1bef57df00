"""Query rows as the B operand: as given (16-bit segments) and as q' = q * 2^(e_q + 11) in fp16 (packed pages)."""


import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from lowbit_attn import registers, subnormals
from lowbit_attn.device import numbers, ptx
from lowbit_attn.hopper.arith.fp16 import boost, operands
from lowbit_attn.hopper.warp.config import WARP, WarpConfig
from lowbit_attn.hopper.warp.fetch import Lane, Query, read


@cute.jit
def prepare(cfg: cutlass.Constexpr[WarpConfig], words: cute.Tensor, scale_log2: Float32, me: Lane,
            shared: cute.Pointer, channels: cute.Pointer) -> Query:
    """Choose e_q of each row, round q' and bring each row's factor to its accumulator column.

    Where registers are short q' goes to ``shared`` (all warps need the same), where it costs no registers; with boosted
    channels, to ``channels`` too. A barrier of the CTA follows.
    """
    operand, factors = round_rows(cfg, words, scale_log2, me)
    if cutlass.const_expr(cfg.boost is not None):
        if me.warp == 0:
            boost.store_channels(cfg, cute.recast_tensor(operand, Uint32), me, channels)
    if cutlass.const_expr(cfg.query_bytes > 0):
        view = shared_view(cfg, shared)
        if me.warp == 0:
            flat = cute.recast_tensor(operand, Uint32)
            for col_tile in cutlass.range_constexpr(cfg.k.col_tiles):
                pair = cute.make_rmem_tensor((2, cfg.col_blocks), Uint32)
                for block in cutlass.range_constexpr(cfg.col_blocks):
                    for col8 in cutlass.range_constexpr(2):
                        pair[col8, block] = flat[col8, col_tile * cfg.col_blocks + block]
                cute.autovec_copy(cute.coalesce(pair), view[None, Int32(me.lane), col_tile])
        operand = view
    return Query(operand, tuple(factors), channels)


def shared_view(cfg: WarpConfig, shared: cute.Pointer) -> cute.Tensor:
    """(words of a lane: col8, then block; lane; column tile)."""
    count = 2 * cfg.col_blocks
    return cute.make_tensor(shared, cute.make_layout((count, WARP, cfg.k.col_tiles), stride=(1, count, count * WARP)))


def query_operand(cfg: WarpConfig, query: Query, me: Lane, col_tile: int) -> tuple[cute.Tensor, cute.Tensor]:
    """q' of one column tile as B operand: (fp16 (4, block), words (2, block))."""
    operand, words = numbers.fragments(cfg.col_blocks)
    if cfg.query_bytes:
        found = read(query.operand[None, None, col_tile], Int32(me.lane))
    else:
        flat = cute.recast_tensor(query.operand, Uint32)
        found = [flat[col8, col_tile * cfg.col_blocks + block] for block in range(cfg.col_blocks) for col8 in (0, 1)]
    for i, word in enumerate(found):
        words[i % 2, i // 2] = word
    return operand, words


def round_rows(cfg: WarpConfig, words: cute.Tensor, scale_log2: Float32, me: Lane) -> tuple[cute.Tensor, list]:
    """(q' in registers, [column] factor)."""
    operand, operand_words = numbers.fragments(cfg.k.col_tiles * cfg.col_blocks)
    factors = []
    for block in range(cfg.col_blocks):
        at = [(col8, col_tile * cfg.col_blocks + block) for col_tile in range(cfg.k.col_tiles) for col8 in (0, 1)]
        exponent = row_exponent(cfg, [words[i] for i in at]) + subnormals.QUERY_OWN_SHIFT
        up = numbers.pow2(exponent)
        for i in at:
            low, high = numbers.widen(words[i], cfg.dtype)
            operand_words[i] = numbers.pack(low * up, high * up)
        factors += to_columns(scale_log2 * numbers.pow2(-exponent), me)
    return operand, factors


def row_exponent(cfg: WarpConfig, words: list) -> Int32:
    """e_q of the lane's query row g."""
    largest = numbers.tree([word & Uint32(operands.NO_SIGNS) for word in words], ptx.max_u16x2)
    amax = numbers.max_half(numbers.over_lanes(largest, numbers.OVER_T, ptx.max_u16x2), cfg.dtype)
    clamped = cute.arch.fmax(amax, Float32(2.0**subnormals.MIN_QUERY_LOG2))
    return Int32(-registers.floor_log2(clamped.bitcast(Int32))) * Int32(amax != 0.0)


def to_columns(x: Float32, me: Lane) -> list[Float32]:
    """From query row g of the lanes of g to columns 2t, 2t + 1 of an accumulator."""
    return [cute.arch.shuffle_sync(x, Int32(4 * (2 * me.t + e))) for e in (0, 1)]
