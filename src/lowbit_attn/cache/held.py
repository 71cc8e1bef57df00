"""A cache that is held for one call, or as part of another one: its tensors, without a host's part."""

from functools import cached_property

import numpy as np
import torch

from lowbit_attn.cache.kv_cache import KVCache
from lowbit_attn.cache.state import Counts
from lowbit_attn.cache.view import Strides
from lowbit_attn.formats import FORMATS
from lowbit_attn.layout import RECORD_ALIGN


class HeldCache(KVCache):
    """A cache for the length of one operator: the view of it that the operator got, without a host's part."""

    ring_start = rows = ring_rows = None  # of the view; those of a KVCache follow from its other state

    def __init__(self, format: str, strides: list[int], state: dict[str, torch.Tensor], **values):
        vars(self).update(state, **values)
        self.format, self.strides = FORMATS[format], Strides(*strides)
        self.device, self.dtype, self.rotate_keys = self.pool.device, self.ring_k.dtype, False
        self.max_batch, self.num_heads_kv, _, self.head_dim = self.ring_k.shape
        self.record, self.unnamed = self.format.record(self.head_dim), []

    @cached_property
    def units(self) -> torch.Tensor:
        """The pool as uint8 [units, 128] from its first record to its last, with whatever an engine has between."""
        pages, heads, record = self.pool.shape
        last = (pages - 1) * self.strides.page + (heads - 1) * self.strides.head
        return self.pool.as_strided((last + record // RECORD_ALIGN, RECORD_ALIGN), (RECORD_ALIGN, 1))

    def settle(self, call: str) -> None:
        """There is no copy of the counters to refresh: ``counts`` reads them."""

    def check_rows(self, seqs, count: int | None = None, alive: bool = True, name: str = "seqs") -> np.ndarray:
        return np.asarray(seqs)

    def batch_rows(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows, self.ring_rows

    def known_pages(self, batch: int) -> None:
        """Only the device knows."""

    @cached_property
    def counts(self) -> Counts:
        """On the CPU the counters themselves."""
        return Counts(*(x.cpu().numpy() for x in self.counters()))
