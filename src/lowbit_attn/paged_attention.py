"""Attention of one step over a ``PagedStore``, whose tokens ``paged.append`` has stored.

Rows of a few new tokens (decode, drafts) read all of their tokens from the store. A chunk of a prompt reads what came
before it from the store, attends to itself as the model gave it, and merges both by lse.
"""

import torch

from lowbit_attn import dispatch, reference
from lowbit_attn.paged import PagedStore, Step, counters
from lowbit_attn.reference import PLAIN, Attention


@torch.no_grad()
def attention(store: PagedStore, step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
              before: torch.Tensor | None, out: torch.Tensor, options: Attention = PLAIN) -> torch.Tensor:
    """Attention of a step's queries, causal within each row.

    q: [tokens, num_heads, head_dim]; k, v: [tokens, num_heads_kv, head_dim], what ``append`` got; before: what it
    returned; out: q's shape and dtype, written for the tokens of all rows. Windows are not supported. Returns lse fp32
    [tokens, num_heads], natural log; -inf for tokens behind the last row. The host looks at the step, and chunks go
    through torch: ``paged_steps`` is the way on a GPU.
    """
    if options.window is not None:
        raise NotImplementedError(f"window: got {options.window}, supported: None")
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    starts, q_lens = step.query_start_loc.tolist(), step.q_lens
    for q_len in q_lens[(q_lens > 0) & (q_lens <= store.max_q_len)].unique().tolist():
        rows = (q_lens == q_len).nonzero().flatten()
        tokens = (step.query_start_loc[rows, None] + torch.arange(q_len, device=rows.device)).long()
        o, row_lse = from_store(store, part_of(step, rows), q[tokens], options, is_after=True)
        out[tokens], lse[tokens] = o.to(out.dtype), row_lse.transpose(1, 2)
    for number, row in enumerate((q_lens > store.max_q_len).nonzero().flatten().tolist()):
        tokens = slice(starts[row], starts[row + 1])
        chunk = part_of(step, torch.tensor([row], device=q_lens.device))
        arguments = store, chunk, q[tokens], k[tokens], v[tokens], before[number : number + 1], options
        o, row_lse = _chunk(*arguments)
        out[tokens], lse[tokens] = o.to(out.dtype), row_lse.T
    return lse


def part_of(step: Step, rows: torch.Tensor) -> Step:
    """A step of some of its rows; their new tokens lie as they did, and only their numbers count from here on."""
    starts = torch.cat((step.q_lens.new_zeros(1), step.q_lens[rows].cumsum(0)))
    return Step(step.table[rows], step.seq_lens[rows], starts.int(), step.ring_rows[rows])


def from_store(store: PagedStore, step: Step, q: torch.Tensor, options: Attention, is_after: bool,
                rings: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [rows, q_len, num_heads, head_dim] to stored tokens -> o of q's shape and lse fp32
    [rows, num_heads, q_len]."""
    view = store.view(step, counters(store, step, is_after), rings)
    out, lse = torch.empty_like(q), q.new_empty(len(q), q.shape[2], q.shape[1], dtype=torch.float32)
    dispatch.decode(q, view, out, lse, options, None, None)
    return out, lse


def _chunk(store: PagedStore, step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, before: torch.Tensor,
           options: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """One row's chunk: q [tokens, num_heads, head_dim] -> o fp32 of its shape and lse fp32 [num_heads, tokens]."""
    own = [x.to(store.dtype).transpose(0, 1) for x in (k, v)]
    o, lse = reference.attention(q, *own, options)
    if int(step.seq_lens[0]) == len(q):
        return o, lse
    rest = Attention(options.softmax_scale, options.softcap)  # a logit of the softmax's own counts once
    o_rest, lse_rest = before_chunk(store, step, q, before, rest)
    o, lse = reference.merge_states(torch.stack((o, o_rest))[:, None], torch.stack((lse, lse_rest))[:, None])
    return o[0], lse[0]


def before_chunk(store: PagedStore, step: Step, q: torch.Tensor, before: torch.Tensor,
                 options: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one row's chunk q [tokens, num_heads, head_dim] to what was stored before it -> o of q's shape and
    lse fp32 [num_heads, tokens]; before: the row's rings as ``append`` found them."""
    step = step._replace(ring_rows=torch.zeros_like(step.ring_rows))
    heads = q.shape[1]
    ratio = heads // store.pool.shape[1]
    rows = q.unflatten(1, (-1, ratio)).transpose(0, 1).reshape(1, 1, -1, q.shape[2])  # each query a query head
    o, lse = from_store(store, step, rows, options, is_after=False, rings=before)
    o = o.view(-1, len(q), ratio, q.shape[2]).transpose(0, 1).reshape(q.shape)
    return o, lse.view(-1, len(q), ratio).transpose(1, 2).reshape(heads, -1)
