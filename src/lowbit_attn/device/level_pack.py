"""``manage`` of a cache of levels, its second launch: the tokens of blocks that were planned, to pages and stages.

    rows that go (``goes``)  -> a list, by all threads of every CTA; none: that was all
    (row, side of a level, KV head)  dealt out to the CTAs:
        staged tokens, then the block's of the level in order: 128 or more: the first 128 -> record, the rest -> stage
                                                               fewer: the block's -> stage, behind what is there
        of the high K: the block's slots of the ring lose their scores

Counters and table are as ``level_plan`` left them, as after the move: how many tokens the stage had is their
difference. The arithmetic is that of ``quantize``, so the bytes are the reference's.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.device.append import list_full
from lowbit_attn.device.groups import EXACT, UNIT_WORDS, sync_packers
from lowbit_attn.device.quantize import BODIES, matrix_of
from lowbit_attn.device.quantize_boost import BoostMatrix
from lowbit_attn.device.step import SMS, THREADS
from lowbit_attn.device.tilelang_kernel import TileKernel
from lowbit_attn.device.tokens import ACCESS_HALVES as ACCESS
from lowbit_attn.device.tokens import loading_threads, swizzled, token_place
from lowbit_attn.formats.levels import Levels
from lowbit_attn.levels.policy import HIGH, LOW

PAGE, LANES = layout.PAGE_TOKENS, layout.LANES
SIDES = ((HIGH, "k"), (HIGH, "v"), (LOW, "k"), (LOW, "v"))


@dataclass(frozen=True)
class PackGeometry:
    """What is static in the move of a pair of levels: the matrices of codes of four sides, threads and CTAs."""

    levels: Levels
    head_dim: int
    searches: tuple[str, str]  # the sides of each level with range search: "", "k", "v" or "kv"
    dtype: str  # of the tokens

    @cached_property
    def matrices(self) -> tuple:
        return tuple(matrix_of(side) for fmt in self.levels.formats for side in fmt.specs(self.head_dim))

    @property
    def first_units(self) -> tuple[int, ...]:
        """Where each side begins in a record of its level."""
        return tuple(side.first_unit for fmt in self.levels.formats for side in fmt.specs(self.head_dim))

    @property
    def searched(self) -> tuple[bool, ...]:
        return tuple(name in self.searches[level] for level, name in SIDES)

    @property
    def threads(self) -> int:
        return max([THREADS, *(m.threads for m in self.matrices if isinstance(m, BoostMatrix))])

    @property
    def max_blocks(self) -> int:
        """The most CTAs of a grid: one an SM, for two would leave four bodies of packing too few registers."""
        return SMS

    @property
    def tile_accesses(self) -> int:
        """16-byte accesses of what is packed at once."""
        return max(m.part_rows * m.row_accesses for m in self.matrices)


class Side(NamedTuple):
    """One side of a level: how it is packed, and where its tokens are and go."""

    m: Any
    range_search: bool
    first_unit: int
    words: Any  # the level's memory
    halves: Any
    stage: Any  # [rows, slots, head_dim]
    start: Any  # of the stage in it
    ring: Any


class Moved(NamedTuple):
    """The tokens of a level that move, of one (row, KV head) ``v``."""

    v: Any
    staged: Any  # tokens that the stage had
    count: Any  # with the block's
    is_full: Any
    first: Any  # of the level's in ``slots``
    slots: Any  # shared int32 [128]: slots of the ring of the block's tokens, in the plan's order
    unit: Any  # of the record, if there is one


class Plan(NamedTuple):
    """What ``level_plan`` left, by the names of ``pack_kernel``."""

    which: Any
    goes: Any
    n_out: Any
    order: Any
    fresh: Any
    n_stage: Any
    c_pack: Any
    table: Any
    score: Any
    seen: Any


class Picked(NamedTuple):
    """Shared memory: which of up to ``threads`` rows go."""

    votes: Any
    full: Any


@T.macro
def load_moved(side, moved, first, count, tile, tx, threads):
    """Tokens first .. first + count - 1 of those that move -> shared tile, by ``threads`` threads; waits."""
    accesses, at = side.m.row_accesses, T.alloc_var("int32")
    loaders = loading_threads(threads, count, accesses)
    if tx < loaders:
        for i in T.unroll(count * accesses // loaders):
            row, access = token_place(i * loaders + tx, accesses)
            at = first + row
            if at < moved.staged:
                T.ptx_cp_async(T.access_ptr(tile[swizzled(row, access, accesses), 0], "w", ACCESS),
                               T.access_ptr(side.stage[moved.v, side.start + at, access * ACCESS], "r", ACCESS), ACCESS)
            else:
                T.ptx_cp_async(T.access_ptr(tile[swizzled(row, access, accesses), 0], "w", ACCESS),
                               T.access_ptr(side.ring[moved.v, moved.slots[moved.first + at - moved.staged],
                                                      access * ACCESS], "r", ACCESS), ACCESS)
    T.ptx_commit_group()
    T.ptx_wait_group(0)


@T.macro
def pack_moved(side, moved, tile, tx, threads):
    """The first 128 tokens that move -> the record, by the first ``threads`` threads, in turns for m.threads."""
    m = side.m
    for part in T.serial(m.parts):
        load_moved(side, moved, part * m.part_rows, m.part_rows, tile, tx, threads)
        sync_packers(threads)
        for group in T.serial(m.threads // threads):
            BODIES[type(m)][0](m, side.range_search, tile, part, side.words, side.halves, moved.unit + side.first_unit,
                               group * threads + tx)
        sync_packers(threads)


@T.macro
def move_side(side, moved, tile, held, threads, tx):
    """One side of a level of a (row, KV head): record, if there is one, and stage."""
    packers = min(side.m.threads, threads)
    first, token, access = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    if T.And(moved.is_full != 0, tx < packers):
        pack_moved(side, moved, tile, tx, packers)
    T.sync_threads()  # the stage was read
    first = T.if_then_else(moved.is_full != 0, PAGE, moved.staged)
    for r in T.serial(T.truncdiv((moved.count - first) * side.m.row_accesses + threads - 1, threads)):
        token = first + T.truncdiv(r * threads + tx, side.m.row_accesses)
        access = T.truncmod(r * threads + tx, side.m.row_accesses)
        if token < moved.count:
            for e in T.vectorized(ACCESS):
                held[e] = side.ring[moved.v, moved.slots[moved.first + token - moved.staged], ACCESS * access + e]
            for e in T.vectorized(ACCESS):
                side.stage[moved.v, side.start + token - PAGE * moved.is_full, ACCESS * access + e] = held[e]


@T.macro
def find_slots(plan, row, v, slots, tx):
    """Slots of the ring of a block that has left it, in the plan's order."""
    if tx < PAGE:
        slots[tx] = T.truncmod(plan.n_out[row] - PAGE + T.cast(plan.order[v, tx], "int32"),
                               plan.score.shape[1])


@T.macro
def forget(plan, row, v, is_first, tx):
    """The block's slots lose their scores; of a row's first head, how often they were seen."""
    slot = T.alloc_var("int32")
    if tx < PAGE:
        slot = T.truncmod(plan.n_out[row] - PAGE + tx, plan.score.shape[1])
        plan.score[v, slot] = T.float32(0.0)
        if is_first:
            plan.seen[row, slot] = 0


@T.macro
def move_part(step, plan, high_k, high_v, low_k, low_v, row, head, heads, which, slots, tile, held, tx):
    """Side ``which`` of SIDES of a (row, KV head)."""
    v, level, arrived, staged, unit, first, total, is_full = (T.alloc_var("int32") for _ in range(8))
    v = row * heads + head
    level = T.truncdiv(which, 2)
    find_slots(plan, row, v, slots, tx)
    if which == 0:
        forget(plan, row, v, head == 0, tx)
    arrived = plan.fresh[level, v]
    staged = T.truncmod(plan.n_stage[level, v] - arrived + 2 * PAGE, PAGE)
    total = staged + arrived
    is_full = T.cast(total >= PAGE, "int32")
    first = T.if_then_else(level == LOW, plan.fresh[HIGH, v], 0)
    unit = 0
    if is_full != 0:
        unit = plan.table[level, v, T.truncdiv(plan.c_pack[level, v], PAGE) - 1]
    moved = Moved(v, staged, total, is_full, first, slots, unit)
    T.sync_threads()  # all slots
    if which == 0:
        move_side(high_k, moved, tile, held, step.threads, tx)
    if which == 1:
        move_side(high_v, moved, tile, held, step.threads, tx)
    if which == 2:
        move_side(low_k, moved, tile, held, step.threads, tx)
    if which == 3:
        move_side(low_v, moved, tile, held, step.threads, tx)
    T.sync_threads()  # slots and tile were read


@T.macro
def move_all(step, plan, high_k, high_v, low_k, low_v, batch, heads, block, grid, tx):
    """This CTA's share of what moves: every ``grid``-th of (row that goes, side, KV head)."""
    threads, sides = step.threads, len(SIDES)
    tile = T.alloc_shared((step.tile_accesses, ACCESS), step.dtype)
    slots = T.alloc_shared((PAGE,), "int32")
    here = Picked(T.alloc_shared((threads // LANES,), "uint32"), T.alloc_shared((threads,), "int32"))
    held, count, goes = T.alloc_local((ACCESS,), step.dtype), T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32")
    for chunk in T.serial(T.truncdiv(batch + threads - 1, threads)):
        first = T.alloc_var("int32")
        first = chunk * threads
        goes[0] = 0
        if first + tx < batch:
            goes[0] = plan.goes[first + tx]
        if T.syncthreads_or(goes[0]) != 0:  # one step in many
            list_full(threads, here, goes, tx, count)
            for i in T.serial(T.truncdiv(sides * heads * count[0] - block + grid - 1, grid)):
                at, rest, row = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
                at = T.truncdiv(i * grid + block, sides * heads)
                rest = i * grid + block - at * sides * heads
                row = T.cast(plan.which[first + here.full[at]], "int32")
                move_part(step, plan, high_k, high_v, low_k, low_v, row, T.truncmod(rest, heads), heads,
                          T.truncdiv(rest, heads), slots, tile, held, tx)
            T.sync_threads()  # the list was read


def pack_kernel(levels: Levels, head_dim: int, dtype: str, searches: tuple[str, str]) -> TileKernel:
    """Rows int64 [batch] of the call of ``level_plan``; tensors as LevelCache names them, ``fresh`` its ``new``.

    pool_high, pool_low: the levels' memory as uint32 [units, 32], and its uint16 views; sinks: before the high stage.
    searches: the sides with range search of the high and of the low level.
    """
    step = PackGeometry(levels, head_dim, searches, dtype)
    batch, seqs, rows, slots, pages = (T.dynamic(name) for name in ("batch", "seqs", "cache_rows", "slots", "pages"))
    high_slots, units_high, units_low = (T.dynamic(name) for name in ("high_slots", "units_high", "units_low"))

    @T.prim_func
    def pack(
        which: T.Tensor((batch,), "int64"),
        goes: T.Tensor((seqs,), "int32"),
        n_out: T.Tensor((seqs,), "int32"),
        order: T.Tensor((rows, PAGE), "uint8"),
        fresh: T.Tensor((2, rows), "int32"),
        n_stage: T.Tensor((2, rows), "int32"),
        c_pack: T.Tensor((2, rows), "int32"),
        table: T.Tensor((2, rows, pages), "int32"),
        score: T.Tensor((rows, slots), "float32"),
        seen: T.Tensor((seqs, slots), "int32"),
        pool_high: T.Tensor((units_high, UNIT_WORDS), "uint32"),
        meta_high: T.Tensor((units_high, 2 * UNIT_WORDS), "uint16"),
        pool_low: T.Tensor((units_low, UNIT_WORDS), "uint32"),
        meta_low: T.Tensor((units_low, 2 * UNIT_WORDS), "uint16"),
        hi_k: T.Tensor((rows, high_slots, head_dim), dtype),
        hi_v: T.Tensor((rows, high_slots, head_dim), dtype),
        lo_k: T.Tensor((rows, PAGE, head_dim), dtype),
        lo_v: T.Tensor((rows, PAGE, head_dim), dtype),
        ring_k: T.Tensor((rows, slots, head_dim), dtype),
        ring_v: T.Tensor((rows, slots, head_dim), dtype),
        heads: T.int32,
        sinks: T.int32,
    ):
        with T.Kernel(T.min(len(SIDES) * heads * batch, step.max_blocks), threads=step.threads) as block:
            T.pdl_sync()
            plan = Plan(which, goes, n_out, order, fresh, n_stage, c_pack, table, score, seen)
            (m0, m1, m2, m3), (s0, s1, s2, s3), (u0, u1, u2, u3) = step.matrices, step.searched, step.first_units
            high_k = Side(m0, s0, u0, pool_high, meta_high, hi_k, sinks, ring_k)
            high_v = Side(m1, s1, u1, pool_high, meta_high, hi_v, sinks, ring_v)
            low_k = Side(m2, s2, u2, pool_low, meta_low, lo_k, 0, ring_k)
            low_v = Side(m3, s3, u3, pool_low, meta_low, lo_v, 0, ring_v)
            blocks = T.alloc_var("int32")
            blocks = T.min(len(SIDES) * heads * batch, step.max_blocks)
            move_all(step, plan, high_k, high_v, low_k, low_v, batch, heads, block, blocks, T.get_thread_binding())

    return TileKernel(pack, compile_flags=EXACT, overlaps=True)
