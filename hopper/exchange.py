"""Exchange of partial results between the GPUs of one host, and their merge (flash-decoding's combine), in one launch.

    own o, lse -> slots of every other rank's memory      pushed over NVLink, each word with the call's number
    slots      -> wait until a word has the call's number
    w_i = exp(lse_i - max lse)    o = sum w_i o_i / sum w_i    lse = max lse + log sum w_i

A CTA does one row and waits for the same row of the others alone, which push before they wait. How a word and its
number travel: hopper/common/slots.py.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_compact_tensor

from lowbit_attn.device import numbers
from lowbit_attn.hopper.common.slots import SLOT_BYTES, push, wait
from lowbit_attn.kernels.key import CuteKernel, KernelKey
from lowbit_attn.registers import LN_2, LOG2_E


class ExchangeSm90:
    """The kernel of one head_dim and dtype; a CTA does a row of o, a thread two channels."""

    smem_bytes = 0

    def __init__(self, head_dim: int, dtype: str):
        self.words, self.dtype = head_dim // 2, dtype

    @cute.jit
    def __call__(self, o: cute.Tensor, lse: cute.Tensor, slots: cute.Tensor, peers: cute.Tensor, calls: cute.Tensor,
                 out: cute.Tensor, out_lse: cute.Tensor, rank: Int32, stream):
        """o, out: uint32 [batch, q_len, num_heads, head_dim / 2], this rank's part and the result; lse, out_lse fp32
        [batch, num_heads, q_len]. slots: int64 [2, ranks, rows, head_dim / 2 + 1], this rank's, whose lse comes last;
        peers: int64 [ranks], addresses of all ranks' slots. calls: uint32 [rows], how often each row was exchanged."""
        batch, q_len, heads, _ = out.shape
        self.kernel(o, lse, slots, peers, calls, out, out_lse, rank).launch(
            grid=(batch * q_len * heads, 1, 1), block=(self.words, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, o: cute.Tensor, lse: cute.Tensor, slots: cute.Tensor, peers: cute.Tensor, calls: cute.Tensor,
               out: cute.Tensor, out_lse: cute.Tensor, rank: Int32):
        _, q_len, heads, _ = out.shape
        _, ranks, capacity, _ = slots.shape
        row, word = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        head, query, seq = row % heads, row // heads % q_len, row // (heads * q_len)
        number = calls[row] + Uint32(1)
        first = Int32(number & Uint32(1)) * ranks  # of this call's half
        own_word, own_lse = o[seq, query, head, word], lse[seq, head, query]
        row_bytes = SLOT_BYTES * (self.words + 1)
        for peer in cutlass.range(ranks, unroll=1):
            if peer != rank:
                at = peers[peer] + (Int64(first + rank) * capacity + row) * row_bytes
                push(at + SLOT_BYTES * word, own_word, number)
                if word == 0:
                    push(at + SLOT_BYTES * self.words, own_lse.bitcast(Uint32), number)

        slot, step = slots.iterator.toint() + (Int64(first) * capacity + row) * row_bytes, Int64(capacity) * row_bytes
        top = own_lse
        for source in cutlass.range(ranks, unroll=1):
            if source != rank:
                found = wait(slot + source * step + SLOT_BYTES * self.words, number)
                top = cute.arch.fmax(top, found.bitcast(Float32))
        start = Float32(0.0) if top == -Float32.inf else top
        low, high, total = Float32(0.0), Float32(0.0), Float32(0.0)
        for source in cutlass.range(ranks, unroll=1):
            part, part_lse = own_word, own_lse
            if source != rank:
                part = wait(slot + source * step + SLOT_BYTES * word, number)
                part_lse = wait(slot + source * step + SLOT_BYTES * self.words, number).bitcast(Float32)
            weight = cute.math.exp2((part_lse - start) * LOG2_E, fastmath=True)
            total += weight
            if weight != Float32(0.0):  # without tokens o is anything
                first_channel, second_channel = numbers.widen(part, self.dtype)
                low += weight * first_channel
                high += weight * second_channel
        share = Float32(0.0) if total == Float32(0.0) else Float32(1.0) / total
        out[seq, query, head, word] = numbers.pack(low * share, high * share, numbers.ELEMENT[self.dtype])
        cute.arch.sync_threads()  # all have read the number
        if word == 0:
            out_lse[seq, head, query] = -Float32.inf if total == Float32(0.0) else \
                start + cute.math.log2(total, fastmath=True) * LN_2
            calls[row] = number


def exchange_kernel(key: KernelKey) -> CuteKernel:
    """The kernel and the fake arguments (all but the stream) to compile it for."""
    def fake(element, *shape):
        return make_fake_compact_tensor(element, shape, stride_order=tuple(reversed(range(len(shape)))),
                                        assumed_align=16)

    batch, q_len, heads, ranks, capacity = (cute.sym_int() for _ in range(5))
    words = key.head_dim // 2
    o, out = (fake(Uint32, batch, q_len, heads, words) for _ in range(2))
    lse, out_lse = (fake(Float32, batch, heads, q_len) for _ in range(2))
    slots, peers, calls = fake(Int64, 2, ranks, capacity, words + 1), fake(Int64, ranks), fake(Uint32, capacity)
    return CuteKernel(ExchangeSm90(key.head_dim, key.dtype), (o, lse, slots, peers, calls, out, out_lse, Int32(0)))
