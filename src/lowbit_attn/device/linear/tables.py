"""What kernels with tables in shared memory have in common: where they are, a CTA's share of units, words of codes."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from lowbit_attn.device import ptx
from lowbit_attn.device.linear.config import TABLE_AT, Chip

CODE_WORDS = 4  # of a lane in one access


class Cta(NamedTuple):
    """The thread that runs, and its CTA."""

    thread: Int32
    lane: Int32
    warp: Int32
    index: Int32
    count: Int32  # of all CTAs

    def share(self, units: Int32) -> tuple[Int32, Int32]:
        """(first, end) of the CTA's units, if all CTAs have as many but for one."""
        return Int32(Int64(units) * self.index // self.count), Int32(Int64(units) * (self.index + 1) // self.count)


def let_next_start(chip: Chip) -> None:
    """The next kernel in the stream may start."""
    if chip.is_hopper:
        cute.arch.griddepcontrol_launch_dependents()


def wait_for_last(chip: Chip) -> None:
    """Wait until the kernel ahead in the stream has ended, if this one may have started before."""
    if chip.is_hopper:
        cute.arch.griddepcontrol_wait()


def begin_kernel(smem_bytes: int, chip: Chip) -> Cta:
    """Begin a kernel: the next one in the stream may start, and tables have the addresses that lookups need."""
    let_next_start(chip)
    thread, lane = cute.arch.thread_idx()[0], Int32(cute.arch.lane_idx())
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    index, count = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]

    @cute.struct
    class Smem:
        words: cute.struct.Align[cute.struct.MemRange[Uint32, smem_bytes // 4], 1024]

    check_base(Int32(cutlass.memory.SmemAllocator().allocate(Smem).words.data_ptr().toint()))
    return Cta(thread, lane, warp, index, count)


@cute.jit
def check_base(base: Int32):
    """Stop the kernel where shared memory does not start as the addresses of tables need it."""
    if base > TABLE_AT:
        ptx.trap()


def shared(kind, address, offset: int, count: int = 1) -> cute.Tensor:
    """Numbers of 32 bits at a shared address."""
    pointer = cute.make_ptr(kind, address, cute.AddressSpace.smem, assumed_align=4 * count)
    return cute.make_tensor(pointer + offset // 4, cute.make_layout(count))


def words_at(address: Int64, count: int = CODE_WORDS) -> cute.Tensor:
    """Words of global memory, in one access."""
    return cute.make_tensor(cute.make_ptr(Uint32, address, cute.AddressSpace.gmem, assumed_align=4 * count),
                            cute.make_layout(count))


def load_once(address: Int64, codes: cute.Tensor, chip: Chip) -> None:
    """Four words of global memory that no one reads again: on Hopper they leave L2 first."""
    words = ptx.load_words(address, Int64(ptx.EVICT_FIRST) << 32) if chip.is_hopper else words_at(address)
    for i in range(CODE_WORDS):
        codes[i] = words[i]


def codes_now_and_ahead(accesses: int) -> tuple[cute.Tensor, cute.Tensor]:
    """Registers of (CODE_WORDS, access): codes that are multiplied, and those on their way meanwhile; zeros."""
    pair = tuple(cute.make_rmem_tensor((CODE_WORDS, accesses), Uint32) for _ in range(2))
    for codes in pair:
        codes.fill(0)
    return pair


def advance(current: cute.Tensor, ahead: cute.Tensor) -> None:
    """What was on its way is what is multiplied next."""
    for j in range(current.shape[1]):
        for i in range(CODE_WORDS):
            current[i, j] = ahead[i, j]


def visible(value: Float32) -> Float32:
    """The number; of an infinity a NaN, as every result of its row of x must be."""
    return value + value * 0.0
