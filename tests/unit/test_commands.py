"""Every command that README.md, docs/ and their like show: it is run here, or checked against what it names."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from lowbit_attn import extras, toolchain
from lowbit_attn.cli import app

ROOT = Path(__file__).parents[2]
FILES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
         *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("lowbit-attn", "make", "pip", "python", "torchrun")
VARIABLE = re.compile(r"[A-Z_]+=\S*$")
OWN = "serve.py"  # a program of the user's


def commands_of(text: str) -> list[str]:
    """Commands in indented lines and shell blocks, up to a comment, and those in backticks that have arguments."""
    blocks = "\n".join(re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", text, re.S | re.M))
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    lines = [*re.findall(r"^    (\S.*)$", text, re.M), *blocks.splitlines(),
             *(" ".join(one.split()) for one in re.findall(r"`([^`]+)`", text) if len(one.split()) > 1)]
    found = [part.strip() for line in lines for part in line.partition(" #")[0].split("&&")]
    return [command for command in found if program_of(command) in PROGRAMS]


def program_of(command: str) -> str:
    """The first word that sets no variable."""
    return next((word for word in command.split() if not VARIABLE.match(word)), "")


SHOWN = {file.relative_to(ROOT).as_posix(): commands_of(file.read_text()) for file in FILES}
COMMANDS = list(dict.fromkeys(command for commands in SHOWN.values() for command in commands))


def words_of(command: str, program: str) -> list[str]:
    words = shlex.split(command)
    return words[words.index(program) + 1 :]


def by_program(name: str) -> list[str]:
    return [command for command in COMMANDS if program_of(command) == name]


def test_commands_are_found():
    assert commands_of("    make demo  # a\ntext `make x`, `make`, `lowbit-attn\nbench` `cache.free([0])`\n\n"
                       "    A=1 make y && pip install z\n```sh\npython a.py\n```\n```python\n    make no\n```\n") == [
        "make demo", "A=1 make y", "pip install z", "python a.py", "make x", "lowbit-attn bench"]
    assert len(SHOWN["README.md"]) >= 6 and len(SHOWN["docs/serving.md"]) >= 6 and len(COMMANDS) > 25
    assert all(len(by_program(name)) > 2 for name in PROGRAMS[:4])


@pytest.fixture
def names(tmp_path, monkeypatch, tiny_folder) -> dict[str, str]:
    """What stands in the commands for a user's own: a model's folder and a text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 8)
    return {"FOLDER": str(tiny_folder), "MODEL": str(tiny_folder), "FILE": "text.txt", "FORMAT": "k4v4"}


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory) -> Path:
    """A random Llama with a tokenizer of single characters."""
    pytest.importorskip("transformers")
    from tiny_models import save_with_letters

    return save_with_letters(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def codebooks(tmp_path_factory, tiny_folder) -> Path:
    """A file that ``calibrate`` made for the model."""
    path = tmp_path_factory.mktemp("codebooks") / "model.safetensors"
    words = ["calibrate", "--model", str(tiny_folder), "--format", "cq2", "--tokens", "1024", "--out", str(path)]
    answer = CliRunner().invoke(app, words, env={"COLUMNS": "160"})
    assert answer.exit_code == 0, answer.output
    return path


# in prose, without their arguments
NAMES = [f"lowbit-attn {name}" for name in ("info", "generate", "suggest", "calibrate")]


@pytest.mark.parametrize("command", [one for one in by_program("lowbit-attn") if one not in NAMES])
def test_lowbit_attn(command, names, request):
    """Each runs to its end, without a FutureWarning; ``bench`` says that it needs a GPU where there is none."""
    if "MODEL.cq2.safetensors" in command:
        names["MODEL.cq2.safetensors"] = str(request.getfixturevalue("codebooks"))
    words = [names.get(word, word) for word in words_of(command, "lowbit-attn")]
    words += {"calibrate": ["--tokens", "1024"], "quantize": ["--tokens", "2048"]}.get(words[0], [])
    if words[0] == "generate" and "--model" not in words:
        words += ["--model", names["FOLDER"], "--tokens", "4"]  # in place of the demo's, which is fetched
    if words[0] == "quality":
        words += [] if "--model" in words else ["--model", names["FOLDER"]]
        words += ["--tokens", "150"] + ([] if "--text" in words else ["--text", names["FILE"]])
        if "recall" in words:  # whose contexts are cut from longer prose
            Path(names["FILE"]).write_text(3 * Path(names["FILE"]).read_text())
            words += ["--questions", "1"]
    if words[0] == "eval":
        words += ["--limit", "1"] + ([] if "--model" in words else ["--model", names["FOLDER"]])
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        answer = CliRunner().invoke(app, words, env={"COLUMNS": "160"})
    if words[0] == "eval" and find_spec("lm_eval") is None:
        assert answer.exit_code == 2 and extras.remedy("eval") in answer.output
    elif words[0] == "bench" and not torch.cuda.is_available():
        assert answer.exit_code == 1 and "bench: needs a CUDA device" in answer.output
    else:
        assert answer.exit_code == 0, f"{words}: {answer.output}"
    for option, value in zip(words, words[1:]):
        assert option != "--plot" or words[0] == "bench" or Path(value).stat().st_size > 1000


@pytest.mark.parametrize("command", by_program("make"))
def test_make(command):
    """The targets are there, and all that they would run is known to make."""
    answer = subprocess.run(["make", "-n", *(word for word in words_of(command, "make"))], cwd=ROOT,
                            capture_output=True, text=True)
    assert answer.returncode == 0 and answer.stdout.strip(), answer.stderr


RUN = {  # by program: what is added so that nothing of the repository is written, and words that it prints
    "perf/targets_table.py": ([], "| GQA 32/8, batch 1, 128K |"),
    "perf/roofline.py": ([], "predicted: max(plain read, issue)"),
    "perf/plots.py": (["--folder", "FOLDER"], "decode-targets.png"),
    "perf/overview.py": (["--output", "FOLDER/overview.png"], "overview.png"),
}
ELSEWHERE = {  # what is not run here, and why
    "lowbit_attn.support": "test_readme.py compares what it prints with docs/support.md",
    **dict.fromkeys(("examples/hf_long_document.py", "examples/quality_check.py", "examples/cuda_graph_decode.py",
                     "examples/paged_serving.py"), "test_examples.py runs it"),
    "perf/peers.py": "needs a GPU and other libraries; test_perf_peers.py runs its parts",
    **dict.fromkeys(("perf/quality.py", "perf/text_quality.py", "perf/text_recall.py", "perf/tasks.py",
                     "perf/leankv.py", "perf/leankv_figures.py", "perf/weights.py"),
                    "minutes to hours of a downloaded model; test_perf_*.py and test_readme.py run its parts"),
    "perf/frames.py": "takes minutes; test_level_steps.py takes fewer of its steps",
    "perf/papers.py": "test_perf_papers.py compares what it prints with docs/papers.md",
    "perf/fleet.py": "half a minute; test_perf_fleet.py runs its parts",
    "perf/downloads.py": "downloads hundreds of MB",
    "perf/sass_counts.py": "needs built kernels; tests/host/test_sass_counts.py runs its parts",
    "perf/host_time.py": "times this machine, into perf/results",
    "perf/outliers.py": "needs captured tensors of a model",
}
GPU = ("bench", "pack", "append", "e2e", "gpu_model", "stalls", "context_parallel", "tensor_parallel", "million",
       "linear", "levels", "level_manage", "vq_steps", "prerope")


def option_is_known(source: str, option: str) -> bool:
    return bool(re.search(rf"--{option}\b|\b{option.replace('-', '_')}: ", source))


@pytest.mark.parametrize("command", [one for one in (*by_program("python"), *by_program("torchrun")) if OWN not in one])
def test_python(command, tmp_path):
    """The program is there and its source names each option that it gets; it runs, or is listed with a reason."""
    program = program_of(command)
    first, *rest = words_of(command, program)
    if program == "torchrun":  # --nproc-per-node N PROGRAM
        _, _, first, *rest = first, *rest
    name = rest[0] if first == "-m" else first
    if first == "-m":
        file, rest = Path(find_spec(name).origin), rest[1:]
        file = file.with_name("__main__.py") if file.name == "__init__.py" else file
    else:
        file = ROOT / name
    source = file.read_text()
    for option in (word.removeprefix("--") for word in rest if word.startswith("--")):
        assert option_is_known(source, option), f"{name} has no --{option}"
    if name in RUN:
        more, words = RUN[name]
        ended = subprocess.run([sys.executable, file, *rest, *(w.replace("FOLDER", str(tmp_path)) for w in more)],
                               cwd=ROOT, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"})
        assert ended.returncode == 0 and words in " ".join(ended.stdout.split()), ended.stdout + ended.stderr
        assert not more or list(tmp_path.iterdir())
    else:
        assert name in ELSEWHERE or Path(name).stem in GPU, f"{name} is neither run nor listed with a reason"


@pytest.mark.skipif(torch.cuda.is_available(), reason="they would run for minutes")
@pytest.mark.parametrize("name", GPU)
def test_measurements_need_a_gpu(name, monkeypatch):
    """Without one a measurement ends with one sentence and writes nothing."""
    monkeypatch.syspath_prepend(str(ROOT / "perf"))
    monkeypatch.delenv("LOWBIT_ATTN_ARCH", raising=False)
    app = typer.Typer()
    app.command()(import_module(name).main)
    words = {"gpu_model": ["GGUF"], "stalls": ["ablation:0"]}.get(name, [])
    answer = CliRunner().invoke(app, words, env={"COLUMNS": "160"})
    assert answer.exit_code == 2 and "this measurement needs a CUDA device" in answer.output, answer.output
    with pytest.raises(typer.BadParameter, match="needs the program no-such, which is not on PATH"):
        import_module("provenance").need(gpu=False, program="no-such")


def test_make_looks_for_modules_and_not_for_folders():
    """A folder of the repository, as build/ is after `make demo`, does not pass for an installed package."""
    shown = subprocess.run(["make", "-n", "lint"], cwd=ROOT, capture_output=True, text=True, check=True,
                           env=os.environ | {"VIRTUAL_ENV": sys.prefix}).stdout
    check = shown.split(" 2> /dev/null")[0].replace("\\\n", " ")
    assert " torch lowbit_attn ruff" in check and (ROOT / "docs").is_dir()
    for name, is_there in (("pytest", True), ("docs", False)):
        ended = subprocess.run(["sh", "-c", check.replace(" ruff", f" {name}")], cwd=ROOT)
        assert (ended.returncode == 0) == is_there, name


@pytest.mark.parametrize("command", by_program("pip"))
def test_pip(command):
    """What is installed is this package, with extras that it has, or a package that its own remedies name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    words = words_of(command, "pip")
    assert words[0] == "install" and len(words) > 1
    for word in (word for word in words[1:] if not word.startswith("-")):
        extras = re.match(r"(?:\.|lowbit-attn|\S*\.whl)(?:\[([\w,]+)\])?$", word)
        if extras:
            unknown = set((extras[1] or "cli").split(",")) - set(project["optional-dependencies"])
            assert not unknown, f"{command}: no extra {unknown}"
        else:
            assert word in toolchain.NVCC_REMEDY or word in ("pre-commit", "build"), word


def test_make_says_how_much_it_downloads():
    """The sizes that README names are those that make prints, which were measured."""
    made = (ROOT / "Makefile").read_text()
    told = " ".join((ROOT / "README.md").read_text().split())
    demo, tests, compilers = (int(re.search(rf"{what} \(about (\d+) MB\)", made)[1]) for what in (
        "transformers and friends", "pytest and transformers", r"both tile DSLs and nvcc"))
    assert f"about {demo} MB of Python packages" in told
    assert f"downloads about {tests + compilers} MB" in told and f"{compilers} MB" in told
