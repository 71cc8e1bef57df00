"""A level of a LevelCache as decode kernels read it: an ordinary cache whose rows are (sequence, KV head).

Every row has one KV head. Its 16-bit segment of sinks is the level's stage (the high level's begins with the real
sinks), its table names units of 128 bytes, so that a page may begin at any unit of a frame, and the low level has the
ring. Tokens of the high level are older than those of the ring, which ``c_out`` and ``c_tok`` say: a step of several
queries hides none of them.
"""

from operator import attrgetter, is_

import numpy as np
import torch

from lowbit_attn import layout
from lowbit_attn.cache.held import HeldCache
from lowbit_attn.cache.state import Counts
from lowbit_attn.levels.policy import HIGH

# with it 64 rows of 256 pages get an even share of all pages, 8 rows of 1,024 splits: faster so with heads 4:1, and as
# fast without (docs/lessons.md)
LONGER = 1.25
_made_of = attrgetter("table", "c_sink", "c_pack", "c_tok", "c_out", "hi_k", "lo_k", "ring_k")


class LevelView(HeldCache):
    """One level of a LevelCache; its counters and pages are the cache's, whatever they hold at a call.

    ``pool``: uint8 [units, 1, record bytes], the record that would begin at each unit of the level's memory, so that
    pages are numbers of units; ``units``: the same memory, uint8 [units, 128]. ``hidden``: int32 [rows] where it is
    read under a window, what ``windows.hidden`` says, else None; ``sinks_before``: sinks before its stage, or room for
    them.
    """

    units = None

    def __init__(self, cache, level: int, hidden: torch.Tensor | None = None):
        fmt, memory = cache.format.formats[level], cache.pool.units(level)
        size = fmt.record_bytes(cache.head_dim)
        ends = len(memory) - size // layout.RECORD_ALIGN + 1
        sinks = (cache.hi_k, cache.hi_v) if level == HIGH else (cache.lo_k, cache.lo_v)
        rows = torch.arange(len(cache.half), dtype=torch.int32, device=cache.device)
        state = dict(
            pool=memory.as_strided((ends, 1, size), (layout.RECORD_ALIGN, size, 1)), units=memory,
            table=cache.table[level], n_sink=cache.c_sink[level], n_qk=cache.c_pack[level], n_qv=cache.c_pack[level],
            n_tok=cache.c_tok[level], ring_start=cache.c_out[level], sink_k=sinks[0][:, None], sink_v=sinks[1][:, None],
            ring_k=cache.ring_k[:, None], ring_v=cache.ring_v[:, None], rows=rows, ring_rows=rows)
        super().__init__(fmt.name, [1, 0, cache.table.shape[2], 0], state, attached=None, query_weights=None,
                         range_search=cache.range_search, hidden=hidden,
                         sinks_before=cache.sinks if level == HIGH else 0)

    def batch_rows(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows[:batch], self.ring_rows[:batch]

    def known_pages(self, batch: int) -> np.ndarray | None:
        """Pages of each row as the choice of a kernel takes them. Only the device knows; but heads of a level differ in
        length, so one is assumed to have LONGER times what the table has room for on average."""
        held = np.full(batch, float(self.table.shape[1]))
        held[0] *= LONGER
        return held if batch > 1 else None

    @property
    def counts(self) -> Counts:
        return Counts(*(x.cpu().numpy() for x in self.counters()))


class LevelViews(list):
    """The two views of one cache; a pickled or deeply copied cache makes its own."""

    LIMIT = 64  # plans of one launch, by what distinguishes their calls: as plan.Plans

    def __init__(self, cache=None):
        super().__init__([] if cache is None else [LevelView(cache, level) for level in (0, 1)])
        self.is_prepared = False  # whether the kernels of manage were launched, as no captured step may be the first to
        # made by the first call with a window: int32 [2, rows], and the views that read it
        self.hidden: torch.Tensor | None = None
        self.windowed: tuple[LevelView, LevelView] | None = None
        self.pairs = {}  # plans of levels/pair.py by call
        self.owner, self.made_of = id(cache), () if cache is None else (*_made_of(cache), *cache.pool.memory)

    def __reduce__(self):
        return LevelViews, ()

    def keep(self, call: tuple, plan) -> None:
        """Add a plan of one launch over both levels."""
        if len(self.pairs) >= self.LIMIT:
            self.pairs.clear()
        self.pairs[call] = plan

    def under_window(self, cache) -> tuple[LevelView, LevelView]:
        """The two views as calls with a window read them; what is hidden is for each call to say."""
        if self.windowed is None:
            with torch.inference_mode(False):
                self.hidden = torch.zeros((2, len(cache.half)), dtype=torch.int32, device=cache.device)
                self.windowed = tuple(LevelView(cache, level, self.hidden[level]) for level in (0, 1))
        return self.windowed

    def serve(self, cache) -> bool:
        """Whether they are this cache's, and where its memory is by now."""
        now = (*_made_of(cache), *cache.pool.memory)
        return self.owner == id(cache) and len(now) == len(self.made_of) and all(map(is_, now, self.made_of))


def views_of(cache) -> LevelViews:
    """The levels of a cache as decode reads them, high and low; kept with it."""
    if getattr(cache, "views", None) is None or not cache.views.serve(cache):
        with torch.inference_mode(False):
            cache.views = LevelViews(cache)
    return cache.views
