"""Which model codebooks were learned from: hashes of its configuration and of its weights, and how a file is checked.

A file serves models of one configuration. Weights may differ (fine-tunes): a warning says so, since codebooks of keys
hardly depend on them but nobody measured it for these.
"""

import hashlib
import json
import warnings

import torch

from lowbit_attn.codebooks.file import CodebookFileError, Codebooks
from lowbit_attn.errors import OtherWeightsWarning

# Parts of names of a configuration's entries that change no key and no value
UNSHAPED = ("token", "vocab", "dtype", "version", "name", "architectures", "label", "use_cache", "output_", "return_",
            "dropout", "initializer", "pretraining", "attn_implementation", "quantization", "task", "problem", "chunk_",
            "is_encoder", "is_decoder", "tie_", "layerdrop", "gradient")
SAMPLED = 64  # values of each parameter


def config_hash(config) -> str:
    """sha256, in hex, of what shapes keys and values in a transformers configuration: sizes, layers, rotary
    embedding, context; not of vocabulary, token numbers, dtype or names."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    kept = {key: value for key, value in sorted(config.to_dict().items())
            if not key.startswith("_") and value is not None and not any(part in key for part in UNSHAPED)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def weights_hash(model: torch.nn.Module) -> str:
    """sha256, in hex, of 64 values of every parameter as bf16, so that the dtype it is loaded in changes nothing."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED].to("cpu", torch.bfloat16).contiguous()
        digest.update(f"{name} {list(parameter.shape)} ".encode())
        digest.update(some.view(torch.uint8).numpy())
    return digest.hexdigest()


def check_model(codebooks: Codebooks, model: torch.nn.Module) -> None:
    """Raise CodebookFileError for codebooks of a model with another configuration; warn where only weights differ.

    Codebooks that do not say what they were learned from are not checked.
    """
    about = codebooks.metadata
    if (stated := about.get("config_hash")) is not None and stated != config_hash(model.config):
        raise CodebookFileError(f"codebooks: learned from {about.get('model', 'a model')}, whose configuration is not "
                                f"that of this {type(model).__name__}; supported: models of the same configuration; "
                                "make others with lowbit-attn calibrate --model")
    if (stated := about.get("weights_hash")) is not None and stated != weights_hash(model):
        warnings.warn(f"codebooks: learned from {about.get('model', 'a model')}, whose weights are not those of this "
                      "model; compare with lowbit-attn quality, or calibrate again", OtherWeightsWarning, stacklevel=2)
