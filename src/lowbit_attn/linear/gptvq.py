"""GPTVQ (van Baalen et al., 2024): k-means codebooks of 256 x 256 tiles, vectors of 4, rounding errors fed back."""

import torch
from torch.nn.functional import pad

from lowbit_attn.linear import kmeans
from lowbit_attn.linear.formats import GPTVQ
from lowbit_attn.linear.layouts import ceil_to
from lowbit_attn.linear.ldlq import block_ldl, damped, ldlq

TILE, VEC, ENTRIES = 256, 4, 256
STEPS = 6  # of k-means a tile


class _TileRounder:
    """Learns the codebooks of a column tile from its targets, then rounds four columns at a time to them."""

    def __init__(self, rows: int, columns: int, metric: torch.Tensor, generator: torch.Generator):
        self.row_tiles = -(-rows // TILE)
        self.metric = metric  # D of block_ldl, [columns / 4, 4, 4]
        self.generator = generator
        self.codes = torch.zeros(rows, columns // VEC, 1, dtype=torch.long, device=metric.device)
        self.codebooks = torch.zeros(self.row_tiles, -(-columns // TILE), ENTRIES, VEC, dtype=torch.half,
                                     device=metric.device)

    def begin(self, first: int, last: int, target: torch.Tensor) -> None:
        """k-means of each row tile's vectors, weighted by the diagonal of their metric."""
        importance = self.metric.diagonal(dim1=1, dim2=2)[first // VEC : last // VEC]  # [vectors, 4]
        for row_tile in range(self.row_tiles):
            rows = target[row_tile * TILE : (row_tile + 1) * TILE]
            x = rows.reshape(1, -1, VEC)
            weight = importance.repeat(len(rows), 1)[None]
            centers = kmeans.lloyd(x, weight, kmeans.seeds(x, weight, ENTRIES, self.generator), STEPS)
            self.codebooks[row_tile, first // TILE] = centers[0].half()

    def round(self, column: int, target: torch.Tensor) -> torch.Tensor:
        books = self.codebooks[:, column // TILE].float()  # [row tiles, 256, 4]
        rows = len(target)
        root = torch.linalg.cholesky(self.metric[column // VEC])  # |x R| is the metric's norm
        x = pad(target @ root, (0, 0, 0, self.row_tiles * TILE - rows)).reshape(-1, TILE, VEC)
        codes = kmeans.assign(x, torch.ones_like(x), books @ root)
        self.codes[:, column // VEC, 0] = codes.flatten()[:rows]
        return books.gather(1, codes[..., None].expand(-1, -1, VEC)).flatten(0, 1)[:rows]


def quantize(w: torch.Tensor, hessian: torch.Tensor, spec: GPTVQ, generator: torch.Generator) -> dict:
    """Planes of W fp32 [n, k] under the second moments ``hessian`` [k, k] of its inputs."""
    n, k = w.shape
    width = ceil_to(k, VEC)
    lower, metric = block_ldl(damped(pad(hessian, (0, width - k, 0, width - k))), VEC)
    rounder = _TileRounder(n, width, metric, generator)
    ldlq(pad(w, (0, width - k)), lower, VEC, TILE, rounder)
    return spec.pack(rounder.codes, rounder.codebooks, n, k)
