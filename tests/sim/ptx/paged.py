"""Steps of an engine by their compiled kernels ``paged_plan`` and ``paged_append``, whose PTX runs on the CPU."""

import struct
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import torch

from lowbit_attn import kernels
from lowbit_attn.formats import FORMATS
from lowbit_attn.kernels import KernelKey
from lowbit_attn.paged import PagedStore, Step
from sim.ptx import build
from sim.ptx import program as ptx

PLAN_THREADS = 1024
PLAN_FIELDS = ("read", "row", "token_row", "token_slot", "items", "count")
UNWRITTEN = 0x7A7A7A7A


def launch(key: KernelKey, tensors: dict[str, torch.Tensor], numbers: dict[str, int], grid: int, threads: int,
           order: Callable[[int], Iterable[int]] = range, sees_races: bool = False, reverse: bool = False) -> None:
    """Run a kernel on tensors where they lie, views of one storage too; numbers: its other parameters by name.

    order: of the blocks of threads, which run one after the other; reverse: the last warp of each first.
    """
    stored = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors.values()}
    whole = {start: torch.empty(0, dtype=torch.uint8).set_(storage) for start, storage in stored.items()}
    memory = ptx.GlobalMemory(list(whole.values()))
    starts = dict(zip(whole, memory.starts))
    places = {name: starts[x.untyped_storage().data_ptr()] + x.storage_offset() * x.element_size()
              for name, x in tensors.items()}
    parameters = [struct.pack("<Q", ptx.GLOBAL_BASE + places[name]) if kind == "*" else
                  struct.pack("<q" if kind == "int64_t" else "<i", numbers[name])
                  for kind, name in build.parameters(key)]
    for block in order(grid):
        cta = ptx.Cta(build.program(key), parameters, memory.memory, (int(block), 0, 0), (grid, 1, 1))
        ptx.run_grid([cta.look_for_races(threads) if sees_races else cta], threads, reverse)
    for i, (start, x) in enumerate(whole.items()):
        x.copy_(memory.tensor(i, x))


def plan(step: Step, store: PagedStore, num_decode: int, num_tokens: int, spare: int = 3, max_items: int | None = None,
         sees_races: bool = False) -> SimpleNamespace:
    """What ``paged_plan`` writes of a step; store: or anything else with the geometry that a plan needs.

    spare: rows and tokens that the tensors hold beyond those of the step.
    """
    rows, blocks = step.table.shape
    held, max_tokens = rows + spare, num_tokens + spare
    max_items = num_tokens // 128 + 2 * rows if max_items is None else max_items
    shapes = ((5, held), (3, held), (max_tokens,), (max_tokens,), (4, max_items), (1,))
    made = {name: torch.full(shape, UNWRITTEN, dtype=torch.int32) for name, shape in zip(PLAN_FIELDS, shapes)}
    inputs = {"table": step.table, "seq_lens": step.seq_lens, "query_start_loc": step.query_start_loc}
    numbers = {"rows": rows, "blocks": blocks, "held": held, "max_tokens": max_tokens, "max_items": max_items,
               "starts": rows + 1, "table_row": step.table.stride(0), "num_decode": num_decode,
               "num_tokens": num_tokens, "sinks": store.sinks, "slots": store.slots, "window_k": store.format.window_k,
               "window_v": store.format.window_v, "null_pages": store.null_pages, "rank": store.rank,
               "world": store.world}
    launch(kernels.paged_plan_key("sm_90"), inputs | made, numbers, 1, PLAN_THREADS, sees_races=sees_races)
    return SimpleNamespace(**made)


def append(key: KernelKey, store: PagedStore, step: Step, planned: SimpleNamespace, k: torch.Tensor, v: torch.Tensor,
           order: Callable[[int], Iterable[int]] = range, sees_races: bool = False, grid: int | None = None) -> None:
    """A step by ``paged_append``; k, v [tokens, num_heads_kv, head_dim], dense but for the stride of a token."""
    from lowbit_attn.device.step import StepGeometry

    geometry = StepGeometry(FORMATS[key.format], key.head_dim, key.variant.removeprefix("search_"), key.dtype)
    sinks, ring = store.rings[:, :, :, : max(1, store.sinks)], store.rings[:, :, :, store.sinks :]
    tensors = {"x_k": k, "x_v": v, "ring_rows": step.ring_rows, "pool": store.pool, "pool_meta": store.pool}
    tensors |= {f"{name}_{side}": x[:, i] for name, x in (("sink", sinks), ("ring", ring))
                for i, side in enumerate("kv")}
    tensors |= {name: getattr(planned, name) for name in PLAN_FIELDS[1:]}
    if store.attached is not None:
        tensors |= {f"{side}_entries": x for side in "kv" if (x := store.attached.entries(side)) is not None}
    pages, heads = (store.pool.stride(i) // 128 for i in range(2))
    numbers = {"tokens": len(k), "heads": k.shape[1], "rows": len(step.ring_rows), "held": planned.row.shape[1],
               "max_tokens": len(planned.token_row), "max_items": planned.items.shape[1], "slots": store.slots,
               "num_sinks": store.sinks, "page_stride": pages, "head_stride": heads,
               "x_k_token": k.stride(0), "x_v_token": v.stride(0)}
    numbers |= {f"{name}_{axis}": tensors[name].stride(i) for name in ("sink_k", "sink_v", "ring_k", "ring_v")
                for i, axis in enumerate(("row", "head"))}
    grid = grid or min(2 * k.shape[1] * len(k), geometry.max_blocks)
    launch(key, tensors, numbers, grid, geometry.threads, order, sees_races)
