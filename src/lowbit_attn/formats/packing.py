"""Codes and metadata between matrices and the bytes of a page, in the order of ``layout``.

Plain torch on any device; it is what the kernels' bytes are compared with.
"""

from functools import lru_cache

import torch

from lowbit_attn import layout


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes [..., rows, cols] -> bytes uint8 [..., rows * cols * bits / 8]."""
    rows, cols = codes.shape[-2:]
    source = _code_source(rows, cols, bits, codes.device)  # [bytes, slots]
    by_slot = codes.flatten(-2)[..., source].int()
    shifts = torch.arange(source.shape[-1], device=codes.device) * bits
    return (by_slot << shifts).sum(-1).to(torch.uint8)


def unpack_codes(packed: torch.Tensor, rows: int, cols: int, bits: int) -> torch.Tensor:
    """Inverse of ``pack_codes``: bytes -> uint8 codes [..., rows, cols]."""
    source = _code_source(rows, cols, bits, packed.device)
    shifts = torch.arange(source.shape[-1], device=packed.device) * bits
    by_slot = (packed[..., None].int() >> shifts) & ((1 << bits) - 1)
    codes = torch.empty(*packed.shape[:-1], rows * cols, dtype=torch.uint8, device=packed.device)
    codes[..., source.flatten()] = by_slot.flatten(-2).to(torch.uint8)
    return codes.unflatten(-1, (rows, cols))


def pack_channel_meta(scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Per-channel scale and zero [..., groups, head_dim] -> bytes uint8 [...]."""
    source = _source(layout.channel_at, scale.shape[-1], scale.device)
    return _to_bytes(torch.stack([_bits(x)[..., source] for x in (scale, zero)], -2).flatten(-3))


def unpack_channel_meta(packed: torch.Tensor, head_dim: int, storage: torch.dtype):
    """Inverse of ``pack_channel_meta``: bytes -> (scale, zero), each [..., groups, head_dim]."""
    values = packed.contiguous().view(storage).unflatten(-1, (-1, 2, head_dim))
    scale, zero = _inverse(values, layout.channel_meta_index, head_dim).unbind(-2)
    return scale, zero


def pack_token_meta(scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Per-token scale and zero [..., groups, 128 tokens] -> bytes uint8 [...]."""
    source = _source(layout.token_at, scale.shape[-1], scale.device)
    return _to_bytes(torch.stack([_bits(x)[..., source] for x in (scale, zero)], -1).flatten(-3))


def unpack_token_meta(packed: torch.Tensor, storage: torch.dtype):
    """Inverse of ``pack_token_meta``: bytes -> (scale, zero), each [..., groups, 128 tokens]."""
    values = packed.contiguous().view(storage).unflatten(-1, (-1, layout.PAGE_TOKENS, 2)).transpose(-1, -2)
    scale, zero = _inverse(values, layout.token_meta_index, layout.PAGE_TOKENS).unbind(-2)
    return scale, zero


def _bits(values: torch.Tensor) -> torch.Tensor:
    """16-bit metadata as integers, which autocast leaves alone."""
    return values.contiguous().view(torch.int16)


def _to_bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def _inverse(values: torch.Tensor, index_of, count: int) -> torch.Tensor:
    return values[..., _source(index_of, count, values.device)]


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # kept for all callers
def _source(index_of, count: int, device: torch.device) -> torch.Tensor:
    return index_of(torch.arange(count, device=device))


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _code_source(rows: int, cols: int, bits: int, device: torch.device) -> torch.Tensor:
    """[bytes, slots] flat index row * cols + col of the code at each place of the plane."""
    offset = torch.arange(layout.plane_bytes(rows, cols, bits), device=device)[:, None]
    slot = torch.arange(layout.slots_per_byte(bits), device=device)[None, :]
    row, col = layout.code_element(*layout.word_at(offset), slot, rows, bits)
    return row * cols + col
