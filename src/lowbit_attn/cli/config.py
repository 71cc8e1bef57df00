"""Reads the shape of a model's attention from its config.json, by way of transformers' own classes."""

import copy
import inspect
import json
import re
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from lowbit_attn import extras
from lowbit_attn.budget import LayerGroup, Model

NAME = "config.json"
MOST, COUNTS = 10_000, re.compile(r"(layers?|experts)$")  # layers and experts at most: transformers makes lists of them
BY_HAND = "or without --model the options --layers, --kv-heads, --heads and --head-dim"
# Names of keys on which the size of a cache depends, if a model type knows them, and of those on which none does
SHAPES = re.compile(r"attn|attention|(^|_)(n_)?kv(_|$)|head_dim|heads|window|chunk|layers?_types?|block_types?|"
                    r"block_config|hybrid|mamba|ssm|recurren|linear_|interval|pattern|latent|layers_block|layer_idx|"
                    r"layers?$|layer_ids|layer_indices|kv_lora|mixer|share|period")
SHAPELESS = re.compile(r"norm|drop|bias|implementation|softcap|scal|moe|expert|mlp|quant|rope|rotary|init|output|nextn|"
                       r"mtp|flash|sdpa|eager|_alpha|temperature|labels?$|vision|audio|image|video|embed|tie_|version")


@dataclass(frozen=True)
class Shape:
    """The attention layers of a model: ``layers`` with K and V of their own, with num_heads, num_heads_kv and head_dim,
    of which ``sliding_layers`` see the last ``sliding_window`` tokens. other_layers: those without K and V.
    context: the longest sequence, None where it is not told. mixed: all layers by shape where they differ in more; the
    other numbers are then those of the layers that keep all tokens, or of the first.
    """

    layers: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    context: int | None = None
    sliding_layers: int = 0
    sliding_window: int = 0
    other_layers: int = 0
    mixed: tuple[LayerGroup, ...] = ()

    def model(self, weights_gb: float | None = None) -> Model:
        return Model(self.layers, self.num_heads, self.num_heads_kv, self.head_dim, weights_gb, self.sliding_layers,
                     self.sliding_window, self.mixed)

    def __str__(self) -> str:
        sliding = f", {self.sliding_layers} of them with a sliding window of {self.sliding_window:,} tokens"
        other = f"; {self.other_layers} layers without a KV cache are left out"
        shape = f"{self.num_heads} query heads, {self.num_heads_kv} KV heads, head_dim {self.head_dim}"
        if self.mixed:
            shape = "; ".join(f"{group.count} of them with " + (f"a sliding window of {group.window:,} tokens, "
                                                                if group.window else "")
                              + f"{group.num_heads} query heads, {group.num_heads_kv} KV heads, head_dim "
                                f"{group.head_dim}" for group in self.mixed)
            return f"{self.layers} layers: {shape}" + other * bool(self.other_layers)
        return (f"{self.layers} layers" + sliding * bool(self.sliding_layers) + f", {shape}"
                + other * bool(self.other_layers))


def read(folder: Path) -> Shape:
    """The shape of the model in a folder; ValueError that names what is missing, unknown or cannot be served."""
    file = folder / NAME
    config = _config(file, _whole(folder, file))
    from lowbit_attn import model_layers

    try:
        structure = model_layers.of_config(config)
    except ValueError as error:
        raise ValueError(f"model: {file}: {error}; supported: another version of transformers, {BY_HAND}") from error
    for layer in structure.layers:
        _check_layer(file, model_layers.text_config(config), layer)
    counts = Counter(LayerGroup(1, layer.num_heads, layer.num_heads_kv, layer.head_dim, layer.kind.window)
                     for layer in structure.layers)
    groups = tuple(LayerGroup(count, one.num_heads, one.num_heads_kv, one.head_dim, one.window)
                   for one, count in counts.items())
    layers = len(structure.layers)
    return _shape(groups, layers, structure.context, len(structure.kinds) - layers)


def _shape(groups: tuple[LayerGroup, ...], layers: int, context: int | None, others: int) -> Shape:
    packed = [group for group in groups if group.window is None]
    sliding = [group for group in groups if group.window is not None]
    one = (packed or sliding)[0]
    shapes = {(group.num_heads, group.num_heads_kv, group.head_dim) for group in groups}
    is_mixed = len(shapes) > 1 or len(sliding) > 1
    return Shape(layers, one.num_heads, one.num_heads_kv, one.head_dim, context, sum(group.count for group in sliding),
                 max((group.window for group in sliding), default=0), others, groups if is_mixed else ())


def _whole(folder: Path, file: Path) -> dict:
    """What the file holds; ValueError where it is no JSON object, or asks for layers without end."""
    try:
        whole = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"model: got {str(folder)!r}, supported: a folder with a {NAME} "
                         f"({type(error).__name__})") from error
    if not isinstance(whole, dict):
        raise ValueError(f"model: got {str(folder)!r}, supported: a folder with a {NAME} that holds a JSON object, not "
                         f"a {type(whole).__name__}")
    for name, value in _entries(whole):
        if isinstance(value, int) and COUNTS.search(name) and value > MOST:
            raise ValueError(f"{name}: got {value:.3g} in {file}, supported: at most {MOST:,}")
        if name in ("num_hidden_layers", "num_layers", "n_layers", "n_layer") and value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name}: got {_short(value)} in {file}, supported: 1 or more")
    return whole


def _entries(whole: dict) -> Iterator[tuple[str, object]]:
    """Keys and values of an object and of the objects directly in it."""
    for name, value in whole.items():
        yield name, value
        if isinstance(value, dict):
            yield from value.items()


def _config(file: Path, whole: dict):
    """transformers' configuration of a file; ValueError where it knows the model type or one of the keys not."""
    try:
        import transformers
    except ImportError:
        raise ValueError(f"model: transformers is not installed, and its classes alone know which layers of {file} "
                         f"keep K and V; supported: {extras.remedy('hf')}, {BY_HAND}") from None
    kind = whole.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise ValueError(f"model_type: got {_short(kind)} in {file}, which transformers {transformers.__version__} "
                         f"does not know, supported: one of its model types, {BY_HAND}")
    transformers.utils.logging.set_verbosity_error()  # what it warns of is told here, in a refusal
    made = transformers.CONFIG_MAPPING[kind]
    read, _ = transformers.PreTrainedConfig.get_config_dict(str(file.parent), local_files_only=True)
    try:
        config = made.from_dict(copy.deepcopy(read))
        text = config.get_text_config(decoder=True)
    except Exception as error:  # of the model type's own checks, of any class
        name, value = _at_fault(made, read)
        raise ValueError(f"{name}: got {value} in {file}, which transformers {transformers.__version__} cannot read: "
                         f"{type(error).__name__}: " + " ".join(str(error).split())[:300]) from error
    stated = {name: value for name, value in _entries(whole) if value}
    if unknown := _not_understood(text, stated.keys()):
        name = unknown[0]
        raise ValueError(f"{name}: got {_short(stated[name])} in {file}, a key that {type(text).__name__} of "
                         f"transformers {transformers.__version__} does not know, so which layers keep K and V is not "
                         "certain; "
                         f"supported: the keys of the model type {text.model_type}, {BY_HAND}")
    return config


def _short(value) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _at_fault(made: type, whole: dict) -> tuple[str, str]:
    """The first key, and its value, without which transformers reads the file; ("model", "keys ...") if none is."""
    for part in (whole, *(value for value in whole.values() if isinstance(value, dict))):
        for name, value in list(part.items()):
            del part[name]
            try:
                made.from_dict(copy.deepcopy(whole)).get_text_config(decoder=True)
                return name, _short(value)
            except Exception:  # another key, or this one is needed
                pass
            finally:
                part[name] = value
    return "model", "keys"


def _not_understood(config, stated: Set[str]) -> list[str]:
    """Keys of the file that a configuration only carries along, and that may concern its cache."""
    known = {name for cls in type(config).__mro__ for name in (*vars(cls), *getattr(cls, "__annotations__", ()))}
    known |= set(getattr(type(config), "attribute_map", {}))
    return sorted(name for name in vars(config) if name in stated - known and SHAPES.search(name)
                  and not SHAPELESS.search(name) and not _is_read(type(config), name))


def _is_read(cls: type, name: str) -> bool:
    """Whether the code of a model type asks for a key that its configuration does not declare."""
    folder = Path(inspect.getfile(cls)).parent
    asked = re.compile(rf"[\"']{re.escape(name)}[\"']|config\.{re.escape(name)}\b|self\.{re.escape(name)}\b")
    return any(asked.search(path.read_text(encoding="utf-8")) for path in folder.glob("*.py"))


def _check_layer(file: Path, config, layer) -> None:
    """ValueError for a layer whose cache is not K and V of one shape for each head."""
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(f"model: {file} is of latent attention (kv_lora_rank), supported: K and V of each head")
    if layer.head_dim != layer.value_dim:
        key = next((name for name in ("v_head_dim", "value_head_dim") if getattr(config, name, None)), "model")
        raise ValueError(f"{key}: layer {layer.index} of {file} has K of {layer.head_dim} channels and V of "
                         f"{layer.value_dim}, supported: K and V of one shape")
    if not layer.kind.attends:
        raise ValueError(f"layer_types: layer {layer.index} of {file} has a cache of transformers' class "
                         f"{layer.kind.cache}, supported: full, sliding and chunked attention")
