"""Merges what several ranks' decode gave over their tokens (flash-decoding's combine, of any number of parts), in fp32.

    w_i = exp(lse_i - max lse)    o = sum w_i o_i / sum w_i    lse = max lse + log sum w_i
"""

import tilelang.language as T

from lowbit_attn.device.tilelang_kernel import TileKernel
from lowbit_attn.device.tokens import ACCESS_BYTES, ACCESS_HALVES
from lowbit_attn.registers import LN_2, LOG2_E

THREADS = 128
ACCESS_FLOATS = ACCESS_BYTES // 4


def merge_states_kernel(head_dim: int, dtype: str) -> TileKernel:
    """States of several ranks -> out [batch, q_len, num_heads, head_dim] in ``dtype``, lse fp32
    [batch, num_heads, q_len].

    o_states, lse_states: the same memory [states, accesses, 16 bytes], as ``dtype`` and as fp32. A state is o, laid out
    as out, then lse as lse. A state's lse is -inf where it has no tokens; then its o is not used. Without tokens in any
    state: 0 and -inf.
    """
    lanes = head_dim // ACCESS_HALVES  # of a row, 16 bytes each
    rows_a_block = THREADS // lanes
    batch, q_len, heads, states, accesses = (T.dynamic(name) for name in ("batch", "q_len", "heads", "states",
                                                                          "accesses"))

    @T.macro
    def lse_of(lse_states, state, index, rows):
        T.assume(index >= 0)
        return lse_states[state, rows * lanes + T.truncdiv(index, ACCESS_FLOATS), T.truncmod(index, ACCESS_FLOATS)]

    @T.prim_func
    def merge_states(
        o_states: T.Tensor((states, accesses, ACCESS_HALVES), dtype),
        lse_states: T.Tensor((states, accesses, ACCESS_FLOATS), "float32"),
        out: T.Tensor((batch, q_len, heads, head_dim), dtype),
        lse: T.Tensor((batch, heads, q_len), "float32"),
    ):
        with T.Kernel(T.truncdiv(batch * q_len * heads + (rows_a_block - 1), rows_a_block), threads=THREADS) as block:
            thread = T.get_thread_binding()
            row, lane, head, query, at, index = (T.alloc_var("int32") for _ in range(6))
            top, start, total, weight = (T.alloc_var("float32") for _ in range(4))
            part, sums = T.alloc_local((ACCESS_HALVES,), dtype), T.alloc_local((ACCESS_HALVES,), "float32")
            row = block * rows_a_block + T.truncdiv(thread, lanes)
            lane = T.truncmod(thread, lanes)
            if T.And(row < batch * q_len * heads, thread < rows_a_block * lanes):
                head = T.truncmod(row, heads)
                query = T.truncmod(T.truncdiv(row, heads), q_len)
                at = T.truncdiv(row, heads * q_len)  # the sequence
                index = (at * heads + head) * q_len + query  # of lse
                top = -T.infinity("float32")
                for state in T.serial(states):
                    top = T.max(top, lse_of(lse_states, state, index, batch * q_len * heads))
                start = T.if_then_else(top == -T.infinity("float32"), T.float32(0.0), top)
                total = T.float32(0.0)
                for e in T.unroll(ACCESS_HALVES):
                    sums[e] = T.float32(0.0)
                for state in T.serial(states):
                    weight = T.exp2((lse_of(lse_states, state, index, batch * q_len * heads) - start)
                                    * T.float32(LOG2_E))
                    total = total + weight
                    for e in T.vectorized(ACCESS_HALVES):
                        part[e] = o_states[state, row * lanes + lane, e]
                    for e in T.unroll(ACCESS_HALVES):
                        sums[e] = sums[e] + T.if_then_else(weight == T.float32(0.0), T.float32(0.0),
                                                           weight * T.cast(part[e], "float32"))
                for e in T.unroll(ACCESS_HALVES):
                    part[e] = T.cast(T.if_then_else(total == T.float32(0.0), T.float32(0.0), sums[e] / total), dtype)
                for e in T.vectorized(ACCESS_HALVES):
                    out[at, query, head, ACCESS_HALVES * lane + e] = part[e]
                if lane == 0:
                    lse[at, head, query] = T.if_then_else(total == T.float32(0.0), -T.infinity("float32"),
                                                          start + T.log2(total) * T.float32(LN_2))

    return TileKernel(merge_states)
