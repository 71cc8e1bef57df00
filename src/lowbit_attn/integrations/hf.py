"""transformers: a Cache whose layers are low-bit KV caches, and the attention function that reads them.

    from lowbit_attn.integrations.hf import LowBitCache

    model = AutoModelForCausalLM.from_pretrained(...)
    model.set_attn_implementation("lowbit")
    model.generate(**inputs, past_key_values=LowBitCache("k4v4"))

``LowBitCache.update`` does not return K and V but a handle, which transformers passes on untouched; the
registered attention function reads the cache through it. In a step the new queries attend to the cache as it
is before the step (packed pages, sinks and the open block) and to the step's own tokens in 16 bit, causally;
then the tokens enter the cache and full blocks are packed. What the function cannot honour raises
NotImplementedError before anything is written.
"""

from functools import partial

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from lowbit_attn.api import decode
from lowbit_attn.cache import DTYPES
from lowbit_attn.formats import FORMATS, Format
from lowbit_attn.integrations.growth import grown, new_cache

NAME = "lowbit"
QUERY_BLOCK = 512  # query rows whose explicit mask exists at once, when a chunk follows cached tokens
FIRST_TOKENS = 1024  # room of a cache of unknown final length; doubled whenever it is full

# Arguments of the models' forward calls that reach the attention function and do not change its result.
HARMLESS = frozenset({"position_ids", "cache_position", "use_cache", "position_embeddings", "output_hidden_states",
                      "return_dict", "logits_to_keep", "num_items_in_batch", "is_causal"})
REASONS = {
    "sliding_window": "sliding-window attention; supported: full causal attention",
    "softcap": "soft-capped logits; supported: plain softmax",
    "s_aux": "attention-sink logits; supported: plain softmax",
    "position_bias": "an additive position bias; supported: plain softmax",
    "output_attentions": "attention weights are never formed; use attn_implementation='eager' to see them",
}


class Handle:
    """Stands for K and V between ``LowBitCache.update`` and the attention function; not a tensor."""

    def __init__(self, layer: "LowBitLayer", k: torch.Tensor, v: torch.Tensor):
        self.layer, self.k, self.v = layer, k, v

    def __getattr__(self, name: str):
        raise NotImplementedError(f"key.{name}: K and V in a LowBitCache are read only by the attention function "
                                  f"{NAME!r}; call model.set_attn_implementation({NAME!r})")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{getattr(func, '__name__', func)}: K and V in a LowBitCache are read only by the "
                                  f"attention function {NAME!r}; call model.set_attn_implementation({NAME!r})")


class LowBitLayer(CacheLayerMixin):
    """One layer's KVCache, created at the first update from the shapes it brings."""

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, format: Format, max_seqlen: int | None = None, dtype: torch.dtype | None = None,
                 path: str | None = None, **options):
        super().__init__()
        self.format, self.max_seqlen, self.kv_dtype, self.options = format, max_seqlen, dtype, options
        self.path = path
        self.kv = None
        self.length = 0
        self.handle = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.format}, {self.length} tokens)"

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for key_states [batch, num_heads_kv, tokens, head_dim]."""
        batch, heads, _, head_dim = key_states.shape
        self.dtype = self.kv_dtype or (key_states.dtype if key_states.dtype in DTYPES else torch.float16)
        self.device, self.batch_size = key_states.device, batch
        tokens = FIRST_TOKENS if self.max_seqlen is None else self.max_seqlen
        weights = {}
        if self.format.k.weighs_queries:
            weights["query_weights"] = torch.zeros(heads, head_dim, device=self.device)
        self.kv = new_cache(self.format, tokens, batch, heads, head_dim, self.dtype, self.device, **self.options,
                            **weights)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[Handle, Handle]:
        """Bring a step's K and V [batch, num_heads_kv, tokens, head_dim]; they are stored by ``attend``."""
        if key_states.shape != value_states.shape:
            raise NotImplementedError(f"value_states: got {list(value_states.shape)} beside keys of "
                                      f"{list(key_states.shape)}; supported: K and V of one shape")
        if self.kv is None or (self.length == 0 and self.batch_size != key_states.shape[0]):
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.batch_size:
            raise ValueError(f"key_states: got batch {key_states.shape[0]}, supported: {self.batch_size}, the batch "
                             "that this cache holds; reset() it or make a new one")
        self.handle = Handle(self, key_states.detach(), value_states.detach())
        return self.handle, self.handle

    def attend(self, handle: Handle, query: torch.Tensor, scaling: float | None) -> torch.Tensor:
        """Attention of query [batch, num_heads, q_len, head_dim] over the cache and the handle's tokens.

        Returns [batch, q_len, num_heads, head_dim] in the query's dtype; afterwards the tokens are stored.
        """
        if handle is not self.handle:
            raise NotImplementedError("key: these tokens are already stored; a step's K and V can be attended to "
                                      "once (models whose layers share K and V are not supported)")
        k, v, q_len = handle.k, handle.v, query.shape[2]
        if k.shape[2] != q_len:
            raise NotImplementedError(f"query: {q_len} tokens beside {k.shape[2]} new keys; supported: equal counts")
        self._make_room(self.length + q_len)
        if self.kv.query_weights is not None:
            self._weigh(query)
        if q_len == 1:
            self.kv.append(k.transpose(1, 2), v.transpose(1, 2))
            out, _ = decode(query.transpose(1, 2), self.kv, softmax_scale=scaling, path=self.path)
            self.kv.flush()
        else:
            out = self._attend_chunk(query, k, v, scaling)
            for row in range(self.batch_size):
                self.kv.prefill(row, k[row].transpose(0, 1), v[row].transpose(0, 1))
        self.length += q_len
        self.handle = None
        return out

    def _weigh(self, query) -> None:
        """Fold the step's queries [batch, num_heads, q_len, head_dim] into the mean |q| that weighs channels of K."""
        step, weights = query.shape[2], self.kv.query_weights
        mean = query.float().abs().unflatten(1, (weights.shape[0], -1)).mean((0, 2, 3))
        weights += (mean - weights) * (step / (self.length + step))

    def _attend_chunk(self, query, k, v, scaling) -> torch.Tensor:
        k, v = (x.to(self.dtype).to(query.dtype) for x in (k, v))
        sdpa = partial(torch.nn.functional.scaled_dot_product_attention, scale=scaling, enable_gqa=True)
        if self.length == 0:
            return sdpa(query, k, v, is_causal=True).transpose(1, 2)
        past = [torch.stack(side).to(query.dtype)
                for side in zip(*(self.kv.gather(row) for row in range(self.batch_size)))]
        k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        q_len, position = query.shape[2], torch.arange(k.shape[2], device=query.device)
        blocks = []
        for start in range(0, q_len, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, q_len)
            seen = self.length + stop
            mask = position[:seen] <= position[self.length + start : seen, None]
            blocks.append(sdpa(query[:, :, start:stop], k[:, :, :seen], v[:, :, :seen], attn_mask=mask))
        return torch.cat(blocks, 2).transpose(1, 2)

    def _make_room(self, tokens: int) -> None:
        if tokens <= self.kv.max_seqlen:
            return
        if self.max_seqlen is not None:
            raise ValueError(f"max_seqlen: the sequences would reach {tokens} tokens, supported: {self.max_seqlen} "
                             "as given to LowBitCache; None lets the cache grow")
        self.kv = grown(self.kv, max(tokens, 2 * self.kv.max_seqlen))

    @property
    def nbytes(self) -> int:
        """Bytes that hold the present tokens."""
        return self.kv.nbytes if self.kv is not None else 0

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1 if self.max_seqlen is None else self.max_seqlen

    def reset(self) -> None:
        """Forget all tokens; the memory stays allocated."""
        if self.kv is not None:
            self.kv.free(range(self.batch_size))
        self.length, self.handle = 0, None

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            self._refuse("crop", "packed blocks cannot be taken apart")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._refuse("reorder_cache", "beam search copies sequences, and pages are not shared between them")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._refuse("batch_repeat_interleave", "pages are not shared between sequences; repeat the inputs instead")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._refuse("batch_select_indices", "all sequences of the batch stay in the cache")

    def offload(self) -> None:
        self._refuse("offload", "the pages stay on the model's device")

    def prefetch(self) -> None:
        self._refuse("prefetch", "the pages stay on the model's device")

    def _refuse(self, call: str, reason: str) -> None:
        raise NotImplementedError(f"{call}: LowBitCache does not support it: {reason}")


class LowBitCache(Cache):
    """A transformers Cache that holds K and V in one low-bit format; use it with attention "lowbit".

    Args:
        format: a name of FORMATS ("k4v4", "k2v2-vg32", ...) or a Format.
        sinks, range_search, saturate: as in KVCache; sinks None: the format's own (32 for Kitty's, else 0).
        max_seqlen: longest sequence, allocated at once; None: the pools double when they are full.
        dtype: 16-bit type of sinks and open blocks; None: the model's, fp16 for an fp32 model.
        path: decode path of one-token steps, as in lowbit_attn.decode; None: the dispatcher's pick.

    All sequences of a batch have the same length. Gradients do not flow into stored tokens. A format that weighs
    channels by queries ("kitty-weighted", ...) takes the mean |q| of all that the layer has seen when a page is packed.
    """

    def __init__(self, format: str | Format, *, sinks: int | None = None, range_search: bool | None = None,
                 max_seqlen: int | None = None, dtype: torch.dtype | None = None, saturate: bool = False,
                 path: str | None = None):
        self.format = FORMATS[format] if isinstance(format, str) else format
        sinks = self.format.sinks if sinks is None else sinks
        layer = partial(LowBitLayer, self.format, max_seqlen, dtype, path, sinks=sinks, range_search=range_search,
                        saturate=saturate)
        super().__init__(layer_class_to_replicate=layer)

    @property
    def nbytes(self) -> int:
        """Bytes that hold the present tokens of all layers: packed pages, sinks and open blocks."""
        return sum(layer.nbytes for layer in self.layers)


def attention(module: torch.nn.Module, query: torch.Tensor, key: Handle, value: Handle,
              attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
              is_causal: bool | None = None, **kwargs) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [batch, num_heads, q_len, head_dim], key and value handles.

    Returns ([batch, q_len, num_heads, head_dim], None). Raises NotImplementedError for what it cannot honour.
    """
    if not isinstance(key, Handle) or value is not key:
        raise NotImplementedError(f"past_key_values: attention {NAME!r} reads a LowBitCache; pass "
                                  "past_key_values=LowBitCache(...), or call model.set_attn_implementation('sdpa')")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal:
        raise NotImplementedError("is_causal: got False, supported: causal self-attention")
    if dropout or module.training:
        raise NotImplementedError(f"dropout: got {dropout}, training {module.training}; supported: inference, "
                                  "after model.eval()")
    if getattr(getattr(module, "config", None), "output_attentions", False):
        kwargs["output_attentions"] = True
    for name, argument in kwargs.items():
        if name not in HARMLESS and argument is not None and argument is not False:
            got = f"a tensor {list(argument.shape)}" if isinstance(argument, torch.Tensor) else argument
            raise NotImplementedError(f"{name}: got {got}, not supported by attention {NAME!r}: "
                                      f"{REASONS.get(name, 'its meaning is not known here')}")
    if attention_mask is not None:
        _check_causal(attention_mask, query.shape[2], key.layer.length + query.shape[2])
    return key.layer.attend(key, query, scaling), None


def mask(batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
         mask_function=causal_mask_function, attention_mask: torch.Tensor | None = None,
         allow_is_causal_skip: bool = True, **kwargs) -> torch.Tensor | None:
    """transformers' mask builder: None for a plain causal mask, else sdpa's boolean mask."""
    whole = attention_mask is None or (attention_mask.shape[-1] == kv_length and bool(attention_mask.all()))
    at_end = kv_offset == 0 and q_offset + q_length == kv_length
    if allow_is_causal_skip and whole and at_end and mask_function is causal_mask_function:
        return None
    return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
                     kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
                     allow_is_causal_skip=False, **kwargs)


def _check_causal(mask: torch.Tensor, q_len: int, seqlen: int) -> None:
    """Raise unless an explicit mask [.., .., q_len, seqlen], boolean or additive, is the causal one."""
    causal = torch.ones(q_len, seqlen, dtype=torch.bool, device=mask.device).tril(seqlen - q_len)
    lowest = None if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    seen = mask if lowest is None else mask == 0
    if mask.dim() != 4 or mask.shape[-2:] != causal.shape or not bool((seen == causal).all()) or (
            lowest is not None and not bool((mask[(~seen)] <= lowest).all())):
        raise NotImplementedError(f"attention_mask: got {list(mask.shape)} that is not plain causal (padding, packed "
                                  "sequences or a custom pattern); supported: sequences of one length without padding")


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
