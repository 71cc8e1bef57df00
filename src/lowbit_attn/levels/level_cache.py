"""A KV cache of two precision levels for each head, with pruning: LeanKV's sections 4 and 5 over pages of 128 tokens.

Tokens of one (sequence, KV head), in the order in which attention reads them:

    low pages | high pages | low stage, high stage (16 bit, up to 127 each) | sinks (16 bit) | recent tokens (16 bit)

A level is what an ordinary cache would be whose rows are (sequence, KV head): its pages hold 128 tokens in any order,
K per channel, and its stage holds what is not yet a page. ``append`` fills the ring of recent tokens and never packs.
``manage``, called after each decode, scores the ring's tokens every eighth one, and once 128 have left a window of 56
it gives each a class: high and low ones go behind their head's stages, a full stage becomes a page, pruned ones are
gone. Classes are decided once. Heads end up with different numbers of tokens, so memory comes from a FramePool.

All of this is in torch, on any device, the steps in fixed shapes (step.py); on a GPU ``decode``, ``append`` and
``manage`` have kernels (decode.py, manage.py), and decode reads each level as an ordinary cache (view.py).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from lowbit_attn.cache.pages import PageExhaustedError
from lowbit_attn.cache.significance import Scores, means, observe, prompt_queries
from lowbit_attn.cache.state import CacheFaultError
from lowbit_attn.checks import check_rank, check_tensor, integer, is_sequence, one_of
from lowbit_attn.levels import step, windows
from lowbit_attn.levels.moves import Departure, head_tokens, share_pages
from lowbit_attn.levels.state import MOVED, PAGE, SCORED, STAGED, STEPPED, WINDOW, LevelState
from lowbit_attn.precision import full_precision, on_own_defaults
from lowbit_attn.reference import PLAIN, Attention, attention


class LevelCounts(NamedTuple):
    """Tokens of each KV head of a sequence, int64 [num_heads_kv]: in high and low pages, staged, pruned."""

    high: torch.Tensor
    low: torch.Tensor
    staged: torch.Tensor
    pruned: torch.Tensor


class LevelCache(LevelState):
    """KV cache of one layer whose heads hold their significant tokens at a high precision and the others at a low one.

    Args:
        pool: FramePool, shared by all layers of a model; its levels are this cache's.
        num_heads_kv: KV heads.
        policy: Shares or Cumulative; None: the levels' own share high, nothing pruned. Read docs/leankv.md before
            pruning: tokens dropped by attention scores cannot be asked for later.
        sinks: first tokens that stay in 16 bit; None: 32.
        max_batch, max_q_len: as in KVCache; max_seqlen: longest sequence.
        manage_every: how often ``manage`` acts, in tokens of a row.
        dtype: of tokens in 16 bit; range_search, saturate: as in KVCache.
        windows: keep the classes of tokens by position, so that ``decode`` takes a window (windows.py).

    A call does all of its work or raises and leaves everything as it was. Steps
    (``append``, ``decode``, ``manage`` of rows 0 .. batch - 1) read nothing on the host while a CUDA graph is captured,
    so one graph serves all lengths; calls outside graphs ask the device for the counters.

    State, with a row of its own for each (sequence b, KV head h) at v = b num_heads_kv + h, levels high, low: ``table``
    int32 [2, v, pages], units of 128 bytes in the level's memory of the pool; ``half`` int32 [v], unit of the next free
    low record of a frame, -1: none; counters int32 [2, v] as kernels of one level read them: ``c_sink`` tokens in its
    16-bit segment (high: sinks and stage), ``c_out`` tokens that left the ring (high: and those in it, of which it has
    none), ``c_pack`` tokens in pages, ``c_tok`` those of the segment, in the ring and that left it; ``n_stage`` int32
    [2, v]; ``n_sink``, ``n_out``, ``n_tok``, ``limit`` int32 [max_batch]; ``score`` fp32 [v, ring], ``seen`` int32
    [max_batch, ring]; of the last plan ``order`` uint8 [v, 128] (by class, each by position), ``new`` int32 [2, v];
    ``n_drop`` int32 [v] pruned tokens; ``starved`` int32 [1], plans that found too few frames; ``waits`` bool
    [max_batch], rows whose last plan did; ``faults`` int32 [max_batch], nonzero after a captured step without room;
    ``classes`` and ``before``: with windows (windows.py), else None.
    """

    # ---- the steps

    @torch.no_grad()
    @on_own_defaults
    def prefill(self, seq: int, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor | None = None,
                lse: torch.Tensor | None = None, **attention) -> None:
        """Add any number of tokens to one sequence; whole blocks that leave the window get their classes at once.

        k, v: [tokens, num_heads_kv, head_dim], the cache's dtype or fp32; q: [tokens, num_heads, head_dim], 64 of
        which score the tokens; None: nothing does, and the earliest tokens are high. lse: fp32 [num_heads, tokens] of
        the queries over all that they see, where the caller has it; attention: softmax_scale, softcap, window,
        keep_sinks and sink_logits as in ``decode``. Raises PageExhaustedError if the pool has too few frames.
        """
        row, = self.check_rows([seq])
        tokens = check_rank("k", k, ("tokens", self.num_heads_kv, self.head_dim))[0]
        k, v, options = self.enter("k", k, (tokens,)), self.enter("v", v, (tokens,)), Attention(**attention)
        length, fresh = int(self.n_tok[row]), min(tokens, self.sinks - int(self.n_sink[row]))
        if length + tokens > self.max_seqlen:
            raise ValueError(f"k: a sequence would reach {length + tokens} tokens, supported: max_seqlen = "
                             f"{self.max_seqlen}")
        observed = None if q is None else self._prompt_scores(row, q, k, fresh, lse, options)
        recent = self.recent(row, k[fresh:], v[fresh:], observed)
        leaving = max(0, len(recent.seen) - WINDOW) // PAGE * PAGE
        with self.undoing((*STEPPED, *SCORED, *MOVED, *STAGED, "ring_k", "ring_v"), row):
            if leaving:
                gone = recent.part(slice(0, leaving))
                classes = self.policy.classes(means(gone.score, gone.seen))
                departure = Departure(self, row, gone.k, gone.v, classes)
                departure.write(self.pool.take(departure.needs.tolist()))
                if self.windows:
                    windows.note(self, row, classes)
            self.n_out[row] += leaving
            self.store_sinks(row, k[:fresh], v[:fresh])
            self.store_recent(row, recent.part(slice(leaving, None)))
            self.n_tok[row] += tokens
            self.recount()

    def append(self, k: torch.Tensor, v: torch.Tensor, seqs: Sequence[int] | None = None) -> None:
        """Add the same number of new tokens to each of several sequences; they stay in 16 bit until ``manage``.

        k, v: [batch, tokens, num_heads_kv, head_dim], 1 <= tokens <= max_q_len. Raises PageExhaustedError where the
        ring is full because the pool had no frames, RuntimeError where it is because ``manage`` was not called; a
        captured step changes nothing of such a row but a mark, from which ``check`` raises CacheFaultError.
        """
        batch, tokens = check_rank("k", k, ("batch", "tokens", self.num_heads_kv, self.head_dim))[:2]
        rows = self.check_rows(seqs, batch)
        if not 1 <= tokens <= self.max_q_len:
            raise ValueError(f"k: {tokens} tokens a step, supported: 1 to max_q_len = {self.max_q_len}")
        k, v = self.enter("k", k, (batch, tokens)), self.enter("v", v, (batch, tokens))
        if not self.is_capturing():
            lengths = self.counts
            for row in rows:
                self._check_limit(row, int(lengths.n_tok[row]) + tokens,
                                  self.sinks + int(lengths.n_qk[row]) + self.slots)
        index = self.row_tensor(rows)
        if not self._why_torch(PLAIN):
            step.KERNELS[self.device.type].append(self, index, k, v)
            return
        with self.undoing(STEPPED):  # the tokens' places hold none
            step.append(self, index, k, v)

    def _check_limit(self, row: int, length: int, room: int) -> None:
        if length <= min(self.max_seqlen, room):
            return
        if length > self.max_seqlen:
            raise ValueError(f"k: a sequence would reach {length} tokens, supported: max_seqlen = {self.max_seqlen}")
        if self.waits[row]:
            raise PageExhaustedError(f"append: sequence {row} has its ring of {self.slots} recent tokens full, and the "
                                     f"pool has {list(self.pool.n_free)} frames free; free sequences or grow the pool")
        raise RuntimeError(f"append: sequence {row} has its ring of {self.slots} recent tokens full, supported: manage "
                           "after each decode, which moves them to the levels")

    def manage(self, q: torch.Tensor, lse: torch.Tensor, seqs: Sequence[int] | None = None, path: str | None = None,
               **attention) -> None:
        """Score the recent tokens by the queries just decoded; where 128 have left the window, move them to levels.

        q: [batch, q_len, num_heads, head_dim] and lse: fp32 [batch, num_heads, q_len], as ``decode`` took and gave;
        attention: softmax_scale, softcap and window; path: "reference" for torch, None for kernels where there are some
        (``why_torch``). Call it after each decode: a row acts when its length comes to another multiple of
        ``manage_every``. Rows that find no frames stay as they are, ``starved`` counts them, and any next call tries
        again. In a captured step all rows take part in every call, those that are not due without a trace.
        """
        batch, q_len = check_rank("q", q, ("batch", "q_len", "num_heads", self.head_dim))[:2]
        one_of("path", path, (None, "reference"))
        rows, options = self.check_rows(seqs, batch), Attention(**attention)
        self.check_queries(q, (batch, q_len))
        check_tensor("lse", lse, (batch, q.shape[2], q_len), (torch.float32,), self.device)
        if not 1 <= q_len <= self.max_q_len:
            raise ValueError(f"q: got {q_len} queries, supported: 1 to max_q_len = {self.max_q_len}")
        if self.is_capturing():
            self._manage(rows, q, lse, options, path)
            return
        n_sink, n_out, _, n_tok = (count[rows] for count in self.counts)
        if (n_tok < q_len).any():
            raise ValueError(f"q: got {q_len} queries, supported: as many as the cache has tokens, {n_tok.tolist()}")
        waits = self.waits.cpu().numpy()[rows]
        picked = np.flatnonzero((n_tok // self.manage_every > (n_tok - q_len) // self.manage_every) | waits)
        if len(picked):
            any_due = bool((n_tok - n_sink - n_out)[picked].max() >= WINDOW + PAGE)
            self._manage([rows[i] for i in picked], q[picked], lse[picked], options, path, any_due)

    def _manage(self, rows: list[int], q: torch.Tensor, lse: torch.Tensor, options: Attention, path: str | None,
                any_due: bool = True) -> None:
        """``manage`` from the device's counters alone; any_due: whether a row may have a block to move."""
        index = self.row_tensor(rows)
        if path is None and not self._why_torch(options):
            step.KERNELS[self.device.type].manage(self, index, q.detach(), lse, options)
            return
        self._manage_in_torch(index, q, lse, options, any_due)

    @torch.no_grad()
    @on_own_defaults
    def _manage_in_torch(self, index: torch.Tensor, q, lse, options: Attention, any_due: bool) -> None:
        every = self.manage_every
        acts = self.n_tok[index] // every > (self.n_tok[index] - q.shape[1]) // every
        scores = step.observed(self, index, q.detach(), lse, acts, options)
        if any_due:
            plan = step.Plan(self, index, scores, acts | self.waits[index])
            with self.undoing((*STEPPED, *SCORED, *MOVED, *STAGED)):
                plan.write()
        else:
            with self.undoing(SCORED):
                step.store_scores(self, index, scores)

    def why_torch(self, **attention) -> list[str]:
        """Reasons why ``append`` and ``manage`` of this cache are torch operations; empty where they are kernels.

        attention: as ``manage`` is given it; ``append`` does not depend on it.
        """
        return self._why_torch(Attention(**attention))

    def _why_torch(self, options: Attention) -> list[str]:
        device = self.device.type
        if device not in step.KERNELS:
            return [f"device: {self.device} has no kernels, supported: {', '.join(step.KERNELS) or 'none'}"]
        return step.KERNELS[device].why_not(self, options)

    def check(self) -> None:
        """Raise CacheFaultError if a captured step found no room since the last such error; waits for the device."""
        if self.is_capturing():
            raise RuntimeError("check: called while a CUDA graph is captured, supported there: append, decode, manage")
        rows = [row for row, fault in enumerate(self.faults.tolist()) if fault]
        if rows:
            self.faults.zero_()
            raise CacheFaultError(f"append: steps were refused on the device: sequences {rows} had no room in their "
                                  f"rings of {self.slots} recent tokens (the pool has {list(self.pool.n_free)} frames "
                                  f"free; FramePool.require tells ahead), or were at max_seqlen = {self.max_seqlen}")

    def rewind(self, seqs: Sequence[int], tokens: int | Sequence[int]) -> None:
        """Drop the last tokens of these sequences, those of the ring at most; what left it stays."""
        rows = self.check_rows(seqs)
        counts = [integer("tokens", n) for n in (tokens if is_sequence(tokens) else [tokens] * len(rows))]
        for row, count in zip(rows, counts, strict=True):
            most = int(self.n_tok[row]) - (self.first_recent(row) if int(self.n_out[row]) else 0)
            if not 0 <= count <= most:
                raise ValueError(f"tokens: got {count} for sequence {row}, supported: 0 to {most}, the tokens of the "
                                 "ring")
        with self.undoing((*STEPPED, *SCORED, "ring_k", "ring_v")):
            for row, count in zip(rows, counts):
                recent, length = self.recent(row), int(self.n_tok[row]) - count
                self.store_recent(row, recent.part(slice(0, max(0, len(recent.seen) - count))))
                self.n_tok[row], self.n_sink[row] = length, min(length, self.sinks)
            self.recount()

    def free(self, seqs: Sequence[int]) -> None:
        """Forget the tokens of these sequences and return their frames; their rows may start anew."""
        rows = self.check_rows(seqs)
        with self.undoing((*STEPPED, *SCORED, *MOVED)):
            for row in rows:
                self._forget(row)
            self.recount()

    def _forget(self, row: int) -> None:
        heads = self.heads_of(row)
        self.pool.give([self.frames_of(heads, size) for size in range(len(self.pool.lists))])
        for x in (self.c_sink, self.c_out, self.c_pack, self.c_tok, self.new, self.n_stage):
            x[:, heads] = 0
        self.table[:, heads], self.half[heads], self.n_drop[heads], self.score[heads] = -1, -1, 0, 0
        self.seen[row], self.n_sink[row], self.n_out[row], self.n_tok[row] = 0, 0, 0, 0
        self.waits[row], self.faults[row] = False, 0

    def trim(self, window: int, seqs: Sequence[int] | None = None) -> None:
        """Return pages of these sequences (default: all) that a window of so many positions will not see any more.

        Their tokens count as pruned from then on, also for calls without a window. Not for captured steps: it waits
        for the device. A page stays while one of its tokens is within the window of the oldest recent token, to which
        ``rewind`` may go back; so does a low page while its frame has another such one.
        """
        if self.is_capturing():
            raise RuntimeError("trim: called while a CUDA graph is captured, supported there: append, decode, manage")
        if integer("window", window) < 1:
            raise ValueError(f"window: got {window}, supported: 1 or more positions")
        windows.check(self, window)
        rows = self.check_rows(seqs)
        with self.undoing(MOVED):
            for row in rows:
                windows.drop_pages(self, row, self.first_recent(row) - window)

    @torch.no_grad()
    @on_own_defaults
    def share(self, src: int, dst: int, tokens: int | None = None) -> None:
        """Make the empty row dst a copy of the first ``tokens`` tokens of src (default: all), with common frames.

        A page has tokens of several blocks in an order of its own, so a prefix must hold all that left the ring: from
        n_sink + n_out tokens of src on, or any number if none left it. dst gets what the queries of src decided:
        classes, what is pruned, and scores of the recent tokens, also by queries behind the prefix. Frames are held by
        both, and free once both have returned them; stages, sinks, ring, and the low pages of a frame that is not full
        yet, a frame a head at most, are copied. Raises PageExhaustedError if there is none for those.
        """
        if self.is_capturing():
            raise RuntimeError("share: called while a CUDA graph is captured, supported there: append, decode, manage")
        src, = self.check_rows([src])
        dst, = self.check_rows([dst])
        if src == dst or int(self.n_tok[dst]):
            raise ValueError(f"dst: row {dst} is src or holds tokens, supported: an empty row")
        length = int(self.n_tok[src])
        least = self.first_recent(src) if int(self.n_out[src]) else 0
        tokens = length if tokens is None else integer("tokens", tokens)
        if not least <= tokens <= length:
            raise ValueError(f"tokens: got {tokens}, supported for sequence {src}: {least} to {length}, as the pages "
                             "of a level are shared whole")
        with self.undoing((*STEPPED, *SCORED, *MOVED, *STAGED, "ring_k", "ring_v"), dst):
            share_pages(self, src, dst)
            self._share_tokens(src, dst, tokens)

    def _share_tokens(self, src: int, dst: int, tokens: int) -> None:
        """Copy what a prefix of src holds in 16 bit, its scores and its counters."""
        here, there = self.heads_of(src), self.heads_of(dst)
        recent = self.recent(src)
        kept = len(recent.seen) - min(len(recent.seen), int(self.n_tok[src]) - tokens)
        for x in (self.hi_k, self.hi_v, self.lo_k, self.lo_v, self.order, self.n_drop):
            x[there] = x[here]
        for x in (self.n_stage, self.new, self.c_pack, *[self.before] * self.windows):
            x[:, there] = x[:, here]
        if self.windows:
            self.classes[there] = self.classes[here]
        self.n_out[dst], self.n_tok[dst], self.n_sink[dst] = self.n_out[src], tokens, min(tokens, self.sinks)
        self.waits[dst] = self.waits[src] & (kept >= WINDOW + PAGE)
        self.store_recent(dst, recent.part(slice(0, kept)))
        self.recount()

    # ---- reading

    def gather(self, seq: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What each KV head of a sequence holds: K, V fp32 [tokens of the head, head_dim], recent tokens last."""
        row, = self.check_rows([seq])
        return [head_tokens(self, row, head) for head in range(self.num_heads_kv)]

    def attend(self, q: torch.Tensor, options: Attention = PLAIN) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode in torch: o fp32 of q's shape [batch, q_len, num_heads, head_dim], lse fp32 [batch, num_heads, q_len].

        Only tokens of the ring can be younger than a query, and they come last: positions count in windows alone.
        """
        if options.window is not None:
            windows.check(self, options.window)
        ratio = q.shape[2] // self.num_heads_kv
        o = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
        for row in range(q.shape[0]):
            for head, (k, v) in enumerate(self.gather(row)):
                mine = slice(head * ratio, (head + 1) * ratio)
                sinks = None if options.sink_logits is None else options.sink_logits[mine]
                asked = replace(options, sink_logits=sinks)
                if options.window is None:
                    found = attention(q[row, :, mine], k[None], v[None], asked)
                else:
                    n_tok, places = int(self.n_tok[row]), windows.positions(self, row, head)
                    at = torch.arange(n_tok - q.shape[1], n_tok, device=q.device)
                    found = attention(q[row, :, mine], k[None], v[None], asked,
                                      seen=windows.visible(places, at, options, int(self.n_sink[row])))
                o[row, :, mine], lse[row, mine] = found
        return o, lse

    def counts_of(self, seq: int) -> LevelCounts:
        """How a sequence's tokens are stored, by KV head; the sinks and the recent tokens are in 16 bit beside them."""
        row, = self.check_rows([seq])
        heads = self.heads_of(row)
        return LevelCounts(*(x.long() for x in (*self.c_pack[:, heads], self.n_stage[:, heads].sum(0),
                                                self.n_drop[heads])))

    @property
    def nbytes(self) -> int:
        """Bytes that hold the present tokens: pages, stages, sinks and recent tokens of both sides."""
        places = torch.arange(self.table.shape[2], device=self.device)
        is_page = places < self.c_pack[..., None] // PAGE
        pages = [len(table[mine].unique()) for table, mine in zip(self.table, is_page)]  # shared ones once
        packed = sum(n * size for n, size in zip(pages, self.pool.record_bytes))
        beside = int(self.n_stage.sum()) + self.num_heads_kv * int((self.n_tok - self.n_out).sum())
        return packed + beside * 4 * self.head_dim

    # ---- scores of a prompt

    def _prompt_scores(self, row: int, q, k, fresh: int, lse, options: Attention) -> Scores:
        """What 64 of the new tokens' queries say of the recent tokens, old and new."""
        check_rank("q", q, ("tokens", "num_heads", self.head_dim))
        self.check_queries(q, (len(k),))
        picked = prompt_queries(len(k)).to(self.device)
        first, at, q = self.first_recent(row) + fresh, int(self.n_tok[row]) + picked, q.detach()[picked]
        if lse is not None:
            check_tensor("lse", lse, (q.shape[1], len(k)), (torch.float32,), self.device)
            lse = lse[:, picked]
        else:
            lse = self._lse(row, q, picked, k, options)
        keys = torch.cat((self.ring_k[self.heads_of(row)][:, self.slots_of(row)], k[fresh:].transpose(0, 1)), 1)
        return observe(q, at, keys, first, options, lse)

    def _lse(self, row: int, q, at, k, options: Attention) -> torch.Tensor:
        """lse fp32 [num_heads, n] of queries [n, num_heads, D], at places ``at`` of the new keys [tokens, H, D], over
        all that the row holds and the new keys up to them."""
        ratio, found = q.shape[1] // self.num_heads_kv, []
        scale = self.head_dim**-0.5 if options.softmax_scale is None else options.softmax_scale
        if options.window is not None:
            windows.check(self, options.window)
        n_tok = int(self.n_tok[row])
        new, n_sink = n_tok + torch.arange(len(k), device=self.device), min(self.sinks, n_tok + len(k))
        with full_precision(self.device.type):
            for head, (past, _) in enumerate(self.gather(row)):
                rows = q[:, head * ratio : (head + 1) * ratio].float().transpose(0, 1)
                s = rows @ torch.cat((past, k[:, head].float())).T * scale
                if options.softcap is not None:
                    s = options.softcap * torch.tanh(s / options.softcap)
                if options.window is None:
                    s[..., len(past) :].masked_fill_(new > n_tok + at[:, None], -torch.inf)
                else:
                    places = torch.cat((windows.positions(self, row, head), new))
                    s.masked_fill_(~windows.visible(places, n_tok + at, options, n_sink), -torch.inf)
                found.append(s.logsumexp(-1))
        lse = torch.cat(found)
        return lse if options.sink_logits is None else torch.logaddexp(lse, options.sink_logits.float()[:, None])
