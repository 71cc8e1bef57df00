"""The decode kernels' arguments, in one place: the view of a cache (lowbit_attn/view.py), a call's results and options.

    q, rows, ring_rows, <the cache's memory>, partials, out, lse, sink_logits, <options>, <strides>, stream
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from lowbit_attn.device import ptx
from lowbit_attn.formats.codebook_order import BOOK_ROW_BYTES, ENTRIES

UNIT_WORDS = 32  # of 128 bytes, in which the pool is counted
TOKEN_BYTES = 2  # of an element of sinks and rings
BOOK_ROW_WORDS = BOOK_ROW_BYTES // 4
BOOK_CHANNEL_PLANES = 4  # order, 1 / weight, mean entry, largest distance from it


class Books(NamedTuple):
    """A layer's codebooks on the device, as lowbit_attn/attached.py lays them out for kernels."""

    k: cute.Tensor  # (heads, entry, words of a row) uint32
    v: cute.Tensor
    channels: cute.Tensor  # (heads, 4, head_dim) fp32


class View(NamedTuple):
    """A cache on the device, fields as in ``lowbit_attn.view.FIELDS``, and the strides of its records."""

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
    books: Books | None = None

    @property
    def counters(self) -> tuple:
        """n_sink, n_qk, n_qv, n_tok, ring_start."""
        return self.n_sink, self.n_qk, self.n_qk if self.n_qv is None else self.n_qv, self.n_tok, self.ring_start

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
    """A decode kernel; call it with the arguments above. A subclass has ``launch``, which takes them by group."""

    @cute.jit
    def __call__(self, q: cute.Tensor, rows: cute.Tensor, ring_rows: cute.Tensor, pool: cute.Tensor, table: cute.Tensor,
                 n_sink: cute.Tensor, n_qk: cute.Tensor, n_qv: cute.Tensor, n_tok: cute.Tensor,
                 ring_start: cute.Tensor, sink_k: cute.Tensor, sink_v: cute.Tensor, ring_k: cute.Tensor,
                 ring_v: cute.Tensor, partials: cute.Tensor, out: cute.Tensor, lse: cute.Tensor,
                 sink_logits: cute.Tensor, scale_log2: Float32, softcap_log2: Float32, window: Int32,
                 sink_window: Int32, page_stride: Int32, head_stride: Int32, table_b: Int32, table_h: Int32, stream):
        view = View(rows, ring_rows, pool, table, n_sink, n_qk, n_qv, n_tok, ring_start, sink_k, sink_v, ring_k, ring_v,
                    page_stride, head_stride, table_b, table_h)
        self.launch(q, view, Results(partials, out, lse, sink_logits),
                    Options(scale_log2, softcap_log2, window, sink_window), stream)


class BookDecodeKernel:
    """``DecodeKernel`` of a cache with codebooks, whose tensors follow those of the cache's memory."""

    @cute.jit
    def __call__(self, q: cute.Tensor, rows: cute.Tensor, ring_rows: cute.Tensor, pool: cute.Tensor, table: cute.Tensor,
                 n_sink: cute.Tensor, n_qk: cute.Tensor, n_qv: cute.Tensor, n_tok: cute.Tensor,
                 ring_start: cute.Tensor, sink_k: cute.Tensor, sink_v: cute.Tensor, ring_k: cute.Tensor,
                 ring_v: cute.Tensor, k_book: cute.Tensor, v_book: cute.Tensor, k_channels: cute.Tensor,
                 partials: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, sink_logits: cute.Tensor,
                 scale_log2: Float32, softcap_log2: Float32, window: Int32, sink_window: Int32, page_stride: Int32,
                 head_stride: Int32, table_b: Int32, table_h: Int32, stream):
        view = View(rows, ring_rows, pool, table, n_sink, n_qk, n_qv, n_tok, ring_start, sink_k, sink_v, ring_k, ring_v,
                    page_stride, head_stride, table_b, table_h, Books(k_book, v_book, k_channels))
        self.launch(q, view, Results(partials, out, lse, sink_logits),
                    Options(scale_log2, softcap_log2, window, sink_window), stream)


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
        is_row = Uint32(row) < Uint32(view.n_tok.shape[0])
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


def fake_arguments(head_dim: int, element, has_books: bool = False) -> tuple:
    """All arguments but the stream, to compile a kernel for; every size but head_dim varies at run time."""
    def tensor(kind, *shape, align=16):
        return make_fake_compact_tensor(kind, shape, stride_order=tuple(reversed(range(len(shape)))),
                                        assumed_align=align)

    def tokens(slots):  # of a ring or of sinks: each (row, KV head) lies anywhere
        return make_fake_tensor(element, (rings, heads_kv, slots, head_dim),
                                (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), head_dim, 1),
                                assumed_align=16)

    n = cute.sym_int
    batch, q_len, heads, heads_kv, seqs, rings, sinks, ring_k, ring_v = (n() for _ in range(9))
    books = (*(tensor(Uint32, heads_kv, ENTRIES, BOOK_ROW_WORDS, align=128) for _ in range(2)),
             tensor(Float32, heads_kv, BOOK_CHANNEL_PLANES, head_dim)) if has_books else ()
    return (
        tensor(element, batch, q_len, heads, head_dim), *(tensor(Int32, batch, align=4) for _ in range(2)),
        tensor(Uint32, n(), UNIT_WORDS, align=128), tensor(Int32, n(), align=4),
        *(tensor(Int32, seqs, align=4) for _ in range(5)), *(tokens(slots) for slots in (sinks, sinks, ring_k, ring_v)),
        *books, tensor(Float32, n(), n(), n()), tensor(element, batch, q_len, heads, head_dim),
        tensor(Float32, batch, heads, q_len, align=4), tensor(Float32, n(), align=4),
        Float32(1.0), Float32(1.0), *(Int32(1) for _ in range(6)),
    )
