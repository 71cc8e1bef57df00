"""x W^T of codebook weights on a CUDA device: which kernels serve a call, and what they are launched with.

    kernel       few rows of x (CROSSOVER): packed codes are multiplied as they are read
    dequantize   more: W in chunks of 16 bits, each multiplied by cuBLAS
    reference    torch in fp32, as on the CPU
"""

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from lowbit_attn import dispatch
from lowbit_attn.formats.uniform import dtype_name
from lowbit_attn.kernels.linear import (
    CLUSTER_LOG2,
    CROSSOVER,
    DTYPES,
    HADAMARD_LIMIT,
    MOST_ROWS,
    PRODUCT_DTYPES,
    ROWS,
    has_clusters,
)
from lowbit_attn.kernels.linear import E8P as E8P_FORMATS
from lowbit_attn.linear import e8p
from lowbit_attn.linear.constants import constant
from lowbit_attn.linear.formats import E8P, Planes, format_named
from lowbit_attn.linear.layouts import ceil_to
from lowbit_attn.linear.weight import DEQUANTIZE, KERNEL, PRODUCTS, REFERENCE, VQWeight
from lowbit_attn.linear_transforms import (
    cluster_log2,
    inside_arguments,
    is_inside,
    kernel_of,
    machine_of,
    parts_of_sums,
    transform,
)

CHUNK_BYTES = 256 << 20  # of W in 16 bits at a time: to keep them in L2 costs more, in launches, than it saves
GPTVQ_UNITS = 16  # of rows of W in a tile of gptvq2, which CTAs share
FLAT_CTAS = 8  # of an SM, of the kernel that decodes aqlm_1x16


def why_not(x_dtype: torch.dtype, device: torch.device, format: str, n: int, k: int, path: str = KERNEL) -> list[str]:
    """Reasons why a path, "kernel" or "dequantize", does not serve a product; empty if it does."""
    dtypes = PRODUCT_DTYPES.get(format, DTYPES) if path == KERNEL else DTYPES
    reasons = [] if dtype_name(x_dtype) in dtypes else [f"x: {x_dtype}, supported by {path} of {format}: "
                                                        f"{', '.join(dtypes)}"]
    try:
        target = dispatch.target_of(device)[1]
    except NotImplementedError as error:
        return [*reasons, str(error)]
    if path == KERNEL and format not in ROWS:
        return [*reasons, f"format {format}, supported: {', '.join(ROWS)}"]
    spec = format_named(format)
    if not isinstance(spec, E8P) or not has_clusters(target):  # long transforms are two launches
        return reasons
    most = HADAMARD_LIMIT << CLUSTER_LOG2
    return reasons + [f"a transform of {size} coefficients: supported are up to {HADAMARD_LIMIT}, or {most} in "
                      "multiples of 64 times the order of their matrix"
                      for size in spec.sides(n, k) if cluster_log2(size) is None]


def product(x: torch.Tensor, planes: Planes, format: str, n: int, k: int, path: str) -> torch.Tensor | None:
    """y [m, n] of x [m, k], on x's device; path: "" picks one. None: the reference serves this call."""
    if path == REFERENCE:
        return None
    m = len(x)
    is_few = m <= CROSSOVER.get(format, 0) and dtype_name(x.dtype) in PRODUCT_DTYPES.get(format, DTYPES)
    wanted = path or (KERNEL if is_few else DEQUANTIZE)
    missing = why_not(x.dtype, x.device, format, n, k, wanted)
    if wanted == KERNEL and format in ROWS and m > MOST_ROWS:
        missing.append(f"{m} rows of x, supported: up to {MOST_ROWS}")
    if missing and path:
        raise NotImplementedError(f"path {path!r}: {'; '.join(missing)}")
    if missing or m == 0:
        return None
    calls = {KERNEL: (_e8p_kernel, _sum_kernel), DEQUANTIZE: (_e8p_dequantize, _dequantize)}
    call = calls[wanted][format not in E8P_FORMATS]
    with torch.cuda.device(x.device):
        return call(x.contiguous(), planes, format, n, k)


PRODUCTS["cuda"] = product


def even_ctas(units: int, most: int) -> int:
    """CTAs that share units: as few as make the largest share no larger than ``most`` CTAs' is. Those that are left
    out have no part in the time, and room for the kernels before and after."""
    return -(-units // -(-units // most))


@constant
def _tables(device: torch.device) -> torch.Tensor:
    """Both tables of E8P, int32 [2, 256]."""
    return torch.stack(e8p.tables()).to(torch.int32).to(device)


class _E8PCall:
    """Memory of one product and its launches: digits, unless the product makes them, multiply, output."""

    def __init__(self, x: torch.Tensor, planes: Planes, format: str, n: int, k: int):
        self.spec, self.x, self.planes, m, device = format_named(format), x, planes, len(x), x.device
        self.sides, self.codes = self.spec.sides(n, k), planes["codes"]
        machine = machine_of(device)
        self.digits = torch.empty(ceil_to(m, 4) // 4, self.codes.shape[1], 32, 8, dtype=torch.uint32, device=device)
        self.sums = torch.empty(m, parts_of_sums(machine, m, k, self.sides[1]), 2, dtype=torch.int32, device=device)
        self.steps = torch.empty(m, dtype=torch.float32, device=device)
        self.product = torch.empty(m, len(self.codes) * self.spec.row_multiple, dtype=torch.float32, device=device)
        self.y = torch.empty(m, n, dtype=x.dtype, device=device)
        self.ctas = even_ctas(len(self.codes), dispatch.running_ctas(device, 1))
        self.is_vector = is_inside(machine, m, k, self.sides[1], planes["in_scale"])

    def make_digits(self) -> None:
        transform("digits", self.x.dtype, self.sides[1], self.x, self.planes["in_scale"], self.digits, self.sums,
                  self.steps)

    def multiply(self) -> None:
        if self.is_vector:
            return self.multiply_vector()
        device, m = self.x.device, len(self.x)
        arguments = (_tables(device).view(torch.uint32), self.planes["scales"])
        at, most = 0, ROWS[self.spec.name][-1]
        while at < m:
            rows = next((rows for rows in ROWS[self.spec.name] if rows >= m - at), most)
            some = slice(at, at + rows)
            kernel_of(device.index, "gemv", self.spec.name, "float32", rows)(
                self.codes.view(torch.uint32), self.digits[at // 4 : (at + rows) // 4], self.sums[some], *arguments,
                self.product[some], self.ctas)
            at += rows

    def multiply_vector(self) -> None:
        """The product with the digits of x made inside."""
        device = self.x.device
        x, signs, order, norm = inside_arguments(self.x, self.sides[1])
        kernel_of(device.index, "gemv-vector", self.spec.name, dtype_name(x.dtype), ROWS[self.spec.name][0])(
            self.codes.view(torch.uint32), x, self.planes["in_scale"], signs, _tables(device).view(torch.uint32),
            self.planes["scales"], self.product, self.steps, order, norm, self.ctas)

    def make_output(self) -> None:
        transform("output", self.x.dtype, self.sides[0], self.product, self.planes["out_scale"], self.y, self.sums,
                  self.steps)


def _e8p_kernel(x: torch.Tensor, planes: Planes, format: str, n: int, k: int) -> torch.Tensor:
    call = _E8PCall(x, planes, format, n, k)
    if not call.is_vector:
        call.make_digits()
    call.multiply()
    call.make_output()
    return call.y


class _SumCall:
    """Memory of the products with AQLM or GPTVQ codes: partial sums, launches that make and add them.

    AQLM's kernels take one row of x at a time, GPTVQ's four, in fp16.
    """

    def __init__(self, x: torch.Tensor, planes: Planes, format: str, n: int, k: int):
        self.x, self.planes, self.format, m, device = x, planes, format, len(x), x.device
        self.dtype = dtype_name(x.dtype)
        self.ctas, codes = dispatch.running_ctas(device, 1), planes["codes"].view(torch.uint32)
        groups, rows = codes.shape[:2] if format != "gptvq2" else codes.shape[1::-1]
        rows *= {"aqlm_2x8": 32, "aqlm_2x12": 128, "gptvq2": 256}[format]
        self.scales, self.codes, self.books = planes.get("scales"), codes, planes["codebooks"]
        self.y = torch.empty(m, n, dtype=x.dtype, device=device)
        if format == "gptvq2":
            self.codes = codes.flatten(2, 3)
            self.books = self.books.view(torch.uint32).view(len(codes), groups, 512, 4)
            self.scales = _ones(n, device)
            self.partial = [torch.empty(groups, len(some), rows, dtype=torch.float32, device=device)
                            for some in x.split(ROWS[format][0])]
            return
        parts = even_ctas(groups, self.ctas) if format == "aqlm_2x12" else groups
        self.partial = torch.empty(m, parts, 1, rows, dtype=torch.float32, device=device)

    def multiply(self) -> None:
        kernel = kernel_of(self.x.device.index, "gemv", self.format, self.dtype, ROWS[self.format][0])
        if self.format == "gptvq2":
            ctas = even_ctas(GPTVQ_UNITS * self.codes.shape[0] * self.codes.shape[1], self.ctas)
            for some, partial in zip(self.padded().split(ROWS[self.format][0]), self.partial):
                kernel(some, self.codes, self.books, partial, ctas)
            return
        ctas = [even_ctas(self.codes.shape[0] * self.codes.shape[1], self.ctas)] * (self.format == "aqlm_2x8")
        for row, partial in zip(self.x.split(1), self.partial):
            kernel(row, self.codes, self.books, partial, *ctas)

    def padded(self) -> torch.Tensor:
        """x [m, columns of the pack], as kernels of GPTVQ read it."""
        columns = self.codes.shape[1] * 1024
        x = self.x if self.x.shape[1] == columns else pad(self.x, (0, columns - self.x.shape[1]))
        return x if x.data_ptr() % 16 == 0 else x.clone()

    def add_up(self) -> None:
        kernel = kernel_of(self.x.device.index, "sum", "", self.dtype)
        for partial, y in zip(self.partial, self.y.split(ROWS[self.format][0])):
            kernel(partial, self.scales, y)


def _sum_kernel(x: torch.Tensor, planes: Planes, format: str, n: int, k: int) -> torch.Tensor:
    call = _SumCall(x, planes, format, n, k)
    call.multiply()
    call.add_up()
    return call.y


@constant
def _ones(count: int, device: torch.device) -> torch.Tensor:
    return torch.ones(count, dtype=torch.float32, device=device)


def launches(x: torch.Tensor, w: VQWeight) -> dict[str, Callable[[], None]]:
    """The launches of a call of the kernel path by name, in order, each to be repeated alone; empty: it has none."""
    if why_not(x.dtype, x.device, w.format, w.n, w.k) or len(x) > MOST_ROWS:
        return {}
    if isinstance(w.spec, E8P):
        call = _E8PCall(x, w.planes, w.format, w.n, w.k)
        if call.is_vector:
            return {"multiply": call.multiply, "output": call.make_output}
        call.make_digits()
        return {"digits": call.make_digits, "multiply": call.multiply, "output": call.make_output}
    call = _SumCall(x, w.planes, w.format, w.n, w.k)
    return {"multiply": call.multiply, "sum": call.add_up}


def _e8p_dequantize(x: torch.Tensor, planes: Planes, format: str, n: int, k: int) -> torch.Tensor:
    spec, m, device = format_named(format), len(x), x.device
    n_side, k_side = spec.sides(n, k)
    codes = planes["codes"].view(torch.uint32)
    columns, unit = codes.shape[1] * 128, spec.row_multiple
    rotated = torch.empty(m, columns, dtype=torch.float16, device=device)
    sums = torch.empty(1, 1, 2, dtype=torch.int32, device=device)
    steps = torch.empty(m, dtype=torch.float32, device=device)
    transform("rotate", x.dtype, k_side, x, planes["in_scale"], rotated, sums, steps)
    blocks = max(1, CHUNK_BYTES // (2 * columns * unit))
    product = torch.empty(m, len(codes) * unit, dtype=torch.float32, device=device)
    w = torch.empty(min(blocks, len(codes)) * unit, columns, dtype=torch.float16, device=device)
    dequantize = kernel_of(device.index, "dequantize", format)
    ctas = dispatch.running_ctas(device, 1)
    for at in range(0, len(codes), blocks):
        some = codes[at : at + blocks]
        part = w[: len(some) * unit]
        dequantize(some, _tables(device).view(torch.uint32), planes["scales"], part, ctas)
        torch.mm(rotated, part.T, out_dtype=torch.float32, out=product[:, at * unit : at * unit + len(part)])
    y = torch.empty(m, n, dtype=x.dtype, device=device)
    steps *= torch.linalg.vector_norm(planes["scales"], torch.inf)  # of which W is in units
    transform("output", x.dtype, n_side, product, planes["out_scale"], y, sums, steps)
    return y


def _dequantize(x: torch.Tensor, planes: Planes, format: str, n: int, k: int) -> torch.Tensor:
    """Products with chunks of rows of W in x's dtype."""
    spec, m, device = format_named(format), len(x), x.device
    rows, columns = spec.padded(n, k)
    codes, books = planes["codes"], planes["codebooks"].view(torch.uint32).view(-1, 4)
    codes = codes.view(torch.uint16) if format == "aqlm_1x16" else codes.view(torch.uint32)
    codes, unit = codes.flatten(2, 3) if format == "gptvq2" else codes, spec.row_multiple
    scales = planes["scales"] if "scales" in planes else _ones(1, device)
    padded = pad(x, (0, columns - k)) if columns > k else x
    blocks = min(max(1, CHUNK_BYTES // (2 * columns * unit)), rows // unit)
    w = torch.empty(blocks * unit, columns, dtype=x.dtype, device=device)
    kernel = kernel_of(device.index, "dequantize", format, dtype_name(x.dtype))
    ctas = dispatch.running_ctas(device, FLAT_CTAS if format == "aqlm_1x16" else 1)
    y = torch.empty(m, rows, dtype=x.dtype, device=device)
    for at in range(0, rows // unit, blocks):
        count = min(blocks, rows // unit - at)
        part = w[: count * unit]
        kernel(codes, books, scales, part, at, count, ctas)
        torch.mm(padded, part.T, out=y[:, at * unit : (at + count) * unit])
    return torch.where(x.isfinite().all(1, keepdim=True), y[:, :n], torch.nan)
