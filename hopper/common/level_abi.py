"""The arguments of decode kernels of a level under a window: those of abi.py and ``hidden``, behind the cache's memory.

Positions of a level's tokens have gaps, but they ascend: a window hides the first tokens of its pages and of its stage.
One query a row: others would see from places of their own on. The other tokens in 16 bit, sinks and recent ones, have
no gaps. ``window`` is that of the recent ones; ``sink_window`` says how many sinks are before the stage, negative where
windows do not hide them.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32

from lowbit_attn.hopper.common.abi import DecodeKernel, Options, Results, View, grid_of


class LevelDecodeKernel(DecodeKernel):
    """``DecodeKernel`` of a level under a window."""

    @cute.jit
    def __call__(self, q: cute.Tensor, rows: cute.Tensor, ring_rows: cute.Tensor, pool: cute.Tensor, table: cute.Tensor,
                 n_sink: cute.Tensor, n_qk: cute.Tensor, n_qv: cute.Tensor, n_tok: cute.Tensor,
                 ring_start: cute.Tensor, sink_k: cute.Tensor, sink_v: cute.Tensor, ring_k: cute.Tensor,
                 ring_v: cute.Tensor, hidden: cute.Tensor, partials: cute.Tensor, out: cute.Tensor, lse: cute.Tensor,
                 sink_logits: cute.Tensor, scale_log2: Float32, softcap_log2: Float32, window: Int32,
                 sink_window: Int32, page_stride: Int32, head_stride: Int32, table_b: Int32, table_h: Int32, stream):
        view = View(rows, ring_rows, pool, table, n_sink, n_qk, None, n_tok, ring_start, sink_k, sink_v, ring_k, ring_v,
                    page_stride, head_stride, table_b, table_h, hidden=hidden)
        self.launch(q, view, Results(partials, out, lse, sink_logits),
                    Options(scale_log2, softcap_log2, window, sink_window),
                    grid_of(q, ring_k, partials.shape[1], self.cfg.rows), stream)
