"""Kernels for SM80 and SM89 in TileLang, and what each decode path serves."""

import torch

from lowbit_attn.kernels.key import Scratch
from lowbit_attn.kernels.support import CodebookSupport, Support

EMPTY = None  # what words of scratch are between calls: anything
SPLITS_COOPERATE = False  # splits of a call may run one after the other
PATHS = {
    "register": Support(arithmetic="fp16",
                        k_bits=(8, 4, 2, 1), v_bits=(8, 4, 2, 1), k_groups=(32, 64, 128), head_dims=(64, 96, 128, 256),
                        dtypes=(torch.float16, torch.bfloat16), storages=(torch.float16, torch.bfloat16),
                        rows=(8, 16, 64), wide_rows=(8, 64), channel_groups=(32, 64, 128), k_per_token=True,
                        windows=True, level_windows=True, boosted=True, boosted_values=True, wide_bits=(4, 2)),
    "tile": Support(arithmetic="tile",
                    k_bits=(4,), v_bits=(4,), k_groups=(128,), head_dims=(64, 128), dtypes=(torch.float16,),
                    storages=(torch.float16,), rows=(8,), wide_rows=(8,)),
    "codebook": CodebookSupport(arithmetic="codebook", k_bits=(4, 2), v_bits=(4, 2), k_groups=(), head_dims=(64, 128),
                                dtypes=(torch.float16, torch.bfloat16), storages=(), rows=(2, 4, 8),
                                wide_rows=(2, 4, 8), codebooks=True),
}


def scratch(q_shape: tuple[int, ...], rows: int, places: int, splits: int) -> Scratch:
    """Scratch of a call with q [batch, q_len, num_heads, head_dim] and ``places`` blocks of ``rows`` query rows."""
    return Scratch(((splits, *q_shape), (splits, *q_shape[:-1])), counters=places if splits > 1 else 1)
