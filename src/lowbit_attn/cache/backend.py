"""What fills and reads the pages of a cache on one type of device; here in torch, for the CPU."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from lowbit_attn.precision import on_own_defaults


class Backend(NamedTuple):
    """The device's part of a cache's work. The first argument of each is the KVCache."""

    # raises NotImplementedError for a cache it cannot serve; else makes what its calls need once a device
    prepare: Callable[[Any], None]
    write_blocks: Callable[[Any, torch.Tensor, torch.Tensor, str], None]
    read_pages: Callable[[Any, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    # (cache, rows int32 [batch] of counters and table on the device, ring_rows int32 [batch] of sinks and rings there,
    # k, v [batch, tokens, num_heads_kv, head_dim]): a whole step on the device, from its counters alone; None: steps go
    # through the host
    append: Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None] | None = None
    # (cache, calls): loads or builds all that these calls need, "k" or "v" (write_blocks of a side) or "append": a call
    # has it before it writes anything
    ready: Callable[[Any, Collection[str]], None] = lambda cache, calls: None
    # whether write_blocks, once it is ready, launches a kernel or does nothing: then what a page held need not be kept
    launches: bool = False


@on_own_defaults
def write_blocks(cache, pages: torch.Tensor, blocks: torch.Tensor, side: str) -> None:
    """Quantize one side of full blocks [n, num_heads_kv, 128, head_dim] into pages int [n] of the pool, in torch."""
    records, blocks = cache.pool[pages.long()].flatten(0, 1), blocks.flatten(0, 1).float()
    entries = None if cache.attached is None else cache.attached.entries(side)
    if side == "k":
        weights = None if cache.query_weights is None else cache.query_weights.repeat(pages.shape[0], 1)
        cache.format.write_k(records, blocks, cache.range_search, weights, entries)
    else:
        cache.format.write_v(records, blocks, cache.range_search, entries)
    cache.pool[pages.long()] = records.unflatten(0, (-1, cache.num_heads_kv))


def read_pages(cache, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantize pages int [n]: K, V fp32 [n, num_heads_kv, 128, head_dim], in torch."""
    records = cache.pool[pages.long()].flatten(0, 1)
    k_entries, v_entries = (None, None) if cache.attached is None else map(cache.attached.entries, "kv")
    k = cache.format.dequantize_k(records, cache.head_dim, k_entries).unflatten(0, (-1, cache.num_heads_kv))
    return k, cache.format.dequantize_v(records, cache.head_dim, v_entries).unflatten(0, (-1, cache.num_heads_kv))


# By device type; dispatch adds the kernels' "cuda" entry, so that this file needs to know of no kernel.
BACKENDS: dict[str, Backend] = {"cpu": Backend(lambda cache: None, write_blocks, read_pages)}


def backend_of(cache) -> Backend:
    """What fills and reads the pages of a cache: torch, on any device, for codebooks of keys before their rotary
    embedding, which no kernel knows."""
    is_turned = cache.attached is not None and cache.attached.is_pre_rope
    return BACKENDS["cpu" if is_turned else cache.device.type]


def kernel_entries(cache, side: str) -> tuple[torch.Tensor, ...]:
    """What kernels that pack or read "k" or "v" take of its codebooks: fp16 [num_heads_kv, groups, 256 c]; an affine
    side has none."""
    entries = cache.k_entries if side == "k" else cache.v_entries
    return () if entries is None else (entries,)
