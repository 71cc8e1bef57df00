"""``append`` and ``manage`` of a LevelCache by kernels (LeanKV, 4.1, 5.2): a launch, and two.

    append  device/level_append.py  new tokens -> sinks and rings
    plan    device/level_plan.py    scores, classes, frames by prefix sums, counters
    pack    device/level_pack.py    tokens of the rows that go -> pages and stages
    places  device/level_windows.py of caches with windows: their classes by position

They read the device's counters: a captured step launches them always, and those of ``manage`` return at once where no
row acts. What they do not serve stays in torch (step.py), and ``why_not`` says so.
"""

import torch

from lowbit_attn import dispatch, kernels, loader
from lowbit_attn.levels import step
from lowbit_attn.levels.frames import FramePool
from lowbit_attn.levels.level_cache import LevelCache
from lowbit_attn.levels.policy import HIGH, LOW, Cumulative
from lowbit_attn.levels.state import PAGE, WINDOW
from lowbit_attn.plan import ACCESS_BYTES
from lowbit_attn.reference import PLAIN, Attention


def why_not(cache, options: Attention) -> list[str]:
    """Reasons why no kernels serve the steps of this cache; empty if some do."""
    if cache.device.type != "cuda":
        return [f"device: {cache.device} has no kernels, supported: a CUDA device"]
    try:
        dispatch.target_of(cache.device)
    except NotImplementedError as error:
        return [str(error)]
    return why_not_on(cache, options)


def why_not_on(cache, options: Attention) -> list[str]:
    """``why_not``, whatever device there is."""
    reasons = kernels.manage_missing(cache.format, cache.head_dim, cache.dtype)
    if options.window is not None and options.window < cache.slots:
        reasons.append(f"window {options.window}, supported: None, or {cache.slots} and more, the ring's slots")
    return reasons


def append_key_of(cache, target: str) -> kernels.KernelKey:
    """The kernel of ``append`` on an architecture."""
    return kernels.level_append_key(target, str(cache.dtype).removeprefix("torch."), cache.head_dim)


def keys_of(cache, target: str) -> tuple[kernels.KernelKey, kernels.KernelKey]:
    """The two kernels of ``manage`` on an architecture."""
    dtype = str(cache.dtype).removeprefix("torch.")
    return kernels.manage_keys(target, dtype, cache.head_dim, cache.format, cache.range_search)


def append_arguments(cache, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict:
    """What the kernel of ``append`` takes, by name and in its order."""
    return dict(
        x_k=_dense(k), x_v=_dense(v), which=rows, hi_k=cache.hi_k, hi_v=cache.hi_v, ring_k=cache.ring_k,
        ring_v=cache.ring_v, n_sink=cache.n_sink, n_tok=cache.n_tok, limit=cache.limit, faults=cache.faults,
        n_stage=cache.n_stage, c_sink=cache.c_sink, c_out=cache.c_out, c_tok=cache.c_tok, sinks=cache.sinks)


def plan_arguments(cache, rows: torch.Tensor, q: torch.Tensor, lse: torch.Tensor, options: Attention) -> dict:
    """What the first kernel takes, by name and in its order; see ``LevelCache.manage``."""
    pool, is_cumulative = cache.pool, isinstance(cache.policy, Cumulative)
    high, low = pool.lists[0], pool.lists[-1]
    counts = (0, 0) if is_cumulative else cache.policy.counts(PAGE)
    limits = (cache.policy.T_l, cache.policy.T_h) if is_cumulative else (0.0, 0.0)
    scale = cache.head_dim**-0.5 if options.softmax_scale is None else options.softmax_scale
    return dict(
        q=_dense(q.to(cache.dtype)), lse=lse.contiguous(), which=rows, ring_k=cache.ring_k, score=cache.score,
        seen=cache.seen, n_sink=cache.n_sink, n_out=cache.n_out, n_tok=cache.n_tok, limit=cache.limit,
        waits=cache.waits.view(torch.uint8), starved=cache.starved, order=cache.order, fresh=cache.new,
        n_stage=cache.n_stage, c_sink=cache.c_sink, c_out=cache.c_out, c_pack=cache.c_pack, c_tok=cache.c_tok,
        n_drop=cache.n_drop, unit=cache.half, table=cache.table, ids_high=high.ids, ids_low=low.ids,
        ends_high=high.ends, ends_low=low.ends, places=cache.places, needs=cache.needs, starts=cache.starts,
        goes=cache.goes, arrivals=cache.arrivals, num_heads=cache.num_heads_kv, every=cache.manage_every,
        due_at=WINDOW + PAGE, high=counts[0], kept=counts[1], is_cumulative=int(is_cumulative),
        size_high=pool.frame_units(HIGH), size_low=pool.frame_units(LOW),
        size_record=pool.record_bytes[LOW] // pool.units(LOW).shape[1], per_low=pool.per_low,
        is_shared=int(pool.is_shared), max_seqlen=cache.max_seqlen, room=cache.sinks + cache.slots,
        softmax_scale=float(scale), softcap=float(options.softcap or 0.0), t_low=float(limits[0]),
        t_high=float(limits[1]))


def pack_arguments(cache, rows: torch.Tensor) -> dict:
    """What the second kernel takes, by name and in its order."""
    high, low = (cache.pool.units(level) for level in (HIGH, LOW))
    return dict(
        which=rows, goes=cache.goes, n_out=cache.n_out, order=cache.order, fresh=cache.new, n_stage=cache.n_stage,
        c_pack=cache.c_pack, table=cache.table, score=cache.score, seen=cache.seen, pool_high=high.view(torch.uint32),
        meta_high=high.view(torch.uint16), pool_low=low.view(torch.uint32), meta_low=low.view(torch.uint16),
        hi_k=cache.hi_k, hi_v=cache.hi_v, lo_k=cache.lo_k, lo_v=cache.lo_v, ring_k=cache.ring_k, ring_v=cache.ring_v,
        heads=cache.num_heads_kv, sinks=cache.sinks)


def places_arguments(cache, rows: torch.Tensor) -> dict:
    """What the kernel of places takes, by name and in its order."""
    return dict(which=rows, goes=cache.goes, n_out=cache.n_out, order=cache.order, fresh=cache.new,
                n_stage=cache.n_stage, c_pack=cache.c_pack, classes=cache.classes, before=cache.before,
                num_heads=cache.num_heads_kv)


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Queries or tokens as kernels load them, in whole accesses."""
    return x.contiguous() if not x.data_ptr() % ACCESS_BYTES else x.clone(memory_format=torch.contiguous_format)


def append(cache, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Put new tokens [batch, tokens, num_heads_kv, head_dim] behind those of distinct rows int64 [batch]."""
    if not len(rows):
        return
    with torch.no_grad(), torch.cuda.device(cache.device):
        kernel = loader.load(append_key_of(cache, dispatch.target_of(cache.device)[1]))
        kernel(*append_arguments(cache, rows, k, v).values())


def manage(cache, rows: torch.Tensor, q: torch.Tensor, lse: torch.Tensor, options: Attention) -> None:
    """Score, plan and move: distinct rows int64 [batch]. Both kernels and all that they read are there before one is
    launched."""
    with torch.no_grad(), torch.cuda.device(cache.device):
        target = dispatch.target_of(cache.device)[1]
        plan, pack = map(loader.load, keys_of(cache, target))
        places = loader.load(kernels.level_window_keys(target)[0]) if cache.windows else None
        planned, packed = plan_arguments(cache, rows, q, lse, options), pack_arguments(cache, rows)
        plan(*planned.values())
        pack(*packed.values())
        if places is not None:
            places(*places_arguments(cache, rows).values())


def ready(cache) -> None:
    """Load or build the kernels of a cache."""
    target = dispatch.target_of(cache.device)[1]
    windows = kernels.level_window_keys(target) if cache.windows else ()
    for key in (append_key_of(cache, target), *keys_of(cache, target), *windows):
        loader.load(key)


def prepare(cache) -> None:
    """Launch the kernels of a cache once, on an empty one: the driver loads them at their first launch, which must not
    be in a captured step. Nothing where no kernel serves it."""
    if why_not(cache, PLAIN):
        return
    sizes = (1,) * len(cache.pool.lists)
    with torch.inference_mode(False):
        pool = FramePool(cache.format, head_dim=cache.head_dim, frames=sizes, device=cache.device)
        empty = LevelCache(pool, 1, max_seqlen=PAGE, dtype=cache.dtype, range_search=cache.range_search,
                           windows=cache.windows)
        q = torch.zeros((1, 1, 1, cache.head_dim), dtype=cache.dtype, device=cache.device)
        append(empty, empty.all_rows, q, q)
        manage(empty, empty.all_rows, q, torch.zeros((1, 1, 1), device=cache.device), PLAIN)


step.KERNELS["cuda"] = step.Kernels(why_not, manage, prepare, append)
