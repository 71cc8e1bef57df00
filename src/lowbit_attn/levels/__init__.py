"""Caches of two precision levels for each head, with pruning (LeanKV), and the memory that they share."""

from lowbit_attn.levels.frames import FramePool
from lowbit_attn.levels.level_cache import LevelCache

__all__ = ["FramePool", "LevelCache"]
