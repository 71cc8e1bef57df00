"""Hashes of a quantized model's folder: in config.json, of what decides how its weights are read, and of the weights.

``quantization_config`` names each quantized module with the sha256 of its planes and header ("modules"), the sha256 of
all other tensors ("rest"), and the sha256 of these entries themselves ("hash"). Models that were written before have a
list of names in "modules" and no hashes; they are still read, and checked for shapes, dtypes and finite values.

transformers may save a model again with other dtypes of what is not quantized: then "rest" is left out.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from lowbit_attn import tensor_file
from lowbit_attn.errors import VersionError, WeightFileError
from lowbit_attn.linear.formats import NAMES, VERSION
from lowbit_attn.linear.module import VQLinear

HEX = frozenset("0123456789abcdef")


def digest_of(planes: Mapping[str, torch.Tensor]) -> str:
    """sha256, in hex, of a module's planes and header; a bias is not among them."""
    return tensor_file.digest({name: x for name, x in planes.items() if name != "bias"}, {})


def rest_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """sha256, in hex, of the tensors that belong to no quantized module's planes."""
    return tensor_file.digest(dict(tensors), {})


def sealed(format: str, version: int, modules: dict[str, str], rest: str | None) -> dict:
    """The entries of ``quantization_config`` with the hash over them."""
    entries = {"format": format, "version": version, "modules": modules, "rest": rest}
    return entries | {"hash": hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()}


def check_entries(format, version, modules, rest, found) -> None:
    """VersionError or WeightFileError unless the entries of a configuration are what ``sealed`` or an older version
    of it wrote; found: their hash."""
    if type(version) is not int or version != VERSION:
        raise VersionError(f"weights: got layout version {version!r:.40}, supported: {VERSION}; quantize the model "
                           "again")
    if not isinstance(format, str) or format not in NAMES:
        raise WeightFileError(f"format: got {format!r:.60}, supported: {', '.join(NAMES)}")
    is_old = isinstance(modules, list)
    if not isinstance(modules, list | dict) or not all(isinstance(name, str) and name for name in modules):
        raise WeightFileError(f"modules: got {modules!r:.60}, supported: names of linear layers")
    if is_old:
        if rest is not None or found is not None:
            raise WeightFileError("modules: got a list beside hashes, supported: names with their hashes; config.json "
                                  "was changed after it was written")
        return
    hashes = [*modules.values(), found, *([] if rest is None else [rest])]
    if not all(isinstance(text, str) and len(text) == 64 and set(text) <= HEX for text in hashes):
        raise WeightFileError("modules: got entries without hashes, supported: a sha256 of each module, of the rest "
                              "and of the entries; config.json was changed after it was written")
    if sealed(format, version, modules, rest)["hash"] != found:
        raise WeightFileError("quantization_config: was changed after it was written: its entries do not have the hash "
                              "that it names; take the folder's own config.json")


def check_files(files: Iterable[str], layers: Mapping[str, VQLinear], hashes: Mapping[str, str], rest: str | None,
                ) -> bool:
    """Check a model's files before they are loaded; whether the hashes of modules were among what was checked.

    layers: the quantized modules by name, on any device, "meta" included; hashes: of their planes, empty of older
    models. WeightFileError names what is damaged, VersionError a header of another version, format or shape.
    """
    tensors = {}
    for path in map(Path, files):
        if path.suffix == ".safetensors":
            tensors |= _read(path)
    known = {name: tuple(layer.plane_names) + ("header",) for name, layer in layers.items()}
    if not any(f"{name}.codes" in tensors for name in known):
        return False  # a checkpoint whose names transformers changes: the modules are checked when they are loaded
    for name, planes in known.items():
        layer, mine = layers[name], {}
        for plane in planes:
            x, like = tensors.pop(f"{name}.{plane}", None), getattr(layer, plane)
            if x is None:
                raise WeightFileError(f"weights: {name}.{plane} is in no file, supported: all planes of a module")
            if plane == "header":
                layer.check_header(x)
            if x.shape != like.shape or x.dtype != like.dtype:
                raise WeightFileError(f"weights: {name}.{plane}: got {x.dtype} {list(x.shape)}, supported by "
                                      f"{layer.format}: {like.dtype} {list(like.shape)}")
            mine[plane] = x
        check_planes(name, mine, hashes.get(name))
    if rest is not None and rest_digest(tensors) != rest:
        raise WeightFileError("weights: tensors that are not quantized were changed after they were written; copy the "
                              "model again, or quantize it again")
    return bool(hashes)


def check_planes(name: str, planes: Mapping[str, torch.Tensor], wanted: str | None) -> None:
    """WeightFileError for planes of another hash, or with a NaN or an infinity; wanted None: of an older model."""
    if wanted is not None and digest_of(planes) != wanted:
        raise WeightFileError(f"weights: {name} was changed after it was written; copy the model again, or quantize it "
                              "again")
    for plane, x in planes.items():
        if x.is_floating_point() and not bool(x.isfinite().all()):
            raise WeightFileError(f"weights: {name}.{plane}: got a NaN or an infinity, supported: finite values")


def _read(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, ValueError, KeyError, AttributeError, TypeError, RuntimeError, OSError) as problem:
        raise WeightFileError(f"weights: {str(path)!r} is no whole safetensors file: {problem}") from None
