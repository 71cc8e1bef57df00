"""Lloyd's k-means for many small problems at once, in torch, on the CPU or a GPU.

Own code, since the libraries are no faster here: on 48 problems of 7,680 vectors of 4 channels and 256 entries,
faiss-cpu takes 3.2 s of CPU time, scikit-learn 4.7 s (docs/codebooks.md), and neither batches on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lowbit_attn.precision import on_own_defaults

ITERATIONS = 12
EARLY_SHARE, EARLY_VECTORS = 2, 2048  # early iterations see one vector in two, but not fewer than 8 an entry
CPU_BLOCK = 512  # vectors whose scores exist at once: 512 KiB, which stays in the cache of a core
GPU_SCORES = 1 << 26  # scores that exist at once on a GPU


@dataclass(frozen=True)
class Clusters:
    """Entries fp32 [problems, entries, c] by how many vectors they stand for, the most first.

    counts: int64 [problems, entries] of vectors whose nearest entry it is; entries that no vector chose are 0.
    error: fp32 [problems], mean square distance of a vector from its entry.
    """

    entries: torch.Tensor
    counts: torch.Tensor
    error: torch.Tensor

    @property
    def unused(self) -> int:
        """Entries that no vector chose, of all problems."""
        return int((self.counts == 0).sum())


@on_own_defaults
def kmeans(x: torch.Tensor, entries: int = 256, iterations: int = ITERATIONS, seed: int = 0,
           on_step: Callable[[], None] = lambda: None, weights: torch.Tensor | None = None) -> Clusters:
    """Cluster x [problems, vectors, c], finite; each problem starts from vectors of its own, drawn with ``seed``.

    An entry that no vector chose moves to the vector that is farthest from its own entry. Where a problem has fewer
    different vectors than entries, the rest stay unused; with fewer vectors than entries, some start as equal ones.
    The first three quarters of the iterations see every other vector, which halves the time at the same error. on_step
    is called after each iteration. weights: fp32 [problems, vectors], positive, by which square distances count; None:
    all alike. The CPU gives the same result for the same seed; a GPU sums in any order.
    """
    x = x.float().contiguous()
    centers = _start(x, entries, seed)
    few = _some(x, seed), None if weights is None else _some(weights[..., None], seed)[..., 0]
    for step in range(iterations):
        seen, theirs = few if step < iterations * 3 // 4 else (x, weights)
        codes, distance = nearest(seen, centers)
        centers, counts = _means(seen, codes, centers, theirs)
        if theirs is not None:
            distance = distance * theirs
        if step + 1 < iterations:
            _reseed(seen, centers, counts, distance)
        on_step()
    codes, distance = nearest(x, centers)
    counts = _counts(codes, entries)
    order = counts.argsort(dim=1, descending=True, stable=True)
    return Clusters(centers.gather(1, order[..., None].expand_as(centers)), counts.gather(1, order), distance.mean(1))


def nearest(x: torch.Tensor, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest of 256 or fewer entries [problems, entries, c] for x [problems, vectors, c], both fp32.

    Returns (codes int64 [problems, vectors], square distances fp32). Of entries that are nearly as far (2^-15 of the
    score x e - |e|^2 / 2) any may be taken.
    """
    problems, vectors, count = *x.shape[:2], entries.shape[1]
    on_cpu = x.device.type == "cpu"
    block = CPU_BLOCK if on_cpu else min(vectors, 8192)
    together = 1 if on_cpu else max(1, GPU_SCORES // (block * count))
    bias = entries.square().sum(-1, keepdim=True) / -2
    number = torch.arange(count, dtype=torch.int32, device=x.device)[:, None]
    best = torch.empty(problems, vectors, dtype=torch.float32, device=x.device)
    for first in range(0, problems, together):
        mine = slice(first, first + together)
        for start in range(0, vectors, block):
            part = slice(start, start + block)
            scores = torch.baddbmm(bias[mine], entries[mine], x[mine, part].mT)
            # The number of an entry replaces the low byte of its score: one maximum finds both, in 0.4 of argmax's time
            scores.view(torch.int32).bitwise_and_(~255).bitwise_or_(number)
            best[mine, part] = scores.amax(1)
    codes = (best.view(torch.int32) & 255).long()
    return codes, (x - gathered(entries, codes)).square().sum(-1)


def gathered(entries: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Entries [problems, entries, c] that codes int64 [problems, vectors] name: [problems, vectors, c]."""
    return entries.gather(1, codes[..., None].expand(*codes.shape, entries.shape[-1]))


def _start(x: torch.Tensor, entries: int, seed: int) -> torch.Tensor:
    """Different vectors of each problem, at random places, as its first entries."""
    generator = torch.Generator().manual_seed(seed)
    problems, vectors, c = x.shape
    draws = torch.rand(problems, vectors, dtype=torch.float32, generator=generator)
    places = draws.topk(min(entries, vectors), 1).indices
    places = places.repeat(1, -(-entries // places.shape[1]))[:, :entries].to(x.device)
    return gathered(x, places)


def _some(x: torch.Tensor, seed: int) -> torch.Tensor:
    """The vectors, the same of all problems, that early iterations see."""
    count = max(x.shape[1] // EARLY_SHARE, EARLY_VECTORS)
    if count >= x.shape[1]:
        return x
    places = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(seed + 1))[:count].sort().values
    return x[:, places.to(x.device)].contiguous()


def _counts(codes: torch.Tensor, entries: int) -> torch.Tensor:
    counts = torch.zeros(codes.shape[0], entries, dtype=torch.int64, device=codes.device)
    return counts.scatter_add_(1, codes, torch.ones_like(codes))


def _means(x: torch.Tensor, codes: torch.Tensor, centers: torch.Tensor, weights: torch.Tensor | None = None,
           ) -> tuple[torch.Tensor, torch.Tensor]:
    """(the mean of each entry's vectors, how many they are); an entry without any stays where it is."""
    counts = shares = _counts(codes, centers.shape[1])
    if weights is not None:
        x = x * weights[..., None]
        shares = torch.zeros_like(centers[..., 0]).scatter_add_(1, codes, weights)
    sums = torch.zeros_like(centers).scatter_add_(1, codes[..., None].expand_as(x), x)
    return torch.where(counts[..., None] > 0, sums / torch.where(counts > 0, shares, 1)[..., None], centers), counts


def _reseed(x: torch.Tensor, centers: torch.Tensor, counts: torch.Tensor, distance: torch.Tensor) -> None:
    """Move entries without vectors, in place, to the vectors that are farthest from their entries."""
    for problem in (counts == 0).any(1).nonzero()[:, 0].tolist():
        empty = (counts[problem] == 0).nonzero()[:, 0]
        far, places = distance[problem].topk(min(len(empty), x.shape[1]))
        places = places[far > 0]
        centers[problem, empty[: len(places)]] = x[problem, places]
