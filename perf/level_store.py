"""Caches of two levels for each layer of e2e.py's decoder (LeanKV): as llama.py's stores, with ``manage`` in a step."""

import torch
from llama import COPY_BYTES, FILL_TOKENS, LowBitStore, Shape

from lowbit_attn import decode
from lowbit_attn.cache.significance import EVERY
from lowbit_attn.formats.levels import Levels, parse
from lowbit_attn.layout import PAGE_TOKENS
from lowbit_attn.levels import FramePool, LevelCache
from lowbit_attn.levels.frames import frame_sizes
from lowbit_attn.levels.policy import LOW, Shares
from lowbit_attn.levels.state import WINDOW

BY_HEAD = ("n_drop", "hi_k", "hi_v", "lo_k", "lo_v", "ring_k", "ring_v", "score", "order")  # first of all in a shape
BY_LEVEL = ("c_pack", "n_stage", "new")  # [2, heads of all sequences]
BY_SEQUENCE = ("n_sink", "n_out", "n_tok", "seen")
COUNTERS = ("n_sink", "n_out", "n_tok", "limit", "c_sink", "c_out", "c_pack", "c_tok", "n_stage", "half", "n_drop",
            "waits", "starved", "faults", "table")


def frames_of_a_head(levels: Levels, head_dim: int, tokens: int) -> tuple[int, ...]:
    """Frames of each size that a head's blocks take, all but sinks and window of so many tokens packed; with the
    levels' own shares they are the same for every head."""
    per_low, sizes = frame_sizes(*(fmt.record_bytes(head_dim) for fmt in levels.formats))
    high, kept = Shares(levels.percent / 100).counts(PAGE_TOKENS)
    blocks = max(0, tokens - levels.sinks - WINDOW) // PAGE_TOKENS
    pages = blocks * high // PAGE_TOKENS, blocks * (kept - high) // PAGE_TOKENS
    frames = pages[0], -(-pages[1] // per_low)
    return (sum(frames),) if len(sizes) == 1 else frames


class LevelStore(LowBitStore):
    """A LevelCache for every layer, each with a pool of its own; arguments as of LowBitStore.

    ``manages``: whether a step calls ``manage``, which every eighth does (``turns``); caches act whenever it is called.
    """

    def __init__(self, shape: Shape, format: str, batch: int, seqlen: int, spare: int, dtype: torch.dtype, device: str):
        self.shape, self.batch, self.seqlen, self.spare, self.manages = shape, batch, seqlen, spare, False
        self.caches = [self._cache(shape, format, batch, seqlen + spare, dtype, device) for _ in range(shape.layers)]
        self.starts = [[] for _ in self.caches]

    @staticmethod
    def _cache(shape: Shape, format: str, batch: int, tokens: int, dtype: torch.dtype, device: str) -> LevelCache:
        levels = parse(format)
        frames = [max(1, batch * shape.num_heads_kv * n) for n in frames_of_a_head(levels, shape.head_dim, tokens)]
        pool = FramePool(levels, head_dim=shape.head_dim, frames=tuple(frames), device=device)
        for free in pool.lists:  # as after many sequences have come and gone
            free.ids.copy_(torch.randperm(len(free.ids)))
        return LevelCache(pool, shape.num_heads_kv, max_batch=batch, max_seqlen=tokens, manage_every=1, dtype=dtype)

    @classmethod
    def sequence_bytes(cls, shape: Shape, format: str, seqlen: int, spare: int) -> int:
        """Bytes of one sequence in one layer, as allocated: frames, tables, sinks, stages, ring and scores."""
        one = cls._cache(shape, format, 1, seqlen + spare, torch.float16, "cpu")
        held = (one.table, one.hi_k, one.hi_v, one.lo_k, one.lo_v, one.ring_k, one.ring_v, one.score, one.seen)
        return one.pool.nbytes + sum(x.nbytes for x in held)

    def fill_layer(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Every sequence gets the tokens k, v [seqlen - 1, num_heads_kv, head_dim], in frames of its own; of each block
        the earliest tokens are high, as nothing scores them."""
        cache = self.caches[layer]
        for start in range(0, len(k), FILL_TOKENS):
            cache.prefill(0, k[start : start + FILL_TOKENS], v[start : start + FILL_TOKENS])
        if self.batch > 1:
            self._copy_first_row(cache)
        self.starts[layer] = [x.clone() for x in self._counters(cache)]

    @staticmethod
    def _counters(cache: LevelCache) -> list[torch.Tensor]:
        return [getattr(cache, name) for name in COUNTERS] + [free.ends for free in cache.pool.lists]

    def _copy_first_row(self, cache: LevelCache) -> None:
        heads = cache.num_heads_kv
        for size, free in enumerate(cache.pool.lists):
            mine = cache.frames_of(cache.heads_of(0), size).long()
            taken = free.take(len(mine) * (self.batch - 1)).reshape(self.batch - 1, len(mine)).long()
            words = cache.pool.memory[size].view(torch.int64)
            rows = max(1, COPY_BYTES // max(1, len(mine) * cache.pool.frame_bytes[size]))
            for some in taken.split(rows) if len(mine) else ():
                words[some] = words[mine]
            place = torch.zeros(len(free.ids), dtype=torch.int64, device=cache.device)
            place[mine] = torch.arange(len(mine), device=cache.device)
            for level in (level for level, of in enumerate(cache.pool.sizes) if of == size):
                tables = [cache.table[level], *([cache.half[:, None]] if level == LOW else [])]
                for table in tables:
                    table[heads:] = self._moved(table[:heads], taken, place, cache.pool.frame_units(level))
        for name in BY_HEAD:
            x = getattr(cache, name).unflatten(0, (self.batch, heads))
            x[1:] = x[:1].clone()
        for name in BY_LEVEL:
            x = getattr(cache, name).unflatten(1, (self.batch, heads))
            x[:, 1:] = x[:, :1].clone()
        for name in BY_SEQUENCE:
            x = getattr(cache, name)
            x[1:] = x[:1].clone()
        cache.recount()

    @staticmethod
    def _moved(units: torch.Tensor, taken: torch.Tensor, place: torch.Tensor, size: int) -> torch.Tensor:
        """The first sequence's units [heads, n], -1 where there is none -> those of the others in the frames ``taken``
        [others, frames], [others * heads, n]; place: the number of a frame among the first one's."""
        held = units.clamp(min=0).long()
        mine = taken[:, place[held // size]] * size + held % size
        return torch.where(units < 0, -1, mine).flatten(0, 1).int()

    def restart(self) -> None:
        """The lengths, tables and free frames after ``fill`` again; tokens that steps have stored stay. Raises
        CacheFaultError if one was refused."""
        self.check()
        for cache, start in zip(self.caches, self.starts):
            for x, value in zip(self._counters(cache), start):
                x.copy_(value)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        o, lse = decode(q, self.caches[layer])
        if self.manages:
            self.caches[layer].manage(q, lse)
        return o

    def turns(self, step) -> list:
        """A period of steps: every eighth with ``manage``."""
        def of(manages: bool):
            def one() -> None:
                self.manages = manages
                step()
                self.manages = False
            return one

        return [of(False)] * (EVERY - 1) + [of(True)]
