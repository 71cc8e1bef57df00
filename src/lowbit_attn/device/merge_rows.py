"""Merges attention of the same queries to other tokens into what is there (flash-decoding's combine), in fp32.

    w_i = exp(lse_i - max lse)    o = sum w_i o_i / sum w_i    lse = max lse + log sum w_i

Rows are tokens of several sequences, as kernels for sequences of unlike length have them: o is [tokens, num_heads,
head_dim], lse [num_heads, tokens]. A head's sink logit is one more lse, whose o is 0.
"""

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.device.merge import weigh
from lowbit_attn.device.tilelang_kernel import TileKernel
from lowbit_attn.device.tokens import ACCESS_HALVES

THREADS = 256
WARPS = THREADS // layout.LANES


def of_tokens(lse):
    """An lse as ``weigh`` takes it. FlashAttention 2 says +inf of a row without tokens, others say -inf."""
    return T.if_then_else(lse == T.infinity("float32"), -T.infinity("float32"), lse)


@T.macro
def load_access(x, token, head, access, held):
    """16 bytes of a row -> held."""
    for e in T.vectorized(ACCESS_HALVES):
        held[e] = x[token, head, ACCESS_HALVES * access + e]


@T.macro
def store_sum(own, other, weights, out, token, head, access):
    """16 bytes of both, each with its weight -> out; what has no weight may be anything."""
    for e in T.unroll(ACCESS_HALVES):
        own[e] = T.cast(
            T.if_then_else(weights[0] == T.float32(0.0), T.float32(0.0), weights[0] * T.cast(own[e], "float32"))
            + T.if_then_else(weights[1] == T.float32(0.0), T.float32(0.0), weights[1] * T.cast(other[e], "float32")),
            out.dtype)
    for e in T.vectorized(ACCESS_HALVES):
        out[token, head, ACCESS_HALVES * access + e] = own[e]


def out_in_accesses(out):
    """Rows whose stride is seen to be whole accesses, without which 16-byte stores fall apart."""
    return T.view(out, strides=(out.strides[0] // ACCESS_HALVES * ACCESS_HALVES, *out.strides[1:]))


def merge_rows_kernel(head_dim: int, dtype: str) -> TileKernel:
    """(more, more_lse) merged into out [tokens, num_heads, head_dim] in ``dtype`` and lse fp32 [num_heads, tokens], in
    place.

    Tokens of ``out`` lie anywhere, at multiples of 16 bytes, and heads of lse and more_lse; more is dense. An lse of
    -inf, or +inf, is that of no tokens, whose o is not used; without any tokens: 0 and -inf. sink_logits: fp32
    [num_heads], or one of -inf for all heads.
    """
    lanes = head_dim // ACCESS_HALVES  # of a row, 16 bytes each, all of one warp
    rows_a_warp = layout.LANES // lanes
    rows_a_block = WARPS * rows_a_warp
    tokens, heads, logits = (T.dynamic(name) for name in ("tokens", "heads", "logits"))
    out_token, lse_head, more_lse_head = (T.dynamic(name, "int64") for name in (
        "out_token", "lse_head", "more_lse_head"))

    @T.prim_func
    def merge_rows(
        out: T.StridedTensor((tokens, heads, head_dim), (out_token, head_dim, 1), dtype),
        lse: T.StridedTensor((heads, tokens), (lse_head, 1), "float32"),
        more: T.Tensor((tokens, heads, head_dim), dtype),
        more_lse: T.StridedTensor((heads, tokens), (more_lse_head, 1), "float32"),
        sink_logits: T.Tensor((logits,), "float32"),
    ):
        with T.Kernel(T.truncdiv(tokens * heads + (rows_a_block - 1), rows_a_block), threads=THREADS) as block:
            thread = T.get_thread_binding()
            row, access, head, token = (T.alloc_var("int32") for _ in range(4))
            weights = T.alloc_local((3,), "float32")
            own, other = T.alloc_local((ACCESS_HALVES,), dtype), T.alloc_local((ACCESS_HALVES,), dtype)
            row = (block * WARPS + thread // layout.LANES) * rows_a_warp + T.truncdiv(thread % layout.LANES, lanes)
            access = T.truncmod(thread % layout.LANES, lanes)
            head = T.truncmod(row, heads)
            token = T.truncdiv(row, heads)
            is_row = T.And(row < tokens * heads, thread % layout.LANES < rows_a_warp * lanes)
            if is_row:
                load_access(out_in_accesses(out), token, head, access, own)
                load_access(more, token, head, access, other)
                weigh(of_tokens(lse[head, token]), of_tokens(more_lse[head, token]),
                      sink_logits[T.if_then_else(logits == 1, 0, head)], weights)
            T.sync_threads()  # all lanes of a row have read its lse
            if is_row:
                store_sum(own, other, weights, out_in_accesses(out), token, head, access)
                if access == 0:
                    lse[head, token] = weights[2]

    return TileKernel(merge_rows)
