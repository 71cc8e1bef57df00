"""Mixed steps of a serving engine that several tests share: decode rows of a few new tokens, then chunks of prompts."""

import numpy as np
import torch

from lowbit_attn import reference
from lowbit_attn.paged import PAGE, PagedStore, Step
from lowbit_attn.paged_plan import BatchPlan, Pass, PlanBuffers, TokenLayout, make_plan
from lowbit_attn.paged_steps import launch
from lowbit_attn.reference import Attention


def layout_of(store: PagedStore) -> TokenLayout:
    return TokenLayout.of(store.format, store.sinks, store.slots, store.null_pages, store.rank, store.world)


def buffers_of(store: PagedStore, rows: int, tokens: int) -> PlanBuffers:
    return PlanBuffers(layout_of(store), rows, tokens, store.pool.device)


def plan_of(buffers: PlanBuffers, step: Step, threshold: int, capacity: int, bucket=lambda rows: rows,
            tokens: int | None = None) -> BatchPlan:
    """The plan of a step on the CPU, entered into its buffers."""
    plan = make_plan(buffers, step.q_lens.numpy(), step.seq_lens.numpy(), threshold, capacity,
                     lambda array: torch.from_numpy(np.array(array)), bucket, tokens)
    launch(plan, step)
    return plan


def varlen(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: Pass, options: Attention,
           out: torch.Tensor) -> torch.Tensor:
    """``paged_steps.Varlen`` in torch."""
    assert options.sink_logits is None and int(part.cu_k[-1]) == part.num_keys == len(keys)
    assert int(part.cu_q[-1]) == len(q) == len(out)
    lse = q.new_full((q.shape[1], len(q)), -torch.inf, dtype=torch.float32)
    lens = list(zip(*(zip(x.tolist(), x.tolist()[1:]) for x in (part.cu_q, part.cu_k))))
    assert max(b - a for (a, b), _ in lens) == part.max_q and max(d - c for _, (c, d) in lens) == part.max_k
    for (a, b), (c, d) in lens:
        if c == d:
            out[a:b] = torch.nan  # what a kernel leaves there does not count
            continue
        o, lse[:, a:b] = reference.attention(q[a:b], keys[c:d].transpose(0, 1), values[c:d].transpose(0, 1), options,
                                             causal=part.is_causal)
        out[a:b] = o
    return lse


class Engine:
    """Sequences over a store that grow by whatever a test asks for, with pages and rings of their own."""

    def __init__(self, store: PagedStore, rows: int, seed: int):
        self.store, self.draw = store, torch.Generator().manual_seed(seed)
        blocks = (len(store.pool) - store.null_pages) // rows
        self.table = (torch.randperm(len(store.pool) - store.null_pages, generator=self.draw)[: rows * blocks]
                      .view(rows, blocks) + store.null_pages).int()
        self.rings = torch.randperm(len(store.rings) - 1, generator=self.draw)[:rows].int() + 1
        self.lens = torch.zeros(rows, dtype=torch.int32)
        self.room = blocks * PAGE * store.world + store.sinks

    def step(self, new: dict[int, int], ratio: int) -> tuple[Step, list[torch.Tensor]]:
        """The next tokens of some sequences, fewest first: the step, and q, k, v."""
        order = sorted(new, key=new.get)
        for row in order:
            self.lens[row] += new[row]
        rows, q_lens = torch.tensor(order), torch.tensor([new[row] for row in order], dtype=torch.int32)
        starts = torch.cat((torch.zeros(1, dtype=torch.int32), q_lens.cumsum(0).int()))
        heads, dim = self.store.pool.shape[1], self.store.rings.shape[-1]
        values = [torch.randn(int(starts[-1]), n, dim, generator=self.draw).to(self.store.dtype)
                  for n in (heads * ratio, heads, heads)]
        table, rings = (_of_more_rows(x[rows]) for x in (self.table, self.rings))
        return Step(table, self.lens[rows], starts, rings), values


def _of_more_rows(x: torch.Tensor) -> torch.Tensor:
    """The same rows in memory that goes on behind them, as an engine's tables."""
    return torch.cat((x, x.new_zeros(4, *x.shape[1:])))[: len(x)]
