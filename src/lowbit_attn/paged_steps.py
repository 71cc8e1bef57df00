"""The calls of one layer in a serving step: nothing is read by the host, and their number does not depend on the rows.

    copy     chunks with context alone: rings, sinks and the chunks' own tokens -> 16-bit rows of the workspace
    append   new tokens -> sinks, rings; blocks that end in the step -> pages
    decode   attention of all decode rows, over pages and rings
    fill     pages of the chunks' context -> 16-bit rows of the workspace
    varlen   FlashAttention of all chunks

The order is forced. ``append`` overwrites ring slots that a chunk still attends to, so they are copied before. A page
that a chunk reads may be packed by this very step, since an engine enters a block in its prefix cache when it schedules
the step that fills it, so ``fill`` follows ``append``. A context beyond the workspace takes one more fill, varlen and
merge for each further pass.

On a CUDA device these are kernels (``paged_kernels``), which a step in a CUDA graph launches again over whatever
``PlanBuffers`` then hold; elsewhere they are torch (``paged_reference``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from lowbit_attn import dispatch
from lowbit_attn.cache.backend import BACKENDS
from lowbit_attn.cache.held import HeldCache
from lowbit_attn.paged import PagedStore, Step
from lowbit_attn.paged_kernels import KernelOps, launch_plan
from lowbit_attn.paged_plan import BatchPlan, DecodeRows, Pass, PlanBuffers
from lowbit_attn.paged_reference import TorchOps
from lowbit_attn.reference import Attention

Workspace = tuple[torch.Tensor, torch.Tensor]  # keys, values [capacity, num_heads_kv, head_dim], 16 bit


class Varlen(Protocol):
    """Attention to 16-bit tokens of several sequences, as FlashAttention's varlen call.

    q [tokens, num_heads, head_dim]; keys, values [at least ``part.num_keys``, num_heads_kv, head_dim]; part: lengths
    and causality; options without sink logits. Writes o into out, of q's shape, and returns lse fp32
    [num_heads, tokens], natural log, -inf for a row without keys.
    """

    def __call__(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: Pass, options: Attention,
                 out: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class View:
    """The store as decode kernels read it, for a number of rows."""

    step: Step  # of which it was made
    cache: HeldCache

    def serves(self, step: Step) -> bool:
        """Whether a step's table and ring rows are the memory that this view names."""
        return all(mine.data_ptr() == other.data_ptr() and mine.stride() == other.stride() for mine, other in
                   ((self.step.table, step.table), (self.step.ring_rows, step.ring_rows)))


def launch(plan: BatchPlan, step: Step) -> None:
    """Enter a step into its plan's buffers, once for all layers."""
    run = launch_plan if plan.buffers.device.type == "cuda" else TorchOps().plan
    run(plan.buffers, step, plan.decode.live if plan.decode else 0, plan.tokens)


class LayerSteps:
    """One layer's calls in steps whose plans are in ``buffers``.

    Tables of steps have rows next to each other, ring rows are contiguous. Raises NotImplementedError for a store that
    no kernel on its device serves.
    """

    def __init__(self, store: PagedStore, buffers: PlanBuffers):
        self.store, self.buffers = store, buffers
        self.backend = BACKENDS[store.pool.device.type]
        self.views: dict[int, View] = {}
        self.ops: KernelOps | TorchOps | None = None

    def append(self, plan: BatchPlan, step: Step, k: torch.Tensor, v: torch.Tensor,
               workspace: Callable[[], Workspace] | None = None) -> list[Workspace]:
        """Store new tokens k, v [tokens, num_heads_kv, head_dim] and pack the blocks that end in the step: the bytes of
        ``paged.append``, but that null pages and the null ring may hold anything.

        Of chunks with context, what ``attention`` reads of rings and of the chunks themselves is copied before, to the
        ``workspace``. Returns the keys and values of each of the plan's passes, for ``attention``.
        """
        if len(k) > plan.tokens:
            k, v = k[: plan.tokens], v[: plan.tokens]
        k, v = self._stored(k), v.to(self.store.dtype)
        ops, places = self._ops(step), []
        for number, part in enumerate(plan.passes):
            if part.is_direct:
                place = k[part.tokens], v[part.tokens]
            elif (place := plan.places.get(number)) is None:
                place = plan.places[number] = self._place(part, workspace)
            if part.copies is not None:
                ops.copy(self.store, step, part.copies, k, v, *place)
            places.append(place)
        ops.append(self.store, plan.buffers, step, k, v)
        return places

    def attention(self, plan: BatchPlan, step: Step, q: torch.Tensor, out: torch.Tensor, options: Attention,
                  places: list[Workspace], varlen: Varlen | None = None,
                  lse: torch.Tensor | None = None) -> None:
        """Attention of q [tokens, num_heads, head_dim], causal within each row, into ``out`` of its shape.

        places: what ``append`` returned; varlen: for plans with chunks. lse: fp32 [rows, num_heads, q_len], for plans
        whose decode rows are alike and which have no chunks. Of several ranks: decode rows alone, to the tokens of
        this one.
        """
        if plan.decode is not None:
            self._decode(plan.decode, step, q, out, options, lse)
        if plan.chunks is not None and self.store.world == 1:
            self.chunks(plan, step, q, out, options, places, varlen)

    def chunks(self, plan: BatchPlan, step: Step, q: torch.Tensor, out: torch.Tensor, options: Attention,
               places: list[Workspace], varlen: Varlen) -> None:
        """Attention of chunk rows to all their tokens."""
        plain = Attention(options.softmax_scale, options.softcap)  # a logit of the softmax's own counts once
        if self.store.attached is not None:
            q = q.clone()
            q[plan.chunks] = self.store.attached.queries(q[plan.chunks]).to(q.dtype)
        whole: list[tuple[slice, torch.Tensor]] = []  # tokens whose results stand in ``out``, and their lse
        for part, place in zip(plan.passes, places):
            if part.pages is not None:
                self.ops.fill(self.store, step, part.pages, *place)
            mine = out[part.tokens]
            target = mine if part.is_causal else torch.empty_like(mine)
            lse = varlen(q[part.tokens], *place, part, plain, target)
            if part.is_causal:
                whole.append((part.tokens, lse))
            else:
                tokens, so_far = whole[-1]
                own = slice(part.tokens.start - tokens.start, part.tokens.stop - tokens.start)
                self.ops.merge(mine, so_far[:, own], target, lse)
        if options.sink_logits is not None:
            for tokens, lse in whole:
                self.ops.merge(out[tokens], lse, out[tokens], torch.full_like(lse, -torch.inf), options.sink_logits)

    def _decode(self, rows: DecodeRows, step: Step, q: torch.Tensor, out: torch.Tensor, options: Attention,
                lse: torch.Tensor | None) -> None:
        """Attention of decode rows. Rows that differ in q_len are padded on the left: a query of a padded place sees
        fewer tokens than the row's first one, and its result is dropped."""
        places = rows.rows * rows.q_len
        if rows.gather is None:
            self._run(q[:places], step, rows, out[:places], options, lse)
            return
        padded = q.index_select(0, rows.gather)
        o = torch.empty_like(padded)
        self._run(padded, step, rows, o, options, None)
        torch.index_select(o, 0, rows.scatter, out=out[: rows.tokens])

    def _run(self, q: torch.Tensor, step: Step, rows: DecodeRows, out: torch.Tensor, options: Attention,
             lse: torch.Tensor | None) -> None:
        cache, shape = self._view(step, rows.rows), (rows.rows, rows.q_len)
        q, out = q.unflatten(0, shape), out.unflatten(0, shape)
        plan = dispatch.planned(q, cache, (options.softmax_scale, options.softcap, None, False, None, None, False))
        if plan is not None:
            plan.run(q, out, lse, options.sink_logits)
            return
        lse = q.new_empty(len(q), q.shape[2], rows.q_len, dtype=torch.float32) if lse is None else lse
        dispatch.decode(q, cache, out, lse, options, None, None)

    def _stored(self, k: torch.Tensor) -> torch.Tensor:
        """Keys as the store has them."""
        attached = self.store.attached
        return (k if attached is None else attached.keys(k, self.store.dtype)).to(self.store.dtype)

    def _place(self, part: Pass, workspace: Callable[[], Workspace] | None) -> Workspace:
        """Where a pass has its keys and values. Rings of more rows than the workspace has room for, which are copied
        before any pass runs, get memory of their own."""
        room = workspace() if workspace and not part.group else None
        if room is not None and part.num_keys <= len(room[0]):
            return tuple(x[: part.num_keys] for x in room)
        rings = self.store.rings
        return tuple(rings.new_empty(part.num_keys, rings.shape[2], rings.shape[4]) for _ in range(2))

    def _ops(self, step: Step) -> KernelOps | TorchOps:
        if self.ops is None:
            cache = self._view(step, len(step.seq_lens))
            self.backend.prepare(cache)
            is_cuda = self.store.pool.device.type == "cuda"
            self.ops = KernelOps(self.store, cache, self.buffers) if is_cuda else TorchOps()
        return self.ops

    def _view(self, step: Step, rows: int) -> HeldCache:
        found = self.views.get(rows)
        if found is None or not found.serves(step):
            found = self.views[rows] = View(step, self._made(step, rows))
        return found.cache

    def _made(self, step: Step, rows: int) -> HeldCache:
        if not (step.table.is_contiguous() and step.ring_rows.is_contiguous()):
            raise ValueError(f"step: got a table of strides {step.table.stride()} and ring rows of "
                             f"{step.ring_rows.stride()}, supported: contiguous ones")
        counts = self.buffers.counts(rows)
        part = Step(first_rows(step.table, rows), counts["n_tok"], None, first_rows(step.ring_rows, rows))
        return self.store.view(part, counts, scratch_pool=self.buffers.scratch)


def rows_in_memory(x: torch.Tensor) -> int:
    """Rows from a tensor's first one to the end of its memory: an engine's tables are the first rows of larger ones."""
    row = 1 + sum((size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:]))
    held = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return (held - row) // x.stride(0) + 1


def first_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """The first rows of a tensor, beyond its own where its memory goes on."""
    if rows <= len(x):
        return x[:rows]
    if rows > rows_in_memory(x):
        raise ValueError(f"rows: got {rows} of {rows_in_memory(x)} in memory, supported: up to those")
    return x.as_strided((rows, *x.shape[1:]), x.stride())


def workspace_tokens(tokens: int) -> int:
    """Tokens that a workspace holds for steps of up to ``tokens`` new ones: those, with the rings and sinks of some
    hundred chunks, and so many at least that contexts of 64K tokens take one pass."""
    return max(tokens + 16_384, 65_536)
