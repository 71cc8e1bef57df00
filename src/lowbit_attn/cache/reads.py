"""What a cache gives back: its bytes, dequantized pages, whole sequences, keys and queries as it has them."""

from collections.abc import Sequence

import torch

from lowbit_attn import layout
from lowbit_attn.cache.attached import count_clamped
from lowbit_attn.cache.backend import backend_of
from lowbit_attn.cache.state import CacheState
from lowbit_attn.checks import integer, integers
from lowbit_attn.formats.contract import by_position
from lowbit_attn.precision import full_precision


class CacheReads(CacheState):
    """The reading half of a KVCache."""

    @property
    def nbytes(self) -> int:
        """Bytes that hold the present tokens: packed sides of pages, sinks, 16-bit tails of both sides; and codebooks.

        A page that several sequences hold counts for each of them.
        """
        self.settle("nbytes")
        token = 2 * self.num_heads_kv * self.head_dim
        _, n_qk, n_qv, n_tok = (int(count.sum()) for count in self.counts)
        packed = n_qk * self.record.v_offset + n_qv * (self.record.nbytes - self.record.v_offset)
        tails = 2 * n_tok - n_qk - n_qv  # sinks included
        books = 0 if self.attached is None else self.attached.nbytes
        return packed // layout.PAGE_TOKENS * self.num_heads_kv + tails * token + books

    def count_clamped(self) -> dict[str, int]:
        """How many packed means ("mean", of K) and norms ("norm", of V) of a codebook format are at fp16's largest
        magnitude: finite ones beyond are clamped to it. Waits for the device."""
        self.settle("count_clamped")
        return count_clamped(self)

    def dequantize_pages(self, pages: Sequence[int] | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Page ids [n] -> K, V fp32 [n, num_heads_kv, 128, head_dim]. Waits for ids that are on the device.

        Codebooks of rope="pre": K before its rotary embedding, since a page does not say its positions.
        """
        ids = integers("pages", pages)
        if ids and not 0 <= min(ids) <= max(ids) < self.num_pages:
            raise ValueError(f"pages: got {ids}, supported: 0 to num_pages - 1 = {self.num_pages - 1}")
        return self._read_pages(self.upload(ids))

    @property
    def pool_positions(self) -> torch.Tensor:
        """Positions in the page of its stored tokens, of formats that order them: uint8 [num_pages, num_heads_kv, 128],
        a view of the pool."""
        return self.format.positions(self.pool.flatten(0, 1), self.head_dim).unflatten(0, (-1, self.num_heads_kv))

    def _read_pages(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantize pages int [n], their tokens by position: K, V fp32 [n, num_heads_kv, 128, head_dim]."""
        k, v = backend_of(self).read_pages(self, pages)
        if self.v_entries is not None:  # an entry above 1 times a norm near the dtype's largest value is beyond it
            largest = torch.finfo(self.dtype).max
            v = torch.where(v.isfinite(), v.clamp(-largest, largest), v)
        if self.format.orders_tokens:
            positions = self.pool_positions[pages.long()]
            k, v = by_position(k, positions), by_position(v, positions)
        return k, v

    def gather(self, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All of one sequence as the cache holds it: K, V fp32 [num_heads_kv, seqlen, head_dim]."""
        self.settle("gather")
        seq = int(self.check_rows([integer("seq", seq)], alive=False)[0])
        return self.held(seq, seq)

    def held(self, row: int, ring_row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``gather`` of a row of counters and table whose sinks and rings are row ``ring_row`` of theirs."""
        n_sink, n_qk, n_qv, n_tok = (int(count[row]) for count in self.counts)
        start = n_qk if self.ring_start is self.n_qk else int(self.ring_start[row])
        k, v = self._read_pages(self.table[row, : n_qk // layout.PAGE_TOKENS])
        k = self.turned(row, k, 0, back=False)
        sides = ((k, n_qk, self.sink_k, self.ring_k), (v, n_qv, self.sink_v, self.ring_v))
        return tuple(
            torch.cat((sink[ring_row, :, :n_sink].float(), pages.transpose(0, 1).flatten(1, 2)[:, :n_q],
                       ring[ring_row][:, self._slots(start + n_q - n_qk, n_tok - n_sink, ring)].float()), 1)
            for pages, n_q, sink, ring in sides)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or queries [..., head_dim] in the cache's dtype, rotated (in fp32, rounded once) if it rotates keys."""
        if self.rotation is not None:
            with full_precision(x.device.type):
                x = x.float() @ self.rotation
        return x.to(self.dtype)

    def turned(self, row: int, k: torch.Tensor, start: int, back: bool) -> torch.Tensor:
        """Keys of a row's pages [pages, num_heads_kv, 128, head_dim], the first at ``start`` after the sinks, turned
        back to before their rotary embedding or forth; as they are unless the codebooks' rope is "pre"."""
        if self.attached is None or not self.attached.is_pre_rope:
            return k
        with full_precision(k.device.type):
            return self.attached.turned(k.float(), int(self.first_positions[row]) + self.sinks + start, back)

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Queries [..., num_heads, head_dim] as the stored keys want them: rotated, or in fp32 as codebooks say."""
        if self.attached is None:
            return self.rotate(q) if self.rotate_keys else q
        return self.attached.queries(q)

    def _slots(self, start: int, stop: int, ring: torch.Tensor) -> torch.Tensor:
        return torch.arange(start, stop, device=self.device) % ring.shape[2]
