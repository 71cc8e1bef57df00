"""Memory of several GPUs for one program's PTX on the CPU: as if each one's were mapped by all."""

import torch

from sim.ptx import program as ptx


class PeerMemory:
    """Tensors of the same names on every rank; ``slots`` is what ``peers`` has the addresses of."""

    def __init__(self, ranks: int, tensors: dict[str, torch.Tensor]):
        self.ranks, self.names = ranks, list(tensors)
        self.like = [x for _ in range(ranks) for x in tensors.values()]
        self.memory = ptx.GlobalMemory(self.like)
        slots = [ptx.GLOBAL_BASE + self.memory.starts[self.number(rank, "slots")] for rank in range(ranks)]
        for rank in range(ranks):
            self.write(rank, "peers", torch.tensor(slots))

    def number(self, rank: int, name: str) -> int:
        return rank * len(self.names) + self.names.index(name)

    def write(self, rank: int, name: str, x: torch.Tensor) -> None:
        start, data = self.memory.starts[self.number(rank, name)], x.contiguous().view(torch.uint8).flatten().numpy()
        self.memory.memory.data[start : start + len(data)] = data

    def read(self, rank: int, name: str) -> torch.Tensor:
        number = self.number(rank, name)
        return self.memory.tensor(number, self.like[number])

    def parameter(self, rank: int, name: str, sizes: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
        return self.memory.parameter(self.number(rank, name), sizes, strides)
