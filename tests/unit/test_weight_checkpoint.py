"""A whole model in codebook weights: the walk through its layers, broken-off runs, the command, transformers."""

import json
import shutil
import string

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers")

import lowbit_attn.linear.hf  # noqa: E402, F401
from lowbit_attn.cli import app  # noqa: E402
from lowbit_attn.cli.quantize import calibration_text  # noqa: E402
from lowbit_attn.linear import VersionError, VQLinear, proxy_error, quantize, quantize_together  # noqa: E402
from lowbit_attn.linear.calibration import TextError, Walk, decoder_layers, linears, sequences  # noqa: E402
from lowbit_attn.linear.checkpoint import FolderError, quantize_model  # noqa: E402

LETTERS = ["<unk>", "<eos>", "<pad>", " ", *string.ascii_lowercase]
SIZES = dict(hidden_size=48, intermediate_size=72, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
             num_hidden_layers=3, vocab_size=len(LETTERS), max_position_embeddings=1024, initializer_range=0.2,
             bos_token_id=1, eos_token_id=1, pad_token_id=2)


def build(name: str = "Llama", **options):
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**(SIZES | options))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return model


def text_tokens(count: int = 2560) -> torch.Tensor:
    return torch.randint(3, len(LETTERS), (count,), generator=torch.Generator().manual_seed(5))


def test_sequences_need_a_long_text():
    assert sequences(text_tokens(2600), 4096).shape == (5, 512) and sequences(text_tokens(5000), 2048).shape == (4, 512)
    with pytest.raises(TextError, match="text: got 2047 tokens, supported: 2048 or more"):
        sequences(text_tokens(2047), 4096)
    with pytest.raises(TextError, match="tokens: got 100, supported: 2048 or more"):
        sequences(text_tokens(4096), 100)


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Gemma2"])
@torch.no_grad()
def test_walk_sees_what_the_model_computes(name):
    """Hidden states and second moments layer by layer are those of whole passes; sliding layers get their own masks."""
    model = build(name, **(dict(sliding_window=100) if name == "Gemma2" else {}))
    tokens = text_tokens().reshape(-1, 512)
    want: dict[str, torch.Tensor] = {}
    layers = decoder_layers(model)[1]

    def add(label):
        def hook(module, args):
            x = args[0].reshape(-1, args[0].shape[-1])
            want[label] = want.get(label, 0) + x.T @ x
        return hook

    hooks = [module.register_forward_pre_hook(add(f"{i}.{label}"))
             for i, layer in enumerate(layers) for label, module in linears(layer).items()]
    hidden = model(tokens, output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    walk = Walk(model, tokens, batch=2)
    for i in range(len(layers)):
        torch.testing.assert_close(walk.hidden, hidden[i], atol=2e-4, rtol=1e-3)
        moments = walk.moments(i)
        for label, got in moments.items():
            torch.testing.assert_close(got, want[f"{i}.{label}"] / tokens.numel(), atol=1e-3, rtol=1e-2)
        assert moments["self_attn.q_proj"] is moments["self_attn.v_proj"]
        assert moments["self_attn.q_proj"] is not moments["self_attn.o_proj"]
        walk.advance(i)


def test_layers_that_read_nothing_have_no_moments():
    model = build()
    model.model.layers[1].mlp.idle = torch.nn.Linear(4, 4)
    assert "mlp.idle" not in Walk(model, text_tokens().reshape(-1, 512)).moments(1)
    with pytest.raises(ValueError, match="model: got LlamaForCausalLM without a list of 3 decoder layers"):
        model.model.layers = torch.nn.ModuleList(list(model.model.layers)[:2])
        decoder_layers(model)


@pytest.mark.parametrize("name", ["e8p4", "gptvq2", "aqlm_2x8"])
def test_together_is_as_good_as_alone(name):
    torch.manual_seed(0)
    x = torch.randn(400, 40) @ torch.randn(40, 40)
    ws, hessian = [torch.randn(24, 40), 5 * torch.randn(8, 40)], x.T @ x
    for w, made in zip(ws, quantize_together(ws, name, hessian), strict=True):
        alone = proxy_error(w, quantize(w, name, hessian).dequantize(), hessian)
        assert proxy_error(w, made.dequantize(), hessian) < 1.5 * alone + 0.002
    with pytest.raises(ValueError, match=r"w: got shape \[24, 39\], supported: \[n, 40\]"):
        quantize_together([ws[0], ws[0][:, 1:]], name)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name, family", [("e8p4", "Llama"), ("gptvq2", "Qwen2"), ("aqlm_2x8", "Llama")])
def test_model_comes_back_through_transformers(name, family, tied, tmp_path):
    model, ids = build(family, tie_word_embeddings=tied), text_tokens()
    before = model(ids[None, :64]).logits
    said = []
    quantize_model(model, None, ids, name, tmp_path, 2048, on_layer=lambda *line: said.append(line))
    assert said == [(i + 1, 3, f"layer {i}: quantized") for i in range(3)]
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "config.json").stat().st_mode
    walked = model(ids[None, :64]).logits  # the model has the decoded weights now
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    layers = [module for module in loaded.modules() if isinstance(module, VQLinear)]
    assert len(layers) == 21 and all(layer.format == name for layer in layers)
    assert (layers[0].bias is None) == (family == "Llama")
    got = loaded(ids[None, :64]).logits
    assert (got - walked).norm() < 2e-3 * walked.norm(), "all but codes are what they were"
    assert 0 < (got - before).norm() < 0.7 * before.norm(), "a random model is chaotic; another one is at 1.4"
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert (half(ids[None, :64]).logits.float() - got).norm() < 0.05 * got.norm()
    for one, two in zip(layers, (module for module in half.modules() if isinstance(module, VQLinear)), strict=True):
        assert torch.equal(one.vq_weight.dequantize(), two.vq_weight.dequantize())
    loaded.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    assert torch.equal(again(ids[None, :64]).logits, got)
    loaded.dequantize()
    torch.testing.assert_close(loaded(ids[None, :64]).logits, got, atol=1e-3, rtol=1e-3)
    assert not any(isinstance(module, VQLinear) for module in loaded.modules())


class Broken(Exception):
    pass


def test_a_broken_run_goes_on(tmp_path):
    ids = text_tokens()
    quantize_model(build(), None, ids, "e8p2", tmp_path / "whole", 2048)

    def stop(done, total, what):
        if done == 2:
            raise Broken

    with pytest.raises(Broken):
        quantize_model(build(), None, ids, "e8p2", tmp_path / "parts", 2048, on_layer=stop)
    assert {path.name for path in (tmp_path / "parts").iterdir()} == {
        "progress.json", "hidden.safetensors", "layer-00000.safetensors", "layer-00001.safetensors"}
    for change, words in ((dict(format="e8p4"), r"another format \(e8p2\); supported: an empty folder"),
                          (dict(seed=5), r"another seed \(0\)"), (dict(tokens=ids.flip(0)), "another model or text")):
        arguments = dict(tokens=ids, format="e8p2", seed=0) | change
        with pytest.raises(FolderError, match=words):
            quantize_model(build(), None, folder=tmp_path / "parts", count=2048, **arguments)
    with pytest.raises(FolderError, match="another model or text"):
        quantize_model(build(initializer_range=0.1), None, ids, "e8p2", tmp_path / "parts", 2048)
    shutil.copytree(tmp_path / "parts", tmp_path / "older")
    (tmp_path / "older/hidden.safetensors").unlink()  # then they are computed again
    whole = load_file(tmp_path / "whole/model.safetensors")
    for folder in (tmp_path / "parts", tmp_path / "older"):
        said = []
        quantize_model(build(), None, ids, "e8p2", folder, 2048, on_layer=lambda *line: said.append(line[2]))
        assert said == ["layer 0: read", "layer 1: read", "layer 2: quantized"]
        parts = load_file(folder / "model.safetensors")
        assert whole.keys() == parts.keys() and all(torch.equal(whole[key], parts[key]) for key in whole)
        assert not list(folder.glob("layer*")) + list(folder.glob("hidden*")) + list(folder.glob("progress*"))
    with pytest.raises(FolderError, match="is not empty, supported: an empty folder"):
        quantize_model(build(), None, ids, "e8p2", tmp_path / "parts", 2048)


def test_other_versions_are_refused(tmp_path):
    quantize_model(build(), None, text_tokens(), "e8p4", tmp_path, 2048)
    state, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    key = "model.layers.1.mlp.up_proj.header"
    state[key] = torch.tensor([9, *state[key][1:]], dtype=torch.int32)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(VersionError, match="layout version 9, supported: 1; quantize the model again"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    config["quantization_config"]["version"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(VersionError, match="layout version 2, supported: 1"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A random Llama with a tokenizer of single characters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(LETTERS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>",
                                         unk_token="<unk>").save_pretrained(path)
    build().save_pretrained(path)
    return path


def run(*args):
    return CliRunner().invoke(app, ["quantize", *map(str, args)], env={"COLUMNS": "160"})


def test_command(source, tmp_path):
    out, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 60)
    result = run("--model", source, "--format", "e8p4", "--out", out, "--text", text, "--tokens", 2048)
    assert result.exit_code == 0, result.output
    size = (out / "model.safetensors").stat().st_size
    assert f"{size:,} bytes in e8p4" in result.output and "import lowbit_attn.linear.hf" in result.output
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = tokenizer("the quick brown", return_tensors="pt").input_ids
    new = model.generate(ids, max_new_tokens=5, do_sample=False)
    want = tokenizer.decode(new[0, 15:], skip_special_tokens=True)
    result = CliRunner().invoke(app, ["generate", "the quick brown", "--model", str(out), "--format", "16", "--tokens",
                                      "5"])
    assert result.exit_code == 0 and result.output.startswith(f"> the quick brown\n{want}"), result.output
    result = run("--model", out, "--out", tmp_path / "twice", "--text", text)
    assert result.exit_code == 2 and "error: model: got a LlamaDecoderLayer without nn.Linear" in result.output
    assert not (tmp_path / "twice").exists()


@pytest.mark.parametrize("arguments, words", [
    (("--format", "int4"), "error: format: got 'int4', supported: e8p4"),
    (("--format", "aqlm_1x16"), "error: format: got 'aqlm_1x16', supported: e8p4"),
    (("--text", "nowhere.txt"), "error: text: got 'nowhere.txt', supported: a text file"),
    (("--tokens", 100), "error: tokens: got 100, supported: 2048 or more"),
    (("--model", "nowhere"), "error: model: got 'nowhere'"),
    (("--device", "tpu"), "error: device: got 'tpu', supported: cpu"),
])
def test_command_names_bad_input(source, tmp_path, arguments, words):
    result = run("--model", source, "--out", tmp_path / "out", *arguments)
    assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_command_names_a_short_text(source, tmp_path):
    (tmp_path / "text.txt").write_text("too short")
    result = run("--model", source, "--out", tmp_path / "out", "--text", tmp_path / "text.txt")
    assert result.exit_code == 2 and "error: text: got 9 tokens, supported: 2048 or more" in result.output


def test_calibration_text_has_no_line_of_the_test_text():
    from lowbit_attn.demo.scoring import help_text

    tested, read = set(help_text().splitlines()) - {""}, calibration_text().splitlines()
    assert len(read) > 2000 and not tested & set(read)
