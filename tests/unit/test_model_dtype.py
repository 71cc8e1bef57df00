"""The dtype in which a model was published is found in its folder, and every command loads and writes it so."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

from tiny_models import save_with_letters  # noqa: E402

from lowbit_attn import loading, model_dtype  # noqa: E402

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def folder(path, config: dict, *dtypes):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if dtypes:
        save_file({f"w{i}": torch.zeros(i + 1, dtype=dtype) for i, dtype in enumerate(dtypes)},
                  path / "model.safetensors")
    return path


@pytest.mark.parametrize("config, dtypes, want", [
    ({"dtype": "bfloat16"}, (torch.float32,), torch.bfloat16),
    ({"torch_dtype": "float16"}, (), torch.float16),
    ({"torch_dtype": "torch.float32"}, (), torch.float32),
    ({"text_config": {"dtype": "bfloat16"}}, (), torch.bfloat16),
    ({"dtype": "auto"}, (torch.float32, torch.bfloat16), torch.bfloat16),
    ({"dtype": None}, (torch.float32, torch.int8), torch.float32),
    ({}, (), None), ({"dtype": "Tensor"}, (), None), ([], (), None)], ids=str)
def test_a_folder_says_its_dtype(tmp_path, config, dtypes, want):
    assert model_dtype.of_folder(folder(tmp_path / "m", config, *dtypes)) == want


def test_a_damaged_folder_says_nothing(tmp_path):
    (tmp_path / "config.json").write_bytes("{}".encode("utf-16"))
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    assert model_dtype.of_folder(tmp_path) is None and model_dtype.of_folder(tmp_path / "nowhere") is None


@pytest.mark.parametrize("name", DTYPES)
def test_models_are_loaded_as_published(tmp_path, name):
    save_with_letters(tmp_path)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).to(DTYPES[name]).save_pretrained(
        tmp_path)
    model, _ = loading.load_folder(tmp_path, "cpu")
    assert model.dtype == model_dtype.of_model(model) == DTYPES[name]
    wide, _ = loading.load_folder(tmp_path, "cpu", torch.float32)
    assert wide.dtype == torch.float32 and model_dtype.of_model(wide) == DTYPES[name], "however it was cast"


def test_a_model_from_no_folder_has_its_own(tmp_path):
    save_with_letters(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config._name_or_path = ""
    assert model_dtype.of_model(transformers.LlamaForCausalLM(config).bfloat16()) == torch.bfloat16


def test_tensors_that_were_published_wider_stay_so(tmp_path):
    save_with_letters(tmp_path)
    model, _ = loading.load_folder(tmp_path, "cpu")
    model.bfloat16().save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["model.norm.weight"] = state["model.norm.weight"].float()
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, _ = loading.load_folder(tmp_path, "cpu")
    assert model_dtype.exceptions(model, torch.bfloat16) == {"model.norm.weight": torch.float32}
    model._keep_in_fp32_modules_strict = {"embed_tokens"}
    assert set(model_dtype.exceptions(model, torch.bfloat16)) == {"model.norm.weight", "model.embed_tokens.weight"}
