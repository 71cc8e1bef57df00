"""Which layers of a transformers model keep K and V, of what shape, and which modules of the model are their attention.

Configurations say this under keys that differ from one model type to the next, so no such key is read here. Kinds of
layers and windows are those of the cache that transformers itself makes for a configuration. Shapes come from the
model: transformers builds it on torch's "meta" device, where tensors have shapes and no memory, and one short step
shows what each layer brings to the cache.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin, cache_utils
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
STATE, SHARED, NONE, UNKNOWN = "state", "shared", "none", "unknown"
STEP = 3  # tokens of the step that shows the shapes

# The name under which this transformers passes a cache to ``generate`` and to models
CACHE_ARGUMENT = next(name for name in ("cache", "past_key_values")
                      if name in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters)

_State = getattr(cache_utils, "LinearAttentionCacheLayerMixin", ())
_Dummy = getattr(cache_utils, "DummyLayer", ())
_Indexed = getattr(cache_utils, "DynamicIndexedLayer", ())


@dataclass(frozen=True)
class Kind:
    """What transformers' cache is for one layer.

    name: FULL, SLIDING, CHUNKED; STATE: a state of fixed size (Mamba, linear attention); SHARED: reads the K and V of
    an earlier layer; NONE: nothing; UNKNOWN: a cache layer of another class. window: how many tokens a query sees, None
    for all. has_state: a state of fixed size is kept too. cache: name of the cache layer's class.
    """

    name: str
    window: int | None = None
    has_state: bool = False
    cache: str = ""

    @property
    def attends(self) -> bool:
        return self.name in (FULL, SLIDING, CHUNKED)


@dataclass(frozen=True)
class Layer:
    """A layer that keeps K [tokens, num_heads_kv, head_dim] and V [tokens, num_heads_kv, value_dim] of its own."""

    index: int
    kind: Kind
    num_heads: int
    num_heads_kv: int
    head_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        """Elements of K and V of one token."""
        return self.num_heads_kv * (self.head_dim + self.value_dim)


@dataclass(frozen=True)
class Structure:
    """kinds: of all layers of the cache; layers: those that keep K and V of their own, by index; blocks: names of the
    attention modules in the model, by layer; cache: transformers' class of cache for this model; context: positions
    that the model was made for, None if its configuration does not say."""

    kinds: tuple[Kind, ...]
    layers: tuple[Layer, ...]
    blocks: tuple[str, ...]
    cache: type[DynamicCache]
    context: int | None

    @property
    def channels(self) -> int:
        """Elements of K and V of one token in all layers."""
        return sum(layer.channels for layer in self.layers)


def text_config(config):
    """The configuration of the language model inside a configuration with pictures or sound; else this one."""
    return config.get_text_config(decoder=True)


def kinds_of(config) -> tuple[Kind, ...]:
    """The kind of every layer, from the cache that transformers makes for a configuration.

    Raises what transformers raises for a configuration that it makes no cache for.
    """
    return _kinds(DynamicCache(config=config).layers, config)


def _kinds(layers: list, config) -> tuple[Kind, ...]:
    text = text_config(config)
    stated = getattr(text, "layer_types", None) or ()
    modes = getattr(text, "kv_sharing_modes", None) or ()
    kinds = [_kind(layer, stated[i] if i < len(stated) else None, modes[i] if i < len(modes) else None)
             for i, layer in enumerate(layers)]
    count = getattr(text, "num_hidden_layers", None) or 0
    missing = max(0, count - len(kinds)) if getattr(text, "num_kv_shared_layers", 0) else 0
    return (*kinds, *[Kind(SHARED)] * missing)  # before transformers had DummyLayer, its cache ended before these


def _kind(layer, stated: str | None, mode: str | None) -> Kind:
    name = type(layer).__name__
    if isinstance(layer, _Dummy):
        return Kind(NONE if mode is None else SHARED, cache=name)
    has_state = isinstance(layer, _State)
    if not isinstance(layer, CacheLayerMixin):
        return Kind(STATE if has_state else UNKNOWN, has_state=has_state, cache=name)
    base = [one for one in type(layer).__mro__ if one.__module__ == cache_utils.__name__]
    if type(layer) is not base[0] or isinstance(layer, _Indexed):
        return Kind(UNKNOWN, has_state=has_state, cache=name)
    if isinstance(layer, DynamicSlidingWindowLayer):
        return Kind(CHUNKED if stated == CHUNKED else SLIDING, layer.sliding_window, has_state, name)
    return Kind(FULL if isinstance(layer, DynamicLayer) else UNKNOWN, None, has_state, name)


def layer_configs(config) -> list:
    """The configuration of each layer, where layers differ; else the text model's own, once for every layer."""
    text = text_config(config)
    return list(getattr(text, "per_layer_config", None) or [text] * len(kinds_of(config)))


_structures: WeakKeyDictionary = WeakKeyDictionary()


def of_model(model: torch.nn.Module) -> Structure:
    """The structure of a transformers model; ValueError where it cannot be seen.

    Looked at once a model: its shapes without its weights, or where its code needs weights, itself.
    """
    if model not in _structures:
        try:
            found = _of_first(model.config, [lambda: type(model)(_plain(model.config))])
        except ValueError:
            with _eager(model):
                found = _structure(model.config, model, [])
        _structures[model] = found
    return _structures[model]


def of_config(config) -> Structure:
    """The structure of the language model that transformers makes of a configuration; ValueError where it makes none,
    or where the layers' shapes cannot be seen."""
    return _of_first(config, [lambda: AutoModelForCausalLM.from_config(_plain(text_config(config))),
                              lambda: AutoModelForCausalLM.from_config(_plain(config)),
                              lambda: AutoModel.from_config(_plain(text_config(config)))])


def attention_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The attention modules of a model's layers that keep K and V, each once, by layer."""
    return [model.get_submodule(name) for name in of_model(model).blocks]


def rotary_module(model: torch.nn.Module, block: str) -> torch.nn.Module | None:
    """The module that gives an attention block, by its name, cos and sin: the nearest one named ``rotary_emb``."""
    parts = block.split(".")
    for end in range(len(parts), -1, -1):
        found = getattr(model.get_submodule(".".join(parts[:end])), "rotary_emb", None)
        if isinstance(found, torch.nn.Module):
            return found
    return None


def new_cache(model: torch.nn.Module, rounded: type) -> DynamicCache:
    """An empty cache of the class that the model takes, with ``rounded`` mixed in before it."""
    own = of_model(model).cache
    made = type(rounded.__name__, (rounded, own), {})
    return made(config=model.config) if own is DynamicCache else made()


def _plain(config):
    """A copy of a configuration without the choices that a loaded model makes for its own machine."""
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # weights of another form have no meta tensors, and the shapes are the same
    return config


@contextmanager
def _eager(model: torch.nn.Module) -> Iterator[None]:
    """Within, the model attends by its own code."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _of_first(config, makers: list[Callable[[], torch.nn.Module]]) -> Structure:
    """The structure of the first model that can be made on the meta device."""
    reasons = []
    for make in makers:
        try:
            with torch.device("meta"):
                model = make().to(torch.bfloat16).eval()  # experts of fused products take no fp32
        except Exception as error:  # of the model type's own code, of any class
            reasons.append(error)
        else:
            return _structure(config, model, [])
    return _structure(config, None, reasons)


def _structure(config, model: torch.nn.Module | None, reasons: list[Exception]) -> Structure:
    """What one short step of a model shows; reasons: why there is none."""
    try:
        kinds = kinds_of(config)  # after the model, whose code may bring cache layers of its own
    except Exception as error:  # of the model type's own code, of any class
        raise ValueError(f"transformers {transformers.__version__} makes no cache for this configuration: "
                         f"{_line(error)}") from error
    wanted = {i for i, kind in enumerate(kinds) if kind.attends or kind.name == UNKNOWN}
    notes = _Notes(DynamicCache) if model is None else _noted(model, config, wanted, reasons)
    if reasons and (missing := sorted(wanted - notes.shapes.keys())):
        raise ValueError(f"the shapes of layers {_listed(missing)} cannot be seen: transformers "
                         f"{transformers.__version__} says {_line(reasons[-1])}")
    if not notes.shapes:
        raise ValueError("no layer brings K and V to a cache")
    configs = layer_configs(config)
    kinds += _kinds(notes.layers, config)[len(kinds) :]  # models that run layers again give each run a cache of its own
    kinds = tuple(kind if i in notes.shapes or not kind.attends else Kind(NONE) for i, kind in enumerate(kinds))
    layers = tuple(_layer(i, kinds[i], configs[i] if i < len(configs) else configs[-1], *notes.shapes[i])
                   for i in sorted(notes.shapes))
    context = getattr(text_config(config), "max_position_embeddings", None)
    context = context if isinstance(context, int) and context > 0 else None
    return Structure(kinds, layers, tuple(dict.fromkeys(notes.blocks[i] for i in sorted(notes.blocks))), notes.cache,
                     context)


def _layer(index: int, kind: Kind, config, key: torch.Size, value: torch.Size) -> Layer:
    heads = getattr(config, "num_attention_heads", None)
    heads = heads if isinstance(heads, int) and heads > 0 and heads % key[1] == 0 else key[1]
    return Layer(index, kind, heads, key[1], key[3], value[3])


class _Notes:
    """What layers brought to a cache, by index: (shape of K, shape of V) and the name of the module that called.
    layers: of the cache afterwards."""

    def __init__(self, cache: type[DynamicCache]):
        self.cache, self.layers = cache, []
        self.shapes: dict[int, tuple[torch.Size, torch.Size]] = {}
        self.blocks: dict[int, str] = {}


def _noted(model: torch.nn.Module, config, wanted: set[int], reasons: list[Exception]) -> _Notes:
    """What the layers of a model bring to transformers' cache, or to the model's own class of it."""
    mask = torch.ones(1, STEP, dtype=torch.long, device=model.device)
    for more in ({}, {"attention_mask": mask}):  # without a mask some look for padding, which needs values
        notes = _Notes(DynamicCache)
        try:
            _step(model, DynamicCache(config=config), notes, **more)
        except Exception as error:  # of the model's code
            reasons.append(error)
        if wanted <= notes.shapes.keys():
            reasons.clear()  # what broke off behind the last layer changes no shape
        if not reasons:
            break
    if notes.shapes or not wanted:
        return notes
    try:  # without a cache, for which the model makes its own
        own = getattr(model(input_ids=_tokens(model), use_cache=True), CACHE_ARGUMENT, None)
        if isinstance(own, DynamicCache) and type(own) is not DynamicCache:
            notes = _Notes(type(own))
            _step(model, own, notes)
    except Exception as error:
        reasons.append(error)
    return notes


def _tokens(model: torch.nn.Module) -> torch.Tensor:
    return torch.zeros(1, STEP, dtype=torch.long, device=model.device)


def _step(model: torch.nn.Module, cache, notes: _Notes, **more) -> None:
    """Read a few tokens through a cache, which is told of by ``notes``."""
    update, running = cache.update, []

    def noted(key_states, value_states, layer_idx, *args, **kwargs):
        notes.shapes[layer_idx] = key_states.shape, value_states.shape
        notes.blocks[layer_idx] = running[-1]
        return update(key_states, value_states, layer_idx, *args, **kwargs)

    cache.update = noted
    try:
        with _running(model, running), torch.no_grad():
            model(input_ids=_tokens(model), use_cache=True, **{CACHE_ARGUMENT: cache}, **more)
    finally:
        notes.layers = cache.layers


@contextmanager
def _running(model: torch.nn.Module, running: list[str]) -> Iterator[None]:
    """Within, ``running`` lists the names of the modules whose forward is running, the innermost last."""
    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
        hooks.append(module.register_forward_hook(lambda *_: running.pop() and None, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _line(error: Exception) -> str:
    """An error's class and text in one line."""
    return f"{type(error).__name__}: " + " ".join(str(error).split())[:300]


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:4]))
    return shown + (f" and {len(numbers) - 4} more" if len(numbers) > 4 else "")
