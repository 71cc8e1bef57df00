"""Attention of a prompt's chunk over a ``PagedStore`` by a kernel for 16-bit tokens, as engines have it.

The chunk attends to itself, then to what came before it, dequantized a run of pages at a time; parts are merged by lse.
"""

from collections.abc import Callable

import torch

from lowbit_attn.cache.backend import backend_of
from lowbit_attn.paged import PAGE, PagedStore, Step, counters
from lowbit_attn.reference import Attention

RUN = 128  # pages dequantized at once: of 8 KV heads of 128 channels 134 MB in fp32, both sides
# (q [n, num_heads, head_dim], k, v [m, num_heads_kv, head_dim], options without sink_logits, whether query i sees the
# first m - n + i + 1 tokens only, else all) -> o of q's shape, lse fp32 [num_heads, n], natural log
Dense = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Attention, bool], tuple[torch.Tensor, torch.Tensor]]


def chunk(store: PagedStore, step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, before: torch.Tensor,
          options: Attention, dense: Dense) -> tuple[torch.Tensor, torch.Tensor]:
    """One row's chunk: q [tokens, num_heads, head_dim], k and v its own tokens -> o fp32 of q's shape and lse fp32
    [num_heads, tokens]; before: the row's rings [1, 2, num_heads_kv, sinks + slots, head_dim] as ``append`` found
    them."""
    plain = Attention(options.softmax_scale, options.softcap)
    o, lse = dense(q, k.to(q.dtype), v.to(q.dtype), plain, True)
    o = o.float()
    if int(step.seq_lens[0]) > len(q):
        lse = before_chunk(store, step, q, before, plain, dense, o, lse)
    if options.sink_logits is not None:
        both = torch.logaddexp(lse, options.sink_logits[:, None].float())
        o *= (lse - both).exp().T[..., None]
        lse = both
    return o, lse


def before_chunk(store: PagedStore, step: Step, q: torch.Tensor, before: torch.Tensor, options: Attention,
                 dense: Dense, o: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Attention of one row's chunk q to what was stored before it, merged into o fp32 of q's shape, in place, and lse
    fp32 [num_heads, tokens]; returns the lse of both."""
    stored_q = q if store.attached is None else store.attached.queries(q).to(q.dtype)
    for part in parts(store, step, before[0]):
        more, more_lse = dense(stored_q, *(x.to(q.dtype) for x in part), options, False)
        lse = merge(o, lse, more, more_lse)
    return lse


def parts(store: PagedStore, step: Step, ring: torch.Tensor):
    """K and V [tokens, num_heads_kv, head_dim] of a row's tokens before the step, as they are stored, a run of pages at
    a time; what is in 16 bit, and K whose V is, comes last."""
    view = store.view(step, counters(store, step, is_after=False))
    n_qk, n_qv, n_tok, start, held = (int(x[0]) for x in (view.n_qk, view.n_qv, view.n_tok, view.ring_start,
                                                          view.n_sink))
    read = backend_of(view).read_pages

    def pages(first: int, last: int):
        return [x.transpose(1, 2).flatten(0, 1) for x in read(view, step.table[0, first:last])]

    for first in range(0, n_qv // PAGE, RUN):
        yield pages(first, min(first + RUN, n_qv // PAGE))
    sides = []
    for side, packed in enumerate((n_qk, n_qv)):
        slots = torch.arange(start - n_qk + packed, n_tok - held, device=ring.device) % store.slots + store.sinks
        sinks, rest = (ring[side][:, some].transpose(0, 1).float() for some in (slice(held), slots))
        between = [pages(n_qv // PAGE, packed // PAGE)[side]] if packed > n_qv else []
        sides.append(torch.cat((sinks, *between, rest)))
    if len(sides[0]):
        yield sides


def merge(o: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> torch.Tensor:
    """Attention to other tokens into o fp32 [tokens, num_heads, head_dim], in place; returns the lse of both."""
    both = torch.logaddexp(lse, more_lse)
    o.lerp_(more.float(), (more_lse - both).exp().T[..., None])
    return both
