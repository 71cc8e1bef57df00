"""Which implementation serves a call: the only place that asks what device and architecture there is."""

import math
import os
from collections.abc import Collection
from dataclasses import replace
from functools import cache

import numpy as np
import torch

from lowbit_attn import _private, kernels, loader, reference
from lowbit_attn.cache import KVCache
from lowbit_attn.cache.backend import BACKENDS, Backend, kernel_entries
from lowbit_attn.cache.state import MAX_Q_LEN, is_capturing
from lowbit_attn.formats import FORMATS
from lowbit_attn.kernels import KernelKey
from lowbit_attn.layout import PAGE_TOKENS, RECORD_ALIGN
from lowbit_attn.levels import LevelCache
from lowbit_attn.levels.view import views_of
from lowbit_attn.plan import DecodePlan, StepPlan, plans_of
from lowbit_attn.reference import Attention
from lowbit_attn.registers import LOG2_E
from lowbit_attn.scratch import prepare

NO_WINDOW = 1 << 30  # positions: more than any sequence has
CAPABILITY_TARGETS = {(9, 0): ("hopper", "sm_90a"), (8, 0): ("ampere", "sm_80"), (8, 9): ("ampere", "sm_89")}
# Ampere kernels also run on Hopper, built for it, in its sizes or in those of the target named behind a hyphen
FORCED_TARGETS = {(forced, (9, 0)): "sm_90" for forced in ("ampere", "ampere-sm_80", "ampere-sm_89")}
forced_arch = _private.environment("LOWBIT_ATTN_ARCH")
PAGES_A_BLOCK = 9  # of a sequence, for each block of query rows an SM has: up to that smaller CTAs win: docs/lessons.md
IDLE_PART = 3  # where splits leave a third of the SMs idle, an even share of all pages wins from IDLE_PAGES on
IDLE_PAGES = 128
FULL = 0.85  # of its last round: with less, smaller CTAs leave SMs idle at the end for longer than they save
UNEVEN = 1.1  # times an even share of all pages that the longest sequence's splits have, and ...
UNEVEN_PAGES = 32  # ... pages beyond it, from which an even share wins
PAGES_A_CLUSTERED_SPLIT = 16  # up to that a cluster of fewer splits is faster than more splits that meet in L2
PAGES_A_SPLIT = 4  # about: with fewer the merge takes longer than the pages that it saves (docs/lessons.md)
_STEP = "append"  # names the plan of a cache's steps among those of its decode calls
# paths of a LevelCache: both levels in one launch; two launches, each of the dispatcher's pick, and their merge
PAIR, MERGE = "pair", "merge"
GRID_PAGES = 65_535  # that one launch takes: CUDA's limit of a grid's second axis


def target_of(device: torch.device) -> tuple[str, str]:
    """(arch, target) that serves a CUDA device; LOWBIT_ATTN_ARCH=ampere takes the Ampere kernels on Hopper too, and
    ampere-sm_80 or ampere-sm_89 takes them in the sizes that they have there."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return _target_of(index, os.environ.get("LOWBIT_ATTN_ARCH") or None)


@cache
def _target_of(index: int, forced: str | None) -> tuple[str, str]:
    capability = torch.cuda.get_device_capability(index)
    if capability not in CAPABILITY_TARGETS:
        supported = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITY_TARGETS)
        raise NotImplementedError(f"device: compute capability {capability[0]}.{capability[1]}, supported: {supported}")
    arch, target = CAPABILITY_TARGETS[capability]
    if forced in (None, arch):
        return arch, target
    if (forced, capability) not in FORCED_TARGETS:
        supported = ", ".join((arch, *(name for name, at in FORCED_TARGETS if at == capability)))
        raise NotImplementedError(f"LOWBIT_ATTN_ARCH: got {forced!r} on compute capability {capability}, "
                                  f"supported: {supported}")
    return forced.partition("-")[0], FORCED_TARGETS[forced, capability]


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda"


def why_not(cache: KVCache, num_heads: int, q_len: int = 1, path: str | None = None) -> list[str]:
    """Reasons why no kernel serves decode over this cache on its device; empty if one does.

    path: None asks for any path, else for that one. The reference (path="reference") serves everything, slowly.
    """
    if not _has_kernels(cache.device):
        return [f"device: {cache.device} has no kernels, supported: a CUDA device, or path='reference'"]
    try:
        arch, _ = target_of(cache.device)
    except NotImplementedError as error:
        return [str(error)]
    return why_not_on(arch, cache, num_heads, q_len, path)


def why_not_on(arch: str, cache: KVCache, num_heads: int, q_len: int = 1, path: str | None = None) -> list[str]:
    """Why a named architecture cannot serve a call, whatever device there is; of a LevelCache, of both its levels."""
    if isinstance(cache, LevelCache):
        if path == PAIR:
            return no_pair(arch, cache, q_len)
        path = None if path == MERGE else path
        heads = num_heads // cache.num_heads_kv  # of a level's row
        return [f"{level} level: {reason}" for level, view in zip(("high", "low"), views_of(cache))
                for reason in _pick(arch, view, heads, q_len, path)[1]]
    return _pick(arch, cache, num_heads, q_len, path)[1]


def no_pair(arch: str, cache: LevelCache, q_len: int, features: tuple[str, ...] = ()) -> list[str]:
    """Why an architecture has no kernel that reads both levels in one launch; empty if it has one."""
    reasons = kernels.no_pair(arch, cache.format, cache.head_dim, cache.dtype, features)
    return reasons + _no_q_len(q_len)


def _no_q_len(q_len: int) -> list[str]:
    return [] if 1 <= q_len <= MAX_Q_LEN else [f"q_len {q_len}, supported: 1 to {MAX_Q_LEN}"]


def _pick(arch: str, cache: KVCache, num_heads: int, q_len: int, path: str | None,
          features: tuple[str, ...] = ()) -> tuple[tuple[str, int] | None, list[str]]:
    """((path, rows of its kernel), []) for a call, or (None, reasons)."""
    paths = kernels.arch_package(arch).PATHS
    if path is not None and path not in paths:
        return None, [f"path: {path!r} is not known on {arch}, supported: {', '.join(paths)}, reference"]
    reasons = list(cache.unnamed)
    is_pre_rope = cache.attached is not None and cache.attached.is_pre_rope
    reasons += kernels.no_codebooks(arch, cache.format, cache.head_dim, is_pre_rope)
    if is_pre_rope and not reasons:
        reasons += cache.attached.unrotated
        if cache.first_positions.any():
            reasons.append("codebooks of keys before their rotary embedding: got rows that begin at another position "
                           "than 0 (padding on the left), supported: rows that begin at 0; path='reference'")
    reasons += _no_q_len(q_len)
    if reasons:
        return None, reasons
    rows = num_heads // cache.num_heads_kv * q_len
    picked, reasons = kernels.pick(arch, cache.format, cache.head_dim, cache.dtype, rows, path, features,
                                   is_pre_rope)
    return picked, [] if picked else reasons


def for_shape(key: KernelKey, blocks: int, pages: int, sms: int, held: np.ndarray | None = None) -> KernelKey:
    """The kernel for so many blocks of query rows, of all sequences and KV heads, with up to ``pages`` pages each.

    Where CTAs would follow each other on an SM, smaller ones run several at a time, if the picked path has them and
    they fill the SMs. Lengths stay on the device, and a smaller CTA takes longer for a sequence that is longer than the
    others: so the more pages there may be, the more blocks there must be. Else, and where blocks leave SMs idle, all
    CTAs get an even share of all pages, which costs 1 to 2 us. So they do where a sequence is far longer than the
    others, if the host knows.

    held: pages of each sequence, if they are known.
    """
    wanted = []
    if blocks > sms:
        wanted = [kernels.SMALL] * (pages * sms <= PAGES_A_BLOCK * blocks) + [kernels.STREAM]
    else:
        splits = _most_splits(blocks, pages, sms)
        leaves_idle = pages >= IDLE_PAGES and IDLE_PART * (sms - splits * blocks) >= sms
        if leaves_idle or held is not None and _is_uneven(held, blocks, splits, sms):
            wanted = [kernels.STREAM]
    for path in filter(None, (kernels.path_of(key.arch, key.arithmetic, schedule) for schedule in wanted)):
        picked, _ = kernels.pick(key.arch, FORMATS[key.format], key.head_dim, getattr(torch, key.dtype), key.rows, path,
                                 key.features)
        if picked:
            found = replace(key, schedule=kernels.arch_package(key.arch).PATHS[path].schedule, rows=picked[1])
            if kernels.is_even(found) or _is_full(blocks, kernels.ctas_per_sm(found), sms):
                return found
    return key


def _is_full(blocks: int, ctas_per_sm: int, sms: int) -> bool:
    """Whether CTAs of equal length, one for each block, are as many on each SM, or fill the last of several rounds."""
    room = ctas_per_sm * sms
    rounds = blocks / (sms if blocks <= room else room)
    return rounds >= FULL * math.ceil(rounds)


def _is_uneven(held: np.ndarray, blocks: int, splits: int, sms: int) -> bool:
    """Whether the splits of the longest sequence end long after an even share of all pages would."""
    longest, even = held.max() / splits, held.sum() * (blocks / len(held)) / sms
    return longest >= UNEVEN * even and longest - even >= UNEVEN_PAGES


def decode(q, cache: KVCache, out, lse, options: Attention, num_splits, path, rows=None) -> None:
    """Run the chosen path into out and lse; raise NotImplementedError with the reasons if there is none.

    rows: int32 [batch] on the cache's device; None: the cache's first ones.
    """
    if is_reference(cache, path):
        q = cache.queries(q)
        with torch.no_grad():
            o, logsumexp = reference.decode(q, cache, options, rows)
            out.copy_(o)
            lse.copy_(logsumexp)
        return
    if cache.rotate_keys:
        q = cache.rotate(q)
    key = _served(q, cache, options, num_splits, path, rows is not None)
    plan = _plan_decode(q, cache, options, num_splits, key, path, rows is not None)
    plan.run(q, out, lse, options.sink_logits, rows)


def ready(q, cache: KVCache, options: Attention, num_splits, path, has_rows: bool, load: bool) -> None:
    """Pick the kernel of a decode call, or raise NotImplementedError with the reasons; load: make its plan too, which
    loads or builds the kernel."""
    if is_reference(cache, path):
        return
    if cache.rotate_keys:
        q = cache.rotate(q)
    key = _served(q, cache, options, num_splits, path, has_rows)
    if load:
        _plan_decode(q, cache, options, num_splits, key, path, has_rows)


def is_reference(cache: KVCache, path: str | None) -> bool:
    """Whether a call is the reference's, in torch."""
    return path == "reference" or (path is None and cache.device.type == "cpu")


def _served(q, cache: KVCache, options: Attention, num_splits, path, has_rows: bool) -> KernelKey:
    """The kernel that serves a call; NotImplementedError with the reasons if there is none."""
    if not _has_kernels(cache.device):
        raise NotImplementedError("; ".join(why_not(cache, q.shape[2], q.shape[1], path)))
    features = _features(cache, options)
    key, reasons = kernel_of(q, cache, path, features, num_splits, has_rows)
    if key is None:
        raise NotImplementedError("; ".join(reasons))
    return key


def _features(cache: KVCache, options: Attention) -> tuple[str, ...]:
    """What the kernel of a call must have; of a level its own kind of window."""
    features = tuple(name for name in kernels.FEATURES if getattr(options, name) is not None)
    if options.window is None or not _is_level(cache):
        return features
    return tuple(name for name in features if name != "window") + (kernels.LEVEL_WINDOW,)


def _is_level(cache: KVCache) -> bool:
    """Whether a cache is a level under a window (levels/view.py)."""
    return getattr(cache, "hidden", None) is not None


def kernel_of(q, cache: KVCache, path: str | None, features: tuple[str, ...] = (),
              num_splits: int | None = None, has_rows: bool = False) -> tuple[KernelKey | None, list[str]]:
    """(the kernel that serves a call on the cache's device, []), or (None, reasons). A call that names its splits gets
    CTAs that are made of splits. Which CTAs others get follows the lengths that the host knows now, but where the call
    says which rows it reads; a captured call keeps its kernel."""
    compiled_for = _specialisation(cache)
    picked, reasons = _pick(compiled_for[0], cache, q.shape[2], q.shape[1], path, features)
    if picked is None:
        return None, reasons
    key = kernels.decode_key(*compiled_for, cache.format.name, *picked, features=features,
                             sizes=os.environ.get("LOWBIT_ATTN_ARCH", "").partition("-")[2])
    if path is None and num_splits is None:
        key = for_shape(key, row_blocks(q, cache, key), cache.table.shape[1], running_ctas(cache.device, 1),
                        None if has_rows else cache.known_pages(q.shape[0]))
    return key, []


def _plan_decode(q, cache: KVCache, options: Attention, num_splits, key: KernelKey, path,
                 has_rows: bool) -> DecodePlan:
    """Plan a call, which loads or builds its kernel, and keep the plan for calls like it."""
    plan = _make_plan(q, cache, options, num_splits, key)
    if path is None and num_splits is None and q.shape[0] > 1:
        plan.edits = cache.edits
    if not is_capturing(q.device):  # memory of a captured step belongs to its graph
        asked = (options.softmax_scale, options.softcap, options.window, options.keep_sinks, num_splits, path,
                 has_rows)
        plans_of(cache).keep(_call(q, asked), plan, cache)
    return plan


def _make_plan(q, cache: KVCache, options: Attention, num_splits, key: KernelKey) -> DecodePlan:
    head_dim, places, ctas_per_sm = q.shape[-1], row_blocks(q, cache, key), kernels.ctas_per_sm(key)
    package = kernels.arch_package(key.arch)
    splits = num_splits or default_splits(cache, places, key)
    if num_splits and package.SPLITS_COOPERATE:
        splits = min(num_splits, max(1, running_ctas(cache.device, ctas_per_sm) // places))
    scale = head_dim**-0.5 if options.softmax_scale is None else options.softmax_scale
    scalars = (scale * LOG2_E, (options.softcap or 0.0) * LOG2_E, *windows_of(cache, options), *cache.strides)
    if kernels.is_even(key):
        room = running_ctas(cache.device, ctas_per_sm)
        scratch = package.even_scratch(tuple(q.shape), key.rows, min(room, num_splits * places) if num_splits else room)
    elif splits in kernels.clusters(key, places, running_ctas(cache.device, 1)):
        scratch = package.cluster_scratch(splits)
    else:
        scratch = package.scratch(tuple(q.shape), key.rows, places, splits)
    return DecodePlan(cache, q, loader.load(key), scratch, scalars, _part(cache, "k").view(torch.uint32))


def windows_of(cache: KVCache, options: Attention) -> tuple[int, int]:
    """``window`` and ``sink_window`` of a kernel's arguments; of a level the latter counts the sinks before its stage,
    negative where the window does not hide them."""
    window = NO_WINDOW if options.window is None else min(options.window, NO_WINDOW)
    if _is_level(cache):
        return window, -cache.sinks_before if options.keep_sinks else cache.sinks_before
    return window, NO_WINDOW if options.keep_sinks else window


def row_blocks(q: torch.Tensor, cache: KVCache, key: KernelKey) -> int:
    """Blocks of query rows of a call, of all sequences and KV heads."""
    batch, q_len, num_heads, _ = q.shape
    return batch * cache.num_heads_kv * -(-(num_heads // cache.num_heads_kv * q_len) // key.rows)


def planned(q: torch.Tensor, cache: KVCache, options: tuple) -> DecodePlan | None:
    """The plan of an earlier call that differs from this one in values of tensors only, if there is one.

    options: softmax_scale, softcap, window, keep_sinks, num_splits, path, whether the call says its rows.
    """
    plans = getattr(cache, "plans", None)
    plan = None if plans is None else plans.get(_call(q, options))
    return plan if plan is not None and plan.serves(cache) else None


def _call(q: torch.Tensor, options: tuple) -> tuple:
    return q.shape, q.dtype, options, forced_arch()


def default_splits(cache: KVCache, blocks: int, key: KernelKey) -> int:
    """CTAs that share a sequence's pages, for so many blocks of query rows, of all sequences and KV heads.

    The lengths stay on the device, so the table's capacity stands for them; a split without pages costs one
    partial result.
    """
    return filling_splits(key, blocks, cache.table.shape[1], running_ctas(cache.device, 1))


def running_ctas(device: torch.device, ctas_per_sm: int) -> int:
    """CTAs that run at once on a device."""
    return ctas_per_sm * torch.cuda.get_device_properties(device).multi_processor_count


def _most_splits(blocks: int, pages: int, room: int) -> int:
    """Splits of each block for a GPU with room for so many CTAs, one for about ``PAGES_A_SPLIT`` pages."""
    return max(1, min(-(-pages // PAGES_A_SPLIT), room // blocks))


def filling_splits(key: KernelKey, blocks: int, pages: int, sms: int) -> int:
    """Splits of each block of rows: as many as fill the GPU and have pages enough, or fewer that are a cluster."""
    splits = _most_splits(blocks, pages, kernels.ctas_per_sm(key) * sms)
    clusters = [n for n in kernels.clusters(key, blocks, sms) if n <= splits and pages <= PAGES_A_CLUSTERED_SPLIT * n]
    return max(clusters, default=splits)


def _specialisation(cache: KVCache) -> tuple[str, str, str, int]:
    """(arch, target, dtype, head_dim): what every kernel of a cache is compiled for."""
    return *target_of(cache.device), str(cache.dtype).removeprefix("torch."), cache.head_dim


def _part(cache: KVCache, side: str) -> torch.Tensor:
    """The pool from the first record's K or V part on, in units: how kernels of one side find it."""
    first = 0 if side == "k" else cache.record.v_offset // RECORD_ALIGN
    return cache.units[first:]


def _write_blocks(cache: KVCache, pages: torch.Tensor, blocks: torch.Tensor, side: str) -> None:
    """Quantize one side of full blocks [n, num_heads_kv, 128, head_dim] into pages int [n] of the pool."""
    key, part = _quantize_key(cache, side), _part(cache, side)
    weights = (cache.query_weights,) if side == "k" and cache.query_weights is not None else ()
    extra = weights + kernel_entries(cache, side)
    blocks, pages, quantize = blocks.contiguous(), pages.int(), loader.load(key)
    for at in range(0, len(pages), GRID_PAGES):
        some = slice(at, at + GRID_PAGES)
        quantize(blocks[some], pages[some], part.view(torch.uint32), part.view(torch.uint16), *extra,
                 cache.strides.page, cache.strides.head)


def _quantize_key(cache: KVCache, side: str) -> KernelKey:
    return kernels.quantize_key(*_specialisation(cache)[1:], cache.format, side, cache.range_search)


def _append(cache: KVCache, rows: torch.Tensor, ring_rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """A step of ``KVCache.append`` on the device: k, v [batch, tokens, heads, head_dim] to rows int32 [batch] of
    counters and table, whose sinks and rings are ring_rows int32 [batch]."""
    _step_plan(cache).run(rows, ring_rows, k, v)


def _step_plan(cache: KVCache) -> StepPlan:
    plans, name = plans_of(cache), (_STEP, forced_arch())
    plan = plans.get(name)
    if plan is None or not plan.serves(cache):
        key = kernels.append_key(*_specialisation(cache)[1:], cache.format, cache.range_search)
        plan = StepPlan(cache, loader.load(key), _part(cache, "k"))
        plans.keep(name, plan, cache)
    return plan


def _ready(cache: KVCache, calls: Collection[str]) -> None:
    """Load or build the kernels of these calls: "k" and "v", that pack a side, and "append"."""
    for call in calls:
        _step_plan(cache) if call == "append" else loader.load(_quantize_key(cache, call))


def _read_pages(cache: KVCache, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantize pages int [n]: K, V fp32 [n, num_heads_kv, 128, head_dim]."""
    shape = (pages.shape[0], cache.num_heads_kv, PAGE_TOKENS, cache.head_dim)
    sides = []
    for name, side in (("k", cache.format.k), ("v", cache.format.v)):
        out = torch.empty(shape, dtype=torch.float32, device=cache.device)
        for at in range(0, len(pages), GRID_PAGES):
            some = slice(at, at + GRID_PAGES)
            key = kernels.dequantize_key(target_of(cache.device)[1], cache.head_dim, cache.format, name)
            part = _part(cache, name)
            loader.load(key)(pages[some].int(), part.view(torch.uint32), part.view(side.storage), out[some],
                             *kernel_entries(cache, name), cache.strides.page, cache.strides.head)
        sides.append(out)
    return sides[0], sides[1]


def _prepare_cuda(cache: KVCache) -> None:
    """Raise NotImplementedError, with the reasons, for a cache that no kernel can fill or read; prepare others."""
    arch, _ = target_of(cache.device)
    if reasons := list(cache.unnamed) or kernels.quantize_missing(cache.format, cache.head_dim, cache.dtype):
        raise NotImplementedError(f"{arch}: {'; '.join(reasons)}")
    prepare(torch.empty(0, device=cache.device).device, kernels.arch_package(arch).EMPTY)  # the device with its index


BACKENDS["cuda"] = Backend(_prepare_cuda, _write_blocks, _read_pages, _append, _ready, launches=True)
