"""safetensors files of one kind: written whole or not at all, read with errors that say what is wrong.

The text in a file's header names its kind and its version. The entry "hash" is a sha256 over all other entries and over
the name, dtype, shape and bytes of every tensor, so that nothing that decides how bytes are read can change unseen.
Files of version 1, written before there was such a hash, are still read; each kind checks what they hold. No file has
version 2.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from lowbit_attn.atomic_file import replacing

VERSION, UNHASHED = "3", "1"  # what is written, and what is read without a hash of everything
HASH = "hash"


@dataclass(frozen=True)
class Kind:
    """One kind of files: its name in the header, the argument that names such a file, what makes one, and the
    exception for a file that is none."""

    name: str
    argument: str
    maker: str
    error: type[ValueError]


def write(path: str | os.PathLike, kind: Kind, tensors: dict[str, torch.Tensor], about: dict[str, str]) -> None:
    """Write named tensors and text about them; whatever raises, an older file of the name stays as it was."""
    from safetensors.torch import save_file

    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    about = about | {"kind": kind.name, "version": VERSION}
    with replacing(path) as part:
        save_file(tensors, part, about | {HASH: digest(tensors, about)})


def read(path: str | os.PathLike, kind: Kind) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """(text, tensors on the CPU) of a file of a kind, its hash checked unless it is of version 1.

    FileNotFoundError, or the kind's error for what is no such file.
    """
    from safetensors import SafetensorError, safe_open

    what = f"{kind.argument}: {str(path)!r}"
    try:
        is_file = Path(path).is_file()
    except ValueError:  # a character that no name of a file can have
        is_file = False
    if not is_file:
        raise FileNotFoundError(f"{kind.argument}: no file {str(path)!r}; {kind.maker} makes one")
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            if about.get("kind") != kind.name:
                raise kind.error(f"{what} holds something else, supported: files of {kind.maker}")
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # of the mapped file
    except kind.error:
        raise
    # torch has no dtype for some of safetensors', or no such shape
    except (SafetensorError, ValueError, KeyError, AttributeError, TypeError, RuntimeError) as problem:
        raise kind.error(f"{what} is no whole safetensors file: {problem}") from None
    _check_hash(what, kind, about, tensors)
    return about, tensors


def _check_hash(what: str, kind: Kind, about: dict[str, str], tensors: dict[str, torch.Tensor]) -> None:
    version = about.get("version")
    if version == UNHASHED:
        return
    if version != VERSION:
        raise kind.error(f"{what} is of version {version}, supported: {UNHASHED}, {VERSION}; make it again with this "
                         "version of the package")
    if about.get(HASH) != digest(tensors, {name: text for name, text in about.items() if name != HASH}):
        raise kind.error(f"{what} was changed after it was written: its contents do not have the hash that it names")


def digest(tensors: dict[str, torch.Tensor], about: dict[str, str]) -> str:
    """sha256, in hex, of text and tensors."""
    found = hashlib.sha256(json.dumps(about, sort_keys=True).encode("utf-8", "surrogatepass"))
    for name, x in sorted(tensors.items()):
        found.update(json.dumps([name, str(x.dtype), list(x.shape)]).encode())
        found.update(bytes_of(x))
    return found.hexdigest()


def bytes_of(x: torch.Tensor):
    """The bytes of a tensor, as what holds bytes."""
    if not x.numel():
        return b""
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def text_of(value: object, what: str) -> str:
    """A value as JSON; ValueError for what JSON cannot hold."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as problem:
        raise ValueError(f"{what}: {problem}, supported: what JSON can hold") from None


def value_of(text: str, what: str) -> object:
    """The value of JSON text; ValueError for text that is none or nests too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{what}: got text that is no JSON ({problem}), supported: what was written") from None


def whole_number(text: str, what: str, low: int, high: int) -> int:
    """The number that digits stand for; ValueError for other text and for numbers beyond the limits."""
    if not (text.isascii() and text.isdigit() and len(text) < 20 and low <= int(text) <= high):
        raise ValueError(f"{what}: got {text[:40]!r}, supported: {low} to {high}")
    return int(text)
