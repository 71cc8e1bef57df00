"""Argument checks: each raises naming the argument, what it got and what is supported."""

from collections.abc import Sequence

import torch


def one_of(name: str, value, supported: Sequence) -> None:
    if value not in supported:
        raise ValueError(f"{name}: got {value}, supported: {', '.join(map(str, supported))}")


def check_rank(name: str, x: torch.Tensor, axes: tuple[str | int, ...]) -> torch.Size:
    """Shape of x; TypeError or ValueError unless it is a tensor with one axis for each of ``axes`` (names or sizes)."""
    if isinstance(x, torch.Tensor) and x.dim() == len(axes):
        return x.shape
    wanted = f"[{', '.join(map(str, axes))}]"
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, supported: a torch.Tensor {wanted}")
    raise ValueError(f"{name}: got shape {list(x.shape)}, supported: {wanted}")


def check_tensor(name: str, x: torch.Tensor, shape: tuple[int, ...], dtypes: Sequence[torch.dtype],
                 device: torch.device) -> None:
    """Raise TypeError or ValueError unless x has this shape, one of the dtypes, the device, and a dense last axis."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, supported: a torch.Tensor of shape {list(shape)}")
    if x.shape != tuple(shape):
        raise ValueError(f"{name}: got shape {list(x.shape)}, supported: {list(shape)}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: got {x.dtype}, supported: {', '.join(map(str, dtypes))}")
    if x.device != device and (x.device.type != device.type or device.index is not None):
        raise ValueError(f"{name}: got device {x.device}, supported: {device}")
    if x.stride(-1) != 1 and x.numel() and x.shape[-1] > 1:
        raise ValueError(f"{name}: got strides {x.stride()}, supported: stride 1 on the last axis")
