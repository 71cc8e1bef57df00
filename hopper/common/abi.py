"""The decode kernels' arguments, in one place: the view of a cache (lowbit_attn/cache/view.py), a call's
results and options; and the query rows of a CTA.

    q, rows, ring_rows, <the cache's memory>, partials, out, lse, sink_logits, <options>, <strides>, stream
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from lowbit_attn.device import ptx

TOKEN_BYTES = 2  # of an element of sinks and rings


class View(NamedTuple):
    """A cache on the device, fields as in ``lowbit_attn.cache.view.FIELDS``, and the strides of its records."""

    rows: cute.Tensor
    ring_rows: cute.Tensor
    pool: cute.Tensor
    table: cute.Tensor
    n_sink: cute.Tensor
    n_qk: cute.Tensor
    n_qv: cute.Tensor | None  # None: n_qk, of formats that pack both sides together
    n_tok: cute.Tensor
    ring_start: cute.Tensor
    sink_k: cute.Tensor
    sink_v: cute.Tensor
    ring_k: cute.Tensor
    ring_v: cute.Tensor
    page_stride: Int32
    head_stride: Int32
    table_b: Int32
    table_h: Int32
    books: tuple | None = None  # of formats with codebooks: book_abi.Books
    hidden: cute.Tensor | None = None  # of a level under a window: level_abi.py

    @property
    def counters(self) -> tuple:
        """n_sink, n_qk, n_qv, n_tok, ring_start; then ``hidden``, if there is one."""
        found = self.n_sink, self.n_qk, self.n_qk if self.n_qv is None else self.n_qv, self.n_tok, self.ring_start
        return found if self.hidden is None else (*found, self.hidden)

    def first_entry(self, row: Int32, head_idx: Int32) -> Int32:
        """Entry of the table with page 0 of a row of the table and KV head."""
        return row * self.table_b + head_idx * self.table_h


class Results(NamedTuple):
    """Where a call's results go, and what its CTAs exchange."""

    partials: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    sink_logits: cute.Tensor


class Options(NamedTuple):
    """What turns q k into logits, and the windows."""

    scale_log2: Float32
    softcap_log2: Float32
    window: Int32
    sink_window: Int32


class DecodeKernel:
    """A decode kernel; call it with the arguments above. A subclass has ``cfg`` and ``launch``."""

    reads_v_counts = True  # else n_qv is n_qk: the format packs both sides together

    @cute.jit
    def __call__(self, q: cute.Tensor, rows: cute.Tensor, ring_rows: cute.Tensor, pool: cute.Tensor, table: cute.Tensor,
                 n_sink: cute.Tensor, n_qk: cute.Tensor, n_qv: cute.Tensor, n_tok: cute.Tensor,
                 ring_start: cute.Tensor, sink_k: cute.Tensor, sink_v: cute.Tensor, ring_k: cute.Tensor,
                 ring_v: cute.Tensor, partials: cute.Tensor, out: cute.Tensor, lse: cute.Tensor,
                 sink_logits: cute.Tensor, scale_log2: Float32, softcap_log2: Float32, window: Int32,
                 sink_window: Int32, page_stride: Int32, head_stride: Int32, table_b: Int32, table_h: Int32, stream):
        view = View(rows, ring_rows, pool, table, n_sink, n_qk, n_qv, n_tok, ring_start, sink_k, sink_v, ring_k, ring_v,
                    page_stride, head_stride, table_b, table_h)
        if cutlass.const_expr(not self.reads_v_counts):
            view = view._replace(n_qv=None)
        self.launch(q, view, Results(partials, out, lse, sink_logits),
                    Options(scale_log2, softcap_log2, window, sink_window),
                    grid_of(q, ring_k, partials.shape[1], self.cfg.rows), stream)

    def launch(self, q: cute.Tensor, view: View, results: Results, options: Options, grid: "Grid", stream) -> None:
        """Launch the kernel of this configuration on a stream."""
        raise NotImplementedError


@cute.jit
def load_counts(view: View, batch_idx: Int32) -> tuple[Int32, tuple]:
    """(row, counters) of a batch row: which row of counters and table it reads, and the five counters there.

    Most calls read row b for batch row b, so its counters are read beside ``rows``: two reads one after the other take
    4 % of a short call. A row that does not exist has no tokens.
    """
    row, counts = guess_counts(view, batch_idx)
    return row, right_counts(view, batch_idx, row, counts)


def guess_counts(view: View, batch_idx: Int32) -> tuple[Int32, tuple]:
    """(row, counters) of a batch row, counters of the row that most calls read."""
    guess = Int32(ptx.opaque(batch_idx))  # else the compiler makes one dependent read of both
    return view.rows[batch_idx], tuple(x[guess] for x in view.counters)


@cute.jit
def right_counts(view: View, batch_idx: Int32, row: Int32, counts: tuple) -> tuple:
    """The counters of ``row`` for those that were guessed."""
    if row != batch_idx:
        is_row = (row >= 0) & (row < view.n_tok.shape[0])
        counts = tuple(Int32(0) for _ in view.counters)
        if is_row:
            counts = tuple(x[row] for x in view.counters)
    return counts


def first_token(tokens: cute.Tensor, ring_row: Int32, head_idx: Int32) -> Int64:
    """Address of the first token of a row and KV head, of sinks or of a ring."""
    return tokens.iterator.toint() + token_offset(*tokens.stride[:2], ring_row, head_idx)


def token_offset(of_row, of_head, ring_row: Int32, head_idx: Int32) -> Int64:
    """Bytes before the first token of a row and KV head; of_row, of_head: strides in elements."""
    return (Int64(ring_row) * Int64(of_row) + Int64(head_idx) * Int64(of_head)) * TOKEN_BYTES


class Rows(NamedTuple):
    """The query rows of a CTA: ``first .. first + count - 1`` of the KV head's ``ratio * q_len``, query by query."""

    batch_idx: Int32
    head_idx: Int32  # KV head
    first: Int32
    count: Int32
    ratio: Int32  # query heads of a KV head
    q_len: Int32
    divisor: object = None  # ratio in a form that is divided by faster, if there is one


class Grid(NamedTuple):
    """How the blocks of query rows are laid out over CTAs."""

    shape: tuple  # row blocks of all KV heads, sequences, splits
    ratio: Int32  # query heads of a KV head
    row_blocks: Int32  # of a KV head

    def divisors(self, parts) -> tuple:
        """ratio, row_blocks and ``parts``, each in a form that is divided by faster."""
        return tuple(cute.fast_divmod_create_divisor_v2(Int32(n)) for n in (self.ratio, self.row_blocks, parts))


def grid_of(q, ring_k, num_splits, rows: int) -> Grid:
    """The grid of a call whose CTAs serve ``rows`` query rows."""
    ratio = q.shape[2] // ring_k.shape[1]
    row_blocks = (ratio * q.shape[1] + rows - 1) // rows
    return Grid((ring_k.shape[1] * row_blocks, q.shape[0], num_splits), ratio, row_blocks)


def block_rows(block, row_blocks, ratio, q_len, rows: int, divisor=None) -> Rows:
    """The rows of CTA ``block`` of the grid; CTAs that read the same pages are neighbours.

    row_blocks: of a KV head, a number or what divides by it; divisor: of ratio. The last block may have fewer rows.
    """
    head_idx, first = block[0] // row_blocks, block[0] % row_blocks * rows
    return Rows(block[1], head_idx, first, at_most(ratio * q_len - first, rows), ratio, q_len, divisor)


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
