"""An accuracy simulator: transformers caches that hold what a low-bit format would give back, in plain tensors.

It measures what a cache loses and nothing else: no pages, no memory saved, any attention implementation of
transformers. It differs from ``LowBitCache`` in one thing that a paged cache cannot do: V may leave its 16-bit window
a few tokens at a time (``v_step``), down to one token a step, as in the published simulators of KIVI and Kitty. With
``v_step=128`` it keeps what LowBitCache keeps, token for token, by an independent road.
"""

from functools import partial

import torch
from transformers.cache_utils import Cache, DynamicLayer

from lowbit_attn.checks import integer, is_truth
from lowbit_attn.formats import FORMATS, Format, Kind
from lowbit_attn.formats.contract import Side
from lowbit_attn.layout import PAGE_TOKENS


class SimulatedLayer(DynamicLayer):
    """One layer's K and V [batch, num_heads_kv, tokens, head_dim], old tokens replaced by their dequantized values.

    ``update`` returns all tokens; those of the step itself are in 16 bit, and what their arrival makes due is
    quantized before the next step.
    """

    is_croppable = False

    def __init__(self, format: Format, sinks: int, range_search: bool | None, window_v: int, v_step: int):
        super().__init__()
        self.format, self.sinks, self.range_search = format, sinks, range_search
        self.window_v, self.v_step = window_v, v_step
        self.n_qk = self.n_qv = 0  # quantized tokens of each side, after the sinks

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Bring a step's K and V [batch, num_heads_kv, tokens, head_dim]; returns all of them, in the model's dtype."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.settle()
        model_dtype = key_states.dtype
        stored = torch.float16 if model_dtype == torch.float32 else model_dtype
        return super().update(key_states.to(stored).to(model_dtype), value_states.to(stored).to(model_dtype))

    def settle(self) -> None:
        """Quantize what is due: whole blocks of K beyond its window, whole steps of V beyond its own."""
        length = self.get_seq_length()
        due_k = _due(length, self.sinks, self.format.window_k, PAGE_TOKENS)
        due_v = _due(length, self.sinks, self.window_v, self.v_step)
        self.keys = self._replaced(self.format.k, self.keys, self.n_qk, due_k)
        self.values = self._replaced(self.format.v, self.values, self.n_qv, due_v)
        self.n_qk, self.n_qv = due_k, due_v

    def _replaced(self, side: Side, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """x with tokens start .. stop - 1 after the sinks quantized and back."""
        if stop == start:
            return x
        before, tokens, after = x.split((self.sinks + start, stop - start, x.shape[2] - self.sinks - stop), 2)
        return torch.cat((before, fake_quantized(side, tokens, self.range_search).to(x.dtype), after), 2)

    def reset(self) -> None:
        super().reset()
        self.n_qk = self.n_qv = 0

    @property
    def nbytes(self) -> int:
        """Bytes that a cache would need for the present tokens, were V packed in steps too; metadata included."""
        batch, heads, length, head_dim = self.keys.shape
        record = self.format.record(head_dim)
        packed = self.n_qk * record.v_offset + self.n_qv * (record.nbytes - record.v_offset)
        return batch * heads * (packed // PAGE_TOKENS + (2 * length - self.n_qk - self.n_qv) * 2 * head_dim)


class SimulatedCache(Cache):
    """A transformers Cache of fake-quantized K and V, for measuring quality; use it with "sdpa" or "eager".

    Args:
        format: a name of FORMATS or a Format, except those that weigh channels by queries, which it does not see.
        sinks, range_search: as in LowBitCache.
        window_v: tokens of V in 16 bit at least; None: the format's own.
        v_step: tokens of V that leave the window together, 1 to 128. 1: exactly ``window_v`` tokens of V are in 16 bit
            (Kitty's and KIVI's simulators); 128: up to 127 more (Kitty's engine, ``KVCache``).

    KIVI as published: ``SimulatedCache("k2v2-g32-vg32", range_search=False, window_v=128, v_step=1)``.
    """

    def __init__(self, format: str | Format, *, sinks: int | None = None, range_search: bool | None = None,
                 window_v: int | None = None, v_step: int = 1):
        is_truth("range_search", range_search, None)
        if not isinstance(format, str | Format):
            raise TypeError(f"format: got {format!r}, supported: a Format or a name: {', '.join(FORMATS)}")
        self.format = FORMATS[format] if isinstance(format, str) else format
        sinks = self.format.sinks if sinks is None else sinks
        window_v = self.format.window_v if window_v is None else window_v
        if self.format.k.weighs_queries:
            raise NotImplementedError(f"format: {self.format} weighs channels by queries, supported by LowBitCache")
        if self.format.needs_codebooks:
            raise NotImplementedError(f"format: {self.format} has codebooks, supported by LowBitCache")
        if self.format.v.kind is not Kind.TOKEN or self.format.orders_tokens:
            raise NotImplementedError(f"format: {self.format}, supported: V per token, which can be packed in steps")
        for name, value, low, high in (("sinks", sinks, 0, None), ("window_v", window_v, 0, None),
                                       ("v_step", v_step, 1, PAGE_TOKENS)):
            if integer(name, value) < low or (high is not None and value > high):
                raise ValueError(f"{name}: got {value}, supported: {low} to {high or 'any'}")
        super().__init__(layer_class_to_replicate=partial(SimulatedLayer, self.format, sinks, range_search, window_v,
                                                          v_step))

    @property
    def nbytes(self) -> int:
        """Bytes that the present tokens of all layers would need."""
        return sum(layer.nbytes for layer in self.layers)


def fake_quantized(side: Side, x: torch.Tensor, range_search: bool | None = None) -> torch.Tensor:
    """x [batch, heads, tokens, head_dim] quantized and back, fp32.

    tokens: a multiple of 128 for K per channel; any number for sides whose groups lie within a token.
    """
    batch, heads, tokens, head_dim = x.shape
    search = side.searches_range if range_search is None else range_search
    whole = -(-tokens // PAGE_TOKENS) * PAGE_TOKENS
    if whole != tokens and side.kind is not Kind.TOKEN:
        raise ValueError(f"x: got {tokens} tokens, supported: multiples of {PAGE_TOKENS} for groups of tokens")
    side.check(head_dim)
    pages = torch.nn.functional.pad(x.float(), (0, 0, 0, whole - tokens)).reshape(-1, PAGE_TOKENS, head_dim)
    values = side.dequantize(side.quantize(pages, search), head_dim)
    return values.reshape(batch, heads, whole, head_dim)[:, :, :tokens]


def _due(length: int, sinks: int, window: int, step: int) -> int:
    """Quantized tokens of a side of a sequence of this length."""
    return max(0, length - min(length, sinks) - window) // step * step
