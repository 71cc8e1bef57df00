"""Walking through a transformers model layer by layer: second moments of every linear layer's inputs.

The hidden states of a calibration text are kept between decoder layers, so one layer at a time is worked on: its
inputs are those that the quantized layers before it give.
"""

from collections.abc import Iterator

import torch
from torch import nn

from lowbit_attn.errors import TextError

SEQUENCE = 512  # tokens read together
MIN_TOKENS = 2048


def sequences(tokens: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` tokens of int64 [n] as [sequences, 512]; TextError for fewer tokens than MIN_TOKENS."""
    if count < MIN_TOKENS:
        raise TextError(f"tokens: got {count}, supported: {MIN_TOKENS} or more for calibration")
    if tokens.dim() != 1 or len(tokens) < MIN_TOKENS:
        raise TextError(f"text: got {tokens.numel()} tokens, supported: {MIN_TOKENS} or more for calibration")
    rows = min(count, len(tokens)) // SEQUENCE
    return tokens[: rows * SEQUENCE].reshape(rows, SEQUENCE)


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """(name, list) of a causal language model's decoder layers; ValueError for a model without such a list."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and count:
            return name, module
    raise ValueError(f"model: got {type(model).__name__} without a list of {count} decoder layers, supported: causal "
                     "language models of transformers")


def linears(layer: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers inside a decoder layer, by their names in it; ValueError if there is none."""
    found = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    if not found:
        raise ValueError(f"model: got a {type(layer).__name__} without nn.Linear, supported: decoder layers whose "
                         "weights are not quantized yet")
    return found


class Walk:
    """Hidden states of a text at one decoder layer after the other.

    tokens: int64 [sequences, length]. ``moments`` gives the layer's second moments, ``advance`` runs it as it is then.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, tokens: torch.Tensor, batch: int = 4):
        self.layers = decoder_layers(model)[1]
        self.batch = batch
        caught: list[tuple[torch.Tensor, dict]] = []

        def catch(module, args, kwargs):
            hidden = args[0] if args else kwargs["hidden_states"]
            caught.append((hidden, {name: value for name, value in kwargs.items() if name != "hidden_states"}))

        hooks = [layer.register_forward_pre_hook(catch, with_kwargs=True) for layer in self.layers]
        try:
            model(tokens[:1], use_cache=False)  # one sequence through all: what each layer is called with
            self.arguments = [arguments for _, arguments in caught]
            for hook in hooks[1:]:
                hook.remove()
            caught.clear()
            stop = self.layers[0].register_forward_pre_hook(_stop)
            hooks.append(stop)
            for rows in tokens.split(batch):
                try:
                    model(rows, use_cache=False)
                except _Stop:
                    pass
            self.hidden = torch.cat([hidden for hidden, _ in caught])
        finally:
            for hook in hooks:
                hook.remove()

    def _run(self, index: int) -> Iterator[torch.Tensor]:
        """Outputs of a layer, batch by batch."""
        for rows in self.hidden.split(self.batch):
            out = self.layers[index](rows, **_repeated(self.arguments[index], len(rows)))
            yield out[0] if isinstance(out, tuple) else out

    @torch.no_grad()
    def moments(self, index: int) -> dict[str, torch.Tensor]:
        """E[x x^T], fp32 [k, k], of the inputs of each linear layer in a decoder layer, by name.

        Layers that read the same tensor (queries, keys and values) share one tensor. ValueError for one without input.
        """
        sums, owner, hooks, kept = {}, {}, [], []
        seen: dict[int, str] = {}

        def add(name):
            def hook(module, args):
                x = args[0].detach()
                leader = owner.setdefault(name, seen.setdefault(id(args[0]), name))
                if leader == name:
                    x = x.reshape(-1, x.shape[-1]).float()
                    total = sums.setdefault(name, [x.new_zeros(x.shape[1], x.shape[1]), 0])
                    total[0].addmm_(x.T, x)
                    total[1] += len(x)
                kept.append(args[0])  # so that no other tensor gets its id in this pass
            return hook

        for name, module in linears(self.layers[index]).items():
            hooks.append(module.register_forward_pre_hook(add(name)))
        try:
            for _ in self._run(index):
                kept.clear()
                seen.clear()
        finally:
            for hook in hooks:
                hook.remove()
        if missing := set(linears(self.layers[index])) - set(owner):
            raise ValueError(f"model: layer {index}: {', '.join(sorted(missing))} read nothing of the text, supported: "
                             "layers whose linear layers all run for every token")
        means = {leader: total / count for leader, (total, count) in sums.items()}
        return {name: means[leader] for name, leader in owner.items()}

    @torch.no_grad()
    def advance(self, index: int) -> None:
        """Replace the hidden states by a layer's outputs."""
        self.hidden = torch.cat(list(self._run(index)))


class _Stop(Exception):
    """Ends a pass before its first layer."""


def _stop(module, args):
    raise _Stop


def _repeated(arguments: dict, rows: int) -> dict:
    """A layer's keyword arguments, caught with one sequence, for several of the same length."""
    def fit(value):
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[0] == 1:
            return value.expand(rows, *value.shape[1:])
        return tuple(map(fit, value)) if isinstance(value, tuple) else value

    return {name: fit(value) for name, value in arguments.items()}
