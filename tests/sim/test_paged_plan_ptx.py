"""The compiled plan of an engine's step, on the CPU, against a plain reading of what a step is: row by row, token by
token, slot by slot."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lowbit_attn.formats import FORMATS
from lowbit_attn.paged import PAGE, Step, counters, ring_slots
from sim.ptx.paged import UNWRITTEN, plan

NULL_PAGES = 2


def geometry(name: str, sinks: int = 0, q_len: int = 1, rank: int = 0, world: int = 1) -> SimpleNamespace:
    fmt = FORMATS[name]
    return SimpleNamespace(format=fmt, window_k=fmt.window_k, window_v=fmt.window_v, sinks=sinks,
                           slots=ring_slots(fmt, q_len), rank=rank, world=world, null_pages=NULL_PAGES)


def step_of(rows: list[tuple[int, int]], world: int = 1, missing: tuple[tuple[int, int], ...] = (),
            spare: int = 1) -> Step:
    """rows: (tokens before, new tokens); missing: (row, entry) of the table that names no page."""
    lens = torch.tensor([before + fresh for before, fresh in rows], dtype=torch.int32)
    starts = torch.tensor([0, *(fresh for _, fresh in rows)]).cumsum(0).int()
    blocks = max(1, -(-int(lens.max()) // (PAGE * world)))
    table = torch.arange(len(rows) * (blocks + spare), dtype=torch.int32).view(len(rows), -1) + NULL_PAGES
    for row, entry in missing:
        table[row, entry] = (row + entry) % NULL_PAGES
    for row, (_, fresh) in enumerate(rows):
        if not fresh:
            lens[row], table[row] = 0, 0
    return Step(table[:, :blocks], lens, starts, torch.arange(1, len(rows) + 1, dtype=torch.int32))


def place_of(store, position: int) -> int:
    return position if position < store.sinks else store.sinks + (position - store.sinks) % store.slots


def expected(store, step: Step, num_decode: int, num_tokens: int) -> tuple[dict, list]:
    """(what is written of rows and tokens, the items)."""
    rows = len(step.seq_lens)
    q_lens, starts = step.q_lens.tolist(), step.query_start_loc.tolist()
    is_decode = (torch.arange(rows) < num_decode) & (step.q_lens > 0)
    found = counters(store, step)
    read = torch.stack([found.get(name, found["n_qk"]) for name in ("n_sink", "n_qk", "n_qv", "n_tok", "ring_start")])
    want = {"read": torch.where(is_decode, read, 0), "row": torch.zeros(3, rows, dtype=torch.int32),
            "token_row": torch.full((num_tokens,), -1, dtype=torch.int32),
            "token_slot": torch.full((num_tokens,), -1, dtype=torch.int32)}
    items = []
    for row, (fresh, start, length) in enumerate(zip(q_lens, starts, step.seq_lens.tolist())):
        if not fresh:
            continue
        before = length - fresh
        want["row"][:, row] = torch.tensor([before, start, fresh])
        want["token_row"][start : start + fresh] = row
        places = [place_of(store, position) for position in range(before, length)]
        is_deferred, has_first_page = False, step.table[row, 0] >= store.null_pages
        old, stop = (max(n - store.sinks, 0) for n in (before, length))
        for block in range(old // PAGE, stop // PAGE):
            entry = block // store.world
            if block % store.world == store.rank and entry < step.table.shape[1]:
                page = int(step.table[row, entry])
                if page >= store.null_pages:
                    read_slots = {place_of(store, store.sinks + n) for n in range(PAGE * block, old)}
                    overwrites = bool(has_first_page and read_slots & set(places))
                    items.append((row, page, PAGE * block, int(overwrites)))
                    is_deferred |= overwrites
        for i, place in enumerate(places):
            if has_first_page and not is_deferred and place not in places[i + 1 :]:
                want["token_slot"][start + i] = place
    return want, items


def check(store, step: Step, num_decode: int, padding: int = 0, **options) -> list:
    num_tokens = int(step.query_start_loc[-1]) + padding
    want, items = expected(store, step, num_decode, num_tokens)
    found = plan(step, store, num_decode, num_tokens, **options)
    for name, value in want.items():
        got, count = getattr(found, name), value.shape[-1]
        assert torch.equal(got[..., :count], value), name
        assert (got[..., count:] == (0 if name in ("read", "row") else UNWRITTEN)).all(), name
    kept = items[: options.get("max_items", len(items))]
    assert found.count.tolist() == [len(kept)]
    assert found.items[:, : len(kept)].T.tolist() == [list(item) for item in kept]
    assert (found.items[:, len(kept) :] == UNWRITTEN).all()
    return items


@pytest.mark.parametrize("name, sinks, q_len", [("k4v4", 0, 1), ("k2v2", 32, 1), ("kitty", 32, 4)])
def test_steps_of_all_kinds_of_rows(name, sinks, q_len):
    """Decode rows around the end of a block, a row without pages, chunks of one to many blocks, and padding."""
    store = geometry(name, sinks, q_len)
    contexts = (0, 1, sinks, sinks + 125, sinks + 127, sinks + 128, sinks + 255, sinks + 383, 1000)
    decode = [(max(0, n), q_len) for n in contexts]
    chunks = [(before, fresh) for before in (0, 5, sinks + 1, sinks + 100, sinks + 128, sinks + 130)
              for fresh in (127, 129, 300, store.slots + 1)]
    step = step_of([*decode, *chunks, (0, 0), (0, 0)], missing=((2, 0), (4, 0), (20, 0), (21, 1)))
    items = check(store, step, len(decode), padding=5)
    assert {stores for *_, stores in items} == {0, 1} and len(items) > 20


@pytest.mark.parametrize("rank", range(3))
def test_blocks_that_are_dealt_to_three_ranks(rank):
    store = geometry("k4v4", rank=rank, world=3)
    rows = [(n + 128 * block, 1) for block in range(4) for n in (5, 127)]
    rows += [(n, fresh) for n in (0, 130, 300, 500, 640) for fresh in (200, 128, 517)]
    check(store, step_of(rows, world=3, missing=((9, 0), (12, 1))), 8)


def test_more_rows_than_threads_and_items_than_room():
    draw = np.random.default_rng(0)
    rows = [(int(n), int(draw.integers(0, 3))) for n in draw.integers(0, 300, 1029)]
    rows[1025:1027] = (100, 260), (128, 1)
    store, step = geometry("k4v4", q_len=4), step_of(rows)
    assert len(check(store, step, 1025)) >= 10
    check(store, step, 1025, max_items=4)


def test_a_step_of_one_token_and_a_step_of_padding():
    store = geometry("k4v4")
    assert check(store, step_of([(127, 1)], spare=0), 1, padding=2) == [(0, NULL_PAGES, 0, 0)]
    assert check(store, step_of([(0, 0), (0, 0)]), 2, padding=2) == []
