"""Argument checks: each raises naming the argument, what it got and what is supported."""

import operator
from collections.abc import Sequence

import numpy as np
import torch

INT64 = range(-(1 << 63), 1 << 63)


def one_of(name: str, value, supported: Sequence) -> None:
    if value not in supported:
        raise ValueError(f"{name}: got {value}, supported: {', '.join(map(str, supported))}")


def integer(name: str, value) -> int:
    """The value as an int; TypeError for what is none (floats and truth values too), ValueError beyond 64 bits."""
    try:
        if isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool:
            raise TypeError
        number = operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # of tensors with other than one element, too
        raise TypeError(f"{name}: got {value!r}, supported: an integer") from None
    if number not in INT64:
        raise ValueError(f"{name}: got {number}, supported: integers of 64 bits")
    return number


def integers(name: str, values: Sequence[int] | np.ndarray | torch.Tensor) -> list[int]:
    """Values as a list of ints; TypeError unless they are a sequence, or an array or tensor [n], of integers."""
    if is_sequence(values):
        listed = values.tolist() if isinstance(values, np.ndarray | torch.Tensor) else values
        return [value if type(value) is int and value in INT64 else integer(name, value) for value in listed]
    got = f"shape {list(values.shape)}" if isinstance(values, np.ndarray | torch.Tensor) else repr(values)
    raise TypeError(f"{name}: got {got}, supported: a sequence of integers")


def is_sequence(values) -> bool:
    """Whether values come one after the other: no text, no set, no array of other than one axis."""
    if isinstance(values, np.ndarray | torch.Tensor):
        return values.ndim == 1
    return isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray)


def is_truth(name: str, value, *others) -> None:
    """TypeError unless the value is True, False or one of the others."""
    if not isinstance(value, bool) and not any(value is other for other in others):
        raise TypeError(f"{name}: got {value!r}, supported: {', '.join(map(str, (True, False, *others)))}")


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
