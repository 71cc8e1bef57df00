"""Tables that are made once and kept for all callers."""

from collections.abc import Callable
from functools import cache, wraps

import torch

from lowbit_attn.precision import full_precision


def constant(make: Callable) -> Callable:
    """A function whose tensors are made at most once for each arguments, whatever the first caller's default device,
    autocast or inference mode; float tensors in it must name their dtype."""

    @cache
    @wraps(make)
    def kept(*arguments):
        with torch.inference_mode(False), torch.device("cpu"), full_precision("cpu"):
            return make(*arguments)

    return kept
