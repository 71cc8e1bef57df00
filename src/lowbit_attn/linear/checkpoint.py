"""Quantizing a whole transformers model into a folder, a decoder layer at a time, so that a broken run goes on.

While it runs, the folder holds ``progress.json``, ``layer-00000.safetensors`` and on, and the hidden states; at the end
``config.json``, ``model.safetensors``, the tokenizer and no more. ``lowbit_attn.linear.hf`` makes transformers load it.
"""

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from lowbit_attn import model_dtype
from lowbit_attn.linear import targets
from lowbit_attn.linear.calibration import Walk, decoder_layers, sequences
from lowbit_attn.linear.formats import VERSION, format_named
from lowbit_attn.linear.module import VQLinear
from lowbit_attn.linear.quantizer import quantize_together
from lowbit_attn.linear.weight import VQWeight

METHOD = "lowbit_vq"  # quant_method in config.json
PROGRESS, HIDDEN, LAYER = "progress.json", "hidden.safetensors", "layer-{:05}.safetensors"


class FolderError(ValueError):
    """An output folder with something else in it."""


def quantize_model(model: nn.Module, tokenizer, tokens: torch.Tensor, format: str, folder: Path, count: int = 8192,
                   seed: int = 0, on_layer: Callable[[int, int, str], None] = lambda done, total, what: None,
                   dtype: torch.dtype | None = None) -> targets.Summary:
    """Write a model with codebook weights into ``folder``; goes on where an earlier equal call was broken off.

    model: a causal language model of transformers on a CPU or GPU, whose weights are overwritten on the way; its
    decoder layers' linear layers are quantized, all else is written in ``dtype``. tokenizer: saved beside it, or None.
    tokens: int64 [n], the calibration text, of which ``count`` are read. on_layer is told layers done, layers in all,
    and a line of text. dtype: None for that of the folder that the model was loaded from, whatever it was cast to, or,
    of a model from no folder, its own. Returns what became of the decoder layers, with the weights that stay in 16 bit.
    Raises TextError for a short text, FolderError for a folder that holds another run or model, ValueError as
    ``quantize`` and for a model whose layers cannot be called one by one, in both cases before anything is written.
    """
    format_named(format)
    rows = sequences(tokens, count)
    layers = decoder_layers(model)[1]
    targets.check(layers)
    dtype = model_dtype.of_model(model) if dtype is None else dtype
    identity = _identity(model.eval(), rows, format, seed)
    _look(folder, identity)
    walk = Walk(model, rows.to(next(model.parameters()).device))
    _claim(folder, identity)
    walked, all_made = _read_hidden(folder, walk), []
    for index, layer in enumerate(layers):
        path = folder / LAYER.format(index)
        if path.exists():
            made = _read_layer(path, layer, format)
            what = "read"
        else:
            made = _quantize_layer(layer, walk.moments(index), format, seed)
            _write(path, {f"{name}.{plane}": tensor for name, module in made.items()
                          for plane, tensor in module.state_dict().items() if plane != "bias"})
            what = "quantized"
        on_layer(index + 1, len(layers), f"layer {index}: {what}{targets.remark(layer, made)}")
        _put_back(layer, made)
        all_made.append(made)
        if index >= walked:
            walk.advance(index)
            _write(folder / HIDDEN, {"hidden": walk.hidden, "layers": torch.tensor(index + 1, device="cpu")})
    _finish(model, tokenizer, format, folder, dtype)
    return targets.summary(layers, all_made, dtype)


def _quantize_layer(layer: nn.Module, moments: dict[str, torch.Tensor], format: str, seed: int) -> dict[str, VQLinear]:
    """Every linear layer of a decoder layer that read inputs as codes, those that read the same ones together.

    On a CPU one thread a group, the largest first: their many small steps gain nothing from threads of their own.
    """
    modules = {name: module for name, module in targets.linears(layer).items() if name in moments}
    groups: dict[int, list[str]] = {}
    for name in modules:
        groups.setdefault(id(moments[name]), []).append(name)
    ordered = sorted(groups.values(), key=lambda names: -sum(modules[name].weight.numel() for name in names))

    def work(names: list[str]) -> list[VQWeight]:
        return quantize_together([modules[name].weight for name in names], format, moments[names[0]], seed)

    threads = torch.get_num_threads() if next(layer.parameters()).device.type == "cpu" else 1
    if threads == 1:
        weights = list(map(work, ordered))
    else:
        torch.set_num_threads(1)
        try:
            with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                weights = list(pool.map(work, ordered))
        finally:
            torch.set_num_threads(threads)
    made = {name: weight for names, group in zip(ordered, weights) for name, weight in zip(names, group)}
    return {name: VQLinear.from_weight(made[name]) for name in modules}


def _read_hidden(folder: Path, walk: Walk) -> int:
    """Give a walk the hidden states that a broken-off run kept; how many layers they have come through."""
    if not (folder / HIDDEN).exists():
        return 0
    with safe_open(folder / HIDDEN, "pt") as file:
        layers = int(file.get_tensor("layers"))
        if not all((folder / LAYER.format(index)).exists() for index in range(layers)):
            return 0
        walk.hidden = file.get_tensor("hidden").to(walk.hidden)
        return layers


@torch.no_grad()
def _put_back(layer: nn.Module, made: dict[str, VQLinear]) -> None:
    """Give a layer's linear layers the weights that their codes decode to."""
    for name, module in made.items():
        layer.get_submodule(name).weight.copy_(module.vq_weight.dequantize())


def _identity(model: nn.Module, rows: torch.Tensor, format: str, seed: int) -> dict:
    """What must be equal for a run to go on: the settings, the text and the model's own weights."""
    digest = hashlib.sha256(rows.cpu().numpy().tobytes())
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.double().sum().item()!r}".encode())
    return {"format": format, "version": VERSION, "tokens": rows.numel(), "seed": seed, "digest": digest.hexdigest()}


def _look(folder: Path, identity: dict) -> None:
    """FolderError unless a run can begin in a folder, or go on with the same one there."""
    progress = folder / PROGRESS
    if progress.exists():
        found = json.loads(progress.read_text())
        if different := [name for name, value in identity.items() if found.get(name) != value]:
            raise FolderError(f"out: {str(folder)!r} holds an unfinished run with another "
                              + ", ".join("model or text" if name == "digest" else f"{name} ({found.get(name)})"
                                          for name in different)
                              + "; supported: an empty folder, or the same run")
    elif folder.exists() and any(folder.iterdir()):
        raise FolderError(f"out: {str(folder)!r} is not empty, supported: an empty folder, or an unfinished run's")


def _claim(folder: Path, identity: dict) -> None:
    """Begin a run in a folder that is empty, or go on with the same one."""
    folder.mkdir(parents=True, exist_ok=True)
    _look(folder, identity)
    if not (folder / PROGRESS).exists():
        _write_text(folder / PROGRESS, json.dumps(identity, indent=1))


def _read_layer(path: Path, layer: nn.Module, format: str) -> dict[str, VQLinear]:
    """The modules that ``path`` holds, by name; VersionError for another layout."""
    with safe_open(path, "pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}
    made = {}
    for name in sorted({key.rpartition(".")[0] for key in state}):
        module = layer.get_submodule(name)
        made[name] = VQLinear(module.in_features, module.out_features, format, device=module.weight.device)
        made[name].load_state_dict({plane: state[f"{name}.{plane}"] for plane in made[name].state_dict()})
    return made


def _finish(model: nn.Module, tokenizer, format: str, folder: Path, dtype: torch.dtype) -> None:
    """Put the layers' files and all other weights together, and remove what only a run needs."""
    prefix, layers = decoder_layers(model)
    state, names = {}, []
    for index in range(len(layers)):
        with safe_open(folder / LAYER.format(index), "pt") as file:
            planes = {f"{prefix}.{index}.{name}": file.get_tensor(name) for name in file.keys()}
        state |= planes
        names += dict.fromkeys(name.rpartition(".")[0] for name in planes)
    taken = {f"{name}.weight" for name in names}
    tied = set(model.all_tied_weights_keys if model.config.get_text_config().tie_word_embeddings else ())
    others = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()
              if name not in taken and name not in tied}
    wider = model_dtype.exceptions(model, dtype)
    state |= {name: (tensor.to(wider.get(name, dtype)) if tensor.is_floating_point() else tensor).contiguous().clone()
              for name, tensor in others.items()}
    _write(folder / "model.safetensors", state)
    config = _with_dtype(model.config.to_diff_dict(), str(dtype).removeprefix("torch.")) | {
        "architectures": [type(model).__name__],
        "quantization_config": {"quant_method": METHOD, "format": format, "version": VERSION, "modules": names}}
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    _write_text(folder / "config.json", json.dumps(config, indent=2, default=str))
    for path in (*folder.glob("layer-*.safetensors"), folder / HIDDEN, folder / PROGRESS):
        path.unlink()


def _with_dtype(config: dict, dtype: str) -> dict:
    """A configuration with this dtype, and so those inside it that name one."""
    inner = {name: _with_dtype(value, dtype) for name, value in config.items()
             if isinstance(value, dict) and "dtype" in value}
    return config | inner | {"dtype": dtype}


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A safetensors file that is there whole or not at all."""
    part = path.with_suffix(".part")
    part.touch()
    mode = part.stat().st_mode & 0o777  # as the user's other files: safetensors' own are for the owner alone
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, part, metadata={"format": "pt"})
    part.chmod(mode)
    os.replace(part, path)


def _write_text(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text + "\n")
    os.replace(part, path)
