"""A call of a compiled kernel by the names of its arguments; its PTX runs on the CPU."""

import struct
from itertools import product

import torch

from lowbit_attn.kernels import KernelKey
from sim.ptx import build
from sim.ptx import program as ptx

FORMS = {"int": "<i", "int64_t": "<q"}


def run(key: KernelKey, grid: tuple[int, ...], threads: int, tensors: dict[str, torch.Tensor],
        numbers: dict[str, int], views: dict[str, str] | None = None,
        sees_races: bool = False) -> dict[str, torch.Tensor]:
    """The tensors after the call, blocks of threads one after the other.

    Args:
        tensors: memory, dense, by the names of pointers.
        numbers: all other arguments.
        views: the tensor that a pointer of another name reads.
        sees_races: between the warps of a block.
    """
    memory = ptx.GlobalMemory(list(tensors.values()))
    starts = dict(zip(tensors, memory.starts))
    parameters = []
    for kind, name in build.parameters(key):
        if kind in ("*", "const") or name.startswith("*"):
            parameters.append(struct.pack("<Q", ptx.GLOBAL_BASE + starts[(views or {}).get(name, name)]))
        else:
            parameters.append(struct.pack(FORMS[kind], numbers[name]))
    for index in product(*map(range, (*grid, 1, 1)[:3][::-1])):
        cta = ptx.Cta(build.program(key), parameters, memory.memory, index[::-1], (*grid, 1, 1)[:3])
        ptx.run_grid([cta.look_for_races(threads) if sees_races else cta], threads)
    return {name: memory.tensor(i, tensor) for i, (name, tensor) in enumerate(tensors.items())}
