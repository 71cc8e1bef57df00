"""The arguments of decode kernels of formats with codebooks: those of abi.py and a layer's codebooks."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from lowbit_attn.formats.codebook_order import BOOK_ROW_BYTES
from lowbit_attn.hopper.common.abi import DecodeKernel, Options, Results, View, grid_of

BOOK_ROW_WORDS = BOOK_ROW_BYTES // 4
BOOK_CHANNEL_PLANES = 4  # order, 1 / weight, mean entry, largest distance from it
ORDER_PLANE, RECIPROCAL_PLANE = 0, 1


class Books(NamedTuple):
    """A layer's codebooks on the device, as lowbit_attn/cache/attached.py lays them out for kernels."""

    k: cute.Tensor  # (heads, entry, words of a row) uint32
    v: cute.Tensor
    channels: cute.Tensor  # (heads, 4, head_dim) fp32


class BookDecodeKernel(DecodeKernel):
    """``DecodeKernel`` of a cache with codebooks, whose tensors follow those of the cache's memory."""

    @cute.jit
    def __call__(self, q: cute.Tensor, rows: cute.Tensor, ring_rows: cute.Tensor, pool: cute.Tensor, table: cute.Tensor,
                 n_sink: cute.Tensor, n_qk: cute.Tensor, n_qv: cute.Tensor, n_tok: cute.Tensor,
                 ring_start: cute.Tensor, sink_k: cute.Tensor, sink_v: cute.Tensor, ring_k: cute.Tensor,
                 ring_v: cute.Tensor, k_book: cute.Tensor, v_book: cute.Tensor, k_channels: cute.Tensor,
                 partials: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, sink_logits: cute.Tensor,
                 scale_log2: Float32, softcap_log2: Float32, window: Int32, sink_window: Int32, page_stride: Int32,
                 head_stride: Int32, table_b: Int32, table_h: Int32, stream):
        view = View(rows, ring_rows, pool, table, n_sink, n_qk, None, n_tok, ring_start, sink_k, sink_v, ring_k, ring_v,
                    page_stride, head_stride, table_b, table_h, Books(k_book, v_book, k_channels))
        self.launch(q, view, Results(partials, out, lse, sink_logits),
                    Options(scale_log2, softcap_log2, window, sink_window),
                    grid_of(q, ring_k, partials.shape[1], self.cfg.rows), stream)
