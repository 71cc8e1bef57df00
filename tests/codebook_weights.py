"""Codebook weights of random codes, for tests."""

import torch

from lowbit_attn.linear import VQWeight, format_named


def random_weight(name: str, n: int, k: int) -> VQWeight:
    """A weight of random codes and codebooks, of matrices whose entries are around 0.02 to 1."""
    spec = format_named(name)
    if name.startswith("e8p"):
        rows, columns = spec.sides(n, k)
        codes = torch.randint(0, 65536, (rows, -(-columns // 8), spec.books))
        scales = torch.tensor([0.02, 0.02 / 3.45][: spec.books])
        planes = spec.pack(codes, scales, torch.randn(k).sign(), torch.randn(n).sign())
    elif name == "gptvq2":
        codes = torch.randint(0, 256, (n, -(-k // 4), 1))
        planes = spec.pack(codes, torch.randn(-(-n // 256), -(-k // 256), 256, 4), n, k)
    else:
        codes = torch.randint(0, spec.book_size, (n, -(-k // 8), spec.books))
        planes = spec.pack(codes, torch.randn(spec.books, spec.book_size, 8), torch.rand(n) + 0.5, k)
    return VQWeight(name, n, k, planes)
