"""Rounding with feedback: LDLQ of QuIP (Chee et al., 2023) in blocks of columns: GPTQ's order reversed.

The error of y = x W^T is tr((W - Q) H (W - Q)^T) with H = E[x x^T]. With H = L D L^T, L unit lower triangular in blocks
of vec columns, rounding the last block first and each block j to W_j + (W - Q)_later L_later,j makes it the sum over
blocks of the rounding error in the metric D_j.
"""

from typing import Protocol

import torch

DAMPING = 0.1  # of H's mean diagonal, added to it: best on held-out text; QuIP#'s 0.01 is for many more tokens

ASYMMETRY = 1e-2  # of the largest entry of H: what sums in another order may differ by, and far more


class Rounder(Protocol):
    """What rounds one block of columns. ``begin`` sees the targets of the next columns first..last - 1 at once."""

    def begin(self, first: int, last: int, target: torch.Tensor) -> None: ...

    def round(self, column: int, target: torch.Tensor) -> torch.Tensor: ...


def power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The least power of two above each value of x, finite and not negative; 1 for 0. Division by it is exact."""
    return torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent)


def checked_moments(hessian: torch.Tensor) -> torch.Tensor:
    """H fp32 [k, k], scaled so that its largest entry is near 1; ValueError where it cannot be E[x x^T].

    Only what costs little is checked here; ``block_ldl`` finds other matrices that are not positive semidefinite.
    """
    diagonal, largest = hessian.diagonal(), hessian.abs().max()
    if (diagonal < 0).any():
        raise ValueError(f"hessian: got {diagonal.min().item():.3g} on its diagonal, supported: a positive "
                         "semidefinite matrix, whose diagonal has no negative entries")
    if largest > 0 and not diagonal.any():
        raise ValueError("hessian: got a diagonal of zeros beside other entries, supported: a positive semidefinite "
                         "matrix")
    hessian = hessian / power_of_two(largest)
    if (asymmetry := (hessian - hessian.T).abs().max().item()) > ASYMMETRY:
        raise ValueError(f"hessian: got entries that differ from those across the diagonal by {asymmetry:.3g} of the "
                         f"largest, supported: a symmetric matrix, up to {ASYMMETRY:g}")
    return hessian


def damped(hessian: torch.Tensor, damping: float = DAMPING) -> torch.Tensor:
    """H divided by its mean diagonal, plus ``damping`` on the diagonal; the identity for a zero H."""
    one = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    mean = hessian.diagonal().mean()
    return hessian / mean + damping * one if mean > 0 else one


def block_ldl(hessian: torch.Tensor, vec: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(L fp32 [k, k], D fp32 [k / vec, vec, vec]) of a positive definite H [k, k]: H = L D L^T, L's diagonal 1.

    ValueError for another H.
    """
    try:
        lower = torch.linalg.cholesky(hessian.double())
    except torch.linalg.LinAlgError:
        raise ValueError("hessian: got a matrix with negative eigenvalues, supported: a positive semidefinite one, as "
                         "E[x x^T] is") from None
    blocks = len(hessian) // vec
    diagonal = lower.reshape(blocks, vec, blocks, vec).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    unit = lower.reshape(-1, blocks, vec).transpose(0, 1) @ torch.linalg.inv(diagonal)
    return unit.transpose(0, 1).reshape(len(hessian), -1).float(), (diagonal @ diagonal.transpose(1, 2)).float()


def ldlq(w: torch.Tensor, lower: torch.Tensor, vec: int, block: int, rounder: Rounder) -> torch.Tensor:
    """Q, fp32 [n, k]: W rounded block after block from the last column on.

    lower: L of ``block_ldl``; k a multiple of vec. block: columns, a multiple of vec, whose feedback from all later
    blocks is one product: rounder.begin is told their targets, then rounder.round each vec of them, last first.
    """
    rounded = torch.zeros_like(w)
    left = w.shape[1]
    while left:
        first = (left - 1) // block * block
        error = w[:, left:] - rounded[:, left:]
        target = w[:, first:left] + error @ lower[left:, first:left]
        rounder.begin(first, left, target)
        inside = torch.zeros_like(target)
        for column in range(left - vec, first - 1, -vec):
            at, after = column - first, column - first + vec
            goal = target[:, at:after] + inside[:, after:] @ lower[column + vec : left, column : column + vec]
            rounded[:, column : column + vec] = rounder.round(column, goal)
            inside[:, at:after] = w[:, column : column + vec] - rounded[:, column : column + vec]
        left = first
    return rounded


def proxy_error(w: torch.Tensor, q: torch.Tensor, hessian: torch.Tensor) -> float:
    """tr((W - Q) H (W - Q)^T) / tr(W H W^T): the relative squared error of y."""
    error = w - q
    return (((error @ hessian) * error).sum() / ((w @ hessian) * w).sum()).item()
