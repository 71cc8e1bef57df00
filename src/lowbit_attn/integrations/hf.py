"""transformers: a Cache whose layers are low-bit KV caches, and the attention function that reads them.

    from lowbit_attn.integrations.hf import LowBitCache

    model = AutoModelForCausalLM.from_pretrained(...)
    model.set_attn_implementation("lowbit")
    model.generate(**inputs, cache=LowBitCache("k4v4"))  # past_key_values= before transformers 5.24

``LowBitCache.update`` does not return K and V but a handle, which transformers passes on untouched; the
registered attention function reads the cache through it. What the function cannot honour raises
NotImplementedError before anything is written.

A step of one token is done by a layer, or leaves it as it was. A forward call of many layers that a layer in the midst
breaks off (no memory, an interrupt) leaves those before it ahead: what can be known at its start (lengths, room, masks)
is refused by the first layer, before any stores a token, and the next call after a broken one raises RuntimeError.
"""

from dataclasses import dataclass
from functools import partial
from os import PathLike

import torch
from transformers import AttentionInterface, GenerationMixin, PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from lowbit_attn import _private, kernels, reference
from lowbit_attn.cache import CacheFaultError, KVCache
from lowbit_attn.cache.state import MAX_Q_LEN
from lowbit_attn.checks import integer, is_truth, one_of
from lowbit_attn.codebooks import Codebooks
from lowbit_attn.codebooks.prompt import PROMPTS
from lowbit_attn.formats import FORMATS, Format, levels
from lowbit_attn.integrations import served
from lowbit_attn.integrations.drafts import Recording, tell_prompt
from lowbit_attn.integrations.handle import NAME, SUPPORTED, Handle
from lowbit_attn.integrations.layer import START_ANEW, LowBitLayer
from lowbit_attn.integrations.levels import GrowingPool, LevelLayer, check_options
from lowbit_attn.integrations.prompt import PromptLayer, blank
from lowbit_attn.integrations.static import StaticLowBitLayer
from lowbit_attn.levels.policy import Policy
from lowbit_attn.model_layers import CACHE_ARGUMENT
from lowbit_attn.reference import Attention

SLIDING = ("16bit", "lowbit")
TRIED_HEAD_DIM = 128  # of the cache that tries options: every format serves it
SAMPLED_ROWS = 64  # queries whose mask is compared with that of a sliding window

# Arguments of the models' forward calls that reach the attention function and do not change its result.
HARMLESS = frozenset({"position_ids", "cache_position", "use_cache", "position_embeddings", "output_hidden_states",
                      "return_dict", "logits_to_keep", "num_items_in_batch", "is_causal"})
REASONS = {
    "position_bias": "an additive position bias; supported: plain softmax",
    "output_attentions": "attention weights are never formed; use attn_implementation='eager' to see them",
}


class LowBitCache(Cache):
    """A transformers Cache that holds K and V in one low-bit format; use it with attention "lowbit".

    Args:
        format: a name of FORMATS ("k4v4", "k2v2-vg32", ...) or a Format; or a name of two precision levels ("lean",
            "lean-low", "k4v4+k2v2-high10", ...), whose significant tokens are in the first format (docs/leankv.md).
        sinks, range_search, rotate_keys, saturate: as in KVCache; sinks None: the format's own (Kitty's: 32).
        max_q_len: one more than the tokens that ``crop`` may take back at any time: so many recent tokens stay in 16
            bit at least. Assisted generation and prompt lookup take back any number of drafts without it. Formats with
            codebooks or boosted values ask for 2 or more there; levels and codebooks="prompt" for one more than the
            drafts of a step.
        max_seqlen: longest sequence, allocated at once and never moved; None: the pools double when they are full.
        codebooks: for formats that need them ("cq2", ...): a file of ``lowbit-attn calibrate``, Codebooks, or "prompt":
            each row learns its own from its first 1,024 tokens or more, which stay in 16 bit until then; of keys before
            their rotary embedding, or with more errors after it ("prompt-post"). Steps over codebooks cannot be
            compiled yet, so ``generate`` does not. On a GPU path="reference" reads them where no kernel does, as of
            "prompt" and of files of rope "pre".
        static: with max_seqlen, take all pages at once too, so that steps of one token after the prompt need nothing of
            the host: torch.compile traces them into one graph (``generate`` does so by itself on a GPU, as with
            transformers' StaticCache), and a CUDA graph of one serves every length. These steps keep the prompt's
            padding and read no attention_mask; ``get_seq_length`` gives a tensor; ``check`` tells of a lack of room.
        dtype: 16-bit type of sinks and open blocks; None: the model's, fp16 for an fp32 model.
        path: decode path, as in lowbit_attn.decode; None: the dispatcher's pick.
        sliding: layers with a sliding window of the model's own (Mistral, Gemma) keep its tokens in 16 bit ("16bit":
            at most window - 1 tokens, whatever the context) or all tokens in low-bit pages ("lowbit": less memory
            where sequences are shorter than a few windows).
        window, keep_sinks: the other layers see the last ``window`` tokens only, and with keep_sinks the sinks too
            (StreamingLLM); pages are kept, not read, those of levels returned.
        policy: of levels: Shares or Cumulative; None: the share of the name, nothing pruned.

    Models whose layers have states of their own, share K and V or see chunks are refused before a token is stored, and
    so are longrope models whose sequences may cross original_max_position_embeddings: max_seqlen says that they do not.
    Sequences of one batch may be padded on the left to one length; padding is not stored. Soft-capped logits (Gemma 2)
    and learned sink logits (gpt-oss) are served. Gradients do not flow into stored tokens. A format that weighs
    channels by queries ("kitty-weighted", ...) takes the mean |q| of all that the layer has seen when a page is packed;
    one that orders tokens by significance ("k4v2-boost", ...) is given 64 queries of each prompt or chunk, and those of
    every eighth step.
    """

    def __init__(self, format: str | Format, *, sinks: int | None = None, range_search: bool | None = None,
                 rotate_keys: bool = False, max_q_len: int = 1, max_seqlen: int | None = None,
                 dtype: torch.dtype | None = None, saturate: bool = False, path: str | None = None,
                 sliding: str = "16bit", window: int | None = None, keep_sinks: bool = False, static: bool = False,
                 codebooks: Codebooks | str | PathLike | None = None, policy: Policy | None = None):
        one_of("sliding", sliding, SLIDING)
        is_truth("keep_sinks", keep_sinks)
        is_truth("static", static)
        if window is not None and integer("window", window) < 1:
            raise ValueError(f"window: got {window}, supported: 1 or more tokens")
        if keep_sinks and window is None:
            raise ValueError("keep_sinks: got True without a window, supported: beside window=")
        if static and max_seqlen is None:
            raise ValueError("static: got True without max_seqlen, supported: beside max_seqlen=")
        if path is not None:
            one_of("path", path, _paths())
        if not isinstance(codebooks, Codebooks | str | PathLike | None):
            raise TypeError(f"codebooks: got {type(codebooks).__name__}, supported: Codebooks of a model or their file")
        options = dict(range_search=range_search, saturate=saturate, rotate_keys=rotate_keys, max_q_len=max_q_len)
        self.static, self.recording, self.drafted = static, Recording(), 0
        is_prompt = isinstance(codebooks, str) and codebooks in PROMPTS
        is_path = isinstance(codebooks, str | PathLike) and not is_prompt
        layer_options = dict(max_seqlen=max_seqlen, dtype=dtype, path=path, sliding=sliding, sinks=sinks, **options)
        pair = levels.parse(format) if isinstance(format, str) else None
        if pair is not None:
            check_options(pair, static, rotate_keys, policy, TRIED_HEAD_DIM, codebooks)
            self.format, self.codebooks = pair, None
            layer = partial(LevelLayer, pair, GrowingPool(pair), policy=policy, window=window, keep_sinks=keep_sinks,
                            **layer_options)
        else:
            if is_prompt and static:
                raise NotImplementedError(f"static: got True with codebooks={codebooks!r}, supported: a file of "
                                          "lowbit-attn calibrate, for a prompt's codebooks are made while it is read")
            self.codebooks = Codebooks.load(codebooks) if is_path else codebooks
            self.format = _tried(format, dtype, max_seqlen, sinks, self.codebooks, options)
            if policy is not None:
                raise ValueError(f"policy: got {policy} for format {self.format}, supported: beside levels (lean, ...)")
            if static and self.format.orders_tokens:
                raise NotImplementedError(f"static: got True for format {self.format}, whose steps "
                                          "torch.compile does not trace, supported: False")
            kind = StaticLowBitLayer if static else PromptLayer if is_prompt else LowBitLayer
            layer = partial(kind, self.format, window=window, keep_sinks=keep_sinks, codebooks=self.codebooks,
                            **layer_options)
        self.max_drafts = max_q_len - 1
        self.keeps_drafts = pair is not None or is_prompt  # max_drafts at most, outside of pages
        super().__init__(layer_class_to_replicate=layer)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Bring a step's K and V of one layer; the first one makes room in all, and finds what an earlier call left."""
        if layer_idx == 0 and not torch.compiler.is_compiling():
            lengths = [layer.known_length() for layer in self.layers if layer.is_initialized]
            if len(set(lengths)) > 1:
                raise RuntimeError(f"LowBitCache: the layers hold {lengths} tokens, since an earlier forward call "
                                   f"ended in the midst of the model; {START_ANEW}")
            self._expect_drafts(key_states.shape[2])
            for layer in self.layers:
                layer.grow_for(key_states.shape[2])
        handles = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx]
        layer.index = layer_idx
        if not torch.compiler.is_compiling():
            layer.is_first = not layer.length and not any(other.length for other in self.layers)
            layer.drafts, layer.drafted, layer.is_recording = None, self.drafted, self.recording.is_on
        return handles

    def _expect_drafts(self, new: int) -> None:
        """Find out how many of a forward call's ``new`` tokens are drafts, or refuse them, before any is stored."""
        held = int(self.get_seq_length()) if self.recording.is_on and self.layers else 0
        self.drafted = self.recording.drafts(held, new)
        if not self.keeps_drafts:
            return
        if (drafts := min(self.drafted, new - 1)) > self.max_drafts:
            raise NotImplementedError(f"max_q_len: got {self.max_drafts + 1} and {drafts} drafts in one step, "
                                      f"supported with {self._kind()}: one more than the drafts, up to {MAX_Q_LEN}; "
                                      "set num_assistant_tokens with a constant num_assistant_tokens_schedule in the "
                                      "assistant's generation_config, or prompt_lookup_num_tokens")
        self.drafted = 0

    def _kind(self) -> str:
        return f"codebooks={self.codebooks!r}" if isinstance(self.codebooks, str) else f"format {self.format}"

    def activate_past_recording(self) -> None:
        """Take back as many of a step's last tokens as ``crop`` says, from now to the next ``reset`` or the end of
        assisted generation, which calls this.

        Each further token of a step reads what it would read if it had come alone. NotImplementedError where drafts
        must stay out of pages and max_q_len leaves no room for them.
        """
        is_affine = isinstance(self.format, Format) and not (self.format.needs_codebooks or self.format.orders_tokens)
        if self.max_drafts == 0 and not is_affine:
            raise NotImplementedError(f"max_q_len: got 1 for assisted generation with {self._kind()}, supported: 2 to "
                                      f"{MAX_Q_LEN}, one more than the drafts, so that they are not packed before the "
                                      "model has accepted them; 1 with affine formats whose pages are in the order of "
                                      "positions (k4v4, k2v2, kitty, ...)")
        self.recording.is_on = True

    def reset(self) -> None:
        """Forget all tokens and the model; memory stays allocated as long as the next model's layers can use it."""
        super().reset()
        self.recording.is_on = False

    def _refuse_states(self, *args, **kwargs):
        raise NotImplementedError("LowBitCache: this model has layers with states of their own (Mamba, linear "
                                  "attention, as in Jamba and Qwen3-Next), which it does not hold; supported: "
                                  f"{SUPPORTED}")

    get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = _refuse_states
    has_previous_state = update_indexer = _refuse_states

    @property
    def is_compileable(self) -> bool:
        """Whether ``generate`` may compile decode steps; asked before the prompt makes the layers."""
        return self.static and self.codebooks is None

    def check(self) -> None:
        """Raise CacheFaultError if a compiled or captured step went beyond max_seqlen; waits for the device."""
        faults = []
        for layer in self.layers:
            try:
                if layer.kv is not None:
                    layer.kv.check()
            except CacheFaultError as fault:
                faults.append(fault)
        if faults:
            raise faults[0]

    @property
    def nbytes(self) -> int:
        """Bytes that hold the present tokens of all layers: packed pages, sinks, open blocks and 16-bit windows."""
        return sum(layer.nbytes for layer in self.layers)


def _paths() -> list[str]:
    """Decode paths of all architectures, and the reference."""
    return list(dict.fromkeys([*(path for arch in kernels.ARCH_TARGETS for path in kernels.arch_package(arch).PATHS),
                               "reference"]))


def _tried(format: str | Format, dtype: torch.dtype | None, max_seqlen: int | None, sinks: int | None,
           codebooks: Codebooks | str | None, options: dict) -> Format:
    """The format; raises what a KVCache of these options would raise, before a model has run."""
    format = FORMATS[format] if isinstance(format, str) else format
    weighs = isinstance(format, Format) and format.k.weighs_queries
    weights = torch.zeros(1, TRIED_HEAD_DIM, dtype=torch.float32, device="cpu") if weighs else None
    sinks = {} if sinks is None else dict(sinks=sinks)
    heads, head_dim, books = 1, TRIED_HEAD_DIM, codebooks
    if isinstance(books, str):
        books = blank(format, head_dim)
    elif isinstance(codebooks, Codebooks):
        heads, head_dim, books = codebooks.num_heads_kv, codebooks.head_dim, codebooks.layer(0)
    KVCache(format, 1, heads, head_dim, torch.float16 if dtype is None else dtype, max_seqlen=max_seqlen,
            query_weights=weights, codebooks=books, **sinks, **options)
    return format


@dataclass(frozen=True)
class CausalMask:
    """What ``mask`` hands to ``attention`` instead of a tensor: causal, with a window, and padding on the left.

    pads: padding tokens at the start of each row, None: none; window: as in Attention. ``generate`` makes the masks of
    a static cache before it calls the model, which takes this for a finished mask [batch, heads, q_len, tokens].
    """

    pads: tuple[int, ...] | None
    window: int | None
    ndim = 4

    def contiguous(self) -> "CausalMask":
        return self


def attention(module: torch.nn.Module, query: torch.Tensor, key: Handle, value: Handle,
              attention_mask: CausalMask | torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
              is_causal: bool | None = None, sliding_window: int | None = None, softcap: float | None = None,
              s_aux: torch.Tensor | None = None, **kwargs) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [batch, num_heads, q_len, head_dim], key and value handles.

    Returns ([batch, q_len, num_heads, head_dim], None). Raises NotImplementedError for what it cannot honour.
    """
    if not isinstance(key, Handle) or value is not key:
        raise NotImplementedError(f"{CACHE_ARGUMENT}: attention {NAME!r} reads a LowBitCache, and none came to this "
                                  f"layer: the call had no {CACHE_ARGUMENT}=LowBitCache(...), or the model or generate "
                                  "left it out, as longrope models do with one that was reset; supported: a new "
                                  "LowBitCache, or model.set_attn_implementation('sdpa')")
    _check_call(module, dropout, is_causal, kwargs)
    if key.layer.codebooks is not None:
        key.layer.check_model(module.config)
        if isinstance(key.layer, PromptLayer):
            key.layer.look_at(module, query.shape[3])
        key.layer.position_ids = kwargs.get("position_ids")
    pads = None
    if isinstance(attention_mask, torch.Tensor):
        if isinstance(key.layer, StaticLowBitLayer):
            raise NotImplementedError(f"attention_mask: got {list(attention_mask.shape)} over a static cache; "
                                      "supported: masks [batch, tokens] of padding on the left, with the prompt")
        _check_causal(attention_mask, query.shape[2], key.layer.length + query.shape[2], sliding_window)
    elif not key.layer.is_step(query.shape[2]):
        masked_window = None if attention_mask is None else attention_mask.window
        if sliding_window is None and masked_window is not None:
            raise NotImplementedError(f"attention_mask: got one of a layer without a sliding window that hides tokens "
                                      f"{masked_window} or more back, or in other chunks of {masked_window} (Llama 4's "
                                      "chunked attention); supported: causal attention, whole or with a sliding window")
        if masked_window != sliding_window:
            raise NotImplementedError(f"sliding_window: got {sliding_window} beside a mask with a window of "
                                      f"{masked_window}; supported: the same")
        pads = None if attention_mask is None else attention_mask.pads
    if key.layer.is_first and isinstance(config := getattr(module, "config", None), PreTrainedConfig):
        served.check(config, key.layer, query.shape[2], pads)
        key.layer.is_first = False
    sink_logits = None if s_aux is None else s_aux.detach().float()
    options = Attention(scaling, softcap, sliding_window, sink_logits=sink_logits)
    return key.layer.attend(key, query, options, pads), None


def _check_call(module: torch.nn.Module, dropout: float, is_causal: bool | None, kwargs: dict) -> None:
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise NotImplementedError("is_causal: got False, supported: causal self-attention")
    if dropout or module.training:
        raise NotImplementedError(f"dropout: got {dropout}, training {module.training}; supported: inference, "
                                  "after model.eval()")
    if getattr(getattr(module, "config", None), "output_attentions", False):
        kwargs = kwargs | {"output_attentions": True}
    for name, argument in kwargs.items():
        if name not in HARMLESS and argument is not None and argument is not False:
            got = f"a tensor {list(argument.shape)}" if isinstance(argument, torch.Tensor) else argument
            raise NotImplementedError(f"{name}: got {got}, not supported by attention {NAME!r}: "
                                      f"{REASONS.get(name, 'its meaning is not known here')}")


def mask(batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
         mask_function=causal_mask_function, attention_mask: torch.Tensor | None = None,
         allow_is_causal_skip: bool = True, local_size: int | None = None, device="cpu",
         **kwargs) -> CausalMask | torch.Tensor | None:
    """transformers' mask builder: None for a plain causal mask, a CausalMask for one with a window or left padding,
    else sdpa's boolean mask (which ``attention`` refuses unless it comes to the same).

    A tensor as q_offset is the length of a static cache: a step of one token has its window and padding there.
    """
    if isinstance(attention_mask, CausalMask):
        return attention_mask
    is_plain = mask_function is causal_mask_function
    if isinstance(q_offset, torch.Tensor):
        if q_length == 1 and (is_plain or local_size is not None):
            return None
        q_offset = int(q_offset)
    at_end = kv_offset == 0 and q_offset + q_length == kv_length
    window = _window(mask_function, local_size, q_offset, q_length, device) if at_end else None
    # over a static cache transformers asks for a whole mask if there is one query
    if (allow_is_causal_skip or q_length == 1) and at_end and (window is not None or is_plain):
        pads = (0,) * batch_size if attention_mask is None else _left_padding(attention_mask, kv_length)
        if pads is not None:
            return CausalMask(pads, window) if any(pads) or window else None
    return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
                     kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
                     allow_is_causal_skip=False, device=device, **kwargs)


def _left_padding(attention_mask: torch.Tensor, kv_length: int) -> tuple[int, ...] | None:
    """Zeros before the ones of each row of a mask [batch, kv_length]; None if there are others."""
    if attention_mask.shape[-1] != kv_length:
        return None
    real = attention_mask.bool()
    pads = (~real).sum(1)
    is_left = (real == (torch.arange(kv_length, device=real.device) >= pads[:, None])).all()
    *pads, is_left = torch.cat((pads, is_left[None])).tolist()
    return tuple(pads) if is_left else None


def _window(mask_function, local_size: int | None, q_offset: int, q_length: int, device) -> int | None:
    """local_size if the mask function is that of a causal sliding window of this size, else None."""
    if local_size is None:
        return None
    count = min(q_length, SAMPLED_ROWS)
    sampled = torch.linspace(0, q_length - 1, count, dtype=torch.float32, device=device).round().long()
    last = sampled[:, None] + q_offset
    position = torch.arange(q_offset + q_length, device=device)
    seen = (position <= last) & (position > last - local_size)
    zero = torch.zeros((), dtype=torch.long, device=device)
    return local_size if torch.equal(seen, mask_function(zero, zero, last, position)) else None


def _check_causal(mask: torch.Tensor, q_len: int, seqlen: int, window: int | None) -> None:
    """Raise unless an explicit mask [.., .., q_len, seqlen], boolean or additive, is the causal one of the window."""
    causal = reference.visible(q_len, seqlen, Attention(window=window), device=mask.device)
    lowest = None if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    seen = mask if lowest is None else mask == 0
    if mask.dim() != 4 or mask.shape[-2:] != causal.shape or not bool((seen == causal).all()) or (
            lowest is not None and not bool((mask[(~seen)] <= lowest).all())):
        raise NotImplementedError(f"attention_mask: got {list(mask.shape)} that is not plain causal (packed sequences, "
                                  "padding elsewhere than on the left, or a custom pattern); supported: causal masks, "
                                  "and masks [batch, tokens] of padding on the left")


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
_private.wrap(GenerationMixin, "_assisted_decoding", partial(tell_prompt, argument=CACHE_ARGUMENT, kind=LowBitCache))
