"""The compiled fill of dense rows from an engine's pages without a GPU: its PTX, run on the CPU, gives the reference's
dequantization, rounded once, and touches nothing else."""

import pytest
import torch

from lowbit_attn import kernels, layout
from lowbit_attn.cache.attached import Attached
from lowbit_attn.cache.backend import kernel_entries, read_pages, write_blocks
from lowbit_attn.formats import FORMATS
from lowbit_attn.paged import PAGE, PagedStore, Step, counters, ring_slots
from lowbit_attn.testing import assert_same_bytes, normal_codebooks
from sim.ptx import calls

HEADS, PAGES, CAPACITY, EMPTY = 2, 4, 270, -7.0
TABLE = [[1, 3, 0, 9, 9], [2, 0, 1, 9, 9]]  # as engines have it, with room behind a row's blocks
ITEMS = [(1, 2, 3, 3), (0, 1, 140, 1), (1, 0, 140, 2), (0, 2, 0, 0)]  # row, block, dest, sides


def store_of(name: str, head_dim: int, dtype: torch.dtype) -> PagedStore:
    fmt = FORMATS[name]
    books = normal_codebooks(name, 1, HEADS, head_dim).layer(0) if fmt.needs_codebooks else None
    pool = torch.zeros(PAGES, HEADS + 1, fmt.record(head_dim).nbytes, dtype=torch.uint8)[:, :HEADS]
    return PagedStore(fmt, pool,
                      torch.zeros(2, 2, HEADS, ring_slots(fmt, 1), head_dim, dtype=dtype),
                      attached=books and Attached(books, fmt, HEADS, head_dim, "cpu"))


def blocks(head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Tokens of all pages: columns of many sizes, of one value, and of the largest values, whose sums overflow fp16."""
    x = torch.randn(PAGES, HEADS, PAGE, head_dim) * torch.logspace(-4, 2, head_dim)
    x[..., 5], x[..., 6] = 0, -0.25
    x[1, 0, ::2, 9], x[1, 0, 1::2, 9] = 65504.0, -65504.0
    return x.to(dtype)


@pytest.mark.parametrize("name, head_dim, dtype", [
    ("k4v4", 128, torch.float16), ("k2v2-g32-vg32", 64, torch.bfloat16), ("kitty", 128, torch.float16),
    ("k4tv4", 96, torch.float16), ("cq4", 64, torch.float16), ("kitty-pro", 256, torch.bfloat16)])
def test_rows_are_those_of_the_reference(name, head_dim, dtype):
    store = store_of(name, head_dim, dtype)
    starts = torch.arange(3, dtype=torch.int32)
    step = Step(torch.tensor(TABLE, dtype=torch.int32)[:, :3], starts[1:], starts, starts[:2])
    view = store.view(step, counters(store, step))
    for side in "kv":
        write_blocks(view, torch.arange(PAGES), blocks(head_dim, dtype), side)
    found = filled(store, view)
    for i, (dense, pages) in enumerate(zip(("keys", "values"), read_pages(view, torch.arange(PAGES)))):
        want = torch.full((CAPACITY, HEADS, head_dim), EMPTY, dtype=dtype)
        for row, block, dest, sides in ITEMS:
            if sides >> i & 1:
                want[dest : dest + PAGE] = pages[TABLE[row][block]].transpose(0, 1).to(dtype)
        assert_same_bytes(dense, found[dense], want)


def filled(store: PagedStore, view) -> dict[str, torch.Tensor]:
    """keys and values [tokens, heads, head_dim] as the kernel leaves them."""
    from lowbit_attn.device.paged_fill import block_threads

    head_dim, dtype = store.rings.shape[4], store.dtype
    key = kernels.paged_fill_key("sm_90", str(dtype).removeprefix("torch."), head_dim, store.format)
    tensors = {"items": torch.tensor(ITEMS, dtype=torch.int32).T.contiguous(), "table": view.table._base,
               "pool": store.pool._base,
               **{name: torch.full((CAPACITY, HEADS, head_dim), EMPTY, dtype=dtype) for name in ("keys", "values")},
               **{f"{side}_entries": entries for side in "kv" for entries in kernel_entries(view, side)}}
    units = store.pool._base.numel() // layout.RECORD_ALIGN
    numbers = {"count": len(ITEMS), "heads": HEADS, "table_row": view.table.stride(0), "units": units,
               "page_stride": view.strides.page, "head_stride": view.strides.head}
    views = {name: "pool" for name in ("halves", "halves_1", "pool_meta")}
    return calls.run(key, (2 * HEADS, len(ITEMS)), block_threads(store.format.specs(head_dim)), tensors, numbers, views,
                     sees_races=True)
