"""torch operators: decode as torch.compile, export and functional transforms see it.

    lowbit_attn::decode(q, <state of a cache>, sink_logits, <plain values>) -> (o, lse)
    lowbit_attn::decode_out(q, out!, lse!, ...)                             into the caller's buffers

They take a cache's public state tensor by tensor, so a graph that holds them holds no Python object. q is rotated as
the cache's keys are, and checked: ``lowbit_attn.decode`` does both and, while it is being compiled, calls these. Shapes
and defaults are those of ``lowbit_attn.decode``.
"""

from dataclasses import dataclass

import numpy as np
import torch

from lowbit_attn import dispatch, kernels
from lowbit_attn.cache import KVCache, Strides
from lowbit_attn.formats import FORMATS, Format
from lowbit_attn.formats.contract import Record
from lowbit_attn.reference import Attention
from lowbit_attn.state import Counts

STATE = ("pool", "table", "n_sink", "n_qk", "n_qv", "n_tok", "sink_k", "sink_v", "ring_k", "ring_v")
_STATE_SCHEMA = ", ".join(f"Tensor {name}" for name in STATE)
_VALUES_SCHEMA = ("str format, int[] strides, float? softmax_scale, float? softcap, int? window, bool keep_sinks, "
                  "int? num_splits, str? path")

# Library.impl, not torch.library.custom_op: its calls take a sixth of the host time.
_LIBRARY = torch.library.Library("lowbit_attn", "DEF")
_LIBRARY.define(f"decode(Tensor q, {_STATE_SCHEMA}, Tensor? sink_logits, {_VALUES_SCHEMA}) -> (Tensor, Tensor)",
                tags=torch.Tag.pt2_compliant_tag)
_LIBRARY.define(f"decode_out(Tensor q, Tensor(a!) out, Tensor(b!) lse, {_STATE_SCHEMA}, Tensor? sink_logits, "
                f"{_VALUES_SCHEMA}) -> ()", tags=torch.Tag.pt2_compliant_tag)


@dataclass(frozen=True)
class DecodeState:
    """What decode reads of a KVCache, made of an operator's arguments."""

    pool: torch.Tensor
    table: torch.Tensor
    n_sink: torch.Tensor
    n_qk: torch.Tensor
    n_qv: torch.Tensor
    n_tok: torch.Tensor
    sink_k: torch.Tensor
    sink_v: torch.Tensor
    ring_k: torch.Tensor
    ring_v: torch.Tensor
    format: Format
    strides: Strides

    rotate_keys = False  # q comes rotated
    gather, dequantize_pages, _slots = KVCache.gather, KVCache.dequantize_pages, KVCache._slots

    def settle(self, call: str) -> None:
        """There is no copy of the counters to refresh: ``counts`` reads them."""

    def check_rows(self, seqs: list[int], alive: bool = True) -> np.ndarray:
        return np.asarray(seqs)

    @property
    def counts(self) -> Counts:
        return Counts(*(x.cpu().numpy() for x in (self.n_sink, self.n_qk, self.n_qv, self.n_tok)))

    @property
    def device(self) -> torch.device:
        return self.pool.device

    @property
    def dtype(self) -> torch.dtype:
        return self.ring_k.dtype

    @property
    def num_heads_kv(self) -> int:
        return self.ring_k.shape[1]

    @property
    def head_dim(self) -> int:
        return self.ring_k.shape[3]

    @property
    def record(self) -> Record:
        return self.format.record(self.head_dim)


_unnamed = torch.compiler.assume_constant_result(kernels.unnamed)  # a format does not change; tracing it would warn


def traced_decode(q: torch.Tensor, cache: KVCache, out: torch.Tensor | None, lse: torch.Tensor | None,
                  options: Attention, num_splits: int | None, path: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """``lowbit_attn.decode`` after its checks, as operators. The cache's format must be one that FORMATS names."""
    if reasons := _unnamed(cache.format):
        raise NotImplementedError("; ".join(reasons))
    state = [getattr(cache, name) for name in STATE]
    values = (options.sink_logits, cache.format.name, list(cache.strides), options.softmax_scale, options.softcap,
              options.window, options.keep_sinks, num_splits, path)
    rotated = cache.rotate(q) if cache.rotate_keys else q
    if out is None and lse is None and rotated.dtype == q.dtype:
        return torch.ops.lowbit_attn.decode(rotated, *state, *values)
    fresh, fresh_lse = _outputs(q)
    out, lse = fresh if out is None else out, fresh_lse if lse is None else lse
    torch.ops.lowbit_attn.decode_out(rotated, out, lse, *state, *values)
    return out, lse


def mark_static(cache: KVCache) -> None:
    """Tell torch.compile that the cache's memory stays where it is, before anything that uses it is compiled.

    With mode="reduce-overhead" a graph then reads the cache in place; otherwise each call would copy all of it to
    where the graph was captured.
    """
    for name in STATE:
        torch._dynamo.mark_static_address(getattr(cache, name), guard=True)


def _outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, q_len, num_heads, _ = q.shape
    return (torch.empty_like(q, memory_format=torch.contiguous_format),
            q.new_empty((batch, num_heads, q_len), dtype=torch.float32))


def _decode_out(q, out, lse, *arguments) -> None:
    state, sink_logits = arguments[: len(STATE)], arguments[len(STATE)]
    format, strides, softmax_scale, softcap, window, keep_sinks, num_splits, path = arguments[len(STATE) + 1 :]
    cache = DecodeState(*state, FORMATS[format], Strides(*strides))
    dispatch.decode(q, cache, out, lse, Attention(softmax_scale, softcap, window, keep_sinks, sink_logits), num_splits,
                    path)


def _decode(q, *arguments) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = _outputs(q)
    _decode_out(q, *outputs, *arguments)
    return outputs


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("decode", _decode, _device)
    _LIBRARY.impl("decode_out", _decode_out, _device)
torch.library.register_fake("lowbit_attn::decode", lambda q, *arguments: _outputs(q), lib=_LIBRARY)
torch.library.register_fake("lowbit_attn::decode_out", lambda *arguments: None, lib=_LIBRARY)
