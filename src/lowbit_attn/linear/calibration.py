"""Walking through a transformers model layer by layer: second moments of every linear layer's inputs.

The hidden states of a calibration text are kept between decoder layers, so one layer at a time is worked on: its
inputs are those that the quantized layers before it give. A layer is called with what the model itself called it with
for the same sequences. Whether its calls, repeated alone, give what they gave inside the model is tried first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from lowbit_attn.errors import TextError
from lowbit_attn.linear.targets import linears

SEQUENCE = 512  # tokens read together
MIN_TOKENS = 2048
TRIED = 128  # tokens of a sequence that shows whether layers can be called alone
TOLERANCE = 1e-3  # of their outputs: sums of experts come in any order on a GPU


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
    inside = getattr(model, "get_decoder", lambda: None)()  # not the tower that sees pictures, of equally many layers
    parts = {id(module) for module in inside.modules()} if isinstance(inside, nn.Module) else set()
    found = [(name, module) for name, module in model.named_modules()
             if isinstance(module, nn.ModuleList) and len(module) == count and count]
    if found:
        return next((one for one in found if id(one[1]) in parts), found[0])
    raise ValueError(f"model: got {type(model).__name__} without a list of {count} decoder layers, supported: causal "
                     "language models of transformers")


class Call(NamedTuple):
    """What a layer was called with beside its hidden states."""

    args: tuple
    kwargs: dict

    def repeat(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's new hidden states."""
        out = layer(hidden.clone(), *self.args, **self.kwargs)  # some layers write into what they get
        return out[0] if isinstance(out, tuple) else out


class Walk:
    """Hidden states of a text at one decoder layer after the other.

    tokens: int64 [sequences, length]. ``moments`` gives the layer's second moments, ``advance`` runs it as it is then.
    Raises ValueError for a model whose layers, called one by one, do not give what they give inside it.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, tokens: torch.Tensor, batch: int = 4):
        self.layers = decoder_layers(model)[1]
        tried = _tried(model, self.layers, tokens[:2, :TRIED])
        self.batches: list[torch.Tensor] = []
        self.calls: list[list[Call]] = []
        for rows in tokens.split(batch):
            inputs, calls, _ = _pass(model, self.layers, rows, keep=1)
            self.batches.append(inputs[0])
            self.calls.append(calls)
        self.axis = _batch_axis(tried, self.batches[0].shape, len(tokens[:2]), len(tokens[:batch]))

    @property
    def hidden(self) -> torch.Tensor:
        """The hidden states of all sequences."""
        return torch.cat(self.batches, self.axis)

    @hidden.setter
    def hidden(self, states: torch.Tensor) -> None:
        self.batches = list(states.split([one.shape[self.axis] for one in self.batches], self.axis))

    def _run(self, index: int) -> Iterator[torch.Tensor]:
        """Outputs of a layer, batch by batch."""
        for hidden, calls in zip(self.batches, self.calls, strict=True):
            yield calls[index].repeat(self.layers[index], hidden)

    @torch.no_grad()
    def moments(self, index: int) -> dict[str, torch.Tensor]:
        """E[x x^T], fp32 [k, k], of the inputs of each linear module in a decoder layer that is called, by name.

        Modules that read the same tensor (queries, keys and values) share one tensor.
        """
        sums, owner, hooks, kept = {}, {}, [], []
        seen: dict[int, str] = {}

        def add(name):
            def hook(module, args, kwargs):
                given = args[0] if args else kwargs["input"]
                leader = owner.setdefault(name, seen.setdefault(id(given), name))
                if leader == name:
                    x = given.detach()
                    x = x.reshape(-1, x.shape[-1]).float()
                    total = sums.setdefault(name, [x.new_zeros(x.shape[1], x.shape[1]), 0])
                    total[0].addmm_(x.T, x)
                    total[1] += len(x)
                kept.append(given)  # so that no other tensor gets its id in this pass
            return hook

        for name, module in linears(self.layers[index]).items():
            hooks.append(module.register_forward_pre_hook(add(name), with_kwargs=True))
        try:
            for _ in self._run(index):
                kept.clear()
                seen.clear()
        finally:
            for hook in hooks:
                hook.remove()
        means = {leader: total / max(count, 1) for leader, (total, count) in sums.items()}
        return {name: means[leader] for name, leader in owner.items() if sums[leader][1]}

    @torch.no_grad()
    def advance(self, index: int) -> None:
        """Replace the hidden states by a layer's outputs."""
        self.batches = list(self._run(index))


class _Stop(Exception):
    """Ends a pass behind its last layer."""


def _pass(model: nn.Module, layers: nn.ModuleList, rows: torch.Tensor, keep: int,
          stops: bool = True) -> tuple[list[torch.Tensor], list[Call], torch.Tensor]:
    """(inputs of the first ``keep`` layers, each layer's call, the last layer's output) of a pass over the rows.

    stops: whether the pass ends behind the last layer, so that no logits are computed.
    """
    inputs: list[torch.Tensor] = []
    calls: list[Call] = []
    order: list[int] = []
    last: list[torch.Tensor] = []

    def begin(index):
        def hook(module, args, kwargs):
            hidden = args[0] if args else kwargs["hidden_states"]
            rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            order.append(index)
            calls.append(_without_caches(args[1:], rest))
            if index < keep:
                inputs.append(hidden.clone())
        return hook

    def end(module, args, out):
        last.append((out[0] if isinstance(out, tuple) else out).clone())
        if stops:
            raise _Stop

    hooks = [layer.register_forward_pre_hook(begin(i), with_kwargs=True) for i, layer in enumerate(layers)]
    hooks.append(layers[-1].register_forward_hook(end))
    try:
        with _as_refusal(model, "read a text"):
            model(rows, use_cache=False)
    except _Stop:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    if order != list(range(len(layers))):
        raise ValueError(f"model: {type(model).__name__} calls its {len(layers)} layers in the order {order[:8]}..., "
                         "supported: each layer once, one after the other")
    return inputs, calls, last[0]


def _tried(model: nn.Module, layers: nn.ModuleList, rows: torch.Tensor) -> torch.Size:
    """Shape of the hidden states of a few tokens, once each layer, called alone, gave what it gave inside the model."""
    inputs, calls, last = _pass(model, layers, rows, keep=len(layers), stops=False)
    for index, (hidden, call, want) in enumerate(zip(inputs, calls, [*inputs[1:], last], strict=True)):
        with _as_refusal(model, f"run layer {index} alone"):
            call.repeat(layers[index], hidden)  # as for the moments: what a call leaves behind must not matter
            got = call.repeat(layers[index], hidden)
        if got.shape != want.shape or not (got - want).norm() <= TOLERANCE * want.norm():
            raise ValueError(f"model: layer {index} of {type(model).__name__}, called alone with the same arguments, "
                             "gives other hidden states than inside the model; supported: models that hand the hidden "
                             "states from layer to layer")
    return inputs[0].shape


@contextmanager
def _as_refusal(model: nn.Module, what: str):
    """Turn what a model's own code raises into one ValueError."""
    try:
        yield
    except (_Stop, ValueError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"model: {type(model).__name__} cannot {what}: {type(error).__name__}: {reason}; supported: "
                         "causal language models of transformers whose layers can be called one by one") from error


def _without_caches(args: tuple, kwargs: dict) -> Call:
    """A call without caches of K and V, which a repeated one would find filled. Other arguments stay the objects that
    they are: layers that share K and V write them into a dictionary that later layers are called with, too."""
    from transformers.cache_utils import Cache

    def fit(value):
        return None if isinstance(value, Cache) else value

    return Call(tuple(map(fit, args)), {name: fit(value) for name, value in kwargs.items()})


def _batch_axis(tried: torch.Size, shape: torch.Size, few: int, rows: int) -> int:
    """Along which axis the hidden states of several sequences lie."""
    for axis, (one, other) in enumerate(zip(tried, shape)):
        if one == few and other == rows:
            return axis
    raise ValueError(f"model: got hidden states of shape {list(shape)} for {rows} sequences, supported: an axis of "
                     "sequences")
