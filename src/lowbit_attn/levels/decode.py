"""Decode over a LevelCache: both levels in one launch where that is served and faster (pair.py); else its two levels by
the kernels of ordinary caches, a launch each, then one that merges them.

    q [batch, q_len, num_heads, D] -> rows of a level [batch * num_heads_kv, q_len, ratio, D]
    high level: decode kernel of its format -> (o, lse)      pages, the stage and the sinks
    low level:  decode kernel of its format -> (o, lse)      pages, the stage and the ring
    merge by lse -> out, lse

Under a window a kernel before them says how many tokens of each level it hides (windows.py). A sink logit joins the
denominator in the merge. No host reads anything: steps may be captured.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from lowbit_attn import dispatch, kernels, loader
from lowbit_attn.levels import pair, step, windows
from lowbit_attn.levels.view import LevelView, views_of
from lowbit_attn.plan import ACCESS_BYTES
from lowbit_attn.reference import Attention
from lowbit_attn.scratch import no_sink_logit, prepare


def decode(q: torch.Tensor, cache, out: torch.Tensor, lse: torch.Tensor, options: Attention, num_splits: int | None,
           path: str | None) -> None:
    """Run the chosen path into out [batch, q_len, num_heads, D] and lse fp32 [batch, num_heads, q_len].

    NotImplementedError with the reasons where no kernel serves a level or its windows.
    """
    check(cache, options, q.shape[1], path)
    if dispatch.is_reference(cache, path):
        with torch.no_grad():
            o, logsumexp = cache.attend(q, options)
            out.copy_(o)
            lse.copy_(logsumexp)
        return
    if q.device.type != "cuda":
        raise NotImplementedError("; ".join(dispatch.why_not(cache, q.shape[2], q.shape[1], path)))
    with torch.no_grad(), torch.cuda.device(q.device):
        rows, asked = level_queries(q.to(cache.dtype), cache.num_heads_kv), _of_levels(options)
        _prepare_manage(cache)
        o, logsumexp = _written(out, cache.dtype), _written(lse, torch.float32)
        if (plan := pair.plan_of(cache, rows, options, num_splits, path)) is not None:
            pair.launch(plan, cache.num_heads_kv, *(x.detach() for x in (rows, o, logsumexp)))
        else:
            path = _path_of_levels(path)
            found = [_decode_level(rows, view, asked, num_splits, path) for view in _views(cache, options.window)]
            sinks = no_sink_logit(q.device) if options.sink_logits is None else options.sink_logits.contiguous()
            _merge(cache)(*(x.detach() for x in (*found[0], *found[1], sinks, o, logsumexp)))
        for given, written in ((out, o), (lse, logsumexp)):
            if given is not written:
                given.copy_(written)


def _prepare_manage(cache) -> None:
    """Have the kernels of ``manage`` there once a step may be captured, which follows a call of decode."""
    views = views_of(cache)
    if not views.is_prepared and not cache.is_capturing():
        step.KERNELS[cache.device.type].prepare(cache)
        views.is_prepared = True


def _written(given: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Where the merge writes: the caller's buffer, or a dense and aligned one like it."""
    fits = given.is_contiguous() and given.dtype == dtype and not given.data_ptr() % ACCESS_BYTES
    return given if fits else torch.empty(given.shape, dtype=dtype, device=given.device)


def ready(q: torch.Tensor, cache, options: Attention, num_splits: int | None, path: str | None, load: bool) -> None:
    """Raise what ``decode`` would raise of such a call; load: load or build its kernels too."""
    check(cache, options, q.shape[1], path)
    if dispatch.is_reference(cache, path):
        return
    rows, asked = level_queries(q.detach().to(cache.dtype), cache.num_heads_kv), _of_levels(options)
    if q.device.type == "cuda" and pair.serves(cache, rows, options, num_splits, path):
        if load:
            pair.plan_of(cache, rows, options, num_splits, path)
        return
    path = _path_of_levels(path)
    views = views_of(cache) if options.window is None else views_of(cache).under_window(cache)
    for view in views:
        if dispatch.planned(rows, view, _call(asked, num_splits, path)) is None:
            dispatch.ready(rows, view, asked, num_splits, path, False, load)
    if load:
        _merge(cache)
        if options.window is not None:
            _hide(cache)


def check(cache, options: Attention, q_len: int, path: str | None) -> None:
    """Raise NotImplementedError for a window over a cache that does not know where its tokens are, or of several
    queries in kernels: each would see a level's tokens from a place of its own on."""
    if options.window is None:
        return
    windows.check(cache, options.window)
    if q_len > 1 and not dispatch.is_reference(cache, path):
        raise NotImplementedError(f"window: got {options.window} over levels for {q_len} queries, supported: 1, or "
                                  "path='reference'")


def _views(cache, window: int | None) -> Sequence[LevelView]:
    """The levels as a call reads them; under a window, what it hides of them is on its way."""
    views = views_of(cache)
    if window is None:
        return views
    found = views.under_window(cache)
    _hide(cache)(*hidden_arguments(cache, views.hidden, window).values())
    return found


def hidden_arguments(cache, hidden: torch.Tensor, window: int) -> dict:
    """What the kernel of hidden tokens takes, by name and in its order; hidden: int32 [2, v], written."""
    return dict(n_out=cache.n_out, n_tok=cache.n_tok, classes=cache.classes, before=cache.before, hidden=hidden,
                num_heads=cache.num_heads_kv, sinks=cache.sinks, window=min(window, dispatch.NO_WINDOW))


def _hide(cache):
    """The kernel that finds how many tokens of each level a window hides."""
    return loader.load(kernels.level_window_keys(dispatch.target_of(cache.device)[1])[1])


def level_queries(q: torch.Tensor, num_heads_kv: int) -> torch.Tensor:
    """Queries [batch, q_len, num_heads, D] as rows of a level: [batch * num_heads_kv, q_len, ratio, D], contiguous."""
    batch, q_len, num_heads, head_dim = q.shape
    split = q.unflatten(2, (num_heads_kv, num_heads // num_heads_kv)).transpose(1, 2)
    return split.reshape(batch * num_heads_kv, q_len, -1, head_dim).contiguous()


def _of_levels(options: Attention) -> Attention:
    """What a level's launch is asked for: sink logits differ by head, and join in the merge."""
    return replace(options, sink_logits=None)


def _path_of_levels(path: str | None) -> str | None:
    """What each level's launch is asked for."""
    return None if path == dispatch.MERGE else path


def _call(options: Attention, num_splits: int | None, path: str | None) -> tuple:
    return options.softmax_scale, options.softcap, options.window, options.keep_sinks, num_splits, path, False


def _decode_level(q: torch.Tensor, view: LevelView, options: Attention, num_splits: int | None,
                  path: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of one level."""
    plan = dispatch.planned(q, view, _call(options, num_splits, path))
    if plan is not None and plan.takes(q, None, None, None):
        return plan.launch(q, None, None, None)
    prepare(q.device, kernels.arch_package(dispatch.target_of(q.device)[0]).EMPTY)
    o, lse = torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    dispatch.decode(q, view, o, lse, options, num_splits, path)
    return o, lse


def _merge(cache):
    """The kernel that merges levels of this cache's device, dtype and head_dim."""
    target = dispatch.target_of(cache.device)[1]
    return loader.load(kernels.merge_key(target, str(cache.dtype).removeprefix("torch."), cache.head_dim))
