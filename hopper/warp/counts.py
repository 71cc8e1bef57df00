"""Instructions that every kernel of warps has, whatever its arithmetic: for predictions of static SASS counts."""

from lowbit_attn.hopper.warp.config import WarpConfig

MERGE_EXPONENTIALS = 7  # of splits: three for a lane; of a row and its sink, with several splits and with one
CLUSTER_EXPONENTIALS = 16  # of splits that are a cluster: of two, of any other number, and of the row and its sink
DIVISIONS = 16  # by sums, and by run-time integers, which take a reciprocal too: before the pages and again after them


def merge_exponentials(cfg: WarpConfig) -> int:
    """Static exponentials of the merge with other splits."""
    return MERGE_EXPONENTIALS + CLUSTER_EXPONENTIALS * cfg.has_clusters
