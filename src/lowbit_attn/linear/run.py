"""The folder of a run that quantizes a model: who works in it, what it has made so far, and whether it may go on.

While a run lasts, the folder holds ``progress.json`` (what the run is), ``run.lock``, ``layer-00000.safetensors`` and
on, and ``hidden.safetensors``. Each file names the run, and has a hash of all its contents: nothing of another run, and
nothing damaged, gets into a model.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from lowbit_attn import tensor_file
from lowbit_attn.atomic_file import is_leftover, locked, remove_leftovers, write_text
from lowbit_attn.errors import FolderError
from lowbit_attn.linear.calibration import Walk
from lowbit_attn.linear.formats import VERSION

PROGRESS, LOCK, HIDDEN, LAYER = "progress.json", "run.lock", "hidden.safetensors", "layer-{:05}.safetensors"
RUN = 2  # of what a run keeps: raised when its files change their meaning
FINISHED = "finished"
# entries of a configuration that change neither the weights nor the text of the finished model's own configuration
UNRELATED = ("transformers_version", "dtype", "torch_dtype")


PART = tensor_file.Kind("lowbit_attn unfinished quantization", "out", "an unfinished run", FolderError)


def identity(model: nn.Module, rows: torch.Tensor, format: str, seed: int) -> dict:
    """What must be equal for a run to go on: the settings, the text, the model's configuration and all its weights."""
    digest = hashlib.sha256(rows.cpu().numpy().tobytes())
    for config in (model.config, getattr(model, "generation_config", None)):
        entries = {} if config is None else config.to_dict()
        kept = {name: value for name, value in entries.items() if name[:1] != "_" and name not in UNRELATED}
        digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
    for name, x in sorted((*model.named_parameters(), *model.named_buffers())):
        digest.update(f"{name} {tuple(x.shape)} {x.dtype} ".encode())
        digest.update(tensor_file.bytes_of(x))
    return {"run": RUN, "format": format, "version": VERSION, "tokens": rows.numel(), "seed": seed,
            "digest": digest.hexdigest()}


@contextlib.contextmanager
def begun(folder: Path, identity: dict) -> Iterator["Run"]:
    """Begin a run in a folder that is empty, or go on with the same one, as the only process that works there.

    FolderError where the folder holds something else, cannot be made, or belongs to another run or a running process.
    """
    folder, stack = Path(folder), contextlib.ExitStack()
    with stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            check_contents(folder)
            is_mine = stack.enter_context(locked(folder / LOCK))
        except (OSError, ValueError) as error:  # ValueError: a name that no folder can have
            if isinstance(error, FolderError):
                raise
            raise FolderError(f"out: got {str(folder)!r}, supported: a folder that can be made and written: "
                              f"{getattr(error, 'strerror', None) or error}") from error
        if not is_mine:
            raise FolderError(f"out: another process writes into {str(folder)!r}, supported: one at a time; wait for "
                              "it, or take another folder")
        check_contents(folder)  # another run may have ended in between
        remove_leftovers(folder, young_seconds=0)
        yield Run(folder, identity)


def check_contents(folder: Path) -> None:
    """FolderError for a folder with something else than a run in it; a path that is no folder is looked at later."""
    folder = Path(folder)
    if folder.is_dir() and not (folder / PROGRESS).exists() and any(
            path.name != LOCK and not is_leftover(path) for path in folder.iterdir()):
        raise FolderError(f"out: {str(folder)!r} is not empty, supported: an empty folder, or an unfinished run's")


class Run:
    """A run in its folder, which no other process uses meanwhile; ``is_finished``: it only had to be tidied up."""

    def __init__(self, folder: Path, identity: dict):
        self.folder, self.identity = folder, identity
        self.key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        found, self.is_finished = self._progress(), False
        if found is None:
            self._write_progress()
        elif found.get(FINISHED) is True:
            self._tidy()
            self.is_finished = True

    def _progress(self) -> dict | None:
        """What the folder says of its run, None of an empty folder; FolderError for another run."""
        path = self.folder / PROGRESS
        if not path.exists():
            return None
        try:
            found = tensor_file.value_of(path.read_text(encoding="utf-8"), PROGRESS)
        except (ValueError, OSError) as problem:
            raise FolderError(f"out: {str(path)!r} cannot be read: {problem}; remove the folder and run again"
                              ) from None
        if not isinstance(found, dict):
            raise FolderError(f"out: {str(path)!r} says nothing of a run; remove the folder and run again")
        if found.get("run") != RUN:
            raise FolderError(f"out: {str(self.folder)!r} holds an unfinished run of another version of the package, "
                              "supported: an empty folder, or a run of this version")
        if different := [name for name, value in self.identity.items() if found.get(name) != value]:
            names = ("model or text" if name == "digest" else f"{name} ({found.get(name)})" for name in different)
            raise FolderError(f"out: {str(self.folder)!r} holds an unfinished run with another {', '.join(names)}; "
                              "supported: an empty folder, or the same run")
        return found

    def _write_progress(self, **more) -> None:
        write_text(self.folder / PROGRESS, json.dumps(self.identity | more, indent=1) + "\n")

    def _path(self, index: int) -> Path:
        return self.folder / LAYER.format(index)

    def has_layer(self, index: int) -> bool:
        return self._path(index).exists()

    def write_layer(self, index: int, tensors: dict[str, torch.Tensor]) -> None:
        self._write(self._path(index), tensors, index)

    def read_layer(self, index: int) -> dict[str, torch.Tensor]:
        """The tensors of a layer; FolderError for a file that is damaged or of another run."""
        about, tensors = self._read(self._path(index))
        if about.get("at") != str(index):
            raise FolderError(f"out: {str(self._path(index))!r} is of layer {about.get('at')}; remove it and run again")
        return tensors

    def write_hidden(self, hidden: torch.Tensor, layers: int) -> None:
        """Keep the hidden states behind so many layers."""
        self._write(self.folder / HIDDEN, {"hidden": hidden}, layers)

    def read_hidden(self, walk: Walk) -> int:
        """Give a walk the hidden states that a broken-off run kept; how many layers they have come through."""
        path = self.folder / HIDDEN
        if not path.exists():
            return 0
        about, tensors = self._read(path)
        layers = tensor_file.whole_number(about.get("at", ""), "layers", 0, len(walk.layers))
        if not all(self.has_layer(index) for index in range(layers)):
            return 0
        hidden = tensors.get("hidden")
        if hidden is None or hidden.shape != walk.hidden.shape or hidden.dtype != walk.hidden.dtype:
            raise FolderError(f"out: {str(path)!r} holds no hidden states of this model; remove it and run again")
        walk.hidden = hidden.to(walk.hidden.device)
        return layers

    def finish(self) -> None:
        """Remove what only a run needs; a process that is killed meanwhile leaves the rest to the next call."""
        self._write_progress(**{FINISHED: True})
        self._tidy()

    def _tidy(self) -> None:
        """Remove the run's files, ``progress.json`` last: without it, what is left would be somebody else's."""
        layers = self.folder.glob(LAYER.replace("{:05}", "*"))
        for path in (*layers, *(self.folder / name for name in (HIDDEN, LOCK, PROGRESS))):
            path.unlink(missing_ok=True)

    def _write(self, path: Path, tensors: dict[str, torch.Tensor], at: int) -> None:
        tensor_file.write(path, PART, tensors, {"run": self.key, "at": str(at)})

    def _read(self, path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
        try:
            about, tensors = tensor_file.read(path, PART)
        except FolderError as error:
            raise FolderError(f"{error}; remove this file and run again") from None
        if about.get("run") != self.key:
            raise FolderError(f"out: {str(path)!r} is of another run; remove it and run again")
        return about, tensors
