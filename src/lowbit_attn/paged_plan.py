"""The plan of one serving step: made once, read by every layer of the step.

A step has two kinds of rows. *Decode rows* have a few new tokens each (one, or one and its drafts) and come first.
*Chunk rows* have more: they are parts of prompts. The lengths of decode rows may be known on the device alone, so one
kernel (``device/paged_plan.py``) computes what the layers read of them into ``PlanBuffers``, whose addresses stay: a
captured CUDA graph reads whatever the latest step left there. The lengths of chunk rows are exact on the host, which
computes how FlashAttention reads each chunk's context (``plan_chunks``).

A chunk attends to its context and to itself in one call of FlashAttention, over 16-bit rows in a workspace:

    dequantized pages | tokens of the ring | sinks | the chunk's own tokens          (the causal pass)

Where the context does not fit the workspace, the pages that are left go through further, non-causal passes, and the
results are merged by their log-sum-exp (flash-decoding's combine).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from lowbit_attn import layout
from lowbit_attn.cache.view import COUNTERS
from lowbit_attn.formats import Format
from lowbit_attn.paged import own_blocks

PAGE = layout.PAGE_TOKENS
READ = (*COUNTERS, "ring_start")  # rows of ``PlanBuffers.read``
ROW = ("before", "q_start", "n_new")  # rows of ``PlanBuffers.row``
ITEM = ("row", "page", "first", "stores")  # rows of ``PlanBuffers.items``
ALIGN = 32  # int32 values: kernels take addresses of 128 bytes
COPY_TOKENS = 32  # most tokens of one copy item
OWN, SINKS, RING = range(3)  # sources of copy items
K_SIDE, V_SIDE, BOTH = 1, 2, 3


class TokenLayout(NamedTuple):
    """What decides where the tokens of a sequence lie in a ``PagedStore``."""

    sinks: int
    window_k: int
    window_v: int
    slots: int  # of a ring, behind the sinks
    null_pages: int = 1
    rank: int = 0
    world: int = 1

    @classmethod
    def of(cls, format: Format, sinks: int, slots: int, null_pages: int = 1, rank: int = 0,
           world: int = 1) -> "TokenLayout":
        return cls(sinks, format.window_k, format.window_v, slots, null_pages, rank, world)


class PlanBuffers:
    """Device memory of the plans of a group of layers, int32 at addresses that stay.

    read [5, rows]: ``READ`` of decode rows, 0 for all others. row [3, rows]: ``ROW`` of all rows. token_row,
    token_slot [tokens]: the row of a new token (-1: padding) and its place in the ring, sinks first (-1: not stored
    there by the flat store). items [4, ...], count [1]: the blocks that end in the step (``ITEM``).

    rows, tokens: the most of a step. ``device/paged_plan.py`` has the exact meaning of each value.
    """

    def __init__(self, where: TokenLayout, rows: int, tokens: int, device: torch.device):
        self.layout, self.rows, self.tokens, self.device = where, rows, tokens, device
        held = _aligned(rows)
        self.max_items = tokens // PAGE + 2 * rows
        self.launch: tuple | None = None  # the plan kernel with these tensors, once it is loaded
        self.scratch: dict = {}  # memory of decode launches, shared by layers, which run one after the other

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        with torch.inference_mode(False):  # written in either mode
            self.read, self.row = zeros(len(READ), held), zeros(len(ROW), held)
            self.token_row, self.token_slot = zeros(_aligned(tokens)), zeros(_aligned(tokens))
            self.items, self.count = zeros(len(ITEM), _aligned(self.max_items)), zeros(1)

    def counts(self, rows: int) -> dict[str, torch.Tensor]:
        """Counters of the first rows, as attention reads them."""
        return dict(zip(READ, self.read[:, :rows]))


@dataclass(frozen=True)
class DecodeRows:
    """The decode rows of a step: the first ``live`` ones, with ``tokens`` new tokens in all.

    rows: as many rows as the kernels are launched for; those behind ``live`` have no tokens. q_len: the most new
    tokens of a row. gather int64 [rows * q_len], scatter int64 [tokens]: only where rows differ in q_len; gather
    aligns each row's queries at the end of its q_len places, scatter finds a token's place among those.
    """

    live: int
    rows: int
    q_len: int
    tokens: int
    gather: torch.Tensor | None = None
    scatter: torch.Tensor | None = None


@dataclass(frozen=True)
class Pass:
    """One call of FlashAttention for chunk rows that follow each other.

    tokens: of the batch. cu_q, cu_k: int32 [rows + 1], cumulative lengths of queries and keys; max_q, max_k: the
    largest of each. num_keys: all keys. pages: int32 [4, n] for the fill kernel (row, block, first key, sides), or
    None. copies: int32 [6, n] for the copy kernel, or None; they are made before the step's tokens are stored.
    group: 0 for keys in the workspace, else the number of a buffer of its own. has_empty: whether a row has no keys.
    """

    tokens: slice
    is_causal: bool
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    max_q: int
    max_k: int
    num_keys: int
    pages: torch.Tensor | None = None
    copies: torch.Tensor | None = None
    group: int = 0
    has_empty: bool = False

    @property
    def is_direct(self) -> bool:
        """Whether the keys are the chunks' own new tokens, read where the model left them."""
        return self.pages is None and self.copies is None


@dataclass(frozen=True)
class BatchPlan:
    """A step's plan: what the device buffers hold, and what the host knows.

    rows, tokens: of the step, padded ones of a captured graph included. passes: of chunk rows; first those that write
    their tokens' results, each followed by those that are merged into them. With several ranks ``passes`` attend to
    the context alone and ``own`` to the chunks themselves. places: keys and values of passes by their number, which the
    first layer enters and all others share.
    """

    buffers: PlanBuffers
    rows: int
    tokens: int
    decode: DecodeRows | None
    chunks: slice | None = None  # tokens of chunk rows
    passes: tuple[Pass, ...] = ()
    own: Pass | None = None
    places: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class _Lists:
    """int32 arrays that go to the device in one copy."""

    def __init__(self):
        self.arrays: list[np.ndarray] = []

    def add(self, values) -> int:
        """The number by which ``upload`` returns these values on the device."""
        self.arrays.append(np.ascontiguousarray(values, dtype=np.int32))
        return len(self.arrays) - 1

    def upload(self, copy: Callable[[np.ndarray], torch.Tensor]) -> list[torch.Tensor]:
        starts, end = [], 0
        for array in self.arrays:
            starts.append(end)
            end += _aligned(array.size)
        if not end:
            return []
        whole = np.zeros(end, np.int32)
        for start, array in zip(starts, self.arrays):
            whole[start : start + array.size] = array.reshape(-1)
        there = copy(whole)
        return [there[start : start + array.size].view(array.shape) for start, array in zip(starts, self.arrays)]


def make_plan(buffers: PlanBuffers, q_lens: np.ndarray, seq_lens: np.ndarray, threshold: int, capacity: int,
              copy: Callable[[np.ndarray], torch.Tensor], bucket: Callable[[int], int] = lambda rows: rows,
              tokens: int | None = None) -> BatchPlan:
    """The host's part of a step's plan; the caller launches the plan kernel for ``plan.decode.live`` decode rows.

    q_lens [rows]: new tokens of each row; rows without any are padding behind the others. seq_lens [rows]: lengths
    after the step, of which those of chunk rows must be exact. threshold: the most new tokens of a decode row.
    capacity: tokens that the workspace holds. copy: int32 array -> device tensor. bucket: rows of a kernel's launch
    for a number of decode rows; few sizes need few plans of launches. It may be more than the step has rows where the
    memory of table and ring rows goes on. tokens: of the batch, if padded rows count as q_len ones each.

    Raises ValueError where a decode row stands behind a chunk row.
    """
    rows, is_chunk = len(q_lens), q_lens > threshold
    first = int(is_chunk.argmax()) if is_chunk.any() else rows
    last = rows - int((q_lens[::-1] > 0).argmax()) if (q_lens > 0).any() else 0  # behind the last live row
    if not is_chunk[first:last].all():
        raise ValueError(f"q_lens: got {q_lens.tolist()}, supported: rows of at most {threshold} new tokens before "
                         "all others")
    starts, lists = np.concatenate(([0], np.cumsum(q_lens))), _Lists()
    total = int(starts[-1]) if tokens is None else tokens
    if first >= last:
        decode = _decode_rows(q_lens[:last], rows, total, bucket, lists)
        return BatchPlan(buffers, rows, total, _uploaded(decode, lists.upload(copy)))
    decode = _decode_rows(q_lens[:first], bucket(first), total, bucket, lists)
    n_new = q_lens[first:last].astype(np.int64)
    before = seq_lens[first:last].astype(np.int64) - n_new
    if (before < 0).any():
        raise ValueError(f"seq_lens: got {seq_lens[first:last].tolist()} for chunks of {n_new.tolist()} tokens, "
                         "supported: lengths after the step")
    made = plan_chunks(buffers.layout, n_new, before, first, starts[first:last], capacity)
    own = None
    if buffers.layout.world > 1:
        own = _PassDraft.of_own_tokens(n_new, starts[first:last])
    numbers = [one.enter(lists) for one in (*made, *([own] if own else []))]
    there = lists.upload(copy)
    passes = [one.finished([None if i is None else there[i] for i in number])
              for one, number in zip((*made, *([own] if own else [])), numbers)]
    decode = _uploaded(decode, there)
    chunks = slice(int(starts[first]), int(starts[last]))
    return BatchPlan(buffers, rows, total, decode, chunks, tuple(passes[: len(made)]), passes[-1] if own else None)


def _decode_rows(q_lens: np.ndarray, rows: int, most: int, bucket: Callable[[int], int], lists: _Lists):
    """(live, rows, q_len, tokens, number of gather, of scatter) of decode rows; None if there are none.

    Queries of rows that are alike are read where they lie, so rows * q_len is at most ``most``; those of
    others are gathered, for as many rows as ``bucket`` says.
    """
    live = len(q_lens)
    if not live:
        return None
    q_len = int(q_lens.max())
    total = int(q_lens.sum())
    if (q_lens == q_len).all():
        return live, max(rows, live) if rows * q_len <= most else live, q_len, total, None, None
    rows = max(bucket(live), live)
    ends = np.cumsum(q_lens)
    place = np.arange(q_len) - q_len + ends[:, None]  # [live, q_len]: right-aligned
    gather = np.maximum(place, (ends - q_lens)[:, None])
    gather = np.concatenate((gather.reshape(-1), np.zeros((rows - live) * q_len, np.int64)))
    row = np.repeat(np.arange(live), q_lens)
    scatter = (row + 1) * q_len - ends[row] + np.arange(total)
    return live, rows, q_len, total, lists.add(gather), lists.add(scatter)


def _uploaded(decode, there: list[torch.Tensor]) -> DecodeRows | None:
    if decode is None:
        return None
    *counts, gather, scatter = decode
    return DecodeRows(*counts, *(None if i is None else there[i] for i in (gather, scatter)))


@dataclass
class _PassDraft:
    """A ``Pass`` whose lists are still on the host."""

    tokens: slice
    is_causal: bool
    q_lens: np.ndarray
    k_lens: np.ndarray
    group: int = 0
    pages: list[np.ndarray] = field(default_factory=list)  # each [4, n]
    copies: list[np.ndarray] = field(default_factory=list)  # each [6, n]

    @classmethod
    def of_own_tokens(cls, n_new: np.ndarray, starts: np.ndarray) -> "_PassDraft":
        return cls(slice(int(starts[0]), int(starts[-1] + n_new[-1])), True, n_new, n_new)

    def enter(self, lists: _Lists) -> tuple[int | None, ...]:
        lens = [lists.add(np.concatenate(([0], np.cumsum(x)))) for x in (self.q_lens, self.k_lens)]
        return (*lens, *(lists.add(np.concatenate(x, 1)) if x else None for x in (self.pages, self.copies)))

    def finished(self, there: Sequence[torch.Tensor | None]) -> Pass:
        cu_q, cu_k, pages, copies = there
        return Pass(self.tokens, self.is_causal, cu_q, cu_k, int(self.q_lens.max()), int(self.k_lens.max()),
                    int(self.k_lens.sum()), pages, copies, self.group, bool((self.k_lens == 0).any()))


class _Context(NamedTuple):
    """What a chunk row has in the store before the step; of several ranks, on this one."""

    free: int  # blocks whose K and V are both read from pages
    lag: int  # blocks behind those whose V is still read from the ring
    start: int  # position behind the sinks of the ring's first token of K
    ring: int  # tokens of K in the ring
    sinks: int

    @property
    def tail(self) -> int:
        """Tokens that the causal pass must read."""
        return self.lag * PAGE + self.ring + self.sinks


def context_of(where: TokenLayout, before: int) -> _Context:
    """How the ``before`` tokens of a sequence lie in the store when a step begins."""
    rest = max(before - where.sinks, 0)
    n_qk, n_qv = (max(rest - window, 0) // PAGE for window in (where.window_k, where.window_v))
    if where.world == 1:
        return _Context(n_qv, n_qk - n_qv, n_qk * PAGE, rest - n_qk * PAGE, min(before, where.sinks))
    has_open = n_qk % where.world == where.rank
    return _Context(own_blocks(n_qk, where.rank, where.world), 0, n_qk * PAGE, (rest - n_qk * PAGE) * has_open, 0)


def plan_chunks(where: TokenLayout, n_new: np.ndarray, before: np.ndarray, first_row: int, starts: np.ndarray,
                capacity: int) -> list[_PassDraft]:
    """The passes of chunk rows: of each group of rows the causal one, then those over the pages that are left.

    n_new, before [rows]: new tokens, and tokens before the step. first_row: the first chunk's row in the step's table.
    starts [rows]: each chunk's first token in the batch. With several ranks a chunk's own tokens are in none of them.
    """
    if not before.any():
        return [] if where.world > 1 else [_PassDraft.of_own_tokens(n_new, starts)]
    contexts = [context_of(where, int(x)) for x in before]
    own = n_new if where.world == 1 else np.zeros_like(n_new)
    needed = own + np.array([context.tail for context in contexts])
    passes, first = [], 0
    for group, last in enumerate(_group_ends(needed, capacity)):
        rows = range(first, last)
        room = capacity - int(needed[first:last].sum()) if not group else 0
        taken = {}
        for row in rows:
            taken[row] = min(contexts[row].free, max(room, 0) // PAGE)
            room -= taken[row] * PAGE
        passes.append(_tail_pass(where, rows, contexts, taken, n_new, own, first_row, starts, group))
        left = {row: contexts[row].free - taken[row] for row in rows}
        passes += _page_passes(left, n_new, first_row, starts, capacity)
        first = last
    return [one for one in passes if one.k_lens.any()]


def _group_ends(needed: np.ndarray, capacity: int) -> list[int]:
    """Where groups of rows end that fit the capacity; a row that does not fit is a group of its own."""
    ends, held = [], 0
    for row, tokens in enumerate(needed.tolist()):
        if row and held + tokens > capacity:
            ends.append(row)
            held = 0
        held += tokens
    return [*ends, len(needed)]


def _tail_pass(where: TokenLayout, rows: range, contexts: list[_Context], taken: dict[int, int], n_new: np.ndarray,
               own: np.ndarray, first_row: int, starts: np.ndarray, group: int) -> _PassDraft:
    """The pass that reads the rings, the sinks and, of one rank, the chunks themselves."""
    k_lens = np.array([taken[row] * PAGE + contexts[row].tail + own[row] for row in rows])
    tokens = slice(int(starts[rows[0]]), int(starts[rows[-1]] + n_new[rows[-1]]))
    draft, at = _PassDraft(tokens, where.world == 1, n_new[rows.start : rows.stop], k_lens, group), 0
    for row, keys in zip(rows, k_lens.tolist()):
        context, there = contexts[row], first_row + row
        if pages := taken[row] + context.lag:
            draft.pages.append(_page_items(there, context.free - taken[row], pages, at, taken[row]))
        at_lag = at + taken[row] * PAGE
        at_ring = at_lag + context.lag * PAGE
        first = context.start - context.lag * PAGE
        draft.copies += _copy_items(RING, there, first, context.lag * PAGE, at_lag, V_SIDE)
        draft.copies += _copy_items(RING, there, context.start, context.ring, at_ring, BOTH)
        draft.copies += _copy_items(SINKS, there, 0, context.sinks, at_ring + context.ring, BOTH)
        draft.copies += _copy_items(OWN, there, int(starts[row]), int(own[row]), at + keys - int(own[row]), BOTH)
        at += keys
    return draft


def _page_passes(left: dict[int, int], n_new: np.ndarray, first_row: int, starts: np.ndarray,
                 capacity: int) -> list[_PassDraft]:
    """Passes over the first ``left[row]`` pages of each row, as many at once as the workspace holds."""
    passes, room = [], 0
    for row, pages in left.items():
        at = 0
        while at < pages:
            if room < PAGE or (passes and passes[-1]["rows"][-1] not in (row - 1, row)):
                passes.append(dict(rows=[], k_lens=[], pages=[], keys=0))
                room = capacity
            one = passes[-1]
            count = min(pages - at, max(room // PAGE, 1))
            one["pages"].append(_page_items(first_row + row, at, count, one["keys"], count))
            one["rows"].append(row)
            one["k_lens"].append(count * PAGE)
            one["keys"] += count * PAGE
            room, at = room - count * PAGE, at + count
    found = []
    for one in passes:
        first, last = one["rows"][0], one["rows"][-1]
        tokens = slice(int(starts[first]), int(starts[last] + n_new[last]))
        found.append(_PassDraft(tokens, False, n_new[first : last + 1], np.array(one["k_lens"]), 0, one["pages"]))
    return found


def _page_items(row: int, first: int, count: int, at: int, both: int) -> np.ndarray:
    """Fill items [4, count] of the blocks from ``first`` on; of the first ``both`` K and V, of the others K alone."""
    number = np.arange(count)
    return np.stack((np.full(count, row), first + number, at + PAGE * number, np.where(number < both, BOTH, K_SIDE)))


def _copy_items(source: int, row: int, first: int, count: int, at: int, sides: int) -> list[np.ndarray]:
    """Copy items [6, n] of ``count`` tokens from ``first`` on; an empty list for no tokens."""
    if not count:
        return []
    offset = np.arange(0, count, COPY_TOKENS)
    alike = np.ones_like(offset)
    return [np.stack((source * alike, row * alike, first + offset, np.minimum(COPY_TOKENS, count - offset), at + offset,
                      sides * alike))]


def _aligned(count: int) -> int:
    return -(-count // ALIGN) * ALIGN
