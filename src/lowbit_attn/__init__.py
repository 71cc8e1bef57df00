"""Decode attention over KV caches of 1 to 8 bits."""

from lowbit_attn import linear_kernels  # noqa: F401  (registers products of codebook weights on a GPU)
from lowbit_attn._version import __version__
from lowbit_attn.api import LayoutMismatchError, decode, merge_states
from lowbit_attn.cache import CacheFaultError, KVCache, PageExhaustedError
from lowbit_attn.dispatch import why_not
from lowbit_attn.formats import FORMATS, Format

__all__ = ["CacheFaultError", "FORMATS", "Format", "KVCache", "LayoutMismatchError", "PageExhaustedError",
           "__version__", "decode", "merge_states", "why_not"]
