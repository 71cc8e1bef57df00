"""``quantize``: a matrix, and the second moments of its inputs, to codebook weights."""

import torch
from torch.nn.functional import pad

from lowbit_attn.linear import aqlm, e8p, gptvq, hadamard
from lowbit_attn.linear.formats import AQLM, E8P, GPTVQ, format_named
from lowbit_attn.linear.layouts import ceil_to
from lowbit_attn.linear.ldlq import block_ldl, checked_moments, damped, ldlq, power_of_two
from lowbit_attn.linear.weight import VQWeight
from lowbit_attn.precision import full_precision

BLOCK = 128  # columns whose feedback from later ones is one product


def quantize(w: torch.Tensor, format: str, hessian: torch.Tensor | None = None, seed: int = 0) -> VQWeight:
    """W [n, k], fp16, bf16 or fp32, in a format of ``NAMES``, on W's device.

    hessian: E[x x^T] of the layer's inputs x, [k, k], any scale; None: all inputs count alike. seed: of the random
    signs and of k-means' start; equal calls give equal weights. aqlm_1x16 is read, not made. Zeros stay zeros in a
    matrix, and in a row of AQLM, that has nothing else. Raises ValueError for shapes, NaN or infinities that do not
    fit, for weights that are smaller or larger than the format holds, and for a hessian that is not positive
    semidefinite; NotImplementedError for aqlm_1x16.
    """
    return quantize_together([w], format, hessian, seed)[0]


def quantize_together(ws: list[torch.Tensor], format: str, hessian: torch.Tensor | None = None,
                      seed: int = 0) -> list[VQWeight]:
    """Several matrices [n, k] that read the same inputs, as queries, keys and values do: ``quantize`` of each, faster.

    E8P rounds the rows of all at once, for which they share the signs of their inputs.
    """
    spec = format_named(format)
    for w in ws:
        if w.dim() != 2 or not w.is_floating_point() or min(w.shape) < 1:
            raise ValueError(f"w: got {w.dtype} {list(w.shape)}, supported: floating point [n, k] with n and k of 1 or "
                             "more")
    k = ws[0].shape[1]
    if hessian is None:
        hessian = torch.eye(k, dtype=torch.float32, device=ws[0].device)
    for name, values in (*(("w", w) for w in ws), ("hessian", hessian)):
        if values.shape[1:] != (k,) or name == "hessian" and values.shape != (k, k):
            raise ValueError(f"{name}: got shape {list(values.shape)}, supported: [{'n' if name == 'w' else k}, {k}]")
        if not values.isfinite().all():
            raise ValueError(f"{name}: got a NaN or an infinity, supported: finite values")
    for w in ws:
        spec.check_magnitude(w)
    if isinstance(spec, AQLM) and spec.book_size > 4096:
        raise NotImplementedError(f"format: got {format!r}, supported: e8p4, e8p2, gptvq2, aqlm_2x8, aqlm_2x12; "
                                  f"{format} is read from published checkpoints (from_aqlm), not made here")
    ws, hessian = [w.detach().float() for w in ws], checked_moments(hessian.detach().float().to(ws[0].device))
    with torch.device("cpu"), full_precision(hessian.device.type):  # generators are the CPU's
        if isinstance(spec, E8P):
            made = _quantize_e8p(ws, hessian, spec, torch.Generator().manual_seed(seed))
        else:
            module = gptvq if isinstance(spec, GPTVQ) else aqlm
            made = [module.quantize(w, hessian, spec, torch.Generator().manual_seed(seed)) for w in ws]
    return [VQWeight(format, *w.shape, planes) for w, planes in zip(ws, made)]


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


def _quantize_e8p(ws: list[torch.Tensor], hessian: torch.Tensor, spec: E8P, generator: torch.Generator) -> list[dict]:
    """QuIP#: random signs and Hadamard transforms on both sides, then LDLQ onto the lattice."""
    k = ws[0].shape[1]
    columns = spec.sides(1, k)[1]
    width = ceil_to(columns, 8)
    in_scale = _signs(k, generator).to(hessian)
    moments = _both_sides(pad(in_scale[:, None] * hessian * in_scale, (0, columns - k, 0, columns - k)))
    lower, _ = block_ldl(damped(pad(moments, (0, width - columns, 0, width - columns)), e8p.DAMPING), 8)
    rotated, scales, out_scales = [], [], []
    for w in ws:
        n, unit = len(w), power_of_two(w.abs().max())
        out_scales.append(_signs(n, generator).to(w))
        signed = out_scales[-1][:, None] * (w / unit) * in_scale
        turned = _both_sides(pad(signed, (0, columns - k, 0, spec.sides(n, k)[0] - n)))
        scale = turned.square().mean().sqrt() / e8p.SCALE
        scales.append(scale * unit)  # 0 for a matrix of zeros: the lattice has no point there
        rotated.append(pad(turned / torch.where(scale > 0, scale, 1.0), (0, width - columns)))
    rows = [len(turned) for turned in rotated]
    rounder = _LatticeRounder(sum(rows), width, spec.stages, hessian.device)
    ldlq(torch.cat(rotated), lower, 8, BLOCK, rounder)
    stages = torch.tensor([1.0, 1 / e8p.RESIDUAL_SCALE][: spec.stages], dtype=torch.float32, device=hessian.device)
    return [spec.pack(codes, stages * scale, in_scale.clone(), out_scale)
            for codes, scale, out_scale in zip(rounder.codes.split(rows), scales, out_scales)]


def _both_sides(matrix: torch.Tensor) -> torch.Tensor:
    """H_n^T A H_k."""
    return hadamard.transform(hadamard.transform(matrix, transpose=True).T.contiguous(), transpose=True).T.contiguous()


def _signs(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, (count,), generator=generator).float() * 2 - 1
