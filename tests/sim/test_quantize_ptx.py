"""The compiled quantize kernels without a GPU: their PTX, run on the CPU, packs the reference's bytes.

The groups are those whose factor of range search hinges on the last bit of a quotient: a rule that the reference and
the kernel round differently shows here, and in random data in a few of a hundred thousand groups.
"""

import numpy as np
import pytest
import torch

from lowbit_attn import kernels, layout
from lowbit_attn.formats import FORMATS
from lowbit_attn.formats.kitty import Boosted
from lowbit_attn.formats.uniform import PerChannel
from sim.ptx import build
from sim.ptx.pack import packed
from sim.search_rule import hinging_groups

HEAD_DIM = 128
CASES = [("k2v2", "float16"), ("k2v2", "bfloat16"), ("k2v2-bf16", "float16"), ("k2v2-g64", "float16"),
         ("k1v1", "float16"), ("k1v1", "bfloat16"), ("k4v4", "float16"), ("k2tv2", "float16"),
         ("kitty-random", "float16"), ("kitty-random", "bfloat16")]


def hinging_block(side, dtype: torch.dtype) -> torch.Tensor:
    """Tokens [1, 1, 128, head_dim] whose every group hinges; few different ones in bf16, where they are rare."""
    def rows(count, size, bits):
        distinct = count if dtype == torch.float16 else 16
        groups = hinging_groups(distinct, size, bits, dtype, seed=bits)
        return torch.from_numpy(np.resize(groups, (count, size)))

    if not isinstance(side, PerChannel | Boosted):
        size = side.group_size or HEAD_DIM
        x = rows(layout.PAGE_TOKENS * HEAD_DIM // size, size, side.bits).reshape(layout.PAGE_TOKENS, HEAD_DIM)
    else:
        size = getattr(side, "group_size", None) or layout.PAGE_TOKENS
        x = rows(layout.PAGE_TOKENS * HEAD_DIM // size, size, side.bits).reshape(HEAD_DIM, layout.PAGE_TOKENS)
        if isinstance(side, Boosted):
            boosted = side.boosted_channels(torch.zeros(1, layout.PAGE_TOKENS, HEAD_DIM))[0]
            x[boosted] = rows(len(boosted), size, side.boosted_bits)
        x = x.T
    return x.to(dtype)[None, None]


@pytest.mark.parametrize("name, dtype", CASES)
def test_search_packs_the_bytes_of_the_reference(name, dtype):
    side = FORMATS[name].k
    code = build.program(kernels.quantize_key("sm_90", dtype, HEAD_DIM, FORMATS[name], "k", True))
    from lowbit_attn.device.quantize import matrix_of

    matrix, sizes = matrix_of(side.spec(HEAD_DIM), dtype), side.plane_sizes(HEAD_DIM)
    x = hinging_block(side, getattr(torch, dtype))
    planes = side.quantize(x[0].float(), True)
    want = torch.cat([planes[plane].flatten().view(torch.uint8) for plane in sizes])
    assert torch.equal(packed(code, matrix.threads, matrix.parts, x, sum(sizes.values())), want)
