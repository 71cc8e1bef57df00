"""``lowbit-attn generate`` and ``quality`` on a small model in a local folder."""

import json
import sys

import pytest
import torch
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers")

from tiny_models import WINDOW, build, save_with_letters, stepwise, tokens  # noqa: E402

from lowbit_attn import extras, quality  # noqa: E402
from lowbit_attn.cli import app, level_plot, model  # noqa: E402
from lowbit_attn.demo import model as fetched  # noqa: E402

TEXT = "the quick brown fox jumps over the lazy dog and then it sleeps " * 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Llama with a tokenizer of single characters."""
    return save_with_letters(tmp_path_factory.mktemp("model"))


def run(*args):
    return CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "160"})


@pytest.mark.parametrize("name, nbytes", [("16", 2 * 322 * 2 * 64 * 4), ("k8v8", None)])
def test_generate(folder, name, nbytes):
    result = run("generate", TEXT, "--model", folder, "--format", name, "--tokens", 8)
    assert result.exit_code == 0, result.output
    assert "8 tokens after 315 in" in result.output and "tokens/s" in result.output
    assert nbytes is None or f"cache {name}: {nbytes:,} bytes, in 16 bit {nbytes:,}" in result.output
    assert ("16.00 bits per element of all 322 tokens, 16.00 where packed" in result.output) == (name == "16")
    assert "nothing was packed" not in result.output


@pytest.mark.parametrize("command", (("generate", TEXT), ("quality",)))
def test_the_demos_model_is_not_fetched_where_nothing_reads_it(monkeypatch, command):
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(fetched, "fetch", lambda *_: pytest.fail("93 MB for nothing"))
    result = run(*command)
    assert result.exit_code == 2 and "gguf" in result.output and extras.remedy("demo") in result.output


def test_generate_says_what_is_not_packed(folder):
    """A short text, and a model with sliding layers, are not told as if they were in the format."""
    short = run("generate", "the dog", "--model", folder, "--tokens", 4, "--sinks", 2)
    assert short.exit_code == 0 and "16.00 bits per element of all 10 tokens, 4.38 where packed" in short.output
    assert "nothing was packed: all tokens are still in 16 bit" in short.output and "the 2 sinks" in short.output
    assert "sliding" not in short.output
    network, cache = build("gemma3"), quality.new_cache(dict(format="k4v4"))
    stepwise(network, cache, tokens(1024), [1024])
    line, note = model.cache_lines(network, cache, dict(format="k4v4"), 1024)
    elements = 2 * 2 * 1024 * 2 * 256  # layers, sides, tokens, heads, channels
    assert f"{8 * cache.nbytes / elements:.2f} bits per element of all 1,024 tokens, " in line
    assert note.startswith("1 of 2 layers have a sliding window and keep its tokens in 16 bit")


def test_measured_bits_are_those_of_the_whole_cache(folder):
    """Sliding layers in 16 bit, sinks and open blocks are counted: more than a page's own bits."""
    network, cache = build("gemma3"), quality.new_cache(dict(format="k4v4", sinks=32))
    stepwise(network, cache, tokens(400), [400])
    full, sliding = (layer.nbytes for layer in reversed(cache.layers))
    assert sliding == 2 * 2 * 2 * 256 * (WINDOW - 1), "one layer's window but one token, in 16 bit"
    want = 8 * (full + sliding) / (2 * 2 * 400 * 2 * 256)
    assert quality.measured_bits(network, cache.nbytes, 400) == pytest.approx(want)
    assert quality.sixteen_bit_bytes(network, 400) == 2 * (2 * 2 * 2 * 256 * 400)


def test_info_draws_a_models_tokens_by_layer_and_head(folder, tmp_path, monkeypatch):
    """Every token behind the sinks and before the window is high, low, staged or pruned in each head."""
    pytest.importorskip("matplotlib")
    text, plots, drawn, draw = tmp_path / "text.txt", (tmp_path / "a.png", tmp_path / "b.png"), [], level_plot.draw
    text.write_text(TEXT * 3)

    def seen(path, counts, about):
        drawn.append((counts, about))
        draw(path, counts, about)

    monkeypatch.setattr(level_plot, "draw", seen)
    for plot, more in zip(plots, ((), ("--thresholds", "0.2,0.6"))):
        result = run("info", "lean", "--plot", plot, "--model", folder, "--text", text, "--tokens", 700, *more)
        assert result.exit_code == 0 and str(plot) in result.output.replace("\n", ""), result.output
        assert plot.read_bytes().startswith(b"\x89PNG")
    for counts, about in drawn:
        assert list(counts) == [0, 1] and "700 tokens" in about
        for one in counts.values():
            assert (torch.stack(one).sum(0) == (700 - 32 - 56) // 128 * 128).all()
    shares, cumulative = (counts[0] for counts, _ in drawn)
    assert not shares.pruned.any() and cumulative.pruned.any() and shares.low.any()


def test_quality_prints_and_writes_what_compare_gives(folder, tmp_path):
    pytest.importorskip("matplotlib")
    text, lines, plot = tmp_path / "text.txt", tmp_path / "lines.jsonl", tmp_path / "plot.png"
    text.write_text(TEXT)
    result = run("quality", "--model", folder, "--text", text, "--format", "k4v4", "--format", "k2v2", "--sinks", 4,
                 "--no-search", "--tokens", 200, "--jsonl", lines, "--plot", plot)
    assert result.exit_code == 0, result.output
    read = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [line["cache"] for line in read] == ["16 bit", "k4v4, 4 sinks, no search", "k2v2, 4 sinks, no search"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer(TEXT, return_tensors="pt").input_ids[:, :200]
    want = quality.evaluate(network, ids, dict(format="k2v2", sinks=4, range_search=False))
    assert read[2]["perplexity"] == pytest.approx(want.perplexity) and read[2]["kl"] == pytest.approx(want.kl)
    assert read[2]["options"] == dict(format="k2v2", sinks=4, range_search=False)
    shown = next(line for line in result.output.splitlines() if line.startswith("k2v2"))
    bits = quality.measured_bits(network, want.cache_bytes, 200)
    assert shown.split("no search")[1].split()[:2] == [f"{want.bits_per_element:.2f}", f"{bits:.2f}"]
    assert f"{want.perplexity:.3f}" in shown and f"{want.top1:.1%}" in shown and f"{want.cache_bytes:,}" in shown


def no_model(name):
    raise AssertionError("the model was loaded before the arguments were checked")


def test_a_folder_without_a_tokenizer(tmp_path):
    build("llama").save_pretrained(tmp_path)
    result = run("generate", "a", "--model", tmp_path)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert f"model: transformers cannot load '{tmp_path}'" in result.output and "a tokenizer" in result.output


@pytest.mark.parametrize("args, words", [
    (("generate", "a", "--model", "/nowhere"), "model: got '/nowhere', supported: 'demo', or a folder"),
    (("generate", "a", "--format", "k4v5"), "did you mean k4v4"),
    (("generate", "a", "--sinks", "-1"), "sinks: got -1"),
    (("quality", "--text", "/nowhere.txt"), "text: got '/nowhere.txt', supported: a text file"),
    (("quality", "--jsonl", "/nowhere/lines.jsonl"), "jsonl: got '/nowhere/lines.jsonl', supported: a file in"),
    (("info", "k4v4", "--plot", "a.png"), "plot: got a file beside format k4v4, supported: levels"),
    (("info", "lean", "--plot", "/nowhere/plot.png"), "plot: got '/nowhere/plot.png', supported: a file in a folder"),
    (("info", "lean", "--plot", "a.png", "--text", "/nowhere"), "text: got '/nowhere', supported: a text file"),
    (("info", "lean", "--plot", "a.png", "--thresholds", "0.5"), "thresholds: got '0.5'"),
    (("info", "lean", "--plot", "a.png", "--thresholds", "0.5,0.2"), "supported: T_l,T_h, two numbers from 0 to 1"),
    (("quality", "--plot", "/nowhere/plot.png"), "plot: got '/nowhere/plot.png', supported: a file in a folder"),
    (("quality", "--jsonl", "/"), "jsonl: got '/', supported: the name of a file"),
])
def test_refusals(args, words, monkeypatch):
    if args[0] == "quality":
        monkeypatch.setattr(model, "load", no_model)
    result = run(*args)
    assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output
