"""Decode calls made ready: what a call on one cache, of one shape and one set of options, repeats at every step.

A decode step is short (tens of microseconds), so its host side must be shorter: views, kernel handles, scalars and
scratch are made once and kept with the cache; a call then allocates its outputs and launches two kernels.
"""

from collections.abc import Callable
from operator import attrgetter, is_
from threading import Lock
from typing import NamedTuple

import torch

from lowbit_attn import loader
from lowbit_attn.state import STATE, STEP_STATE, is_capturing

# What a plan is made of: it serves a cache as long as these are the same objects.
_made_of = attrgetter(*STATE, "strides", "format")
_made_of_step = attrgetter(*STEP_STATE, "strides", "format")
ACCESS_BYTES = 16  # of the kernels' widest loads


_NO_SINK_LOGIT: dict[torch.device, torch.Tensor] = {}


def no_sink_logit(device: torch.device) -> torch.Tensor:
    """A sink logit of -inf for every head: fp32 [1]. Kept for good, since captured graphs outlive plans."""
    if device not in _NO_SINK_LOGIT:
        if is_capturing(device):
            return torch.full((1,), -torch.inf, device=device)
        # a copy from the host is complete when it returns, so that any stream may read it
        _NO_SINK_LOGIT[device] = torch.tensor([-torch.inf], device=device)
    return _NO_SINK_LOGIT[device]


class Scratch(NamedTuple):
    """Partial results of one call's splits as the decode kernel takes them (o [splits, batch, q_len, num_heads,
    head_dim], lse [splits, batch, q_len, num_heads], fp32), and the same memory flattened over rows for combine."""

    o: object
    lse: object
    o_rows: object
    lse_rows: object


class DecodePlan:
    """One decode call on one cache, but for its queries and outputs.

    Args:
        cache: the cache, or anything with its public state.
        q: queries of the shape, dtype and device that calls will bring.
        kernels: the loaded decode and combine kernels.
        splits: CTAs that share one sequence's tokens.
        scalars: the decode kernel's plain arguments after its tensors.
        pool: the pool's records as the kernel takes them.
    """

    def __init__(self, cache, q: torch.Tensor, kernels: tuple[Callable, Callable], splits: int, scalars: tuple,
                 pool: torch.Tensor):
        batch, q_len, num_heads, head_dim = self.shape = tuple(q.shape)
        self.made_of = _made_of(cache)
        self.device, self.q_dtype, self.dtype = q.device, q.dtype, cache.dtype
        self.decode, self.combine = kernels
        self.splits, self.scalars, self.heads = splits, scalars, (num_heads, q_len)
        self.rows, self.lse_shape = batch * q_len * num_heads, (batch, num_heads, q_len)
        state = (cache.n_sink, cache.n_qk, cache.n_qv, cache.n_tok, cache.sink_k, cache.sink_v, cache.ring_k,
                 cache.ring_v)
        self.tensors = tuple(loader.argument(x) for x in (pool, cache.table.view(-1), *(x[:batch] for x in state)))
        self.no_sink_logit = loader.argument(no_sink_logit(q.device))
        # what outputs look like, to allocate by the cheapest call there is
        self.o_like = torch.empty(self.rows, head_dim, dtype=self.dtype, device=q.device)
        self.lse_like = torch.empty(self.rows, dtype=torch.float32, device=q.device)
        self.scratch: dict[int, Scratch] = {}
        self.lock = Lock()

    def serves(self, cache) -> bool:
        """Whether the cache's state is still the memory that this plan reads."""
        return all(map(is_, _made_of(cache), self.made_of))

    def run(self, q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None,
            sink_logits: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode on the current stream; returns (out, lse).

        q: the plan's shape, rotated as the cache's keys are. out [batch, q_len, num_heads, head_dim] of q's dtype and
        lse fp32 [batch, num_heads, q_len]: where results go; None: new ones.
        """
        if q.dtype != self.dtype or not q.is_contiguous():
            q = q.to(self.dtype).contiguous()
        rows, lse_rows = _flat(out, self.o_like), _flat(lse, self.lse_like)
        sink_logits = self.no_sink_logit if sink_logits is None else sink_logits.contiguous()
        with self.lock:  # of scratch: the two launches of one thread follow each other on a stream
            scratch = self._scratch()
            self.decode(q, *self.tensors, scratch.o, scratch.lse, *self.scalars)
            self.combine(scratch.o_rows, scratch.lse_rows, rows, lse_rows, sink_logits, *self.heads)
        return _shaped(rows, out, self.shape, self.q_dtype), _shaped(lse_rows, lse, self.lse_shape, torch.float32)

    def _scratch(self) -> Scratch:
        """Scratch of the current stream; in a captured step new memory, which belongs to that graph."""
        if is_capturing(self.device):
            return self._allocate()
        stream = torch._C._cuda_getCurrentRawStream(self.device.index) if self.device.type == "cuda" else 0
        if stream not in self.scratch:
            self.scratch[stream] = self._allocate()
        return self.scratch[stream]

    def _allocate(self) -> Scratch:
        o = torch.empty(self.splits, *self.shape, dtype=torch.float32, device=self.device)
        lse = torch.empty(self.splits, *self.shape[:3], dtype=torch.float32, device=self.device)
        rows = (o.view(self.splits, self.rows, -1), lse.view(self.splits, self.rows))
        return Scratch(*(loader.argument(x) for x in (o, lse, *rows)))


class StepPlan:
    """``KVCache.append`` on one cache, but for its tokens and rows.

    Args:
        cache: the cache, or anything with its public state.
        kernel: the loaded kernel of a step.
        pool: the pool in units of 128 bytes.
    """

    def __init__(self, cache, kernel: Callable, pool: torch.Tensor):
        self.made_of = _made_of_step(cache)
        self.kernel = kernel
        tensors = (cache.sink_k, cache.sink_v, cache.ring_k, cache.ring_v, cache.table, pool.view(torch.uint32),
                   pool.view(torch.uint16), *cache.counters(), cache.limit, cache.faults, cache.arrivals)
        self.arguments = (*(loader.argument(x) for x in tensors), cache.sinks, cache.window_k, cache.window_v,
                          cache.strides.page, cache.strides.head)

    def serves(self, cache) -> bool:
        """Whether the cache's state is still the memory that this plan writes."""
        return all(map(is_, _made_of_step(cache), self.made_of))

    def run(self, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Launch on the current stream. k, v [batch, tokens, num_heads_kv, head_dim]; rows int32 [batch]."""
        self.kernel(_aligned(k), _aligned(v), rows, *self.arguments)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """New tokens as the kernel reads them: contiguous, from an address of its widest loads."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ACCESS_BYTES else x


def _flat(given: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Where combine writes: the caller's buffer, if it has the layout, or new memory; in the shape of ``like``."""
    if given is not None and given.dtype == like.dtype and given.is_contiguous():
        return given.view(like.shape)
    return torch.empty_like(like)


def _shaped(flat: torch.Tensor, given: torch.Tensor | None, shape: tuple, dtype: torch.dtype) -> torch.Tensor:
    """What combine wrote, as the caller gets it."""
    if given is None:
        return flat.view(shape) if flat.dtype == dtype else flat.view(shape).to(dtype)
    if given.data_ptr() != flat.data_ptr():
        given.copy_(flat.view(shape))
    return given


class Plans(dict):
    """Plans of one cache by what distinguishes their calls; a pickled or deeply copied cache starts without any."""

    LIMIT = 64  # calls of more kinds than that start over: scratch of shapes that are not used any more is freed

    def __init__(self, owner: int | None = None):
        super().__init__()
        self.owner = owner  # id of the cache: a shallow copy finds the dict of its original, and makes its own

    def __reduce__(self):
        return Plans, ()

    def keep(self, call: tuple, plan: "DecodePlan | StepPlan", cache) -> None:
        """Add a plan; those of memory that the cache has given up go, and with them that memory."""
        for old in [name for name, kept in self.items() if not kept.serves(cache)]:
            del self[old]
        if len(self) >= self.LIMIT:
            self.clear()
        self[call] = plan


def plans_of(cache) -> Plans:
    """The plans of this cache, kept with it."""
    if getattr(cache, "plans", None) is None or cache.plans.owner != id(cache):
        cache.plans = Plans(id(cache))
    return cache.plans
