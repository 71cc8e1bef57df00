"""Which kernels exist: their names, how each is traced, and the shipped set of every target.

An arch package (hopper, ampere) declares what its decode kernels support; ``device`` holds the kernels both share.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import product

import torch

from lowbit_attn.formats import FORMATS, Format
from lowbit_attn.formats.uniform import PerChannel, PerToken

# Shared memory a block may use (CUDA programming guide, "Technical specifications per compute capability").
SMEM_LIMIT_BYTES = {"sm_80": 166_912, "sm_89": 101_376, "sm_90": 232_448, "sm_90a": 232_448}
ARCH_TARGETS = {"hopper": ("sm_90a",), "ampere": ("sm_80", "sm_89", "sm_90")}
SHIPPED_FORMATS = ("k4v4",)
SHIPPED_HEAD_DIMS = (64, 128)
SHIPPED_DTYPES = ("float16",)
READ_VARIANTS = ("256x4", "256x8", "512x4", "512x8")
QUANTIZE_DTYPES = (torch.float16, torch.bfloat16)
QUANTIZE_HEAD_DIMS = (64, 96, 128, 256)


@dataclass(frozen=True)
class KernelKey:
    """Identity of one compiled kernel; what varies at run time (batch, heads, lengths) is not in it."""

    op: str  # "decode", "quantize", "dequantize", "combine" or "read"
    arch: str  # "hopper" | "ampere"
    target: str
    dtype: str
    head_dim: int
    format: str = ""  # "" where no packed data is touched (combine)
    variant: str = ""  # decode: path; quantize: k, v, k-search, v-search; dequantize: k, v; read: threads x unroll

    @property
    def name(self) -> str:
        return "-".join(p for p in (self.op, self.variant, self.format, self.dtype, f"d{self.head_dim}") if p)

    def __str__(self) -> str:
        return f"{self.name}@{self.target}"


@dataclass(frozen=True)
class CuteKernel:
    """A CuTe-DSL entry point and the fake arguments (all but the stream) it is compiled for."""

    entry: object
    arguments: tuple


@dataclass(frozen=True)
class Checks:
    """What the SASS of a kernel must show: see sass.KernelSass."""

    need: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ("LDL", "STL")
    expected: tuple[tuple[str, int], ...] = ()
    smem_bytes: int | None = None  # dynamic shared memory the launch asks for; None: none


@cache
def arch_package(arch: str):
    return import_module(f"lowbit_attn.{arch}")


def trace(key: KernelKey):
    """The DSL program of a kernel: a TileKernel or a CuteKernel. Imports the DSL."""
    if key.op == "combine":
        return import_module("lowbit_attn.device.combine").combine_kernel(key.head_dim, key.dtype)
    if key.op == "read":
        threads, unroll = map(int, key.variant.split("x"))
        return import_module("lowbit_attn.device.read").read_kernel(threads, unroll)
    fmt = FORMATS[key.format]
    if key.op == "decode":
        return import_module(f"lowbit_attn.{key.arch}.decode").decode_kernel(fmt, key.head_dim, key.dtype, key.target)
    quantize = import_module("lowbit_attn.device.quantize")
    side_name, _, search = key.variant.partition("-")
    side, offset = (fmt.k, 0) if side_name == "k" else (fmt.v, fmt.record(key.head_dim).v_offset)
    if key.op == "quantize":
        return quantize.quantize_kernel(side, offset, key.head_dim, key.dtype, search == "search")
    return quantize.dequantize_kernel(side, offset, key.head_dim)


def checks(key: KernelKey) -> Checks:
    """The static checks of a kernel, declared beside its source."""
    if key.op == "decode":
        return import_module(f"lowbit_attn.{key.arch}.config").checks(FORMATS[key.format], key.head_dim, key.target)
    return Checks()


@dataclass(frozen=True)
class Support:
    """What one decode path of one architecture serves."""

    k_bits: tuple[int, ...]
    v_bits: tuple[int, ...]
    k_groups: tuple[int, ...]  # tokens, K per channel
    head_dims: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    storages: tuple[torch.dtype, ...]  # of scale and zero-point
    max_ratio: int  # query heads of one KV head
    max_q_len: int

    def missing(self, fmt: Format, head_dim: int, dtype: torch.dtype, ratio: int, q_len: int) -> list[str]:
        """Reasons why a call is not served; empty if it is."""
        if not (isinstance(fmt.k, PerChannel) and isinstance(fmt.v, PerToken)):
            return [f"format {fmt}: supported: K per channel with V per token"]
        wanted = (
            ("K bits", fmt.k.bits, self.k_bits), ("V bits", fmt.v.bits, self.v_bits),
            ("K group", fmt.k.group_size, self.k_groups), ("V group", fmt.v.group_size or head_dim, (head_dim,)),
            ("head_dim", head_dim, self.head_dims), ("dtype", dtype, self.dtypes),
            ("K metadata", fmt.k.storage, self.storages), ("V metadata", fmt.v.storage, self.storages),
            ("query heads per KV head", ratio, range(1, self.max_ratio + 1)), ("q_len", q_len, range(1, self.max_q_len + 1)),
        )
        return [f"{name} {value}, supported: {_listed(supported)}" for name, value, supported in wanted
                if value not in supported]

    def __str__(self) -> str:
        return (f"K of {_listed(self.k_bits)} bits per channel in groups of {_listed(self.k_groups)} tokens, "
                f"V of {_listed(self.v_bits)} bits per token, {_listed(self.storages)} metadata, "
                f"head_dim {_listed(self.head_dims)}, {_listed(self.dtypes)}, "
                f"up to {self.max_ratio} query heads a KV head, q_len up to {self.max_q_len}")


def quantize_missing(fmt: Format, head_dim: int, dtype: torch.dtype) -> list[str]:
    """Reasons why no kernel can fill or read the pages of a cache; empty if one can."""
    reasons = [] if dtype in QUANTIZE_DTYPES else [f"dtype {dtype}, supported: {_listed(QUANTIZE_DTYPES)}"]
    if not isinstance(fmt.k, PerChannel) or not isinstance(fmt.v, PerToken):
        reasons.append(f"format {fmt}, supported: K per channel with V per token")
    if head_dim not in QUANTIZE_HEAD_DIMS:
        reasons.append(f"head_dim {head_dim}, supported: {_listed(QUANTIZE_HEAD_DIMS)}")
    return reasons


def _listed(supported) -> str:
    if isinstance(supported, range):
        return f"{supported[0]} to {supported[-1]}" if len(supported) > 1 else str(supported[0])
    return ", ".join(str(value).removeprefix("torch.") for value in supported)


def quantize_variant(fmt: Format, side_name: str, range_search: bool | None) -> str:
    side = fmt.k if side_name == "k" else fmt.v
    search = side.searches_range if range_search is None else range_search
    return f"{side_name}-search" if search else side_name


def shipped(arch: str) -> list[KernelKey]:
    """Every kernel that ``make`` builds for an architecture."""
    keys = []
    for target, dtype, head_dim in product(ARCH_TARGETS[arch], SHIPPED_DTYPES, SHIPPED_HEAD_DIMS):
        common = (arch, target, dtype, head_dim)
        keys.append(KernelKey("combine", *common))
        for name in SHIPPED_FORMATS:
            keys += [KernelKey("quantize", *common, name, quantize_variant(FORMATS[name], s, None)) for s in "kv"]
            keys += [KernelKey("dequantize", *common, name, side) for side in "kv"]
            keys += [KernelKey("decode", *common, name, path) for path in arch_package(arch).PATHS]
    return keys


def baselines(arch: str) -> list[KernelKey]:
    """The read-only kernels that the benchmarks compare with; they use no packed data."""
    target = ARCH_TARGETS[arch][-1]
    return [KernelKey("read", arch, target, "uint32", 0, variant=variant) for variant in READ_VARIANTS]
