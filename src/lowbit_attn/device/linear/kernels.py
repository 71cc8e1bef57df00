"""The kernel of a key of codebook weights, as it is traced, and the fake arguments that it is compiled for."""

import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint16, Uint32
from cutlass.cute.runtime import make_fake_compact_tensor

from lowbit_attn.device.linear.aqlm import Aqlm2x8, Sum
from lowbit_attn.device.linear.aqlm12 import Aqlm2x12
from lowbit_attn.device.linear.config import Chip, GemvConfig, chip_of
from lowbit_attn.device.linear.dequantize import Dequantize
from lowbit_attn.device.linear.e8p import E8PGemv
from lowbit_attn.device.linear.e8p_dequantize import E8PDequantize
from lowbit_attn.device.linear.e8p_vector import E8PVector
from lowbit_attn.device.linear.fixed import FixedDigits
from lowbit_attn.device.linear.gptvq import Gptvq2
from lowbit_attn.device.linear.hadamard import Hadamard
from lowbit_attn.device.linear.kronecker import SIGNS, Kronecker
from lowbit_attn.device.linear.wide import BATCH_SIGNS, Wide
from lowbit_attn.device.numbers import ELEMENT
from lowbit_attn.kernels.key import CuteKernel, KernelKey


def tensor(kind, *shape, align=4):
    """A dense tensor; None: a size that varies."""
    shape = tuple(cute.sym_int() if size is None else size for size in shape)
    return make_fake_compact_tensor(kind, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=align)


def linear_kernel(key: KernelKey) -> CuteKernel:
    """The kernel of a key and its fake arguments, all but the stream."""
    what, _, kind = key.variant.partition("-")
    chip = chip_of(key)
    if what == "hadamard":
        return hadamard_kernel(kind, key.dtype, chip)
    if what in ("kronecker", "wide"):
        return kronecker_kernel(Wide if what == "wide" else Kronecker, kind, key.dtype, key.rows, chip)
    if what == "fixed":
        return CuteKernel(FixedDigits(chip), (
            tensor(Float32, None, None, align=16), tensor(Uint32, None, None, 32, 8, align=16),
            tensor(Int32, None, None, 2), tensor(Float32, None), Float32(1.0)))
    if what == "sum":
        return CuteKernel(Sum(key.dtype, chip), (tensor(Float32, None, None, None), tensor(Float32, None),
                                           tensor(ELEMENT[key.dtype], None, None, align=2)))
    if what == "dequantize" and not key.format.startswith("e8p"):
        return dequantize_kernel(key, chip)
    if key.format == "aqlm_2x12":
        return CuteKernel(Aqlm2x12(key.dtype, chip), (
            tensor(ELEMENT[key.dtype], 1, None, align=2), tensor(Uint32, None, None, 3, 32, 4, align=16),
            tensor(Float16, 2, 4096, 8, align=16), tensor(Float32, None, 1, None)))
    if key.format == "aqlm_2x8":
        return CuteKernel(Aqlm2x8(key.dtype, chip), (
            tensor(ELEMENT[key.dtype], 1, None, align=2), tensor(Uint32, None, None, 4, 32, 4, align=16),
            tensor(Float16, 2, 256, 8, align=16), tensor(Float32, None, 1, None), Int32(1)))
    if key.format == "gptvq2":
        return CuteKernel(Gptvq2(chip), (
            tensor(Float16, None, None, align=16), tensor(Uint32, None, None, 128, 32, 4, align=16),
            tensor(Uint32, None, None, 512, 4, align=16), tensor(Float32, None, None, None), Int32(1)))
    stages = {"e8p2": 1, "e8p4": 2}[key.format]
    codes, tables, scales = tensor(Uint32, None, None, 32, 4, align=16), tensor(Uint32, 2, 256), tensor(Float32, None)
    if what == "dequantize":
        return CuteKernel(E8PDequantize(stages, chip), (codes, tables, scales,
                                                        tensor(Float16, None, None, align=16), Int32(1)))
    if kind == "vector":
        arguments = (codes, tensor(ELEMENT[key.dtype], None, None, align=8), tensor(Float32, None, align=16),
                     tensor(Float32, None, 32, SIGNS, align=16), tables, scales, tensor(Float32, None, None),
                     tensor(Float32, None), Int32(1), Float32(1.0), Int32(1))
        return CuteKernel(E8PVector(GemvConfig(stages, key.rows, chip, True), key.dtype), arguments)
    arguments = (codes, tensor(Uint32, None, None, 32, 8, align=16), tensor(Int32, None, None, 2), tables, scales,
                 tensor(Float32, None, None), Int32(1))
    return CuteKernel(E8PGemv(GemvConfig(stages, key.rows, chip)), arguments)


def dequantize_kernel(key: KernelKey, chip: Chip) -> CuteKernel:
    """The kernel that writes rows of W: see ``Dequantize``."""
    codes = {"aqlm_2x8": tensor(Uint32, None, None, 4, 32, 4, align=16),
             "aqlm_2x12": tensor(Uint32, None, None, 3, 32, 4, align=16),
             "aqlm_1x16": tensor(Uint16, None, None, align=2),
             "gptvq2": tensor(Uint32, None, None, 128, 32, 4, align=16)}[key.format]
    return CuteKernel(Dequantize(key.format, key.dtype, chip), (
        codes, tensor(Uint32, None, 4, align=16), tensor(Float32, None),
        tensor(ELEMENT[key.dtype], None, None, align=16), Int32(0), Int32(1), Int32(1)))


def hadamard_kernel(kind: str, dtype: str, chip: Chip) -> CuteKernel:
    """A transform: see ``Hadamard``."""
    out = {"digits": tensor(Uint32, None, None, 32, 8, align=16), "rotate": tensor(Float16, None, None, align=2),
           "output": tensor(ELEMENT[dtype], None, None, align=2)}[kind]
    source = tensor(Float32, None, None) if kind == "output" else tensor(ELEMENT[dtype], None, None, align=2)
    arguments = (source, tensor(Float32, None), tensor(Float32, None, None, align=16), out,
                 tensor(Int32, None, None, 2), tensor(Float32, None), Int32(1), Int32(0), Float32(1.0))
    return CuteKernel(Hadamard(kind, dtype, chip), arguments)


def kronecker_kernel(program: type, kind: str, dtype: str, columns: int, chip: Chip) -> CuteKernel:
    """A transform of few rows: see ``Kronecker`` and ``Wide``."""
    source = tensor(ELEMENT[dtype], None, None, align=8)
    out = {"digits": tensor(Uint32, None, None, 32, 8, align=16), "coefficients": tensor(Float32, None, None, align=16),
           "output": tensor(ELEMENT[dtype], None, None, align=16)}[kind]
    if kind == "output":
        source = tensor(Float32, None, None, align=16)
    signs = tensor(Float32, None, 32, BATCH_SIGNS if program is Wide else SIGNS, align=16)
    arguments = (source, tensor(Float32, None, align=4 if kind == "output" else 16), signs, out,
                 tensor(Int32, None, None, 2), tensor(Float32, None), Int32(1), Float32(1.0))
    return CuteKernel(program(kind, dtype, columns, chip), arguments)
