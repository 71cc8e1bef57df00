"""Runs the PTX of a compiled kernel on the CPU: parsing, memory, barriers, and the warps of several CTAs in turns.

What the instructions do is in instructions.py. A warp runs until it ends or needs others: at a barrier, before it
reads what other CTAs may be writing (ld.relaxed), where an mbarrier lets it wait. Copies to shared memory come as late
as they may, and what was there goes as early: what is read without a wait, or written too early, is NaN. A copy
may not go where the warp has read since its lanes last met, a bulk copy not come when its CTA has ended. Shared memory
starts as NaN; every access must be aligned and in bounds.
"""

import re
import struct
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from sim.ptx import instructions
from sim.ptx.memory import CTA_WINDOW, LANES, names_of
from sim.ptx.races import Races

OPERANDS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
SHARED_BYTES = 232_448
SMS = 132
GLOBAL_BASE = 1 << 20
OF_ALL_LANES = ("shfl", "vote", "redux", "movmatrix", "ldmatrix", "mma")  # lanes wait there for those elsewhere
EVERY_LANE = np.ones(LANES, bool)
POISON = np.full(LANES, 0x7FFD_7FFD_7FFD_7FFD, np.uint64)  # not a number in any type


@dataclass(frozen=True)
class Instruction:
    opcode: str
    operands: tuple[str, ...]
    predicate: str | None
    negated: bool

    @property
    def kind(self) -> str:
        return self.opcode.partition(".")[0]

    @classmethod
    def parse(cls, text: str) -> "Instruction":
        guard = re.match(r"@(!?)(%?\w+)\s+(.*)", text, re.S)
        if guard:
            text = guard[3]
        opcode, _, rest = re.sub(r"\s+", " ", text).partition(" ")
        return cls(opcode, tuple(OPERANDS.findall(rest)), guard and guard[2], bool(guard and guard[1]))


class Program:
    """The instructions of the one kernel in a PTX text."""

    def __init__(self, text: str):
        body = re.sub(r"//[^\n]*|\n\s*\.loc[^\n]*", "", text[text.index("\n{", text.index(".entry")) + 2 :])
        body = re.sub(r"\{([^{};\n]*)\}", r"<\1>", body)  # lists of registers
        body = re.sub(r"\{\s*\.reg[^{}]*\}", _with_own_names, body)
        body = re.sub(r"\{\s*([a-z][^{};]*;)\s*\}", r"\1", body)  # one instruction of inline assembly
        self.instructions, self.labels, self.shared = [], {}, _shared_places(text)
        for statement in re.split(r"[;{}](?=\s)|(?<=:)\s", body):
            statement = statement.strip()
            if re.fullmatch(r"\$?\w+:", statement):
                assert self.labels.setdefault(statement[:-1], len(self.instructions)) == len(self.instructions)
            elif statement and not statement.startswith("."):
                statement = statement.replace("<", "{").replace(">", "}")
                self.instructions.append(Instruction.parse(statement))


def _shared_places(text: str) -> dict[str, int]:
    """Addresses of what a kernel has in shared memory, by name; dynamic shared memory comes last."""
    at, found = 0, {}
    for align, name, size in sorted(re.findall(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\w+)\[(\d*)\]", text),
                                    key=lambda x: not x[2]):
        found[name] = at = -(-at // int(align)) * int(align)
        at += int(size or 0)
    return found


def _with_own_names(block: re.Match) -> str:
    """What is in a block of inline assembly, whose registers and labels hide others of their names."""
    text = block[0][1:-1]
    lists = re.findall(r"\.reg\s+\.\w+\s+(%?\w+(?:\s*,\s*%?\w+)*);", text)
    for name in [*re.findall(r"%?\w+", " ".join(lists)), *re.findall(r"^\s*(\w+):", text, re.M)]:
        text = re.sub(rf"(?<![\w%]){name}\b", f"{name}_{block.start()}", text)
    return text


class Memory:
    def __init__(self, data: np.ndarray, base: int = 0):
        self.data, self.base, self.changes = data, base, 0
        self.late: np.ndarray | None = None  # bytes that the kernel before this one may still write; None: it has ended
        self.holes: np.ndarray | None = None  # bytes that are no tensor's, which nothing may touch

    def places(self, address: np.ndarray, size: int) -> np.ndarray:
        if not self.base:  # shared memory: its addresses have 32 bits
            address = address & np.uint64(0xFFFF_FFFF)
        at = address.astype(np.int64) - self.base
        assert (at >= 0).all() and (at + size <= len(self.data)).all(), "access out of bounds"
        assert (at % size == 0).all(), "misaligned access"
        places = at[:, None] + np.arange(size)
        assert self.holes is None or not self.holes[places].any(), "access beyond a tensor"
        return places

    def read(self, address: np.ndarray, size: int) -> np.ndarray:
        """uint8 [threads, size]."""
        return self.data[self.places(address, size)]

    def write(self, address: np.ndarray, data: np.ndarray) -> None:
        places = self.places(address, data.shape[1])
        self.changes += not np.array_equal(self.data[places], data)
        self.data[places] = data


class GlobalMemory:
    """Tensors one after the other, with bytes between them that no access may touch."""

    def __init__(self, tensors: list[torch.Tensor]):
        chunks, self.starts = [], []
        for tensor in tensors:
            self.starts.append(sum(map(len, chunks)))
            data = tensor.contiguous().view(torch.uint8).flatten().numpy() if tensor.numel() else np.empty(0, np.uint8)
            chunks += [data, np.full(2048 - len(data) % 1024, 0xFF, np.uint8)]
        self.memory = Memory(np.concatenate(chunks), GLOBAL_BASE)
        self.memory.holes = np.concatenate([np.full(len(chunk), i % 2 == 1) for i, chunk in enumerate(chunks)])

    def parameter(self, number: int, sizes: tuple, strides: tuple, skipped: int = 0) -> bytes:
        """A CuTe tensor argument: address, int32 sizes, int64 strides, those that are not fixed; skipped: bytes at the
        start of the memory that are not the tensor's."""
        data = struct.pack(f"<Q{len(sizes)}i", GLOBAL_BASE + self.starts[number] + skipped, *sizes)
        return data + bytes(-len(data) % 8) + struct.pack(f"<{len(strides)}q", *strides)

    def begin_early(self, *late: int) -> None:
        """The kernel begins before the one ahead of it, which makes these tensors, has ended."""
        self.memory.late = np.zeros(len(self.memory.data), bool)
        for start, end in (((*self.starts, len(self.memory.data))[number :][:2]) for number in late):
            self.memory.late[start:end] = True

    def tensor(self, number: int, like: torch.Tensor) -> torch.Tensor:
        start = self.starts[number]
        return torch.from_numpy(self.memory.data[start : start + like.nbytes].copy()).view(like.dtype).view(like.shape)


@dataclass
class Barrier:
    """An mbarrier: a phase ends when all arrivals and all announced bytes have come."""

    count: int
    pending: int = 0
    missing_bytes: int = 0
    phases: int = 0  # that have ended

    def __post_init__(self):
        self.pending = self.count

    def arrive(self, expected_bytes: int) -> None:
        assert self.pending > 0, "more arrivals than the barrier counts"
        self.pending -= 1
        self.bring(-expected_bytes)

    def bring(self, nbytes: int) -> None:
        self.missing_bytes -= nbytes
        if self.pending == 0 and self.missing_bytes == 0:
            self.pending, self.phases = self.count, self.phases + 1


class Stop(NamedTuple):
    """Where a warp needs others: at a barrier of warps, or else at an instruction that looks for what they do."""

    instruction: Instruction
    place: int
    address: bytes = b""  # that each lane looks at
    barrier: int | None = None
    warps: int | None = None  # that the barrier counts; None: all of the CTA
    vote: bool = False

    def __str__(self) -> str:
        return f"{self.instruction.opcode} {', '.join(self.instruction.operands)}"


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
    stops: dict[int, Stop] = field(default_factory=dict)  # by warp
    passed: Counter = field(default_factory=Counter)  # how often each barrier of warps let some go on
    ended: int = 0  # warps
    cluster: list["Cta"] = field(default_factory=list)  # its CTAs by rank; none: this one alone
    threads: int = 0
    arrived: int = 0  # threads, at all barriers of the cluster
    under_way: dict[int, list] = field(default_factory=dict)  # by barrier: bulk copies that have not come
    # bytes of shared memory that have a barrier
    guarded: np.ndarray = field(default_factory=lambda: np.zeros(SHARED_BYTES, bool))
    policies: set[int] = field(default_factory=set)  # of L2, of all bulk copies
    # the warp, counted from 1, that wrote a byte of shared memory and has not fenced it for wgmma since; 0: none
    unfenced: np.ndarray = field(default_factory=lambda: np.zeros(SHARED_BYTES, np.uint8))
    # the moment of a warp in which it last read a byte of shared memory
    read_when: np.ndarray = field(default_factory=lambda: np.zeros(SHARED_BYTES, np.int64))
    moments: int = 0  # of all warps, so far
    races: Races | None = None  # if races are looked for
    has_poison: bool = False  # a register that is read before it is written is no number; else that is an error

    @staticmethod
    def new_barrier(count: int) -> Barrier:
        return Barrier(count)

    @property
    def state(self) -> tuple:
        """The same again if its warps have done nothing but look."""
        phases = sum(barrier.phases for barrier in self.barriers.values())
        return tuple(self.stops.items()), self.passed.total(), self.ended, phases, self.shared.changes, self.arrived

    @property
    def rank(self) -> int:
        """In its cluster."""
        return next((i for i, cta in enumerate(self.cluster) if cta is self), 0)

    def of_cluster(self, address: int) -> tuple["Cta", int]:
        """(CTA, address in its shared memory) of an address of ``mapa``, or of one in this CTA's shared memory."""
        window, own = divmod(address, CTA_WINDOW)
        return (self.cluster or [self])[window - 1] if window else self, own

    def look_for_races(self, threads: int) -> "Cta":
        self.races = Races(threads // LANES, SHARED_BYTES)
        return self

    def turns(self, threads: int, reverse: bool = False):
        """A generator: in each turn every warp that no barrier holds goes to its next stop; reverse: the last first."""
        count, self.threads = threads // LANES, threads
        running, votes = {warp: Warp(self, warp).run() for warp in range(count)[:: -1 if reverse else 1]}, {}
        while running:
            for warp in [x for x in running if x not in self.stops or self.stops[x].barrier is None]:
                try:
                    self.stops[warp] = running[warp].send(votes.pop(warp, None))
                except StopIteration:
                    del running[warp]
                    self.stops.pop(warp, None)
                    self.ended += 1
                    assert running or not self.under_way, "copies to shared memory of a CTA that has ended"
            votes |= self.release(count)
            yield True

    def release(self, count: int) -> dict[int, bool]:
        """The warps whose barrier is complete go on; what each is told: whether one of them has voted for it."""
        votes = {}
        for barrier in {stop.barrier for stop in self.stops.values()} - {None}:
            held = {warp: stop for warp, stop in self.stops.items() if stop.barrier == barrier}
            counts = {stop.warps or count for stop in held.values()}
            assert len(counts) == 1 and len(held) <= max(counts), f"barrier {barrier} of {counts} warps has {held}"
            if len(held) == max(counts):
                votes |= dict.fromkeys(held, any(stop.vote for stop in held.values()))
                self.passed[barrier] += 1
                if self.races:
                    self.races.meet(sorted(held))
                for warp in held:
                    del self.stops[warp]
        return votes


def run_grid(ctas: list[Cta], threads: int, reverse: bool = False) -> Counter:
    """CTAs that run at once, the first one as far as it comes before the next one; returns how often each barrier was
    passed.

    reverse: of the warps of each CTA, the last has the first turn.
    """
    turns, seen = [(cta, cta.turns(threads, reverse)) for cta in ctas], Counter()
    with np.errstate(all="ignore"):
        while turns := [(cta, turn) for cta, turn in turns if _goes_on(cta, turn)]:
            state = (ctas[0].memory.changes, *(cta.state for cta in ctas))
            seen[state] += 1  # a second round: of what a warp looks at in turn, the first was not there yet
            assert seen[state] <= 2, f"deadlock: {_describe(ctas, threads // LANES)}"
    return sum((cta.passed for cta in ctas), Counter())


def _goes_on(cta: Cta, turns) -> bool:
    """Let a CTA take turns until its warps do nothing but look; whether one of them has not ended."""
    seen = set()
    while cta.state not in seen:
        seen.add(cta.state)
        if not next(turns, False):
            return False
    return True


def _describe(ctas: list[Cta], count: int) -> str:
    """Where the warps of all CTAs are."""
    return "; ".join(f"CTA {cta.index}, {cta.ended} of {count} warps have ended" + "".join(
        f", {warps} at {place}" for place, warps in Counter(map(str, cta.stops.values())).items()) for cta in ctas)


class Warp:
    """Registers as uint64 or bool [32]; each lane has its own place, and those at the lowest place go first, but where
    an instruction is of all lanes."""

    def __init__(self, cta: Cta, warp: int):
        self.cta, self.index = cta, warp
        self.has_waited = np.zeros(LANES, bool)  # for the kernel before
        self.met = 0  # how often it has waited for its cluster
        self.begin_moment()
        self.copies, self.groups = [], []  # cp.async: those that no group has, and groups that are under way
        self.multiplies, self.multiply_groups = [], []  # the same of wgmma
        self.registers = {"%laneid": np.arange(LANES, dtype=np.uint64),
                          **{name: _all(at) for name, at in cta.program.shared.items()},
                          "%cluster_ctarank": _all(cta.rank), "%nsmid": _all(SMS),
                          "%tid.x": np.arange(LANES * warp, LANES * (warp + 1), dtype=np.uint64)}
        for name, values in (("ctaid", cta.index), ("nctaid", cta.grid)):
            self.registers |= {f"%{name}.{axis}": _all(value) for axis, value in zip("xyz", values)}

    def run(self):
        """A generator that yields its stops, and behind a barrier is sent whether there was a vote for it."""
        program, end = self.cta.program, len(self.cta.program.instructions)
        places = np.zeros(LANES, np.int64)
        at, here, next_group = _lowest(places, end)
        waits = 0
        while at < end:
            instruction = program.instructions[at]
            if here is not EVERY_LANE and instruction.kind in OF_ALL_LANES and (places[~here] < end).any():
                waits += 1
                assert waits < LANES, f"lanes wait for each other at {instruction.opcode}"
                places[here] = at
                at, here, next_group = _lowest(np.where(here, end, places), end)
                next_group = min(next_group, int(places[places > at].min(initial=end)))
                continue
            waits = 0
            active, opcode, operands = here, instruction.opcode, instruction.operands
            if instruction.predicate:
                active = here & (self.registers[instruction.predicate].astype(bool) != instruction.negated)
            if opcode.startswith(("bra", "ret")):
                places[here] = at + 1
                places[active] = end if opcode.startswith("ret") else program.labels[operands[0]]
                at, here, next_group = _lowest(places, end)
                continue
            if opcode in ("bar.sync", "bar.red.or.pred", "barrier.cta.red.or.pred"):
                assert active.all()
                found = yield self.barrier_stop(instruction, at)
                self.begin_moment()
                if opcode != "bar.sync":
                    self.set(operands[0], np.full(LANES, found), active)
            elif opcode == "barrier.cluster.wait":
                self.met += 1
                while any(cta.arrived < self.met * self.cta.threads for cta in self.cta.cluster):
                    yield Stop(instruction, at)
            elif active is here or active.any():
                if opcode.startswith("ld.relaxed"):
                    yield self.look(instruction, at, active)
                instructions.execute(self, opcode, operands, active)
                if opcode.startswith("mbarrier.try_wait") and not self.value(operands[0])[active].all():
                    yield self.look(instruction, at, active)
            at += 1
            if at == next_group:
                places[here] = at
                at, here, next_group = _lowest(places, end)

    def begin_moment(self) -> None:
        """All lanes have met: of what was read before, none is still being read."""
        self.cta.moments += 1
        self.moment = self.cta.moments

    def note_read(self, address: np.ndarray, size: int) -> None:
        """Until all lanes have met, some may still read this: no copy may take its place."""
        places = self.cta.shared.places(address, size)
        self.cta.read_when[places] = self.moment
        if self.cta.races:
            self.cta.races.read(self.index, places.ravel())

    def look(self, instruction: Instruction, at: int, active: np.ndarray) -> Stop:
        return Stop(instruction, at, self.address(instruction.operands[1])[active].tobytes())

    def barrier_stop(self, instruction: Instruction, at: int) -> Stop:
        is_vote = instruction.opcode != "bar.sync"
        barrier, *threads = instruction.operands[1:-1] if is_vote else instruction.operands
        (barrier,), *counts = (set(self.value(x).tolist()) for x in (barrier, *threads))
        return Stop(instruction, at, barrier=barrier, warps=counts[0].pop() // LANES if counts else None,
                    vote=is_vote and bool(self.value(instruction.operands[-1]).any()))

    def value(self, operand: str) -> np.ndarray:
        """uint64 [32]: a register's, or a literal's."""
        if operand in self.registers:
            return self.registers[operand]
        if operand[0] == "%":
            assert self.cta.has_poison, f"{operand} is read before it is written"
            return POISON
        return _literal(operand)

    def values(self, operand: str) -> list[np.ndarray]:
        """Of a register or of a list in braces."""
        return [self.value(name) for name in names_of(operand)]

    def address(self, operand: str) -> np.ndarray:
        base, offset = _base_and_offset(operand)
        return self.value(base) + offset

    def write_shared(self, address: np.ndarray, data: np.ndarray) -> None:
        places = self.cta.shared.places(address, data.shape[1])
        assert not self.cta.guarded[places].any(), "a barrier is there"
        if self.cta.races:
            self.cta.races.write(self.index, places.ravel())
        self.cta.shared.write(address, data)
        self.cta.unfenced[places] = self.index + 1

    def set(self, operand: str, value: np.ndarray, active: np.ndarray) -> None:
        value = value if value.dtype == bool else value.astype(np.uint64)
        if active is not EVERY_LANE and not active.all():
            value = np.where(active, value, self.registers.get(operand, np.zeros_like(value[:1])))
        self.registers[operand] = value


def _lowest(places: np.ndarray, end: int) -> tuple[int, np.ndarray, int]:
    """The lowest place, the lanes there, and the next place of others, at least ``end`` if there are none."""
    at = places.min()
    here = places == at
    return int(at), EVERY_LANE if here.all() else here, int(places[~here].min(initial=end))


def _all(value: int) -> np.ndarray:
    return np.full(LANES, value & (1 << 64) - 1, np.uint64)


@cache
def _literal(operand: str) -> np.ndarray:
    return _all(int(operand[2:], 16) if operand.startswith("0f") else int(operand.removesuffix("U"), 0))


@cache
def _base_and_offset(operand: str) -> tuple[str, np.ndarray]:
    base, offset = re.fullmatch(r"\[(%?\w+)(?:\+(-?\d+))?\]", operand).groups()
    return base, _all(int(offset or 0))
