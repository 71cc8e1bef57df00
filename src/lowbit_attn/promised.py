"""The kernels that the support tables promise: ``make all-kernels`` builds all of them, CI a rotating part.

Formats are presets and representatives of the grammars: every pair of bits, and every option of a name at the bits
where its kernels differ most. Each comes with all head_dims, dtypes, operations, and for decode all that a call may
get: query rows, paths, features.
"""

import random
from collections.abc import Iterator
from itertools import chain, combinations, product

import torch

from lowbit_attn import emit, kernels
from lowbit_attn.formats import FORMATS, Format
from lowbit_attn.formats.levels import PRESETS, parse
from lowbit_attn.kernels import KernelKey
from lowbit_attn.kernels.linear import linear_keys

BITS, GROUPS = (8, 4, 2, 1), (32, 64, 128)
OPTIONS = (  # of names, each with the bits of both sides that it stands for
    *(f"k{bits}v{bits}-{group}{size}" for bits in (4, 2, 1) for group in ("g", "vg") for size in GROUPS),
    *(f"k{bits}tv{bits}-g{size}" for bits in (4, 2) for size in GROUPS),
    "k2v2-g32-vg32", "k4v4-bf16", "k4tv4-bf16", "k2v2-g64-bf16", "k1v1-bf16",
    "kitty-b0", "kitty-b8", "kitty-b24", "kitty-b64", "kitty-variance", "kitty-weighted", "kitty-random",
    "kitty-pro-weighted", "kitty-vg32", "kitty-bf16",
    "k4vcq2", "kcq4v4", "k8tvcq4", "kcq2v2-vg32-bf16",
)
LEVELS = (*PRESETS, "k4v4+k2v2", "k4v2+k4v1")  # pairs of which caches are managed by kernels
HEAD_DIMS = kernels.QUANTIZE_HEAD_DIMS
FEATURES = [names for count in range(len(kernels.FEATURES) + 1) for names in combinations(kernels.FEATURES, count)]
SHUFFLE = 0  # seed of the order within a class: fixed, so that consecutive parts of a rotation do not overlap


def formats() -> list[str]:
    """Names of the presets and of the representatives."""
    pairs = (f"k{k}{per_token}v{v}" for per_token in ("", "t") for k in BITS for v in BITS)
    return list(dict.fromkeys(chain(FORMATS, pairs, OPTIONS)))


def promised(arch: str) -> list[KernelKey]:
    """Every kernel of an architecture's targets that calls with these formats or codebook weights may ask for."""
    common = product(kernels.SHIPPED_TARGETS[arch], kernels.SHIPPED_DTYPES, HEAD_DIMS, map(FORMATS.get, formats()))
    keys = [key for target, dtype, head_dim, fmt in common if _has_record(fmt, head_dim)
            for keys in (_packing, _decoding) for key in keys(arch, target, dtype, head_dim, fmt)]
    keys += [key for common in product(kernels.SHIPPED_TARGETS[arch], kernels.SHIPPED_DTYPES, HEAD_DIMS)
             for key in (kernels.merge_key(*common), *kernels.rank_keys(arch, *common))]
    keys += [key for *common, name, search in product(
        kernels.SHIPPED_TARGETS[arch], kernels.SHIPPED_DTYPES, kernels.PLAN_HEAD_DIMS, LEVELS, (None, True, False))
        if all(_has_record(fmt, common[-1]) for fmt in parse(name).formats)
        for key in (kernels.level_append_key(*common), *kernels.manage_keys(*common, parse(name), search))]
    keys += [kernels.pair_key(target, dtype, head_dim, levels, features) for target, dtype, head_dim, levels, features
             in product(kernels.SHIPPED_TARGETS[arch], kernels.SHIPPED_DTYPES, HEAD_DIMS, map(parse, LEVELS), FEATURES)
             if not kernels.no_pair(arch, levels, head_dim, getattr(torch, dtype), features)]
    keys += _level_windows(arch)
    keys += chain.from_iterable(map(linear_keys, kernels.SHIPPED_TARGETS[arch]))
    return list(dict.fromkeys(keys))


def rotation(keys: list[KernelKey], count: int, seed: int) -> list[KernelKey]:
    """About ``count`` of the kernels, of all classes in proportion; consecutive seeds give others, until all were.

    Kernels of one source come together, since they share most of the time that building takes.
    """
    sources: dict[KernelKey, list[KernelKey]] = {}
    for key in keys:
        sources.setdefault(emit.source_of(key), []).append(key)
    classes: dict[tuple, list[KernelKey]] = {}
    for key in sources:
        what = key.arithmetic + key.schedule or key.variant.partition("-")[0]
        classes.setdefault((key.op, key.target, what, key.head_dim), []).append(key)
    for members in classes.values():
        random.Random(SHUFFLE).shuffle(members)
    parts = max(1, round(len(keys) / count))
    picked = list(chain.from_iterable(classes.values()))[seed % parts :: parts]
    return list(chain.from_iterable(sources[key] for key in picked))


def _has_record(fmt: Format, head_dim: int) -> bool:
    try:
        fmt.record(head_dim)
    except ValueError:
        return False
    return True


def _packing(arch: str, target: str, dtype: str, head_dim: int, fmt: Format) -> Iterator[KernelKey]:
    """What fills and reads pages, with the format's own range search, with it on both sides and without."""
    if kernels.quantize_missing(fmt, head_dim, getattr(torch, dtype)):
        return
    for search in (None, True, False):
        yield from (kernels.quantize_key(target, dtype, head_dim, fmt, side, search) for side in "kv")
        yield kernels.append_key(target, dtype, head_dim, fmt, search)
    if not kernels.paged_missing(fmt, head_dim):
        yield kernels.paged_plan_key(target)
        yield kernels.paged_append_key(target, dtype, head_dim, fmt)  # a store of pages has no range search of its own
        yield kernels.paged_copy_key(target, dtype, head_dim)
        yield kernels.paged_fill_key(target, dtype, head_dim, fmt)
        yield kernels.merge_rows_key(target, dtype, head_dim)
    yield from (kernels.dequantize_key(target, head_dim, fmt, side) for side in "kv")


def _level_windows(arch: str) -> Iterator[KernelKey]:
    """What windows over levels ask for: the two kernels of positions, and decode of each level's format."""
    for target in kernels.SHIPPED_TARGETS[arch]:
        yield from kernels.level_window_keys(target)
        wanted = product(kernels.SHIPPED_DTYPES, HEAD_DIMS, dict.fromkeys(f for n in LEVELS for f in parse(n).formats),
                         (None, *kernels.arch_package(arch).PATHS), kernels.ROWS, ((), ("softcap",)))
        for dtype, head_dim, fmt, path, rows, others in wanted:
            features = (*others, kernels.LEVEL_WINDOW)
            picked, _ = kernels.pick(arch, fmt, head_dim, getattr(torch, dtype), rows, path, features)
            if picked:
                yield kernels.decode_key(arch, target, dtype, head_dim, fmt.name, *picked, features=features)


def _decoding(arch: str, target: str, dtype: str, head_dim: int, fmt: Format) -> Iterator[KernelKey]:
    """Decode kernels: those that dispatch picks for any number of query rows, and those of a named path.

    Formats that are no presets come without features and with all of them, which take the most registers.
    """
    wanted = FEATURES if fmt.name in tuple(FORMATS) else (FEATURES[0], FEATURES[-1])
    is_pre_rope = (False, True) if fmt.needs_codebooks else (False,)
    for path, rows, features, is_pre in product((None, *kernels.arch_package(arch).PATHS), kernels.ROWS, wanted,
                                                is_pre_rope):
        picked, _ = kernels.pick(arch, fmt, head_dim, getattr(torch, dtype), rows, path, features, is_pre)
        if picked:
            yield kernels.decode_key(arch, target, dtype, head_dim, fmt.name, *picked, features=features)
