"""The query rows of a CTA: which they are, and where each is in q and o."""

from typing import NamedTuple

from cutlass import Int32, Uint32


class Rows(NamedTuple):
    """The query rows of a CTA: ``first .. first + count - 1`` of the KV head's ``ratio * q_len``, query by query."""

    batch_idx: Int32
    head_idx: Int32  # KV head
    first: Int32
    count: Int32
    ratio: Int32  # query heads of a KV head
    q_len: Int32
    divisor: object = None  # ratio in a form that is divided by faster, if there is one


def make_rows(batch_idx, head_idx, block, ratio, q_len, rows: int, divisor=None) -> Rows:
    """The rows of row block ``block``; the last block may have fewer than ``rows``."""
    first = block * rows
    return Rows(batch_idx, head_idx, first, at_most(ratio * q_len - first, rows), ratio, q_len, divisor)


def grid_of(q, ring_k, num_splits, rows: int):
    """(grid, ratio, row blocks of a KV head). The grid is (row blocks of all KV heads, sequences, splits)."""
    ratio = q.shape[2] // ring_k.shape[1]
    row_blocks = (ratio * q.shape[1] + rows - 1) // rows
    return (ring_k.shape[1] * row_blocks, q.shape[0], num_splits), ratio, row_blocks


def block_rows(block, row_blocks, ratio, q_len, rows: int, divisor=None) -> Rows:
    """The rows of CTA ``block`` of the grid; CTAs that read the same pages are neighbours.

    row_blocks: of a KV head, a number or what divides by it; divisor: of ratio.
    """
    return make_rows(block[1], block[0] // row_blocks, block[0] % row_blocks, ratio, q_len, rows, divisor)


def query_and_head(rows: Rows, row):
    """(query, head) of a row of this CTA, counted from 0; beyond the last row, those that would follow."""
    row = rows.first + row
    query = Int32(Uint32(row) // Uint32(rows.ratio)) if rows.divisor is None else row // rows.divisor
    return query, rows.head_idx * rows.ratio + row - query * rows.ratio


def at_most(x, limit: int):
    """min(x, limit), in operators that Python ints, numpy and the DSL's integers share."""
    return x + (limit - x) * Int32(x > limit)


def clamp_unit(x, limit: int):
    """x clamped to 0 .. limit."""
    return at_most(x * Int32(x > 0), limit)
