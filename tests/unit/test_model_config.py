"""``suggest --model FOLDER``: what a config.json says, as transformers and LowBitCache take it."""

import json

import pytest
from typer.testing import CliRunner

from lowbit_attn import FORMATS, budget, extras
from lowbit_attn.budget import GPUS, Model
from lowbit_attn.cli import app, config

transformers = pytest.importorskip("transformers")

from tiny_models import FAMILIES, SMALL, WINDOW, build, stepwise, tokens  # noqa: E402

from lowbit_attn.integrations.hf import LowBitCache  # noqa: E402

LLAMA = dict(num_hidden_layers=28, num_attention_heads=24, num_key_value_heads=8, head_dim=128, hidden_size=3072,
             max_position_embeddings=131072, model_type="llama")


@pytest.fixture
def folder(tmp_path):
    """Writes a config.json; its folder."""
    def write(**values):
        (tmp_path / "config.json").write_text(json.dumps(values))
        return tmp_path
    return write


def run(*args):
    return CliRunner().invoke(app, ["suggest", *map(str, args)], env={"COLUMNS": "160"})


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_s_own_config(name, tmp_path):
    """Layers, heads and windows are those of the model that transformers builds from the folder."""
    cls = getattr(transformers, FAMILIES[name][0])
    made = cls.config_class(**(SMALL | FAMILIES[name][1]))
    made.save_pretrained(tmp_path)
    shape = config.read(tmp_path)
    model = build(name)
    attention = [layer.self_attn for layer in model.model.layers]
    windows = [getattr(one, "sliding_window", getattr(made, "sliding_window", None)) for one in attention]
    assert (shape.layers, shape.num_heads, shape.num_heads_kv) == (len(attention), 6, 2)
    assert shape.head_dim == attention[0].head_dim and shape.context == 2048 and not shape.other_layers
    assert shape.sliding_layers == sum(window is not None for window in windows)
    assert shape.sliding_window == (WINDOW if shape.sliding_layers else 0)


def test_numbers_come_from_the_file_alone(folder, monkeypatch):
    monkeypatch.setattr(config, "_filled", lambda *_: pytest.fail("nothing is missing"))
    assert config.read(folder(**LLAMA)) == config.Shape(28, 24, 8, 128, 131072)
    assert config.read(folder(text_config=LLAMA, vision_config={"num_hidden_layers": 3})).layers == 28
    assert str(config.read(folder(**LLAMA))) == "28 layers, 24 query heads, 8 KV heads, head_dim 128"


def test_what_is_missing_is_transformers_default(folder):
    """Gemma 3's published files leave heads and head_dim out."""
    shape = config.read(folder(model_type="gemma3", text_config=dict(
        model_type="gemma3_text", hidden_size=2560, num_hidden_layers=34, sliding_window=1024)))
    assert (shape.num_heads, shape.num_heads_kv, shape.head_dim) == (8, 4, 256)
    assert (shape.layers, shape.sliding_layers, shape.sliding_window) == (34, 29, 1024)
    old = {name: value for name, value in LLAMA.items() if name not in ("num_key_value_heads", "head_dim")}
    shape = config.read(folder(**old))
    assert (shape.num_heads, shape.num_heads_kv, shape.head_dim) == (24, 24, 128)
    shape = config.read(folder(model_type="gpt2", n_layer=3, n_head=4, n_embd=256, n_positions=99))
    assert (shape.layers, shape.num_heads_kv, shape.head_dim, shape.context) == (3, 4, 64, 99)


@pytest.mark.parametrize("values, sliding", [
    (dict(sliding_window=512), 28), (dict(sliding_window=512, layer_types=["sliding_attention"] * 3
                                          + ["full_attention"] * 25), 3),
    (dict(sliding_window=512, model_type="qwen3"), 0), (dict(sliding_window=None), 0),
    (dict(sliding_window=512, use_sliding_window=False), 0),
    (dict(sliding_window=512, use_sliding_window=True, max_window_layers=20), 8),
    (dict(sliding_window=512, sliding_window_pattern=4), 21), (dict(sliding_window=512, model_type="gemma3_text"), 24),
    (dict(sliding_window=512, model_type="gemma2"), 14), (dict(sliding_window=512, model_type="gpt_oss"), 14),
])
def test_sliding_layers(folder, values, sliding):
    shape = config.read(folder(**(LLAMA | values)))
    assert (shape.layers, shape.sliding_layers, shape.other_layers) == (28, sliding, 0)


def test_layers_of_another_kind_are_left_out(folder):
    kinds = ["linear_attention"] * 21 + ["full_attention"] * 7
    shape = config.read(folder(**LLAMA, layer_types=kinds))
    assert (shape.layers, shape.other_layers) == (7, 21)
    assert "7 layers" in str(shape) and "21 layers without a KV cache are left out" in str(shape)


@pytest.mark.parametrize("values, words", [
    ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers: got 0 in "),
    ({**LLAMA, "head_dim": "x"}, "head_dim: got x"),
    ({**LLAMA, "kv_lora_rank": 512}, "latent attention (kv_lora_rank), supported"),
    ({**LLAMA, "layer_types": ["mamba"] * 28}, "has layers mamba, supported: full_attention, sliding_attention"),
    ({"model_type": "nobody"}, "transformers cannot read"),
])
def test_refusals(folder, values, words):
    answer = run("--model", folder(**values))
    assert answer.exit_code == 2 and words in answer.output and "Traceback" not in answer.output


def test_no_folder_no_file_no_numbers(tmp_path):
    for args, words in ((("--model", "/nowhere"), "model: got '/nowhere', supported: a folder with a config.json"),
                        ((), "layers: got none, supported: a number, or --model FOLDER"),
                        (("--layers", 2, "--head-dim", 64), "kv-heads: got none"),
                        (("--layers", 2, "--head-dim", 64, "--kv-heads", 2), "ctx: got none, supported: a number")):
        answer = run(*args)
        assert answer.exit_code == 2 and words in answer.output, answer.output
    (tmp_path / "config.json").write_text("[1]")
    assert "supported: a folder with a config.json (AttributeError)" in run("--model", tmp_path).output


def test_without_transformers_it_says_what_is_missing(folder, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    answer = run("--model", folder(model_type="gemma3_text", num_hidden_layers=2))
    assert "leaves num_attention_heads, num_key_value_heads, head_dim to defaults" in answer.output
    assert extras.remedy("hf") in answer.output
    assert run("--model", folder(**LLAMA)).exit_code == 0


def test_command(folder):
    where = folder(**LLAMA, sliding_window=512, layer_types=["sliding_attention", "full_attention"] * 14)
    answer = run("--model", where, "--format", "k4v4")
    assert answer.exit_code == 0, answer.output
    assert "28 layers, 14 of them with a sliding window of 512 tokens, 24 query heads" in answer.output
    assert "131,072 tokens a sequence" in answer.output and "511 tokens in 16 bit" in answer.output
    shown = json.loads(run("--model", where, "--format", "k4v4", "--ctx", "8K", "--heads", 8, "--json").output)
    assert (shown["ctx"], shown["model"]["num_heads"], shown["model"]["layers"]) == (8192, 8, 28)


@pytest.mark.parametrize("name, count", [("gemma3", 300), ("mistral-sliding", 30), ("llama", 300)])
def test_size_is_that_of_a_real_cache(name, count):
    """What ``suggest`` says of a model's shape is what LowBitCache holds after so many tokens."""
    model, cache = build(name), LowBitCache("k8v8")
    stepwise(model, cache, tokens(count), [count])
    own = model.config
    shape = Model(own.num_hidden_layers, 6, 2, model.model.layers[0].self_attn.head_dim,
                  sliding_layers=own.num_hidden_layers if name == "mistral-sliding" else int(name == "gemma3"),
                  sliding_window=WINDOW)
    row = budget.suggest(shape, count, 1, GPUS["h200"], ["k8v8"])[1]
    assert row.cache_gb * 1e9 == pytest.approx(cache.nbytes)


def test_sliding_layers_gain_nothing():
    mixed, full = (Model(12, 8, 2, 128, sliding_layers=sliding, sliding_window=1024) for sliding in (10, 0))
    ctx, gpu = 32768, GPUS["h100"]
    plain, low = budget.suggest(mixed, ctx, 1, gpu, ["k4v4"])
    window = 10 * budget.sequence_bytes(None, 2, 128, 1023)
    assert plain.cache_gb * 1e9 == pytest.approx(2 * budget.sequence_bytes(None, 2, 128, ctx) + window)
    assert low.cache_gb * 1e9 == pytest.approx(2 * budget.sequence_bytes(FORMATS["k4v4"], 2, 128, ctx) + window)
    assert low.bits > budget.suggest(full, ctx, 1, gpu, ["k4v4"])[1].bits
    all_sliding = Model(12, 8, 2, 128, sliding_layers=12, sliding_window=1024)
    assert budget.suggest(all_sliding, ctx, 1, gpu, ["k4v4"])[1].bits == 16
    with pytest.raises(ValueError, match="sliding_layers: got 13 with a window of 9, supported: 0 to 12"):
        Model(12, 8, 2, 128, sliding_layers=13, sliding_window=9)
