"""Kernels for SM90 in CuTe-DSL, and what each decode path serves."""

import torch

from lowbit_attn.kernels import Support

PATHS = {
    "register": Support(k_bits=(8, 4, 2, 1), v_bits=(8, 4, 2, 1), k_groups=(32, 64, 128), head_dims=(64, 128),
                        dtypes=(torch.float16, torch.bfloat16), storages=(torch.float16, torch.bfloat16), max_ratio=16,
                        max_q_len=1, channel_groups=(32, 64, 128), k_per_token=True, windows=True),
    "tile": Support(k_bits=(4,), v_bits=(4,), k_groups=(128,), head_dims=(64, 128), dtypes=(torch.float16,),
                    storages=(torch.float16,), max_ratio=8, max_q_len=1),
}
