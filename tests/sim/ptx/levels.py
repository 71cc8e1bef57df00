"""Steps of a LevelCache on the CPU by their compiled kernels, whose PTX runs CTA after CTA in any order."""

import struct
from collections.abc import Callable, Iterable

import torch

from lowbit_attn import kernels
from lowbit_attn.kernels import KernelKey
from lowbit_attn.levels import decode as level_decode
from lowbit_attn.levels import manage
from lowbit_attn.levels.level_cache import LevelCache
from lowbit_attn.reference import PLAIN, Attention
from sim.ptx import build
from sim.ptx import program as ptx

FORMS = {"float": "<f", "int": "<i", "int64_t": "<q"}
TARGET = "sm_90"
Order = Callable[[int], Iterable[int]]


def run_kernel(key: KernelKey, arguments: dict, sizes: dict[str, int], threads: int, grid: tuple[int, int],
               order: Order = range) -> None:
    """Launch a kernel on tensors and numbers by name, which it changes in place; order: of the CTAs.

    sizes: of what its tensors' shapes leave open, by name.
    """
    tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    first = {x.untyped_storage().data_ptr(): x for x in tensors.values()}
    memory = ptx.GlobalMemory(list(first.values()))
    starts = dict(zip(first, memory.starts))
    numbers = sizes | {name: x for name, x in arguments.items() if name not in tensors}
    parameters = [struct.pack("<Q", ptx.GLOBAL_BASE + starts[tensors[name].untyped_storage().data_ptr()])
                  if kind == "*" else struct.pack(FORMS[kind], numbers[name]) for kind, name in build.parameters(key)]
    code = build.program(key)
    for at in order(grid[0] * grid[1]):
        y, x = divmod(int(at), grid[0])
        cta = ptx.Cta(code, parameters, memory.memory, (x, y, 0), (*grid, 1), ("acq_rel", "add"))
        ptx.run_grid([cta], threads)
    for i, x in enumerate(first.values()):
        x.copy_(memory.tensor(i, x))


def sizes_of(cache: LevelCache, rows: torch.Tensor) -> dict[str, int]:
    """What the shapes of a call's tensors leave open; heads and q come from its arguments."""
    units = cache.pool.units
    return {"batch": len(rows), "size": len(rows), "seqs": cache.max_batch, "marks": cache.max_batch + 1,
            "cache_rows": len(cache.half), "slots": cache.slots, "pages": cache.table.shape[2],
            "frames_high": len(cache.pool.lists[0].ids), "frames_low": len(cache.pool.lists[-1].ids),
            "high_slots": cache.hi_k.shape[1], "units_high": len(units(0)), "units_low": len(units(1))}


def run_append(cache: LevelCache, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, order: Order = range) -> None:
    """The launch of levels.manage.append."""
    from lowbit_attn.device.level_append import THREADS

    sizes = sizes_of(cache, rows) | {"tokens": k.shape[1], "heads": cache.num_heads_kv}
    run_kernel(manage.append_key_of(cache, TARGET), manage.append_arguments(cache, rows, k, v), sizes, THREADS,
               (cache.num_heads_kv, len(rows)), order)


def run_plan(cache: LevelCache, rows: torch.Tensor, q: torch.Tensor, lse: torch.Tensor, options: Attention = PLAIN,
             order: Order = range) -> None:
    """The first launch of levels.manage.manage."""
    from lowbit_attn.device.level_rows import THREADS

    sizes = sizes_of(cache, rows) | {"q_len": q.shape[1], "query_heads": q.shape[2]}
    run_kernel(manage.keys_of(cache, TARGET)[0], manage.plan_arguments(cache, rows, q, lse, options), sizes, THREADS,
               (cache.num_heads_kv, len(rows)), order)


def run_places(cache: LevelCache, rows: torch.Tensor, order: Order = range) -> None:
    """The third launch, of caches with windows."""
    run_kernel(kernels.level_window_keys(TARGET)[0], manage.places_arguments(cache, rows), windows_sizes(cache, rows),
               128, (cache.num_heads_kv, len(rows)), order)


def run_hidden(cache: LevelCache, hidden: torch.Tensor, window: int, order: Order = range) -> None:
    """What comes before the launches of levels.decode under a window."""
    from lowbit_attn.device.level_windows import LANES, WARPS

    run_kernel(kernels.level_window_keys(TARGET)[1], level_decode.hidden_arguments(cache, hidden, window),
               windows_sizes(cache, cache.all_rows), WARPS * LANES, (-(-len(cache.half) // WARPS), 1), order)


def windows_sizes(cache: LevelCache, rows: torch.Tensor) -> dict[str, int]:
    return sizes_of(cache, rows) | {"blocks": cache.classes.shape[1], "ends": cache.before.shape[2]}


def run_pack(cache: LevelCache, rows: torch.Tensor, order: Order = range) -> None:
    """The second launch."""
    from lowbit_attn.device.level_pack import PackGeometry
    from lowbit_attn.kernels.registry import searches_of

    key = manage.keys_of(cache, TARGET)[1]
    geometry = PackGeometry(cache.format, cache.head_dim, searches_of(key), key.dtype)
    grid = min(4 * cache.num_heads_kv * len(rows), geometry.max_blocks)
    run_kernel(key, manage.pack_arguments(cache, rows), sizes_of(cache, rows), geometry.threads, (grid, 1), order)
