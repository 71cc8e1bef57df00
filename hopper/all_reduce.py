"""Sum of the same rows of several GPUs of a host (an all-reduce in one shot), alone or with what follows it in a layer.

    own x -> slots of every other rank's memory      over NVLink, each word with the call's number
    slots -> wait until a word has the call's number
    sum = x_0 + x_1 + ...                            fp32, in the order of the ranks: the same bits on all of them

AddNormSm90 goes on with the sum (Megatron-LM's layer of a pre-norm transformer, RMSNorm's paper, equation 4):

    residual += sum      out = residual / sqrt(mean residual^2 + epsilon) * weight

A CTA does one row and waits for the same row of the others alone, which push before they wait. How a word and its
number travel: hopper/common/slots.py.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_compact_tensor

from lowbit_attn.device import numbers
from lowbit_attn.hopper.common.slots import SLOT_BYTES, load_slot, push, wait_from
from lowbit_attn.kernels.all_reduce import ADD_NORM, WARP, parsed, words_a_thread
from lowbit_attn.kernels.key import CuteKernel, KernelKey

OVER_WARP = (1, 2, 4, 8, 16)  # lane distances


class AllReduceSm90:
    """The sum of rows of one width and dtype; thread t of a CTA does the words t, t + threads, ... of its row."""

    smem_bytes = 0

    def __init__(self, width: int, dtype: str):
        self.width, self.words, self.dtype = width, width // 2, dtype
        self.each = words_a_thread(width)
        self.threads = self.words // self.each

    @cute.jit
    def __call__(self, x: cute.Tensor, slots: cute.Tensor, peers: cute.Tensor, calls: cute.Tensor, out: cute.Tensor,
                 rank: Int32, stream):
        """x, out: uint32 [rows, width / 2], this rank's part and the sum, rounded once; may be the same memory. slots:
        int64 [2, ranks, capacity, width / 2], this rank's; peers: int64 [ranks], addresses of all ranks' slots; calls:
        uint32 [capacity], how often each row was summed."""
        self.kernel(x, slots, peers, calls, out, rank).launch(grid=(x.shape[0], 1, 1), block=(self.threads, 1, 1),
                                                              stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, slots: cute.Tensor, peers: cute.Tensor, calls: cute.Tensor, out: cute.Tensor,
               rank: Int32):
        row, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        low, high = self.sums(x, slots, peers, calls, rank, row, thread)
        for i in cutlass.range_constexpr(self.each):
            out[row, thread + i * self.threads] = numbers.pack(low[i], high[i], numbers.ELEMENT[self.dtype])

    @cute.jit
    def sums(self, x, slots, peers, calls, rank, row, thread):
        """The sums of both halves of a thread's words, fp32 [each]."""
        _, ranks, capacity, _ = slots.shape
        number = calls[row] + Uint32(1)
        first = Int32(number & Uint32(1)) * ranks  # of this call's half
        row_bytes, step = SLOT_BYTES * self.words, SLOT_BYTES * self.threads
        own = cute.make_rmem_tensor(self.each, Uint32)
        for i in cutlass.range_constexpr(self.each):
            own[i] = x[row, thread + i * self.threads]
        for peer in cutlass.range(ranks, unroll=1):
            if peer != rank:
                to = peers[peer] + (Int64(first + rank) * capacity + row) * row_bytes + SLOT_BYTES * thread
                for i in cutlass.range_constexpr(self.each):
                    push(to + i * step, own[i], number)
        low, high = (cute.make_rmem_tensor(self.each, Float32) for _ in range(2))
        low.fill(0.0)
        high.fill(0.0)
        part, found = cute.make_rmem_tensor(self.each, Uint32), cute.make_rmem_tensor(self.each, Int64)
        for source in cutlass.range(ranks, unroll=1):
            at = slots.iterator.toint() + (Int64(first + source) * capacity + row) * row_bytes + SLOT_BYTES * thread
            for i in cutlass.range_constexpr(self.each):
                part[i] = own[i]
            if source != rank:
                for i in cutlass.range_constexpr(self.each):  # all are on their way before one is waited for
                    found[i] = load_slot(at + i * step)
                for i in cutlass.range_constexpr(self.each):
                    part[i] = wait_from(found[i], at + i * step, number)
            for i in cutlass.range_constexpr(self.each):
                first_channel, second_channel = numbers.widen(part[i], self.dtype)
                low[i] += first_channel
                high[i] += second_channel
        cute.arch.sync_threads()  # all have read the number
        if thread == 0:
            calls[row] = number
        return low, high


class AddNormSm90(AllReduceSm90):
    """The sum of rows, added to a residual, and the residual's RMSNorm."""

    smem_bytes = 4 * WARP

    @cute.jit
    def __call__(self, x: cute.Tensor, slots: cute.Tensor, peers: cute.Tensor, calls: cute.Tensor, out: cute.Tensor,
                 residual: cute.Tensor, weight: cute.Tensor, rank: Int32, epsilon: Float32, stream):
        """As AllReduceSm90; residual: uint32 [rows, width / 2], the same on all ranks, changed in place; weight: uint32
        [width / 2]; out: the norm of the new residual as it is stored, rounded once."""
        self.kernel(x, slots, peers, calls, out, residual, weight, rank, epsilon).launch(
            grid=(x.shape[0], 1, 1), block=(self.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, slots: cute.Tensor, peers: cute.Tensor, calls: cute.Tensor, out: cute.Tensor,
               residual: cute.Tensor, weight: cute.Tensor, rank: Int32, epsilon: Float32):
        @cute.struct
        class Smem:
            squares: cute.struct.MemRange[Float32, WARP]  # of each warp

        row, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        squares = cute.make_tensor(cutlass.memory.SmemAllocator().allocate(Smem).squares.data_ptr(),
                                   cute.make_layout(WARP))
        element = numbers.ELEMENT[self.dtype]
        before, scale = (cute.make_rmem_tensor(self.each, Uint32) for _ in range(2))
        for i in cutlass.range_constexpr(self.each):  # on their way while the others' words come
            before[i], scale[i] = residual[row, thread + i * self.threads], weight[thread + i * self.threads]
        low, high = self.sums(x, slots, peers, calls, rank, row, thread)
        square = Float32(0.0)
        for i in cutlass.range_constexpr(self.each):
            first_channel, second_channel = numbers.widen(before[i], self.dtype)
            word = numbers.pack(first_channel + low[i], second_channel + high[i], element)
            residual[row, thread + i * self.threads] = word
            low[i], high[i] = numbers.widen(word, self.dtype)
            square += low[i] * low[i] + high[i] * high[i]
        total = self.over_threads(square, squares, thread)
        factor = cute.math.rsqrt(total / Float32(self.width) + epsilon)
        for i in cutlass.range_constexpr(self.each):
            first_channel, second_channel = numbers.widen(scale[i], self.dtype)
            out[row, thread + i * self.threads] = numbers.pack(low[i] * factor * first_channel,
                                                               high[i] * factor * second_channel, element)

    @cute.jit
    def over_threads(self, x, words, thread):
        """The sum of all threads' x, by way of a word of shared memory for each warp."""
        total = numbers.over_lanes(x, OVER_WARP, numbers.add)
        if thread % WARP == 0:
            words[thread // WARP] = total
        cute.arch.sync_threads()
        lane, warps = thread % WARP, self.threads // WARP
        mine = Float32(0.0)
        if lane < warps:
            mine = words[lane]
        return numbers.over_lanes(mine, OVER_WARP, numbers.add)


def all_reduce_kernel(key: KernelKey) -> CuteKernel:
    """The kernel and the fake arguments (all but the stream) to compile it for."""
    def fake(element, *shape):
        return make_fake_compact_tensor(element, shape, stride_order=tuple(reversed(range(len(shape)))),
                                        assumed_align=16)

    rows, ranks, capacity = (cute.sym_int() for _ in range(3))
    variant, width = parsed(key)
    words = width // 2
    x, out, residual = (fake(Uint32, rows, words) for _ in range(3))
    slots, peers, calls = fake(Int64, 2, ranks, capacity, words), fake(Int64, ranks), fake(Uint32, capacity)
    arguments = x, slots, peers, calls, out
    if variant == ADD_NORM:
        return CuteKernel(AddNormSm90(width, key.dtype),
                          (*arguments, residual, fake(Uint32, words), Int32(0), Float32(0.0)))
    return CuteKernel(AllReduceSm90(width, key.dtype), (*arguments, Int32(0)))
