"""The cache's life at random: add, prefill, append, rewind, share, free and wrong calls, against a simple model."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lowbit_attn import FORMATS, KVCache, PageExhaustedError

HEADS, DIM, ROWS, PAGES, MAX_SEQLEN, MAX_Q_LEN = 1, 32, 4, 7, 620, 4
EXAMPLES, STEPS = 96, 200
VALUES = torch.rand(2, 8192, HEADS, DIM, generator=torch.Generator().manual_seed(0)).mul(2).sub(1).half()
ATOL = 2 / 255  # twice the worst error of 8 bits over [-1, 1]: other tokens differ by far more
ROW = st.integers(0, ROWS - 1)


class Sequence:
    """A row of the model: ids of its tokens, the blocks packed of each side, its pages (shared ones are the same)."""

    def __init__(self, state="unused"):
        self.state, self.ids, self.packed, self.pages = state, [], [0, 0], []


class CacheLife(RuleBasedStateMachine):
    steps = 0  # of all examples

    @initialize(sinks=st.sampled_from((0, 5)), windows=st.sampled_from(((0, 0), (0, 128), (128, 128))))
    def start(self, sinks, windows):
        fmt = replace(FORMATS["k8v8"], window_k=windows[0], window_v=windows[1])
        self.cache = KVCache(fmt, PAGES, HEADS, DIM, sinks=sinks, max_batch=ROWS, max_q_len=MAX_Q_LEN,
                             max_seqlen=MAX_SEQLEN)
        self.sinks, self.windows = sinks, [max(w, MAX_Q_LEN - 1) for w in windows]
        self.rows, self.next_id = [Sequence() for _ in range(ROWS)], 0

    # ---- the model

    def blocks(self, length, window):
        return max(0, length - min(length, self.sinks) - window) // 128

    def pack(self, seq):
        seq.packed = [max(n, self.blocks(len(seq.ids), w)) for n, w in zip(seq.packed, self.windows)]

    def free_pages(self):
        return PAGES - len({page for seq in self.rows for page in seq.pages})

    def fresh(self, count):
        ids = [(self.next_id + i) % VALUES.shape[1] for i in range(count)]
        self.next_id += count
        return ids

    def refusal(self, growth):
        """The error that adding tokens {sequence: count} must raise, or None."""
        lengths = {seq: len(seq.ids) + count for seq, count in growth.items()}
        if max(lengths.values()) > MAX_SEQLEN:
            return ValueError
        missing = sum(max(0, self.blocks(n, self.windows[0]) - len(seq.pages)) for seq, n in lengths.items())
        return PageExhaustedError if missing > self.free_pages() else None

    def grow(self, seq, ids):
        seq.ids += ids
        seq.pages += [object() for _ in range(self.blocks(len(seq.ids), self.windows[0]) - len(seq.pages))]
        seq.state = "live"

    def refused(self, error, call):
        """The call raises and changes nothing; what it could write beside the invariants is compared here."""
        before = [x.clone() for x in (*self.cache.counters(), self.cache.ring_k, self.cache.sink_v, self.cache.table)]
        with pytest.raises(error):
            call()
        after = (*self.cache.counters(), self.cache.ring_k, self.cache.sink_v, self.cache.table)
        assert all(map(torch.equal, after, before))

    # ---- the calls

    @rule()
    def add(self):
        vacant = [row for row, seq in enumerate(self.rows) if seq.state != "live"]
        if not vacant:
            self.refused(RuntimeError, self.cache.add)
            return
        assert self.cache.add() == vacant[0]
        self.rows[vacant[0]].state = "live"

    @rule(row=ROW, count=st.one_of(st.integers(0, 20), st.integers(100, 420)))
    def prefill(self, row, count):
        seq, ids = self.rows[row], self.fresh(count)
        call = lambda: self.cache.prefill(row, *VALUES[:, ids])  # noqa: E731
        if error := self.refusal({seq: count}):
            self.refused(error, call)
            return
        call()
        self.grow(seq, ids)
        self.pack(seq)

    def append_to(self, rows, count):
        picked, ids = [self.rows[row] for row in rows], [self.fresh(count) for _ in rows]
        call = lambda: self.cache.append(*VALUES[:, ids], rows)  # noqa: E731
        if any(seq.state == "freed" for seq in picked):
            self.refused(ValueError, call)
        elif error := self.refusal(dict.fromkeys(picked, count)):
            self.refused(error, call)
        else:
            call()
            for seq, new in zip(picked, ids):
                self.pack(seq)
                self.grow(seq, new)

    @rule(rows=st.lists(ROW, min_size=1, max_size=ROWS, unique=True), count=st.integers(1, MAX_Q_LEN))
    def append(self, rows, count):
        self.append_to(rows, count)

    @rule(row=ROW, short=st.integers(-2, 2))
    def append_over_a_boundary(self, row, short):
        """Prefill to ``short`` tokens before the next block is full, then steps over it."""
        seq = self.rows[row]
        rest = len(seq.ids) - min(len(seq.ids), self.sinks) - self.windows[short % 2]
        count = -rest % 128 - short
        if seq.state == "freed" or not 0 <= count < 128:
            return
        self.prefill(row, count)
        for _ in range(3):
            self.append_to([row], 1 + short % MAX_Q_LEN)

    @rule(row=ROW, count=st.integers(0, 12))
    def rewind(self, row, count):
        seq = self.rows[row]
        held = len(seq.ids) - (128 * seq.packed[0] + self.sinks if seq.packed[0] else 0)
        if seq.state == "freed" or count > held:
            self.refused(ValueError, lambda: self.cache.rewind([row], count))
            return
        self.cache.rewind([row], count)
        seq.ids = seq.ids[: len(seq.ids) - count]

    @rule(src=ROW, dst=ROW, cut=st.one_of(st.none(), st.integers(0, 3), st.integers(4, 600)))
    def share(self, src, dst, cut):
        """cut: None for all, up to 3: after so many packed pages, else a length."""
        a, b = self.rows[src], self.rows[dst]
        length = len(a.ids) if cut is None else min(len(a.ids), self.sinks) + 128 * cut if cut < 4 else cut
        rest = max(0, length - min(len(a.ids), self.sinks))
        packed = [min(n, rest // 128) for n in a.packed]
        call = lambda: self.cache.share(src, dst, None if cut is None else length)  # noqa: E731
        own = packed[0] - packed[1]
        if (a.state == "freed" or src == dst or b.ids or b.pages or length > len(a.ids)
                or (rest % 128 and rest < 128 * a.packed[0])):
            self.refused(ValueError, call)
        elif own > self.free_pages():
            self.refused(PageExhaustedError, call)
        else:
            call()
            b.state, b.ids, b.packed = "live", a.ids[:length], packed
            b.pages = a.pages[: packed[1]] + [object() for _ in range(own)]

    @rule(row=ROW)
    def free(self, row):
        if self.rows[row].state == "freed":
            self.refused(ValueError, lambda: self.cache.free([row]))
            return
        self.cache.free([row])
        self.rows[row] = Sequence("freed")

    @precondition(lambda self: any(seq.state == "live" for seq in self.rows))
    @rule()
    def flush(self):
        rows = [row for row, seq in enumerate(self.rows) if seq.state == "live"]
        self.cache.flush(rows)
        for row in rows:
            self.pack(self.rows[row])

    @rule(row=st.sampled_from((-1, ROWS, 99)))
    def name_an_unknown_row(self, row):
        self.refused(ValueError, lambda: self.cache.append(*VALUES[:, None, :1], [row]))
        self.refused(ValueError, lambda: self.cache.free([row]))

    @rule(row=ROW)
    def read(self, row):
        """Every token of the row is there, in order."""
        got, ids = self.cache.gather(row), self.rows[row].ids
        for x, values in zip(got, VALUES):
            want = values[ids].transpose(0, 1)
            assert x.shape == want.shape and (not ids or float((x - want).abs().max()) <= ATOL)

    # ---- what always holds

    @invariant()
    def pages_and_counters_are_the_models(self):
        if not hasattr(self, "rows"):
            return
        CacheLife.steps += 1
        book = self.cache.book
        book.check()
        assert len(book.free) == self.free_pages()
        number = {}  # of every page of the model
        for row, seq in enumerate(self.rows):
            length = len(seq.ids)
            counts = [int(count[row]) for count in self.cache.counts]
            assert counts == [min(length, self.sinks), *(128 * n for n in seq.packed), length]
            assert all(number.setdefault(page, mine) == mine for page, mine in zip(seq.pages, book.held[row]))
            assert len(seq.pages) == len(book.held[row])
        assert len(set(number.values())) == len(number)
        tables = self.cache.table.numpy()
        assert all(tables[row, : len(held)].tolist() == held and (tables[row, len(held) :] == -1).all()
                   for row, held in enumerate(book.held))
        limits = [0 if seq.state == "freed" else min(MAX_SEQLEN, self.sinks + self.windows[0] + 127 + 128 * len(
            seq.pages)) for seq in self.rows]
        assert np.array_equal(self.cache.limit.numpy(), limits)

    def teardown(self):
        for row in range(ROWS if hasattr(self, "rows") else 0):
            self.read(row)


def test_ten_thousand_steps():
    CacheLife.steps = 0
    run_state_machine_as_test(CacheLife, settings=settings(
        max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck)))
    assert CacheLife.steps >= 10_000
