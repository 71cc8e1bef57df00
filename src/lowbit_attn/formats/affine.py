"""The affine group quantizer: values -> (codes, scale, zero), and back.

The last axis of every input is one group. A group stores ``scale`` and ``zero`` in fp16 or bf16 and
reads back ``code * scale + zero``. Codes are chosen against the *stored* (rounded) scale and zero, so
their rounding is absorbed by the codes.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

MIN_SCALE = 2.0**-126  # a stored scale below this counts as 0
SEARCH_TENTHS = (10, 9, 8, 7, 6, 5, 4, 3)  # of a group's span that range search tries
SEARCH_FACTORS = tuple(tenths / 10 for tenths in SEARCH_TENTHS)
SEARCH_GRID = 150  # steps from a group's midpoint to its ends: all levels of 1, 2 and 4 bits at all factors are whole
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
    SEARCH_FACTORS that ``search`` picks; "two-means" (1 bit only) puts the two levels at the means of the
    halves below and above the midpoint.

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
    if levels == "minmax":
        return _span(x, low, high - low, bits, storage)
    tried = search(x, low, high, bits)
    factor = _factors(x.device)[tried]
    bottom = torch.where(tried > 0, low + (high - low) * 0.5 * (1 - factor), low)
    return _span(x, bottom, (high - low) * factor, bits, storage)


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # kept for all callers, captured ones too
def _factors(device: torch.device) -> torch.Tensor:
    return torch.tensor(SEARCH_FACTORS, dtype=torch.float32, device=device)


def search(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor, bits: int) -> torch.Tensor:
    """Index into SEARCH_FACTORS of the least squared error of each group, the larger factor on ties.

    Errors are exact integers, so they may be added in any order: distances from the midpoint are rounded to a grid of
    SEARCH_GRID steps, where every level lies. Midpoint, steps per unit (a quotient), difference and product are fp32,
    rounded once each: values half way between two steps follow their last bits. The levels are symmetric, so
    ``abs(distance - c)``, with c half of the levels' reach, folds them onto half as many, and so on until the miss of
    the nearest one is left. A group whose span is zero or not finite keeps factor 1, and so do 8 bits: cutting 5 % of
    the span off both ends misses by more than 255 steps can, up to 1,300 values.
    """
    inverse = quotient(SEARCH_GRID, (high - low) * 0.5)
    searched = (inverse > 0) & (inverse < torch.inf) & (bits < 8)
    distance = ((x - ((low + high) * 0.5)[..., None]) * inverse[..., None]).abs().round()
    distance = distance.nan_to_num(nan=0.0).clamp(max=SEARCH_GRID).int()
    errors = []
    for tenths in SEARCH_TENTHS:
        miss = distance
        for fold in folds(tenths, bits):
            miss = (miss - fold).abs()
        errors.append((miss * miss).sum(-1))
    errors = torch.stack(errors, -1)
    first = (errors == errors.amin(-1, keepdim=True)).int().argmax(-1)  # of equal ones: argmin may give any
    return torch.where(searched, first, 0)


def folds(tenths: int, bits: int) -> list[int]:
    """Distances, in steps of the search grid, about which the levels of a factor are folded, the last onto one."""
    half_step = SEARCH_GRID * tenths // (10 * ((1 << bits) - 1))
    return [half_step << i for i in reversed(range(bits))]


def largest_finite(bits: int, storage: torch.dtype) -> float:
    """Magnitude up to which the values of any group have finite metadata and read back finite.

    fp16 metadata: a span is at most 2 * 65504, and so is a scale of 1 bit, but of more bits a third of that. bf16
    reaches as far as fp32, in which up to 256 values are added: 2^118 leaves room for the sum and for the span.
    """
    if storage == torch.float16:
        return torch.finfo(storage).max / (2 if bits == 1 else 1)
    return 2.0**118


def dequantize_groups(q: Quantized) -> torch.Tensor:
    """fp32 values ``code * scale + zero``, two roundings, of the same shape as the codes."""
    return q.codes.float() * q.scale.float()[..., None] + q.zero.float()[..., None]


def squared_error(x: torch.Tensor, q: Quantized) -> torch.Tensor:
    return tree_sum((x - dequantize_groups(q)) ** 2)


def quotient(x: torch.Tensor | float, y: torch.Tensor | float) -> torch.Tensor:
    """x / y in fp32, rounded once, where one of them is a number: torch multiplies by a rounded reciprocal then.

    It does so for a number over a tensor, and on a GPU for a tensor over a number; the kernels divide.
    """
    if isinstance(x, torch.Tensor):
        return x / torch.full_like(x, y)
    return torch.full_like(y, x) / y


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """fp32 sum over the last axis by halving: index i takes i + n/2 until one is left; padded with zeros.

    The order is part of the format, because codes follow from such sums: a kernel must add alike.
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


def _span(x, low, width, bits: int, storage: torch.dtype) -> Quantized:
    steps = (1 << bits) - 1
    zero, scale = _store(low, storage), _store_scale(quotient(width, steps), storage)
    inverse = torch.where(scale == 0, torch.zeros_like(low), quotient(1.0, scale.float()))
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
