"""The state of a cache of levels: its memory, its counters, and how tokens enter and leave its ring."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from lowbit_attn import layout
from lowbit_attn.cache.journal import Journal
from lowbit_attn.cache.significance import EVERY, Scores
from lowbit_attn.cache.state import DTYPES, MAX_Q_LEN, RING_ALIGN, is_capturing
from lowbit_attn.checks import check_tensor, integer, is_truth, one_of
from lowbit_attn.levels import windows
from lowbit_attn.levels.frames import Copied, FramePool
from lowbit_attn.levels.policy import Policy, Shares

WINDOW = 56  # recent tokens that stay in 16 bit at least
PAGE = layout.PAGE_TOKENS
# what calls write, beside tokens in places that hold none yet
STEPPED = ("n_sink", "n_tok", "faults", "c_sink", "c_out", "c_tok", "limit")
SCORED = ("score", "seen")
MOVED = ("n_out", "c_pack", "n_stage", "new", "half", "n_drop", "starved", "waits", "order", "table")
STAGED = ("hi_k", "hi_v", "lo_k", "lo_v")


def ring_slots(max_q_len: int = 1, manage_every: int = EVERY) -> int:
    """Recent tokens that a row's ring holds: the window, a block that waits, and those of steps until ``manage``."""
    return -(-(WINDOW + PAGE - 1 + manage_every * max_q_len) // RING_ALIGN) * RING_ALIGN


def buffer_bytes(sinks: int, head_dim: int) -> int:
    """16-bit memory of one KV head of a sequence, whatever its length: sinks, two stages and the ring, K and V."""
    return (sinks + 2 * PAGE + ring_slots()) * 2 * head_dim * torch.float16.itemsize


class Lengths(NamedTuple):
    """Counters of the rows as the host sees them, int32 arrays [max_batch]; what left the ring counts as packed."""

    n_sink: np.ndarray
    n_qk: np.ndarray
    n_qv: np.ndarray
    n_tok: np.ndarray


class Recent(NamedTuple):
    """Tokens of a row's ring, oldest first: K, V [num_heads_kv, n, head_dim], score fp32 [num_heads_kv, n], seen int32
    [n]."""

    k: torch.Tensor
    v: torch.Tensor
    score: torch.Tensor
    seen: torch.Tensor

    def part(self, tokens: slice) -> "Recent":
        return Recent(self.k[:, tokens], self.v[:, tokens], self.score[:, tokens], self.seen[tokens])


class LevelState(Copied):
    """What a LevelCache holds, documented there."""

    rotate_keys, query_weights, attached = False, None, None

    @torch.inference_mode(False)  # else calls outside inference mode could not write to what is made here
    def __init__(self, pool: FramePool, num_heads_kv: int, *, policy: Policy | None = None, sinks: int | None = None,
                 max_batch: int = 1, max_seqlen: int, max_q_len: int = 1, manage_every: int = EVERY,
                 dtype: torch.dtype = torch.float16, range_search: bool | None = None, saturate: bool = False,
                 windows: bool = False):
        if not isinstance(pool, FramePool):
            raise TypeError(f"pool: got {type(pool).__name__}, supported: a FramePool")
        one_of("dtype", dtype, DTYPES)
        is_truth("range_search", range_search, None)
        is_truth("saturate", saturate)
        is_truth("windows", windows)
        self.pool, self.format, self.head_dim, self.device = pool, pool.levels, pool.head_dim, pool.device
        self.policy = Shares(self.format.percent / 100) if policy is None else policy
        if not isinstance(self.policy, Policy):
            raise TypeError(f"policy: got {policy!r}, supported: Shares or Cumulative, which decide a block at once")
        sinks = self.format.sinks if sinks is None else sinks
        for name, value, low, high in (("num_heads_kv", num_heads_kv, 1, None), ("sinks", sinks, 0, None),
                                       ("max_batch", max_batch, 1, None), ("max_seqlen", max_seqlen, 1, None),
                                       ("max_q_len", max_q_len, 1, MAX_Q_LEN), ("manage_every", manage_every, 1, PAGE)):
            if integer(name, value) < low or (high is not None and value > high):
                raise ValueError(f"{name}: got {value}, supported: {low} to {high or 'any'}")
        self.num_heads_kv, self.sinks, self.max_batch, self.max_seqlen = num_heads_kv, sinks, max_batch, max_seqlen
        self.max_q_len, self.manage_every, self.dtype = max_q_len, manage_every, dtype
        self.range_search, self.saturate, self.layout_id = range_search, saturate, self.format.layout_id
        self.windows = windows
        self.identity = self.layout_id
        self.largest = tuple(min(torch.finfo(dtype).max, *(getattr(fmt, side).largest() for fmt in self.format.formats))
                             for side in "kv")
        self._allocate()

    def _allocate(self) -> None:
        rows, ints = self.max_batch * self.num_heads_kv, dict(dtype=torch.int32, device=self.device)
        self.slots = ring_slots(self.max_q_len, self.manage_every)

        def tokens(count: int) -> torch.Tensor:
            return torch.zeros((rows, count, self.head_dim), dtype=self.dtype, device=self.device)

        self.table = torch.full((2, rows, -(-self.max_seqlen // PAGE)), -1, **ints)
        self.half = torch.full((rows,), -1, **ints)
        self.c_sink, self.c_out, self.c_pack, self.c_tok = (torch.zeros((2, rows), **ints) for _ in range(4))
        self.n_stage, self.new = (torch.zeros((2, rows), **ints) for _ in range(2))
        self.n_sink, self.n_out, self.n_tok = (torch.zeros(self.max_batch, **ints) for _ in range(3))
        self.n_drop, self.starved = torch.zeros(rows, **ints), torch.zeros(1, **ints)
        self.waits, self.faults = torch.zeros(self.max_batch, dtype=torch.bool, device=self.device), self.n_tok.clone()
        self.all_rows = torch.arange(self.max_batch, device=self.device)
        self.hi_k, self.hi_v, self.lo_k, self.lo_v = (tokens(n) for n in (*(self.sinks + PAGE,) * 2, PAGE, PAGE))
        self.ring_k, self.ring_v = tokens(self.slots), tokens(self.slots)
        self.score = torch.zeros((rows, self.slots), dtype=torch.float32, device=self.device)
        self.seen = torch.zeros((self.max_batch, self.slots), **ints)
        self.order = torch.zeros((rows, PAGE), dtype=torch.uint8, device=self.device)
        # scratch of the kernels of manage: see device/level_plan.py
        self.places, self.needs, self.starts, self.goes, self.arrivals = (torch.zeros(shape, **ints) for shape in (
            (2, rows), (2, self.max_batch), (2, self.max_batch), self.max_batch, self.max_batch + 1))
        self.classes = self.before = None
        if self.windows:
            windows.allocate(self)
        self.limit = torch.full((self.max_batch,), min(self.max_seqlen, self.sinks + self.slots), **ints)
        if self.device.type == "cuda":  # constants of packing, which no captured step may be the first to make
            block = torch.zeros((1, PAGE, self.head_dim), dtype=torch.float32, device=self.device)
            for fmt in self.format.formats:
                fmt.quantize(block, block, self.range_search)

    @torch.inference_mode(False)
    def extend(self, max_seqlen: int) -> None:
        """Serve longer sequences, up to max_seqlen; ValueError if it is less than before."""
        if max_seqlen < self.max_seqlen:
            raise ValueError(f"max_seqlen: got {max_seqlen}, supported: at least the cache's {self.max_seqlen}")
        more = -(-max_seqlen // PAGE) - self.table.shape[2]
        with self.undoing(STEPPED) as journal:
            journal.set(self, table=torch.nn.functional.pad(self.table, (0, more), value=-1), max_seqlen=max_seqlen)
            if self.windows:
                journal.set(self, classes=torch.nn.functional.pad(self.classes, (0, 0, 0, more)),
                            before=torch.nn.functional.pad(self.before, (0, more)))
            self.recount()

    def undoing(self, names: Sequence[str], row: int | None = None) -> Journal:
        """What these tensors hold, of one row or of all, and who has which frames: brought back if the call that
        follows raises. A captured step keeps nothing, for it does nothing yet."""
        journal = Journal()
        if self.is_capturing():
            return journal
        heads = slice(None) if row is None else self.heads_of(row)
        for name in names:
            x = getattr(self, name)
            if name == "table":
                journal.keep(x[:, heads])
            else:
                journal.keep(x[heads] if name in (*STAGED, "ring_k", "ring_v", "score", "order") else x)
        if "table" in names:
            self.pool.keep(journal)
            if self.windows:
                journal.keep(self.classes[heads])
                journal.keep(self.before[:, heads])
        return journal

    @property
    def counts(self) -> Lengths:
        n_sink, n_out, n_tok = torch.stack((self.n_sink, self.n_out, self.n_tok)).cpu().numpy()  # one wait
        return Lengths(n_sink, n_out, n_out, n_tok)

    def held_frames(self, size: int) -> list[int]:
        """Frames of one size of the pool that this cache holds."""
        return self.frames_of(slice(0, self.table.shape[1]), size).tolist()

    def frames_of(self, rows: slice, size: int) -> torch.Tensor:
        """Ids of the frames of one size that these (sequence, head) rows hold, int32."""
        ids = [torch.zeros(0, dtype=torch.int32, device=self.device)]
        for level, mine in enumerate(self.pool.sizes):
            step = self.pool.per_low if level else 1
            for v in range(rows.start, rows.stop) if mine == size else ():
                pages = int(self.c_pack[level, v]) // PAGE
                ids.append(self.table[level, v, :pages:step] // self.pool.frame_units(level))
        return torch.cat(ids)

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Queries as the stored keys want them, which are the model's."""
        return q

    # ---- rows

    def check_rows(self, seqs: Sequence[int] | None, count: int | None = None) -> list[int]:
        """Rows as a list; ValueError unless they are distinct rows of the cache, ``count`` of them if it is given."""
        named = range(self.max_batch if count is None else count) if seqs is None else seqs
        rows = [integer("seqs", row) for row in named]
        if len(set(rows)) != len(rows) or any(not 0 <= row < self.max_batch for row in rows) or (
                count is not None and len(rows) != count):
            raise ValueError(f"seqs: got {rows}, supported: distinct rows 0 to max_batch - 1 = {self.max_batch - 1}"
                             + f", {count} of them" * (count is not None))
        return rows

    def row_tensor(self, rows: list[int]) -> torch.Tensor:
        """Rows as int64 on the device; of a captured step the first ones, whose numbers are there."""
        if rows == list(range(len(rows))):
            return self.all_rows[: len(rows)]
        if self.is_capturing():
            raise NotImplementedError(f"seqs: got {rows} while a CUDA graph is captured, supported there: None, for "
                                      "rows 0 .. batch - 1")
        return torch.tensor(rows, dtype=torch.int64, device=self.device)

    def is_capturing(self) -> bool:
        return is_capturing(self.device)

    def heads_of(self, row: int) -> slice:
        """The (sequence, head) rows of a sequence."""
        return slice(row * self.num_heads_kv, (row + 1) * self.num_heads_kv)

    def slots_of(self, row: int) -> torch.Tensor:
        """Ring slots of a row's recent tokens, oldest first."""
        first, stop = int(self.n_out[row]), int(self.n_tok[row] - self.n_sink[row])
        return torch.arange(first, stop, device=self.device) % self.slots

    def first_recent(self, row: int) -> int:
        """Position of the oldest token of a row's ring."""
        return int(self.n_sink[row] + self.n_out[row])

    def recount(self) -> None:
        """Set the counters that decode reads of each level, and the limits, from those of the rows."""
        n_sink, n_out, behind = (x.repeat_interleave(self.num_heads_kv)
                                 for x in (self.n_sink, self.n_out, self.n_tok - self.n_sink))
        self.c_sink.copy_(self.n_stage)
        self.c_sink[0] += n_sink
        self.c_out[0] = behind  # all in the ring are younger, and none are this level's
        self.c_out[1] = n_out
        torch.add(self.c_sink, behind, out=self.c_tok)
        torch.clamp(self.n_out + (self.sinks + self.slots), max=self.max_seqlen, out=self.limit)

    # ---- tokens

    def enter(self, name: str, x: torch.Tensor, lead: tuple[int, ...]) -> torch.Tensor:
        """K or V [*lead, num_heads_kv, head_dim] as the cache holds it in 16 bit; raises for other shapes."""
        check_tensor(name, x, (*lead, self.num_heads_kv, self.head_dim), (self.dtype, torch.float32), self.device)
        x, most = x.detach().to(self.dtype), self.largest[name == "v"]
        return x.clamp(-most, most) if self.saturate else x

    def check_queries(self, q: torch.Tensor, lead: tuple[int, ...]) -> None:
        """Raise unless these are queries [*lead, num_heads, head_dim] of a multiple of the KV heads."""
        heads = q.shape[-2]
        if heads == 0 or heads % self.num_heads_kv:
            raise ValueError(f"q: {heads} heads, supported: multiples of num_heads_kv = {self.num_heads_kv}")
        check_tensor("q", q, (*lead, heads, self.head_dim), (self.dtype, torch.float32), self.device)

    def recent(self, row: int, k: torch.Tensor | None = None, v: torch.Tensor | None = None,
               observed: Scores | None = None) -> Recent:
        """Copies of a row's recent tokens, new ones [tokens, num_heads_kv, head_dim] behind them, scores added."""
        heads, slots = self.heads_of(row), self.slots_of(row)
        sides = [ring[heads][:, slots] for ring in (self.ring_k, self.ring_v)]
        score, seen = self.score[heads][:, slots], self.seen[row, slots]
        if k is not None:
            sides = [torch.cat((old, new.transpose(0, 1)), 1) for old, new in zip(sides, (k, v))]
            score, seen = (torch.nn.functional.pad(x, (0, len(k))) for x in (score, seen))
        if observed is not None:
            score, seen = score + observed.score, seen + observed.seen
        return Recent(*sides, score, seen)

    def store_recent(self, row: int, recent: Recent) -> None:
        """Make these a row's recent tokens, from n_out after the sinks on; scores of all other slots are dropped."""
        heads, first = self.heads_of(row), int(self.n_out[row])
        slots = torch.arange(first, first + len(recent.seen), device=self.device) % self.slots
        for ring, tokens in ((self.ring_k, recent.k), (self.ring_v, recent.v)):
            ring[heads].index_copy_(1, slots, tokens)
        self.score[heads], self.seen[row] = 0, 0
        self.score[heads].index_copy_(1, slots, recent.score)
        self.seen[row].index_copy_(0, slots, recent.seen)

    def store_sinks(self, row: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Append tokens [n, num_heads_kv, head_dim] to a row's sinks."""
        heads, first = self.heads_of(row), int(self.n_sink[row])
        for store, new in ((self.hi_k, k), (self.hi_v, v)):
            store[heads, first : first + len(new)] = new.transpose(0, 1)
        self.n_sink[row] += len(k)
