"""Merges what decode gave over two levels of a cache (flash-decoding's combine, of two parts), in fp32.

    w_i = exp(lse_i - max lse)    o = sum w_i o_i / sum w_i    lse = max lse + log sum w_i

Levels have a row for each (sequence, KV head); the results have sequences of query heads again. A head's sink logit is
one more lse, whose o is 0.
"""

import tilelang.language as T

from lowbit_attn.device.tilelang_kernel import TileKernel
from lowbit_attn.device.tokens import ACCESS_HALVES
from lowbit_attn.registers import LN_2, LOG2_E

THREADS = 128


@T.macro
def weigh(high, low, sink, weights):
    """lse of both levels and the sink logit -> the levels' weights, lse of all. Without tokens and sink: 0, 0, -inf."""
    top, start, total = (T.alloc_var("float32") for _ in range(3))
    top = T.max(T.max(high, low), sink)
    start = T.if_then_else(top == -T.infinity("float32"), T.float32(0.0), top)
    weights[0] = T.exp2((high - start) * T.float32(LOG2_E))
    weights[1] = T.exp2((low - start) * T.float32(LOG2_E))
    total = weights[0] + weights[1] + T.exp2((sink - start) * T.float32(LOG2_E))
    weights[2] = T.if_then_else(total == T.float32(0.0), -T.infinity("float32"),
                                start + T.log2(total) * T.float32(LN_2))
    weights[0] = T.if_then_else(total == T.float32(0.0), T.float32(0.0), weights[0] / total)
    weights[1] = T.if_then_else(total == T.float32(0.0), T.float32(0.0), weights[1] / total)


def merge_kernel(head_dim: int, dtype: str) -> TileKernel:
    """(o, lse) of both levels -> out [batch, q_len, num_heads, head_dim] in ``dtype``, lse fp32
    [batch, num_heads, q_len].

    o_high, o_low: [batch * num_heads_kv, q_len, ratio, head_dim]; lse_high, lse_low: fp32
    [batch * num_heads_kv, ratio, q_len], -inf for a level without tokens, whose o is not used. sink_logits: fp32
    [num_heads], or one of -inf for all heads.
    """
    lanes = head_dim // ACCESS_HALVES  # of a row, 16 bytes each
    rows_a_block = THREADS // lanes
    batch, q_len, heads, rows, ratio, logits = (
        T.dynamic(name) for name in ("batch", "q_len", "heads", "rows", "ratio", "logits"))

    @T.prim_func
    def merge(
        o_high: T.Tensor((rows, q_len, ratio, head_dim), dtype),
        lse_high: T.Tensor((rows, ratio, q_len), "float32"),
        o_low: T.Tensor((rows, q_len, ratio, head_dim), dtype),
        lse_low: T.Tensor((rows, ratio, q_len), "float32"),
        sink_logits: T.Tensor((logits,), "float32"),
        out: T.Tensor((batch, q_len, heads, head_dim), dtype),
        lse: T.Tensor((batch, heads, q_len), "float32"),
    ):
        with T.Kernel(T.truncdiv(rows * q_len * ratio + (rows_a_block - 1), rows_a_block), threads=THREADS) as block:
            thread = T.get_thread_binding()
            row, lane, query, head, of_group, at = (T.alloc_var("int32") for _ in range(6))
            weights = T.alloc_local((3,), "float32")
            high, low = T.alloc_local((ACCESS_HALVES,), dtype), T.alloc_local((ACCESS_HALVES,), dtype)
            row = block * rows_a_block + T.truncdiv(thread, lanes)
            lane = T.truncmod(thread, lanes)
            if T.And(row < rows * q_len * ratio, thread < rows_a_block * lanes):
                of_group = T.truncmod(row, ratio)
                query = T.truncmod(T.truncdiv(row, ratio), q_len)
                at = T.truncdiv(row, ratio * q_len)  # (sequence, KV head)
                for e in T.vectorized(ACCESS_HALVES):
                    high[e] = o_high[at, query, of_group, ACCESS_HALVES * lane + e]
                for e in T.vectorized(ACCESS_HALVES):
                    low[e] = o_low[at, query, of_group, ACCESS_HALVES * lane + e]
                head = T.truncmod(at * ratio + of_group, heads)
                weigh(lse_high[at, of_group, query], lse_low[at, of_group, query],
                      sink_logits[T.if_then_else(logits == 1, 0, head)], weights)
                at = T.truncdiv(at * ratio + of_group, heads)  # the sequence
                for e in T.unroll(ACCESS_HALVES):
                    high[e] = T.cast(
                        T.if_then_else(weights[0] == T.float32(0.0), T.float32(0.0),
                                       weights[0] * T.cast(high[e], "float32"))
                        + T.if_then_else(weights[1] == T.float32(0.0), T.float32(0.0),
                                         weights[1] * T.cast(low[e], "float32")), dtype)
                for e in T.vectorized(ACCESS_HALVES):
                    out[at, query, head, ACCESS_HALVES * lane + e] = high[e]
                if lane == 0:
                    lse[at, head, query] = weights[2]

    return TileKernel(merge)
