"""Attention of one step over stores whose blocks are dealt to several ranks (decode context parallelism).

Every rank has the queries of its own heads, whose KV heads all of them have. So

    q of all ranks' heads    gathered
    o, lse                   of all heads over the rank's own blocks, and over the ring where it has the open block
    o, lse of all ranks      gathered, and merged by lse for its own heads (flash-decoding's combine)

and a chunk of a prompt attends to itself, with its own heads, beside that. All ranks gather in the same steps.
"""

from collections.abc import Callable

import torch

from lowbit_attn import reference
from lowbit_attn.paged import PagedStore, Step
from lowbit_attn.paged_attention import before_chunk, from_store, part_of
from lowbit_attn.paged_plan import BatchPlan
from lowbit_attn.paged_steps import LayerSteps, Varlen, Workspace
from lowbit_attn.reference import Attention

Gather = Callable[[torch.Tensor], torch.Tensor]  # x, of one shape on all ranks -> [world, *x.shape]


@torch.no_grad()
def attention(store: PagedStore, step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
              before: torch.Tensor | None, out: torch.Tensor, options: Attention, gather: Gather) -> None:
    """As ``paged_attention.attention``, by all ranks together; q, out: of this rank's heads."""
    plain = Attention(options.softmax_scale, options.softcap)  # a logit of the softmax's own counts once
    o, lse = merged(store, *_stored(store, step, all_heads(q, gather), before, plain), gather)
    starts = step.query_start_loc.tolist()
    for first, last in zip(starts, starts[1:]):
        if last - first <= store.max_q_len:
            continue
        chunk, tokens = [x[first:last] for x in (q, k, v)], slice(first, last)
        keys, values = (x.to(store.dtype).transpose(0, 1) for x in chunk[1:])
        own, own_lse = reference.attention(chunk[0], keys, values, plain)
        lse[tokens] = merge(o[tokens], lse[tokens].T, own, own_lse).T
    tokens = slice(starts[-1])
    out[tokens] = with_sinks(o[tokens], lse[tokens], options.sink_logits).to(out.dtype)


@torch.no_grad()
def step_attention(steps: LayerSteps, gather: Gather, plan: BatchPlan, step: Step, q: torch.Tensor, k: torch.Tensor,
                   v: torch.Tensor, out: torch.Tensor, options: Attention, places: list[Workspace],
                   varlen: Varlen | None) -> None:
    """As ``LayerSteps.attention``, by all ranks together; q, out: of this rank's heads.

    Nothing is read by the host, so a step without chunks can be captured where ``gather`` can. NotImplementedError for
    decode rows of several new tokens.
    """
    if plan.decode is not None and plan.decode.q_len != 1:
        raise NotImplementedError(f"q_len: got {plan.decode.q_len} with blocks dealt to ranks, supported: 1")
    plain = Attention(options.softmax_scale, options.softcap)  # a logit of the softmax's own counts once
    every = all_heads(q[: plan.tokens], gather)
    o, lse = torch.zeros_like(every), every.new_full(every.shape[1::-1], -torch.inf, dtype=torch.float32)
    if plan.decode is not None:
        rows = plan.decode.rows
        of_rows = lse.new_empty(rows, every.shape[1], 1)
        steps.attention(plan, step, every, o, plain, places, lse=of_rows)
        lse[:, : plan.decode.live] = of_rows[: plan.decode.live, :, 0].T
    for part, place in zip(plan.passes, places):
        if part.pages is not None:
            steps.ops.fill(steps.store, step, part.pages, *place)
        of_part = torch.empty_like(o[part.tokens])
        more = varlen(every[part.tokens], *place, part, plain, of_part)
        steps.ops.merge(o[part.tokens], lse[:, part.tokens], of_part, more)
    merged_o, merged_lse = merged(steps.store, o, lse.T, gather)
    if plan.own is not None:
        tokens = plan.chunks
        own = torch.empty_like(q[tokens])
        own_lse = varlen(q[tokens], k[tokens], v[tokens], plan.own, plain, own)
        merged_lse[tokens] = merge(merged_o[tokens], merged_lse[tokens].T, own, own_lse).T
    out[: plan.tokens] = with_sinks(merged_o, merged_lse, options.sink_logits).to(out.dtype)


def all_heads(q: torch.Tensor, gather: Gather) -> torch.Tensor:
    """Queries [tokens, heads of a rank, head_dim] -> those of all ranks' heads [tokens, num_heads, head_dim]."""
    return gather(q).transpose(0, 1).flatten(1, 2)


def merged(store: PagedStore, o: torch.Tensor, lse: torch.Tensor, gather: Gather) -> tuple[torch.Tensor, torch.Tensor]:
    """What ranks give over their own tokens, o [tokens, num_heads, head_dim] and lse fp32 [tokens, num_heads] -> the
    attention of this rank's heads over all tokens, fp32: o [tokens, heads of a rank, head_dim] and lse."""
    every = gather(torch.cat((o.float(), lse[..., None]), 2))
    own = every.unflatten(2, (store.world, -1))[:, :, store.rank]  # [world, tokens, heads, head_dim + 1]
    states, lses = own[..., :-1], own[..., -1]
    o, lse = reference.merge_states(states[:, None], lses.transpose(1, 2)[:, None])
    return o[0], lse[0].T.contiguous()


def with_sinks(o: torch.Tensor, lse: torch.Tensor, sink_logits: torch.Tensor | None) -> torch.Tensor:
    """o with a logit of the softmax's own for each head, whose value is 0."""
    if sink_logits is None:
        return o
    return o * (lse - torch.logaddexp(lse, sink_logits.float())).exp()[..., None]


def _stored(store: PagedStore, step: Step, q: torch.Tensor, before: torch.Tensor | None,
            options: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of all heads' q [tokens, num_heads, head_dim] to what this rank has stored: o fp32 of q's shape and lse
    fp32 [tokens, num_heads]; -inf where it has nothing."""
    o, lse = torch.zeros_like(q, dtype=torch.float32), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    q_lens, starts = step.q_lens, step.query_start_loc.tolist()
    rows = (q_lens == 1).nonzero().flatten()
    if len(rows):
        tokens = step.query_start_loc[rows].long()
        of_rows, lse_rows = from_store(store, part_of(step, rows), q[tokens][:, None], options, is_after=True)
        o[tokens], lse[tokens] = of_rows[:, 0].float(), lse_rows[..., 0]
    for number, row in enumerate((q_lens > 1).nonzero().flatten().tolist()):
        tokens = slice(starts[row], starts[row + 1])
        chunk = part_of(step, torch.tensor([row], device=q_lens.device))
        if int(chunk.seq_lens[0]) == tokens.stop - tokens.start:
            continue
        of_chunk, lse_chunk = before_chunk(store, chunk, q[tokens], before[number : number + 1], options)
        o[tokens], lse[tokens] = of_chunk.float(), lse_chunk.T
    return torch.where(lse[..., None] > -torch.inf, o, 0), lse


def merge(o: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> torch.Tensor:
    """Attention to other tokens into o fp32 [tokens, num_heads, head_dim], in place; returns the lse of both."""
    both = torch.logaddexp(lse, more_lse)
    o.lerp_(more.float(), (more_lse - both).exp().T[..., None])
    return both
