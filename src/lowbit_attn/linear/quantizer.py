"""``quantize``: a matrix, and the second moments of its inputs, to codebook weights."""

import torch
from torch.nn.functional import pad

from lowbit_attn.linear import aqlm, e8p, gptvq, hadamard
from lowbit_attn.linear.formats import AQLM, E8P, GPTVQ, format_named
from lowbit_attn.linear.layouts import ceil_to
from lowbit_attn.linear.ldlq import block_ldl, damped, ldlq
from lowbit_attn.linear.weight import VQWeight

BLOCK = 128  # columns whose feedback from later ones is one product


def quantize(w: torch.Tensor, format: str, hessian: torch.Tensor | None = None, seed: int = 0) -> VQWeight:
    """W [n, k], fp16, bf16 or fp32, in a format of ``NAMES``, on W's device.

    hessian: E[x x^T] of the layer's inputs x, [k, k], any scale; None: all inputs count alike. seed: of the random
    signs and of k-means' start; equal calls give equal weights. aqlm_1x16 is read, not made. Raises ValueError for
    shapes, NaN or infinities that do not fit, NotImplementedError for aqlm_1x16.
    """
    spec = format_named(format)
    if w.dim() != 2 or not w.is_floating_point() or min(w.shape) < 1:
        raise ValueError(f"w: got {w.dtype} {list(w.shape)}, supported: floating point [n, k], n and k of 1 or more")
    if hessian is None:
        hessian = torch.eye(w.shape[1], device=w.device)
    if tuple(hessian.shape) != (w.shape[1], w.shape[1]):
        raise ValueError(f"hessian: got shape {list(hessian.shape)}, supported: [{w.shape[1]}, {w.shape[1]}]")
    for name, values in (("w", w), ("hessian", hessian)):
        if not values.isfinite().all():
            raise ValueError(f"{name}: got a NaN or an infinity, supported: finite values")
    w, hessian = w.detach().float(), hessian.detach().float().to(w.device)
    generator = torch.Generator().manual_seed(seed)
    if isinstance(spec, E8P):
        planes = _quantize_e8p(w, hessian, spec, generator)
    elif isinstance(spec, GPTVQ):
        planes = gptvq.quantize(w, hessian, spec, generator)
    elif isinstance(spec, AQLM) and spec.book_size <= 4096:
        planes = aqlm.quantize(w, hessian, spec, generator)
    else:
        raise NotImplementedError(f"format: got {format!r}, supported: e8p4, e8p2, gptvq2, aqlm_2x8, aqlm_2x12; "
                                  f"{format} is read from published checkpoints (from_aqlm), not made here")
    return VQWeight(format, *w.shape, planes)


class _LatticeRounder:
    """Rounds blocks of 8 columns to E8P, and what that leaves to E8P again for a second stage."""

    def __init__(self, rows: int, columns: int, stages: int, device):
        self.codes = torch.zeros(rows, columns // 8, stages, dtype=torch.long, device=device)

    def begin(self, first: int, last: int, target: torch.Tensor) -> None:
        """Needs nothing ahead: the codebook is fixed."""

    def round(self, column: int, target: torch.Tensor) -> torch.Tensor:
        points, self.codes[:, column // 8, 0] = e8p.nearest(target)
        if self.codes.shape[2] == 2:
            rest, self.codes[:, column // 8, 1] = e8p.nearest((target - points) * e8p.RESIDUAL_SCALE)
            points = points + rest / e8p.RESIDUAL_SCALE
        return points


def _quantize_e8p(w: torch.Tensor, hessian: torch.Tensor, spec: E8P, generator: torch.Generator):
    """QuIP#: random signs and Hadamard transforms on both sides, then LDLQ onto the lattice."""
    n, k = w.shape
    rows, columns = spec.sides(n, k)
    width = ceil_to(columns, 8)
    in_scale, out_scale = (_signs(size, generator).to(w.device) for size in (k, n))
    rotated = pad(out_scale[:, None] * w * in_scale, (0, columns - k, 0, rows - n))
    rotated = _both_sides(rotated)
    moments = pad(in_scale[:, None] * hessian * in_scale, (0, columns - k, 0, columns - k))
    moments = _both_sides(moments)
    rotated, moments = pad(rotated, (0, width - columns)), pad(moments, (0, width - columns, 0, width - columns))
    scale = rotated[:, :columns].square().mean().sqrt() / e8p.SCALE
    scale = torch.where(scale > 0, scale, 1.0)
    lower, _ = block_ldl(damped(moments), 8)
    rounder = _LatticeRounder(rows, width, spec.stages, w.device)
    ldlq(rotated / scale, lower, 8, BLOCK, rounder)
    scales = torch.tensor([1.0, 1 / e8p.RESIDUAL_SCALE][: spec.stages], device=w.device) * scale
    return spec.pack(rounder.codes, scales, in_scale, out_scale)


def _both_sides(matrix: torch.Tensor) -> torch.Tensor:
    """H_n^T A H_k."""
    return hadamard.transform(hadamard.transform(matrix, transpose=True).T.contiguous(), transpose=True).T.contiguous()


def _signs(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, (count,), generator=generator) * 2.0 - 1.0
