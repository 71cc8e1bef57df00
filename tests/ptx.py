"""Runs the PTX of a compiled kernel on the CPU: parsing, memory, barriers, and warps in lock step.

What the instructions do is in ptx_instructions.py. Bulk copies complete at once, so waits must pass at once: what is
checked is what each thread computes and touches, not the timing. Shared memory starts as NaN; every access must be
aligned and in bounds.
"""

import re
import struct
from dataclasses import dataclass, field

import numpy as np
import ptx_instructions
import torch
from ptx_instructions import LANES, names_of

OPERANDS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
SHARED_BYTES = 232_448
GLOBAL_BASE = 1 << 20


@dataclass(frozen=True)
class Instruction:
    opcode: str
    operands: tuple[str, ...]
    predicate: str | None
    negated: bool

    @classmethod
    def parse(cls, text: str) -> "Instruction":
        guard = re.match(r"@(!?)(%?\w+)\s+(.*)", text, re.S)
        if guard:
            text = guard[3]
        opcode, _, rest = re.sub(r"\s+", " ", text).partition(" ")
        return cls(opcode, tuple(OPERANDS.findall(rest)), guard and guard[2], bool(guard and guard[1]))


class Program:
    """The instructions of the one kernel in a PTX text; inline assembly may repeat its labels."""

    def __init__(self, text: str):
        body = re.sub(r"//[^\n]*|\n\s*\.loc[^\n]*", "", text[text.index("\n{", text.index(".entry")) + 2 :])
        body = re.sub(r"\{\s*\.reg[^{}]*\}", _with_own_names, body)
        self.instructions, self.labels = [], {}
        for statement in re.split(r"[;{}](?=\s)|(?<=:)\s", re.sub(r"\{([^{}\n]*)\}", r"<\1>", body)):
            statement = statement.strip()
            if re.fullmatch(r"\$?\w+:", statement):
                self.labels.setdefault(statement[:-1], []).append(len(self.instructions))
            elif statement and not statement.startswith("."):
                statement = statement.replace("<", "{").replace(">", "}")
                self.instructions.append(Instruction.parse(statement))

    def target(self, label: str, at: int) -> int:
        """The place of a label: of several, the nearest."""
        return min(self.labels[label], key=lambda place: abs(place - at))


def _with_own_names(block: re.Match) -> str:
    """A block of inline assembly whose registers hide others of their names."""
    text = block[0]
    for name in re.findall(r"\.reg\s+\.\w+\s+(%\w+);", text):
        text = re.sub(rf"{name}\b", f"{name}_{block.start()}", text)
    return text


class Memory:
    def __init__(self, data: np.ndarray, base: int = 0):
        self.data, self.base = data, base

    def places(self, address: np.ndarray, size: int) -> np.ndarray:
        at = address.astype(np.int64) - self.base
        assert (at >= 0).all() and (at + size <= len(self.data)).all(), "access out of bounds"
        assert (at % size == 0).all(), "misaligned access"
        return at[:, None] + np.arange(size)

    def read(self, address: np.ndarray, size: int) -> np.ndarray:
        """uint8 [threads, size]."""
        return self.data[self.places(address, size)]

    def write(self, address: np.ndarray, data: np.ndarray) -> None:
        self.data[self.places(address, data.shape[1])] = data


class GlobalMemory:
    """Tensors one after the other, with unused bytes between them."""

    def __init__(self, tensors: list[torch.Tensor]):
        chunks, self.starts = [], []
        for tensor in tensors:
            self.starts.append(sum(map(len, chunks)))
            data = tensor.contiguous().view(torch.uint8).flatten().numpy() if tensor.numel() else np.empty(0, np.uint8)
            chunks += [data, np.full(2048 - len(data) % 1024, 0xFF, np.uint8)]
        self.memory = Memory(np.concatenate(chunks), GLOBAL_BASE)

    def parameter(self, number: int, sizes: tuple, strides: tuple) -> bytes:
        """A CuTe tensor argument: address, int32 sizes, int64 strides, those that are not fixed."""
        data = struct.pack(f"<Q{len(sizes)}i", GLOBAL_BASE + self.starts[number], *sizes)
        return data + bytes(-len(data) % 8) + struct.pack(f"<{len(strides)}q", *strides)

    def tensor(self, number: int, like: torch.Tensor) -> torch.Tensor:
        start = self.starts[number]
        return torch.from_numpy(self.memory.data[start : start + like.nbytes].copy()).view(like.dtype).view(like.shape)


@dataclass
class Barrier:
    """An mbarrier: a phase ends when all arrivals and all announced bytes have come."""

    count: int
    pending: int = 0
    missing_bytes: int = 0
    phase: int = 0

    def __post_init__(self):
        self.pending = self.count

    def arrive(self, expected_bytes: int) -> None:
        assert self.pending > 0, "more arrivals than the barrier counts"
        self.pending -= 1
        self.bring(-expected_bytes)

    def bring(self, nbytes: int) -> None:
        self.missing_bytes -= nbytes
        if self.pending == 0 and self.missing_bytes == 0:
            self.pending, self.phase = self.count, self.phase ^ 1


@dataclass
class Cta:
    program: Program
    parameters: list[bytes]
    memory: Memory  # global
    index: tuple[int, int, int]
    grid: tuple[int, int, int]
    atomics: tuple[str, ...] = ("global", "acq_rel", "add")  # what each atomic must be
    shared: Memory = field(default_factory=lambda: Memory(np.full(SHARED_BYTES, 0xFF, np.uint8)))
    barriers: dict[int, Barrier] = field(default_factory=dict)

    @staticmethod
    def new_barrier(count: int) -> Barrier:
        return Barrier(count)

    def run(self, threads: int) -> None:
        """All warps, one after the other from barrier to barrier, all of which are for all threads."""
        running, found = [Warp(self, warp).run() for warp in range(threads // LANES)], None
        while running:
            votes = []
            for warp in running:
                try:
                    votes.append(warp.send(found))
                except StopIteration:
                    pass
            assert len(votes) in (0, len(running)), "some warps have ended before a barrier"
            running, found = running if votes else [], any(votes)


class Warp:
    """Registers as uint64 or bool [32]; each lane has its own place, and those at the lowest place go first."""

    def __init__(self, cta: Cta, warp: int):
        self.cta = cta
        self.registers = {"%laneid": np.arange(LANES, dtype=np.uint64), "__dynamic_shmem__0": _all(0),
                          "buf_dyn_shmem": _all(0),
                          "%cluster_ctarank": _all(0),
                          "%tid.x": np.arange(LANES * warp, LANES * (warp + 1), dtype=np.uint64)}
        for name, values in (("ctaid", cta.index), ("nctaid", cta.grid)):
            self.registers |= {f"%{name}.{axis}": _all(value) for axis, value in zip("xyz", values)}

    def run(self):
        """A generator that yields its vote at every barrier of the CTA, and is sent whether there was one for it."""
        program, end = self.cta.program, len(self.cta.program.instructions)
        places = np.zeros(LANES, np.int64)
        while (at := places.min()) < end:
            here, instruction = places == at, program.instructions[at]
            active = here
            if instruction.predicate:
                active = here & (self.registers[instruction.predicate].astype(bool) != instruction.negated)
            places[here] = at + 1
            kind = instruction.opcode.partition(".")[0]
            if kind in ("bra", "ret"):
                places[active] = end if kind == "ret" else program.target(instruction.operands[0], at)
            elif instruction.opcode == "bar.sync":
                assert active.all()
                yield False
            elif instruction.opcode == "bar.red.or.pred":
                assert active.all()
                found = yield bool(self.value(instruction.operands[2]).any())
                self.set(instruction.operands[0], np.full(LANES, found), active)
            elif active.any():
                with np.errstate(all="ignore"):
                    ptx_instructions.execute(self, instruction.opcode, instruction.operands, active)

    def value(self, operand: str) -> np.ndarray:
        """uint64 [32]: a register's, or a literal's."""
        if operand in self.registers:
            return self.registers[operand]
        assert operand[0] != "%", f"{operand} is read before it is written"
        return _all(int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0))

    def values(self, operand: str) -> list[np.ndarray]:
        """Of a register or of a list in braces."""
        return [self.value(name) for name in names_of(operand)]

    def address(self, operand: str) -> np.ndarray:
        base, offset = re.fullmatch(r"\[(%?\w+)(?:\+(-?\d+))?\]", operand).groups()
        return self.value(base) + _all(int(offset or 0))

    def set(self, operand: str, value: np.ndarray, active: np.ndarray) -> None:
        value = value if value.dtype == bool else value.astype(np.uint64)
        self.registers[operand] = np.where(active, value, self.registers.get(operand, np.zeros_like(value[:1])))


def _all(value: int) -> np.ndarray:
    return np.full(LANES, value & (1 << 64) - 1, np.uint64)
