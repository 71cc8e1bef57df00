"""Which sums over GPUs are served, and what is said of others; the sums themselves: tests/sim, tests/gpu."""

import pytest
import torch
import torch.distributed as dist

from lowbit_attn.all_reduce import AllReduce
from lowbit_attn.kernels.all_reduce import ADD_NORM, all_reduce_key, missing, parsed, words_a_thread


@pytest.mark.parametrize("width, each", [(64, 1), (2048, 1), (2880, 3), (4096, 2), (5120, 4), (8192, 4), (12288, 6),
                                         (12352, None), (16384, None), (4095, None), (32, None), (0, None)])
def test_whole_warps_share_a_row(width, each):
    assert words_a_thread(width) == each
    assert bool(missing(width, "float16")) == (each is None)
    if each:
        threads = width // 2 // each
        assert threads * each * 2 == width and threads % 32 == 0 and threads <= 1024


def test_keys_name_variant_and_width():
    key = all_reduce_key("sm_90a", "bfloat16", 4096, ADD_NORM)
    assert parsed(key) == (ADD_NORM, 4096)
    assert len({all_reduce_key("sm_90a", dtype, width, variant).name for dtype in ("float16", "bfloat16")
                for width in (64, 4096) for variant in ("sum", ADD_NORM)}) == 8


def test_refusals_name_what_is_supported(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    try:
        with pytest.raises(NotImplementedError) as error:
            AllReduce(8, 4095, torch.float32, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    for reason in ("float32: supported: float16, bfloat16", "rows of 4095 numbers: supported: multiples of 64",
                   "cpu: supported: Hopper GPUs", "1 ranks: supported: 2 or more"):
        assert reason in str(error.value)
