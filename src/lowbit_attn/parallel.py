"""Decode over a cache whose tokens are dealt to several ranks (context parallelism), with torch.distributed alone.

A sequence's tokens lie in turn on the ranks of a process group, 128 at a time (dealing.py), so that every rank reads
about the same bytes of every sequence. Each rank attends to its own tokens; one all-gather of (o, lse) and a merge by
lse give every rank the whole result (exchange.py).
"""

from collections.abc import Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from lowbit_attn.agreement import Agreement, RankError
from lowbit_attn.api import decode
from lowbit_attn.cache import KVCache, PageExhaustedError
from lowbit_attn.cache.backend import backend_of
from lowbit_attn.checks import check_rank, integer, is_truth
from lowbit_attn.dealing import is_own, local_lengths, parts_of
from lowbit_attn.exchange import Exchanges
from lowbit_attn.formats import FORMATS
from lowbit_attn.layout import PAGE_TOKENS
from lowbit_attn.parallel_decode import Call, fact

__all__ = ["RankError", "ShardedKVCache", "decode_sharded", "local_lengths"]


class ShardedKVCache:
    """A KVCache whose tokens are dealt to the ranks of a process group in blocks of 128.

    Every rank makes one and makes the same calls with the same tokens; each stores those that are its own. A call that
    one rank refuses is refused on every rank, before anything is written. To that end each rank checks the whole call,
    whoever owns its tokens, and before the work all ranks compare whether they can do it, and with which arguments
    (agreement.py); values of tensors are not compared. The rank that refused raises its own error, another one
    RankError; so does a rank that waits for another one longer than the process group's timeout.

    Args:
        format, num_heads_kv, head_dim, max_batch, max_q_len and the other keywords: as in KVCache; format is a name.
        num_pages: pages of 128 tokens of each rank.
        sinks: first tokens of each sequence in 16 bit, on rank 0; None: as a KVCache of the format.
        group: a torch.distributed process group; None: the default group, or one rank where none is initialised.
        peer_memory: ranks exchange results by one kernel that writes to the other GPUs' memory, not by an all-gather:
            Hopper GPUs of one host.
        agree: ranks compare each call, which takes a message between the hosts' CPUs. False: of calls that surely are
            the same on all ranks; each rank then refuses what it can know by itself, capacity included.

    A block is packed by its rank's next step or by ``flush``, so up to a block a rank more than in one KVCache may be
    in 16 bit. ``local`` is this rank's KVCache, ``n_tok`` int32 [max_batch], on the device, the tokens of all ranks.
    A call that fails while it writes (memory that runs out) is undone on no other rank: the sequences it named are
    refused from then on, until they are freed or cleared.
    """

    def __init__(self, format: str, num_pages: int, num_heads_kv: int, head_dim: int, *, sinks: int | None = None,
                 group: "dist.ProcessGroup | None" = None, peer_memory: bool = False, agree: bool = True, **options):
        is_alone = group is None and not (dist.is_available() and dist.is_initialized())
        self.group = group
        self.rank, self.world = (0, 1) if is_alone else (dist.get_rank(group), dist.get_world_size(group))
        if self.rank < 0:
            raise ValueError("group: this process is not in it, supported: a group of this process's")
        self.agreement = Agreement(group, self.rank, self.world, is_alone=agree is False)

        def made() -> tuple[dict, None]:
            is_truth("agree", agree)
            self._make(format, num_pages, num_heads_kv, head_dim, sinks, peer_memory, options)
            local = ("num_pages", "num_heads_kv", "head_dim", "dtype", "range_search", "max_batch", "max_q_len",
                     "saturate", "rotate_keys")
            facts = {name: str(getattr(self.local, name)) for name in local}
            return facts | dict(format=self.local.format.name, device=self.local.device.type, sinks=self.sinks,
                                max_seqlen=self.max_seqlens, peer_memory=peer_memory), None

        self.agreement.reach("ShardedKVCache", made)

    def _make(self, format: str, num_pages: int, num_heads_kv: int, head_dim: int, sinks: int | None,
              peer_memory: bool, options: dict) -> None:
        """This rank's part; nothing is exchanged."""
        if FORMATS[format].needs_codebooks:
            raise NotImplementedError(f"format: {format} has codebooks, supported by KVCache")
        self.sinks = sinks = FORMATS[format].sinks if sinks is None else sinks
        self.local = KVCache(format, num_pages, num_heads_kv, head_dim, sinks=sinks if self.rank == 0 else 0, **options)
        batch, has_limit = self.local.max_batch, options.get("max_seqlen") is not None
        # of each rank: where it follows from the pages, rank 0's counts the sinks that it alone has
        self.max_seqlens = [self.local.max_seqlen if has_limit else self.local.reach_with(sinks if rank == 0 else 0)
                            for rank in range(self.world)]
        self.lengths = np.zeros(batch, np.int64)  # of all ranks
        self.n_tok = torch.zeros(batch, dtype=torch.int32, device=self.local.device)
        self._pages = np.zeros((self.world, batch), np.int64)  # that each rank holds
        self._settled = np.zeros(batch, np.int64)  # lengths that packing has seen: what rewind may go back from
        self._torn = np.zeros(batch, bool)  # rows of a call that failed while it wrote
        self.agreed: set[tuple] = set()  # calls of decode_sharded on a GPU that the ranks have compared
        self._are_ready: set[tuple[str, ...]] = set()  # kernels of the local cache that were loaded
        self.exchanges = Exchanges(self.local.pool.device, self.group, self.rank, self.world, peer_memory)

    # ---- the steps

    def prefill(self, seq: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add any number of tokens k, v [tokens, num_heads_kv, head_dim] to one sequence, packing every full block."""
        rows, after, pages, own = self.agreement.reach("prefill", lambda: self._checked_prompt(seq, k, v))
        with self._writing(rows):
            self.local.prefill(int(rows[0]), *own)
            self._advance(rows, after, pages)
            self._settled[rows] = after

    def _checked_prompt(self, seq: int, k: torch.Tensor, v: torch.Tensor) -> tuple[dict, tuple]:
        local = self.local
        local.settle("prefill")
        rows = self._rows([integer("seq", seq)], alive=False)
        tokens, = check_rank("k", k, ("tokens", local.num_heads_kv, local.head_dim))[:1]
        self._check_tokens(k, v, (tokens,))
        start, after = int(self.lengths[rows[0]]), self.lengths[rows] + tokens
        pages = self._room(rows, after)
        if pages.any():
            self._load(("k", "v"))
        own = is_own(torch.arange(start, start + tokens, device=k.device), self.rank, self.world, self.sinks)
        return self._facts(rows, k=fact(k), v=fact(v)), (rows, after, pages, (k[own], v[own]))

    def append(self, k: torch.Tensor, v: torch.Tensor, seqs: Sequence[int] | None = None) -> None:
        """Add k, v [batch, tokens, num_heads_kv, head_dim], 1 to max_q_len tokens, to sequences (default: the first).

        Not in a CUDA graph: which rank stores a token follows from lengths that the host knows.
        """
        rows, tokens, pages = self.agreement.reach("append", lambda: self._checked_step(k, v, seqs))
        before, after = self.lengths[rows], self.lengths[rows] + tokens
        with self._writing(rows):
            self.local.reserve(rows.tolist(), self._own(after, self.rank))
            for place, first, count in parts_of(before, tokens, self.rank, self.world, self.sinks):
                part = slice(first, first + count)
                at = torch.from_numpy(place).to(k.device)
                self.local.append(k[at, part], v[at, part], rows[place].tolist())
            self._settled[rows] = np.maximum(self._settled[rows], before)
            self._advance(rows, after, pages)

    def _checked_step(self, k: torch.Tensor, v: torch.Tensor, seqs: Sequence[int] | None) -> tuple[dict, tuple]:
        local = self.local
        if local.is_capturing():
            raise RuntimeError("append: called while a CUDA graph is captured, supported there: decode_sharded")
        local.settle("append")
        batch, tokens = check_rank("k", k, ("batch", "tokens", local.num_heads_kv, local.head_dim))[:2]
        rows = self._rows(seqs, batch)
        if not 1 <= tokens <= local.max_q_len:
            raise ValueError(f"k: {tokens} tokens a step, supported: 1 to max_q_len = {local.max_q_len}; use prefill "
                             "for more")
        self._check_tokens(k, v, (len(rows), tokens))
        pages = self._room(rows, self.lengths[rows] + tokens)
        self._load(("append",))
        return self._facts(rows, k=fact(k), v=fact(v)), (rows, tokens, pages)

    def flush(self, seqs: Sequence[int] | None = None) -> None:
        """Pack every full block beyond the windows of these sequences (default: all)."""
        rows = self.agreement.reach("flush", lambda: self._checked_flush(seqs))
        with self._writing(rows):
            self.local.flush(rows.tolist())
            self._settled[rows] = self.lengths[rows]

    def _checked_flush(self, seqs: Sequence[int] | None) -> tuple[dict, np.ndarray]:
        self.local.settle("flush")
        rows = self._rows(seqs)
        if self._pages[:, rows].any():
            self._load(("k", "v"))
        return self._facts(rows), rows

    def rewind(self, seqs: Sequence[int], tokens: int | Sequence[int]) -> None:
        """Drop the last tokens of sequences, a number for each or one for all: at most max_q_len - 1 of those that
        the last step found."""
        rows, after = self.agreement.reach("rewind", lambda: self._checked_rewind(seqs, tokens))
        with self._writing(rows):
            self.local.rewind(rows.tolist(), self._own(self.lengths[rows], self.rank) - self._own(after, self.rank))
            self._set_lengths(rows, after)

    def _checked_rewind(self, seqs: Sequence[int], tokens: int | Sequence[int]) -> tuple[dict, tuple]:
        self.local.settle("rewind")
        rows = self._rows(seqs)
        counts = self.local.per_row("tokens", tokens, rows)
        after = self.lengths[rows] - counts
        least = np.maximum(0, self._settled[rows] - (self.local.max_q_len - 1))
        if (counts < 0).any() or (after < least).any():
            raise ValueError(f"tokens: got {counts.tolist()} for sequences {rows.tolist()}, supported: 0 to "
                             f"{(self.lengths[rows] - least).tolist()}")
        return self._facts(rows, tokens=counts.tolist()), (rows, after)

    def reserve(self, seqs: Sequence[int], lengths: int | Sequence[int]) -> None:
        """Take the pages, on every rank, that sequences need to reach these lengths."""
        rows, wanted, pages = self.agreement.reach("reserve", lambda: self._checked_reserve(seqs, lengths))
        with self._writing(rows):
            self.local.reserve(rows.tolist(), self._own(wanted, self.rank))
            self._pages[:, rows] = pages

    def _checked_reserve(self, seqs: Sequence[int], lengths: int | Sequence[int]) -> tuple[dict, tuple]:
        self.local.settle("reserve")
        rows = self._rows(seqs)
        lengths = self.local.per_row("lengths", lengths, rows)
        if (lengths < 0).any():
            raise ValueError(f"lengths: got {lengths.tolist()}, supported: 0 or more tokens")
        wanted = np.maximum(self.lengths[rows], lengths)
        return self._facts(rows, wanted=wanted.tolist()), (rows, wanted, self._room(rows, wanted))

    def free(self, seqs: Sequence[int]) -> None:
        """End these sequences and return their pages."""
        self._forget("free", seqs)

    def clear(self, seqs: Sequence[int]) -> None:
        """Forget the tokens of these sequences; the rows stay in use."""
        self._forget("clear", seqs)

    @property
    def nbytes(self) -> int:
        """Bytes that hold this rank's tokens."""
        return self.local.nbytes

    # ---- parts of the steps

    def _rows(self, seqs: Sequence[int] | None, count: int | None = None, alive: bool = True) -> np.ndarray:
        rows = self.local.check_rows(seqs, count, alive)
        self.check_whole(rows)
        return rows

    def check_whole(self, rows: np.ndarray) -> None:
        """Raise RankError for sequences whose ranks may hold different tokens."""
        if self._torn[rows].any():
            raise RankError(f"seqs: got {rows.tolist()}, of which {rows[self._torn[rows]].tolist()} were in a call "
                            "that failed while it wrote, supported: other sequences; free or clear these")

    @contextmanager
    def _writing(self, rows: np.ndarray):
        """The part of a call that writes: if it fails, nobody knows any more what the ranks hold of these rows."""
        self._torn[rows] = True
        yield
        self._torn[rows] = False

    def _check_tokens(self, k: torch.Tensor, v: torch.Tensor, lead: tuple[int, ...]) -> None:
        self.local.check_tokens("k", k, lead)
        self.local.check_tokens("v", v, lead)

    def _facts(self, rows: np.ndarray, **others) -> dict:
        """What ranks compare of a call for these rows."""
        return dict(seqs=rows.tolist(), lengths=self.lengths[rows].tolist()) | others

    def _load(self, calls: tuple[str, ...]) -> None:
        """Load or build the local cache's kernels of these calls, so that one that cannot be had is a refusal."""
        if calls not in self._are_ready:
            backend_of(self.local).ready(self.local, calls)
            self._are_ready.add(calls)

    def _own(self, lengths: np.ndarray, rank: int) -> np.ndarray:
        return local_lengths(lengths, rank, self.world, self.sinks)

    def _room(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Pages of each rank [world, rows] for these lengths; PageExhaustedError or ValueError if a rank has none."""
        longest = int(lengths.max(initial=0))
        over = [rank for rank, most in enumerate(self.max_seqlens) if self._own(longest, rank) > most]
        if over:
            raise ValueError(f"k: a sequence would reach {longest} tokens, {int(self._own(longest, over[0]))} of them "
                             f"on rank {over[0]}, supported: max_seqlen = {self.max_seqlens} on the {self.world} ranks")
        filled = np.stack([local_lengths(lengths - np.minimum(lengths, self.sinks), rank, self.world)
                           for rank in range(self.world)])
        packed = np.maximum(filled - self.local.window_k, 0) // PAGE_TOKENS
        pages = np.maximum(packed, self._pages[:, rows])
        wanted = self._pages.sum(1) + (pages - self._pages[:, rows]).sum(1)
        if (wanted > self.local.num_pages).any():
            raise PageExhaustedError(f"the call needs {int(wanted.max())} pages on rank {int(wanted.argmax())}, "
                                     f"num_pages = {self.local.num_pages}; free sequences or allocate more")
        return pages

    def _advance(self, rows: np.ndarray, lengths: np.ndarray, pages: np.ndarray) -> None:
        self._pages[:, rows] = pages
        self._set_lengths(rows, lengths)

    def _set_lengths(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        self.lengths[rows] = lengths
        self.n_tok.copy_(torch.from_numpy(self.lengths.astype(np.int32)))

    def _forget(self, call: str, seqs: Sequence[int]) -> None:
        rows = self.agreement.reach(call, lambda: self._checked_end(call, seqs))
        with self._writing(rows):
            getattr(self.local, call)(rows.tolist())
            self._pages[:, rows] = self._settled[rows] = 0
            self._set_lengths(rows, np.zeros_like(rows))

    def _checked_end(self, call: str, seqs: Sequence[int]) -> tuple[dict, np.ndarray]:
        self.local.settle(call)
        rows = self.local.check_rows(seqs)
        return dict(seqs=rows.tolist()), rows  # lengths may differ: this is how sequences that do are ended


def decode_sharded(q: torch.Tensor, cache: ShardedKVCache, *, softmax_scale: float | None = None,
                   softcap: float | None = None, sink_logits: torch.Tensor | None = None,
                   out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
                   path: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of new queries over a sharded cache, on every rank of its group; all ranks call it together.

    q: [batch, q_len, num_heads, head_dim], the same on every rank; query j of a row sees the tokens of all ranks up to
    position seqlen - q_len + j. The keywords are those of ``decode``; sliding windows are not supported.
    Returns (o, lse) of all tokens, as ``decode`` does. A rank sends its o in q's dtype and its lse, in one all-gather
    or into the other GPUs' memory, from memory that the cache keeps: calls of one cache run one after the other.
    Nothing is read by the host, so a call can be captured in a CUDA graph once one of its shape was called.

    On a CPU ranks compare each call. On a GPU they compare the first call of its arguments (shapes, dtypes, options)
    alone: later ones start at once, and a rank that another one leaves waiting there is ended by torch.distributed's
    watchdog after the process group's timeout.
    """
    if cache.world == 1 and isinstance(q, torch.Tensor) and q.dim() == 4 and q.shape[1] == 1:
        cache.check_whole(np.arange(min(len(q), len(cache.lengths))))
        return decode(q, cache.local, softmax_scale=softmax_scale, softcap=softcap, sink_logits=sink_logits, out=out,
                      lse=lse, path=path)
    call = Call(q, cache, dict(softmax_scale=softmax_scale, softcap=softcap, path=path), sink_logits, out, lse)
    with torch.no_grad():
        part = None
        if call.is_agreed():
            call.check_outputs()
        else:
            part = cache.agreement.reach("decode_sharded", call.prepared)
        found = call.exchanged(part) if cache.world > 1 else part or call.part()
        return tuple(x if given is None or given is x else given.copy_(x) for given, x in zip((out, lse), found))
