"""Reads the shape of a model's attention from its config.json; what that leaves to defaults, transformers fills in."""

import json
from dataclasses import dataclass
from pathlib import Path

from lowbit_attn import extras
from lowbit_attn.budget import Model

NAME = "config.json"
FULL, SLIDING = "full_attention", "sliding_attention"
NEEDED = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
READ = (*NEEDED, "hidden_size", "max_position_embeddings", "model_type", "kv_lora_rank", "layer_types",
        "sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern")


@dataclass(frozen=True)
class Shape:
    """What a config.json says: num_heads, num_heads_kv and head_dim of each of ``layers`` layers with attention,
    ``sliding_layers`` of which see the last ``sliding_window`` tokens; ``other_layers`` have states of another kind.
    context: the longest sequence, None where it is not told."""

    layers: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    context: int | None = None
    sliding_layers: int = 0
    sliding_window: int = 0
    other_layers: int = 0

    def model(self, weights_gb: float | None = None) -> Model:
        return Model(self.layers, self.num_heads, self.num_heads_kv, self.head_dim, weights_gb, self.sliding_layers,
                     self.sliding_window)

    def __str__(self) -> str:
        sliding = f", {self.sliding_layers} of them with a sliding window of {self.sliding_window:,} tokens"
        other = f"; {self.other_layers} layers without a KV cache are left out"
        return (f"{self.layers} layers" + sliding * bool(self.sliding_layers) + f", {self.num_heads} query heads, "
                f"{self.num_heads_kv} KV heads, head_dim {self.head_dim}" + other * bool(self.other_layers))


def read(folder: Path) -> Shape:
    """The shape of the model in a folder; ValueError that names what is missing or cannot be served."""
    file = folder / NAME
    try:
        whole = json.loads(file.read_text())
        config = whole.get("text_config") or whole  # of models with pictures or sound
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"model: got {str(folder)!r}, supported: a folder with a {NAME} "
                         f"({type(error).__name__})") from error
    if missing := [name for name in NEEDED if config.get(name) is None]:
        config = _filled(folder, missing)
    if config.get("kv_lora_rank"):
        raise ValueError(f"model: {file} is of latent attention (kv_lora_rank), supported: K and V of each head")
    layers, heads = (_number(file, config, name) for name in NEEDED[:2])
    kinds = _kinds(config, layers)
    sliding = kinds.count(SLIDING)
    attending = sliding + kinds.count(FULL)
    if not attending:
        raise ValueError(f"model: {file} has layers {', '.join(sorted(set(kinds)))}, supported: {FULL}, {SLIDING}")
    return Shape(attending, heads, _number(file, config, "num_key_value_heads"), _number(file, config, "head_dim"),
                 config.get("max_position_embeddings"), sliding,
                 _number(file, config, "sliding_window") if sliding else 0, layers - attending)


def _filled(folder: Path, missing: list[str]) -> dict:
    """What transformers makes of a config.json that leaves these names to its model type's defaults."""
    try:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(str(folder), local_files_only=True).get_text_config()
    except ImportError:
        raise ValueError(f"model: {folder / NAME} leaves {', '.join(missing)} to defaults that transformers knows; "
                         f"{extras.remedy('hf')}, or give the numbers as options") from None
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"model: transformers cannot read {folder / NAME}: {error}") from error
    found = {name: getattr(config, name, None) for name in READ}
    found["num_key_value_heads"] = found["num_key_value_heads"] or found["num_attention_heads"]
    if not found["head_dim"] and found["hidden_size"] and found["num_attention_heads"]:
        found["head_dim"] = found["hidden_size"] // found["num_attention_heads"]
    return found


def _number(file: Path, config: dict, name: str) -> int:
    """A whole number of 1 or more."""
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: got {value} in {file}, supported: 1 or more")
    return value


def _kinds(config: dict, layers: int) -> list[str]:
    """The kind of each layer, by the rules with which transformers' own configs fill a missing ``layer_types``."""
    if config.get("layer_types"):
        return list(config["layer_types"])
    kind = config.get("model_type") or ""
    needs_flag = kind.startswith("qwen") or config.get("use_sliding_window") is not None
    if config.get("sliding_window") is None or (needs_flag and not config.get("use_sliding_window")):
        return [FULL] * layers
    if pattern := config.get("sliding_window_pattern"):  # every so many-th layer sees all
        return [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(layers)]
    if config.get("use_sliding_window"):  # Qwen: from this layer on
        return [SLIDING if i >= config.get("max_window_layers", layers) else FULL for i in range(layers)]
    if kind.startswith("gemma3"):
        return [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(layers)]
    if kind.startswith(("gemma2", "gpt_oss")):
        return [SLIDING if i % 2 == 0 else FULL for i in range(layers)]
    return [SLIDING] * layers  # Mistral
