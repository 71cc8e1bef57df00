"""Which kernels exist: names, what they serve, programs and checks, and the shipped set. Imports go down the list:

    shipped    what ``make`` builds
    registry   programs, checks, and which kernel takes a call; the only file that imports architectures
    support    what decode paths and the kernels of pages serve
    key        names and limits

Architectures and programs import ``key`` and ``support``; what stands above them finds all names here.
"""

from lowbit_attn.kernels.key import (
    FEATURES,
    LEVEL_WINDOW,
    PAIR_ROWS,
    ROWS,
    SCHEDULES,
    SMALL,
    SMEM_LIMIT_BYTES,
    SPLITS,
    STREAM,
    Checks,
    CuteKernel,
    KernelKey,
    Scratch,
    append_key,
    dequantize_key,
    device_target,
    exchange_key,
    is_even,
    level_append_key,
    level_window_keys,
    manage_keys,
    merge_key,
    merge_rows_key,
    merge_states_key,
    packing_keys,
    paged_append_key,
    paged_copy_key,
    paged_fill_key,
    paged_plan_key,
    pair_key,
    quantize_key,
    rank_keys,
    step_keys,
)
from lowbit_attn.kernels.registry import (
    ARCH_TARGETS,
    arch_package,
    checks,
    clusters,
    ctas_per_sm,
    decode_key,
    needs_nvcc,
    no_codebooks,
    no_pair,
    other_ctas,
    path_name,
    path_of,
    pick,
    same_text,
    trace,
)
from lowbit_attn.kernels.shipped import (
    SHIPPED_DTYPES,
    SHIPPED_FORMATS,
    SHIPPED_HEAD_DIMS,
    SHIPPED_TARGETS,
    baselines,
    shipped_keys,
)
from lowbit_attn.kernels.support import (
    PLAN_HEAD_DIMS,
    QUANTIZE_HEAD_DIMS,
    Support,
    manage_missing,
    paged_missing,
    quantize_missing,
)

__all__ = [
    "ARCH_TARGETS", "Checks", "CuteKernel", "FEATURES", "KernelKey", "LEVEL_WINDOW", "PAIR_ROWS", "PLAN_HEAD_DIMS",
    "QUANTIZE_HEAD_DIMS", "ROWS", "SCHEDULES", "SHIPPED_DTYPES", "SHIPPED_FORMATS", "SHIPPED_HEAD_DIMS",
    "SHIPPED_TARGETS", "SMALL", "SMEM_LIMIT_BYTES", "SPLITS", "STREAM", "Scratch", "Support", "append_key",
    "arch_package", "baselines", "checks", "clusters", "ctas_per_sm", "decode_key", "dequantize_key", "device_target",
    "exchange_key", "is_even", "level_append_key", "level_window_keys", "manage_keys", "manage_missing", "merge_key",
    "merge_rows_key", "merge_states_key", "needs_nvcc", "no_codebooks", "no_pair", "other_ctas", "packing_keys",
    "paged_append_key", "paged_copy_key", "paged_fill_key", "paged_missing", "paged_plan_key", "pair_key",
    "path_name", "path_of", "pick", "quantize_key", "quantize_missing", "rank_keys", "same_text", "shipped_keys",
    "step_keys", "trace",
]
