"""Random-sign Hadamard rotation of keys and queries: QuaRot (Ashkboos et al., 2024), applied after RoPE."""

import random
from functools import cache

import torch

SEED = 20_240_404  # of the signs: part of what a rotated cache means, so it never changes


@cache
@torch.inference_mode(False)  # kept for all callers
def hadamard(head_dim: int) -> torch.Tensor:
    """H = diag(signs) Hadamard / sqrt(head_dim), fp32 [head_dim, head_dim], orthogonal: (q H) (k H)^T = q k^T.

    ValueError unless head_dim is a power of two (Sylvester's construction).
    """
    if head_dim & (head_dim - 1) or head_dim < 1:
        raise ValueError(f"head_dim: got {head_dim}, supported with a rotation: powers of two")
    matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while len(matrix) < head_dim:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    bits = random.Random(SEED).getrandbits(head_dim)
    signs = torch.tensor([[1.0 if bits >> i & 1 else -1.0] for i in range(head_dim)],
                         dtype=torch.float32, device="cpu")
    return signs * matrix / head_dim**0.5
