"""Tokens that enter a row of a cache through the host: which go where, and which blocks are packed."""

from collections.abc import Iterator

import numpy as np
import torch

from lowbit_attn import layout
from lowbit_attn.cache.backend import backend_of
from lowbit_attn.cache.journal import Journal
from lowbit_attn.cache.significance import OpenScores, Scores
from lowbit_attn.formats.contract import reordered


class Extension:
    """New tokens of one row with all that they write, made before anything is written.

    Args:
        cache: the cache, or anything with its state.
        row: the sequence that gets the tokens.
        k, v: [tokens, num_heads_kv, head_dim] of the cache's dtype; none: only packs.
        pack: every block that they fill; else those that earlier tokens filled.
        observed: what the call's queries say of all tokens that are open or new, of formats that order tokens.

    ``sides``: those that pack blocks; ``counts``: the row's counters afterwards, int [1] by name.
    """

    def __init__(self, cache, row: int, k: torch.Tensor, v: torch.Tensor, pack: bool, observed: Scores | None = None):
        self.cache, self.row = cache, row
        self._blocks: list[tuple[str, slice, torch.Tensor]] = []  # side, pages of the row, tokens
        self._tokens: list[tuple[torch.Tensor, torch.Tensor]] = []  # where, what
        n_sink, n_qk, n_qv, n_tok = (int(count[row]) for count in cache.counts)
        fresh = min(len(k), cache.sinks - n_sink)
        if fresh:
            for store, new in ((cache.sink_k, k), (cache.sink_v, v)):
                self._tokens.append((store[row, :, n_sink : n_sink + fresh], new[:fresh].transpose(0, 1)))
        first = n_tok - n_sink  # relative position of the first token that is no sink
        until = first + len(k) - fresh if pack else first
        n_qk = self._extend("k", k[fresh:], first, n_qk, until)
        n_qv = self._extend("v", v[fresh:], first, n_qv, until)
        self._scores = None
        if cache.format.orders_tokens:
            blocks = (n_qk - int(cache.counts.n_qk[row])) // layout.PAGE_TOKENS
            self._scores = OpenScores(cache, row, len(k) - fresh, blocks, observed)
        after = dict(n_sink=n_sink + fresh, n_qk=n_qk, n_qv=n_qv, n_tok=n_tok + len(k))
        self.counts = {name: np.array([value]) for name, value in after.items()}

    @property
    def sides(self) -> set[str]:
        return {side for side, *_ in self._blocks}

    def write(self, journal: Journal) -> None:
        """Pack the blocks and store the tokens; the pages are in the table."""
        backend = backend_of(self.cache)
        for side, pages, blocks in self._blocks:
            pages = self.cache.table[self.row, pages]
            if not backend.launches:
                for page in pages.tolist():
                    journal.keep(self.cache.pool[page])
            if self._scores is not None:
                blocks = reordered(blocks, self._scores.orders)
            backend.write_blocks(self.cache, pages, blocks, side)
            if self._scores is not None and side == "v":
                self.cache.pool_positions[pages.long()] = self._scores.orders
        for target, tokens in self._tokens:
            journal.write(target, tokens)
        if self._scores is not None:
            self._scores.write(journal)

    def _extend(self, side: str, new: torch.Tensor, first: int, start: int, until: int) -> int:
        """New tokens [tokens, H, D] of one side, from relative position ``first`` on; blocks from position ``start`` up
        to ``until`` less the window are packed. Returns the side's packed tokens."""
        cache = self.cache
        ring, window = (cache.ring_k, cache.window_k) if side == "k" else (cache.ring_v, cache.window_v)
        ring, stop = ring[self.row], first + len(new)
        full = max(0, until - start - window) // layout.PAGE_TOKENS
        end = start + full * layout.PAGE_TOKENS
        if full:
            tokens = _joined(ring, start, min(first, end), new[: max(0, end - first)])
            blocks = tokens.unflatten(0, (-1, layout.PAGE_TOKENS)).transpose(1, 2).contiguous()
            if side == "k":
                blocks = cache.turned(self.row, blocks, start, back=True)
            self._blocks.append((side, slice(start // layout.PAGE_TOKENS, end // layout.PAGE_TOKENS), blocks))
        for at, slots in _runs(max(first, end), stop, ring.shape[1]):
            tokens = new[at - first : at - first + slots.stop - slots.start]
            self._tokens.append((ring[:, slots], tokens.transpose(0, 1)))
        return end


def _joined(ring: torch.Tensor, start: int, stop: int, new: torch.Tensor) -> torch.Tensor:
    """Tokens start .. stop - 1 of a ring [H, slots, D], then new ones [tokens, H, D]: [all tokens, H, D]."""
    if start == stop:
        return new
    tokens = new.new_empty((stop - start + len(new), *new.shape[1:]))
    for at, slots in _runs(start, stop, ring.shape[1]):
        tokens[at - start : at - start + slots.stop - slots.start] = ring[:, slots].transpose(0, 1)
    tokens[stop - start :] = new
    return tokens


def _runs(start: int, stop: int, size: int) -> Iterator[tuple[int, slice]]:
    """Positions start .. stop - 1 in a ring of so many slots: the first position of each run and its slots."""
    while start < stop:
        slot = start % size
        count = min(stop - start, size - slot)
        yield start, slice(slot, slot + count)
        start += count
