"""The paged low-bit KV cache: KVCache and its errors. Its parts are imported from their modules."""

from lowbit_attn.cache.kv_cache import CacheFaultError, KVCache, PageExhaustedError

__all__ = ["CacheFaultError", "KVCache", "PageExhaustedError"]
