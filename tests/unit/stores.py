"""Stores of an engine's pages and rings that several tests share: all families of formats, with and without sinks."""

import torch

from lowbit_attn import FORMATS
from lowbit_attn.cache.attached import Attached
from lowbit_attn.paged import PagedStore, ring_slots
from lowbit_attn.testing import normal_codebooks

HEADS, DIM, ROWS, PAGES, Q_LEN, NULL_PAGES = 2, 64, 6, 30, 4, 2
STORES = [("k8v8", 0), ("k4v4", 0), ("k2v2", 32), ("k4tv4-g32", 5), ("kitty", 32), ("cq2", 32), ("k4vcq2", 0)]


def store_of(name: str, sinks: int, seed: int = 0) -> PagedStore:
    """Pages and rings with bytes of others."""
    fmt, draw = FORMATS[name], torch.Generator().manual_seed(seed)
    pool = torch.randint(0, 256, (PAGES, HEADS, fmt.record(DIM).nbytes), dtype=torch.uint8, generator=draw)
    rings = torch.randn(ROWS + 1, 2, HEADS, sinks + ring_slots(fmt, Q_LEN), DIM, generator=draw).half()
    books = normal_codebooks(name, 1, HEADS, DIM).layer(0) if fmt.needs_codebooks else None
    return PagedStore(fmt, pool, rings, sinks, books and Attached(books, fmt, HEADS, DIM, "cpu"), NULL_PAGES)
