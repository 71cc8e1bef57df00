"""Decode over both levels of a LevelCache on the CPU, by the PTX of one launch, or of two and a merge in fp32."""

from types import SimpleNamespace

import torch

from lowbit_attn import dispatch, hopper, kernels, reference
from lowbit_attn.hopper import EMPTY
from lowbit_attn.levels import LevelCache
from lowbit_attn.levels import decode as level_decode
from lowbit_attn.levels.view import views_of
from lowbit_attn.reference import Attention
from sim.hopper_calls import COUNTS, compiled, decode_stream, divisor, packed
from sim.ptx import program as ptx

Result = tuple[torch.Tensor, torch.Tensor]


def cap_parameters(options: Attention) -> list[bytes]:
    """softmax.Limits of a call without windows."""
    cap = (options.softcap or 0.0) * dispatch.LOG2_E
    return packed("f", 2 * dispatch.LOG2_E / cap if cap else 0.0, 2 * cap) + packed("i", 0, 0)


def joined(o: torch.Tensor, lse: torch.Tensor, shape: tuple[int, ...]) -> Result:
    """Results of (sequence, KV head) rows as a call's, o [batch, q_len, num_heads, head_dim]."""
    batch, q_len, heads, head_dim = shape
    o = o.unflatten(0, (batch, -1)).transpose(1, 2).reshape(batch, q_len, heads, head_dim)
    return o, lse.reshape(batch, heads, q_len)


def decode_pair(program, cfg, cache: LevelCache, q: torch.Tensor, options: Attention, ctas: int,
                reverse: bool = False) -> Result:
    """One launch."""
    rows, views = level_decode.level_queries(q, cache.num_heads_kv), views_of(cache)
    batch, q_len, ratio, head_dim = rows.shape
    scratch = hopper.even_scratch(rows.shape, cfg.rows, ctas)
    words = torch.full((scratch.header + torch.Size(scratch.shapes[0]).numel(),), EMPTY, dtype=torch.int32)
    partials = words[scratch.header:].view(scratch.shapes[0])
    results = [torch.full_like(rows, torch.nan), torch.full((batch, ratio, q_len), torch.nan)]
    of_levels = [[view.units.view(torch.int32), view.table.flatten(), view.n_sink, view.n_qk, view.n_tok,
                  view.ring_start, view.sink_k, view.sink_v] for view in views]
    rings = [views[0].ring_k, views[0].ring_v]
    tensors = [rows, views[0].rows[:batch], *of_levels[0], *of_levels[1], *rings, partials, *results,
               torch.full((1,), -torch.inf)]
    memory = ptx.GlobalMemory([words if x is partials else x.contiguous() for x in tensors])
    level, tokens = [((0,), ())] * 6, [((0, 2), (0, 1))] * 2
    kinds = [((0, 1, 2), (0, 1)), ((0,), ()), *(level + tokens) * 2, *tokens, *[((0, 1, 2), (0, 1))] * 3, ((0,), ())]
    given = [memory.parameter(i, tuple(x.shape[j] for j in sizes), tuple(x.contiguous().stride(j) for j in strides),
                              4 * scratch.header * (x is partials))
             for i, (x, (sizes, strides)) in enumerate(zip(tensors, kinds))]
    row_blocks = -(-ratio * q_len // cfg.rows)
    scale = (head_dim**-0.5 if options.softmax_scale is None else options.softmax_scale) * dispatch.LOG2_E
    parameters = [*given[:-4], *packed("i", views[0].table.shape[1]), *given[-4:], *packed("f", scale),
                  *cap_parameters(options), *packed("i", row_blocks),
                  *(x for n in (ratio, row_blocks, ctas) for x in divisor(n))]
    running = [ptx.Cta(program, parameters, memory.memory, (x, 0, 0), (ctas, 1, 1), COUNTS) for x in range(ctas)]
    ptx.run_grid(running[:: -1 if reverse else 1], cfg.threads, reverse)
    at = len(tensors)
    assert (memory.tensor(at - 4, words)[scratch.header:] == EMPTY).all()  # ready for the next call
    return joined(memory.tensor(at - 3, results[0]), memory.tensor(at - 2, results[1]), q.shape)


def decode_twice(cache: LevelCache, q: torch.Tensor, options: Attention, ctas: int, scratch) -> Result:
    """Two launches on the stream path, and their merge in fp32."""
    rows, found = level_decode.level_queries(q, cache.num_heads_kv), []
    for view in views_of(cache):
        key = kernels.decode_key("hopper", "sm_90a", "float16", cache.head_dim, view.format.name, "stream", 4)
        text, cfg = compiled(key, scratch)
        found.append(decode_stream(ptx.Program(text), cfg, SimpleNamespace(cache=view, q=rows), options, ctas))
    o, lse = reference.merge_states(*(torch.stack([x.float() for x in parts]) for parts in zip(*found)))
    return joined(o, lse, q.shape)
