"""Codebooks of all layers of a model as one value and one safetensors file.

A code stands for ``c`` consecutive stored channels and names one of 256 entries of c fp16 values: 8 / c bits an
element. Stored channel i of a KV head's keys is channel ``k_order[i]`` of the model's, times ``k_weights[k_order[i]]``;
values are stored in the model's order. Group y of the entries holds stored channels c y to c y + c - 1.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from lowbit_attn import tensor_file
from lowbit_attn.errors import CodebookFileError
from lowbit_attn.precision import on_own_defaults

VERSION = 1  # of the tensors' meaning, in every hash of codes; tensor_file.py counts the versions of files
ENTRIES = 256
VEC_SIZES = (2, 4, 8)  # channels a code: 4, 2 and 1 bits
ROPES = ("post", "pre")
ROPE_TYPES = ("default", "linear", "llama3")  # transformers' rotary embeddings whose frequencies know no length
TENSORS = ("k_entries", "v_entries", "k_order", "k_weights", "rope_inv_freq")
KIND = "lowbit_attn codebooks"
MOST_CHANNELS = 1 << 15  # of a head: k_order is int16
_DTYPES = {"k_entries": torch.float16, "v_entries": torch.float16, "k_order": torch.int16, "k_weights": torch.float32,
           "rope_inv_freq": torch.float32}
# Types of those entries of the metadata that anything reads: values, which may be None, and lists; others are free
_NUMBER = (int, float)
_METADATA = {"model": str, "config_hash": str, "weights_hash": str, "tokens": int, "held_out_tokens": int}
_METADATA_LISTS = {"rope_type": str, "warnings": str, "logit_error": (*_NUMBER, type(None)),
                   "value_error": (*_NUMBER, type(None)), "unused_entries": int}


FILE = tensor_file.Kind(KIND, "codebooks", "lowbit-attn calibrate or Codebooks.save", CodebookFileError)


@dataclass(frozen=True, eq=False)
class Codebooks:
    """Codebooks of every layer of a model.

    Args:
        format: name of the format that they were made for ("cq2", "kcq4vcq2", "k4vcq2", ...).
        rope: "post", codes of keys after their rotary embedding, or "pre", of keys turned back to before it.
        head_dim: channels of a head.
        k_entries: fp16 [layers, num_heads_kv, head_dim / c, 256, c]; None where K is affine.
        v_entries: the same of V; None where V is affine.
        k_order: int16 [layers, num_heads_kv, head_dim], the model's channel in each stored one; None: as they are.
        k_weights: fp32 [layers, num_heads_kv, head_dim] by the model's channel, factors of keys (and divisors of
            queries), positive; None: 1. With rope="pre" channels d and d + head_dim / 2 have one weight.
        rope_inv_freq: fp32 [layers, head_dim / 2], radians a position, with rope="pre" only.
        metadata: what can be written as JSON: "model", "config_hash", "weights_hash", "rope_type" (a list of names),
            provenance, errors on held-out text by layer, "warnings".

    Tensors are on the CPU. ValueError names the field that does not fit.
    """

    format: str
    rope: str
    head_dim: int
    k_entries: torch.Tensor | None
    v_entries: torch.Tensor | None
    k_order: torch.Tensor | None = None
    k_weights: torch.Tensor | None = None
    rope_inv_freq: torch.Tensor | None = None
    metadata: dict = field(default_factory=dict)
    version: int = VERSION

    @on_own_defaults
    def __post_init__(self):
        _detach(self)
        if not isinstance(self.format, str):
            raise ValueError(f"format: got {self.format!r}, supported: the name of a format")
        if self.version != VERSION:
            raise ValueError(f"version: got {self.version}, supported: {VERSION}; calibrate again with this version")
        if self.rope not in ROPES:
            raise ValueError(f"rope: got {self.rope!r}, supported: {', '.join(ROPES)}")
        if not isinstance(self.head_dim, int) or not 2 <= self.head_dim <= MOST_CHANNELS:
            raise ValueError(f"head_dim: got {self.head_dim!r}, supported: 2 to {MOST_CHANNELS} channels")
        _check_metadata(self.metadata)
        if self.k_entries is None and self.v_entries is None:
            raise ValueError("k_entries, v_entries: got neither, supported: codebooks of K, of V or of both")
        for name in ("k_entries", "v_entries"):
            _check_entries(name, getattr(self, name), self.head_dim)
        if None not in (self.k_entries, self.v_entries) and self.k_entries.shape[:2] != self.v_entries.shape[:2]:
            raise ValueError(f"v_entries: got {list(self.v_entries.shape[:2])} layers and KV heads, supported: those "
                             f"of k_entries, {list(self.k_entries.shape[:2])}")
        if self.k_entries is None:
            self._check_no_keys()
        else:
            self._fill_keys()
            _check_weights(self.k_weights, self.head_dim, paired=self.rope == "pre")
        self._check_rope()

    def _check_no_keys(self) -> None:
        for name in ("k_order", "k_weights"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: got a tensor without k_entries, supported: None, for K is affine")
        if self.rope != "post":
            raise ValueError("rope: got 'pre' without k_entries, supported: 'post', for V has no positions")

    def _fill_keys(self) -> None:
        """Give the fields of K their defaults and dtypes."""
        shape = (self.layers, self.num_heads_kv, self.head_dim)
        order = torch.arange(self.head_dim).expand(shape) if self.k_order is None else self.k_order
        weights = torch.ones(shape) if self.k_weights is None else self.k_weights
        for name, x in (("k_order", order), ("k_weights", weights)):
            wants_floats = _DTYPES[name].is_floating_point
            if (not isinstance(x, torch.Tensor) or x.shape != shape or x.is_floating_point() != wants_floats
                    or x.dtype == torch.bool):
                raise ValueError(f"{name}: got {_shape(x)}, supported: {'floats' if wants_floats else 'integers'} "
                                 f"{list(shape)}")
            if name == "k_order":
                _check_order(x, self.head_dim)
            object.__setattr__(self, name, x.detach().to("cpu", _DTYPES[name]).contiguous())

    def _check_rope(self) -> None:
        freq = self.rope_inv_freq
        if self.rope == "post":
            if freq is not None:
                raise ValueError("rope_inv_freq: got a tensor with rope='post', supported: None")
            return
        shape = [self.layers, self.head_dim // 2]
        if not isinstance(freq, torch.Tensor) or list(freq.shape) != shape or not freq.is_floating_point():
            raise ValueError(f"rope_inv_freq: got {_shape(freq)}, supported with rope='pre': fp32 {shape}")
        if self.head_dim % 2 or not bool((freq.isfinite() & (freq >= 0)).all()):
            raise ValueError("rope_inv_freq: got negative or non-finite values or an odd head_dim, supported: radians "
                             "a position, of an even head_dim")
        if unknown := [kind for kind in self.metadata.get("rope_type", ()) if kind not in ROPE_TYPES]:
            raise ValueError(f"rope_type: got {', '.join(map(str, unknown))}, supported with rope='pre': "
                             f"{', '.join(ROPE_TYPES)}")
        object.__setattr__(self, "rope_inv_freq", freq.detach().to("cpu", torch.float32).contiguous())

    # ---- sizes and identity

    @property
    def layers(self) -> int:
        return self._entries.shape[0]

    @property
    def num_heads_kv(self) -> int:
        return self._entries.shape[1]

    @property
    def _entries(self) -> torch.Tensor:
        return self.v_entries if self.k_entries is None else self.k_entries

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that there are, by name."""
        return {name: x for name in TENSORS if (x := getattr(self, name)) is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of all layers."""
        return sum(x.nbytes for x in self.tensors.values())

    @cached_property
    def hash(self) -> str:
        """sha256 over format, rope, head_dim and tensors, in hex: the same codes mean the same values."""
        return _digest(self)

    def layer(self, i: int) -> "LayerCodebooks":
        """What the cache of layer i takes; IndexError beyond the layers that there are."""
        if not 0 <= i < self.layers:
            raise IndexError(f"layer: got {i}, supported: 0 to {self.layers - 1}, the layers of these codebooks")
        return LayerCodebooks(self.format, self.rope, self.head_dim,
                              **{name: self.tensors[name][i] if name in self.tensors else None for name in TENSORS})

    # ---- the file

    def save(self, path: str | os.PathLike) -> None:
        """Write one safetensors file, whole or not at all; its hash covers the metadata, too."""
        about = {"format": self.format, "rope": self.rope, "head_dim": str(self.head_dim),
                 "metadata": tensor_file.text_of(self.metadata, "metadata")}
        tensor_file.write(path, FILE, self.tensors, about)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Codebooks":
        """Read a file of ``save``; FileNotFoundError, or CodebookFileError that says what is wrong with it.

        A file of version 1 has a hash of the tensors alone: its metadata are checked for their types.
        """
        about, tensors = tensor_file.read(path, FILE)
        try:
            found = _made(cls, about, tensors)
        except KeyError as error:
            raise CodebookFileError(f"codebooks: {str(path)!r} does not say its {error}") from None
        except (ValueError, RuntimeError) as error:  # RuntimeError: shapes that torch cannot hold
            raise CodebookFileError(f"codebooks: {str(path)!r}: {error}") from None
        if about["version"] == tensor_file.UNHASHED and found.hash != about.get("hash"):
            raise CodebookFileError(f"codebooks: {str(path)!r} was changed after it was written: its contents do not "
                                    "have the hash that it names")
        return found


@dataclass(frozen=True, eq=False)
class LayerCodebooks:
    """Codebooks of one layer, fields as in Codebooks without the axis of layers; tensors on any one device."""

    format: str
    rope: str
    head_dim: int
    k_entries: torch.Tensor | None
    v_entries: torch.Tensor | None
    k_order: torch.Tensor | None = None
    k_weights: torch.Tensor | None = None
    rope_inv_freq: torch.Tensor | None = None

    def __post_init__(self):
        _detach(self)

    @property
    def num_heads_kv(self) -> int:
        return (self.v_entries if self.k_entries is None else self.k_entries).shape[0]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that there are, by name."""
        return {name: x for name in TENSORS if (x := getattr(self, name)) is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in self.tensors.values())

    @cached_property
    def hash(self) -> str:
        """sha256 over rope, head_dim and tensors, in hex."""
        return _digest(self)

    def to(self, device: torch.device | str) -> "LayerCodebooks":
        """These codebooks on a device; themselves if they are there."""
        device = torch.device(device)
        if all(x.device == device for x in self.tensors.values()):
            return self
        moved = replace(self, **{name: x.to(device) for name, x in self.tensors.items()})
        vars(moved)["hash"] = self.hash
        return moved


def _made(cls: type[Codebooks], about: dict[str, str], tensors: dict[str, torch.Tensor]) -> Codebooks:
    """Codebooks of what a file holds; KeyError for what it does not say, ValueError for what does not fit."""
    format, rope, head_dim, metadata = (about[name] for name in ("format", "rope", "head_dim", "metadata"))
    if unknown := sorted(set(tensors) - set(TENSORS)):
        raise ValueError(f"it has tensors {unknown}, supported: {', '.join(TENSORS)}")
    for name, x in tensors.items():
        if x.dtype != _DTYPES[name]:
            raise ValueError(f"{name}: got {_shape(x)}, supported: {_DTYPES[name]}")
    return cls(format, rope, tensor_file.whole_number(head_dim, "head_dim", 2, MOST_CHANNELS),
               **{name: tensors.get(name) for name in TENSORS}, metadata=tensor_file.value_of(metadata, "metadata"))


def _detach(books: "Codebooks | LayerCodebooks") -> None:
    """Leave out of any graph what requires grad: graphs are not copied."""
    for name in TENSORS:
        x = getattr(books, name)
        if isinstance(x, torch.Tensor) and x.requires_grad:
            object.__setattr__(books, name, x.detach())


def _digest(books: Codebooks | LayerCodebooks) -> str:
    digest = hashlib.sha256(json.dumps([VERSION, books.format, books.rope, books.head_dim]).encode())
    for name, x in books.tensors.items():
        digest.update(f"{name} {list(x.shape)} {x.dtype} ".encode())
        digest.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _check_metadata(metadata) -> None:
    """ValueError unless this is an object of JSON whose entries have the types with which they are read."""
    if not isinstance(metadata, dict) or not all(isinstance(name, str) for name in metadata):
        raise ValueError(f"metadata: got a {type(metadata).__name__}, supported: a dict by names")
    tensor_file.text_of(metadata, "metadata")
    for name, kind in _METADATA.items():
        value = metadata.get(name)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"metadata: {name}: got {value!r:.60}, supported: {kind.__name__}")
    for name, kinds in _METADATA_LISTS.items():
        value = metadata.get(name, [])
        if not isinstance(value, list | tuple) or not all(isinstance(x, kinds) for x in value):
            names = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
            raise ValueError(f"metadata: {name}: got {value!r:.60}, supported: a list of {names}")


def _shape(x) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)


def _check_entries(name: str, entries, head_dim: int) -> None:
    if entries is None:
        return
    if not isinstance(entries, torch.Tensor) or entries.dim() != 5 or entries.dtype != _DTYPES[name]:
        raise ValueError(f"{name}: got {_shape(entries)}, supported: fp16 [layers, num_heads_kv, head_dim / c, "
                         f"{ENTRIES}, c]")
    groups, count, vec_size = entries.shape[2:]
    if vec_size not in VEC_SIZES or count != ENTRIES:
        raise ValueError(f"{name}: got {count} entries of {vec_size} channels, supported: {ENTRIES} of "
                         f"{', '.join(map(str, VEC_SIZES))}")
    if not min(entries.shape[:2]):
        raise ValueError(f"{name}: got {_shape(entries)}, supported: one layer and one KV head or more")
    if groups * vec_size != head_dim:
        raise ValueError(f"{name}: got {groups} groups of {vec_size} channels, supported: head_dim = {head_dim} in all")
    if not bool(entries.isfinite().all()):
        raise ValueError(f"{name}: got NaN or infinities, supported: finite entries")


def _check_order(order: torch.Tensor, head_dim: int) -> None:
    if not bool((order.long().sort(-1).values == torch.arange(head_dim)).all()):
        raise ValueError(f"k_order: got a channel twice or beyond {head_dim - 1}, supported: permutations of the "
                         "channels of a head")


def _check_weights(weights: torch.Tensor, head_dim: int, paired: bool) -> None:
    if not bool((weights.isfinite() & (weights > 0)).all()):
        raise ValueError("k_weights: got NaN, infinities or values that are not positive, supported: positive factors")
    if paired and not torch.equal(weights[..., : head_dim // 2], weights[..., head_dim // 2 :]):
        raise ValueError("k_weights: got two weights for channels that turn together, supported with rope='pre': one "
                         "for channels d and d + head_dim / 2")
