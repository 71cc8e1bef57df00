"""Split-KV decode attention for SM80 and SM89 (built for sm_90 too, to run it there): one launch, either path.

One block per (split and block of query rows, KV head, sequence). Up to 16 rows (8 at head_dim 256): every warp owns
whole pages of the split's range and a private ring of ``slots`` record parts; nothing synchronises warps until their
results merge:

    before q is read      copies of the first parts of every ring
    (pages.start)
    page i of a warp      wait K part -> refill the slot of the last V part -> S^T = K Q^T
    (pages.run)           -> wait V part -> refill the slot of the K part -> softmax -> P^T, O^T += V^T P^T
    last split only       pages whose V is still in 16 bit (formats with two windows), shared out by chunks of V
    (mixed.walk)
    last split only       sinks and the 16-bit residual, tiles of 32 (or 16) tokens dealt out to the warps, through
    (tokens.walk)         the emptied ring
    end (merge)           O, row maxima and sums of the warps -> shared memory -> one (o, lse) of the split
    last block (combine)  (o, lse) of all splits of the same rows -> out, lse

A block of 64 rows: every warp has rows of its own, all walk the same pages through one ring, with one barrier of the
block a part, and each writes its rows' (o, lse) without a merge (config.shares_pages).

What becomes of a packed part is the path's: register (codes are multiplied as they are) or tile (scale and zero-point
applied to every code); both modules define the same steps. Read pages, register, values, mixed, tokens, merge, combine.
The codebook path has loops of its own over pages (codebook_pages; codebook_phases where shared memory holds one
codebook) and its arithmetic in codebook and the files that it names.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.ampere import (
    codebook,
    codebook_pages,
    codebook_phases,
    codebook_values,
    combine,
    merge,
    mixed,
    mma,
    pages,
    queries,
    softmax,
    tokens,
)
from lowbit_attn.ampere.codebook_config import BOOK_ENTRIES, BOOK_ROW_WORDS
from lowbit_attn.ampere.config import LANES, DecodeConfig, decode_config
from lowbit_attn.device.tilelang_kernel import TileKernel
from lowbit_attn.device.tokens import token_strides
from lowbit_attn.formats import Format

COMPILE_FLAGS = ("-use_fast_math", *mma.MOVMATRIX_FLAGS)  # exp2 as one MUFU, approximate division; sums stay fp32
SASS_FORBID = ("LDL", "STL")
CHANNEL_PLANES = 4  # of k_channels


class Ring(NamedTuple):
    """A block's ring slots, seen as 16-byte accesses of words and of halves, and as floats by ring."""

    words: Any
    halves: Any
    floats: Any


def shared_ring(config: DecodeConfig) -> Ring:
    """The rings of a block."""
    rings = config.table_slots // config.slots if config.path == "codebook" else config.rings
    slots = rings * config.slots
    words = T.alloc_shared((slots, config.slot_accesses, 4), "uint32")
    return Ring(words, T.view(words, (slots, config.slot_accesses, 8), "float16"),
                T.view(words, (rings, config.ring_floats), "float32"))


def decode_kernel(fmt: Format, head_dim: int, dtype: str, target: str, path: str, rows: int,
                  features: tuple[str, ...] = ()) -> TileKernel:
    """The kernel of one format, head_dim (64, 96, 128, 256) and dtype of q and 16-bit tokens ("float16", "bfloat16").

    target "sm_80", "sm_89" or "sm_90"; path "register", "tile" or "codebook" (head_dim 64 and 128); rows 8, 16 (below
    head_dim 256) or 64, on the codebook path 2, 4 or 8: query rows (heads of a KV head times q_len) of a block, further
    ones take further blocks; features: of kernels.FEATURES, or LEVEL_WINDOW.
    ValueError, naming what is supported, for anything else.
    """
    return trace(decode_config(fmt, head_dim, dtype, target, path, rows, features))


def trace(config: DecodeConfig) -> TileKernel:
    """The kernel of a configuration."""
    return TileKernel(_prim_func(config), compile_flags=COMPILE_FLAGS)


@T.macro
def attend(config, pool_of, rows, state, counters, ring, warp, thread, regs, ops, work, q, books,
           softmax_scale_log2, softcap_log2, split, num_splits):
    """All tokens of a split: packed pages, those whose V is in 16 bit, and (last split) the 16-bit tokens."""
    is_book = config.path == "codebook"
    steps = None if is_book else pages.STEPS[config.path]
    lane = thread % LANES
    walker, member = (0, thread) if config.shares_pages else (warp, lane)
    scales = pages.Scales(softmax_scale_log2, softcap_log2, work.token_slope if is_book else None)
    bounds = pages.bounds()
    work_range = pages.Range(bounds[0], bounds[1], state)
    if is_book:
        codebook.start(config, q, books, rows, ring, thread, work, softmax_scale_log2)
        codebook_values.start(config, lane, work)
        softmax.start(config, regs)
        pages.share(config, rows, state, split, num_splits, bounds)
        if config.is_phased:
            codebook_phases.walk(config, pool_of, work_range, rows, ring, books, thread, warp, lane, regs, ops, work,
                                 scales)
        else:
            codebook_pages.walk(config, pool_of, work_range, rows, books, thread, warp, lane, regs, ops, work, scales)
        codebook_values.finish(config, ring, warp, lane, work, regs.acc_o)
    else:
        walk = pages.places(config)
        pages.share(config, rows, state, split, num_splits, bounds)
        pages.start(config, pool_of, work_range, ring, walker, member, walk)
        steps.start(config, q, rows, warp, lane, ops, work, num_splits)
        softmax.start(config, regs)
        pages.run(config, pool_of, work_range, rows, ring, walker, member, lane, walk, regs, ops, work, scales)
        steps.finish(config, work, regs.acc_o)
    if split == num_splits - 1:
        # values of their own, as below
        row, counts = tokens.places(), tokens.counts()
        tokens.load_counts(counters, T.shfl_sync(rows.seq, 0), row, counts)
        state = state._replace(**dict(zip(("ring_row", *tokens.COUNTS), (row[1], *tokens.listed(counts)))))
        if config.has_mixed:
            first, last = T.alloc_var("int32"), T.alloc_var("int32")
            first = T.truncdiv(state.num_packed_v, layout.PAGE_TOKENS)
            if config.window:
                first = T.max(queries.first_page(rows, state.num_sink), first)
            last = T.truncdiv(state.num_packed, layout.PAGE_TOKENS)
            mixed.walk(config, pool_of, pages.Range(first, last, state), rows, ring, walker, member, lane, regs, ops,
                       work, scales)
        if is_book:
            codebook.query_for_tokens(config, q, books, rows, lane, work, ops)
        else:
            steps.query_for_tokens(config, q, rows, lane, ops)
        tokens.walk(config, state, rows, ring, walker, member, lane, regs, ops, scales)


@T.macro
def deliver(config, regs, ring, rows, block_rows, warp, thread, results, arrivals, row_block):
    """(o, lse) of the block's split, and of all splits if it is the last to have its own."""
    lane = thread % LANES
    if config.shares_pages:
        merge.write(config, regs, rows, lane, results)
    else:
        merge.stash(config, regs, ring.floats, warp, lane)
        T.sync_threads()
        merge.merge(config, ring.floats, thread, rows, results)
    if results.num_splits > 1:
        combine.finish(config, thread, block_rows, results, arrivals, row_block, ring.words)


def _prim_func(config: DecodeConfig):
    head_dim, dtype = config.head_dim, config.dtype
    is_book = config.path == "codebook"
    steps = None if is_book else pages.STEPS[config.path]
    batch, q_len, heads, heads_kv = (T.dynamic(name) for name in ("batch", "q_len", "num_heads", "num_heads_kv"))
    units, entries, sinks = T.dynamic("units"), T.dynamic("entries"), T.dynamic("sinks")
    slots_k, slots_v, num_splits = T.dynamic("slots_k"), T.dynamic("slots_v"), T.dynamic("num_splits")
    logits, places, seqs, rings = (T.dynamic(name) for name in ("logits", "places", "seqs", "rings"))

    row_blocks = T.truncdiv(T.truncdiv(heads, heads_kv) * q_len + (config.rows - 1), config.rows)

    strides = {name: token_strides(name, head_dim) for name in ("sink_k", "sink_v", "ring_k", "ring_v")}

    @T.prim_func
    def decode(
        q: T.Tensor((batch, q_len, heads, head_dim), dtype),
        batch_rows: T.Tensor((batch,), "int32"),
        ring_rows: T.Tensor((batch,), "int32"),
        pool: T.Tensor((units, layout.RECORD_ALIGN // 4), "uint32"),
        table: T.Tensor((entries,), "int32"),
        n_sink: T.Tensor((seqs,), "int32"),
        n_qk: T.Tensor((seqs,), "int32"),
        n_qv: T.Tensor((seqs,), "int32"),
        n_tok: T.Tensor((seqs,), "int32"),
        ring_start: T.Tensor((seqs,), "int32"),
        sink_k: T.StridedTensor((rings, heads_kv, sinks, head_dim), strides["sink_k"], dtype),
        sink_v: T.StridedTensor((rings, heads_kv, sinks, head_dim), strides["sink_v"], dtype),
        ring_k: T.StridedTensor((rings, heads_kv, slots_k, head_dim), strides["ring_k"], dtype),
        ring_v: T.StridedTensor((rings, heads_kv, slots_v, head_dim), strides["ring_v"], dtype),
        k_book: T.Tensor((heads_kv, BOOK_ENTRIES, BOOK_ROW_WORDS), "uint32") if is_book else None,
        v_book: T.Tensor((heads_kv, BOOK_ENTRIES, BOOK_ROW_WORDS), "uint32") if is_book else None,
        k_channels: T.Tensor((heads_kv, CHANNEL_PLANES, head_dim), "float32") if is_book else None,
        hidden: T.Tensor((seqs,), "int32") if config.level_window else None,
        o_partial: T.Tensor((num_splits, batch, q_len, heads, head_dim), "float32"),
        lse_partial: T.Tensor((num_splits, batch, q_len, heads), "float32"),
        out: T.Tensor((batch, q_len, heads, head_dim), dtype),
        lse: T.Tensor((batch, heads, q_len), "float32"),
        sink_logits: T.Tensor((logits,), "float32"),
        arrivals: T.Tensor((places,), "int32"),
        softmax_scale_log2: T.float32,
        softcap_log2: T.float32,
        window: T.int32,
        sink_window: T.int32,
        page_stride: T.int32,
        head_stride: T.int32,
        table_b: T.int32,
        table_h: T.int32,
    ):
        # blocks that read the same pages are neighbours, blocks of a split come before those of the next
        with T.Kernel(heads_kv * row_blocks, batch, num_splits, threads=config.threads) as (place, seq, split):
            thread = T.get_thread_binding()
            warp = thread // LANES
            ring = shared_ring(config)
            regs, ops = softmax.state(config), mma.operands(config)
            work = codebook.allocate(config, ring) if is_book else steps.allocate(config, thread)
            ratio, head, first_row, num_rows = (T.alloc_var("int32") for _ in range(4))
            ratio = T.truncdiv(heads, heads_kv)
            head = T.truncdiv(place, row_blocks)
            counters = tokens.Counters(batch_rows, ring_rows, n_sink, n_qk, n_qv, n_tok, ring_start)
            row, counts = tokens.places(), tokens.counts()
            tokens.load_counts(counters, seq, row, counts)
            pool_of = pages.Pool(pool, table, row[0] * table_b + head * table_h, page_stride, head * head_stride)
            combine.prefetch(sink_logits, head * ratio, arrivals, seq * heads_kv * row_blocks + place, thread)
            first_row = queries.first_row(config, place - head * row_blocks, warp)
            num_rows = T.min(ratio * q_len - first_row, config.warp_rows)
            state = tokens.Tokens(sink_k, sink_v, ring_k, ring_v, slots_k, slots_v, head, row[1],
                                  *tokens.listed(counts))
            rows = queries.Rows(seq, head * ratio, ratio, first_row, num_rows, state.num_tok - q_len + 1, state.num_tok,
                                window, sink_window, hidden[row[0]] if config.level_window else None)
            books = codebook.Books(k_book, v_book, k_channels, head)
            attend(config, pool_of, rows, state, counters, ring, warp, thread, regs, ops, work, q, books,
                   softmax_scale_log2, softcap_log2, split, num_splits)
            # values of their own: those of above would stay in registers over the page loop, or be spilled
            place_again, seq_again = (T.alloc_var("int32") for _ in range(2))
            place_again = T.shfl_sync(place, 0)
            seq_again = T.shfl_sync(seq, 0)
            head = T.truncdiv(place_again, row_blocks)
            first_row = queries.first_row(config, place_again - head * row_blocks, warp)
            num_rows = T.min(ratio * q_len - first_row, config.warp_rows)
            rows = rows._replace(seq=seq_again, first_head=head * ratio)
            deliver(config, regs, ring, rows, queries.of_block(config, rows, warp, q_len), warp, thread,
                    combine.Results(o_partial, lse_partial, out, lse, sink_logits, split, num_splits), arrivals,
                    seq_again * heads_kv * row_blocks + place_again)

    return decode
