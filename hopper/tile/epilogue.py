"""End of a split on the tile path: the rows' sums in chunks of channels that follow each other."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from lowbit_attn.hopper.common import combine
from lowbit_attn.hopper.common.abi import Rows
from lowbit_attn.hopper.common.combine import CHANNELS, Outputs, Row, Sums

QUOTIENT_LOG2 = 23  # x // n is x * ceil(2^23 / n) >> 23: x < 4,096 chunks, n <= 2,048 of a split, fewer than 512 splits


def chunks(half: int, acc_o: cute.Tensor, t: Int32) -> tuple[tuple, tuple]:
    """(numbers, values) of this thread's chunks of row g + 8 * half; by the whole warp.

    Of every 16 channels a thread has 2t, 2t + 1 and 8 + 2t, 9 + 2t. Neighbours swap a pair: even t take 4 channels of
    the first eight, odd t of the others.
    """
    is_odd, found = t % 2 != 0, []
    for first in range(0, cute.size(acc_o), 8):
        lower, upper = ([acc_o[first + 4 * j + 2 * half + e] for e in range(2)] for j in range(2))
        own, given = ([cutlass.select_(is_odd, *pair) for pair in zip(*sides)]
                      for sides in ((upper, lower), (lower, upper)))
        got = [cute.arch.shuffle_sync_bfly(x, offset=1) for x in given]
        values = cute.make_rmem_tensor(CHANNELS, Float32)
        for e in range(2):
            values[e], values[2 + e] = (cutlass.select_(is_odd, *pair) for pair in ((got[e], own[e]), (own[e], got[e])))
        found.append((first // 2 + 2 * (t % 2) + t // 2, values))
    return tuple(zip(*found))


@cute.jit
def write(out: Outputs, rows: Rows, row: Row, found: tuple, row_max: Float32, row_sum: Float32):
    """What ``chunks`` found of a query row."""
    numbers, values = found
    sums = tuple(Sums(acc, row_max, row_sum) for acc in values)
    combine.store_partial(out, row, numbers, slot_addresses(out, rows, row, numbers), sums)


def slot_addresses(out: combine.Outputs, rows: Rows, row: combine.Row, chunks: tuple) -> tuple:
    """``combine.slot_address`` of several chunks of a row, with one division for all."""
    size, is_single = combine.chunks_of_split(out, rows.count * out.chunks), out.num_splits == 1
    factor = (Uint32(1 << QUOTIENT_LOG2) + Uint32(size) - Uint32(1)) // Uint32(size)
    found = []
    for chunk in chunks:
        unit = row.idx * out.chunks + chunk
        merger = Int32(Uint32(unit) * factor >> Uint32(QUOTIENT_LOG2))
        own = combine.slot(out, merger, out.split_idx, size, unit - merger * size)
        found.append(combine.Slot(cutlass.select_(is_single, combine.o_address(out, row, chunk), own.acc), own.pair))
    return tuple(found)
