"""safetensors files of one kind: written whole or not at all, read with errors that say what is wrong."""

import os
from pathlib import Path

import torch


def write(path: str | os.PathLike, tensors: dict[str, torch.Tensor], about: dict[str, str]) -> None:
    """Write named tensors and text about them; whatever raises, an older file of the name stays as it was."""
    from safetensors.torch import save

    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(save({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, about))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read(path: str | os.PathLike, kind: str, what: str, maker: str,
         error: type[ValueError]) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """(text, tensors on the CPU) of a file whose "kind" is this; FileNotFoundError, or ``error`` for what is no such
    file. what: the argument that named it; maker: what makes such files."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"{what}: no file {str(path)!r}; {maker} makes one")
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # of the mapped file
    except SafetensorError as problem:
        raise error(f"{what}: {str(path)!r} is no whole safetensors file: {problem}") from None
    if about.get("kind") != kind:
        raise error(f"{what}: {str(path)!r} holds something else, supported: files of {maker}")
    return about, tensors
