"""perf/engine.py without an engine: rows in processes that fail or take too long, sizes of batches."""

import json
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from perf_scripts import PERF, script
from typer.testing import CliRunner

from lowbit_attn.integrations.vllm import names


@pytest.fixture(scope="module")
def engine():
    with script("engine") as module:
        yield module


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_that_fails_or_takes_too_long_leaves_a_line(engine, tmp_path):
    output = tmp_path / "engine.jsonl"
    about = dict(part="steps", dtype="auto")
    fails = [sys.executable, "-c", "import sys; sys.stderr.write('x' * 5000 + 'why'); sys.exit(3)"]
    assert not engine._row(fails, 60, output, about)
    hangs = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert not engine._row(hangs, 0.5, output, about)
    assert engine._row([sys.executable, "-c", ""], 60, output, about)
    failed, stopped = lines(output)
    assert failed["error"] == "exit 3" and failed["told"].endswith("why") and len(failed["told"]) == 1500
    assert stopped["error"].startswith("stopped after") and stopped | about == stopped


def test_rows_go_on_after_one_that_fails_and_none_begins_too_late(engine, tmp_path, monkeypatch):
    asked, output = [], tmp_path / "engine.jsonl"

    def row(command, limit, output, about):
        asked.append((about["dtype"], command[command.index("--part") + 1], limit))
        return about["dtype"] != "fp8"

    monkeypatch.setattr(engine, "_row", row)
    flags = ["run", "--output", str(output), "--dtype", "fp8", "--dtype", "auto"]
    assert CliRunner().invoke(engine.app, flags).exit_code == 1
    assert [name for name, _, _ in asked] == ["fp8", "auto"] and {limit for _, _, limit in asked} == {240.0}
    asked.clear()
    assert CliRunner().invoke(engine.app, [*flags, "--seconds", "30", "--limit", "25"]).exit_code == 1
    assert len(asked) == 2 and not output.exists()
    asked.clear()
    assert CliRunner().invoke(engine.app, [*flags, "--seconds", "30"]).exit_code == 1
    assert len(asked) == 1 and lines(output)[0]["error"] == "not begun: no time was left"
    assert CliRunner().invoke(engine.app, ["run", "--output", str(output), "--dtype", "auto"]).exit_code == 0


def test_what_is_asked_of_a_row(engine, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(engine, "_row", lambda command, *_: asked.append(command[3:]) or True)
    flags = ["run", "--output", str(tmp_path / "x"), "--part", "steps", "--dtype", "auto"]
    CliRunner().invoke(engine.app, flags)
    CliRunner().invoke(engine.app, [*flags, "--ranks", "2", "--context", "8192", "--batch", "1", "--batch", "8",
                                    "--no-largest", "--fill", "prompt"])
    plain, chosen = asked
    assert not {"--context", "--batch", "--no-largest"} & set(plain) and plain[plain.index("--ranks") + 1] == "1"
    assert " ".join(chosen).endswith("--ranks 2 --cache-gib 0.0 --no-largest --context 8192 --batch 1 --batch 8")
    assert chosen[chosen.index("--fill") + 1] == "prompt"


def test_every_dtype_is_an_engines_or_ours(engine):
    for dtype in engine.DTYPES:
        if engine.is_ours(dtype):
            names.parse(dtype)
        else:
            assert dtype in engine.OWN_BYTES


def test_batches_that_fit_and_their_graphs(engine):
    rows = {dtype: engine.rows_at_most(dtype) for dtype in engine.DTYPES}
    assert 8 < rows["auto"] < rows["fp8"] < rows["lowbit_k4v4"] < rows["lowbit_k2v2"] <= engine.MOST_ROWS
    for most in rows.values():
        sizes = engine.captured(most)
        assert sizes == sorted(set(sizes)) and sizes[:2] == [1, 8] and sizes[-1] <= most < sizes[-1] + 16
        assert len(sizes) < 16
    about = dict(block_tokens=128, ring_blocks=5, page_groups=1)
    assert engine.blocks_of(about, 128) == 6 and engine.blocks_of(about, 129) == 7
    assert engine.blocks_of(about | dict(page_groups=3), 129) == 11


def test_models_without_weights(engine, tmp_path):
    folder = engine.model_folder(tmp_path, engine.TINY, "lowbit_kcq4vcq2")
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2
    assert [path.name for path in (folder / "lowbit_attn").iterdir()] == ["kcq4vcq2.safetensors"]
    assert not (engine.model_folder(tmp_path, engine.TINY, "auto") / "lowbit_attn").exists()


@pytest.mark.parametrize("name,gpu", (("steps", "H100"), ("steps", "H200"), ("largest", "H100"), ("quality", "H200"),
                                      ("prompts", "H200"), ("ranks", "H200"), ("overhead", "H200")))
def test_the_docs_have_the_newest_lines(name, gpu):
    text = (PERF.parent / "docs/serving.md").read_text()
    command = f"python perf/engine_table.py {name}" + f" --gpu {gpu}" * (gpu != "H100")
    pattern = rf"<!-- engine: begin \({command}\) -->\n(.*?)\n<!-- engine: end -->"
    shown = re.search(pattern, text, re.DOTALL)[1]
    with script("engine_table") as table:
        assert shown == getattr(table, name)(gpu), f"put the table of {command} there"


def test_ratios_are_to_16_bit_in_the_same_run(tmp_path, monkeypatch):
    like = dict(part="steps", gpu="NVIDIA H100", commit="x", fill="dummy", is_eager=False, context=8192, batch=1,
                is_largest=False)
    found = [like | dict(dtype="auto", ms_per_token=10.0), like | dict(dtype="a", ms_per_token=5.0),
             like | dict(dtype="auto", ms_per_token=8.0), like | dict(dtype="b", ms_per_token=4.0),
             like | dict(dtype="c", error="3 blocks are needed"), like | dict(dtype="e", ms_per_token=2.0, commit="y"),
             like | dict(dtype="d", ms_per_token=1.0, fill="prompt")]
    found.append(like | dict(dtype="f", ms_per_token=1.0, ranks=2))
    with script("engine_table") as table:
        monkeypatch.setattr(table, "RESULTS", tmp_path / "engine.jsonl")
        table.RESULTS.write_text("".join(json.dumps(line) + "\n" for line in found))
        rows = [row.split(" | ")[:2] for row in table.steps("H100").splitlines()[2:]]
    assert rows == [["| auto", "8.00"], ["| a", "5.00, 0.50"], ["| b", "4.00, 0.50"], ["| c", "-"], ["| e", "2.00"]]


def test_tables_of_prompts_ranks_quality_and_overhead(tmp_path, monkeypatch):
    like = dict(part="steps", gpu="NVIDIA H100", commit="x", fill="dummy", is_eager=False, context=8192, batch=1,
                is_largest=False, ranks=1)
    k4v4 = like | dict(dtype="lowbit_k4v4")
    found = [like | dict(dtype="auto", ms_per_token=7.0), k4v4 | dict(ms_per_token=5.0, commit="w"),
             k4v4 | dict(ms_per_token=5.9, ms_stepped=6.0, ms_prompts=6.6),
             k4v4 | dict(ms_per_token=4.0, ranks=2), k4v4 | dict(ms_per_token=1.0, ranks=2, context=16384),
             dict(part="quality", gpu="NVIDIA H100", dtype="auto", by="vllm", perplexity=12.0),
             dict(part="quality", gpu="NVIDIA H100", dtype="auto", by="lowbit_attn.quality", perplexity=12.12),
             dict(part="quality", gpu="NVIDIA H100", dtype="fp8", error="no memory"),
             dict(part="quality", gpu="NVIDIA H100", dtype="int4", by="vllm", perplexity=14.0)]
    steps = [dict(gpu="NVIDIA H100", commit="x", dtype="bfloat16", seqlen=8192, batch=1, format=name, step_ms=ms)
             for name, ms in (("16 bit", 6.5), ("k4v4", 5.25), ("k2v2", 5.0))] + [dict(gpu="NVIDIA H200", commit="x")]
    with script("engine_table") as table:
        for name, lines in (("RESULTS", found), ("E2E", steps)):
            monkeypatch.setattr(table, name, tmp_path / name)
            (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        shown = {name: getattr(table, name)("H100").splitlines()[2:] for name in ("prompts", "ranks", "quality",
                                                                                  "overhead")}
    assert shown["prompts"] == ["| lowbit_k4v4 | 8K, batch 1 | 6.60 | 6.00 | 1.10 |"]
    assert shown["ranks"] == ["| lowbit_k4v4 | 2 | 8K, batch 1 | 4.00 | 5.95 | 1.49x |",
                              "| lowbit_k4v4 | 2 | 16K, batch 1 | 1.00 | - | - |"]
    assert shown["quality"] == ["| auto | 12.000 | 12.120 | -0.99 % |", "| int4 | 14.000 | - | - |"]
    assert shown["overhead"] == ["| 8K, batch 1 | 6.50 -> 7.00, +0.50 | 5.25 -> 5.95, +0.70 | +0.20 ms, +3.8 % |"]


def test_processes_measure_one_at_a_time_and_none_while_one_starts(engine, tmp_path):
    """Two processes enter what they do into one file; what is between them is left to chance."""
    code = ("import sys, time; sys.path.insert(0, sys.argv[1]); import engine; from pathlib import Path\n"
            "turns = engine.Turns(Path(sys.argv[2])); log = open(sys.argv[3], 'a', buffering=1)\n"
            "log.write('start\\n'); time.sleep(float(sys.argv[4])); log.write('ready\\n'); turns.wait()\n"
            "log.write('measure\\n'); time.sleep(0.3); log.write('end\\n')")
    log = tmp_path / "log"
    running = [subprocess.Popen([sys.executable, "-c", code, str(PERF), str(tmp_path / "turn"), str(log), seconds])
               for seconds in ("1.5", "2.0")]
    assert [process.wait(60) for process in running] == [0, 0]
    found = log.read_text().split()
    assert found[:4] == ["start", "start", "ready", "ready"] and found[4:] == ["measure", "end"] * 2
    engine.Turns(None).wait()


def test_a_row_that_is_stopped_from_outside_leaves_a_line(tmp_path):
    """What its process printed is in it, and the process is gone."""
    output, script_of_a_row = tmp_path / "engine.jsonl", tmp_path / "row.py"
    script_of_a_row.write_text("import sys, time; print('hangs here', file=sys.stderr, flush=True); time.sleep(600)")
    code = ("import sys; sys.path.insert(0, sys.argv[1]); import engine; engine.__file__ = sys.argv[2]\n"
            "sys.argv = ['engine', 'run', '--part', 'steps', '--dtype', 'auto', '--output', sys.argv[3]]; engine.app()")
    process = subprocess.Popen([sys.executable, "-c", code, str(PERF), str(script_of_a_row), str(output)])
    child = until(lambda: child_with(process.pid, str(script_of_a_row)))
    time.sleep(2.0)  # for it to print
    process.terminate()
    assert process.wait(60) == 143
    line, = lines(output)
    assert line["error"] == "stopped from outside" and "hangs here" in line["told"] and line["part"] == "steps"
    assert not Path(f"/proc/{child}").exists()


def child_with(pid: int, word: str) -> int | None:
    """A child of a process whose command line has a word."""
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        with suppress(FileNotFoundError):
            if word in Path(f"/proc/{child}/cmdline").read_text():
                return child
    return None


def until(condition, seconds: float = 60.0):
    """What the condition gives once it is true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return found
