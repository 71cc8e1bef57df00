"""Steps of the affine quantizer that both quantize kernels share: reductions over held values, and stored values."""

import tilelang.language as T

from lowbit_attn.formats.affine import MIN_SCALE

EXACT = ("-fmad=false",)
STORED_NAN = {"float16": 0x7E00, "bfloat16": 0x7FC0}
UNIT_WORDS = 32  # the pool is addressed in units of 128 bytes


@T.macro
def stored_span(low, high, scale, zero, storage):
    """A group's scale and zero as a reader will see them: rounded to storage, then fp32 again."""
    zero[0] = T.cast(T.cast(low, storage), "float32")
    if zero[0] == T.float32(0.0):
        zero[0] = T.float32(0.0)
    scale[0] = T.cast(T.cast(high, storage), "float32")
    if scale[0] < T.float32(MIN_SCALE):
        scale[0] = T.float32(0.0)


def fold(values: list, step):
    """step (T.min, T.max or an or) over the values, in pairs."""
    while len(values) > 1:
        values = [step(*values[i : i + 2]) if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]
    return values[0]


def tree_sum(values: list):
    """The lane's part of affine.tree_sum: index i takes i + half; the caller's shuffles finish it."""
    size = 1 << max(0, len(values) - 1).bit_length()
    while size > 1:
        size //= 2
        values = [values[i] + values[i + size] if i + size < len(values) else values[i] for i in range(size)]
    return values[0]


def pick(values, index):
    """values[index] of a static tuple for a symbolic index."""
    chosen = T.float32(values[-1])
    for i, value in reversed(list(enumerate(values[:-1]))):
        chosen = T.if_then_else(index == i, T.float32(value), chosen)
    return chosen


def storage_bits(value, storage: str):
    """Bits of an fp32 value that storage represents exactly; every NaN as the one positive quiet NaN."""
    return T.if_then_else(T.isnan(value), T.uint16(STORED_NAN[storage]),
                          T.reinterpret(T.cast(value, storage), "uint16"))
