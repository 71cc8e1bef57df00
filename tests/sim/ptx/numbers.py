"""Registers of 32 lanes, uint64, as the numbers of an instruction's type, and back."""

import re
from functools import cache

import numpy as np

U32, U64 = np.uint32, np.uint64
HALF = U64(0xFFFF)


def f32(x: np.ndarray) -> np.ndarray:
    return x.astype(U32).view(np.float32)


def bits(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32).view(U32).astype(U64)


@cache
def width(suffixes: tuple[str, ...]) -> int:
    """Bits of the type, one number."""
    if not (found := re.fullmatch(r"[busf](\d+)", suffixes[-1])):
        raise NotImplementedError(f"type {suffixes[-1]}")
    return int(found[1])


def unsigned(x: np.ndarray, size: int) -> np.ndarray:
    return x & U64((1 << size) - 1)


def signed(x: np.ndarray, size: int) -> np.ndarray:
    return x.view(np.int64) if size == 64 else x.astype(f"u{size // 8}").view(f"i{size // 8}").astype(np.int64)


def typed(x: np.ndarray, suffixes: tuple[str, ...]) -> np.ndarray:
    """int64 of an s type, else uint64."""
    size = width(suffixes)
    return signed(x, size) if suffixes[-1][0] == "s" else unsigned(x, size)


def raw(x: np.ndarray) -> np.ndarray:
    return x.view(U64) if x.dtype == np.int64 else x


def halves_of(word: np.ndarray, is_bf16: bool) -> list[np.ndarray]:
    """The two 16-bit floats of a word, lowest first."""
    halves = [word & HALF, word >> U64(16) & HALF]
    if is_bf16:
        return [f32(half << U64(16)) for half in halves]
    return [half.astype(np.uint16).view(np.float16).astype(np.float32) for half in halves]


def to_half(x: np.ndarray, is_bf16: bool) -> np.ndarray:
    """Bits of fp32 rounded to nearest even."""
    if not is_bf16:
        return x.astype(np.float16).view(np.uint16).astype(U64)
    word = x.view(U32).astype(U64)
    return (word + U64(0x7FFF) + (word >> U64(16) & U64(1))) >> U64(16) & HALF
