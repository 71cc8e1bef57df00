"""One side of a record by a compiled quantize or dequantize kernel, whose PTX runs on the CPU."""

import struct

import torch

from lowbit_attn import layout
from sim.ptx import program as ptx

GUARD = 0xA5  # of bytes that no kernel has written


def packed(code: ptx.Program, threads: int, parts: int, x: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The record's part of one side, uint8, by all blocks of threads of the kernel."""
    units = -(-nbytes // layout.RECORD_ALIGN)
    pool = torch.full((units * layout.RECORD_ALIGN,), GUARD, dtype=torch.uint8)
    pages = torch.zeros(1, dtype=torch.int32)
    memory = ptx.GlobalMemory([pages, pool, x.contiguous().view(torch.int16)])
    parameters = [struct.pack("<Q", ptx.GLOBAL_BASE + memory.starts[i]) for i in (0, 1, 1, 2)]
    parameters += [struct.pack("<i", number) for number in (units, 1, 1, units)]  # strides of a head and of a page
    for part in range(parts):
        ptx.run_grid([ptx.Cta(code, parameters, memory.memory, (0, 0, part), (1, 1, parts))], threads)
    return memory.tensor(1, pool)[:nbytes]


def unpacked(code: ptx.Program, threads: int, parts: int, record: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Tokens fp32 [128, head_dim] of the record's part of one side, uint8, by all blocks of threads of the kernel."""
    units = -(-len(record) // layout.RECORD_ALIGN)
    out = torch.full((layout.PAGE_TOKENS, head_dim), torch.nan)
    memory = ptx.GlobalMemory([out, torch.zeros(1, dtype=torch.int32), record])
    parameters = [struct.pack("<Q", ptx.GLOBAL_BASE + memory.starts[i]) for i in (0, 1, 2, 2)]
    parameters += [struct.pack("<i", number) for number in (units, 1, 1, units)]
    for part in range(parts):
        ptx.run_grid([ptx.Cta(code, parameters, memory.memory, (0, 0, part), (1, 1, parts))], threads)
    return memory.tensor(0, out)
