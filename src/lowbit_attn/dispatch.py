"""Which implementation serves a call: the only place that asks what device and architecture there is."""

import os
from dataclasses import replace
from functools import cache

import torch

from lowbit_attn import kernels, loader, reference
from lowbit_attn.cache import BACKENDS, Backend, KVCache
from lowbit_attn.kernels import KernelKey
from lowbit_attn.layout import PAGE_TOKENS

LOG2_E = 1.4426950408889634
UNIT_BYTES = 128  # kernels address the pool in units of this
CAPABILITY_TARGETS = {(9, 0): ("hopper", "sm_90a"), (8, 0): ("ampere", "sm_80"), (8, 9): ("ampere", "sm_89")}
FORCED_TARGETS = {("ampere", (9, 0)): "sm_90"}  # Ampere kernels also run on Hopper, built for it
CTAS_PER_SM = 1


def target_of(device: torch.device) -> tuple[str, str]:
    """(arch, target) that serves a CUDA device; LOWBIT_ATTN_ARCH=ampere takes the Ampere kernels on Hopper too."""
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
        raise NotImplementedError(f"LOWBIT_ATTN_ARCH: got {forced!r} on compute capability {capability}, "
                                  f"supported: {arch}" + (" or ampere" if capability == (9, 0) else ""))
    return forced, FORCED_TARGETS[forced, capability]


def why_not(cache: KVCache, num_heads: int, q_len: int = 1, path: str | None = None) -> list[str]:
    """Reasons why no kernel serves decode over this cache on its device; empty if one does.

    path: None asks for any path, else for that one. The reference (path="reference") serves everything, slowly.
    """
    if cache.device.type != "cuda":
        return [f"device: {cache.device} has no kernels, supported: a CUDA device, or path='reference'"]
    try:
        arch, _ = target_of(cache.device)
    except NotImplementedError as error:
        return [str(error)]
    return why_not_on(arch, cache, num_heads, q_len, path)


def why_not_on(arch: str, cache: KVCache, num_heads: int, q_len: int = 1, path: str | None = None) -> list[str]:
    """The same for a named architecture, whatever device there is."""
    paths = kernels.arch_package(arch).PATHS
    if path is not None and path not in paths:
        return [f"path: {path!r} is not known on {arch}, supported: {', '.join(paths)}, reference"]
    reasons = kernels.unnamed(cache.format)
    for name in [] if reasons else paths if path is None else [path]:
        missing = paths[name].missing(cache.format, cache.head_dim, cache.dtype, num_heads // cache.num_heads_kv, q_len)
        if not missing:
            return []
        reasons += [f"{arch} {name} path: {reason}" for reason in missing]
    return reasons


def decode(q, cache: KVCache, out, lse, softmax_scale, num_splits, path) -> None:
    """Run the chosen path into out and lse; raise NotImplementedError with the reasons if there is none."""
    if path == "reference" or (path is None and cache.device.type == "cpu"):
        o, logsumexp = reference.decode(q, cache, softmax_scale)
        out.copy_(o)
        lse.copy_(logsumexp)
        return
    if reasons := why_not(cache, q.shape[2], q.shape[1], path):
        raise NotImplementedError("; ".join(reasons))
    arch, target = target_of(cache.device)
    pick = path or next(p for p in kernels.arch_package(arch).PATHS if not why_not(cache, q.shape[2], q.shape[1], p))
    ratio = q.shape[2] // cache.num_heads_kv
    rows = next(n for n in kernels.ROWS if ratio <= n)
    key = _key("decode", cache, pick, rows)
    if ablated := os.environ.get("LOWBIT_ATTN_WITHOUT"):
        key = replace(key, without=tuple(ablated.split(",")))
    _run_decode(q, cache, out, lse, softmax_scale, num_splits, key)


def _run_decode(q, cache: KVCache, out, lse, softmax_scale, num_splits, key: KernelKey) -> None:
    batch, _, num_heads, head_dim = q.shape
    splits = num_splits or default_splits(cache, batch)
    o_partial = q.new_empty((splits, batch, num_heads, head_dim), dtype=torch.float32)
    lse_partial = q.new_empty((splits, batch, num_heads), dtype=torch.float32)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    state = (x[:batch] for x in (cache.n_sink, cache.n_qk, cache.n_qv, cache.n_tok, cache.sink_k, cache.sink_v,
                                 cache.ring_k, cache.ring_v))
    loader.load(key)(
        q.to(cache.dtype).reshape(batch, num_heads, head_dim), _units(cache), cache.table.view(-1), *state, o_partial,
        lse_partial, scale * LOG2_E, *_strides(cache), cache.table.shape[1], 0,
    )
    target = out if out.is_contiguous() and out.dtype == cache.dtype else torch.empty_like(
        q, dtype=cache.dtype, memory_format=torch.contiguous_format)
    flat_lse = lse if lse.is_contiguous() else torch.empty_like(lse, memory_format=torch.contiguous_format)
    loader.load(_key("combine", cache))(
        o_partial.flatten(1, 2), lse_partial.flatten(1), target.view(-1, head_dim), flat_lse.view(-1))
    if target is not out:
        out.copy_(target)
    if flat_lse is not lse:
        lse.copy_(flat_lse)


def default_splits(cache: KVCache, batch: int) -> int:
    """CTAs that share a sequence's pages: enough to fill the GPU, never more than the table's pages.

    The lengths stay on the device, so the table's capacity stands for them; a split without pages costs one
    partial result.
    """
    sms = torch.cuda.get_device_properties(cache.device).multi_processor_count
    ctas = batch * cache.num_heads_kv
    return max(1, min(cache.table.shape[1], CTAS_PER_SM * sms // ctas))


def _key(op: str, cache: KVCache, variant: str = "", rows: int = 0) -> KernelKey:
    arch, target = target_of(cache.device)
    dtype = str(cache.dtype).removeprefix("torch.")
    name = "" if op == "combine" else cache.format.name
    return KernelKey(op, arch, target, dtype, cache.head_dim, name, variant, rows)


def _units(cache: KVCache) -> torch.Tensor:
    return cache.pool.view(-1, UNIT_BYTES).view(torch.uint32)


def _strides(cache: KVCache) -> tuple[int, int]:
    head = cache.record.nbytes // UNIT_BYTES
    return cache.num_heads_kv * head, head


def _write_blocks(cache: KVCache, pages: torch.Tensor, blocks: torch.Tensor, side: str) -> None:
    """Quantize one side of full blocks [n, num_heads_kv, 128, head_dim] into pages int [n] of the pool."""
    key = _key("quantize", cache, kernels.quantize_variant(cache.format, side, cache.range_search))
    meta = cache.pool.view(-1, UNIT_BYTES).view(torch.uint16)
    loader.load(key)(blocks.contiguous(), pages.int(), _units(cache), meta, *_strides(cache))


def _read_pages(cache: KVCache, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantize pages int [n]: K, V fp32 [n, num_heads_kv, 128, head_dim]."""
    shape = (pages.shape[0], cache.num_heads_kv, PAGE_TOKENS, cache.head_dim)
    sides = []
    for name, side in (("k", cache.format.k), ("v", cache.format.v)):
        out = torch.empty(shape, dtype=torch.float32, device=cache.device)
        if pages.numel():
            meta = cache.pool.view(-1, UNIT_BYTES).view(side.storage)
            loader.load(_key("dequantize", cache, name))(pages.int(), _units(cache), meta, out, *_strides(cache))
        sides.append(out)
    return sides[0], sides[1]


def _check_cuda(cache: KVCache) -> None:
    """Raise NotImplementedError, with the reasons, for a cache that no kernel can fill or read."""
    arch, _ = target_of(cache.device)
    if reasons := kernels.unnamed(cache.format) or kernels.quantize_missing(cache.format, cache.head_dim, cache.dtype):
        raise NotImplementedError(f"{arch}: {'; '.join(reasons)}")


BACKENDS["cuda"] = Backend(_check_cuda, _write_blocks, _read_pages)
