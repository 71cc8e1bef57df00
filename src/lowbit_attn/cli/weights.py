"""How many bytes of weights a model's folder holds: what a GPU must hold and read beside the cache."""

import json
from pathlib import Path

INDEX = "model.safetensors.index.json"
KINDS = ("model*.safetensors", "*.safetensors", "pytorch_model*.bin", "*.gguf")  # the first that is there counts
LEAST = 4096  # bytes: a smaller file is no model, but for example what git keeps in place of a large one


def nbytes(folder: Path) -> int | None:
    """Bytes of the weights in a folder as they are stored; None where it has none, or only a part of them."""
    indexed = _indexed(folder)
    if indexed is not None:
        return indexed
    for kind in KINDS:
        if sizes := [file.stat().st_size for file in folder.glob(kind) if file.is_file()]:
            return sum(sizes) if min(sizes) >= LEAST and (kind != "*.gguf" or len(sizes) == 1) else None
    return None


def _indexed(folder: Path) -> int | None:
    """Bytes of all weights by the index of their files; None without one."""
    try:
        total = json.loads((folder / INDEX).read_bytes())["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return total if type(total) is int and total > 0 else None
