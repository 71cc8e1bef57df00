"""Calls of Ampere's decode kernels as dispatch makes them, with the kernels' PTX run on the CPU: for tests."""

import struct

import numpy as np
import torch

from lowbit_attn import dispatch, kernels, testing
from lowbit_attn.formats import FORMATS
from lowbit_attn.kernels import KernelKey
from lowbit_attn.reference import Attention
from lowbit_attn.testing import Case
from sim.ptx import build
from sim.ptx import program as ptx

PLANES = ("k_book", "v_book", "k_channels")
TOKENS = ("sink_k", "sink_v", "ring_k", "ring_v")
COUNTS = ("gpu", "acq_rel", "add")  # the atomics of decode, in global memory


def key_of(case: Case, options: Attention = Attention(), path: str = "codebook", rows: int = 8,
           target: str = "sm_90", sizes: str = "") -> KernelKey:
    features = tuple(name for name in kernels.FEATURES if getattr(options, name) is not None)
    return kernels.decode_key("ampere", target, str(case.dtype).removeprefix("torch."), case.head_dim,
                              str(case.format), path, rows, features, sizes)


def decode(key: KernelKey, problem: testing.Problem, options: Attention = Attention(), splits: int = 1,
           reverse: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of a call: its blocks one after the other; reverse: the last block, and its last warp, first."""
    from lowbit_attn.ampere.config import decode_config

    config = decode_config(FORMATS[key.format], key.head_dim, key.dtype, key.sizes or key.target,
                           kernels.path_name(key), key.rows, key.features)
    cache, q = problem.cache, problem.q.to(problem.cache.dtype)
    batch, q_len, heads, head_dim = q.shape
    row_blocks = -(-(heads // cache.num_heads_kv * q_len) // key.rows)
    grid = (cache.num_heads_kv * row_blocks, batch, splits)
    rows, ring_rows = cache.batch_rows(batch)
    sink_logits = torch.full((1,), -torch.inf) if options.sink_logits is None else options.sink_logits
    tensors = {
        "q": q, "batch_rows": rows, "ring_rows": ring_rows, "pool": dispatch._part(cache, "k"),
        "table": cache.table.view(-1), "arrivals": torch.zeros(grid[0] * batch, dtype=torch.int32),
        **{name: getattr(cache, name) for name in ("n_sink", "n_qk", "n_qv", "n_tok", "ring_start", *TOKENS)},
        "o_partial": torch.full((splits, *q.shape), torch.nan), "sink_logits": sink_logits,
        "lse_partial": torch.full((splits, *q.shape[:-1]), torch.nan), "out": torch.full_like(q, torch.nan),
        "lse": torch.full((batch, heads, q_len), torch.nan)}
    if cache.attached is not None:
        tensors |= dict(zip(PLANES, (x.view(torch.int32) for x in cache.attached.planes)))
    if getattr(cache, "hidden", None) is not None:
        tensors["hidden"] = cache.hidden
    memory = ptx.GlobalMemory(list(tensors.values()))
    starts = dict(zip(tensors, memory.starts))
    scale = head_dim**-0.5 if options.softmax_scale is None else options.softmax_scale
    window, sink_window = dispatch.windows_of(cache, options)
    numbers = {
        "batch": batch, "q_len": q_len, "num_heads": heads, "num_heads_kv": cache.num_heads_kv, "num_splits": splits,
        "logits": len(sink_logits), "seqs": len(cache.n_tok), "rings": len(cache.ring_k),
        "sinks": cache.sink_k.shape[2],
        "slots_k": cache.ring_k.shape[2], "slots_v": cache.ring_v.shape[2],
        "softmax_scale_log2": scale * dispatch.LOG2_E, "softcap_log2": (options.softcap or 0.0) * dispatch.LOG2_E,
        "window": window, "sink_window": sink_window,
        **dict(zip(("page_stride", "head_stride", "table_b", "table_h"), cache.strides)),
        **{f"{name}_{axis}": getattr(cache, name).stride(i) for name in TOKENS
           for i, axis in enumerate(("row", "head"))}}
    kinds = {"int": "<i", "int64_t": "<q", "float": "<f"}
    parameters = [struct.pack("<Q", ptx.GLOBAL_BASE + starts[name]) if kind == "*" else
                  struct.pack(kinds[kind], numbers[name]) for kind, name in build.parameters(key)]
    blocks = [(x, y, z) for z, y, x in np.ndindex(grid[::-1])]
    for block in blocks[:: -1 if reverse else 1]:  # of a split all before those of the next
        # the compiler moves what a branch does to arrays out of it, and drops it behind
        cta = ptx.Cta(build.program(key), parameters, memory.memory, block, grid, COUNTS, has_poison=True)
        ptx.run_grid([cta], config.threads, reverse)
    found = dict(zip(tensors, (memory.tensor(i, x) for i, x in enumerate(tensors.values()))))
    assert not found["arrivals"].any()  # ready for the next call
    return found["out"], found["lse"]
