"""What a step on the device is made of (``append.py``, ``paged_append.py``): its geometry, the buffers that its macros
share, and how a block is packed."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.device.groups import sync_packers
from lowbit_attn.device.quantize import BODIES, matrix_of, of_head
from lowbit_attn.device.quantize_boost import BoostMatrix
from lowbit_attn.formats import Format

SMS, BLOCKS_PER_SM = 128, 2  # of the largest grid
THREADS = 256  # of a block, but for boosted channels, which are ranked together
STEP_REGISTERS = {"float16": 0, "bfloat16": 16}  # of a thread, beside those that packing takes
GROUP_REGISTERS, GROUP_HEAD_DIM = 16, 128  # more of them where K's range is searched group by group, below this


@dataclass(frozen=True)
class StepGeometry:
    """What is static in the step of a format: both sides' matrices of codes, threads and blocks of them."""

    fmt: Format
    head_dim: int
    searches: str  # the sides with range search: "", "k", "v" or "kv"
    dtype: str  # of the tokens

    @cached_property
    def matrices(self) -> tuple:
        return tuple(map(matrix_of, self.fmt.specs(self.head_dim)))

    @property
    def orders_tokens(self) -> bool:
        return self.fmt.orders_tokens

    @property
    def threads(self) -> int:
        return max([THREADS, *(m.threads for m in self.matrices if isinstance(m, BoostMatrix))])

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that must fit an SM together, with the registers that either side takes."""
        more, k = STEP_REGISTERS[self.dtype], self.fmt.specs(self.head_dim)[0]
        if "k" in self.searches and k.groups > 1 and self.head_dim < GROUP_HEAD_DIM:
            more += GROUP_REGISTERS
        return min(BLOCKS_PER_SM, *(m.blocks_per_sm(name in self.searches, self.threads, more)
                                    for m, name in zip(self.matrices, "kv")))

    @property
    def max_blocks(self) -> int:
        """The most blocks of a grid: what a GPU holds at once."""
        return SMS * self.blocks_per_sm

    @property
    def tile_accesses(self) -> int:
        """16-byte accesses of what is packed at once."""
        return max(m.part_rows * m.row_accesses for m in self.matrices)

    @property
    def first_units(self) -> tuple[int, int]:
        """Where K and V begin in a record, in units of the pool."""
        return tuple(side.first_unit for side in self.fmt.specs(self.head_dim))


class Side(NamedTuple):
    """K or V: how it is packed, new tokens x, one after the other [heads, head_dim], and where they go."""

    m: Any
    range_search: bool
    first_unit: int
    x: Any
    sink: Any
    ring: Any
    query_weights: Any = None  # fp32 [heads, head_dim] of a side that weighs channels by queries
    entries: Any = None  # fp16 [heads, groups, 256 c] of a side with codebooks


class Pool(NamedTuple):
    """Records, in units of 128 bytes as words and as halves, and where those of a (page, head) are."""

    words: Any
    halves: Any
    table: Any
    page_stride: Any
    head_stride: Any


class Counters(NamedTuple):
    """Where every sequence of the cache stands, and what is one for all."""

    n_sink: Any
    n_qk: Any
    n_qv: Any
    n_tok: Any
    ring_start: Any
    limit: Any
    num_sinks: Any
    window_k: Any
    window_v: Any


class BatchRows(NamedTuple):
    """Which rows of the cache's memory a row of the batch has, int32 [batch]."""

    counters: Any  # and of the table
    rings: Any  # and of sinks


class Ranks(NamedTuple):
    """The significance of tokens in the ring, of formats that order them, as the cache has it."""

    order: Any  # in which the oldest block is stored
    score: Any
    seen: Any


class Rows(NamedTuple):
    """Shared memory: what a step does for up to ``threads`` rows, a thread each."""

    row: Any
    ring_row: Any
    elsewhere: Any  # packed tokens that no page of this cache holds
    length: Any  # -1: nothing to do
    packed_k: Any  # K's packed tokens if a block is full, else -1
    packed_v: Any
    votes: Any  # rows with a full block, a bit each
    full: Any  # the same in order


def rows_in_shared_memory(threads: int) -> Rows:
    row, ring_row, elsewhere, length, packed_k, packed_v, full = (
        T.alloc_shared((threads,), "int32") for _ in range(7))
    votes = T.alloc_shared((threads // layout.LANES,), "uint32")
    return Rows(row, ring_row, elsewhere, length, packed_k, packed_v, votes, full)


@T.macro
def pack_block(side, head, load, pool, unit, tile, threads, tx):
    """128 tokens of one side and head -> the record at ``unit``, by the first ``threads`` threads.

    They stand for m.threads threads, in turns if those are more. load: a macro of (part, tile, tx, threads) that copies
    a part of the tokens into the tile and waits for its own copies.
    """
    m = side.m
    for part in T.serial(m.parts):
        load(part, tile, tx, threads)
        sync_packers(threads)
        for group in T.serial(m.threads // threads):
            BODIES[type(m)][0](m, side.range_search, tile, part, pool.words, pool.halves, unit, group * threads + tx,
                               *of_head(m, side.query_weights, side.entries, head))
        sync_packers(threads)
