"""Uniform affine formats of 8, 4, 2 and 1 bits (BitDecoding, KIVI).

K is grouped per channel (a group is one channel over consecutive tokens: KIVI, BitDecoding "KC") or
per token (a group is one token over consecutive channels: "KT"); V is always grouped per token.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

import torch

from lowbit_attn import layout
from lowbit_attn.formats import packing
from lowbit_attn.formats.affine import Quantized, dequantize_groups, largest_finite, quantize_groups
from lowbit_attn.formats.contract import Format, Planes, Side, part_of
from lowbit_attn.formats.spec import Kind, SideSpec

GROUP_SIZES = (32, 64, 128)
SEARCH_BITS = 2  # per-channel or per-token K of at most this many bits searches its range by default
GRAMMAR = "k<8|4|2|1>[t]v<8|4|2|1>[-g<32|64|128>][-vg<32|64|128>][-bf16]"
PRESETS = ("k8v4", "k4v4", "k4v2", "k2v2", "k4tv4")

_NAME = re.compile(r"k([8421])(t?)v([8421])(?:-g(32|64|128))?(?:-vg(32|64|128))?(-bf16)?")


@dataclass(frozen=True)
class PerChannel(Side):
    """K as rows = tokens, columns = channels; one (scale, zero) per channel and group of tokens."""

    kind = Kind.CHANNEL
    bits: int
    group_size: int = layout.PAGE_TOKENS  # tokens
    storage: torch.dtype = torch.float16
    searches_range: bool = False

    def spec(self, head_dim: int, start: int = 0) -> SideSpec:
        at, nbytes = part_of(self, head_dim)
        return SideSpec(self.kind, self.bits, head_dim, False, self.group_size, dtype_name(self.storage), start,
                        nbytes, at["codes"], at["meta"], searches_range=self.searches_range)

    def plainest(self) -> str:
        group = f"-g{self.group_size}" * (self.group_size != layout.PAGE_TOKENS)
        return f"k{self.bits}v{self.bits}{group}{_suffix(self.storage)}"

    def largest(self) -> float:
        return largest_finite(self.bits, self.storage)

    def check(self, head_dim: int) -> None:
        layout.check_codes(layout.PAGE_TOKENS, head_dim, self.bits, "K")

    def plane_sizes(self, head_dim: int) -> dict[str, int]:
        groups = layout.PAGE_TOKENS // self.group_size
        return {
            "codes": layout.plane_bytes(layout.PAGE_TOKENS, head_dim, self.bits),
            "meta": 2 * layout.META_BYTES * groups * head_dim,
        }

    def quantize(self, x: torch.Tensor, range_search: bool) -> Planes:
        groups = x.unflatten(1, (-1, self.group_size)).transpose(2, 3)  # [n, groups, d, g]
        q = quantize_groups(groups, self.bits, self.storage, levels(self.bits, range_search))
        codes = q.codes.transpose(2, 3).flatten(1, 2)
        return {
            "codes": packing.pack_codes(codes, self.bits),
            "meta": packing.pack_channel_meta(q.scale, q.zero),
        }

    def dequantize(self, planes: Planes, head_dim: int) -> torch.Tensor:
        codes = packing.unpack_codes(planes["codes"], layout.PAGE_TOKENS, head_dim, self.bits)
        scale, zero = packing.unpack_channel_meta(planes["meta"], head_dim, self.storage)
        groups = codes.unflatten(1, (-1, self.group_size)).transpose(2, 3)
        return dequantize_groups(Quantized(groups, scale, zero)).transpose(2, 3).flatten(1, 2)


@dataclass(frozen=True)
class PerToken(Side):
    """One (scale, zero) per token and group of channels.

    ``transposed`` (V): rows = channels, columns = tokens; else (K): rows = tokens, columns = channels.
    """

    kind = Kind.TOKEN
    bits: int
    transposed: bool
    group_size: int | None = None  # channels; None: head_dim
    storage: torch.dtype = torch.float16
    searches_range: bool = False

    def spec(self, head_dim: int, start: int = 0) -> SideSpec:
        at, nbytes = part_of(self, head_dim)
        return SideSpec(self.kind, self.bits, head_dim, self.transposed, self._group(head_dim),
                        dtype_name(self.storage), start, nbytes, at["codes"], at["meta"],
                        searches_range=self.searches_range)

    def plainest(self) -> str:
        group = f"-{'v' * self.transposed}g{self.group_size}" if self.group_size else ""
        return f"k{self.bits}{'' if self.transposed else 't'}v{self.bits}{group}{_suffix(self.storage)}"

    def largest(self) -> float:
        return largest_finite(self.bits, self.storage)

    def check(self, head_dim: int) -> None:
        rows = head_dim if self.transposed else layout.PAGE_TOKENS
        side = "V" if self.transposed else "K"
        layout.check_codes(rows, head_dim, self.bits, side)
        if head_dim % self._group(head_dim):
            raise ValueError(f"{side} group {self.group_size} does not divide head_dim {head_dim}; "
                             f"supported: head_dim and those of {GROUP_SIZES} that divide it")

    def plane_sizes(self, head_dim: int) -> dict[str, int]:
        groups = head_dim // self._group(head_dim)
        return {
            "codes": layout.plane_bytes(layout.PAGE_TOKENS, head_dim, self.bits),
            "meta": 2 * layout.META_BYTES * groups * layout.PAGE_TOKENS,
        }

    def quantize(self, x: torch.Tensor, range_search: bool) -> Planes:
        groups = x.unflatten(2, (-1, self._group(x.shape[2])))  # [n, tokens, groups, g]
        q = quantize_groups(groups, self.bits, self.storage, levels(self.bits, range_search))
        codes = q.codes.flatten(2, 3)
        return {
            "codes": packing.pack_codes(codes.transpose(1, 2) if self.transposed else codes, self.bits),
            "meta": packing.pack_token_meta(q.scale.transpose(1, 2), q.zero.transpose(1, 2)),
        }

    def dequantize(self, planes: Planes, head_dim: int) -> torch.Tensor:
        rows, cols = (head_dim, layout.PAGE_TOKENS) if self.transposed else (layout.PAGE_TOKENS, head_dim)
        codes = packing.unpack_codes(planes["codes"], rows, cols, self.bits)
        codes = codes.transpose(1, 2) if self.transposed else codes
        scale, zero = packing.unpack_token_meta(planes["meta"], self.storage)
        groups = codes.unflatten(2, (-1, self._group(head_dim)))
        return dequantize_groups(Quantized(groups, scale.transpose(1, 2), zero.transpose(1, 2))).flatten(2, 3)

    def _group(self, head_dim: int) -> int:
        return self.group_size or head_dim


@lru_cache
def parse(name: str) -> Format | None:
    """The format of a name in GRAMMAR, or None if the name is not in it."""
    match = _NAME.fullmatch(name)
    if not match:
        return None
    k_bits, per_token, v_bits, k_group, v_group, bf16 = match.groups()
    storage = torch.bfloat16 if bf16 else torch.float16
    k_bits, v_bits = int(k_bits), int(v_bits)
    k_kwargs = dict(storage=storage, searches_range=k_bits <= SEARCH_BITS)
    if per_token:
        k = PerToken(k_bits, transposed=False, group_size=int(k_group) if k_group else None, **k_kwargs)
    else:
        k = PerChannel(k_bits, group_size=int(k_group or layout.PAGE_TOKENS), **k_kwargs)
    v = PerToken(v_bits, transposed=True, group_size=int(v_group) if v_group else None, storage=storage)
    return Format(name, k, v)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name as kernels write it: "float16", "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _suffix(storage: torch.dtype) -> str:
    return "-bf16" * (storage is torch.bfloat16)


def levels(bits: int, range_search: bool) -> str:
    """1 bit never uses plain min/max: its error exceeds that of storing the mean alone."""
    return "search" if range_search else "two-means" if bits == 1 else "minmax"
