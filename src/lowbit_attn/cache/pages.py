"""The host's account of a cache: which pages are free, who holds which, which rows are in use.

Kernels never read it: they follow the cache's table. It takes and returns pages; a page that several sequences hold
(a common prefix) returns to the pool with its last holder.
"""

import copy
from collections.abc import Iterable

import numpy as np

from lowbit_attn.errors import PageExhaustedError

UNUSED, LIVE, FREED = range(3)  # states of a row: any call may start an unused one; a freed one wants add or prefill


class PageBook:
    """Pages of a pool and the sequences (rows) that hold them.

    free: page ids, the last is handed out next; refs int [num_pages]: holders of each page; held: page ids of each
    row in the order of its tokens; n_pages int [max_batch]: their number; state int [max_batch].
    """

    def __init__(self, num_pages: int, max_batch: int):
        self.free = list(range(num_pages - 1, -1, -1))
        self.refs = np.zeros(num_pages, np.int32)
        self.held: list[list[int]] = [[] for _ in range(max_batch)]
        self.n_pages = np.zeros(max_batch, np.int64)
        self.state = np.full(max_batch, UNUSED)

    def copy(self) -> "PageBook":
        return copy.deepcopy(self)

    def require(self, count: int) -> None:
        """Raise PageExhaustedError unless so many pages are free."""
        if count > len(self.free):
            raise PageExhaustedError(f"the call needs {count} pages, {len(self.free)} of {len(self.refs)} are free; "
                                     "free sequences or allocate with a larger num_pages")

    def next_free(self, count: int) -> list[int]:
        """Ids of the pages that ``take`` hands out next; raises PageExhaustedError if there are fewer."""
        self.require(count)
        return self.free[: -count - 1 : -1]

    def take(self, row: int, count: int) -> list[int]:
        """Give a row so many free pages behind those it holds; returns their ids."""
        self.require(count)
        return self.hold(row, [self.free.pop() for _ in range(count)])

    def hold(self, row: int, pages: Iterable[int]) -> list[int]:
        """Add a row to the holders of these pages, which come behind those it holds."""
        pages = list(pages)
        self.held[row] += pages
        self.refs[pages] += 1
        self.n_pages[row] += len(pages)
        return pages

    def release(self, row: int) -> None:
        """Take all its pages from a row; those without another holder are free again, its first page on top."""
        for page in reversed(self.held[row]):
            self.refs[page] -= 1
            if not self.refs[page]:
                self.free.append(page)
        self.held[row], self.n_pages[row] = [], 0

    def first_vacant(self) -> int | None:
        """The lowest row that holds no sequence: unused or freed."""
        vacant = np.flatnonzero(self.state != LIVE)
        return int(vacant[0]) if len(vacant) else None

    def renumber(self, place: np.ndarray) -> None:
        """Page p becomes page place[p]: for a pool whose pages were moved."""
        self.free = [int(place[page]) for page in self.free]
        self.held = [[int(place[page]) for page in pages] for pages in self.held]
        refs = np.empty_like(self.refs)
        refs[place] = self.refs
        self.refs = refs

    def grown(self, num_pages: int) -> "PageBook":
        """A copy for a larger pool: the pages that were free before are handed out before the new ones."""
        book, old = self.copy(), len(self.refs)
        book.free = list(range(num_pages - 1, old - 1, -1)) + book.free
        book.refs = np.concatenate((book.refs, np.zeros(num_pages - old, np.int32)))
        return book

    def check(self) -> None:
        """Raise AssertionError unless every page is free or held, and as often as its count says."""
        count = np.zeros_like(self.refs)
        for row, pages in enumerate(self.held):
            assert len(pages) == self.n_pages[row], f"row {row} holds {len(pages)} pages, counted {self.n_pages[row]}"
            assert len(set(pages)) == len(pages), f"row {row} holds a page twice: {pages}"
            np.add.at(count, pages, 1)
        wrong = np.flatnonzero(count != self.refs)
        assert not len(wrong), f"pages {wrong.tolist()}: {count[wrong]} holders, counted {self.refs[wrong]}"
        free = np.flatnonzero(count == 0)
        assert sorted(self.free) == free.tolist(), f"free list {sorted(self.free)}, without a holder {free.tolist()}"
