"""Engine stores and steps for tests of the compiled kernels, and the comparison with ``paged.append``."""

import dataclasses

import torch

from lowbit_attn import kernels
from lowbit_attn.cache.attached import Attached
from lowbit_attn.formats import FORMATS
from lowbit_attn.paged import PagedStore, Step, ring_slots
from lowbit_attn.paged import append as append_in_torch
from lowbit_attn.testing import assert_same_bytes, normal_codebooks
from sim.ptx import paged

PAGES = 90


def store_of(name: str, head_dim: int, sinks: int, q_len: int, rows: int, dtype=torch.float16,
             heads: int = 1, **options) -> PagedStore:
    """Pages and rings of old bytes, each with room beside them."""
    fmt, draw = FORMATS[name], torch.Generator().manual_seed(5)
    record = fmt.record(head_dim).nbytes
    pool = torch.randint(0, 256, (PAGES, 2, heads, record), dtype=torch.uint8, generator=draw)[:, 1]
    rings = torch.randn(rows + 2, 2, heads, sinks + ring_slots(fmt, q_len), head_dim, generator=draw).to(dtype)
    books = normal_codebooks(name, 1, heads, head_dim).layer(0) if fmt.needs_codebooks else None
    return PagedStore(fmt, pool, rings, sinks, books and Attached(books, fmt, heads, head_dim, "cpu"), **options)


def copy_of(store: PagedStore) -> PagedStore:
    return dataclasses.replace(store, pool=store.pool.clone(), rings=store.rings.clone())


def step_of(rows: list[tuple[int, int]], sinks: int, blocks: int = 8, world: int = 1) -> Step:
    """rows: (tokens before, new tokens), (0, 0): padding; pages and rings in an order of their own."""
    lens = torch.tensor([before + fresh for before, fresh in rows], dtype=torch.int32)
    starts = torch.tensor([0, *(fresh for _, fresh in rows)]).cumsum(0).int()
    table, page = torch.zeros(len(rows), blocks, dtype=torch.int32), PAGES - 1
    for row, (before, fresh) in enumerate(rows):
        first, last = (max(n - sinks, 0) // 128 // world for n in (before, before + fresh))
        for block in range(first, last + (fresh > 0)):
            table[row, block], page = page, page - 1
        table[row, 0] = table[row, 0] or fresh > 0  # a page that the step does not touch
    assert page > 1
    rings = [(7 * row) % len(rows) + 1 if fresh else 0 for row, (_, fresh) in enumerate(rows)]
    assert len({*rings} - {0}) == sum(fresh > 0 for _, fresh in rows)
    return Step(table, lens, starts, torch.tensor(rings, dtype=torch.int32))


def check(store: PagedStore, step: Step, num_decode: int, padding: int = 0, **options) -> torch.Tensor:
    """A step by the kernels and by ``paged.append``; the items that were packed."""
    (*_, heads, _, head_dim), dtype = store.rings.shape, store.rings.dtype
    tokens = int(step.query_start_loc[-1]) + padding
    draw = torch.Generator().manual_seed(tokens)
    qkv = torch.randn(tokens, 4 * heads * head_dim, generator=draw).to(dtype)
    sizes = [2 * heads * head_dim, heads * head_dim, heads * head_dim]
    k, v = (x.unflatten(1, (heads, head_dim)) for x in qkv.split(sizes, 1)[1:])
    want, found = store, copy_of(store)
    planned = paged.plan(step, store, num_decode, tokens)
    entered = k if store.attached is None else store.attached.keys(k, dtype).to(dtype)
    key = kernels.paged_append_key("sm_90", str(dtype).removeprefix("torch."), head_dim, store.format)
    paged.append(key, found, step, planned, entered, v, **options)
    append_in_torch(want, step, k, v)
    for name, null in (("pool", store.null_pages), ("rings", 1)):
        assert_same_bytes(name, getattr(found, name)[null:], getattr(want, name)[null:])
    return planned.items[:, : planned.count]
