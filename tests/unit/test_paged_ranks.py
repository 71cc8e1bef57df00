"""Steps over stores whose blocks are dealt to ranks, each in a thread, against one store with all blocks."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch

from lowbit_attn import FORMATS
from lowbit_attn.paged import PAGE, PagedStore, Step, append, own_blocks, ring_slots
from lowbit_attn.paged_attention import attention
from lowbit_attn.paged_ranks import attention as ranks_attention
from lowbit_attn.paged_ranks import step_attention
from lowbit_attn.paged_steps import LayerSteps
from lowbit_attn.reference import Attention
from lowbit_attn.testing import assert_same_bytes
from unit.mixed import buffers_of, plan_of, varlen

HEADS, DIM, PAGES, ROWS = 6, 64, 60, 3  # query heads over one KV head
ERROR = 2e-3


def store_of(name: str, rank: int = 0, world: int = 1) -> PagedStore:
    """Pages and rings with bytes that no reader may use."""
    fmt = FORMATS[name]
    pool = torch.randint(0, 256, (PAGES, 1, fmt.record(DIM).nbytes), dtype=torch.uint8)
    rings = torch.full((ROWS + 1, 2, 1, ring_slots(fmt, 1), DIM), torch.nan, dtype=torch.float16)
    return PagedStore(fmt, pool, rings, rank=rank, world=world)


class Group:
    """All-gathers among threads."""

    def __init__(self, world: int):
        self.parts, self.barrier = [None] * world, Barrier(world, timeout=60)

    def gather(self, rank: int):
        def gather(x: torch.Tensor) -> torch.Tensor:
            self.parts[rank] = x
            self.barrier.wait()
            every = torch.stack(self.parts)
            self.barrier.wait()
            return every
        return gather


def step_of(tables: list[list[int]], lens: list[int], counts: list[int], rings: list[int], padding: int = 0) -> Step:
    table = torch.zeros(len(lens) + padding, max(map(len, tables)) + 1, dtype=torch.int32)
    for row, pages in enumerate(tables):
        table[row, : len(pages)] = torch.tensor(pages)
    starts = torch.tensor([0, *counts, *[0] * padding]).cumsum(0)
    values = [*lens, *[0] * padding], starts, [*rings, *[0] * padding]
    return Step(table, *(torch.as_tensor(x, dtype=torch.int32) for x in values))


def rounds(draw: random.Random) -> list[list[int]]:
    """New tokens of each row, step by step: prompts in chunks, and single tokens over the ends of blocks."""
    chunks = [draw.randint(1, 200) for _ in range(ROWS)]
    return [[300, 1, 130], [1, 127, 256], [80, 126, 123], *[[1] * ROWS] * 6, [1, 2, 1], chunks, *[[1] * ROWS] * 3]


def rank_step(store: PagedStore, steps: LayerSteps | None, step: Step, tokens, gather, options: Attention,
              capacity: int) -> torch.Tensor:
    """One rank's part of a step, of its own heads; by a plan if there are calls of a layer, else the host looks."""
    q, k, v = tokens
    share = HEADS // store.world
    own = q[:, store.rank * share : (store.rank + 1) * share].contiguous()
    if options.sink_logits is not None:
        options = replace(options, sink_logits=options.sink_logits[store.rank * share : (store.rank + 1) * share])
    out = torch.full_like(own, torch.nan)
    if steps is None:
        before = append(store, step, k, v)
        ranks_attention(store, step, own, k, v, before, out, options, gather)
        return out
    with torch.no_grad():
        plan = plan_of(steps.buffers, step, 1, capacity, tokens=len(q))
        workspace = tuple(torch.full((capacity, 1, DIM), torch.nan, dtype=torch.half) for _ in range(2))
        places = steps.append(plan, step, k, v, lambda: workspace)
    step_attention(steps, gather, plan, step, own, k, v, out, options, places, varlen)
    return out


@pytest.mark.parametrize("name, world, capacity", [
    ("k4v4", 2, 0), ("k2v2", 3, 4096), ("k8v8", 2, 256), ("k4tv4", 3, 0), ("k4v4", 3, 300)])
def test_ranks_give_what_one_store_gives(name, world, capacity, seed):
    """capacity: of the workspace of steps by a plan; 0: the host looks at the steps."""
    draw, lens, group = random.Random(seed), [0] * ROWS, Group(world)
    whole, stores = store_of(name), [store_of(name, rank, world) for rank in range(world)]
    layers = [LayerSteps(store, buffers_of(store, ROWS + 2, 1000)) if capacity else None for store in stores]
    rings = [*range(1, ROWS + 1)]
    pages, free = [[] for _ in range(ROWS)], random.Random(seed).sample(range(1, PAGES), PAGES - 1)
    for number, counts in enumerate(rounds(draw)):
        lens = [length + count for length, count in zip(lens, counts)]
        for row, length in enumerate(lens):
            pages[row] += [free.pop() for _ in range(-(-length // PAGE) - len(pages[row]))]
        padding = number % 2
        tokens = [torch.randn(sum(counts) + (padding if max(counts) == 1 else 0), heads, DIM).half()
                  for heads in (HEADS, 1, 1)]
        options = Attention(0.2, sink_logits=torch.randn(HEADS) if number % 3 == 0 else None)
        if capacity:  # rows of one token first
            order = sorted(range(ROWS), key=lambda row: counts[row])
            pages, lens, counts, rings = ([some[row] for row in order] for some in (pages, lens, counts, rings))
        step = step_of(pages, lens, counts, rings, padding)
        want = torch.zeros_like(tokens[0])
        before = append(whole, step, *tokens[1:])
        attention(whole, step, *tokens, before, want, options)
        with ThreadPoolExecutor(world) as pool:
            parts = [pool.submit(rank_step, stores[rank], layers[rank],
                                 step_of([held[rank::world] for held in pages], lens, counts, rings, padding), tokens,
                                 group.gather(rank), options, capacity) for rank in range(world)]
            got = torch.cat([part.result() for part in parts], 1)
        live = sum(counts)
        assert (got[:live] - want[:live]).float().norm() < ERROR * want[:live].float().norm(), (number, counts)
        for row, length in enumerate(lens):
            for block in range(length // PAGE):
                held = pages[row][block]
                assert_same_bytes("page", stores[block % world].pool[held], whole.pool[held])
    for store in stores:  # the open block of each sequence is in the ring of the rank that has it
        for ring, length in zip(rings, lens):
            first = length // PAGE * PAGE
            if first // PAGE % world == store.rank:
                slots = torch.arange(first, length) % store.slots
                assert store.rings[ring][:, :, slots].isfinite().all()


def test_own_blocks():
    for world in (1, 2, 3):
        for blocks in range(8):
            own = [own_blocks(blocks, rank, world) for rank in range(world)]
            assert own == [len(range(rank, blocks, world)) for rank in range(world)]


@pytest.mark.parametrize("name, sinks", [("k4v4", 32), ("kitty", 0)])
def test_sinks_and_windows_are_not_dealt(name, sinks):
    fmt = FORMATS[name]
    rings = torch.zeros(2, 2, 1, sinks + ring_slots(fmt, 1), DIM, dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="world: got 2 ranks for .*, supported there: no sinks and formats"):
        PagedStore(fmt, torch.zeros(4, 1, fmt.record(DIM).nbytes, dtype=torch.uint8), rings, sinks, world=2)


def test_several_kv_heads_are_not_dealt():
    fmt = FORMATS["k4v4"]
    rings = torch.zeros(2, 2, 2, ring_slots(fmt, 1), DIM, dtype=torch.float16)
    pool = torch.zeros(4, 2, fmt.record(DIM).nbytes, dtype=torch.uint8)
    with pytest.raises(NotImplementedError, match="world: got 3 ranks for stores of 2 KV heads, supported there: 1 KV"):
        PagedStore(fmt, pool, rings, rank=1, world=3)
    assert PagedStore(fmt, pool, rings).world == 1
