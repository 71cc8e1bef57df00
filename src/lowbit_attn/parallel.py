"""Decode over a cache whose tokens are dealt to several ranks (context parallelism), with torch.distributed alone.

A sequence's tokens lie in turn on the ranks of a process group, 128 at a time, so that every rank reads about the same
bytes of every sequence:

    position p < sinks            rank 0
    block b = (p - sinks) / 128   rank b mod N

Each rank attends to its own tokens; one all-gather of (o, lse) and a merge by lse give every rank the whole result
(exchange.py).
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from lowbit_attn import dispatch, reference
from lowbit_attn.api import decode, merge_states, ready
from lowbit_attn.cache import KVCache, PageExhaustedError
from lowbit_attn.checks import check_tensor
from lowbit_attn.exchange import Exchanges
from lowbit_attn.formats import FORMATS
from lowbit_attn.layout import PAGE_TOKENS
from lowbit_attn.ops import decode_with_counters
from lowbit_attn.plan import ACCESS_BYTES
from lowbit_attn.reference import Attention


def local_lengths(lengths, rank: int, world: int, sinks: int = 0):
    """Tokens of sequences of these lengths (int, array or tensor) that lie on one of ``world`` ranks."""
    head, rest = _least(lengths, sinks), lengths - _least(lengths, sinks)
    rounds = rest // (world * PAGE_TOKENS)
    last = _least(_most(rest - rounds * world * PAGE_TOKENS - rank * PAGE_TOKENS, 0), PAGE_TOKENS)
    return rounds * PAGE_TOKENS + last + (head if rank == 0 else 0)


def _least(x, bound: int):
    return x.clamp(max=bound) if isinstance(x, torch.Tensor) else np.minimum(x, bound)


def _most(x, bound: int):
    return x.clamp(min=bound) if isinstance(x, torch.Tensor) else np.maximum(x, bound)


class ShardedKVCache:
    """A KVCache whose tokens are dealt to the ranks of a process group in blocks of 128.

    Every rank makes one and makes the same calls with the same tokens; each stores those that are its own. What a call
    needs on any rank is known on all of them, so a call that one rank has no room for raises on every rank, before
    anything is written, and without communication.

    Args:
        format, num_heads_kv, head_dim, max_batch, max_q_len and the other keywords: as in KVCache; format is a name.
        num_pages: pages of 128 tokens of each rank.
        sinks: first tokens of each sequence in 16 bit, on rank 0; None: as a KVCache of the format.
        group: a torch.distributed process group; None: the default group, or one rank where none is initialised.
        peer_memory: ranks exchange results by one kernel that writes to the other GPUs' memory, not by an all-gather:
            Hopper GPUs of one host.

    A block is packed by its rank's next step or by ``flush``, so up to a block a rank more than in one KVCache may be
    in 16 bit. ``local`` is this rank's KVCache, ``n_tok`` int32 [max_batch], on the device, the tokens of all ranks.
    """

    def __init__(self, format: str, num_pages: int, num_heads_kv: int, head_dim: int, *, sinks: int | None = None,
                 group: "dist.ProcessGroup | None" = None, peer_memory: bool = False, **options):
        if FORMATS[format].needs_codebooks:
            raise NotImplementedError(f"format: {format} has codebooks, supported by KVCache")
        is_alone = group is None and not (dist.is_available() and dist.is_initialized())
        self.group = group
        self.rank, self.world = (0, 1) if is_alone else (dist.get_rank(group), dist.get_world_size(group))
        if self.rank < 0:
            raise ValueError("group: this process is not in it, supported: a group of this process's")
        self.sinks = sinks = FORMATS[format].sinks if sinks is None else sinks
        self.local = KVCache(format, num_pages, num_heads_kv, head_dim, sinks=sinks if self.rank == 0 else 0, **options)
        batch = self.local.max_batch
        self.lengths = np.zeros(batch, np.int64)  # of all ranks
        self.n_tok = torch.zeros(batch, dtype=torch.int32, device=self.local.device)
        self._pages = np.zeros((self.world, batch), np.int64)  # that each rank holds
        self._settled = np.zeros(batch, np.int64)  # lengths that packing has seen: what rewind may go back from
        self.exchanges = Exchanges(self.local.pool.device, group, self.rank, self.world, peer_memory)

    # ---- the steps

    def prefill(self, seq: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add any number of tokens k, v [tokens, num_heads_kv, head_dim] to one sequence, packing every full block."""
        row, tokens = self._rows([seq], alive=False), len(k)
        after = self.lengths[row] + tokens
        pages = self._room(row, after)
        start = int(self.lengths[row[0]])
        own = self._is_own(torch.arange(start, start + tokens, device=k.device))
        self.local.prefill(int(row[0]), k[own], v[own])
        self._advance(row, after, pages)
        self._settled[row] = after

    def append(self, k: torch.Tensor, v: torch.Tensor, seqs: Sequence[int] | None = None) -> None:
        """Add k, v [batch, tokens, num_heads_kv, head_dim], 1 to max_q_len tokens, to sequences (default: the first).

        Not in a CUDA graph: which rank stores a token follows from lengths that the host knows.
        """
        if self.local.is_capturing():
            raise RuntimeError("append: called while a CUDA graph is captured, supported there: decode_sharded")
        rows = self._rows(seqs, len(k))
        if k.dim() != 4 or not 1 <= k.shape[1] <= self.local.max_q_len or k.shape != v.shape:
            raise ValueError(f"k, v: got {list(k.shape)} and {list(v.shape)}, supported: equal shapes [batch, tokens, "
                             f"num_heads_kv, head_dim] of 1 to max_q_len = {self.local.max_q_len} tokens")
        tokens = k.shape[1]
        before, after = self.lengths[rows], self.lengths[rows] + tokens
        pages = self._room(rows, after)
        self.local.reserve(rows.tolist(), self._own(after, self.rank))
        for place, first, count in self._parts(before, tokens):
            part = slice(first, first + count)
            at = torch.from_numpy(place).to(k.device)
            self.local.append(k[at, part], v[at, part], rows[place].tolist())
        self._settled[rows] = np.maximum(self._settled[rows], before)
        self._advance(rows, after, pages)

    def flush(self, seqs: Sequence[int] | None = None) -> None:
        """Pack every full block beyond the windows of these sequences (default: all)."""
        rows = self._rows(seqs)
        self.local.flush(rows.tolist())
        self._settled[rows] = self.lengths[rows]

    def rewind(self, seqs: Sequence[int], tokens: int | Sequence[int]) -> None:
        """Drop the last tokens of sequences, a number for each or one for all: at most max_q_len - 1 of those that
        the last step found."""
        rows = self._rows(seqs)
        counts = np.broadcast_to(np.asarray(tokens, dtype=np.int64), rows.shape)
        after = self.lengths[rows] - counts
        least = np.maximum(0, self._settled[rows] - (self.local.max_q_len - 1))
        if (counts < 0).any() or (after < least).any():
            raise ValueError(f"tokens: got {counts.tolist()} for sequences {rows.tolist()}, supported: 0 to "
                             f"{(self.lengths[rows] - least).tolist()}")
        self.local.rewind(rows.tolist(), self._own(self.lengths[rows], self.rank) - self._own(after, self.rank))
        self._set_lengths(rows, after)

    def reserve(self, seqs: Sequence[int], lengths: int | Sequence[int]) -> None:
        """Take the pages, on every rank, that sequences need to reach these lengths."""
        rows = self._rows(seqs)
        wanted = np.maximum(self.lengths[rows], np.broadcast_to(np.asarray(lengths, dtype=np.int64), rows.shape))
        pages = self._room(rows, wanted)
        self.local.reserve(rows.tolist(), self._own(wanted, self.rank))
        self._pages[:, rows] = pages

    def free(self, seqs: Sequence[int]) -> None:
        """End these sequences and return their pages."""
        self._forget(seqs, self.local.free)

    def clear(self, seqs: Sequence[int]) -> None:
        """Forget the tokens of these sequences; the rows stay in use."""
        self._forget(seqs, self.local.clear)

    @property
    def nbytes(self) -> int:
        """Bytes that hold this rank's tokens."""
        return self.local.nbytes

    # ---- parts of the steps

    def _rows(self, seqs: Sequence[int] | None, count: int | None = None, alive: bool = True) -> np.ndarray:
        return self.local.check_rows(seqs, count, alive)

    def _own(self, lengths: np.ndarray, rank: int) -> np.ndarray:
        return local_lengths(lengths, rank, self.world, self.sinks)

    def _is_own(self, positions: torch.Tensor) -> torch.Tensor:
        """Which positions of a sequence lie on this rank."""
        block = (positions - self.sinks).clamp(min=0) // PAGE_TOKENS
        return torch.where(positions < self.sinks, 0, block % self.world) == self.rank

    def _room(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Pages of each rank [world, rows] for these lengths; PageExhaustedError or ValueError if a rank has none."""
        longest = int(lengths.max(initial=0))
        if any(self._own(longest, rank) > self.local.max_seqlen for rank in range(self.world)):
            raise ValueError(f"k: a sequence would reach {longest} tokens, supported: max_seqlen = "
                             f"{self.local.max_seqlen} on each of {self.world} ranks")
        filled = np.stack([local_lengths(lengths - np.minimum(lengths, self.sinks), rank, self.world)
                           for rank in range(self.world)])
        packed = np.maximum(filled - self.local.window_k, 0) // PAGE_TOKENS
        pages = np.maximum(packed, self._pages[:, rows])
        wanted = self._pages.sum(1) + (pages - self._pages[:, rows]).sum(1)
        if (wanted > self.local.num_pages).any():
            raise PageExhaustedError(f"the call needs {int(wanted.max())} pages on rank {int(wanted.argmax())}, "
                                     f"num_pages = {self.local.num_pages}; free sequences or allocate more")
        return pages

    def _parts(self, before: np.ndarray, tokens: int) -> list[tuple[np.ndarray, int, int]]:
        """Which of a step's tokens are this rank's: (places in the batch, first token, how many), the same for each."""
        own = np.stack([self._own(before + t, self.rank) for t in range(tokens + 1)])  # as the tokens come, by row
        is_own = np.diff(own, axis=0) > 0  # [tokens, batch]
        parts = {}
        for place, mine in enumerate(is_own.T):
            at = np.flatnonzero(mine)
            if len(at):
                parts.setdefault((int(at[0]), len(at)), []).append(place)
        return [(np.array(places), *part) for part, places in parts.items()]

    def _advance(self, rows: np.ndarray, lengths: np.ndarray, pages: np.ndarray) -> None:
        self._pages[:, rows] = pages
        self._set_lengths(rows, lengths)

    def _set_lengths(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        self.lengths[rows] = lengths
        self.n_tok.copy_(torch.from_numpy(self.lengths.astype(np.int32)))

    def _forget(self, seqs: Sequence[int], call) -> None:
        rows = self._rows(seqs, alive=False)
        call(rows.tolist())
        self._pages[:, rows] = self._settled[rows] = 0
        self._set_lengths(rows, np.zeros_like(rows))


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
    """
    options = dict(softmax_scale=softmax_scale, softcap=softcap, path=path,
                   sink_logits=sink_logits if cache.rank == 0 else None)
    if cache.world == 1 and q.shape[1] == 1:
        return decode(q, cache.local, out=out, lse=lse, **options)
    # also what rank 0 alone reads: a call that it alone refuses would leave the others waiting
    for name, x, shape, dtype in (("out", out, q.shape, q.dtype), ("lse", lse, _lse_shape(q), torch.float32),
                                  ("sink_logits", sink_logits, q.shape[2:3], torch.float32)):
        if x is not None:
            check_tensor(name, x, shape, (dtype,), q.device)
    with torch.no_grad():
        own, own_lse = (x if _is_dense(x) else None for x in (out, lse))
        own = torch.empty_like(q, memory_format=torch.contiguous_format) if own is None else own
        own_lse = q.new_empty(_lse_shape(q), dtype=torch.float32) if own_lse is None else own_lse
        if cache.world == 1:
            for x, found in zip((own, own_lse), _decode_drafts(q, cache, options)):
                x.copy_(found)
        else:
            _decode_ranks(q, cache, options, own, own_lse, sink_logits)
        return tuple(x if given is None or given is x else given.copy_(x)
                     for given, x in ((out, own), (lse, own_lse)))


def _lse_shape(q: torch.Tensor) -> tuple[int, int, int]:
    return q.shape[0], q.shape[2], q.shape[1]


def _is_dense(x: torch.Tensor | None) -> bool:
    """Whether the merge writes there as it is."""
    return x is not None and x.is_contiguous() and not x.data_ptr() % ACCESS_BYTES


def _decode_ranks(q: torch.Tensor, cache: ShardedKVCache, options: dict, out: torch.Tensor, lse: torch.Tensor,
                  sink_logits: torch.Tensor | None) -> None:
    """Decode over this rank's tokens, then the exchange with the others."""
    name = (q.shape, q.dtype, dispatch.is_reference(cache.local, options["path"]))
    if not cache.exchanges.has(*name) and not cache.local.is_capturing():
        # what is refused is refused on every rank, before they make anything together
        ready(q, cache.local, **options | {"sink_logits": sink_logits}, load=False)
    exchange = cache.exchanges.find(*name, cache.local.is_capturing())
    if q.shape[1] == 1:
        decode(q, cache.local, out=exchange.o, lse=exchange.lse, **options)
    else:
        for x, found in zip((exchange.o, exchange.lse), _decode_drafts(q, cache, options)):
            x.copy_(found)
    exchange.merge(out, lse)


def _decode_drafts(q: torch.Tensor, cache: ShardedKVCache, options: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part for several queries a row, which see different numbers of its tokens.

    What all queries see is read at once, a query row for each query; the tokens behind it, fewer than q_len and still
    in 16 bit, are masked by their positions of all ranks.
    """
    local, (batch, q_len, num_heads, head_dim) = cache.local, q.shape
    ends = cache.n_tok[:batch, None] - torch.arange(q_len - 1, -1, -1, device=q.device)  # that each query sees
    seen = local_lengths(ends, cache.rank, cache.world, cache.sinks)
    first = seen[:, 0].clamp(min=0)  # local tokens that every query sees
    ratio = num_heads // local.num_heads_kv
    rows = q.unflatten(2, (local.num_heads_kv, ratio)).permute(0, 2, 1, 3, 4).reshape(batch, 1, -1, head_dim)
    sink_logits = options["sink_logits"]
    if sink_logits is not None:
        options = options | {"sink_logits": sink_logits.view(-1, 1, ratio).expand(-1, q_len, -1).reshape(-1)}
    o, lse = decode_with_counters(rows, local, first.int(), **options)
    o = o.view(batch, local.num_heads_kv, q_len, ratio, head_dim).transpose(1, 2).reshape(q.shape)
    lse = lse.view(batch, local.num_heads_kv, q_len, ratio).transpose(2, 3).reshape(batch, num_heads, q_len)
    behind = first[:, None] + torch.arange(q_len - 1, device=q.device)  # local positions [batch, q_len - 1]
    k, v = (_held(local, side, behind) for side in "kv")
    is_seen = behind[:, None] < seen[..., None]  # [batch, q_len, q_len - 1]
    scale = Attention(options["softmax_scale"], options["softcap"])
    own = reference.masked_attention(local.rotate(q) if local.rotate_keys else q, k, v, is_seen, scale)
    return merge_states(torch.stack((o.float(), own[0])), torch.stack((lse, own[1])))


def _held(local: KVCache, side: str, positions: torch.Tensor) -> torch.Tensor:
    """16-bit tokens of one side at local positions [batch, n] -> [batch, n, num_heads_kv, head_dim]."""
    sink, ring = getattr(local, f"sink_{side}"), getattr(local, f"ring_{side}")
    batch = torch.arange(len(positions), device=positions.device)[:, None]
    rest = (positions - local.sinks).clamp(min=0)
    held = ring[batch, :, rest % ring.shape[2]]
    if not local.sinks:
        return held
    first = sink[batch, :, positions.clamp(max=local.sinks - 1)]
    return torch.where((positions < local.sinks)[..., None, None], first, held)
