"""Which tokens of a sequence lie on which of N ranks:

    position p < sinks            rank 0
    block b = (p - sinks) / 128   rank b mod N
"""

import numpy as np
import torch

from lowbit_attn.layout import PAGE_TOKENS


def local_lengths(lengths, rank: int, world: int, sinks: int = 0):
    """Tokens of sequences of these lengths (int, array or tensor) that lie on one of ``world`` ranks."""
    head, rest = _least(lengths, sinks), lengths - _least(lengths, sinks)
    rounds = rest // (world * PAGE_TOKENS)
    last = _least(_most(rest - rounds * world * PAGE_TOKENS - rank * PAGE_TOKENS, 0), PAGE_TOKENS)
    return rounds * PAGE_TOKENS + last + (head if rank == 0 else 0)


def _least(x, bound: int):
    return x.clamp(max=bound) if isinstance(x, torch.Tensor) else np.minimum(x, bound)


def _most(x, bound: int):
    return x.clamp(min=bound) if isinstance(x, torch.Tensor) else np.maximum(x, bound)


def is_own(positions: torch.Tensor, rank: int, world: int, sinks: int) -> torch.Tensor:
    """Which positions of a sequence lie on a rank."""
    block = (positions - sinks).clamp(min=0) // PAGE_TOKENS
    return torch.where(positions < sinks, 0, block % world) == rank


def parts_of(before: np.ndarray, tokens: int, rank: int, world: int, sinks: int) -> list[tuple[np.ndarray, int, int]]:
    """Which of a step's tokens lie on a rank: (places in the batch, first token, how many), the same for each; before:
    lengths of the batch's sequences."""
    own = np.stack([local_lengths(before + t, rank, world, sinks) for t in range(tokens + 1)])  # as the tokens come
    is_mine = np.diff(own, axis=0) > 0  # [tokens, batch]
    parts = {}
    for place, mine in enumerate(is_mine.T):
        at = np.flatnonzero(mine)
        if len(at):
            parts.setdefault((int(at[0]), len(at)), []).append(place)
    return [(np.array(places), *part) for part, places in parts.items()]
