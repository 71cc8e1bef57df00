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
SHIPPED_FORMATS = ("k4v4", "k2v2")
SHIPPED_HEAD_DIMS = (64, 128)
SHIPPED_DTYPES = ("float16",)
ROWS = (8, 16)  # query rows of one KV head that a decode kernel is built for
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
    rows: int = 0  # decode: query rows of one KV head that it multiplies at once
    without: tuple[str, ...] = ()  # decode, register path: parts left out (registers.Options), to measure them

    @property
    def name(self) -> str:
        parts = [self.op, self.variant, self.format, self.dtype, f"d{self.head_dim}"]
        parts += [f"r{self.rows}"] if self.rows else []
        return "-".join(filter(None, parts + [f"without_{name}" for name in self.without]))

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
        decode = import_module(f"lowbit_attn.{key.arch}.decode")
        return decode.decode_kernel(fmt, key.head_dim, key.dtype, key.target, key.variant, key.rows,
                                    key.without)
    quantize = import_module("lowbit_attn.device.quantize")
    side_name, _, search = key.variant.partition("-")
    side, offset = (fmt.k, 0) if side_name == "k" else (fmt.v, fmt.record(key.head_dim).v_offset)
    if key.op == "quantize":
        return quantize.quantize_kernel(side, offset, key.head_dim, key.dtype, search == "search")
    return quantize.dequantize_kernel(side, offset, key.head_dim)


def needs_nvcc(key: KernelKey) -> bool:
    """Whether a kernel is TileLang's, which compiles with nvcc; CuTe-DSL brings its own compiler."""
    return not (key.op == "decode" and key.arch == "hopper")


def checks(key: KernelKey) -> Checks:
    """The static checks of a kernel, declared beside its source."""
    if key.op == "decode":
        config = import_module(f"lowbit_attn.{key.arch}.config")
        return config.checks(FORMATS[key.format], key.head_dim, target=key.target, path=key.variant, rows=key.rows,
                             dtype=key.dtype, without=key.without)
    return Checks()


@dataclass(frozen=True)
class Support:
    """What one decode path of one architecture serves. A group of head_dim channels is always served."""

    k_bits: tuple[int, ...]
    v_bits: tuple[int, ...]
    k_groups: tuple[int, ...]  # tokens, K per channel
    head_dims: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    storages: tuple[torch.dtype, ...]  # of scale and zero-point
    max_ratio: int  # query heads of one KV head
    max_q_len: int
    channel_groups: tuple[int, ...] = ()  # channels, V and K per token, beside head_dim
    k_per_token: bool = False
    windows: bool = False  # V may be packed later than K

    def missing(self, fmt: Format, head_dim: int, dtype: torch.dtype, ratio: int, q_len: int) -> list[str]:
        """Reasons why a call is not served; empty if it is."""
        per_token = isinstance(fmt.k, PerToken)
        if not isinstance(fmt.k, PerChannel | PerToken) or not isinstance(fmt.v, PerToken) or (
                per_token and not self.k_per_token):
            return [f"format {fmt}, supported: K per channel{' or per token' * self.k_per_token} with V per token"]
        channels = (*self.channel_groups, head_dim)
        lag = fmt.window_v - fmt.window_k
        # K per token in small groups beside a lagging V is the one combination that does not fit the registers
        lags = self.windows and not (per_token and (fmt.k.group_size or head_dim) != head_dim)
        wanted = (
            ("K bits", fmt.k.bits, self.k_bits), ("V bits", fmt.v.bits, self.v_bits),
            ("K group", fmt.k.group_size or head_dim, channels if per_token else self.k_groups),
            ("V group", fmt.v.group_size or head_dim, channels),
            ("V window beyond K's", lag, (lag if lags else 0,)),
            ("head_dim", head_dim, self.head_dims), ("dtype", dtype, self.dtypes),
            ("K metadata", fmt.k.storage, self.storages), ("V metadata", fmt.v.storage, self.storages),
            ("query heads per KV head", ratio, range(1, self.max_ratio + 1)),
            ("q_len", q_len, range(1, self.max_q_len + 1)),
        )
        return [f"{name} {value}, supported: {_listed(supported)}" for name, value, supported in wanted
                if value not in supported]

    def __str__(self) -> str:
        groups = _listed((*self.channel_groups, "head_dim"))
        per_token = f" or per token in groups of {groups} channels" * self.k_per_token
        return (f"K of {_listed(self.k_bits)} bits per channel in groups of {_listed(self.k_groups)} tokens"
                f"{per_token}; V of {_listed(self.v_bits)} bits per token in groups of {groups} channels; "
                f"{_listed(self.storages)} metadata; head_dim {_listed(self.head_dims)}; {_listed(self.dtypes)}; "
                f"up to {self.max_ratio} query heads a KV head; q_len up to {self.max_q_len}")


def unnamed(fmt: Format) -> list[str]:
    """Why a Format object cannot have kernels, which are built and found by name; empty if FORMATS names it."""
    if fmt.name in FORMATS and FORMATS[fmt.name] == fmt:
        return []
    return [f"format {fmt}: a Format that FORMATS does not give under this name has no kernels, supported: its names"]


def quantize_missing(fmt: Format, head_dim: int, dtype: torch.dtype) -> list[str]:
    """Reasons why no kernel can fill or read the pages of a cache; empty if one can."""
    reasons = [] if dtype in QUANTIZE_DTYPES else [f"dtype {dtype}, supported: {_listed(QUANTIZE_DTYPES)}"]
    if not isinstance(fmt.k, PerChannel | PerToken) or not isinstance(fmt.v, PerToken):
        reasons.append(f"format {fmt}, supported: K per channel or per token with V per token")
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


def packing_keys(arch: str, target: str, dtype: str, head_dim: int, fmt: Format) -> list[KernelKey]:
    """The kernels that fill and read the pages of a format with its default range search."""
    common = (arch, target, dtype, head_dim, fmt.name)
    return [KernelKey("quantize", *common, quantize_variant(fmt, side, None)) for side in "kv"] + [
        KernelKey("dequantize", *common, side) for side in "kv"]


def shipped(arch: str) -> list[KernelKey]:
    """Every kernel that ``make`` builds for an architecture."""
    keys = []
    for target, dtype, head_dim in product(ARCH_TARGETS[arch], SHIPPED_DTYPES, SHIPPED_HEAD_DIMS):
        common = (arch, target, dtype, head_dim)
        keys.append(KernelKey("combine", *common))
        for name in SHIPPED_FORMATS:
            keys += packing_keys(*common, FORMATS[name])
            served = [path for path, support in arch_package(arch).PATHS.items()
                      if not support.missing(FORMATS[name], head_dim, getattr(torch, dtype), 1, 1)]
            keys += [KernelKey("decode", *common, name, path, ROWS[0]) for path in served]
    return keys


def baselines(arch: str) -> list[KernelKey]:
    """The read-only kernels that the benchmarks compare with; they use no packed data."""
    target = ARCH_TARGETS[arch][-1]
    return [KernelKey("read", arch, target, "uint32", 0, variant=variant) for variant in READ_VARIANTS]
