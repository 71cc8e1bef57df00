"""Bars of long runs, the plot of ``bench``, and the lines that tell of a kernel being built."""

import io
import logging
from concurrent.futures import Future

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from lowbit_attn import build, compile, kernels, progress
from lowbit_attn.cli import app, bench, common
from lowbit_attn.formats import FORMATS

LINE = {"format": "k4v4", "us": 45.6, "bytes": 10**8, "read_us": 41.0, "hinted_read_us": 40.3, "fp16_us": 137.0,
        "fp16_by": "sdpa flash", "void": False, "floor": "", "batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128,
        "seqlen": 131072, "q_len": 1}


def test_a_bar_tells_done_total_and_time_left():
    written = io.StringIO()
    now = [0.0]
    with progress.bar(Console(file=written, force_terminal=True, width=100, color_system=None), "kernels") as bar:
        bar.get_time = lambda: now[0]
        task = bar.add_task("[building]", total=10)
        for _ in range(5):
            now[0] += 60
            bar.advance(task)
        bar.refresh()
    shown = written.getvalue()
    assert "[building]" in shown and "5/10 kernels" in shown and "left: 0:05:00" in shown


def test_bench_plot(tmp_path):
    pytest.importorskip("matplotlib")
    low = LINE | {"format": "k2v2", "us": 29.4, "read_us": 24.9, "hinted_read_us": 24.3, "void": True}
    bench.save_plot(tmp_path / "plot.svg", [LINE, low], "NVIDIA H200, sm_90a kernels")
    bench.save_plot(tmp_path / "plot.png", [LINE, low], "NVIDIA H200, sm_90a kernels")
    text = (tmp_path / "plot.svg").read_text()
    for words in ("microseconds a call", "One decode call on NVIDIA H200, sm_90a kernels, lowbit_attn 0.",
                  "heads 32/8, head_dim 128, 131,072 tokens", "k4v4", "k2v2 (void)", "45.6", "40.3", "24.3", "137.0",
                  "fastest read of the same bytes", "16-bit attention"):
        assert words in text, words
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_bench_refuses_a_plot_that_it_could_not_write(monkeypatch):
    monkeypatch.setattr(bench, "unavailable", lambda: pytest.fail("asked before the argument was checked"))
    answer = CliRunner().invoke(app, ["bench", "--plot", "/nowhere/plot.png"])
    assert answer.exit_code == 2 and "plot: got '/nowhere/plot.png', supported: a file in a folder" in answer.output


@pytest.fixture
def logger():
    """The package's logger, as it was before a command spoke through it."""
    found = logging.getLogger("lowbit_attn")
    kept, level = list(found.handlers), found.level
    found.handlers.clear()
    yield found
    found.handlers[:], found.level = kept, level


def test_commands_tell_of_kernels_that_they_build(monkeypatch, tmp_path, capsys, logger):
    monkeypatch.setenv("LOWBIT_ATTN_CACHE_DIR", str(tmp_path))
    key = kernels.dequantize_key("sm_90a", 64, FORMATS["k4v4"], "v")
    monkeypatch.setattr("lowbit_attn.emit.require", lambda key: None)
    monkeypatch.setattr(compile, "_build", lambda key, path: compile.Built(path, {}))
    compile.build(key)
    assert "building" not in capsys.readouterr().err, "a library is silent"
    common.tell_builds()
    common.tell_builds()
    compile.build(key)
    assert capsys.readouterr().err == f"building {key}, which is done once\n"


def test_builds_show_how_many_are_done_and_the_time_left(monkeypatch):
    """Kernels of one source end together; a bar counts each of them."""
    groups = {Future(): list("abc"), Future(): list("d")}
    written = io.StringIO()
    monkeypatch.setattr(build, "Console", lambda stderr: Console(file=written, force_terminal=True, width=100,
                                                              color_system=None))
    ended = build._shown(iter(groups), groups)
    assert list(ended) == list(groups)
    shown = written.getvalue()
    assert "building" in shown and "4/4 kernels" in shown and "left:" in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_bench_help_names_the_plot():
    assert "--plot" in CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "160", "NO_COLOR": "1"}).output
