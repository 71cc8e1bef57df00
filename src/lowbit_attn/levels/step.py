"""Steps of a LevelCache in fixed shapes, from what the device holds alone: no host read, so that steps may be captured.

    append    new tokens -> sinks, ring; a row without room changes nothing but its mark
    observed  scores of the ring's tokens after the queries just decoded            LeanKV, section 4.1
    Plan      the oldest 128 of the ring: classes, frames by prefix sums; written:  sections 4.2, 5.2
              whole records -> pages, the rest -> stages

Rows that have nothing to do take part in every operation and write what was there before. In torch, on any device;
``KERNELS`` has what does all three by kernels.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lowbit_attn import layout
from lowbit_attn.cache.significance import Scores, added, means, observe_ring
from lowbit_attn.levels.moves import LEVELS, PAGE, stage_stores
from lowbit_attn.levels.policy import HIGH, LOW, PRUNED
from lowbit_attn.levels.state import WINDOW
from lowbit_attn.reference import Attention


class Kernels(NamedTuple):
    """Kernels of a LevelCache's steps on one type of device; the first argument of each is the cache."""

    why_not: Callable[[Any, Attention], list[str]]  # reasons why they do not serve a call; empty if they do
    # (cache, rows int64 [batch], q, lse, options): as ``observed`` and a Plan of the rows that act or wait
    manage: Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, Attention], None]
    prepare: Callable[[Any], None]  # makes what no captured step may be the first to make
    # (cache, rows int64 [batch], k, v): as ``append`` below
    append: Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], None]


KERNELS: dict[str, Kernels] = {}  # by device type; levels/manage.py adds its own, so that this file knows of no kernel


def append(cache, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Put new tokens k, v [batch, tokens, num_heads_kv, head_dim] behind those of distinct rows int64 [batch].

    A row that they would bring beyond its ``limit`` stays as it is, and ``faults`` marks it.
    """
    tokens, held = k.shape[1], cache.n_tok[rows]
    has_room = held + tokens <= cache.limit[rows]
    for i in range(tokens):
        at = held + i
        for stores, slot, mine in (((cache.hi_k, cache.hi_v), at.clamp(max=cache.sinks), at < cache.sinks),
                                   ((cache.ring_k, cache.ring_v), (at - cache.sinks) % cache.slots, at >= cache.sinks)):
            for store, new in zip(stores, (k, v)):
                by_row = store.unflatten(0, (cache.max_batch, -1))
                _set(by_row, (rows, slice(None), slot), has_room & mine, new[:, i])
    after = held + tokens
    _set(cache.n_tok, (rows,), has_room, after)
    _set(cache.n_sink, (rows,), has_room, after.clamp(max=cache.sinks))
    _set(cache.faults, (rows,), ~has_room, torch.ones_like(held))
    cache.recount()


def observed(cache, rows: torch.Tensor, q: torch.Tensor, lse: torch.Tensor, acts: torch.Tensor,
             options: Attention) -> Scores:
    """Scores by ring slot of rows int64 [batch] once these queries are added: fp32 [batch, num_heads_kv, slots], int32
    [batch, slots].

    q: [batch, q_len, num_heads, head_dim] of the rows' last tokens; lse: fp32 [batch, num_heads, q_len]. acts: bool
    [batch]; the others' scores stay. Slots without a token get 0.
    """
    heads, n_out, n_tok = cache.num_heads_kv, cache.n_out[rows], cache.n_tok[rows]
    keys = cache.ring_k.unflatten(0, (-1, heads))[rows]
    new, is_held = observe_ring(q, keys, n_out, cache.n_sink[rows] + n_out, n_tok, lse, options)
    score, seen = cache.score.unflatten(0, (-1, heads))[rows], cache.seen[rows]
    return added(Scores(score, seen), new, is_held, acts)


def store_scores(cache, rows: torch.Tensor, scores: Scores) -> None:
    """Make these the scores of rows int64 [batch]."""
    cache.score.unflatten(0, (cache.max_batch, -1))[rows], cache.seen[rows] = scores


class Moved(NamedTuple):
    """A level's tokens of (sequence, head) rows: K, V [n, 256, head_dim], the staged ones, then the block's; how many,
    int64 [n]."""

    k: torch.Tensor
    v: torch.Tensor
    count: torch.Tensor

    @property
    def is_full(self) -> torch.Tensor:
        """Whether the first 128 are a record."""
        return self.count >= PAGE


class Plan:
    """Where the oldest 128 tokens of rows go that have 128 beyond the window; nothing is written before ``write``.

    Args:
        cache, rows: distinct rows, int64 [batch]; frames are given in their order, a row all or nothing.
        scores: of the ring, as ``observed`` gives them.
        tries: bool [batch], rows that may move a block; the others only keep their scores.

    ``due``, ``go``: bool [batch], rows whose block is planned, and those that get the frames they need.
    """

    def __init__(self, cache, rows: torch.Tensor, scores: Scores, tries: torch.Tensor):
        self.cache, self.rows, self.scores = cache, rows, scores
        heads, n_out, device = cache.num_heads_kv, cache.n_out[rows], rows.device
        recent = cache.n_tok[rows] - cache.n_sink[rows] - n_out
        self.due = tries & (recent >= WINDOW + PAGE)
        self.v = (rows[:, None] * heads + torch.arange(heads, device=device)).flatten()
        block = (n_out[:, None] + torch.arange(PAGE, device=device)) % cache.slots
        self.block, self.slots = block, block.repeat_interleave(heads, 0)
        score = scores.score.flatten(0, 1).gather(1, self.slots)
        seen = scores.seen.gather(1, block).repeat_interleave(heads, 0)
        self.classes = cache.policy.classes(means(score, seen))
        self.moved = [self._moved(level) for level in LEVELS]
        self.records = [fmt.quantize(moved.k[:, :PAGE].float(), moved.v[:, :PAGE].float(), cache.range_search)
                        for fmt, moved in zip(cache.format.formats, self.moved)]
        self.full = torch.stack([moved.is_full for moved in self.moved], 1)  # [n, levels]
        takes = self.full.clone()
        takes[:, LOW] &= cache.half[self.v] < 0
        self.takes = takes & self.due.repeat_interleave(heads)[:, None]
        self.go = self.due & cache.pool.grant(self._needs())

    def _moved(self, level: int) -> Moved:
        cache, places = self.cache, torch.arange(2 * PAGE, device=self.rows.device)
        staged, is_mine = cache.n_stage[level, self.v].long()[:, None], self.classes == level
        order = (~is_mine).to(torch.uint8).argsort(dim=1, stable=True)  # the level's tokens first, by position
        of_block = PAGE + order.gather(1, (places - staged).clamp(0, PAGE - 1))
        chosen = torch.where(places < staged, places, of_block)
        start = cache.sinks if level == HIGH else 0
        sides = [torch.cat((stage[self.v, start : start + PAGE], ring[self.v[:, None], self.slots]), 1)
                 for stage, ring in zip(stage_stores(cache, level), (cache.ring_k, cache.ring_v))]
        return Moved(*(_picked(side, chosen) for side in sides), staged[:, 0] + is_mine.sum(1))

    def _needs(self) -> torch.Tensor:
        """Frames of each size that rows need, int64 [sizes, batch]."""
        by_level = self.takes.unflatten(0, (len(self.rows), -1)).sum(1)
        return torch.stack([sum(by_level[:, level] for level in LEVELS if self.cache.pool.sizes[level] == size)
                            for size in range(len(self.cache.pool.lists))])

    def write(self) -> None:
        """Store scores and plans; of rows that go take the frames, fill pages and stages, and move the counters."""
        cache, rows, v = self.cache, self.rows, self.v
        goes = self.go.repeat_interleave(cache.num_heads_kv)
        frames = cache.pool.take_where(self.takes & goes[:, None])
        for level in LEVELS:
            self._write_level(level, goes, frames[:, level])
        self._note(goes)
        if cache.windows:
            self._note_places(goes)
        _set(cache.n_drop, (v,), goes, cache.n_drop[v] + (self.classes == PRUNED).sum(1, dtype=torch.int32))
        _set(cache.waits, (rows,), self.due, ~self.go)
        cache.starved += (self.due & ~self.go).sum()
        cache.n_out[rows] += PAGE * self.go
        cache.recount()

    def _write_level(self, level: int, goes: torch.Tensor, frames: torch.Tensor) -> None:
        cache, v, moved = self.cache, self.v, self.moved[level]
        is_full, packed = self.full[:, level] & goes, cache.c_pack[level, v]
        page, size = packed // PAGE, cache.pool.record_bytes[level] // layout.RECORD_ALIGN
        unit = frames * cache.pool.frame_units(level)
        if level == LOW:
            half = cache.half[v]
            unit = torch.where(half < 0, unit, half)
            is_last = (page + 1) % cache.pool.per_low == 0
            _set(cache.half, (v,), is_full, torch.where(is_last, -1, unit + size))
        _write_records(cache.pool.units(level), unit, self.records[level], is_full)
        _set(cache.table[level], (v, page.clamp(max=cache.table.shape[2] - 1)), is_full, unit)
        _set(cache.c_pack[level], (v,), is_full, packed + PAGE)
        rest = torch.arange(PAGE, device=v.device) + PAGE * self.full[:, level, None]
        start = cache.sinks if level == HIGH else 0
        for store, tokens in zip(stage_stores(cache, level), (moved.k, moved.v)):
            _set(store[:, start : start + PAGE], (v,), goes, _picked(tokens, rest))
        left = moved.count - PAGE * self.full[:, level]
        _set(cache.n_stage[level], (v,), goes, left.to(torch.int32))

    def _note_places(self, goes: torch.Tensor) -> None:
        """Classes by position of blocks that go, and tokens of each level up to them (windows.py)."""
        cache, v = self.cache, self.v
        block = (cache.n_out[self.rows].long() // PAGE).clamp(max=cache.classes.shape[1] - 1)
        block = block.repeat_interleave(cache.num_heads_kv)
        _set(cache.classes, (v, block), goes, self.classes)
        for level in LEVELS:
            new = cache.before[level, v, block] + (self.classes == level).sum(1)
            _set(cache.before[level], (v, block + 1), goes, new)

    def _note(self, goes: torch.Tensor) -> None:
        """Scores, without those of blocks that go; and the plans: order by class, and tokens of each level."""
        cache, v, (score, seen) = self.cache, self.v, self.scores
        slots = self.slots.unflatten(0, score.shape[:2])
        left = Scores(torch.where(self.go[:, None, None], score.scatter(2, slots, 0), score),
                      torch.where(self.go[:, None], seen.scatter(1, self.block, 0), seen))
        store_scores(cache, self.rows, left)
        due = self.due.repeat_interleave(cache.num_heads_kv)
        _set(cache.order, (v,), due, self.classes.argsort(dim=1, stable=True).to(torch.uint8))
        for level in LEVELS:
            _set(cache.new[level], (v,), due, (self.classes == level).sum(1, dtype=torch.int32))


def _picked(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Rows x [n, m, D] at places int64 [n, k] of each: [n, k, D]."""
    return x[torch.arange(len(x), device=x.device)[:, None], places]


def _set(store: torch.Tensor, at: tuple, chosen: torch.Tensor, values: torch.Tensor) -> None:
    """store[at] = values [n, ..] where chosen bool [n]; the others stay."""
    old = store[at]
    store[at] = torch.where(chosen.view(-1, *(1,) * (old.dim() - 1)), values.to(store.dtype), old)


def _write_records(units: torch.Tensor, first: torch.Tensor, records: torch.Tensor, chosen: torch.Tensor) -> None:
    """Put the chosen of records uint8 [n, bytes] at units ``first`` int [n] of memory uint8 [units, 128].

    A row that is not chosen repeats what a chosen one writes; where none is, all write back what they read.
    """
    any_chosen = chosen.any()
    source = torch.where(chosen, torch.arange(len(first), device=first.device), chosen.int().argmax())
    places = torch.where(any_chosen, first.long()[source], 0)[:, None] + torch.arange(
        records.shape[1] // layout.RECORD_ALIGN, device=first.device)
    new = records[source].unflatten(1, (-1, layout.RECORD_ALIGN))
    units[places] = torch.where(any_chosen, new, units[places])
