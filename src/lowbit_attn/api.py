"""The public calls: argument checks, then the device's implementation. No arithmetic.

Shapes: batch, q_len, num_heads (query heads), num_heads_kv, head_dim, seqlen (tokens in the cache).
"""

from collections.abc import Sequence
from numbers import Real

import torch

from lowbit_attn import dispatch, ops, reference
from lowbit_attn.cache import KVCache
from lowbit_attn.cache.attached import check_identity
from lowbit_attn.cache.state import CacheState
from lowbit_attn.checks import check_rank, check_tensor, integer, is_truth
from lowbit_attn.levels import LevelCache
from lowbit_attn.levels import decode as level_decode
from lowbit_attn.levels import manage as level_manage

__all__ = ["decode", "merge_states", "ready"]

SMALLEST_FACTOR = 2.0**-64  # of softmax_scale and softcap: kernels multiply them with powers of two of the data


def decode(q: torch.Tensor, cache: KVCache, *, rows: torch.Tensor | Sequence[int] | None = None,
           softmax_scale: float | None = None, softcap: float | None = None, window: int | None = None,
           keep_sinks: bool = False, sink_logits: torch.Tensor | None = None, out: torch.Tensor | None = None,
           lse: torch.Tensor | None = None, num_splits: int | None = None,
           path: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of new queries over a low-bit cache that already holds their tokens.

    Args:
        q: [batch, q_len, num_heads, head_dim] in the cache's dtype (or fp32 on the CPU); q[b] attends to
            row rows[b] of the cache, and query j to positions <= seqlen - q_len + j.
        cache: KVCache, or LevelCache, with max_batch >= batch.
        rows: distinct rows of a KVCache, in any order, a sequence of integers or an int32 tensor [batch] on its device
            that may change under a captured call; default: 0 to batch - 1. What a tensor holds is not read by the
            host: a row beyond max_batch - 1, or below 0, is one without tokens. A LevelCache takes None.
        softmax_scale: 2^-64 to 2^64; default head_dim ** -0.5.
        softcap: c, 2^-64 to 2^64: a scaled logit x becomes c tanh(x / c) (Gemma 2); default: no cap.
        window: each query sees the last ``window`` positions, its own included (sliding window); default: all.
        keep_sinks: with a window, the cache's sink tokens stay visible (StreamingLLM).
        sink_logits: fp32 [num_heads], a learned logit of each head that joins its softmax's denominator (gpt-oss).
        out: output buffer of q's shape and dtype; lse: fp32 [batch, num_heads, q_len].
        num_splits: CTAs that share one sequence's tokens; default: the dispatcher's pick. On SM90 no more than the GPU
            runs at once. With path="stream" so many CTAs for each sequence share all sequences' tokens.
        path: "reference" (any device), or a kernel path by name; default: the dispatcher's pick. Of a LevelCache also
            "pair", both levels in one launch, and "merge", a launch for each of the dispatcher's pick and their merge;
            a path of the kernels is that of both launches. Default: "pair" where a kernel serves the call at once
            and there are many rows (levels/pair.py: serves).

    Returns:
        (o, lse): o [batch, q_len, num_heads, head_dim] in q's dtype; lse natural log, sink_logits included. A query
        that sees no token gives o = 0 and lse = -inf (or its sink logit).

    Raises ValueError, TypeError or NotImplementedError, before anything is written, for what is not supported.
    """
    is_compiling = torch.compiler.is_compiling()
    if isinstance(q, torch.Tensor) and not is_compiling:
        plan = dispatch.planned(q, cache, (softmax_scale, softcap, window, keep_sinks, num_splits, path,
                                           rows is not None))
        if plan is not None:
            rows = None if rows is None else _rows(rows, q, cache)
            if plan.takes(q, out, lse, sink_logits):
                return plan.launch(cache.rotate(q) if cache.rotate_keys else q, out, lse, sink_logits, rows)
            return _repeat(plan, q, cache, out, lse, sink_logits, rows)
    options = reference.Attention(softmax_scale, softcap, window, keep_sinks, sink_logits)
    _check(q, cache, out, lse, num_splits, options)
    if is_compiling and cache.attached is not None:
        raise NotImplementedError(f"decode: format {cache.format} has codebooks, whose calls cannot be compiled yet, "
                                  "supported: calls outside of torch.compile")
    if is_compiling and isinstance(cache, LevelCache):
        raise NotImplementedError("decode: a LevelCache, whose calls cannot be compiled, supported: calls outside of "
                                  "torch.compile")
    rows = None if rows is None else _rows(rows, q, cache)
    if is_compiling:
        return ops.traced_decode(q, cache, out, lse, options, num_splits, path, rows)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    lse = q.new_empty(_lse_shape(q), dtype=torch.float32) if lse is None else lse
    if isinstance(cache, LevelCache):
        level_decode.decode(q, cache, out, lse, options, num_splits, path)
    else:
        dispatch.decode(q, cache, out, lse, options, num_splits, path, rows)
    return out, lse


def ready(q: torch.Tensor, cache: KVCache, *, rows: torch.Tensor | Sequence[int] | None = None,
          softmax_scale: float | None = None, softcap: float | None = None, window: int | None = None,
          keep_sinks: bool = False, sink_logits: torch.Tensor | None = None, num_splits: int | None = None,
          path: str | None = None, load: bool = True) -> None:
    """Raise what ``decode`` would raise of such a call, without running it: for steps that must not be done by half.

    Arguments are decode's; the values of q are not read. The kernel is picked, and with load=True loaded too (built at
    its first use) and kept for the call, so that decode after one ``append`` needs no other. Not for calls that are
    captured or compiled.
    """
    asked = (softmax_scale, softcap, window, keep_sinks, num_splits, path, rows is not None)
    if isinstance(q, torch.Tensor) and dispatch.planned(q, cache, asked) is not None:
        _check_tensors(q, cache, None, None, sink_logits)
        _rows(rows, q, cache)
        return
    options = reference.Attention(softmax_scale, softcap, window, keep_sinks, sink_logits)
    _check(q, cache, None, None, num_splits, options)
    _rows(rows, q, cache)
    if isinstance(cache, LevelCache):
        level_decode.ready(q, cache, options, num_splits, path, load)
        if load and path != "reference" and not level_manage.why_not(cache, options):
            level_manage.ready(cache)
    else:
        dispatch.ready(q, cache, options, num_splits, path, rows is not None, load)


def _lse_shape(q: torch.Tensor) -> tuple[int, int, int]:
    return q.shape[0], q.shape[2], q.shape[1]


def _rows(rows, q: torch.Tensor, cache: KVCache) -> torch.Tensor | None:
    """Rows of a call as int32 [batch] on the cache's device, or None; raises for what is none."""
    batch = q.shape[0]
    if rows is not None and isinstance(cache, LevelCache):
        raise NotImplementedError("rows: got some over a LevelCache, supported: None, which reads rows 0 to batch - 1; "
                                  "or a KVCache")
    if isinstance(rows, torch.Tensor):
        check_tensor("rows", rows, (batch,), (torch.int32,), cache.device)
        return rows if rows.is_contiguous() else rows.contiguous()
    if rows is None:
        return None
    named = cache.check_rows(rows, alive=False, name="rows")
    if len(named) != batch:
        raise ValueError(f"rows: got {len(named)} rows for a batch of {batch}, supported: one for each")
    return cache.row_tensor(named)


def _repeat(plan, q, cache: KVCache, out, lse, sink_logits, rows) -> tuple[torch.Tensor, torch.Tensor]:
    """A planned call whose tensors must be checked or copied; the rest was checked when the plan was made."""
    if q.device != plan.device:
        raise ValueError(f"q: got device {q.device}, supported: {plan.device}")
    if not q.is_contiguous() or out is not None or lse is not None or sink_logits is not None:
        _check_tensors(q, cache, out, lse, sink_logits)
    return plan.run(cache.rotate(q) if cache.rotate_keys else q, out, lse, sink_logits, rows)


def _check(q, cache: KVCache, out, lse, num_splits: int | None, options: reference.Attention) -> None:
    """Raise for what is not supported; None stands for what decode allocates or picks itself."""
    if not isinstance(cache, CacheState | LevelCache):
        raise TypeError(f"cache: got {type(cache).__name__}, supported: a KVCache or a LevelCache")
    check_identity(cache)
    batch, q_len, num_heads, _ = check_rank("q", q, ("batch", "q_len", "num_heads", "head_dim"))
    if not 0 < batch <= cache.max_batch:
        raise ValueError(f"q: batch {batch}, supported: 1 to the cache's max_batch = {cache.max_batch}")
    if not 1 <= q_len <= cache.max_q_len:
        raise ValueError(f"q: q_len {q_len}, supported: 1 to the cache's max_q_len = {cache.max_q_len}")
    if num_heads == 0 or num_heads % cache.num_heads_kv:
        raise ValueError(f"q: {num_heads} heads, supported: multiples of num_heads_kv = {cache.num_heads_kv}")
    _check_tensors(q, cache, out, lse, options.sink_logits)
    for name, value in (("softmax_scale", options.softmax_scale), ("softcap", options.softcap)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name}: got {value!r}, supported: a number, 2^-64 to 2^64")
        if not SMALLEST_FACTOR <= value <= 1 / SMALLEST_FACTOR:
            raise ValueError(f"{name}: got {value}, supported: positive, 2^-64 to 2^64")
    if options.window is not None and integer("window", options.window) < 1:
        raise ValueError(f"window: got {options.window}, supported: 1 or more positions")
    is_truth("keep_sinks", options.keep_sinks)
    if options.keep_sinks and options.window is None:
        raise ValueError("keep_sinks: got True without a window, supported: beside window=")
    if num_splits is not None and integer("num_splits", num_splits) < 1:
        raise ValueError(f"num_splits: got {num_splits}, supported: 1 or more")


def _check_tensors(q, cache: KVCache, out, lse, sink_logits) -> None:
    batch, q_len, num_heads, _ = q.shape
    check_tensor("q", q, (batch, q_len, num_heads, cache.head_dim), (cache.dtype, torch.float32), cache.device)
    if out is not None:
        check_tensor("out", out, q.shape, (q.dtype,), cache.device)
    if lse is not None:
        check_tensor("lse", lse, _lse_shape(q), (torch.float32,), cache.device)
    if sink_logits is not None:
        check_tensor("sink_logits", sink_logits, (num_heads,), (torch.float32,), cache.device)


def merge_states(o: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial attention results over disjoint sets of tokens (flash-decoding's combine).

    o: [num_states, batch, q_len, num_heads, head_dim]; lse: fp32 [num_states, batch, num_heads, q_len], natural
    log, -inf for an empty state. Returns (o in o's dtype, lse fp32) without the first axis.
    """
    axes = ("num_states", "batch", "q_len", "num_heads", "head_dim")
    num_states, batch, q_len, num_heads, _ = check_rank("o", o, axes)
    if not o.is_floating_point():
        raise TypeError(f"o: got {o.dtype}, supported: floating point")
    check_tensor("lse", lse, (num_states, batch, num_heads, q_len), (torch.float32,), o.device)
    merged, merged_lse = reference.merge_states(o, lse)
    return merged.to(o.dtype), merged_lse
