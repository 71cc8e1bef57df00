"""Commands over codebook formats: files that fit, and what is said of those that do not."""

import json
import re
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from lowbit_attn import dispatch
from lowbit_attn.cli import app
from lowbit_attn.cli import model as commands
from lowbit_attn.codebooks.identity import config_hash, weights_hash
from lowbit_attn.testing import normal_codebooks

SHAPE = dict(hidden_size=96, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
             num_hidden_layers=2, vocab_size=97, max_position_embeddings=2048, initializer_range=0.15,
             bos_token_id=0, eos_token_id=1, pad_token_id=2)
OF_A_MODEL = ("--heads", "4", "--kv-heads", "2", "--head-dim", "64")


class Letters:
    """A tokenizer of one token a letter."""

    def __call__(self, text, return_tensors=None, add_special_tokens=True):
        ids = [3 + ord(letter) % 94 for letter in text]
        return type("Tokens", (), {"input_ids": torch.tensor([ids]) if return_tensors else ids})

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(map(str, ids.tolist()))


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


@pytest.fixture
def file(tmp_path, network):
    """Makes a file of codebooks of the network for a format."""
    def make(name="cq2", **metadata):
        path = tmp_path / f"{name}{len(metadata)}.safetensors"
        about = {"config_hash": config_hash(network.config), "weights_hash": weights_hash(network), "model": "tiny"}
        replace(normal_codebooks(name, 2, 2, 64), metadata=about | metadata).save(path)
        return path
    return make


@pytest.fixture
def run(monkeypatch, network):
    monkeypatch.setattr(commands, "load", lambda name: (network, Letters()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return lambda *args: CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"})


def test_generate_takes_codebooks_and_the_format_s_own_sinks(run, file):
    shown = run("generate", "a text of some letters " * 12, "--format", "cq2", "--codebooks", file(), "--tokens", 5)
    assert shown.exit_code == 0, shown.output
    assert "cache cq2" in shown.output and "warning" not in shown.output


def test_quality_takes_a_file_for_each_format(run, file, tmp_path):
    text = tmp_path / "text"
    text.write_text("some words that follow each other, and then others. " * 10)
    shown = run("quality", "--text", text, "--tokens", 400, "--format", "cq2", "--format", "cq4", "--format", "k4v4",
                "--codebooks", file("cq4"), "--codebooks", file("cq2"), "--jsonl", tmp_path / "scores")
    assert shown.exit_code == 0, shown.output
    lines = {line["cache"]: line for line in map(json.loads, (tmp_path / "scores").read_text().splitlines())}
    assert lines.keys() == {"16 bit", "cq2", "cq4", "k4v4"}
    assert lines["cq2"]["options"]["codebooks"].endswith("cq20.safetensors")
    assert "codebooks" not in lines["k4v4"]["options"] and lines["cq2"]["options"]["sinks"] is None
    assert lines["cq2"]["kl"] > 0 and lines["16 bit"]["kl"] == 0


@pytest.mark.parametrize("command", ("generate", "quality"))
def test_codebooks_that_do_not_fit_end_the_command(run, file, tmp_path, command):
    start = (command, "words") if command == "generate" else (command,)
    for args, words in (
        ((), r"codebooks: got none for format cq2.*calibrate --model MODEL --format cq2 makes one"),
        (("--codebooks", file("cq4")), "codebooks: made for cq4, whose K is another"),
        (("--codebooks", tmp_path / "none"), "no file"),
        (("--codebooks", file("cq2", config_hash="other")), "learned from tiny, whose configuration is not"),
    ):
        shown = run(*start, "--format", "cq2", *args)
        assert shown.exit_code == 2 and re.search(words, shown.output.replace("\n", " ")), shown.output


def test_generate_tells_what_codebooks_take(run, file):
    """A file's are there however long the text is; a prompt's are the sequence's own, and of no sliding layer."""
    books = 2 * 2 * (2 * 512 * 64 + 6 * 64)
    short = run("generate", "words", "--format", "cq2", "--codebooks", file(), "--tokens", 2)
    assert f"{books:,} of these bytes are codebooks, however many tokens" in short.output, short.output
    assert f"cache cq2: {books + 6 * 2 * 2 * 2 * 64 * 2:,} bytes" in short.output, short.output
    assert "nothing was packed" in short.output
    own = run("generate", "words " * 200, "--format", "cq2", "--codebooks", "prompt", "--tokens", 2)
    turning = 2 * 4 * 32  # how keys turn, of each layer
    assert own.exit_code == 0 and f"{books + turning:,} of these bytes are codebooks, of this sequence" in own.output
    assert "sliding" not in own.output and "nothing was packed" not in own.output
    assert "are codebooks" not in run("generate", "words", "--format", "k4v4", "--tokens", 2).output


def test_prompts_that_are_too_short_end_the_command(run, tmp_path):
    """Before a model reads, and not as a quality without errors."""
    (text := tmp_path / "text").write_text("x" * 2000)
    for command, tokens in ((("generate", "x" * 1023), 1023), (("quality", "--text", text, "--tokens", 1024), 1023)):
        shown = run(*command, "--format", "cq2", "--codebooks", "prompt")
        words = f"codebooks: got 'prompt' with {tokens:,} tokens to learn from, supported: 1,024 or more"
        assert shown.exit_code == 2 and words in " ".join(shown.output.split()), shown.output
    shown = run("quality", "--text", text, "--tokens", 1025, "--format", "cq2", "--codebooks", "prompt")
    assert shown.exit_code == 0 and "its first 1,024 tokens are read in 16 bit" in shown.output


def test_other_weights_are_told_of(run, file):
    shown = run("generate", "words", "--format", "cq2", "--codebooks", file("cq2", weights_hash="other"), "--tokens", 2)
    assert shown.exit_code == 0 and "warning: codebooks: learned from tiny, whose weights are not" in shown.output


def test_a_gpu_s_torch_path_is_asked_for_and_told(monkeypatch, network, file, capsys):
    from lowbit_attn.cli import books

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    path = file()
    for target in (("hopper", "sm_90a"), ("ampere", "sm_80")):
        monkeypatch.setattr(dispatch, "target_of", lambda device: target)  # noqa: B023
        assert books.cache_options("cq2", [path]) == {"codebooks": str(path)}
    path = file("cq1")
    options = {"format": "cq1"} | books.cache_options("cq1", [path])
    assert options == {"format": "cq1", "codebooks": str(path), "path": "reference"}
    books.check_model(options, network)
    assert "no kernel reads these codebooks yet; torch reads them" in capsys.readouterr().err
    assert books.cache_options("k4v4", [path]) == {}


def test_info_shows_planes_and_that_the_reference_reads_them(run, file):
    shown = run("info", "cq2", *OF_A_MODEL, "--codebooks", file())
    assert shown.exit_code == 0, shown.output
    for words in ("norm", "mean", "decode-codebook2-splits-cq2",
                  "decode-codebook-splits-cq2-float16-d64-r2", "4,480 bytes",
                  "65,920 bytes of codebooks a KV head", "learned from tiny"):
        assert words in " ".join(shown.output.split()), words
    found = json.loads(run("info", "kcq4vcq2", "--json").output)
    assert found["shared_bytes"] == 2 * 65536 + 128 * 6 and found["codebooks"] is None
    assert "calibrate makes them" in run("info", "cq4").output
    wrong = run("info", "cq2", "--codebooks", file())
    assert wrong.exit_code == 2 and "codebooks: got head_dim 64, supported: 128" in wrong.output


def test_doctor_reads_a_file(run, file, tmp_path):
    path = file("cq2", warnings=["layer 1: logit error 0.9"])
    shown = " ".join(run("doctor", "--codebooks", path).output.split())
    assert "codebooks: cq2, keys after their rotary embedding, 2 layers x 2 KV heads x head_dim 64" in shown
    assert "codebooks warning: layer 1: logit error 0.9" in shown
    about = json.loads(run("doctor", "--codebooks", path, "--json").output)["codebooks"]
    assert about["format"] == "cq2" and about["warnings"] == ["layer 1: logit error 0.9"]
    path.write_bytes(path.read_bytes()[:-9])
    broken = run("doctor", "--codebooks", path)
    assert broken.exit_code == 2 and "is no whole safetensors file" in broken.output


def test_suggest_counts_codebooks(run, file):
    shape = ("--layers", 2, "--kv-heads", 2, "--head-dim", 64, "--json")
    few, many = (json.loads(run("suggest", *shape, "--ctx", ctx, "--format", "cq2").output)["rows"][1]
                 for ctx in ("4K", "1M"))
    assert few["bits"] > many["bits"] > 2.18
    spread = 8 * 65920 / (2 * 64 * 4096)
    assert few["bits"] - spread == pytest.approx(2.1875, abs=0.01)
    rows = json.loads(run("suggest", *shape, "--ctx", "4K", "--format", "k4v4", "--codebooks", file()).output)["rows"]
    assert [row["format"] for row in rows] == ["16 bit", "k4v4", "cq2"]
    wrong = run("suggest", "--layers", 3, *shape[2:], "--ctx", "4K", "--codebooks", file())
    assert wrong.exit_code == 2 and "codebooks: made for layers 2, supported: 3" in wrong.output
