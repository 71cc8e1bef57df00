"""``paged.append`` for steps of a few tokens a row, from what the device knows alone: for a step in a CUDA graph.

Shapes are those of the batch, and nothing is read by the host. Every row computes a block; one that ends no block, is
padding, or has a page or ring that is none puts back what lies in the null page and the null ring.
"""

import torch

from lowbit_attn import _private
from lowbit_attn.checks import check_tensor
from lowbit_attn.paged import NULL, PAGE, PagedStore, Step


def append_static(store: PagedStore, step: Step, k: torch.Tensor, v: torch.Tensor, q_len: int) -> None:
    """Store a step's new tokens, at most ``q_len`` a row, and pack the block that ends inside it.

    k, v: [tokens, num_heads_kv, head_dim] as ``paged.append`` takes them, one token or more. Pool and rings hold the
    same bytes after both. ValueError for a q_len above ``store.max_q_len``: rows with more tokens are chunks.

    A step whose values are wrong (a table without the block that is filled, a page or ring that is not there, lengths
    that do not fit) is refused before anything is written: RuntimeError on a CPU, a failed assertion of the device on a
    GPU, where the host does not look.
    """
    if not 1 <= q_len <= store.max_q_len:
        raise ValueError(f"q_len: got {q_len}, supported: 1 to {store.max_q_len} tokens a row")
    check_tensor("v", v, k.shape, (k.dtype,), k.device)
    if store.attached is not None:
        k = store.attached.keys(k, store.dtype)
    entered = torch.stack((k, v), 1).to(store.dtype)  # [tokens, 2, heads, head_dim]
    before = step.seq_lens.long() - step.q_lens
    _check(store, step, before, q_len, len(entered))
    _store(store, step, before, entered, q_len)
    _pack(store, step, before)


def _check(store: PagedStore, step: Step, before: torch.Tensor, q_len: int, tokens: int) -> None:
    """Refuse values that name what is not there, of rows that store something."""
    is_live = (step.q_lens > 0) & (step.ring_rows != NULL)
    blocks, held = (step.seq_lens - store.sinks).clamp(min=0) // PAGE, step.table.shape[1]
    last, named, ends = ended_blocks(store, step, before)
    is_filled = is_live & (blocks > (before - store.sinks).clamp(min=0) // PAGE) & (last % store.world == store.rank)
    rings, pages = len(store.rings), len(store.pool)
    is_ring, is_page = (step.ring_rows >= 0) & (step.ring_rows < rings), named < pages
    for refused, message in (
            (is_filled & (last // store.world >= held), f"table: got {held} blocks a row for sequences that fill more"),
            (ends & ~is_page, f"table: got a page beyond those of the pool, supported: up to {pages - 1}"),
            (is_live & ~is_ring, f"ring_rows: got a ring that is none, supported: 0 to {rings - 1}"),
            (is_live & (before < 0), "seq_lens: got fewer tokens than are new, supported: the new ones among them"),
            (is_live & (step.q_lens > q_len), f"query_start_loc: got more than q_len = {q_len} tokens of a row"),
            (step.q_lens < 0, "query_start_loc: got a row that ends before it begins"),
            (step.query_start_loc > tokens, f"query_start_loc: got ends behind the {tokens} tokens of k and v")):
        _private.assert_async(~refused.any(), message)


def _store(store: PagedStore, step: Step, before: torch.Tensor, entered: torch.Tensor, q_len: int) -> None:
    """New tokens -> sinks and slots of the rows' rings."""
    offset = torch.arange(q_len, device=before.device)
    token = (step.query_start_loc[:-1, None] + offset).clamp(max=len(entered) - 1)
    is_new = (offset < step.q_lens[:, None]) & (step.ring_rows != NULL)[:, None]
    ring = torch.where(is_new, step.ring_rows[:, None].long(), NULL).flatten()
    slot = torch.where(is_new, _slots(store, before[:, None] + offset), 0).flatten()
    old = store.rings[ring, :, :, slot]  # [rows x q_len, 2, heads, head_dim]
    new = entered[token.flatten().long()]
    store.rings[ring, :, :, slot] = torch.where(is_new.flatten()[:, None, None, None], new, old)


def _pack(store: PagedStore, step: Step, before: torch.Tensor) -> None:
    """The last block of each row that is full, if this step filled it -> its page, both sides."""
    last, named, ends = ended_blocks(store, step, before)
    position = store.sinks + last[:, None] * PAGE + torch.arange(PAGE, device=before.device)
    page = torch.where(ends, named, NULL)
    tokens = store.rings[step.ring_rows.long()[:, None], :, :, _slots(store, position)]  # [rows, 128, 2, heads, D]
    k, v = tokens.permute(2, 0, 3, 1, 4).flatten(1, 2).float()
    old = store.pool[page]
    records = old.flatten(0, 1).clone()
    k_entries, v_entries = (None, None) if store.attached is None else map(store.attached.entries, "kv")
    store.format.write_k(records, k, entries=k_entries)
    store.format.write_v(records, v, entries=v_entries)
    store.pool[page] = torch.where(ends[:, None, None], records.view_as(old), old)


def ended_blocks(store: PagedStore, step: Step, before: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The last block of each row that is full, the page that the table names for it, and whether this step filled it
    and it is a page of this rank. A block behind the table's last one has no page.

    store: or anything else with its sinks, null_pages, rank and world; before: tokens of the rows before the step.
    """
    blocks = (step.seq_lens - store.sinks).clamp(min=0) // PAGE
    last = (blocks - 1).clamp(min=0).long()
    own, held = last // store.world, step.table.shape[1]
    named = step.table.gather(1, own.clamp(max=held - 1)[:, None])[:, 0].long()
    ends = (blocks > (before - store.sinks).clamp(min=0) // PAGE) & (step.q_lens > 0) & (named >= store.null_pages)
    return last, named, ends & (own < held) & (last % store.world == store.rank)


def _slots(store: PagedStore, position: torch.Tensor) -> torch.Tensor:
    """Places in a ring, sinks among them, of positions of a sequence."""
    return torch.where(position < store.sinks, position, (position - store.sinks) % store.slots + store.sinks)
