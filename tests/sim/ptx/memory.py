"""PTX instructions that read and write memory, and barriers in it, on registers of 32 lanes."""

import re
from functools import cache

import numpy as np

from sim.ptx.numbers import U32, U64, width

LANES = 32
CTA_WINDOW = 1 << 24  # bytes between the shared memories of a cluster's CTAs


def names_of(operand: str) -> list[str]:
    """The registers of a list in braces, or the one register."""
    return operand.strip("{} ").replace(",", " ").split()


def load(warp, suffixes, operands, active):
    names, size = names_of(operands[0]), width(suffixes) // 8
    if suffixes[0] == "param":
        number, offset = parameter_place(operands[1])
        data = np.frombuffer(warp.cta.parameters[number], np.uint8, size * len(names), offset)
        words = np.broadcast_to(data.view(f"u{size}"), (LANES, len(names)))
    elif suffixes[0] == "shared::cluster":
        words = load_of_cluster(warp, operands, active).view(f"u{size}")
    else:
        at, data = warp.address(operands[1]), np.zeros((LANES, size * len(names)), np.uint8)
        is_shared = suffixes[0] == "shared"
        memory = warp.cta.shared if is_shared else global_memory(warp, at, size * len(names), active)
        data[active] = memory.read(at[active], size * len(names))
        if is_shared:
            warp.note_read(at[active], size * len(names))
        words = data.view(f"u{size}")
    for i, name in enumerate(names):
        warp.set(name, words[:, i], active)


def load_of_cluster(warp, operands, active) -> np.ndarray:
    """A word of the shared memory of a CTA of the cluster, which must not have ended, by each lane."""
    data, address = np.zeros((LANES, 4), np.uint8), warp.address(operands[1])
    for lane in np.flatnonzero(active):
        cta, at = warp.cta.of_cluster(int(address[lane]))
        assert cta.ended * LANES < cta.threads, "the CTA has ended"
        data[lane] = cta.shared.read(np.array([at], U64), 4)[0]
    return data


def global_memory(warp, address, size, active, writes=False):
    """Global memory. Before its griddepcontrol.wait, a lane may write nothing to it and may not read what the kernel
    before this one makes: ``late``."""
    memory, early = warp.cta.memory, active & ~warp.has_waited
    if memory.late is not None and early.any():
        assert not writes, "a write before griddepcontrol.wait"
        assert not memory.late[memory.places(address[early], size)].any(), "a read before griddepcontrol.wait"
    return memory


def grid_dependency(warp, suffixes, operands, active):
    if suffixes[0] == "wait":
        warp.has_waited = warp.has_waited | active


@cache
def parameter_place(operand: str) -> tuple[int, int]:
    """(number of the parameter, offset in it)."""
    number, offset = re.fullmatch(r"\[\w+_param_(\d+)(?:\+(\d+))?\]", operand).groups()
    return int(number), int(offset or 0)


def store(warp, suffixes, operands, active):
    if suffixes[0] == "async":
        return store_async(warp, suffixes, operands, active)
    words = np.stack([x.astype(f"u{width(suffixes) // 8}") for x in warp.values(operands[1])], 1)
    at, data = warp.address(operands[0]), words.view(np.uint8)
    is_shared = suffixes[0] == "shared"
    write = warp.write_shared if is_shared else global_memory(warp, at, data.shape[1], active, writes=True).write
    write(at[active], data[active])


def atomic(warp, suffixes, operands, active):
    """Add 32 bits, in shared memory or, in the memory order that the kernel needs, in global memory; or exchange them
    in shared memory."""
    is_shared, adds = suffixes[0] == "shared", "add" in suffixes
    assert is_shared or {*warp.cta.atomics} <= {*suffixes}
    assert adds or is_shared and "exch" in suffixes
    at, value = warp.address(operands[1]), warp.value(operands[2])
    memory = warp.cta.shared if is_shared else global_memory(warp, at, 4, active, writes=True)
    before = np.zeros(LANES, U64)
    for lane in np.flatnonzero(active):
        before[lane] = memory.read(at[lane : lane + 1], 4).view(U32)[0, 0]
        memory.write(at[lane : lane + 1], np.array([[adds * before[lane] + value[lane]]]).astype(U32).view(np.uint8))
    return before


def bulk_copy(warp, suffixes, operands, active):
    """What is copied comes when someone waits at the barrier; until then the target is no number."""
    cta = warp.cta
    target, source, size, barrier = (read(x) for read, x in zip((warp.address, warp.address, warp.value, warp.address),
                                                                operands))
    for lane in np.flatnonzero(active):
        if suffixes[-1] == "L2::cache_hint":
            cta.policies.add(int(warp.value(operands[4])[lane]))
        to, first = cta.of_cluster(int(target[lane]))
        last = first + int(size[lane])
        assert to is cta
        start = int(source[lane]) - cta.memory.base
        global_memory(warp, source, 16, np.arange(LANES) == lane)  # its first bytes stand for all of a tensor
        assert first % 16 == start % 16 == size[lane] % 16 == 0 and start >= 0
        assert last <= len(cta.shared.data) and start + int(size[lane]) <= len(cta.memory.data)
        assert not cta.memory.holes[start : start + int(size[lane])].any(), "a copy from beyond a tensor"
        assert not cta.guarded[first:last].any(), "a barrier is there"
        check_read(warp, slice(first, last))
        cta.shared.data[first:last] = 0xFF
        cta.under_way.setdefault(int(barrier[lane]), []).append((first, start, int(size[lane])))


def check_read(warp, places):
    """A copy may not take the place of what lanes of the warp have read since they last met: some may be behind."""
    assert not (warp.cta.read_when[places] == warp.moment).any(), "other lanes may still read what is there"


def bulk_copies_come(cta, barrier: int) -> None:
    """All that were started until now and count at this barrier."""
    for first, start, size in cta.under_way.pop(barrier, ()):
        cta.shared.data[first : first + size] = cta.memory.data[start : start + size]
        if cta.races:
            cta.races.copied(slice(first, first + size))
        cta.barriers[barrier].bring(size)


def copy(warp, suffixes, operands, active):
    """cp.async: what a lane copies may come any time before its group is waited for; here, when it is. Until then the
    target is no number."""
    if "bulk" in suffixes:
        bulk_copy(warp, suffixes, operands, active)
    elif "commit_group" in suffixes:
        warp.groups.append(warp.copies)
        warp.copies = []
    elif suffixes[1] in ("wait_group", "wait_all"):
        if suffixes[1] == "wait_all":  # those without a group too
            warp.groups.append(warp.copies)
            warp.copies = []
        while len(warp.groups) > int((*operands, 0)[0]):
            for target, data in warp.groups.pop(0):
                warp.write_shared(target, data)
    else:
        assert suffixes[-2:] == ("shared", "global") and operands[2] == "16", (suffixes, operands)
        global_memory(warp, warp.address(operands[1]), 16, active)
        target, source = (warp.address(x)[active] for x in operands[:2])
        assert (target % 16 == 0).all() and (source % 16 == 0).all()
        count = warp.value(operands[3])[active] if len(operands) > 3 else np.full(len(target), 16, U64)  # the rest is 0
        assert set(count.tolist()) <= {0, 16}, count
        data = np.zeros((len(target), 16), np.uint8)
        data[count > 0] = warp.cta.memory.read(source[count > 0], 16)
        check_read(warp, warp.cta.shared.places(target, 16))
        warp.write_shared(target, np.full_like(data, 0xFF))
        warp.copies.append((target, data))


def mbarrier(warp, suffixes, operands, active):
    barriers, what = warp.cta.barriers, suffixes[0]
    at = warp.address(operands[0 if what == "init" else 1])
    value = warp.value(operands[1 if what == "init" else 2])
    passed = np.zeros(LANES, bool)
    for lane in np.flatnonzero(active):
        if what == "init":
            barriers[int(at[lane])] = warp.cta.new_barrier(int(value[lane]))
            warp.cta.guarded[int(at[lane]) : int(at[lane]) + 8] = True
        elif what == "arrive":
            is_counted = "expect_tx" not in suffixes
            if warp.cta.races:
                warp.cta.races.arrive(warp.index, int(at[lane]))
            for _ in range(int(value[lane]) if is_counted else 1):
                barriers[int(at[lane])].arrive(0 if is_counted else int(value[lane]))
        else:
            if what == "try_wait" or warp.index % 2:  # who only looks, may find them there or not
                bulk_copies_come(warp.cta, int(at[lane]))
            passed[lane] = barriers[int(at[lane])].phases % 2 != int(value[lane])
            if passed[lane] and warp.cta.races:
                warp.cta.races.go_on(warp.index, int(at[lane]))
    return passed if what in ("try_wait", "test_wait") else None


def map_address(warp, suffixes, operands, active):
    return warp.value(operands[1]) + (warp.value(operands[2]) + U64(1)) * U64(CTA_WINDOW)


def arrive_at_cluster(warp, suffixes, operands, active):
    assert suffixes[:2] == ("cluster", "arrive")
    warp.cta.arrived += int(active.sum())


def store_async(warp, suffixes, operands, active):
    """To the shared memory of a CTA of the cluster; its barrier counts the bytes."""
    words = np.stack([x.astype(U32) for x in warp.values(operands[1])], 1).view(np.uint8)
    target, barrier = (warp.address(operands[i]) for i in (0, 2))
    for lane in np.flatnonzero(active):
        (cta, at), (owner, place) = (warp.cta.of_cluster(int(x[lane])) for x in (target, barrier))
        assert cta is owner and cta.ended * LANES < cta.threads, "the CTA has ended"
        cta.shared.write(np.array([at], U64), words[lane : lane + 1])
        cta.barriers[place].bring(words.shape[1])
