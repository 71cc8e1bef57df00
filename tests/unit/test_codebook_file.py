"""Codebooks as a value and as a file: defaults, identity, and what is refused by the name of its field."""

import json
import struct
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load, save_file

from lowbit_attn.codebooks import Codebooks
from lowbit_attn.codebooks.file import CodebookFileError

LAYERS, HEADS, DIM = 3, 2, 64


def entries(vec_size: int, head_dim: int = DIM) -> torch.Tensor:
    return torch.randn(LAYERS, HEADS, head_dim // vec_size, 256, vec_size).half()


def order() -> torch.Tensor:
    return torch.stack([torch.randperm(DIM) for _ in range(LAYERS * HEADS)]).view(LAYERS, HEADS, DIM).short()


def weights() -> torch.Tensor:
    half = torch.rand(LAYERS, HEADS, DIM // 2) + 0.1
    return torch.cat((half, half), -1)


def books(**changes) -> Codebooks:
    fields = dict(format="cq2", rope="post", head_dim=DIM, k_entries=entries(4), v_entries=entries(4), k_order=order(),
                  k_weights=weights(), metadata={"model": "tiny", "warnings": []})
    return Codebooks(**fields | changes)


def pre(**changes) -> Codebooks:
    return books(rope="pre", rope_inv_freq=torch.rand(LAYERS, DIM // 2), **changes)


@pytest.mark.parametrize("made", [
    books, pre, lambda: books(v_entries=None), lambda: books(k_entries=None, k_order=None, k_weights=None),
])
def test_a_file_gives_back_what_was_saved(made, tmp_path):
    saved = made()
    saved.save(tmp_path / "books.safetensors")
    found = Codebooks.load(tmp_path / "books.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["books.safetensors"]
    assert (found.format, found.rope, found.head_dim, found.metadata) == (
        saved.format, saved.rope, saved.head_dim, saved.metadata)
    assert found.tensors.keys() == saved.tensors.keys() and found.hash == saved.hash and found.nbytes == saved.nbytes
    assert all(torch.equal(x, saved.tensors[name]) and x.dtype == saved.tensors[name].dtype
               for name, x in found.tensors.items())


def test_layers_are_slices_with_hashes_of_their_own():
    whole = pre()
    layers = [whole.layer(i) for i in range(LAYERS)]
    assert len({layer.hash for layer in layers} | {whole.hash}) == LAYERS + 1
    assert torch.equal(layers[1].k_entries, whole.k_entries[1]) and layers[1].num_heads_kv == HEADS
    assert torch.equal(layers[2].rope_inv_freq, whole.rope_inv_freq[2])
    assert sum(layer.nbytes for layer in layers) == whole.nbytes
    assert layers[0].to("cpu") is layers[0]
    with pytest.raises(IndexError, match="layer: got 3, supported: 0 to 2"):
        whole.layer(3)


def test_order_and_weights_default_to_nothing():
    plain = books(k_order=None, k_weights=None)
    assert torch.equal(plain.k_order, torch.arange(DIM).expand(LAYERS, HEADS, DIM).short())
    assert (plain.k_weights == 1).all() and plain.k_order.dtype == torch.int16


def test_everything_that_gives_codes_their_meaning_is_in_the_hash():
    whole = pre()
    turned = whole.k_order.clone()
    turned[0, 0, :2] = turned[0, 0, :2].flip(0)
    changed = [replace(whole, format="kcq2vcq2"), replace(whole, k_entries=whole.k_entries + 1),
               replace(whole, v_entries=whole.v_entries + 1), replace(whole, k_order=turned),
               replace(whole, k_weights=whole.k_weights * 2), replace(whole, rope_inv_freq=whole.rope_inv_freq * 2)]
    assert len({whole.hash, *(other.hash for other in changed)}) == len(changed) + 1
    assert replace(whole, metadata={}).hash == whole.hash
    assert len({whole.layer(0).hash, *(other.layer(0).hash for other in changed)}) == len(changed) + 1


def bad(x: torch.Tensor, value: float) -> torch.Tensor:
    x = x.clone()
    x.view(-1)[7] = value
    return x


@pytest.mark.parametrize("changes, words", [
    (dict(version=2), "version: got 2, supported: 1"),
    (dict(rope="none"), "rope: got 'none', supported: post, pre"),
    (dict(head_dim=0), "head_dim: got 0"),
    (dict(head_dim=128), "k_entries: got 16 groups of 4 channels, supported: head_dim = 128"),
    (dict(metadata={"a": torch.ones(1)}), "metadata: .*JSON"),
    (dict(k_entries=None, v_entries=None), "k_entries, v_entries: got neither"),
    (dict(k_entries=None), "k_order: got a tensor without k_entries"),
    (dict(k_entries=torch.zeros(2, 3).half()), r"k_entries: got torch.float16 \[2, 3\]"),
    (dict(v_entries=entries(4).float()), "v_entries: got torch.float32"),
    (dict(v_entries=entries(4)[..., :100, :]), "v_entries: got 100 entries of 4 channels"),
    (dict(v_entries=entries(16)), "v_entries: got 256 entries of 16 channels, supported: 256 of 2, 4, 8"),
    (dict(v_entries=entries(4)[:2]), r"v_entries: got \[2, 2\] layers and KV heads"),
    (dict(k_entries=bad(entries(4), float("nan"))), "k_entries: got NaN or infinities"),
    (dict(v_entries=bad(entries(4), float("inf"))), "v_entries: got NaN or infinities"),
    (dict(k_order=order()[:2]), "k_order: got"),
    (dict(k_order=bad(order(), 64)), "k_order: got a channel twice or beyond 63"),
    (dict(k_weights=bad(weights(), 0.0)), "k_weights: .* not positive"),
    (dict(k_weights=bad(weights(), float("nan"))), "k_weights: .* not positive"),
    (dict(rope_inv_freq=torch.rand(LAYERS, DIM // 2)), "rope_inv_freq: got a tensor with rope='post'"),
    (dict(rope="pre"), "rope_inv_freq: got None"),
    (dict(rope="pre", rope_inv_freq=torch.rand(LAYERS, DIM // 2), metadata={"rope_type": ["default", "yarn"]}),
     r"rope_type: got yarn, supported with rope='pre': default, linear, llama3"),
    (dict(rope="pre", rope_inv_freq=torch.full((LAYERS, DIM // 2), -1.0)), "rope_inv_freq: got negative"),
    (dict(rope="pre", rope_inv_freq=torch.rand(LAYERS, DIM // 2), k_weights=bad(weights(), 3.0)),
     "k_weights: got two weights for channels that turn together"),
])
def test_fields_that_do_not_fit_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        books(**changes)


def test_files_that_cannot_be_read_say_why(tmp_path):
    path = tmp_path / "books.safetensors"
    with pytest.raises(FileNotFoundError, match="no file .*lowbit-attn calibrate .* makes one"):
        Codebooks.load(path)
    saved = books()
    saved.save(path)
    content = path.read_bytes()
    tensors = load(content)
    path.write_bytes(content[:-5])
    with pytest.raises(CodebookFileError, match="no whole safetensors file"):
        Codebooks.load(path)
    about = dict(kind="lowbit_attn codebooks", format="cq2", rope="post", head_dim="64", metadata="{}", version="1")
    save_file(tensors | {"v_entries": tensors["v_entries"] + 1}, path, about | {"hash": saved.hash})
    with pytest.raises(CodebookFileError, match="changed after it was written"):
        Codebooks.load(path)
    save_file(tensors, path)
    with pytest.raises(CodebookFileError, match="holds something else"):
        Codebooks.load(path)
    save_file(tensors, path, {"kind": about["kind"], "version": "1"})
    with pytest.raises(CodebookFileError, match="does not say its 'format'"):
        Codebooks.load(path)
    for version in ("7", "2"):
        save_file(tensors, path, about | {"version": version})
        with pytest.raises(CodebookFileError, match=f"is of version {version}, supported: 1, 3"):
            Codebooks.load(path)
    save_file(tensors | {"extra": torch.ones(1)}, path, about)
    with pytest.raises(CodebookFileError, match=r"has tensors \['extra'\]"):
        Codebooks.load(path)


def rewritten(path, change) -> None:
    """Write a file again after ``change`` of its text and tensors, its hash as it was."""
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    about, tensors = json.loads(content[8 : 8 + size])["__metadata__"], load(content)
    change(about, tensors)
    save_file(tensors, path, about)


def changed_about(about, **entries) -> None:
    about["metadata"] = json.dumps(json.loads(about["metadata"]) | entries)


@pytest.mark.parametrize("change", [
    lambda about, tensors: changed_about(about, config_hash="y" * 64),
    lambda about, tensors: changed_about(about, note="x"),
    lambda about, tensors: about.update(metadata="{}"),
    lambda about, tensors: about.update(more="x"),
    lambda about, tensors: about.update(hash="0" * 64),
    lambda about, tensors: about.update(version="1"),
    lambda about, tensors: about.update(version="1", metadata="{}"),
    lambda about, tensors: about.pop("hash"),
    lambda about, tensors: about.pop("metadata"),
    lambda about, tensors: about.update(format="kcq2vcq2"),
    lambda about, tensors: tensors.pop("v_entries"),
    lambda about, tensors: tensors.update(k_weights=tensors["k_weights"].double()),
    lambda about, tensors: tensors["v_entries"].view(-1)[:1].neg_(),
])
def test_everything_in_a_file_is_in_its_hash(change, tmp_path):
    path = tmp_path / "books.safetensors"
    books(metadata={"model": "tiny", "config_hash": "x" * 64}).save(path)
    rewritten(path, change)
    with pytest.raises(CodebookFileError, match="was changed after it was written|does not say its"):
        Codebooks.load(path)


def old_file(path, made: Codebooks, **entries) -> None:
    """A file as version 1 of them was: its hash is that of the codes alone."""
    about = dict(kind="lowbit_attn codebooks", version="1", format=made.format, rope=made.rope,
                 head_dim=str(made.head_dim), hash=made.hash, metadata=json.dumps(made.metadata))
    save_file(made.tensors, path, about | entries)


def test_files_of_version_1_are_read_and_their_metadata_checked(tmp_path):
    path, made = tmp_path / "books.safetensors", books()
    old_file(path, made)
    assert Codebooks.load(path).hash == made.hash and Codebooks.load(path).metadata == made.metadata
    for text in ("null", "[1]", "7", '"x"', "[" * 100_000 + "]" * 100_000, "{", '{"warnings": 5}', '{"model": [1]}',
                 '{"rope_type": "default"}', '{"rope_type": [1]}', '{"config_hash": 7}', '{"logit_error": [[]]}',
                 '{"tokens": ' + "9" * 5000 + "}"):
        old_file(path, made, metadata=text)
        with pytest.raises(CodebookFileError, match="metadata: "):
            Codebooks.load(path)
    for name, text in (("head_dim", "6_4"), ("head_dim", "9" * 5000), ("head_dim", "-64"), ("rope", "x"),
                       ("format", "cq4"), ("hash", "0")):
        old_file(path, made, **{name: text})
        with pytest.raises(CodebookFileError):
            Codebooks.load(path)


def test_order_and_weights_have_their_kinds():
    for changes, words in ((dict(k_order=order().half()), "k_order: got torch.float16 .*integers"),
                           (dict(k_order=order().long() + 65536), "k_order: got a channel twice or beyond 63"),
                           (dict(k_order=order() > 3), "k_order: got torch.bool"),
                           (dict(k_weights=weights().long() + 1), "k_weights: got torch.int64 .*floats"),
                           (dict(metadata=[1]), "metadata: got a list"), (dict(format=None), "format: got None"),
                           (dict(k_entries=entries(4)[:0], v_entries=entries(4)[:0]), "one layer and one KV head")):
        with pytest.raises(ValueError, match=words):
            books(**changes)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "books.safetensors"
    old = books()
    old.save(path)
    monkeypatch.setattr("lowbit_attn.tensor_file.os.replace", lambda *paths: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        books().save(path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name] and Codebooks.load(path).hash == old.hash
