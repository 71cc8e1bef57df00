"""Steps with as many new tokens in every row, over an engine's pages: nothing is read by the host, addresses stay.

A step in a CUDA graph is launched again over whatever its memory then holds. ``StepBuffers`` are that memory: what all
layers of a model read of a step, filled once a step by operations on the device. ``LayerSteps`` are the calls of one
layer; views, plans and kernels are kept for each number of rows, so that a step which is not captured launches, too,
what an earlier one made ready.

A kernel of a step (``device/append.py``) packs the blocks that were full before it, then stores the new tokens. An
engine's block is packed in the step that fills it. So each layer launches that kernel twice:

    store    counters under which no block is full: tokens -> sinks, ring
    pack     counters under which the block that ends in this step is full: ring -> its page; the same tokens go to the
             same places again. Rows without such a block have no room (limit 0), so nothing is done for them

Where there are no kernels, ``append_static`` does both, with the same bytes.
"""

from dataclasses import dataclass

import torch

from lowbit_attn import dispatch
from lowbit_attn.cache.backend import BACKENDS
from lowbit_attn.cache.held import HeldCache
from lowbit_attn.cache.view import COUNTERS
from lowbit_attn.formats import Format
from lowbit_attn.paged import PAGE, PagedStore, Step, counters
from lowbit_attn.paged_static import append_static, ended_blocks
from lowbit_attn.reference import Attention

MOVED = (*COUNTERS, "ring_start", "limit")  # what a step's kernel reads of a row, and moves
NEVER = 1 << 30  # packed tokens behind which no block is ever full
ALIGN = 32  # rows of a counter's memory: kernels take addresses of 128 bytes


class StepBuffers:
    """What a step's layers read, int32 at addresses that stay, for up to ``rows`` rows.

    format, sinks: of the layers' stores, which are alike. null_pages, rank, world: as in PagedStore.
    """

    def __init__(self, format: Format, sinks: int, layers: int, rows: int, device: torch.device, null_pages: int = 1,
                 rank: int = 0, world: int = 1):
        self.format, self.sinks, self.null_pages, self.rows = format, sinks, null_pages, rows
        self.rank, self.world = rank, world
        self.names = COUNTERS if world == 1 else (*COUNTERS, "ring_start")  # that attention reads
        held = -(-rows // ALIGN) * ALIGN

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        with torch.inference_mode(False):  # written in either mode
            self.read, self.moved = zeros(len(self.names), held), zeros(layers, 2, len(MOVED), held)
            self.faults, self.arrivals = zeros(held + 1), zeros(held)  # marks of rows without room say nothing here

    def fill(self, step: Step) -> None:
        """Enter a step, whose ring rows are not read. Rows without new tokens or pages are padding."""
        rows = len(step.seq_lens)
        counts, before = counters(self, step), step.seq_lens - step.q_lens
        self.read[:, :rows] = torch.stack([counts[name] for name in self.names])
        is_stored = (step.q_lens > 0) & (step.table[:, 0] >= self.null_pages)
        last, _, ends = ended_blocks(self, step, before)
        zero, first, own = torch.zeros_like(before), last * PAGE, last // self.world * PAGE
        never = zero + NEVER
        store = dict(n_sink=zero, n_qk=never, n_qv=never, n_tok=before, ring_start=never,
                     limit=torch.where(is_stored, step.seq_lens, 0))
        pack = dict(n_sink=before - step.seq_lens + self.sinks, n_qk=own, n_qv=own, n_tok=before, ring_start=first,
                    limit=torch.where(ends, step.seq_lens, 0))
        both = torch.stack([torch.stack([some[name].int() for name in MOVED]) for some in (store, pack)])
        self.moved[..., :rows] = both

    def counts(self, rows: int) -> dict[str, torch.Tensor]:
        """Counters of the first rows for attention."""
        return dict(zip(self.names, self.read[:, :rows]))

    def state(self, layer: int, launch: int, rows: int) -> dict[str, torch.Tensor]:
        """What launch 0 (store) or 1 (pack) of a layer reads, and moves, of the first rows."""
        return dict(zip(MOVED, self.moved[layer, launch, :, :rows])) | dict(faults=self.faults,
                                                                           arrivals=self.arrivals[:rows])


@dataclass(frozen=True)
class Views:
    """The store as the kernels of a layer take it, for a number of rows."""

    step: Step  # what they were made of
    read: HeldCache
    stored: HeldCache
    packed: HeldCache

    def serve(self, step: Step) -> bool:
        """Whether a step's table and ring rows are the memory that these views name."""
        return all(mine.data_ptr() == other.data_ptr() and mine.shape == other.shape for mine, other in
                   ((self.step.table, step.table), (self.step.ring_rows, step.ring_rows)))


class LayerSteps:
    """One layer's calls in steps of ``q_len`` new tokens in every row but padded ones, at most ``store.max_q_len``.

    buffers: filled for the step; layer: this one's number there. Tables and ring rows of steps are contiguous; row r's
    tokens are r * q_len and those behind it. Raises NotImplementedError for a store that no kernel on its device
    serves, when it is made.
    """

    def __init__(self, store: PagedStore, buffers: StepBuffers, layer: int):
        self.store, self.buffers, self.layer = store, buffers, layer
        self.backend, self.views, self.is_ready = BACKENDS[store.pool.device.type], {}, False

    def append(self, step: Step, k: torch.Tensor, v: torch.Tensor, q_len: int) -> None:
        """Store new tokens k, v [rows x q_len, num_heads_kv, head_dim] and pack the blocks that end inside the step:
        the bytes of ``paged.append``, but that null pages and the null ring may hold anything."""
        if self.backend.append is None:
            append_static(self.store, step, k, v, q_len)
            return
        if self.store.attached is not None:
            k = self.store.attached.keys(k, self.store.dtype)
        k, v = (x.to(self.store.dtype).unflatten(0, (-1, q_len)).contiguous() for x in (k, v))
        views = self._views(step)
        for cache in (views.stored, views.packed):
            self.backend.append(cache, cache.rows, cache.ring_rows, k, v)

    def attention(self, step: Step, q: torch.Tensor, out: torch.Tensor, options: Attention, q_len: int,
                  lse: torch.Tensor | None = None) -> None:
        """Attention of q [rows x q_len, num_heads, head_dim], causal within each row, into ``out`` of its shape, and
        lse fp32 [rows, num_heads, q_len] where there is one. Of several ranks: to the tokens of this one."""
        cache, q, out = self._views(step).read, q.unflatten(0, (-1, q_len)), out.unflatten(0, (-1, q_len))
        plan = dispatch.planned(q, cache, (options.softmax_scale, options.softcap, None, False, None, None, False))
        if plan is not None:
            plan.run(q, out, lse, options.sink_logits)
            return
        lse = q.new_empty(len(q), q.shape[2], q_len, dtype=torch.float32) if lse is None else lse
        dispatch.decode(q, cache, out, lse, options, None, None)

    def _views(self, step: Step) -> Views:
        rows = len(step.seq_lens)
        found = self.views.get(rows)
        if found is None or not found.serve(step):
            found = self.views[rows] = self._made(step, rows)
        return found

    def _made(self, step: Step, rows: int) -> Views:
        if not (step.table.is_contiguous() and step.ring_rows.is_contiguous()):
            raise ValueError(f"step: got a table of strides {step.table.stride()} and ring rows of "
                             f"{step.ring_rows.stride()}, supported: contiguous ones")
        caches = [self.store.view(step, self.buffers.counts(rows))]
        caches += [self.store.view(step, self.buffers.state(self.layer, launch, rows), window_k=0, window_v=0)
                   for launch in range(2)]
        if not self.is_ready:
            self.backend.prepare(caches[0])
            self.is_ready = True
        return Views(step, *caches)
