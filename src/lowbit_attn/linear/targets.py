"""Which weights of a decoder layer become codes, and which stay in 16 bit.

Codes replace ``nn.Linear`` modules. Other weights stay: routers and gates, whose few rows decide where tokens go;
linear modules that are not called, since their weights are read in another way; and parameters that belong to no
linear module, such as the experts of a mixture in one three-dimensional tensor.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

ROUTER = re.compile(r"(^|[._])(gate|router|gating)(\.(wg|layer|proj|linear|classifier|weight))?$")
ROUTER_SHARE = 4  # a router has at most as many rows as a quarter of its columns
LEAST_ROWS = 4  # fewer rows are a gate, whose bits do not count


@dataclass(frozen=True)
class Summary:
    """What became of a model's decoder layers.

    weights: their elements; nbytes: of their codes, scales, codebooks and 16-bit tensors; left: elements of weights
    that stay in 16 bit, by name in a layer, from the most.
    """

    weights: int
    nbytes: int
    left: dict[str, int]

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.weights

    @property
    def share_left(self) -> float:
        """Share of the weights that stays in 16 bit."""
        return sum(self.left.values()) / self.weights


def linears(layer: nn.Module) -> dict[str, nn.Linear]:
    """The linear modules inside a decoder layer that may become codes, by their names in it."""
    return {name: module for name, module in layer.named_modules()
            if isinstance(module, nn.Linear) and not _is_gate(name, module)}


def _is_gate(name: str, module: nn.Linear) -> bool:
    rows, columns = module.out_features, module.in_features
    return rows < LEAST_ROWS or bool(ROUTER.search(name)) and rows * ROUTER_SHARE <= columns


def check(layers: Iterable[nn.Module]) -> None:
    """ValueError unless the layers have linear modules to quantize, whose weights are numbers and are not shared."""
    found: dict[int, str] = {}
    layers = list(layers)
    for index, layer in enumerate(layers):
        for name, module in linears(layer).items():
            weight = module.weight
            if not weight.is_floating_point() or weight.dim() != 2 or weight.is_meta:
                raise ValueError(f"model: got {name} of layer {index}, a {type(module).__name__} of {weight.dtype} on "
                                 f"{weight.device}, supported: floating point weights in memory, not quantized yet")
            if not weight.isfinite().all():
                raise ValueError(f"model: layer {index}: {name}: w: got a NaN or an infinity, supported: finite "
                                 "weights")
            first = found.setdefault(id(weight), f"layer {index}")
            if first != f"layer {index}":
                raise ValueError(f"model: layer {index} shares {name} with {first}, supported: layers with weights of "
                                 "their own")
    if not found:
        raise ValueError(f"model: got a {type(layers[0]).__name__} without nn.Linear, supported: decoder layers whose "
                         "weights are not quantized yet")


def left(layer: nn.Module, made: Iterable[str]) -> dict[str, int]:
    """Elements of a layer's matrices that stay in 16 bit, by name, without the layers of a list; made: the modules
    that became codes."""
    taken = {f"{name}.weight" for name in made}
    found: dict[str, int] = {}
    for name, parameter in layer.named_parameters():
        if parameter.dim() > 1 and name not in taken:
            found[name] = parameter.numel()
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def remark(layer: nn.Module, made: Iterable[str]) -> str:
    """What to say of a layer that keeps more than a hundredth of its matrices in 16 bit, else ""."""
    rest = left(layer, made)
    whole = sum(parameter.numel() for parameter in layer.parameters() if parameter.dim() > 1)
    if sum(rest.values()) * 100 <= whole:
        return ""
    return f"; {named(rest)} stay unquantized, {sum(rest.values()) / whole:.0%} of its weights"


def named(left: dict[str, int], most: int = 3) -> str:
    """The largest weights that are left, by name; members of lists (experts.3.up) as one."""
    names = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in left))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def summary(layers: Iterable[nn.Module], made: list[dict[str, nn.Module]], dtype: torch.dtype) -> Summary:
    """What became of the layers; made: the modules that became codes, by name, of each; dtype: of what stays."""
    weights = nbytes = 0
    rest: dict[str, int] = {}
    for layer, modules in zip(layers, made, strict=True):
        taken = {f"{name}.weight" for name in modules}
        for name, parameter in layer.named_parameters():
            weights += parameter.numel()
            nbytes += 0 if name in taken else parameter.numel() * dtype.itemsize
        nbytes += sum(module.vq_weight.nbytes for module in modules.values())
        for name, count in left(layer, modules).items():
            rest[name] = rest.get(name, 0) + count
    return Summary(weights, nbytes, dict(sorted(rest.items(), key=lambda item: -item[1])))
