"""Calibration of small models: what is captured is what their caches hold, and a file says which model it is of."""

import json
import string
import warnings
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from typer.testing import CliRunner  # noqa: E402

from lowbit_attn import FORMATS  # noqa: E402
from lowbit_attn.cli import app  # noqa: E402
from lowbit_attn.codebooks import Codebooks, capture, identity  # noqa: E402
from lowbit_attn.codebooks.calibrate import calibrate, recipe_of, rope_types, tokens_to_read  # noqa: E402
from lowbit_attn.codebooks.capture import captured, turned  # noqa: E402
from lowbit_attn.codebooks.file import CodebookFileError  # noqa: E402
from lowbit_attn.integrations.hf import CACHE_ARGUMENT  # noqa: E402

SMALL = dict(hidden_size=96, intermediate_size=64, num_attention_heads=6, num_key_value_heads=2, vocab_size=97,
             max_position_embeddings=2048, num_hidden_layers=2, head_dim=64, bos_token_id=0, eos_token_id=1,
             pad_token_id=2, initializer_range=0.15)
HYBRID = ["sliding_attention", "full_attention"]
GEMMA = dict(head_dim=32, sliding_window=48, layer_types=HYBRID)


def build(family: str = "Llama", **options):
    """A model of random weights in eval mode; the same for the same arguments."""
    torch.manual_seed(1)
    cls = getattr(transformers, f"{family}ForCausalLM")
    return cls(cls.config_class(**(SMALL | options))).eval()


def tokens(count: int) -> torch.Tensor:
    return torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def held(model, ids: torch.Tensor):
    """(K, V) fp32 [num_heads_kv, tokens, head_dim] by layer, of transformers' own cache after one eager pass."""
    model.set_attn_implementation("eager")
    cache = transformers.DynamicCache()
    model.base_model(ids[None], **{CACHE_ARGUMENT: cache})
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


# ---- capture

@pytest.mark.parametrize("family, options", [
    ("Llama", {}), ("Qwen2", dict(num_attention_heads=2, num_key_value_heads=1, head_dim=48)), ("Qwen3", {}),
    ("Gemma2", GEMMA | dict(attn_logit_softcapping=2.0, query_pre_attn_scalar=64)), ("Gemma3", GEMMA),
    ("SmolLM3", dict(num_hidden_layers=4, no_rope_layer_interval=4))])
def test_keys_and_values_are_those_of_a_cache(family, options):
    model, ids = build(family, **options), tokens(330)
    sample = captured(model, ids, sinks=32)
    assert sample.first.tolist() == [32, 160] and sample.max_positions == 2048 and sample.tokens == 256
    for layer, (keys, values) in zip(sample.layers, held(model, ids), strict=True):
        # a sliding layer of the cache may have let early tokens go
        for mine, whole in ((layer.keys, keys), (layer.values, values)):
            mine = mine.transpose(0, 1).flatten(1, 2).float()
            there = min(mine.shape[1], whole.shape[1] - (330 - 288))
            want = whole[:, : whole.shape[1] - (330 - 288)][:, -there:]
            assert mine.dtype == torch.float32 and torch.allclose(mine[:, -there:], want, atol=4e-3, rtol=2e-3)


def test_sequences_fit_the_context_and_begin_alike():
    model, ids = build(max_position_embeddings=512), tokens(1200)
    sample = captured(model, ids, sinks=32)  # 3 pages each in 416 tokens, then 1200 - 832 = 368 hold 2
    assert sample.first.tolist() == [32, 160, 288] * 2 + [32, 160]
    second = ids[416:832].clone()
    second[0] = ids[0]
    keys = held(model, second)[1][0]
    assert torch.allclose(sample.layers[1].keys[3:6].transpose(0, 1).flatten(1, 2).float(), keys[:, 32:], atol=4e-3)


def test_query_moments_are_of_each_kv_heads_queries():
    model, ids = build(), tokens(288)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
        q = attention.q_proj(hidden).view(288, 6, 64).transpose(0, 1)[:, 32:]
        q = turned(q, model.model.rotary_emb.inv_freq, torch.arange(32, 288))
    want = torch.stack([sum(one.T @ one for one in q[group : group + 3]) / (3 * 256) for group in (0, 3)])
    sample = captured(model, ids)
    assert torch.allclose(sample.layers[0].q_moment, want, rtol=1e-3, atol=1e-4)
    assert sample.layers[0].scaling == attention.scaling


def test_frequencies_are_found_by_layer():
    theta = 10_000.0 ** -(torch.arange(32) / 32)
    assert torch.allclose(captured(build(), tokens(160)).layers[1].inv_freq, theta)
    smol = captured(build("SmolLM3", num_hidden_layers=4, no_rope_layer_interval=4), tokens(160)).layers
    assert [bool(layer.inv_freq.any()) for layer in smol] == [True, True, True, False]
    local, whole = captured(build("Gemma3", **GEMMA), tokens(160)).layers
    assert local.inv_freq[0] == whole.inv_freq[0] == 1 and local.inv_freq[1] != whole.inv_freq[1]


def test_half_precision_models_are_read():
    sample = captured(build().to(torch.bfloat16), tokens(160))
    assert sample.layers[0].keys.dtype == torch.bfloat16 and sample.layers[1].inv_freq[0] == 1


@pytest.mark.parametrize("family, options", [("Glm", dict(head_dim=64)), ("Cohere", {})])
def test_keys_that_turn_otherwise_are_refused(family, options):
    """Part of a head turns, or neighbouring channels do."""
    with pytest.raises(NotImplementedError, match="keys of layer 0 do not turn with position as"):
        captured(build(family, **options), tokens(160))


def test_the_model_attends_as_before_whatever_happens():
    model = build()
    before = model.config._attn_implementation
    captured(model, tokens(160))
    assert model.config._attn_implementation == before and not capture._active
    model.model.layers[1].self_attn.v_proj.weight.data[0] = float("nan")
    with pytest.raises(ValueError, match="layer 1 stored NaN or infinities"):
        captured(model, tokens(160))
    model.model.layers[1].mlp.forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        captured(model, tokens(160))
    assert model.config._attn_implementation == before and not capture._active


def test_texts_and_contexts_without_a_page_are_refused():
    with pytest.raises(ValueError, match="ids: got 159 tokens, supported: 160 or more"):
        captured(build(), tokens(159))
    with pytest.raises(NotImplementedError, match="context of 128 tokens has no page of 128 after 32 sinks"):
        captured(build(max_position_embeddings=128), tokens(400))


def test_turning_there_and_back():
    x, freq = torch.randn(2, 5, 8), torch.tensor([1.0, 0.3, 0.01, 0.0])
    positions = torch.arange(5) * 1000
    there = turned(x, freq, positions)
    assert torch.allclose(turned(there, freq, -positions), x, atol=1e-5) and not torch.allclose(there, x)
    assert torch.equal(there[..., 3], x[..., 3]) and torch.allclose(there.norm(dim=-1), x.norm(dim=-1))


# ---- calibrate

@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def made(model):
    return calibrate(model, tokens(1100), FORMATS["cq2"], name="tiny")


def test_a_file_keeps_everything(made, tmp_path):
    made.save(tmp_path / "x.safetensors")
    read = Codebooks.load(tmp_path / "x.safetensors")
    assert read.hash == made.hash and read.metadata == made.metadata
    about = read.metadata
    assert (about["model"], about["tokens"], about["held_out_tokens"], about["sinks"]) == ("tiny", 896, 128, 32)
    assert about["max_positions"] == 2048 and about["rope_type"] == ["default"]
    assert [len(about[name]) for name in ("logit_error", "value_error", "unused_entries")] == [2, 2, 2]
    assert all(about["recipe"].values()) and len(about["recipe"]) == 4


@pytest.mark.parametrize("name, k, v", [("cq4", 2, 2), ("kcq4vcq2", 2, 4), ("kcq2vcq1", 4, 8), ("k4vcq2", None, 4),
                                        ("kcq2v4", 4, None), ("cq2-nonorm", 4, 4)])
def test_formats_say_what_is_learned(name, k, v):
    recipe = recipe_of(FORMATS[name])
    assert (recipe.k_vec_size, recipe.v_vec_size) == (k, v)
    assert recipe.v_norm == (v is not None and name != "cq2-nonorm")


def test_formats_without_codebooks_are_refused():
    with pytest.raises(ValueError, match="format: got k4v4, which has no codebooks"):
        recipe_of(FORMATS["k4v4"])
    with pytest.raises(ValueError, match="'pre' with k4vcq2, whose keys have no codebooks"):
        recipe_of(FORMATS["k4vcq2"], "pre")


def test_the_formats_own_bytes_have_the_errors_that_the_file_names(model, made):
    """Pages that were held out, through the side's quantizer and back: V's error is the file's."""
    sample = captured(model, tokens(1100))
    side = FORMATS["cq2"].v
    for i, layer in enumerate(sample.layers):
        page = layer.values[-1].float()
        back = side.dequantize(side.quantize(page, False, made.v_entries[i]), 64, made.v_entries[i])
        error = ((back - page).square().sum() / page.square().sum()).item()
        assert error == pytest.approx(made.metadata["value_error"][i], rel=1e-2)


def test_before_rope(model):
    pre = calibrate(model, tokens(1100), FORMATS["cq2"], rope="pre")
    assert pre.rope == "pre" and torch.allclose(pre.rope_inv_freq[0], model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("kind, extra, refused", [
    ("yarn", dict(factor=4.0, original_max_position_embeddings=512), ("pre",)),
    ("dynamic", dict(factor=2.0), ("pre", "post")),
    ("linear", dict(factor=2.0), ()),
    ("llama3", dict(factor=2.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512), ())])
def test_rope_types(kind, extra, refused):
    model = build(rope_parameters=dict(rope_type=kind, rope_theta=10000.0, **extra))
    assert rope_types(model.config) == [kind]
    for rope in ("pre", "post"):
        if rope in refused:
            with pytest.raises(NotImplementedError, match=f"of type {kind}, supported for"):
                calibrate(model, tokens(1024), FORMATS["cq2"], rope=rope)
    if not refused:
        assert captured(model, tokens(160)).layers[0].inv_freq[-1] < 10_000.0 ** -(31 / 32) * 0.6


def test_short_texts_are_refused(model):
    with pytest.raises(ValueError, match="got 1023 tokens, supported: 1024 or more"):
        calibrate(model, tokens(1023), FORMATS["cq2"])


def test_enough_is_read():
    assert tokens_to_read(8192) >= 8192 * 9 / 8 + 5 * 32
    model = build(num_hidden_layers=1)
    sample = captured(model, tokens(tokens_to_read(2048)))
    assert sample.tokens - sample.pages // 9 * 128 == 2048


# ---- which model

def test_a_file_is_of_one_configuration(made, model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        identity.check_model(made, model)
        identity.check_model(made, build().to(torch.bfloat16))
        identity.check_model(Codebooks("cq2", "post", 64, made.k_entries, made.v_entries), build(num_hidden_layers=1))
    for other in (build(num_hidden_layers=3), build(rope_parameters=dict(rope_type="default", rope_theta=5e5)),
                  build("Qwen3")):
        with pytest.raises(CodebookFileError, match="learned from tiny, whose configuration is not that of this"):
            identity.check_model(made, other)


def test_other_weights_are_warned_of(made):
    tuned = build()
    tuned.model.layers[0].self_attn.k_proj.weight.data *= 1.1
    with pytest.warns(identity.OtherWeightsWarning, match="learned from tiny, whose weights are not those"):
        identity.check_model(made, tuned)


def test_words_of_a_model_change_no_hash(model):
    other = build(bos_token_id=5, dtype="bfloat16", attention_dropout=0.5)
    assert identity.config_hash(other.config) == identity.config_hash(model.config)


# ---- the command

def saved(model, path: Path) -> Path:
    """A folder of the model with a tokenizer of single characters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    letters = {c: i for i, c in enumerate(["<unk>", "<eos>", "<pad>", " ", *string.ascii_letters])}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>",
                                         unk_token="<unk>").save_pretrained(path)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model):
    return saved(model, tmp_path_factory.mktemp("models") / "small")


def run(*args):
    return CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "160"})


def test_the_command_writes_a_file(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("calibrate", "--model", folder, "--format", "cq2", "--tokens", 1024)
    assert result.exit_code == 0, result.output
    assert "logit error" in result.output and "learned from 1,024 tokens, errors on 128 others" in result.output
    made = Codebooks.load("small.cq2.safetensors")
    assert made.layers == 2 and made.metadata["model"] == "small" and made.hash[:16] in result.output
    identity.check_model(made, transformers.AutoModelForCausalLM.from_pretrained(folder))


def test_the_command_reads_files_and_repeats_itself(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog and sleeps\n" * 40)
    hashes = []
    for i, seed in enumerate((0, 0, 1)):
        result = run("calibrate", "--model", folder, "--text", text, "--format", "kcq2v4", "--seed", seed, "--rope",
                     "pre", "--out", tmp_path / f"{i}.safetensors")
        assert result.exit_code == 0, result.output
        hashes.append(Codebooks.load(tmp_path / f"{i}.safetensors").hash)
    assert hashes[0] == hashes[1] != hashes[2]
    warned = json.dumps(Codebooks.load(tmp_path / "0.safetensors").metadata["warnings"])
    assert ("warning: " in result.output) == (warned != "[]")


@pytest.mark.parametrize("args, words", [
    (("--format", "k4v4"), "which has no codebooks"), (("--format", "nothing"), "nothing"),
    (("--rope", "in"), "rope: got 'in'"), (("--text", "/absent.txt"), "text: got '/absent.txt'"),
    (("--out", "/absent/x"), "out: got '/absent/x'")])
def test_the_command_refuses(args, words):
    result = run("calibrate", "--model", "/absent", *args)
    assert result.exit_code == 2 and words in result.output


def test_the_command_refuses_a_short_text(folder, tmp_path):
    (tmp_path / "short.txt").write_text("too short " * 10)
    result = run("calibrate", "--model", folder, "--text", tmp_path / "short.txt", "--out", tmp_path / "x")
    assert result.exit_code == 2 and "got 100 tokens, supported: 1024 or more" in result.output
    assert not Path(tmp_path / "x").exists()


@pytest.mark.parametrize("head_dim", (64, 128))
def test_three_commands_from_a_model_folder(head_dim, tmp_path, monkeypatch):
    """calibrate, quality and generate, as docs/codebooks.md has them."""
    monkeypatch.chdir(tmp_path)
    model, text = saved(build(head_dim=head_dim), tmp_path / "models/small"), tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog and sleeps " * 22)
    result = run("calibrate", "--model", model, "--format", "cq2", "--tokens", 1024)
    assert result.exit_code == 0, result.output
    books, lines = "small.cq2.safetensors", tmp_path / "lines.jsonl"
    assert f"Next: lowbit-attn quality --model {model} --format cq2 --codebooks {books}\n" in result.output
    assert Codebooks.load(books).head_dim == head_dim
    result = run("quality", "--model", model, "--text", text, "--format", "cq2", "--codebooks", books, "--tokens", 320,
                 "--jsonl", lines)
    assert result.exit_code == 0, result.output
    found = json.loads(lines.read_text().splitlines()[-1])
    assert 0 < found["kl"] < 1 and found["bits_per_element"] == 2 + 8 / head_dim + 1 / 16
    result = run("generate", text.read_text()[:300], "--model", model, "--format", "cq2", "--codebooks", books,
                 "--tokens", 4)
    assert result.exit_code == 0 and "4 tokens after 300 in" in result.output


def test_quality_with_codebooks_of_the_text_itself(folder, tmp_path):
    """Its first tokens teach; the others lose less than in the uniform format of as many bits."""
    (text := tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog and sleeps " * 26)
    result = run("quality", "--model", folder, "--text", text, "--format", "cq2", "--format", "k2v2", "--sinks", 32,
                 "--codebooks", "prompt", "--tokens", 1400, "--jsonl", tmp_path / "lines.jsonl")
    assert result.exit_code == 0, result.output
    kl = {line["cache"]: line["kl"] for line in map(json.loads, (tmp_path / "lines.jsonl").read_text().splitlines())}
    assert 0 < kl["cq2, 32 sinks"] < kl["k2v2, 32 sinks"]
