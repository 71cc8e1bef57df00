"""Decode over both levels of a LevelCache in one launch, where an architecture has a kernel for it.

    q [batch, q_len, num_heads, D] -> rows [batch * num_heads_kv, q_len, ratio, D] -> out, lse

A warp reads pages of the high level, then of the low one, into one softmax: nothing is merged but parts of a row.
"""

import torch

from lowbit_attn import dispatch, kernels, loader
from lowbit_attn.levels.view import LevelViews, views_of
from lowbit_attn.plan import ACCESS_BYTES, DecodePlan
from lowbit_attn.reference import Attention
from lowbit_attn.registers import LOG2_E
from lowbit_attn.scratch import prepare

PATH = dispatch.PAIR
LEAST_ROWS = 64  # (sequence, KV head) rows from which on one launch was faster on an H100; at 32 two were by 2 %


class PairPlan(DecodePlan):
    """A ``DecodePlan`` whose kernel reads two levels; q and o are of (sequence, KV head) rows."""

    def __init__(self, cache, views: LevelViews, q: torch.Tensor, decode, scratch, scalars: tuple):
        high, low = views
        super().__init__(low, q, decode, scratch, scalars, low.units)
        self.rows = self.rows[:1]
        self.tensors = tuple(map(loader.argument, (
            *(view.units.view(torch.uint32) for view in views), cache.table, cache.c_sink, cache.c_pack, cache.c_tok,
            cache.c_out, high.sink_k, high.sink_v, low.sink_k, low.sink_v, low.ring_k, low.ring_v)))


def why_not(cache, options: Attention, q_len: int = 1, num_splits: int | None = None) -> list[str]:
    """Reasons why a call on a CUDA device takes two launches; empty if one serves it."""
    arch, _ = dispatch.target_of(cache.device)
    reasons = dispatch.no_pair(arch, cache, q_len, _features(options))
    if options.sink_logits is not None:
        reasons = [*reasons, f"{PATH} path: sink_logits, supported: None"]
    if num_splits is not None:
        reasons = [*reasons, f"{PATH} path: num_splits {num_splits}, supported: None, as all CTAs share all pages"]
    return reasons


def serves(cache, rows: torch.Tensor, options: Attention, num_splits: int | None, path: str | None) -> bool:
    """Whether a call with queries of ``decode.level_queries`` takes one launch; NotImplementedError with the reasons if
    it asks for one and none serves it.

    More than PAIR_ROWS query rows of a KV head are blocks that read all pages again, and of few rows the splits of two
    launches are faster: those take it by name only.
    """
    count, q_len, ratio = rows.shape[:3]
    if path not in (None, PATH) or (path is None and (q_len * ratio > kernels.PAIR_ROWS or count < LEAST_ROWS)):
        return False
    reasons = why_not(cache, options, q_len, num_splits)
    if reasons and path is not None:
        raise NotImplementedError("; ".join(reasons))
    return not reasons


def plan_of(cache, rows: torch.Tensor, options: Attention, num_splits: int | None, path: str | None) -> PairPlan | None:
    """The plan of a call with queries of ``decode.level_queries``, which loads its kernel; None: it takes two launches.

    Plans, and that there is none, are kept with the views of the cache. Raises what ``serves`` does.
    """
    views = views_of(cache)
    call = (rows.shape, options.softmax_scale, options.softcap, options.sink_logits is None, num_splits, path,
            dispatch.forced_arch())
    if call in views.pairs:
        return views.pairs[call]
    plan = _make_plan(cache, views, rows, options) if serves(cache, rows, options, num_splits, path) else None
    if not cache.is_capturing():  # memory of a captured step belongs to its graph
        views.keep(call, plan)
    return plan


def _make_plan(cache, views: LevelViews, rows: torch.Tensor, options: Attention) -> PairPlan:
    arch, target = dispatch.target_of(rows.device)
    package = kernels.arch_package(arch)
    prepare(rows.device, package.EMPTY)
    key = kernels.pair_key(target, str(cache.dtype).removeprefix("torch."), cache.head_dim, cache.format,
                           _features(options))
    scratch = package.even_scratch(tuple(rows.shape), key.rows, dispatch.running_ctas(rows.device, 1))
    scale = cache.head_dim**-0.5 if options.softmax_scale is None else options.softmax_scale
    scalars = (scale * LOG2_E, (options.softcap or 0.0) * LOG2_E)
    return PairPlan(cache, views, rows, loader.load(key), scratch, scalars)


def launch(plan: PairPlan, num_heads_kv: int, rows: torch.Tensor, o: torch.Tensor, lse: torch.Tensor) -> None:
    """One launch. rows: the call's queries; o [batch, q_len, num_heads, head_dim] of the cache's dtype and lse fp32
    [batch, num_heads, q_len], dense and aligned."""
    count, q_len, ratio, _ = rows.shape
    rows = rows.clone() if rows.data_ptr() % ACCESS_BYTES else rows
    is_same = q_len == 1  # the order of o and of its rows
    found, _ = plan.launch(rows, o.view(rows.shape) if is_same else None, lse.view(count, ratio, q_len), None)
    if not is_same:
        o.unflatten(2, (num_heads_kv, ratio)).copy_(found.unflatten(0, (-1, num_heads_kv)).transpose(1, 2))


def _features(options: Attention) -> tuple[str, ...]:
    return tuple(name for name in kernels.FEATURES if getattr(options, name) is not None)
