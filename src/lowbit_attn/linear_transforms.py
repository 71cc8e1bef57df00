"""Hadamard transforms of rows of x and of y on a CUDA device: which kernels make them, and their launches.

    kronecker   few rows, sizes of order x 256 or order x 512 with order up to 64: see device/linear/kronecker.py
    wide        few rows, sizes of order x 64 to order x 512 with order up to 256: see device/linear/wide.py
    hadamard    sizes up to hadamard_limit, or eight times that of a cluster of CTAs: see device/linear/hadamard.py
    in memory   digits where a row's CTAs are no cluster, or clusters are many: coefficients in fp32 of the first two
                or of torch, from which device/linear/fixed.py makes digits; what neither has room for is made by torch
"""

import os
from functools import cache
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from lowbit_attn import dispatch, loader
from lowbit_attn.device.linear.config import SMALLEST
from lowbit_attn.formats.uniform import dtype_name
from lowbit_attn.kernels.linear import (
    CLUSTER_LOG2,
    FIXED_PARTS,
    HADAMARD_LIMIT,
    KRONECKER,
    KRONECKER_ORDER,
    KRONECKER_ROWS,
    VECTOR_COLUMNS,
    VECTOR_ROWS,
    VECTOR_SIZE,
    WIDE,
    WIDE_BATCH,
    WIDE_ORDER,
    WIDE_SIZE,
    hadamard_limit,
    has_clusters,
    has_vector,
    linear_key,
)
from lowbit_attn.linear import hadamard
from lowbit_attn.linear.constants import constant
from lowbit_attn.linear.layouts import ceil_to

GRID_ROWS = 32_768  # rows of x in one launch of a transform
FEW_ROWS = 64  # rows that a Kronecker product's kernel transforms: each of its CTAs reads all of a row
LONG = 8192  # coefficients from which CTAs share a row of a transform
SHORT_ORDER = 40  # of a small matrix, up to which one CTA transforms a short row
X_MULTIPLE, Y_MULTIPLE = 4, 8  # of the columns of x, of y, that a Kronecker product's kernel reads or writes at once
ALIGN_BYTES = 16
MANY_CTAS = 128  # in clusters: about as many as run at once (docs/lessons.md)
KRONECKER_WAY, HADAMARD_WAY, IN_MEMORY = "kronecker", "hadamard", "memory"  # see _way


class Split(NamedTuple):
    """A transform as a Kronecker product: of the matrix of an order and of Sylvester's of ``columns``, by CTAs that
    have as many rows of the result."""

    order: int
    columns: int
    ctas: int

    @property
    def is_wide(self) -> bool:
        """Whether it is one for device/linear/wide.py."""
        return self.order > KRONECKER_ORDER or self.columns not in KRONECKER


class Machine(NamedTuple):
    """What kernels are built for: a target, and the one whose shared memory they are made for, if not its own."""

    target: str
    sizes: str = ""

    @property
    def has_clusters(self) -> bool:
        return has_clusters(self.target)

    @property
    def has_vector(self) -> bool:
        return has_vector(self.sizes or self.target)


def machine_of(device: torch.device) -> Machine:
    """What the kernels of a CUDA device that has an index are built for: see dispatch.target_of."""
    return _machine(device.index, dispatch.forced_arch())


@cache
def _machine(index: int, forced: bytes | None) -> Machine:
    return Machine(dispatch.target_of(torch.device("cuda", index))[1], os.fsdecode(forced or b"").partition("-")[2])


@cache
def split_of(size: int) -> Split | None:
    """How a Kronecker product's kernel transforms ``size`` coefficients; None: it does not."""
    base = hadamard.base_order(size)
    for columns in KRONECKER:
        order = size // columns
        if order >= KRONECKER_ROWS // 2 and order <= KRONECKER_ORDER and order % base == 0 and size % columns == 0:
            return Split(order, columns, 1 << (-(-order // KRONECKER_ROWS) - 1).bit_length())
    for columns in WIDE:
        order = size // columns
        if size >= WIDE_SIZE and size % columns == 0 and order <= WIDE_ORDER and base and order % base == 0:
            return Split(order, columns, -(-order // KRONECKER_ROWS))
    return None


def cluster_log2(size: int) -> int | None:
    """log2 of the CTAs that share a row of a transform of any number of rows; None: no kernel does it."""
    order = hadamard.base_order(size)
    can_share = size // order >= 64 and size <= HADAMARD_LIMIT << CLUSTER_LOG2
    if size <= HADAMARD_LIMIT and not (can_share and (size >= LONG or order > SHORT_ORDER)):
        return 0
    return CLUSTER_LOG2 if can_share else None


def parts_of_sums(machine: Machine, rows: int, k: int, size: int) -> int:
    """CTAs of a row of x, k columns, each of which sums its digits."""
    way, split = _way(machine, "digits", rows, k, size)
    if way == HADAMARD_WAY:
        return 1 << cluster_log2(size) if machine.has_clusters else 1
    return split.ctas if split else FIXED_PARTS


def kernel_of(index: int, *args):
    """The kernel of ``linear_key(target, *args)`` on a CUDA device."""
    return _kernel(index, dispatch.forced_arch(), *args)


@cache
def _kernel(index: int, forced: bytes | None, *args):
    machine = _machine(index, forced)
    return loader.load(linear_key(machine.target, *args, sizes=machine.sizes))


def transform(kind: str, dtype: torch.dtype, size: int, source, scale, out, sums, steps) -> None:
    """Launch a transform of ``size`` coefficients: "digits" or "rotate" of x, "output" of y'. See ``Hadamard`` in
    device/linear/hadamard.py for the tensors; sums: int32 [rows, parts_of_sums, 2]."""
    machine = machine_of(source.device)
    way, split = _way(machine, kind, len(source), (out if kind == "output" else source).shape[1], size)
    if way == KRONECKER_WAY:
        _kronecker(kind, dtype, split, source, scale, out, sums, steps)
    elif way == HADAMARD_WAY:
        _hadamard(machine, kind, dtype, size, source, scale, out, sums, steps)
    elif kind == "output":
        _output_by_torch(size, source, scale, out, steps)
    else:
        _in_memory(kind, dtype, size, source, scale, out, sums, steps)


def _way(machine: Machine, kind: str, rows: int, columns: int, size: int) -> tuple[str, Split | None]:
    """How a transform of x or y with so many columns is made: by a Kronecker product's kernel that is divided so, with
    coefficients in memory, or by the kernel of any number of rows.

    Coefficients go to memory where no CTA or cluster has room for a row, and where CTAs that make parts of a row's
    digits cannot tell each other the largest, or clusters of them would not all run at once. Those digits are the ones
    of the product with a transform inside, to the bit.
    """
    multiple = Y_MULTIPLE if kind == "output" else X_MULTIPLE
    has_room = machine.has_clusters or size <= hadamard_limit(False)
    may_split = kind != "rotate" and columns % multiple == 0 and (rows <= FEW_ROWS or not has_room)
    split = split_of(size) if may_split else None
    if split and kind == "digits":
        tells = split.ctas == 1 or machine.has_clusters and rows * split.ctas < MANY_CTAS
        return (KRONECKER_WAY, split) if tells and not split.is_wide else (IN_MEMORY, None)
    if split:
        return KRONECKER_WAY, split
    return (HADAMARD_WAY if has_room else IN_MEMORY), None


def is_inside(machine: Machine, rows: int, columns: int, size: int, scale: torch.Tensor) -> bool:
    """Whether the product's kernel makes the digits of x itself."""
    split = split_of(size) if machine.has_vector and columns % X_MULTIPLE == 0 else None
    return bool(split and split.columns == VECTOR_COLUMNS and size <= VECTOR_SIZE and rows <= VECTOR_ROWS
                and scale.data_ptr() % ALIGN_BYTES == 0)  # no copy of it is made: it is read before x is there


def inside_arguments(x: torch.Tensor, size: int) -> tuple:
    """(x, signs, order, norm) of a product with the transform of x inside."""
    split = split_of(size)
    return _aligned(x), _signs(split, x.device, True), split.order, size**-0.5


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.data_ptr() % ALIGN_BYTES == 0 else tensor.clone()


def _kronecker(kind: str, dtype: torch.dtype, split: Split, source, scale, out, sums, steps) -> None:
    size, way = split.order * split.columns, "wide" if split.is_wide else "kronecker"
    kernel = kernel_of(source.device.index, f"{way}-{kind}", "", dtype_name(dtype), split.columns)
    signs = _signs(split, source.device, kind != "output")
    source, scale = _aligned(source), scale if kind == "output" else _aligned(scale)
    for at in range(0, len(source), GRID_ROWS):  # scale of y is read before the kernel ahead has ended: never a copy
        some = slice(at, at + GRID_ROWS)
        kernel(source[some], scale, signs, out if kind == "digits" else out[some], sums, steps[some], split.order,
               size**-0.5)


def _hadamard(machine: Machine, kind: str, dtype: torch.dtype, size: int, source, scale, out, sums, steps) -> None:
    order = hadamard.base_order(size)
    bits = (size // order).bit_length() - 1
    kernel = kernel_of(source.device.index, f"hadamard-{kind}", "", dtype_name(dtype))
    matrix = _matrix(order, source.device, kind != "output")
    log2 = cluster_log2(size) if machine.has_clusters else 0
    for at in range(0, len(source), GRID_ROWS):
        some = slice(at, at + GRID_ROWS)
        kernel(source[some], scale, matrix, out if kind == "digits" else out[some], sums, steps[some], bits, log2,
               size**-0.5)


def _in_memory(kind: str, dtype: torch.dtype, size: int, source, scale, out, sums, steps) -> None:
    """Digits, or 16 bits, of coefficients that are in memory first."""
    made, norm = _coefficients(dtype, size, source, scale, sums, steps)
    if kind == "digits":
        kernel_of(source.device.index, "fixed-digits")(made, out, sums, steps, norm)
        return
    largest = made.abs().amax(1)
    steps.copy_(torch.where(largest.isfinite(), largest * norm, torch.nan))
    inverse = torch.where(largest.isfinite() & (largest >= SMALLEST), 1 / largest, 0)
    out[:, :size].copy_(torch.where(inverse[:, None] > 0, made * inverse[:, None], 0))
    out[:, size:] = 0


def _coefficients(dtype: torch.dtype, size: int, source, scale, sums, steps) -> tuple[torch.Tensor, float]:
    """(coefficients of x times scale, fp32 [m, size], what they still are to be multiplied by)."""
    split = split_of(size) if source.shape[1] % X_MULTIPLE == 0 else None
    if split:
        made = torch.empty(len(source), size, dtype=torch.float32, device=source.device)
        _kronecker("coefficients", dtype, split, source, scale, made, sums, steps)
        return made, size**-0.5
    # in fp64: in fp32 a caller who allows tf32 would get its precision
    wide = pad(source.double() * scale, (0, size - source.shape[1]))
    return hadamard.transform(wide, transpose=True).float(), 1.0


def _output_by_torch(size: int, source, scale, out, steps) -> None:
    made = hadamard.transform(source[:, :size].double())[:, : out.shape[1]]
    out.copy_(made * steps[:, None] * scale)


@constant
def _matrix(order: int, device: torch.device, transpose: bool) -> torch.Tensor:
    """The small matrix as kernels read it, fp32 [source row, result row]."""
    matrix = hadamard.matrix(order)
    return (matrix if transpose else matrix.T).contiguous().to(device)


@constant
def _signs(split: Split, device: torch.device, transpose: bool) -> torch.Tensor:
    return kronecker_signs(split, transpose).to(device)


def kronecker_signs(split: Split, transpose: bool) -> torch.Tensor:
    """The matrix of a split's order, fp32 [CTAs, 32 lanes, values], in the order of a multiply's B operand; of one for
    wide.py [CTAs times batches, 32 lanes, values of a batch].

    Value 2 s + h of lane 4 g + t: source row 8 s + 4 h + t, result row g of the CTA's; 0 where there is none.
    """
    matrix = hadamard.matrix(split.order)
    matrix = matrix if transpose else matrix.T  # [source row, result row]
    each = KRONECKER_ROWS if split.is_wide else -(-split.order // split.ctas)
    rows = ceil_to(split.order, WIDE_BATCH) if split.is_wide else KRONECKER_ORDER
    wide = matrix.new_zeros(rows, split.ctas * each)
    wide[: split.order, : split.order] = matrix
    mine = wide.new_zeros(split.ctas, rows, KRONECKER_ROWS)
    for cta in range(split.ctas):
        mine[cta, :, :each] = wide[:, cta * each : (cta + 1) * each]
    by_lane = mine.view(split.ctas, -1, 2, 4, KRONECKER_ROWS).permute(0, 4, 3, 1, 2)
    if split.is_wide:
        return by_lane.unflatten(3, (-1, WIDE_BATCH // 8)).permute(0, 3, 1, 2, 4, 5).reshape(-1, 32, WIDE_BATCH // 4)
    return by_lane.reshape(split.ctas, 32, -1).contiguous()
