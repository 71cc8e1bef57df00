"""A longer copy of a cache, for callers that do not know the final length."""

import torch

from lowbit_attn import layout
from lowbit_attn.cache import KVCache, significance

COUNTERS = ("n_sink", "n_qk", "n_qv", "n_tok")
TOKENS = ("sink_k", "sink_v", "ring_k", "ring_v")


def new_cache(format, tokens: int, batch: int, num_heads_kv: int, head_dim: int, dtype, device, *, exact: bool = False,
              **options) -> KVCache:
    """A cache whose pool holds ``batch`` sequences of ``tokens`` tokens each, rounded up to whole pages; exact: but no
    sequence gets longer than ``tokens``."""
    with torch.inference_mode(False):  # else steps outside inference mode could not write to the cache
        one_page = KVCache(format, 1, num_heads_kv, head_dim, dtype, device, max_batch=batch, **options)
        pages = 1 + max(0, -(-(tokens - one_page.max_seqlen) // layout.PAGE_TOKENS))
        longest = tokens if exact else one_page.max_seqlen + (pages - 1) * layout.PAGE_TOKENS
        return KVCache(format, batch * pages, num_heads_kv, head_dim, dtype, device, max_batch=batch,
                       max_seqlen=longest, **options)


def grown(old: KVCache, tokens: int) -> KVCache:
    """A cache with the contents of ``old`` and room for ``tokens`` tokens in each sequence.

    Page ids keep their meaning. Both pools exist while the pages are copied. ``old`` stays valid.
    """
    new = new_cache(old.format, tokens, old.max_batch, old.num_heads_kv, old.head_dim, old.dtype, old.device,
                    sinks=old.sinks, range_search=old.range_search, max_q_len=old.max_q_len, saturate=old.saturate,
                    rotate_keys=old.rotate_keys, query_weights=old.query_weights,
                    codebooks=None if old.attached is None else old.attached.layer)
    if new.max_seqlen < old.max_seqlen or new.num_pages < old.num_pages:
        raise ValueError(f"tokens: got {tokens}, supported: at least the old cache's {old.max_seqlen}")
    new.pool[: old.num_pages] = old.pool
    new.table[:, : old.table.shape[1]] = old.table
    scores = significance.STATE if old.format.orders_tokens else ()
    for name in COUNTERS + TOKENS + scores:
        getattr(new, name).copy_(getattr(old, name))
    new.first_positions[:] = old.first_positions
    new.book = old.book.grown(new.num_pages)
    new.bind()
    new.refresh_limits()
    return new
