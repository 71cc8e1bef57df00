"""Frames: memory that the sequences, heads and layers of a model share, given out by prefix sums (LeanKV, section 5.2).

Free frames stand in a circular list with a head and a tail that only grow; free = tail - head. A call gives every row
what it needs, or nothing: offsets into the list are the exclusive sums of the rows' needs in row order, and a row goes
ahead if its inclusive sum is free. Nothing depends on who comes first, so a GPU's blocks can do it from one scan.

Sequences may share frames: ``shared`` counts the holders of a frame beside the first, so that what gives frames out
need not know of it. A frame is free again when its last holder returns it.

A frame holds one record of the high level or a whole number of the low one's, where the records' sizes allow it with
little waste; else each level has frames of its own. All in torch, on any device.
"""

import copy
from collections import Counter
from collections.abc import Iterable

import torch

from lowbit_attn import layout
from lowbit_attn.cache.journal import Journal
from lowbit_attn.cache.pages import PageExhaustedError
from lowbit_attn.checks import integer
from lowbit_attn.formats import FORMATS, Format
from lowbit_attn.formats.levels import Levels, parse

MOST_WASTE = 0.08  # of a frame that both levels share


class Copied:
    """Base of what holds tensors that calls in and outside inference mode write: so may a deep copy be written."""

    def __deepcopy__(self, memo: dict) -> "Copied":
        twin = memo[id(self)] = object.__new__(type(self))
        with torch.inference_mode(False):
            vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin


class FreeList(Copied):
    """The circular list of one size of frames: ids int32 [frames]; ends int64 [2], its head and tail; shared int32
    [frames], holders of each frame beside the first."""

    def __init__(self, frames: int, device: torch.device):
        self.ids = torch.arange(frames, dtype=torch.int32, device=device)
        self.ends = torch.tensor([0, frames], dtype=torch.int64, device=device)
        self.shared = torch.zeros_like(self.ids)

    @property
    def n_free(self) -> int:
        return int(self.ends[1] - self.ends[0])

    def free_ids(self) -> torch.Tensor:
        """Free ids in the order in which they are given out; a copy."""
        return self._ids(*self.ends.tolist())

    def _ids(self, start: int, stop: int) -> torch.Tensor:
        return self.ids[torch.arange(start, stop, device=self.ids.device) % len(self.ids)]

    def take(self, count: int) -> torch.Tensor:
        """The next ``count`` free ids, which ``grant`` found to be there."""
        head = int(self.ends[0])
        taken = self._ids(head, head + count)
        self.ends[0] += count
        return taken

    def take_where(self, wants: torch.Tensor) -> torch.Tensor:
        """The next free ids for those of bool [n] that want one, in their order: int64 [n], without meaning elsewhere.

        ``grant`` found so many to be there. No host read, so calls may be captured.
        """
        wanted = wants.long()
        ids = self.ids[(self.ends[0] + wanted.cumsum(0) - wanted) % len(self.ids)].long()
        self.ends[0] += wanted.sum()
        return ids

    def give(self, ids: torch.Tensor) -> None:
        """Return ids to the list's tail."""
        places = (self.ends[1] + torch.arange(len(ids), device=self.ids.device)) % len(self.ids)
        self.ids[places] = ids
        self.ends[1] += len(ids)

    def share(self, ids: torch.Tensor) -> None:
        """Give frames in use, distinct ids, one holder more."""
        self.shared[ids.long()] += 1

    def release(self, ids: torch.Tensor) -> None:
        """Take a holder from frames, distinct ids; those that had no other return to the list's tail."""
        has_others = self.shared[ids.long()] > 0
        self.shared[ids.long()] -= has_others.int()
        self.give(ids[~has_others])

    def extend(self, frames: int, journal: Journal) -> None:
        """Add new ids behind the free ones."""
        first = len(self.ids)
        fresh = torch.arange(first, first + frames, dtype=torch.int32, device=self.ids.device)
        free = torch.cat((self.free_ids(), fresh))
        ids = torch.cat((free, torch.zeros(first + frames - len(free), dtype=torch.int32, device=free.device)))
        journal.keep(self.ends)
        journal.set(self, ids=ids, shared=torch.nn.functional.pad(self.shared, (0, frames)))
        self.ends[0], self.ends[1] = 0, len(free)


class FramePool(Copied):
    """Frames for the two levels of any number of caches (one a layer), on one device.

    Args:
        high, low: formats or their names; or a Levels, or a name of one, as high, with low None.
        head_dim: channels of a head.
        frames: how many; one number where a frame serves both levels (``is_shared``), else (high, low).
        device: where the memory lives.

    ``memory``: uint8 [frames, frame bytes] of each size, one or two; tables count it in units of 128 bytes.
    ``lists``: the FreeList of each. ``per_low``: low records in one frame. ``sizes``: for each level, which memory.
    """

    @torch.inference_mode(False)
    def __init__(self, high: str | Format | Levels, low: str | Format | None = None, *, head_dim: int,
                 frames: int | tuple[int, int], device: torch.device | str = "cpu"):
        self.levels = _levels(high, low)
        self.levels.check(head_dim)
        self.head_dim, self.device = head_dim, torch.device(device)
        self.record_bytes = tuple(fmt.record_bytes(head_dim) for fmt in self.levels.formats)
        self.per_low, self.frame_bytes = frame_sizes(*self.record_bytes)
        self.is_shared = len(self.frame_bytes) == 1
        self.sizes = (0, 0) if self.is_shared else (0, 1)
        counts = self._counts(frames)
        self.memory = [torch.zeros((n, size), dtype=torch.uint8, device=self.device)
                       for n, size in zip(counts, self.frame_bytes)]
        self.lists = [FreeList(n, self.device) for n in counts]

    def _counts(self, frames: int | tuple[int, int]) -> tuple[int, ...]:
        wanted = 1 if self.is_shared else 2
        counts = tuple(integer("frames", n) for n in (frames if isinstance(frames, tuple | list) else (frames,)))
        if len(counts) != wanted or min(counts) < 1:
            kind = "one number, for a frame serves both levels" if self.is_shared else "(high, low), as sizes differ"
            raise ValueError(f"frames: got {frames}, supported for {self.levels}: {kind}; 1 or more")
        return counts

    @property
    def n_free(self) -> tuple[int, ...]:
        """Free frames of each size."""
        return tuple(free.n_free for free in self.lists)

    @property
    def nbytes(self) -> int:
        """Bytes of all frames."""
        return sum(memory.nbytes for memory in self.memory)

    def units(self, level: int) -> torch.Tensor:
        """Memory of a level as uint8 [units, 128]; a view."""
        return self.memory[self.sizes[level]].view(-1, layout.RECORD_ALIGN)

    def frame_units(self, level: int) -> int:
        """Units of a frame that holds records of this level."""
        return self.frame_bytes[self.sizes[level]] // layout.RECORD_ALIGN

    def needs(self, high: torch.Tensor, low: torch.Tensor, open_parts: torch.Tensor) -> torch.Tensor:
        """Frames of each size that heads need for new records: int64 [sizes, ..].

        high, low: records; open_parts: low records that still fit into a head's last frame; all int64 [..].
        """
        fresh = (low - open_parts).clamp(min=0)
        frames = (fresh + self.per_low - 1) // self.per_low
        return torch.stack((high + frames,) if self.is_shared else (high, frames))

    def grant(self, needs: torch.Tensor) -> torch.Tensor:
        """Which rows get what they need, bool [rows], by the inclusive sums of needs int64 [sizes, rows].

        A row that needs nothing goes ahead; those that go ahead and need something come before all that do not.
        No host read, so calls may be captured.
        """
        free = torch.stack([mine.ends[1] - mine.ends[0] for mine in self.lists])[:, None]
        return (needs.cumsum(1) <= free).all(0) | (needs == 0).all(0)

    def take_where(self, wants: torch.Tensor) -> torch.Tensor:
        """Frames for heads of rows that ``grant`` lets go: bool [n, levels] -> ids int64 [n, levels], without meaning
        where no frame is wanted. Heads in their order; of one head, the high level first."""
        ids = torch.zeros(wants.shape, dtype=torch.int64, device=wants.device)
        for size, free in enumerate(self.lists):
            levels = slice(0, 2) if self.is_shared else slice(size, size + 1)
            mine = wants[:, levels]
            ids[:, levels] = free.take_where(mine.flatten()).view(mine.shape)
        return ids

    def take(self, counts: Iterable[int]) -> list[torch.Tensor]:
        """Ids of so many frames of each size; PageExhaustedError, and nothing is taken, if they are not there."""
        counts = list(counts)
        if any(count > free for count, free in zip(counts, self.n_free)):
            raise PageExhaustedError(f"the call needs {counts} frames, {list(self.n_free)} are free; free sequences or "
                                     "allocate with more frames")
        return [free.take(count) for free, count in zip(self.lists, counts)]

    def give(self, ids: Iterable[torch.Tensor]) -> None:
        """Return frames of each size, distinct int32 ids, of one holder."""
        for free, mine in zip(self.lists, ids):
            free.release(mine)

    def share(self, ids: Iterable[torch.Tensor]) -> None:
        """Give frames of each size, distinct int32 ids that are in use, one holder more."""
        for free, mine in zip(self.lists, ids):
            free.share(mine)

    def grow(self, frames: int | tuple[int, int]) -> None:
        """Add frames; the old ones keep their ids and contents. Both copies exist meanwhile."""
        counts = self._counts(frames)
        with torch.inference_mode(False), Journal() as journal:
            journal.set(self, memory=[torch.cat((old, old.new_zeros((n, old.shape[1]))))
                                      for old, n in zip(self.memory, counts)])
            for free, n in zip(self.lists, counts):
                free.extend(n, journal)

    def keep(self, journal: Journal) -> None:
        """Remember which frames are free, and which are shared. What a free one holds means nothing."""
        for free in self.lists:
            for x in (free.ids, free.ends, free.shared):
                journal.keep(x)

    def most(self, heads: int, tokens: int) -> tuple[int, ...]:
        """Frames of each size that so many heads take at most for so many tokens more, whatever their classes."""
        frames = heads * -(-tokens // layout.PAGE_TOKENS)
        return (2 * frames,) if self.is_shared else (frames, frames)

    def require(self, rows: int, tokens: int, num_heads_kv: int, layers: int = 1) -> None:
        """Raise PageExhaustedError unless so many rows can each take so many tokens more, whatever their classes.

        A head takes at most one frame of each level in 128 tokens.
        """
        wanted = self.most(rows * num_heads_kv * layers, tokens)
        if any(need > free for need, free in zip(wanted, self.n_free)):
            raise PageExhaustedError(f"{rows} rows of {num_heads_kv} KV heads and {layers} layers may take "
                                     f"{list(wanted)} frames in {tokens} tokens, {list(self.n_free)} are free")

    def check(self, *caches) -> None:
        """Raise AssertionError unless every frame is free, or held by these caches, which must be all, as often as its
        count says: once if it is not shared."""
        for size, free in enumerate(self.lists):
            held = Counter(frame for cache in caches for frame in cache.held_frames(size))
            ids = sorted(free.free_ids().tolist() + list(held))
            assert ids == list(range(len(free.ids))), f"size {size}: {len(ids)} frames free or held of {len(free.ids)}"
            holders = [max(0, held[frame] - 1) for frame in range(len(free.ids))]
            assert free.shared.tolist() == holders, f"size {size}: frames free or held otherwise than counted"


def frame_sizes(high_bytes: int, low_bytes: int) -> tuple[int, tuple[int, ...]]:
    """(low records in a frame, bytes of each size of frame) for records of these bytes: one size that serves both
    levels where that wastes little, else two."""
    per_low = round(high_bytes / low_bytes)
    frame = max(high_bytes, per_low * low_bytes)
    waste = 2 * frame - high_bytes - per_low * low_bytes  # of one of the two: the other fills the frame
    return (per_low, (frame,)) if per_low > 1 and waste <= MOST_WASTE * frame else (1, (high_bytes, low_bytes))


def _levels(high: str | Format | Levels, low: str | Format | None) -> Levels:
    if isinstance(high, Levels) and low is None:
        return high
    if isinstance(high, str) and low is None:
        if levels := parse(high):
            return levels
        raise ValueError(f"high: got {high!r} alone, supported: a pair of formats, or a name of levels: lean, "
                         "lean-low, <format>+<format>[-high<percent>]")
    high, low = (FORMATS[fmt] if isinstance(fmt, str) else fmt for fmt in (high, low))
    if not isinstance(high, Format) or not isinstance(low, Format):
        raise TypeError(f"high, low: got {high!r}, {low!r}, supported: formats or their names")
    return Levels(f"{high}+{low}", high, low)
