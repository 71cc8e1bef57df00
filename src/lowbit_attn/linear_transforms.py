"""Hadamard transforms of rows of x and of y on a CUDA device: which kernels make them, and their launches.

    kronecker   few rows, sizes of order x 256 or order x 512 with order up to 64: see hopper/linear/kronecker.py
    hadamard    any number of rows, sizes up to HADAMARD_LIMIT, or eight times that of a cluster of CTAs
"""

from functools import cache
from typing import NamedTuple

import torch

from lowbit_attn import dispatch, loader
from lowbit_attn.formats.uniform import dtype_name
from lowbit_attn.kernels.linear import (
    CLUSTER_LOG2,
    HADAMARD_LIMIT,
    KRONECKER,
    KRONECKER_ORDER,
    KRONECKER_ROWS,
    VECTOR_COLUMNS,
    VECTOR_ROWS,
    VECTOR_SIZE,
    linear_key,
)
from lowbit_attn.linear import hadamard
from lowbit_attn.linear.constants import constant

GRID_ROWS = 32_768  # rows of x in one launch of a transform
FEW_ROWS = 64  # rows that a Kronecker product's kernel transforms: each of its CTAs reads all of a row
LONG = 8192  # coefficients from which CTAs share a row of a transform
SHORT_ORDER = 40  # of a small matrix, up to which one CTA transforms a short row
X_MULTIPLE, Y_MULTIPLE = 4, 8  # of the columns of x, of y, that a Kronecker product's kernel reads or writes at once
ALIGN_BYTES = 16


class Split(NamedTuple):
    """A transform as a Kronecker product: of the matrix of an order and of Sylvester's of ``columns``, by CTAs that
    have as many rows of the result."""

    order: int
    columns: int
    ctas: int


@cache
def split_of(size: int) -> Split | None:
    """How a Kronecker product's kernel transforms ``size`` coefficients; None: it does not."""
    base = hadamard.base_order(size)
    for columns in KRONECKER:
        order = size // columns
        if order >= KRONECKER_ROWS // 2 and order <= KRONECKER_ORDER and order % base == 0 and size % columns == 0:
            return Split(order, columns, 1 << (-(-order // KRONECKER_ROWS) - 1).bit_length())
    return None


def cluster_log2(size: int) -> int | None:
    """log2 of the CTAs that share a row of a transform of any number of rows; None: no kernel does it."""
    order = hadamard.base_order(size)
    can_share = size // order >= 64 and size <= HADAMARD_LIMIT << CLUSTER_LOG2
    if size <= HADAMARD_LIMIT and not (can_share and (size >= LONG or order > SHORT_ORDER)):
        return 0
    return CLUSTER_LOG2 if can_share else None


def parts_of_sums(rows: int, k: int, size: int) -> int:
    """CTAs of a row of x, k columns, each of which sums its digits."""
    split = _split("digits", rows, k, size)
    return split.ctas if split else 1 << cluster_log2(size)


@cache
def kernel_of(index: int, *args):
    """The kernel of ``linear_key(target, *args)`` on a CUDA device."""
    return loader.load(linear_key(dispatch.target_of(torch.device("cuda", index))[1], *args))


def transform(kind: str, dtype: torch.dtype, size: int, source, scale, out, sums, steps) -> None:
    """Launch a transform of ``size`` coefficients: "digits" or "rotate" of x, "output" of y'. See ``Hadamard`` in
    hopper/linear/hadamard.py for the tensors; sums: int32 [rows, parts_of_sums, 2]."""
    split = _split(kind, len(source), (out if kind == "output" else source).shape[1], size)
    (_hadamard if split is None else _kronecker)(kind, dtype, size, source, scale, out, sums, steps)


def _split(kind: str, rows: int, columns: int, size: int) -> Split | None:
    """How a Kronecker product's kernel makes a transform of x or y with so many columns; None: the other one does."""
    multiple = {"digits": X_MULTIPLE, "output": Y_MULTIPLE}.get(kind)
    return split_of(size) if multiple and rows <= FEW_ROWS and columns % multiple == 0 else None


def is_inside(rows: int, columns: int, size: int, scale: torch.Tensor) -> bool:
    """Whether the product's kernel makes the digits of x itself."""
    split = _split("digits", rows, columns, size)
    return bool(split and split.columns == VECTOR_COLUMNS and size <= VECTOR_SIZE and rows <= VECTOR_ROWS
                and scale.data_ptr() % ALIGN_BYTES == 0)  # no copy of it is made: it is read before x is there


def inside_arguments(x: torch.Tensor, size: int) -> tuple:
    """(x, signs, order, norm) of a product with the transform of x inside."""
    x = x if x.data_ptr() % ALIGN_BYTES == 0 else x.clone()
    return x, _signs(size, x.device, True), split_of(size).order, size**-0.5


def _kronecker(kind: str, dtype: torch.dtype, size: int, source, scale, out, sums, steps) -> None:
    order, columns, _ = split_of(size)
    kernel = kernel_of(source.device.index, f"kronecker-{kind}", "", dtype_name(dtype), columns)
    signs = _signs(size, source.device, kind != "output")
    source = source if source.data_ptr() % ALIGN_BYTES == 0 else source.clone()
    if kind != "output" and scale.data_ptr() % ALIGN_BYTES:  # that of y is read before the kernel ahead has ended
        scale = scale.clone()
    kernel(source, scale, signs, out, sums, steps, order, size**-0.5)


def _hadamard(kind: str, dtype: torch.dtype, size: int, source, scale, out, sums, steps) -> None:
    order = hadamard.base_order(size)
    bits = (size // order).bit_length() - 1
    kernel = kernel_of(source.device.index, f"hadamard-{kind}", "", dtype_name(dtype))
    matrix = _matrix(order, source.device, kind != "output")
    for at in range(0, len(source), GRID_ROWS):
        some = slice(at, at + GRID_ROWS)
        kernel(source[some], scale, matrix, out if kind == "digits" else out[some], sums, steps[some], bits,
               cluster_log2(size), size**-0.5)


@constant
def _matrix(order: int, device: torch.device, transpose: bool) -> torch.Tensor:
    """The small matrix as kernels read it, fp32 [source row, result row]."""
    matrix = hadamard.matrix(order)
    return (matrix if transpose else matrix.T).contiguous().to(device)


@constant
def _signs(size: int, device: torch.device, transpose: bool) -> torch.Tensor:
    return kronecker_signs(split_of(size), transpose).to(device)


def kronecker_signs(split: Split, transpose: bool) -> torch.Tensor:
    """The matrix of a split's order, fp32 [CTAs, 32 lanes, values], in the order of a multiply's B operand.

    Value 2 s + h of lane 4 g + t: source row 8 s + 4 h + t, result row g of the CTA's; 0 where there is none.
    """
    matrix = hadamard.matrix(split.order)
    matrix = matrix if transpose else matrix.T  # [source row, result row]
    each = -(-split.order // split.ctas)
    wide = matrix.new_zeros(KRONECKER_ORDER, split.ctas * each)
    wide[: split.order, : split.order] = matrix
    mine = wide.new_zeros(split.ctas, KRONECKER_ORDER, KRONECKER_ROWS)
    for cta in range(split.ctas):
        mine[cta, :, :each] = wide[:, cta * each : (cta + 1) * each]
    by_lane = mine.view(split.ctas, -1, 2, 4, KRONECKER_ROWS).permute(0, 4, 3, 1, 2)
    return by_lane.reshape(split.ctas, 32, -1).contiguous()
