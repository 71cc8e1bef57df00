"""Query rows: their words in global memory as the B operand of a multiply, and what an arithmetic makes of them."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from lowbit_attn import layout
from lowbit_attn.hopper.common.abi import Rows, query_and_head
from lowbit_attn.hopper.common.scratch import LINE_WORDS
from lowbit_attn.hopper.warp.config import WORD, WarpConfig
from lowbit_attn.hopper.warp.unpack import Lane

LINE_BYTES = LINE_WORDS * WORD


class Query(NamedTuple):
    """What an arithmetic multiplies K with, and what turns accumulators into base-2 logits."""

    operand: cute.Tensor  # in registers: fp16 (4, column tile * col_blocks + block); else its words in shared memory
    factor: tuple  # [query column of this lane] softmax_scale_log2 * 2^-(e_q + 11)
    channels: cute.Pointer  # boosted K: q' by channel in shared memory (boost.py)


@cute.jit
def prefetch(cfg: cutlass.Constexpr[WarpConfig], q: cute.Tensor, rows: Rows, thread: Int32):
    """Bring q to L2, a line a thread."""
    at = thread * LINE_BYTES
    if at < rows.count * cfg.row_bytes:
        start = q.iterator.toint() + row_offset(cfg, q, rows, at // cfg.row_bytes) + at % cfg.row_bytes
        line = cute.make_ptr(Uint32, start, cute.AddressSpace.gmem, assumed_align=WORD)
        cute.arch.prefetch(line.llvm_ptr, cache_level="L2")


def row_offset(cfg: WarpConfig, q: cute.Tensor, rows: Rows, row) -> Int64:
    """Bytes of q before a row of this CTA."""
    query, head = query_and_head(rows, row)
    return Int64((rows.batch_idx * q.shape[1] + query) * q.shape[2] + head) * cfg.row_bytes


@cute.jit
def load(cfg: cutlass.Constexpr[WarpConfig], q: cute.Tensor, rows: Rows, me: Lane) -> cute.Tensor:
    """q words as B operand, (2, column tile * col_blocks + block); rows beyond the last one are zero."""
    words = cute.make_rmem_tensor((2, cfg.k.col_tiles * cfg.col_blocks), Uint32)
    words.fill(0)
    for block in cutlass.range_constexpr(cfg.col_blocks):
        row = cfg.arithmetic.operand_row(Int32(me.g), block)
        if row < rows.count:
            start = q.iterator.toint() + row_offset(cfg, q, rows, row)
            found = cute.make_tensor(cute.make_ptr(Uint32, start, cute.AddressSpace.gmem, assumed_align=WORD),
                                     cute.make_layout(cfg.row_bytes // WORD))
            for col_tile in cutlass.range_constexpr(cfg.k.col_tiles):
                for col8 in cutlass.range_constexpr(2):
                    words[col8, col_tile * cfg.col_blocks + block] = found[
                        (layout.TILE // 2) * col_tile + 4 * col8 + Int32(me.t)]
    return words
