"""Which models a LowBitCache holds: what it does not is refused by the first layer, before any stores a token."""

from collections.abc import Sequence

from lowbit_attn import model_layers
from lowbit_attn.codebooks.calibrate import rope_types
from lowbit_attn.formats.levels import Levels
from lowbit_attn.integrations.handle import SUPPORTED
from lowbit_attn.model_layers import CHUNKED, SHARED, STATE, UNKNOWN


def why_not(config) -> str:
    """Why a LowBitCache does not hold the K and V of a model of this configuration; "" if it does."""
    kinds = model_layers.kinds_of(config)
    reasons = {
        "with states of their own (Mamba, linear attention, as in Jamba and Qwen3-Next)":
            [kind.has_state or kind.name == STATE for kind in kinds],
        "that read the K and V of an earlier layer (as in Gemma 3n and Gemma 4)":
            [kind.name == SHARED for kind in kinds],
        "whose queries see the tokens of one chunk alone (Llama 4's chunked attention)":
            [kind.name == CHUNKED for kind in kinds],
        "that keep something beside K and V": [kind.name == UNKNOWN for kind in kinds],
    }
    for reason, found in reasons.items():
        if any(found):
            return (f"this model has layers {reason}, {sum(found)} of {len(kinds)}, the first of them layer "
                    f"{found.index(True)}, which it does not hold")
    return ""


def switch_of(config) -> int | None:
    """How many tokens a sequence may have before its rotary embedding changes that of all tokens (longrope), None for
    embeddings that never do."""
    text = model_layers.text_config(config)
    if "longrope" not in rope_types(text):
        return None
    stated = getattr(text, "rope_parameters", None) or {}
    each = [stated, *(one for one in stated.values() if isinstance(one, dict))]
    found = [one["original_max_position_embeddings"] for one in each if one.get("original_max_position_embeddings")]
    return min(found, default=getattr(text, "original_max_position_embeddings", None))


def room_for(config, tokens: int) -> dict:
    """The argument of LowBitCache with which it serves sequences of so many tokens, where it needs one."""
    switch = switch_of(config)
    return {} if switch is None or tokens > switch else {"max_seqlen": switch}


def check(config, layer, q_len: int, pads: Sequence[int] | None) -> None:
    """Raise NotImplementedError for a model that a cache does not hold; config: its text model's, layer: the first one
    to store tokens, q_len of them a row, of which the first ``pads`` are padding."""
    if reason := why_not(config):
        raise NotImplementedError(f"LowBitCache: {reason}; supported: {SUPPORTED}")
    switch, pads = switch_of(config), pads or (0,)
    starts_behind = switch is not None and all(q_len - pad > switch for pad in pads)
    stays_before = switch is not None and layer.max_seqlen is not None and layer.max_seqlen + max(pads) <= switch
    if switch is not None and not starts_behind and not stays_before:
        raise NotImplementedError(f"LowBitCache: this model's rotary embedding (rope_type longrope) turns all keys "
                                  f"otherwise once a sequence has more than {switch:,} tokens, and keys that are "
                                  f"stored are not turned again; supported: LowBitCache(..., max_seqlen={switch}) or "
                                  f"less, or prompts of more than {switch:,} tokens in one call")
    _check_shapes(config, layer)


def _check_shapes(config, layer) -> None:
    """Raise for a head_dim of a later layer what that layer would raise, and for levels, whose layers share pages, if
    head_dims differ."""
    kinds = model_layers.kinds_of(config)
    packed = [one for one, kind in zip(model_layers.layer_configs(config), kinds)
              if kind.attends and (kind.window is None or layer.sliding == "lowbit")]
    head_dims = {one.head_dim for one in packed if isinstance(getattr(one, "head_dim", None), int)}
    for head_dim in sorted(head_dims):
        layer.format.check(head_dim) if isinstance(layer.format, Levels) else layer.format.record(head_dim)
    if isinstance(layer.format, Levels) and len(head_dims) > 1:
        raise NotImplementedError(f"LowBitCache: levels {layer.format} share pages over layers, and this model's "
                                  f"layers have head_dims {', '.join(map(str, sorted(head_dims)))}; supported: one "
                                  "head_dim, or a format without levels")
