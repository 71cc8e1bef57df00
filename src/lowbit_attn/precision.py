"""Arithmetic that keeps its dtypes whatever the caller's autocast says."""

from contextlib import AbstractContextManager, nullcontext

import torch

_AS_IT_IS = nullcontext()


def full_precision(device_type: str) -> AbstractContextManager:
    """A context in which operations on a type of device run in the dtypes of their inputs, without autocast."""
    # asked first: entering torch.autocast takes 5 us
    if torch.compiler.is_compiling() or _is_autocast(device_type):
        return torch.autocast(device_type, enabled=False)
    return _AS_IT_IS


def _is_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
