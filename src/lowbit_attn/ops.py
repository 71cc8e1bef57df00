"""torch operators: decode and append as torch.compile, export and functional transforms see them.

    lowbit_attn::decode(q, rows, ring_rows, <state of a cache>, sink_logits, <plain values>) -> (o, lse)
    lowbit_attn::decode_out(q, out!, lse!, ...)                             into the caller's buffers
    lowbit_attn::append(k, v, rows, ring_rows, <state of a cache>!, <plain values>)     a step, pages reserved ahead

They take a cache's public state tensor by tensor, so a graph that holds them holds no Python object. Row b of a batch
has counters and table in row ``rows[b]`` of theirs, sinks and ring in row ``ring_rows[b]`` of theirs; a KVCache's are
the same, an engine's need not be. Kernels do not check ``ring_rows``. q, k and v are rotated as the cache's keys are,
of its dtype, and checked: ``lowbit_attn.decode`` and ``KVCache.append`` do all that and, while they are being compiled,
call these. Shapes and defaults are theirs.
"""

import numpy as np
import torch

from lowbit_attn import _private, dispatch
from lowbit_attn.cache import KVCache
from lowbit_attn.cache.backend import BACKENDS
from lowbit_attn.cache.extend import Extension
from lowbit_attn.cache.held import HeldCache
from lowbit_attn.cache.journal import Journal
from lowbit_attn.cache.view import ROW_FIELDS, STATE, STEP_STATE
from lowbit_attn.reference import Attention

STEP_VALUES = ("query_weights", "range_search", "sinks", "window_k", "window_v")
_READ_BY_STEPS = ("table", "limit")
READ = (*(field.name for field in ROW_FIELDS), *STATE)  # by decode
_STATE_SCHEMA = ", ".join(f"Tensor {name}" for name in READ)
_STEP_SCHEMA = ", ".join(f"Tensor{'' if name in _READ_BY_STEPS else f'({chr(97 + i)}!)'} {name}"
                         for i, name in enumerate(STEP_STATE))
_VALUES_SCHEMA = ("str format, int[] strides, float? softmax_scale, float? softcap, int? window, bool keep_sinks, "
                  "int? num_splits, str? path")

# Library.impl, not torch.library.custom_op: its calls take a sixth of the host time.
_LIBRARY = torch.library.Library("lowbit_attn", "DEF")
_LIBRARY.define(f"decode(Tensor q, {_STATE_SCHEMA}, Tensor? sink_logits, {_VALUES_SCHEMA}) -> (Tensor, Tensor)",
                tags=torch.Tag.pt2_compliant_tag)
_LIBRARY.define(f"decode_out(Tensor q, Tensor(a!) out, Tensor(b!) lse, {_STATE_SCHEMA}, Tensor? sink_logits, "
                f"{_VALUES_SCHEMA}) -> ()", tags=torch.Tag.pt2_compliant_tag)
_LIBRARY.define(f"append(Tensor k, Tensor v, Tensor rows, Tensor ring_rows, {_STEP_SCHEMA}, str format, "
                "int[] strides, Tensor? query_weights, bool? range_search, int sinks, int window_k, int window_v) "
                "-> ()",
                tags=torch.Tag.pt2_compliant_tag)


def traced_decode(q: torch.Tensor, cache: KVCache, out: torch.Tensor | None, lse: torch.Tensor | None,
                  options: Attention, num_splits: int | None, path: str | None,
                  rows: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``lowbit_attn.decode`` after its checks, as operators. The cache's format must be one that FORMATS names."""
    if cache.unnamed:  # known to the cache: not every torch can trace a comparison of formats
        raise NotImplementedError("; ".join(cache.unnamed))
    state = [*(cache.batch_rows(q.shape[0]) if rows is None else (rows, rows)),
             *(getattr(cache, name) for name in STATE)]
    values = (options.sink_logits, cache.format.name, list(cache.strides), options.softmax_scale, options.softcap,
              options.window, options.keep_sinks, num_splits, path)
    rotated = cache.rotate(q) if cache.rotate_keys else q
    if out is None and lse is None and rotated.dtype == q.dtype:
        return torch.ops.lowbit_attn.decode(rotated, *state, *values)
    fresh, fresh_lse = _outputs(q)
    out, lse = fresh if out is None else out, fresh_lse if lse is None else lse
    torch.ops.lowbit_attn.decode_out(rotated, out, lse, *state, *values)
    return out, lse


def decode_with_counters(q: torch.Tensor, cache: KVCache, n_tok: torch.Tensor, *, softmax_scale: float | None = None,
                         softcap: float | None = None, sink_logits: torch.Tensor | None = None,
                         path: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``decode`` over the first n_tok int32 [batch] tokens of each row, packed ones among them."""
    batch = len(n_tok)
    state = {name: getattr(cache, name) for name in STATE}
    state |= {name: state[name][:batch] for name in ("n_qk", "n_qv", "ring_start")}
    state |= {"n_tok": n_tok, "n_sink": torch.minimum(cache.n_sink[:batch], n_tok)}
    rotated = cache.rotate(q) if cache.rotate_keys else q
    return torch.ops.lowbit_attn.decode(rotated, *cache.batch_rows(batch), *state.values(), sink_logits,
                                        cache.format.name, list(cache.strides), softmax_scale, softcap, None, False,
                                        None, path)


def mark_static(cache: KVCache) -> None:
    """Tell torch.compile that the cache's memory stays where it is, before anything that uses it is compiled.

    With mode="reduce-overhead" a graph then reads the cache in place; otherwise each call would copy all of it to
    where the graph was captured.
    """
    for name in STEP_STATE:
        _private.mark_static_address(getattr(cache, name))


def _outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, q_len, num_heads, _ = q.shape
    return (torch.empty_like(q, memory_format=torch.contiguous_format),
            q.new_empty((batch, num_heads, q_len), dtype=torch.float32))


def _decode_out(q, out, lse, *arguments) -> None:
    state, sink_logits = arguments[: len(READ)], arguments[len(READ)]
    format, strides, softmax_scale, softcap, window, keep_sinks, num_splits, path = arguments[len(READ) + 1 :]
    cache = HeldCache(format, strides, dict(zip(READ, state)))
    dispatch.decode(q, cache, out, lse, Attention(softmax_scale, softcap, window, keep_sinks, sink_logits), num_splits,
                    path)


def _decode(q, *arguments) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = _outputs(q)
    _decode_out(q, *outputs, *arguments)
    return outputs


def _append(k, v, rows, ring_rows, *arguments) -> None:
    state, (format, strides, *values) = arguments[: len(STEP_STATE)], arguments[len(STEP_STATE) :]
    state = dict(zip(STEP_STATE, state))
    cache = HeldCache(format, strides, state | {"ring_start": state["n_qk"]}, **dict(zip(STEP_VALUES, values)))
    step = BACKENDS[cache.device.type].append or _append_in_torch
    step(cache, rows, ring_rows, k, v)


def _append_in_torch(cache: HeldCache, rows: torch.Tensor, ring_rows: torch.Tensor, k: torch.Tensor,
                     v: torch.Tensor) -> None:
    """What the kernels do, marks in ``faults`` included."""
    is_row = (rows >= 0) & (rows < len(cache.n_tok))
    if (is_row & ((ring_rows < 0) | (ring_rows >= len(cache.ring_k)))).any():
        raise IndexError(f"ring_rows: got {ring_rows.tolist()}, supported: 0 to {len(cache.ring_k) - 1}")
    for i, (row, ring_row) in enumerate(zip(rows.tolist(), ring_rows.tolist())):
        if not is_row[i]:
            cache.faults[-1] = 1
        elif cache.n_tok[row] + k.shape[1] > cache.limit[row]:
            cache.faults[row] = 1
        else:
            extension = Extension(cache, row, k[i], v[i], pack=False, ring_row=ring_row)
            with Journal() as journal:
                extension.write(journal)
                cache._write_counters(journal, np.array([row]), extension.counts)


for _device in ("CPU", "CUDA"):
    for _name, _function in (("decode", _decode), ("decode_out", _decode_out), ("append", _append)):
        _LIBRARY.impl(_name, _function, _device)
torch.library.register_fake("lowbit_attn::decode", lambda q, *arguments: _outputs(q), lib=_LIBRARY)
for _name in ("decode_out", "append"):
    torch.library.register_fake(f"lowbit_attn::{_name}", lambda *arguments: None, lib=_LIBRARY)
