"""What commands look at before their work: versions, output paths, plots, weights of a folder, remedies."""

import json
import re
from importlib import metadata
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from lowbit_attn import __version__, extras
from lowbit_attn.cli import app, common, weights

LLAMA = dict(model_type="llama", num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
             hidden_size=256, max_position_embeddings=8192)


def run(*args):
    return CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "200"})


def ended(capsys, check, *args) -> str:
    with pytest.raises(typer.Exit):
        check(*args)
    return capsys.readouterr().err


def test_version():
    answer = run("--version")
    assert answer.exit_code == 0 and answer.output == f"lowbit-attn {__version__}\n"
    assert "--version" in run("--help").output


# ---- output paths


@pytest.mark.parametrize("name", ("p.xyz", "p", ".png", "p.png.txt", "p.jpeg"))
def test_plots_have_a_suffix_that_is_drawn(tmp_path, capsys, name):
    assert "supported: names that end in .png, .svg, .pdf" in ended(capsys, common.check_plot, "plot", tmp_path / name)


def test_plots_need_matplotlib_before_the_work(tmp_path, capsys, monkeypatch):
    import sys

    common.check_plot("plot", tmp_path / "a.PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert extras.remedy("demo") in ended(capsys, common.check_plot, "plot", tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_folders_are_tried_and_not_left(tmp_path, capsys):
    common.check_folder("out", tmp_path / "a" / "b")
    common.check_folder("out", tmp_path)
    assert not list(tmp_path.iterdir())
    (file := tmp_path / "file").write_text("x")
    for path in (file, file / "x", Path("/proc/x"), tmp_path / ("n" * 300), tmp_path / "a\0b"):
        assert "out: got" in ended(capsys, common.check_folder, "out", path)
    assert list(tmp_path.iterdir()) == [file]


def test_what_cannot_be_written_after_all_is_one_line(capsys, tmp_path):
    def write():
        with common.writing("jsonl", Path("/dev/full")), open("/dev/full", "w") as file:
            file.write("x" * 100_000)

    assert ended(capsys, write) == "error: jsonl: '/dev/full' could not be written (No space left on device)\n"


@pytest.mark.parametrize("command, option", (
    (("quality",), "--jsonl"), (("quality",), "--plot"), (("info", "lean"), "--plot"), (("calibrate",), "--out"),
    (("quantize",), "--out"), (("bench",), "--plot")))
def test_outputs_are_checked_before_the_model_is_read(monkeypatch, tmp_path, command, option):
    from lowbit_attn.cli import model

    monkeypatch.setattr(model, "_load", lambda *args: pytest.fail("the model was read first"))
    (file := tmp_path / "file").write_text("x")
    for path in ("/proc/x.png", file / "x.png", tmp_path / ("n" * 260 + ".png")):
        answer = run(*command, option, path)
        assert answer.exit_code == 2 and f"error: {option[2:]}: got" in answer.output, answer.output


# ---- suggest


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def shards(folder: Path, *names: str, nbytes: int = 1_000_000) -> None:
    for name in names:
        (folder / name).write_bytes(bytes(nbytes))


def test_bytes_of_weights(tmp_path):
    assert weights.nbytes(tmp_path) is None
    shards(tmp_path, "a.gguf")
    assert weights.nbytes(tmp_path) == 1_000_000
    shards(tmp_path, "b.gguf")
    assert weights.nbytes(tmp_path) is None, "one model of two quantizations is one of them"
    shards(tmp_path, "pytorch_model-1.bin", "pytorch_model-2.bin", "training_args.bin")
    assert weights.nbytes(tmp_path) == 2_000_000
    shards(tmp_path, "consolidated.safetensors", nbytes=3_000_000)
    assert weights.nbytes(tmp_path) == 3_000_000
    shards(tmp_path, "model-1-of-2.safetensors", "model-2-of-2.safetensors")
    assert weights.nbytes(tmp_path) == 2_000_000, "the same weights once"
    (tmp_path / "model-1-of-2.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert weights.nbytes(tmp_path) is None
    (index := tmp_path / weights.INDEX).write_text(json.dumps({"metadata": {"total_size": 5_000_000}}))
    assert weights.nbytes(tmp_path) == 5_000_000
    for damaged in ("[]", "{", '{"metadata": {"total_size": "5"}}', '{"metadata": {"total_size": -1}}', "[" * 100_000):
        index.write_text(damaged)
        assert weights.nbytes(tmp_path) is None


def test_suggest_counts_the_folders_weights(folder):
    pytest.importorskip("transformers")
    words = ("suggest", "--model", folder, "--format", "k4v4", "--gpu", "rtx4090")
    without = run(*words)
    assert without.exit_code == 0 and "The weights are not known" in without.output
    (folder / weights.INDEX).write_text(json.dumps({"metadata": {"total_size": 23_990_000_000}}))
    beside = run(*words)
    assert "leave room for 23.99 GB of weights" in beside.output
    rows = [json.loads(run(*words, "--json", *more).output) for more in ((), ("--weights-gb", "0"))]
    assert [row["weights_gb"] for row in rows] == [pytest.approx(23.99), 0]
    (full, empty) = (row["rows"][1] for row in rows)
    assert full["max_batch"] < empty["max_batch"] and full["step_ratio"] < empty["step_ratio"]
    (folder / weights.INDEX).write_text(json.dumps({"metadata": {"total_size": 25_000_000_000}}))
    assert not any(row["fits"] for row in json.loads(run(*words, "--json").output)["rows"])


def test_suggest_warns_beyond_the_models_context(folder):
    pytest.importorskip("transformers")
    for ctx, is_beyond in (("8K", False), ("9000", True), ("1M", True)):
        answer = run("suggest", "--model", folder, "--ctx", ctx, "--format", "k4v4")
        assert answer.exit_code == 0
        assert ("warning: ctx: got" in answer.output) == ("the model's context is 8,192" in answer.output) == is_beyond


@pytest.mark.parametrize("option, value", (("--weights-gb", "nan"), ("--weights-gb", "inf"), ("--ctx", "9" * 5000)))
def test_numbers_of_no_size(option, value):
    shape = ("--layers", 2, "--kv-heads", 2, "--head-dim", 64, "--ctx", "4K")
    answer = run("suggest", *shape, option, value)
    assert answer.exit_code == 2 and f"error: {option[2:]}: got" in answer.output and len(answer.output) < 200


# ---- remedies


def test_remedy_in_a_clone(monkeypatch):
    root = Path(extras.__file__).resolve().parents[2]
    if (root / "pyproject.toml").exists():
        assert extras.remedy("demo") == f"pip install -e '.[demo]' in {root}"


@pytest.mark.parametrize("origin, remedy", (
    (None, "pip install 'lowbit-attn[demo]'"),
    ({"url": "file:///w/a.whl", "archive_info": {}}, "pip install 'lowbit-attn[demo] @ file:///w/a.whl'"),
    ({"url": "https://host/x", "vcs_info": {"vcs": "git"}}, "pip install 'lowbit-attn[demo] @ git+https://host/x'"),
    ({"url": "file:///gone", "dir_info": {}}, "pip install 'lowbit-attn[demo]'"),
    ({"url": "file://FOLDER", "dir_info": {}}, "pip install '.[demo]' in FOLDER"),
    ([], "pip install 'lowbit-attn[demo]'")))
def test_remedy_of_an_installation(monkeypatch, tmp_path, origin, remedy):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "lowbit-attn"\n')
    text = None if origin is None else json.dumps(origin).replace("FOLDER", str(tmp_path))
    monkeypatch.setattr(extras, "SOURCES", tmp_path / "none")
    monkeypatch.setattr(metadata.Distribution, "read_text", lambda self, name: text, raising=False)
    monkeypatch.setattr(metadata.PathDistribution, "read_text", lambda self, name: text)
    extras.remedy.cache_clear()
    assert extras.remedy("demo") == remedy.replace("FOLDER", str(tmp_path))
    extras.remedy.cache_clear()


def test_no_remedy_is_written_by_hand():
    """Every hint to install an extra comes from ``extras``, which knows where this package is from."""
    for path in Path(common.__file__).parents[1].rglob("*.py"):
        if path.name != "extras.py":
            assert not re.search(r"pip install '?lowbit-attn", path.read_text(encoding="utf-8")), path
