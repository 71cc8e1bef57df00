"""Quantize-and-pack of blocks of tokens into pages, and its inverse: the kernels of every side of a format.

One block of threads takes one page of one KV head, or a part of one: it copies the tokens into shared memory and hands
them to the body of the side's matrix of codes (``quantize_rows``, ``quantize_token``, ``quantize_boost``). The
arithmetic is ``formats.affine`` step by step, without contraction (EXACT), so the bytes are the reference's.
"""

from functools import partial

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.device.groups import EXACT, UNIT_WORDS
from lowbit_attn.device.quantize_boost import BoostMatrix, dequantize_boosted, quantize_boosted
from lowbit_attn.device.quantize_codebook import (
    CodebookMatrix,
    dequantize_codebook,
    entries_argument,
    quantize_codebook,
)
from lowbit_attn.device.quantize_rows import RowMatrix, dequantize_rows, quantize_rows
from lowbit_attn.device.quantize_runs import RunMatrix, dequantize_runs, quantize_runs
from lowbit_attn.device.quantize_token import TokenMatrix, dequantize_tokens, quantize_tokens
from lowbit_attn.device.tilelang_kernel import TileKernel
from lowbit_attn.device.tokens import ACCESS_HALVES, load_tokens
from lowbit_attn.formats.kitty import WEIGHTED
from lowbit_attn.formats.spec import SideSpec

# (quantize one part of a block, dequantize one) by the geometry of the matrix of codes, the first that serves a side
BODIES = {RowMatrix: (quantize_rows, dequantize_rows), TokenMatrix: (quantize_tokens, dequantize_tokens),
          BoostMatrix: (quantize_boosted, dequantize_boosted), RunMatrix: (quantize_runs, dequantize_runs),
          CodebookMatrix: (quantize_codebook, dequantize_codebook)}


def matrix_of(side: SideSpec, dtype: str = ""):
    """The matrix of codes of a side: threads of a block, parts of a page, and where lanes find and put everything.

    dtype: of the tokens, where they are quantized by a kernel of their own.
    """
    return next(matrix for matrix in BODIES if matrix.serves(side))(side, dtype)


def weights_argument(side: SideSpec, heads):
    """query_weights of a kernel that packs a side: fp32 [heads, head_dim] if it weighs queries, else no argument."""
    return T.Tensor((heads, side.head_dim), "float32") if side.weighs_queries else None


def of_head(m, query_weights, entries, head) -> tuple:
    """What the body of a matrix takes beside the others' arguments: a head's query weights, or its entries."""
    if isinstance(m, CodebookMatrix):
        return entries, head
    return (query_weights, head) if isinstance(m, BoostMatrix) and m.selection == WEIGHTED else ()


def read_by_head(m, entries, head) -> tuple:
    """What the body that reads a matrix takes beside the others' arguments: a head's entries."""
    return (entries, head) if isinstance(m, CodebookMatrix) else ()


@T.macro
def put_floats(out, page, head, token, channel, values):
    """What bodies that read a matrix do with ``values`` of neighbouring channels from ``channel`` on: here, to out."""
    for e, value in enumerate(values):
        out[page, head, token, channel + e] = value


def quantize_kernel(side: SideSpec, dtype: str, range_search: bool) -> TileKernel:
    """Blocks x [n, num_heads_kv, 128, head_dim] -> one side's codes and metadata in pages int32 [n] of the pool.

    pool: uint32 [units, 32] and its uint16 view [units, 64], in units of 128 bytes, from the first record's part of
    this side on; page_stride and head_stride in the same units. query_weights: only of sides that weigh queries.
    entries: fp16 [num_heads_kv, groups, 256 c], only of sides with codebooks.
    """
    m, head_dim = matrix_of(side, dtype), side.head_dim
    body = BODIES[type(m)][0]
    n, heads, units = T.dynamic("n"), T.dynamic("heads"), T.dynamic("units")

    @T.prim_func
    def quantize(
        x: T.Tensor((n, heads, layout.PAGE_TOKENS, head_dim), dtype),
        pages: T.Tensor((n,), "int32"),
        pool: T.Tensor((units, UNIT_WORDS), "uint32"),
        pool_meta: T.Tensor((units, 2 * UNIT_WORDS), "uint16"),
        query_weights: weights_argument(side, heads),
        entries: entries_argument(side, heads),
        page_stride: T.int32,
        head_stride: T.int32,
    ):
        with T.Kernel(heads, n, m.parts, threads=m.threads) as (head, page, part):
            T.annotate_min_blocks_per_sm(m.blocks_per_sm(range_search))
            tx = T.get_thread_binding()
            unit = T.alloc_var("int32")
            unit = pages[page] * page_stride + head * head_stride
            tile = T.alloc_shared((m.part_rows * m.row_accesses, ACCESS_HALVES), dtype)
            load_tokens(x, page, head, part * m.part_rows, m.part_rows, m.row_accesses, tile, tx, m.threads)
            T.sync_threads()
            body(m, range_search, tile, part, pool, pool_meta, unit, tx,
                 *of_head(m, query_weights, entries, head))

    return TileKernel(quantize, compile_flags=EXACT)


def dequantize_kernel(side: SideSpec) -> TileKernel:
    """One side of pages int32 [n] of the pool -> fp32 out [n, num_heads_kv, 128, head_dim]: code * scale + zero, or
    entries (fp16 [num_heads_kv, groups, 256 c]) with the mean or norm."""
    m, head_dim = matrix_of(side), side.head_dim
    body = BODIES[type(m)][1]
    n, heads, units = T.dynamic("n"), T.dynamic("heads"), T.dynamic("units")

    @T.prim_func
    def dequantize(
        pages: T.Tensor((n,), "int32"),
        pool: T.Tensor((units, UNIT_WORDS), "uint32"),
        pool_meta: T.Tensor((units, 2 * UNIT_WORDS), m.storage),
        out: T.Tensor((n, heads, layout.PAGE_TOKENS, head_dim), "float32"),
        entries: entries_argument(side, heads),
        page_stride: T.int32,
        head_stride: T.int32,
    ):
        with T.Kernel(heads, n, m.parts, threads=m.threads) as (head, page, part):
            tx = T.get_thread_binding()
            unit = T.alloc_var("int32")
            unit = pages[page] * page_stride + head * head_stride
            body(m, pool, pool_meta, unit, partial(put_floats, out, page, head), part, tx,
                 *read_by_head(m, entries, head))

    return TileKernel(dequantize, compile_flags=EXACT)
