"""Decode calls made ready: what a call on one cache, of one shape and one set of options, repeats at every step.

A decode step is short (tens of microseconds), so its host side must be shorter: views, kernel handles, scalars and
scratch are made once and kept with the cache; a call then allocates its outputs and launches one kernel.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from operator import attrgetter, is_, mul

import torch

from lowbit_attn import _private, loader
from lowbit_attn.cache.view import OPTIONAL_FIELDS, STATE, STEP_FIELDS, optional
from lowbit_attn.kernels.key import Scratch
from lowbit_attn.scratch import no_sink_logit, partials, words

# What a plan is made of: it serves a cache as long as these are the same objects. DecodePlan.serves lists them again.
_made_of = attrgetter(*STATE, "strides", "format")
ACCESS_BYTES = 16  # of the kernels' widest loads
_EMPTY = {kind: _private.empty_strided(kind) for kind in ("cpu", "cuda")}


class Buffer:
    """A dense, aligned tensor that a kernel takes at every call: new, or the caller's if that is like it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self.shape, self.dtype, self.device = shape, dtype, device
        strides = tuple(accumulate(shape[:0:-1], mul, initial=1))[::-1]
        self.new = partial(_EMPTY[device.type], shape, strides, dtype)  # on the current device

    def is_like(self, x) -> bool:
        return (isinstance(x, torch.Tensor) and x.dtype is self.dtype and x.shape == self.shape and x.is_contiguous()
                and x.device == self.device and not x.data_ptr() % ACCESS_BYTES and not x.requires_grad)


class DecodePlan:
    """One decode call on one cache, but for its queries and outputs.

    Args:
        cache: the cache, or anything with its public state.
        q: queries of the shape, dtype and device that calls will bring.
        decode: the loaded kernel.
        scratch: what its CTAs exchange.
        scalars: the decode kernel's plain arguments after its tensors.
        pool: the pool's records as the kernel takes them.
    """

    def __init__(self, cache, q: torch.Tensor, decode: Callable, scratch: Scratch, scalars: tuple, pool: torch.Tensor):
        batch, q_len, num_heads, _ = self.shape = tuple(q.shape)
        self.made_of = _made_of(cache)
        self.device, self.q_dtype, self.dtype = q.device, q.dtype, cache.dtype
        self.is_exact = q.dtype == cache.dtype
        self.is_cuda, self.index = q.device.type == "cuda", q.device.index
        self.decode, self.scratch, self.scalars = decode, scratch, scalars
        self.rows = tuple(map(loader.argument, cache.batch_rows(batch)))
        state = dict(zip(STATE, self.made_of)) | {"pool": pool, "table": cache.table.view(-1)}
        self.optional = optional(cache, "decode")
        self.is_pre_rope = cache.attached is not None and cache.attached.is_pre_rope
        self.tensors = tuple(map(loader.argument, (*state.values(), *self.optional)))
        self.no_sink_logit = loader.argument(no_sink_logit(q.device))
        self.o = Buffer(self.shape, self.dtype, q.device)
        self.lse = Buffer((batch, num_heads, q_len), torch.float32, q.device)
        self.sink_logits = Buffer((num_heads,), torch.float32, q.device)
        self.around: dict[int, tuple[tuple, tuple]] = {}
        self.edits: int | None = None  # the cache's, where the kernel was picked for the lengths of then
        # scratch by what it is, for caches whose calls follow each other on one stream; None: of this plan alone
        self.pool: dict | None = getattr(cache, "scratch_pool", None)

    def serves(self, cache) -> bool:
        """Whether the cache's state is still the memory that this plan reads, and its kernel the one to pick."""
        # written out: a third of the time of a loop
        pool, table, n_sink, n_qk, n_qv, n_tok, start, sink_k, sink_v, ring_k, ring_v, strides, format = self.made_of
        return (cache.pool is pool and cache.table is table and cache.n_sink is n_sink and cache.n_qk is n_qk
                and cache.n_qv is n_qv and cache.n_tok is n_tok and cache.ring_start is start
                and cache.sink_k is sink_k and cache.sink_v is sink_v and cache.ring_k is ring_k
                and cache.ring_v is ring_v and cache.strides is strides and cache.format is format
                and (not self.optional or _are(self.optional, optional(cache, "decode")))
                and (self.edits is None or self.edits == cache.edits)
                and not (self.is_pre_rope and cache.first_positions.any()))  # which kernels do not read

    def takes(self, q: torch.Tensor, out, lse, sink_logits) -> bool:
        """Whether ``launch`` takes a call's tensors as they are, which says that they are valid too."""
        # asked of a GPU's tensor, its number takes half the time of its device
        is_here = q.get_device() == self.index if self.is_cuda else q.device == self.device
        return (is_here and self.is_exact and q.is_contiguous() and not q.data_ptr() % ACCESS_BYTES
                and not q.requires_grad and (out is None or self.o.is_like(out))
                and (lse is None or self.lse.is_like(lse))
                and (sink_logits is None or self.sink_logits.is_like(sink_logits)))

    def run(self, q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None,
            sink_logits: torch.Tensor | None, rows: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode on the current stream; returns (out, lse).

        q: the plan's shape, rotated as the cache's keys are. rows: int32 [batch], contiguous; None: the cache's. out
        [batch, q_len, num_heads, head_dim] of q's dtype and lse fp32 [batch, num_heads, q_len]: where results go, in
        any layout; None: new ones.
        """
        o, logsumexp = self.launch(_aligned(q.detach().to(self.dtype)), out if self.o.is_like(out) else None,
                                   lse if self.lse.is_like(lse) else None,
                                   None if sink_logits is None else _aligned(sink_logits.detach()), rows)
        return _result(o, out, self.q_dtype), _result(logsumexp, lse, torch.float32)

    def launch(self, q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None,
               sink_logits: torch.Tensor | None, rows: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """``run`` of tensors that the plan takes."""
        if self.is_cuda and _private.current_device() != self.index:
            with torch.cuda.device(self.device):
                return self.launch(q, out, lse, sink_logits, rows)
        before, after = self._around()
        o = self.o.new() if out is None else out
        logsumexp = self.lse.new() if lse is None else lse
        read = self.rows if rows is None else (rows, rows)
        self.decode(q, *read, *before, o, logsumexp, self.no_sink_logit if sink_logits is None else sink_logits, *after)
        return o, logsumexp

    def _around(self) -> tuple[tuple, tuple]:
        """The kernel's arguments before and after a call's outputs, with scratch of the current stream, or, of a
        captured step, of its capture."""
        stream = 0
        if self.is_cuda:
            if _private.is_stream_capturing():  # what is_capturing asks, without its calls
                return self._allocate()
            stream = _private.raw_stream(self.index)
        around = self.around.get(stream)
        if around is None:
            around = self.around[stream] = self._allocate(stream)
        return around

    def _allocate(self, stream: int | None = None) -> tuple[tuple, tuple]:
        """``_around`` with scratch of a stream, shared with the plans of its pool, or, of a capture, new."""
        found = None if self.pool is None or stream is None else self.pool.get((stream, self.scratch))
        if found is None:
            left = [partials(shape, self.scratch.word, self.device, self.scratch.header)
                    for shape in self.scratch.shapes]
            arrivals = [words(self.scratch.counters, 0, self.device)] * bool(self.scratch.counters)
            found = tuple(map(loader.argument, left)), tuple(map(loader.argument, arrivals))
            if self.pool is not None and stream is not None:
                self.pool[stream, self.scratch] = found
        return (*self.tensors, *found[0]), (*found[1], *self.scalars)


class StepPlan:
    """``KVCache.append`` on one cache, but for its tokens and rows.

    Args:
        cache: the cache, or anything with its public state.
        kernel: the loaded kernel of a step.
        pool: the pool in units of 128 bytes.
    """

    def __init__(self, cache, kernel: Callable, pool: torch.Tensor):
        planes = [field.name for field in OPTIONAL_FIELDS["append"] if hasattr(cache, field.name)]
        self.read = attrgetter(*STEP_FIELDS, "strides", "format", *planes)
        self.made_of, self.kernel = self.read(cache), kernel
        state = dict(zip(STEP_FIELDS, self.made_of)) | {"pool": pool.view(torch.uint32)}
        for name in ("sink_k", "sink_v", "ring_k", "ring_v"):
            check_whole_accesses(name, state[name])
        tensors = (state.pop("pool"), pool.view(torch.uint16), *state.values(), *optional(cache, "append"))
        self.arguments = (*(loader.argument(x) for x in tensors), cache.sinks, cache.window_k, cache.window_v,
                          cache.strides.page, cache.strides.head)

    def serves(self, cache) -> bool:
        """Whether the cache's state is still the memory that this plan writes."""
        return _are(self.read(cache), self.made_of)

    def run(self, rows: torch.Tensor, ring_rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Launch on the current stream. k, v [batch, tokens, num_heads_kv, head_dim]; rows int32 [batch] of counters
        and table, ring_rows int32 [batch] of sinks and rings."""
        self.kernel(_aligned(k), _aligned(v), rows, ring_rows, *self.arguments)


def _are(some: tuple, others: tuple) -> bool:
    """Whether two tuples hold the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


def check_whole_accesses(name: str, x: torch.Tensor) -> None:
    """Raise ValueError unless rows and heads of sinks or of a ring begin where the kernels' widest stores may go."""
    whole = ACCESS_BYTES // x.element_size()
    if x.stride()[2:] != (x.shape[3], 1) or any(stride % whole for stride in x.stride()[:2]) or \
            x.data_ptr() % ACCESS_BYTES:
        raise ValueError(f"{name}: got strides {x.stride()} at address {x.data_ptr():#x}, supported: those of rows and "
                         f"heads multiples of {whole}, tokens of a head next to each other, an address of "
                         f"{ACCESS_BYTES} bytes")


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """A tensor as kernels read it: contiguous, from an address of their widest loads."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ACCESS_BYTES else x


def _result(written: torch.Tensor, given: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """What the kernel wrote, as the caller gets it."""
    if given is None:
        return written if written.dtype == dtype else written.to(dtype)
    if given is not written:
        with torch.no_grad():
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
