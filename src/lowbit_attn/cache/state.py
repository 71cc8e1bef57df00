"""The memory of a cache, its counters on the device and the host's copy of them.

Counters are per sequence, int32, on the cache's device: ``n_sink``, ``n_qk`` and ``n_qv`` (packed tokens of each
side, multiples of 128, n_qk >= n_qv) and ``n_tok``. Kernels follow them alone; the host's copy says what a call must
do without reading the device.
"""

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from lowbit_attn import layout
from lowbit_attn.cache import significance
from lowbit_attn.cache.attached import Attached, attach, identity
from lowbit_attn.cache.backend import BACKENDS, backend_of
from lowbit_attn.cache.copies import Copies
from lowbit_attn.cache.journal import Journal
from lowbit_attn.cache.pages import FREED, LIVE, UNUSED, PageBook
from lowbit_attn.cache.view import Strides
from lowbit_attn.checks import check_tensor, integer, integers, is_sequence, is_truth, one_of
from lowbit_attn.codebooks import LayerCodebooks
from lowbit_attn.errors import CacheFaultError
from lowbit_attn.formats import FORMATS, Format, Kind, unnamed
from lowbit_attn.formats.rotation import hadamard

DTYPES = (torch.float16, torch.bfloat16)
MAX_Q_LEN = 16
MAX_ENTRIES = (1 << 31) - 1  # of the table, and record units of the pool: kernels count them in int32
MAX_TOKENS = 1 << 30  # of a sequence: windows of more see all
RING_ALIGN = 64  # ring slots come in whole tiles of this many tokens, so that no tile wraps around


def is_capturing(device: torch.device) -> bool:
    """Whether work on this device is being recorded into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Counts(NamedTuple):
    """The host's copy of the counters, int32 arrays [max_batch]; on the CPU they share the tensors' memory."""

    n_sink: np.ndarray
    n_qk: np.ndarray
    n_qv: np.ndarray
    n_tok: np.ndarray


def _plane(i: int, state: "CacheState") -> torch.Tensor | None:
    return None if state.attached is None else state.attached.planes[i]


class CacheState(Copies):
    """What a KVCache holds, documented there; ``counts``, ``book``, ``is_captured`` and ``edits`` are the host's."""

    edits = 0  # how often the host gave rows other sequences: what it knew of their lengths before does not hold
    attached: Attached | None = None  # the codebooks of a format that needs some
    # codebooks as decode kernels read them: Attached.planes
    k_book, v_book, k_channels = (property(partial(_plane, i)) for i in range(3))
    _counts: Counts | None = None  # of the device; None: the counters are the host's to read

    @torch.inference_mode(False)  # else calls outside inference mode could not write to what is made here
    def __init__(self, format: str | Format, num_pages: int, num_heads_kv: int, head_dim: int,
                 dtype: torch.dtype = torch.float16, device: torch.device | str = "cpu", sinks: int | None = None,
                 range_search: bool | None = None, *, max_batch: int = 1, max_q_len: int = 1,
                 max_seqlen: int | None = None, saturate: bool = False, rotate_keys: bool = False,
                 query_weights: torch.Tensor | None = None, codebooks: LayerCodebooks | None = None,
                 pool: torch.Tensor | None = None):
        one_of("dtype", dtype, DTYPES)
        if not isinstance(format, str | Format):
            raise TypeError(f"format: got {format!r}, supported: a Format or a name: {', '.join(FORMATS)}, or any of "
                            f"{', '.join(FORMATS.grammars)}")
        self.format = FORMATS[format] if isinstance(format, str) else format
        sinks = self.format.sinks if sinks is None else sinks
        num_pages, num_heads_kv, head_dim, sinks, max_batch, max_q_len, most = (
            _within(name, value, low, high) for name, value, low, high in (
                ("num_pages", num_pages, 1, None), ("num_heads_kv", num_heads_kv, 1, None),
                ("head_dim", head_dim, None, None), ("sinks", sinks, 0, MAX_TOKENS), ("max_batch", max_batch, 1, None),
                ("max_q_len", max_q_len, 1, MAX_Q_LEN),
                ("max_seqlen", MAX_TOKENS if max_seqlen is None else max_seqlen, 1, MAX_TOKENS)))
        for name, value, others in (("range_search", range_search, (None,)), ("saturate", saturate, ()),
                                    ("rotate_keys", rotate_keys, ())):
            is_truth(name, value, *others)
        self.unnamed = unnamed(self.format)
        self.record = self.format.record(head_dim)
        self.layout_id = self.format.layout_id
        self.num_pages, self.num_heads_kv, self.head_dim = num_pages, num_heads_kv, head_dim
        self.dtype, self.device = dtype, torch.device(device)
        self.sinks, self.range_search, self.saturate, self.rotate_keys = sinks, range_search, saturate, rotate_keys
        if rotate_keys and self.format.k.kind is not Kind.TOKEN:
            raise ValueError(f"rotate_keys: format {self.format} groups K per channel, supported: K per token, whose "
                             "groups a rotation evens out")
        self.rotation = hadamard(head_dim).to(self.device) if rotate_keys else None
        self.query_weights = self._checked_weights(query_weights)
        self.max_batch, self.max_q_len = max_batch, max_q_len
        self.window_k = max(self.format.window_k, max_q_len - 1)
        self.window_v = max(self.format.window_v, max_q_len - 1)
        self.max_seqlen = self.reach_with(sinks) if max_seqlen is None else most
        self.largest = tuple(_rounded_down(side.largest(), dtype) for side in (self.format.k, self.format.v))
        one_of("device", self.device.type, list(BACKENDS))
        self.attached = attach(codebooks, self.format, num_heads_kv, head_dim, self.device)
        self.identity = identity(self.format, self.attached)
        self.first_positions = np.zeros(max_batch, np.int64)  # of each row's first token: what its embedding said
        backend_of(self).prepare(self)
        self._allocate(pool)

    def _checked_weights(self, weights: torch.Tensor | None) -> torch.Tensor | None:
        shape = (self.num_heads_kv, self.head_dim)
        if (weights is not None) != self.format.k.weighs_queries:
            raise ValueError(f"query_weights: got {'none' if weights is None else 'some'} for format {self.format}, "
                             f"supported: fp32 {list(shape)} for formats that choose channels by them, None for others")
        if weights is not None:
            check_tensor("query_weights", weights, shape, (torch.float32,), self.device)
            if not bool((weights.isfinite() & (weights >= 0)).all()):
                raise ValueError("query_weights: got negative or non-finite values, supported: means of |q|")
            if not weights.is_contiguous():
                raise ValueError(f"query_weights: got strides {weights.stride()}, supported: contiguous")
        return weights.detach() if weights is not None and weights.requires_grad else weights

    def _allocate(self, pool: torch.Tensor | None) -> None:
        # at least one table entry and one sink row, never read, so that kernels always get a valid pointer
        max_pages = max(1, int(self._num_packed(self.max_seqlen, self.window_k)) // layout.PAGE_TOKENS)
        units = self.record.nbytes // layout.RECORD_ALIGN
        self._check_sizes(max_pages, units)
        ints = dict(dtype=torch.int32, device=self.device)
        tokens = dict(dtype=self.dtype, device=self.device)
        side = (self.max_batch, self.num_heads_kv)
        shape = (self.num_pages, self.num_heads_kv, self.record.nbytes)
        if pool is None:
            pool = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        check_tensor("pool", pool, shape, (torch.uint8,), self.device)
        aligned = self.device.type == "cpu" or pool.data_ptr() % layout.RECORD_ALIGN == 0
        if not pool.is_contiguous() or not aligned:
            raise ValueError(f"pool: got strides {pool.stride()} at address {pool.data_ptr():#x}, supported: "
                             f"contiguous, on a GPU aligned to {layout.RECORD_ALIGN} bytes")
        if pool.is_inference():
            raise ValueError("pool: got memory made under torch.inference_mode(), which calls outside it cannot write, "
                             "supported: memory made outside")
        self.pool = pool
        self.table = torch.full((self.max_batch, max_pages), -1, **ints)
        self.strides = Strides(self.num_heads_kv * units, units, max_pages, 0)
        self.n_sink, self.n_qk, self.n_qv, self.n_tok = (torch.zeros(self.max_batch, **ints) for _ in range(4))
        self.sink_k = torch.zeros((*side, max(1, self.sinks), self.head_dim), **tokens)
        self.sink_v = torch.zeros_like(self.sink_k)
        self.ring_k = torch.zeros((*side, self._ring(self.window_k), self.head_dim), **tokens)
        self.ring_v = torch.zeros((*side, self._ring(self.window_v), self.head_dim), **tokens)
        significance.allocate(self)
        self.limit = torch.full((self.max_batch,), self._limit(0), **ints)
        self.faults = torch.zeros(self.max_batch + 1, **ints)
        self.arrivals = torch.zeros(self.max_batch, **ints)  # blocks of a step's kernel that have read the counters
        self.all_rows = torch.arange(self.max_batch, **ints)
        self.book = PageBook(self.num_pages, self.max_batch)
        self.is_captured = False  # whether a CUDA graph or compiled code holds a step, which may run at any time
        self._row_tensors: dict[tuple[int, ...], torch.Tensor] = {}
        self.bind()

    def _check_sizes(self, max_pages: int, units: int) -> None:
        """Raise ValueError for what kernels could not address."""
        most = MAX_ENTRIES // (self.num_heads_kv * units)
        if self.num_pages > most:
            pool_gib = (MAX_ENTRIES + 1) * layout.RECORD_ALIGN >> 30
            raise ValueError(f"num_pages: got {self.num_pages} of {self.num_heads_kv} x {self.record.nbytes} bytes, "
                             f"supported: pools of at most {pool_gib} GiB, {most} pages")
        if self.max_batch * max_pages > MAX_ENTRIES:
            raise ValueError(f"max_batch: got {self.max_batch} sequences of at most {max_pages} pages, supported: "
                             f"{MAX_ENTRIES} table entries in all; a smaller max_seqlen takes fewer for each sequence")

    # ---- optional planes of the view

    @property
    def k_entries(self) -> torch.Tensor | None:
        return None if self.attached is None else self.attached.packed_by["k"]

    @property
    def v_entries(self) -> torch.Tensor | None:
        return None if self.attached is None else self.attached.packed_by["v"]

    # ---- sizes

    def _open_tokens(self, window: int) -> int:
        return window + layout.PAGE_TOKENS - 1

    def _ring(self, window: int) -> int:
        return -(-(self._open_tokens(window) + self.max_q_len) // RING_ALIGN) * RING_ALIGN

    def _num_packed(self, seqlen, window: int):
        """Packed tokens of a sequence of this length (int or array): however it was cut into steps."""
        blocks = (seqlen - np.minimum(seqlen, self.sinks) - window) // layout.PAGE_TOKENS
        return np.maximum(blocks, 0) * layout.PAGE_TOKENS

    def _reach(self, pages):
        """Tokens of the longest sequence whose packed blocks fit into so many pages (int or array)."""
        return self.sinks + self._open_tokens(self.window_k) + pages * layout.PAGE_TOKENS

    def reach_with(self, sinks: int) -> int:
        """max_seqlen of a cache like this one, but with so many sinks, where the caller gives none."""
        return min(self._reach(self.num_pages) - self.sinks + sinks, MAX_TOKENS)

    def _limit(self, pages: int) -> int:
        """Tokens that a sequence may have whose packed blocks fill so many pages."""
        return int(min(self.max_seqlen, self._reach(pages)))

    # ---- the host's copy

    def counters(self) -> tuple[torch.Tensor, ...]:
        return self.n_sink, self.n_qk, self.n_qv, self.n_tok

    @property
    def ring_start(self) -> torch.Tensor:
        """int32 [max_batch]: what left K's ring is in K's pages."""
        return self.n_qk

    @property
    def units(self) -> torch.Tensor:
        """The pool as uint8 [units, 128], in which tables and strides count."""
        return self.pool.view(-1, layout.RECORD_ALIGN)

    def batch_rows(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the state and of sinks and rings that the rows of a batch read unless a call says others."""
        rows = self.all_rows if batch == self.max_batch else self.all_rows[:batch]
        return rows, rows

    @property
    def counts(self) -> Counts:
        """The host's copy of the counters; on the CPU the counters themselves, wherever their memory is by now."""
        return Counts(*(x.numpy() for x in self.counters())) if self._counts is None else self._counts

    def bind(self) -> None:
        """Make the host's copy of the counters anew, from their tensors."""
        on_host = self.device.type == "cpu"
        self._counts = None if on_host else Counts(*torch.stack(self.counters()).cpu().numpy())

    def sync(self) -> None:
        """Read the counters of the device, which captured steps move; waits for it. Raises as ``check`` does."""
        self._refuse_capture("sync")
        read = torch.cat((*self.counters(), self.faults)).cpu().numpy()
        for mine, theirs in zip(self.counts, read[: 4 * self.max_batch].reshape(4, -1)):
            mine[:] = theirs
        self._mark_started()
        self._raise_faults(read[4 * self.max_batch :])

    def _mark_started(self) -> None:
        """Rows that steps on the device started are in use."""
        self.book.state[(self.counts.n_tok > 0) & (self.book.state == UNUSED)] = LIVE

    def known_pages(self, batch: int) -> np.ndarray | None:
        """Pages of the first ``batch`` rows as the host last knew them, without waiting for the device; or None."""
        return self.counts.n_qv[:batch] // layout.PAGE_TOKENS

    def check(self) -> None:
        """Raise CacheFaultError if a step on the device could not be done since the last such error; waits for it."""
        self._refuse_capture("check")
        self._raise_faults(np.array(self.faults.tolist()))

    def _raise_faults(self, faults: np.ndarray) -> None:
        if not faults.any():
            return
        self.faults.zero_()
        rows = np.flatnonzero(faults[:-1]).tolist()
        named = [f"sequences {rows} were freed or had no room (reserve pages ahead; at most max_seqlen = "
                 f"{self.max_seqlen} tokens)"] if rows else []
        named += [f"a row beyond 0 to max_batch - 1 = {self.max_batch - 1} was asked for"] if faults[-1] else []
        raise CacheFaultError(f"append: steps were refused on the device: {'; '.join(named)}")

    def settle(self, call: str) -> None:
        """Make the host's copy good for a call: after a captured step, read the counters."""
        self._refuse_capture(call)
        if self.is_captured:
            self.sync()

    def is_capturing(self) -> bool:
        return is_capturing(self.device)

    def _refuse_capture(self, call: str) -> None:
        if self.is_capturing():
            raise RuntimeError(f"{call}: called while a CUDA graph is captured, supported there: append and decode")

    # ---- rows

    def check_rows(self, seqs: Sequence[int] | None, count: int | None = None, alive: bool = True,
                   name: str = "seqs") -> np.ndarray:
        """Rows as an int array; TypeError unless they are integers, ValueError unless they are distinct rows, and none
        freed if they must be alive.

        seqs: None stands for the first ``count`` rows (default: all).
        """
        if seqs is None and (count is None or count <= self.max_batch):
            rows = np.arange(self.max_batch if count is None else count)
            return self._check_alive(rows) if alive else rows
        named = list(range(count)) if seqs is None else integers(name, seqs)
        if named and (min(named) < 0 or max(named) >= self.max_batch or len(set(named)) != len(named)):
            raise ValueError(f"{name}: got {named}, supported: distinct rows 0 to max_batch - 1 = "
                             f"{self.max_batch - 1}")
        rows = np.array(named, dtype=np.int64)
        return self._check_alive(rows) if alive else rows

    def _check_alive(self, rows: np.ndarray) -> np.ndarray:
        if FREED in self.book.state[rows].tolist():
            freed = rows[self.book.state[rows] == FREED].tolist()
            raise ValueError(f"seqs: {freed} were freed, supported: rows in use; add or prefill starts one anew")
        return rows

    def row_tensor(self, rows: np.ndarray) -> torch.Tensor:
        """Rows as int32 on the device; made once for each selection, so that captured steps may use it."""
        key = tuple(rows.tolist())
        if key == tuple(range(len(key))):
            return self.all_rows if len(key) == self.max_batch else self.all_rows[: len(key)]
        if key not in self._row_tensors:
            self._refuse_capture(f"rows {list(key)} named for the first time")
            with torch.inference_mode(False):
                self._row_tensors[key] = self.upload(rows)
        return self._row_tensors[key]

    def upload(self, values) -> torch.Tensor:
        """Host integers as int32 on the device, without waiting for it."""
        host = torch.from_numpy(np.array(values, dtype=np.int32))  # which follows no default device
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host

    def per_row(self, name: str, values: int | Sequence[int], rows: np.ndarray) -> np.ndarray:
        """One integer for each row, or one for all, as an int64 array."""
        if not is_sequence(values):
            return np.full(rows.shape, integer(name, values))
        listed = integers(name, values)
        if len(listed) != len(rows):
            raise ValueError(f"{name}: got {len(listed)} numbers for {len(rows)} sequences, supported: one for "
                             "each, or one for all")
        return np.array(listed, dtype=np.int64)

    # ---- pages

    def missing_pages(self, rows: np.ndarray, lengths: np.ndarray) -> dict[int, list[int]]:
        """Free pages for each row that these lengths fill beyond those it holds; raises if they cannot be had."""
        longest = max(lengths.tolist(), default=0)
        if longest > self.max_seqlen:
            raise ValueError(f"k: a sequence would reach {longest} tokens, supported: max_seqlen = {self.max_seqlen}")
        if not (lengths > self._reach(self.book.n_pages[rows])).any():
            return {}
        missing = self._num_packed(lengths, self.window_k) // layout.PAGE_TOKENS - self.book.n_pages[rows]
        counts = missing.clip(0).tolist()
        free = iter(self.book.next_free(sum(counts)))
        return {row: list(islice(free, count)) for row, count in zip(rows.tolist(), counts) if count}

    def _enter_pages(self, journal: Journal, rows: np.ndarray, granted: dict[int, list[int]]) -> None:
        """Write pages that rows get into the table, and the limits that follow from them and from a new start."""
        uploaded = self.upload([page for pages in granted.values() for page in pages]) if granted else None
        at = 0
        for row, state in zip(rows.tolist(), self.book.state[rows].tolist()):
            held, pages = len(self.book.held[row]), granted.get(row, ())
            if pages:
                journal.write(self.table[row, held : held + len(pages)], uploaded[at : at + len(pages)])
                at += len(pages)
            if pages or state == FREED:
                journal.fill(self.limit[row], self._limit(held + len(pages)))

    def _hold(self, rows: np.ndarray, granted: dict[int, list[int]]) -> None:
        """Note that rows are in use and hold the pages that were entered. Nothing here can fail."""
        for row, pages in granted.items():
            self.book.take(row, len(pages))
        for row, state in zip(rows.tolist(), self.book.state[rows].tolist()):
            if state != LIVE:
                self.book.state[row] = LIVE
                self.edits += 1

    def refresh_limits(self) -> None:
        """``limit`` of all rows anew from the pages that they hold, freed ones among them."""
        limits = [0 if state == FREED else self._limit(int(pages))
                  for state, pages in zip(self.book.state, self.book.n_pages)]
        self.limit.copy_(self.upload(limits))

    # ---- pages as tensors, for readers

    @property
    def n_free(self) -> int:
        """Free pages of the pool."""
        return len(self.book.free)

    @property
    def free_list(self) -> torch.Tensor:
        """Free page ids int32 [n_free], the last is handed out next; a copy."""
        return torch.from_numpy(np.array(self.book.free, dtype=np.int32))

    @property
    def n_pages(self) -> torch.Tensor:
        """Pages that each sequence holds, int32 [max_batch]; a copy."""
        return torch.from_numpy(self.book.n_pages.astype(np.int32))


def _within(name: str, value, low: int | None, high: int | None) -> int:
    number = integer(name, value)
    if (low is not None and number < low) or (high is not None and number > high):
        raise ValueError(f"{name}: got {number}, supported: {low} to {high or 'any'}")
    return number


def _rounded_down(magnitude: float, dtype: torch.dtype) -> float:
    """The largest finite value of a type up to a magnitude."""
    value = torch.tensor(min(magnitude, torch.finfo(dtype).max), dtype=torch.float64, device="cpu")
    near = value.to(dtype)
    return float(near if near.double() <= value else (near.view(torch.int16) - 1).view(dtype))
