"""In torch, on a CPU and slowly: what the kernels of a serving step do (``paged_kernels``).

Each method is the reference of one kernel. They look at values on the host, so they serve CPUs and tests.
"""

import torch

from lowbit_attn import reference
from lowbit_attn.cache.backend import backend_of
from lowbit_attn.paged import NULL, PAGE, PagedStore, Step, counters, own_blocks
from lowbit_attn.paged_plan import K_SIDE, OWN, READ, RING, SINKS, V_SIDE, PlanBuffers, TokenLayout
from lowbit_attn.precision import on_own_defaults


class TorchOps:
    """The kernels of a store's steps, in torch."""

    @on_own_defaults
    def plan(self, buffers: PlanBuffers, step: Step, decode_rows: int, tokens: int) -> None:
        """Enter a step into the buffers, whose first ``decode_rows`` rows attend by decode."""
        where, rows = buffers.layout, len(step.seq_lens)
        q_lens = step.q_lens
        before = torch.where(q_lens > 0, step.seq_lens - q_lens, 0)
        counts = counters(where, step)
        counts.setdefault("ring_start", counts["n_qk"])
        buffers.read.zero_()
        for number, name in enumerate(READ):
            buffers.read[number, :decode_rows] = torch.where(q_lens > 0, counts[name], 0)[:decode_rows]
        starts = torch.where(q_lens > 0, step.query_start_loc[:-1], 0)
        buffers.row[:, :rows] = torch.stack((before, starts, q_lens))
        buffers.token_row[:tokens], buffers.token_slot[:tokens] = -1, -1
        items = []
        for row, (length, n_new, start) in enumerate(zip(step.seq_lens.tolist(), q_lens.tolist(), starts.tolist())):
            if not n_new:
                continue
            own = _ended_blocks(where, step, row, length - n_new, length)
            overwritten = length - where.sinks - where.slots  # positions behind the sinks up to here lose their slots
            is_deferred = bool(own) and own[0][2] < max(length - n_new - where.sinks, 0) and overwritten > own[0][2]
            items += [(*item, int(is_deferred and item is own[0])) for item in own]
            buffers.token_row[start : start + n_new] = row
            if int(step.table[row, 0]) >= where.null_pages and not is_deferred:
                buffers.token_slot[start : start + n_new] = _places(where, length - n_new, length)
        buffers.count[0] = len(items)
        if items:
            buffers.items[:, : len(items)] = torch.tensor(items, dtype=torch.int32).T

    @on_own_defaults
    def append(self, store: PagedStore, buffers: PlanBuffers, step: Step, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store new tokens k, v [tokens, num_heads_kv, head_dim], and pack the blocks that end in the step."""
        where, entered = buffers.layout, torch.stack((k, v), 1)  # [tokens, 2, heads, head_dim]
        before, q_start, n_new = (x.tolist() for x in buffers.row)
        rings = step.ring_rows.tolist()
        view = store.view(step, buffers.counts(len(step.seq_lens)))
        packs, stores = [], []
        for row, page, first, is_storing in buffers.items[:, : int(buffers.count)].T.tolist():
            position = torch.arange(first, first + PAGE) + where.sinks
            from_ring = store.rings[max(rings[row], NULL)][:, :, _place(where, position)].permute(2, 0, 1, 3)
            new = entered[(q_start[row] + position - before[row]).clamp(min=0, max=len(entered) - 1)]
            packs.append((page, torch.where((position < before[row])[:, None, None, None], from_ring, new)))
            if is_storing:
                stores.append(row)
        if packs:
            pages = torch.tensor([page for page, _ in packs], dtype=torch.int32, device=store.pool.device)
            blocks = torch.stack([tokens for _, tokens in packs])  # [n, 128, 2, heads, head_dim]
            for number, side in enumerate("kv"):
                backend_of(view).write_blocks(view, pages, blocks[:, :, number].transpose(1, 2).contiguous(), side)
        for token, (row, slot) in enumerate(zip(buffers.token_row[: len(k)].tolist(), buffers.token_slot.tolist())):
            if row >= 0 and slot >= 0 and rings[row] > NULL:
                store.rings[rings[row], :, :, slot] = entered[token]
        for row in stores:
            length = before[row] + n_new[row]
            for token, slot in enumerate(_places(where, before[row], length).tolist(), q_start[row]):
                if slot >= 0 and rings[row] > NULL:
                    store.rings[rings[row], :, :, slot] = entered[token]

    @on_own_defaults
    def copy(self, store: PagedStore, step: Step, items: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
             keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy 16-bit tokens of the step, of sinks and of rings to keys, values [tokens, num_heads_kv, head_dim]."""
        slots, rings = store.slots, step.ring_rows.tolist()
        for source, row, first, count, at, sides in items.T.tolist():
            for number, (side, new, out) in enumerate(((K_SIDE, k, keys), (V_SIDE, v, values))):
                if not sides & side:
                    continue
                ring = store.rings[rings[row], number].transpose(0, 1)  # [sinks + slots, heads, head_dim]
                token = torch.arange(first, first + count)
                out[at : at + count] = {OWN: lambda: new[token], SINKS: lambda: ring[token],
                                        RING: lambda: ring[token % slots + store.sinks]}[source]()

    @on_own_defaults
    def fill(self, store: PagedStore, step: Step, items: torch.Tensor, keys: torch.Tensor,
             values: torch.Tensor) -> None:
        """Dequantize pages into keys, values [tokens, num_heads_kv, head_dim], rounded once."""
        view = store.view(step, counters(store, step))
        for row, block, at, sides in items.T.tolist():
            both = backend_of(view).read_pages(view, step.table[row, block : block + 1])
            for side, tokens, out in zip((K_SIDE, V_SIDE), both, (keys, values)):
                if sides & side:
                    out[at : at + PAGE] = tokens[0].transpose(0, 1).to(out.dtype)

    def merge(self, out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor,
              sink_logits: torch.Tensor | None = None) -> None:
        """Merge attention to other tokens into out [tokens, num_heads, head_dim] and lse fp32 [num_heads, tokens]."""
        states, lses = torch.stack((out, more)).float(), torch.stack((lse, more_lse))
        states = torch.where(lses.transpose(1, 2)[..., None] > -torch.inf, states, 0)
        o, merged = reference.merge_states(states[:, None], lses[:, None])
        if sink_logits is not None:
            both = torch.logaddexp(merged[0], sink_logits.float()[:, None])
            o, merged = o * (merged - both).exp().transpose(1, 2)[..., None], both[None]
        out.copy_(o[0])
        lse.copy_(merged[0])


def _ended_blocks(where: TokenLayout, step: Step, row: int, before: int, length: int) -> list[tuple[int, int, int]]:
    """(row, page, first position) of the blocks that end in the step, of this rank, whose page is none of the null."""
    found = []
    for block in range(max(before - where.sinks, 0) // PAGE, max(length - where.sinks, 0) // PAGE):
        entry = int(own_blocks(block, where.rank, where.world))
        if block % where.world == where.rank and entry < step.table.shape[1]:
            page = int(step.table[row, entry])
            if page >= where.null_pages:
                found.append((row, page, block * PAGE))
    return found


def _place(where: TokenLayout, position: torch.Tensor) -> torch.Tensor:
    """Places in a ring, its sinks first, of positions of a sequence."""
    return torch.where(position < where.sinks, position, (position - where.sinks) % where.slots + where.sinks)


def _places(where: TokenLayout, before: int, length: int) -> torch.Tensor:
    """The place of each token from ``before`` on, -1 where a later one takes it."""
    position = torch.arange(before, length, dtype=torch.int32)
    is_kept = (position < where.sinks) | (position - where.sinks >= length - where.sinks - where.slots)
    return torch.where(is_kept, _place(where, position), -1).int()
