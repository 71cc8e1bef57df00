"""AQLM (Egiazarian et al., 2024): sums of two learned codebooks. Residual k-means, beam search, least-squares refits.

A round assigns codes block by block with the rounding errors fed back (``ldlq``), by beam search in the block's metric,
and then fits the codebooks to these codes under all of H by conjugate gradients. The paper's fine tuning of whole
transformer blocks is left out.
"""

import torch
from torch.nn.functional import pad

from lowbit_attn.linear import kmeans
from lowbit_attn.linear.formats import AQLM
from lowbit_attn.linear.layouts import ceil_to
from lowbit_attn.linear.ldlq import block_ldl, damped, ldlq, power_of_two

VEC, BLOCK = 8, 128
ROUNDS = 2  # assignments, each followed by a refit
LEARN_STEPS, LEARN_PER_ENTRY = 12, 64  # k-means of the first codebooks: steps, and vectors an entry at most
REFIT_STEPS = 24  # of conjugate gradients
BEAMS = {256: 8, 4096: 2}  # first codes that the search for the second keeps, by entries of a codebook
_SCORES = 1 << 21  # distances held at once


class _BeamRounder:
    """Rounds blocks of 8 columns to the best sum of two entries that a beam search finds."""

    def __init__(self, rows: int, columns: int, books: torch.Tensor, metric: torch.Tensor):
        self.books = books  # [2, entries, 8]
        self.root = torch.linalg.cholesky(metric)  # |x R| is the metric's norm
        self.codes = torch.zeros(rows, columns // VEC, 2, dtype=torch.long, device=books.device)

    def begin(self, first: int, last: int, target: torch.Tensor) -> None:
        """Needs nothing ahead: the codebooks are those of the round."""

    def round(self, column: int, target: torch.Tensor) -> torch.Tensor:
        root = self.root[column // VEC]
        codes = beam_search(target @ root, self.books @ root)
        self.codes[:, column // VEC] = codes
        return self.books[0][codes[:, 0]] + self.books[1][codes[:, 1]]


def beam_search(x: torch.Tensor, books: torch.Tensor) -> torch.Tensor:
    """Codes, int64 [m, 2], of the sum of an entry of each codebook [2, K, 8] near each x [m, 8].

    The best few first entries, of each the best second one, the best pair of these; then, in turn, the best first entry
    for that second one and the best second one for it.
    """
    beam = BEAMS[books.shape[1]]
    first, second = books
    halves = books.square().sum(-1) / 2
    codes = []
    for rows in x.split(max(1, _SCORES // (beam * books.shape[1]))):
        kept, firsts = torch.addmm(halves[0], rows, first.T, beta=-1).topk(beam, 1)
        rest = rows[:, None] - first[firsts]  # [m, beam, 8]
        gain, seconds = torch.addmm(halves[1], rest.flatten(0, 1), second.T, beta=-1).max(1)
        best = (kept + gain.reshape_as(kept)).argmax(1)
        pair = [firsts[:, 0], seconds.reshape_as(firsts).gather(1, best[:, None])[:, 0]]
        for book in (0, 1):
            rest = rows - books[1 - book][pair[1 - book]]
            pair[book] = torch.addmm(halves[book], rest, books[book].T, beta=-1).argmax(1)
        codes.append(torch.stack(pair, 1))
    return torch.cat(codes)


def quantize(w: torch.Tensor, hessian: torch.Tensor, spec: AQLM, generator: torch.Generator) -> dict:
    """Planes of W fp32 [n, k] under the second moments ``hessian`` [k, k] of its inputs."""
    n, k = w.shape
    width = ceil_to(k, VEC)
    moments = damped(pad(hessian, (0, width - k, 0, width - k)))
    lower, metric = block_ldl(moments, VEC)
    near = power_of_two(w.abs().amax(1))  # so that no square is too large or too small for fp32
    shares = (w / near[:, None]).square().mean(1).sqrt()
    scales = shares * near  # 0 for a row of zeros
    unit = pad(w / near[:, None], (0, width - k)) / torch.where(shares > 0, shares, 1.0)[:, None]
    weight = _row_weights(scales)
    books = _first_books(unit, metric, weight, spec, generator)
    for _ in range(ROUNDS):
        rounder = _BeamRounder(n, width, books, metric)
        ldlq(unit, lower, VEC, BLOCK, rounder)
        books = refit(unit, rounder.codes, books, moments, weight)
    books = books.clamp(-65504, 65504).half()
    made = decode(rounder.codes, books.float())
    along, norm = ((made @ moments) * unit).sum(1), ((made @ moments) * made).sum(1)
    scales = scales * torch.where(norm > 0, along / norm, 0.0)
    return spec.pack(rounder.codes, books, scales, k)


def _row_weights(scales: torch.Tensor) -> torch.Tensor:
    """How much the error of a row counts in that of the matrix: the square of its scale, with a mean of 1; a row of
    zeros counts nothing."""
    relative = scales / power_of_two(scales.max())
    mean = relative.square().mean().sqrt()
    return (relative / torch.where(mean > 0, mean, 1.0)).square()


def decode(codes: torch.Tensor, books: torch.Tensor) -> torch.Tensor:
    """Sums of entries, [n, k], of codes [n, k/8, 2] in books [2, entries, 8]."""
    return (books[0][codes[..., 0]] + books[1][codes[..., 1]]).flatten(1)


def _first_books(unit: torch.Tensor, metric: torch.Tensor, weight: torch.Tensor, spec: AQLM,
                 generator: torch.Generator) -> torch.Tensor:
    """Residual k-means of vectors at random, their entries weighted by row and by the metric's diagonal."""
    vectors = unit.reshape(-1, VEC)
    places = torch.randperm(len(vectors), generator=generator, device="cpu")
    picked = places[: spec.book_size * LEARN_PER_ENTRY].to(unit.device)
    x = vectors[picked][None]
    blocks = unit.shape[1] // VEC
    importance = metric.diagonal(dim1=1, dim2=2)[picked % blocks] * weight[picked // blocks, None]
    books = []
    for _ in range(2):
        start = kmeans.seeds(x, importance[None], spec.book_size, generator)
        centers = kmeans.lloyd(x, importance[None], start, LEARN_STEPS)
        x = x - centers[0][kmeans.assign(x, importance[None], centers)]
        books.append(centers[0])
    return torch.stack(books)


def refit(unit: torch.Tensor, codes: torch.Tensor, books: torch.Tensor, moments: torch.Tensor,
          weight: torch.Tensor) -> torch.Tensor:
    """Codebooks [2, entries, 8] that minimize sum_r weight_r (w_r - q_r) H (w_r - q_r)^T for these codes.

    Conjugate gradients from ``books`` on, preconditioned by how much each entry is used.
    """
    size = books.shape[1]
    flat = [codes[..., book].flatten() + book * size for book in range(2)]

    def collect(rows: torch.Tensor) -> torch.Tensor:
        """Sums [2, entries, 8] over the places of each entry: the transpose of ``decode``."""
        vectors = (rows * weight[:, None]).reshape(-1, VEC)
        made = vectors.new_zeros(2 * size, VEC)
        for at in flat:
            made.index_add_(0, at, vectors)
        return made.reshape_as(books)

    uses = collect(moments.diagonal().expand_as(unit))
    precondition = torch.where(uses > 0, 1 / uses.clamp(min=1e-30), 0)
    residual = collect((unit - decode(codes, books)) @ moments)
    step = precondition * residual
    direction, power = step, (residual * step).sum()
    enough = 1e-9 * power
    for _ in range(REFIT_STEPS):
        if not power > enough:
            break
        bent = collect(decode(codes, direction) @ moments)
        length = power / (direction * bent).sum()
        books = books + length * direction
        residual = residual - length * bent
        step = precondition * residual
        direction, power = step + (residual * step).sum() / power * direction, (residual * step).sum()
    return books
