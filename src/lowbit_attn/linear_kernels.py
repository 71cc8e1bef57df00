"""x W^T of codebook weights on a CUDA device: which kernels serve a call, and what they are launched with.

    kernel       few rows of x (MOST_ROWS): packed codes are multiplied as they are read
    dequantize   more: W in chunks of 16 bits that stay in L2, each multiplied by cuBLAS
    reference    torch in fp32, as on the CPU
"""

from collections.abc import Callable
from functools import cache

import torch

from lowbit_attn import dispatch, loader
from lowbit_attn.kernels import KernelKey
from lowbit_attn.linear import e8p, hadamard
from lowbit_attn.linear.constants import constant
from lowbit_attn.linear.formats import E8P, Planes, format_named
from lowbit_attn.linear.layouts import ceil_to
from lowbit_attn.linear.weight import DEQUANTIZE, KERNEL, PRODUCTS, REFERENCE, VQWeight

MOST_ROWS = {"e8p2": 16, "e8p4": 16, "aqlm_2x8": 4}  # of x that a format's product kernel takes
DEQUANTIZED = ("e8p2", "e8p4")  # formats with a kernel that writes W in 16 bits
E8P_ROWS = (4, 16)  # of x that E8P's product kernels multiply at once; AQLM's take them one after the other
KERNEL_DTYPES = (torch.float16, torch.bfloat16)
CHUNK_BYTES = 16 << 20  # of W in 16 bits at a time: a third of the smallest L2
GRID_ROWS = 32_768  # rows of x in one launch of a transform
LONG, CLUSTER_LOG2, CTA_LIMIT = 8192, 3, 8192  # see hopper/linear/config.py
SHORT_ORDER = 40  # of a small matrix, up to which one CTA transforms a short row
DEQUANTIZE_CTAS = 8  # of an SM


def why_not(x_dtype: torch.dtype, device: torch.device, format: str, n: int, k: int, path: str = KERNEL) -> list[str]:
    """Reasons why a path, "kernel" or "dequantize", does not serve a product; empty if it does."""
    reasons = [] if x_dtype in KERNEL_DTYPES else [f"x: {x_dtype}, supported: float16, bfloat16"]
    try:
        arch = dispatch.target_of(device)[0]
        reasons += [] if arch == "hopper" else [f"device: {arch}, supported: hopper"]
    except NotImplementedError as error:
        reasons.append(str(error))
    served = tuple(MOST_ROWS) if path == KERNEL else DEQUANTIZED
    if format not in served:
        return [*reasons, f"format {format}, supported: {', '.join(served)}"]
    spec = format_named(format)
    if not isinstance(spec, E8P):
        return reasons
    return reasons + [f"a transform of {size} coefficients: supported are up to {CTA_LIMIT}, or {CTA_LIMIT << 3} in "
                      "multiples of 64 times the order of their matrix"
                      for size in spec.sides(n, k) if _cluster_log2(size) is None]


def product(x: torch.Tensor, planes: Planes, format: str, n: int, k: int, path: str) -> torch.Tensor | None:
    """y [m, n] of x [m, k], on x's device; path: "" picks one. None: the reference serves this call."""
    if path == REFERENCE:
        return None
    m, most = len(x), MOST_ROWS.get(format, 0)
    wanted = path or (KERNEL if m <= most else DEQUANTIZE)
    missing = why_not(x.dtype, x.device, format, n, k, wanted)
    if wanted == KERNEL and m > most > 0:
        missing.append(f"{m} rows of x, supported: up to {most}")
    if missing and path:
        raise NotImplementedError(f"path {path!r}: {'; '.join(missing)}")
    if missing or m == 0:
        return None
    call = _e8p_dequantize if wanted == DEQUANTIZE else _aqlm_kernel if format == "aqlm_2x8" else _e8p_kernel
    with torch.cuda.device(x.device):
        return call(x.contiguous(), planes, format, n, k)


PRODUCTS["cuda"] = product


def _key(device: torch.device, variant: str, format: str = "", dtype: str = "float32", rows: int = 0) -> KernelKey:
    arch, target = dispatch.target_of(device)
    return KernelKey("linear", arch, target, dtype, 0, format, variant, rows=rows)


@cache
def _kernel(index: int, *args):
    return loader.load(_key(torch.device("cuda", index), *args))


def _cluster_log2(size: int) -> int | None:
    """log2 of the CTAs that share a row of a transform; None: no kernel does it."""
    order = hadamard.base_order(size)
    can_share = size // order >= 64 and size <= CTA_LIMIT << CLUSTER_LOG2
    if size <= CTA_LIMIT and not (can_share and (size >= LONG or order > SHORT_ORDER)):
        return 0
    return CLUSTER_LOG2 if can_share else None


@constant
def _tables(device: torch.device) -> torch.Tensor:
    """Both tables of E8P, int32 [2, 256]."""
    return torch.stack(e8p.tables()).to(torch.int32).to(device)


@constant
def _matrix(order: int, device: torch.device, transpose: bool) -> torch.Tensor:
    """The small matrix as kernels read it, fp32 [source row, result row]."""
    matrix = hadamard.matrix(order)
    return (matrix if transpose else matrix.T).contiguous().to(device)


def _transform(kind: str, dtype: torch.dtype, size: int, source, scale, out, sums, steps) -> None:
    """Launch a transform of ``size`` coefficients; see hopper/linear/hadamard.py."""
    order = hadamard.base_order(size)
    bits = (size // order).bit_length() - 1
    kernel = _kernel(source.device.index, f"hadamard-{kind}", "", str(dtype).removeprefix("torch."))
    matrix = _matrix(order, source.device, kind != "output")
    for at in range(0, len(source), GRID_ROWS):
        some = slice(at, at + GRID_ROWS)
        kernel(source[some], scale, matrix, out if kind == "digits" else out[some], sums, steps[some], bits,
               _cluster_log2(size), size**-0.5)


class _E8PCall:
    """Memory of one product and its three launches: digits, multiply, output."""

    def __init__(self, x: torch.Tensor, planes: Planes, format: str, n: int, k: int):
        self.spec, self.x, self.planes, m, device = format_named(format), x, planes, len(x), x.device
        self.sides, self.codes = self.spec.sides(n, k), planes["codes"]
        self.digits = torch.empty(ceil_to(m, 4) // 4, self.codes.shape[1], 32, 8, dtype=torch.uint32, device=device)
        self.sums = torch.empty(m, 1 << _cluster_log2(self.sides[1]), 2, dtype=torch.int32, device=device)
        self.steps = torch.empty(m, dtype=torch.float32, device=device)
        self.product = torch.empty(m, len(self.codes) * self.spec.row_multiple, dtype=torch.float32, device=device)
        self.y = torch.empty(m, n, dtype=x.dtype, device=device)

    def make_digits(self) -> None:
        _transform("digits", self.x.dtype, self.sides[1], self.x, self.planes["in_scale"], self.digits, self.sums,
                   self.steps)

    def multiply(self) -> None:
        device, rows = self.x.device, next(rows for rows in E8P_ROWS if rows >= len(self.x))
        _kernel(device.index, "gemv", self.spec.name, "float32", rows)(
            self.codes.view(torch.uint32), self.digits, self.sums, _tables(device).view(torch.uint32),
            self.planes["scales"], self.product, min(dispatch.running_ctas(device, 1), len(self.codes)))

    def make_output(self) -> None:
        _transform("output", self.x.dtype, self.sides[0], self.product, self.planes["out_scale"], self.y, self.sums,
                   self.steps)


def _e8p_kernel(x: torch.Tensor, planes: Planes, format: str, n: int, k: int) -> torch.Tensor:
    call = _E8PCall(x, planes, format, n, k)
    call.make_digits()
    call.multiply()
    call.make_output()
    return call.y


class _AqlmCall:
    """Memory of the products of rows of x, one after the other, and their launches."""

    def __init__(self, x: torch.Tensor, planes: Planes, format: str, n: int, k: int):
        self.x, self.planes, self.format = x, planes, format
        self.codes = planes["codes"].view(torch.uint32)
        groups, rows = len(self.codes), self.codes.shape[1] * 32
        self.partial = torch.empty(len(x), groups, 1, rows, dtype=torch.float32, device=x.device)
        self.units = groups * self.codes.shape[1]
        self.y = torch.empty(len(x), n, dtype=x.dtype, device=x.device)

    def multiply(self) -> None:
        dtype = str(self.x.dtype).removeprefix("torch.")
        kernel = _kernel(self.x.device.index, "gemv", self.format, dtype, 1)
        for row, partial in zip(self.x.split(1), self.partial):
            kernel(row, self.codes, self.planes["codebooks"], partial,
                   min(dispatch.running_ctas(self.x.device, 1), self.units))

    def add_up(self) -> None:
        kernel = _kernel(self.x.device.index, "sum", "", str(self.x.dtype).removeprefix("torch."))
        for partial, y in zip(self.partial, self.y.split(1)):
            kernel(partial, self.planes["scales"], y)


def _aqlm_kernel(x: torch.Tensor, planes: Planes, format: str, n: int, k: int) -> torch.Tensor:
    call = _AqlmCall(x, planes, format, n, k)
    call.multiply()
    call.add_up()
    return call.y


def product_alone(x: torch.Tensor, w: VQWeight) -> Callable[[], None] | None:
    """The product kernel of a call without what comes before and after it, to time it; None: it has no kernel."""
    if why_not(x.dtype, x.device, w.format, w.n, w.k) or len(x) > MOST_ROWS[w.format]:
        return None
    if w.format == "aqlm_2x8":
        return _AqlmCall(x, w.planes, w.format, w.n, w.k).multiply
    call = _E8PCall(x, w.planes, w.format, w.n, w.k)
    call.make_digits()
    return call.multiply


def _e8p_dequantize(x: torch.Tensor, planes: Planes, format: str, n: int, k: int) -> torch.Tensor:
    spec, m, device = format_named(format), len(x), x.device
    n_side, k_side = spec.sides(n, k)
    codes = planes["codes"].view(torch.uint32)
    columns, unit = codes.shape[1] * 128, spec.row_multiple
    rotated = torch.empty(m, columns, dtype=torch.float16, device=device)
    sums = torch.empty(1, 1, 2, dtype=torch.int32, device=device)
    steps = torch.empty(m, dtype=torch.float32, device=device)
    _transform("rotate", x.dtype, k_side, x, planes["in_scale"], rotated, sums, steps)
    top = planes["scales"].abs().amax()
    scales = planes["scales"] / top.clamp(min=1e-30)  # so that no weight leaves the range of fp16
    blocks = max(1, CHUNK_BYTES // (2 * columns * unit))
    product = torch.empty(m, len(codes) * unit, dtype=torch.float32, device=device)
    w = torch.empty(min(blocks, len(codes)) * unit, columns, dtype=torch.float16, device=device)
    dequantize = _kernel(device.index, "dequantize", format)
    ctas = dispatch.running_ctas(device, DEQUANTIZE_CTAS)
    for at in range(0, len(codes), blocks):
        some = codes[at : at + blocks]
        part = w[: len(some) * unit]
        dequantize(some, _tables(device).view(torch.uint32), scales, part, ctas)
        product[:, at * unit : at * unit + len(part)] = torch.mm(rotated, part.T)
    y = torch.empty(m, n, dtype=x.dtype, device=device)
    _transform("output", x.dtype, n_side, product, planes["out_scale"], y, sums, steps * top)
    return y
