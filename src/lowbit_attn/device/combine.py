"""Split-KV merge: partial (O, LSE) of disjoint token sets -> O, LSE (flash-decoding's combine), in fp32."""

import tilelang.language as T

from lowbit_attn.device.tilelang_kernel import TileKernel

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


def combine_kernel(head_dim: int, dtype: str) -> TileKernel:
    """fp32 o_partial [num_splits, rows, head_dim], lse_partial [num_splits, rows] -> out [rows, head_dim], lse [rows].

    rows = batch * num_heads * q_len. An empty split has lse -inf; a row of only such gives o = 0, lse = -inf.
    One block a row, one thread a channel.
    """
    num_splits, rows = T.dynamic("num_splits"), T.dynamic("rows")

    @T.prim_func
    def combine(
        o_partial: T.Tensor((num_splits, rows, head_dim), "float32"),
        lse_partial: T.Tensor((num_splits, rows), "float32"),
        out: T.Tensor((rows, head_dim), dtype),
        lse: T.Tensor((rows,), "float32"),
    ):
        with T.Kernel(rows, threads=head_dim) as row:
            d = T.get_thread_binding()
            top = T.alloc_var("float32")
            top = -T.infinity("float32")
            for s in T.serial(num_splits):
                top = T.max(top, lse_partial[s, row])
            # an all-empty row keeps every weight at exp2(-inf) = 0 by measuring from 0 instead of -inf
            origin = T.alloc_var("float32")
            origin = T.if_then_else(top == -T.infinity("float32"), T.float32(0.0), top)
            total = T.alloc_var("float32")
            total = T.float32(0.0)
            acc = T.alloc_var("float32")
            acc = T.float32(0.0)
            for s in T.serial(num_splits):
                weight = T.alloc_var("float32")
                weight = T.exp2((lse_partial[s, row] - origin) * T.float32(LOG2_E))
                total = total + weight
                acc = acc + T.if_then_else(weight > T.float32(0.0), weight * o_partial[s, row, d], T.float32(0.0))
            out[row, d] = T.cast(T.if_then_else(total > T.float32(0.0), acc / total, T.float32(0.0)), dtype)
            if d == 0:
                lse[row] = T.if_then_else(
                    total > T.float32(0.0), origin + T.log2(total) * T.float32(LN_2), -T.infinity("float32")
                )

    return TileKernel(combine)
