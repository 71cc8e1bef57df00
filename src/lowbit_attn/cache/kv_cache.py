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
from lowbit_attn.cache import significance
from lowbit_attn.cache.attached import check_identity
from lowbit_attn.cache.backend import BACKENDS, Backend, backend_of
from lowbit_attn.cache.extend import Extension
from lowbit_attn.cache.journal import Journal
from lowbit_attn.cache.pages import FREED, PageExhaustedError
from lowbit_attn.cache.reads import CacheReads
from lowbit_attn.cache.state import DTYPES, MAX_Q_LEN, MAX_TOKENS, CacheFaultError, Counts
from lowbit_attn.cache.view import STEP_STATE, Strides
from lowbit_attn.checks import check_rank, check_tensor, integer
from lowbit_attn.reference import Attention

__all__ = ["BACKENDS", "DTYPES", "MAX_Q_LEN", "Backend", "CacheFaultError", "KVCache", "PageExhaustedError", "Strides"]


class KVCache(CacheReads):
    """KV cache of a batch of sequences in pages of one low-bit format.

    Args:
        format: a name in the grammar of FORMATS ("k4v4", "k2v2-vg32", ...) or a Format.
        num_pages: pages of 128 tokens (all KV heads) in the pool.
        num_heads_kv, head_dim: shape of one token.
        dtype: torch.float16 or torch.bfloat16, of sinks and residual; fp32 inputs are rounded to it once.
        device: where the pool and the state live.
        sinks: the first ``sinks`` tokens of each sequence stay in 16 bit (StreamingLLM, Kitty section 4), and pages
            start behind them; None: the format's own, 32 for "kitty" and its kin, 0 for others.
        range_search: None takes the format's default (on for K of at most 2 bits); True or False sets
            it for both sides. It changes codes, never the layout.
        max_batch: sequences held at once (rows 0 .. max_batch - 1).
        max_q_len: most tokens one ``append`` may bring, 1 to 16.
        max_seqlen: longest sequence; None: what the whole pool could hold for one sequence.
        saturate: clamp the inputs to magnitudes (``largest``, of K and V) that ``dtype`` and the format's metadata
            hold, so that infinities give finite results: 65504 (32752 with 1 bit) with fp16 metadata, 2^118 with bf16.
        rotate_keys: store K H with a random-sign Hadamard matrix H (QuaRot; formats of K per token, head_dim a power
            of two), which spreads outlier channels over a token's group; ``decode`` rotates queries likewise, so
            logits stay the same. ``gather`` and ``dequantize_pages`` give the rotated keys.
        query_weights: fp32 [num_heads_kv, head_dim], contiguous, finite, not negative: mean |q| by channel over the
            query heads of each KV head, from a calibration. For formats that choose channels by it ("kitty-weighted",
            ...), which need it; read whenever a page is packed, so it may be updated in place.
        codebooks: LayerCodebooks of the cache's layer, for formats that need them ("cq2", ...; ``Codebooks.load(file)
            .layer(i)``). The cache stores keys in their order and weighted, as ``gather`` and ``dequantize_pages``
            give them, and ``decode`` treats queries accordingly; saved, copied or shared pages are of these codebooks.
        pool: memory for the pages, uint8 [num_pages, num_heads_kv, record_bytes], which the caller owns; None: new.

    A call does all of its work or raises and leaves every tensor, counter and page as it was, whatever raised: a
    kernel that cannot be built, memory that runs out. (Bytes of a GPU's pool that hold no token mean nothing.) What
    calls compute follows the dtypes given here, not the caller's default device, default dtype, autocast or inference
    mode, and keeps no gradients. ``copy.copy`` gives a view of the same memory; ``copy.deepcopy``, ``pickle``,
    ``torch.save`` and a trip to another process give a cache of its own, which no captured step knows.

    A sequence is a row. Every row may be used at once; ``add`` gives a vacant one, ``free`` vacates one, and a freed
    one takes no step before ``add`` or ``prefill`` starts it anew. Calls know from the host's copy of the counters
    (``counts``) what to do, so that none waits for the device. Steps captured in a CUDA graph run without the host's
    knowledge: once one was captured, every call that needs the counters reads them first (``sync``). A captured step
    cannot take pages: ``reserve`` them ahead. A step that finds no room, a freed or an unknown sequence on the device
    changes nothing for this sequence and leaves a mark, from which ``check`` and ``sync`` raise CacheFaultError.

    Public state, read by kernels: ``pool``; ``table`` int32 [max_batch, max_pages]; ``n_sink``, ``n_qk``, ``n_qv``,
    ``n_tok`` int32 [max_batch]; ``sink_k``, ``sink_v`` [max_batch, num_heads_kv, max(1, sinks), head_dim];
    ``ring_k``, ``ring_v`` [max_batch, num_heads_kv, ring, head_dim]; ``strides``, how pool and table are addressed;
    ``score``, ``seen``, ``order``: the significance of tokens in the ring, of formats that order them, else None;
    ``limit`` int32 [max_batch], the tokens that a sequence's pages serve, 0 for a freed one; ``faults`` int32
    [max_batch + 1], nonzero after a step that could not be done (last: of an unknown row).
    """

    # ---- the steps

    def prefill(self, seq: int, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor | None = None,
                lse: torch.Tensor | None = None, **attention) -> None:
        """Add any number of tokens to one sequence and pack every full block; a freed sequence starts anew.

        k, v: [tokens, num_heads_kv, head_dim], the cache's dtype or fp32. The state equals that of
        appending the tokens one by one and flushing.

        q: [tokens, num_heads, head_dim], the tokens' queries, of formats that order tokens: 64 of them score the open
        tokens and these. None: tokens that nothing has scored keep their order. lse: fp32 [num_heads, tokens] of the
        queries over all that they see, where the caller has it; attention: softmax_scale, softcap, window and
        sink_logits as in ``decode``.
        """
        self.settle("prefill")
        rows = self.check_rows([integer("seq", seq)], alive=False)
        tokens, = check_rank("k", k, ("tokens", self.num_heads_kv, self.head_dim))[:1]
        k, v = self._enter("k", k, (tokens,)), self._enter("v", v, (tokens,))
        if q is not None:
            heads = check_rank("q", q, ("tokens", "num_heads", self.head_dim))[1]
            significance.check_queries(self, q, lse, (tokens,), (heads, tokens))
        granted = self.missing_pages(rows, self.counts.n_tok[rows].astype(np.int64) + tokens)
        observed = None if q is None else significance.prompt_scores(self, int(rows[0]), self.queries(q.detach()), k,
                                                                     Attention(**attention), lse)
        self._extend(rows, [Extension(self, int(rows[0]), k, v, pack=True, observed=observed)], granted)
        self.edits += 1

    def append(self, k: torch.Tensor, v: torch.Tensor, seqs: Sequence[int] | torch.Tensor | None = None) -> None:
        """Add the same number of new tokens to each of several sequences, after packing what earlier steps filled.

        k, v: [batch, tokens, num_heads_kv, head_dim] with 1 <= tokens <= max_q_len, the cache's dtype or
        fp32. seqs: the batch's rows of the cache, default 0 .. batch - 1.

        While a CUDA graph is captured nothing is reserved and no length is checked but on the device; seqs may then
        also be an int32 tensor [batch] of distinct rows on the device, which each replay reads. The same holds for
        a step that torch.compile compiles.
        """
        if torch.compiler.is_compiling():
            self._append_traced(k, v, seqs)
            return
        if self.is_capturing() and backend_of(self).append is None:
            raise NotImplementedError(f"append: format {self.format} has codebooks of keys before their rotary "
                                      "embedding, whose steps cannot be captured, supported: calls outside of CUDA "
                                      "graphs")
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
        step = backend_of(self).append
        if capturing:
            step(self, picked, picked, k, v)
            self.is_captured = True
            return
        granted = self.missing_pages(rows, self.counts.n_tok[rows] + tokens)
        if step:
            self._step(rows, picked, k, v, granted)
        else:
            self._extend(rows, [Extension(self, row, k[i], v[i], pack=False) for i, row in enumerate(rows.tolist())],
                         granted)

    def manage(self, q: torch.Tensor, lse: torch.Tensor, seqs: Sequence[int] | None = None, *,
               every: int = significance.EVERY, **attention) -> None:
        """Score the tokens in 16 bit by the queries of the step just decoded, and rank those that are packed next.

        q: [batch, q_len, num_heads, head_dim] and lse: fp32 [batch, num_heads, q_len], what ``decode`` took and gave;
        seqs: the batch's rows, default 0 .. batch - 1. Call it after each decode: a row whose length has not come to
        another multiple of ``every`` is left as it is. attention: softmax_scale, softcap, window as in ``decode``.
        Formats that order tokens only; without calls a page's order is that of positions, which costs quality alone.
        A captured step (of rows 0 .. batch - 1, the lse that of ``decode`` in it) follows the counters on the device.
        """
        in_graph = self.is_capturing()
        if not in_graph:
            self.settle("manage")
        elif seqs is not None:
            raise NotImplementedError("seqs: got rows while a CUDA graph is captured, supported there: None, for rows "
                                      "0 .. batch - 1")
        batch = check_rank("q", q, ("batch", "q_len", "num_heads", self.head_dim))[0]
        significance.check_queries(self, q, lse, (batch, q.shape[1]), (batch, q.shape[2], q.shape[1]))
        q, options, every = self.queries(q.detach()), Attention(**attention), integer("every", every)
        if in_graph:
            significance.manage_in_graph(self, q, lse, options, every)
        else:
            significance.manage(self, self.check_rows(seqs, batch), q, lse, options, every)

    def _append_traced(self, k: torch.Tensor, v: torch.Tensor, seqs: torch.Tensor | None) -> None:
        """``append`` as the operator lowbit_attn::append, which ops.py defines."""
        if self.attached is not None:
            raise NotImplementedError(f"append: format {self.format} has codebooks, whose steps cannot be compiled "
                                      "yet, supported: calls outside of torch.compile")
        if self.format.orders_tokens:
            raise NotImplementedError(f"append: format {self.format} orders tokens by significance, supported under "
                                      "torch.compile: formats that store them by position")
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
            k, v, rows, rows, *state, self.format.name, list(self.strides),
            self.query_weights, self.range_search, self.sinks, self.window_k, self.window_v)

    def flush(self, seqs: Sequence[int] | None = None) -> None:
        """Pack every full block beyond the windows of these sequences (default: all). Idempotent."""
        self.settle("flush")
        rows = self.check_rows(seqs)
        n_sink, n_qk, n_qv, n_tok = (count[rows] for count in self.counts)
        filled = n_tok - n_sink - layout.PAGE_TOKENS
        rows = rows[(filled - n_qk >= self.window_k) | (filled - n_qv >= self.window_v)]
        if len(rows):
            nothing = self.ring_k[0, :, :0].transpose(0, 1)
            self._extend(rows, [Extension(self, row, nothing, nothing, pack=True) for row in rows.tolist()], {})

    def reserve(self, seqs: Sequence[int], lengths: int | Sequence[int]) -> None:
        """Take the pages that these sequences need to reach these lengths, one for each or one for all.

        Steps up to there then need nothing of the host, so they may be captured in a CUDA graph. Raises
        PageExhaustedError, or ValueError beyond max_seqlen.
        """
        self.settle("reserve")
        rows = self.check_rows(seqs)
        lengths = self.per_row("lengths", lengths, rows)
        if (lengths < 0).any():
            raise ValueError(f"lengths: got {lengths.tolist()}, supported: 0 to max_seqlen = {self.max_seqlen} tokens")
        granted = self.missing_pages(rows, lengths)
        with Journal() as journal:
            self._enter_pages(journal, rows, granted)
        self._hold(rows, granted)

    def rewind(self, seqs: Sequence[int], tokens: int | Sequence[int]) -> None:
        """Drop the last tokens of these sequences (rejected drafts), a number for each or one for all.

        As many as a sequence holds in 16 bit on both sides can be dropped, which is max_q_len - 1 at least. Packed
        blocks stay, so n_qk and n_qv may be a block ahead of what the new length alone would give.
        """
        self.settle("rewind")
        rows = self.check_rows(seqs)
        n_sink, n_qk, _, n_tok = (count[rows] for count in self.counts)
        most = np.where(n_qk > 0, n_tok - n_sink - n_qk, n_tok)
        tokens = self.per_row("tokens", tokens, rows)
        if (tokens < 0).any() or (tokens > most).any():
            raise ValueError(f"tokens: got {tokens.tolist()} for sequences {rows.tolist()}, supported: 0 to "
                             f"{most.tolist()}, the last tokens that are held in 16 bit")
        length = n_tok - tokens
        counts = dict(n_tok=length, n_sink=np.minimum(length, self.sinks))
        with Journal() as journal:
            for row, first, stop in zip(rows.tolist(), n_qk.tolist(), (length - counts["n_sink"]).tolist()):
                significance.cut(journal, self, row, row, first, stop)
            self._write_counters(journal, rows, counts)
        self._note_counters(rows, counts)

    def add(self) -> int:
        """The lowest vacant row, in use from now on; RuntimeError if every row holds a sequence."""
        self.settle("add")
        row = self.book.first_vacant()
        if row is None:
            raise RuntimeError(f"add: all max_batch = {self.max_batch} rows hold sequences; free one or allocate with "
                               "a larger max_batch")
        rows = np.array([row])
        with Journal() as journal:
            self._enter_pages(journal, rows, {})
        self._hold(rows, {})
        return row

    def free(self, seqs: Sequence[int]) -> None:
        """End these sequences and return their pages, where no other sequence holds them, to the pool."""
        self.settle("free")
        rows = self.check_rows(seqs, alive=False)
        if (self.book.state[rows] == FREED).any():
            raise ValueError(f"seqs: {rows[self.book.state[rows] == FREED].tolist()} were freed before, supported: "
                             "rows in use")
        self._empty(rows, 0)
        self.book.state[rows] = FREED

    def clear(self, seqs: Sequence[int]) -> None:
        """Forget the tokens of these sequences and return their pages; the rows stay in use."""
        self.settle("clear")
        self._empty(self.check_rows(seqs), self._limit(0))

    def set_first_positions(self, seqs: Sequence[int], positions: int | Sequence[int]) -> None:
        """Say at which positions of their rotary embedding empty sequences begin, one number for each or one for all.

        They are 0 unless said otherwise, and 0 again once a sequence is freed or cleared. Only codebooks of keys before
        their rotary embedding (rope="pre") ask.
        """
        rows = self.check_rows(seqs, alive=False)
        positions = self.per_row("positions", positions, rows)
        self.settle("set_first_positions")
        if (positions < 0).any() or (positions > MAX_TOKENS).any():
            raise ValueError(f"positions: got {positions.tolist()}, supported: 0 to {MAX_TOKENS}")
        if self.counts.n_tok[rows].any():
            raise ValueError(f"seqs: got {rows.tolist()}, some of which hold tokens, supported: empty sequences")
        if positions.any() and self.is_captured and self.attached is not None and self.attached.is_pre_rope:
            raise ValueError(f"positions: got {positions.tolist()} for a cache with captured calls, whose kernels "
                             "begin at 0, supported: 0")
        self.first_positions[rows] = positions

    def share(self, src: int, dst: int, tokens: int | None = None) -> None:
        """Make the empty row dst a copy of the first ``tokens`` tokens of src (default: all), with common pages.

        Pages whose both sides are packed are held by both sequences; a page whose V is still in 16 bit, the sinks and
        the open block are copied. A prefix must end where its pages do: up to n_sink, n_sink plus whole packed pages,
        or anywhere in what src holds of K in 16 bit.
        """
        self.settle("share")
        check_identity(self)
        src, dst = integer("src", src), integer("dst", dst)
        tokens = None if tokens is None else integer("tokens", tokens)
        self.check_rows([src])
        self.check_rows([dst], alive=False)
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
        rows, fresh = np.array([dst]), self.book.next_free(len(own))
        counts = dict(n_sink=min(tokens, self.sinks), n_qk=n_qk, n_qv=n_qv, n_tok=tokens)
        counts = {name: np.array([value]) for name, value in counts.items()}
        with Journal() as journal:
            self._enter_pages(journal, rows, {dst: [*common, *fresh]} if pages else {})
            for page, copied in zip(fresh, own):
                journal.write(self.pool[page], self.pool[copied])
            for store in (self.sink_k, self.sink_v, self.ring_k, self.ring_v):
                journal.write(store[dst], store[src])
            significance.cut(journal, self, src, dst, n_qk, rest)
            self._write_counters(journal, rows, counts)
        self.book.hold(dst, common)
        self._hold(rows, {dst: fresh})
        self._note_counters(rows, counts)
        self.first_positions[dst] = self.first_positions[src]
        self.edits += 1

    # ---- parts of the steps

    def check_tokens(self, name: str, x: torch.Tensor, lead: tuple[int, ...]) -> None:
        """Raise TypeError or ValueError for K or V that a step does not take; lead: the axes before the heads."""
        check_tensor(name, x, (*lead, self.num_heads_kv, self.head_dim), (self.dtype, torch.float32), self.device)

    def _enter(self, name: str, x: torch.Tensor, lead: tuple[int, ...]) -> torch.Tensor:
        self.check_tokens(name, x, lead)
        x = x.detach() if x.requires_grad else x
        largest = self.largest[name == "v"] if self.saturate else None
        if name == "k" and self.rotation is not None:
            x = self.rotate(x if largest is None else x.clamp(-largest, largest))
        if name == "k" and self.attached is not None:
            x = self.attached.keys(x if largest is None else x.clamp(-largest, largest), self.dtype)
        x = x.to(self.dtype)
        return x if largest is None else x.clamp(-largest, largest)

    def _extend(self, rows: np.ndarray, extensions: list[Extension], granted: dict[int, list[int]]) -> None:
        """Write what these rows get, in the order of the extensions, and their pages."""
        sides = set().union(*(extension.sides for extension in extensions))
        backend_of(self).ready(self, sides)
        counts = {name: np.concatenate([extension.counts[name] for extension in extensions] or [rows])
                  for name in Counts._fields}
        with Journal() as journal:
            self._enter_pages(journal, rows, granted)
            for extension in extensions:
                extension.write(journal)
            self._write_counters(journal, rows, counts)
        self._hold(rows, granted)
        self._note_counters(rows, counts)

    def _step(self, rows: np.ndarray, picked: torch.Tensor, k, v, granted: dict[int, list[int]]) -> None:
        """A step on the device, its kernel's launch the last thing that can fail; picked: the rows there."""
        backend, counts = backend_of(self), self._after_step(rows, k.shape[1])
        if granted:
            backend.ready(self, ("append",))
            with Journal() as journal:
                self._enter_pages(journal, rows, granted)
                backend.append(self, picked, picked, k, v)
        else:
            backend.append(self, picked, picked, k, v)
        self._hold(rows, granted)
        self._note_counters(rows, counts)

    def _after_step(self, rows: np.ndarray, tokens: int) -> dict[str, np.ndarray]:
        """The counters that a step of ``append`` on the device moves, of these rows: what they are afterwards."""
        n_sink, n_qk, n_qv, n_tok = (count[rows] for count in self.counts)
        after = dict(n_tok=n_tok + tokens)
        if self.sinks:
            after["n_sink"] = np.minimum(after["n_tok"], self.sinks)
        filled = n_tok - n_sink
        for name, n_packed, window in (("n_qk", n_qk, self.window_k), ("n_qv", n_qv, self.window_v)):
            full = filled - n_packed >= window + layout.PAGE_TOKENS
            if full.any():
                after[name] = n_packed + layout.PAGE_TOKENS * full
        return after

    def _write_counters(self, journal: Journal, rows: np.ndarray, counts: dict[str, np.ndarray]) -> None:
        """Set counters of rows on the device, without waiting for it."""
        if len(rows) == 1:
            row, known = int(rows[0]), self.counts
            for name, values in counts.items():
                journal.fill(getattr(self, name)[row], int(values[0]), old=int(getattr(known, name)[row]))
        elif len(rows):
            index, uploaded = self.row_tensor(rows).long(), self.upload(np.stack(list(counts.values())))
            for name, values in zip(counts, uploaded):
                journal.keep(getattr(self, name))
                getattr(self, name)[index] = values

    def _note_counters(self, rows: np.ndarray, counts: dict[str, np.ndarray]) -> None:
        """Set counters of rows in the host's copy, where it is one. Nothing here can fail."""
        if self._counts is not None:
            for name, values in counts.items():
                getattr(self._counts, name)[rows] = values

    def _empty(self, rows: np.ndarray, limit: int) -> None:
        """Give back the pages of rows, set their counters to 0 and their limits to this."""
        counts = dict.fromkeys(Counts._fields, np.zeros_like(rows))
        with Journal() as journal:
            for row in rows.tolist():
                journal.fill(self.table[row], -1)
                journal.fill(self.limit[row], limit)
                significance.cut(journal, self, row, row, 0, 0)
            self._write_counters(journal, rows, counts)
        for row in rows.tolist():
            self.book.release(row)
        self._note_counters(rows, counts)
        self.first_positions[rows] = 0
        self.edits += len(rows)
