"""K, V and query moments of every layer of a transformers model, as its caches would hold them.

Keys are taken after their rotary embedding, at the attention function, so that whatever the model does to them before
(norms, biases, scaling of long contexts) is in them. How they turn with position is read from the model's rotary
module and then tested on the model itself: a layer whose keys turn otherwise is refused, one whose keys do not turn
(NoPE) is found.
"""

import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lowbit_attn.layout import PAGE_TOKENS
from lowbit_attn.precision import on_own_defaults

NAMES = {"sdpa": "lowbit-capture-sdpa", "eager": "lowbit-capture-eager"}  # of attention functions that record
PAGES = 16  # of a sequence: 2,048 tokens after the sinks
PROBED_TOKENS, PROBED_OFFSET = 16, 37


@dataclass
class LayerSample:
    """What one layer stored of a text, on the CPU.

    keys, values: [pages, num_heads_kv, 128, head_dim] in 16 bit, keys after their rotary embedding. q_moment: fp32
    [num_heads_kv, head_dim, head_dim], mean of q q^T over the queries that read a KV head. scaling: factor of q k.
    inv_freq: fp32 [head_dim / 2], radians a position by which channels d and d + head_dim / 2 turn; 0: they do not.
    token_weights: fp32 [pages, num_heads_kv, 128], positive, how much each token's errors count; None: all alike.
    """

    keys: torch.Tensor
    values: torch.Tensor
    q_moment: torch.Tensor
    scaling: float
    inv_freq: torch.Tensor
    token_weights: torch.Tensor | None = None


@dataclass
class Sample:
    """What all layers stored of a text, in whole pages. first: int64 [pages], position of each page's first token."""

    layers: list[LayerSample]
    first: torch.Tensor
    max_positions: int

    @property
    def pages(self) -> int:
        return len(self.first)

    @property
    def tokens(self) -> int:
        return self.pages * PAGE_TOKENS


def captured(model, ids: torch.Tensor, sinks: int = 32, on_tokens: Callable[[int], None] = lambda n: None) -> Sample:
    """Let a model read ids int64 [tokens] in sequences of its own and keep what its layers would store.

    model: a causal language model of transformers in eval mode, on a CPU or GPU. Sequences have ``sinks`` tokens, which
    are dropped (they stay in 16 bit in a cache and would take the codebooks over), and up to 2,048 more, fewer where
    the model's context is shorter; what fills no page of 128 tokens is dropped too. A first token that the tokenizer
    gave the text (BOS) stands at the start of each. Raises NotImplementedError for a model whose keys do not turn as
    its rotary embedding says, or whose layers differ in shape.
    """
    limit = context_of(model.config)
    pages = min(PAGES, (limit - sinks) // PAGE_TOKENS)
    if pages < 1:
        raise NotImplementedError(f"model: its context of {limit} tokens has no page of {PAGE_TOKENS} after {sinks} "
                                  "sinks, supported: longer ones")
    _check_layers(model)
    frequencies = _frequencies(model)
    recorder = _Recorder(sinks)
    first = []
    with _recorded(model, recorder):
        for sequence in _sequences(ids, sinks, pages):
            _read(model, sequence)
            first += range(sinks, len(sequence) - PAGE_TOKENS + 1, PAGE_TOKENS)
            on_tokens(len(sequence))
    return Sample(recorder.layers(frequencies), torch.tensor(first, device="cpu"), limit)


def _check_layers(model) -> None:
    """Raise NotImplementedError, before a text is read, for a model whose layers do not all keep K and V of one shape
    for themselves."""
    from lowbit_attn import model_layers

    try:
        found = model_layers.of_model(model)
    except ValueError as error:
        raise NotImplementedError(f"model: {error}, supported: models whose layers all keep K and V") from error
    others = len(found.kinds) - len(found.layers)
    if others or any(kind.has_state for kind in found.kinds):
        raise NotImplementedError(f"model: {others or 'some'} of {len(found.kinds)} layers keep something else than K "
                                  "and V of their own (states, or another layer's), supported: models whose layers all "
                                  "keep K and V alone")
    shapes = sorted({(layer.num_heads_kv, layer.head_dim, layer.value_dim) for layer in found.layers})
    if len(shapes) > 1:
        raise NotImplementedError("model: its layers differ in KV heads or head_dim ("
                                  + "; ".join(f"{heads} of {dim}" for heads, dim, _ in shapes)
                                  + "), supported: one shape")


def context_of(config) -> int:
    """Positions that a model was made for."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(found, int):
        raise NotImplementedError("model: its config has no max_position_embeddings, supported: models with one")
    return found


def turned(x: torch.Tensor, inv_freq: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """x [..., tokens, head_dim] in fp32, each token turned on by its position; negative positions turn it back.

    inv_freq: [head_dim / 2]; positions: any shape that broadcasts against x's [..., tokens].
    """
    angles = positions.double()[..., None].to(inv_freq.device) * inv_freq.double()
    cos, sin = angles.cos().float(), angles.sin().float()
    low, high = x.float().chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def _sequences(ids: torch.Tensor, sinks: int, pages: int):
    """The text in sequences of whole pages after their sinks; ValueError if it does not fill one."""
    ids, has_start, start = ids.reshape(-1), True, 0
    while len(ids) - start >= sinks + PAGE_TOKENS:
        whole = min(pages, (len(ids) - start - sinks) // PAGE_TOKENS)
        sequence = ids[start : start + sinks + whole * PAGE_TOKENS].clone()
        if start and has_start:
            sequence[0] = ids[0]
        start += len(sequence)
        yield sequence
    if not start:
        raise ValueError(f"ids: got {len(ids)} tokens, supported: {sinks + PAGE_TOKENS} or more")


def _read(model, sequence: torch.Tensor, offset: int = 0) -> None:
    ids = sequence.reshape(1, -1).to(model.device)
    positions = torch.arange(offset, offset + ids.shape[1], device=ids.device)[None]
    with torch.inference_mode():
        model.base_model(ids, position_ids=positions, use_cache=False)


class _Recorder:
    """Sums and tensors by layer, filled by the attention function."""

    def __init__(self, sinks: int):
        self.sinks, self.found = sinks, {}

    @on_own_defaults
    def record(self, module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> None:
        """Take a sequence's q [1, num_heads, tokens, head_dim] and K, V [1, num_heads_kv, tokens, head_dim]."""
        if key.shape != value.shape:
            raise NotImplementedError(f"model: layer {module.layer_idx} has values of {list(value.shape)} beside keys "
                                      f"of {list(key.shape)}, supported: K and V of one shape")
        keys, values, moments, counts = self.found.setdefault(module.layer_idx, ([], [], [], []))
        stored = torch.float16 if key.dtype == torch.float32 else key.dtype
        for kept, x in ((keys, key), (values, value)):
            pages = x[0, :, self.sinks :].unflatten(1, (-1, PAGE_TOKENS)).transpose(0, 1)
            kept.append(pages.to(stored).cpu())
        q = query[0, :, self.sinks :].float().unflatten(0, (key.shape[1], -1)).flatten(1, 2)
        moments.append((q.mT @ q).cpu())
        counts.append(q.shape[1])
        self.scaling = query.shape[-1] ** -0.5 if scaling is None else scaling

    def layers(self, frequencies: list[torch.Tensor]) -> list[LayerSample]:
        if sorted(self.found) != list(range(len(frequencies))):
            raise NotImplementedError(f"model: {len(self.found)} of {len(frequencies)} layers came to the attention "
                                      "function, supported: models whose layers all do")
        out = []
        for i, inv_freq in enumerate(frequencies):
            keys, values, moments, counts = self.found.pop(i)
            out.append(LayerSample(torch.cat(keys), torch.cat(values), sum(moments) / sum(counts), self.scaling,
                                   inv_freq))
            if not (out[-1].keys.isfinite().all() and out[-1].values.isfinite().all()):
                raise ValueError(f"model: layer {i} stored NaN or infinities while it read the text, supported: finite "
                                 "keys and values; try another dtype of the model")
        if len({layer.keys.shape for layer in out}) > 1:
            raise NotImplementedError("model: its layers differ in KV heads or head_dim, supported: one shape")
        return out


_active: list = []


def _sdpa(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """transformers' attention function that records and attends by torch's kernels."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    _active[-1].record(module, query, key, value, scaling)
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def _eager(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """transformers' attention function that records and attends as the model's own code does."""
    _active[-1].record(module, query, key, value, scaling)
    forward = sys.modules[type(module).__module__].eager_attention_forward
    return forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def _needs_eager(model) -> bool:
    """Whether torch's kernels leave out something of the model: capped logits, learned sinks."""
    return bool(getattr(model.config.get_text_config(), "attn_logit_softcapping", None)) or not model._supports_sdpa


@contextmanager
def _recorded(model, recorder):
    """Within, the model's attention tells the recorder; afterwards the model attends as it did before."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

    for kind, function, mask in (("sdpa", _sdpa, sdpa_mask), ("eager", _eager, eager_mask)):
        AttentionInterface.register(NAMES[kind], function)
        AttentionMaskInterface.register(NAMES[kind], mask)
    before = model.config._attn_implementation
    _active.append(recorder)
    try:
        model.set_attn_implementation(NAMES["eager" if _needs_eager(model) else "sdpa"])
        yield
    finally:
        _active.pop()
        model.set_attn_implementation(before)


def _frequencies(model) -> list[torch.Tensor]:
    """inv_freq fp32 [head_dim / 2] by layer, as the model's keys were seen to turn with position."""
    probes = []
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (PROBED_TOKENS,), generator=torch.Generator().manual_seed(0), device="cpu")
    for offset in (0, PROBED_OFFSET):
        recorder = _ProbeRecorder()
        with _recorded(model, recorder):
            _read(model, ids, offset)
        probes.append(recorder.keys)
    blocks = _blocks(model)
    if any(len(keys) != len(blocks) for keys in probes):
        raise NotImplementedError(f"model: {len(probes[0])} of {len(blocks)} layers came to the attention function, "
                                  "supported: models whose layers all do")
    found, offset = [], torch.tensor(PROBED_OFFSET, device="cpu")
    for i, (before, after) in enumerate(zip(*probes, strict=True)):
        choices = [*_stated(model, blocks[i], i, before.shape[-1]), before.new_zeros(before.shape[-1] // 2)]
        gaps = [((turned(before, freq, offset) - after).norm() / after.norm()).item() for freq in choices]
        best = min(range(len(gaps)), key=gaps.__getitem__)
        if not gaps[best] < (1e-3 if model.dtype == torch.float32 else 5e-2):
            raise NotImplementedError(f"model: keys of layer {i} do not turn with position as its rotary embedding "
                                      f"says (relative difference {min(gaps):.2g}), supported: rotary embeddings of "
                                      "the whole head whose frequencies do not depend on the length, and none")
        found.append(choices[best])
    return found


class _ProbeRecorder:
    def __init__(self):
        self.keys: list[torch.Tensor] = []

    def record(self, module, query, key, value, scaling) -> None:
        self.keys.append(key[0].float().cpu())


def _blocks(model) -> tuple[str, ...]:
    """Names of a model's attention modules, by layer."""
    from lowbit_attn import model_layers

    return model_layers.of_model(model).blocks


def _stated(model, block: str, layer: int, head_dim: int) -> list[torch.Tensor]:
    """What the rotary module of an attention module, if it has one, says of its layer's frequencies."""
    from lowbit_attn import model_layers

    rotary = model_layers.rotary_module(model, block)
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    names = ["inv_freq"] + ([f"{kinds[layer]}_inv_freq"] if kinds else [])
    found = [getattr(rotary, name, None) for name in names]
    return [x.detach().float().cpu() for x in found if isinstance(x, torch.Tensor) and x.shape == (head_dim // 2,)]
