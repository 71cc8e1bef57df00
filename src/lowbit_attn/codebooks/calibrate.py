"""Codebooks of a transformers model from a text that it reads.

    from lowbit_attn import FORMATS
    from lowbit_attn.codebooks.calibrate import calibrate
    from lowbit_attn.codebooks.text import mixture, tokenized

    ids = tokenized(tokenizer, mixture(), tokens_to_read(8192))
    calibrate(model, ids, FORMATS["cq2"]).save("model.cq2.safetensors")

The model reads once; then each layer's codebooks are learned on the model's device (Recipe), and their errors taken on
one page in nine that they were not learned from.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version

import torch

from lowbit_attn._version import __version__
from lowbit_attn.codebooks.capture import Sample, captured
from lowbit_attn.codebooks.file import Codebooks
from lowbit_attn.codebooks.identity import config_hash, weights_hash
from lowbit_attn.codebooks.learn import HELD_OUT, Learned, Recipe, learn_layers

TOKENS = 8192  # that codebooks are learned from; twice as many lower the KL by about 5 %
LARGEST_SEED = 2**32 - 1
PRE_TYPES = ("default", "linear", "llama3")
POST_TYPES = (*PRE_TYPES, "yarn")


def tokens_to_read(tokens: int, sinks: int = 32) -> int:
    """Tokens of text that give so many to learn from, beside the held-out ones and the sinks of each sequence."""
    read = -(-tokens * HELD_OUT // (HELD_OUT - 1))
    return read + sinks * -(-read // 2048)


def recipe_of(format, rope: str = "post", seed: int = 0, k_shared: bool = False) -> Recipe:
    """What a format of codebooks (a Format of FORMATS) needs learned; ValueError for one without codebooks.

    k_shared: see Recipe; of rope="pre" alone, for nothing else reads it faster.
    """
    if not format.needs_codebooks:
        raise ValueError(f"format: got {format.name}, which has no codebooks, supported: cq4, cq2, cq1, kcq4vcq2, "
                         "k4vcq2, ...")
    if not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed: got {seed}, supported: 0 to {LARGEST_SEED}")
    k, v = (side.vec_size if side.kind.name == "CODEBOOK" else None for side in (format.k, format.v))
    if rope == "pre" and k is None:
        raise ValueError(f"rope: got 'pre' with {format.name}, whose keys have no codebooks, supported: 'post'")
    if k_shared and rope != "pre":
        raise ValueError("k_shared: got True with rope='post', supported with rope='pre': only there kernels want it")
    return Recipe(k, v, v is not None and format.v.normed, rope, seed=seed, k_shared=k_shared)


def calibrate(model, ids: torch.Tensor, format, *, rope: str = "post", seed: int = 0, k_shared: bool = False,
              name: str | None = None, on_tokens: Callable[[int], None] = lambda n: None,
              on_step: Callable[[], None] = lambda: None) -> Codebooks:
    """Codebooks of a model for a format, learned from ids.

    model: a causal language model of transformers in eval mode; ids: int64 [tokens] of varied text, 1,024 or more, of
    which sinks and one page in nine are not learned from. format: of FORMATS. rope: "post", or "pre" for keys before
    their rotary embedding (fewer errors, and readers that turn them). k_shared: four codebooks of K a head (see
    Recipe), which Hopper's kernels read before that embedding. name: of the model, for messages; None: its
    configuration's. on_tokens is told of the tokens read, on_step of each iteration of k-means (Recipe.steps a layer).
    Raises NotImplementedError for rotary embeddings that cannot be turned back or on, and models that are no decoders.
    """
    if len(ids) < 1024:
        raise ValueError(f"ids: got {len(ids)} tokens, supported: 1024 or more")
    recipe = recipe_of(format, rope, seed, k_shared)
    kinds = rope_types(model.config)
    check_rope(kinds, rope)
    sample = captured(model, ids, format.sinks, on_tokens)
    return learned_codebooks(sample, recipe, format.name, model.device, on_step, about_model(model, name) | {
        "rope_type": kinds, "text_hash": hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest(),
        "sinks": format.sinks})


def learned_codebooks(sample: Sample, recipe: Recipe, format_name: str, device, on_step: Callable[[], None],
                      about: dict) -> Codebooks:
    """The file's value of what is learned from a sample; about: metadata that the sample does not tell."""
    layers = learn_layers(sample, recipe, device, on_step)
    stacked = {name: None if getattr(layers[0], name) is None else torch.stack([getattr(x, name) for x in layers])
               for name in ("k_entries", "v_entries", "k_order", "k_weights")}
    if recipe.rope == "pre":
        stacked["rope_inv_freq"] = torch.stack([layer.inv_freq for layer in sample.layers])
    head_dim = sample.layers[0].keys.shape[-1]
    return Codebooks(format_name, recipe.rope, head_dim, **stacked, metadata=about | _findings(sample, recipe, layers))


def about_model(model, name: str | None = None) -> dict:
    """What a file says of its model."""
    return {"model": name or model.config.name_or_path or type(model).__name__,
            "config_hash": config_hash(model.config), "weights_hash": weights_hash(model),
            "lowbit_attn": __version__, "transformers": version("transformers")}


def rope_types(config) -> list[str]:
    """Names of a configuration's rotary embeddings, each once; none for a model without."""
    found = getattr(config.get_text_config(), "rope_parameters", None) or {}
    each = [found] if "rope_type" in found else [x for x in found.values() if isinstance(x, dict)]
    return sorted({x.get("rope_type", "default") for x in each})


def check_rope(kinds: list[str], rope: str) -> None:
    supported = PRE_TYPES if rope == "pre" else POST_TYPES
    if unknown := [kind for kind in kinds if kind not in supported]:
        raise NotImplementedError(f"rope: the model's rotary embedding is of type {', '.join(unknown)}, supported for "
                                  f"codebooks of keys {'before' if rope == 'pre' else 'after'} it: "
                                  f"{', '.join(supported)}"
                                  + (f"; after it ('post', 'prompt-post'): {', '.join(POST_TYPES)}" * (rope == "pre")))


def _findings(sample: Sample, recipe: Recipe, layers: list[Learned]) -> dict:
    held = max(1, sample.pages // HELD_OUT) if sample.pages > 1 else 0
    per_page = sample.tokens // sample.pages
    return {"tokens": (sample.pages - held) * per_page, "held_out_tokens": held * per_page,
            "max_positions": sample.max_positions, "seed": recipe.seed, "iterations": recipe.iterations,
            "recipe": {key: value for key, value in vars(replace(recipe)).items() if key.startswith(("is_", "has_"))},
            "logit_error": [layer.logit_error for layer in layers],
            "value_error": [layer.value_error for layer in layers],
            "unused_entries": [layer.unused for layer in layers],
            "warnings": [warning for layer in layers for warning in layer.warnings]}
