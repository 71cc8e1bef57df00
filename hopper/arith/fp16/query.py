"""Query rows as the B operand: as given (16-bit segments) and as q' = q * 2^(e_q + 11) in fp16 (packed pages)."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from lowbit_attn import layout, registers
from lowbit_attn.device import ptx
from lowbit_attn.hopper.arith.fp16 import boost
from lowbit_attn.hopper.common import numbers
from lowbit_attn.hopper.common.rows import Rows, place
from lowbit_attn.hopper.common.scratch import LINE_WORDS
from lowbit_attn.hopper.warp.config import COLUMNS, WARP, WORD, RegisterConfig
from lowbit_attn.hopper.warp.load import Lane, read

LINE_BYTES = LINE_WORDS * WORD


class Query(NamedTuple):
    """q' and what turns accumulators into base-2 logits."""

    operand: cute.Tensor  # in registers: fp16 (4, column tile * col_blocks + block); else its words in shared memory
    factor: tuple  # [query column of this lane] softmax_scale_log2 * 2^-(e_q + 11)
    channels: cute.Pointer  # boosted K: q' by channel in shared memory (boost.py)


def column_row(cfg: RegisterConfig, t, column: int):
    """Query row of accumulator column ``column`` of a lane: its ``lane_rows`` columns, block by block."""
    return t if cfg.is_integer else COLUMNS * (column // 2) + 2 * t + column % 2


def operand_row(cfg: RegisterConfig, g, block: int):
    """Query row in column g of a B operand; the integer path's columns come in pairs."""
    return g // 2 if cfg.is_integer else g + COLUMNS * block


@cute.jit
def prefetch(cfg: cutlass.Constexpr[RegisterConfig], q: cute.Tensor, rows: Rows, thread: Int32):
    """Bring q to L2, a line a thread."""
    at = thread * LINE_BYTES
    if at < rows.count * cfg.row_bytes:
        start = q.iterator.toint() + row_offset(cfg, q, rows, at // cfg.row_bytes) + at % cfg.row_bytes
        line = cute.make_ptr(Uint32, start, cute.AddressSpace.gmem, assumed_align=WORD)
        cute.arch.prefetch(line.llvm_ptr, cache_level="L2")


def row_offset(cfg: RegisterConfig, q: cute.Tensor, rows: Rows, row) -> Int64:
    """Bytes of q before a row of this CTA."""
    query, head = place(rows, row)
    return Int64((rows.batch_idx * q.shape[1] + query) * q.shape[2] + head) * cfg.row_bytes


@cute.jit
def load(cfg: cutlass.Constexpr[RegisterConfig], q: cute.Tensor, rows: Rows, me: Lane) -> cute.Tensor:
    """q words as B operand, (2, column tile * col_blocks + block); rows beyond the last one are zero."""
    words = cute.make_rmem_tensor((2, cfg.k.col_tiles * cfg.col_blocks), Uint32)
    words.fill(0)
    for block in cutlass.range_constexpr(cfg.col_blocks):
        row = operand_row(cfg, Int32(me.g), block)
        if row < rows.count:
            start = q.iterator.toint() + row_offset(cfg, q, rows, row)
            found = cute.make_tensor(cute.make_ptr(Uint32, start, cute.AddressSpace.gmem, assumed_align=WORD),
                                     cute.make_layout(cfg.row_bytes // WORD))
            for col_tile in cutlass.range_constexpr(cfg.k.col_tiles):
                for col8 in cutlass.range_constexpr(2):
                    words[col8, col_tile * cfg.col_blocks + block] = found[
                        (layout.TILE // 2) * col_tile + 4 * col8 + Int32(me.t)]
    return words


@cute.jit
def prepare(cfg: cutlass.Constexpr[RegisterConfig], words: cute.Tensor, scale_log2: Float32, me: Lane,
            shared: cute.Pointer, channels: cute.Pointer) -> Query:
    """Choose e_q of each row, round q' and bring each row's factor to its accumulator column.

    Where registers are short q' goes to ``shared`` (all warps need the same), where it costs no registers; with boosted
    channels, to ``channels`` too. A barrier of the CTA follows.
    """
    operand, factors = round_rows(cfg, words, scale_log2, me)
    if cutlass.const_expr(cfg.boost is not None):
        if me.warp == 0:
            boost.leave_channels(cfg, cute.recast_tensor(operand, Uint32), me, channels)
    if cutlass.const_expr(cfg.has_shared_query):
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


def shared_view(cfg: RegisterConfig, shared: cute.Pointer) -> cute.Tensor:
    """(words of a lane: col8, then block; lane; column tile)."""
    count = 2 * cfg.col_blocks
    return cute.make_tensor(shared, cute.make_layout((count, WARP, cfg.k.col_tiles), stride=(1, count, count * WARP)))


def query_operand(cfg: RegisterConfig, query: Query, me: Lane, col_tile: int) -> tuple[cute.Tensor, cute.Tensor]:
    """q' of one column tile as B operand: (fp16 (4, block), words (2, block))."""
    operand, words = numbers.fragments(cfg.col_blocks)
    if cfg.has_shared_query:
        found = read(query.operand[None, None, col_tile], Int32(me.lane))
    else:
        flat = cute.recast_tensor(query.operand, Uint32)
        found = [flat[col8, col_tile * cfg.col_blocks + block] for block in range(cfg.col_blocks) for col8 in (0, 1)]
    for i, word in enumerate(found):
        words[i % 2, i // 2] = word
    return operand, words


def round_rows(cfg: RegisterConfig, words: cute.Tensor, scale_log2: Float32, me: Lane) -> tuple[cute.Tensor, list]:
    """(q' in registers, [column] factor)."""
    operand, operand_words = numbers.fragments(cfg.k.col_tiles * cfg.col_blocks)
    factors = []
    for block in range(cfg.col_blocks):
        at = [(col8, col_tile * cfg.col_blocks + block) for col_tile in range(cfg.k.col_tiles) for col8 in (0, 1)]
        exponent = row_exponent(cfg, [words[i] for i in at]) + registers.QUERY_OWN_SHIFT
        up = numbers.pow2(exponent)
        for i in at:
            low, high = numbers.widen(words[i], cfg.dtype)
            operand_words[i] = numbers.pack(low * up, high * up)
        factors += to_columns(scale_log2 * numbers.pow2(-exponent), me)
    return operand, factors


def row_exponent(cfg: RegisterConfig, words: list) -> Int32:
    """e_q of the lane's query row g."""
    largest = numbers.tree([word & Uint32(numbers.NO_SIGNS) for word in words], ptx.max_u16x2)
    amax = numbers.max_half(numbers.over_lanes(largest, numbers.OVER_T, ptx.max_u16x2), cfg.dtype)
    clamped = cute.arch.fmax(amax, Float32(2.0**registers.MIN_QUERY_LOG2))
    return Int32(-registers.floor_log2(clamped.bitcast(Int32))) * Int32(amax != 0.0)


def to_columns(x: Float32, me: Lane) -> list[Float32]:
    """From query row g of the lanes of g to columns 2t, 2t + 1 of an accumulator."""
    return [cute.arch.shuffle_sync(x, Int32(4 * (2 * me.t + e))) for e in (0, 1)]
