"""The compiled quantize kernels without a GPU: their PTX, run on the CPU, packs the reference's bytes.

With range search groups are those whose factor hinges on the last bit of a quotient: a rule that the reference and the
kernel round differently shows here, and in random data in a few of a hundred thousand groups.
"""

import numpy as np
import pytest
import torch

from lowbit_attn import kernels, layout
from lowbit_attn.formats import FORMATS
from lowbit_attn.formats.kitty import Boosted
from lowbit_attn.formats.uniform import PerChannel
from sim.ptx import build
from sim.ptx.pack import GUARD, packed, unpacked
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


def hard_block(head_dim: int) -> torch.Tensor:
    """Tokens fp16 [128, head_dim]: columns of many sizes, of one value, of values at the midpoint, and equal ones."""
    x = torch.randn(layout.PAGE_TOKENS, head_dim) * torch.logspace(-6, 3, head_dim)
    x[:, 5], x[:, 6] = 0, -0.25
    x[:, 9] = torch.arange(layout.PAGE_TOKENS) % 3 - 1.0
    x[:, head_dim // 4 : head_dim // 2 : 2] = x[:, 3 * head_dim // 4 :: 2]  # large equal scores in two column tiles
    return x.half()


@pytest.mark.parametrize("name, side_name", [
    ("k4v4-g32", "k"), ("k1v1", "k"), ("kitty", "k"), ("k8tv8", "k"), ("k4v4-vg32-bf16", "v"), ("k4v2-boost", "v")])
def test_every_kind_of_matrix_packs_and_reads_as_the_reference(name, side_name):
    """Without range search; both bits of two means, and boosted channels of which some have equal scores."""
    from lowbit_attn.device.quantize import matrix_of

    head_dim, fmt = 64, FORMATS[name]
    side = getattr(fmt, side_name)
    spec = side.spec(head_dim)
    x = hard_block(head_dim)
    planes = side.quantize(x[None].float(), False)
    want = torch.cat([planes[plane].flatten().view(torch.uint8) for plane in side.plane_sizes(head_dim)])
    written = spec.wide.positions if spec.wide else len(want)  # positions are not the kernel's to write
    matrix = matrix_of(spec, "float16")
    code = build.program(kernels.quantize_key("sm_90", "float16", head_dim, fmt, side_name, False))
    found = packed(code, matrix.threads, matrix.parts, x[None, None], spec.nbytes)
    assert torch.equal(found[:written], want[:written]) and (found[written:] == GUARD).all()
    matrix = matrix_of(spec)
    code = build.program(kernels.dequantize_key("sm_90", head_dim, fmt, side_name))
    got = unpacked(code, matrix.threads, matrix.parts, want, head_dim)
    assert torch.equal(got, side.dequantize(planes, head_dim)[0])
