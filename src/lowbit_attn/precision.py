"""Arithmetic and tensors that do not follow the caller's default device or autocast."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import wraps

import torch

_AS_IT_IS = nullcontext()
_DEVICE_TYPES = ("cpu", "cuda")


def full_precision(device_type: str) -> AbstractContextManager:
    """A context in which operations on a type of device run in the dtypes of their inputs, without autocast."""
    # asked first: entering torch.autocast takes 5 us
    if torch.compiler.is_compiling() or _is_autocast(device_type):
        return torch.autocast(device_type, enabled=False)
    return _AS_IT_IS


def on_own_defaults(function: Callable) -> Callable:
    """Decorator: within the function a tensor whose device is not named is the CPU's, and there is no autocast.

    A caller's ``torch.set_default_device("cuda")``, which serving engines have in force while they make a model, ends
    at the function's door. Floats must still name their dtype: torch's default one is of the process, not of a thread.
    """

    @wraps(function)
    def run(*arguments, **named):
        contexts = _ending_the_callers()
        if not contexts:
            return function(*arguments, **named)
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            return function(*arguments, **named)

    return run


def _ending_the_callers() -> list[AbstractContextManager]:
    """Contexts that end a default device and autocasts; none where the caller has none in force."""
    device = [] if torch.get_default_device().type == "cpu" else [torch.device("cpu")]
    return device + [torch.autocast(kind, enabled=False) for kind in _DEVICE_TYPES if _is_autocast(kind)]


def _is_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
