"""300 random wrong command lines: each ends with a documented error, and before anything is written.

A line has one wrong part, drawn with a seed from what each command's options say that they take, among other options
with right values. The last resort for unforeseen errors (cli/errors.py) is switched off, so that it hides nothing.
"""

import inspect
import json
import os
import random
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
from typer.models import OptionInfo
from typer.testing import CliRunner

pytest.importorskip("transformers")

from tiny_models import save_with_letters  # noqa: E402

from lowbit_attn import extras  # noqa: E402
from lowbit_attn.cli import app, errors  # noqa: E402
from lowbit_attn.formats import FORMATS  # noqa: E402
from lowbit_attn.testing import normal_codebooks  # noqa: E402

SEED, LINES, PARTS = 52, 300, 6
TEXT = "the quick brown fox jumps over the lazy dog and then it sleeps " * 20
COMMANDS = {command.name or command.callback.__name__: command.callback for command in app.registered_commands}
NO_NUMBERS = ("x", "", "1.5", "1e3", "nan", "0x10", "--", "1,000", "٣x")
BEYOND = ("99999999999999999999", "-99999999999999999999")
WORDS = ("x", "", "4", "Text", "cpu ", "gpu0", "none", "\u00fc", "float", "a,b", "$HOME", "k4v4", "../..")
FOREIGN = ("int4", "q4_0", "fp8", "Q8_0", "nf4", "K4V4", "k4v5", "k3v3", "kitty-b7", "cq3", "k4v4-g31", "", " ", "k",
           "16x", "lean-", "lean+lean", "k4tv4+k2v2", "k8v4+k4v2-high0", "k8v4+k8v4+k4v2", "x" * 300, "\u00e9", "4bit",
           "k4v4 k2v2")
UNCHECKED = {  # options whose values the command shows as not served, or looks at only with a GPU or with lm-eval
    ("info", "path"), ("bench", "path"), ("bench", "head_dim"), ("eval", "task"), ("eval", "limit"), ("eval", "chunk")}


class Files:
    """Right and wrong files for the lines, in one folder."""

    def __init__(self, root: Path):
        self.root, self.model = root, save_with_letters(root / "model")
        self.text, self.short, self.folder = root / "text.txt", root / "short.txt", root / "folder"
        self.text.write_text(TEXT)
        self.short.write_text("the dog")
        self.folder.mkdir()
        (self.folder / "mine.txt").write_text("x")
        self.books = root / "books.safetensors"
        normal_codebooks("cq2", 2, 2, 64).save(self.books)
        (damaged := root / "damaged.safetensors").write_bytes(self.books.read_bytes()[:-1000])
        other = root / "other.safetensors"
        normal_codebooks("cq4", 2, 2, 64).save(other)
        self.wrong_books = [root / "none", self.folder, self.text, damaged, other]
        self.wrong_books_of_no_format = self.wrong_books[:-1]
        self.wrong_models = [root / "none", self.text, self.folder, *self._damaged_models()]
        self.wrong_folders_of_a_model = [root / "none", self.text, self.folder, root / "broken-config",
                                         root / "list-config"]
        (latin := root / "latin.txt").write_bytes(("caf\u00e9 " * 2000).encode("latin-1"))
        (utf16 := root / "utf16.txt").write_text(TEXT, encoding="utf-16")
        (binary := root / "binary.txt").write_bytes(random.Random(SEED).randbytes(9000))
        self.wrong_texts = [root / "none.txt", self.folder, Path("/dev/null"), root / ("t" * 300), latin, utf16, binary]
        self.wrong_texts_to_learn = [*self.wrong_texts, self.short]
        self.wrong_outputs = [self.folder, root / "none" / "x", self.text / "x", Path("/proc/x"), Path("/dev/full"),
                              root / ("o" * 300), Path("/")]
        self.wrong_plots = [*self.wrong_outputs, root / "p.xyz", root / "p", root / ".png", root / "p.png.txt"]
        self.wrong_folders = [self.text, self.text / "x", Path("/proc/x"), self.folder, root / ("f" * 300)]

    def _damaged_models(self) -> list[Path]:
        """Copies of the model of which a file is missing, cut or of another kind."""
        made = []
        for name, spoil in {
            "no-tokenizer": lambda folder: [file.unlink() for file in folder.glob("tokenizer*")],
            "cut-weights": lambda folder: os.truncate(folder / "model.safetensors", 5000),
            "no-weights": lambda folder: (folder / "model.safetensors").unlink(),
            "broken-config": lambda folder: (folder / "config.json").write_text("{"),
            "list-config": lambda folder: (folder / "config.json").write_text("[1]"),
            "unknown-type": lambda folder: (folder / "config.json").write_text('{"model_type": "no such model"}'),
            "other-shape": lambda folder: self._edit(folder / "config.json", hidden_size=128),
            "broken-tokenizer": lambda folder: (folder / "tokenizer.json").write_text('{"model": 5}'),
        }.items():
            spoil(shutil.copytree(self.model, made_folder := self.root / name))
            made.append(made_folder)
        return made

    @staticmethod
    def _edit(path: Path, **changes) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def listing(self) -> dict[str, int]:
        return {str(path): path.stat().st_size for path in sorted(self.root.rglob("*"))}


def integers(least: int, most: int | None = None):
    """Wrong values of a whole number from ``least`` to ``most``."""
    def draw(rng: random.Random, files: Files) -> str:
        out = [str(least - 1), str(least - rng.randrange(1, 10**6)), *NO_NUMBERS, BEYOND[1]]
        return rng.choice(out + ([] if most is None else [str(most + 1), BEYOND[0]]))

    return draw


def words(*right: str):
    def draw(rng: random.Random, files: Files) -> str:
        return rng.choice([one for one in WORDS if one not in right])

    return draw


def of(name: str):
    """Wrong files of a kind."""
    def draw(rng: random.Random, files: Files) -> str:
        return str(rng.choice(getattr(files, name)))

    return draw


def formats(*more: str):
    def draw(rng: random.Random, files: Files) -> str:
        return rng.choice(FOREIGN + more)

    return draw


MODEL, TEXTS, BOOKS, SINKS = of("wrong_models"), of("wrong_texts"), of("wrong_books"), integers(0, 1 << 16)
COUNT, SMALL = integers(1), integers(1, 1 << 20)
WRONG = {  # command -> option -> how a wrong value of it is drawn
    "doctor": {"codebooks": of("wrong_books_of_no_format")},
    "suggest": {"model": of("wrong_folders_of_a_model"), "layers": SMALL, "kv_heads": SMALL, "head_dim": SMALL,
                "heads": SMALL, "ctx": words(), "batch": SMALL, "gpu": words(), "sinks": integers(0, 1 << 30),
                "weights_gb": lambda rng, _: rng.choice(["nan", "-1", "inf", "-inf", "x", "", "1GB"]),
                "format": formats("k4v4-g31"), "codebooks": of("wrong_books_of_no_format")},
    "info": {"format": formats("aqlm_2x8"), "heads": integers(1), "kv_heads": integers(1), "head_dim": integers(1),
             "batch": COUNT, "q_len": integers(1, 16), "seqlen": COUNT, "dtype": words("float16", "bfloat16"),
             "arch": words("hopper", "ampere"), "feature": words("softcap", "window"), "codebooks": BOOKS,
             "plot": of("wrong_plots"), "model": MODEL, "text": TEXTS, "tokens": integers(2),
             "thresholds": lambda rng, _: rng.choice(["1", "a,b", "nan,nan", "0.5,0.2", "-1,2", "", "0,0.5,1", "0;1"])},
    "generate": {"prompt": lambda rng, _: rng.choice(["", "\udcff", "a\udce9b"]), "model": MODEL,
                 "format": formats("aqlm_2x8"), "sinks": SINKS, "codebooks": BOOKS, "tokens": COUNT},
    "quality": {"model": MODEL, "text": TEXTS, "format": formats(), "sinks": SINKS, "codebooks": BOOKS,
                "tokens": integers(2), "task": words("text", "recall"), "questions": COUNT,
                "jsonl": of("wrong_outputs"), "plot": of("wrong_plots")},
    "calibrate": {"model": MODEL, "format": formats("k4v4", "k2v2", "lean", "16"), "text": of("wrong_texts_to_learn"),
                  "tokens": integers(1024), "rope": words("pre", "post"), "seed": integers(0, 2**32 - 1),
                  "out": of("wrong_outputs")},
    "quantize": {"out": of("wrong_folders"), "model": MODEL, "format": formats("k4v4", "aqlm_1x16", "lean", "cq2"),
                 "text": of("wrong_texts_to_learn"), "tokens": integers(2048), "seed": integers(0, 2**32 - 1),
                 "device": words("cpu", "cuda")},
    "bench": {"format": formats("aqlm_2x8"), "heads": integers(1), "kv_heads": integers(1), "batch": COUNT,
              "q_len": integers(1, 16), "seqlen": integers(256), "plot": of("wrong_plots")},
    "eval": {"model": MODEL, "format": formats(), "sinks": SINKS, "codebooks": BOOKS, "jsonl": of("wrong_outputs")},
}


def right(command: str, wrong: str, files: Files) -> dict[str, str]:
    """Right options of a command that the wrong one stands beside, as it needs them."""
    shape = {"layers": "2", "kv_heads": "2", "head_dim": "64", "ctx": "4096"}
    folder = {"model": str(files.model)}
    learned = {"format": "cq2", "codebooks": str(files.books)}
    if command == "suggest":
        return (folder if wrong in ("model", "codebooks") else shape) | {"batch": "2"}
    if command == "info" and wrong in ("plot", "model", "text", "tokens", "thresholds"):
        return {"format": "lean", "plot": str(files.root / "p.png"), "text": str(files.text), "tokens": "150"} | folder
    if command == "info":
        return (learned if wrong == "codebooks" else {"format": "k4v4"}) | {
            "kv_heads": "2", "heads": "4", "head_dim": "64"}
    if command in ("generate", "quality", "eval"):
        more = {"generate": {"prompt": "the dog", "tokens": "2"}, "eval": {},
                "quality": {"text": str(files.text), "tokens": "150"}}[command]
        return folder | more | (learned if wrong == "codebooks" else {"format": "k4v4"})
    return {"calibrate": folder | {"format": "cq2", "out": str(files.root / "new.safetensors"), "tokens": "1024"},
            "quantize": folder | {"format": "e8p2", "out": str(files.root / "new"), "tokens": "2048"},
            "bench": {"format": "k2v2", "seqlen": "512"}, "doctor": {}}[command]


def line_of(command: str, options: dict[str, str], rng: random.Random) -> list[str]:
    """The words of a command line: options in any order, arguments where the command has them."""
    parameters = inspect.signature(COMMANDS[command]).parameters
    parts = [[f"--{name.replace('_', '-')}={value}"] if is_option(parameters[name]) else [value]
             for name, value in options.items()]
    rng.shuffle(parts)
    return [command, *(word for part in parts for word in part)]


def is_option(parameter: inspect.Parameter) -> bool:
    return any(isinstance(one, OptionInfo) for one in get_args(parameter.annotation))


def damaged_line(command: str, files: Files, rng: random.Random) -> tuple[list[str], str]:
    """(a line whose shape is wrong, a word of the error)."""
    words = line_of(command, right(command, "", files), rng)
    first = next(iter(right(command, "", files)), "")
    option = "--codebooks" if command in ("doctor", "info", "quality") else "--format"
    return rng.choice([
        (words + [f"--{rng.choice(['nonsense', 'tokenz', 'modell', 'Format'])}=1"], "no such option"),
        (words + ["extra", "words"], "unexpected extra argument"),
        ([rng.choice(["nonsense", "Quality", "--verbose", "infoo"]), *words], "no such"),
        ([command, option], "requires an argument"),
    ] + ([([command], "missing")] if command in ("generate", "info", "quantize") else []) + (
        [(words + ["--json=maybe"], "json")] if first == "layers" else []))


def wrong_line(rng: random.Random, files: Files) -> tuple[list[str], str]:
    """(a wrong command line, what the error names)."""
    command = rng.choice(list(WRONG))
    if rng.random() < 0.1 and command != "doctor":
        return damaged_line(command, files, rng)
    name = rng.choice(list(WRONG[command]))
    value = WRONG[command][name](rng, files)
    return line_of(command, right(command, name, files) | {name: value}, rng), name


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return Files(tmp_path_factory.mktemp("files"))


def told(answer) -> str:
    """What a command printed, on one line and without a box."""
    return " ".join(re.sub(r"[─│╭╮╰╯]", " ", answer.output).split())


@pytest.mark.parametrize("part", range(PARTS))
def test_wrong_lines_end_with_a_documented_error(files, part, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    before, seen = files.listing(), Counter()
    for number in range(part, LINES, PARTS):
        line, name = wrong_line(random.Random(SEED * 1000 + number), files)
        answer = CliRunner().invoke(app, line, env={"COLUMNS": "300", errors.VARIABLE: "1"})
        text, what = told(answer), f"line {number}: {line}"
        assert isinstance(answer.exception, SystemExit), f"{what}: {answer.exception!r}"
        assert answer.exit_code in (1, 2), f"{what}: exit {answer.exit_code}: {text}"
        assert "Traceback" not in text and len(text) < 1200, f"{what}: {text}"
        if extras.remedy("eval") not in text:
            assert re.search(rf"(error: |Error ).*{name.replace('_', '.')}", text, re.I), f"{what}: {text}"
        seen[line[0]] += 1
    assert files.listing() == before and not list(tmp_path.iterdir()), "a refused command wrote something"
    assert len(seen) >= 8


def test_every_option_is_tried():
    """All options that take a value are in WRONG, or among those that say why they are not."""
    for command, callback in COMMANDS.items():
        parameters = inspect.signature(callback).parameters
        flags = {name for name, one in parameters.items() if bool in get_args(get_args(one.annotation)[0])
                 or get_args(one.annotation)[0] is bool}
        untried = parameters.keys() - flags - WRONG[command].keys() - {
            name for where, name in UNCHECKED if where == command}
        assert not untried and WRONG[command].keys() <= parameters.keys(), f"{command}: {untried}"


def test_unforeseen_errors_end_in_one_line(monkeypatch):
    """Without the variable, an error that no check foresaw is told with its type, and with how to see more of it."""
    def broken():
        raise RuntimeError("a\nb")

    from lowbit_attn.cli import machine
    monkeypatch.setattr(machine.environment, "gather", broken)
    answer = CliRunner().invoke(app, ["doctor"], env={errors.VARIABLE: "0"})
    assert answer.exit_code == 1 and isinstance(answer.exception, SystemExit)
    line, = answer.output.strip().splitlines()
    assert line.startswith("error: RuntimeError: a b (") and f"{errors.VARIABLE}=1" in line
    answer = CliRunner().invoke(app, ["doctor"], env={errors.VARIABLE: "1"})
    assert isinstance(answer.exception, RuntimeError)


def test_names_of_other_projects_are_understood():
    for name, meant in (("int4", "k4v4"), ("q4_0", "k4v4"), ("fp8", "k4v4 or k8v8"), ("K4V4", "k4v4"), ("nf4", "k4v4"),
                        ("int2", "k2v2"), ("kity", "kitty or kitty-pro")):
        answer = CliRunner().invoke(app, ["generate", "a", "--format", name])
        assert answer.exit_code == 2 and f"did you mean {meant}?" in answer.output and len(answer.output) < 320
        assert all(preset in answer.output for preset in (*FORMATS, "lean"))
    assert len(CliRunner().invoke(app, ["info", "x" * 5000]).output) < 400
