"""Kernels for SM90 in CuTe-DSL. Imports go from each folder to those before it:

    common     rows, scratch, the merge of splits
    tile       the tile path: warpgroups in roles, WGMMA          warp      a warp with pages of its own; no arithmetic
    arith      how a warp multiplies: fp16 on raw codes, int8 digits
    schedule   how warps get their work: splits, an even share
    decode.py, config.py   the kernel of a key
"""

from lowbit_attn.hopper.common.support import PATHS
from lowbit_attn.hopper.common.tuning import CLUSTERS, EMPTY
from lowbit_attn.hopper.scratch import cluster_scratch, even_scratch, fits_clusters, scratch

SPLITS_COOPERATE = True  # all splits of a call must run at once

__all__ = ["CLUSTERS", "EMPTY", "PATHS", "SPLITS_COOPERATE", "cluster_scratch", "even_scratch", "fits_clusters",
           "scratch"]
