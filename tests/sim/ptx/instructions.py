"""What the PTX instructions of kernels of decode, append, quantize and manage do, on registers of 32 lanes.

Any other one is an error.
"""

import operator
from functools import cache

import numpy as np

from sim.ptx import memory, wgmma
from sim.ptx.memory import LANES, names_of
from sim.ptx.numbers import HALF, U64, bits, f32, halves_of, raw, signed, to_half, typed, unsigned, width

LANE = np.arange(LANES)
G, T = LANE // 4, LANE % 4
COMPARE = {"gtu": lambda x, y: ~(x <= y), "ltu": lambda x, y: ~(x >= y),
           "geu": lambda x, y: ~(x < y), "leu": lambda x, y: ~(x > y),
           "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt,
           "ge": operator.ge, "neu": operator.ne, "nan": lambda x, y: np.isnan(x) | np.isnan(y)}
BITWISE = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def execute(warp, opcode: str, operands: tuple[str, ...], active: np.ndarray) -> None:
    """One instruction in the active lanes of a warp (program.Warp)."""
    step, suffixes = step_of(opcode)
    result = step(warp, suffixes, operands, active)
    if result is not None:
        warp.set(operands[0], result, active)


@cache
def step_of(opcode: str) -> tuple:
    """What an instruction does, and its suffixes."""
    kind, _, rest = opcode.partition(".")
    suffixes = tuple(rest.split("."))
    tables = ((WHOLE, kind), (PAIRS, (kind, suffixes[-1])), (HALVES, (kind, suffixes[-1])),
              (FLOATS, kind if suffixes[-1] == "f32" else None), (INTEGERS, kind))
    for table, key in tables:
        if key in table:
            return table[key], suffixes
    raise NotImplementedError(opcode)


# ---- fp32


def float_step(function):
    def step(warp, suffixes, operands, active):
        return bits(function(*(f32(warp.value(x)) for x in operands[1:])))
    return step


def fused(x, y, z):
    return (x.astype(np.float64) * y + z).astype(np.float32)


def set_predicate(warp, suffixes, operands, active):
    readers = {"f32": f32, "f16": lambda x: halves_of(x, False)[0]}
    read = readers.get(suffixes[-1], lambda x: typed(x, suffixes))
    return COMPARE[suffixes[0]](*(read(warp.value(x)) for x in operands[1:3]))


def select(warp, suffixes, operands, active):
    return np.where(warp.value(operands[3]).astype(bool), warp.value(operands[1]), warp.value(operands[2]))


FLOATS = {name: float_step(function) for name, function in {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "max": np.fmax, "min": np.fmin, "abs": np.abs,
    "fma": fused, "neg": operator.neg, "ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal, "sin": np.sin,
    "cos": np.cos, "div": np.divide, "sqrt": np.sqrt, "rsqrt": lambda x: np.reciprocal(np.sqrt(x))}.items()}


# ---- 16-bit halves


def each_half(function):
    """A step on both halves of words."""
    def step(warp, suffixes, operands, active):
        words = [warp.value(x) for x in operands[1:]]
        low, high = (function(*(word >> U64(shift) & HALF for word in words)) for shift in (0, 16))
        return low | high << U64(16)
    return step


def half_product(x, y):
    return to_half(halves_of(x, False)[0] * halves_of(y, False)[0], False)


def half_sum(x, y, sign=1):
    x, y = (halves_of(half, False)[0].astype(np.float64) for half in (x, y))
    return (x + sign * y).astype(np.float16).view(np.uint16).astype(U64)


def half_maximum(warp, suffixes, operands, active):
    return to_half(np.fmax(*(halves_of(warp.value(x), False)[0] for x in operands[1:])), False)


def half_step(function, is_bf16: bool):
    """A step on numbers of 16 bits; fp64 holds any sum of a product that it gives, so one rounding is left."""
    return each_half(rounded_step(function, is_bf16))


def keeps_nan(function, of_nan):
    """A step on both fp16 halves; with the suffix NaN, what is no number stays so."""
    plain, kept = (each_half(rounded_step(f, False)) for f in (function, of_nan))
    return lambda warp, suffixes, *more: (kept if "NaN" in suffixes else plain)(warp, suffixes, *more)


def rounded_step(function, is_bf16: bool):
    def step(*halves):
        exact = function(*(halves_of(half, is_bf16)[0].astype(np.float64) for half in halves))
        if not is_bf16:
            return exact.astype(np.float16).view(np.uint16).astype(U64)
        rounded = exact.astype(np.float32)
        assert (rounded == exact)[np.isfinite(exact)].all(), "two roundings"
        return to_half(rounded, is_bf16)
    return step


PAIRS = {("max", "u16x2"): each_half(np.maximum), ("mul", "f16x2"): each_half(half_product),
         ("add", "f16x2"): each_half(half_sum), ("sub", "f16x2"): each_half(lambda x, y: half_sum(x, y, -1))} | {
    (name, f"{kind}x2"): half_step(function, kind == "bf16") for kind in ("f16", "bf16")
    for name, function in (("min", np.fmin), ("max", np.fmax), ("fma", lambda x, y, z: x * y + z))} | {
    ("neg", "f16x2"): each_half(lambda x: x ^ U64(0x8000)),
    ("min", "f16x2"): keeps_nan(np.fmin, np.minimum), ("max", "f16x2"): keeps_nan(np.fmax, np.maximum)}
HALVES = {("max", "f16"): half_maximum}


# ---- integers


def integer_step(function):
    def step(warp, suffixes, operands, active):
        return unsigned(raw(function(*(typed(warp.value(x), suffixes) for x in operands[1:]))), width(suffixes))
    return step


def bitwise(name):
    def step(warp, suffixes, operands, active):
        return BITWISE[name](*(warp.value(x) for x in operands[1:]))
    return step


def multiply(warp, suffixes, operands, active):
    if suffixes in (("hi", "u64"), ("hi", "s64")):
        kind = np.int64 if suffixes[1] == "s64" else U64
        factors = (warp.value(x).astype(U64).view(kind) for x in operands[1:])
        return np.array([int(x) * int(y) >> 64 for x, y in zip(*factors)], kind).view(U64)
    product = operator.mul(*(typed(warp.value(x), suffixes) for x in operands[1:]))
    if suffixes[0] == "wide":
        return unsigned(raw(product), 2 * width(suffixes))
    return unsigned(raw(product >> product.dtype.type(32) if suffixes[0] == "hi" else product), width(suffixes))


def multiply_add(warp, suffixes, operands, active):
    x, y, z = (warp.value(x) for x in operands[1:])
    return unsigned(x * y + z, width(suffixes))


def shift(warp, suffixes, operands, active):
    value, count = typed(warp.value(operands[1]), suffixes), warp.value(operands[2])
    return unsigned(raw(value >> count.astype(value.dtype)), width(suffixes))


def shift_left(warp, suffixes, operands, active):
    return unsigned(warp.value(operands[1]) << warp.value(operands[2]), width(suffixes))


def truncated(x, y):
    return np.trunc(x / y).astype(x.dtype)


def move(warp, suffixes, operands, active):
    """To or from a list: equal parts of the bits."""
    lists = [names_of(operand) for operand in operands if operand[0] == "{"]
    part = width(suffixes) // len(lists[0]) if lists else 0
    mask = U64((1 << part) - 1)
    if operands[0][0] == "{":
        for i, name in enumerate(lists[0]):
            if name != "_":
                warp.set(name, warp.value(operands[1]) >> U64(part * i) & mask, active)
        return None
    if lists:
        return sum((value & mask) << U64(part * i) for i, value in enumerate(warp.values(operands[1])))
    return warp.value(operands[1])


def convert(warp, suffixes, operands, active):
    values = [warp.value(x) for x in operands[1:]]
    kinds = tuple(x for x in suffixes if x != "rn")
    if suffixes == ("sat", "f32", "f32"):  # not a number gives 0
        return bits(np.fmin(np.fmax(f32(values[0]), np.float32(0)), np.float32(1)))
    if suffixes == ("rzi", "s32", "f32"):
        return unsigned(raw(f32(values[0]).astype(np.int64)), 32)
    if suffixes == ("rzi", "s64", "f32"):
        return raw(f32(values[0]).astype(np.int64))
    if suffixes == ("rni", "f32", "f32"):
        return bits(np.rint(f32(values[0])))
    assert len(kinds) == 2, suffixes  # no other rounding
    if kinds[0] == "f32" and kinds[1] in ("s32", "u32", "s64"):
        return bits(typed(values[0], kinds[1:]).astype(np.float32))
    if kinds[0] == "f32":
        return bits(halves_of(values[0], kinds[1] == "bf16")[0])
    if kinds[1] == "f32":
        parts = [to_half(f32(x), "bf16" in kinds[0]) for x in values]
        return parts[0] << U64(16) | parts[1] if "x2" in kinds[0] else parts[0]
    return unsigned(raw(typed(values[0], kinds[1:])), width(kinds[:1]))


def negate(warp, suffixes, operands, active):
    value = warp.value(operands[1])
    return ~value.astype(bool) if suffixes[-1] == "pred" else unsigned(~value, width(suffixes))


INTEGERS = {
    "add": integer_step(operator.add), "sub": integer_step(operator.sub), "mul": multiply, "mad": multiply_add,
    "min": integer_step(np.minimum), "max": integer_step(np.maximum), "neg": integer_step(operator.neg),
    "abs": integer_step(np.abs),
    "div": integer_step(truncated), "rem": integer_step(lambda x, y: x - truncated(x, y) * y),
    "shl": shift_left, "shr": shift, "not": negate, **{name: bitwise(name) for name in BITWISE},
}


# ---- the whole warp


def shuffle(warp, suffixes, operands, active):
    assert active.all()
    value, by = warp.value(operands[1]), warp.value(operands[2]).astype(np.int64)
    sources = {"bfly": LANE ^ by, "up": np.where(LANE >= by, LANE - by, LANE), "idx": by % LANES}
    name, *found = operands[0].split("|")
    warp.set(name, value[sources[suffixes[1]]], active)
    for predicate in found:  # whether the lane asked for is there
        warp.set(predicate, LANE >= by if suffixes[1] == "up" else active, active)


def reduce(warp, suffixes, operands, active):
    assert active.all() and suffixes[1:] in (("max", "u32"), ("max", "s32"), ("add", "s32")), suffixes
    value = typed(warp.value(operands[1]), suffixes)
    found = value.max(keepdims=True) if suffixes[1] == "max" else value.sum(keepdims=True)
    return np.repeat(unsigned(raw(found), 32), LANES)


def vote(warp, suffixes, operands, active):
    assert active.all()
    votes = warp.value(operands[1]).astype(bool)
    if "ballot" in suffixes:
        return np.full(LANES, (votes.astype(U64) << LANE.astype(U64)).sum())
    return np.full(LANES, votes.all() if "all" in suffixes else votes.any())


def match(warp, suffixes, operands, active):
    """Active lanes of the mask that hold the lane's value."""
    assert suffixes == ("any", "sync", "b32"), suffixes
    value, mask = warp.value(operands[1]), warp.value(operands[2])
    members = active & ((mask >> LANE.astype(U64)) & U64(1)).astype(bool)
    assert members[active].all(), "a lane outside of its mask"
    return ((value[:, None] == value[None, :]) & members[None, :]).astype(U64) @ (U64(1) << LANE.astype(U64))


def count_ones(warp, suffixes, operands, active):
    return np.array([int(x).bit_count() for x in unsigned(warp.value(operands[1]), width(suffixes))], U64)


def table_of_bits(warp, suffixes, operands, active):
    """lop3: bit 4a + 2b + c of the table."""
    assert suffixes == ("b32",)
    words, table = [unsigned(warp.value(x), 32) for x in operands[1:4]], int(operands[4], 0)
    found = np.zeros(LANES, U64)
    for i in np.flatnonzero([table >> i & 1 for i in range(8)]):
        a, b, c = (word if i >> 2 - j & 1 else unsigned(~word, 32) for j, word in enumerate(words))
        found |= a & b & c
    return found


def insert_bits(warp, suffixes, operands, active):
    first, count = int(operands[3]), int(operands[4])
    mask = U64(((1 << count) - 1) << first)
    return (warp.value(operands[2]) & ~mask) | (warp.value(operands[1]) << U64(first) & mask)


def funnel_shift(warp, suffixes, operands, active):
    """32 bits of two words, the first one lower."""
    assert suffixes[1:] == ("wrap", "b32") and suffixes[0] in "lr"
    low, high, count = (warp.value(x) for x in operands[1:])
    count, both = count & U64(31), unsigned(low, 32) | high << U64(32)
    return unsigned(both << count >> U64(32) if suffixes[0] == "l" else both >> count, 32)


def elect(warp, suffixes, operands, active):
    number, chosen = operands[0].split("|")
    warp.set(number, np.full(LANES, active.argmax(), U64), active)
    warp.set(chosen, LANE == active.argmax(), active)


def permute(warp, suffixes, operands, active):
    low, high, selector = (warp.value(x) for x in operands[1:])
    both, result = unsigned(low, 32) | high << U64(32), np.zeros(LANES, U64)
    for i in range(4):
        nibble = selector >> U64(4 * i) & U64(15)
        byte = both >> (nibble & U64(7)) * U64(8) & U64(255)
        byte = np.where(nibble < 8, byte, (byte >> U64(7)) * U64(255))  # from 8 on: the sign of a byte, in all bits
        result |= byte << U64(8 * i)
    return result


def bytes_of(word: np.ndarray) -> np.ndarray:
    """int64 [lanes, 4], the lowest first."""
    return (word[:, None] >> U64(8) * np.arange(4, dtype=U64) & U64(255)).astype(np.int64)


def byte_distances(warp, suffixes, operands, active):
    """vabsdiff4 of unsigned bytes; the fourth operand is only for selected bytes or, with add, for the sum."""
    assert suffixes[:3] == ("u32", "u32", "u32") and suffixes[3:] in ((), ("add",))
    x, y = (bytes_of(warp.value(operand)) for operand in operands[1:3])
    if suffixes[3:]:
        return unsigned(raw(np.abs(x - y).sum(1)) + warp.value(operands[3]), 32)
    return (np.abs(x - y) << 8 * np.arange(4)).sum(1)


def byte_products(warp, suffixes, operands, active):
    assert suffixes == ("u32", "u32")
    x, y = (bytes_of(warp.value(operand)) for operand in operands[1:3])
    return unsigned(raw((x * y).sum(1)) + warp.value(operands[3]), 32)


def rows_of(matrix: np.ndarray) -> np.ndarray:
    """Each lane's word of an 8x8 matrix of 16-bit values."""
    return matrix[G, 2 * T] | matrix[G, 2 * T + 1] << U64(16)


def movmatrix(warp, suffixes, operands, active):
    assert active.all()
    matrix, word = np.zeros((8, 8), U64), warp.value(operands[1])
    matrix[G, 2 * T], matrix[G, 2 * T + 1] = word & HALF, word >> U64(16)
    return rows_of(matrix.T)


def ldmatrix(warp, suffixes, operands, active):
    assert active.all()
    rows = warp.cta.shared.read(warp.address(operands[1]), 16).view(np.uint16).astype(U64)
    warp.note_read(warp.address(operands[1]), 16)
    for i, name in enumerate(names_of(operands[0])):
        matrix = rows[8 * i : 8 * i + 8]
        warp.set(name, rows_of(matrix.T if "trans" in suffixes else matrix), active)


def mma(warp, suffixes, operands, active):
    """m16n8k16 of 16-bit floats, m16n8k32 and m16n8k16 of bytes, m16n8k8 of tf32: fragments by the PTX manual."""
    assert active.all()
    if "tf32" in suffixes:
        return mma_tf32(warp, operands, active)
    names, a, b, c = names_of(operands[0]), *(warp.values(x) for x in operands[1:])
    kinds, k = suffixes[-3:-1], 32 if "m16n8k32" in suffixes else 16
    is_bytes = "s32" in suffixes
    each = 4 if is_bytes else 2  # values of a register
    left, right = np.zeros((16, k)), np.zeros((k, 8))

    def values(word, kind):
        if not is_bytes:
            return halves_of(word, kind == "bf16")
        found = [(word >> U64(8 * i) & U64(255)).astype(np.uint8) for i in range(4)]
        return [x.view(np.int8) if kind == "s8" else x for x in found]

    for i, word in enumerate(a):
        for j, value in enumerate(values(word, kinds[0])):
            left[G + 8 * (i % 2), each * T + j + k // 2 * (i // 2)] = value
    for i, word in enumerate(b):
        for j, value in enumerate(values(word, kinds[1])):
            right[each * T + j + k // 2 * i, G] = value
    product = left @ right
    for i, (name, word) in enumerate(zip(names, c)):
        part = product[G + 8 * (i // 2), 2 * T + i % 2]
        if is_bytes:
            warp.set(name, unsigned(raw(signed(word, 32) + part.astype(np.int64)), 32), active)
        else:
            warp.set(name, bits(f32(word) + part), active)


def mma_tf32(warp, operands, active):
    """m16n8k8: the low 13 bits of a and b do not count."""
    names, a, b, c = names_of(operands[0]), *(warp.values(x) for x in operands[1:])
    left, right = np.zeros((16, 8)), np.zeros((8, 8))
    for i, word in enumerate(a):
        left[G + 8 * (i % 2), T + 4 * (i // 2)] = f32(word & U64(0xFFFF_E000))
    for i, word in enumerate(b):
        right[T + 4 * i, G] = f32(word & U64(0xFFFF_E000))
    product = left @ right
    for i, (name, word) in enumerate(zip(names, c)):
        warp.set(name, bits((f32(word) + product[G + 8 * (i // 2), 2 * T + i % 2]).astype(np.float32)), active)


def nothing(warp, suffixes, operands, active):
    """Prefetches, and what has no effect here."""


def warp_barrier(warp, suffixes, operands, active):
    """Warps run in lock step; but without it, other lanes may be behind: see Warp.note_read."""
    assert suffixes[:2] == ("warp", "sync")
    warp.begin_moment()


def fence(warp, suffixes, operands, active):
    """What the warp wrote to shared memory is visible to wgmma; other fences do nothing here."""
    if suffixes[:2] == ("proxy", "async"):
        warp.cta.unfenced[warp.cta.unfenced == warp.index + 1] = 0


WHOLE = {
    "mov": move, "cvt": convert, "selp": select, "setp": set_predicate,
    "ld": memory.load, "st": memory.store, "cp": memory.copy, "atom": memory.atomic, "mapa": memory.map_address,
    "barrier": memory.arrive_at_cluster, "mbarrier": memory.mbarrier,
    "shfl": shuffle, "vote": vote, "match": match, "redux": reduce, "elect": elect, "prmt": permute,
    "movmatrix": movmatrix, "ldmatrix": ldmatrix, "mma": mma,
    "wgmma": wgmma.step, "stmatrix": wgmma.stmatrix, "setmaxnreg": nothing, "lop3": table_of_bits,
    "fence": fence, "bar": warp_barrier, "prefetch": nothing, "nanosleep": nothing, "cvta": move,
    "griddepcontrol": memory.grid_dependency,
    "popc": count_ones, "bfi": insert_bits, "shf": funnel_shift, "vabsdiff4": byte_distances, "dp4a": byte_products,
}
