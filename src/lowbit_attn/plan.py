"""Decode calls made ready: what a call on one cache, of one shape and one set of options, repeats at every step.

A decode step is short (tens of microseconds), so its host side must be shorter: views, kernel handles, scalars and
scratch are made once and kept with the cache; a call then allocates its outputs and launches one kernel.
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
_made_of_step = attrgetter(*STEP_STATE, "strides", "format", "query_weights")
ACCESS_BYTES = 16  # of the kernels' widest loads
GRAPH_COUNTERS = 1 << 18  # a device: 512 captured calls of 64 sequences and 8 KV heads; 1 MiB

_NO_SINK_LOGIT: dict[torch.device, torch.Tensor] = {}
_FREE_COUNTERS: dict[torch.device, torch.Tensor] = {}
_STOCK = Lock()


def no_sink_logit(device: torch.device) -> torch.Tensor:
    """A sink logit of -inf for every head: fp32 [1]. Kept for good, since captured graphs outlive plans."""
    if device not in _NO_SINK_LOGIT:
        if is_capturing(device):
            return torch.full((1,), -torch.inf, device=device)
        # a copy from the host is complete when it returns, so that any stream may read it
        _NO_SINK_LOGIT[device] = torch.tensor([-torch.inf], device=device)
    return _NO_SINK_LOGIT[device]


def prepare(device: torch.device) -> None:
    """Make what calls on a device share for good; waits for it, so a cache does it when it is made."""
    if not is_capturing(device):
        no_sink_logit(device)
        with _STOCK:
            if device not in _FREE_COUNTERS:
                _FREE_COUNTERS[device] = torch.zeros(GRAPH_COUNTERS, dtype=torch.int32).to(device)


def counters(count: int, device: torch.device) -> torch.Tensor:
    """``count`` zeros, int32, which every call leaves as zeros.

    A captured call's are its own for good, since its graph may run at any time; they come from the stock that
    ``prepare`` made. A graph beyond the stock sets its own to zero, in a launch more a call.
    """
    if is_capturing(device):
        with _STOCK:
            free = _FREE_COUNTERS.get(device)
            if free is not None and len(free) >= count:
                _FREE_COUNTERS[device] = free[count:]
                return free[:count]
    return torch.zeros(count, dtype=torch.int32, device=device)


class Scratch(NamedTuple):
    """What the splits of one call leave for the one that ends last, as the kernel takes it: partial results (o [splits,
    batch, q_len, num_heads, head_dim] and lse [splits, batch, q_len, num_heads], fp32) and ``counters`` of arrivals."""

    o: object
    lse: object
    arrivals: object


class DecodePlan:
    """One decode call on one cache, but for its queries and outputs.

    Args:
        cache: the cache, or anything with its public state.
        q: queries of the shape, dtype and device that calls will bring.
        decode: the loaded kernel.
        splits: CTAs that share one sequence's tokens.
        places: blocks of query rows, over KV heads and sequences, whose splits are merged.
        scalars: the decode kernel's plain arguments after its tensors.
        pool: the pool's records as the kernel takes them.
    """

    def __init__(self, cache, q: torch.Tensor, decode: Callable, splits: int, places: int, scalars: tuple,
                 pool: torch.Tensor):
        batch, q_len, num_heads, _ = self.shape = tuple(q.shape)
        self.made_of = _made_of(cache)
        self.device, self.q_dtype, self.dtype = q.device, q.dtype, cache.dtype
        self.is_cuda, self.index = q.device.type == "cuda", q.device.index
        self.decode, self.splits, self.places, self.scalars = decode, splits, places, scalars
        state = (cache.n_sink, cache.n_qk, cache.n_qv, cache.n_tok, cache.sink_k, cache.sink_v, cache.ring_k,
                 cache.ring_v)
        self.tensors = tuple(loader.argument(x) for x in (pool, cache.table.view(-1), *(x[:batch] for x in state)))
        self.no_sink_logit = loader.argument(no_sink_logit(q.device))
        # what outputs look like, to allocate by the cheapest call there is
        self.o_like = torch.empty(self.shape, dtype=self.dtype, device=q.device)
        self.lse_like = torch.empty(batch, num_heads, q_len, dtype=torch.float32, device=q.device)
        self.scratch: dict[int, Scratch] = {}

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
        o = torch.empty_like(self.o_like) if out is None else _target(out, self.o_like)
        logsumexp = torch.empty_like(self.lse_like) if lse is None else _target(lse, self.lse_like)
        sink_logits = self.no_sink_logit if sink_logits is None else sink_logits.contiguous()
        scratch = self._scratch()
        self.decode(q, *self.tensors, scratch.o, scratch.lse, o, logsumexp, sink_logits, scratch.arrivals,
                    *self.scalars)
        if out is None and lse is None and self.q_dtype is self.dtype:
            return o, logsumexp
        return _result(o, out, self.q_dtype), _result(logsumexp, lse, torch.float32)

    def _scratch(self) -> Scratch:
        """Scratch of the current stream; in a captured step new memory, which belongs to that graph."""
        stream = 0
        if self.is_cuda:
            if torch._C._cuda_isCurrentStreamCapturing():  # what is_capturing asks, without its calls
                return self._allocate()
            stream = torch._C._cuda_getCurrentRawStream(self.index)
        scratch = self.scratch.get(stream)
        if scratch is None:
            scratch = self.scratch[stream] = self._allocate()
        return scratch

    def _allocate(self) -> Scratch:
        o = torch.empty(self.splits, *self.shape, dtype=torch.float32, device=self.device)
        lse = torch.empty(self.splits, *self.shape[:3], dtype=torch.float32, device=self.device)
        arrivals = (counters(self.places, self.device) if self.splits > 1
                    else torch.empty(1, dtype=torch.int32, device=self.device))  # not used
        return Scratch(*(loader.argument(x) for x in (o, lse, arrivals)))


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
        tensors += () if cache.query_weights is None else (cache.query_weights,)
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


def _target(given: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Where the kernel writes: the caller's buffer, if it has dtype, layout and alignment, or new memory."""
    if (given is not None and given.dtype == like.dtype and given.is_contiguous()
            and given.data_ptr() % ACCESS_BYTES == 0):
        return given
    return torch.empty_like(like)


def _result(written: torch.Tensor, given: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """What the kernel wrote, as the caller gets it."""
    if given is None:
        return written if written.dtype == dtype else written.to(dtype)
    if given is not written:
        given.copy_(written)
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
