"""Private names of other packages: all are in one file, and what stands for a missing one gives the same."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lowbit_attn
from lowbit_attn import _private, ampere, hopper

FOLDERS = [Path(package.__file__).parent for package in (lowbit_attn, hopper, ampere)]
# of an object of another package: torch._C, os.environ._data, cutlass._mlir
PRIVATE = re.compile(r"\b(torch|os|numpy|np|cutlass|cute|tilelang|T|tvm|transformers)(\.\w+)*\._[A-Za-z]\w*")


def without(monkeypatch, path: str, owner: object = torch) -> None:
    """Take a private name away."""
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    monkeypatch.delattr(owner, name, raising=False)


# the same as a text that is looked up: "_C._cuda_getDevice"
LOOKED_UP = re.compile(r"[\"']_[A-Za-z]\w*\.\w")


def test_private_names_are_in_one_file():
    """Where they are looked up, with a public name beside each; kernels use none."""
    texts = {path.name: path.read_text() for folder in FOLDERS for path in folder.rglob("*.py")}
    assert not [match[0] for text in texts.values() if (match := PRIVATE.search(text))]
    assert [name for name, text in texts.items() if LOOKED_UP.search(text)] == ["_private.py"]
    for text in ("torch._C._cuda_getDevice()", "os.environ._data", "from cutlass._mlir import ir", "torch._dynamo.x"):
        assert PRIVATE.search(text)
    assert not PRIVATE.search("self.kv._empty(torch.int8, tensor._base, cute.arch.load)")


@pytest.mark.parametrize("path, public", [
    ("_C._cuda_getDevice", torch.cuda.current_device), ("_C._cuda_getCurrentRawStream", _private.public_raw_stream),
    ("_C._cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)])
def test_functions_of_torch_have_a_public_one_in_their_place(monkeypatch, path, public):
    name = path.split(".")[-1]
    monkeypatch.setattr(torch._C, name, lambda *given: 7, raising=False)
    assert _private._either(path, public)() == 7
    without(monkeypatch, path)
    assert _private._either(path, public) is public


def test_the_public_stream_is_the_current_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=40 + index))
    assert _private.public_raw_stream(2) == 42


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.gpu
def test_public_functions_of_torch_give_the_same_on_a_device():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert _private.raw_stream(0) == _private.public_raw_stream(0) == stream.cuda_stream
        assert _private.current_device() == torch.cuda.current_device()
        assert _private.is_stream_capturing() is torch.cuda.is_current_stream_capturing() is False


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_new_memory_is_alike(monkeypatch, dtype):
    fast = _private.empty_strided("cpu")
    without(monkeypatch, "_C._dynamo.guards._empty_strided_cpu")
    plain = _private.empty_strided("cpu")
    assert fast is not plain
    for shape, strides in (((2, 3, 8), (24, 8, 1)), ((4,), (1,)), ((3, 2), (1, 3))):
        one, other = fast(shape, strides, dtype), plain(shape, strides, dtype)
        assert (one.shape, one.stride(), one.dtype, one.device) == (other.shape, other.stride(), dtype, other.device)


def test_static_addresses_are_a_hint(monkeypatch):
    x = torch.zeros(3)
    _private.mark_static_address(x)
    assert x._dynamo_static_input_type == "guarded"
    without(monkeypatch, "_dynamo.mark_static_address")
    y = torch.zeros(3)
    _private.mark_static_address(y)
    assert not hasattr(y, "_dynamo_static_input_type") and torch.equal(x, y)


@pytest.mark.parametrize("value", [None, "", "ampere-sm_80", "\u00e9"])
def test_both_ways_read_the_environment_as_it_is(monkeypatch, value):
    fast = _private.environment("LOWBIT_ATTN_TRIAL")
    monkeypatch.setattr(_private, "_find", lambda *given: None)
    plain = _private.environment("LOWBIT_ATTN_TRIAL")
    monkeypatch.delenv("LOWBIT_ATTN_TRIAL", raising=False)
    if value is not None:
        monkeypatch.setenv("LOWBIT_ATTN_TRIAL", value)
    assert fast() == plain() == (None if value is None else os.fsencode(value))
    assert fast.func != plain.func


def test_a_group_that_does_not_tell_its_timeout_has_the_default():
    assert _private.group_timeout(SimpleNamespace()) is None


@pytest.mark.parametrize("check", (_private.assert_async, _private.public_assert))
def test_a_truth_on_a_device_is_asserted_with_words(check):
    check(torch.tensor(True), "no")
    with pytest.raises(RuntimeError, match="why it is none"):
        check(torch.tensor(False), "why it is none")
