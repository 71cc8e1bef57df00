"""Scalars and fragments: packed 16-bit words, powers of two, reductions over lanes, one multiply."""

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import warp

from lowbit_attn import layout, registers
from lowbit_attn.device import ptx
from lowbit_attn.registers import matrix_place

ELEMENT = {"float16": Float16, "bfloat16": BFloat16}
NEG_INF = float("-inf")
LOWEST = -3.4028234663852886e38  # -FLT_MAX, the maximum before any token: finite, so that exp2(-inf - LOWEST) is 0
LOW_HALF, HIGH_HALF = 0x0000_FFFF, 0xFFFF_0000
OVER_T = (1, 2)  # lane distances of the four lanes that share g
OVER_G = (4, 8, 16)  # lane distances of the eight lanes that share t


def widen(word: Uint32, storage: str) -> tuple[Float32, Float32]:
    """Low and high half of a word of fp16 or bf16 as fp32, exact."""
    if storage == "bfloat16":
        return (word << Uint32(16)).bitcast(Float32), (word & Uint32(HIGH_HALF)).bitcast(Float32)
    halves = cute.make_rmem_tensor(2, Float16)
    cute.recast_tensor(halves, Uint32)[0] = word
    return Float32(halves[0]), Float32(halves[1])


def pack(low: Float32, high: Float32, element=Float16) -> Uint32:
    """Both values rounded to nearest, in the halves of a word."""
    pair, halves = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, element)
    pair[0], pair[1] = low, high
    halves.store(pair.load().to(element))
    return cute.recast_tensor(halves, Uint32)[0]


def pow2(exponent: Int32) -> Float32:
    """2^exponent, -126 <= exponent <= 127."""
    return Int32(registers.pow2_bits(exponent)).bitcast(Float32)


def ceil_log2(x: Float32, at_least: int) -> Int32:
    """ceil(log2 max(x, 2^at_least))."""
    return Int32(registers.ceil_log2(cute.arch.fmax(x, Float32(2.0**at_least)).bitcast(Int32)))


def tree(values: list, combine):
    """Fold in pairs: few dependent steps."""
    while len(values) > 1:
        values = [combine(*pair) if len(pair) == 2 else pair[0]
                  for pair in (values[i : i + 2] for i in range(0, len(values), 2))]
    return values[0]


def over_lanes(x, distances, combine):
    """Reduce over the lanes at these distances; every lane gets the result."""
    return all_over_lanes([x], distances, combine)[0]


def all_over_lanes(values: list, distances, combine) -> list:
    """``over_lanes`` of several values, side by side."""
    for distance in distances:
        others = [cute.arch.shuffle_sync_bfly(x, offset=distance) for x in values]
        values = [combine(*pair) for pair in zip(values, others)]
    return values


def add(x, y):
    return x + y


def max_half(word: Uint32, storage: str) -> Float32:
    """The larger half of a word without sign bits, as fp32."""
    return widen(ptx.max_u16x2(word, word >> Uint32(16)) & Uint32(LOW_HALF), storage)[0]


def warp_max(x: Float32) -> Float32:
    """The largest of the warp's numbers, none of which is negative."""
    return Uint32(cute.arch.warp_redux_sync(x.bitcast(Uint32), "umax")).bitcast(Float32)


def fragments(count: int, element=Float16, words: int = 2):
    """Operands of ``words`` registers: (16-bit view [2 * words, count] for the multiply, word view [words, count])."""
    tensor = cute.make_rmem_tensor((2 * words, count), element)
    return tensor, cute.recast_tensor(tensor, Uint32)


def multiply_atom(element=Float16):
    """m16n8k16 with fp32 accumulators."""
    return cute.make_mma_atom(warp.MmaF16BF16Op(element, Float32, (layout.TILE, 8, 16)))


def operand_a(words: list[Uint32], element=Float16) -> cute.Tensor:
    a, a_words = fragments(1, element, 4)
    for i, word in enumerate(words):
        a_words[i, 0] = word
    return a[None, 0]


def multiply(atom, acc: cute.Tensor, index: int, a: cute.Tensor, b: cute.Tensor) -> None:
    """acc[:, index] += a b, a 16x16 and b 16x8."""
    cute.mma_atom_call(atom, acc[None, index], a, b, acc[None, index])


def zero_dead(frag: cute.Tensor, token: Uint32, live: Uint32) -> None:
    """Zero the halves of a V^T fragment whose token is not live; ``token``: that of register 0's low half.

    P = 0 does not protect: 0 * NaN is NaN.
    """
    words = cute.recast_tensor(frag, Uint32)
    for matrix in range(4):
        _, col8 = matrix_place(matrix)
        low, high = Uint32(token + 8 * col8 < live), Uint32(token + 8 * col8 + 1 < live)
        words[matrix] = words[matrix] & (low * Uint32(0x0000FFFF) + high * Uint32(0xFFFF0000))
