"""The affine group quantizer: values -> (codes, scale, zero), and back.

The last axis of every input is one group. A group stores ``scale`` and ``zero`` in fp16 or bf16 and
reads back ``code * scale + zero``. Codes are chosen against the *stored* (rounded) scale and zero, so
their rounding is absorbed by the codes.
"""

from dataclasses import dataclass

import torch

MIN_SCALE = 2.0**-126  # a stored scale below this counts as 0
SEARCH_FACTORS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
LEVELS = ("minmax", "search", "two-means")


@dataclass(frozen=True)
class Quantized:
    """Codes uint8 [..., group]; scale and zero [...] in their storage dtype."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor


def quantize_groups(x: torch.Tensor, bits: int, storage: torch.dtype, levels: str = "minmax") -> Quantized:
    """Quantize each group (last axis) of fp32 ``x`` to ``bits``-bit codes with ``storage`` metadata.

    levels: "minmax" spans the group; "search" shrinks the span about its midpoint by the factor of
    SEARCH_FACTORS with the least squared error (the larger factor wins ties); "two-means" (1 bit only)
    puts the two levels at the means of the halves below and above the midpoint.

    A constant group is exact (scale 0). A NaN in a group makes its zero NaN, so the whole group reads
    back NaN. An infinity propagates into the metadata.
    """
    if levels not in LEVELS:
        raise ValueError(f"levels: {levels!r} is not supported; supported: {LEVELS}")
    if levels == "two-means":
        if bits != 1:
            raise ValueError(f"levels: two-means is for 1 bit, got {bits} bits")
        return _two_means(x, storage)
    low, high = x.amin(-1), x.amax(-1)  # both propagate NaN
    best = _span(x, low, high, bits, storage)
    if levels == "minmax":
        return best
    best_error = squared_error(x, best)
    middle, half = (low + high) * 0.5, (high - low) * 0.5
    for factor in SEARCH_FACTORS[1:]:
        tried = _span(x, middle - half * factor, middle + half * factor, bits, storage)
        error = squared_error(x, tried)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = Quantized(
            torch.where(better[..., None], tried.codes, best.codes),
            torch.where(better, tried.scale, best.scale),
            torch.where(better, tried.zero, best.zero),
        )
    return best


def dequantize_groups(q: Quantized) -> torch.Tensor:
    """fp32 values ``code * scale + zero``, two roundings, of the same shape as the codes."""
    return q.codes.float() * q.scale.float()[..., None] + q.zero.float()[..., None]


def squared_error(x: torch.Tensor, q: Quantized) -> torch.Tensor:
    return tree_sum((x - dequantize_groups(q)) ** 2)


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """fp32 sum over the last axis by halving: index i takes i + n/2 until one is left; padded with zeros.

    The order is part of the format, because range search compares such sums: a kernel must add alike.
    """
    size = 1 << max(0, x.shape[-1] - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, size - x.shape[-1]))
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def demote(q: Quantized, bits: int) -> Quantized:
    """Codes of ``bits`` bits -> half as many bits, same zero, without the values: affine codes are nested.

    Equal to quantizing the dequantized values again when the group reached both ends.
    """
    if bits not in (8, 4, 2):
        raise ValueError(f"bits: {bits} cannot be demoted; supported: 8, 4, 2")
    ratio = (1 << bits // 2) + 1  # 17, 5, 3 low steps a high step
    codes = (q.codes.int() + ratio // 2).div(ratio, rounding_mode="floor").to(torch.uint8)
    return Quantized(codes, (q.scale.float() * ratio).to(q.scale.dtype), q.zero)


def _store(value: torch.Tensor, storage: torch.dtype) -> torch.Tensor:
    """Rounded to the storage dtype, with one NaN (positive, quiet) and one zero (+0), so that bytes can be compared."""
    stored = value.to(storage)
    stored = torch.where(stored.isnan(), torch.full_like(stored, float("nan")), stored)
    return torch.where(stored == 0, torch.zeros_like(stored), stored)


def _store_scale(scale: torch.Tensor, storage: torch.dtype) -> torch.Tensor:
    stored = _store(scale, storage)
    return torch.where(stored.float() < MIN_SCALE, torch.zeros_like(stored), stored)


def _span(x, low, high, bits: int, storage: torch.dtype) -> Quantized:
    steps = (1 << bits) - 1
    zero, scale = _store(low, storage), _store_scale((high - low) / steps, storage)
    inverse = torch.where(scale == 0, torch.zeros_like(low), 1.0 / scale.float())
    codes = ((x - zero.float()[..., None]) * inverse[..., None]).round().clamp(0, steps)
    return Quantized(codes.nan_to_num(nan=0.0).to(torch.uint8), scale, zero)


def _two_means(x: torch.Tensor, storage: torch.dtype) -> Quantized:
    low, high = x.amin(-1), x.amax(-1)
    below = x < ((high + low) * 0.5)[..., None]
    num_below = below.sum(-1)
    mean_below = tree_sum(torch.where(below, x, 0.0)) / num_below
    mean_above = tree_sum(torch.where(below, 0.0, x)) / (x.shape[-1] - num_below)
    split = num_below > 0
    zero = _store(torch.where(split, mean_below, low), storage)
    scale = _store_scale(torch.where(split, mean_above - mean_below, high - low), storage)
    threshold = zero.float() + scale.float() * 0.5
    codes = (x >= threshold[..., None]) & (scale != 0)[..., None]
    return Quantized(codes.to(torch.uint8), scale, zero)
