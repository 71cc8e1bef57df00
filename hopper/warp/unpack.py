"""What comes to a lane's registers: words of codes and metadata from record parts in shared memory, and query rows."""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from lowbit_attn import layout
from lowbit_attn.hopper.common.abi import Rows, query_and_head
from lowbit_attn.hopper.common.tuning import LINE_WORDS
from lowbit_attn.hopper.warp.config import META_BYTES, WORD, SidePlan, WarpConfig

BLOCK_WORDS = layout.BLOCK_WORDS


class Lane(NamedTuple):
    """This thread: its warp, and lane = 4 * g + t."""

    warp: Int32
    lane: Uint32
    g: Uint32
    t: Uint32


def lane_of(warp: Int32, lane: Uint32) -> Lane:
    return Lane(warp, lane, lane // 4, lane % 4)


def fresh(me: Lane) -> Lane:
    """This thread once more, as values of its own: what ptxas worked out of the old ones would stay in registers over
    a long loop, or be spilled."""
    return lane_of(me.warp, Uint32(cute.arch.shuffle_sync_bfly(me.lane, offset=0)))


def fence() -> None:
    """Keep loads on their side: else ptxas brings the next ones forward, until registers are short, or puts early ones
    off."""
    cute.arch.sync_warp()


class Piece(NamedTuple):
    """A record part in shared memory."""

    buffer: cute.Pointer
    warp: Int32
    slot: Int32


def part_view(cfg: WarpConfig, piece: Piece, offset: int, words: int, count: int) -> cute.Tensor:
    """(words, count) accesses of ``words`` 32-bit words from byte ``offset`` of the part on, aligned to their size."""
    view = cute.make_tensor(piece.buffer + offset // WORD, cute.make_layout(
        (words, count, cfg.slots, cfg.warps), stride=(1, words, cfg.slot_bytes // WORD, cfg.warp_bytes // WORD)))
    return view[None, None, piece.slot, piece.warp]


def read(view: cute.Tensor, index) -> list:
    """One access: its words, or what else the view has."""
    words = cute.make_rmem_tensor(cute.size(view, mode=[0]), view.element_type)
    cute.autovec_copy(view[None, index], words)
    return [words[i] for i in range(cute.size(words))]


def codes(cfg: WarpConfig, side: SidePlan, piece: Piece, me: Lane, first_tile: int, tiles: int,
          skip=0) -> dict[int, Uint32]:
    """The lane's words of a run of tiles, by word index; ``skip``, an int or Int32: whole blocks of words to skip."""
    first, count = side.words_of(first_tile), side.words_of(tiles)
    width = math.gcd(count, BLOCK_WORDS)  # runs of head_dim 96 start anywhere in a block
    accesses = layout.plane_bytes(side.rows, side.cols, side.bits) // (width * WORD)
    view = part_view(cfg, piece, side.codes, width, accesses)
    found = {}
    for word in range(first, first + count, width):
        values = read(view, side.code_access(word, width, Int32(me.lane)) + skip * side.block_accesses(width))
        found |= {word + i: value for i, value in enumerate(values)}
    return found


def meta_view(cfg: WarpConfig, side: SidePlan, piece: Piece) -> cute.Tensor:
    """(words, accesses): the part's metadata in accesses of META_BYTES."""
    accesses = (side.nbytes - side.meta) // META_BYTES
    return part_view(cfg, piece, side.meta, META_BYTES // WORD, accesses)


def elements(cfg: WarpConfig, piece: Piece, offset: int, count: int, element) -> cute.Tensor:
    """``count`` integers of 8 or 16 bits from byte ``offset`` of the part on."""
    apart = WORD * 8 // element.width  # elements in a word
    view = cute.make_tensor(cute.recast_ptr(piece.buffer + offset // WORD, dtype=element), cute.make_layout(
        (count, cfg.slots, cfg.warps), stride=(1, cfg.slot_bytes // WORD * apart, cfg.warp_bytes // WORD * apart)))
    return view[None, piece.slot, piece.warp]


class Query(NamedTuple):
    """What an arithmetic multiplies K with, and what turns accumulators into base-2 logits."""

    operand: cute.Tensor  # in registers: fp16 (4, column tile * col_blocks + block); else its words in shared memory
    factor: tuple  # [query column of this lane] softmax_scale_log2 * 2^-(e_q + 11)
    channels: cute.Pointer  # boosted K: q' by channel in shared memory (boost.py)


def query_offset(cfg: WarpConfig, q: cute.Tensor, rows: Rows, row) -> Int64:
    """Bytes of q before a row of this CTA."""
    query, head = query_and_head(rows, row)
    return Int64((rows.batch_idx * q.shape[1] + query) * q.shape[2] + head) * cfg.row_bytes


@cute.jit
def prefetch_query(cfg: cutlass.Constexpr[WarpConfig], q: cute.Tensor, rows: Rows, thread: Int32):
    """Bring q to L2, a line a thread."""
    at = thread * (LINE_WORDS * WORD)
    if at < rows.count * cfg.row_bytes:
        start = q.iterator.toint() + query_offset(cfg, q, rows, at // cfg.row_bytes) + at % cfg.row_bytes
        line = cute.make_ptr(Uint32, start, cute.AddressSpace.gmem, assumed_align=WORD)
        cute.arch.prefetch(line.llvm_ptr, cache_level="L2")


@cute.jit
def load_query(cfg: cutlass.Constexpr[WarpConfig], q: cute.Tensor, rows: Rows, me: Lane) -> cute.Tensor:
    """q words as B operand, (2, column tile * col_blocks + block); rows beyond the last one are zero."""
    words = cute.make_rmem_tensor((2, cfg.k.col_tiles * cfg.col_blocks), Uint32)
    words.fill(0)
    for block in cutlass.range_constexpr(cfg.col_blocks):
        row = cfg.arithmetic.operand_row(Int32(me.g), block)
        if row < rows.count:
            start = q.iterator.toint() + query_offset(cfg, q, rows, row)
            found = cute.make_tensor(cute.make_ptr(Uint32, start, cute.AddressSpace.gmem, assumed_align=WORD),
                                     cute.make_layout(cfg.row_bytes // WORD))
            for col_tile in cutlass.range_constexpr(cfg.k.col_tiles):
                for col8 in cutlass.range_constexpr(2):
                    words[col8, col_tile * cfg.col_blocks + block] = found[
                        (layout.TILE // 2) * col_tile + 4 * col8 + Int32(me.t)]
    return words
