"""Launches the kernels of a serving step on a CUDA device; ``paged_reference.TorchOps`` does the same in torch.

A layer launches a handful of them in every step, so the arguments that stay (pool, rings, codebooks, plan buffers) are
converted once a layer.
"""

from collections.abc import Callable
from functools import cached_property

import torch

from lowbit_attn import dispatch, kernels, loader
from lowbit_attn.cache.backend import kernel_entries
from lowbit_attn.cache.held import HeldCache
from lowbit_attn.paged import PagedStore, Step
from lowbit_attn.paged_plan import PlanBuffers
from lowbit_attn.plan import ACCESS_BYTES, check_whole_accesses
from lowbit_attn.scratch import no_sink_logit

ACCESS_HALVES = 8  # of 16 bytes


class KernelOps:
    """The kernels of one layer's steps.

    store: of the layer. view: the store as kernels take it, of any step. Raises NotImplementedError for a store that
    no kernel of its device serves.
    """

    def __init__(self, store: PagedStore, view: HeldCache, buffers: PlanBuffers):
        self.store, self.view, self.buffers = store, view, buffers
        self.target = dispatch.target_of(store.pool.device)[1]
        self.dtype, self.head_dim = str(store.dtype).removeprefix("torch."), store.rings.shape[-1]
        for name in ("sink_k", "sink_v", "ring_k", "ring_v"):
            check_whole_accesses(name, getattr(view, name))

    def append(self, store: PagedStore, buffers: PlanBuffers, step: Step, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store new tokens k, v [tokens, num_heads_kv, head_dim], and pack the blocks that end in the step."""
        kernel, arguments = self._append
        kernel(_rows(k), _rows(v), step.ring_rows, *arguments)

    def copy(self, store: PagedStore, step: Step, items: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
             keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy 16-bit tokens of the step, of sinks and of rings to keys, values [tokens, num_heads_kv, head_dim]."""
        kernel, arguments = self._copy
        kernel(_rows(k), _rows(v), *arguments, step.ring_rows, items, keys, values)

    def fill(self, store: PagedStore, step: Step, items: torch.Tensor, keys: torch.Tensor,
             values: torch.Tensor) -> None:
        """Dequantize pages into keys, values [tokens, num_heads_kv, head_dim], rounded once."""
        kernel, arguments = self._fill
        strides = self.view.strides
        kernel(items, step.table, *arguments, keys, values, strides.page, strides.head)

    def merge(self, out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor,
              sink_logits: torch.Tensor | None = None) -> None:
        """Merge attention to other tokens into out [tokens, num_heads, head_dim] and lse fp32 [num_heads, tokens]."""
        sinks = no_sink_logit(out.device) if sink_logits is None else sink_logits.float()
        self._merge(out, lse, more, more_lse, sinks)

    @cached_property
    def _append(self) -> tuple[Callable, tuple]:
        key = kernels.paged_append_key(self.target, self.dtype, self.head_dim, self.store.format)
        buffers, strides = self.buffers, self.view.strides
        tensors = (buffers.row, buffers.token_row, buffers.token_slot, buffers.items, buffers.count, *self._pool,
                   *self._rings, *self._entries)
        return loader.load(key), (*map(loader.argument, tensors), self.store.sinks, strides.page, strides.head)

    @cached_property
    def _copy(self) -> tuple[Callable, tuple]:
        key = kernels.paged_copy_key(self.target, self.dtype, self.head_dim)
        return loader.load(key), tuple(map(loader.argument, self._rings))

    @cached_property
    def _fill(self) -> tuple[Callable, tuple]:
        key = kernels.paged_fill_key(self.target, self.dtype, self.head_dim, self.store.format)
        return loader.load(key), tuple(map(loader.argument, (*self._pool, *self._entries)))

    @cached_property
    def _merge(self) -> Callable:
        return loader.load(kernels.merge_rows_key(self.target, self.dtype, self.head_dim))

    @property
    def _pool(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.view.units.view(torch.uint32), self.view.units.view(torch.uint16)

    @property
    def _rings(self) -> tuple[torch.Tensor, ...]:
        return self.view.sink_k, self.view.sink_v, self.view.ring_k, self.view.ring_v

    @property
    def _entries(self) -> tuple[torch.Tensor, ...]:
        return tuple(x for side in "kv" for x in kernel_entries(self.view, side))


def launch_plan(buffers: PlanBuffers, step: Step, decode_rows: int, tokens: int) -> None:
    """Launch the plan kernel of a step, whose ring rows are not read."""
    kernel, arguments = _plan_of(buffers)
    where = buffers.layout
    kernel(step.table, step.seq_lens, step.query_start_loc, *arguments, decode_rows, tokens, where.sinks, where.slots,
           where.window_k, where.window_v, where.null_pages, where.rank, where.world)


def _plan_of(buffers: PlanBuffers) -> tuple[Callable, tuple]:
    """The plan kernel and the buffers as it takes them, kept with the buffers."""
    if buffers.launch is None:
        tensors = (buffers.read, buffers.row, buffers.token_row, buffers.token_slot, buffers.items, buffers.count)
        key = kernels.paged_plan_key(dispatch.target_of(buffers.device)[1])
        buffers.launch = loader.load(key), tuple(map(loader.argument, tensors))
    return buffers.launch


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Tokens [tokens, heads, head_dim] as kernels read them: heads of a token next to each other, in whole accesses."""
    is_dense = x.stride()[1:] == (x.shape[2], 1) and not x.stride(0) % ACCESS_HALVES
    return x if is_dense and not x.data_ptr() % ACCESS_BYTES else x.clone(memory_format=torch.contiguous_format)
