"""Split-KV merge: partial (O, LSE) of disjoint token sets -> O, LSE (flash-decoding's combine), in fp32."""

import tilelang.language as T

from lowbit_attn.device.tilelang_kernel import TileKernel

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
SPLITS_AT_ONCE = 8  # whose loads are under way together


def combine_kernel(head_dim: int, dtype: str, is_programmatic: bool) -> TileKernel:
    """fp32 o_partial [num_splits, rows, head_dim], lse_partial [num_splits, rows] -> out [rows, head_dim], lse [rows].

    rows of the partial results and of out are (batch, q_len, num_heads), of lse (batch, num_heads, q_len). sink_logits
    fp32: one a head, or a single -inf for all: exp of it joins the denominator. An empty split has lse -inf; a row of
    only such gives o = 0, lse = -inf; a NaN stays visible. One block a row, one thread a channel.

    is_programmatic: the launch may overlap the decode kernel's end (programmatic dependent launch, sm_90 on); only
    sink_logits, which is older, is read before that kernel is complete.
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
            top, origin, shrink = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("float32")
            total, acc = T.alloc_var("float32"), T.alloc_var("float32")
            lses, values = T.alloc_local((SPLITS_AT_ONCE,), "float32"), T.alloc_local((SPLITS_AT_ONCE,), "float32")
            top = sink_logits[T.truncmod(head, sinks)]
            if is_programmatic:
                T.pdl_sync()
            total = T.if_then_else(top == -T.infinity("float32"), T.float32(0.0), T.float32(1.0))
            acc = T.float32(0.0)
            for first in T.serial(T.ceildiv(num_splits, SPLITS_AT_ONCE)):
                for i in T.unroll(SPLITS_AT_ONCE):
                    lses[i] = -T.infinity("float32")
                    values[i] = T.float32(0.0)
                    if first * SPLITS_AT_ONCE + i < num_splits:
                        lses[i] = lse_partial[first * SPLITS_AT_ONCE + i, row]
                        values[i] = o_partial[first * SPLITS_AT_ONCE + i, row, d]
                shrink = top
                for i in T.unroll(SPLITS_AT_ONCE):
                    top = T.max(top, lses[i])
                # an all-empty row keeps every weight at exp2(-inf) = 0 by measuring from 0 instead of -inf
                origin = T.if_then_else(top == -T.infinity("float32"), T.float32(0.0), top)
                shrink = T.exp2((shrink - origin) * T.float32(LOG2_E))
                total = total * shrink
                acc = acc * shrink
                for i in T.unroll(SPLITS_AT_ONCE):
                    lses[i] = T.exp2((lses[i] - origin) * T.float32(LOG2_E))
                    total = total + lses[i]
                    acc = acc + T.if_then_else(lses[i] == T.float32(0.0), T.float32(0.0), lses[i] * values[i])
            out[row, d] = T.cast(T.if_then_else(total == T.float32(0.0), T.float32(0.0), acc / total), dtype)
            if d == 0:
                lse[(T.truncdiv(query, q_len) * num_heads + head) * q_len + T.truncmod(query, q_len)] = T.if_then_else(
                    total == T.float32(0.0), -T.infinity("float32"), origin + T.log2(total) * T.float32(LN_2)
                )

    return TileKernel(combine)
