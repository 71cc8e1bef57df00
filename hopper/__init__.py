"""Kernels for SM90 in CuTe-DSL. Imports go from each folder to those before it:

    common     rows, numbers, scratch, the merge of splits
    tile       the tile path: warpgroups in roles, WGMMA          warp      a warp with pages of its own; no arithmetic
    arith      how a warp multiplies: fp16 on raw codes, int8 digits
    schedule   how warps get their work: splits, an even share
    decode.py, config.py   the kernel of a key
"""

from lowbit_attn.hopper.common.scratch import (
    CLUSTERS,
    EMPTY,
    cluster_scratch,
    even_scratch,
    fits_clusters,
    scratch,
)
from lowbit_attn.hopper.common.support import PATHS

SPLITS_MEET = True  # all splits of a call must run at once

__all__ = ["CLUSTERS", "EMPTY", "PATHS", "SPLITS_MEET", "cluster_scratch", "even_scratch", "fits_clusters", "scratch"]
