"""What a caller may have in force around calls of the package, none of which may follow it."""

import contextlib

import torch


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
