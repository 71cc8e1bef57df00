"""The paged low-bit KV cache and its state machine.

Positions of one sequence, in order:

    sinks (16 bit) | pages: K packed, V packed | K packed, V still 16 bit | residual ring (16 bit)

The token at position p >= n_sink sits at slot ``(p - n_sink) % ring`` of its side's ring until it is packed. A step
is: ``append``, ``decode``: the tokens of a block are packed by the step after the one that fills it, which has read
them in 16 bit; ``flush`` packs them at once. On a CUDA device a step of ``append`` is done by kernels from the device's
counters alone.
"""

from collections.abc import Sequence

import numpy as np
import torch

from lowbit_attn import layout
from lowbit_attn.backend import BACKENDS, Backend
from lowbit_attn.checks import check_rank, check_tensor
from lowbit_attn.pages import FREED, PageExhaustedError
from lowbit_attn.state import DTYPES, MAX_Q_LEN, STEP_STATE, CacheFaultError, CacheState, Strides

__all__ = ["BACKENDS", "DTYPES", "MAX_Q_LEN", "Backend", "CacheFaultError", "KVCache", "PageExhaustedError", "Strides"]


class KVCache(CacheState):
    """KV cache of a batch of sequences in pages of one low-bit format.

    Args:
        format: a name in the grammar of FORMATS ("k4v4", "k2v2-vg32", ...) or a Format.
        num_pages: pages of 128 tokens (all KV heads) in the pool.
        num_heads_kv, head_dim: shape of one token.
        dtype: torch.float16 or torch.bfloat16, of sinks and residual; fp32 inputs are rounded to it once.
        device: where the pool and the state live.
        sinks: the first ``sinks`` tokens of each sequence stay in 16 bit (StreamingLLM, Kitty section 4).
        range_search: None takes the format's default (on for K of at most 2 bits); True or False sets
            it for both sides. It changes codes, never the layout.
        max_batch: sequences held at once (rows 0 .. max_batch - 1).
        max_q_len: most tokens one ``append`` may bring, 1 to 16.
        max_seqlen: longest sequence; None: what the whole pool could hold for one sequence.
        saturate: clamp infinities of the inputs to the largest finite value of ``dtype``.
        rotate_keys: store K H with a random-sign Hadamard matrix H (QuaRot; formats of K per token, head_dim a power
            of two), which spreads outlier channels over a token's group; ``decode`` rotates queries likewise, so
            logits stay the same. ``gather`` and ``dequantize_pages`` give the rotated keys.
        query_weights: fp32 [num_heads_kv, head_dim], contiguous, finite, not negative: mean |q| by channel over the
            query heads of each KV head, from a calibration. For formats that choose channels by it ("kitty-weighted",
            ...), which need it; read whenever a page is packed, so it may be updated in place.

        pool: memory for the pages, uint8 [num_pages, num_heads_kv, record_bytes], which the caller owns; None: new.

    A sequence is a row. Every row may be used at once; ``add`` gives a vacant one, ``free`` vacates one, and a freed
    one takes no step before ``add`` or ``prefill`` starts it anew. Calls know from the host's copy of the counters
    (``counts``) what to do, so that none waits for the device. Steps captured in a CUDA graph run without the host's
    knowledge: once one was captured, every call that needs the counters reads them first (``sync``). A captured step
    cannot take pages: ``reserve`` them ahead. A step that finds no room, a freed or an unknown sequence on the device
    changes nothing for this sequence and leaves a mark, from which ``check`` and ``sync`` raise CacheFaultError.

    Public state, read by kernels: ``pool``; ``table`` int32 [max_batch, max_pages]; ``n_sink``, ``n_qk``, ``n_qv``,
    ``n_tok`` int32 [max_batch]; ``sink_k``, ``sink_v`` [max_batch, num_heads_kv, max(1, sinks), head_dim];
    ``ring_k``, ``ring_v`` [max_batch, num_heads_kv, ring, head_dim]; ``strides``, how pool and table are addressed;
    ``limit`` int32 [max_batch], the tokens that a sequence's pages serve, 0 for a freed one; ``faults`` int32
    [max_batch + 1], nonzero after a step that could not be done (last: of an unknown row).
    """

    # ---- the steps

    def prefill(self, seq: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add any number of tokens to one sequence and pack every full block; a freed sequence starts anew.

        k, v: [tokens, num_heads_kv, head_dim], the cache's dtype or fp32. The state equals that of
        appending the tokens one by one and flushing. Raises before anything is written.
        """
        self.settle("prefill")
        rows = self.check_rows([seq], alive=False)
        tokens, = check_rank("k", k, ("tokens", self.num_heads_kv, self.head_dim))[:1]
        k, v = self._enter("k", k, (tokens,)), self._enter("v", v, (tokens,))
        self.take_pages(rows, self.counts.n_tok[rows] + tokens)
        self.start_rows(rows)
        self.edits += 1
        self._extend(int(rows[0]), k, v, pack=True)

    def append(self, k: torch.Tensor, v: torch.Tensor, seqs: Sequence[int] | torch.Tensor | None = None) -> None:
        """Add the same number of new tokens to each of several sequences, after packing what earlier steps filled.

        k, v: [batch, tokens, num_heads_kv, head_dim] with 1 <= tokens <= max_q_len, the cache's dtype or
        fp32. seqs: the batch's rows of the cache, default 0 .. batch - 1. Raises before anything is written.

        While a CUDA graph is captured nothing is reserved and no length is checked but on the device; seqs may then
        also be an int32 tensor [batch] of distinct rows on the device, which each replay reads. The same holds for
        a step that torch.compile compiles.
        """
        if torch.compiler.is_compiling():
            self._append_traced(k, v, seqs)
            return
        batch, tokens = check_rank("k", k, ("batch", "tokens", self.num_heads_kv, self.head_dim))[:2]
        capturing = self.is_capturing()
        if capturing and isinstance(seqs, torch.Tensor):
            check_tensor("seqs", seqs, (batch,), (torch.int32,), self.device)
            rows, picked = None, seqs
        else:
            if not capturing:
                self.settle("append")
            rows = self.check_rows(seqs, batch)
            picked = self.row_tensor(rows)
        if not 1 <= tokens <= self.max_q_len:
            raise ValueError(f"k: {tokens} tokens a step, supported: 1 to max_q_len = {self.max_q_len}; "
                             "use prefill for more")
        lead = (batch if rows is None else len(rows), tokens)
        k, v = self._enter("k", k, lead), self._enter("v", v, lead)
        step = BACKENDS[self.device.type].append
        if capturing:
            self.is_captured = True
            step(self, picked, k, v)
            return
        self.take_pages(rows, self.counts.n_tok[rows] + tokens)
        self.start_rows(rows)
        if step:
            step(self, picked, k, v)
            self._follow_step(rows, tokens)
        else:
            self._flush(rows)
            for i, row in enumerate(rows.tolist()):
                self._extend(row, k[i], v[i], pack=False)

    def _append_traced(self, k: torch.Tensor, v: torch.Tensor, seqs: torch.Tensor | None) -> None:
        """``append`` as the operator lowbit_attn::append, which ops.py defines."""
        batch, tokens = check_rank("k", k, ("batch", "tokens", self.num_heads_kv, self.head_dim))[:2]
        if batch > self.max_batch or not 1 <= tokens <= self.max_q_len:
            raise ValueError(f"k: {batch} sequences of {tokens} tokens, supported: at most max_batch = "
                             f"{self.max_batch} of 1 to max_q_len = {self.max_q_len} tokens")
        k, v = (self._enter(name, x, (batch, tokens)) for name, x in (("k", k), ("v", v)))
        rows = self.all_rows[:batch] if seqs is None else seqs
        check_tensor("seqs", rows, (batch,), (torch.int32,), self.device)
        self.is_captured = True
        state = [getattr(self, name) for name in STEP_STATE]
        torch.ops.lowbit_attn.append(
            k, v, rows, *state, self.format.name, list(self.strides),
            self.query_weights, self.range_search, self.sinks, self.window_k, self.window_v)

    def flush(self, seqs: Sequence[int] | None = None) -> None:
        """Pack every full block beyond the windows of these sequences (default: all). Idempotent."""
        self.settle("flush")
        self._flush(self.check_rows(seqs))

    def reserve(self, seqs: Sequence[int], lengths: int | Sequence[int]) -> None:
        """Take the pages that these sequences need to reach these lengths, one for each or one for all.

        Steps up to there then need nothing of the host, so they may be captured in a CUDA graph. Raises
        PageExhaustedError, or ValueError beyond max_seqlen, before anything is written.
        """
        self.settle("reserve")
        rows = self.check_rows(seqs)
        self.take_pages(rows, np.broadcast_to(np.asarray(lengths, dtype=np.int64), rows.shape))
        self.start_rows(rows)

    def rewind(self, seqs: Sequence[int], tokens: int | Sequence[int]) -> None:
        """Drop the last tokens of these sequences (rejected drafts), a number for each or one for all.

        As many as a sequence holds in 16 bit on both sides can be dropped, which is max_q_len - 1 at least. Packed
        blocks stay, so n_qk and n_qv may be a block ahead of what the new length alone would give.
        """
        self.settle("rewind")
        rows = self.check_rows(seqs)
        n_sink, n_qk, _, n_tok = (count[rows] for count in self.counts)
        most = np.where(n_qk > 0, n_tok - n_sink - n_qk, n_tok)
        tokens = np.broadcast_to(np.asarray(tokens, dtype=np.int64), rows.shape)
        if (tokens < 0).any() or (tokens > most).any():
            raise ValueError(f"tokens: got {tokens.tolist()} for sequences {rows.tolist()}, supported: 0 to "
                             f"{most.tolist()}, the last tokens that are held in 16 bit")
        self._set_lengths(rows, n_tok - tokens)

    def add(self) -> int:
        """The lowest vacant row, in use from now on; RuntimeError if every row holds a sequence."""
        self.settle("add")
        row = self.book.first_vacant()
        if row is None:
            raise RuntimeError(f"add: all max_batch = {self.max_batch} rows hold sequences; free one or allocate with "
                               "a larger max_batch")
        self.start_rows(np.array([row]))
        return row

    def free(self, seqs: Sequence[int]) -> None:
        """End these sequences and return their pages, where no other sequence holds them, to the pool."""
        self.settle("free")
        rows = self.check_rows(seqs, alive=False)
        if (self.book.state[rows] == FREED).any():
            raise ValueError(f"seqs: {rows[self.book.state[rows] == FREED].tolist()} were freed before, supported: "
                             "rows in use")
        for row in rows.tolist():
            self._empty_row(row)
            self.book.state[row] = FREED
            self.limit[row].fill_(0)

    def clear(self, seqs: Sequence[int]) -> None:
        """Forget the tokens of these sequences and return their pages; the rows stay in use."""
        self.settle("clear")
        for row in self.check_rows(seqs).tolist():
            self._empty_row(row)

    def share(self, src: int, dst: int, tokens: int | None = None) -> None:
        """Make the empty row dst a copy of the first ``tokens`` tokens of src (default: all), with common pages.

        Pages whose both sides are packed are held by both sequences; a page whose V is still in 16 bit, the sinks and
        the open block are copied. A prefix must end where its pages do: up to n_sink, n_sink plus whole packed pages,
        or anywhere in what src holds of K in 16 bit. Raises before anything is written.
        """
        self.settle("share")
        src, dst = int(self.check_rows([src])[0]), int(self.check_rows([dst], alive=False)[0])
        if src == dst or self.counts.n_tok[dst] or self.book.held[dst]:
            raise ValueError(f"dst: row {dst} is src or holds tokens or pages, supported: an empty row")
        n_sink, n_qk, n_qv, n_tok = (int(count[src]) for count in self.counts)
        tokens = n_tok if tokens is None else tokens
        rest = max(0, tokens - n_sink)
        if not 0 <= tokens <= n_tok or (rest % layout.PAGE_TOKENS and rest < n_qk):
            raise ValueError(f"tokens: got {tokens}, supported for sequence {src}: 0 to {n_sink}, then multiples of "
                             f"{layout.PAGE_TOKENS} beyond {n_sink}, or {n_sink + n_qk} to {n_tok}")
        n_qk, n_qv = (min(n, rest // layout.PAGE_TOKENS * layout.PAGE_TOKENS) for n in (n_qk, n_qv))
        pages = self.book.held[src][: n_qk // layout.PAGE_TOKENS]
        common, own = pages[: n_qv // layout.PAGE_TOKENS], pages[n_qv // layout.PAGE_TOKENS :]
        self.book.require(len(own))
        self.start_rows(np.array([dst]))
        self.edits += 1
        self.book.hold(dst, common)
        fresh = self.book.take(dst, len(own))
        if own:
            self.pool[self.upload(fresh).long()] = self.pool[self.upload(own).long()]
        if pages:
            self.table[dst, : len(pages)] = self.upload(self.book.held[dst])
        for store in (self.sink_k, self.sink_v, self.ring_k, self.ring_v):
            store[dst] = store[src]
        self.refresh_limit(dst)
        self._set_counter("n_qk", dst, n_qk)
        self._set_counter("n_qv", dst, n_qv)
        self._set_lengths(np.array([dst]), np.array([tokens]))

    # ---- reading

    @property
    def nbytes(self) -> int:
        """Bytes that hold the present tokens: packed sides of pages, sinks and 16-bit tails of both sides.

        A page that several sequences hold counts for each of them.
        """
        self.settle("nbytes")
        token = 2 * self.num_heads_kv * self.head_dim
        _, n_qk, n_qv, n_tok = (int(count.sum()) for count in self.counts)
        packed = n_qk * self.record.v_offset + n_qv * (self.record.nbytes - self.record.v_offset)
        tails = 2 * n_tok - n_qk - n_qv  # sinks included
        return packed // layout.PAGE_TOKENS * self.num_heads_kv + tails * token

    def dequantize_pages(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Page ids int [n] -> K, V fp32 [n, num_heads_kv, 128, head_dim]."""
        return BACKENDS[self.device.type].read_pages(self, pages)

    def gather(self, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All of one sequence as the cache holds it: K, V fp32 [num_heads_kv, seqlen, head_dim]."""
        self.settle("gather")
        seq = int(self.check_rows([seq], alive=False)[0])
        n_sink, n_qk, n_qv, n_tok = (int(count[seq]) for count in self.counts)
        k, v = self.dequantize_pages(self.table[seq, : n_qk // layout.PAGE_TOKENS])
        packed = (x.transpose(0, 1).flatten(1, 2) for x in (k, v))
        return tuple(
            torch.cat((sink[seq, :, :n_sink].float(), pages[:, :n_q],
                       ring[seq][:, self._slots(n_q, n_tok - n_sink, ring)].float()), 1)
            for sink, pages, n_q, ring in zip((self.sink_k, self.sink_v), packed, (n_qk, n_qv),
                                              (self.ring_k, self.ring_v))
        )

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or queries [..., head_dim] in the cache's dtype, rotated (in fp32, rounded once) if it rotates keys."""
        return (x if self.rotation is None else x.float() @ self.rotation).to(self.dtype)

    # ---- parts of the steps

    def _enter(self, name: str, x: torch.Tensor, lead: tuple[int, ...]) -> torch.Tensor:
        check_tensor(name, x, (*lead, self.num_heads_kv, self.head_dim), (self.dtype, torch.float32), self.device)
        x = self.rotate(x) if name == "k" else x.to(self.dtype)
        if not self.saturate:
            return x
        largest = torch.finfo(self.dtype).max
        return x.clamp(-largest, largest)

    def _slots(self, start: int, stop: int, ring: torch.Tensor) -> torch.Tensor:
        return torch.arange(start, stop, device=self.device) % ring.shape[2]

    def _set_counter(self, name: str, rows, values) -> None:
        """Set a counter of some rows to host values, here and on the device, without waiting for it."""
        getattr(self.counts, name)[rows] = values
        if self.device.type != "cpu":
            if isinstance(rows, np.ndarray):
                getattr(self, name)[self.row_tensor(rows).long()] = self.upload(values)
            else:
                getattr(self, name)[rows].fill_(int(values))

    def _set_lengths(self, rows: np.ndarray, n_tok: np.ndarray) -> None:
        self._set_counter("n_tok", rows, n_tok)
        self._set_counter("n_sink", rows, np.minimum(n_tok, self.sinks))

    def _empty_row(self, row: int) -> None:
        """Give back a row's pages and set its counters to 0."""
        self.edits += 1
        self.book.release(row)
        self.table[row].fill_(-1)
        self.refresh_limit(row)
        for name in self.counts._fields:
            self._set_counter(name, row, 0)

    def _follow_step(self, rows: np.ndarray, tokens: int) -> None:
        """What a step of ``append`` on the device does to the counters, done to the host's copy."""
        n_sink, n_qk, n_qv, n_tok = self.counts
        length = n_tok[rows]
        filled = length - n_sink[rows]
        for n_packed, window in ((n_qk, self.window_k), (n_qv, self.window_v)):
            full = filled - n_packed[rows] >= window + layout.PAGE_TOKENS
            if full.any():
                n_packed[rows[full]] += layout.PAGE_TOKENS
        n_tok[rows] = length = length + tokens
        n_sink[rows] = np.minimum(length, self.sinks)

    def _flush(self, rows: np.ndarray) -> None:
        n_sink, n_qk, n_qv, n_tok = (count[rows] for count in self.counts)
        filled = n_tok - n_sink
        for side, n_packed, window in (("k", n_qk, self.window_k), ("v", n_qv, self.window_v)):
            for row in rows[filled - n_packed >= window + layout.PAGE_TOKENS].tolist():
                ring = self.ring_k if side == "k" else self.ring_v
                first = int(self.counts.n_tok[row] - self.counts.n_sink[row])
                self._extend_side(row, ring[row, :, :0].transpose(0, 1), first, side, pack=True)

    def _extend(self, row: int, k: torch.Tensor, v: torch.Tensor, pack: bool) -> None:
        """Add tokens k, v [tokens, num_heads_kv, head_dim] to a row; pack: with every block that they fill."""
        old, at = int(self.counts.n_tok[row]), int(self.counts.n_sink[row])
        fresh = min(k.shape[0], self.sinks - at)
        if fresh:
            self.sink_k[row, :, at : at + fresh] = k[:fresh].transpose(0, 1)
            self.sink_v[row, :, at : at + fresh] = v[:fresh].transpose(0, 1)
        first = max(0, old - self.sinks)  # relative position of the first token that is no sink
        self._extend_side(row, k[fresh:], first, "k", pack)
        self._extend_side(row, v[fresh:], first, "v", pack)
        self._set_counter("n_sink", row, at + fresh)
        self._set_counter("n_tok", row, old + k.shape[0])

    def _extend_side(self, row: int, new: torch.Tensor, first: int, side: str, pack: bool) -> None:
        """Add tokens new [tokens, H, D], whose relative positions start at ``first``, to one side."""
        ring, name, window = ((self.ring_k, "n_qk", self.window_k) if side == "k"
                              else (self.ring_v, "n_qv", self.window_v))
        start, stop = int(getattr(self.counts, name)[row]), first + new.shape[0]
        full = max(0, stop - start - window) // layout.PAGE_TOKENS if pack else 0
        end = start + full * layout.PAGE_TOKENS
        if full:
            tokens = torch.cat((ring[row][:, self._slots(start, first, ring)].transpose(0, 1), new))
            blocks = tokens[: end - start].unflatten(0, (-1, layout.PAGE_TOKENS)).transpose(1, 2)
            pages = self.table[row, start // layout.PAGE_TOKENS : end // layout.PAGE_TOKENS]
            BACKENDS[self.device.type].write_blocks(self, pages, blocks, side)
            self._set_counter(name, row, end)
        kept = max(first, end)
        if stop > kept:
            ring[row][:, self._slots(kept, stop, ring)] = new[kept - first :].transpose(0, 1)
