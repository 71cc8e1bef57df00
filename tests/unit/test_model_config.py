"""``suggest --model FOLDER``: what a config.json says, as transformers and LowBitCache take it."""

import json

import pytest
from typer.testing import CliRunner

from lowbit_attn import FORMATS, budget, extras
from lowbit_attn.budget import GPUS, LayerGroup, Model
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


def test_published_files(folder):
    """Nested text models are read, and what a file leaves out is transformers' default."""
    assert config.read(folder(**LLAMA)) == config.Shape(28, 24, 8, 128, 131072)
    assert str(config.read(folder(**LLAMA))) == "28 layers, 24 query heads, 8 KV heads, head_dim 128"
    shape = config.read(folder(model_type="gemma3", vision_config={"num_hidden_layers": 3}, text_config=dict(
        model_type="gemma3_text", hidden_size=2560, num_hidden_layers=34, sliding_window=1024)))
    assert (shape.num_heads, shape.num_heads_kv, shape.head_dim) == (8, 4, 256)
    assert (shape.layers, shape.sliding_layers, shape.sliding_window) == (34, 29, 1024)
    old = {name: value for name, value in LLAMA.items() if name not in ("num_key_value_heads", "head_dim")}
    shape = config.read(folder(**old))
    assert (shape.num_heads, shape.num_heads_kv, shape.head_dim) == (24, 24, 128)
    shape = config.read(folder(model_type="gpt2", n_layer=3, n_head=4, n_embd=256, n_positions=99))
    assert (shape.layers, shape.num_heads_kv, shape.head_dim, shape.context) == (3, 4, 64, 99)


@pytest.mark.parametrize("values, sliding", [
    (dict(model_type="mistral", sliding_window=512), 28), (dict(model_type="mistral", sliding_window=None), 0),
    (dict(model_type="qwen3", use_sliding_window=True, sliding_window=512,
          layer_types=["sliding_attention"] * 3 + ["full_attention"] * 25), 3),
    (dict(sliding_window=512, model_type="qwen3"), 0),
    (dict(model_type="qwen2", sliding_window=512, use_sliding_window=True, max_window_layers=20), 8),
    (dict(model_type="gemma3_text", sliding_window=512, sliding_window_pattern=4), 21),
    (dict(sliding_window=512, model_type="gemma3_text"), 24),
    (dict(sliding_window=512, model_type="gemma2"), 14), (dict(sliding_window=512, model_type="gpt_oss"), 14),
])
def test_sliding_layers(folder, values, sliding):
    shape = config.read(folder(**(LLAMA | values)))
    assert (shape.layers, shape.sliding_layers, shape.other_layers) == (28, sliding, 0)


HYBRIDS = {
    "qwen3_next": (dict(num_attention_heads=16, num_key_value_heads=2, head_dim=256, num_hidden_layers=48,
                        hidden_size=2048, full_attention_interval=4), 12, 36),
    "nemotron_h": (dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128, hidden_size=4096,
                        hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"), 4, 48),
    "jamba": (dict(num_hidden_layers=32, attn_layer_period=8, attn_layer_offset=4), 4, 28),
    "lfm2": (dict(num_hidden_layers=16, full_attn_idxs=[2, 5, 8, 10, 12, 14]), 6, 10),
    "bamba": (dict(num_hidden_layers=32, attn_layer_indices=[9, 18, 27]), 3, 29),
}


@pytest.mark.parametrize("kind", HYBRIDS)
def test_layers_with_states_are_left_out(folder, kind):
    values, attending, others = HYBRIDS[kind]
    shape = config.read(folder(model_type=kind, **values))
    assert (shape.layers, shape.other_layers) == (attending, others)
    assert f"{attending} layers" in str(shape) and f"{others} layers without a KV cache are left out" in str(shape)


def test_layers_of_several_shapes(folder):
    """Gemma 4: full layers are wider, and the last layers read the K and V of earlier ones."""
    where = folder(model_type="gemma4_text", num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
                   head_dim=64, global_head_dim=128, num_global_key_value_heads=1, attention_k_eq_v=True,
                   num_kv_shared_layers=2, sliding_window=512, vocab_size=99, hidden_size=256,
                   layer_types=["sliding_attention", "full_attention"] * 3)
    shape = config.read(where)
    assert (shape.layers, shape.other_layers) == (4, 2)
    assert shape.mixed == (LayerGroup(2, 4, 2, 64, 512), LayerGroup(2, 4, 1, 128))
    rows = json.loads(run("--model", where, "--ctx", "4K", "--format", "k8v8", "--json").output)["rows"]
    wide = [2 * budget.sequence_bytes(fmt, 1, 128, 4096) for fmt in (None, FORMATS["k8v8"])]
    assert [row["cache_gb"] * 1e9 for row in rows] == pytest.approx([one + 2 * 2 * 2 * 64 * 511 * 2 for one in wide])
    shown = run("--model", where, "--ctx", "4K").output
    assert "2 of them with a sliding window of 512 tokens, 4 query heads, 2 KV heads, head_dim 64" in shown
    assert "kv-heads: got 3" not in shown and "num_heads_kv: got 3" in run("--model", where, "--kv-heads", 3).output


@pytest.mark.parametrize("values, words", [
    ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers: got 0 in "),
    ({**LLAMA, "num_hidden_layers": 10**30}, "num_hidden_layers: got 1e+30 in "),
    ({**LLAMA, "head_dim": "x"}, "head_dim: got 'x' in"),
    ({**LLAMA, "layer_types": 5}, "layer_types: got 5 in "),
    ({**LLAMA, "model_type": "qwen3", "layer_types": [5, None]}, "layer_types: got [5, None] in "),
    ({**LLAMA, "max_position_embeddings": "4096"}, "max_position_embeddings: got '4096' in "),
    ({"model_type": "gemma3", "text_config": "x"}, "text_config: got 'x' in "),
    ({"model_type": "gemma3_text", "sliding_window_pattern": "x"}, "sliding_window_pattern: got 'x' in "),
    ({"model_type": "minimax", "attn_type_list": [0, 1]}, "attn_type_list: got [0, 1] in "),
    ({**LLAMA, "sliding_window": 512}, "sliding_window: got 512 in "),
    ({**LLAMA, "model_type": ["llama"]}, "model_type: got ['llama'] in "),
    ({**LLAMA, "model_type": None}, "model_type: got None in "),
    ({"model_type": "nobody"}, "model_type: got 'nobody' in "),
    ({"model_type": "deepseek_v3", "num_hidden_layers": 2}, "latent attention (kv_lora_rank), supported"),
    ({"model_type": "mimo_v2_flash", "num_hidden_layers": 2}, "K of 192 channels and V of 128, supported"),
    ({"model_type": "mamba2", "num_hidden_layers": 2}, "no layer brings K and V to a cache"),
])
def test_refusals(folder, values, words):
    answer = run("--model", folder(**values))
    assert answer.exit_code == 2 and words in answer.output and "Traceback" not in answer.output, answer.output


@pytest.mark.parametrize("text", ("[" * 100_000, '{"a":' * 100_000, "", "\xff"))
def test_files_that_are_no_json(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    answer = run("--model", tmp_path)
    assert answer.exit_code == 2 and "supported: a folder with a config.json" in answer.output


def test_no_folder_no_file_no_numbers(tmp_path):
    for args, words in ((("--model", "/nowhere"), "model: got '/nowhere', supported: a folder with a config.json"),
                        ((), "layers: got none, supported: a number, or --model FOLDER"),
                        (("--layers", 2, "--head-dim", 64), "kv-heads: got none"),
                        (("--layers", 2, "--head-dim", 64, "--kv-heads", 2), "ctx: got none, supported: a number")):
        answer = run(*args)
        assert answer.exit_code == 2 and words in answer.output, answer.output
    (tmp_path / "config.json").write_text("[1]")
    assert "config.json that holds a JSON object, not a list" in run("--model", tmp_path).output


def test_without_transformers_it_says_what_is_missing(folder, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    answer = run("--model", folder(**LLAMA))
    assert answer.exit_code == 2 and "transformers is not installed" in answer.output
    assert extras.remedy("hf") in answer.output and "--kv-heads" in answer.output


def test_command(folder):
    where = folder(**LLAMA | dict(model_type="qwen3", sliding_window=512, use_sliding_window=True,
                                  layer_types=["sliding_attention", "full_attention"] * 14))
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
