"""Codebooks of one sequence, learned from its own first tokens: no calibration, and fewer errors from long texts.

A layer's keys, values and query moments of the first 1,024 tokens or more give LayerCodebooks, as calibration gives
them from many texts (learn.py); each token counts as much as the prompt's queries attend to it. How keys turn with
position is not seen in one prompt; it is what the model's configuration says, and models whose code says otherwise are
refused by name.
"""

import sys

import torch

from lowbit_attn.codebooks.calibrate import POST_TYPES, check_rope, rope_types
from lowbit_attn.codebooks.capture import LayerSample, context_of
from lowbit_attn.codebooks.file import LayerCodebooks
from lowbit_attn.codebooks.learn import Recipe, Sample, learn_layer, random_offsets
from lowbit_attn.layout import PAGE_TOKENS
from lowbit_attn.precision import on_own_defaults

PROMPTS = {"prompt": "pre", "prompt-post": "post"}  # an argument ``codebooks``, and the rope of its keys' codebooks
LEAST_TOKENS = 1024
QUERY_STEP = 4  # one query of so many tells how much attention tokens get
LEAST_SHARE = 0.05  # of a token's weight, beside a mean of 1: what nobody looked at yet may be looked at


@on_own_defaults
def learn_prompt(keys: torch.Tensor, values: torch.Tensor, q_moment: torch.Tensor, inv_freq: torch.Tensor,
                 max_positions: int, sinks: int, recipe: Recipe, format_name: str, start: int = 0,
                 weights: torch.Tensor | None = None) -> LayerCodebooks:
    """Codebooks of a layer from a sequence's first tokens.

    keys, values: [num_heads_kv, tokens, head_dim], all of the sequence from its first token; its sinks are not learned
    from. Where the rest is no whole number of pages of 128 tokens, the last page reaches back over tokens of the one
    before it: of so few tokens none is spared (docs/lessons.md). q_moment: as in LayerSample. inv_freq: fp32
    [head_dim / 2]. max_positions: the model's context, which random positions reach up to. start: the first token's
    position. weights: fp32 [num_heads_kv, tokens], positive, how much each token's errors count; None: all alike.
    Raises ValueError for NaN or infinities.
    """
    tokens = keys.shape[1]
    first = [*range(sinks, tokens - PAGE_TOKENS, PAGE_TOKENS), tokens - PAGE_TOKENS]
    paged = [torch.stack([x[:, at : at + PAGE_TOKENS] for at in first]) for x in (keys, values)]
    if not all(x.isfinite().all() for x in paged):
        raise ValueError("codebooks: the prompt's keys or values have NaN or infinities, supported: finite ones; try "
                         "another dtype of the model")
    paged_weights = None if weights is None else torch.stack([weights[:, at : at + PAGE_TOKENS] for at in first])
    layer = LayerSample(*paged, q_moment.float().cpu(), 1.0, inv_freq, paged_weights)
    sample = Sample([layer], start + torch.tensor(first), max_positions)
    none_held = torch.zeros(len(first), dtype=torch.bool)
    learned = learn_layer(layer, sample.first, random_offsets(sample, recipe, 0), none_held, recipe, keys.device)
    order = None if learned.k_order is None else learned.k_order.to(torch.int16)
    freq = inv_freq.float() if recipe.rope == "pre" else None
    return LayerCodebooks(format_name, recipe.rope, keys.shape[2], learned.k_entries, learned.v_entries, order,
                          learned.k_weights, freq).to(keys.device)


@on_own_defaults
def attention_squares(query: torch.Tensor, keys: torch.Tensor, pad: int, scale: float,
                      ) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the square attention probabilities that tokens get from every fourth query of a step.

    query: [num_heads, q_len, head_dim], of the last q_len tokens of keys [num_heads_kv, tokens, head_dim], whose first
    ``pad`` are padding. Returns (fp32 [num_heads_kv, tokens], int64 [tokens], how many of those queries see a token).
    """
    heads, tokens, _ = keys.shape
    token = torch.arange(tokens, device=keys.device)
    asks = token[tokens - query.shape[1] :]
    asks = asks[(asks >= pad) & ((asks - pad) % QUERY_STEP == 0)]
    squares = torch.zeros(heads, tokens, dtype=torch.float32, device=keys.device)
    for some in asks.split(PAGE_TOKENS):
        q = query[:, some - tokens].float().unflatten(0, (heads, -1))  # [heads, queries of a KV head, some, head_dim]
        scores = q @ keys.float().mT[:, None] * scale
        unseen = (token > some[:, None]) | (token < pad)
        squares += scores.masked_fill_(unseen, -torch.inf).softmax(-1).square().sum((1, 2))
    return squares, (asks[:, None] >= token).sum(0)


def token_weights(squares: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """How much each token's errors count, fp32 [num_heads_kv, tokens] of a mean near 1: the root mean square of the
    attention that it gets. Arguments: sums of ``attention_squares`` over the steps of a prompt; tokens that fewer than
    a 16th of the queries see count as if so many did not look."""
    share = (squares / seen.clamp(min=max(1, int(seen.max()) // 16))).sqrt()
    return share / share.mean(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) + LEAST_SHARE


@on_own_defaults
def frequencies(module: torch.nn.Module, head_dim: int, rope: str = "post") -> torch.Tensor:
    """inv_freq fp32 [head_dim / 2] of an attention module of transformers, 0 where its keys do not turn.

    Raises NotImplementedError for rotary embeddings of part of a head or of neighbouring channels, and of types whose
    frequencies depend on the length.
    """
    config = module.config
    check_rope(rope_types(config), rope)
    if not getattr(module, "use_rope", True) or not rope_types(config):
        return torch.zeros(head_dim // 2, dtype=torch.float32)
    stated = config.rope_parameters
    if "rope_type" not in stated:
        stated = stated[config.layer_types[module.layer_idx]]
    part = stated.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    halves = getattr(sys.modules[type(module).__module__], "rotate_half", None)
    x = torch.arange(float(head_dim))
    if part not in (None, 1) or halves is None or not torch.equal(halves(x), torch.cat((-x[head_dim // 2 :],
                                                                                        x[: head_dim // 2]))):
        raise NotImplementedError(f"codebooks='prompt': {type(module).__name__} turns a part of each head or "
                                  "neighbouring channels, supported: rotary embeddings of channels d and d + "
                                  "head_dim / 2; or codebooks of lowbit-attn calibrate")
    return _of_type(config, stated, module, head_dim)


def context(config) -> int:
    """Positions that a model was made for."""
    return context_of(config)


def _of_type(config, stated: dict, module: torch.nn.Module, head_dim: int) -> torch.Tensor:
    """Frequencies of a type of rotary embedding, as transformers computes them."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = stated["rope_type"]
    assert kind in POST_TYPES
    if kind == "default":
        return stated["rope_theta"] ** -(torch.arange(head_dim // 2, dtype=torch.float32) * 2 / head_dim)
    nested = {} if "rope_type" in config.rope_parameters else {"layer_type": config.layer_types[module.layer_idx]}
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **nested)[0].float()
