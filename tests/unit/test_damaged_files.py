"""Three hundred damaged files of caches, codebooks and quantized models, drawn with a seed: each gives an exception
that is documented for it and no other, or what was written."""

import json
import random
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from damaged import ODD_NUMBERS, ODD_TEXT, draw, parts
from safetensors.torch import save_file

from lowbit_attn import FORMATS, KVCache, LayoutMismatchError, decode
from lowbit_attn.cache.saved import CacheFileError
from lowbit_attn.codebooks import Codebooks
from lowbit_attn.codebooks.file import CodebookFileError
from lowbit_attn.testing import assert_same_state, normal_codebooks

CACHES, OLD_CACHES, BOOKS, OLD_BOOKS, MODELS, CONFIGS = 80, 40, 80, 30, 50, 30
DIM = 64


def books_of(name: str):
    return normal_codebooks(name, 1, 1, DIM).layer(0) if FORMATS[name].needs_codebooks else None


def cache_file(path: Path, name: str) -> KVCache:
    cache = KVCache(name, 4, 1, DIM, max_batch=2, max_q_len=2, codebooks=books_of(name), sinks=4)
    generator = torch.Generator().manual_seed(0)
    for row, count in ((0, 300), (1, 20)):
        k, v = torch.randn(2, count, 1, DIM, generator=generator).half()
        cache.prefill(row, k, v)
    cache.save(path)
    return cache


def is_usable(cache: KVCache) -> bool:
    """Whether calls that read and write everything in a cache end without an error."""
    x = torch.randn(2, 1, 1, DIM).to(cache.dtype)
    for _ in range(130):
        cache.append(x, x)
    decode(torch.randn(2, 1, 2, DIM).to(cache.dtype), cache)
    cache.gather(0)
    cache.free([1])
    return True


@pytest.mark.parametrize("name", ["k4v4", "cq2", "k4v2-boost", "kitty"])
def test_damaged_caches(name, tmp_path):
    whole, path, rng = tmp_path / "whole", tmp_path / "damaged", random.Random(f"caches of {name}")
    cache, books = cache_file(whole, name), books_of(name)
    for _ in range(CACHES // 4):
        said, content = draw(rng, whole.read_bytes())
        path.write_bytes(content)
        try:
            found = KVCache.load(path, codebooks=books)
        except (CacheFileError, LayoutMismatchError) as error:
            assert str(error).startswith("path: "), said
        except Exception as error:
            pytest.fail(f"{said}: {type(error).__name__}: {error}")
        else:
            assert_same_state(found, cache)


@pytest.mark.parametrize("name", ["k4v4", "k4v2-boost"])
def test_damaged_caches_of_version_1_are_refused_or_usable(name, tmp_path):
    """They have no hash: what is accepted must not lead a later call out of its memory."""
    whole, path, rng = tmp_path / "whole", tmp_path / "damaged", random.Random(f"old caches of {name}")
    cache_file(whole, name)
    about = parts(whole.read_bytes())[0]["__metadata__"]
    about.pop("hash")
    from safetensors.torch import load_file

    save_file(load_file(whole), whole, about | {"version": "1"})
    for _ in range(OLD_CACHES // 2):
        said, content = draw(rng, whole.read_bytes())
        path.write_bytes(content)
        try:
            assert is_usable(KVCache.load(path))
        except (CacheFileError, LayoutMismatchError) as error:
            assert str(error).startswith("path: "), said
        except Exception as error:
            pytest.fail(f"{said}: {type(error).__name__}: {error}")


@pytest.mark.parametrize("version, count", [("3", BOOKS), ("1", OLD_BOOKS)])
def test_damaged_codebooks(version, count, tmp_path):
    whole, path, rng = tmp_path / "whole", tmp_path / "damaged", random.Random(f"codebooks {version}")
    made = normal_codebooks("cq2", 2, 1, DIM)
    made = Codebooks(made.format, made.rope, DIM, made.k_entries, made.v_entries,
                     metadata={"model": "tiny", "config_hash": "x" * 64, "rope_type": ["default"], "warnings": ["w"],
                               "logit_error": [0.1, None], "tokens": 1024})
    made.save(whole)
    if version == "1":
        about = parts(whole.read_bytes())[0]["__metadata__"]
        save_file(made.tensors, whole, about | {"version": "1", "hash": made.hash})
    for _ in range(count):
        said, content = draw(rng, whole.read_bytes())
        path.write_bytes(content)
        try:
            found = Codebooks.load(path)
        except CodebookFileError as error:
            assert str(error).startswith("codebooks: "), said
        except Exception as error:
            pytest.fail(f"{said}: {type(error).__name__}: {error}")
        else:
            assert found.hash == made.hash, said
            assert found.metadata == made.metadata or version == "1", said


# ---- quantized models

SIZES = dict(hidden_size=16, intermediate_size=16, num_attention_heads=1, num_key_value_heads=1, head_dim=16,
             num_hidden_layers=1, vocab_size=32, max_position_embeddings=1024, initializer_range=0.2)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    transformers = pytest.importorskip("transformers")
    from lowbit_attn.linear.checkpoint import quantize_model

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    folder = tmp_path_factory.mktemp("quantized") / "model"
    quantize_model(model, None, torch.randint(0, 32, (2048,)), "e8p2", folder, 2048)
    return folder


def outcome(folder: Path):
    """The logits of a folder's model; the exception where it is one that is documented."""
    import transformers
    from safetensors import SafetensorError

    import lowbit_attn.linear.hf  # noqa: F401
    from lowbit_attn.linear import VersionError, WeightFileError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        except (WeightFileError, VersionError) as error:
            return error
        except (OSError, SafetensorError) as error:  # transformers' own, for a file that it cannot open
            return error
    return model(torch.arange(32)[None]).logits


def test_damaged_weights(model_folder, tmp_path):
    want, folder, rng = outcome(model_folder), tmp_path / "model", random.Random("models")
    assert isinstance(want, torch.Tensor)
    shutil.copytree(model_folder, folder)
    for _ in range(MODELS):
        said, content = draw(rng, (model_folder / "model.safetensors").read_bytes())
        (folder / "model.safetensors").write_bytes(content)
        try:
            found = outcome(folder)
        except Exception as error:
            pytest.fail(f"{said}: {type(error).__name__}: {error}")
        assert isinstance(found, Exception) or torch.equal(found, want), said


def test_damaged_configurations_of_weights(model_folder, tmp_path):
    want, folder, rng = outcome(model_folder), tmp_path / "model", random.Random("configurations")
    shutil.copytree(model_folder, folder)
    text = (model_folder / "config.json").read_text()
    for _ in range(CONFIGS):
        config = json.loads(text)
        entries = config["quantization_config"]
        name = rng.choice(["format", "version", "modules", "rest", "hash"])
        value = rng.choice((*ODD_NUMBERS, *ODD_TEXT, "gone", "one", "one"))
        if value == "gone":
            entries.pop(name)
        elif value == "one" and name == "modules":
            entries[name][rng.choice(sorted(entries[name]))] = rng.choice((*ODD_NUMBERS, *ODD_TEXT))
        else:
            entries[name] = value
        (folder / "config.json").write_text(json.dumps(config))
        try:
            found = outcome(folder)
        except Exception as error:
            pytest.fail(f"{name} {value!r:.40}: {type(error).__name__}: {error}")
        same = json.loads(text)["quantization_config"] == entries
        assert isinstance(found, Exception) or same and torch.equal(found, want), f"{name} {value!r:.40}"
