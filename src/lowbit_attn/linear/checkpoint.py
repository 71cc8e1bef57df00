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

from lowbit_attn.errors import FolderError
from lowbit_attn.linear.calibration import Walk, decoder_layers, linears, sequences
from lowbit_attn.linear.formats import VERSION, format_named
from lowbit_attn.linear.module import VQLinear
from lowbit_attn.linear.quantizer import quantize_together
from lowbit_attn.linear.weight import VQWeight

METHOD = "lowbit_vq"  # quant_method in config.json
PROGRESS, HIDDEN, LAYER = "progress.json", "hidden.safetensors", "layer-{:05}.safetensors"


def quantize_model(model: nn.Module, tokenizer, tokens: torch.Tensor, format: str, folder: Path, count: int = 8192,
                   seed: int = 0, on_layer: Callable[[int, int, str], None] = lambda done, total, what: None) -> None:
    """Write a model with codebook weights into ``folder``; goes on where an earlier equal call was broken off.

    model: a causal language model of transformers on a CPU or GPU, whose weights are overwritten on the way; its
    decoder layers' linear layers are quantized, all else becomes fp16 (bfloat16 where fp16 would overflow). tokenizer:
    saved beside it, or None. tokens: int64 [n], the calibration text, of which ``count`` are read. on_layer is told
    layers done, layers in all, and a line of text. Raises TextError for a short text, FolderError for a folder that
    holds another run or model, ValueError as ``quantize``.
    """
    format_named(format)
    rows = sequences(tokens, count)
    layers = decoder_layers(model)[1]
    for layer in layers:
        linears(layer)
    _claim(folder, _identity(model, rows, format, seed))
    walk = Walk(model, rows.to(next(model.parameters()).device))
    walked = _read_hidden(folder, walk)
    for index, layer in enumerate(layers):
        path = folder / LAYER.format(index)
        if path.exists():
            made = _read_layer(path, layer, format)
            on_layer(index + 1, len(layers), f"layer {index}: read")
        else:
            made = _quantize_layer(layer, walk.moments(index), format, seed)
            _write(path, {f"{name}.{plane}": tensor for name, module in made.items()
                          for plane, tensor in module.state_dict().items() if plane != "bias"})
            on_layer(index + 1, len(layers), f"layer {index}: quantized")
        _put_back(layer, made)
        if index >= walked:
            walk.advance(index)
            _write(folder / HIDDEN, {"hidden": walk.hidden, "layers": torch.tensor(index + 1, device="cpu")})
    _finish(model, tokenizer, format, folder)


def _quantize_layer(layer: nn.Module, moments: dict[str, torch.Tensor], format: str, seed: int) -> dict[str, VQLinear]:
    """Every linear layer of a decoder layer as codes, those that read the same inputs together.

    On a CPU one thread a group, the largest first: their many small steps gain nothing from threads of their own.
    """
    modules = linears(layer)
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
    for name, module in linears(layer).items():
        module.weight.copy_(made[name].vq_weight.dequantize())


def _identity(model: nn.Module, rows: torch.Tensor, format: str, seed: int) -> dict:
    """What must be equal for a run to go on: the settings, the text and the model's own weights."""
    digest = hashlib.sha256(rows.cpu().numpy().tobytes())
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.double().sum().item()!r}".encode())
    return {"format": format, "version": VERSION, "tokens": rows.numel(), "seed": seed, "digest": digest.hexdigest()}


def _claim(folder: Path, identity: dict) -> None:
    """Begin a run in a folder that is empty, or go on with the same one."""
    folder.mkdir(parents=True, exist_ok=True)
    progress = folder / PROGRESS
    if progress.exists():
        found = json.loads(progress.read_text())
        if different := [name for name, value in identity.items() if found.get(name) != value]:
            raise FolderError(f"out: {str(folder)!r} holds an unfinished run with another "
                              + ", ".join("model or text" if name == "digest" else f"{name} ({found.get(name)})"
                                          for name in different)
                              + "; supported: an empty folder, or the same run")
    elif any(folder.iterdir()):
        raise FolderError(f"out: {str(folder)!r} is not empty, supported: an empty folder, or an unfinished run's")
    else:
        _write_text(progress, json.dumps(identity, indent=1))


def _read_layer(path: Path, layer: nn.Module, format: str) -> dict[str, VQLinear]:
    """The modules that ``path`` holds, by name; VersionError for another layout."""
    with safe_open(path, "pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}
    made = {}
    for name, module in linears(layer).items():
        made[name] = VQLinear(module.in_features, module.out_features, format, device=module.weight.device)
        made[name].load_state_dict({plane: state[f"{name}.{plane}"] for plane in made[name].state_dict()})
    return made


def _finish(model: nn.Module, tokenizer, format: str, folder: Path) -> None:
    """Put the layers' files and all other weights together, and remove what only a run needs."""
    prefix, layers = decoder_layers(model)
    state, names = {}, []
    for index, layer in enumerate(layers):
        with safe_open(folder / LAYER.format(index), "pt") as file:
            state |= {f"{prefix}.{index}.{name}": file.get_tensor(name) for name in file.keys()}
        names += [f"{prefix}.{index}.{name}" for name in linears(layer)]
    taken = {f"{name}.weight" for name in names}
    tied = set(model.all_tied_weights_keys if model.config.get_text_config().tie_word_embeddings else ())
    others = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()
              if name not in taken and name not in tied}
    fits = all(not t.is_floating_point() or t.abs().max() <= torch.finfo(torch.half).max for t in others.values()
               if t.numel())
    dtype = torch.float16 if fits else torch.bfloat16
    state |= {name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous().clone()
              for name, tensor in others.items()}
    _write(folder / "model.safetensors", state)
    config = model.config.to_diff_dict() | {
        "architectures": [type(model).__name__], "dtype": str(dtype).removeprefix("torch."),
        "quantization_config": {"quant_method": METHOD, "format": format, "version": VERSION, "modules": names}}
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    _write_text(folder / "config.json", json.dumps(config, indent=2, default=str))
    for path in (*folder.glob("layer-*.safetensors"), folder / HIDDEN, folder / PROGRESS):
        path.unlink()


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
