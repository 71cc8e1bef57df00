"""Codebook files of served models: where they are found, and what is refused; no vLLM is installed."""

from dataclasses import replace

import pytest
import torch
import transformers

from lowbit_attn import FORMATS
from lowbit_attn.codebooks.file import CodebookFileError
from lowbit_attn.codebooks.identity import config_hash
from lowbit_attn.integrations.vllm import books
from lowbit_attn.testing import normal_codebooks

LAYERS, HEADS, DIM = 2, 4, 64


def config(**changes):
    return transformers.LlamaConfig(**dict(num_hidden_layers=LAYERS, num_attention_heads=8, num_key_value_heads=HEADS,
                                           hidden_size=512, vocab_size=32) | changes)


def made(path, format="cq2", rope="post", layers=LAYERS, of=None, **kwargs):
    about = {"model": "a model", "config_hash": config_hash(config() if of is None else of)}
    found = replace(normal_codebooks(format, layers, HEADS, DIM, rope, **kwargs), metadata=about)
    found.save(path)
    return found


def refusal(place, format="cq2", model="nowhere") -> str:
    with pytest.raises(CodebookFileError) as error:
        books.find(None if place is None else str(place), str(model), config(), FORMATS[format])
    return str(error.value)


def test_a_file_by_the_variable(tmp_path):
    expected = made(tmp_path / "x.safetensors")
    found = books.find(str(tmp_path / "x.safetensors"), "nowhere", config(), FORMATS["cq2"])
    assert found.hash == expected.hash
    assert books.identity(FORMATS["cq2"], found) == f"{FORMATS['cq2'].layout_id}+{found.hash[:16]}"
    assert books.identity(FORMATS["k4v4"], None) == FORMATS["k4v4"].layout_id


def test_of_a_folder_the_file_of_this_format_and_model(tmp_path):
    expected = made(tmp_path / "a.safetensors", "cq4")
    made(tmp_path / "b.safetensors", "cq2")
    made(tmp_path / "c.safetensors", "cq4", of=config(rope_parameters=dict(rope_theta=7.0, rope_type="default")))
    (tmp_path / "d.safetensors").write_bytes(b"no such file")
    (tmp_path / "text.txt").write_text("codebooks")
    assert books.find(str(tmp_path), "nowhere", config(), FORMATS["cq4"]).hash == expected.hash
    (model := tmp_path / "model").mkdir()
    (tmp_path / "a.safetensors").rename(tmp_path / "e.safetensors")
    (model / books.BESIDE).symlink_to(tmp_path)
    assert books.find(None, str(model), config(), FORMATS["cq4"]).hash == expected.hash
    made(tmp_path / "f.safetensors", "cq4", seed=5)
    assert "e.safetensors, f.safetensors" in refusal(tmp_path, "cq4")
    (tmp_path / "e.safetensors").unlink()
    (tmp_path / "f.safetensors").unlink()
    reason = refusal(tmp_path, "cq4")
    for part in ("no file in", "'b.safetensors' does not fit cq4", "'c.safetensors' was learned from a model, whose",
                 "set LOWBIT_ATTN_CODEBOOKS to a file of lowbit-attn calibrate --model MODEL --format cq4"):
        assert part in reason
    assert "d.safetensors" not in reason


def test_files_that_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    assert "no file or folder 'nowhere/lowbit_attn', set LOWBIT_ATTN_CODEBOOKS" in refusal(None)
    for reason, changes in (("was made with --rope pre, supported: --rope post", dict(rope="pre")),
                            ("does not fit cq2", dict(format="cq4")),
                            ("whose configuration is another one", dict(of=config(num_hidden_layers=5)))):
        made(path, **changes)
        assert reason in refusal(path)
    made(path, layers=3)
    assert "has 3 layers, supported: 2, the model's" in refusal(path)
    path.write_bytes(b"text")
    assert "x.safetensors" in refusal(path)


@pytest.mark.parametrize("ranks,expected", [(1, [(0, 4)]), (2, [(0, 2), (2, 4)]), (4, [(i, i + 1) for i in range(4)]),
                                            (8, [(i // 2, i // 2 + 1) for i in range(8)])])
def test_each_rank_has_the_codebooks_of_its_heads(ranks, expected):
    layer = normal_codebooks("cq4", 1, HEADS, DIM).layer(0)
    for rank, (start, stop) in enumerate(expected):
        mine = books.of_rank(layer, rank, ranks)
        for name, x in layer.tensors.items():
            assert torch.equal(mine.tensors[name], x[start:stop])
