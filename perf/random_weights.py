"""Codebook weights of random codes for benchmarks: what they multiply means nothing, its size is a real layer's."""

import torch

from lowbit_attn.linear import VQWeight, format_named
from lowbit_attn.linear.e8p import RESIDUAL_SCALE


def random_weight(format: str, n: int, k: int, device: str) -> VQWeight:
    """W [n, k] of random codes; its numbers have a standard deviation of about k^-0.5, so that y is of x's size."""
    planes, std = {}, k**-0.5
    for name, (shape, dtype) in format_named(format).shapes(n, k).items():
        if not dtype.is_floating_point:
            limit = torch.iinfo(dtype)
            planes[name] = torch.randint(limit.min, limit.max + 1, shape, dtype=dtype, device=device)
        elif name in ("in_scale", "out_scale"):
            planes[name] = torch.randint(0, 2, shape, device=device).to(dtype) * 2 - 1
        elif name == "scales" and format.startswith("e8p"):
            planes[name] = std * torch.tensor([1, 1 / RESIDUAL_SCALE], dtype=dtype, device=device)[: shape[0]]
        elif name == "scales":
            planes[name] = torch.ones(shape, dtype=dtype, device=device)
        else:
            planes[name] = (torch.randn(shape, device=device) * std).to(dtype)
    return VQWeight(format, n, k, planes)
