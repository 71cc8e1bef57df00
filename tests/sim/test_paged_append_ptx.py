"""Steps of an engine by the compiled plan and append on the CPU: pages and rings bit for bit those of
``paged.append``, with decode rows, drafts, chunks, padding, null pages and null rings in one step."""

import pytest

from sim.paged_steps import check, step_of, store_of


def last_first(count: int) -> range:
    return range(count)[::-1]


@pytest.mark.parametrize("name, sinks", [("k4v4", 0), ("k2v2", 32), ("k4tv4", 0)])
def test_a_step_of_decode_rows_a_chunk_and_padding(name, sinks):
    """A row that packs, one that does not, and a chunk that overwrites what its first block reads.

    K per token is packed by fewer threads than V, so that warps which wait and warps which pack must not meet at one
    barrier: no warp races with another there.
    """
    rows = [(sinks + 127, 1), (sinks + 40, 1), (sinks + 100, 160), (0, 0)]
    store = store_of(name, 64, sinks, 1, len(rows))
    items = check(store, step_of(rows, sinks), 2, padding=2, order=last_first, sees_races=name == "k4tv4")
    assert items[3].tolist() == [0, 1, 0]


def test_drafts_chunks_and_rows_that_store_nothing():
    """Chunks of all lengths around the ring's, one whose deferred tokens wrap; a page and a ring that are none."""
    rows = [(254, 3), (127, 1), (253, 4), (0, 0), (0, 130), (5, 260), (120, 60), (128, 128)]
    step, store = step_of(rows, 0), store_of("k4v4", 64, 0, 4, len(rows))
    step.ring_rows[1] = 0
    step.table[2, 1] = 0
    items = check(store, step, 3)
    assert items[0].tolist() == [0, 1, 4, 5, 5, 6, 7] and items[3].tolist() == [0, 0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("rank", (0, 1))
def test_blocks_of_one_rank_of_two(rank):
    rows = [(127, 1), (255, 1), (60, 1), (100, 300)]
    store = store_of("k4v4", 64, 0, 1, len(rows), rank=rank, world=2)
    items = check(store, step_of(rows, 0, world=2), 3)
    assert items[0].tolist() == ([0, 3, 3] if rank == 0 else [1, 3])
    assert items[3].tolist() == ([0, 1, 0] if rank == 0 else [0, 0])


def test_more_new_tokens_than_a_grid_stores_at_once():
    """Those of the first 8,372 tokens are overwritten by later ones of their row; its second page and on are none."""
    store = store_of("k4v4", 64, 0, 1, 3, heads=3)
    step = step_of([(130, 1), (0, 8500), (5, 60)], 0, blocks=72)
    step.table[1, 1:] = 0
    assert check(store, step, 1).tolist() == [[1], [int(step.table[1, 0])], [0], [0]]
