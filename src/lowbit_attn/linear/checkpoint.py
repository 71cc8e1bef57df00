"""Quantizing a whole transformers model into a folder, a decoder layer at a time, so that a broken run goes on.

While it runs, the folder holds what ``run.py`` keeps there; at the end ``config.json``, ``model.safetensors``, the
tokenizer and no more. ``lowbit_attn.linear.hf`` makes transformers load it.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from lowbit_attn import model_dtype
from lowbit_attn.atomic_file import replacing, write_text
from lowbit_attn.errors import FolderError
from lowbit_attn.linear import targets
from lowbit_attn.linear.calibration import Walk, decoder_layers, sequences
from lowbit_attn.linear.formats import VERSION, format_named
from lowbit_attn.linear.module import VQLinear
from lowbit_attn.linear.quantizer import quantize_together
from lowbit_attn.linear.run import Run, begun, check_contents, identity
from lowbit_attn.linear.sealed import digest_of, rest_digest, sealed
from lowbit_attn.linear.weight import VQWeight

METHOD = "lowbit_vq"  # quant_method in config.json


def quantize_model(model: nn.Module, tokenizer, tokens: torch.Tensor, format: str, folder: Path, count: int = 8192,
                   seed: int = 0, on_layer: Callable[[int, int, str], None] = lambda done, total, what: None,
                   dtype: torch.dtype | None = None) -> targets.Summary | None:
    """Write a model with codebook weights into ``folder``; goes on where an earlier equal call was broken off.

    model: a causal language model of transformers on a CPU or GPU, whose weights are overwritten on the way; its
    decoder layers' linear layers are quantized, all else is written in ``dtype``. tokenizer: saved beside it, or None.
    tokens: int64 [n], the calibration text, of which ``count`` are read. on_layer is told layers done, layers in all,
    and a line of text. dtype: None for that of the folder that the model was loaded from, whatever it was cast to, or,
    of a model from no folder, its own. Returns what became of the decoder layers, with the weights that stay in 16 bit;
    None where an earlier call had written the whole model. Raises TextError for a short text, FolderError for a folder
    that holds another run or model, cannot be made, or in which another process works, ValueError as ``quantize`` and
    for a model whose layers cannot be called one by one, in both cases before anything is written.
    """
    format_named(format)
    rows = sequences(tokens, count)
    layers = decoder_layers(model)[1]
    targets.check(layers)
    dtype = model_dtype.of_model(model) if dtype is None else dtype
    check_contents(folder)
    mine = identity(model.eval(), rows, format, seed)
    walk = Walk(model, rows.to(next(model.parameters()).device))
    with begun(folder, mine) as run:
        if run.is_finished:
            return None
        walked, all_made = run.read_hidden(walk), []
        for index, layer in enumerate(layers):
            if run.has_layer(index):
                made, what = _modules_of(run, index, layer, format), "read"
            else:
                made, what = _quantize_layer(index, layer, walk.moments(index), format, seed), "quantized"
                run.write_layer(index, {f"{name}.{plane}": tensor for name, module in made.items()
                                        for plane, tensor in module.state_dict().items() if plane != "bias"})
            on_layer(index + 1, len(layers), f"layer {index}: {what}{targets.remark(layer, made)}")
            _put_back(layer, made)
            all_made.append(made)
            if index >= walked:
                walk.advance(index)
                run.write_hidden(walk.hidden, index + 1)
        _finish(model, tokenizer, format, run, dtype)
        return targets.summary(layers, all_made, dtype)


def _modules_of(run: Run, index: int, layer: nn.Module, format: str) -> dict[str, VQLinear]:
    """The modules of a decoder layer that a run has kept, by name; FolderError where they do not fit it."""
    state, made = run.read_layer(index), {}
    try:
        for name in sorted({key.rpartition(".")[0] for key in state}):
            module = layer.get_submodule(name)
            made[name] = VQLinear(module.in_features, module.out_features, format, device=module.weight.device)
            made[name].load_state_dict({plane: state[f"{name}.{plane}"] for plane in made[name].state_dict()})
    except (AttributeError, KeyError, RuntimeError, ValueError) as problem:
        raise FolderError(f"out: layer {index} of the run in {str(run.folder)!r} does not fit the model: {problem}; "
                          "remove the folder and run again") from None
    return made


def _quantize_layer(index: int, layer: nn.Module, moments: dict[str, torch.Tensor], format: str,
                    seed: int) -> dict[str, VQLinear]:
    """Every linear layer of a decoder layer that read inputs as codes, those that read the same ones together.

    On a CPU one thread a group, the largest first: their many small steps gain nothing from threads of their own.
    """
    modules = {name: module for name, module in targets.linears(layer).items() if name in moments}
    groups: dict[int, list[str]] = {}
    for name in modules:
        groups.setdefault(id(moments[name]), []).append(name)
    ordered = sorted(groups.values(), key=lambda names: -sum(modules[name].weight.numel() for name in names))

    def work(names: list[str]) -> list[VQWeight]:
        try:
            return quantize_together([modules[name].weight for name in names], format, moments[names[0]], seed)
        except ValueError as error:
            raise ValueError(f"model: layer {index}: {', '.join(names)}: {error}") from error

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


@torch.no_grad()
def _put_back(layer: nn.Module, made: dict[str, VQLinear]) -> None:
    """Give a layer's linear layers the weights that their codes decode to."""
    for name, module in made.items():
        layer.get_submodule(name).weight.copy_(module.vq_weight.dequantize())


def _finish(model: nn.Module, tokenizer, format: str, run: Run, dtype: torch.dtype) -> None:
    """Put the layers' files and all other weights together, and remove what only a run needs."""
    prefix, layers = decoder_layers(model)
    state, modules = {}, {}
    for index in range(len(layers)):
        planes = run.read_layer(index)
        state |= {f"{prefix}.{index}.{name}": tensor for name, tensor in planes.items()}
        for name in dict.fromkeys(key.rpartition(".")[0] for key in planes):
            mine = {key.removeprefix(f"{name}."): x for key, x in planes.items() if key.startswith(f"{name}.")}
            modules[f"{prefix}.{index}.{name}"] = digest_of(mine)
    taken = {f"{name}.weight" for name in modules}
    tied = set(model.all_tied_weights_keys if model.config.get_text_config().tie_word_embeddings else ())
    others = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()
              if name not in taken and name not in tied}
    wider = model_dtype.exceptions(model, dtype)
    others = {name: (tensor.to(wider.get(name, dtype)) if tensor.is_floating_point() else tensor).contiguous().clone()
              for name, tensor in others.items()}
    with replacing(run.folder / "model.safetensors") as part:
        save_file(state | others, part, metadata={"format": "pt"})
    if tokenizer is not None:
        tokenizer.save_pretrained(run.folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(run.folder)
    config = _with_dtype(model.config.to_diff_dict(), str(dtype).removeprefix("torch.")) | {
        "architectures": [type(model).__name__],
        "quantization_config": {"quant_method": METHOD} | sealed(format, VERSION, modules, rest_digest(others))}
    write_text(run.folder / "config.json", json.dumps(config, indent=2, default=str) + "\n")
    run.finish()


def _with_dtype(config: dict, dtype: str) -> dict:
    """A configuration with this dtype, and so those inside it that name one."""
    inner = {name: _with_dtype(value, dtype) for name, value in config.items()
             if isinstance(value, dict) and "dtype" in value}
    return config | inner | {"dtype": dtype}
