"""``torch.nn.Linear`` over codebook weights."""

import torch
from torch import nn

from lowbit_attn.errors import VersionError
from lowbit_attn.linear.formats import NAMES, VERSION, format_named
from lowbit_attn.linear.weight import VQWeight, check_input

HEADER = "header"


class VQLinear(nn.Module):
    """y = x W^T + bias over a VQWeight: the drop-in for ``nn.Linear`` in inference.

    Its buffers are the weight's planes and ``header``, int32 [4]: layout version, place of the format in ``NAMES``, n,
    k. ``state_dict`` can be saved as safetensors; ``load_state_dict`` raises VersionError for a header of another
    version, format or shape. Casts (``half()``, ``to(dtype)``) change the bias alone. In a graph of torch.compile it
    is one operator, ``lowbit_attn::vq_linear``.
    """

    def __init__(self, in_features: int, out_features: int, format: str, bias: bool = False, device=None,
                 dtype: torch.dtype | None = None):
        super().__init__()
        self.in_features, self.out_features, self.format = in_features, out_features, format
        shapes = format_named(format).shapes(out_features, in_features)
        self.plane_names = tuple(shapes)
        for name, (shape, plane_dtype) in shapes.items():
            self.register_buffer(name, torch.zeros(shape, dtype=plane_dtype, device=device))
        self.register_buffer(HEADER, torch.tensor(self._header(), dtype=torch.int32, device=device))
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype, device=device) if bias else None)
        self.header_is_due = False  # to be checked at the first call: it was on no device when the model was loaded

    @classmethod
    def from_weight(cls, weight: VQWeight, bias: torch.Tensor | None = None) -> "VQLinear":
        """A module that holds this weight's planes themselves, and a bias [n]."""
        if bias is not None and tuple(bias.shape) != (weight.n,):
            raise ValueError(f"bias: got shape {list(bias.shape)}, supported: [{weight.n}]")
        made = cls(weight.k, weight.n, weight.format, device="meta")
        for name, plane in weight.planes.items():
            setattr(made, name, plane)
        setattr(made, HEADER, torch.tensor(made._header(), dtype=torch.int32, device=weight.device))
        made.bias = None if bias is None else bias.detach().to(weight.device)
        return made

    @property
    def vq_weight(self) -> VQWeight:
        """The weight whose planes are this module's buffers."""
        return VQWeight(self.format, self.out_features, self.in_features,
                        {name: getattr(self, name) for name in self.plane_names})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.header_is_due:
            self.check_header()
            self.header_is_due = False
        check_input(x, self.in_features, self.header.device)
        planes = [getattr(self, name) for name in self.plane_names]
        y = torch.ops.lowbit_attn.vq_linear(x, planes, self.format, self.out_features, self.in_features, "")
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return (f"in_features={self.in_features}, out_features={self.out_features}, format={self.format}, "
                f"bias={self.bias is not None}")

    def check_header(self, header: torch.Tensor | None = None) -> None:
        """VersionError unless a header, by default this module's own, says what the module is."""
        header, mine = self.header if header is None else header, self._header()
        if header.is_floating_point() or header.is_complex() or header.shape != (len(mine),):
            version = "none" if not header.numel() else f"of a header {header.dtype} {list(header.shape)}"
            raise VersionError(f"weights: got layout version {version}, supported: {VERSION}, in a header int32 "
                               f"[{len(mine)}]; quantize the model again")
        if (got := header.tolist()) == mine:
            return
        if got[0] != VERSION:
            raise VersionError(f"weights: got layout version {got[0]}, supported: {VERSION}; "
                               "quantize the model again")
        name = NAMES[got[1]] if 0 <= got[1] < len(NAMES) else f"format {got[1]}"
        raise VersionError(f"weights: got {name} of {got[2]} x {got[3]}, supported by this module: {self.format} of "
                           f"{self.out_features} x {self.in_features}")

    def _header(self) -> list[int]:
        return [VERSION, NAMES.index(self.format), self.out_features, self.in_features]

    def _apply(self, fn, recurse: bool = True):
        """Move planes as ``fn`` moves them, but keep their dtypes: codebooks in bfloat16 would be other codebooks."""
        before = {name: getattr(self, name) for name in self.plane_names}
        super()._apply(fn, recurse)
        for name, plane in before.items():
            moved = getattr(self, name)
            if moved.dtype != plane.dtype:
                setattr(self, name, plane.to(moved.device))
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        if (header := state_dict.get(prefix + HEADER)) is not None:
            self.check_header(header)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
