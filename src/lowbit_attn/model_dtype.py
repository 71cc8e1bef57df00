"""The dtype in which a transformers model was published: of a folder, and of a model that was loaded from one.

A model is computed and stored in this dtype. Whether its weights would fit a narrower one says nothing of its
activations: those of models that were trained in bfloat16 reach beyond the 65,504 of float16.
"""

import json
from collections import Counter
from pathlib import Path

import torch

KEYS = ("dtype", "torch_dtype")  # in a config.json, of newer and of older versions of transformers
SUPPORTED = (torch.float16, torch.bfloat16, torch.float32)
IN_FILES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}  # in the header of safetensors


def of_folder(folder: Path) -> torch.dtype | None:
    """The dtype of the model in a folder: by its config.json, else of most of its weights; None where neither says."""
    if (named := _named(folder)) is not None:
        return named
    sizes: Counter[torch.dtype] = Counter()
    for dtype, elements in _stored(folder).values():
        sizes[dtype] += elements
    return sizes.most_common(1)[0][0] if sizes else None


def of_model(model) -> torch.dtype:
    """The dtype of the folder that a model was loaded from, whatever it was cast to; else of most of its parameters."""
    folder = folder_of(model)
    found = of_folder(folder) if folder else None
    if found is not None:
        return found
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.dtype in SUPPORTED:
            sizes[parameter.dtype] += parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else torch.float32


def folder_of(model) -> Path | None:
    """The folder that a model was loaded from, if it is there: the user's, or the one in the local hub cache."""
    name = getattr(model.config, "_name_or_path", "")
    if not name or not isinstance(name, str):
        return None
    if Path(name).is_dir():
        return Path(name)
    from transformers.utils import cached_file

    try:
        found = cached_file(name, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False,
                            _raise_exceptions_for_connection_errors=False)
    except (OSError, ValueError):
        return None
    return Path(found).parent if found else None


def exceptions(model, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Tensors of a model that are wider than ``dtype``, by name: published so, or kept so by transformers."""
    folder = folder_of(model)
    found = {name: wide for name, (wide, _) in (_stored(folder) if folder else {}).items()
             if wide.itemsize > dtype.itemsize}
    if folder is not None and dtype is not torch.float32 and len(found) * 2 > len(_stored(folder)):
        found = {}  # a file that is wider as a whole than its configuration says: transformers reads it as that says
    kept = {*(getattr(model, "_keep_in_fp32_modules", None) or ()),
            *(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
    return found | {name: torch.float32 for name in model.state_dict()
                    if any(f".{part}." in f".{name}." for part in kept)}


def _named(folder: Path) -> torch.dtype | None:
    """What a config.json says of the model, or of the language model inside it."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    inner = [config.get(name) for name in ("text_config", "llm_config", "language_config", "thinker_config")]
    for one in (config, *inner):
        for key in KEYS if isinstance(one, dict) else ():
            found = getattr(torch, str(one.get(key)).removeprefix("torch."), None)
            if found in SUPPORTED:
                return found
    return None


def _stored(folder: Path) -> dict[str, tuple[torch.dtype, int]]:
    """(dtype, elements) of each 16-bit or 32-bit floating point tensor in a folder's safetensors files, by name."""
    from safetensors import SafetensorError, safe_open

    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():
                    part = opened.get_slice(name)
                    if part.get_dtype() in IN_FILES:
                        found[name] = IN_FILES[part.get_dtype()], _elements(part.get_shape())
        except (OSError, SafetensorError):
            continue
    return found


def _elements(shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
