"""Kitty's boosted channels element by element: their choice, their codes, and the kernel's masks."""

import numpy as np
import pytest
import torch

from lowbit_attn import FORMATS, Format, layout
from lowbit_attn.formats.kitty import Boosted

F, INF, NAN = np.float32, float("inf"), float("nan")
NAMES = ("kitty", "kitty-pro", "kitty-b8", "kitty-b24", "kitty-b40-vg32", "kitty-b64-bf16", "kitty-pro-variance",
         "kitty-random-vg64-bf16")
DIMS = (32, 64, 96, 128, 256)


def supports(fmt: Format, head_dim: int) -> bool:
    try:
        fmt.record(head_dim)
    except ValueError:
        return False
    return True


formats = pytest.mark.parametrize("name, head_dim", [(n, d) for n in NAMES for d in DIMS if supports(FORMATS[n], d)])


def keys(head_dim: int, count: int = 2) -> torch.Tensor:
    """K [count, 128, head_dim] with channel means and magnitudes that differ, fp32 values of fp16 numbers."""
    k = torch.randn(count, 128, head_dim) * (0.1 + 5 * torch.rand(head_dim)) + torch.randn(head_dim) * 3
    return k.half().float()


def largest(scores: torch.Tensor, count: int) -> list[int]:
    """Channels of the largest scores [head_dim], ascending; equal scores: the lower channel."""
    return sorted(sorted(range(len(scores)), key=lambda d: (-float(scores[d]), d))[:count])


def chosen(k: torch.Tensor, **kwargs) -> list[list[int]]:
    return Boosted(**kwargs).boosted_channels(k).tolist()


def code_at(plane: torch.Tensor, token: int, column: int, bits: int) -> int:
    """One code of a plane uint8 [bytes] of 128 rows, by the scalar functions of the layout."""
    word, lane, byte, slot = layout.code_slot(token, column, layout.PAGE_TOKENS, bits)
    return int(plane[layout.word_offset(word, lane) + byte]) >> (bits * slot) & ((1 << bits) - 1)


def element(side: Boosted, planes: dict[str, torch.Tensor], page: int, token: int, channel: int, head_dim: int):
    """One value of K, as a reader without this package's torch code would find it."""
    code = code_at(planes["codes"][page], token, channel, side.bits)
    slots = planes["index"][page, : side.boost(head_dim)].tolist()
    if channel in slots:
        code += code_at(planes["high"][page], token, slots.index(channel), side.high_bits) << side.bits
    meta = planes["meta"][page].clone().view(side.storage)
    scale, zero = (float(meta[layout.channel_meta_offset(0, i, channel, head_dim) // 2]) for i in (0, 1))
    return F(code) * F(scale) + F(zero)


def emulated_masks(m, scores: torch.Tensor) -> list[int]:
    """One bit a channel, as ``mark_largest`` sets them: two lanes count the channels ahead of theirs."""
    ahead = [[a > mine or (a == mine and other < d) for other, a in enumerate(scores.tolist())]
             for d, mine in enumerate(scores.tolist())]
    flags = [sum(row) < m.boost for row in ahead]
    return [sum(flag << bit for bit, flag in enumerate(flags[16 * w : 16 * w + 16])) for w in range(m.num_masks)]
