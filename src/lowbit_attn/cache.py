"""The paged low-bit KV cache and its state machine.

Positions of one sequence, in order:

    sinks (16 bit) | pages: K packed, V packed | K packed, V still 16 bit | residual ring (16 bit)

Counters are per sequence, int32, on the cache's device: ``n_sink``, ``n_qk`` and ``n_qv`` (packed tokens
of each side, multiples of 128, n_qk >= n_qv) and ``n_tok``. The token at position p >= n_sink sits at slot
``(p - n_sink) % ring`` of its side's ring until it is packed. A step is: ``append``, ``decode``, ``flush``:
the tokens of a block are packed after the step that fills it has read them in 16 bit. ``append`` flushes
what an earlier step left.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from lowbit_attn import layout
from lowbit_attn.checks import check_rank, check_tensor, one_of
from lowbit_attn.formats import FORMATS, Format
from lowbit_attn.formats.rotation import hadamard
from lowbit_attn.formats.uniform import PerToken

DTYPES = (torch.float16, torch.bfloat16)
MAX_Q_LEN = 16
RING_ALIGN = 64  # ring slots come in whole tiles of this many tokens, so that no tile wraps around


class Strides(NamedTuple):
    """Where records are, in units of RECORD_ALIGN bytes of the pool and in entries of the table: the record of page j
    of (sequence b, KV head h) is at unit table[b * table_b + h * table_h + j] * page + h * head."""

    page: int
    head: int
    table_b: int
    table_h: int


class PageExhaustedError(RuntimeError):
    """The pool has fewer free pages than the call needs; nothing was written."""


class KVCache:
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
        query_weights: fp32 [num_heads_kv, head_dim], finite and not negative: mean |q| by channel over the query heads
            of each KV head, from a calibration. For formats that choose channels by it ("kitty-weighted", ...), which
            need it; read whenever a page is packed, so it may be updated in place.

    Public state, read by kernels: ``pool`` uint8 [num_pages, num_heads_kv, record_bytes]; ``table`` int32
    [max_batch, max_pages]; ``n_sink``, ``n_qk``, ``n_qv``, ``n_tok`` int32 [max_batch]; ``sink_k``, ``sink_v``
    [max_batch, num_heads_kv, max(1, sinks), head_dim]; ``ring_k``, ``ring_v`` [max_batch, num_heads_kv, ring,
    head_dim]; ``strides``, how pool and table are addressed.
    """

    def __init__(self, format: str | Format, num_pages: int, num_heads_kv: int, head_dim: int,
                 dtype: torch.dtype = torch.float16, device: torch.device | str = "cpu", sinks: int = 0,
                 range_search: bool | None = None, *, max_batch: int = 1, max_q_len: int = 1,
                 max_seqlen: int | None = None, saturate: bool = False, rotate_keys: bool = False,
                 query_weights: torch.Tensor | None = None):
        one_of("dtype", dtype, DTYPES)
        if not isinstance(format, str | Format):
            raise TypeError(f"format: got {format!r}, supported: a Format or a name: {', '.join(FORMATS)}, or any of "
                            f"{', '.join(FORMATS.grammars)}")
        for name, value, low, high in (
            ("num_pages", num_pages, 1, None), ("num_heads_kv", num_heads_kv, 1, None), ("sinks", sinks, 0, None),
            ("max_batch", max_batch, 1, None), ("max_q_len", max_q_len, 1, MAX_Q_LEN),
            ("max_seqlen", 1 if max_seqlen is None else max_seqlen, 1, None),
        ):
            if value < low or (high is not None and value > high):
                raise ValueError(f"{name}: got {value}, supported: {low} to {high or 'any'}")
        self.format = FORMATS[format] if isinstance(format, str) else format
        self.record = self.format.record(head_dim)
        self.layout_id = layout.LAYOUT_ID
        self.num_pages, self.num_heads_kv, self.head_dim = num_pages, num_heads_kv, head_dim
        self.dtype, self.device = dtype, torch.device(device)
        self.sinks, self.range_search, self.saturate, self.rotate_keys = sinks, range_search, saturate, rotate_keys
        if rotate_keys and not isinstance(self.format.k, PerToken):
            raise ValueError(f"rotate_keys: format {self.format} groups K per channel, supported: K per token, whose "
                             "groups a rotation evens out")
        self.rotation = hadamard(head_dim).to(self.device) if rotate_keys else None
        self.query_weights = self._checked_weights(query_weights)
        self.max_batch, self.max_q_len = max_batch, max_q_len
        self.window_k = max(self.format.window_k, max_q_len - 1)
        self.window_v = max(self.format.window_v, max_q_len - 1)
        reach = num_pages * layout.PAGE_TOKENS + self._open_tokens(self.window_k) + sinks
        self.max_seqlen = reach if max_seqlen is None else max_seqlen
        one_of("device", self.device.type, list(BACKENDS))
        BACKENDS[self.device.type].check(self)
        self._allocate()

    def _checked_weights(self, weights: torch.Tensor | None) -> torch.Tensor | None:
        shape = (self.num_heads_kv, self.head_dim)
        if (weights is not None) != self.format.k.weighs_queries:
            raise ValueError(f"query_weights: got {'none' if weights is None else 'some'} for format {self.format}, "
                             f"supported: fp32 {list(shape)} for formats that choose channels by them, None for others")
        if weights is not None:
            check_tensor("query_weights", weights, shape, (torch.float32,), self.device)
            if not bool((weights.isfinite() & (weights >= 0)).all()):
                raise ValueError("query_weights: got negative or non-finite values, supported: means of |q|")
        return weights

    def _allocate(self) -> None:
        # at least one table entry and one sink row, never read, so that kernels always get a valid pointer
        max_pages = max(1, self._num_packed(self.max_seqlen, self.window_k) // layout.PAGE_TOKENS)
        ints = dict(dtype=torch.int32, device=self.device)
        tokens = dict(dtype=self.dtype, device=self.device)
        side = (self.max_batch, self.num_heads_kv)
        self.pool = torch.zeros((self.num_pages, self.num_heads_kv, self.record.nbytes), dtype=torch.uint8,
                                device=self.device)
        self.table = torch.full((self.max_batch, max_pages), -1, **ints)
        units = self.record.nbytes // layout.RECORD_ALIGN
        self.strides = Strides(self.num_heads_kv * units, units, max_pages, 0)
        self.n_sink, self.n_qk, self.n_qv, self.n_tok = (torch.zeros(self.max_batch, **ints) for _ in range(4))
        self.sink_k = torch.zeros((*side, max(1, self.sinks), self.head_dim), **tokens)
        self.sink_v = torch.zeros_like(self.sink_k)
        self.ring_k = torch.zeros((*side, self._ring(self.window_k), self.head_dim), **tokens)
        self.ring_v = torch.zeros((*side, self._ring(self.window_v), self.head_dim), **tokens)
        self.n_pages = torch.zeros(self.max_batch, **ints)  # table entries in use, one block ahead of n_qk at most
        self.free_list = torch.arange(self.num_pages - 1, -1, -1, **ints)
        self.n_free = torch.full((1,), self.num_pages, **ints)

    # ---- sizes

    def _open_tokens(self, window: int) -> int:
        return window + layout.PAGE_TOKENS - 1

    def _ring(self, window: int) -> int:
        return -(-(self._open_tokens(window) + self.max_q_len) // RING_ALIGN) * RING_ALIGN

    def _num_packed(self, seqlen: int, window: int) -> int:
        """Packed tokens of a sequence of this length: however it was cut into steps."""
        return max(0, seqlen - min(seqlen, self.sinks) - window) // layout.PAGE_TOKENS * layout.PAGE_TOKENS

    @property
    def nbytes(self) -> int:
        """Bytes that hold the present tokens: packed sides of pages, sinks and 16-bit tails of both sides."""
        token = 2 * self.num_heads_kv * self.head_dim
        n_qk, n_qv, n_tok = (int(counter.sum()) for counter in (self.n_qk, self.n_qv, self.n_tok))
        packed = n_qk * self.record.v_offset + n_qv * (self.record.nbytes - self.record.v_offset)
        tails = 2 * n_tok - n_qk - n_qv  # sinks included
        return packed // layout.PAGE_TOKENS * self.num_heads_kv + tails * token

    # ---- the steps

    def prefill(self, seq: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add any number of tokens to one sequence and pack every full block.

        k, v: [tokens, num_heads_kv, head_dim], the cache's dtype or fp32. The state equals that of
        appending the tokens one by one and flushing. Raises before anything is written.
        """
        seq = self._check_rows([seq])[0]
        tokens, = check_rank("k", k, ("tokens", self.num_heads_kv, self.head_dim))[:1]
        k, v = self._enter("k", k, (tokens,)), self._enter("v", v, (tokens,))
        old = int(self.n_tok[seq])
        self._reserve([seq], [old + k.shape[0]])
        fresh = min(k.shape[0], self.sinks - int(self.n_sink[seq]))
        if fresh:
            at = int(self.n_sink[seq])
            self.sink_k[seq, :, at : at + fresh] = k[:fresh].transpose(0, 1)
            self.sink_v[seq, :, at : at + fresh] = v[:fresh].transpose(0, 1)
            self.n_sink[seq] += fresh
        self.n_tok[seq] += k.shape[0]
        first = max(0, old - self.sinks)  # relative position of the first token that is no sink
        self._extend_side(seq, k[fresh:], first, self.ring_k, self.n_qk, self.window_k, "k")
        self._extend_side(seq, v[fresh:], first, self.ring_v, self.n_qv, self.window_v, "v")

    def append(self, k: torch.Tensor, v: torch.Tensor, seqs: Sequence[int] | None = None) -> None:
        """Add the same number of new tokens to each of several sequences.

        k, v: [batch, tokens, num_heads_kv, head_dim] with 1 <= tokens <= max_q_len, the cache's dtype or
        fp32. seqs: the batch's rows of the cache, default 0 .. batch - 1. Blocks that earlier steps filled
        are packed first. Raises before anything is written.
        """
        check_rank("k", k, ("batch", "tokens", self.num_heads_kv, self.head_dim))
        rows = self._check_rows(range(k.shape[0]) if seqs is None else seqs)
        if not 1 <= k.shape[1] <= self.max_q_len:
            raise ValueError(f"k: {k.shape[1]} tokens a step, supported: 1 to max_q_len = {self.max_q_len}; "
                             "use prefill for more")
        k, v = (self._enter(n, x, (len(rows), k.shape[1])) for n, x in (("k", k), ("v", v)))
        lengths = self.n_tok[rows].tolist()
        self._reserve(rows, [length + k.shape[1] for length in lengths])
        self.flush(rows)
        row = torch.tensor(rows, device=self.device)
        for i in range(k.shape[1]):
            position = self.n_tok[row]
            sink = position < self.sinks
            self._put(self.sink_k, row[sink], position[sink], k[sink, i])
            self._put(self.sink_v, row[sink], position[sink], v[sink, i])
            relative = position[~sink] - self.sinks
            self._put(self.ring_k, row[~sink], relative % self.ring_k.shape[2], k[~sink, i])
            self._put(self.ring_v, row[~sink], relative % self.ring_v.shape[2], v[~sink, i])
            self.n_sink[row] += sink.int()
            self.n_tok[row] += 1

    def flush(self, seqs: Sequence[int] | None = None) -> None:
        """Pack every full block beyond the windows of these sequences (default: all). Idempotent."""
        for seq in range(self.max_batch) if seqs is None else self._check_rows(seqs):
            empty = self.ring_k[seq, :, :0].transpose(0, 1)
            relative = max(0, int(self.n_tok[seq]) - self.sinks)
            self._extend_side(seq, empty, relative, self.ring_k, self.n_qk, self.window_k, "k")
            self._extend_side(seq, empty, relative, self.ring_v, self.n_qv, self.window_v, "v")

    def free(self, seqs: Sequence[int]) -> None:
        """Empty these sequences and return their pages to the pool."""
        for seq in self._check_rows(seqs):
            used, free = int(self.n_pages[seq]), int(self.n_free)
            self.free_list[free : free + used] = self.table[seq, :used].flip(0)
            self.n_free += used
            self.table[seq] = -1
            for counter in (self.n_sink, self.n_qk, self.n_qv, self.n_tok, self.n_pages):
                counter[seq] = 0

    # ---- reading

    def dequantize_pages(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Page ids int [n] -> K, V fp32 [n, num_heads_kv, 128, head_dim]."""
        return BACKENDS[self.device.type].read_pages(self, pages)

    def gather(self, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All of one sequence as the cache holds it: K, V fp32 [num_heads_kv, seqlen, head_dim]."""
        seq = self._check_rows([seq])[0]
        n_sink, n_tok = int(self.n_sink[seq]), int(self.n_tok[seq])
        n_qk, n_qv = int(self.n_qk[seq]), int(self.n_qv[seq])
        k, v = self.dequantize_pages(self.table[seq, : n_qk // layout.PAGE_TOKENS])
        packed = (x.transpose(0, 1).flatten(1, 2) for x in (k, v))
        return tuple(
            torch.cat((sink[seq, :, :n_sink].float(), pages[:, :n_q],
                       ring[seq][:, self._slots(n_q, n_tok - n_sink, ring)].float()), 1)
            for sink, pages, n_q, ring in zip((self.sink_k, self.sink_v), packed, (n_qk, n_qv),
                                              (self.ring_k, self.ring_v))
        )

    # ---- parts of the steps

    def _slots(self, start: int, stop: int, ring: torch.Tensor) -> torch.Tensor:
        return torch.arange(start, stop, device=self.device) % ring.shape[2]

    def _extend_side(self, seq, new, first, ring, n_packed, window, side: str) -> None:
        """Add tokens new [tokens, H, D], whose relative positions start at ``first``, to one side."""
        start, stop = int(n_packed[seq]), first + new.shape[0]
        end = start + max(0, stop - start - window) // layout.PAGE_TOKENS * layout.PAGE_TOKENS
        if end > start:
            tokens = torch.cat((ring[seq][:, self._slots(start, first, ring)].transpose(0, 1), new))
            blocks = tokens[: end - start].unflatten(0, (-1, layout.PAGE_TOKENS)).transpose(1, 2)
            pages = self.table[seq, start // layout.PAGE_TOKENS : end // layout.PAGE_TOKENS]
            BACKENDS[self.device.type].write_blocks(self, pages, blocks, side)
            n_packed[seq] = end
        kept = max(first, end)
        ring[seq][:, self._slots(kept, stop, ring)] = new[kept - first :].transpose(0, 1)

    def _put(self, store, rows, slots, tokens) -> None:
        store[rows.long(), :, slots.long()] = tokens

    def _enter(self, name: str, x: torch.Tensor, lead: tuple[int, ...]) -> torch.Tensor:
        check_tensor(name, x, (*lead, self.num_heads_kv, self.head_dim), (self.dtype, torch.float32), self.device)
        x = self.rotate(x) if name == "k" else x.to(self.dtype)
        largest = torch.finfo(self.dtype).max
        return x.clamp(-largest, largest) if self.saturate else x

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or queries [..., head_dim] in the cache's dtype, rotated (in fp32, rounded once) if it rotates keys."""
        return (x if self.rotation is None else x.float() @ self.rotation).to(self.dtype)

    def _check_rows(self, seqs: Sequence[int]) -> list[int]:
        rows = [int(s) for s in seqs]
        if len(set(rows)) != len(rows) or any(not 0 <= s < self.max_batch for s in rows):
            raise ValueError(f"seqs: got {rows}, supported: distinct rows 0 to max_batch - 1 = {self.max_batch - 1}")
        return rows

    def _reserve(self, rows: list[int], lengths: list[int]) -> None:
        """Take from the pool the pages that these lengths will fill; raise before anything is written."""
        if rows and max(lengths) > self.max_seqlen:
            raise ValueError(f"k: a sequence would reach {max(lengths)} tokens, "
                             f"supported: max_seqlen = {self.max_seqlen}")
        wanted = [self._num_packed(n, self.window_k) // layout.PAGE_TOKENS for n in lengths]
        missing = [max(0, n - int(self.n_pages[s])) for s, n in zip(rows, wanted)]
        if sum(missing) > int(self.n_free):
            raise PageExhaustedError(f"the call needs {sum(missing)} pages, {int(self.n_free)} of {self.num_pages} "
                                     "are free; free sequences or allocate with a larger num_pages")
        for seq, count in zip(rows, missing):
            used, free = int(self.n_pages[seq]), int(self.n_free)
            self.table[seq, used : used + count] = self.free_list[free - count : free].flip(0)
            self.n_pages[seq] += count
            self.n_free -= count


def write_blocks(cache: KVCache, pages: torch.Tensor, blocks: torch.Tensor, side: str) -> None:
    """Quantize one side of full blocks [n, num_heads_kv, 128, head_dim] into pages int [n] of the pool, in torch."""
    records, blocks = cache.pool[pages.long()].flatten(0, 1), blocks.flatten(0, 1).float()
    if side == "k":
        weights = None if cache.query_weights is None else cache.query_weights.repeat(pages.shape[0], 1)
        cache.format.write_k(records, blocks, cache.range_search, weights)
    else:
        cache.format.write_v(records, blocks, cache.range_search)
    cache.pool[pages.long()] = records.unflatten(0, (-1, cache.num_heads_kv))


def read_pages(cache: KVCache, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantize pages int [n]: K, V fp32 [n, num_heads_kv, 128, head_dim], in torch."""
    records = cache.pool[pages.long()].flatten(0, 1)
    k = cache.format.dequantize_k(records, cache.head_dim).unflatten(0, (-1, cache.num_heads_kv))
    return k, cache.format.dequantize_v(records, cache.head_dim).unflatten(0, (-1, cache.num_heads_kv))


class Backend(NamedTuple):
    """What fills and reads pages on one type of device."""

    check: Callable[[KVCache], None]  # raises NotImplementedError for a cache it cannot serve
    write_blocks: Callable[[KVCache, torch.Tensor, torch.Tensor, str], None]
    read_pages: Callable[[KVCache, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


# By device type; dispatch adds the kernels' "cuda" entry, so that this file needs to know of no kernel.
BACKENDS: dict[str, Backend] = {"cpu": Backend(lambda cache: None, write_blocks, read_pages)}
