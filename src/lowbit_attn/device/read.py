"""A read-only kernel: the floor that decode is compared with, a plain read of the same bytes."""

import tilelang.language as T

from lowbit_attn.device.tilelang_kernel import TileKernel

ACCESS_WORDS = 4  # 16 bytes


def read_kernel(threads: int, unroll: int) -> TileKernel:
    """Read data uint32 [accesses, 4] once with the given grid; sink uint32 [1] only keeps the reads alive.

    Each thread has ``unroll`` independent 16-byte loads in flight; a CTA reads a contiguous run.
    """
    accesses = T.dynamic("accesses")
    step = threads * unroll

    @T.prim_func
    def read(data: T.Tensor((accesses, ACCESS_WORDS), "uint32"), sink: T.Tensor((1,), "uint32"), ctas: T.int32):
        with T.Kernel(ctas, threads=threads) as cta:
            tx = T.get_thread_binding()
            steps, first, last = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            steps = T.truncdiv(accesses + step - 1, step)
            first = T.cast(T.truncdiv(T.cast(steps, "int64") * cta, T.cast(ctas, "int64")), "int32")
            last = T.cast(T.truncdiv(T.cast(steps, "int64") * (cta + 1), T.cast(ctas, "int64")), "int32")
            loaded = T.alloc_local((unroll, ACCESS_WORDS), "uint32")
            total = T.alloc_var("uint32")
            total = T.uint32(0)
            for i in T.serial(last - first):
                for u in T.unroll(unroll):
                    at = T.alloc_var("int32")
                    at = T.min((first + i) * step + u * threads + tx, accesses - 1)
                    for w in T.vectorized(ACCESS_WORDS):
                        loaded[u, w] = data[at, w]
                for u in T.unroll(unroll):
                    for w in T.unroll(ACCESS_WORDS):
                        total = total ^ loaded[u, w]
            if total == T.uint32(0x9E3779B9):
                sink[0] = total

    return TileKernel(read)
