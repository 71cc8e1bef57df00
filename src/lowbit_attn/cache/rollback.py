"""Bringing a cache back to an earlier time, over blocks that it packed since."""

import numpy as np

from lowbit_attn import layout
from lowbit_attn.cache import significance
from lowbit_attn.cache.journal import Journal
from lowbit_attn.cache.kv_cache import KVCache
from lowbit_attn.cache.state import Counts

SAVED = ("ring_k", "ring_v", "query_weights", *significance.STATE)


def _sides(cache: KVCache) -> tuple[tuple[np.ndarray, int], ...]:
    """(packed tokens of every row, tokens that stay unpacked) of K and V."""
    return (cache.counts.n_qk, cache.window_k), (cache.counts.n_qv, cache.window_v)


def tokens_until_packed(cache: KVCache) -> int:
    """How many more tokens fill the next block of some row: the last of them is the one after which it is packed."""
    lengths = [cache.sinks + packed + window + layout.PAGE_TOKENS for packed, window in _sides(cache)]
    return max(1, int((np.stack(lengths) - cache.counts.n_tok).min()))


def has_packed_too_much(cache: KVCache, tokens: int) -> bool:
    """Whether some row without its last ``tokens`` tokens would not have filled all the blocks that it has packed."""
    left = cache.counts.n_tok - tokens
    return any(bool(((packed > 0) & (left < cache.sinks + packed + window)).any()) for packed, window in _sides(cache))


class Snapshot:
    """The counters of a cache and all that it holds in 16 bit, beside what its format knows of queries.

    ``restore`` brings the cache, or a ``growth.grown`` copy of it, back to them. What was packed since is forgotten,
    and its pages stay with their rows, which fill them again; so the cache must not have been cleared in between.
    """

    def __init__(self, cache: KVCache):
        cache.settle("snapshot")
        self.counts = {name: count.copy() for name, count in zip(Counts._fields, cache.counts)}
        self.tensors = {name: x.clone() for name in SAVED if (x := getattr(cache, name)) is not None}

    def restore(self, cache: KVCache) -> None:
        """Bring the cache back, or raise and leave it as it is."""
        cache.settle("restore")
        rows = np.arange(cache.max_batch)
        with Journal() as journal:
            for name, x in self.tensors.items():
                journal.write(getattr(cache, name), x)
            cache._write_counters(journal, rows, self.counts)
        cache._note_counters(rows, self.counts)
        cache.edits += 1
