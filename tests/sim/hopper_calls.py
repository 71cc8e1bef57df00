"""Calls of Hopper's decode kernels as dispatch makes them, with the kernels' PTX run on the CPU: for tests."""

import math
import struct
from functools import cache

import numpy as np
import torch

from lowbit_attn import dispatch, hopper, kernels, testing
from lowbit_attn.hopper import EMPTY
from lowbit_attn.hopper.common import tuning as sizes
from lowbit_attn.kernels import KernelKey
from lowbit_attn.reference import Attention
from lowbit_attn.testing import Case
from sim.ptx import program as ptx

COUNTS = ("global", "add")  # the atomics of decode in global memory: relaxed, on the GPU, where nothing else is said


@cache
def compiled(key: KernelKey, scratch) -> tuple[str, object]:
    """(PTX, configuration) of a decode kernel; scratch: a folder for what the compiler leaves."""
    traced = kernels.trace(key)
    return ptx_of(traced, key.target, scratch), traced.entry.cfg


def ptx_of(traced: kernels.CuteKernel, target: str, scratch) -> str:
    """PTX of a kernel's program."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    options = f"--enable-tvm-ffi --gpu-arch {target} --keep-ptx --dump-dir {scratch}"
    made = cute.compile(traced.entry, *traced.arguments, make_fake_stream(use_tvm_ffi_env_stream=True), options=options)
    text = made.artifacts.PTX
    return text if isinstance(text, str) else text.decode()


def scatter(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Row b of x as row rows[b]."""
    found = torch.empty_like(x)
    found[rows.long()] = x
    return found


def spread(x: torch.Tensor) -> torch.Tensor:
    """Tokens [rows, heads, slots, head_dim] with something between the heads."""
    between = torch.nan if x.dtype.is_floating_point else 0
    found = torch.full((x.shape[0], x.shape[1] + 1, *x.shape[2:]), between, dtype=x.dtype)
    found[:, : x.shape[1]] = x
    return found[:, : x.shape[1]]


def divisor(n: int) -> list[bytes]:
    """A FastDivmodDivisorV2 argument: x // n is (t + ((x - t) >> first)) >> second with t = x * multiplier >> 32."""
    bits = (n - 1).bit_length()
    multiplier = (1 << 32) * ((1 << bits) - n) // n + 1
    return [struct.pack("<iIBBxx", n, multiplier, min(bits, 1), max(bits - 1, 0)), struct.pack("<i", n)]


class Call:
    """One call of a kernel as dispatch makes it, on the CPU."""

    def __init__(self, cfg, problem: testing.Problem, options: Attention, places: int | None, splits: int,
                 in_clusters: bool = False, scattered: bool = False, others: dict[int, int] | None = None):
        """places: of scratch; None: one for each block of query rows. in_clusters: a block's splits are a cluster.
        others: rows of the cache that batch rows read in place of their own.
        scattered: rows of counters and table, and those of sinks and rings, are in orders of their own, the latter
        apart from each other."""
        cache, q = problem.cache, problem.q.to(problem.cache.dtype)
        batch, q_len, heads, head_dim = q.shape
        self.ratio = heads // cache.num_heads_kv
        self.row_blocks = -(-self.ratio * q_len // cfg.rows)
        self.grid = (cache.num_heads_kv * self.row_blocks, batch, splits)
        sink_logits = torch.full((1,), -torch.inf) if options.sink_logits is None else options.sink_logits
        scratch = hopper.scratch(q.shape, cfg.rows, self.grid[0] * batch, splits)
        if places is not None:
            scratch = hopper.even_scratch(q.shape, cfg.rows, places)
        if in_clusters:
            scratch = hopper.cluster_scratch(splits)
        self.header = scratch.header
        self.scratch = torch.full((scratch.header + math.prod(scratch.shapes[0]),), EMPTY, dtype=torch.int32)
        partials = self.scratch[scratch.header:].view(scratch.shapes[0])
        self.results = [torch.full_like(q, torch.nan), torch.full((batch, heads, q_len), torch.nan)]
        reads_v_counts = getattr(cfg, "has_mixed", not getattr(cfg, "has_books", False))
        names = ["table", "n_sink", "n_qk", *["n_qv"] * reads_v_counts, "n_tok", "ring_start"]
        rows, ring_rows = cache.batch_rows(batch)
        for at, row in (others or {}).items():
            rows[at] = row
        state = [getattr(cache, name) for name in names]
        tokens = [cache.sink_k, cache.sink_v, cache.ring_k, cache.ring_v]
        if scattered:
            rows, ring_rows = (torch.roll(rows, shift) for shift in (1, 2))
            state = [scatter(x, rows) for x in state]
            tokens = [spread(scatter(x, ring_rows)) for x in tokens]
        planes = [] if cache.attached is None else [x.view(torch.int32) for x in cache.attached.planes]
        planes += [cache.hidden] if getattr(cache, "hidden", None) is not None else []
        tensors = [q, rows, ring_rows, dispatch._part(cache, "k"), state[0].view(-1), *state[1:], *tokens, *planes,
                   partials, *self.results, sink_logits]
        whole = {id(partials): self.scratch} | {id(x): x if x._base is None else x._base for x in tokens}
        self.memory = ptx.GlobalMemory([whole.get(id(x), x) for x in tensors])
        sizes = [3, 1, 1, 1, 1, *[1] * len(state[1:]), *[3] * 4, *[1] * len(planes), 3, 3, 3, 1]  # that vary
        strides = [2, 0, 0, 0, 0, *[0] * len(state[1:]), *[2] * 4, *[0] * len(planes), 2, 2, 2, 0]
        given = [self.memory.parameter(i, x.shape[:count], x.stride()[:apart], 4 * self.header * (x is partials))
                 for i, (x, count, apart) in enumerate(zip(tensors, sizes, strides))]
        memory, books, results = given[: -4 - len(planes)], given[-4 - len(planes) : -4], given[-4:]
        self.tensors = memory + packed("i", *cache.strides) + books + results
        self.count = len(given)
        self.policies: set[int] = set()  # of L2, of all CTAs' bulk copies
        self.scale = (head_dim**-0.5 if options.softmax_scale is None else options.softmax_scale) * dispatch.LOG2_E

    def found(self) -> tuple[torch.Tensor, torch.Tensor]:
        last = self.count - 1
        assert (self.memory.tensor(last - 3, self.scratch)[self.header:] == EMPTY).all()  # ready for the next call
        return self.memory.tensor(last - 2, self.results[0]), self.memory.tensor(last - 1, self.results[1])

    def counted(self) -> torch.Tensor:
        """Pages that each group of CTAs has told."""
        lines = self.memory.tensor(self.count - 4, self.scratch)[: self.header].view(-1, sizes.LINE_WORDS)
        assert (lines[:, 1:] == EMPTY).all()
        return lines[:, 0].flip(0) - EMPTY  # group 0 is next to the cells


def packed(kind: str, *values) -> list[bytes]:
    return [struct.pack("<" + kind, x) for x in values]


def decode(program, cfg, problem: testing.Problem, options: Attention, splits: int, reverse: bool = False,
           in_clusters: bool = False, scattered: bool = False, others: dict[int, int] | None = None):
    """What dispatch does, on the CPU: (o, lse)."""
    return run(program, cfg, problem, options, splits, reverse, in_clusters, scattered, others).found()


def run(program, cfg, problem: testing.Problem, options: Attention, splits: int, reverse: bool,
        in_clusters: bool = False, scattered: bool = False, others: dict[int, int] | None = None,
        sees_races: bool = False) -> Call:
    """A call that has ended. The splits of a row block run at once.

    reverse: the last CTA and the last warp have the first turn; sees_races: between the warps of a CTA.
    """
    call = Call(cfg, problem, options, None, splits, in_clusters, scattered, others)
    cap = (options.softcap or 0.0) * dispatch.LOG2_E
    is_tile = not hasattr(cfg, "arithmetic")
    caps = (cap,) if is_tile else (2 * dispatch.LOG2_E / cap if cap else 0.0, 2 * cap)
    parameters = call.tensors + packed("f", call.scale, *caps)
    parameters += packed("i", *dispatch.windows_of(problem.cache, options))
    if is_tile:
        parameters += packed("i", call.ratio, call.row_blocks)
    else:
        parameters += [argument for n in (call.ratio, call.row_blocks, splits) for argument in divisor(n)]
    for x, y in np.ndindex(call.grid[:2]):
        ctas = [ptx.Cta(program, parameters, call.memory.memory, (x, y, z), call.grid, COUNTS) for z in range(splits)]
        for cta in ctas:
            cta.cluster = ctas if in_clusters else []
            if sees_races:
                cta.look_for_races(cfg.threads)
        ptx.run_grid(ctas[:: -1 if reverse else 1], cfg.threads, reverse)
        call.policies |= set().union(*(cta.policies for cta in ctas))
    return call


def decode_stream(program, cfg, problem: testing.Problem, options: Attention, ctas: int, reverse: bool = False,
                  scattered: bool = False):
    """``decode`` on the stream path."""
    return run_stream(program, cfg, problem, options, ctas, reverse, scattered).found()


def run_stream(program, cfg, problem: testing.Problem, options: Attention, ctas: int, reverse: bool = False,
               scattered: bool = False) -> Call:
    """``run`` of the stream path, whose CTAs all run at once."""
    call = Call(cfg, problem, options, ctas, 1, scattered=scattered)
    parameters = call.tensors + packed("f", call.scale) + packed("i", call.grid[0])
    parameters += [argument for n in (call.ratio, call.row_blocks, ctas) for argument in divisor(n)]
    running = [ptx.Cta(program, parameters, call.memory.memory, (x, 0, 0), (ctas, 1, 1), COUNTS) for x in range(ctas)]
    ptx.run_grid(running[:: -1 if reverse else 1], cfg.threads, reverse)
    call.policies = set().union(*(cta.policies for cta in running))
    return call


def key_of(case: Case, options: Attention, path: str = "integer", rows: int = 4) -> KernelKey:
    features = tuple(name for name in kernels.FEATURES if getattr(options, name) is not None)
    return kernels.decode_key("hopper", "sm_90a", str(case.dtype).removeprefix("torch."), case.head_dim,
                     str(case.format), path, rows, features=features)
