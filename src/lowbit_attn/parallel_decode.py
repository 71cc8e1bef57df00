"""A call of ``decode_sharded`` on one rank: its checks, what it computes alone, and the exchange with the others."""

from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch

from lowbit_attn import dispatch, reference
from lowbit_attn.api import decode, merge_states, ready
from lowbit_attn.cache import KVCache
from lowbit_attn.checks import check_tensor
from lowbit_attn.dealing import local_lengths
from lowbit_attn.ops import decode_with_counters
from lowbit_attn.plan import ACCESS_BYTES
from lowbit_attn.reference import Attention


@dataclass
class Call:
    """A call of decode_sharded; asked: softmax_scale, softcap and path."""

    q: torch.Tensor
    cache: Any  # a ShardedKVCache
    asked: dict
    sink_logits: torch.Tensor | None
    out: torch.Tensor | None
    lse: torch.Tensor | None

    @property
    def name(self) -> tuple[torch.Size, torch.dtype, bool]:
        """What the exchange is kept by."""
        return self.q.shape, self.q.dtype, dispatch.is_reference(self.cache.local, self.asked["path"])

    @property
    def signature(self) -> tuple:
        """What calls on a GPU that need not be compared again have in common."""
        return self.q.shape, self.q.dtype, self.sink_logits is None, *self.asked.values()

    def is_agreed(self) -> bool:
        """Whether the call goes on without the others: on a GPU, if they compared one like it or capture a graph."""
        local = self.cache.local
        if local.device.type == "cpu" or not isinstance(self.q, torch.Tensor):
            return False
        try:
            return local.is_capturing() or self.signature in self.cache.agreed
        except TypeError:  # a value that no option takes
            return False

    def check_outputs(self) -> None:
        """What the merge alone sees, and what rank 0 alone reads: a call that it alone refuses would leave the others
        waiting."""
        q, cache = self.q, self.cache
        cache.check_whole(np.arange(min(len(q), len(cache.lengths))))
        lse_shape = (q.shape[0], q.shape[2], q.shape[1])
        for name, x, shape, dtype in (("out", self.out, q.shape, q.dtype), ("lse", self.lse, lse_shape, torch.float32),
                                      ("sink_logits", self.sink_logits, q.shape[2:3], torch.float32)):
            if x is not None:
                check_tensor(name, x, shape, (dtype,), q.device)

    def prepared(self) -> tuple[dict, tuple[torch.Tensor, torch.Tensor]]:
        """All that this rank can do without the others, in memory of its own."""
        q, cache = self.q, self.cache
        ready(q, cache.local, **self.asked, sink_logits=self.sink_logits, load=False)
        self.check_outputs()
        if cache.world > 1:
            cache.exchanges.ready(*self.name)
        part = self.part()
        facts = dict(q=fact(q), has_sink_logits=self.sink_logits is not None, lengths=cache.lengths[: len(q)].tolist())
        return facts | {name: float(value) if isinstance(value, Real) else value
                        for name, value in self.asked.items()}, part

    def part(self, **outputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention to this rank's tokens; outputs: out and lse of a call with one query a row."""
        options = self.asked | {"sink_logits": self.sink_logits if self.cache.rank == 0 else None}
        if self.q.shape[1] == 1:
            return decode(self.q, self.cache.local, **options, **outputs)
        return _decode_drafts(self.q, self.cache, options)

    def exchanged(self, part: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention to all ranks' tokens; part: this rank's, if it was computed."""
        cache, q = self.cache, self.q
        exchange = cache.exchanges.find(*self.name, cache.local.is_capturing())
        is_first = part is not None
        part = part if is_first else self.part(out=exchange.o, lse=exchange.lse)
        for x, found in zip((exchange.o, exchange.lse), part):
            if x is not found:
                x.copy_(found)
        out, lse = (x if _is_dense(x) else None for x in (self.out, self.lse))
        out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        lse = torch.empty_like(exchange.lse) if lse is None else lse
        exchange.merge(out, lse)
        if is_first and q.is_cuda:
            cache.agreed.add(self.signature)
        return out, lse


def fact(x: torch.Tensor) -> str:
    """What ranks compare of a tensor."""
    return f"{list(x.shape)} of {x.dtype}"


def _is_dense(x: torch.Tensor | None) -> bool:
    """Whether the merge writes there as it is."""
    return x is not None and x.is_contiguous() and not x.data_ptr() % ACCESS_BYTES


def _decode_drafts(q: torch.Tensor, cache, options: dict) -> tuple[torch.Tensor, torch.Tensor]:
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
    o, lse = merge_states(torch.stack((o.float(), own[0])), torch.stack((lse, own[1])))
    return o.to(q.dtype), lse


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
