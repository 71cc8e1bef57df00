"""A matrix of codebook weights, and x W^T over it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lowbit_attn.linear.formats import NAMES, Planes, WeightFormat, format_named
from lowbit_attn.precision import full_precision

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PATHS = KERNEL, DEQUANTIZE, REFERENCE = "kernel", "dequantize", "reference"
# By device type: (x [m, k], planes, format, n, k, path or "") -> y [m, n], or None where the reference serves a call.
# linear_kernels.py adds "cuda", so that this file needs to know of no kernel.
PRODUCTS: dict[str, Callable] = {}


@dataclass(frozen=True)
class VQWeight:
    """Weights W [n, k] of y = x W^T in one of ``NAMES``'s formats.

    n, k: rows (outputs) and columns (inputs), any sizes of 1 or more: padding is inside the planes.
    planes: the tensors of ``format_named(format).shapes(n, k)``, on one device, in the order that kernels read.
        Kernels read them while the one before in the stream ends: who writes them on the device waits before a call.
    Raises ValueError for planes that do not fit.
    """

    format: str
    n: int
    k: int
    planes: Planes = field(repr=False)

    def __post_init__(self):
        if min(self.n, self.k) < 1:
            raise ValueError(f"shape: got {self.n} x {self.k}, supported: 1 or more rows and columns")
        expected = self.spec.shapes(self.n, self.k)
        if set(self.planes) != set(expected):
            raise ValueError(f"planes: got {', '.join(sorted(self.planes))}, supported by {self.format}: "
                             f"{', '.join(sorted(expected))}")
        for name, (shape, dtype) in expected.items():
            plane = self.planes[name]
            if tuple(plane.shape) != shape or plane.dtype != dtype:
                raise ValueError(f"{name}: got {plane.dtype} {list(plane.shape)}, supported by {self.format} of "
                                 f"{self.n} x {self.k}: {dtype} {list(shape)}")
            if plane.device != self.planes["codes"].device:
                raise ValueError(f"{name}: got a tensor on {plane.device}, supported: the device of the codes, "
                                 f"{self.planes['codes'].device}")

    @property
    def spec(self) -> WeightFormat:
        return format_named(self.format)

    @property
    def shape(self) -> tuple[int, int]:
        return self.n, self.k

    @property
    def device(self) -> torch.device:
        return self.planes["codes"].device

    @property
    def nbytes(self) -> int:
        """Bytes of all planes, padding included."""
        return sum(plane.nbytes for plane in self.planes.values())

    @property
    def bits_per_weight(self) -> float:
        """Bits of all planes, codebooks, scales and padding included, divided by n k."""
        return 8 * self.nbytes / (self.n * self.k)

    def to(self, device) -> "VQWeight":
        """This weight on another device."""
        return VQWeight(self.format, self.n, self.k, {name: plane.to(device) for name, plane in self.planes.items()})

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """W [n, k], decoded in fp32 and rounded to ``dtype``."""
        with full_precision(self.device.type):
            return self.spec.decode(self.planes, self.n, self.k).to(dtype)


def linear(x: torch.Tensor, w: VQWeight, out: torch.Tensor | None = None, path: str | None = None) -> torch.Tensor:
    """y = x W^T: x [..., k], y [..., n] of x's dtype (fp16, bf16 or fp32), accumulated in fp32 or exactly.

    A row of x that holds a NaN or an infinity gives a row of NaN, in every format. out: receives y; its shape, dtype
    and device must be y's. path: "kernel" multiplies packed codes (a CUDA device, up to 64 rows of x), "dequantize"
    has chunks of W in 16 bits (a CUDA device), "reference" is torch in fp32, anywhere; None: the first that serves
    the call. Raises ValueError for what does not fit, NotImplementedError, with the reasons, for a path that does not
    serve the call. Gradients reach x alone.
    """
    check_path(path, x.device)
    check_input(x, w.k, w.device)
    y = torch.ops.lowbit_attn.vq_linear(x, [w.planes[name] for name in w.spec.shapes(w.n, w.k)], w.format, w.n, w.k,
                                        path or "")
    if out is None:
        return y
    if out.shape != y.shape or out.dtype != y.dtype or out.device != y.device:
        raise ValueError(f"out: got {out.dtype} {list(out.shape)} on {out.device}, supported: {y.dtype} "
                         f"{list(y.shape)} on {y.device}")
    return out.copy_(y)


def check_path(path: str | None, device: torch.device) -> None:
    """NotImplementedError for a path that no call on this device takes, ValueError for an unknown one."""
    if path not in (None, *PATHS):
        raise ValueError(f"path: got {path!r}, supported: {', '.join(PATHS)}")
    if path not in (None, REFERENCE) and device.type not in PRODUCTS:
        raise NotImplementedError(f"path: got {path!r}, supported on {device.type}: {REFERENCE!r} (torch)")


def check_input(x: torch.Tensor, k: int, device: torch.device) -> None:
    """ValueError unless x can be multiplied by weights with k columns on this device."""
    if x.dim() < 1 or x.shape[-1] != k:
        raise ValueError(f"x: got shape {list(x.shape)}, supported: [..., {k}]")
    if x.dtype not in DTYPES:
        raise ValueError(f"x: got {x.dtype}, supported: float16, bfloat16, float32")
    if x.device != device:
        raise ValueError(f"x: got a tensor on {x.device}, supported: the weights' device, {device}")


def _vq_linear(x: torch.Tensor, planes: list[torch.Tensor], format: str, n: int, k: int, path: str) -> torch.Tensor:
    spec = format_named(format)
    by_name = dict(zip(spec.shapes(n, k), planes, strict=True))
    rows = x.reshape(-1, k)
    y = PRODUCTS[x.device.type](rows, by_name, format, n, k, path) if x.device.type in PRODUCTS else None
    if y is None:
        rows = rows.float()
        rows = torch.where(rows.isfinite().all(1, keepdim=True), rows, torch.nan)
        with full_precision(x.device.type):
            y = spec.multiply(rows, by_name, n, k).to(x.dtype)
    return y.reshape(*x.shape[:-1], n)


def _keep_planes(ctx, inputs, output) -> None:
    ctx.planes, ctx.shape = inputs[1], inputs[2:5]


def _gradient(ctx, grad: torch.Tensor):
    format, n, k = ctx.shape
    spec = format_named(format)
    with full_precision(grad.device.type):
        w = spec.decode(dict(zip(spec.shapes(n, k), ctx.planes, strict=True)), n, k)
        return (grad.float() @ w).to(grad.dtype), [None] * len(ctx.planes), None, None, None, None


_LIBRARY = torch.library.Library("lowbit_attn", "FRAGMENT")
_LIBRARY.define("vq_linear(Tensor x, Tensor[] planes, str format, int n, int k, str path) -> Tensor",
                tags=torch.Tag.pt2_compliant_tag)
_LIBRARY.impl("vq_linear", _vq_linear, "CompositeExplicitAutograd")
torch.library.register_fake("lowbit_attn::vq_linear",
                            lambda x, planes, format, n, k, path: x.new_empty(*x.shape[:-1], n), lib=_LIBRARY)
torch.library.register_autograd("lowbit_attn::vq_linear", _gradient, setup_context=_keep_planes, lib=_LIBRARY)

__all__ = ["NAMES", "VQWeight", "linear"]
