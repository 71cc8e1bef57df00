"""The decode kernels that the GPU tests compare with fp64: each width, grouping, type and row count on either side."""

import re
from dataclasses import dataclass, replace

import torch

from lowbit_attn import kernels
from lowbit_attn.formats import FAMILIES, FORMATS, Family, Format
from lowbit_attn.kernels import KernelKey


def parse_windowed(name: str) -> Format | None:
    """ "k4v4+w128": a uniform format whose V is packed so many tokens later than K, as Kitty's is."""
    if not (match := re.fullmatch(r"(.+)\+w(\d+)", name)):
        return None
    return replace(FORMATS[match[1]], name=name, window_v=int(match[2]))


FAMILIES.append(Family("<uniform>+w<128|256>", (), parse_windowed))


ABLATED = (("centring",), ("exponents",), ("centring", "exponents"))  # registers.Options, left out


@dataclass(frozen=True)
class MatrixKernel:
    """One decode kernel of the register path."""

    format: str
    dtype: str
    head_dim: int
    rows: int

    def __str__(self) -> str:
        return f"{self.format}-{self.dtype}-d{self.head_dim}-r{self.rows}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


F16, BF16 = "float16", "bfloat16"
REGISTER = tuple(MatrixKernel(*kernel) for kernel in (
    # the presets of serving, and every width on either side
    ("k4v4", F16, 128, 8), ("k4v4", F16, 64, 8), ("k4v4", F16, 128, 16), ("k4v4", BF16, 128, 8),
    ("k2v2", F16, 128, 8), ("k2v2", F16, 64, 8), ("k2v2", BF16, 64, 16), ("k4v2", F16, 128, 8), ("k4v2", F16, 64, 8),
    ("k8v4", F16, 128, 8), ("k8v8", F16, 64, 8), ("k8v8", BF16, 128, 16), ("k2v4", F16, 128, 8),
    ("k1v1", F16, 128, 8), ("k1v2", F16, 64, 16), ("k4v1", F16, 128, 16), ("k2v8", BF16, 64, 8),
    # keys per token
    ("k4tv4", F16, 128, 8), ("k2tv2", F16, 64, 8), ("k8tv2", F16, 128, 16), ("k1tv4", BF16, 128, 8),
    # groups
    ("k4v4-g32", F16, 128, 8), ("k2v2-g64-vg32", F16, 64, 8), ("k4v4-vg64", F16, 128, 16),
    ("k4tv4-g32-vg64", F16, 128, 8), ("k2tv2-g64", BF16, 128, 8), ("k1v8-g32-vg32", F16, 64, 8),
    # the largest register demand: 16 rows beside several groups of K
    ("k4v4-g32", F16, 128, 16), ("k4tv4-g32-vg64", BF16, 128, 16), ("k2tv2-g64-vg64", F16, 128, 16),
    # bf16 metadata
    ("k4v4-bf16", BF16, 128, 8), ("k2v2-g32-bf16", BF16, 64, 8), ("k4tv4-g64-vg32-bf16", BF16, 128, 8),
    ("k8v2-bf16", F16, 128, 8),
    # K packed beside V in 16 bit
    ("k4v4+w128", F16, 128, 8), ("k2v2+w128", F16, 64, 8), ("k4tv4+w256", BF16, 128, 16),
))


# formats, dtype and head_dim whose quantize and dequantize kernels are compared with the CPU's bytes
QUANTIZED = (
    ("k4v4", F16, 64), ("k4v4", F16, 128), ("k2v2", F16, 64), ("k2v2", F16, 128), ("k8v1-g32-vg32", F16, 64),
    ("k1v8-bf16", BF16, 128), ("k4tv4", F16, 128), ("k2tv2-g32", F16, 64), ("k1tv1-g64-vg64-bf16", BF16, 128),
)


def served(kernel: MatrixKernel, arch: str, path: str = "register") -> list[str]:
    """Reasons why an architecture's path does not serve the kernel; empty if it does."""
    support = kernels.arch_package(arch).PATHS[path]
    return support.missing(FORMATS[kernel.format], kernel.head_dim, kernel.torch_dtype, kernel.rows, 1)


def keys(arch: str) -> list[KernelKey]:
    """What the GPU tests need beyond the shipped set, for the one target of an architecture that runs on Hopper."""
    target = kernels.ARCH_TARGETS[arch][-1]
    decode = [KernelKey("decode", arch, target, k.dtype, k.head_dim, k.format, "register", k.rows)
              for k in REGISTER if not served(k, arch)]
    decode += [replace(key, without=parts) for key in decode for parts in ABLATED
               if (key.format, key.dtype, key.head_dim, key.rows) in (("k4v4", F16, 128, 8), ("k2v2", F16, 128, 8))]
    combine = {KernelKey("combine", arch, target, k.dtype, k.head_dim) for k in REGISTER}
    packing = [key for name, dtype, head_dim in QUANTIZED
               for key in kernels.packing_keys(arch, target, dtype, head_dim, FORMATS[name])]
    return decode + sorted(combine, key=str) + packing
