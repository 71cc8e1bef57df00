"""Warpgroup multiplies (wgmma), and what they need: operands by matrix descriptors, and the fence before their reads.

A multiply reads registers and shared memory when its group is waited for, as late as it may. What a thread wrote to
shared memory must have been fenced for such reads (fence.proxy.async); a read of what was not is an error.
"""

from functools import partial

import numpy as np

from sim.ptx.memory import LANES, names_of
from sim.ptx.numbers import U64, bits, f32, halves_of

LANE = np.arange(LANES)
G, T = LANE // 4, LANE % 4
K = 16
SWIZZLES = {1: 128, 2: 64, 3: 32}  # bytes of a row of the atom, by the layout in a descriptor


def step(warp, suffixes, operands, active):
    """wgmma.fence, mma_async, commit_group, wait_group."""
    assert active.all()
    if suffixes[0] == "mma_async":
        warp.multiplies.append(partial(multiply, warp, suffixes, operands, warp.value(operands[3])))
    elif suffixes[0] == "commit_group":
        warp.multiply_groups.append(warp.multiplies)
        warp.multiplies = []
    elif suffixes[0] == "wait_group":
        while len(warp.multiply_groups) > int(operands[0]):
            for pending in warp.multiply_groups.pop(0):
                pending()
    else:
        assert suffixes[0] == "fence", suffixes


def multiply(warp, suffixes, operands, is_added) -> None:
    """m64nNk16 with fp32 accumulators, of which a warp has 16 rows; A from registers or K-major in shared memory, B
    in shared memory, K-major or (its last immediate) with N contiguous."""
    _, n, k = (int(x) for x in suffixes[3][1:].replace("n", " ").replace("k", " ").split())
    d, a, b, _, *immediates = operands
    wanted = ["1", "1"] + ["0"] * (1 - (a[0] == "{"))
    assert k == K and suffixes[-3] == "f32" and immediates[:-1] == wanted and immediates[-1] in "01", operands[3:]
    is_bf16 = suffixes[-1] == "bf16"
    row = 16 * (warp.index % 4)
    left = of_registers(warp, a, is_bf16) if a[0] == "{" else of_shared(warp, a, row + np.arange(16), is_bf16)
    read = of_shared_by_k if immediates[-1] == "1" else of_shared
    product = left @ read(warp, b, np.arange(n), is_bf16).T
    assert (is_added == is_added[0]).all()
    for i, name in enumerate(names_of(d)):
        part = product[G + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * T + i % 2]
        warp.registers[name] = bits(part + f32(warp.value(name)) if is_added[0] else part)


def of_registers(warp, operand: str, is_bf16: bool) -> np.ndarray:
    """16 rows of A, fp64 [16, 16]."""
    found = np.zeros((16, K))
    for i, word in enumerate(warp.values(operand)):
        for e, value in enumerate(halves_of(word, is_bf16)):
            found[G + 8 * (i % 2), 2 * T + e + 8 * (i // 2)] = value
    return found


def of_shared(warp, operand: str, rows: np.ndarray, is_bf16: bool) -> np.ndarray:
    """Rows of a K-major operand in shared memory, fp64 [rows, 16]."""
    (descriptor,) = set(warp.value(operand).tolist())
    start, pitch = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4  # pitch: of eight rows
    size = SWIZZLES[descriptor >> 62]
    assert descriptor >> 49 & 7 == 0, "base offset"
    at = start + rows[:, None] // 8 * pitch + rows[:, None] % 8 * size + 16 * np.arange(2)
    return values_at(warp, at, size, is_bf16).reshape(len(rows), K)


def of_shared_by_k(warp, operand: str, rows: np.ndarray, is_bf16: bool) -> np.ndarray:
    """Rows of an operand in shared memory whose rows are contiguous, 64 of them for each k, fp64 [rows, 16]: the atom
    of the 128-byte swizzle has eight k; ``pitch`` is from eight k to the next, ``leading`` from 64 rows to the next."""
    (descriptor,) = set(warp.value(operand).tolist())
    start, leading, pitch = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    assert SWIZZLES[descriptor >> 62] == 128 and descriptor >> 49 & 7 == 0 and len(rows) % 64 == 0
    first, k = rows[::8, None], np.arange(K)
    at = start + first // 64 * leading + k // 8 * pitch + k % 8 * 128 + first % 64 * 2
    return values_at(warp, at, 128, is_bf16).reshape(len(rows) // 8, K, 8).swapaxes(1, 2).reshape(len(rows), K)


def values_at(warp, at: np.ndarray, size: int, is_bf16: bool) -> np.ndarray:
    """Eight values from each byte address on, before the swizzle of ``size`` bytes, fp64."""
    at = at ^ (at >> 7 & size // 16 - 1) << 4  # the 16 bytes of a row change places by the line they are in
    shared = warp.cta.shared
    places = shared.places(at.reshape(-1).astype(U64), 16)
    assert not warp.cta.unfenced[places].any(), "a multiply reads what no fence has made visible to it"
    words = shared.data[places].reshape(-1, 16).view(np.uint16).astype(U64)
    return halves_of(words, is_bf16)[0].astype(np.float64)


def stmatrix(warp, suffixes, operands, active):
    """Lane 8 i + r names the 16 bytes of row r of matrix i."""
    assert active.all()
    words = warp.values(operands[1])
    address = warp.address(operands[0])
    for i, word in enumerate(words):
        matrix = np.zeros((8, 8), np.uint16)
        matrix[G, 2 * T], matrix[G, 2 * T + 1] = word & U64(0xFFFF), word >> U64(16) & U64(0xFFFF)
        matrix = np.ascontiguousarray(matrix.T if "trans" in suffixes else matrix)
        warp.write_shared(address[8 * i : 8 * i + 8], matrix.view(np.uint8))
