"""Split-KV merge: partial (O, LSE) of disjoint token sets -> O, LSE (flash-decoding's combine), in fp32."""

import tilelang.language as T

from lowbit_attn.device.tilelang_kernel import TileKernel

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


def combine_kernel(head_dim: int, dtype: str) -> TileKernel:
    """fp32 o_partial [num_splits, rows, head_dim], lse_partial [num_splits, rows] -> out [rows, head_dim], lse [rows].

    rows of the partial results and of out are (batch, q_len, num_heads), of lse (batch, num_heads, q_len). sink_logits
    fp32: one a head, or a single -inf for all: exp of it joins the denominator. An empty split has lse -inf; a row of
    only such gives o = 0, lse = -inf; a NaN stays visible. One block a row, one thread a channel.
    """
    num_splits, rows, sinks = T.dynamic("num_splits"), T.dynamic("rows"), T.dynamic("sinks")

    @T.prim_func
    def combine(
        o_partial: T.Tensor((num_splits, rows, head_dim), "float32"),
        lse_partial: T.Tensor((num_splits, rows), "float32"),
        out: T.Tensor((rows, head_dim), dtype),
        lse: T.Tensor((rows,), "float32"),
        sink_logits: T.Tensor((sinks,), "float32"),
        num_heads: T.int32,
        q_len: T.int32,
    ):
        with T.Kernel(rows, threads=head_dim) as row:
            d = T.get_thread_binding()
            head, query = T.alloc_var("int32"), T.alloc_var("int32")
            head = T.truncmod(row, num_heads)
            query = T.truncdiv(row, num_heads)
            top, sink = T.alloc_var("float32"), T.alloc_var("float32")
            sink = sink_logits[T.truncmod(head, sinks)]
            top = sink
            for s in T.serial(num_splits):
                top = T.max(top, lse_partial[s, row])
            # an all-empty row keeps every weight at exp2(-inf) = 0 by measuring from 0 instead of -inf
            origin = T.alloc_var("float32")
            origin = T.if_then_else(top == -T.infinity("float32"), T.float32(0.0), top)
            total = T.alloc_var("float32")
            total = T.exp2((sink - origin) * T.float32(LOG2_E))
            acc = T.alloc_var("float32")
            acc = T.float32(0.0)
            for s in T.serial(num_splits):
                weight = T.alloc_var("float32")
                weight = T.exp2((lse_partial[s, row] - origin) * T.float32(LOG2_E))
                total = total + weight
                acc = acc + T.if_then_else(weight == T.float32(0.0), T.float32(0.0), weight * o_partial[s, row, d])
            out[row, d] = T.cast(T.if_then_else(total == T.float32(0.0), T.float32(0.0), acc / total), dtype)
            if d == 0:
                lse[(T.truncdiv(query, q_len) * num_heads + head) * q_len + T.truncmod(query, q_len)] = T.if_then_else(
                    total == T.float32(0.0), -T.infinity("float32"), origin + T.log2(total) * T.float32(LN_2)
                )

    return TileKernel(combine)
