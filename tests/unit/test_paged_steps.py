"""Steps by a plan: the bytes and the attention of steps at which the host looks, for any mix of rows."""

import random

import numpy as np
import pytest
import torch

from lowbit_attn.paged import PAGE, PagedStore, Step, append, counters
from lowbit_attn.paged_attention import attention
from lowbit_attn.paged_plan import BOTH, ITEM, OWN, READ, RING, ROW, SINKS, make_plan, plan_chunks
from lowbit_attn.paged_steps import LayerSteps
from lowbit_attn.reference import Attention
from lowbit_attn.testing import assert_same_bytes
from unit.mixed import Engine, buffers_of, layout_of, plan_of, varlen
from unit.stores import DIM, HEADS, NULL_PAGES, PAGES, Q_LEN, ROWS, STORES, store_of

RATIO, TOKENS = 2, 1500
LENGTHS = (0, 1, 1, 1, Q_LEN, 2, Q_LEN + 1, 127, 128, 129, 200, 300)


def even_step(sinks: int, q_len: int, draw: torch.Generator, padding: int = 1) -> Step:
    """Rows of q_len new tokens, some of which end a block, then padding."""
    live = ROWS - padding
    ends = sinks + PAGE * torch.randint(0, 3, (live,), generator=draw) + torch.randint(-2, Q_LEN + 2, (live,),
                                                                                      generator=draw)
    lens = torch.cat((ends.clamp(min=q_len), torch.zeros(padding, dtype=torch.long))).int()
    table = (torch.randperm(PAGES - NULL_PAGES, generator=draw)[: ROWS * 4].view(ROWS, 4) + NULL_PAGES).int()
    rings = torch.randperm(ROWS, generator=draw).int() + 1
    table[live:], rings[live:] = 0, 0
    starts = torch.cat((torch.arange(live + 1), torch.full((padding,), live))).int() * q_len
    return Step(table, lens, starts, rings)


def new_tokens(count: int, draw: torch.Generator) -> list[torch.Tensor]:
    return [torch.randn(count, heads, DIM, generator=draw).half() for heads in (HEADS * RATIO, HEADS, HEADS)]


@pytest.mark.parametrize("name,sinks", STORES)
def test_steps_of_equal_rows(name, sinks, seed):
    """Decode alone, as a captured graph has it, padded rows included: to the bit."""
    mine, theirs = store_of(name, sinks), store_of(name, sinks)
    buffers, draw, packed = buffers_of(mine, ROWS, ROWS * Q_LEN), torch.Generator().manual_seed(seed), 0
    layer = LayerSteps(mine, buffers)
    mine.pool.zero_(), theirs.pool.zero_()  # what attention reads must be records
    for number in range(30 if "cq" not in name else 8):
        q_len = 1 + number % Q_LEN
        step = even_step(sinks, q_len, draw)
        q, k, v = new_tokens(ROWS * q_len, draw)
        before = mine.pool.clone()
        plan = plan_of(buffers, step, Q_LEN, 0, tokens=ROWS * q_len)
        assert (plan.decode.live, plan.decode.rows, plan.decode.q_len) == (ROWS - 1, ROWS, q_len)
        assert plan.decode.gather is None and not plan.passes
        layer.append(plan, step, k, v)
        assert append(theirs, step, k, v) is None
        assert_same_bytes("pool", mine.pool, theirs.pool)
        assert_same_bytes("rings", mine.rings, theirs.rings)
        options = Attention(0.2, sink_logits=torch.randn(HEADS * RATIO) if number % 2 else None)
        out, expected = torch.zeros_like(q), torch.zeros_like(q)
        layer.attention(plan, step, q, out, options, [])
        attention(theirs, step, q, k, v, None, expected, options)
        live = slice(int(step.query_start_loc[-1]))
        assert torch.equal(out[live], expected[live])
        packed += int((mine.pool != before).any(2).any(1).sum())
    assert packed > 2


@pytest.mark.parametrize("name,sinks", STORES)
def test_mixed_steps(name, sinks, seed):
    """Decode rows of unlike numbers of tokens beside chunks, with workspaces that hold all, some and hardly any."""
    draw = random.Random(seed)
    mine, theirs = store_of(name, sinks), store_of(name, sinks)
    mine.pool.zero_(), theirs.pool.zero_()
    engine, buffers = Engine(mine, 5, seed), buffers_of(mine, 8, TOKENS)
    layer, seen = LayerSteps(mine, buffers), set()
    for number in range(24 if "cq" not in name else 10):
        new = {row: draw.choice(LENGTHS) for row in range(5)}
        new = {row: count for row, count in new.items() if 0 < count < engine.room - int(engine.lens[row])}
        if not new:
            engine.lens.zero_()
            continue
        step, (q, k, v) = engine.step(new, RATIO)
        capacity = draw.choice((256, 700, 4096))
        plan = plan_of(buffers, step, Q_LEN, capacity, draw.choice((lambda rows: rows, lambda rows: rows + 2)))
        seen |= {(part.is_causal, part.is_direct, part.group > 0) for part in plan.passes}
        seen |= {"unlike"} if plan.decode and plan.decode.gather is not None else set()
        workspace = tuple(torch.full((capacity, HEADS, DIM), torch.nan, dtype=torch.half) for _ in range(2))
        options = Attention(0.2, sink_logits=torch.randn(HEADS * RATIO) if number % 3 == 0 else None)
        out, expected = torch.full_like(q, torch.nan), torch.zeros_like(q)
        places = layer.append(plan, step, k, v, lambda: workspace)
        before = append(theirs, step, k, v)
        assert_same_bytes("pool", mine.pool, theirs.pool)
        assert_same_bytes("rings", mine.rings, theirs.rings)
        layer.attention(plan, step, q, out, options, places, varlen)
        attention(theirs, step, q, k, v, before, expected, options)
        assert (out.float() - expected.float()).abs().max() < 4e-3, (number, new)
    assert {"unlike", (True, False, False), (False, False, False)} <= seen


@pytest.mark.parametrize("rank,world", [(0, 1), (0, 3), (1, 3)])
def test_what_the_plan_says(rank, world, seed):
    """Counters of decode rows are those of ``counters``; all other rows are empty."""
    whole = store_of("k4v4", 0)
    store = PagedStore(whole.format, whole.pool[:, :1], whole.rings[:, :, :1], 0, None, NULL_PAGES, rank, world)
    draw = torch.Generator().manual_seed(seed)
    buffers, ended = buffers_of(store, ROWS + 3, 64), 0
    buffers.read.fill_(77)
    for number in range(120):
        step = even_step(0, 1, draw)
        live = 1 + number % (ROWS - 1)
        plan = plan_of(buffers, step, 1, 0)
        counts = counters(store, step)
        for at, name in enumerate(READ):
            assert torch.equal(buffers.read[at, :ROWS], counts.get(name, counts["n_qk"]))
            assert not buffers.read[at, ROWS:].any()
        assert buffers.counts(live)["n_tok"].data_ptr() == buffers.read[READ.index("n_tok")].data_ptr()
        before = dict(zip(ROW, buffers.row[:, :ROWS]))["before"]
        assert torch.equal(before, step.seq_lens - step.q_lens)
        items = [dict(zip(ITEM, item)) for item in buffers.items[:, : int(buffers.count)].T.tolist()]
        for item in items:
            row, block = item["row"], item["first"] // PAGE
            assert int(step.seq_lens[row]) // PAGE == block + 1 and block % world == rank and not item["stores"]
            assert item["page"] == int(step.table[row, block // world])
        ended += len(items)
        assert plan.decode.live == ROWS - 1
    assert ended > 5


def test_rows_in_another_order_are_refused():
    store = store_of("k4v4", 0)
    buffers = buffers_of(store, 8, TOKENS)
    with pytest.raises(ValueError, match=r"q_lens: got \[200, 1\]"):
        make_plan(buffers, np.array([200, 1]), np.array([200, 1]), 4, 4096, torch.from_numpy)
    with pytest.raises(ValueError, match="seq_lens: got"):
        make_plan(buffers, np.array([1, 200]), np.array([1, 100]), 4, 4096, torch.from_numpy)


@pytest.mark.parametrize("name,sinks", STORES)
@pytest.mark.parametrize("world,rank", [(1, 0), (2, 1)])
def test_passes_read_every_token_once(name, sinks, world, rank, seed):
    """Of each chunk row, all tokens before it and its own: K and V of each come from one place."""
    store = store_of(name, sinks)
    if world > 1 and (sinks or store.format.window_v):
        sinks = 0
        store = store_of("k4v4", 0)
    where = layout_of(store)._replace(rank=rank, world=world)
    draw = random.Random(seed)
    for _ in range(60):
        rows, capacity = draw.randint(1, 5), draw.choice((128, 500, 1000, 5000))
        n_new = np.array([draw.randint(5, 300) for _ in range(rows)])
        before = np.array([draw.choice((0, 1, 127, 128, 129, 500, 2000)) for _ in range(rows)])
        starts = np.concatenate(([0], np.cumsum(n_new)))[:-1] + 7
        passes = plan_chunks(where, n_new, before, 3, starts, capacity)
        seen = {side: [[] for _ in range(rows)] for side in (1, 2)}
        for part in passes:
            first = int(np.flatnonzero(starts == part.tokens.start)[0])
            bounds = np.concatenate(([0], np.cumsum(part.k_lens)))
            assert part.tokens.stop - part.tokens.start == part.q_lens.sum()
            keys = {side: np.full(int(part.k_lens.sum()), -1) for side in (1, 2)}
            pages, copies = (np.concatenate([np.zeros((size, 0), int), *items], 1).T.tolist()
                             for size, items in ((4, part.pages), (6, part.copies)))
            for row, block, at, sides in pages:
                position = sinks + block * PAGE
                _enter(keys, sides, at, range(position, position + PAGE), bounds, row - 3 - first)
            for source, row, start, count, at, sides in copies:
                there = row - 3
                offset = {SINKS: 0, RING: sinks, OWN: int(before[there]) - int(starts[there])}[source]
                _enter(keys, sides, at, range(start + offset, start + count + offset), bounds, there - first)
                if source == OWN and part.is_causal:
                    assert at + int(starts[there]) + int(n_new[there]) - start == bounds[there - first + 1]
            if part.is_causal and not part.pages and not part.copies:
                for number in range(len(part.k_lens)):
                    for side in (1, 2):
                        keys[side][bounds[number] : bounds[number + 1]] = np.arange(n_new[first + number])
            for number in range(len(part.k_lens)):
                for side in (1, 2):
                    seen[side][first + number] += keys[side][bounds[number] : bounds[number + 1]].tolist()
        for row in range(rows):
            expected = _expected(where, int(before[row]), int(n_new[row]))
            assert sorted(seen[1][row]) == sorted(seen[2][row]) == expected


def _enter(keys: dict, sides: int, at: int, positions: range, bounds: np.ndarray, number: int) -> None:
    """Positions of a sequence into a pass's keys; on several ranks, positions of a page are those of own blocks."""
    assert bounds[number] <= at and at + len(positions) <= bounds[number + 1]
    for side in (1, 2):
        if sides & side:
            assert (keys[side][at : at + len(positions)] == -1).all(), "each place is written once"
            keys[side][at : at + len(positions)] = positions
    assert sides in (1, 2, BOTH)


def _expected(where, before: int, n_new: int) -> list[int]:
    """Positions that passes read; of several ranks those of own blocks as if they lay together, without own tokens."""
    if where.world == 1:
        return list(range(before + n_new))
    blocks = before // PAGE
    own = (blocks - where.rank + where.world - 1) // where.world
    tail = list(range(blocks * PAGE, before)) if blocks % where.world == where.rank else []
    return sorted(list(range(own * PAGE)) + tail)


def test_steps_that_follow_use_the_same_memory():
    """Views are made once for a number of rows, and again where the engine's table moved."""
    store, draw = store_of("k4v4", 0), torch.Generator().manual_seed(1)
    buffers = buffers_of(store, ROWS, ROWS)
    layer, step = LayerSteps(store, buffers), even_step(0, 1, draw)
    first = layer._view(step, ROWS)
    plan_of(buffers, step, 1, 0)
    later = even_step(0, 1, draw)
    for mine, other in zip(step, later):
        mine.copy_(other)
    plan_of(buffers, step, 1, 0)
    assert layer._view(Step(*(x[:] for x in step)), ROWS) is first, "other tensors of the same memory"
    assert torch.equal(first.n_tok, step.seq_lens)
    assert layer._view(later, ROWS) is not first
    assert all(x.data_ptr() % 128 == buffers.read.data_ptr() % 128 for x in buffers.counts(3).values())
    assert layer._view(later, 2).n_tok.shape == (2,) and layer._view(later, 2) is layer._view(later, 2)
    with pytest.raises(ValueError, match="step: got a table of strides"):
        layer._view(step._replace(table=step.table[:, ::2]), 3)


def test_records_are_found_by_strides():
    """A layer's pages among those of others: units count from its first record, whatever lies between."""
    store, step = store_of("k4v4", 0), even_step(0, 1, torch.Generator().manual_seed(1))
    blocks = torch.zeros(PAGES, 3, *store.pool.shape[1:], dtype=torch.uint8)
    store = PagedStore(store.format, blocks[:, 1], store.rings, 0)
    view = store.view(step, counters(store, step))
    for page, head in ((0, 0), (0, 1), (7, 1), (PAGES - 1, HEADS - 1)):
        record = view.units[page * view.strides.page + head * view.strides.head]
        assert record.data_ptr() == store.pool[page, head].data_ptr()
    last = view.units[-1]
    assert last.data_ptr() + last.numel() == store.pool[-1, -1].data_ptr() + store.pool.shape[2]
