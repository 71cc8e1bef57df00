"""What a caller may have in force around calls of the package, none of which may follow it."""

import contextlib

import torch

from lowbit_attn.formats import packing, rotation


@contextlib.contextmanager
def default_device():
    torch.set_default_device("meta")  # stands for "cuda": what is made there cannot be read here
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES = {
    "default device": default_device,
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to fp16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "inference mode": torch.inference_mode,
}


def forget() -> None:
    """Drop what earlier calls of the process made for all."""
    for kept in (rotation.hadamard, packing._source, packing._code_source):
        kept.cache_clear()


def lead(cache, k: torch.Tensor, v: torch.Tensor) -> None:
    """Steps of two tokens, 300 to 399, on sequence 0 of three, then every other call that moves tokens or pages."""
    for at in range(300, 400, 2):
        cache.append(k[None, at : at + 2], v[None, at : at + 2])
    cache.flush()
    cache.share(0, 2)
    cache.reserve([1], 200)
    cache.rewind([2, 0], [1, 2])
    cache.free([1])
