"""A step of a cache by its compiled kernel, whose PTX runs on the CPU, blocks of threads one after the other."""

import struct
from collections.abc import Callable, Iterable

import torch

from lowbit_attn.formats import FORMATS
from lowbit_attn.kernels import KernelKey
from sim.ptx import build
from sim.ptx import program as ptx

RINGS = ("sink_k", "sink_v", "ring_k", "ring_v")


def run_step(key: KernelKey, state: dict[str, torch.Tensor], x: dict[str, torch.Tensor], numbers: dict[str, int],
             order: Callable[[int], Iterable[int]] = range, sees_races: bool = False) -> dict[str, torch.Tensor]:
    """The state after a step.

    Args:
        state: tensors by the names of view.STEP_FIELDS and OPTIONAL_FIELDS, dense; those of one memory share it.
            Heads of rings and sinks beyond those of the tokens are room between rows.
        x: x_k, x_v [batch, tokens, num_heads_kv, head_dim], rows and ring_rows int32 [batch].
        numbers: num_sinks, window_k, window_v, page_stride, head_stride.
        order: of the blocks of threads.
        sees_races: between the warps of a block.
    """
    from lowbit_attn.device.step import StepGeometry

    step = StepGeometry(FORMATS[key.format], key.head_dim, key.variant.removeprefix("search_"), key.dtype)
    named = {**state, **x}
    first = {tensor.data_ptr(): name for name, tensor in reversed(named.items())}
    memory = ptx.GlobalMemory([named[name] for name in first.values()])
    starts = dict(zip(first.values(), memory.starts))
    places = {name: starts[first[tensor.data_ptr()]] for name, tensor in named.items()}
    places["pool_meta"] = places["pool"]
    batch, tokens, heads, _ = x["x_k"].shape
    numbers = numbers | {
        "batch": batch, "tokens": tokens, "heads": heads, "seqs": len(state["limit"]), "marks": len(state["faults"]),
        "entries": state["table"].shape[1], "slots_k": state["ring_k"].shape[2], "slots_v": state["ring_v"].shape[2]}
    strides = {f"{name}_{axis}": state[name].stride(i) for name in RINGS for i, axis in enumerate(("row", "head"))}
    # a kernel's parameters are sorted by name, tensors first
    parameters = [struct.pack("<Q", ptx.GLOBAL_BASE + place) for _, place in sorted(places.items())]
    parameters += [struct.pack("<q" if name in strides else "<i", number)
                   for name, number in sorted((numbers | strides).items())]
    grid = min(2 * heads * batch, step.max_blocks)
    for block in order(grid):
        # relaxed: all that a block reads before it counts itself, its threads have used before a barrier
        cta = ptx.Cta(build.program(key), parameters, memory.memory, (int(block), 0, 0), (grid, 1, 1),
                      ("relaxed", "add"))
        ptx.run_grid([cta.look_for_races(step.threads) if sees_races else cta], step.threads)
    numbered = {name: i for i, name in enumerate(first.values())}
    return {name: memory.tensor(numbered[first[tensor.data_ptr()]], tensor) for name, tensor in state.items()}
