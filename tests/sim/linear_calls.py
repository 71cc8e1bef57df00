"""What tests of linear layers' kernels give to their PTX, and what they read of it."""

import torch

from sim.ptx import program as ptx


def arguments(tensors: list[torch.Tensor], varying: list[tuple[int, int]]) -> tuple[ptx.GlobalMemory, list[bytes]]:
    """(memory, parameters) of dense tensors; varying: of each, how many sizes and strides a call gives."""
    memory = ptx.GlobalMemory(tensors)
    return memory, [memory.parameter(i, x.shape[:sizes], x.stride()[:strides])
                    for i, (x, (sizes, strides)) in enumerate(zip(tensors, varying))]


def digits_of(out: torch.Tensor, m: int) -> torch.Tensor:
    """Fixed-point numbers int64 [m, columns] of the digits in the order of the B operand."""
    blocks, chunks = out.shape[:2]
    made = out.view(torch.int8).reshape(blocks, chunks, 4, 2, 4, 2, 2, 2, 4).long()
    made = 256 * made[:, :, :, 0] + made[:, :, :, 1]  # .., row, t, half of j, odd, j mod 2, byte
    return made.permute(0, 2, 1, 4, 6, 3, 7, 5).reshape(4 * blocks, 128 * chunks)[:m]
