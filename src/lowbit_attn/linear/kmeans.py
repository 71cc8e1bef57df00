"""Weighted k-means of many small problems at once."""

import torch

_SCORES = 1 << 21  # distances held at once


def assign(x: torch.Tensor, weight: torch.Tensor, centers: torch.Tensor) -> torch.Tensor:
    """Nearest center of each vector by sum_i weight_i (x_i - c_i)^2, ties to the lowest: int64 [b, m].

    x, weight fp32 [b, m, d], centers fp32 [b, K, d].
    """
    left = torch.cat((weight * x, weight), -1)
    right = torch.cat((2 * centers, -centers.square()), -1).transpose(1, 2)
    step = max(1, _SCORES // right.shape[-1])
    chosen = [(rows @ book).max(1).indices for problem, book in zip(left, right) for rows in problem.split(step)]
    return torch.cat(chosen).reshape(x.shape[:2])


def lloyd(x: torch.Tensor, weight: torch.Tensor, centers: torch.Tensor, steps: int) -> torch.Tensor:
    """Centers [b, K, d] after some steps of Lloyd's iteration; one that nothing chose moves to the worst vector."""
    for _ in range(steps):
        centers = update(x, weight, assign(x, weight, centers), centers)
    return centers


def update(x: torch.Tensor, weight: torch.Tensor, codes: torch.Tensor, centers: torch.Tensor) -> torch.Tensor:
    """The weighted means of what chose each center; an empty one takes a vector far from its own center."""
    problems, count, size = centers.shape
    flat = (codes + count * torch.arange(problems, device=x.device)[:, None]).flatten()
    total = centers.new_zeros(problems * count, size).index_add_(0, flat, (weight * x).flatten(0, 1))
    mass = centers.new_zeros(problems * count, size).index_add_(0, flat, weight.flatten(0, 1))
    moved = (total / mass.clamp(min=1e-30)).reshape_as(centers)
    moved = torch.where(mass.reshape_as(centers) > 0, moved, centers)
    empty = torch.bincount(flat, minlength=problems * count).reshape(problems, count) == 0
    for problem in empty.any(1).nonzero().flatten().tolist():
        cost = (weight[problem] * (x[problem] - moved[problem][codes[problem]]).square()).sum(1)
        places = empty[problem].nonzero().flatten()[: len(cost)]
        moved[problem, places] = x[problem, cost.topk(len(places)).indices]
    return moved


def seeds(x: torch.Tensor, weight: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Centers [b, count, d] to start from: vectors of each problem at random, by their weighted squared size.

    A few inputs of a layer are often hundreds of times the others: vectors of those columns need centers of their own.
    Where there are fewer vectors than centers, they are repeated.
    """
    m = x.shape[1]
    if m < count:
        picked = torch.arange(count, device=x.device).remainder(m).expand(len(x), -1)
    else:
        size = (weight * x.square()).sum(-1).cpu()
        size = size + 1e-3 * size.mean(1, keepdim=True) + 1e-30
        picked = torch.multinomial(size, count, generator=generator).to(x.device)
    return x.gather(1, picked[..., None].expand(-1, -1, x.shape[-1])).clone()
