"""A read-only kernel: the floor that decode is compared with, a plain read of the same bytes."""

from functools import reduce
from operator import xor

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_compact_tensor

from lowbit_attn.device import ptx
from lowbit_attn.kernels.key import CuteKernel

ACCESS_WORDS = 4
ACCESS_BYTES = 16
RARE = 0x9E3779B9  # a sum that makes a thread store it


class Read:
    """Read data uint32 [accesses, 4] once with ``ctas`` CTAs; sink uint32 [1] only keeps the reads alive.

    Each thread has ``unroll`` independent 16-byte loads in flight. CTAs take runs of threads x unroll accesses in turn,
    so that the first load needs no division. policy: high word of L2's (ptx.EVICT_UNCHANGED: as a load without one).
    """

    smem_bytes = 0

    def __init__(self, threads: int, unroll: int):
        self.threads, self.unroll = threads, unroll

    @cute.jit
    def __call__(self, data: cute.Tensor, sink: cute.Tensor, ctas: Int32, policy: Int32, stream):
        self.kernel(data, sink, policy).launch(grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, data: cute.Tensor, sink: cute.Tensor, policy: Int32):
        accesses, step = data.shape[0], self.threads * self.unroll
        at = cute.arch.block_idx()[0] * step + cute.arch.thread_idx()[0]
        total = Uint32(0)
        while at < accesses:
            loaded = []
            for i in cutlass.range_constexpr(self.unroll):
                own = cutlass.min(at + i * self.threads, accesses - 1)
                loaded += ptx.load_words(data.iterator.toint() + Int64(own) * ACCESS_BYTES, Int64(policy) << 32)
            total = reduce(xor, loaded, total)
            at = at + cute.arch.grid_dim()[0] * step
        if total == Uint32(RARE):
            sink[0] = total


def read_kernel(threads: int, unroll: int) -> CuteKernel:
    """The kernel and the fake arguments (all but the stream) to compile it for."""
    data, sink = (make_fake_compact_tensor(Uint32, shape, stride_order=tuple(reversed(range(len(shape)))),
                                           assumed_align=ACCESS_BYTES)
                  for shape in ((cute.sym_int(), ACCESS_WORDS), (1,)))
    return CuteKernel(Read(threads, unroll), (data, sink, Int32(1), Int32(0)))
