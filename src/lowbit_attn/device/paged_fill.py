"""Pages of an engine -> dense rows of 16-bit tokens, both sides in one launch, for attention of chunks.

A block of threads takes one side of one page and KV head. The bodies of ``quantize`` that read a matrix of codes put
values where lanes hold them, down columns or along rows, into a tile in shared memory; from there each row of a token
and head goes to global memory in one run of 16-byte accesses.
"""

from functools import partial

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.device.groups import EXACT, UNIT_WORDS
from lowbit_attn.device.quantize import BODIES, matrix_of, read_by_head
from lowbit_attn.device.quantize_boost import BoostMatrix
from lowbit_attn.device.quantize_codebook import CodebookMatrix, entries_argument
from lowbit_attn.device.tilelang_kernel import TileKernel
from lowbit_attn.device.tokens import ACCESS_HALVES, loading_threads, swizzled, token_place
from lowbit_attn.formats import Format
from lowbit_attn.formats.spec import SideSpec
from lowbit_attn.registers import WIDE_HEAD_DIM

PAGE = layout.PAGE_TOKENS
THREADS = 256  # of a block, but for boosted channels of wide heads
# threads of an SM, of blocks that hide each other's loads: codes of 8 bits take more registers, and wide heads most
THREADS_PER_SM, BYTE_THREADS_PER_SM, WIDE_THREADS_PER_SM = 1024, 768, 512
ROW, BLOCK, DEST, SIDE = FIELDS = range(4)  # of an item
K, V = SIDES = 1, 2  # bits of an item's sides


def block_threads(sides: tuple[SideSpec, ...]) -> int:
    """Threads of a block: as many as a matrix with boosted channels takes at once."""
    return max([THREADS, *(m.threads for m in map(matrix_of, sides) if isinstance(m, BoostMatrix))])


def matrix_for(side: SideSpec, threads: int):
    """The matrix of codes of a side, read by a block of so many threads; any number may share a codebook's."""
    m = matrix_of(side)
    if isinstance(m, CodebookMatrix):
        m.threads = next(n for n in (threads, m.threads) if PAGE * m.groups % n == 0)
    return m


def blocks_per_sm(sides: tuple[SideSpec, ...], threads: int) -> int:
    """Blocks that must fit an SM together, with the registers that a lane's words of codes leave."""
    if sides[0].head_dim > WIDE_HEAD_DIM:
        return WIDE_THREADS_PER_SM // threads
    return (BYTE_THREADS_PER_SM if max(side.bits for side in sides) == 8 else THREADS_PER_SM) // threads


@T.macro
def put_halves(tile, row_accesses, token, channel, values):
    """Values of neighbouring channels, of one access, from ``channel`` on -> the tile, rounded to its type."""
    rounded = T.alloc_local((len(values),), tile.dtype)
    for e, value in enumerate(values):
        rounded[e] = T.cast(value, tile.dtype)
    for e in T.vectorized(len(values)):
        tile[swizzled(token, channel // ACCESS_HALVES, row_accesses), channel % ACCESS_HALVES + e] = rounded[e]


@T.macro
def read_record(m, pool, pool_meta, unit, tile, row_accesses, entries, head, threads, tx):
    """The record at ``unit`` -> the tile, by all ``threads`` threads of the block."""
    put, needed = partial(put_halves, tile, row_accesses), m.threads * m.parts
    halves = T.view(pool_meta, tuple(pool_meta.shape), m.storage)
    for round_ in T.serial(-(-needed // threads)):
        if round_ * threads + tx < needed:
            BODIES[type(m)][1](m, pool, halves, unit, put, 0, round_ * threads + tx, *read_by_head(m, entries, head))


@T.macro
def store_tile(tile, out, dest, head, row_accesses, threads, tx):
    """The tile -> rows dest .. dest + 127 of one head, 16 bytes a thread."""
    storing = loading_threads(threads, PAGE, row_accesses)
    if tx < storing:
        for i in T.unroll(PAGE * row_accesses // storing):
            row, access = token_place(i * storing + tx, row_accesses)
            for e in T.vectorized(ACCESS_HALVES):
                out[dest + row, head, ACCESS_HALVES * access + e] = tile[swizzled(row, access, row_accesses), e]


def paged_fill_kernel(fmt: Format, head_dim: int, dtype: str) -> TileKernel:
    """Items int32 [4, n] -> keys, values [capacity, num_heads_kv, head_dim] in ``dtype``, dense.

    items: the step's ROW, BLOCK of its table int32 [rows, blocks], DEST: the page's first token in keys and values,
    SIDE (K, V or both). pool: uint32 [units, 32] and its uint16 view, in units of 128 bytes, as are page_stride and
    head_stride. k_entries, v_entries: fp16 [num_heads_kv, groups, 256 c], only of sides with codebooks.
    """
    sides, row_accesses = fmt.specs(head_dim), head_dim // ACCESS_HALVES
    threads = block_threads(sides)
    k, v = (matrix_for(side, threads) for side in sides)
    heads, units, rows, blocks, count, capacity = (
        T.dynamic(name) for name in ("heads", "units", "rows", "blocks", "count", "capacity"))

    @T.prim_func
    def paged_fill(
        items: T.Tensor((len(FIELDS), count), "int32"),
        table: T.StridedTensor((rows, blocks), (T.dynamic("table_row", "int64"), 1), "int32"),
        pool: T.Tensor((units, UNIT_WORDS), "uint32"),
        pool_meta: T.Tensor((units, 2 * UNIT_WORDS), "uint16"),
        k_entries: entries_argument(sides[0], heads),
        v_entries: entries_argument(sides[1], heads),
        keys: T.Tensor((capacity, heads, head_dim), dtype),
        values: T.Tensor((capacity, heads, head_dim), dtype),
        page_stride: T.int32,
        head_stride: T.int32,
    ):
        with T.Kernel(len(SIDES) * heads, count, threads=threads) as (part, item):
            T.annotate_min_blocks_per_sm(blocks_per_sm(sides, threads))
            tx = T.get_thread_binding()
            tile = T.alloc_shared((PAGE * row_accesses, ACCESS_HALVES), dtype)
            head, side, unit = (T.alloc_var("int32") for _ in range(3))
            side = T.truncdiv(part, heads)
            head = part - side * heads
            if (items[SIDE, item] >> side) % 2 == 1:
                unit = table[items[ROW, item], items[BLOCK, item]] * page_stride + head * head_stride
                if side == 0:
                    read_record(k, pool, pool_meta, unit + sides[0].first_unit, tile, row_accesses, k_entries, head,
                                threads, tx)
                else:
                    read_record(v, pool, pool_meta, unit + sides[1].first_unit, tile, row_accesses, v_entries, head,
                                threads, tx)
                T.sync_threads()
                if side == 0:
                    store_tile(tile, keys, items[DEST, item], head, row_accesses, threads, tx)
                else:
                    store_tile(tile, values, items[DEST, item], head, row_accesses, threads, tx)

    return TileKernel(paged_fill, compile_flags=EXACT)
