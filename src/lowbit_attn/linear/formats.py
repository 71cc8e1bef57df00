"""Formats of codebook weights: which tensors (planes) hold a matrix, and what they decode to.

    name         paper                          bits a weight (codes alone)   vectors   codebooks
    e8p2, e8p4   QuIP#, Tseng et al. 2024       2, 4                          8         E8P, fixed: ``e8p.py``
    gptvq2       GPTVQ, van Baalen et al. 2024  2 (2.25 with codebooks)       4         256 entries a 256 x 256 tile
    aqlm_2x8     AQLM, Egiazarian et al. 2024   2                             8         2 of 256 entries a matrix
    aqlm_2x12    the same ("AQLM-3" of VQ-LLM)  3                             8         2 of 4,096
    aqlm_1x16    the same                       2                             8         1 of 65,536
"""

from abc import ABC, abstractmethod

import torch
from torch.nn.functional import pad

from lowbit_attn.linear import e8p, hadamard, layouts
from lowbit_attn.linear.layouts import ceil_to

Planes = dict[str, torch.Tensor]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
VERSION = 1  # of every layout here: raised when bytes change their meaning


class WeightFormat(ABC):
    """One format: both ends of its planes. vec_size: weights that one code stands for; books: codes a vector."""

    vec_size = 8
    books = 1
    book_size = 256
    row_multiple, column_multiple = 1, 8  # n and k are padded to multiples of them
    # Of the largest weight of a matrix that is not zero. What has scales in fp32 decodes without overflow in between.
    magnitudes = (2.0**-100, 2.0**64)

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name

    def padded(self, n: int, k: int) -> tuple[int, int]:
        """Rows and columns of the pack of an n x k matrix."""
        return ceil_to(n, self.row_multiple), ceil_to(k, self.column_multiple)

    def code_bits(self) -> float:
        """Bits a weight of the codes alone."""
        return self.books * (self.book_size - 1).bit_length() / self.vec_size

    @abstractmethod
    def shapes(self, n: int, k: int) -> Shapes:
        """Shape and dtype of every plane of an n x k matrix, by name."""

    @abstractmethod
    def decode(self, planes: Planes, n: int, k: int) -> torch.Tensor:
        """The matrix W, fp32 [n, k], y = x W^T."""

    def multiply(self, x: torch.Tensor, planes: Planes, n: int, k: int) -> torch.Tensor:
        """x W^T, fp32 [m, n]; x fp32 [m, k]."""
        return x @ self.decode(planes, n, k).T

    def check_magnitude(self, w: torch.Tensor) -> None:
        """ValueError for finite weights which this format would decode to zeros or infinities."""
        (least, most), largest = self.magnitudes, w.abs().max().item()
        if largest and not least <= largest <= most:
            raise ValueError(f"w: got values up to {largest:.3g}, supported by {self}: up to {most:.6g}, and not below "
                             f"{least:.3g} unless all are 0")

    def _check_codes(self, codes: torch.Tensor) -> None:
        if codes.dim() != 3 or codes.shape[2] != self.books:
            raise ValueError(f"codes: got shape {list(codes.shape)}, supported by {self}: [n, k / {self.vec_size}, "
                             f"{self.books}]")
        if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < self.book_size:
            raise ValueError(f"codes: got values {int(codes.min())} to {int(codes.max())}, supported by {self}: 0 to "
                             f"{self.book_size - 1}")


class E8P(WeightFormat):
    """QuIP#: codes of E8P after randomly signed Hadamard transforms of both sides.

    W = diag(out_scale) H_n Q H_k^T diag(in_scale), cut to n x k: H_s is ``hadamard.transform`` of the smallest size of
    at least s that has one, Q[r] = scales[0] E8P(first code) + scales[1] E8P(residual code). in_scale [k] and out_scale
    [n] are signs, or what fine tuning made of them.
    """

    book_size = e8p.CODES
    column_multiple = 128

    def __init__(self, name: str, stages: int):
        super().__init__(name)
        self.stages = self.books = stages
        self.row_multiple = 16 // stages

    def sides(self, n: int, k: int) -> tuple[int, int]:
        """Sizes of the two Hadamard transforms."""
        return hadamard.padded_size(n), hadamard.padded_size(k)

    def padded(self, n: int, k: int) -> tuple[int, int]:
        return super().padded(*self.sides(n, k))

    def shapes(self, n: int, k: int) -> Shapes:
        rows, columns = self.padded(n, k)
        return {"codes": ((rows // self.row_multiple, columns // 128, 32, 16), torch.uint8),
                "scales": ((self.stages,), torch.float32), "in_scale": ((k,), torch.float32),
                "out_scale": ((n,), torch.float32)}

    def pack(self, codes: torch.Tensor, scales: torch.Tensor, in_scale: torch.Tensor,
             out_scale: torch.Tensor) -> Planes:
        """Planes of codes [n', k'/8, stages], n' and k' the sizes of the two transforms (k' a multiple of 8)."""
        self._check_codes(codes)
        n, k = len(out_scale), len(in_scale)
        rows, columns = self.padded(n, k)
        codes = layouts.pad_codes(codes.long(), rows, columns // 8)
        return {"codes": layouts.pack_e8p(codes), "scales": scales.float(), "in_scale": in_scale.float(),
                "out_scale": out_scale.float()}

    def unpack(self, planes: Planes) -> torch.Tensor:
        """Codes, int64 [n', k'/8, stages], padding included."""
        return layouts.unpack_e8p(planes["codes"], self.stages)

    def lattice(self, planes: Planes, n: int, k: int) -> torch.Tensor:
        """Q, fp32 [n', k'], of the transforms' sizes: the matrix between the two of them."""
        codes, grid = self.unpack(planes), e8p.grid(planes["codes"].device)
        made = sum(scale * grid[codes[..., stage]] for stage, scale in enumerate(planes["scales"]))
        rows, columns = self.sides(n, k)
        return made.flatten(1)[:rows, :columns]

    def decode(self, planes: Planes, n: int, k: int) -> torch.Tensor:
        made = hadamard.transform(hadamard.transform(self.lattice(planes, n, k)).T).T  # H_n Q H_k^T
        return planes["out_scale"][:, None] * made[:n, :k] * planes["in_scale"]

    def multiply(self, x: torch.Tensor, planes: Planes, n: int, k: int) -> torch.Tensor:
        columns = self.sides(n, k)[1]
        x = hadamard.transform(pad(x * planes["in_scale"], (0, columns - k)), transpose=True)
        y = hadamard.transform(x @ self.lattice(planes, n, k).T)
        return y[:, :n] * planes["out_scale"]


class GPTVQ(WeightFormat):
    """GPTVQ in two dimensions of VQ-LLM's Table 2: vectors of 4 in codebooks of 256 fp16 entries a 256 x 256 tile."""

    vec_size = 4
    row_multiple, column_multiple = 256, 1024
    magnitudes = (2.0**-18, 65504.0)  # entries are fp16 without a scale, in steps of 2^-24 near 0

    def shapes(self, n: int, k: int) -> Shapes:
        rows, columns = self.padded(n, k)
        return {"codes": ((rows // 256, columns // 1024, 16, 8, 32, 16), torch.uint8),
                "codebooks": ((rows // 256, columns // 1024, 256, 4, 4), torch.float16)}

    def pack(self, codes: torch.Tensor, codebooks: torch.Tensor, n: int, k: int) -> Planes:
        """Planes of codes [n, ceil(k/4), 1] and codebooks [ceil(n/256), ceil(k/256), 256, 4]."""
        self._check_codes(codes)
        rows, columns = self.padded(n, k)
        books = pad(codebooks, (0, 0, 0, 0, 0, columns // 256 - codebooks.shape[1]))
        return {"codes": layouts.pack_gptvq(layouts.pad_codes(codes, rows, columns // 4)),
                "codebooks": layouts.pack_gptvq_books(books.half())}

    def decode(self, planes: Planes, n: int, k: int) -> torch.Tensor:
        codes = layouts.unpack_gptvq(planes["codes"])[..., 0]
        books = layouts.unpack_gptvq_books(planes["codebooks"]).float()
        rows, vectors = codes.shape
        row = torch.arange(rows, device=codes.device)[:, None] // 256
        column = torch.arange(vectors, device=codes.device) // 64
        return books[row, column, codes].flatten(1)[:n, :k]


class AQLM(WeightFormat):
    """AQLM: a vector of 8 is the sum of one entry of each codebook, times the scale of its row."""

    def __init__(self, name: str, books: int, bits: int, rows: int, columns: int):
        super().__init__(name)
        self.books, self.book_size, self.row_multiple, self.column_multiple = books, 1 << bits, rows, columns
        self._pack = getattr(layouts, f"pack_{name}")
        self._unpack = getattr(layouts, f"unpack_{name}")

    def shapes(self, n: int, k: int) -> Shapes:
        rows, columns = self.padded(n, k)
        shapes = {"aqlm_2x8": ((columns // 256, rows // 32, 4, 32, 16), torch.uint8),
                  "aqlm_2x12": ((columns // 32, rows // 128, 3, 32, 4), torch.int32),
                  "aqlm_1x16": ((rows, columns // 8), torch.int16)}
        return {"codes": shapes[self.name], "codebooks": ((self.books, self.book_size, 8), torch.float16),
                "scales": ((n,), torch.float32)}

    def pack(self, codes: torch.Tensor, codebooks: torch.Tensor, scales: torch.Tensor, k: int) -> Planes:
        """Planes of codes [n, ceil(k/8), books], codebooks [books, entries, 8] and scales [n]."""
        self._check_codes(codes)
        rows, columns = self.padded(len(scales), k)
        return {"codes": self._pack(layouts.pad_codes(codes.long(), rows, columns // 8)),
                "codebooks": codebooks.half(), "scales": scales.float()}

    def decode(self, planes: Planes, n: int, k: int) -> torch.Tensor:
        codes, books = self._unpack(planes["codes"])[:n], planes["codebooks"].float()
        made = sum(books[book][codes[..., book]] for book in range(self.books))
        return made.flatten(1)[:, :k] * planes["scales"][:, None]


FORMATS: dict[str, WeightFormat] = {fmt.name: fmt for fmt in (
    E8P("e8p4", 2), E8P("e8p2", 1), GPTVQ("gptvq2"), AQLM("aqlm_2x8", 2, 8, 32, 256),
    AQLM("aqlm_2x12", 2, 12, 128, 32), AQLM("aqlm_1x16", 1, 16, 1, 8))}
NAMES = tuple(FORMATS)  # a header names a format by its place here: append only


def format_named(name: str) -> WeightFormat:
    """The format of this name; ValueError, with the names, for another one."""
    if name not in FORMATS:
        raise ValueError(f"format: got {name!r}, supported: {', '.join(NAMES)}")
    return FORMATS[name]
