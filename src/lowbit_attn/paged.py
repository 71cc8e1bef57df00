"""Steps over pages and rings that a serving engine owns: nothing is counted here, nothing is allocated.

An engine says of each step which pages and which ring a sequence has, how long it is after the step and which tokens
are new (``Step``); where everything lies follows from that. Positions of a sequence, in order:

    sinks (16 bit) | blocks of 128 tokens, block j in page table[row, j] | ring (16 bit)

A token at position p behind the sinks is in slot ``(p - sinks) % slots`` of the ring until newer ones take the slot.
Every block that ends inside a step is packed in this step, since an engine may give its page to another sequence in the
very same step. The step's own queries still read it in 16 bit (``counters``), and so does the next step if drafts that
ended it are rejected: then it fills, and is packed, again. ``KVCache`` packs by the same functions of a format, one
step later.

Blocks may be dealt to several ranks in turn (decode context parallelism): block b to rank b % world, as its own block
b // world. Each rank's ring gets all new tokens; who has a sequence's open block reads them (paged_ranks.py).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from lowbit_attn import kernels, layout
from lowbit_attn.cache.attached import Attached
from lowbit_attn.cache.backend import backend_of
from lowbit_attn.cache.held import HeldCache
from lowbit_attn.cache.state import DTYPES, RING_ALIGN
from lowbit_attn.checks import check_rank, check_tensor, one_of
from lowbit_attn.formats import Format
from lowbit_attn.precision import on_own_defaults

PAGE = layout.PAGE_TOKENS
NULL = 0  # ring that engines name where there is none, never written; pages of this block are none, too


class Step(NamedTuple):
    """What an engine says of one step, int32 tensors on the store's device.

    table [rows, blocks]: pages of each sequence by its blocks; seq_lens [rows]: its tokens, the new ones among them;
    query_start_loc [rows + 1]: first of each row's new tokens in the batch, 1 to many, then the end; ring_rows [rows].
    A row without new tokens is padding: nothing is read or written for it.
    """

    table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    ring_rows: torch.Tensor

    @property
    def q_lens(self) -> torch.Tensor:
        return self.query_start_loc.diff()


def why_not(fmt: Format, head_dim: int) -> list[str]:
    """Why an engine's pages cannot hold a format; empty if they can."""
    return kernels.paged_missing(fmt, head_dim)


def no_kernels(fmt: Format, arch: str, head_dim: int, dtype: torch.dtype, rows: int) -> list[str]:
    """Why an architecture's kernels do not serve an engine's steps; empty if they do.

    dtype: of tokens in 16 bit; rows: query heads of a KV head.
    """
    reasons = kernels.no_codebooks(arch, fmt, head_dim) or kernels.quantize_missing(fmt, head_dim, dtype)
    if reasons:
        return reasons
    picked, passed_over = kernels.pick(arch, fmt, head_dim, dtype, rows)
    return [] if picked else passed_over


def ring_slots(fmt: Format, max_q_len: int) -> int:
    """Tokens that a ring must hold, sinks apart: the open block, V's window and all but one token of a step, in whole
    tiles of a kernel."""
    return -(-(fmt.window_v + PAGE - 1 + max_q_len) // RING_ALIGN) * RING_ALIGN


def own_blocks(blocks, rank: int, world: int):
    """How many of a sequence's first ``blocks`` (int or tensor) a rank has of those that are dealt to so many."""
    return (blocks - rank + world - 1) // world


@dataclass(frozen=True)
class PagedStore:
    """Memory of one layer that an engine owns.

    format: of the pages; ``why_not`` says which are refused.
    pool: uint8 [num_pages, num_heads_kv, record bytes], dense within a record.
    rings: fp16 or bf16 [num_rings, 2 (K, V), num_heads_kv, sinks + slots, head_dim], dense within a token.
    sinks: first tokens of a sequence that stay in 16 bit. They lie in its ring, so that pages of a sequence with sinks
        mean nothing to another one.
    attached: codebooks of the layer, for formats that need them.
    null_pages: pages below this are none: those of an engine's block 0, never written.
    rank, world: of the ranks to which blocks are dealt, this one. Several: for formats without windows, no sinks, and
        one KV head.
    """

    format: Format
    pool: torch.Tensor
    rings: torch.Tensor
    sinks: int = 0
    attached: Attached | None = None
    null_pages: int = 1
    rank: int = 0
    world: int = 1

    def __post_init__(self):
        _, two, heads, _, head_dim = check_rank("rings", self.rings, ("rings", 2, "num_heads_kv", "slots", "head_dim"))
        one_of("rings", self.rings.dtype, DTYPES)
        one_of("rings", two, (2,))
        if reasons := why_not(self.format, head_dim):
            raise NotImplementedError("; ".join(reasons))
        if self.format.needs_codebooks != (self.attached is not None):
            raise ValueError(f"attached: got {self.attached} for format {self.format}, supported: codebooks for "
                             "formats that need them, None for others")
        if self.attached is not None and self.attached.is_pre_rope:
            raise NotImplementedError("attached: codebooks of rope 'pre', supported: 'post', for blocks are packed "
                                      "without positions")
        if self.world > 1 and (self.sinks or self.format.window_k or self.format.window_v):
            raise NotImplementedError(f"world: got {self.world} ranks for {self.format} with {self.sinks} sinks, "
                                      "supported there: no sinks and formats without windows")
        if self.world > 1 and heads > 1:
            raise NotImplementedError(f"world: got {self.world} ranks for stores of {heads} KV heads, supported there: "
                                      "1 KV head, which the heads of all ranks read")
        check_tensor("pool", self.pool, (len(self.pool), heads, self.format.record(head_dim).nbytes), (torch.uint8,),
                     self.rings.device)
        if self.max_q_len < 1:
            raise ValueError(f"rings: got {self.slots} slots behind {self.sinks} sinks, supported for {self.format}: "
                             f"at least {ring_slots(self.format, 1)}")

    @property
    def slots(self) -> int:
        return self.rings.shape[3] - self.sinks

    @property
    def window_k(self) -> int:
        return self.format.window_k

    @property
    def window_v(self) -> int:
        return self.format.window_v

    @property
    def max_q_len(self) -> int:
        """New tokens of a row that overwrite nothing which its queries read; a row with more is a chunk. Of several
        ranks one: more may lie in two ranks' blocks."""
        most = self.slots - self.format.window_v - PAGE + 1
        return most if self.world == 1 else min(most, 1)

    @property
    def dtype(self) -> torch.dtype:
        return self.rings.dtype

    def view(self, step: Step, counts: dict[str, torch.Tensor], rings: torch.Tensor | None = None,
             **values) -> HeldCache:
        """The store as decode and the packers read a cache; rings: others that ``ring_rows`` counts in; values: what
        else a reader asks a cache for."""
        rings = self.rings if rings is None else rings
        sinks, ring = rings[:, :, :, : max(1, self.sinks)], rings[:, :, :, self.sinks :]
        state = dict(ring_start=counts["n_qk"]) | counts | dict(
            pool=self.pool, table=step.table, sink_k=sinks[:, 0], sink_v=sinks[:, 1], ring_k=ring[:, 0],
            ring_v=ring[:, 1], ring_rows=step.ring_rows,
            rows=torch.arange(len(step.seq_lens), dtype=torch.int32, device=step.seq_lens.device))
        pages, heads = (self.pool.stride(i) // layout.RECORD_ALIGN for i in range(2))
        strides = [pages, heads, step.table.stride(0), 0]
        return HeldCache(self.format.name, strides, state, sinks=self.sinks, range_search=None, query_weights=None,
                         attached=self.attached, first_positions=np.zeros(len(step.seq_lens), np.int64), **values)


def counters(store: PagedStore, step: Step, is_after: bool = True) -> dict[str, torch.Tensor]:
    """Counters int32 [rows] under which the step's queries read each sequence: n_sink, n_qk, n_qv, n_tok; of several
    ranks also ring_start.

    store: or anything else with its sinks, windows, rank and world. Packed is what earlier steps filled, less the
    format's windows. is_after: n_tok and n_sink count the new tokens too, else what was there before them. A rank
    without the open block has no tokens in its ring.
    """
    before = torch.where(step.q_lens > 0, step.seq_lens - step.q_lens, 0)
    length = torch.where(step.q_lens > 0, step.seq_lens, 0) if is_after else before
    rest = (before - store.sinks).clamp(min=0)
    packed = {name: (rest - window).clamp(min=0) // PAGE * PAGE
              for name, window in (("n_qk", store.window_k), ("n_qv", store.window_v))}
    counts = dict(n_sink=length.clamp(max=store.sinks), **packed, n_tok=length)
    if store.world > 1:
        packed = counts["n_qk"]  # of all ranks
        own = own_blocks(packed // PAGE, store.rank, store.world) * PAGE
        has_open = packed // PAGE % store.world == store.rank
        counts |= dict(n_qk=own, n_qv=own, ring_start=packed, n_tok=torch.where(has_open, length, packed))
    return {name: value.int() for name, value in counts.items()}


@torch.no_grad()
@on_own_defaults
def append(store: PagedStore, step: Step, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
    """Store a step's new tokens, and pack every block that ends inside it.

    k, v: [tokens, num_heads_kv, head_dim] of all rows, any float dtype, rounded once to the rings'; tokens behind the
    last row are padding. Nothing is written for padded rows, to ring 0 or to pages that are none.

    Returns the rings as they were of the rows that are chunks (more than ``store.max_q_len`` tokens), in their order:
    [chunks, 2, num_heads_kv, sinks + slots, head_dim], which ``attention`` reads; None if there are none.
    """
    check_tensor("v", v, k.shape, (k.dtype,), k.device)
    if store.attached is not None:
        k = store.attached.keys(k, store.dtype)
    entered = torch.stack((k, v)).to(store.dtype).transpose(1, 2)  # [2, heads, tokens, head_dim]
    starts, lens, rings = (x.tolist() for x in (step.query_start_loc, step.seq_lens, step.ring_rows))
    live = [row for row, (start, stop) in enumerate(zip(starts, starts[1:])) if stop > start]
    _check(store, live, starts, lens, rings, len(k))
    chunks = [rings[row] for row in live if starts[row + 1] - starts[row] > store.max_q_len]
    before = store.rings[chunks] if chunks else None
    blocks, pages = [], []
    for row in live:
        new = entered[:, :, starts[row] : starts[row + 1]]
        full, first = _full_blocks(store, rings[row], lens[row] - new.shape[2], new)
        own = [own_blocks(block, store.rank, store.world) for block in (first, first + full.shape[2])]
        named = step.table[row, slice(*own)]
        if len(named) < own[1] - own[0]:
            raise ValueError(f"table: got {step.table.shape[1]} blocks a row, supported: {own[1]} for row {row}, which "
                             "fills so many")
        full = full[:, :, (store.rank - first) % store.world :: store.world]
        blocks.append(full[:, :, named >= store.null_pages])
        pages.append(named[named >= store.null_pages])
    pages = torch.cat(pages) if pages else step.table.new_empty(0)
    if len(pages) and int(pages.max()) >= len(store.pool):
        raise ValueError(f"table: got page {int(pages.max())}, supported: up to {len(store.pool) - 1}")
    _pack(store, step, pages, blocks)
    for row in live:
        if rings[row] != NULL:
            new = entered[:, :, starts[row] : starts[row + 1]]
            _store(store, store.rings[rings[row]], lens[row] - new.shape[2], new)
    return before


def _check(store: PagedStore, live: list[int], starts: list[int], lens: list[int], rings: list[int],
           tokens: int) -> None:
    """Raise ValueError for values of a step that name what is not there, of rows that store something."""
    if max(starts) > tokens or starts != sorted(starts):
        raise ValueError(f"query_start_loc: got {starts} for {tokens} tokens, supported: ascending, and within k and v")
    for row in live:
        if not 0 <= rings[row] < len(store.rings):
            raise ValueError(f"ring_rows: got {rings[row]} for row {row}, supported: 0 to {len(store.rings) - 1}")
        if rings[row] != NULL and lens[row] < starts[row + 1] - starts[row]:
            raise ValueError(f"seq_lens: got {lens[row]} for row {row}, supported: at least its "
                             f"{starts[row + 1] - starts[row]} new tokens")


def _full_blocks(store: PagedStore, ring: int, context: int, new: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Blocks [2, heads, n, 128, head_dim] that new tokens [2, heads, tokens, head_dim] behind ``context`` others
    fill, and the number of the first."""
    new = new[:, :, max(0, store.sinks - context) :]
    first = max(0, context - store.sinks)
    start = first // PAGE * PAGE
    count = (first + new.shape[2]) // PAGE - start // PAGE
    slots = torch.arange(start, first, device=new.device) % store.slots + store.sinks
    tokens = torch.cat((store.rings[ring][:, :, slots], new), 2) if count else new
    return tokens[:, :, : count * PAGE].unflatten(2, (count, PAGE)), start // PAGE


def _pack(store: PagedStore, step: Step, pages: torch.Tensor, blocks: list[torch.Tensor]) -> None:
    """Quantize blocks into these pages, both sides."""
    if not len(pages):
        return
    view = store.view(step, counters(store, step))
    write = backend_of(view).write_blocks
    for number, side in enumerate("kv"):
        write(view, pages, torch.cat([full[number] for full in blocks], 1).transpose(0, 1).contiguous(), side)


def _store(store: PagedStore, ring: torch.Tensor, context: int, new: torch.Tensor) -> None:
    """New tokens [2, heads, tokens, head_dim] behind ``context`` others -> the sinks and slots of a ring."""
    fresh = min(new.shape[2], max(0, store.sinks - context))
    ring[:, :, context : context + fresh] = new[:, :, :fresh]
    stop = context + new.shape[2] - store.sinks
    start = max(context + fresh - store.sinks, stop - store.slots)
    if start < stop:
        slots = torch.arange(start, stop, device=new.device) % store.slots + store.sinks
        ring[:, :, slots] = new[:, :, new.shape[2] - (stop - start) :]
